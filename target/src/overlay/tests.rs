use std::fs;
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::{TempDir, tempdir};

use super::diff::differences;
use crate::api::Settings;
use crate::blockdev::crash_point::testing::{kill_before, killed_process, run_before, run_killed};
use crate::config::{NamespaceKind, Saving};
use crate::overlay::*;

mod editing;
mod replacing;
mod saving;
mod shared;

const A: &str = "nqn.2026-11.io.nvmfd:a";
const HOST: &str = "nqn.2026-11.org.example:h";

/// A configuration written by hand.
const TEXT: &str = r#"# our disks
provider = "soft"     # no adapter yet

[[listener]]
address = "127.0.0.1" # only us

# the first
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:a"
hosts = [ "nqn.2026-11.org.example:g" ] # who may
  [[subsystem.namespace]]
  nsid = 1
  kind = "null"
  size = "1GiB"       # for now

[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:b"
allow_any_host = true

[limits]
queue_depth = 64
"#;

fn settings(value: serde_json::Value) -> Settings {
    serde_json::from_value(value).unwrap()
}

fn add(nsid: u32, size: &str) -> Change {
    let settings = settings(json!({"kind": "null", "size": size}));
    Change::AddNamespace { subsystem: A.to_owned(), nsid, settings }
}

fn remove(nsid: u32) -> Change {
    Change::RemoveNamespace { subsystem: A.to_owned(), nsid }
}

fn replace(text: String) -> Change {
    Change::Replace { text: Some(text), files: None }
}

/// A file, and a state directory beside it.
fn stage(text: &str) -> (TempDir, EffectiveConfig) {
    let directory = tempdir().unwrap();
    write(&directory, text);
    let declared = load(&directory);
    (directory, declared)
}

fn write(directory: &TempDir, text: &str) {
    let state = format!("state_directory = {:?}\n{text}", directory.path());
    fs::write(directory.path().join("nvmfd.toml"), state).unwrap();
}

fn load(directory: &TempDir) -> EffectiveConfig {
    EffectiveConfig::load_with(&directory.path().join("nvmfd.toml"), None).unwrap()
}

/// A process that another test spawns may hold the lock as well, until it executes its program.
fn begin(declared: &EffectiveConfig) -> Saving {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match Saving::begin(declared.file()) {
            Err(said)
                if said.contains("another save is in progress") && Instant::now() < deadline =>
            {
                std::thread::yield_now();
            }
            begun => return begun.unwrap(),
        }
    }
}

fn edit(text: &str, change: &Change) -> Result<String, EditError> {
    super::edit(&ConfigFiles::from(text), change).map(|sources| sources.main.text)
}

fn nsids(declared: &EffectiveConfig) -> Vec<u32> {
    declared.config().subsystems[0].namespaces.iter().map(|n| n.nsid).collect()
}

const AT: (u64, Option<u32>) = (1_700_000_000, Some(0));

/// A program may set the same again and again.
#[test]
fn a_change_that_the_files_have_already_overrides_no_later_edit_of_them() {
    let (directory, declared) = stage(TEXT);
    let size = |size: &str| Change::SetNamespace {
        subsystem: A.to_owned(),
        nsid: 1,
        settings: settings(json!({ "size": size })),
    };
    let changed = declared.with(&[size("1GiB")], AT).unwrap();
    assert_eq!((changed.digest(), changed.changes()), (declared.digest(), &Changes::default()));
    fs::write(declared.file(), TEXT.replace("1GiB", "3GiB")).unwrap();
    assert_eq!(changed.reload().unwrap().config(), load(&directory).config());
    let both = declared.with(&[size("2GiB"), size("1GiB")], AT).unwrap();
    assert_eq!(both.changes().kept.len(), 2);
}

#[test]
fn changes_survive_restarts_until_they_are_saved() {
    let (directory, declared) = stage(TEXT);
    let journal = directory.path().join("changes.json");
    let next = declared.with(&[add(2, "2GiB"), add(3, "3GiB")], AT).unwrap();
    next.keep().unwrap();
    let next = next.with(&[remove(2)], AT).unwrap();
    next.keep().unwrap();
    let found = load(&directory);
    assert_eq!((found.config(), found.changes()), (next.config(), next.changes()));
    assert_eq!(nsids(&found), [1, 3]);

    // Killed after a save, before the changes are removed.
    let file = directory.path().join("nvmfd.toml");
    let saved = merged(&ConfigFiles::read(&file).unwrap(), found.changes()).unwrap();
    fs::write(&file, &saved.main.text).unwrap();
    let saved = load(&directory);
    assert_eq!(saved.changes(), &Changes::default());
    assert_eq!(saved.config(), next.config());
    // Another change was made in between.
    let more = next.with(&[add(4, "4GiB")], AT).unwrap();
    more.keep().unwrap();
    let found = load(&directory);
    assert_eq!((nsids(&found), found.changes().kept.len()), (vec![1, 3, 4], 1));
    saved.keep().unwrap();
    assert!(!journal.exists());
}

