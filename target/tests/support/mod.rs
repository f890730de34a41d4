//! A queue's world: a fabric and a disk that record, and a host at the other end.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use nvme::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, PropertySet};
use nvme::property::Property;
use nvme::{AdminOpcode, Cqe, Nqn, Sgl, Sqe, Status, Text, cm};
use nvmfd::blockdev::{BlockDevice, DeviceId, IoCompletion, IoRequest};
use nvmfd::core::controller::Limits;
use nvmfd::core::diag::log_limiter::CauseLog;
use nvmfd::core::poll_group::clear;
use nvmfd::core::qpair::{Io, QueuePair, room};
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::buffers::{BufferScheduler, TryAlloc};
use nvmfd::core::shared::Shared;
use nvmfd::core::stats::CompletionBatch;
use nvmfd::core::subsystem::bad_blocks::BadBlocks;
use nvmfd::core::subsystem::reservation::Reservation;
use nvmfd::core::subsystem::write_protect::Protection;
use nvmfd::core::subsystem::{Namespace, Subsystem};
use nvmfd::worker::Workers;
use rdma::{
    Completion, Event, Fabric, FabricError, Fault, Incoming, Pool, PoolPlan, Qp, QpLimits, Reason,
    Remote, Tag, Work,
};

pub(crate) const LIMITS: Limits =
    Limits { queue_depth: 16, io_queues: 4, in_capsule_bytes: 4096, mdts_bytes: 1 << 16 };
pub(crate) const SIZE: usize = 1 << 20;
pub(crate) const KEY: u32 = 0x77;

#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) posted: VecDeque<(Tag, Work)>,
    pub(crate) opened: Option<QpLimits>,
    pub(crate) accepted: Vec<u8>,
    pub(crate) rejected: Vec<u8>,
    /// How often a host was let in.
    pub(crate) admitted: u32,
    pub(crate) disconnected: bool,
}

impl Fabric for Recorder {
    fn listen(&mut self, _: SocketAddr) -> Result<(), FabricError> {
        Ok(())
    }
    fn unlisten(&mut self, _: SocketAddr) {}
    fn open(&mut self, _: Incoming, limits: QpLimits) -> Result<Qp, FabricError> {
        self.opened = Some(limits);
        Ok(Qp(0))
    }
    fn accept(&mut self, _: Qp, private_data: &[u8]) {
        self.accepted = private_data.to_vec();
    }
    fn reject(&mut self, _: Incoming, private_data: &[u8]) {
        self.rejected = private_data.to_vec();
    }
    fn admit(&mut self, _: Qp) {
        self.admitted += 1;
    }
    fn disconnect(&mut self, _: Qp) {
        self.disconnected = true;
    }
    fn post(&mut self, _: Qp, tag: Tag, work: Work) {
        self.posted.push_back((tag, work));
    }
    fn flush(&mut self) {}
    fn poll(&mut self, _: Instant, _: &mut Vec<Event>) {}
    fn arm(&mut self, _: rdma::Wake) -> Option<Instant> {
        None
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
    fn fd(&self) -> i32 {
        -1
    }
}

/// Operations wait here until the test lets them happen on `blocks`.
pub(crate) struct Ram {
    pub(crate) blocks: Vec<u8>,
    pub(crate) waiting: VecDeque<(Tag, IoRequest)>,
    /// Wishes to have operations back, and whether they are granted.
    pub(crate) recalls: VecDeque<(Tag, Tag)>,
    pub(crate) gives_back: bool,
    pub(crate) fail: Option<Status>,
    pub(crate) trace: Vec<&'static str>,
    pub(crate) backings: Vec<DeviceId>,
}

impl BlockDevice for Ram {
    fn submit(&mut self, backing: DeviceId, tag: Tag, op: IoRequest) {
        self.backings.push(backing);
        self.waiting.push_back((tag, op));
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.recalls.push_back((tag, of));
    }
}

impl Ram {
    /// The answer to the oldest request, and the operation that it brings back.
    fn answer_recall(&mut self) -> Option<(IoCompletion, Option<IoCompletion>)> {
        let (tag, of) = self.recalls.pop_front()?;
        let refused = Err(Status::ABORT_REQUESTED);
        let at = self.waiting.iter().position(|(tag, _)| *tag == of).filter(|_| self.gives_back);
        let given_back = at.and_then(|at| self.waiting.remove(at)).map(|(tag, op)| {
            let buf = match op {
                IoRequest::Read { into: buf, .. } | IoRequest::Write { from: buf, .. } => Some(buf),
                IoRequest::Flush | IoRequest::Discard { .. } | IoRequest::Zero { .. } => None,
            };
            IoCompletion { tag, buf, outcome: refused }
        });
        let outcome = if given_back.is_some() { Ok(()) } else { refused };
        Some((IoCompletion { tag, buf: None, outcome }, given_back))
    }

