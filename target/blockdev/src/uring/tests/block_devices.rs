//! Tests of the ring on block devices and full file systems: they need root.

use nvme::status::Status;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{Bench, Loop, Mount, SIZE, STORE, every_operation, image, open};
use crate::uring::*;
use crate::{BackingConfig, BackingKind, InjectedFault};

#[test]
#[ignore = "needs root and a loop device"]
fn every_operation_works_on_a_block_device() {
    for block in [512, 4096] {
        let mut bench = Bench::new(8);
        let device = Loop::new(&image(&bench), block);
        let backing = open(Path::new(&device.0), Some(SIZE), block);
        assert_eq!((backing.kind(), backing.size_bytes()), (Kind::Device, SIZE));
        assert!(backing.has_volatile_cache() && backing.can_discard());
        assert!(backing.geometry().physical_block_bytes >= block);
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        every_operation(&mut bench, block);
        let plain = if bench.ring.memory.registered { 0 } else { 6 };
        assert_eq!((backing.health().failures(), bench.ring.stats().plain), (0, plain));
        // Served only once, and not in addition to a mount.
        let kind = BackingKind::File { path: PathBuf::from(&device.0), size: None };
        let config =
            BackingConfig { kind, block_size_bytes: block, read_only: false, shared: false };
        let refusal = BackingDevice::open(&config).unwrap_err().to_string();
        assert!(refusal.contains("in use"), "{refusal}");
        bench.ring.detach(STORE);
        drop(backing);
        let wrong = BackingConfig {
            kind: BackingKind::File { path: PathBuf::from(&device.0), size: Some(2 * SIZE) },
            ..config.clone()
        };
        let refusal = BackingDevice::open(&wrong).unwrap_err().to_string();
        assert!(refusal.contains("change the device yourself"), "{refusal}");
        if block == 4096 {
            let small = BackingConfig { block_size_bytes: 512, ..config };
            let refusal = BackingDevice::open(&small).unwrap_err().to_string();
            assert!(refusal.contains("set block_size = 4096"), "{refusal}");
        }
    }
}

#[test]
fn a_failed_flush_completes_after_recording_and_plain_writes_at_once() {
    let mut bench = Bench::new(8);
    let backing = open(&image(&bench), Some(SIZE), 512);
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    let health = backing.health();
    health.record_by(Some(Arc::default()));
    health.set_fault(InjectedFault::Sync);
    let (mut done, mut woken) = (Vec::new(), Vec::new());
    // The first one fails, so the second is rejected.
    for tag in [1, 2] {
        BlockDevice::submit(&mut bench.ring, STORE, tag, IoRequest::Flush);
        let until = Instant::now() + Duration::from_secs(60);
        while !health.is_unrecorded() && Instant::now() < until {
            bench.ring.sleep(Some(Instant::now() + Duration::from_millis(1)), Instant::now());
            bench.ring.reap(&mut done, &mut woken);
        }
        bench.ring.reap(&mut done, &mut woken);
        assert!(health.is_unrecorded() && done.is_empty());
    }
    assert_eq!(bench.ring.in_flight(), 2);
    assert_eq!(bench.write(0, 4096, 1, false), Ok(()));
    health.note_recorded();
    bench.ring.reap(&mut done, &mut woken);
    let failed: Vec<_> = done.iter().map(|done| (done.tag, done.outcome)).collect();
    assert_eq!(failed, [1, 2].map(|tag| (tag, health.sync_failure().map_or(Ok(()), Err))));
    assert_eq!(bench.ring.in_flight(), 0);
}

#[test]
#[ignore = "needs root and a loop device"]
fn a_device_is_shared_only_as_configured_and_never_with_a_mount() {
    let bench = Bench::new(8);
    let device = Loop::new(&image(&bench), 512);
    let kind = BackingKind::File { path: PathBuf::from(&device.0), size: None };
    let alone = BackingConfig { kind, block_size_bytes: 512, read_only: false, shared: false };
    let shared = BackingConfig { shared: true, ..alone.clone() };
    let refusal = |config| BackingDevice::open(config).unwrap_err().to_string();
    let first = BackingDevice::open(&alone).unwrap();
    for second in [&alone, &shared] {
        assert!(refusal(second).contains("in use by another nvmfd"), "{}", refusal(second));
    }
    drop(first);
    let (first, second) =
        (BackingDevice::open(&shared).unwrap(), BackingDevice::open(&shared).unwrap());
    assert!(refusal(&alone).contains("in use by another nvmfd"));
    drop((first, second));
    // Another process that knows of no lock has it open exclusively.
    let mut options = OpenOptions::new();
    let _claim = options.read(true).custom_flags(libc::O_EXCL).open(&device.0).unwrap();
    for config in [&alone, &shared] {
        assert!(refusal(config).contains("cannot claim"), "{}", refusal(config));
    }
}