#[test]
fn changes_that_conflict_with_manual_edits_are_set_aside() {
    let (directory, declared) = stage(TEXT);
    declared.with(&[add(2, "2GiB"), add(3, "3GiB"), remove(1)], AT).unwrap().keep().unwrap();
    let by_hand = "[[subsystem.namespace]]\nnsid = 2\nkind = \"null\"\nsize = \"9GiB\"\n\n[[subsystem]]\n\
                   nqn = \"nqn.2026-11.io.nvmfd:b\"";
    let text = TEXT.replace("[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:b\"", by_hand);
    write(&directory, &text);
    let found = load(&directory);
    assert_eq!(nsids(&found), [2, 3]);
    let aside = &found.changes().set_aside;
    assert_eq!((aside.len(), &aside[0].kept.change), (1, &add(2, "2GiB")));
    assert!(aside[0].why.contains("namespace 2 exists already"), "{}", aside[0].why);
    // It is retained until the administrator discards it.
    found.keep().unwrap();
    assert_eq!(load(&directory).changes(), found.changes());
    found.without_set_aside().keep().unwrap();
    assert!(load(&directory).changes().set_aside.is_empty());
    // The same edit by hand is no conflict.
    let same = by_hand.replace("9GiB", "2GiB");
    let again = TEXT.replace("[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:b\"", &same);
    declared.with(&[add(2, "2GiB")], AT).unwrap().keep().unwrap();
    write(&directory, &again);
    let found = load(&directory);
    assert!(found.changes().set_aside.is_empty(), "{:?}", found.changes());
    assert_eq!(nsids(&found), [1, 2]);
}

#[test]
fn interdependent_changes_of_a_request_survive_a_restart() {
    let text = TEXT.replace("allow_any_host = true", "allow_any_host = true\nlisteners = [1]");
    let (directory, declared) = stage(&text);
    let address = settings(json!({"address": "127.0.0.9"}));
    let moved =
        [Change::RemoveListener { id: 1 }, Change::AddListener { id: 1, settings: address }];
    assert!(declared.with(&moved[..1], AT).is_err() && declared.with(&moved[1..], AT).is_err());
    let before = declared.with(&[add(2, "2GiB")], AT).unwrap();
    let next = before.with(&moved, AT).unwrap().with(&[add(3, "3GiB")], AT).unwrap();
    next.keep().unwrap();
    let found = load(&directory);
    assert_eq!((found.config(), found.changes()), (next.config(), next.changes()));
    assert_eq!(found.config().listeners[0].address.ip().to_string(), "127.0.0.9");
    // Each change that no longer applies is set aside; the others are applied.
    write(&directory, &text.replace("127.0.0.1", "127.0.0.5"));
    let found = load(&directory);
    assert_eq!(nsids(&found), [1, 2, 3]);
    let aside: Vec<_> = found.changes().set_aside.iter().map(|aside| &aside.kept.change).collect();
    assert_eq!(aside, [&moved[0], &moved[1]], "{:?}", found.changes().set_aside);
}

#[test]
fn a_configuration_replacement_is_set_aside_after_a_manual_edit() {
    let (directory, declared) = stage(TEXT);
    let state = format!("state_directory = {:?}\n", directory.path());
    let other = state + &TEXT.replace("nsid = 1", "nsid = 9");
    let next = declared.with(&[add(2, "2GiB"), replace(other)], AT).unwrap();
    next.keep().unwrap();
    assert_eq!((nsids(&load(&directory)), next.changes().kept.len()), (vec![9], 1));
    write(&directory, &TEXT.replace("nsid = 1", "nsid = 4"));
    let found = load(&directory);
    assert_eq!(nsids(&found), [4]);
    assert!(found.changes().set_aside[0].why.contains("the replaced object was changed"));
}

