//! Limits as a queue serves them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::sqe::Flags;
use nvme::{IoOpcode, Sgl, Sqe, Status};
use nvmfd::core::message::mailbox;
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::sched::abort::AbortRequest;
use nvmfd::core::subsystem::Subsystem;
use nvmfd::core::subsystem::rate_limit::{Grant, Limit, Limiter};
use rdma::{Tag, Work};

use crate::support::{World, end_both, io_queue, keyed, subsystem};

const MS: Duration = Duration::from_millis(1);

fn limit(iops: Option<u32>, bandwidth: Option<u64>) -> Limit {
    Limit { iops, bandwidth, burst_ms: 0 }
}

/// The subsystem with such a limit on its namespace.
fn limited(world: &World, limit: Limit) -> Subsystem {
    let mut subsystem = subsystem();
    subsystem.namespaces[0].limiters = vec![Arc::new(Limiter::new(limit, world.now))];
    subsystem
}

type Ends = (QueuePair, QueuePair, VecDeque<(Tag, Work)>);

fn stage(change: impl FnOnce(&World) -> Subsystem) -> (World, Ends) {
    let mut world = World::new();
    let subsystem = change(&world);
    world.registry.publish(Arc::new(subsystem));
    let ends = io_queue(&mut world);
    (world, ends)
}

/// Advances the time and starts permitted commands; returns the answered ones.
fn after(world: &mut World, queue: &mut QueuePair, time: Duration) -> Vec<u16> {
    world.now += time;
    let now = world.now;
    while let Some((_, slot)) = world.waiters.rate_limits.next(now, |_, slot| queue.book(slot, now))
    {
        queue.on_rate_limit(slot, &mut world.io());
    }
    world.run(queue);
    world.completions.drain(..).map(|cqe| cqe.cid).collect()
}

/// Limits are about to change.
fn change(world: &mut World, queue: &QueuePair) {
    let now = world.now;
    let refund = |_, slot, booking: &Grant| queue.give_back(slot, booking, now);
    world.waiters.rate_limits.change(now, refund);
}

fn read(cid: u16) -> Sqe {
    Sqe::io(IoOpcode::READ, 1).with_range(3, 0).with_sgl(keyed(0, 4096)).with_cid(cid)
}

#[test]
fn rate_limited_commands_start_in_order_at_their_booked_time() {
    let (mut world, (mut queue, admin, posted)) =
        stage(|world| limited(world, limit(Some(1000), None)));
    (0..5).for_each(|cid| world.send(&mut queue, &read(cid), &[]));
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [0]);
    assert_eq!(world.waiters.rate_limits.due(), Some(world.now + MS));
    assert!(after(&mut world, &mut queue, MS / 2).is_empty());
    assert_eq!(after(&mut world, &mut queue, MS / 2), [1]);
    assert_eq!(after(&mut world, &mut queue, MS), [2]);
    // What is refused, and what has no limit, waits for nobody.
    let beyond = read(9).with_range(1 << 40, 0);
    world.send(&mut queue, &beyond, &[]);
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [9]);
    assert_eq!(after(&mut world, &mut queue, MS), [3]);
    assert_eq!(after(&mut world, &mut queue, MS), [4]);
    assert!(after(&mut world, &mut queue, MS * 10).is_empty());
    assert_eq!(world.waiters.rate_limits.due(), None, "nobody waits");
    end_both(world, queue, admin, posted);
}

#[test]
fn a_fused_command_whose_second_half_is_aborted_waits_for_no_limit() {
    let (mut world, (mut queue, admin, posted)) =
        stage(|world| limited(world, limit(Some(1000), None)));
    world.send(&mut queue, &read(0), &[]);
    for (cid, opcode, fuse) in
        [(1, IoOpcode::COMPARE, Flags::FUSED_FIRST), (2, IoOpcode::WRITE, Flags::FUSED_SECOND)]
    {
        let half = Sqe { opcode: opcode.0, ..read(cid) }.with_flags(Flags::SGL.with_fuse(fuse));
        world.send(&mut queue, &half, &[]);
    }
    let (home, _inbox) = mailbox().unwrap();
    let (recall, token) = AbortRequest::new(admin.association().unwrap().id, 1, 2, home.waker());
    queue.on_abort(&token, &mut world.io());
    let ended = after(&mut world, &mut queue, Duration::ZERO);
    assert_eq!((ended.len(), recall.outcome()), (3, Some(true)), "{ended:?}");
    world.now += MS * 10;
    let now = world.now;
    assert_eq!(world.waiters.rate_limits.next(now, |_, slot| queue.book(slot, now)), None);
    drop(token);
    end_both(world, queue, admin, posted);
}