/// A device may gain a cache while it is served: its queue limit at the time of opening decides
/// nothing.
#[test]
#[ignore = "needs root and a loop device"]
fn a_flush_reaches_a_device_that_was_write_through_when_it_was_opened() {
    let mut bench = Bench::new(8);
    let device = Loop::new(&image(&bench), 512);
    let queue = |file: &str| Path::new("/sys/block").join(&device.0["/dev/".len()..]).join(file);
    fs::write(queue("queue/write_cache"), "write through").unwrap();
    let backing = open(Path::new(&device.0), Some(SIZE), 512);
    assert!(backing.has_volatile_cache(), "so hosts flush, and their flushes are passed on");
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    // The 16th number: flushes that the device has completed.
    let flushes = || {
        let stat = fs::read_to_string(queue("stat")).unwrap();
        stat.split_whitespace().nth(15).unwrap().parse::<u64>().unwrap()
    };
    fs::write(queue("queue/write_cache"), "write back").unwrap();
    let before = flushes();
    assert_eq!(bench.write(0, 512, 1, false), Ok(()));
    assert!(backing.health().has_unsynced());
    assert_eq!(bench.run(IoRequest::Flush), Ok(()));
    assert!(flushes() > before, "the device has not heard of it");
    bench.ring.detach(STORE);
    drop(backing);
}

#[test]
#[ignore = "needs root, a loop device and mkfs.ext4"]
fn a_flush_failure_of_the_kernel_is_sticky() {
    let mut bench = Bench::new(8);
    let disk = bench.path("ext4");
    fs::File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let device = Loop::new(&disk, 4096);
    let mount = Mount::new(&device, bench.path("mounted"));
    let backing = open(&mount.0.join("disk.img"), Some(SIZE), 4096);
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    assert_eq!(bench.write(0, 4096, 1, true), Ok(()));
    assert_eq!(bench.write(4096, 4096, 2, false), Ok(()));
    mount.shut_down();
    let failed = bench.run(IoRequest::Flush).unwrap_err();
    assert!(failed.is(Status::WRITE_FAULT), "{failed}");
    assert_eq!(backing.sync_failure(), Some(failed));
    assert_eq!(bench.run(IoRequest::Flush), Err(failed));
    assert_eq!(bench.write(0, 4096, 3, true), Err(failed));
    assert_eq!(backing.health().failures(), 1, "the kernel was asked once");
    bench.ring.detach(STORE);
    drop((backing, mount, device));
}

#[test]
#[ignore = "needs root, a loop device and mkfs.ext4"]
fn writes_to_a_full_file_system_fail_with_capacity_exceeded() {
    let mut bench = Bench::new(8);
    let disk = bench.path("ext4");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let device = Loop::new(&disk, 4096);
    let mount = Mount::new(&device, bench.path("mounted"));
    let size = 64 << 20;
    let backing = open(&mount.0.join("disk.img"), Some(size), 4096);
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    let full = Err(Status::CAPACITY_EXCEEDED.with_dnr());
    let outcomes: Vec<_> =
        (0..size >> 17).map(|n| bench.write(n << 17, 1 << 17, 1, true)).collect();
    assert!(outcomes.contains(&Ok(())) && outcomes.contains(&full));
    assert!(outcomes.iter().all(|outcome| *outcome == Ok(()) || *outcome == full));
    // No sync was lost, and space can be freed.
    assert_eq!(bench.run(IoRequest::Flush), Ok(()));
    assert_eq!(bench.run(IoRequest::Discard { at: 0, len: size / 2 }), Ok(()));
    assert_eq!(bench.write(size - (1 << 17), 1 << 17, 1, true), Ok(()));
    bench.ring.detach(STORE);
    drop((backing, mount, device));
}