#[test]
fn an_unreadable_change_log_makes_loading_fail() {
    let (directory, _) = stage(TEXT);
    for bytes in ["", "{", "{\"form\": 3, \"kept\": [], \"set_aside\": []}"] {
        fs::write(directory.path().join("changes.json"), bytes).unwrap();
        let errors =
            EffectiveConfig::load_with(&directory.path().join("nvmfd.toml"), None).unwrap_err();
        assert!(errors.to_string().contains("move that file away"), "{errors}");
    }
}

#[test]
fn changes_that_cannot_be_persisted_are_an_error() {
    let (directory, declared) = stage(TEXT);
    let next = declared.with(&[add(2, "1MiB")], AT).unwrap();
    drop(directory);
    assert!(next.keep().unwrap_err().contains("cannot be written"));
    // Without a state directory nothing can fail, and nothing is persisted.
    let text = TEXT.replace("nsid = 1", "nsid = 8");
    let directory = tempdir().unwrap();
    fs::write(directory.path().join("nvmfd.toml"), text).unwrap();
    let next = load(&directory).with(&[add(2, "1MiB")], AT).unwrap();
    next.keep().unwrap();
    assert!(!next.keeps());
    assert_eq!(nsids(&load(&directory)), [8]);
}

/// It belongs to the other daemon, or is that of a start which has not happened.
#[test]
fn a_reload_does_not_touch_the_change_log_of_another_directory() {
    let (directory, declared) = stage(TEXT);
    let (theirs, other) = stage(TEXT);
    other.with(&[add(5, "5GiB")], AT).unwrap().keep().unwrap();
    let journal = || fs::read(theirs.path().join("changes.json")).unwrap();
    let before = journal();
    let state = format!("state_directory = {:?}\n{TEXT}", theirs.path());
    fs::write(directory.path().join("nvmfd.toml"), state).unwrap();
    let found = declared.reload().unwrap();
    assert_eq!(declared.config().needs_restart(found.config()), ["state_directory"]);
    found.keep().unwrap();
    assert_eq!(journal(), before);
    let next = found.with(&[add(2, "2GiB")], AT).unwrap();
    next.keep().unwrap();
    assert_eq!(journal(), before);
    assert!(next.warnings().iter().any(|each| each.contains("does not find them")));
    write(&directory, TEXT);
    assert_eq!(nsids(&load(&directory)), [1, 2]);
}

/// As a program makes them that provides volumes, and never saves.
#[test]
fn changes_undone_or_replaced_since_do_not_fill_the_change_log() {
    let (directory, declared) = stage(TEXT);
    let long = "x".repeat(20_000);
    let volume = |nsid: u32| {
        let settings = settings(json!({"path": format!("/srv/{long}{nsid}"), "size": "1GiB"}));
        Change::AddNamespace { subsystem: A.to_owned(), nsid, settings }
    };
    let allow = |nsid: u32| {
        let host = format!("nqn.2026-11.org.example:{nsid}");
        Change::AllowHost { subsystem: A.to_owned(), host }
    };
    let deny = |nsid: u32| {
        let host = format!("nqn.2026-11.org.example:{nsid}");
        Change::DenyHost { subsystem: A.to_owned(), host }
    };
    let state = |nsid: u32| {
        let state = if nsid.is_multiple_of(2) { "inaccessible" } else { "optimized" };
        Change::SetAna { listener: 1, group: Some(2), state: state.to_owned() }
    };
    let mut next = declared.with(&[add(2, "2GiB"), volume(10), allow(10)], AT).unwrap();
    for nsid in 11..100 {
        let at = (AT.0 + u64::from(nsid), AT.1);
        next = next.with(&[volume(nsid), allow(nsid), state(nsid)], at).unwrap();
        next = next.with(&[deny(nsid - 1), remove(nsid - 1)], at).unwrap();
        drop(next.prepare().unwrap_or_else(|error| panic!("{nsid}: {error}")));
    }
    next.keep().unwrap();
    assert_eq!(nsids(&next), [1, 2, 99]);
    let found = load(&directory);
    assert_eq!((found.config(), found.changes()), (next.config(), next.changes()));
    let expected = declared.with(&[add(2, "2GiB"), volume(99), allow(99), state(99)], AT);
    assert_eq!(found.config(), expected.unwrap().config());
}

