//! Abort: which commands end, which continue, and that the response reports it.

use nvme::sqe::{DsmRange, Flags};
use nvme::{AdminOpcode, IoOpcode, Sgl, Sqe, Status};
use nvmfd::core::message::{Mailbox, Sender, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::sched::abort::AbortRequest;

use crate::support::{World, admin, end_both, io_queue, keyed};

const CID: u16 = 0x33;

fn abort(sqid: u16, cid: u16) -> Sqe {
    let cdw10 = u32::from(sqid) | u32::from(cid) << 16;
    Sqe { cdw10, ..Sqe::admin(AdminOpcode::ABORT).with_cid(0x70) }
}

/// The abort of an Abort command on another reactor, as its mail brings it to an I/O queue.
struct Abort {
    home: Sender,
    _inbox: Mailbox,
}

impl Abort {
    fn new() -> Abort {
        let (home, inbox) = mailbox().unwrap();
        Abort { home, _inbox: inbox }
    }

    fn tell(
        &self,
        world: &mut World,
        queue: &mut QueuePair,
        admin: &QueuePair,
        cid: u16,
    ) -> AbortRequest {
        let id = admin.association().unwrap().id;
        let (recall, token) = AbortRequest::new(id, 1, cid, self.home.waker());
        queue.on_abort(&token, &mut world.io());
        recall
    }
}

/// What came of the command, and what the Abort command says.
fn ends(world: &mut World, queue: &mut QueuePair, recall: &AbortRequest) -> (u16, bool) {
    world.run(queue);
    let cqe = world.completions.pop().expect("an answer");
    assert_eq!((cqe.cid, world.completions.len()), (CID, 0));
    (cqe.status.code(), recall.outcome().expect("settled"))
}

fn read() -> Sqe {
    Sqe::io(IoOpcode::READ, 1).with_range(1, 0).with_sgl(keyed(0, 4096)).with_cid(CID)
}

fn write() -> Sqe {
    Sqe { opcode: IoOpcode::WRITE.0, ..read() }
}

#[test]
fn an_aborted_event_request_completes_at_once_and_frees_its_slot() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let event = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST);
    for cid in 1..=4 {
        world.send(&mut queue, &event.with_cid(cid), &[]);
    }
    world.send(&mut queue, &abort(0, 2), &[]);
    world.run(&mut queue);
    let answers: Vec<_> =
        world.completions.drain(..).map(|c| (c.cid, c.status.code(), c.dw0())).collect();
    assert_eq!(answers, [(2, 0x007, 0), (0x70, 0, 0)], "the command's own answer comes first");
    world.send(&mut queue, &event.with_cid(2), &[]);
    world.run(&mut queue);
    assert!(world.completions.is_empty(), "one more waits");
    assert_eq!(world.ask(&mut queue, &event.with_cid(5), &[]).status.code(), 0x105);
    world.end(queue);
}

#[test]
fn abort_of_a_nonexistent_command_reports_not_aborted() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    // No such command, an Abort command (this one), no such queue.
    for named in [abort(0, 9), abort(0, 0x70), abort(3, 9), abort(u16::MAX, 0)] {
        let cqe = world.ask(&mut queue, &named, &[]);
        assert!(cqe.status.is_success());
        assert_eq!((cqe.cid, cqe.dw0()), (0x70, 1), "{named:?}");
    }
    world.end(queue);
}

#[test]
fn excess_aborts_fail_with_abort_command_limit_exceeded() {
    let mut world = World::new();
    let (messages, inbox) = mailbox().unwrap();
    let registry = nvmfd::core::registry::Registry::new(vec![messages], 8, 70);
    world.replace(registry, nvmfd::worker::Workers::default());
    world.registry.publish(std::sync::Arc::new(crate::support::subsystem()));
    let (mut queue, _) = admin(&mut world);
    // The errands wait in the channel.
    for cid in 1..=4 {
        world.send(&mut queue, &abort(1, 9).with_cid(cid), &[]);
    }
    assert_eq!(world.ask(&mut queue, &abort(1, 9).with_cid(5), &[]).status.code(), 0x103);
    assert!(world.completions.is_empty());
    while let Some(message) = inbox.take() {
        drop(message);
    }
    queue.tick(&mut world.io());
    world.run(&mut queue);
    let told: Vec<_> = world.completions.drain(..).map(|c| (c.cid, c.dw0())).collect();
    assert_eq!(told, [1, 2, 3, 4].map(|cid| (cid, 1)), "in order; nobody had the queue");
    assert_eq!(world.ask(&mut queue, &abort(0, 9), &[]).dw0(), 1, "there is room again");
    world.end(queue);
}

