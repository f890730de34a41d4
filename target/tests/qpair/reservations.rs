//! Reservations as a queue serves them, with a worker that the test drives.

use std::sync::{Arc, mpsc};

use nvme::reservation::{
    Acquire, AcquireKeys, NotificationType, Register, RegisterKeys, Report, ReservationType,
};
use nvme::{AdminOpcode, IoOpcode, Sgl, Sqe, Status};
use nvmfd::core::message::{Mailbox, Message, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::offload::{Job, ReservationRequest};
use nvmfd::core::sched::{DrainBarrier, DrainScope};
use nvmfd::core::subsystem::reservation::{Order, Reservation};
use nvmfd::worker::Workers;
use nvmfd::worker::ns_state::{NamespaceStateMessage, NamespaceStateWorker};

use crate::support::{World, end_both, io_queue, keyed, subsystem};

/// The host that the queues of this world belong to, and another one.
const OWN: [u8; 16] = [5; 16];
const OTHER: [u8; 16] = [6; 16];

/// A world with a worker that has not begun.
fn world() -> (World, Mailbox, NamespaceStateWorker, Arc<Reservation>) {
    let (sender, message) = mailbox().unwrap();
    let worker = NamespaceStateWorker::new();
    let mut world = World::new();
    let subsystem = subsystem();
    let reservation = Arc::clone(&subsystem.namespaces[0].reservation);
    let registry = Registry::new(vec![sender], 8, 70);
    world.replace(registry, Workers::default().with_ns_state(worker.sender()));
    world.registry.publish(Arc::new(subsystem));
    (world, message, worker, reservation)
}

/// Has the state worker do what it was asked, and end.
fn keep(worker: NamespaceStateWorker, registry: &Registry) {
    worker.sender().send(NamespaceStateMessage::Stop).unwrap();
    worker.run(registry);
}

/// Hands the state worker's answers to the queue.
fn answers(world: &mut World, queue: &mut QueuePair, message: &Mailbox) -> usize {
    let mut count = 0;
    while let Some(message) = message.take() {
        if let Message::Answer(done) = message {
            queue.on_disk(done.tag as u16, done, &mut world.io());
            count += 1;
        }
    }
    world.run(queue);
    count
}

fn write() -> Sqe {
    Sqe::io(IoOpcode::WRITE, 1).with_sgl(keyed(8192, 4096)).with_cid(0x41)
}

#[test]
fn a_reservation_command_completes_when_the_state_worker_has_run() {
    let (mut world, message, worker, reservation) = world();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let keys = RegisterKeys { current: 0, new: 0xA1 };
    let register = Register(0).emit(1, Sgl::in_capsule(0, 16)).with_cid(9);
    world.send(&mut queue, &register, &keys.emit());
    world.run(&mut queue);
    assert!(world.completions.is_empty(), "nobody has decided yet");
    keep(worker, &world.registry);
    assert_eq!(answers(&mut world, &mut queue, &message), 1);
    let cqe = world.completions.pop().unwrap();
    assert!(cqe.status.is_success() && cqe.cid == 9, "{}", cqe.status);
    assert_eq!(reservation.state().registrants, [(OWN, 0xA1)].into());

    let report = Report { numd_z: 31, extended: true }.emit(1, keyed(4096, 128)).with_cid(10);
    assert!(world.ask(&mut queue, &report, &[]).status.is_success());
    assert_eq!(world.memory[4096..4096 + 128], reservation.report());
    end_both(world, queue, admin, posted);
}

#[test]
fn reservation_commands_without_a_state_worker_fail() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let register = Register(0).emit(1, Sgl::in_capsule(0, 16));
    let cqe = world.ask(&mut queue, &register, &[0; 16]);
    assert!(cqe.status.is(Status::INTERNAL_ERROR), "{}", cqe.status);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_closing_queue_waits_for_its_pending_reservation_command() {
    let (mut world, message, worker, _) = world();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let register = Register(0).emit(1, Sgl::in_capsule(0, 16));
    world.send(&mut queue, &register, &[7; 16]);
    world.flush_and_go(&mut queue);
    assert!(!queue.is_finished(), "its slot may not be named anew");
    keep(worker, &world.registry);
    answers(&mut world, &mut queue, &message);
    end_both(world, queue, admin, posted);
}

#[test]
fn writes_conflict_with_a_reservation_of_another_host() {
    let (mut world, message, worker, reservation) = world();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let how = Acquire(0).with_rtype(ReservationType::WRITE_EXCLUSIVE);
    for order in [
        Order::Register(Register(0), RegisterKeys { current: 0, new: 1 }),
        Order::Acquire(how, AcquireKeys { current: 1, preempt: 0 }),
    ] {
        let of = vec![Arc::clone(&reservation)];
        // The answers are nobody's here: they are for a reactor that is none.
        let request = ReservationRequest { of, host: OTHER, order, reactor: 0, tag: 0 };
        assert!(world.shared.offload.submit(Job::Reserve(request)));
    }
    assert!(world.ask(&mut queue, &write(), &[]).status.is_success(), "not yet");
    keep(worker, &world.registry);
    while message.take().is_some() {}
    let cqe = world.ask(&mut queue, &write(), &[]);
    assert!(cqe.status.is(Status::RESERVATION_CONFLICT) && cqe.status.dnr(), "{}", cqe.status);
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(8192, 4096));
    assert!(world.ask(&mut queue, &read, &[]).status.is_success());
    end_both(world, queue, admin, posted);
}

