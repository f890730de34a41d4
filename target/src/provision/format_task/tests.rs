use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use tempfile::{TempDir, tempdir};

use super::super::Transition;
use crate::blockdev::BlockSizes;
use crate::blockdev::crash_point::testing::{kill_before, killed_process, run_killed};
use crate::blockdev::monitor::DeviceMonitor;
use crate::config::Config;
use crate::core::message::ReactorRings;
use crate::core::sched::offload::OpenConnection;
use crate::core::subsystem::Subsystem;
use crate::core::subsystem::bad_blocks::Change;
use crate::core::subsystem::power::PowerMeter;
use crate::core::subsystem::reservation::HostId;
use crate::core::subsystem::reservation::testing::{acquired, clear, registered, reserve};
use crate::error::Fatal;
use crate::provision::devices::DeviceTable;
use crate::provision::format_task::*;
use crate::provision::ns_catalog::Catalogs;
use crate::state::usage::UsageStore;
use crate::worker::Workers;

const NQN: &str = "nqn.2026-11.io.nvmfd:a";
const BYTES: usize = 64 << 10;
/// The host identifier of the host that formats.
const HOST_ID: HostId = [1; 16];

pub(in crate::provision) fn nqn() -> Nqn {
    NQN.parse().unwrap()
}

pub(in crate::provision) fn config(directory: &Path, block_size: u32, more: &str) -> Config {
    config_of(directory, BYTES, block_size, more)
}

fn config_of(directory: &Path, bytes: usize, block_size: u32, more: &str) -> Config {
    let text = format!(
        "state_directory = {directory:?}\n[[listener]]\naddress = \"192.0.2.1\"\n[[subsystem]]\n\
         nqn = \"{NQN}\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\n\
         path = {:?}\nsize = {bytes}\nblock_size = {block_size}\n{more}",
        directory.join("disk.img")
    );
    Config::parse(&text).unwrap()
}

/// A provisioner without a reactor, and the lines that it reported.
pub(in crate::provision) fn provisioner(config: &Config) -> (Mutex<Provisioner>, Vec<String>) {
    let registry = Arc::new(Registry::new(Vec::new(), 8, 1 << 20));
    let shared = Arc::new(Shared::new(registry, Workers::default(), SystemTime::now));
    let monitor = Arc::new(DeviceMonitor::start(ReactorRings(Vec::new()), Arc::default()).unwrap());
    let stores = DeviceTable::new(config.state_directory.clone(), 0);
    let next = patiently(|| Transition::open(config, &stores, &Catalogs::new()));
    let usage_store = Arc::new(UsageStore::open(None, PowerMeter::default()));
    let mut provisioner =
        Provisioner::new(config.clone(), stores, shared, monitor, usage_store, false);
    provisioner.attach_new(&next).unwrap();
    let told = provisioner.adopt(next, Vec::new());
    (Mutex::new(provisioner), told)
}

