//! Tests of the ring on stores that fail, hang or are replaced, and of flushes.

use nvme::status::Status;
use std::fs::{self, OpenOptions};

use super::{Bench, SIZE, STORE};
use crate::uring::*;
use crate::{BackingConfig, BackingKind, Health, InjectedFault};

#[test]
fn io_beyond_the_end_of_a_shortened_file_fails() {
    let (mut bench, backing) = Bench::with_file(512);
    assert_eq!(bench.write(0, 1 << 16, 0x42, true), Ok(()));
    let file = OpenOptions::new().write(true).open(bench.path("disk.img")).unwrap();
    file.set_len(8192).unwrap();
    let not_ready = Err(Status::NAMESPACE_NOT_READY.with_crd(1));
    assert_eq!(bench.read(4096, 4096), Ok(vec![0x42; 4096]));
    assert_eq!(bench.read(4096, 8192), not_ready, "half of it is there");
    assert_eq!(bench.read(4096, 4096), not_ready);
    assert_eq!(
        bench.write(65536, 4096, 1, false).unwrap_err(),
        Status::NAMESPACE_NOT_READY.with_crd(1)
    );
    assert_eq!(fs::metadata(bench.path("disk.img")).unwrap().len(), 8192, "not made long again");
    assert_eq!(backing.health().failures(), 1);
}

/// A success beside a failure would confirm data that the kernel has reported as lost.
#[test]
fn flushes_during_a_running_sync_share_the_next_sync() {
    let (mut bench, backing) = Bench::with_file(512);
    for _ in 0..5 {
        bench.submit(IoRequest::Flush);
    }
    let done = bench.await_done(5);
    assert!(done.iter().all(|done| done.outcome == Ok(())));
    assert_eq!(bench.ring.stats().syncs, 2);
    assert_eq!((bench.ring.in_flight(), backing.sync_failure()), (0, None));
    // All of them again, on a full ring.
    for n in 0..20u64 {
        let from = bench.filled(4096, n as u8);
        bench.submit(IoRequest::Write { from, at: n * 4096, fua: n % 3 == 0 });
        bench.submit(IoRequest::Flush);
    }
    for done in bench.await_done(40) {
        assert_eq!(done.outcome, Ok(()));
        if let Some(buf) = done.buf {
            bench.pool.give(buf);
        }
    }
    assert!(bench.pool.is_full() && bench.ring.in_flight() == 0);
}

/// A device that is lost returns EIO to one ring and ENODEV to another. A host that reads either
/// flushes again, and after a kill of the daemon that would succeed.
#[test]
fn concurrent_flush_failures_are_all_reported_after_recording() {
    let (_bench, backing) = Bench::with_file(512);
    let health = backing.health();
    health.record_by(Some(Arc::default()));
    let mut rings = [libc::EIO, libc::ENODEV].map(|errno| {
        let mut flights = Flights::new(RingLimits { ops: 1, backings: 4 });
        assert!(flights.attach(STORE, Arc::clone(&backing), false));
        flights.submit(STORE, 0, IoRequest::Flush, |_, _| None);
        let sync = flights.next_ask().unwrap();
        flights.submitted(sync);
        (flights, sync.slot(), errno)
    });
    let mut done = Vec::new();
    for (flights, slot, errno) in &mut rings {
        flights.answered(*slot, -*errno, &mut done);
        done.extend(flights.take_ready());
    }
    assert!(health.is_unrecorded());
    assert!(done.is_empty(), "{done:?}");
    health.note_recorded();
    let told = rings.each_mut().map(|(flights, ..)| flights.take_ready().next().unwrap().outcome);
    assert_eq!(told, [Err(Status::WRITE_FAULT), Err(Health::NOT_READY)]);
}

