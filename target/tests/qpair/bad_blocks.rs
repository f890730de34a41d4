//! Write Uncorrectable as a queue serves it, with a worker that the test drives.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::reservation::{
    Acquire, AcquireKeys, Register, RegisterKeys, Release, ReleaseAction, ReleaseKey,
    ReservationType,
};
use nvme::sqe::DsmRange;
use nvme::{Cqe, IoOpcode, Sgl, Sqe, Status};
use nvmfd::blockdev::{IoCompletion, IoRequest};
use nvmfd::core::message::{Mailbox, Message, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::offload::{Job, ReservationRequest};
use nvmfd::core::subsystem::bad_blocks::BadBlocks;
use nvmfd::core::subsystem::reservation::Order;
use nvmfd::state::namespace_state::NamespaceFile;
use nvmfd::worker::Workers;
use nvmfd::worker::ns_state::NamespaceStateWorker;
use rdma::{Tag, Work};

use uuid::Uuid;

use crate::support::{World, end_both, io_queue, keyed, subsystem};

/// A host that is not of this world.
const OTHER: [u8; 16] = [6; 16];

/// A world whose namespace takes Write Uncorrectable, and a host in it.
struct Stage {
    world: World,
    message: Mailbox,
    worker: NamespaceStateWorker,
    queue: QueuePair,
    admin: QueuePair,
    posted: VecDeque<(Tag, Work)>,
}

impl Stage {
    fn new(directory: &Path) -> Stage {
        let (sender, message) = mailbox().unwrap();
        let worker = NamespaceStateWorker::new();
        let mut world = World::new();
        let mut subsystem = subsystem();
        subsystem.namespaces[0].write_uncorrectable = true;
        subsystem.namespaces[0].marks =
            BadBlocks::kept(NamespaceFile::new(directory, Uuid::nil())).unwrap();
        let registry = Registry::new(vec![sender], 8, 70);
        world.replace(registry, Workers::default().with_ns_state(worker.sender()));
        world.registry.publish(Arc::new(subsystem));
        let (queue, admin, posted) = io_queue(&mut world);
        while message.take().is_some() {}
        Stage { world, message, worker, queue, admin, posted }
    }

    fn send(&mut self, sqe: &Sqe, data: &[u8]) {
        self.world.send(&mut self.queue, sqe, data);
        self.world.run(&mut self.queue);
    }

    /// Another host gives an order about its reservation.
    fn order(&self, order: Order) {
        let subsystem = self.world.registry.subsystem(&subsystem().nqn).unwrap();
        let of = vec![Arc::clone(&subsystem.namespaces[0].reservation)];
        let request = ReservationRequest { of, host: OTHER, order, reactor: 0, tag: 0 };
        assert!(self.world.shared.offload.submit(Job::Reserve(request)));
    }

    /// The state worker executes its jobs. This many results of other tests come first.
    fn carry_out(&mut self, orders: usize) {
        self.worker.catch_up(&self.world.registry);
        for _ in 0..orders {
            assert!(matches!(
                self.message.take(),
                Some(Message::Answer(IoCompletion { outcome: Ok(()), .. }))
            ));
        }
    }

    /// The state worker persists its jobs, and all commands continue.
    fn keep(&mut self) {
        self.hear();
        self.world.run(&mut self.queue);
    }

    /// The state worker persists its jobs; the device completes nothing.
    fn hear(&mut self) {
        self.receive_answers();
        while self.world.fabric_step(&mut self.queue) {}
    }

    /// The same; the fabric does nothing either.
    fn receive_answers(&mut self) {
        self.worker.catch_up(&self.world.registry);
        while let Some(message) = self.message.take() {
            if let Message::Answer(done) = message {
                self.queue.on_disk(done.tag as u16, done, &mut self.world.io());
            }
        }
    }

    /// Sends a command whose change of blocks has happened, without a response yet.
    fn change(&mut self, sqe: &Sqe, data: &[u8]) -> IoCompletion {
        self.world.send(&mut self.queue, sqe, data);
        while self.world.fabric_step(&mut self.queue) {}
        self.world.look(&mut self.queue);
        while !matches!(
            self.world.disk.waiting[0].1,
            IoRequest::Write { .. } | IoRequest::Zero { .. }
        ) {
            assert!(self.world.disk_step(&mut self.queue));
            self.world.look(&mut self.queue);
        }
        self.world.disk.perform(&self.world.pool).unwrap()
    }

    fn ask(&mut self, sqe: &Sqe, data: &[u8]) -> Cqe {
        self.send(sqe, data);
        self.keep();
        self.world.completions.pop().expect("an answer")
    }

    fn good(&mut self, sqe: &Sqe, data: &[u8]) {
        let cqe = self.ask(sqe, data);
        assert!(cqe.status.is_success(), "{}", cqe.status);
    }

    /// Which blocks of the first 16 cannot be read.
    fn bad(&mut self) -> Vec<u64> {
        let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096));
        let mut bad = Vec::new();
        for slba in 0..16 {
            let status = self.ask(&read.with_range(slba, 0), &[]).status;
            if status.is(Status::UNRECOVERED_READ_ERROR) {
                assert!(status.dnr());
                bad.push(slba);
            } else {
                assert!(status.is_success(), "{status}");
            }
        }
        bad
    }

    /// Commands that were answered, all with success.
    fn answered(&mut self) -> Vec<u16> {
        let answers = self.world.completions.drain(..);
        answers.filter(|cqe| cqe.status.is_success()).map(|cqe| cqe.cid).collect()
    }

    /// What a block contains, if it can be read just now.
    fn read(&mut self, slba: u64) -> Option<u8> {
        let read = Sqe::io(IoOpcode::READ, 1).with_range(slba, 0).with_sgl(keyed(8192, 4096));
        let status = self.world.ask(&mut self.queue, &read.with_cid(9), &[]).status;
        assert!(status.is_success() || status.is(Status::UNRECOVERED_READ_ERROR), "{status}");
        status.is_success().then(|| self.world.memory[8192])
    }

    fn end(self) {
        end_both(self.world, self.queue, self.admin, self.posted);
    }
}

