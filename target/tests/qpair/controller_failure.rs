//! A controller that an administrator has fail.

use nvme::fabrics::{PropertyGet, PropertySet};
use nvme::property::Property;
use nvme::{AdminOpcode, IoOpcode, Sqe, Status};
use rdma::Work;

use crate::support::{World, end_both, keyed};

const FATAL: u64 = 1 << 1;

#[test]
fn a_failed_controller_reports_csts_cfs_and_an_event_until_reset() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let id = queue.association().unwrap().id;
    let event = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).with_cid(0x1F);
    world.send(&mut queue, &event, &[]);
    assert!(world.registry.fail(id).is_some() && world.registry.fail(id + 1).is_none());
    queue.tick(&mut world.io());
    world.run(&mut queue);
    let cqe = world.completions.pop().expect("the event");
    assert_eq!((cqe.cid, cqe.dw0()), (0x1F, 0x01_03_00), "error status, persistent internal error");
    let csts = PropertyGet::new(Property::CSTS).emit();
    assert_eq!(world.ask(&mut queue, &csts, &[]).result, FATAL, "fatal, and not ready");
    let features = Sqe { cdw10: 7, cdw11: 0x3_0003, ..Sqe::admin(AdminOpcode::SET_FEATURES) };
    let refused = world.ask(&mut queue, &features, &[]);
    assert!(refused.status.is(Status::COMMAND_SEQUENCE_ERROR), "{}", refused.status);
    // The host resets it, and all is well.
    for (cc, status) in [(0x0046_0000, 0), (0x0046_0001, 1)] {
        let set = PropertySet::new(Property::CC, cc).emit();
        assert!(world.ask(&mut queue, &set, &[]).status.is_success());
        assert_eq!(world.ask(&mut queue, &csts, &[]).result, status);
    }
    assert!(world.ask(&mut queue, &features, &[]).status.is_success());
    assert!(!world.fabric.disconnected);
    world.end(queue);
}

/// A status would end in the host's file system, a lost path does not.
#[test]
fn the_io_queues_of_a_controller_that_fails_close_without_an_answer() {
    let (mut world, mut queue, mut admin, posted) = World::with_io_queue();
    world.send(&mut queue, &Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096)), &[]);
    world.registry.fail(admin.association().unwrap().id);
    let of_queue = std::mem::replace(&mut world.fabric.posted, posted);
    admin.tick(&mut world.io());
    let posted = std::mem::replace(&mut world.fabric.posted, of_queue);
    assert!(!world.fabric.disconnected);
    queue.tick(&mut world.io());
    assert!(world.fabric.disconnected && world.completions.is_empty());
    let sends = |(_, work): &(_, Work)| matches!(work, Work::Send { .. });
    assert!(!world.fabric.posted.iter().any(sends));
    end_both(world, queue, admin, posted);
}