/// Between release and acquisition of an image another gateway serves it: what waits here is late.
#[test]
fn queued_operations_of_a_replaced_device_are_not_executed() {
    let mut bench = Bench::new(1);
    let old = bench.file("disk.img", 512);
    bench.ring.attach(STORE, Arc::clone(&old)).unwrap();
    old.health().set_fault(InjectedFault::Stall);
    for at in [0, 4096] {
        let from = bench.filled(512, 0x77);
        bench.submit(IoRequest::Write { from, at, fua: false });
    }
    bench.ring.submit();
    old.set_lost(true);
    let kind = BackingKind::File { path: bench.path("disk.img"), size: Some(SIZE) };
    let config = BackingConfig { kind, block_size_bytes: 512, read_only: false, shared: false };
    bench.ring.attach(STORE, Arc::new(old.renewed(&config).unwrap())).unwrap();
    old.health().set_fault(InjectedFault::None);
    for done in bench.await_done(2) {
        assert_eq!(done.outcome, Err(Health::NOT_READY));
        bench.pool.give(done.buf.unwrap());
    }
    assert!(fs::read(bench.path("disk.img")).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(bench.write(0, 512, 0x78, false), Ok(()));
}

/// Its store may be lost before it starts: data written after the running one began are not durable
/// then.
#[test]
fn a_queued_flush_leaves_the_device_unsynced() {
    let (mut bench, backing) = Bench::with_file(512);
    let health = backing.health();
    bench.submit(IoRequest::Flush);
    bench.ring.fill();
    health.note_write();
    bench.submit(IoRequest::Flush);
    bench.ring.fill();
    assert!(health.has_unsynced());
    assert!(bench.await_done(2).iter().all(|done| done.outcome == Ok(())));
    assert!(!health.has_unsynced());
}

#[test]
fn a_stalled_flush_leaves_the_device_unsynced() {
    let (mut bench, backing) = Bench::with_file(512);
    let health = backing.health();
    health.set_fault(InjectedFault::Stall);
    health.note_write();
    bench.submit(IoRequest::Flush);
    bench.ring.fill();
    assert!(health.has_unsynced());
    health.set_fault(InjectedFault::None);
    assert_eq!(bench.await_done(1)[0].outcome, Ok(()));
    assert!(!health.has_unsynced());
}

#[test]
fn each_ring_synchronises_an_open_file_of_its_own() {
    let (bench, backing) = Bench::with_file(512);
    let other = Bench::new(8);
    let mut ring = other.ring;
    ring.attach(STORE, Arc::clone(&backing)).unwrap();
    let fd = |ring: &Ring| ring.flights.attachments[0].as_ref().and_then(|a| a.sync_fd).unwrap();
    let fds = [fd(&bench.ring), fd(&ring), backing.fd().unwrap()];
    assert!(fds[0] != fds[1] && fds[0] != fds[2] && fds[1] != fds[2], "{fds:?}");
}

#[test]
fn a_failed_flush_is_sticky_until_the_device_is_reopened() {
    let (mut bench, backing) = Bench::with_file(512);
    backing.fail_sync(Status::WRITE_FAULT);
    assert_eq!(bench.run(IoRequest::Flush), Err(Status::WRITE_FAULT));
    assert_eq!(bench.write(0, 512, 1, true), Err(Status::WRITE_FAULT));
    assert_eq!(bench.write(0, 512, 2, false), Ok(()));
    assert_eq!(bench.read(0, 512), Ok(vec![2; 512]));
    bench.ring.detach(STORE);
    drop(backing);
    let again = bench.file("disk.img", 512);
    bench.ring.attach(STORE, again).unwrap();
    assert_eq!(bench.run(IoRequest::Flush), Ok(()));
}

#[test]
fn injected_faults_act_like_real_device_errors() {
    let (mut bench, backing) = Bench::with_file(512);
    let health = backing.health();
    assert_eq!(bench.write(0, 4096, 0x11, true), Ok(()));
    health.set_fault(InjectedFault::Error);
    assert_eq!(bench.read(0, 4096), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(bench.write(0, 4096, 0x22, false), Err(Status::WRITE_FAULT));
    assert_eq!((health.failures(), health.media_errors(), health.is_suspect()), (2, 2, true));
    health.set_fault(InjectedFault::Full);
    let full = Err(Status::CAPACITY_EXCEEDED.with_dnr());
    assert_eq!(bench.write(0, 4096, 0x22, true), full);
    assert_eq!(bench.run(IoRequest::Flush), Ok(()));
    health.set_fault(InjectedFault::Short);
    assert_eq!(bench.write(4096, 4096, 0x33, false), Ok(()));
    assert_eq!(bench.read(0, 8192).map(|bytes| (bytes[0], bytes[8191])), Ok((0x11, 0x33)));
    assert_eq!(bench.ring.stats().again, 7 + 15, "a block at a time");
    health.set_fault(InjectedFault::Sync);
    let lost = Err(Status::WRITE_FAULT);
    bench.submit(IoRequest::Flush);
    bench.submit(IoRequest::Flush);
    assert!(bench.await_done(2).iter().all(|done| done.outcome == lost));
    health.set_fault(InjectedFault::None);
    assert_eq!(bench.run(IoRequest::Flush), lost, "it sticks");
    assert_eq!(bench.read(0, 4096), Ok(vec![0x11; 4096]));
    assert!(bench.pool.is_full());
}

#[test]
fn a_hanging_device_delays_no_other_and_its_io_can_be_cancelled() {
    let (mut bench, hung) = Bench::with_file(512);
    let other = bench.file("other.img", 512);
    bench.ring.attach(DeviceId(2), other).unwrap();
    hung.health().set_fault(InjectedFault::Stall);
    for tag in 0..4 {
        let from = bench.filled(4096, 0x44);
        BlockDevice::submit(
            &mut bench.ring,
            STORE,
            tag,
            IoRequest::Write { from, at: tag << 12, fua: false },
        );
    }
    BlockDevice::submit(&mut bench.ring, STORE, 4, IoRequest::Flush);
    for _ in 0..3 {
        let into = bench.filled(512, 1);
        BlockDevice::submit(&mut bench.ring, DeviceId(2), 100, IoRequest::Read { into, at: 0 });
        let done = bench.await_done(1).pop().unwrap();
        assert_eq!((done.tag, done.outcome), (100, Ok(())));
        bench.pool.give(done.buf.unwrap());
    }
    bench.ring.recall(200, 1);
    let mut done = bench.await_done(2);
    done.sort_by_key(|done| done.tag);
    assert_eq!((done[0].tag, done[0].outcome), (1, Err(Status::ABORT_REQUESTED)));
    assert_eq!((done[1].tag, done[1].outcome), (200, Ok(())));
    done.into_iter().filter_map(|done| done.buf).for_each(|buf| bench.pool.give(buf));
    hung.health().set_fault(InjectedFault::None);
    for done in bench.await_done(4) {
        assert_eq!(done.outcome, Ok(()));
        done.buf.into_iter().for_each(|buf| bench.pool.give(buf));
    }
    assert_eq!(bench.read(0, 512), Ok(vec![0x44; 512]));
    assert_eq!(bench.read(4096, 512), Ok(vec![0; 512]), "it was taken back");
    assert!(bench.pool.is_full() && bench.ring.in_flight() == 0);
}

/// All hosts of a store that blocks time out at about the same time.
#[test]
fn cancelled_operations_leave_no_state_in_the_ring() {
    const CANCEL: Tag = 1 << 20;
    let mut bench = Bench::new(512);
    let hung = bench.file("disk.img", 512);
    bench.ring.attach(STORE, Arc::clone(&hung)).unwrap();
    hung.health().set_fault(InjectedFault::Stall);
    for tag in 0..500 {
        let into = bench.filled(512, 1);
        BlockDevice::submit(&mut bench.ring, STORE, tag, IoRequest::Read { into, at: 0 });
    }
    bench.ring.submit();
    // One of them is unknown.
    let requests: Vec<_> =
        (0..501).map(|of| crate::CancelRequest { of, tag: CANCEL | of }).collect();
    bench.ring.recall_all(&requests);
    let done = bench.await_done(1001);
    let granted = done.iter().filter(|done| done.tag & CANCEL != 0 && done.outcome.is_ok()).count();
    let aborted = done.iter().filter(|done| done.outcome == Err(Status::ABORT_REQUESTED)).count();
    assert_eq!((granted, aborted), (500, 500));
    assert!(done.iter().any(|it| (it.tag, it.outcome.is_ok()) == (CANCEL | 500, false)));
    assert_eq!((bench.ring.flights.recalls.len(), bench.ring.flights.recalls.places()), (0, 0));
    done.into_iter().filter_map(|done| done.buf).for_each(|buf| bench.pool.give(buf));
    assert!(bench.pool.is_full() && bench.ring.in_flight() == 0);
}