fn write(slba: u64) -> Sqe {
    Sqe::io(IoOpcode::WRITE, 1).with_range(slba, 0).with_sgl(keyed(0, 4096))
}

fn zeroes(slba: u64) -> Sqe {
    Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(slba, 0)
}

fn mark(slba: u64, nlb_z: u16) -> Sqe {
    Sqe::io(IoOpcode::WRITE_UNCORRECTABLE, 1).with_range(slba, nlb_z)
}

#[test]
fn write_uncorrectable_marks_are_persisted_and_cleared_by_writes() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    stage.send(&mark(4, 7), &[]);
    assert!(stage.world.completions.is_empty(), "nobody has kept it yet");
    stage.keep();
    assert!(stage.world.completions.pop().unwrap().status.is_success());
    assert_eq!(stage.bad(), [4, 5, 6, 7, 8, 9, 10, 11]);

    // Written, durably; the response is sent when the marks are persisted as well.
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(3, 1).with_sgl(keyed(0, 8192));
    stage.world.memory[..8192].fill(0xAB);
    stage.world.send(&mut stage.queue, &write, &[]);
    assert!(stage.world.fabric_step(&mut stage.queue), "pulled");
    stage.world.look(&mut stage.queue);
    let durable =
        matches!(stage.world.disk.waiting.front(), Some((_, IoRequest::Write { fua: true, .. })));
    assert!(durable, "or a power loss would bring old data back");
    stage.world.run(&mut stage.queue);
    assert!(stage.world.completions.is_empty());
    stage.keep();
    assert!(stage.world.completions.pop().unwrap().status.is_success());
    stage.good(&Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(6, 0), &[]);
    let range = DsmRange { attributes: 0, blocks: 2, slba: 8 }.emit();
    stage.world.disk.trace.clear();
    let deallocation = Sqe::deallocation(1, 0).with_sgl(Sgl::in_capsule(0, 16));
    stage.world.send(&mut stage.queue, &deallocation, &range);
    let zeroed = matches!(stage.world.disk.waiting.front(), Some((_, IoRequest::Zero { .. })));
    assert!(zeroed, "a store that gives up nothing would bring old data back");
    stage.world.run(&mut stage.queue);
    stage.keep();
    assert!(stage.world.completions.pop().unwrap().status.is_success());
    assert_eq!(stage.world.disk.trace, ["zero", "flush"]);
    assert_eq!(stage.bad(), [5, 7, 10, 11]);
    let marks = BadBlocks::kept(NamespaceFile::new(directory.path(), Uuid::nil())).unwrap();
    assert_eq!((marks.first(0, 1 << 20), marks.first(6 << 12, 4096)), (Some(5 << 12), None));

    stage.good(&write.with_range(14, 1), &[]);
    stage.end();
}