/// Others at the limit would wait for it, for as long as somebody likes.
#[test]
fn commands_that_never_start_are_refunded_their_rate_limit_booking() {
    let mut limiter = None;
    let (mut world, (mut queue, admin, posted)) = stage(|world| {
        let subsystem = limited(world, limit(Some(10), None));
        limiter = subsystem.namespaces[0].limiters.first().cloned();
        subsystem
    });
    world.send(&mut queue, &read(0), &[]);
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [0]);
    let (home, _inbox) = mailbox().unwrap();
    for _ in 0..100 {
        world.send(&mut queue, &read(1), &[]);
        let association = admin.association().unwrap().id;
        let (recall, token) = AbortRequest::new(association, 1, 1, home.waker());
        queue.on_abort(&token, &mut world.io());
        assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [1]);
        assert_eq!(recall.outcome(), Some(true));
    }
    // Nor does anybody pay twice because something else is published.
    world.send(&mut queue, &read(2), &[]);
    for _ in 0..100 {
        change(&mut world, &queue);
        assert!(after(&mut world, &mut queue, Duration::ZERO).is_empty());
    }
    assert!(after(&mut world, &mut queue, MS * 99).is_empty());
    assert_eq!(after(&mut world, &mut queue, MS), [2]);
    // A queue that closes as well.
    world.send(&mut queue, &read(3), &[]);
    assert!(after(&mut world, &mut queue, Duration::ZERO).is_empty());
    let now = world.now;
    end_both(world, queue, admin, posted);
    assert_eq!(limiter.unwrap().book(now, 0).start, now + MS * 100);
}

#[test]
fn bandwidth_limits_charge_bytes_and_those_of_a_copy_afterwards() {
    // A block takes a millisecond.
    let (mut world, (mut queue, admin, posted)) =
        stage(|world| limited(world, limit(None, Some(4_096_000))));
    let write = |cid| Sqe { opcode: IoOpcode::WRITE.0, ..read(cid) };
    world.send(&mut queue, &write(0).with_range(3, 3).with_sgl(keyed(0, 16384)), &[]);
    world.send(&mut queue, &read(1), &[]);
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [0]);
    assert!(after(&mut world, &mut queue, MS * 3).is_empty(), "four blocks were written");
    assert_eq!(after(&mut world, &mut queue, MS), [1]);
    world.now += MS;
    let copy = Copy { sdlba: 40, flags: CopyFlags(0) }.emit(1, Sgl::in_capsule(0, 32));
    world.send(&mut queue, &copy.with_cid(2), &CopyRange { slba: 1, nlb_z: 7 }.emit());
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [2]);
    world.send(&mut queue, &read(3), &[]);
    assert!(after(&mut world, &mut queue, MS * 7).is_empty());
    assert_eq!(after(&mut world, &mut queue, MS), [3]);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_host_has_its_own_limit_and_a_fused_command_counts_as_one() {
    let (mut world, (mut queue, admin, posted)) = stage(|world| {
        let mut subsystem = subsystem();
        let limiter = Arc::new(Limiter::new(limit(Some(1000), None), world.now));
        let host = "nqn.2026-11.host:h".parse().unwrap();
        subsystem.host_limiters = Arc::new([(host, vec![limiter])].into());
        subsystem
    });
    world.send(&mut queue, &read(0), &[]);
    world.memory[4096..8192].copy_from_slice(&world.disk.blocks[3 * 4096..4 * 4096]);
    let half = |opcode: IoOpcode, fuse, cid| {
        let flags = Flags::SGL.with_fuse(fuse);
        Sqe { opcode: opcode.0, flags, ..read(cid) }.with_sgl(keyed(4096, 4096))
    };
    world.send(&mut queue, &half(IoOpcode::COMPARE, Flags::FUSED_FIRST, 1), &[]);
    world.send(&mut queue, &half(IoOpcode::WRITE, Flags::FUSED_SECOND, 2), &[]);
    world.send(&mut queue, &read(3), &[]);
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [0]);
    assert_eq!(after(&mut world, &mut queue, MS), [1, 2]);
    assert_eq!(after(&mut world, &mut queue, MS), [3]);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_changed_or_removed_rate_limit_takes_effect_at_once() {
    let (mut world, (mut queue, admin, posted)) =
        stage(|world| limited(world, limit(Some(1), None)));
    (0..4).for_each(|cid| world.send(&mut queue, &read(cid), &[]));
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [0]);
    assert!(after(&mut world, &mut queue, MS * 900).is_empty());
    let faster = Arc::new(limited(&world, limit(Some(1000), None)));
    change(&mut world, &queue);
    queue.on_subsystem(&faster, &mut world.io());
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [1]);
    assert_eq!(after(&mut world, &mut queue, MS), [2]);
    change(&mut world, &queue);
    queue.on_subsystem(&Arc::new(subsystem()), &mut world.io());
    assert_eq!(after(&mut world, &mut queue, Duration::ZERO), [3]);
    end_both(world, queue, admin, posted);
}

#[test]
fn queues_with_rate_limited_commands_can_disconnect_or_be_closed() {
    for dies in [false, true] {
        let (mut world, (mut queue, admin, posted)) =
            stage(|world| limited(world, limit(Some(1), None)));
        (0..6).for_each(|cid| world.send(&mut queue, &read(cid), &[]));
        world.run(&mut queue);
        world.completions.clear();
        if !dies {
            let sqe = nvme::fabrics::Disconnect { recfmt: 0 }.emit().with_cid(9);
            world.send(&mut queue, &sqe, &[]);
            world.run(&mut queue);
            let told = |cid| world.completions.iter().find(|cqe| cqe.cid == cid).unwrap().status;
            assert!((1..6).all(|cid| told(cid).is(Status::ABORTED_SQ_DELETION)));
            assert!(told(9).is_success());
        }
        end_both(world, queue, admin, posted);
    }
}
