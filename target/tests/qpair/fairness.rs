//! What one host may hold of the buffers that all hosts share.

use std::mem::{replace, take};
use std::ops::Range;
use std::sync::Arc;

use nvme::{IoOpcode, Sqe};
use nvmfd::blockdev::DeviceId;
use nvmfd::core::message::mailbox;
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::subsystem::Namespace;

use crate::support::{World, end_both, io_queue, keyed, share, subsystem};

/// Bytes of each write: too many for a capsule, so they are pulled into a buffer of the pool.
const LEN: u32 = 16 << 10;

fn write(cid: u16) -> Sqe {
    Sqe::io(IoOpcode::WRITE, 1).with_range(0, 3).with_sgl(keyed(0, LEN)).with_cid(cid)
}

#[test]
fn a_host_that_sends_no_data_does_not_keep_others_waiting() {
    let (mut world, mut silent, silent_admin, silent_admin_posted) = World::with_io_queue();
    for cid in 0..16 {
        world.send(&mut silent, &write(cid), &[]);
    }
    // 256 KiB for data: it may hold four times of what is free, and the rest of its own waits.
    assert_eq!(world.waiters.len(), 3);
    let silent_posted = take(&mut world.fabric.posted);

    world.key = 1;
    let (mut busy, busy_admin, busy_admin_posted) = io_queue(&mut world);
    for cid in 0..10 {
        let cqe = world.ask(&mut busy, &write(cid), &[]);
        assert!(cqe.status.is_success(), "{}", cqe.status);
    }
    assert_eq!(world.waiters.len(), 3, "the silent one has got nothing more");
    let busy_posted = take(&mut world.fabric.posted);

    // Its data arrive in the end, and so do all others.
    world.key = 0;
    world.fabric.posted = silent_posted;
    world.run(&mut silent);
    let mut done: Vec<u16> = world.completions.drain(..).map(|cqe| cqe.cid).collect();
    done.sort_unstable();
    assert_eq!(done, (0..16).collect::<Vec<_>>());
    assert!(world.waiters.is_empty());

    let silent_posted = take(&mut world.fabric.posted);
    for (mut queue, posted) in [
        (silent, silent_posted),
        (busy, busy_posted),
        (silent_admin, silent_admin_posted),
        (busy_admin, busy_admin_posted),
    ] {
        world.fabric.posted = posted;
        world.flush_and_go(&mut queue);
        assert!(queue.is_finished());
        queue.finish(&mut world.io());
    }
    assert!(world.pool.is_full(), "{:?}", world.pool.free());
}

/// A host that took a second to send data holds a third of the buffers, beside one that sends at once.
#[test]
fn a_slow_host_leaves_two_thirds_of_the_buffers_to_prompt_ones() {
    let (mut world, mut slow, slow_admin, slow_admin_posted) = World::with_io_queue();
    world.send(&mut slow, &write(0), &[]);
    world.now_ns += 1_000_000_000;
    world.run(&mut slow);
    let slow_posted = take(&mut world.fabric.posted);

    world.key = 1;
    let (mut prompt, prompt_admin, prompt_admin_posted) = io_queue(&mut world);
    assert!(world.ask(&mut prompt, &write(0), &[]).status.is_success());
    let prompt_posted = replace(&mut world.fabric.posted, slow_posted);

    world.key = 0;
    for cid in 1..16 {
        world.send(&mut slow, &write(cid), &[]);
    }
    // 256 KiB for data: as much as half of what is free then, and the rest of its own waits.
    assert_eq!(world.waiters.len(), 15 - 5);
    world.run(&mut slow);
    assert!(world.waiters.is_empty());
    assert_eq!(world.completions.drain(..).filter(|cqe| cqe.status.is_success()).count(), 16);

    let slow_posted = take(&mut world.fabric.posted);
    for (mut queue, posted) in [
        (slow, slow_posted),
        (prompt, prompt_posted),
        (slow_admin, slow_admin_posted),
        (prompt_admin, prompt_admin_posted),
    ] {
        world.fabric.posted = posted;
        world.flush_and_go(&mut queue);
        assert!(queue.is_finished());
        queue.finish(&mut world.io());
    }
    assert!(world.pool.is_full(), "{:?}", world.pool.free());
}

/// A world whose subsystem has a second namespace, on a disk of its own.
pub(crate) fn two_namespaces() -> World {
    let mut subsystem = subsystem();
    let second = Namespace { nsid: 2, backing: DeviceId(1), ..subsystem.namespaces[0].clone() };
    subsystem.namespaces.push(second);
    let registry = Registry::new(vec![mailbox().unwrap().0], 8, 70);
    registry.publish(Arc::new(subsystem));
    World::of(share(registry), 0)
}

