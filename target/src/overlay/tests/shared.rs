//! The shared configuration of a gateway group as one of the texts.

use super::*;

const GROUP: &str = r#"provider = "soft"
[group]
name = "g"
pool = "rbd"
gateway = "a"
slot = 0
shared = true
[[listener]]
address = "127.0.0.1"
id = 1
[limits]
queue_depth = 64
"#;

fn shared(text: &str) -> SharedConfig {
    SharedConfig::after(6, text.to_owned(), "b", 7)
}

/// A gateway with version 7, which has one subsystem.
fn gateway() -> (TempDir, EffectiveConfig) {
    let (directory, declared) = stage(GROUP);
    assert_eq!(declared.shared(), Some(&SharedConfig::none()));
    assert!(declared.config().subsystems.is_empty());
    let text = format!("# all gateways\n[[subsystem]]\nnqn = {A:?} # the first\n");
    let declared = declared.with_shared(shared(&text)).unwrap();
    (directory, declared)
}

fn image(nsid: u32) -> Change {
    let settings = settings(json!({"kind": "rbd", "path": format!("rbd/{nsid}")}));
    Change::AddNamespace { subsystem: A.to_owned(), nsid, settings }
}

fn whole(text: &str) -> Change {
    Change::ReplaceShared { text: text.to_owned(), base: None }
}

#[test]
fn subsystem_changes_are_shared_and_listener_changes_are_local() {
    let (_directory, declared) = gateway();
    let add = Change::AddSubsystem { nqn: HOST.to_owned(), settings: Settings::new() };
    let next = declared.with(&[image(3), add], (7, None)).unwrap();
    let text = declared.next_shared(&next).unwrap();
    assert!(text.starts_with("# all gateways\n[[subsystem]]\n"), "{text}");
    assert!(text.contains("rbd/3") && text.contains(HOST), "{text}");
    assert!(next.changes().kept.is_empty(), "no change of this gateway");
    assert_ne!(next.digest(), declared.digest());
    let local = settings(json!({"keep_alive_min_ms": 20_000}));
    let local = Change::SetListener { id: 1, settings: local };
    let own = declared.with(std::slice::from_ref(&local), (7, None)).unwrap();
    assert_eq!((own.changes().kept.len(), declared.next_shared(&own)), (1, None));
    let said = declared.with(&[local, image(3)], (7, None)).unwrap_err().to_string();
    assert!(said.contains("make the changes separately"), "{said}");
    // Also the same text, which a gateway writes again if it was lost or damaged.
    let address = settings(json!({"address": "127.0.0.2"}));
    let more = Change::AddListener { id: 2, settings: address };
    let same = whole(&declared.shared().unwrap().text);
    let said = declared.with(&[same, more], (7, None)).unwrap_err().to_string();
    assert!(said.contains("make the changes separately"), "{said}");
    // A reload, and another version, preserve the change of this gateway.
    let own = own.reload().unwrap().with_shared(shared(&text)).unwrap();
    assert_eq!(own.config().listeners[0].keep_alive_min_ms, 20_000);
    assert_eq!(own.config().subsystems.len(), 2);
    assert_eq!(own.shared().unwrap().version.number, 7);
    let same = own.with(&[whole(&text)], (7, None)).unwrap();
    assert_eq!((own.next_shared(&same), same.changes().kept.len()), (None, 1));
}

#[test]
fn shared_errors_name_the_rados_object_and_local_keys_are_refused() {
    let (_directory, declared) = gateway();
    let place = "rados:rbd/nvmfd.g";
    for (text, what) in [
        ("[limits]\nqueue_depth = 3", ":1:2: `limits` is not shared by gateways"),
        ("include = 'x'", ":1:1: `include` is for the configuration file alone"),
        ("[[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:b'\nlisteners = [1]", ":3:1: `listeners`"),
        (
            "[[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:b'\nqueue_depth = 65",
            ":3:15: `queue_depth` is 65",
        ),
        ("[[subsystem]", ":1:"),
    ] {
        let said = declared.with_shared(shared(text)).unwrap_err().to_string();
        assert!(said.contains(&format!("{place}{what}")), "{said}");
        let said = declared.with(&[whole(text)], (7, None)).unwrap_err().to_string();
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn local_subsystems_beside_a_shared_configuration_are_refused() {
    let (directory, declared) = gateway();
    write(&directory, &format!("{GROUP}[[subsystem]]\nnqn = {A:?}\n"));
    let said = declared.reload().unwrap_err().to_string();
    assert!(said.contains("`subsystem` is part of the shared configuration"), "{said}");
    write(&directory, &GROUP.replace("shared = true", "shared = false"));
    let said = declared.reload().unwrap_err().to_string();
    assert!(said.contains("`shared` of [group] has changed: restart"), "{said}");
    let said = declared.with(&[replace(String::new())], (7, None)).unwrap_err().to_string();
    assert!(said.contains("cannot be changed while the daemon serves"), "{said}");
}

#[test]
fn startup_loads_the_shared_copy_and_reports_a_damaged_one() {
    let (directory, declared) = gateway();
    let version = declared.shared().unwrap().clone();
    declared.prepare_copy(&version).unwrap().persist().unwrap();
    assert_eq!(load(&directory).shared(), Some(&version));
    assert_eq!(load(&directory).config().subsystems.len(), 1);
    fs::write(directory.path().join("shared-configuration"), "nvmfd").unwrap();
    let damaged = load(&directory);
    assert_eq!(damaged.shared(), Some(&SharedConfig::none()));
    assert!(damaged.warnings().iter().any(|it| it.contains("no record that nvmfd has written")));
}

#[test]
fn earlier_local_changes_are_not_applied_to_the_shared_configuration() {
    let (directory, declared) =
        stage(&format!("{}[[subsystem]]\nnqn = {A:?}\n", GROUP.replace("shared = true", "")));
    declared.with(&[image(3)], (7, None)).unwrap().keep().unwrap();
    write(&directory, GROUP);
    let text = format!("[[subsystem]]\nnqn = {A:?}\n");
    shared(&text).prepare_copy(Some(directory.path())).unwrap().persist().unwrap();
    let declared = load(&directory);
    assert_eq!(declared.sources.shared.as_ref().unwrap().text, text);
    let [aside] = &declared.changes().set_aside[..] else { panic!("{:?}", declared.changes()) };
    assert!(aside.why.contains("shared configuration"), "{}", aside.why);
}
