//! What SPDK's host programs do and Linux does not.

use std::sync::Arc;

use nvme::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, PropertyGet};

use nvme::property::Property;
use nvme::reservation::{Register, RegisterKeys};
use nvme::{AdminOpcode, Cqe, Nqn, NqnField, Sgl, Sqe, Status};
use nvmfd::core::message::mailbox;
use nvmfd::core::sched::abort::AbortRequest;
use rdma::Work;

use crate::support::{World, connect_data, end_both, io_queue, keyed, subsystem};

/// It takes back its event requests without a word before it detaches, and gives their ids to the
/// commands that follow.
#[test]
fn a_command_reusing_the_id_of_a_pending_event_request_replaces_it() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let receives = |world: &World| {
        world.fabric.posted.iter().filter(|(_, work)| matches!(work, Work::Recv(_))).count()
    };
    let all = receives(&world);
    let event = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST);
    (1..=4).for_each(|cid| world.send(&mut queue, &event.with_cid(cid), &[]));
    assert_eq!(receives(&world), all - 4);
    let get = PropertyGet::new(Property::VS).emit().with_cid(2);
    let cqe = world.ask(&mut queue, &get, &[]);
    assert!(cqe.cid == 2 && cqe.status.is_success() && !world.fabric.disconnected);
    assert!(world.completions.is_empty(), "the request itself is not answered");
    assert_eq!(receives(&world), all - 3);
    // One more may wait, also one that takes another's place, and then no further one.
    world.send(&mut queue, &event.with_cid(2), &[]);
    world.send(&mut queue, &event.with_cid(3), &[]);
    world.run(&mut queue);
    assert!(world.completions.is_empty() && receives(&world) == all - 4);
    assert_eq!(world.ask(&mut queue, &event.with_cid(9), &[]).status.code(), 0x105);
    // Any other id that is in use is in use.
    assert!(!world.fabric.disconnected);
    world.end(queue);
}

fn unnamed() -> ConnectData {
    ConnectData { hostnqn_field: NqnField::EMPTY, ..connect_data(CNTLID_DYNAMIC) }
}

fn connect(world: &mut World, data: &ConnectData) -> (nvmfd::core::qpair::QueuePair, Cqe) {
    let mut queue = world.open_qid(0);
    world.memory[..1024].copy_from_slice(&data.emit());
    let connect = Connect { sqsize_z: 15, kato_ms: 5000, ..Connect::default() };
    let cqe = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]);
    (queue, cqe)
}

#[test]
fn unnamed_hosts_are_admitted_only_where_any_host_is_allowed() {
    let mut world = World::new();
    let (queue, cqe) = connect(&mut world, &unnamed());
    assert!(cqe.status.is_success(), "{}", cqe.status);
    assert_eq!(queue.association().unwrap().host, Nqn::UNNAMED);
    world.end(queue);

    let mut world = World::new();
    let hosts = ["nqn.2026-11.host:h".parse().unwrap()].into();
    let listed = nvmfd::core::subsystem::Subsystem { allow_any_host: false, hosts, ..subsystem() };
    world.registry.publish(Arc::new(listed));
    let (queue, cqe) = connect(&mut world, &unnamed());
    assert!(cqe.status.is(Status::CONNECT_INVALID_HOST), "{}", cqe.status);
    world.end(queue);
}

#[test]
fn unnamed_hosts_cannot_register_reservations() {
    let mut world = World::new();
    world.unnamed = true;
    let (mut queue, admin, posted) = io_queue(&mut world);
    assert_eq!(queue.association().unwrap().host, Nqn::UNNAMED);
    let keys = RegisterKeys { current: 0, new: 0xA1 };
    let register = Register(0).emit(1, Sgl::in_capsule(0, 16));
    let cqe = world.ask(&mut queue, &register, &keys.emit());
    assert!(cqe.status.is(Status::OPERATION_DENIED) && cqe.status.dnr(), "{}", cqe.status);
    end_both(world, queue, admin, posted);
}

/// Its tests of Abort count the first response.
#[test]
fn abort_completes_after_the_completion_of_the_aborted_command() {
    let (mut world, mut queue, admin_queue, posted) = World::with_io_queue();
    let hoard: Vec<_> = std::iter::from_fn(|| world.pool.take_data(4096)).collect();
    let read = Sqe::io(nvme::IoOpcode::READ, 1).with_sgl(keyed(0, 4096)).with_cid(7);
    world.send(&mut queue, &read, &[]);
    let (home, inbox) = mailbox().unwrap();
    let (recall, token) =
        AbortRequest::new(admin_queue.association().unwrap().id, 1, 7, home.waker());
    queue.on_abort(&token, &mut world.io());
    drop(token);
    inbox.hush();
    assert_eq!(recall.outcome(), None, "007h is on its way");
    assert!(world.fabric_step(&mut queue));
    assert!(world.completions.pop().unwrap().status.is(Status::ABORT_REQUESTED));
    assert_eq!((recall.outcome(), inbox.hush()), (Some(true), true), "and the admin queue hears");
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    end_both(world, queue, admin_queue, posted);
}

/// After a restart of the target it asks for its old controller many times a second.
#[test]
fn io_connects_to_stale_controllers_do_not_count_against_the_source() {
    let mut world = World::new();
    let data = connect_data(77);
    for (qid, subsystem, expected) in [
        (1, data.subnqn_field, 1),
        (1, "nqn.2026-11.io.nvmfd:none".parse::<Nqn>().unwrap().into(), 0),
    ] {
        world.fabric.admitted = 0;
        let mut queue = world.open_qid(qid);
        let connect = Connect { qid, sqsize_z: 15, ..Connect::default() };
        let data = ConnectData { subnqn_field: subsystem, ..data };
        let cqe = world.ask(&mut queue, &connect.emit(Sgl::in_capsule(0, 1024)), &data.emit());
        assert!(cqe.status.is(Status::CONNECT_INVALID_PARAMETERS), "{}", cqe.status);
        assert_eq!(world.fabric.admitted, expected);
        assert_eq!(cqe.status.dnr(), expected == 0, "another controller would do");
        world.flush_and_go(&mut queue);
        queue.finish(&mut world.io());
    }
}
