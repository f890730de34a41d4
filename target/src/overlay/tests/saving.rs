//! Tests of saving several files, with a power loss in between.

use std::path::{Path, PathBuf};

use crate::config::{Rewritten, Saving, Source};
use crate::overlay::tests::*;

const D: &str = "nqn.2026-11.io.nvmfd:d";

/// A configuration in three files, none of which numbers its listeners.
pub(super) fn stage_three() -> (TempDir, EffectiveConfig, Vec<(PathBuf, String)>) {
    let (directory, _) = stage(TEXT);
    fs::create_dir(directory.path().join("conf.d")).unwrap();
    let text = |at: u8, nqn: &str| {
        format!("[[listener]]\naddress = \"127.0.0.{at}\"\n[[subsystem]]\nnqn = \"{nqn}\"\n")
    };
    fs::write(directory.path().join("conf.d/c.toml"), text(7, C)).unwrap();
    fs::write(directory.path().join("conf.d/d.toml"), text(8, D)).unwrap();
    let declared = load(&directory);
    let named = |source: &Source| (source.file.clone().unwrap(), source.text.clone());
    let files = declared.sources.iter().map(named).collect();
    (directory, declared, files)
}

fn add_listener(id: u16, at: u8) -> Change {
    let settings = settings(json!({"address": format!("127.0.0.{at}")}));
    Change::AddListener { id, settings }
}

fn offer(nqn: &str, listeners: &[u16]) -> Change {
    let settings = settings(json!({"listeners": listeners}));
    Change::SetSubsystem { nqn: nqn.to_owned(), settings }
}

/// The addresses of two listeners, swapped. Neither change can be first.
fn swapped() -> [Change; 2] {
    [(2, 8), (3, 7)].map(|(id, last)| {
        let settings = settings(json!({"address": format!("127.0.0.{last}")}));
        Change::SetListener { id, settings }
    })
}

fn beside(file: &Path, end: &str) -> PathBuf {
    file.with_file_name(format!("{}{end}", file.file_name().unwrap().display()))
}

/// Path of the new text of a file.
fn waiting(file: &Path) -> PathBuf {
    file.with_file_name(format!(".{}.saving", file.file_name().unwrap().display()))
}

/// Existing files that are not part of the configuration.
fn left(directory: &Path) -> Vec<PathBuf> {
    let directories = [directory.to_owned(), directory.join("conf.d")];
    let entries = directories.iter().flat_map(|directory| fs::read_dir(directory).unwrap());
    let files = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    files.filter(|file| file.extension().is_none_or(|end| end != "toml")).collect()
}

/// Saves the changes, and starts as after a power loss with every combination of old and new
/// files. Returns the number of files.
fn save(changed: &EffectiveConfig) -> usize {
    let old = ConfigFiles::read(changed.file()).unwrap();
    let new = merged(&old, changed.changes()).unwrap();
    assert_eq!(digest_with_shared(&new), changed.digest(), "the daemon has what is saved");
    let saving = begin(changed);
    if !saving.commit(&old, &new).unwrap() {
        return 0;
    }
    drop(saving);
    let pairs = || old.iter().zip(new.iter()).filter(|(old, new)| old != new);
    let count = pairs().count();
    for mix in 0..1 << count {
        for (at, (old, new)) in pairs().enumerate() {
            let file = new.file.as_ref().unwrap();
            if mix & 1 << at == 0 {
                fs::write(file, &old.text).unwrap();
                fs::write(waiting(file), &new.text).unwrap();
            } else {
                fs::write(file, &new.text).unwrap();
                let _ = fs::remove_file(waiting(file));
            }
        }
        let found = changed.reload().unwrap_or_else(|errors| {
            panic!("{errors}with {mix:b} of {:?} in place", changed.changes())
        });
        assert_eq!(found.config(), changed.config(), "{mix:b} of {:?}", changed.changes());
        assert_eq!(found.changes(), &Changes::default());
        assert!(found.warnings().iter().any(|each| each.contains("`nvmfctl save` finishes it")));
    }
    assert!(begin(changed).has_finished_another());
    let written: Vec<_> =
        new.iter().map(|s| fs::read_to_string(s.file.as_ref().unwrap())).collect();
    written.into_iter().zip(new.iter()).for_each(|(is, new)| assert_eq!(is.unwrap(), new.text));
    assert_eq!(changed.reload().unwrap().changes(), &Changes::default());
    count
}