/// It was let through before its host was preempted, and comes to the state worker behind that.
#[test]
fn queued_write_uncorrectable_of_a_fenced_host_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    let how = Acquire(0).with_rtype(ReservationType::WRITE_EXCLUSIVE);
    stage.order(Order::Register(Register(0), RegisterKeys { current: 0, new: 1 }));
    stage.carry_out(1);
    stage.order(Order::Acquire(how, AcquireKeys { current: 1, preempt: 0 }));
    stage.send(&mark(4, 0), &[]);
    stage.carry_out(1);
    stage.keep();
    let status = stage.world.completions.pop().unwrap().status;
    assert!(status.is(Status::RESERVATION_CONFLICT) && status.dnr(), "{status}");
    let clear = Release(0).with_action(ReleaseAction::CLEAR);
    stage.order(Order::Release(clear, ReleaseKey { current: 1 }));
    stage.carry_out(1);
    assert_eq!(stage.bad(), [] as [u64; 0]);
    // Nor when the namespace is protected.
    stage.send(&mark(4, 0), &[]);
    let mut protected = subsystem();
    protected.namespaces[0].read_only = true;
    let served = stage.world.registry.subsystem(&protected.nqn).unwrap();
    protected.namespaces[0].marks = Arc::clone(&served.namespaces[0].marks);
    stage.world.registry.publish(Arc::new(protected));
    stage.hear();
    let status = stage.world.completions.pop().unwrap().status;
    assert!(status.is(Status::NAMESPACE_WRITE_PROTECTED), "{status}");
    stage.end();
}

/// Its host may have written the blocks since, by another connection.
#[test]
fn queued_write_uncorrectable_of_a_closed_connection_is_not_executed() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    let served = stage.world.registry.subsystem(&subsystem().nqn).unwrap();
    stage.send(&mark(4, 0), &[]);
    stage.world.flush_and_go(&mut stage.queue);
    assert!(!stage.queue.is_finished(), "the worker will answer");
    stage.keep();
    assert!(served.namespaces[0].marks.is_empty());
    let Stage { mut world, queue, admin, posted, .. } = stage;
    assert!(queue.is_finished());
    queue.finish(&mut world.io());
    world.fabric.posted = posted;
    world.end(admin);
}

