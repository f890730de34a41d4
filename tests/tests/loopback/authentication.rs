//! Authentication end to end: our host and our target over real sockets.

use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;

use initiator::{Error, Host, HostOptions, Options};
use nvme::auth::{Failure, GroupId, HashId, Secret};
use nvmfd::core::diag::cause::Cause;

use super::EndReason;
use super::target::{HOST, TestTarget};

const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OURS: &str =
    "DHHC-1:03:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";

fn key(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    write(&path, text).unwrap();
    set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path.display().to_string()
}

/// The configuration of a host with both secrets, whose files lie in `directory`.
fn rules(directory: &Path, more: &str) -> String {
    let (theirs, ours) = (key(directory, "theirs", SECRET), key(directory, "ours", OURS));
    format!(
        "[authentication]\n{more}\n[[host]]\nnqn = \"{HOST}\"\ndhchap_key_file = \"{theirs}\"\n\
         dhchap_ctrl_key_file = \"{ours}\"\n"
    )
}

fn options(target: &TestTarget, secret: Option<&str>, ours: Option<&str>) -> Options {
    let parse = |text: &str| Secret::parse(text).expect("a secret");
    let (secret, controller_secret) = (secret.map(parse), ours.map(parse));
    Options { secret, controller_secret, ..target.options(1) }
}

fn ended(target: &TestTarget, secret: Option<&str>, ours: Option<&str>) -> EndReason {
    match Host::connect(options(target, secret, ours), target.setup()) {
        Err(Error::Ended(ended)) => ended,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("connected"),
    }
}

#[test]
fn authentication_works_in_every_dh_group_and_is_enforced() {
    let directory = tempfile::tempdir().unwrap();
    let mut target = TestTarget::start_with(&rules(directory.path(), ""));
    for group in ["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"] {
        target.apply(&rules(directory.path(), &format!("groups = [\"{group}\"]")));
        let options = options(&target, Some(SECRET), Some(OURS));
        let mut host = Host::connect(options, target.setup()).expect("connected");
        let mut block = vec![0; 4096];
        host.read(super::FILE, &mut block).expect("read");
        host.disconnect();
    }
    target.apply(&rules(directory.path(), "groups = [\"ffdhe2048\"]"));
    assert!(matches!(ended(&target, None, None), EndReason::Authentication));
    let refused = ended(&target, Some(OURS), None);
    assert!(matches!(refused, EndReason::NotAuthenticated { queue: 0, why: Failure::FAILED }));
    assert!(refused.to_string().contains("is --dhchap-secret the secret"), "{refused}");
    let unproved = ended(&target, Some(SECRET), Some(SECRET));
    assert!(matches!(unproved, EndReason::Unproved { queue: 0, why: Failure::FAILED }));
    // A host whose key was removed is refused until the administrator permits it without one.
    target.apply("");
    assert!(Host::connect(target.options(1), target.setup()).is_err());
    // The same target without keys: nothing that a host which wants a proof would talk to.
    target.apply(&format!("[[host]]\nnqn = \"{HOST}\"\nauthenticate = false\n"));
    assert!(Host::connect(target.options(1), target.setup()).is_ok());
    let unproved = ended(&target, Some(SECRET), Some(OURS));
    let expected = EndReason::Unproved { queue: 0, why: Failure::PROTOCOL_UNUSABLE };
    assert_eq!(unproved.to_string(), expected.to_string());
}