    pub(crate) fn perform(&mut self, pool: &Pool) -> Option<IoCompletion> {
        let (tag, op) = self.waiting.pop_front()?;
        let outcome = self.fail.map_or(Ok(()), Err);
        let range = |at: u64, len: u64| at as usize..(at + len) as usize;
        let buf = match op {
            IoRequest::Read { mut into, at } => {
                self.trace.push("load");
                let range = range(at, into.len().into());
                pool.bytes_mut(&mut into).copy_from_slice(&self.blocks[range]);
                Some(into)
            }
            IoRequest::Write { from, at, .. } => {
                self.trace.push("store");
                if outcome.is_ok() {
                    self.blocks[range(at, from.len().into())].copy_from_slice(pool.bytes(&from));
                }
                Some(from)
            }
            IoRequest::Flush => {
                self.trace.push("flush");
                None
            }
            IoRequest::Discard { at, len } | IoRequest::Zero { at, len, .. } => {
                self.trace.push("zero");
                self.blocks[range(at, len)].fill(0);
                None
            }
        };
        Some(IoCompletion { tag, buf, outcome })
    }
}

/// What the reactors of a registry share.
pub(crate) fn share(registry: Registry) -> Arc<Shared> {
    Arc::new(Shared::new(Arc::new(registry), Workers::default(), SystemTime::now))
}

/// One reactor's world around one queue at a time, and a host at the other end.
pub(crate) struct World {
    /// The key of the queue that is opened next, and whose turns are taken.
    pub(crate) key: u32,
    /// The next host sends no name.
    pub(crate) unnamed: bool,
    /// What the next host connects to.
    pub(crate) subsystem: Nqn,
    pub(crate) pool: Pool,
    pub(crate) fabric: Recorder,
    pub(crate) disk: Ram,
    pub(crate) registry: Arc<Registry>,
    pub(crate) shared: Arc<Shared>,
    /// Which of the registry's reactors this is, and since when it watches changes.
    pub(crate) reactor: usize,
    round: u32,
    pub(crate) waiters: BufferScheduler,
    pub(crate) over: CompletionBatch,
    pub(crate) refusals: CauseLog,
    pub(crate) now: Instant,
    /// The time on the clocks of commands, in nanoseconds.
    pub(crate) now_ns: u64,
    /// The host's memory, all under one key.
    pub(crate) memory: Vec<u8>,
    pub(crate) completions: Vec<Cqe>,
    /// Kinds of work, in the order in which they were posted.
    pub(crate) trace: Vec<&'static str>,
    pub(crate) invalidated: Vec<Option<u32>>,
}

impl World {
    /// A world with an enabled controller: see [`admin`].
    pub(crate) fn with_admin_queue() -> (World, QueuePair, u16) {
        let mut world = World::new();
        let (queue, cntlid) = admin(&mut world);
        (world, queue, cntlid)
    }

    /// A world with a connected I/O queue: see [`io_queue`].
    pub(crate) fn with_io_queue() -> (World, QueuePair, QueuePair, VecDeque<(Tag, Work)>) {
        let mut world = World::new();
        let (queue, admin, admin_posted) = io_queue(&mut world);
        (world, queue, admin, admin_posted)
    }

    pub(crate) fn new() -> World {
        let registry = Registry::new(vec![nvmfd::core::message::mailbox().unwrap().0], 8, 70);
        registry.publish(Arc::new(subsystem()));
        World::of(share(registry), 0)
    }

    /// Another target, which hands jobs to these workers.
    pub(crate) fn replace(&mut self, registry: Registry, workers: Workers) {
        self.registry = Arc::new(registry);
        self.shared = Arc::new(Shared::new(Arc::clone(&self.registry), workers, SystemTime::now));
    }