/// The process that is killed: not a test by itself.
#[test]
#[ignore = "run by another test, in a process that is killed"]
fn child_process_killed_during_a_save() {
    let (directory, steps) = killed_process();
    let declared = EffectiveConfig::load_with(&directory.join("nvmfd.toml"), None).unwrap();
    kill_before(steps);
    let saving = begin(&declared);
    let old = ConfigFiles::read(declared.file()).unwrap();
    saving.write(&old, &merged(&old, declared.changes()).unwrap()).unwrap();
    println!("done 0");
}

/// Saves the changes, killed before each step, and starts again.
pub(super) fn kill_saving(changed: &EffectiveConfig) {
    let old = ConfigFiles::read(changed.file()).unwrap();
    let new = merged(&old, changed.changes()).unwrap();
    let declared = Config::of(&old).unwrap();
    let directory = changed.file().parent().unwrap();
    let (conf_d, journal) = (directory.join("conf.d"), directory.join("changes.json"));
    let had_directory = conf_d.is_dir();
    let load = || EffectiveConfig::load_with(changed.file(), None).unwrap();
    let (mut before, mut after, mut halves) = (0, 0, 0);
    for steps in 1.. {
        let _ = fs::remove_dir_all(&conf_d);
        if had_directory {
            fs::create_dir(&conf_d).unwrap();
        }
        for Source { file, text } in old.iter() {
            fs::write(file.as_ref().unwrap(), text).unwrap();
        }
        changed.keep().unwrap();
        let own = "overlay::tests::saving::child_process_killed_during_a_save";
        let (done, killed) = run_killed(own, directory, steps);
        if !killed {
            assert_eq!((done, ConfigFiles::read(changed.file()).unwrap()), (1, new));
            break;
        }
        let rewritten = old.rewritten(&new);
        let is_new =
            |each: &&Rewritten<'_>| fs::read_to_string(each.file).ok().as_deref() == each.new;
        let in_place = rewritten.iter().filter(is_new).count();
        halves += usize::from(in_place > 0 && in_place < rewritten.len());
        let found = load();
        assert_eq!(found.config(), changed.config(), "killed before step {steps}");
        assert!(found.changes().set_aside.is_empty());
        // Also without the record of the changes.
        fs::remove_file(&journal).unwrap();
        let found = Config::of(&ConfigFiles::read(changed.file()).unwrap()).unwrap();
        match (found == declared, found == Config::of(&new).unwrap()) {
            (true, _) => before += 1,
            (_, true) => after += 1,
            _ => panic!("killed before step {steps}: {found:?}"),
        }
        // A second save completes it.
        changed.keep().unwrap();
        let saving = begin(changed);
        let read = ConfigFiles::read(changed.file()).unwrap();
        saving.write(&read, &merged(&read, load().changes()).unwrap()).unwrap();
        assert_eq!(ConfigFiles::read(changed.file()).unwrap(), new);
        assert_eq!(load().changes(), &Changes::default());
        drop(saving);
        assert!(left(directory).iter().eq([&journal]), "killed before step {steps}");
    }
    println!("{before} before, {after} after, {halves} with some files in place");
    assert!(before > 5 && after > 5 && halves > 0, "{before}, {after}, {halves}");
}

#[test]
fn a_save_killed_anywhere_has_saved_all_or_nothing() {
    let (_directory, declared, _) = stage_three();
    kill_saving(&declared.with(&swapped(), AT).unwrap());
}

#[test]
fn manual_edits_of_half_saved_files_are_preserved() {
    let (directory, declared, files) = stage_three();
    let changed = declared.with(&swapped(), AT).unwrap();
    let commit = || {
        let saving = begin(&declared);
        let new = merged(&declared.sources, changed.changes()).unwrap();
        assert!(saving.commit(&declared.sources, &new).unwrap());
    };
    commit();
    // No other save may run at the same time.
    let first = begin(&declared);
    assert!(Saving::begin(declared.file()).unwrap_err().contains("another save is in progress"));
    drop(first);
    files.iter().for_each(|(file, text)| fs::write(file, text).unwrap());
    commit();
    let by_hand = files[1].1.replace("127.0.0.7", "127.0.0.9");
    fs::write(&files[1].0, &by_hand).unwrap();
    let serving = |declared: &EffectiveConfig| -> Vec<String> {
        declared.config().listeners.iter().map(|each| each.address.ip().to_string()).collect()
    };
    let says = ["127.0.0.1", "127.0.0.9", "127.0.0.7"];
    assert_eq!(serving(&load(&directory)), says);
    assert!(begin(&declared).has_finished_another());
    assert_eq!(
        (serving(&load(&directory)), left(directory.path())),
        (says.map(String::from).into(), vec![])
    );
    assert_eq!(fs::read_to_string(&files[1].0).unwrap(), by_hand);
    // An unreadable record is not ignored.
    let record = directory.path().join("nvmfd.toml.saving");
    for text in ["", "{}", "{\"form\": 3, \"files\": []}"] {
        fs::write(&record, text).unwrap();
        let said = EffectiveConfig::load_with(declared.file(), None).unwrap_err().to_string();
        assert!(said.contains("its record is lost: cannot read"), "{said}");
        assert!(Saving::begin(declared.file()).is_err());
    }
}