#[test]
fn abort_reports_whether_the_device_cancelled_the_operation() {
    let abort = Abort::new();
    for (gives_back, expected) in [(true, (0x007, true)), (false, (0x000, false))] {
        let flush = Sqe::io(IoOpcode::FLUSH, 1).with_cid(CID);
        let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(1, 0).with_cid(CID);
        for sqe in [read(), write(), flush, zeroes] {
            let mut world = World::new();
            world.disk.gives_back = gives_back;
            let (mut queue, admin, posted) = io_queue(&mut world);
            world.send(&mut queue, &sqe, &[]);
            while world.disk.waiting.is_empty() {
                assert!(world.fabric_step(&mut queue));
            }
            let recall = abort.tell(&mut world, &mut queue, &admin, CID);
            assert_eq!(recall.outcome(), None, "the disk has not answered");
            let found = ends(&mut world, &mut queue, &recall);
            assert_eq!(found, expected, "{sqe:?}");
            end_both(world, queue, admin, posted);
        }
    }
}

#[test]
fn abort_does_not_wait_for_an_operation_that_cannot_be_cancelled() {
    let abort = Abort::new();
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    world.send(&mut queue, &read(), &[]);
    let recall = abort.tell(&mut world, &mut queue, &admin, CID);
    assert!(world.disk_step(&mut queue), "the disk will not give it back");
    assert_eq!((recall.outcome(), world.disk.waiting.len()), (Some(false), 1));
    assert_eq!(ends(&mut world, &mut queue, &recall), (0, false));
    end_both(world, queue, admin, posted);
}

#[test]
fn concurrent_aborts_of_a_command_all_report_its_outcome() {
    let abort = Abort::new();
    for (gives_back, expected) in [(true, (0x007, true)), (false, (0x000, false))] {
        for sqe in [read(), write()] {
            // When the later Aborts arrive: in every state from the capsule to the device.
            for steps in 0..3 {
                let mut world = World::new();
                world.disk.gives_back = gives_back;
                let (mut queue, admin, posted) = io_queue(&mut world);
                world.memory[..4096].fill(0xAB);
                world.send(&mut queue, &sqe, &[]);
                let first = abort.tell(&mut world, &mut queue, &admin, CID);
                for _ in 0..steps {
                    world.fabric_step(&mut queue);
                }
                let more = [(); 3].map(|()| abort.tell(&mut world, &mut queue, &admin, CID));
                let found = ends(&mut world, &mut queue, &first);
                // What is pulled does not need the disk to be given back.
                let pulled = sqe.opcode == write().opcode;
                assert!(found == expected || pulled && found == (0x007, true), "{found:?}");
                for later in more {
                    let told = later.outcome().expect("settled");
                    assert!(!told || found.1, "{steps}: told that it was aborted, and it was not");
                    // Once its answer is on the way, it is no longer there to be aborted.
                    assert!(told == found.1 || pulled && steps > 0, "{steps}: {told} {found:?}");
                }
                end_both(world, queue, admin, posted);
            }
        }
    }
}

#[test]
fn an_aborted_write_that_is_pulling_data_does_not_reach_the_device() {
    let abort = Abort::new();
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let before = world.disk.blocks.clone();
    world.memory[..4096].fill(0xAB);
    world.send(&mut queue, &write(), &[]);
    let recall = abort.tell(&mut world, &mut queue, &admin, CID);
    assert_eq!(ends(&mut world, &mut queue, &recall), (0x007, true));
    assert!(world.disk.blocks == before && world.disk.trace.is_empty());
    end_both(world, queue, admin, posted);
}

