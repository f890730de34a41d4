//! A namespace is formatted under a queue that uses it: the fence, and the blocks that change.

use std::sync::{Arc, mpsc};

use nvme::{AdminOpcode, IoOpcode, Sqe, Status};
use nvmfd::blockdev::{BlockSizes, IoCompletion};
use nvmfd::core::message::mailbox;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::DrainBarrier;
use nvmfd::core::subsystem::lba_format::Progress;
use nvmfd::worker::Workers;
use nvmfd::worker::ns_management::NamespaceAdmin;

use crate::support::{World, admin, end_both, keyed, subsystem};

fn io(opcode: IoOpcode, cid: u16) -> Sqe {
    Sqe::io(opcode, 1).with_sgl(keyed(8192, 4096)).with_cid(cid)
}

fn statuses(world: &mut World) -> Vec<(u16, u16)> {
    let mut found: Vec<_> =
        world.completions.drain(..).map(|cqe| (cqe.cid, cqe.status.code())).collect();
    found.sort_unstable();
    found
}

#[test]
fn format_fails_unstarted_commands_and_waits_for_started_ones() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let (waiting, drained) = mpsc::channel::<()>();
    let is_drained = || drained.try_recv() == Err(mpsc::TryRecvError::Disconnected);
    // A read at the disk, a write whose data are on their way, a read that waits for a buffer.
    world.send(&mut queue, &io(IoOpcode::READ, 1), &[]);
    world.send(&mut queue, &io(IoOpcode::WRITE, 2), &[]);
    let hoard: Vec<_> = std::iter::from_fn(|| world.pool.take_data(4096)).collect();
    world.send(&mut queue, &io(IoOpcode::READ, 3), &[]);

    let mut next = subsystem();
    next.namespaces[0].formatting = Some(Arc::new(Progress::none()));
    world.registry.publish(Arc::new(next));
    let news = world.registry.subsystem(&subsystem().nqn).unwrap();
    queue.on_subsystem(&news, &mut world.io());
    let fence = Arc::new(DrainBarrier::around(subsystem().nqn, 1, waiting));
    queue.on_fence(&fence, &mut world.io());
    drop(fence);
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    world.send(&mut queue, &io(IoOpcode::READ, 4), &[]);
    world.send(&mut queue, &io(IoOpcode::FLUSH, 5).with_sgl(nvme::Sgl::NONE), &[]);
    assert!(!is_drained(), "one is at the disk, and data of one are under way");
    world.run(&mut queue);
    assert_eq!(statuses(&mut world), [(1, 0), (2, 0x084), (3, 0x084), (4, 0x084), (5, 0x084)]);
    assert!(is_drained(), "nobody uses the blocks any more");

    // It is over: other blocks, for the next command.
    let mut next = subsystem();
    let namespace = &mut next.namespaces[0];
    (namespace.block_shift, namespace.blocks) = (9, namespace.blocks * 8);
    namespace.formats = BlockSizes::only(9);
    world.registry.publish(Arc::new(next));
    let news = world.registry.subsystem(&subsystem().nqn).unwrap();
    queue.on_subsystem(&news, &mut world.io());
    let old = world.ask(&mut queue, &io(IoOpcode::READ, 6), &[]);
    assert!(old.status.is(Status::DATA_SGL_LENGTH_INVALID), "{}", old.status);
    let new = world.ask(&mut queue, &io(IoOpcode::READ, 7).with_range(8, 7), &[]);
    assert!(new.status.is_success(), "{}", new.status);
    end_both(world, queue, admin, posted);
}

#[test]
fn format_waits_only_for_device_io_of_its_own_namespace() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    world.send(&mut queue, &io(IoOpcode::READ, 1), &[]);
    let (waiting, drained) = mpsc::channel::<()>();
    queue.on_fence(&Arc::new(DrainBarrier::around(subsystem().nqn, 2, waiting)), &mut world.io());
    assert_eq!(drained.try_recv(), Err(mpsc::TryRecvError::Disconnected), "it is another one");
    let (waiting, drained) = mpsc::channel::<()>();
    queue.on_fence(&Arc::new(DrainBarrier::around(subsystem().nqn, 1, waiting)), &mut world.io());
    world.flush_and_go(&mut queue);
    assert_eq!(drained.try_recv(), Err(mpsc::TryRecvError::Empty), "the disk still has it");
    while world.disk_step(&mut queue) {}
    assert_eq!(drained.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    end_both(world, queue, admin, posted);
}

#[test]
fn a_queued_format_is_withdrawn_when_its_connection_closes() {
    let (sender, _message) = mailbox().unwrap();
    let worker = NamespaceAdmin::new();
    let mut world = World::new();
    let registry = Registry::new(vec![sender], 8, 70);
    world.replace(registry, Workers::default().with_ns_management(worker.sender()));
    let mut subsystem = subsystem();
    subsystem.namespaces[0].allow_format = true;
    world.registry.publish(Arc::new(subsystem));
    let (mut queue, _) = admin(&mut world);
    world.send(&mut queue, &Sqe::admin(AdminOpcode::FORMAT_NVM).with_nsid(1), &[]);
    world.run(&mut queue);
    let job = worker.take().expect("a format");
    assert_eq!(job.connection.check(), Ok(()));
    world.flush_and_go(&mut queue);
    assert_eq!(job.connection.check(), Err(Status::ABORTED_SQ_DELETION));
    let done = IoCompletion { tag: job.tag, buf: None, outcome: job.connection.check() };
    queue.on_disk(job.tag as u16, done, &mut world.io());
    assert!(queue.is_finished());
    queue.finish(&mut world.io());
}
