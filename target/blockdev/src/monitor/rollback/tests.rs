//! Rollbacks on the file system of the tests: complete where it has reflinks, as in the guest with
//! an XFS (`flow-snapshots`), and otherwise refused.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;

use crate::crash_point::testing::{kill_before, killed_process, run_before, run_killed};
use crate::monitor::rollback::*;
use crate::monitor::tests::Bench;

const OLD: u8 = 0x11;
const NEW: u8 = 0x22;

/// A device with the contents `NEW`, and a snapshot of its contents `OLD`, if there are reflinks.
fn with_snapshot() -> Option<(Bench, PathBuf)> {
    prepare(Bench::new())
}

fn prepare(mut bench: Bench) -> Option<(Bench, PathBuf)> {
    bench.write(0, OLD).unwrap();
    bench.flush().unwrap();
    let path = bench.path().with_file_name("snapshot");
    let copy = Reflink::create(&path).unwrap();
    if let Err(error) = copy.copy_device(&bench.device.backing()) {
        assert!(error.sentence.ends_with("has no reflinks"), "{error}");
        return None;
    }
    copy.publish(0o440).unwrap();
    bench.write(0, NEW).unwrap();
    bench.flush().unwrap();
    Some((bench, path))
}

fn names(bench: &Bench) -> Vec<OsString> {
    let all = fs::read_dir(bench.path().parent().unwrap()).unwrap();
    let mut names: Vec<_> = all.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

#[test]
fn a_rollback_serves_the_contents_of_the_snapshot_and_leaves_it_as_it_is() {
    let Some((mut bench, snapshot)) = with_snapshot() else { return };
    fs::set_permissions(bench.path(), fs::Permissions::from_mode(0o640)).unwrap();
    for _ in 0..2 {
        assert_eq!(bench.read(0), Ok(NEW));
        assert_eq!(bench.roll_back(&snapshot), Ok(()));
        assert_eq!((bench.read(0), bench.flush()), (Ok(OLD), Ok(())));
        assert_eq!((bench.write(0, NEW), bench.flush()), (Ok(()), Ok(())));
        assert_eq!(
            (fs::read(&snapshot).unwrap()[0], fs::read(bench.path()).unwrap()[0]),
            (OLD, NEW)
        );
        assert_eq!(names(&bench), ["disk.img", "snapshot"]);
    }
    assert_eq!(fs::metadata(bench.path()).unwrap().mode() & 0o777, 0o640);
}

#[test]
fn a_refused_rollback_changes_nothing() {
    let Some((mut bench, snapshot)) = with_snapshot() else { return };
    let refused = |bench: &mut Bench, path: &Path, why: &str| {
        let error = bench.roll_back(path).unwrap_err();
        assert!(error.sentence.contains(why), "{error}");
        assert_eq!(bench.read(0), Ok(NEW));
    };
    let short = snapshot.with_file_name("short");
    fs::write(&short, "x").unwrap();
    refused(&mut bench, &short, "has 1 bytes, and the namespace has 1048576");
    refused(&mut bench, &snapshot.with_file_name("none"), "cannot open");
    refused(&mut bench, snapshot.parent().unwrap(), "is no file");
    let own = bench.path();
    refused(&mut bench, &own, "in use by a namespace that writes to it");
    let left = own.with_file_name(".disk.img.nvmfd-rollback");
    fs::write(&left, "precious").unwrap();
    refused(&mut bench, &snapshot, "is left of an earlier rollback");
    assert_eq!(fs::read(&left).unwrap(), b"precious");
}

/// To open one for reading waits until another process writes to it.
#[test]
fn a_named_pipe_is_no_snapshot_and_delays_nothing() {
    let mut bench = Bench::new();
    let pipe = bench.path().with_file_name("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
    let error = bench.roll_back(&pipe).unwrap_err();
    assert!(error.sentence.ends_with("is no file"), "{error}");
}

/// A format after the snapshot has changed it: the data would be found at other block addresses.
#[test]
fn a_snapshot_of_another_block_size_is_refused_before_it_is_copied() {
    let mut bench = Bench::new();
    let (own, other) = (bench.device.backing().block_size_bytes(), 4096);
    for (name, block_size_bytes) in [("own", own), ("other", other)] {
        let path = bench.path().with_file_name(name);
        let copy = Reflink::create(&path).unwrap();
        copy.mark_as_snapshot(block_size_bytes);
        copy.publish(0o640).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(bench.device.backing().size_bytes()).unwrap();
        if snapshot_block_size_bytes(&file).is_none() {
            // A file system without extended attributes.
            return;
        }
        let outcome = bench.roll_back(&path).map_err(|error| error.sentence);
        let is_refused = outcome.as_ref().is_err_and(|it| it.contains("has blocks of 4096 bytes"));
        assert_eq!(is_refused, block_size_bytes != own, "{outcome:?}");
    }
}

#[test]
fn a_failed_rollback_restores_the_old_file() {
    let Some((mut bench, snapshot)) = with_snapshot() else { return };
    // The copy is damaged between its directory entry and its service.
    let path = bench.path();
    let damage = move || {
        run_before(3, move || {
            File::options().write(true).open(path).unwrap().set_len(4096).unwrap()
        });
    };
    let error = bench.roll_back_after(&snapshot, damage).unwrap_err();
    assert!(error.sentence.contains("4096"), "{error}");
    assert_eq!((bench.read(0), bench.flush()), (Ok(NEW), Ok(())));
    assert_eq!(fs::read(bench.path()).unwrap()[0], NEW);
    assert_eq!(names(&bench), ["disk.img", "snapshot"]);
    assert_eq!(bench.roll_back(&snapshot), Ok(()));
    assert_eq!(bench.read(0), Ok(OLD));
}

#[test]
fn a_file_is_not_taken_for_replaced_while_it_is_rolled_back() {
    let Some((mut bench, snapshot)) = with_snapshot() else { return };
    let (shared, device) = (Arc::clone(&bench.monitor.shared), Arc::clone(&bench.device));
    // The file and the copy have exchanged their names.
    let look = move || run_before(2, move || shared.look(&device));
    assert_eq!(bench.roll_back_after(&snapshot, look), Ok(()));
    assert_eq!((bench.read(0), bench.device.health().detached()), (Ok(OLD), None));
}

const OWN: &str = "monitor::rollback::tests::a_rollback_process_is_killed_at_a_given_step";

#[test]
#[ignore = "run by another test, in a process that is killed"]
fn a_rollback_process_is_killed_at_a_given_step() {
    let (directory, steps) = killed_process();
    let (mut bench, snapshot) = prepare(Bench::at(&directory)).unwrap();
    bench.roll_back_after(&snapshot, move || kill_before(steps)).unwrap();
}

#[test]
fn a_rollback_killed_at_any_step_leaves_the_old_or_new_contents() {
    if with_snapshot().is_none() {
        return;
    }
    let mut found = Vec::new();
    for steps in 1..=10 {
        let directory = crate::testing::directory();
        let (_, killed) = run_killed(OWN, directory.path(), steps);
        let contents = fs::read(directory.path().join("disk.img")).unwrap();
        assert_eq!(contents.len(), 1 << 20);
        found.push(contents[0]);
        if !killed {
            assert_eq!(found, [NEW, OLD, OLD, OLD]);
            return;
        }
    }
    panic!("it is killed still: {found:?}");
}