#[test]
fn compare_verify_and_copy_do_not_read_uncorrectable_blocks() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    stage.good(&mark(8, 1), &[]);
    let unread = Status::UNRECOVERED_READ_ERROR;
    let compare = Sqe::io(IoOpcode::COMPARE, 1).with_range(7, 1).with_sgl(keyed(0, 8192));
    assert!(stage.ask(&compare, &[]).status.is(unread));
    assert!(stage.ask(&Sqe::io(IoOpcode::VERIFY, 1).with_range(0, 15), &[]).status.is(unread));
    let copy = |sdlba| {
        let flags = CopyFlags(0).with_nr_z(1);
        Copy { sdlba, flags }.emit(1, Sgl::in_capsule(0, 64))
    };
    let ranges = |slba| {
        [CopyRange { slba: 1, nlb_z: 0 }, CopyRange { slba, nlb_z: 1 }]
            .iter()
            .flat_map(CopyRange::emit)
            .collect::<Vec<u8>>()
    };
    stage.world.disk.trace.clear();
    assert!(stage.ask(&copy(20), &ranges(7)).status.is(unread));
    assert!(stage.world.disk.trace.is_empty(), "nothing was loaded");
    let association = stage.queue.association().unwrap();
    let (_, errors) = association.errors();
    let told: Vec<u64> = errors.iter().map(|(_, error)| error.slba).collect();
    assert_eq!(told, [8; 3], "the block itself");

    stage.good(&copy(7), &ranges(2));
    assert!(stage.bad().is_empty(), "they were copied over");
    stage.good(&mark(8, 1), &[]);
    stage.good(&copy(40), &ranges(2));
    assert_eq!(stage.bad(), [8, 9]);
    stage.end();
}

#[test]
fn blocks_marked_during_a_deallocation_stay_uncorrectable() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    stage.good(&mark(0, 0), &[]);
    let range = DsmRange { attributes: 0, blocks: 2, slba: 8 }.emit();
    let deallocation = Sqe::deallocation(1, 0).with_sgl(Sgl::in_capsule(0, 16)).with_cid(5);
    stage.world.send(&mut stage.queue, &deallocation, &range);
    let discards =
        |stage: &Stage| matches!(stage.world.disk.waiting[0].1, IoRequest::Discard { .. });
    assert!(discards(&stage), "nothing there is unreadable, and the store may do nothing");
    stage.world.send(&mut stage.queue, &mark(9, 0).with_cid(1), &[]);
    stage.hear();
    let cqe = stage.world.completions.pop().unwrap();
    assert!((cqe.cid, cqe.status.is_success()) == (1, true) && discards(&stage));
    stage.world.run(&mut stage.queue);
    stage.keep();
    let cqe = stage.world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.status.is_success()), (5, true));
    assert_eq!(stage.bad(), [0, 9], "what was there before would be read again");
    stage.end();
}

#[test]
fn blocks_marked_during_a_write_or_copy_stay_uncorrectable() {
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(8, 0).with_sgl(keyed(0, 4096));
    let copy = Copy { sdlba: 8, flags: CopyFlags(0) }.emit(1, Sgl::in_capsule(0, 32));
    let from = CopyRange { slba: 2, nlb_z: 0 }.emit();
    let range = DsmRange { attributes: 0, blocks: 2, slba: 8 }.emit();
    let deallocation = Sqe::deallocation(1, 0).with_sgl(Sgl::in_capsule(0, 16));
    let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(8, 0);
    let changes: [(Sqe, &[u8]); 4] =
        [(write, &[]), (zeroes, &[]), (copy, &from), (deallocation, &range)];
    for (change, data) in changes {
        let directory = tempfile::tempdir().unwrap();
        let mut stage = Stage::new(directory.path());
        stage.good(&mark(0, 0), &[]);
        stage.good(&mark(8, 0), &[]);
        let done = stage.change(&change.with_cid(5), data);
        stage.good(&mark(8, 0), &[]);
        stage.queue.on_disk(done.tag as u16, done, &mut stage.world.io());
        stage.world.run(&mut stage.queue);
        stage.keep();
        let cqe = stage.world.completions.pop().unwrap();
        assert_eq!((cqe.cid, cqe.status.is_success()), (5, true));
        assert_eq!(stage.bad(), [0, 8], "opcode {:02X}h", change.opcode);
        stage.good(&change.with_cid(6), data);
        assert_eq!(stage.bad(), [0]);
        stage.end();
    }
}