/// One that was replaced since may have been needed by others in between.
#[test]
fn a_long_change_log_is_refused_rather_than_reordered() {
    let text = TEXT.replace("kind = \"null\"", "path = \"/srv/x\"");
    let (directory, declared) = stage(&text);
    let path = |nsid: u32, path: &str| {
        let settings = settings(json!({"path": path}));
        Change::SetNamespace { subsystem: A.to_owned(), nsid, settings }
    };
    let second = settings(json!({"path": "/srv/x", "size": "1GiB"}));
    let second = Change::AddNamespace { subsystem: A.to_owned(), nsid: 2, settings: second };
    let mut next = declared.with(&[path(1, "/srv/y")], AT).unwrap();
    next = next.with(&[second], (AT.0 + 1, AT.1)).unwrap();
    next.keep().unwrap();
    let long = "x".repeat(20_000);
    for nsid in 10.. {
        let last = next.clone();
        let moved = path(1, &format!("/srv/{long}{nsid}"));
        next = last.with(&[add(nsid, "1GiB"), moved], (AT.0 + u64::from(nsid), AT.1)).unwrap();
        if let Err(error) = next.keep() {
            assert!(error.contains("`nvmfctl save`"), "{error}");
            next = last;
            break;
        }
    }
    let found = load(&directory);
    assert!(found.changes() == next.changes() && found.config() == next.config());
}

/// A save does not write them.
#[test]
fn a_change_log_full_of_set_aside_changes_names_its_remedy() {
    let (_directory, declared) = stage(TEXT);
    let mut next = declared.with(&[add(2, "2GiB")], AT).unwrap();
    let (kept, why) = (next.changes.kept[0].clone(), "x".repeat(1 << 20));
    next.changes.set_aside.push(SetAside { kept, why });
    let error = next.keep().unwrap_err();
    assert!(error.contains("`nvmfctl changes forget`") && !error.contains("save"), "{error}");
    next.without_set_aside().keep().unwrap();
}

const C: &str = "nqn.2026-11.io.nvmfd:c";

/// More of the configuration, in a second file.
const MORE: &str = r#"# theirs
[[listener]]
address = "127.0.0.7"

