//! Tests of stores whose data the reactor copies or discards itself.

use std::fs::{self, OpenOptions};
use std::sync::atomic::{AtomicBool, Ordering};

use nvme::status::Status;
use proptest::prelude::*;

use super::{Bench, SIZE, STORE, every_operation};
use crate::uring::*;
use crate::{BackingConfig, BackingKind, InjectedFault};

#[test]
fn every_operation_works_on_a_ram_device() {
    let (mut bench, backing) = Bench::with_kind(BackingKind::Ram { size: SIZE });
    every_operation(&mut bench, 512);
    assert!(!backing.has_volatile_cache() && backing.can_discard());
    // Memory files cannot zero a range; one refusal suffices.
    assert!(!backing.allows(crate::Space::ZeroRange));
    assert_eq!(bench.ring.stats().spaces, 0);
}

/// What one host writes at once keeps no other waiting.
#[test]
fn large_ram_copies_do_not_delay_small_ones() {
    const LARGE: u32 = 32 << 10;
    let size = 8 * u64::from(LARGE);
    let (mut bench, _) = Bench::with_kind(BackingKind::Ram { size });
    for (at, byte) in (512..).step_by(LARGE as usize).zip(1..=6) {
        let from = bench.filled(LARGE, byte);
        bench.submit(IoRequest::Write { from, at, fua: false });
    }
    let into = bench.filled(512, 0);
    bench.submit(IoRequest::Read { into, at: 0 });
    let mut lens_by_round = vec![Vec::new(); 7];
    for lens in &mut lens_by_round {
        bench.ring.reap(&mut bench.done, &mut bench.woken);
        for done in bench.done.drain(..) {
            assert_eq!(done.outcome, Ok(()));
            let buf = done.buf.unwrap();
            lens.push(buf.len());
            bench.pool.give(buf);
        }
        bench.ring.submit();
    }
    // All of the first round is copied when it is submitted.
    let mut expected = vec![vec![LARGE]; 7];
    (expected[0], expected[1]) = (vec![LARGE, 512], vec![]);
    assert_eq!(lens_by_round, expected);
    for (at, byte) in (512..).step_by(LARGE as usize).zip(1..=6) {
        assert!(bench.read(at, LARGE).unwrap().iter().all(|found| *found == byte));
    }
    assert_eq!((bench.ring.stats().copied, bench.ring.stats().plain), (13, 0));
}

/// Those that wait for a round can be cancelled, and leave nothing behind.
#[test]
fn a_queued_large_ram_copy_can_be_cancelled() {
    let (mut bench, _) = Bench::with_kind(BackingKind::Ram { size: SIZE });
    for tag in 0..8 {
        let from = bench.filled(64 << 10, 1);
        BlockDevice::submit(
            &mut bench.ring,
            STORE,
            tag,
            IoRequest::Write { from, at: 0, fua: false },
        );
    }
    // Those that wait have slots from now on.
    bench.ring.submit();
    bench.ring.recall_all(&[crate::CancelRequest { of: 7, tag: 9 }]);
    let done = bench.await_done(9);
    for done in done {
        assert_eq!(done.outcome, if done.tag == 7 { Err(Status::ABORT_REQUESTED) } else { Ok(()) });
        done.buf.into_iter().for_each(|buf| bench.pool.give(buf));
    }
    assert_eq!(bench.ring.in_flight(), 0);
}

/// Whole huge pages are deallocated by a worker of the kernel, what is left of others before.
#[test]
fn a_deallocation_over_huge_pages_clears_exactly_its_range() {
    const HUGE: u64 = 2 << 20;
    let (mut bench, _) = Bench::with_kind(BackingKind::Ram { size: 4 * HUGE });
    let (start, end) = (HUGE - 512, 3 * HUGE + 512);
    let edges = [start - 512, start, HUGE, 3 * HUGE - 512, 3 * HUGE, end];
    for at in edges {
        assert_eq!(bench.write(at, 512, 0xaa, false), Ok(()));
    }
    assert_eq!(bench.run(IoRequest::Discard { at: start, len: end - start }), Ok(()));
    let first_bytes = edges.map(|at| bench.read(at, 512).unwrap()[0]);
    assert_eq!(first_bytes, [0xaa, 0, 0, 0, 0, 0xaa]);
    assert_eq!(bench.ring.stats().spaces, 1);
}

/// One block is atomic (AWUN): the kernel copies to and from memory without a lock of both.
#[test]
fn ram_block_reads_are_atomic_during_writes_of_another_ring() {
    const BLOCK: u32 = 4096;
    let kind = BackingKind::Ram { size: SIZE };
    let config = BackingConfig { kind, block_size_bytes: BLOCK, read_only: false, shared: false };
    let backing = Arc::new(BackingDevice::open(&config).unwrap());
    let written = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bench = Bench::new(4);
            bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
            for byte in (0..=255u8).cycle().take(100_000) {
                assert_eq!(bench.write(0, BLOCK, byte, false), Ok(()));
            }
            written.store(true, Ordering::Release);
        });
        let mut bench = Bench::new(4);
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        while !written.load(Ordering::Acquire) {
            let bytes = bench.read(0, BLOCK).unwrap();
            let other = bytes.iter().position(|byte| *byte != bytes[0]);
            assert_eq!(other, None, "the beginning is {:#x}", bytes[0]);
        }
    });
}

