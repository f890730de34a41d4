//! Tests of configurations replaced by others: one file, those of a directory, or all.

use std::collections::BTreeMap;

use super::saving::{kill_saving, stage_three};
use crate::config::Source;
use crate::overlay::tests::*;

/// The texts of the files, by name.
fn named<'s>(sources: impl Iterator<Item = &'s Source>) -> BTreeMap<String, String> {
    let name = |source: &Source| source.file.as_ref()?.file_name()?.to_str().map(str::to_owned);
    sources.map(|source| (name(source).unwrap(), source.text.clone())).collect()
}

/// The current files, but without `c.toml`, with its listener in `e.toml`, and with another `d.toml`.
fn other(declared: &EffectiveConfig) -> BTreeMap<String, String> {
    let mut files = named(declared.sources.more.iter());
    let gone = files.remove("c.toml").unwrap();
    files.insert("e.toml".to_owned(), gone.replace(":c\"", ":e\""));
    let changed = files["d.toml"].replace("127.0.0.8", "127.0.0.9");
    files.insert("d.toml".to_owned(), changed);
    files
}

fn names(declared: &EffectiveConfig) -> Vec<&str> {
    declared.config().subsystems.iter().map(|each| each.nqn.as_str()).collect()
}

#[test]
fn all_files_are_replaced_and_saved_atomically() {
    let (directory, declared, _) = stage_three();
    let text = Some(declared.sources.main.text.replace("nsid = 1", "nsid = 9"));
    let change = Change::Replace { text, files: Some(other(&declared)) };
    let next = declared.with(&[add(2, "2GiB"), change], AT).unwrap();
    assert_eq!(next.changes().kept.len(), 1, "what came before is replaced with the rest");
    let all = ["a", "b", "d", "e"].map(|last| format!("nqn.2026-11.io.nvmfd:{last}"));
    assert_eq!((names(&next), nsids(&next)), (all.each_ref().map(String::as_str).into(), vec![9]));
    next.keep().unwrap();
    let found = load(&directory);
    assert_eq!((found.config(), found.changes()), (next.config(), next.changes()));
    kill_saving(&next);
    assert_eq!(named(ConfigFiles::read(next.file()).unwrap().more.iter()), other(&declared));
}

/// A save lists the changes, writes the files, and has the daemon read them again.
#[test]
fn a_replacement_made_during_a_save_of_earlier_changes_stays_in_force() {
    let (directory, declared, _) = stage_three();
    let one = declared.with(&[add(2, "2GiB")], AT).unwrap();
    let two = one.with(&[add(3, "3GiB")], AT).unwrap();
    let text = Some(declared.sources.main.text.replace("nsid = 1", "nsid = 9"));
    for files in [Some(other(&declared)), None] {
        let change = Change::Replace { text: text.clone(), files };
        let next = two.with(&[change], AT).unwrap();
        next.keep().unwrap();
        for saved in [&one, &two] {
            let new = merged(&declared.sources, saved.changes()).unwrap();
            begin(&declared).write(&declared.sources, &new).unwrap();
            let found = [next.reload().unwrap(), load(&directory)];
            for found in found {
                assert_eq!((found.config(), found.changes().set_aside.len()), (next.config(), 0));
                assert_eq!(found.changes().kept.len(), 1);
            }
            let all = merged(&new, next.changes()).unwrap();
            assert_eq!(all, next.sources);
            begin(&declared).write(&new, &declared.sources).unwrap();
        }
    }
}

#[test]
fn removing_a_symlinked_file_removes_only_the_symlink() {
    let (directory, declared, files) = stage_three();
    let (link, text) = &files[1];
    let target = directory.path().join("conf.avail/c.toml");
    fs::create_dir(target.parent().unwrap()).unwrap();
    fs::rename(link, &target).unwrap();
    std::os::unix::fs::symlink("../conf.avail/c.toml", link).unwrap();
    let change = Change::Replace { text: None, files: Some(other(&declared)) };
    let next = declared.with(&[change], AT).unwrap();
    let new = merged(&declared.sources, next.changes()).unwrap();
    let saving = begin(&declared);
    assert!(saving.commit(&declared.sources, &new).unwrap());
    drop(saving);
    assert_eq!(ConfigFiles::read(declared.file()).unwrap().more, new.more, "the link is there");
    assert!(begin(&declared).has_finished_another());
    assert_eq!(ConfigFiles::read(declared.file()).unwrap(), new);
    assert!(fs::symlink_metadata(link).is_err(), "the link is gone");
    assert_eq!(fs::read_to_string(&target).unwrap(), *text, "what it led to is not");
}