fn fence(nsid: u32, host: [u8; 16], drained: mpsc::Sender<()>) -> Arc<DrainBarrier> {
    Arc::new(DrainBarrier::new(
        subsystem().nqn,
        vec![nsid],
        DrainScope::Preempted(vec![host]),
        move || {
            drained.send(()).unwrap();
        },
    ))
}

#[test]
fn a_fence_aborts_unstarted_commands_and_waits_for_started_ones() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let (worker, words) = mpsc::channel();
    let drained = || words.try_recv().is_ok();
    // One at the disk, one whose data are on their way, one that waits for a buffer.
    world.send(&mut queue, &write().with_cid(1), &[]);
    assert!(world.fabric_step(&mut queue), "pulled: now at the disk");
    world.send(&mut queue, &write().with_cid(2), &[]);
    let hoard: Vec<_> = std::iter::from_fn(|| world.pool.take_data(4096)).collect();
    world.send(&mut queue, &write().with_cid(3), &[]);

    // Others are not concerned.
    for other in [fence(2, OWN, worker.clone()), fence(1, OTHER, worker.clone())] {
        queue.on_fence(&other, &mut world.io());
        drop(other);
        assert!(drained());
    }
    let concerned = fence(1, OWN, worker);
    queue.on_fence(&concerned, &mut world.io());
    drop(concerned);
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    assert!(!drained(), "two commands hold it");
    let before = world.disk.blocks.clone();
    world.memory[8192..8192 + 4096].fill(0xEE);
    while world.fabric_step(&mut queue) {}
    let ended: Vec<u16> = world.completions.iter().map(|cqe| cqe.cid).collect();
    assert_eq!(ended, [3, 2], "the one that waited at once, the other when its data had come");
    assert!(world.completions.iter().all(|cqe| cqe.status.is(Status::ABORTED_PREEMPT)));
    assert!(world.disk.blocks == before && !drained(), "the first is still at the disk");
    world.completions.clear();
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is_success(), "it was done, and says so");
    assert!(drained());
    end_both(world, queue, admin, posted);
}

#[test]
fn a_fence_of_write_protection_ends_writes_of_all_and_nothing_else() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let (worker, words) = mpsc::channel();
    let drained = || words.try_recv().is_ok();
    world.send(&mut queue, &write().with_cid(1), &[]);
    assert!(world.fabric_step(&mut queue), "pulled: now at the disk");
    let hoard: Vec<_> = std::iter::from_fn(|| world.pool.take_data(4096)).collect();
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(8192, 4096));
    world.send(&mut queue, &read.with_cid(2), &[]);
    world.send(&mut queue, &write().with_cid(3), &[]);
    let nqn = subsystem().nqn;
    let fence = Arc::new(DrainBarrier::new(nqn, vec![2, 1], DrainScope::Writers, move || {
        worker.send(()).unwrap()
    }));
    queue.on_fence(&fence, &mut world.io());
    drop(fence);
    while world.fabric_step(&mut queue) {}
    let cqe = world.completions.pop().unwrap();
    assert!(cqe.cid == 3 && cqe.status.is(Status::NAMESPACE_WRITE_PROTECTED), "{cqe:?}");
    assert!(world.completions.is_empty() && !drained(), "the first is still at the disk");
    world.disk_step(&mut queue);
    assert!(drained(), "the read holds nothing up");
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    world.run(&mut queue);
    world.serve_waiters(&mut queue);
    world.run(&mut queue);
    assert!(world.completions.iter().all(|cqe| cqe.status.is_success()));
    assert_eq!(world.completions.len(), 2);
    world.completions.clear();
    end_both(world, queue, admin, posted);
}

#[test]
fn a_fence_stops_a_command_of_many_steps_after_the_one_under_way() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let (worker, words) = mpsc::channel();
    let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_fua(true);
    world.send(&mut queue, &zeroes, &[]);
    queue.on_fence(&fence(1, OWN, worker), &mut world.io());
    world.run(&mut queue);
    let cqe = world.completions.pop().unwrap();
    assert!(cqe.status.is(Status::ABORTED_PREEMPT), "{}", cqe.status);
    assert_eq!(world.disk.trace, ["zero"], "not flushed any more");
    assert!(words.try_recv().is_ok());
    end_both(world, queue, admin, posted);
}

#[test]
fn reservation_notifications_are_reported_at_the_next_poll() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let event = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).with_cid(0x1F);
    world.send(&mut queue, &event, &[]);
    world.run(&mut queue);
    assert!(world.completions.is_empty());
    let reservation = Reservation::volatile(subsystem().nqn, 1);
    let notices = [(OWN, NotificationType::RESERVATION_RELEASED)];
    world.registry.notify(&reservation, &[(OTHER, NotificationType::RESERVATION_RELEASED)]);
    queue.tick(&mut world.io());
    world.run(&mut queue);
    assert!(world.completions.is_empty(), "another host's");
    world.registry.notify(&reservation, &notices);
    queue.tick(&mut world.io());
    world.run(&mut queue);
    let cqe = world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.dw0()), (0x1F, 0x80_00_06));
    world.end(queue);
}
