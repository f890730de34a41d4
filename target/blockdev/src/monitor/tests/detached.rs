//! Tests of files whose paths lead elsewhere while they are served, and of the next start.

use std::fs;

use super::NOT_READY;
use super::bench::{Bench, MemoryTrust, SIZE, STORE};
use crate::monitor::*;
use crate::{BackingConfig, BackingKind, Detached, Health};

#[test]
fn a_file_moved_from_its_path_stays_served_and_is_reported() {
    let mut bench = Bench::new();
    let (path, aside) = (bench.path(), bench.dir.join("aside"));
    let detached = |bench: &mut Bench, expected| {
        bench.until("it was seen", |bench| bench.device.health().detached() == expected);
        assert_eq!((bench.write(0, 0x11), bench.flush()), (Ok(()), Ok(())));
        assert!(bench.device.is_trusted() && !bench.device.health().is_degraded());
    };
    fs::rename(&path, &aside).unwrap();
    detached(&mut bench, Some(Detached::Removed));
    fs::write(&path, vec![0x77; SIZE as usize]).unwrap();
    detached(&mut bench, Some(Detached::Replaced));
    fs::rename(&aside, &path).unwrap();
    detached(&mut bench, None);
    std::os::unix::fs::symlink(&path, &aside).unwrap();
    fs::remove_file(&path).unwrap();
    detached(&mut bench, Some(Detached::Removed));
    // Data that no path leads to can still be flushed.
    let own_path = bench.device.backing().own_path();
    let sentence = device::detachment(&bench.device.backing(), Detached::Removed, true);
    assert!(sentence.contains(&own_path) && fs::read(&own_path).unwrap()[0] == 0x11, "{sentence}");
}

/// Hosts would find other data than they have flushed.
#[test]
fn a_file_that_replaced_a_served_one_is_not_served_after_a_restart() {
    let records = Arc::new(MemoryTrust::default());
    let of = || records.of(uuid::Uuid::from_u128(1)).replaced;
    let mut bench = Bench::new();
    bench.restart(&records, || {});
    assert_eq!((bench.write(0, 0x11), bench.flush(), of()), (Ok(()), Ok(()), None));
    let (path, aside) = (bench.path(), bench.dir.join("aside"));
    // It returns before anybody stops the daemon: nothing has happened.
    fs::rename(&path, &aside).unwrap();
    bench.until("it is recorded", |_| of().is_some());
    assert!(bench.device.is_trusted() && bench.write(0, 0x12) == Ok(()));
    fs::rename(&aside, &path).unwrap();
    bench.until("that is removed", |_| of().is_none());
    // It returns while the daemon is stopped.
    fs::rename(&path, &aside).unwrap();
    bench.until("it is recorded", |_| of().is_some());
    bench.restart(&records, || fs::rename(&aside, &path).unwrap());
    assert_eq!((bench.read(0), bench.flush()), (Ok(0x12), Ok(())));
    bench.until("that is removed", |_| of().is_none());
    // Another file is there after the restart, and stays out of service until it is trusted.
    fs::rename(&path, &aside).unwrap();
    fs::write(&path, vec![0x77; SIZE as usize]).unwrap();
    bench.until("it is recorded", |_| of().is_some());
    bench.restart(&records, || {});
    for _ in 0..3 {
        bench.monitor.shared.look(&bench.device);
        assert!(bench.device.health().is_untrusted() && of().is_some());
    }
    assert_eq!((bench.read(0), bench.flush()), (NOT_READY, Err(Health::NOT_READY)));
    // The file that was served returns.
    fs::rename(&path, bench.dir.join("other")).unwrap();
    fs::rename(&aside, &path).unwrap();
    bench.until("it is served", |bench| !bench.device.health().is_down());
    assert_eq!((bench.read(0), bench.device.is_trusted()), (Ok(0x12), true));
    bench.until("that is removed", |_| of().is_none());
    // The administrator trusts the other one.
    fs::rename(bench.dir.join("other"), &path).unwrap();
    bench.until("it is recorded", |_| of().is_some());
    bench.restart(&records, || {});
    assert_eq!((bench.read(0), bench.trust()), (NOT_READY, (Ok(()), true)));
    assert_eq!((bench.read(0), bench.write(0, 0x78), bench.flush()), (Ok(0x77), Ok(()), Ok(())));
    assert_eq!(of(), None);
    bench.restart(&records, || {});
    assert_eq!(bench.read(0), Ok(0x78));
}

#[test]
fn a_file_that_is_replaced_while_it_is_read_only_or_not_served_is_not_recorded() {
    let records = Arc::new(MemoryTrust::default());
    let of = || records.of(uuid::Uuid::from_u128(1)).replaced;
    let mut bench = Bench::new();
    bench.restart(&records, || {});
    let (served, other) = (bench.path(), bench.dir.join("other"));
    fs::write(&other, vec![0x77; SIZE as usize]).unwrap();
    bench.restart(&records, || fs::rename(&other, &served).unwrap());
    assert_eq!((bench.read(0), of()), (Ok(0x77), None));
    let backing = bench.device.backing();
    let config = BackingConfig { read_only: true, ..bench.device.config.clone() };
    let device = MonitoredDevice::new(
        STORE,
        String::new(),
        config,
        backing.renewed(&bench.device.config).unwrap(),
    );
    bench.exchange(SIZE, 0x78);
    device.check_path(&device.backing());
    assert_eq!(
        (device.health.detached(), device.distrust()),
        (Some(Detached::Replaced), Distrust::default())
    );
}

/// At the stop of the daemon, within the second before the next examination.
#[test]
fn a_replacement_just_before_the_stop_is_recorded() {
    let records = Arc::new(MemoryTrust::default());
    let mut bench = Bench::new();
    bench.restart(&records, || {});
    lock(&bench.device.check).next_check += Duration::from_secs(3600);
    bench.exchange(SIZE, 0x77);
    bench.monitor.report_detached(Instant::now() + Duration::from_secs(30));
    bench.monitor.stop(Instant::now() + Duration::from_secs(30));
    assert!(records.of(uuid::Uuid::from_u128(1)).replaced.is_some());
}

#[test]
fn a_device_that_hangs_hides_no_replacement_of_another_at_the_stop() {
    let records = Arc::new(MemoryTrust::default());
    let mut bench = Bench::new();
    bench.restart(&records, || {});
    bench.postpone();
    let kind = BackingKind::File { path: bench.dir.join("hangs"), size: Some(SIZE) };
    let config = BackingConfig { kind, ..bench.device.config.clone() };
    let backing = BackingDevice::open(&config).unwrap();
    let hangs = Arc::new(MonitoredDevice::new(DeviceId(3), String::new(), config, backing));
    hangs.place_now.store(0, Ordering::Relaxed);
    lock(&hangs.check).next_check += Duration::from_secs(3600);
    lock(&bench.monitor.shared.state).devices.insert(0, Arc::clone(&hangs));
    let hung = lock(&hangs.current);
    bench.exchange(SIZE, 0x77);
    // None of them has to answer in time.
    bench.monitor.report_detached(Instant::now());
    bench.until("it is recorded", |_| records.of(uuid::Uuid::from_u128(1)).replaced.is_some());
    drop(hung);
}