/// The lock of a file that was just closed may not be released yet.
fn patiently(open: impl Fn() -> Result<Transition, Fatal>) -> Transition {
    let is_held = |why: &str| why.contains("a lock on it is held");
    loop {
        match open() {
            Ok(next) if next.stores.pending().iter().any(|each| is_held(&each.why)) => {}
            Ok(next) => return next,
            Err(why) => assert!(is_held(&why.0), "{why}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Closes all devices and the provisioner.
fn close(provisioner: Mutex<Provisioner>) {
    let monitor = Arc::clone(&lock(&provisioner).monitor);
    monitor.stop(Instant::now() + Duration::from_secs(60));
}

/// Applies another configuration.
fn reload(provisioner: &Mutex<Provisioner>, config: Config) -> Result<Vec<String>, String> {
    let mut provisioner = lock(provisioner);
    let next = provisioner.next(&config).map_err(|fatal| fatal.0)?.unwrap();
    provisioner.attach_new(&next).unwrap();
    provisioner.set_config(config);
    Ok(provisioner.adopt(next, Vec::new()))
}

fn format_to(provisioner: &Mutex<Provisioner>, block_size_bytes: u32) -> Result<(), u16> {
    let shared = Arc::clone(&lock(provisioner).shared);
    let request = FormatRequest { nsid: 1, block_size_bytes, cntlid: 1, host_id: HOST_ID };
    let open = OpenConnection::default();
    let outcome = execute(nqn(), request, &open.watch(), provisioner, &shared);
    outcome.map_err(|status| status.code())
}

/// Stalls the I/O of the device from now on.
fn stall(directory: &Path, provisioner: &Mutex<Provisioner>) {
    let stalling = config(directory, 4096, "allow_format = true\nfault = \"stall\"\n");
    reload(provisioner, stalling).unwrap();
}

/// Waits for a format to begin.
fn until_begun(provisioner: &Mutex<Provisioner>) {
    while !shape(provisioner).2 {
        std::thread::yield_now();
    }
}

fn served(provisioner: &Mutex<Provisioner>) -> Arc<Subsystem> {
    lock(provisioner).registry.subsystem(&nqn()).unwrap()
}

/// Block size in bytes, number of blocks, and whether the namespace is being formatted.
fn shape(provisioner: &Mutex<Provisioner>) -> (u32, u64, bool) {
    let subsystem = served(provisioner);
    let n = subsystem.namespace(1).unwrap();
    (n.block_bytes(), n.blocks, n.formatting.is_some())
}

fn fill(directory: &Path, byte: u8) {
    use std::os::unix::fs::FileExt;
    let file = fs::File::options().write(true).open(directory.join("disk.img")).unwrap();
    file.write_all_at(&vec![byte; BYTES], 0).unwrap();
    file.sync_all().unwrap();
}

fn contents(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("disk.img")).unwrap()
}

fn granted(block_size: u32) -> (TempDir, Mutex<Provisioner>) {
    let directory = tempdir().unwrap();
    let (provisioner, told) =
        provisioner(&config(directory.path(), block_size, "allow_format = true\n"));
    assert_eq!(told, Vec::<String>::new());
    (directory, provisioner)
}

#[test]
fn a_formatted_block_size_is_effective_and_survives_a_restart() {
    let (directory, one) = granted(4096);
    fill(directory.path(), 0xA5);
    assert_eq!(shape(&one), (4096, 16, false));
    assert_eq!(format_to(&one, 512), Ok(()));
    assert_eq!(shape(&one), (512, 128, false));
    assert!(contents(directory.path()) == vec![0; BYTES], "all of it is erased");
    // Any other change of the configuration retains the block size that the host has chosen.
    let more = "allow_format = true\n[[subsystem.namespace]]\nnsid = 2\nkind = \"null\"\nsize = \"1MiB\"\n";
    assert_eq!(reload(&one, config(directory.path(), 4096, more)), Ok(Vec::new()));
    assert_eq!(shape(&one), (512, 128, false));
    // Also if the configured size changes, which is reported, or if formats are no longer allowed.
    assert_eq!(reload(&one, config(directory.path(), 512, "")), Ok(Vec::new()));
    let told = reload(&one, config(directory.path(), 4096, "")).unwrap();
    assert!(told.len() == 1 && told[0].contains("not heeded"), "{told:?}");
    assert_eq!(shape(&one), (512, 128, false));
    assert_eq!(format_to(&one, 4096), Err(0x015));
    close(one);
    let (two, told) = provisioner(&config(directory.path(), 4096, ""));
    assert!(told.len() == 1 && told[0].contains("blocks of 512 bytes"), "{told:?}");
    assert_eq!(shape(&two), (512, 128, false));
    assert_eq!(
        reload(&two, config(directory.path(), 4096, "allow_format = true\n")),
        Ok(Vec::new())
    );
    assert_eq!(format_to(&two, 4096), Ok(()));
    close(two);
    let (three, told) = provisioner(&config(directory.path(), 4096, ""));
    assert_eq!((shape(&three), told), ((4096, 16, false), Vec::new()));
}

#[test]
fn a_uuid_change_preserves_the_block_size_or_is_refused() {
    const OTHER: &str = "uuid = \"00000000-0000-4000-8000-000000000001\"\n";
    const THIRD: &str = "uuid = \"00000000-0000-4000-8000-000000000002\"\n";
    let with = |directory: &Path, block_size: u32, uuid: &str| {
        config(directory, block_size, &format!("allow_format = true\n{uuid}"))
    };
    let directory = tempdir().unwrap();
    let at = directory.path();
    let (one, _) = provisioner(&with(at, 4096, OTHER));
    // While it is served its UUID cannot change, whether a block size was chosen or not.
    for block_size in [4096, 512] {
        assert_eq!(format_to(&one, block_size), Ok(()));
        for uuid in ["", THIRD] {
            let refused = reload(&one, with(at, 4096, uuid)).unwrap_err();
            assert!(refused.contains("is in use as") && refused.contains("uuid = "), "{refused}");
        }
    }
    assert_eq!(shape(&one), (512, 128, false));
    close(one);
    let (two, _) = provisioner(&with(at, 4096, OTHER));
    assert_eq!(shape(&two), (512, 128, false));
    close(two);
    // A start detects the conflict as well, under any UUID.
    let open = |config: &Config| {
        let stores = DeviceTable::new(config.state_directory.clone(), 0);
        let next = Transition::open(config, &stores, &Catalogs::new()).map_err(|fatal| fatal.0)?;
        next.stores
            .pending()
            .iter()
            .find(|each| each.is_held)
            .map_or(Ok(()), |it| Err(it.why.clone()))
    };
    let refused = open(&with(at, 4096, THIRD)).unwrap_err();
    assert!(refused.contains("blocks of 512 bytes") && refused.contains("uuid = "), "{refused}");
    std::os::unix::fs::symlink(at, at.join("link")).unwrap();
    let mut linked = with(at, 4096, "");
    let crate::config::NamespaceKind::File { path, .. } =
        &mut linked.subsystems[0].namespaces[0].kind
    else {
        panic!()
    };
    *path = at.join("link/disk.img");
    assert!(open(&linked).unwrap_err().contains("blocks of 512 bytes"));
    let (three, _) = provisioner(&with(at, 512, THIRD));
    assert_eq!(shape(&three), (512, 128, false));
}

#[test]
fn a_format_to_the_same_block_size_erases_but_records_nothing() {
    let (directory, provisioner) = granted(512);
    fill(directory.path(), 0xA5);
    assert_eq!(format_to(&provisioner, 512), Ok(()));
    assert!(contents(directory.path()) == vec![0; BYTES]);
    let kept = fs::read_dir(directory.path()).unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.ends_with(".namespace").then_some(name)
    });
    assert_eq!(kept.collect::<Vec<_>>(), Vec::<String>::new());
}

/// Its host has given up, and may have written since by another connection.
#[test]
fn a_format_that_begins_after_its_connection_has_closed_erases_nothing() {
    let (directory, provisioner) = granted(4096);
    fill(directory.path(), 0xA5);
    let shared = Arc::clone(&lock(&provisioner).shared);
    let request = FormatRequest { nsid: 1, block_size_bytes: 4096, cntlid: 1, host_id: HOST_ID };
    let closed = OpenConnection::default().watch();
    let outcome = execute(nqn(), request, &closed, &provisioner, &shared);
    assert_eq!(outcome, Err(Status::ABORTED_SQ_DELETION));
    assert!(contents(directory.path()) == vec![0xA5; BYTES]);
}

#[test]
fn a_refused_format_changes_nothing() {
    let (directory, provisioner) = granted(4096);
    fill(directory.path(), 0xA5);
    assert_eq!(format_to(&provisioner, 1024), Err(0x10A));
    let store = lock(&provisioner).stores.store(nqn(), 1).unwrap().clone();
    let other = store.format.begin().unwrap();
    assert_eq!(format_to(&provisioner, 512), Err(0x084), "one at a time");
    drop(other);
    let again = reload(
        &provisioner,
        config(directory.path(), 4096, "allow_format = true\nread_only = true\n"),
    );
    assert!(again.is_err(), "not at once");
    store.format.end();
    store.protection.change(nvme::feature::WriteProtectState::PROTECTED).unwrap();
    assert_eq!(format_to(&provisioner, 512), Err(0x020));
    assert_eq!(shape(&provisioner), (4096, 16, false));
    assert!(contents(directory.path()) == vec![0xA5; BYTES]);
    assert_eq!(reload(&provisioner, config(directory.path(), 4096, "")), Ok(Vec::new()));
    assert_eq!(format_to(&provisioner, 512), Err(0x015));
}

/// The request has waited for the lock of the provisioner: the state after the wait applies.
#[test]
fn a_format_and_a_reservation_exclude_each_other() {
    let (directory, provisioner) = granted(4096);
    fill(directory.path(), 0xA5);
    let store = lock(&provisioner).stores.store(nqn(), 1).unwrap().clone();
    reserve(&store.reservation, [2; 16]);
    assert_eq!(format_to(&provisioner, 512), Err(0x083));
    assert_eq!(shape(&provisioner), (4096, 16, false));
    assert!(contents(directory.path()) == vec![0xA5; BYTES]);
    clear(&store.reservation, [2; 16]);
    store.reservation.carry_out(&[2; 16], &registered()).unwrap();
    // Nor during the erase: a reservation request may be pending at the state worker already.
    stall(directory.path(), &provisioner);
    std::thread::scope(|scope| {
        let formats = scope.spawn(|| format_to(&provisioner, 512));
        until_begun(&provisioner);
        let progress = store.format.under_way().unwrap();
        while progress.wait_until_idle(Duration::ZERO) {
            std::thread::yield_now();
        }
        let taken = store.reservation.carry_out(&[2; 16], &acquired());
        assert_eq!(taken, Err(Status::FORMAT_IN_PROGRESS));
        store.monitored.health().set_fault(crate::blockdev::InjectedFault::None);
        formats.join().unwrap().unwrap();
    });
}

/// The new backing store was not erased, so the blocks marked by hosts stay unreadable.
#[test]
fn a_device_replaced_during_a_format_retains_its_bad_blocks() {
    let (directory, provisioner) = granted(4096);
    fill(directory.path(), 0xA5);
    let store = lock(&provisioner).stores.store(nqn(), 1).unwrap().clone();
    let mark = Change::Mark { at: 4096, len: 4096, most_bytes: 1 << 20 };
    store.marks.change(&mark).unwrap();
    stall(directory.path(), &provisioner);
    std::thread::scope(|scope| {
        let formats = scope.spawn(|| format_to(&provisioner, 512));
        until_begun(&provisioner);
        let monitor = Arc::clone(&lock(&provisioner).monitor);
        let before = store.monitored.backing();
        before.fail_sync(nvme::Status::WRITE_FAULT);
        assert_eq!(monitor.trust(&store.monitored, || ()), Ok(()));
        assert!(!Arc::ptr_eq(&before, &store.monitored.backing()));
        store.monitored.health().set_fault(crate::blockdev::InjectedFault::None);
        // The format detects the replaced backing store or, before that, the failed sync.
        let failed = formats.join().unwrap().unwrap_err();
        let expected = [Health::NOT_READY, nvme::Status::WRITE_FAULT].map(nvme::Status::code);
        assert!(expected.contains(&failed), "{failed:x}");
    });
    assert_eq!(store.marks.first(0, BYTES as u64), Some(4096));
    assert_eq!(shape(&provisioner), (4096, 16, false));
    assert_eq!(format_to(&provisioner, 512), Ok(()));
    assert!(store.marks.is_empty());
}

/// Blocks beyond the end are not erased, and may belong to the namespace again.
#[test]
fn a_format_preserves_blocks_beyond_the_end_of_the_namespace() {
    let (directory, provisioner) = granted(4096);
    fill(directory.path(), 0xA5);
    let store = lock(&provisioner).stores.store(nqn(), 1).unwrap().clone();
    let behind = BYTES / 2;
    for at in [4096, behind as u64] {
        let mark = Change::Mark { at, len: 4096, most_bytes: 1 << 20 };
        store.marks.change(&mark).unwrap();
    }
    let smaller = config_of(directory.path(), behind, 4096, "allow_format = true\n");
    reload(&provisioner, smaller).unwrap();
    assert_eq!(format_to(&provisioner, 4096), Ok(()));
    assert_eq!(store.marks.first(0, BYTES as u64), Some(behind as u64));
    let contents = contents(directory.path());
    assert!(contents[..behind].iter().all(|byte| *byte == 0));
    assert!(contents[behind..].iter().all(|byte| *byte == 0xA5));
}

#[test]
fn a_failed_format_preserves_the_block_size_and_can_be_retried() {
    let (directory, provisioner) = granted(4096);
    let with = |fault: &str| {
        config(directory.path(), 4096, &format!("allow_format = true\nfault = \"{fault}\"\n"))
    };
    for (fault, code) in [("error", 0x280), ("full", 0x081)] {
        reload(&provisioner, with(fault)).unwrap();
        assert_eq!(format_to(&provisioner, 512), Err(code));
        assert_eq!(shape(&provisioner), (4096, 16, false));
    }
    reload(&provisioner, with("none")).unwrap();
    assert_eq!(format_to(&provisioner, 512), Ok(()));
    assert_eq!(shape(&provisioner), (512, 128, false));
}

/// As with a Flush: the failure is persisted before it is reported, so the next daemon knows it.
#[test]
fn a_failed_format_sync_is_persisted_until_the_device_is_trusted() {
    let (directory, first) = granted(4096);
    let with = |fault: &str| {
        config(directory.path(), 4096, &format!("allow_format = true\nfault = \"{fault}\"\n"))
    };
    let kept = || {
        let mut paths = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
        let is_of_namespace = |path: &PathBuf| path.extension().is_some_and(|it| it == "namespace");
        let path = paths.find(is_of_namespace);
        path.is_some_and(|path| fs::read_to_string(path).unwrap().contains("[trust]"))
    };
    reload(&first, with("sync")).unwrap();
    assert_eq!(format_to(&first, 512), Err(0x280));
    assert!(kept(), "it was told before");
    reload(&first, with("none")).unwrap();
    assert_eq!(format_to(&first, 512), Err(0x280), "a reload forgives nothing");
    close(first);
    let (next, _) = provisioner(&with("none"));
    assert_eq!(format_to(&next, 512), Err(0x280), "nor does a restart");
    assert_eq!(shape(&next), (4096, 16, false));
    let store = lock(&next).stores.store(nqn(), 1).unwrap().clone();
    let monitor = Arc::clone(&lock(&next).monitor);
    assert_eq!(monitor.trust(&store.monitored, || ()), Ok(()));
    assert!(!kept());
    assert_eq!(format_to(&next, 512), Ok(()));
    assert_eq!(shape(&next), (512, 128, false));
}

#[test]
fn a_format_reports_progress_and_allows_reloads() {
    let (directory, provisioner) = granted(4096);
    let with = |more: &str| config(directory.path(), 4096, &format!("allow_format = true\n{more}"));
    reload(&provisioner, with("fault = \"stall\"\n")).unwrap();
    std::thread::scope(|scope| {
        let formats = scope.spawn(|| format_to(&provisioner, 512));
        while shape(&provisioner) != (4096, 16, true) {
            std::thread::yield_now();
        }
        let subsystem = served(&provisioner);
        let namespace = subsystem.namespace(1).unwrap();
        assert_eq!(namespace.formatting.as_ref().unwrap().left_percent(), 100);
        let text = format!("size = {BYTES}");
        let larger =
            Config::parse(&fs_text(directory.path()).replace(&text, "size = 131072")).unwrap();
        let file = fs::File::options().write(true).open(directory.path().join("disk.img")).unwrap();
        file.set_len(131_072).unwrap();
        let refused = reload(&provisioner, larger).unwrap_err();
        assert!(refused.contains("is being formatted"), "{refused}");
        file.set_len(BYTES as u64).unwrap();
        reload(&provisioner, with("")).unwrap();
        assert_eq!(formats.join().unwrap(), Ok(()));
    });
    assert_eq!(shape(&provisioner), (512, 128, false));
    // In the other case it is removed meanwhile, and blocks not reached by then are kept.
    fill(directory.path(), 0xA5);
    reload(&provisioner, with("fault = \"stall\"\n")).unwrap();
    std::thread::scope(|scope| {
        let formats = scope.spawn(|| format_to(&provisioner, 4096));
        until_begun(&provisioner);
        let store = lock(&provisioner).stores.store(nqn(), 1).unwrap().clone();
        let progress = store.format.under_way().unwrap();
        let mut without = with("");
        without.subsystems[0].namespaces.clear();
        reload(&provisioner, without).unwrap();
        assert!(progress.is_stopped() && progress.wait_until_idle(Duration::ZERO));
        store.monitored.health().set_fault(crate::blockdev::InjectedFault::None);
        assert_eq!(formats.join().unwrap(), Err(0x00B));
    });
    assert!(served(&provisioner).namespaces.is_empty());
    assert!(contents(directory.path()) == vec![0xA5; BYTES], "it went on after the removal");
}

#[test]
fn a_shutdown_does_not_wait_for_a_format() {
    let (directory, provisioner) = granted(4096);
    fill(directory.path(), 0xA5);
    stall(directory.path(), &provisioner);
    std::thread::scope(|scope| {
        let formats = scope.spawn(|| format_to(&provisioner, 512));
        until_begun(&provisioner);
        lock(&provisioner).registry.halt();
        assert_eq!(formats.join().unwrap(), Err(0x021), "although the store stalls");
    });
    assert_eq!(shape(&provisioner), (4096, 16, false));
    assert!(contents(directory.path()) == vec![0xA5; BYTES]);
}

/// The text of a configuration whose device stalls.
fn fs_text(directory: &Path) -> String {
    format!(
        "state_directory = {directory:?}\n[[listener]]\naddress = \"192.0.2.1\"\n[[subsystem]]\n\
         nqn = \"{NQN}\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\n\
         path = {:?}\nsize = {BYTES}\nblock_size = 4096\nallow_format = true\nfault = \"stall\"\n",
        directory.join("disk.img")
    )
}

#[test]
fn formats_are_offered_only_if_granted_and_persistable() {
    let directory = tempdir().unwrap();
    let formats = |more: &str, place: bool| {
        let mut config = config(directory.path(), 4096, more);
        config.state_directory = config.state_directory.filter(|_| place);
        let (provisioner, _) = provisioner(&config);
        let formats = served(&provisioner).namespace(1).unwrap().formats;
        close(provisioner);
        formats
    };
    assert_eq!(formats("allow_format = true\n", true), BlockSizes::those(|_| true));
    assert_eq!(formats("allow_format = true\n", false), BlockSizes::only(12));
    assert_eq!(formats("", true), BlockSizes::only(12));
}

/// The process that is killed.
const OWN: &str = "provision::format_task::tests::child_process_killed_between_two_steps";
const ORDERS: u32 = 12;

/// The block size after this number of formats.
fn size_after(orders: usize) -> u32 {
    if orders.is_multiple_of(2) { 4096 } else { 512 }
}

/// Not a test by itself. Fills the namespace and formats it, repeatedly.
#[test]
#[ignore = "run by another test, in a process that is killed"]
fn child_process_killed_between_two_steps() {
    let (directory, steps) = killed_process();
    let (provisioner, _) = provisioner(&config(&directory, 4096, "allow_format = true\n"));
    for index in 0..ORDERS {
        fill(&directory, size_mark(size_after(index as usize)));
        if index == 0 {
            kill_before(steps);
        }
        format_to(&provisioner, size_after(index as usize + 1)).unwrap();
        println!("done {index}");
    }
}

/// The byte that is written into blocks of this size.
fn size_mark(block_size_bytes: u32) -> u8 {
    if block_size_bytes == 4096 { 0x40 } else { 0x51 }
}

#[test]
fn a_kill_during_a_format_leaves_the_old_size_or_zeroed_blocks() {
    let (mut kills, mut before, mut after) = (0, 0, 0);
    for steps in 1.. {
        let directory = tempdir().unwrap();
        let (done, killed) = run_killed(OWN, directory.path(), steps);
        if !killed {
            assert_eq!(done, ORDERS as usize);
            break;
        }
        kills += 1;
        let (provisioner, _) = provisioner(&config(directory.path(), 4096, ""));
        let (size, ..) = shape(&provisioner);
        let (old, new) = (size_after(done), size_after(done + 1));
        let found = contents(directory.path());
        match size {
            _ if size == old => {
                before += 1;
                let mark = size_mark(old);
                assert!(found.iter().all(|byte| [0, mark].contains(byte)), "step {steps}");
            }
            _ if size == new => {
                after += 1;
                assert!(found == vec![0; BYTES], "killed at step {steps}: data of another size");
            }
            _ => panic!("killed at step {steps}, after {done} formats: blocks of {size}"),
        }
    }
    println!("{kills} kills: {before} found the old size, {after} the new one");
    assert!(kills >= 50 && before > 0 && after > 0, "{kills} kills, {before} + {after}");
}