/// The kernel clears part of a page in place.
#[test]
fn ram_block_reads_are_atomic_during_deallocation_by_another_ring() {
    const AT: u64 = 512;
    let (mut bench, backing) = Bench::with_kind(BackingKind::Ram { size: SIZE });
    let deallocated = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bench = Bench::new(4);
            bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
            for _ in 0..200_000 {
                assert_eq!(bench.write(AT, 512, 0xaa, false), Ok(()));
                assert_eq!(bench.run(IoRequest::Discard { at: AT, len: 512 }), Ok(()));
            }
            assert_eq!(bench.ring.stats().spaces, 0, "none by workers of the kernel");
            deallocated.store(true, Ordering::Release);
        });
        while !deallocated.load(Ordering::Acquire) {
            let bytes = bench.read(AT, 512).unwrap();
            let other = bytes.iter().position(|byte| *byte != bytes[0]);
            assert_eq!(other, None, "the beginning is {:#x}", bytes[0]);
        }
    });
}

/// The directory is on tmpfs, which allows direct I/O since Linux 6.6.
#[test]
fn every_operation_works_on_tmpfs_without_kernel_workers() {
    let mut bench = Bench::new(8);
    bench.dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let kind = BackingKind::File { path: bench.path("disk.img"), size: Some(SIZE) };
    let config = BackingConfig { kind, block_size_bytes: 512, read_only: false, shared: false };
    let backing = match BackingDevice::open(&config) {
        Ok(backing) => Arc::new(backing),
        Err(refused) => {
            assert!(refused.sentence.contains("O_DIRECT"), "{}", refused.sentence);
            return;
        }
    };
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    every_operation(&mut bench, 512);
    let stats = bench.ring.stats();
    assert_eq!((stats.fixed, stats.plain, stats.copied), (0, 0, 10));
    // An injected fault replaces results of the ring.
    backing.health().set_fault(InjectedFault::Full);
    assert_eq!(bench.write(0, 512, 0x33, false), Err(Status::CAPACITY_EXCEEDED.with_dnr()));
    backing.health().set_fault(InjectedFault::None);
    assert_eq!(bench.write(0, 512, 0x33, false), Ok(()));
    assert_eq!(bench.ring.stats().copied, 11);
    // A file that was shortened is not made long again by a write.
    OpenOptions::new().write(true).open(bench.path("disk.img")).unwrap().set_len(512).unwrap();
    assert_eq!(bench.read(SIZE - 512, 512), Err(crate::Health::NOT_READY));
    assert_eq!(bench.write(SIZE - 512, 512, 0x44, false), Err(crate::Health::NOT_READY));
    assert_eq!(fs::metadata(bench.path("disk.img")).unwrap().len(), 512);
}

#[test]
fn a_null_device_always_reads_as_zeros() {
    let (mut bench, _) = Bench::with_kind(BackingKind::Null { size: SIZE });
    assert_eq!(bench.write(0, 4096, 0x55, true), Ok(()));
    assert_eq!(bench.read(0, 4096), Ok(vec![0; 4096]));
    let len = SIZE;
    for op in [
        IoRequest::Flush,
        IoRequest::Discard { at: 0, len },
        IoRequest::Zero { at: 0, len, deallocate: true },
    ] {
        assert_eq!(bench.run(op), Ok(()));
    }
    let outside = Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    assert_eq!(bench.write(SIZE, 512, 1, false), outside);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Buffers are shared with all hosts and devices: whatever was in them is never sent.
    #[test]
    fn a_null_device_reads_as_zeros_after_any_traffic_of_the_pool(
        steps in proptest::collection::vec((0u8..5, 1u32..=256, 0usize..1 << 17, 1u8..), 1..80)
    ) {
        const FILE: DeviceId = DeviceId(2);
        let (mut bench, _) = Bench::with_kind(BackingKind::Null { size: SIZE });
        let file = bench.file("disk.img", 512);
        fs::write(bench.path("disk.img"), vec![0xAB; SIZE as usize]).unwrap();
        bench.ring.attach(FILE, file).unwrap();
        let mut held = Vec::new();
        for (what, blocks, at, byte) in steps {
            let Some(mut buf) = bench.pool.take_data(blocks * 512) else { continue };
            match what {
                // One byte of a host, and all of them.
                0 => {
                    let at = at % buf.len() as usize;
                    bench.pool.bytes_mut(&mut buf)[at] = byte;
                    bench.pool.give(buf);
                }
                1 => {
                    bench.pool.bytes_mut(&mut buf).fill(byte);
                    bench.pool.give(buf);
                }
                2 => {
                    BlockDevice::submit(&mut bench.ring, FILE, 0, IoRequest::Read { into: buf, at: 0 });
                    let done = bench.await_done(1).pop().unwrap();
                    prop_assert_eq!(done.outcome, Ok(()));
                    bench.pool.give(done.buf.unwrap());
                }
                // Others are at another place meanwhile.
                3 => {
                    held.push(buf);
                    if held.len() > 4 {
                        bench.pool.give(held.swap_remove(at % 4));
                    }
                }
                _ => {
                    bench.submit(IoRequest::Read { into: buf, at: 0 });
                    let done = bench.await_done(1).pop().unwrap();
                    prop_assert_eq!(done.outcome, Ok(()));
                    let buf = done.buf.unwrap();
                    prop_assert!(bench.pool.bytes(&buf).iter().all(|byte| *byte == 0));
                    bench.pool.give(buf);
                }
            }
        }
        held.into_iter().for_each(|buf| bench.pool.give(buf));
    }
}
