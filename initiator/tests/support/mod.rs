//! A fabric that ends in a scripted target: what the session sends lies there until the test has
//! it answered, by the book or against it.

mod exposed_memory;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use initiator::rng::Random;
use initiator::{Data, Done, Io, Options, Phase, Request, Session};
use nvme::fabrics::{Connect, ConnectData, ConnectResult, FabricsType, PropertyGet, PropertySet};
use nvme::feature::{AsyncEventConfig, FeatureId, NumberOfQueues, SetFeatures};
use nvme::identify::{ControllerType, IdentifyController, Oncs, Sgls};
use nvme::property::{Cap, Cc, Csts, Property, Shutdown, ShutdownStatus, Vs};
use nvme::{AdminOpcode, Cqe, Nqn, Sgl, Sqe, Status, cm};
use rdma::{
    Buf, Completion, Event, Fabric, FabricError, Fault, Incoming, Initiator, Pool, Qp, QpLimits,
    Reason, ReceivedWith, Region, RemoteRegion, Tag, Wake, Work,
};

use exposed_memory::ExposedMemory;

pub(crate) const CNTLID: u16 = 7;

/// One connection.
struct Line {
    request: cm::Request,
    limits: QpLimits,
    receives: VecDeque<(Tag, Buf)>,
    sends: u32,
    ending: bool,
}

/// The fabric.
pub(crate) struct Wire {
    region: Arc<Region>,
    exposed: ExposedMemory,
    lines: BTreeMap<Qp, Line>,
    next_qp: u32,
    pub(crate) events: VecDeque<Event>,
    gone: VecDeque<(Qp, Reason)>,
    /// Received capsules: queue, command, in-capsule data.
    pub(crate) capsules: VecDeque<(u16, Sqe, Vec<u8>)>,
    /// Sends that have not completed, though the target has received the capsule.
    unsent: VecDeque<(Qp, Tag, Buf)>,
    pub(crate) hold_sends: bool,
    pub(crate) refuse: Option<Reason>,
    pub(crate) silent: bool,
    /// Whether the device can invalidate exposed memory.
    pub(crate) invalidates: bool,
    /// Up to which length a message is short.
    pub(crate) short_bytes: u32,
}

impl Fabric for Wire {
    fn listen(&mut self, _: SocketAddr) -> Result<(), FabricError> {
        unreachable!("a host does not listen")
    }
    fn unlisten(&mut self, _: SocketAddr) {}
    fn open(&mut self, _: Incoming, _: QpLimits) -> Result<Qp, FabricError> {
        unreachable!("a host opens nothing")
    }
    fn accept(&mut self, _: Qp, _: &[u8]) {}
    fn reject(&mut self, _: Incoming, _: &[u8]) {}

    fn disconnect(&mut self, qp: Qp) {
        if self.lines.get(&qp).is_some_and(|line| !line.ending) {
            self.end(qp, Reason::Local);
        }
    }

    fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        let Some(line) = self.lines.get_mut(&qp).filter(|line| !line.ending) else {
            let outcome = Err(Fault::Flushed);
            self.events.push_back(Event::Done(Completion::new(qp, tag, work, outcome)));
            return;
        };
        match work {
            Work::Recv(buf) => {
                line.receives.push_back((tag, buf));
                assert!(line.receives.len() as u32 <= line.limits.receives);
            }
            Work::Send { from, .. } => {
                line.sends += 1;
                assert!(line.sends <= line.limits.sends);
                let bytes = self.region.bytes(&from);
                let (command, data) = bytes.split_first_chunk().expect("a command");
                let qid = line.request.qid;
                self.capsules.push_back((qid, Sqe::parse(command), data.to_vec()));
                self.unsent.push_back((qp, tag, from));
            }
            other => panic!("a host posts no {other:?}"),
        }
    }

    fn flush(&mut self) {
        if let (Some(reason), Some(qp)) = (&self.refuse, self.lines.keys().next()) {
            self.end(*qp, reason.clone());
        }
        while !self.hold_sends
            && let Some((qp, tag, from)) = self.unsent.pop_front()
        {
            self.sent(qp, tag, from, Ok(64));
        }
    }

    fn poll(&mut self, _: Instant, batch: &mut Vec<Event>) {
        batch.extend(self.next_event());
    }
    fn arm(&mut self, _: Wake) -> Option<Instant> {
        None
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }
    fn fd(&self) -> i32 {
        -1
    }
}

