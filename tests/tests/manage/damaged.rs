//! What is damaged at a start keeps its own namespace from being served, and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use initiator::Host;
use serde_json::{Value, json};

use super::{Daemon, NQN, ask, host_at, range};

/// With namespaces 2, 3 and 4 in files, of which 2 is protected from writes.
fn daemon(address: &str, source: &str) -> Daemon {
    let daemon = Daemon::start(address);
    for nsid in 2..5 {
        let image = daemon.directory.path().join(format!("{nsid}.img"));
        daemon.made(json!({"change": "add_namespace", "subsystem": NQN, "nsid": nsid,
                           "settings": {"path": image, "size": "1MiB"}}));
    }
    let mut host = host_at(address, source, super::nqn()).expect("a connection");
    for nsid in 1..5 {
        host.write(range(nsid), &block(nsid), true).expect("written");
    }
    host.disconnect();
    let protect = format!("/v1/subsystems/{NQN}/namespaces/2/protection");
    let protected = ask(&daemon.socket(), "POST", &protect, r#"{"state": "protected"}"#);
    assert_eq!(protected.0, 200, "{}", protected.1);
    daemon
}

fn block(nsid: u32) -> Vec<u8> {
    vec![0x70 + nsid as u8; 4096]
}

/// The file of a state directory whose name ends so, with its content; its last line is cut off.
fn damage(directory: &Path, end: &str) -> (PathBuf, Vec<u8>) {
    let files = fs::read_dir(directory.join("state")).unwrap().map(|each| each.unwrap().path());
    let file = { files }.find(|file| file.to_str().unwrap().ends_with(end)).expect("it is kept");
    let good = fs::read(&file).unwrap();
    fs::write(&file, &good[..good.len() - 5]).unwrap();
    (file, good)
}

fn serves(host: &mut Host, nsids: &[u32]) {
    for nsid in 1..5 {
        let mut read = vec![0; 4096];
        let served = host.read(range(nsid), &mut read).is_ok();
        assert_eq!(served, nsids.contains(&nsid), "namespace {nsid}");
        // That in memory is empty after a start.
        assert!(!served || nsid == 1 || read == block(nsid), "namespace {nsid}");
    }
}

fn states(daemon: &Daemon) -> Vec<Value> {
    let namespaces = daemon.get("/v1/namespaces");
    namespaces.as_array().unwrap().iter().map(|each| each["state"].clone()).collect()
}

#[test]
fn namespaces_with_a_damaged_record_or_short_image_stay_pending() {
    let [at, one, two, three] = ["127.0.47.1", "127.0.47.2", "127.0.47.3", "127.0.47.4"];
    let directory = daemon(at, one).stop();
    let (file, good) = damage(directory.path(), ".namespace");
    let image = directory.path().join("3.img");
    let content = fs::read(&image).unwrap();
    fs::write(&image, &content[..1 << 19]).unwrap();

    let daemon = Daemon::begin(directory);
    let mut host = host_at(at, two, super::nqn()).expect("a connection");
    serves(&mut host, &[1, 4]);
    assert_eq!(states(&daemon), ["serving", "pending", "pending", "serving"]);
    let pending = daemon.get("/v1/status")["pending"].to_string();
    for says in ["namespace 2 of", ".namespace", "namespace 3 of", "524288 bytes", "reload"] {
        assert!(pending.contains(says), "{pending}");
    }
    // A change of something else has nothing to do with them.
    daemon.made(json!({"change": "set_subsystem", "nqn": NQN, "settings": {"serial": "X"}}));
    assert_eq!(states(&daemon)[1..3], ["pending", "pending"]);
    // One is repaired: a reload serves it, and the other one is no reason to refuse that.
    fs::write(&image, &content).unwrap();
    assert_eq!(ask(&daemon.socket(), "POST", "/v1/reload", "").0, 200);
    assert_eq!(states(&daemon), ["serving", "pending", "serving", "serving"]);
    fs::write(&file, &good).unwrap();
    assert_eq!(ask(&daemon.socket(), "POST", "/v1/reload", "").0, 200);
    assert_eq!(daemon.get("/v1/status")["pending"], json!([]));
    host.disconnect();
    let mut host = host_at(at, three, super::nqn()).expect("a connection");
    serves(&mut host, &[1, 2, 3, 4]);
    assert!(host.write(range(2), &block(2), false).is_err(), "it is protected");
    host.disconnect();
    daemon.stop();
}

#[test]
fn a_damaged_name_list_blocks_files_while_any_record_exists() {
    let [at, one, two, three] = ["127.0.47.5", "127.0.47.6", "127.0.47.7", "127.0.47.8"];
    let directory = daemon(at, one).stop();
    let (names, _) = damage(directory.path(), "/names");
    let bad = fs::read(&names).unwrap();
    let daemon = Daemon::begin(directory);
    let mut host = host_at(at, two, super::nqn()).expect("a connection");
    serves(&mut host, &[1]);
    let pending = daemon.get("/v1/status")["pending"].to_string();
    assert!(pending.contains("is no record that nvmfd has written"), "{pending}");
    host.disconnect();
    let directory = daemon.stop();
    assert_eq!(fs::read(&names).unwrap(), bad, "it is not written over");
    // Where nothing is kept, it says nothing that anybody needs.
    let (protection, _) = damage(directory.path(), ".namespace");
    fs::remove_file(protection).unwrap();
    let daemon = Daemon::begin(directory);
    let mut host = host_at(at, three, super::nqn()).expect("a connection");
    serves(&mut host, &[1, 2, 3, 4]);
    host.disconnect();
    daemon.stop();
}

#[test]
fn a_damaged_journal_of_changes_keeps_the_daemon_from_starting() {
    let directory = daemon("127.0.47.9", "127.0.47.10").stop();
    damage(directory.path(), "/changes.json");
    let declared = nvmfd::overlay::EffectiveConfig::load(&directory.path().join("nvmfd.toml"));
    let said = declared.unwrap_err().to_string();
    assert!(said.contains("changes.json") && said.contains("move that file away"), "{said}");
}

/// The administrator trusts a namespace.
fn trust(daemon: &Daemon, nsid: usize) {
    let trust = format!("/v1/subsystems/{NQN}/namespaces/{nsid}/trust");
    let trusted = ask(&daemon.socket(), "POST", &trust, "{}");
    assert_eq!(trusted.0, 200, "{}", trusted.1);
    assert_eq!(states(daemon)[nsid - 1], "serving");
}

/// It truncates the file, and has its length again long before the next examination.
#[test]
fn a_file_that_cp_overwrites_in_service_is_served_only_after_trust() {
    let [at, one, two, three] = ["127.0.47.15", "127.0.47.16", "127.0.47.17", "127.0.47.18"];
    let daemon = daemon(at, one);
    let image = |name: &str| daemon.directory.path().join(name);
    let mut host = host_at(at, two, super::nqn()).expect("a connection");
    // Readers, and an administrator who makes room for growth.
    fs::copy(image("3.img"), image("backup")).unwrap();
    fs::File::options().write(true).open(image("3.img")).unwrap().set_len(2 << 20).unwrap();
    fs::File::options().write(true).open(image("3.img")).unwrap().set_len(1 << 20).unwrap();
    let copied = Command::new("cp").arg(image("2.img")).arg(image("4.img")).status().unwrap();
    assert!(copied.success());
    super::eventually("it is noticed", || states(&daemon)[3] == "untrusted");
    assert_eq!(states(&daemon), ["serving", "serving", "serving", "untrusted"]);
    serves(&mut host, &[1, 2, 3]);
    let degraded = daemon.get("/v1/status")["degraded"].to_string();
    assert!(degraded.contains("its file was shortened"), "{degraded}");
    host.disconnect();
    let daemon = Daemon::begin(daemon.stop());
    assert_eq!(states(&daemon)[3], "untrusted");
    trust(&daemon, 4);
    let mut host = host_at(at, three, super::nqn()).expect("a connection");
    let mut read = vec![0; 4096];
    host.read(range(4), &mut read).expect("read");
    assert_eq!(read, block(2));
    host.disconnect();
    daemon.stop();
}

/// Hosts have flushed blocks that the other file does not have.
#[test]
fn a_file_replaced_in_service_is_not_served_after_a_restart_until_trusted() {
    let [at, one, two, three] = ["127.0.47.11", "127.0.47.12", "127.0.47.13", "127.0.47.14"];
    let daemon = daemon(at, one);
    let image = |name: &str| daemon.directory.path().join(name);
    // Nothing but its content differs.
    fs::copy(image("2.img"), image("other")).unwrap();
    fs::rename(image("other"), image("3.img")).unwrap();
    super::eventually("it is reported", || {
        daemon.get("/v1/namespaces")[2]["detached"] == json!("replaced")
    });
    let daemon = Daemon::begin(daemon.stop());
    let mut host = host_at(at, two, super::nqn()).expect("a connection");
    serves(&mut host, &[1, 2, 4]);
    assert_eq!(states(&daemon), ["serving", "serving", "untrusted", "serving"]);
    let degraded = daemon.get("/v1/status")["degraded"].to_string();
    assert!(
        degraded.contains("is not known to be the one that hosts have written to"),
        "{degraded}"
    );
    trust(&daemon, 3);
    let daemon = Daemon::begin(daemon.stop());
    assert_eq!(states(&daemon)[2], "serving", "it stays trusted");
    let mut host = host_at(at, three, super::nqn()).expect("a connection");
    let mut read = vec![0; 4096];
    host.read(range(3), &mut read).expect("read");
    assert_eq!(read, block(2));
    host.disconnect();
    daemon.stop();
}