[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:c"  # a guest
hosts = []

[[host]]
nqn = "nqn.2026-11.org.example:h"
dhchap_key_file = "/k"
"#;

/// As [`stage`], with more in `conf.d`.
fn stage_more() -> (TempDir, EffectiveConfig) {
    let (directory, _) = stage(TEXT);
    fs::create_dir(directory.path().join("conf.d")).unwrap();
    fs::write(directory.path().join("conf.d/0.toml"), "# nothing yet\n").unwrap();
    fs::write(directory.path().join("conf.d/more.toml"), MORE).unwrap();
    let declared = load(&directory);
    (directory, declared)
}

#[test]
fn objects_are_changed_in_the_file_that_defines_them() {
    let (directory, declared) = stage_more();
    let c = || C.to_owned();
    let null = settings(json!({"kind": "null", "size": "1MiB"}));
    let text_of = |declared: &EffectiveConfig, file: usize| {
        declared.sources.iter().nth(file).map(|source| source.text.clone()).unwrap()
    };
    let main = text_of(&declared, 0);
    let there = [
        Change::AddNamespace { subsystem: c(), nsid: 1, settings: null.clone() },
        Change::AllowHost { subsystem: c(), host: HOST.to_owned() },
        Change::SetSubsystem { nqn: c(), settings: settings(json!({"model": "m"})) },
        Change::SetAna { listener: 2, group: None, state: "change".to_owned() },
        Change::SetHost {
            nqn: HOST.to_owned(),
            settings: settings(json!({"dhchap_key_file": "/l"})),
        },
    ];
    let next = declared.with(&there, AT).unwrap();
    assert_eq!(text_of(&next, 0), main, "the configuration file has nothing to do with that");
    assert_eq!(text_of(&next, 1), "# nothing yet\n");
    let more = text_of(&next, 2);
    for has in ["# theirs", "# a guest", "nsid = 1", "model = \"m\"", "ana = \"change\"", "/l"] {
        assert!(more.contains(has), "{has}: {more}");
    }
    assert_eq!(next.config().subsystems[2].namespaces.len(), 1);

    // New objects are added to the configuration file; existing ones are changed in the file that has them.
    let d =
        Change::AddSubsystem { nqn: "nqn.2026-11.io.nvmfd:d".into(), settings: Settings::new() };
    let last = next.with(&[d, Change::RemoveHost { nqn: HOST.to_owned() }], AT).unwrap();
    assert!(text_of(&last, 0).contains("nvmfd:d"));
    let exempt = text_of(&last, 2);
    assert!(exempt.contains("authenticate = false") && !exempt.contains("dhchap_key_file"));
    assert_eq!(last.config().authentication.exempt, [HOST.parse().unwrap()]);
    let twice = Change::AddSubsystem { nqn: c(), settings: Settings::new() };
    assert!(matches!(last.with(&[twice], AT), Err(EditError::Exists(_))));
    // Listeners are numbered through all files.
    let gone = last.with(&[Change::RemoveListener { id: 1 }], AT).unwrap();
    assert_eq!(gone.config().listeners.iter().map(|each| each.id).collect::<Vec<_>>(), [2]);
    assert!(text_of(&gone, 2).contains("id = 2"));

    // It is effective after a restart, and each file can be saved.
    gone.keep().unwrap();
    let found = load(&directory);
    assert_eq!((found.config(), found.changes()), (gone.config(), gone.changes()));
    let file = directory.path().join("nvmfd.toml");
    let saved = merged(&ConfigFiles::read(&file).unwrap(), found.changes()).unwrap();
    for source in saved.iter() {
        fs::write(source.file.as_ref().unwrap(), &source.text).unwrap();
    }
    let found = load(&directory);
    assert_eq!((found.config(), found.changes()), (gone.config(), &Changes::default()));
}

#[test]
fn changes_survive_manual_edits_of_other_files() {
    let (directory, declared) = stage_more();
    let state = format!("state_directory = {:?}\n", directory.path());
    let other = state.clone() + &TEXT.replace("nsid = 1", "nsid = 9");
    let next = declared.with(&[replace(other), add(2, "1MiB")], AT).unwrap();
    assert_eq!((nsids(&next), next.config().subsystems.len()), (vec![9, 2], 3));
    next.keep().unwrap();
    // An administrator adds a file and removes another: the file that was replaced is unchanged.
    let more = directory.path().join("conf.d/more.toml");
    fs::write(directory.path().join("conf.d/new.toml"), MORE.replace(":c", ":d")).unwrap();
    fs::remove_file(&more).unwrap();
    let found = next.reload().unwrap();
    assert_eq!((nsids(&found), found.changes().set_aside.len()), (vec![9, 2], 0));
    assert_eq!(found.config().subsystems[2].nqn.as_str(), "nqn.2026-11.io.nvmfd:d");
    // Objects of a removed file cannot be changed any more.
    let lost = Change::AllowHost { subsystem: C.to_owned(), host: HOST.to_owned() };
    fs::write(&more, MORE.replace("127.0.0.7", "127.0.0.8").replace("example:h", "example:i"))
        .unwrap();
    let next = found.reload().unwrap().with(std::slice::from_ref(&lost), AT).unwrap();
    fs::remove_file(&more).unwrap();
    let found = next.reload().unwrap();
    assert_eq!(found.changes().set_aside[0].kept.change, lost);
    // An error in any of the files makes the reload fail.
    fs::write(&more, "colour = 1").unwrap();
    let said = next.reload().unwrap_err().to_string();
    assert!(said.contains("conf.d/more.toml:1:1: unknown key `colour`"), "{said}");

    // A listener retains its identity, also when another one has its number.
    let (directory, declared) = stage_more();
    let gone = declared.with(&[Change::RemoveListener { id: 2 }], AT).unwrap();
    let other = "[[listener]]\naddress = \"127.0.0.6\"\n";
    fs::write(directory.path().join("conf.d/1.toml"), other).unwrap();
    let found = gone.reload().unwrap();
    let serving = found.config().listeners.iter().map(|each| each.address.to_string());
    assert_eq!(serving.collect::<Vec<_>>(), ["127.0.0.1:4420", "127.0.0.6:4420"]);

    let (directory, declared) = stage_more();
    let text = format!("include = \"d\"\nstate_directory = {:?}\n{TEXT}", directory.path());
    let refused = declared.with(&[replace(text)], AT).unwrap_err();
    assert!(refused.to_string().contains("write it into the file, and reload"), "{refused}");
}

/// The changes during the run of the process that is killed.
fn life() -> Vec<Change> {
    let mut life: Vec<Change> = (2..8).map(|nsid| add(nsid, "1MiB")).collect();
    life.extend((2..6).map(remove));
    life.push(Change::AllowHost { subsystem: A.to_owned(), host: HOST.to_owned() });
    life.push(Change::DenyHost { subsystem: A.to_owned(), host: HOST.to_owned() });
    life
}

/// The process that is killed: not a test by itself. Reports every change that is persisted.
#[test]
#[ignore = "run by another test, in a process that is killed"]
fn child_process_killed_between_two_steps() {
    let (directory, steps) = killed_process();
    let mut declared = EffectiveConfig::load_with(&directory.join("nvmfd.toml"), None).unwrap();
    kill_before(steps);
    for (index, change) in life().into_iter().enumerate() {
        declared = declared.with(&[change], AT).unwrap();
        declared.keep().unwrap();
        println!("done {index}");
    }
}

#[test]
fn a_kill_at_any_step_loses_no_persisted_change() {
    let (directory, declared) = stage(TEXT);
    let mut states = vec![declared.config().clone()];
    let mut last = declared;
    for change in life() {
        last = last.with(&[change], AT).unwrap();
        states.push(last.config().clone());
    }
    let journal = directory.path().join("changes.json");
    let (mut kills, mut before, mut after) = (0, 0, 0);
    for steps in 1.. {
        let _ = fs::remove_file(&journal);
        let own = "overlay::tests::child_process_killed_between_two_steps";
        let (done, killed) = run_killed(own, directory.path(), steps);
        if !killed {
            assert_eq!(done, life().len());
            break;
        }
        kills += 1;
        let found = load(&directory);
        assert!(found.changes().set_aside.is_empty());
        match (*found.config() == states[done], *found.config() == states[done + 1]) {
            (true, _) => before += 1,
            (_, true) => after += 1,
            _ => panic!("killed at step {steps}, after {done} changes: {:?}", found.changes()),
        }
    }
    println!("{kills} kills: {before} found the state before, {after} the state after");
    assert!(kills >= 50 && before > 0 && after > 0, "{kills} kills, {before} + {after}");
}

#[test]
fn error_locations_refer_to_the_file_or_to_the_change() {
    const UUID: &str = "00000000-0000-4000-8000-000000000001";
    let disk = format!(
        "allow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = \
         \"1GiB\"\nuuid = \"{UUID}\"\n"
    );
    let (directory, declared) = stage(&TEXT.replace("allow_any_host = true", &disk));
    let text = fs::read_to_string(directory.path().join("nvmfd.toml")).unwrap();
    let line = 1 + text.lines().position(|line| line.contains(UUID)).unwrap();
    // Lines after that of the file have other numbers in the effective text.
    let serial = settings(json!({"serial": "X", "model": "Y"}));
    let next = declared.with(&[Change::SetSubsystem { nqn: A.to_owned(), settings: serial }], AT);
    let next = next.unwrap();
    let disk = |nsid, uuid: &str| Change::AddNamespace {
        subsystem: A.to_owned(),
        nsid,
        settings: settings(json!({"kind": "null", "size": "1MiB", "uuid": uuid})),
    };
    let said = next.with(&[disk(5, UUID)], AT).unwrap_err().to_string();
    // The same value twice: one is a line of the file, the other is from the change.
    assert!(said.contains(&format!("nvmfd.toml:{line}:")), "{said}");
    assert_eq!(said.matches("nvmfd.toml:").count(), 1, "{said}");
    let by = |nsid| format!("written by this change: add namespace {nsid} to {A}");
    assert!(said.contains(&by(5)), "{said}");
    // A line of an earlier change, then a line of the file itself.
    let other = UUID.replace('1', "2");
    let next = next.with(&[disk(6, &other)], AT).unwrap();
    let said = next.with(&[disk(7, &other)], AT).unwrap_err().to_string();
    assert!(said.contains(&by(6)) && said.contains(&by(7)) && !said.contains("line "), "{said}");
    let kept = next.with(&[replace(text.replace(UUID, &other))], AT).unwrap();
    let said = kept.with(&[disk(8, &other)], AT).unwrap_err().to_string();
    let given = format!("line {line} of what this change gave: replace the configuration file");
    assert!(said.contains(&given) && said.contains(&by(8)), "{said}");
    // A value that is not in the file is reported as it is.
    let any = settings(json!({"allow_any_host": "perhaps"}));
    let any = Change::SetSubsystem { nqn: A.to_owned(), settings: any };
    let said = next.with(&[any], AT).unwrap_err().to_string();
    let by = "(`allow_any_host = \"perhaps\"`, written by this change: set allow_any_host = ";
    assert!(said.contains(by), "{said}");
    // The errors of a replaced text are reported by its own line numbers.
    let said = next.with(&[replace("colour = 1\n".to_owned())], AT).unwrap_err().to_string();
    assert!(said.contains(":1:1: unknown key `colour`"), "{said}");
}