impl Initiator for Wire {
    fn connect(
        &mut self,
        _: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        let qp = Qp(self.next_qp);
        self.next_qp += 1;
        let request = cm::Request::from_private_data(private_data).expect("private data");
        let receives = VecDeque::new();
        let line = Line { request, limits, receives, sends: 0, ending: false };
        self.lines.insert(qp, line);
        if !self.silent && self.refuse.is_none() {
            self.events.push_back(Event::Established(qp));
        }
        Ok(qp)
    }

    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)> {
        if self.lines.get(&qp).is_none_or(|line| line.ending) {
            return Err((buf, FabricError("the connection has ended".into())));
        }
        let exposed = self.exposed.register(buf);
        Ok(if self.invalidates { exposed.with_invalidation() } else { exposed })
    }

    fn deregister_remote(&mut self, region: RemoteRegion) -> Buf {
        self.exposed.deregister(&region)
    }

    fn short_message_bytes(&self, _: Qp) -> u32 {
        self.short_bytes
    }
}

impl Wire {
    fn sent(&mut self, qp: Qp, tag: Tag, from: Buf, outcome: Result<u32, Fault>) {
        if let Some(line) = self.lines.get_mut(&qp) {
            line.sends -= 1;
        }
        let work = Work::Send { from, invalidate: None };
        self.events.push_back(Event::Done(Completion::new(qp, tag, work, outcome)));
    }

    /// Ends a connection: all work completes, then it is removed.
    pub(crate) fn end(&mut self, qp: Qp, reason: Reason) {
        let Some(line) = self.lines.get_mut(&qp).filter(|line| !line.ending) else { return };
        line.ending = true;
        let receives = std::mem::take(&mut line.receives);
        for (tag, buf) in receives {
            let (work, outcome) = (Work::Recv(buf), Err(Fault::Flushed));
            self.events.push_back(Event::Done(Completion::new(qp, tag, work, outcome)));
        }
        let (of_this, rest): (VecDeque<_>, _) =
            self.unsent.drain(..).partition(|(of, ..)| *of == qp);
        self.unsent = rest;
        for (qp, tag, from) in of_this {
            self.sent(qp, tag, from, Err(Fault::Flushed));
        }
        self.gone.push_back((qp, reason));
    }

    /// The next event for the host. The end of a connection is the last one.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front().or_else(|| {
            let (qp, reason) = self.gone.pop_front()?;
            self.lines.remove(&qp);
            Some(Event::Gone(qp, reason))
        })
    }

    pub(crate) fn qp(&self, qid: u16) -> Option<Qp> {
        let lives = |line: &Line| line.request.qid == qid && !line.ending;
        self.lines.iter().find(|(_, line)| lives(line)).map(|(qp, _)| *qp)
    }

    /// The private data of a queue's connection.
    pub(crate) fn request(&self, qid: u16) -> cm::Request {
        self.lines[&self.qp(qid).expect("connected")].request
    }

    /// The target sends a message to the host.
    pub(crate) fn message(&mut self, qid: u16, bytes: &[u8]) {
        self.message_with(qid, bytes, ReceivedWith::Nothing);
    }

    /// As [`Lab::message`], with a key to invalidate or immediate data.
    pub(crate) fn message_with(&mut self, qid: u16, bytes: &[u8], with: ReceivedWith) {
        let Some(qp) = self.qp(qid) else { return };
        let line = self.lines.get_mut(&qp).expect("connected");
        // Without a receive it stays pending: a message that the target sends without a request.
        let Some((tag, mut buf)) = line.receives.pop_front() else { return };
        self.region.bytes_mut(&mut buf)[..bytes.len()].copy_from_slice(bytes);
        let (work, outcome) = (Work::Recv(buf), Ok(bytes.len() as u32));
        self.events.push_back(Event::Done(Completion { qp, tag, work, outcome, with }));
    }

    /// An answer that takes a key back.
    pub(crate) fn answer_and_invalidate(&mut self, qid: u16, cid: u16, key: u32) {
        let cqe = Cqe::new(cid, Status::SUCCESS).emit();
        self.message_with(qid, &cqe, ReceivedWith::Invalidate(key));
    }

    pub(crate) fn answer(&mut self, qid: u16, cid: u16, status: Status, result: u64) {
        self.message(qid, &Cqe { result, ..Cqe::new(cid, status) }.emit());
    }

    /// Exposed memory of a command, as the target gets at it.
    pub(crate) fn memory(&mut self, sqe: &Sqe) -> &mut [u8] {
        self.open_memory(sqe).expect("the key is open")
    }

    /// The data of a command, if its memory is still registered.
    pub(crate) fn open_memory(&mut self, sqe: &Sqe) -> Option<&mut [u8]> {
        self.exposed.get(sqe)
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.exposed.is_empty()
            && self.unsent.is_empty()
            && self.lines.is_empty()
            && self.gone.is_empty()
    }
}

