//! Files that are written one after the other, with the power going in between.

use std::path::PathBuf;

use super::*;

const D: &str = "nqn.2026-11.io.nvmfd:d";

/// A configuration in three files, none of which numbers its listeners.
fn stage_three() -> (TempDir, Declared, Vec<(PathBuf, String)>) {
    let (folder, _) = stage(TEXT);
    fs::create_dir(folder.path().join("conf.d")).unwrap();
    let text = |at: u8, nqn: &str| {
        format!("[[listener]]\naddress = \"127.0.0.{at}\"\n[[subsystem]]\nnqn = \"{nqn}\"\n")
    };
    fs::write(folder.path().join("conf.d/c.toml"), text(7, C)).unwrap();
    fs::write(folder.path().join("conf.d/d.toml"), text(8, D)).unwrap();
    let declared = load(&folder);
    let named = |source: &Source| (source.file.clone().unwrap(), source.text.clone());
    let files = declared.sources.iter().map(named).collect();
    (folder, declared, files)
}

fn add_listener(id: u16, at: u8) -> Change {
    let settings = settings(json!({"address": format!("127.0.0.{at}")}));
    Change::AddListener { id, settings }
}

fn offer(nqn: &str, listeners: &[u16]) -> Change {
    let settings = settings(json!({"listeners": listeners}));
    Change::SetSubsystem { nqn: nqn.to_owned(), settings }
}

/// Saves what was changed, and starts after each file as after a power loss. How many were written.
fn save(changed: &Declared) -> usize {
    let files = Sources::read(changed.file()).unwrap();
    let writes = writes(&files, changed.changes()).unwrap();
    for Source { file, text } in &writes {
        fs::write(file.as_ref().unwrap(), text).unwrap();
        let found = changed.reload().unwrap_or_else(|errors| {
            panic!("{errors}after {} of {:?}", file.as_ref().unwrap().display(), changed.changes())
        });
        let (found, changes) = (found.config(), found.changes());
        assert_eq!(found, changed.config(), "{changes:?} of {:?}", changed.changes());
        assert!(changes.set_aside.is_empty(), "{changes:?}");
    }
    assert_eq!(changed.reload().unwrap().changes(), &Changes::default());
    writes.len()
}

#[test]
fn files_are_saved_in_an_order_in_which_each_step_can_be_read() {
    // The numbers that the others have by their places are written first.
    let (_folder, declared, _) = stage_three();
    assert_eq!(save(&declared.with(&[add_listener(4, 9)], AT).unwrap()), 3);

    // What goes there and comes here is never in two places.
    let (_folder, declared, _) = stage_three();
    let again = Change::AddSubsystem { nqn: C.to_owned(), settings: Settings::new() };
    let gone = Change::RemoveSubsystem { nqn: C.to_owned() };
    assert_eq!(save(&declared.with(&[gone, again], AT).unwrap()), 2);

    // What names another thing is written behind it.
    let (_folder, declared, files) = stage_three();
    let numbered = files[2].1.replace("address", "id = 3\naddress");
    fs::write(&files[2].0, numbered).unwrap();
    let declared = declared.reload().unwrap();
    let named = declared.with(&[add_listener(4, 9)], AT).unwrap();
    assert_eq!(save(&named.with(&[offer(D, &[4])], AT).unwrap()), 3);

    // Neither file can be first: one is written twice.
    let (_folder, declared, _) = stage_three();
    let named = declared.with(&[add_listener(4, 9)], AT).unwrap();
    assert_eq!(save(&named.with(&[offer(D, &[4])], AT).unwrap()), 4);
}