#[test]
fn an_aborted_command_leaves_the_buffer_wait_queue() {
    let abort = Abort::new();
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for cid in 0..8 {
        let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(keyed(0, 1 << 16));
        world.send(&mut queue, &read.with_cid(cid), &[]);
    }
    assert_eq!((world.disk.waiting.len(), world.waiters.len()), (4, 4));
    let recall = abort.tell(&mut world, &mut queue, &admin, 6);
    assert_eq!((recall.outcome(), world.waiters.len()), (None, 3));
    assert!(world.fabric_step(&mut queue));
    assert_eq!(recall.outcome(), Some(true));
    let cqe = world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.status), (6, Status::ABORT_REQUESTED.with_more(true)));
    world.run(&mut queue);
    let order: Vec<u16> = world.completions.drain(..).map(|c| c.cid).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5, 7]);
    end_both(world, queue, admin, posted);
}

#[test]
fn abort_of_either_fused_half_removes_both_from_the_buffer_queue() {
    let abort = Abort::new();
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for cid in 0..8 {
        let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(keyed(0, 1 << 16));
        world.send(&mut queue, &read.with_cid(cid), &[]);
    }
    assert_eq!(world.waiters.len(), 4);
    for aborted in [21, 20] {
        for (cid, opcode, fuse) in [
            (20, IoOpcode::COMPARE, Flags::FUSED_FIRST),
            (21, IoOpcode::WRITE, Flags::FUSED_SECOND),
        ] {
            let flags = Flags::SGL.with_fuse(fuse);
            let half = Sqe { opcode: opcode.0, ..read() }.with_flags(flags).with_cid(cid);
            world.send(&mut queue, &half, &[]);
        }
        assert_eq!(world.waiters.len(), 5, "the first half stands in line for both");
        let recall = abort.tell(&mut world, &mut queue, &admin, aborted);
        assert_eq!((recall.outcome(), world.waiters.len()), (None, 4));
        while world.fabric_step(&mut queue) {}
        assert_eq!(recall.outcome(), Some(true));
        let mut ended: Vec<_> =
            world.completions.drain(..).map(|c| (c.cid, c.status.code())).collect();
        ended.sort_unstable();
        let code = |cid| match cid == aborted {
            true => Status::ABORT_REQUESTED.code(),
            false => Status::ABORTED_FAILED_FUSED.code(),
        };
        assert_eq!(ended, [(20, code(20)), (21, code(21))]);
    }
    world.run(&mut queue);
    let order: Vec<u16> = world.completions.drain(..).map(|c| c.cid).collect();
    assert_eq!(order, (0..8).collect::<Vec<_>>());
    end_both(world, queue, admin, posted);
}

#[test]
fn remaining_ranges_of_an_aborted_deallocation_stay_unchanged() {
    let abort = Abort::new();
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let mut data = vec![0; 4096];
    for (i, slba) in [2, 4, 6].into_iter().enumerate() {
        data[i * 16..][..16].copy_from_slice(&DsmRange { attributes: 0, blocks: 1, slba }.emit());
    }
    let dsm = Sqe::deallocation(1, 2).with_sgl(Sgl::in_capsule(0, 4096)).with_cid(CID);
    world.send(&mut queue, &dsm, &data);
    // The abort meets the operation on its way home: the disk has not heard of it yet.
    let recall = abort.tell(&mut world, &mut queue, &admin, CID);
    let done = world.disk.perform(&world.pool).unwrap();
    queue.on_disk(done.tag as u16, done, &mut world.io());
    assert_eq!(ends(&mut world, &mut queue, &recall), (0x007, true));
    let kept: Vec<_> = [2, 4, 6].map(|lba| world.disk.blocks[lba << 12] != 0).to_vec();
    assert_eq!(kept, [false, true, true]);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_closing_connection_resolves_its_pending_aborts() {
    let abort = Abort::new();
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    world.send(&mut queue, &read(), &[]);
    let recall = abort.tell(&mut world, &mut queue, &admin, CID);
    queue.close(&mut world.io());
    world.flush_and_go(&mut queue);
    let done = world.disk.perform(&world.pool).unwrap();
    queue.on_disk(done.tag as u16, done, &mut world.io());
    assert_eq!(recall.outcome(), Some(false), "nobody is told of the command any more");
    assert!(!queue.is_finished(), "the disk still owes the answer to the abort");
    assert!(world.disk_step(&mut queue) && queue.is_finished());
    assert!(world.disk.waiting.is_empty());
    end_both(world, queue, admin, posted);
}
