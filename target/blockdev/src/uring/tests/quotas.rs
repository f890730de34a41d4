//! Tests of what one store leaves to the others: slots, flushes, workers of the kernel.

use crate::request::PendingIo;
use nvme::status::Status;
use std::fs;

use super::{Bench, Loop, Mount, STORE, open};
use crate::InjectedFault;
use crate::uring::*;

/// Operations beyond its share are parked with the store, and start in order.
#[test]
fn no_device_occupies_all_ring_slots_while_another_is_attached() {
    const MANY: u64 = 1000;
    let mut bench = Bench::new(2048);
    let [share_alone, share] = bench.ring.flights.shares;
    let (hangs, other) = (bench.file("disk.img", 512), bench.file("other.img", 512));
    bench.ring.attach(STORE, Arc::clone(&hangs)).unwrap();
    bench.ring.attach(DeviceId(0), Arc::clone(&other)).unwrap();
    hangs.health().set_fault(InjectedFault::Stall);
    let discard = |n: u64| IoRequest::Discard { at: n * 512, len: 512 };
    (0..MANY).for_each(|n| BlockDevice::submit(&mut bench.ring, STORE, n, discard(n)));
    bench.ring.submit();
    let in_slots =
        |bench: &Bench| bench.ring.flights.slots.iter().flatten().map(PendingIo::tag).max();
    assert_eq!(in_slots(&bench), Some(u64::from(share) - 1));
    BlockDevice::submit(&mut bench.ring, DeviceId(0), MANY, IoRequest::Flush);
    assert_eq!(bench.await_done(1)[0].tag, MANY);
    // The other one is detached: more may start. It is attached again: no more than have started.
    bench.ring.detach(DeviceId(0));
    bench.ring.submit();
    let alone = Some(u64::from(share_alone) - 1);
    assert_eq!(in_slots(&bench), alone);
    bench.ring.attach(DeviceId(0), other).unwrap();
    let requests = [(2001, 5), (2002, MANY - 2), (2000, MANY - 1)];
    bench.ring.recall_all(&requests.map(|(tag, of)| crate::CancelRequest { of, tag }));
    bench.ring.submit();
    let tags: Vec<Tag> = bench.await_done(6).iter().map(|done| done.tag).collect();
    assert!([5, 998, 999, 2000, 2001, 2002].iter().all(|tag| tags.contains(tag)), "{tags:?}");
    assert_eq!(in_slots(&bench), alone);
    assert_eq!(bench.ring.in_flight(), MANY as usize - 3);
    // An operation that starts now uses the present state of the store.
    hangs.resize(900 * 512);
    hangs.health().set_fault(InjectedFault::None);
    let mut home = Vec::new();
    while home.len() < MANY as usize - 3 {
        home.extend(bench.await_done(1));
        let next =
            bench.ring.flights.attachments[0].as_ref().unwrap().parked.front().map(PendingIo::tag);
        let latest = in_slots(&bench);
        assert!(next.is_none() || latest < next, "{latest:?} began before {next:?}");
    }
    assert_eq!((bench.ring.in_flight(), bench.ring.flights.resumed.len()), (0, 0));
    let beyond = Err(Status::LBA_OUT_OF_RANGE.with_dnr());
    let right = |it: &IoCompletion| it.outcome == if it.tag < 900 { Ok(()) } else { beyond };
    assert!(home.iter().all(right), "{home:?}");
}

/// An operation that waits for an fsync of others is not in the kernel.
#[test]
fn flushes_waiting_for_a_shared_sync_are_cancellable_and_block_no_io() {
    let share = u64::from(worker_quota::SHARES[1]);
    let mut bench = Bench::new(2048);
    let (store, other) = (bench.file("disk.img", 512), bench.file("other.img", 512));
    bench.ring.attach(STORE, Arc::clone(&store)).unwrap();
    bench.ring.attach(DeviceId(0), other).unwrap();
    store.health().set_fault(InjectedFault::Stall);
    BlockDevice::submit(&mut bench.ring, STORE, 0, IoRequest::Flush);
    bench.ring.submit();
    (1..=2 * share).for_each(|n| BlockDevice::submit(&mut bench.ring, STORE, n, IoRequest::Flush));
    bench.ring.submit();
    // The first one blocks: the others can be cancelled, and what arrives now starts.
    store.health().set_fault(InjectedFault::None);
    assert_eq!(bench.ring.flights.attachments[0].as_ref().unwrap().active, 1);
    let into = bench.filled(512, 0xEE);
    BlockDevice::submit(&mut bench.ring, STORE, 1000, IoRequest::Read { into, at: 0 });
    bench.ring.submit();
    assert!(bench.ring.flights.attachments[0].as_ref().unwrap().parked.is_empty());
    (0..2 * share).for_each(|n| bench.ring.recall(2000 + n, 1 + n));
    let at_once: Vec<IoCompletion> = bench.ring.flights.ready.drain(..).collect();
    let aborted = at_once.iter().filter(|done| done.outcome == Err(Status::ABORT_REQUESTED));
    assert_eq!((at_once.len() as u64, aborted.count() as u64), (4 * share, 2 * share));
    let mut tags: Vec<Tag> = bench.await_done(2).iter().map(|done| done.tag).collect();
    tags.sort_unstable();
    assert_eq!((tags, bench.ring.in_flight()), (vec![0, 1000], 0));
    assert_eq!(bench.ring.flights.attachments[0].as_ref().unwrap().active, 0);
}

/// The queue of the kernel for its workers is shared by all stores.
#[test]
#[ignore = "needs root, a loop device and mkfs.ext4"]
fn a_hanging_device_leaves_kernel_workers_to_others() {
    const MANY: u64 = 3000;
    let mut bench = Bench::new(4096);
    let disk = bench.path("ext4");
    fs::File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let device = Loop::new(&disk, 4096);
    let mount = Mount::new(&device, bench.path("mounted"));
    let hangs = open(&mount.0.join("disk.img"), Some(MANY * 4096), 4096);
    let (beside, other) = (DeviceId(0), bench.file("other.img", 4096));
    bench.ring.attach(STORE, hangs).unwrap();
    bench.ring.attach(beside, other).unwrap();
    let frozen = mount.freeze();
    (0..MANY).for_each(|n| bench.submit(IoRequest::Discard { at: n * 4096, len: 4096 }));
    bench.ring.submit();
    for _ in 0..3 {
        BlockDevice::submit(
            &mut bench.ring,
            beside,
            7,
            IoRequest::Zero { at: 0, len: 4096, deallocate: false },
        );
        BlockDevice::submit(&mut bench.ring, beside, 8, IoRequest::Flush);
        let done = bench.await_done(2);
        assert!(done.iter().all(|done| done.tag >= 7 && done.outcome == Ok(())), "{done:?}");
    }
    // A parked one is cancelled immediately; the others continue when they can.
    BlockDevice::submit(&mut bench.ring, STORE, 9, IoRequest::Discard { at: 0, len: 4096 });
    bench.ring.recall(10, 9);
    assert_eq!(bench.await_done(2).iter().map(|done| done.tag).sum::<u64>(), 19);
    assert_eq!(bench.ring.in_flight(), MANY as usize);
    drop(frozen);
    assert!(bench.await_done(MANY as usize).iter().all(|done| done.outcome == Ok(())));
    bench.ring.detach(STORE);
    drop((mount, device));
}