/// Properties of the scripted controller.
pub(crate) struct Controller {
    pub(crate) page: IdentifyController,
    pub(crate) cap: Cap,
    pub(crate) csts: Csts,
    /// Number of reads of CSTS before the controller is ready.
    pub(crate) lazy: u32,
    pub(crate) io_queues: u16,
    pub(crate) connect: Status,
    pub(crate) connect_result: u64,
    pub(crate) events: VecDeque<u16>,
    pub(crate) kept_alive: u32,
    /// Every command that was answered by the book, by name.
    pub(crate) trace: Vec<String>,
}

/// A session, its world and its target.
pub(crate) struct Lab {
    pub(crate) session: Session,
    pub(crate) pool: Pool,
    pub(crate) wire: Wire,
    pub(crate) now: Instant,
    pub(crate) target: Controller,
}

pub(crate) fn options() -> Options {
    let nqn = |name| Nqn::new(name).expect("valid");
    let to = "192.0.2.1:4420".parse().expect("valid");
    Options {
        io_queues: 2,
        queue_entries: 8,
        kato_ms: 10_000,
        ..Options::new(to, nqn("nqn.2026-11.io.nvmfd:t"), nqn("nqn.2026-11.io.nvmfd:h"), [9; 16])
    }
}

pub(crate) fn controller() -> Controller {
    Controller {
        page: IdentifyController {
            cntlid: CNTLID,
            mdts: 5,
            kas_100ms: 10,
            maxcmd: 64,
            nn: 1,
            oncs: Oncs(0).with_compare(true),
            oaes: AsyncEventConfig(0).with_namespace_attribute(true),
            cntrltype: ControllerType::IO,
            sgls: Sgls(0).with_support(1).with_keyed(true).with_offset(true),
            ioccsz_16: (64 + 4096) / 16,
            iorcsz_16: 1,
            ..IdentifyController::default()
        },
        cap: Cap(0).with_mqes_z(127).with_to_500ms(4).with_css(Cap::CSS_NVM),
        csts: Csts(0),
        lazy: 0,
        io_queues: 16,
        connect: Status::SUCCESS,
        connect_result: ConnectResult(0).with_cntlid(CNTLID).0.into(),
        events: VecDeque::new(),
        kept_alive: 0,
        trace: Vec::new(),
    }
}

impl Lab {
    pub(crate) fn new(options: Options, target: Controller) -> Lab {
        let pool = Pool::new(options.plan(1 << 20, 1 << 17)).expect("memory");
        let wire = Wire {
            region: pool.region().clone(),
            exposed: ExposedMemory::new(pool.region()),
            lines: BTreeMap::new(),
            next_qp: 3,
            events: VecDeque::new(),
            gone: VecDeque::new(),
            capsules: VecDeque::new(),
            unsent: VecDeque::new(),
            hold_sends: false,
            refuse: None,
            silent: false,
            invalidates: true,
            short_bytes: u32::MAX,
        };
        Lab { session: Session::new(options), pool, wire, now: Instant::now(), target }
    }

    /// A session with a ready association.
    pub(crate) fn ready() -> Lab {
        let mut lab = Lab::new(options(), controller());
        lab.start();
        assert_eq!(lab.session.phase(), Phase::Ready, "{:?}", lab.session.ended());
        lab
    }