    /// One of several reactors.
    pub(crate) fn of(shared: Arc<Shared>, reactor: usize) -> World {
        World {
            key: 0,
            unnamed: false,
            subsystem: subsystem().nqn,
            pool: Pool::new(PoolPlan {
                cells: 512,
                receives: 256,
                lead_bytes: 64,
                tail_bytes: 4096,
                data_bytes: 1 << 19,
                largest_bytes: 1 << 16,
            })
            .unwrap(),
            fabric: Recorder::default(),
            disk: Ram {
                blocks: (0..SIZE / 512).flat_map(|i| [i as u8; 512]).collect(),
                waiting: VecDeque::new(),
                recalls: VecDeque::new(),
                gives_back: false,
                fail: None,
                trace: Vec::new(),
                backings: Vec::new(),
            },
            registry: Arc::clone(&shared.registry),
            shared,
            reactor,
            round: 0,
            waiters: BufferScheduler::default(),
            over: CompletionBatch::default(),
            refusals: CauseLog::default(),
            now: Instant::now(),
            now_ns: 0,
            memory: vec![0; 1 << 17],
            completions: Vec::new(),
            trace: Vec::new(),
            invalidated: Vec::new(),
        }
    }

    pub(crate) fn io(&mut self) -> Io<'_> {
        Io {
            pool: &mut self.pool,
            fabric: &mut self.fabric,
            disk: &mut self.disk,
            shared: &self.shared,
            waiters: &mut self.waiters,
            refusals: &mut self.refusals,
            reactor: self.reactor,
            now: self.now,
            now_ns: self.now_ns,
            sent_ns: self.now_ns,
            run: &mut self.over,
        }
    }

    pub(crate) fn open(&mut self, private_data: &[u8], reads: u8) -> Option<QueuePair> {
        let at: SocketAddr = "192.0.2.1:4420".parse().unwrap();
        let incoming = Incoming::detached(at, at, private_data.to_vec(), reads, Box::new(()));
        QueuePair::open(self.key, incoming, LIMITS, &mut self.io()).ok()
    }

    pub(crate) fn open_qid(&mut self, qid: u16) -> QueuePair {
        let request = cm::Request { qid, hrqsize: 16, hsqsize_z: 15, ..cm::Request::default() };
        self.open(&request.emit(), 16).unwrap()
    }

    /// The host sends a capsule: the oldest posted receive gets it.
    pub(crate) fn send(&mut self, queue: &mut QueuePair, sqe: &Sqe, data: &[u8]) {
        let mut capsule = sqe.emit().to_vec();
        capsule.extend_from_slice(data);
        assert!(self.deliver(queue, &capsule), "a receive is posted");
    }

    /// The same with any bytes, which must fit. False when no receive is posted.
    pub(crate) fn deliver(&mut self, queue: &mut QueuePair, message: &[u8]) -> bool {
        let at = self.fabric.posted.iter().position(|(_, w)| matches!(w, Work::Recv(_)));
        let Some((tag, work)) = at.and_then(|at| self.fabric.posted.remove(at)) else {
            return false;
        };
        let mut buf = work.into_buf();
        self.pool.bytes_mut(&mut buf)[..message.len()].copy_from_slice(message);
        let outcome = Ok(message.len() as u32);
        let done = Completion::new(Qp(0), tag, Work::Recv(buf), outcome);
        queue.on_completion(done, &mut self.io());
        self.over.end();
        true
    }

    /// Where the host's memory has these bytes, if it has them all.
    fn place(&self, remote: Remote, len: u32) -> Option<Range<usize>> {
        let start = usize::try_from(remote.addr).ok()?;
        let range = start..start.checked_add(len as usize)?;
        (range.end <= self.memory.len()).then_some(range)
    }

    /// Performs the oldest posted work that is no receive. False when there is none.
    pub(crate) fn fabric_step(&mut self, queue: &mut QueuePair) -> bool {
        let is_done = self.fabric_event(queue);
        self.over.end();
        is_done
    }