#[test]
fn new_files_are_synced_before_the_save_record_and_renamed_after_it() {
    const D_SYNCED: &str = "sync .d.toml.saving";
    const RECORD_SYNCED: &str = "sync .nvmfd.toml.saving.saving";
    const RECORD: &str = "rename to nvmfd.toml.saving";
    let (directory, declared, _) = stage_three();
    let changed = declared.with(&[add_listener(9, 9)], AT).unwrap();
    let new = merged(&declared.sources, changed.changes()).unwrap();
    let saving = begin(&declared);
    let (written, calls) =
        crate::blockdev::durable::testing::calls(|| saving.write(&declared.sources, &new));
    written.unwrap();
    let directory = format!("sync directory {}", directory.path().file_name().unwrap().display());
    let included = "sync directory conf.d";
    let all = [
        ["write .c.toml.saving", "sync .c.toml.saving", "write .d.toml.saving", D_SYNCED],
        ["write .nvmfd.toml.saving", "sync .nvmfd.toml.saving", &directory, included],
        ["write .nvmfd.toml.saving.saving", RECORD_SYNCED, RECORD, &directory],
        ["rename to c.toml", "rename to d.toml", "rename to nvmfd.toml", &directory],
        [included, "remove nvmfd.toml.saving", &directory, ""],
    ];
    let all = all.iter().flatten().filter(|call| !call.is_empty());
    assert!(calls.iter().eq(all), "{calls:#?}");
}

