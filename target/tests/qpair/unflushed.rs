//! Hosts whose writes may be lost are told by one failed flush after the store is trusted again.

use std::sync::Arc;
use std::time::Duration;

use nvme::log::AnaState;
use nvme::{Cqe, IoOpcode, Sqe, Status};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::subsystem::ana::AnaStates;
use nvmfd::core::subsystem::rate_limit::{Limit, Limiter};

use crate::support::{World, end_both, io_queue, keyed, subsystem};

fn write() -> Sqe {
    Sqe::io(IoOpcode::WRITE, 1).with_range(3, 0).with_sgl(keyed(0, 4096))
}

fn flush() -> Sqe {
    Sqe::io(IoOpcode::FLUSH, 1)
}

/// The administrator trusts the store again.
fn trust(world: &World) {
    world.registry.report_lost_writes(&subsystem().nqn, 1);
}

/// One flush fails, and no host takes the next one in its place by itself.
fn fails_once(world: &mut World, queue: &mut QueuePair) {
    let told = world.ask(queue, &flush(), &[]).status;
    assert!(told.is(Status::WRITE_FAULT) && told.dnr(), "{told}");
    assert!(world.ask(queue, &flush(), &[]).status.is_success(), "once");
}

/// Linux repeats by itself what fails without Do Not Retry.
#[test]
fn a_flush_that_reports_lost_writes_is_not_to_be_retried() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    assert!(world.ask(&mut queue, &write(), &[]).status.is_success());
    trust(&world);
    fails_once(&mut world, &mut queue);
    end_both(world, queue, admin, posted);
}

/// It was begun on a store that has been replaced meanwhile, or whose failure others have met.
#[test]
fn a_flush_in_progress_during_a_trust_confirms_no_earlier_writes() {
    for fails in [true, false] {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        assert!(world.ask(&mut queue, &write(), &[]).status.is_success());
        world.send(&mut queue, &flush(), &[]);
        trust(&world);
        world.disk.fail = fails.then_some(Status::NAMESPACE_NOT_READY);
        world.run(&mut queue);
        world.disk.fail = None;
        let Cqe { status, .. } = world.completions.pop().unwrap();
        assert_eq!(status.is_success(), !fails, "{status}");
        fails_once(&mut world, &mut queue);
        end_both(world, queue, admin, posted);
    }
}

#[test]
fn a_flush_refused_after_its_rate_limit_confirms_no_earlier_writes() {
    let mut world = World::new();
    let limit = Limit { iops: Some(1), bandwidth: None, burst_ms: 0 };
    let mut limited = subsystem();
    limited.namespaces[0].limiters = vec![Arc::new(Limiter::new(limit, world.now))];
    world.registry.publish(Arc::new(limited));
    let (mut queue, admin, posted) = io_queue(&mut world);
    assert!(world.ask(&mut queue, &write(), &[]).status.is_success());
    world.send(&mut queue, &flush(), &[]);
    let reach = |state| queue_reach(&admin, state);
    reach(AnaState::INACCESSIBLE);
    world.now += Duration::from_secs(2);
    let now = world.now;
    let next = world.waiters.rate_limits.next(now, |_, slot| queue.book(slot, now));
    queue.on_rate_limit(next.expect("its time has come").1, &mut world.io());
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is(Status::ANA_INACCESSIBLE));
    reach(AnaState::OPTIMIZED);
    queue.on_subsystem(&Arc::new(subsystem()), &mut world.io());
    trust(&world);
    fails_once(&mut world, &mut queue);
    end_both(world, queue, admin, posted);
}

/// Sets the state of all groups on the path of a host.
fn queue_reach(admin: &QueuePair, state: AnaState) {
    admin.association().unwrap().reach.set(&AnaStates::all(state));
}