fn read(nsid: u32, cid: u16) -> Sqe {
    let sqe = Sqe::io(IoOpcode::READ, nsid).with_range(0, 3);
    sqe.with_sgl(keyed(0, LEN)).with_cid(cid)
}

/// Reads of the second namespace, each of which is answered while those of the first wait.
fn the_second_is_served(world: &mut World, queue: &mut QueuePair, cids: Range<u16>) {
    let before = (world.disk.waiting.len(), world.waiters.len());
    for cid in cids {
        world.send(queue, &read(2, cid), &[]);
        world.serve_waiters(queue);
        assert_eq!(world.disk.backings.last(), Some(&DeviceId(1)), "command {cid}");
        let newest = world.disk.waiting.pop_back().expect("it has gone to its disk");
        world.disk.waiting.push_front(newest);
        assert!(world.disk_step(queue));
        while world.fabric_step(queue) {}
        let answers: Vec<_> = take(&mut world.completions);
        assert!(answers.iter().all(|cqe| cqe.cid == cid && cqe.status.is_success()), "{answers:?}");
        assert_eq!(answers.len(), 1);
        assert_eq!((world.disk.waiting.len(), world.waiters.len()), before, "as before");
    }
}

#[test]
fn a_hung_device_does_not_block_other_namespaces_of_its_hosts() {
    let mut world = two_namespaces();
    let (mut queue, admin, posted) = io_queue(&mut world);
    (0..14).for_each(|cid| world.send(&mut queue, &read(1, cid), &[]));
    // 256 KiB for data: the namespace holds as much as is free, and its other commands wait.
    assert_eq!((world.disk.waiting.len(), world.waiters.len()), (8, 6));
    the_second_is_served(&mut world, &mut queue, 14..64);
    // The disk is back: those that wait get their turn, in their order.
    world.run(&mut queue);
    let answered: Vec<u16> = world.completions.drain(..).map(|cqe| cqe.cid).collect();
    assert_eq!(answered, (0..14).collect::<Vec<_>>());
    assert!(world.waiters.is_empty());
    end_both(world, queue, admin, posted);
}

#[test]
fn a_hung_device_does_not_block_other_namespaces_beside_a_busy_host() {
    let mut world = two_namespaces();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let own_posted = take(&mut world.fabric.posted);
    world.key = 1;
    let (mut busy, busy_admin, busy_admin_posted) = io_queue(&mut world);
    let busy_posted = replace(&mut world.fabric.posted, own_posted);
    world.key = 0;
    (0..14).for_each(|cid| world.send(&mut queue, &read(1, cid), &[]));
    assert_eq!((world.disk.waiting.len(), world.waiters.len()), (8, 6));

    // Another host takes of both namespaces what it may, and its commands take their time.
    let own_posted = replace(&mut world.fabric.posted, busy_posted);
    world.key = 1;
    for cid in 0..14 {
        let nsid = 1 + u32::from(cid >= 7);
        world.send(&mut busy, &write(cid).with_nsid(nsid), &[]);
    }
    world.serve_waiters(&mut busy);
    let busy_posted = replace(&mut world.fabric.posted, own_posted);
    // 128 KiB are at the disk that hangs, 96 KiB are the other host's, and 32 KiB are free.
    assert_eq!(world.waiters.len(), 6 + 8);

    world.key = 0;
    the_second_is_served(&mut world, &mut queue, 14..40);

    // The disk is back, and then the other host.
    world.run(&mut queue);
    let answered: Vec<u16> = world.completions.drain(..).map(|cqe| cqe.cid).collect();
    assert_eq!(answered, (0..14).collect::<Vec<_>>());
    let own_posted = take(&mut world.fabric.posted);
    (world.key, world.fabric.posted) = (1, busy_posted);
    world.run(&mut busy);
    assert_eq!((world.completions.drain(..).count(), world.waiters.len()), (14, 0));
    let busy_posted = take(&mut world.fabric.posted);
    for (mut queue, posted) in
        [(queue, own_posted), (busy, busy_posted), (admin, posted), (busy_admin, busy_admin_posted)]
    {
        world.fabric.posted = posted;
        world.flush_and_go(&mut queue);
        assert!(queue.is_finished());
        queue.finish(&mut world.io());
    }
    assert!(world.pool.is_full(), "{:?}", world.pool.free());
}