/// The block cannot be read once the write and the marks are answered, so the marks are behind the
/// write, and only what the zeroes have left may be read when the marks are gone.
#[test]
fn data_hidden_by_marks_does_not_reappear_when_zeroes_clear_them() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    stage.world.memory[..4096].fill(0xAB);
    stage.world.send(&mut stage.queue, &write(4).with_cid(1), &[]);
    assert!(stage.world.fabric_step(&mut stage.queue), "the disk has the write");
    stage.world.send(&mut stage.queue, &mark(4, 0).with_cid(2), &[]);
    stage.hear();
    stage.world.send(&mut stage.queue, &zeroes(4).with_cid(3), &[]);
    stage.world.look(&mut stage.queue);
    // A device executes its operations in any order.
    stage.world.disk.waiting.make_contiguous().reverse();
    stage.world.run(&mut stage.queue);
    assert_eq!(stage.answered(), [2, 1]);
    assert_eq!(stage.read(4), None);
    stage.keep();
    assert_eq!(stage.answered(), [3]);
    assert_eq!(stage.read(4), Some(0), "what was hidden");
    stage.end();
}

#[test]
fn a_write_older_than_the_marks_waits_until_they_are_cleared() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    stage.world.memory[..4096].fill(0xAB);
    stage.world.send(&mut stage.queue, &write(4).with_cid(1), &[]);
    stage.world.send(&mut stage.queue, &mark(4, 0).with_cid(2), &[]);
    stage.receive_answers();
    stage.world.send(&mut stage.queue, &zeroes(4).with_cid(3), &[]);
    stage.world.look(&mut stage.queue);
    while stage.world.disk_step(&mut stage.queue) {}
    // The zeroes are durable, and the state worker has not noted that. Now the data of the write
    // come.
    stage.world.run(&mut stage.queue);
    assert_eq!(stage.answered(), [2]);
    assert_eq!(stage.read(4), None);
    stage.keep();
    assert_eq!(stage.answered(), [3, 1]);
    assert_eq!(stage.read(4), Some(0xAB));
    stage.end();
}

#[test]
fn failed_writes_clear_no_marks_and_persistence_errors_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let mut stage = Stage::new(directory.path());
    stage.good(&mark(4, 0), &[]);
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(4, 0).with_sgl(keyed(0, 4096));
    stage.world.disk.fail = Some(Status::WRITE_FAULT);
    assert!(stage.ask(&write, &[]).status.is(Status::WRITE_FAULT));
    stage.world.disk.fail = None;
    assert_eq!(stage.bad(), [4]);
    std::fs::remove_dir_all(directory.path()).unwrap();
    assert!(stage.ask(&write, &[]).status.is(Status::INTERNAL_ERROR));
    assert!(stage.ask(&mark(5, 0), &[]).status.is(Status::INTERNAL_ERROR));
    assert_eq!(stage.bad(), [4]);
    std::fs::create_dir(directory.path()).unwrap();
    stage.good(&write, &[]);
    assert!(stage.bad().is_empty());
    stage.end();
}

#[test]
fn a_connection_closed_while_marks_are_persisted_returns_all_buffers() {
    for steps in 0..4 {
        let directory = tempfile::tempdir().unwrap();
        let mut stage = Stage::new(directory.path());
        stage.good(&mark(4, 0), &[]);
        let write = Sqe::io(IoOpcode::WRITE, 1).with_range(4, 0).with_sgl(keyed(0, 4096));
        stage.world.send(&mut stage.queue, &write, &[]);
        stage.world.send(&mut stage.queue, &mark(6, 0).with_cid(1), &[]);
        for _ in 0..steps {
            let _ = stage.world.fabric_step(&mut stage.queue);
            let _ = stage.world.disk_step(&mut stage.queue);
        }
        stage.world.flush_and_go(&mut stage.queue);
        while stage.world.disk_step(&mut stage.queue) {}
        stage.keep();
        let Stage { mut world, queue, admin, posted, .. } = stage;
        assert!(queue.is_finished());
        queue.finish(&mut world.io());
        world.fabric.posted = posted;
        world.end(admin);
    }
}