#[test]
fn each_host_may_use_the_hashes_and_groups_that_are_allowed_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let text = |own: &str| {
        rules(directory.path(), "hashes = [\"sha256\"]\ngroups = [\"null\"]") + own + "\n"
    };
    let mut target =
        TestTarget::start_with(&text("hashes = [\"sha384\"]\ngroups = [\"ffdhe2048\"]"));
    // The host that stays connected has the usual address.
    let elsewhere = |target: &TestTarget, options: Options| {
        let source = target.address().trim_end_matches('1').to_owned() + "10";
        let source = Some(source.parse().expect("an address"));
        Host::connect(options, HostOptions { source, ..target.setup() })
    };
    let offering = |target: &TestTarget, hashes: &[HashId], groups: &[GroupId]| {
        let (hashes, groups) = (hashes.to_vec(), groups.to_vec());
        elsewhere(target, Options { hashes, groups, ..options(target, Some(SECRET), None) })
    };
    let refused = |host: Result<Host, Error>| match host {
        Err(Error::Ended(EndReason::NotAuthenticated { queue: 0, why })) => why,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("connected"),
    };
    let all = GroupId::ALL;
    let why = refused(offering(&target, &[HashId::SHA256, HashId::SHA512], &all));
    assert_eq!(why, Failure::HASH_UNUSABLE);
    let said = target.told(Cause::NoCommonAlgorithm);
    let expected = "(hash function not usable: of hashes it offers SHA-256, SHA-512, and it may \
                    use SHA-384)";
    assert!(said.iter().any(|line| line.contains(expected)), "{said:?}");
    let why = refused(offering(&target, &HashId::ALL, &[GroupId::NULL, GroupId::FFDHE3072]));
    assert_eq!(why, Failure::GROUP_UNUSABLE);
    let said = target.told(Cause::NoCommonAlgorithm);
    let expected = "of groups it offers NULL, ffdhe3072, and it may use ffdhe2048";
    assert!(said.iter().any(|line| line.contains(expected)), "{said:?}");
    let allowed = Options {
        hashes: vec![HashId::SHA384],
        groups: vec![GroupId::FFDHE2048],
        ..options(&target, Some(SECRET), None)
    };
    let mut host = Host::connect(allowed, target.setup()).expect("allowed");
    // A change concerns the next authentication, and no session.
    target.apply(&text("hashes = [\"sha512\"]"));
    let mut block = vec![0; 4096];
    host.read(super::FILE, &mut block).expect("read");
    host.disconnect();
    let why = refused(offering(&target, &[HashId::SHA384], &all));
    assert_eq!(why, Failure::HASH_UNUSABLE);
    offering(&target, &[HashId::SHA512], &[GroupId::NULL]).expect("connected").disconnect();
    // A host that has nothing of its own may use what all may.
    target.apply(&text(""));
    offering(&target, &[HashId::SHA256], &[GroupId::NULL]).expect("connected").disconnect();
}

#[test]
fn concurrent_authentications_all_succeed() {
    let directory = tempfile::tempdir().unwrap();
    let more = rules(directory.path(), "groups = [\"ffdhe4096\"]");
    let target = TestTarget::start_with(&more);
    thread::scope(|scope| {
        let connects: Vec<_> = (10..14)
            .map(|last| {
                let options = options(&target, Some(SECRET), Some(OURS));
                // Each from an address of its own.
                let source = target.source();
                let (net, _) = source.rsplit_once('.').unwrap();
                let source = format!("{net}.{last}").parse().unwrap();
                let setup = HostOptions { source: Some(source), ..target.setup() };
                scope.spawn(move || Host::connect(options, setup).map(Host::disconnect))
            })
            .collect();
        for connect in connects {
            connect.join().unwrap().expect("connected");
        }
    });
}

#[test]
fn the_tool_accepts_secrets_and_never_prints_them() {
    let directory = tempfile::tempdir().unwrap();
    let target = TestTarget::start_with(&rules(directory.path(), "groups = [\"ffdhe2048\"]"));
    let file = format!("@{}/theirs", directory.path().display());
    let good = target.nvmf("id-ctrl", &["--dhchap-secret", &file, "--dhchap-ctrl-secret", OURS]);
    assert_eq!(good.code(), 0, "{}", good.error());
    let bad = target.nvmf("id-ctrl", &["--dhchap-secret", OURS]);
    assert_eq!(bad.code(), 1);
    let broken = SECRET.replace("AAEC", "AAED");
    let bad = target.nvmf("id-ctrl", &["--dhchap-secret", &broken]);
    assert_eq!(bad.code(), 2);
    assert!(bad.error().contains("checksum") && !bad.error().contains("AAED"), "{}", bad.error());
    assert_eq!(target.nvmf("id-ctrl", &[]).code(), 1);
}
