//! Hosts whose writes may be lost are told by one failed flush after the store is trusted again.

use nvme::{IoOpcode, Sqe, Status};
use nvmfd::core::qpair::QueuePair;

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
    let mut world = World::new();
    let (mut queue, admin, posted) = io_queue(&mut world);
    assert!(world.ask(&mut queue, &write(), &[]).status.is_success());
    trust(&world);
    fails_once(&mut world, &mut queue);
    end_both(world, queue, admin, posted);
}