    /// The same as one of several events that a poll group processes together.
    pub(crate) fn fabric_event(&mut self, queue: &mut QueuePair) -> bool {
        let at = self.fabric.posted.iter().position(|(_, w)| !matches!(w, Work::Recv(_)));
        let Some(at) = at else { return false };
        let (tag, mut work) = self.fabric.posted.remove(at).unwrap();
        let len = work.buf().len();
        let mut outcome = Ok(len);
        match &mut work {
            Work::Send { from, invalidate } => {
                self.trace.push("send");
                self.invalidated.push(*invalidate);
                let bytes = self.pool.bytes(from);
                assert_eq!(bytes.len(), 16, "a response is exactly 16 bytes");
                self.completions.push(Cqe::parse(bytes.first_chunk().unwrap()));
            }
            Work::Read { into, from } => {
                self.trace.push("pull");
                assert_eq!(len, from.len);
                match self.place(*from, len) {
                    Some(range) => self.pool.bytes_mut(into).copy_from_slice(&self.memory[range]),
                    None => outcome = Err(Fault::RemoteAccess),
                }
            }
            Work::Write { from, to } => {
                self.trace.push("push");
                assert!(len <= to.len);
                match self.place(*to, len) {
                    Some(range) => self.memory[range].copy_from_slice(self.pool.bytes(from)),
                    None => outcome = Err(Fault::RemoteAccess),
                }
            }
            Work::SendImmediate { .. } | Work::WriteImmediate { .. } => {
                panic!("a target has no immediate data")
            }
            Work::Recv(_) => unreachable!(),
        }
        let done = Completion::new(Qp(0), tag, work, outcome);
        queue.on_completion(done, &mut self.io());
        true
    }

    pub(crate) fn disk_step(&mut self, queue: &mut QueuePair) -> bool {
        if let Some((done, given_back)) = self.disk.answer_recall() {
            queue.on_recalled(done.tag as u16, done.outcome, &mut self.io());
            if let Some(done) = given_back {
                queue.on_disk(done.tag as u16, done, &mut self.io());
            }
            return true;
        }
        let Some(done) = self.disk.perform(&self.pool) else { return false };
        queue.on_disk(done.tag as u16, done, &mut self.io());
        true
    }

    pub(crate) fn run(&mut self, queue: &mut QueuePair) {
        loop {
            self.serve_waiters(queue);
            if !self.fabric_step(queue) && !self.disk_step(queue) && !self.look(queue) {
                return;
            }
        }
    }

    pub(crate) fn serve_waiters(&mut self, queue: &mut QueuePair) {
        clear(&mut self.waiters, &mut self.pool, self.now);
        while let Some(turn) = self.waiters.next_turn(&room(&self.pool, self.now)) {
            let take = match turn.key == self.key {
                true => queue.on_buffers(turn.slot, turn.aside, &mut self.io()),
                false => TryAlloc::Over,
            };
            if !self.waiters.settle(turn, take, self.now) {
                break;
            }
        }
    }

    /// Looks at what is shared with other reactors; whether that has led to anything.
    pub(crate) fn look(&mut self, queue: &mut QueuePair) -> bool {
        let before = self.disk.waiting.len();
        let round = self.shared.range_locks.round();
        if std::mem::replace(&mut self.round, round) != round {
            queue.claim_begun(&self.io());
            self.shared.range_locks.settle();
        }
        queue.tick(&mut self.io());
        self.disk.waiting.len() > before
    }

    pub(crate) fn ask(&mut self, queue: &mut QueuePair, sqe: &Sqe, data: &[u8]) -> Cqe {
        self.send(queue, sqe, data);
        self.run(queue);
        self.completions.pop().expect("an answer")
    }

    /// The fabric returns all work, as after a disconnect, then reports the queue pair as removed.
    pub(crate) fn flush_and_go(&mut self, queue: &mut QueuePair) {
        for (tag, work) in std::mem::take(&mut self.fabric.posted) {
            let outcome = Err(Fault::Flushed);
            let done = Completion::new(Qp(0), tag, work, outcome);
            queue.on_completion(done, &mut self.io());
        }
        self.over.end();
        assert!(self.fabric.posted.is_empty(), "nothing is posted on a dead queue pair");
        queue.on_gone(Reason::Peer, &mut self.io());
    }