#[test]
fn whatever_was_changed_each_step_of_saving_it_can_be_read() {
    let (_folder, declared, files) = stage_three();
    let c = || C.to_owned();
    let all = [
        add_listener(4, 9),
        add_listener(5, 7),
        Change::RemoveListener { id: 1 },
        Change::RemoveListener { id: 2 },
        Change::SetAna { listener: 3, group: None, state: "change".to_owned() },
        Change::RemoveSubsystem { nqn: c() },
        Change::AddSubsystem { nqn: c(), settings: Settings::new() },
        offer(C, &[4]),
        offer(D, &[2, 3]),
        offer(A, &[3]),
    ];
    let (mut saved, mut several) = (0, 0);
    let mut lives = vec![(declared, 0)];
    while let Some((changed, depth)) = lives.pop() {
        if depth > 0 {
            files.iter().for_each(|(file, text)| fs::write(file, text).unwrap());
            saved += 1;
            several += usize::from(save(&changed) > 1);
            files.iter().for_each(|(file, text)| fs::write(file, text).unwrap());
        }
        if depth < 2 {
            let next =
                all.iter().filter_map(|one| changed.with(std::slice::from_ref(one), AT).ok());
            lives.extend(next.map(|next| (next, depth + 1)));
        }
    }
    println!("{saved} saved, {several} of them in several steps");
    assert!(several > 20, "{several} of {saved}");
}

#[test]
fn a_listener_that_was_changed_is_still_the_one_when_others_come() {
    let at = |id: u16, last: u8| format!("127.0.0.{last}:4420 (id {id})");
    let serving = |declared: &Declared| -> Vec<String> {
        declared.config().listeners.iter().map(ToString::to_string).collect()
    };
    let come = |folder: &TempDir| {
        let text = "[[listener]]\naddress = \"127.0.0.6\"\n";
        fs::write(folder.path().join("conf.d/a.toml"), text).unwrap();
    };
    // What was taken away stays away, and who is new serves.
    let (folder, declared, _) = stage_three();
    let gone = declared.with(&[Change::RemoveListener { id: 2 }], AT).unwrap();
    gone.keep().unwrap();
    come(&folder);
    for found in [load(&folder), gone.reload().unwrap()] {
        assert_eq!(serving(&found), [at(1, 1), at(2, 6), at(4, 8)]);
        assert!(found.changes().set_aside.is_empty());
    }
    save(&load(&folder));

    // Also when it was changed more than once, and its address with it.
    let (folder, declared, _) = stage_three();
    let moved = Change::SetListener { id: 2, settings: settings(json!({"port": 4421})) };
    let ana = Change::SetAna { listener: 2, group: None, state: "change".to_owned() };
    let next = declared.with(&[moved, ana], AT).unwrap();
    next.keep().unwrap();
    come(&folder);
    let found = load(&folder);
    let changed = "127.0.0.7:4421 (id 3), all groups change".to_owned();
    assert_eq!(serving(&found), [at(1, 1), at(2, 6), changed, at(4, 8)]);
    fs::remove_file(folder.path().join("conf.d/a.toml")).unwrap();
    assert_eq!(found.reload().unwrap().config(), next.config());
    // The files have it by now.
    let text = fs::read_to_string(folder.path().join("conf.d/c.toml")).unwrap();
    let by_hand = text.replace("[[sub", "port = 4421\nana = \"change\"\n[[sub");
    fs::write(folder.path().join("conf.d/c.toml"), by_hand).unwrap();
    assert_eq!(load(&folder).changes(), &Changes::default());

    // When it is gone, the one that has its number has nothing to do with that.
    come(&folder);
    fs::remove_file(folder.path().join("conf.d/c.toml")).unwrap();
    let found = load(&folder);
    assert_eq!(serving(&found), [at(1, 1), at(2, 6), at(3, 8)]);
    let [moved, ana] = &found.changes().set_aside[..] else { panic!("{:?}", found.changes()) };
    let why = "listener 2 was 127.0.0.7:4420 when that was changed, and is 127.0.0.6:4420 now";
    assert_eq!(moved.why, why);
    assert_eq!(ana.why, why.replace("7:4420", "7:4421"));
}

#[test]
fn changes_of_listeners_that_an_older_version_has_kept_can_be_read() {
    let (folder, declared, _) = stage_three();
    declared.with(&[Change::RemoveListener { id: 2 }], AT).unwrap().keep().unwrap();
    let journal = folder.path().join("changes.json");
    let mut kept: serde_json::Value = serde_json::from_slice(&fs::read(&journal).unwrap()).unwrap();
    let was = kept["kept"][0].as_object_mut().unwrap().remove("listener");
    assert_eq!(was, Some(json!("127.0.0.7:4420")));
    fs::write(&journal, kept.to_string()).unwrap();
    let found = load(&folder);
    assert_eq!(found.config().listeners.iter().map(|each| each.id).collect::<Vec<_>>(), [1, 3]);
}