#[test]
fn a_failed_save_is_complete_or_undone_and_reports_which() {
    let (directory, declared, files) = stage_three();
    let change = Change::Replace { text: None, files: Some(other(&declared)) };
    let next = declared.with(&[change], AT).unwrap();
    let new = merged(&declared.sources, next.changes()).unwrap();
    // The new texts can be written while the record cannot.
    let (home, elsewhere) = (directory.path(), tempdir().unwrap());
    let (conf_d, stays) = (home.join("conf.d"), elsewhere.path().join("conf.d"));
    fs::rename(&conf_d, &stays).unwrap();
    std::os::unix::fs::symlink(&stays, &conf_d).unwrap();
    let (mut before, mut after) = (0, 0);
    for step in 1.. {
        let _ = fs::remove_file(conf_d.join("e.toml"));
        files.iter().for_each(|(file, text)| fs::write(file, text).unwrap());
        let saving = begin(&declared);
        let (here, away) = (home.to_owned(), elsewhere.path().join("away"));
        let back = away.clone();
        run_before(step, move || fs::rename(here, away).unwrap());
        let Err(said) = saving.write(&declared.sources, &new) else { break };
        fs::rename(back, home).unwrap();
        let found = ConfigFiles::read(declared.file()).unwrap();
        if said.contains("in force") {
            assert_eq!(found.more, new.more, "before step {step}: {said}");
            after += 1;
        } else {
            assert_eq!(found, declared.sources, "before step {step}: {said}");
            before += 1;
        }
        drop(saving);
        let saving = begin(&declared);
        saving.write(&ConfigFiles::read(declared.file()).unwrap(), &new).unwrap();
        assert_eq!(ConfigFiles::read(declared.file()).unwrap(), new);
    }
    assert!(before > 5 && after > 2, "{before}, {after}");
}

#[test]
fn a_replacement_equal_to_the_files_leaves_no_change() {
    let (directory, declared, _) = stage_three();
    let next = declared.with(&[add(2, "2GiB")], AT).unwrap();
    next.keep().unwrap();
    let text = Some(declared.sources.main.text.clone());
    let files = Some(named(declared.sources.more.iter()));
    let back = next.with(&[Change::Replace { text, files }], AT).unwrap();
    assert_eq!((back.config(), back.changes()), (declared.config(), &Changes::default()));
    back.keep().unwrap();
    assert_eq!(load(&directory).config(), declared.config());
}

#[test]
fn adding_the_first_included_file_creates_its_directory() {
    let (directory, declared) = stage(TEXT);
    let more = [("c.toml".to_owned(), MORE.to_owned())].into();
    let main = declared.sources.main.text.replace("nsid = 1", "nsid = 9");
    let change = Change::Replace { text: Some(main), files: Some(more) };
    let next = declared.with(&[change], AT).unwrap();
    next.keep().unwrap();
    assert_eq!((load(&directory).config(), names(&next).len()), (next.config(), 3));
    kill_saving(&next);
    assert_eq!(fs::read_to_string(directory.path().join("conf.d/c.toml")).unwrap(), MORE);
    // And the files are removed again.
    let gone = load(&directory).with(&[Change::Replace { text: None, files: Some([].into()) }], AT);
    gone.as_ref().unwrap().keep().unwrap();
    assert_eq!((names(&gone.unwrap()).len(), names(&load(&directory)).len()), (2, 2));
}

#[test]
fn a_created_directory_is_readable_by_readers_of_its_parent() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    // No umask results in all of these.
    for (mode, made) in [(0o750, 0o750), (0o775, 0o775), (0o1777, 0o775)] {
        let (directory, declared) = stage(TEXT);
        // Another user, if this process may set it.
        let _ = chown(directory.path(), Some(1234), Some(1235));
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
        let files = Some([("c.toml".to_owned(), MORE.to_owned())].into());
        let next = declared.with(&[Change::Replace { text: None, files }], AT).unwrap();
        let new = merged(&declared.sources, next.changes()).unwrap();
        begin(&declared).write(&declared.sources, &new).unwrap();
        let around = fs::metadata(directory.path()).unwrap();
        let found = fs::metadata(directory.path().join("conf.d")).unwrap();
        assert_eq!(found.mode() & 0o7777, made, "in a directory of mode {mode:o}");
        assert_eq!((found.uid(), found.gid()), (around.uid(), around.gid()));
    }
}