    pub(crate) fn with<T>(&mut self, act: impl FnOnce(&mut Session, &mut Io<'_>) -> T) -> T {
        let fabric = &mut self.wire;
        let mut io = Io { pool: &mut self.pool, fabric, now: self.now };
        let result = act(&mut self.session, &mut io);
        self.wire.flush();
        result
    }

    /// Starts, and serves until there are no more events.
    pub(crate) fn start(&mut self) {
        self.with(|session, io| session.start(io));
        self.run();
    }

    /// Delivers what has happened, without answering anything.
    pub(crate) fn deliver(&mut self) {
        while let Some(event) = self.wire.next_event() {
            let rest = self.with(|session, io| session.on_event(event, io));
            assert!(rest.is_none(), "an event of nobody: {rest:?}");
        }
        self.with(|session, io| session.tick(io));
    }

    /// Delivers capsules, and sends the scripted responses; I/O commands wait.
    pub(crate) fn run(&mut self) {
        loop {
            self.deliver();
            let next = self.wire.capsules.iter().position(|(qid, sqe, _)| is_book(*qid, sqe));
            match next.and_then(|at| self.wire.capsules.remove(at)) {
                Some((qid, sqe, data)) => self.serve(qid, &sqe, &data),
                None if self.wire.events.is_empty() => return,
                None => {}
            }
        }
    }

    /// One thing happens: the oldest command is answered, by the book or, so often of a hundred
    /// times, with a lie.
    pub(crate) fn step(&mut self, random: &mut Random, malice: u8) {
        self.deliver();
        let at = random.below(self.wire.capsules.len() as u64 + 1) as usize;
        let Some((qid, sqe, data)) = self.wire.capsules.remove(at) else { return };
        if self.wire.qp(qid).is_none() {
            return;
        }
        if random.percent(malice) {
            return self.lie(random, qid, &sqe);
        }
        // A command whose memory is no longer registered is not answered.
        let keyed = matches!(sqe.sgl(), Ok(Sgl::Keyed { len, .. }) if len.get() > 0);
        if keyed && self.wire.open_memory(&sqe).is_none() {
            return;
        }
        match is_book(qid, &sqe) {
            true => self.serve(qid, &sqe, &data),
            false => self.wire.answer(qid, sqe.cid, Status::SUCCESS, random.next()),
        }
    }

    fn lie(&mut self, random: &mut Random, qid: u16, sqe: &Sqe) {
        let status = Status::from_field(random.next() as u16);
        match random.below(8) {
            0 => self.wire.answer(qid, sqe.cid, status, random.next()),
            1 => self.wire.answer(qid, random.next() as u16, status, 0),
            2 => self.wire.answer(qid, sqe.cid ^ 1 << random.below(16), Status::SUCCESS, 0),
            3 => {
                let bytes: Vec<u8> = (0..random.below(65)).map(|_| random.next() as u8).collect();
                self.wire.message(qid, &bytes);
            }
            4 => self.wire.answer_and_invalidate(qid, sqe.cid, random.next() as u32),
            5 => {
                self.wire.answer(qid, sqe.cid, Status::SUCCESS, random.next());
                self.wire.answer(qid, sqe.cid, Status::SUCCESS, random.next());
            }
            6 if matches!(sqe.sgl(), Ok(Sgl::Keyed { len, .. }) if len.get() > 0) => {
                if let Some(memory) = self.wire.open_memory(sqe) {
                    memory.fill_with(|| random.next() as u8);
                }
                self.wire.answer(qid, sqe.cid, Status::SUCCESS, random.next());
            }
            // No answer.
            _ => {}
        }
    }

    /// Time passes.
    pub(crate) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.run();
    }

    pub(crate) fn request(&mut self, queue: u16, sqe: Sqe, len: u32, tag: u64) {
        let data = match len {
            0 => Data::None,
            len => Data::Buf(self.pool.take_data(len).expect("memory")),
        };
        let request = Request { sqe, data, tag };
        self.with(|session, io| session.submit(queue, request, io)).expect("taken");
    }

    /// The oldest command that waits on a queue.
    pub(crate) fn capsule(&mut self, qid: u16) -> (Sqe, Vec<u8>) {
        let at = self.wire.capsules.iter().position(|(of, ..)| *of == qid).expect("a capsule");
        let (_, sqe, data) = self.wire.capsules.remove(at).expect("a capsule");
        (sqe, data)
    }

    /// Takes a finished request; its buffers are freed.
    pub(crate) fn done(&mut self) -> Option<Done> {
        let mut done = self.session.next_done()?;
        if let Data::Buf(buf) = std::mem::replace(&mut done.data, Data::None) {
            self.pool.give(buf);
        }
        Some(done)
    }