    pub(crate) fn end(mut self, mut queue: QueuePair) {
        self.flush_and_go(&mut queue);
        while self.disk_step(&mut queue) {}
        assert!(queue.is_finished());
        queue.finish(&mut self.io());
        assert!(self.pool.is_full(), "{:?}", self.pool.free());
    }
}

pub(crate) fn subsystem() -> Subsystem {
    let nqn: Nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
    let namespace = Namespace {
        nsid: 1,
        backing: DeviceId(0),
        health: Arc::default(),
        geometry: nvmfd::blockdev::Geometry::default(),
        blocks: (SIZE >> 12) as u64,
        block_shift: 12,
        read_only: false,
        protection: Protection::none(nqn, 1),
        allow_format: false,
        formats: nvmfd::blockdev::BlockSizes::only(12),
        formatting: None,
        write_uncorrectable: false,
        marks: BadBlocks::volatile(),
        limiters: Vec::new(),
        ana_group: 1,
        volatile_cache: true,
        uuid: [1; 16],
        nguid: [1; 16],
        eui64: None,
        reservation: Reservation::volatile(nqn, 1),
    };
    Subsystem {
        nqn,
        serial: Text::lossy("S"),
        model: Text::lossy("M"),
        allow_any_host: true,
        hosts: Default::default(),
        offer: Arc::default(),
        namespaces: vec![namespace],
        management: None,
        host_limiters: Arc::default(),
        usage: Arc::default(),
    }
}

pub(crate) fn keyed(addr: u64, len: u32) -> Sgl {
    Sgl::keyed(addr, len, KEY, true).unwrap()
}

pub(crate) fn connect_data(cntlid: u16) -> ConnectData {
    let (sub, host): (Nqn, Nqn) =
        ("nqn.2026-11.io.nvmfd:test".parse().unwrap(), "nqn.2026-11.host:h".parse().unwrap());
    ConnectData::new([5; 16], cntlid, &sub, &host)
}

/// The same for the subsystem of the world.
fn data_of(world: &World, cntlid: u16) -> ConnectData {
    let data = ConnectData { subnqn_field: (&world.subsystem).into(), ..connect_data(cntlid) };
    match world.unnamed {
        true => ConnectData { hostnqn_field: nvme::NqnField::EMPTY, ..data },
        false => data,
    }
}

/// An enabled controller: its admin queue and its id.
pub(crate) fn admin(world: &mut World) -> (QueuePair, u16) {
    let mut queue = world.open_qid(0);
    let data = data_of(world, CNTLID_DYNAMIC);
    world.memory[..1024].copy_from_slice(&data.emit());
    let connect = Connect { sqsize_z: 15, kato_ms: 5000, ..Connect::default() };
    let cqe = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]);
    assert!(cqe.status.is_success(), "{}", cqe.status);
    let cntlid = cqe.dw0() as u16;
    let enable = PropertySet::new(Property::CC, 0x0046_0001).emit();
    assert!(world.ask(&mut queue, &enable, &[]).status.is_success());
    let queues = Sqe { cdw10: 7, cdw11: 0x3_0003, ..Sqe::admin(AdminOpcode::SET_FEATURES) };
    assert!(world.ask(&mut queue, &queues, &[]).status.is_success());
    (queue, cntlid)
}

/// A connected I/O queue. Its controller's admin queue is left as it is, outside the world.
pub(crate) fn io_queue(world: &mut World) -> (QueuePair, QueuePair, VecDeque<(Tag, Work)>) {
    let (admin, cntlid) = admin(world);
    let admin_posted = std::mem::take(&mut world.fabric.posted);
    let mut queue = world.open_qid(1);
    let connect = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    let sqe = connect.emit(Sgl::in_capsule(0, 1024));
    let data = data_of(world, cntlid);
    let cqe = world.ask(&mut queue, &sqe, &data.emit());
    assert!(cqe.status.is_success(), "{}", cqe.status);
    world.trace.clear();
    world.invalidated.clear();
    (queue, admin, admin_posted)
}

pub(crate) fn end_both(
    mut world: World,
    mut queue: QueuePair,
    admin: QueuePair,
    posted: VecDeque<(Tag, Work)>,
) {
    world.flush_and_go(&mut queue);
    while world.disk_step(&mut queue) {}
    assert!(queue.is_finished());
    queue.finish(&mut world.io());
    world.fabric.posted = posted;
    world.end(admin);
}