#[test]
fn changes_in_retained_files_survive_the_replacement_of_others() {
    let (directory, declared) = stage_more();
    let null = settings(json!({"kind": "null", "size": "1MiB"}));
    let theirs = Change::AddNamespace { subsystem: C.to_owned(), nsid: 1, settings: null };
    let main = declared.sources.main.text.replace("nsid = 1", "nsid = 9");
    let next = declared.with(&[theirs.clone(), add(2, "2GiB"), replace(main.clone())], AT).unwrap();
    next.keep().unwrap();
    for each in [&next, &load(&directory)] {
        assert_eq!((nsids(each), each.config().subsystems[2].namespaces.len()), (vec![9], 1));
    }
    // The reverse.
    let files = Some(named(declared.sources.more.iter()));
    let change = Change::Replace { text: None, files: files.clone() };
    let next = declared.with(&[theirs.clone(), add(2, "2GiB"), change], AT).unwrap();
    next.keep().unwrap();
    for each in [&next, &load(&directory)] {
        assert_eq!((nsids(each), each.config().subsystems[2].namespaces.len()), (vec![1, 2], 0));
    }
    let both = Change::Replace { text: Some(main), files };
    let next = declared.with(&[theirs, add(2, "2GiB"), both], AT).unwrap();
    assert_eq!(next.changes().kept.len(), 1);
}

#[test]
fn a_file_replacement_is_set_aside_after_a_manual_edit() {
    let (directory, declared, files) = stage_three();
    let change = Change::Replace { text: None, files: Some(other(&declared)) };
    let next = declared.with(std::slice::from_ref(&change), AT).unwrap();
    next.keep().unwrap();
    // The configuration file is not one of them.
    let main = files[0].1.replace("nsid = 1", "nsid = 9");
    fs::write(&files[0].0, &main).unwrap();
    let found = load(&directory);
    assert_eq!((nsids(&found), names(&found)), (vec![9], names(&next)));
    fs::write(&files[2].0, files[2].1.replace("127.0.0.8", "127.0.0.5")).unwrap();
    let found = load(&directory);
    let [aside] = &found.changes().set_aside[..] else { panic!("{:?}", found.changes()) };
    assert_eq!((&aside.kept.change, names(&found)), (&change, names(&declared)));
    assert!(aside.why.contains("the replaced object was changed afterwards"), "{}", aside.why);
}

#[test]
fn a_save_overwrites_no_manual_edit_by_a_replacement() {
    let (_directory, declared, files) = stage_three();
    let main = files[0].1.replace("nsid = 1", "nsid = 9");
    let all = Some(other(&declared));
    for (change, edited) in [
        (replace(main.clone()), &files[0]),
        (Change::Replace { text: None, files: all.clone() }, &files[2]),
        (Change::Replace { text: Some(main), files: all }, &files[1]),
    ] {
        let next = declared.with(&[change, add(2, "2GiB")], AT).unwrap();
        assert!(merged(&declared.sources, next.changes()).is_ok());
        let (file, text) = edited;
        fs::write(file, format!("{text}# by hand\n")).unwrap();
        let found = ConfigFiles::read(declared.file()).unwrap();
        let said = merged(&found, next.changes()).unwrap_err();
        assert!(said.to_string().contains("the replaced object was changed"), "{said}");
        fs::write(file, text).unwrap();
    }
}

#[test]
fn only_names_of_includable_files_are_accepted() {
    let (_directory, declared, _) = stage_three();
    for name in ["a", "a.txt", ".a.toml", "../a.toml", "b/a.toml", "/a.toml", "a\0.toml"] {
        let files = Some([(name.to_owned(), String::new())].into());
        let said = declared.with(&[Change::Replace { text: None, files }], AT).unwrap_err();
        assert!(said.to_string().contains("is no name of a file"), "{name:?}: {said}");
    }
    let long = " ".repeat(MOST_TEXT_BYTES / 2 + 1);
    let files = Some(["a.toml", "b.toml"].map(|name| (name.to_owned(), long.clone())).into());
    let said = declared.with(&[Change::Replace { text: None, files }], AT).unwrap_err();
    assert!(said.to_string().contains("longer than"), "{said}");
}