#[test]
fn a_save_preserves_file_modes_and_writes_all_files_or_none() {
    use std::os::unix::fs::PermissionsExt;
    let (directory, declared, files) = stage_three();
    let changed = declared.with(&swapped(), AT).unwrap();
    let new = merged(&declared.sources, changed.changes()).unwrap();
    let last = &files[2].0;
    fs::set_permissions(last, fs::Permissions::from_mode(0o640)).unwrap();
    // Directories in place of a new text, and of the record.
    for way in [last, &directory.path().join("nvmfd.toml.saving")].map(|file| waiting(file)) {
        fs::create_dir(&way).unwrap();
        let saving = begin(&declared);
        let said = saving.write(&declared.sources, &new).unwrap_err();
        assert!(said.contains("cannot write") && !said.contains("in force"), "{said}");
        drop(saving);
        files.iter().for_each(|(file, old)| assert_eq!(fs::read_to_string(file).unwrap(), *old));
        assert!(left(directory.path()).is_empty(), "nothing is left behind");
        fs::remove_dir(&way).unwrap();
    }
    let link = directory.path().join("conf.d/c.toml");
    let elsewhere = directory.path().join("elsewhere");
    fs::rename(&link, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    begin(&declared).write(&declared.sources, &new).unwrap();
    assert_eq!(ConfigFiles::read(declared.file()).unwrap(), new);
    assert_eq!(fs::metadata(last).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink(), "a link stays a link");
}

/// An administrator drafts `nvmfd.toml.new`.
#[test]
fn a_save_changes_no_other_files_beside_the_configuration() {
    let (directory, declared, files) = stage_three();
    let changed = declared.with(&swapped(), AT).unwrap();
    let new = merged(&declared.sources, changed.changes()).unwrap();
    for (file, _) in &files {
        fs::write(beside(file, ".new"), "draft").unwrap();
    }
    begin(&declared).write(&declared.sources, &new).unwrap();
    assert_eq!(ConfigFiles::read(declared.file()).unwrap(), new);
    let left = left(directory.path());
    assert_eq!(left.len(), files.len(), "{left:?}");
    left.iter().for_each(|file| assert_eq!(fs::read_to_string(file).unwrap(), "draft"));
}

/// Any user may lock a directory that he may list.
#[test]
fn a_lock_on_the_directory_of_the_configuration_prevents_no_save() {
    use std::os::unix::fs::PermissionsExt;

    let (directory, declared, _) = stage_three();
    let foreign = fs::File::open(directory.path()).unwrap();
    foreign.try_lock().unwrap();
    let first = Saving::begin(declared.file()).unwrap();
    assert!(Saving::begin(declared.file()).unwrap_err().contains("another save is in progress"));
    let [lock] = &left(directory.path())[..] else { panic!("one file") };
    assert_eq!(fs::metadata(lock).unwrap().permissions().mode() & 0o777, 0o600);
    drop(first);
    assert_eq!(left(directory.path()), Vec::<PathBuf>::new());
    drop(begin(&declared));
}

/// The daemon may have been upgraded meanwhile.
#[test]
fn a_save_interrupted_in_the_former_version_is_completed() {
    let (directory, declared, _) = stage_three();
    let changed = declared.with(&swapped(), AT).unwrap();
    let new = merged(&declared.sources, changed.changes()).unwrap();
    assert!(begin(&declared).commit(&declared.sources, &new).unwrap());
    // As that version has left it.
    let record = directory.path().join("nvmfd.toml.saving");
    let text = fs::read_to_string(&record).unwrap();
    assert!(text.contains("\"form\": 2,"), "{text}");
    fs::write(&record, text.replace("\"form\": 2,", "\"form\": 1,")).unwrap();
    for source in declared.sources.rewritten(&new) {
        fs::rename(waiting(source.file), beside(source.file, ".new")).unwrap();
    }
    assert!(ConfigFiles::read(declared.file()).unwrap().iter().eq(new.iter()));
    assert!(begin(&declared).has_finished_another());
    assert_eq!(ConfigFiles::read(declared.file()).unwrap(), new);
    assert!(left(directory.path()).is_empty());
}

#[test]
fn half_saved_files_load_with_all_changes() {
    let (_directory, declared, files) = stage_three();
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
fn changes_of_a_listener_follow_it_when_others_are_added() {
    let at = |id: u16, last: u8| format!("127.0.0.{last}:4420 (id {id})");
    let serving = |declared: &EffectiveConfig| -> Vec<String> {
        declared.config().listeners.iter().map(ToString::to_string).collect()
    };
    // A removed listener stays removed, and a new one serves.
    let (directory, declared, _) = stage_three();
    let gone = declared.with(&[Change::RemoveListener { id: 2 }], AT).unwrap();
    gone.keep().unwrap();
    come(&directory);
    for found in [load(&directory), gone.reload().unwrap()] {
        assert_eq!(serving(&found), [at(1, 1), at(2, 6), at(4, 8)]);
        assert!(found.changes().set_aside.is_empty());
    }
    save(&load(&directory));

    // Also if it was changed more than once, including its address.
    let (directory, declared, _) = stage_three();
    let moved = Change::SetListener { id: 2, settings: settings(json!({"port": 4421})) };
    let ana = Change::SetAna { listener: 2, group: None, state: "change".to_owned() };
    let next = declared.with(&[moved, ana], AT).unwrap();
    next.keep().unwrap();
    come(&directory);
    let found = load(&directory);
    let changed = "127.0.0.7:4421 (id 3), all groups change".to_owned();
    assert_eq!(serving(&found), [at(1, 1), at(2, 6), changed, at(4, 8)]);
    fs::remove_file(directory.path().join("conf.d/a.toml")).unwrap();
    assert_eq!(found.reload().unwrap().config(), next.config());
    // The files contain the change now.
    let text = fs::read_to_string(directory.path().join("conf.d/c.toml")).unwrap();
    let by_hand = text.replace("[[sub", "port = 4421\nana = \"change\"\n[[sub");
    fs::write(directory.path().join("conf.d/c.toml"), by_hand).unwrap();
    assert_eq!(load(&directory).changes(), &Changes::default());

    // When it is removed, the listener that now has its number is not affected.
    come(&directory);
    fs::remove_file(directory.path().join("conf.d/c.toml")).unwrap();
    let found = load(&directory);
    assert_eq!(serving(&found), [at(1, 1), at(2, 6), at(3, 8)]);
    let [moved, ana] = &found.changes().set_aside[..] else { panic!("{:?}", found.changes()) };
    let why = "listener 2 was 127.0.0.7:4420 when that was changed, and is 127.0.0.6:4420 now";
    assert_eq!(moved.why, why);
    assert_eq!(ana.why, why.replace("7:4420", "7:4421"));
}

/// Adds a file with a listener whose position is before most others.
fn come(directory: &TempDir) {
    let text = "[[listener]]\naddress = \"127.0.0.6\"\n";
    fs::write(directory.path().join("conf.d/a.toml"), text).unwrap();
}

/// The addresses of the listeners of a subsystem.
fn offered(declared: &EffectiveConfig, nqn: &str) -> Vec<String> {
    let config = declared.config();
    let subsystem = config.subsystems.iter().find(|each| each.nqn.as_str() == nqn).unwrap();
    let listeners = config.listeners.iter().filter(|l| subsystem.offer.listeners.contains(&l.id));
    listeners.map(|listener| listener.address.to_string()).collect()
}

#[test]
fn listeners_of_a_subsystem_stay_the_same_when_others_are_added() {
    let (directory, declared, files) = stage_three();
    let b = "nqn.2026-11.io.nvmfd:new";
    let listed = settings(json!({"listeners": [3], "allow_any_host": true}));
    let added = Change::AddSubsystem { nqn: b.to_owned(), settings: listed };
    let next = declared.with(&[offer(D, &[2, 3]), added], AT).unwrap();
    next.keep().unwrap();
    come(&directory);
    for found in [load(&directory), next.reload().unwrap()] {
        assert_eq!(offered(&found, D), ["127.0.0.7:4420", "127.0.0.8:4420"]);
        assert_eq!(offered(&found, b), ["127.0.0.8:4420"]);
        assert!(found.changes().set_aside.is_empty());
        // It is unchanged after it was persisted again.
        found.keep().unwrap();
        assert_eq!(load(&directory).config(), found.config());
    }
    // A change that the files contain is dropped.
    for Source { file, text } in load(&directory).sources.iter() {
        fs::write(file.as_ref().unwrap(), text).unwrap();
    }
    assert_eq!(load(&directory).changes(), &Changes::default());

    // Another listener that has the number of a removed one does not replace it.
    files.iter().for_each(|(file, text)| fs::write(file, text).unwrap());
    next.keep().unwrap();
    fs::remove_file(directory.path().join("conf.d/c.toml")).unwrap();
    let found = load(&directory);
    assert_eq!(offered(&found, D), [""; 0]);
    assert_eq!(offered(&found, b), ["127.0.0.8:4420"]);
    let [aside] = &found.changes().set_aside[..] else { panic!("{:?}", found.changes()) };
    let why = "listener 2 was 127.0.0.7:4420 when that was changed, and is 127.0.0.6:4420 now";
    assert_eq!((&aside.kept.change, aside.why.as_str()), (&offer(D, &[2, 3]), why));
}

#[test]
fn swapped_listeners_stay_the_same_when_others_are_added() {
    let (directory, declared, _) = stage_three();
    let next = declared.with(&swapped(), AT).unwrap();
    next.keep().unwrap();
    come(&directory);
    let found = load(&directory);
    assert!(found.changes().set_aside.is_empty(), "{:?}", found.changes());
    let serving = found.config().listeners.iter().map(|l| l.address.ip().to_string());
    let says = ["127.0.0.1", "127.0.0.6", "127.0.0.8", "127.0.0.7"];
    assert_eq!(serving.collect::<Vec<_>>(), says);
    save(&found);
}

#[test]
fn listener_changes_of_an_older_version_are_read() {
    let (directory, declared, _) = stage_three();
    declared.with(&[Change::RemoveListener { id: 2 }], AT).unwrap().keep().unwrap();
    let journal = directory.path().join("changes.json");
    let mut kept: serde_json::Value = serde_json::from_slice(&fs::read(&journal).unwrap()).unwrap();
    let was = kept["kept"][0].as_object_mut().unwrap().remove("listener");
    assert_eq!(was, Some(json!("127.0.0.7:4420")));
    let form = kept.as_object_mut().unwrap().insert("form".to_owned(), json!(1));
    assert_eq!(
        (form, kept.as_object_mut().unwrap().remove("crc32").is_some()),
        (Some(json!(2)), true)
    );
    fs::write(&journal, kept.to_string()).unwrap();
    let found = load(&directory);
    assert_eq!(found.config().listeners.iter().map(|each| each.id).collect::<Vec<_>>(), [1, 3]);
}