    /// After the end: everything is where it was.
    pub(crate) fn expect_whole(&mut self) {
        self.run();
        assert_eq!(self.session.phase(), Phase::Ended);
        assert!(
            self.session
                .tick(&mut Io { pool: &mut self.pool, fabric: &mut self.wire, now: self.now })
                .is_none()
        );
        while self.done().is_some() {}
        assert!(self.wire.is_clean(), "something is left on the fabric");
        assert!(self.pool.is_full(), "a buffer is lost: {:?}", self.pool.free());
    }

    fn serve(&mut self, qid: u16, sqe: &Sqe, data: &[u8]) {
        let (status, result) = match sqe.is_fabrics() {
            true => self.fabrics(qid, sqe, data),
            false => match sqe.admin_opcode() {
                AdminOpcode::IDENTIFY => {
                    self.target.trace.push("Identify".into());
                    let mut page = [0; 4096];
                    self.target.page.emit(&mut page);
                    self.wire.memory(sqe).copy_from_slice(&page);
                    (Status::SUCCESS, 0)
                }
                AdminOpcode::SET_FEATURES => {
                    let feature = SetFeatures::parse(sqe);
                    self.target.trace.push(format!("Set {}", feature.fid));
                    let z = self.target.io_queues - 1;
                    let both = NumberOfQueues(0).with_submission_z(z).with_completion_z(z);
                    let is = feature.fid == FeatureId::NUMBER_OF_QUEUES;
                    (Status::SUCCESS, if is { both.0.into() } else { 0 })
                }
                AdminOpcode::KEEP_ALIVE => {
                    self.target.kept_alive += 1;
                    (Status::SUCCESS, 0)
                }
                AdminOpcode::ASYNC_EVENT_REQUEST => {
                    self.target.events.push_back(sqe.cid);
                    return;
                }
                _ => unreachable!("not by the book"),
            },
        };
        self.wire.answer(qid, sqe.cid, status, result);
    }

    fn fabrics(&mut self, qid: u16, sqe: &Sqe, data: &[u8]) -> (Status, u64) {
        let cntlid = self.session.cntlid();
        let target = &mut self.target;
        match sqe.fabrics_type() {
            FabricsType::CONNECT => {
                let connect = Connect::parse(sqe);
                assert_eq!(connect.qid, qid);
                let bytes: [u8; 1024] = match data.is_empty() {
                    true => self.wire.memory(sqe).try_into().expect("Connect data"),
                    false => data.try_into().expect("Connect data"),
                };
                let data = ConnectData::parse(&bytes);
                assert_eq!(data.cntlid, if qid == 0 { 0xFFFF } else { cntlid });
                assert_eq!(data.hostid, [9; 16]);
                assert_eq!(self.wire.request(qid).hsqsize_z, connect.sqsize_z);
                target.trace.push(format!("Connect {qid}"));
                (target.connect, target.connect_result)
            }
            FabricsType::PROPERTY_GET => {
                let property = PropertyGet::parse(sqe).property;
                if target.trace.last().is_none_or(|last| *last != format!("Get {property:?}")) {
                    target.trace.push(format!("Get {property:?}"));
                }
                let value = match property {
                    Property::CAP => target.cap.0,
                    Property::VS => Vs::V1_4.0.into(),
                    Property::CSTS if target.lazy > 0 => {
                        target.lazy -= 1;
                        0
                    }
                    Property::CSTS => target.csts.0.into(),
                    _ => return (Status::INVALID_FIELD, 0),
                };
                (Status::SUCCESS, value)
            }
            FabricsType::PROPERTY_SET => {
                let set = PropertySet::parse(sqe);
                let cc = Cc(set.value as u32);
                target.trace.push(format!("Set CC {:#x}", cc.0));
                target.csts = match cc.shn() {
                    Shutdown::Normal => target.csts.with_shst(ShutdownStatus::Complete),
                    _ => target.csts.with_rdy(cc.en()),
                };
                (Status::SUCCESS, 0)
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Whether the scripted target answers the command by itself.
fn is_book(qid: u16, sqe: &Sqe) -> bool {
    sqe.is_fabrics()
        || qid == 0
            && matches!(
                sqe.admin_opcode(),
                AdminOpcode::IDENTIFY
                    | AdminOpcode::SET_FEATURES
                    | AdminOpcode::KEEP_ALIVE
                    | AdminOpcode::ASYNC_EVENT_REQUEST
            )
}
