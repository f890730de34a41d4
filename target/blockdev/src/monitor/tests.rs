//! Tests of devices that disappear and return, on real files and a real ring.

mod bench;
mod detached;

use std::fs::{self, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::monitor::*;
use crate::uring::tests::Loop;
use crate::{BackingConfig, BackingKind, BlockDevice, Health, IoRequest};

pub(super) use self::bench::{Bench, SIZE};
use self::bench::{MemoryTrust, STORE, place};

const NOT_READY: Result<u8, Status> = Err(Health::NOT_READY);

#[test]
fn a_shortened_file_is_detected_without_io_and_served_after_trust() {
    let mut bench = Bench::new();
    assert_eq!(bench.write(0, 0x11), Ok(()));
    assert_eq!(bench.write(SIZE - 4096, 0x22), Ok(()));
    assert_eq!(bench.flush(), Ok(()));
    bench.shorten();
    bench.until("it is down", |bench| bench.device.health().is_down());
    assert_eq!((bench.read(0), bench.read(SIZE / 2)), (NOT_READY, NOT_READY));
    assert_eq!(bench.write(SIZE - 4096, 0x33), Err(Health::NOT_READY));
    assert_eq!(bench.flush(), Err(Health::NOT_READY));
    assert_eq!(fs::metadata(bench.path()).unwrap().len(), 8192, "nothing made it long again");
    let file = OpenOptions::new().write(true).open(bench.path()).unwrap();
    let short = bench.trust();
    assert_eq!(short, (Err(Untrusted::Failing("it ends at byte 8192".to_owned())), false));
    file.set_len(SIZE).unwrap();
    bench.until("it was seen", |bench| {
        lock(&bench.device.check).last_reason.contains("is whole again")
    });
    assert!(bench.device.health().is_untrusted());
    assert_eq!((bench.read(0), bench.flush()), (NOT_READY, Err(Health::NOT_READY)));
    assert_eq!(bench.trust(), (Ok(()), true));
    assert_eq!((bench.read(0), bench.read(SIZE - 4096)), (Ok(0x11), Ok(0)));
    assert_eq!((bench.write(0, 0x44), bench.flush()), (Ok(()), Ok(())));
    assert!(bench.pool.is_full());
}

/// As `cp` and `dd` do between two examinations, which find the right length then.
#[test]
fn a_file_that_is_truncated_and_filled_again_is_served_only_after_trust() {
    let records = Arc::new(MemoryTrust::default());
    let of = || records.of(uuid::Uuid::from_u128(1)).shortened;
    let mut bench = Bench::new();
    // Only what is left of it is noticed, and not that the file is opened.
    bench.monitor.shared.events.iter().for_each(FileEvents::stop);
    bench.restart(&records, || {});
    assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
    bench.refill(0x77);
    bench.until("it is recorded", |_| of());
    assert_eq!((bench.read(0), bench.flush()), (NOT_READY, Err(Health::NOT_READY)));
    bench.restart(&records, || {});
    assert!(bench.device.health().is_untrusted());
    assert_eq!((bench.read(0), bench.trust()), (NOT_READY, (Ok(()), true)));
    assert_eq!((bench.read(0), of()), (Ok(0x77), false));
    // It is not trusted for ever.
    bench.refill(0x78);
    bench.until("it is recorded", |_| of());
    assert_eq!(
        (bench.read(0), bench.trust(), bench.read(0)),
        (NOT_READY, (Ok(()), true), Ok(0x78))
    );
    // Just before the stop.
    lock(&bench.device.check).next_check += Duration::from_secs(3600);
    fs::write(bench.path(), vec![0x79; SIZE as usize]).unwrap();
    bench.monitor.report_detached(Instant::now() + Duration::from_secs(30));
    bench.monitor.stop(Instant::now() + Duration::from_secs(30));
    assert!(of());
}

#[test]
fn a_file_that_was_opened_or_closed_is_examined_at_once() {
    let mut bench = Bench::new();
    let is_watched = |bench: &Bench| lock(&bench.device.watch).descriptor.is_some();
    bench.until("it is watched", is_watched);
    let file = OpenOptions::new().write(true).open(bench.path()).unwrap();
    bench.until("it is examined", |bench| !bench.device.touched.load(Ordering::Relaxed));
    bench.postpone();
    file.set_len(0).unwrap();
    file.set_len(SIZE).unwrap();
    drop(file);
    bench.until("it is down", |bench| bench.device.health().is_down());
    assert_eq!(bench.trust(), (Ok(()), true));
    // What is served now has another open file.
    lock(&bench.device.check).next_check = Instant::now();
    bench.until("that is watched", |bench| {
        lock(&bench.device.watch).of.as_ptr() == Arc::as_ptr(&bench.device.backing())
    });
    bench.postpone();
    fs::write(bench.path(), vec![0x77; SIZE as usize]).unwrap();
    bench.until("it is down", |bench| bench.device.health().is_down());
    // The watch of a file that is not served ends with its next event.
    let events = bench.monitor.shared.events.as_ref().unwrap();
    let watches = format!("/proc/self/fdinfo/{}", events.inotify.as_fd().as_raw_fd());
    let has_watches = move || fs::read_to_string(&watches).unwrap().contains("inotify wd");
    assert!(has_watches());
    bench.monitor.remove(&bench.device);
    fs::read(bench.path()).unwrap();
    bench.until("it is not watched", |_| !has_watches());
}

#[test]
fn reads_writes_and_changes_of_size_of_a_served_file_are_no_truncation() {
    let mut bench = Bench::new();
    let file = OpenOptions::new().read(true).write(true).open(bench.path()).unwrap();
    let sound = |bench: &Bench, what: &str| {
        // Twice: the second one finds what the first one has prepared.
        for _ in 0..2 {
            assert_eq!(bench.device.backing().inspect(true), Condition::Sound, "{what}");
        }
    };
    for at in (0..SIZE).step_by(4096) {
        assert_eq!(bench.write(at, 0x11), Ok(()));
    }
    sound(&bench, "writes of hosts");
    assert_eq!(bench.run(IoRequest::Discard { at: 0, len: SIZE }).0, Ok(()));
    sound(&bench, "Deallocate");
    fs::read(bench.path()).unwrap();
    file.write_all_at(&[0x22; 8192], SIZE - 8192).unwrap();
    file.sync_all().unwrap();
    sound(&bench, "another process");
    // A namespace grows after its file, and its file shrinks after the namespace.
    let device = Arc::clone(&bench.device);
    file.set_len(SIZE * 2).unwrap();
    sound(&bench, "a longer file");
    device.resize(SIZE * 2);
    sound(&bench, "a larger namespace");
    device.resize(SIZE);
    file.set_len(SIZE).unwrap();
    sound(&bench, "a smaller namespace");
    device.resize(SIZE / 2 + 512);
    file.set_len(SIZE / 2 + 512).unwrap();
    sound(&bench, "the end within a page");
    // Whoever adds bytes and removes them changes nothing that is served.
    file.set_len(SIZE).unwrap();
    file.set_len(SIZE / 2 + 512).unwrap();
    sound(&bench, "the end as before");
    file.set_len(4096).unwrap();
    file.set_len(SIZE).unwrap();
    assert_eq!(device.backing().inspect(false), Condition::Refilled);
}

/// It cannot be opened again, because this daemon has its lock.
#[test]
#[ignore = "needs root and a loop device"]
fn a_device_that_shrinks_is_not_reported_as_in_use_and_served_with_its_size() {
    let directory = crate::testing::directory();
    let image = fs::File::create(directory.path().join("image")).unwrap();
    image.set_len(SIZE).unwrap();
    let device = Loop::new(&directory.path().join("image"), 512);
    let mut bench = Bench::of(directory.path(), PathBuf::from(&device.0));
    assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
    let resize = |bytes| {
        image.set_len(bytes).unwrap();
        let adopted = std::process::Command::new("losetup").args(["-c", &device.0]).status();
        assert!(adopted.unwrap().success());
    };
    resize(SIZE / 2);
    bench.until("it is down", |bench| bench.device.health().is_down());
    bench.monitor.shared.look(&bench.device);
    let reason = lock(&bench.device.check).last_reason.clone();
    assert!(reason.starts_with("the same device is at its path"), "{reason}");
    resize(SIZE);
    bench.until("it is up", |bench| !bench.device.health().is_down());
    assert_eq!((bench.read(0), bench.flush()), (Ok(0x11), Ok(())));
}

#[test]
fn a_recovered_device_reports_a_sync_failure_for_unsynced_writes() {
    for unsynced in [false, true] {
        let mut bench = Bench::new();
        assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
        if unsynced {
            assert_eq!(bench.write(SIZE - 4096, 0x22), Ok(()));
        }
        bench.device.backing().set_down("is gone for a while");
        bench.until("it is up", |bench| !bench.device.health().is_down());
        let expected = if unsynced { Err(Status::WRITE_FAULT) } else { Ok(()) };
        assert_eq!((bench.flush(), bench.flush()), (expected, expected));
    }
}

#[test]
fn writes_completed_during_replacement_are_lost_with_the_device() {
    let mut bench = Bench::new();
    assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
    bench.late = true;
    bench.replace();
    assert_eq!(bench.flush(), Err(Status::WRITE_FAULT));
}

#[test]
fn late_operations_of_a_lost_device_are_not_executed() {
    let mut bench = Bench::new();
    assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
    bench.device.health().set_fault(crate::InjectedFault::Stall);
    let from = bench.pool.take_data(4096).unwrap();
    BlockDevice::submit(&mut bench.ring, STORE, 0, IoRequest::Write { from, at: 0, fua: false });
    bench.turn();
    bench.shorten();
    bench.until("it is down", |bench| bench.device.health().is_down());
    bench.exchange(SIZE, 0x77);
    assert_eq!(bench.trust(), (Ok(()), true));
    bench.device.health().set_fault(crate::InjectedFault::None);
    let late = loop {
        if let Some(done) = bench.turn().pop() {
            break done;
        }
    };
    assert_eq!(late.outcome, Err(Health::NOT_READY));
    bench.pool.give(late.buf.unwrap());
    assert_eq!((bench.read(0), bench.flush()), (Ok(0x77), Ok(())));
}

#[test]
fn a_flush_in_progress_at_device_loss_confirms_no_data() {
    let mut bench = Bench::new();
    assert_eq!(bench.write(0, 0x11), Ok(()));
    bench.device.health().begin_sync();
    bench.replace();
    assert_eq!(bench.flush(), Err(Status::WRITE_FAULT));
}

#[test]
fn a_replacement_of_a_lost_file_is_served_once_trusted() {
    let mut bench = Bench::new();
    assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
    bench.shorten();
    bench.until("it is down", |bench| bench.device.health().is_down());
    let old = bench.device.backing();
    // A store of another size is not a replacement.
    bench.exchange(SIZE * 2, 0x55);
    let (refused, is_marked) = bench.trust();
    assert!(
        matches!(refused, Err(Untrusted::Failing(why)) if why.contains("2097152")) && !is_marked
    );
    bench.exchange(SIZE, 0x77);
    for _ in 0..3 {
        bench.monitor.shared.look(&bench.device);
        assert!(bench.device.health().is_down() && bench.device.health().is_untrusted());
    }
    assert_eq!((bench.read(0), bench.device.is_trusted()), (NOT_READY, false));
    assert_eq!(bench.trust(), (Ok(()), true));
    assert_eq!((bench.read(0), bench.write(0, 0x78), bench.flush()), (Ok(0x77), Ok(()), Ok(())));
    assert_eq!(Arc::strong_count(&old), 2, "we and the list of those that part");
}

#[test]
fn a_lost_file_is_not_replaced_by_another_without_trust() {
    let bench = Bench::new();
    let gone = bench.device.backing();
    bench.exchange(SIZE, 0x77);
    let refused = gone.open_again(&bench.device.config, false).unwrap_err().to_string();
    assert!(
        refused.contains("is another file") && refused.contains("namespace trust"),
        "{refused}"
    );
}

#[test]
fn a_shortened_file_is_not_served_after_a_restart() {
    let records = Arc::new(MemoryTrust::default());
    let (uuid, place) = (uuid::Uuid::from_u128(1), place());
    records.set(uuid, Distrust { shortened: true, ..Distrust::default() }).unwrap();
    let mut bench = Bench::new();
    bench.monitor.remove(&bench.device);
    let config = bench.device.config.clone();
    let backing = bench.device.backing().renewed(&config).unwrap();
    let device = MonitoredDevice::new(STORE, "namespace 1".to_owned(), config, backing);
    bench.device = Arc::new(device.recorded(place, TrustRecord::new(&records, uuid)));
    bench.monitor.add(Arc::clone(&bench.device));
    bench.until("it was seen", |bench| {
        lock(&bench.device.check).last_reason.contains("is whole again")
    });
    assert_eq!(bench.read(0), NOT_READY);
    assert_eq!(bench.trust(), (Ok(()), true));
    assert_eq!((bench.read(0), records.of(uuid)), (Ok(0), Distrust::default()));
}

#[test]
fn a_timed_out_trust_request_changes_nothing() {
    let mut bench = Bench::new();
    bench.device.backing().fail_sync(Status::WRITE_FAULT);
    let (shared, device) = (Arc::clone(&bench.monitor.shared), Arc::clone(&bench.device));
    let late =
        std::thread::spawn(move || shared.trust(&device, || false, || unreachable!("not in time")));
    bench.until("it has come to nothing", |_| late.is_finished());
    assert_eq!(late.join().unwrap(), Err("it took too long".to_owned()));
    assert_eq!(bench.flush(), Err(Status::WRITE_FAULT));
}

#[test]
fn a_failed_sync_is_recorded_until_the_device_is_trusted() {
    let records = Arc::new(MemoryTrust::default());
    let (uuid, place) = (uuid::Uuid::from_u128(1), place());
    let mut bench = Bench::new();
    let recorded = |bench: &Bench| {
        let config = bench.device.config.clone();
        let backing = bench.device.backing().renewed(&config).unwrap();
        backing.health().trust();
        let device = MonitoredDevice::new(STORE, "namespace 1".to_owned(), config, backing);
        Arc::new(device.recorded(place, TrustRecord::new(&records, uuid)))
    };
    bench.monitor.remove(&bench.device);
    bench.device = recorded(&bench);
    bench.monitor.add(Arc::clone(&bench.device));
    bench.device.backing().fail_sync(Status::WRITE_FAULT);
    bench.until("it is kept", |_| records.of(uuid).failed_sync.is_some());
    let again = recorded(&bench);
    assert_eq!(again.health().sync_failure(), Some(Status::WRITE_FAULT));
    assert_eq!(bench.trust(), (Ok(()), true));
    assert_eq!(records.of(uuid), Distrust::default());
    let again = recorded(&bench);
    assert_eq!((again.health().sync_failure(), bench.flush()), (None, Ok(())));
    // A failure just before the end, or before the store is removed.
    bench.device.backing().fail_sync(Status::WRITE_FAULT);
    bench.monitor.remove(&bench.device);
    assert!(records.of(uuid).failed_sync.is_some());
}

/// A host that is notified of the failure, and kills the daemon then, finds it recorded after the
/// restart.
#[test]
fn a_failed_sync_is_recorded_before_the_flush_completes() {
    let records = Arc::new(MemoryTrust::default());
    let (uuid, place) = (uuid::Uuid::from_u128(1), place());
    let mut bench = Bench::new();
    let config = bench.device.config.clone();
    let backing = bench.device.backing().renewed(&config).unwrap();
    bench.monitor.remove(&bench.device);
    let device = MonitoredDevice::new(STORE, "namespace 1".to_owned(), config, backing);
    bench.device = Arc::new(device.recorded(place, TrustRecord::new(&records, uuid)));
    bench.monitor.add(Arc::clone(&bench.device));
    bench.device.health().set_fault(crate::InjectedFault::Sync);
    assert_eq!(bench.flush(), Err(Status::WRITE_FAULT));
    assert_eq!(records.of(uuid).failed_sync, Some(Status::WRITE_FAULT));

    // While the failure cannot be persisted, its hosts wait, and no longer.
    assert_eq!(bench.trust().0, Ok(()));
    records.fails.store(true, Ordering::Relaxed);
    assert_eq!(bench.flush(), Err(Status::WRITE_FAULT));
    assert_eq!(records.of(uuid).failed_sync, None);
}

/// The directory of the records may be on a device that has failed as well.
#[test]
fn a_trust_record_that_hangs_delays_no_examination_of_devices() {
    let records = Arc::new(MemoryTrust::default());
    let mut bench = Bench::new();
    let config = bench.device.config.clone();
    let backing = bench.device.backing().renewed(&config).unwrap();
    bench.monitor.remove(&bench.device);
    let device = MonitoredDevice::new(STORE, "namespace 1".to_owned(), config, backing);
    let record = TrustRecord::new(&records, uuid::Uuid::from_u128(1));
    bench.device = Arc::new(device.recorded(place(), record));
    bench.monitor.add(Arc::clone(&bench.device));
    let own = Arc::clone(&records);
    let hung = lock(&own.gate);
    bench.device.backing().fail_sync(Status::WRITE_FAULT);
    bench.until("it is written", |_| records.writes.load(Ordering::Relaxed) == 1);
    bench.shorten();
    bench.until("it is down", |bench| bench.device.health().is_down());
    let (nqn, nsid) = place();
    assert!(bench.monitor.find(&nqn, nsid).is_some());
    drop(hung);
    bench.until("all is kept", |_| records.of(uuid::Uuid::from_u128(1)).shortened);
}

#[test]
fn a_failed_sync_stays_until_the_administrator_trusts_the_device() {
    let mut bench = Bench::new();
    assert_eq!(bench.write(0, 0x11), Ok(()));
    bench.device.backing().fail_sync(Status::WRITE_FAULT);
    assert_eq!(bench.flush(), Err(Status::WRITE_FAULT));
    let before = bench.device.backing();
    assert_eq!(bench.trust(), (Ok(()), true));
    assert_eq!(bench.trust(), (Err(Untrusted::AlreadyTrusted), false));
    assert!(!Arc::ptr_eq(&before, &bench.device.backing()));
    assert_eq!((bench.flush(), bench.read(0)), (Ok(()), Ok(0x11)));
    // Not while it is down.
    bench.device.backing().fail_sync(Status::WRITE_FAULT);
    bench.shorten();
    bench.until("it is down", |bench| bench.device.health().is_down());
    let down = Untrusted::Failing("it ends at byte 8192".to_owned());
    assert_eq!(bench.trust(), (Err(down), false));
    assert!(bench.device.health().sync_failure().is_some());
}

#[test]
fn a_removed_device_is_closed_when_the_ring_detaches() {
    let mut bench = Bench::new();
    assert!(BackingDevice::open(&bench.device.config).is_err(), "it is in use");
    bench.monitor.remove(&bench.device);
    let weak = Arc::downgrade(&bench.device.backing());
    bench.device = {
        let config =
            BackingConfig { kind: BackingKind::Null { size: SIZE }, ..bench.device.config.clone() };
        let backing = BackingDevice::open(&config).unwrap();
        Arc::new(MonitoredDevice::new(STORE, String::new(), config, backing))
    };
    bench.turn();
    assert!(weak.upgrade().is_some(), "the ring has it");
    bench.ring.detach(STORE);
    bench.until("it is closed", |_| weak.upgrade().is_none());
    let config = BackingConfig {
        kind: BackingKind::File { path: bench.path(), size: None },
        block_size_bytes: 512,
        read_only: false,
        shared: false,
    };
    assert!(BackingDevice::open(&config).is_ok());
}

/// A server that does not answer, with many images on it.
#[test]
fn devices_of_a_file_system_are_checked_one_at_a_time() {
    let Bench { monitor, device, dir, own: _own, .. } = Bench::new();
    let mut state = MonitorState::default();
    let add = |state: &mut MonitorState, name: &str, place: u64| {
        let kind = BackingKind::File { path: dir.join(name), size: Some(SIZE) };
        let config = BackingConfig { kind, ..device.config.clone() };
        let backing = BackingDevice::open(&config).unwrap();
        let store = MonitoredDevice::new(STORE, name.to_owned(), config, backing);
        store.place_now.store(place, Ordering::Relaxed);
        lock(&store.check).next_check = Instant::now();
        state.devices.push(Arc::new(store));
    };
    (0..20).for_each(|n| add(&mut state, &format!("hangs {n}"), 7));
    add(&mut state, "sound", 8);
    let whose = |due: Option<(u64, Work)>| match due {
        Some((place, Work::Look(store))) => format!("{place}: {}", store.place),
        other => format!("{other:?}"),
    };
    assert_eq!(whose(state.next_due()), "7: hangs 0");
    assert_eq!(whose(state.next_due()), "8: sound");
    assert_eq!(whose(state.next_due()), "None");
    // A store that is to be closed waits as well, and no other.
    let away = state.devices.remove(3);
    state.closing.push(Arc::into_inner(away).unwrap().current.into_inner().unwrap());
    assert!(
        state.next_due().is_some_and(|(place, work)| matches!(work, Work::Close(_)) && place > 8)
    );
    state.busy.retain(|place| *place != 7);
    assert_eq!(whose(state.next_due()), "7: hangs 0");
    monitor.stop(Instant::now() + Duration::from_secs(20));
}

/// Whoever opens a file all the time has neither others of its file system wait, nor a failed device
/// examined more often.
#[test]
fn a_file_that_is_opened_all_the_time_delays_no_other_device() {
    let Bench { monitor, device, dir, own: _own, .. } = Bench::new();
    let mut state = MonitorState::default();
    for name in ["touched", "other"] {
        let kind = BackingKind::File { path: dir.join(name), size: Some(SIZE) };
        let config = BackingConfig { kind, ..device.config.clone() };
        let backing = BackingDevice::open(&config).unwrap();
        let store = MonitoredDevice::new(STORE, name.to_owned(), config, backing);
        lock(&store.check).next_check = Instant::now();
        state.devices.push(Arc::new(store));
    }
    let touched = Arc::clone(&state.devices[0]);
    touched.reschedule();
    touched.touched.store(true, Ordering::Relaxed);
    assert!(touched.due_at() < lock(&touched.check).next_check);
    // Both are due, and the other one for longer.
    let other_due = lock(&state.devices[1].check).next_check;
    lock(&touched.check).next_touch = other_due + Duration::from_nanos(1);
    assert!(touched.is_due(Instant::now()));
    let due = state.next_due().map(|(_, work)| work);
    assert!(matches!(due, Some(Work::Look(store)) if store.place == "other"));
    touched.health.set_down();
    assert_eq!(touched.due_at(), lock(&touched.check).next_check);
    monitor.stop(Instant::now() + Duration::from_secs(20));
}

/// The device was slow, so the request of the administrator is older than the state of the store.
#[test]
fn a_late_reopen_does_not_replace_a_newer_device() {
    let mut bench = Bench::new();
    let before = bench.device.backing();
    let late = before.renewed(&bench.device.config).unwrap();
    before.fail_sync(Status::WRITE_FAULT);
    assert_eq!(bench.trust(), (Ok(()), true));
    let now = bench.device.backing();
    let refused = bench.monitor.shared.put(&bench.device, &before, late);
    assert_eq!(refused, Err("it was opened again meanwhile".to_owned()));
    assert!(Arc::ptr_eq(&now, &bench.device.backing()) && bench.answers.try_recv().is_err());
}

#[test]
fn a_trust_request_fails_while_another_reopens_the_device() {
    let mut bench = Bench::new();
    for _ in 0..2 {
        bench.device.backing().fail_sync(Status::WRITE_FAULT);
        bench.device.reopening.store(true, Ordering::Relaxed);
        assert_eq!(bench.trust(), (Err(Untrusted::NoAnswer), false));
        bench.device.reopening.store(false, Ordering::Relaxed);
        assert_eq!(bench.trust(), (Ok(()), true), "as often as it fails");
    }
}

#[test]
fn a_partly_served_file_reopens_only_with_its_former_size() {
    let dir = crate::testing::directory();
    let path = dir.path().join("disk.img");
    let config = BackingConfig {
        kind: BackingKind::File { path: path.clone(), size: Some(SIZE) },
        block_size_bytes: 512,
        read_only: false,
        shared: false,
    };
    let put = |bytes: u64| {
        let other = dir.path().join("other");
        fs::write(&other, vec![0; bytes as usize]).unwrap();
        fs::rename(&other, &path).unwrap();
    };
    put(SIZE * 2);
    let mut backing = BackingDevice::open(&config).unwrap();
    // As often as requested, also through new descriptors.
    for _ in 0..2 {
        backing = backing.renewed(&config).unwrap();
        for bytes in [SIZE * 2 - 4096, SIZE * 2 + 4096, SIZE - 4096] {
            put(bytes);
            let refused = backing.open_again(&config, true).unwrap_err().to_string();
            assert!(refused.contains(&format!("has {bytes} bytes")), "{refused}");
        }
        put(SIZE * 2);
        backing = backing.open_again(&config, true).unwrap();
        assert_eq!(backing.size_bytes(), SIZE);
    }
    put(SIZE);
    backing = backing.open_again(&config, true).unwrap();
    put(SIZE * 2);
    assert!(backing.open_again(&config, true).is_err(), "now that would be another length");

    // The administrator extends the file meanwhile, and only a part stays served.
    put(SIZE * 2);
    let mut backing = BackingDevice::open(&config).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(SIZE * 3).unwrap();
    assert_eq!(backing.inspect(false), Condition::Sound);
    put(SIZE * 2);
    assert!(backing.open_again(&config, true).is_err(), "that is what it was before");
    put(SIZE * 3);
    backing = backing.open_again(&config, true).unwrap();
    // The size of a truncated file is not evidence of the size it should have.
    fs::File::options().write(true).open(&path).unwrap().set_len(SIZE / 2).unwrap();
    assert_eq!(backing.inspect(false), Condition::Shortened(SIZE / 2));
    put(SIZE * 3);
    assert_eq!(backing.open_again(&config, true).unwrap().size_bytes(), SIZE);
}

#[test]
fn a_grown_and_then_partly_served_file_can_be_reopened() {
    let dir = crate::testing::directory();
    let path = dir.path().join("disk.img");
    let of = |size: u64| BackingKind::File { path: path.clone(), size: Some(size) };
    let config =
        BackingConfig { kind: of(SIZE), block_size_bytes: 512, read_only: false, shared: false };
    let backing = BackingDevice::open(&config).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(SIZE * 4).unwrap();
    for size in [SIZE * 4, SIZE * 2] {
        assert_eq!(backing.next_size(&of(size)), Ok(Some(size)));
        backing.resize(size);
    }
    let other = dir.path().join("other");
    fs::write(&other, vec![0; SIZE as usize * 4]).unwrap();
    fs::rename(&other, &path).unwrap();
    assert_eq!(backing.open_again(&config, true).unwrap().size_bytes(), SIZE * 2);
}
