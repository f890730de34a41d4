//! Two ports behind a fabric, all simulated: of one target, or of one each over the same blocks. What
//! arrives is carried out after a random time, also when the host has lost the path meanwhile, until
//! the target has heard that or its Keep Alive Timer has expired.

mod admin;
mod group;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use initiator::rng::Random;
use nvme::fabrics::{Connect, ConnectData, ConnectResult, FabricsType, PropertyGet, PropertySet};
use nvme::feature::{AsyncEvent, AsyncEventConfig, FeatureId, NumberOfQueues, SetFeatures};
use nvme::identify::{
    Cmic, Cns, ControllerType, Identify, IdentifyController, IdentifyControllerNvm,
    IdentifyNamespace, LbaFormat, NamespaceIds, Oncs, Sgls,
};
use nvme::ids::LogId;
use nvme::lba_status::{CompletionCondition, GetLbaStatus, LbaStatusDescriptor, LbaStatusHeader};
use nvme::log::{AnaGroup, AnaHeader, AnaState, GetLogPage};
use nvme::property::{Cap, Cc, Csts, Property, Shutdown, ShutdownStatus, Vs};
use nvme::sqe::DsmRange;
use nvme::{AdminOpcode, Cqe, IoOpcode, Sqe, Status, cm};
use rdma::{
    Buf, Completion, Event, Fabric, FabricError, Fault, Incoming, Initiator, Qp, QpLimits, Reason,
    Region, RemoteRegion, Tag, Wake, Work,
};

use crate::exposed_memory::ExposedMemory;

pub(crate) const BLOCK_BYTES: usize = 512;
pub(crate) const BLOCKS: u64 = 12;
pub(crate) const KATO_MS: u32 = 2_000;
/// Longest time until a command is carried out: longer than the Keep Alive Timeout, so that some
/// commands of a lost association are there until the target has ended it.
const LONGEST_EXECUTION_MS: u64 = 2_500;

/// A connection.
struct Link {
    port: usize,
    qid: u16,
    cntlid: u16,
    receives: VecDeque<(Tag, Buf)>,
    is_ending: bool,
}

/// A controller: an association as the target sees it.
struct Controller {
    port: usize,
    qps: Vec<Qp>,
    heard: Instant,
    csts: Csts,
    /// Command ids of Asynchronous Event Requests.
    event_requests: VecDeque<u16>,
    /// Events that are not acknowledged, and whether they are reported.
    events: Vec<(AsyncEvent, bool)>,
}

/// An I/O command that is carried out at a time.
struct Pending {
    at: Instant,
    port: usize,
    cntlid: u16,
    /// That of the daemon when the command arrived.
    client: u32,
    qp: Qp,
    sqe: Sqe,
    data: Vec<u8>,
}

/// A port of the target.
pub(crate) struct Port {
    /// Nothing gets through, in either direction.
    pub(crate) is_cut: bool,
    pub(crate) ana: AnaState,
}

/// A process of a target.
pub(crate) struct Daemon {
    pub(crate) is_alive: bool,
    /// It reaches the blocks no more. What it has to carry out is held until it does.
    pub(crate) is_cut_off: bool,
    /// Its client of the cluster, by which it is excluded from the blocks.
    client: u32,
    /// That was excluded while the daemon was cut off.
    is_excluded: bool,
}

/// Fabric and targets.
pub(crate) struct Target {
    pub(crate) now: Instant,
    pub(crate) random: Random,
    region: Arc<Region>,
    exposed: ExposedMemory,
    links: BTreeMap<Qp, Link>,
    next_qp: u32,
    events: VecDeque<Event>,
    gone: Vec<(Instant, Qp, Reason)>,
    controllers: BTreeMap<u16, Controller>,
    next_cntlid: u16,
    pending: Vec<Pending>,
    pub(crate) ports: Vec<Port>,
    /// One for all ports, or one for each.
    pub(crate) daemons: Vec<Daemon>,
    next_client: u32,
    /// The daemons are gateways of a group; the number of the one that serves, or has served last.
    pub(crate) group: Option<Option<usize>>,
    pub(crate) size_blocks: u64,
    pub(crate) is_removed: bool,
    /// Of the namespace.
    pub(crate) uuid: [u8; 16],
    /// The ANA group of the namespace: 1 or 2.
    pub(crate) ana_group: u32,
    pub(crate) is_write_protected: bool,
    /// WZSL: the longest Write Zeroes has 8 << wzsl blocks.
    pub(crate) wzsl: u8,
    /// DMRSL, in blocks.
    pub(crate) dmrsl: u32,
    /// How many of the next commands that read the identifiers fail.
    pub(crate) unread_identifiers: u32,
    blocks: Vec<u64>,
    /// What a power failure would leave.
    pub(crate) durable: Vec<u64>,
    /// Percentage of I/O commands that fail for now, and for good.
    pub(crate) transient_percent: u8,
    pub(crate) fatal_percent: u8,
    pub(crate) fatal_statuses: u64,
    pub(crate) commands: u64,
    /// Longest time until a command is carried out.
    pub(crate) longest_ms: u64,
}

/// The status of a command that fails for good.
pub(crate) const FATAL: Status = Status::WRITE_FAULT.with_dnr();

impl Fabric for Target {
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
        let Some(link) = self.links.get(&qp).filter(|link| !link.is_ending) else { return };
        let (cntlid, port) = (link.cntlid, link.port);
        self.end(qp, Reason::Local);
        if !self.ports[port].is_cut {
            self.end_controller(cntlid);
        }
    }

    fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        match (work, self.links.get_mut(&qp).filter(|link| !link.is_ending)) {
            (work, None) => self.complete(qp, tag, work, Err(Fault::Flushed)),
            (Work::Recv(buf), Some(link)) => link.receives.push_back((tag, buf)),
            (Work::Send { from, invalidate }, Some(link)) => {
                let (port, cntlid) = (link.port, link.cntlid);
                let (command, data) =
                    self.region.bytes(&from).split_first_chunk().expect("a command");
                let (sqe, data) = (Sqe::parse(command), data.to_vec());
                self.complete(qp, tag, Work::Send { from, invalidate }, Ok(64));
                if !self.ports[port].is_cut {
                    self.on_capsule(qp, cntlid, sqe, data);
                }
            }
            (other, Some(_)) => panic!("a host posts no {other:?}"),
        }
    }

    fn flush(&mut self) {}
    fn poll(&mut self, _: Instant, batch: &mut Vec<Event>) {
        batch.extend(self.events.drain(..));
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

impl Initiator for Target {
    fn connect(&mut self, to: SocketAddr, data: &[u8], _: QpLimits) -> Result<Qp, FabricError> {
        let qp = Qp(self.next_qp);
        self.next_qp += 1;
        let request = cm::Request::from_private_data(data).expect("private data");
        let port = usize::from(to.port() - 4420);
        let cntlid = if request.qid == 0 { 0 } else { request.cntlid };
        let receives = VecDeque::new();
        self.links.insert(qp, Link { port, qid: request.qid, cntlid, receives, is_ending: false });
        match (&self.ports[port], self.daemon_of(port)) {
            (Port { is_cut: true, .. }, _) => {}
            (_, Daemon { is_alive: true, .. }) => self.events.push_back(Event::Established(qp)),
            _ => self.end(qp, Reason::Rejected { code: 8, private_data: Vec::new() }),
        }
        Ok(qp)
    }

    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)> {
        if self.links.get(&qp).is_none_or(|link| link.is_ending) {
            return Err((buf, FabricError("the connection has ended".into())));
        }
        Ok(self.exposed.register(buf))
    }

    fn deregister_remote(&mut self, region: RemoteRegion) -> Buf {
        self.exposed.deregister(&region)
    }
}

/// The fabric.
impl Target {
    fn complete(&mut self, qp: Qp, tag: Tag, work: Work, outcome: Result<u32, Fault>) {
        let completion = Completion::new(qp, tag, work, outcome);
        self.events.push_back(Event::Done(completion));
    }

    /// Ends a connection at the host: all work is flushed now, and it is gone a little later.
    fn end(&mut self, qp: Qp, reason: Reason) {
        let Some(link) = self.links.get_mut(&qp).filter(|link| !link.is_ending) else { return };
        link.is_ending = true;
        for (tag, buf) in std::mem::take(&mut link.receives) {
            self.complete(qp, tag, Work::Recv(buf), Err(Fault::Flushed));
        }
        let after = Duration::from_millis(self.random.below(300));
        self.gone.push((self.now + after, qp, reason));
    }

    fn message(&mut self, qp: Qp, bytes: &[u8]) {
        let Some(link) = self.links.get_mut(&qp).filter(|link| !link.is_ending) else { return };
        if self.ports[link.port].is_cut {
            return;
        }
        let (tag, mut buf) = link.receives.pop_front().expect("a receive for each answer");
        self.region.bytes_mut(&mut buf)[..bytes.len()].copy_from_slice(bytes);
        self.complete(qp, tag, Work::Recv(buf), Ok(bytes.len() as u32));
    }

    /// The next time at which something happens here.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let gone = self.gone.iter().map(|(at, ..)| *at);
        let pending = self.pending.iter().filter(|pending| !self.is_held(pending));
        gone.chain(pending.map(|pending| pending.at)).min()
    }

    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.exposed.is_empty() && self.links.is_empty()
    }
}

/// The target.
impl Target {
    /// With two ports.
    pub(crate) fn new(region: &Arc<Region>, daemons: u32, random: Random, now: Instant) -> Target {
        let daemon =
            |client| Daemon { is_alive: true, is_cut_off: false, client, is_excluded: false };
        let port = |_| Port { is_cut: false, ana: AnaState::OPTIMIZED };
        Target {
            now,
            random,
            region: region.clone(),
            exposed: ExposedMemory::new(region),
            links: BTreeMap::new(),
            next_qp: 1,
            events: VecDeque::new(),
            gone: Vec::new(),
            controllers: BTreeMap::new(),
            next_cntlid: 1,
            pending: Vec::new(),
            ports: (0..2).map(port).collect(),
            daemons: (0..daemons).map(daemon).collect(),
            next_client: daemons,
            group: None,
            size_blocks: BLOCKS,
            is_removed: false,
            uuid: [5; 16],
            ana_group: 1,
            is_write_protected: false,
            wzsl: 5,
            dmrsl: 64,
            unread_identifiers: 0,
            blocks: vec![0; 2 * BLOCKS as usize],
            durable: vec![0; 2 * BLOCKS as usize],
            transient_percent: 0,
            fatal_percent: 0,
            fatal_statuses: 0,
            commands: 0,
            longest_ms: LONGEST_EXECUTION_MS,
        }
    }

    /// Everything that is due happens.
    pub(crate) fn advance(&mut self, now: Instant) {
        self.now = now;
        let kato = Duration::from_millis(KATO_MS.into());
        let expired = |c: &Controller| now > c.heard + kato;
        let expired: Vec<u16> =
            self.controllers.iter().filter(|(_, c)| expired(c)).map(|(id, _)| *id).collect();
        expired.into_iter().for_each(|cntlid| self.end_controller(cntlid));
        let next = |target: &Target| {
            target.pending.iter().position(|pending| pending.at <= now && !target.is_held(pending))
        };
        while let Some(n) = next(self) {
            let pending = self.pending.swap_remove(n);
            if self.controllers.contains_key(&pending.cntlid) {
                self.execute(pending);
            } else {
                self.perform(&pending.sqe, &pending.data);
            }
        }
        let (due, rest) =
            std::mem::take(&mut self.gone).into_iter().partition(|(at, ..)| *at <= now);
        self.gone = rest;
        for (_, qp, reason) in due {
            self.links.remove(&qp);
            self.events.push_back(Event::Gone(qp, reason));
        }
    }

    /// The host's end of all connections to a port fails.
    pub(crate) fn fail_links(&mut self, port: usize, reason: &Reason) {
        let of_port = |(qp, link): (&Qp, &Link)| (link.port == port).then_some(*qp);
        let qps: Vec<Qp> = self.links.iter().filter_map(of_port).collect();
        qps.into_iter().for_each(|qp| self.end(qp, reason.clone()));
    }

    /// The target ends all associations at a port, and says so.
    pub(crate) fn close_port(&mut self, port: usize) {
        let of_port = |(id, c): (&u16, &Controller)| (c.port == port).then_some(*id);
        let ids: Vec<u16> = self.controllers.iter().filter_map(of_port).collect();
        for cntlid in ids {
            let qps = self.controllers[&cntlid].qps.clone();
            self.end_controller(cntlid);
            if !self.ports[port].is_cut {
                qps.into_iter().for_each(|qp| self.end(qp, Reason::Peer));
            }
        }
    }

    /// The target ends the connection of one I/O queue at a port, and says so: it got no answer there.
    /// Then nothing more gets through, so that it does not hear that the host ends the association.
    pub(crate) fn close_queue(&mut self, port: usize) {
        let of_port = |c: &&Controller| c.port == port;
        let queues = self.controllers.values().filter(of_port).filter_map(|c| c.qps.get(1));
        let Some(qp) = queues.copied().last().filter(|_| !self.ports[port].is_cut) else { return };
        self.end_commands(|pending| pending.qp == qp);
        self.end(qp, Reason::Peer);
        self.ports[port].is_cut = true;
    }

    /// The process of a target is killed: nobody hears of it.
    pub(crate) fn kill(&mut self, daemon: usize) {
        self.daemons[daemon].is_alive = false;
        let of_daemon = |c: &Controller| c.port % self.daemons.len() == daemon;
        let ids = self.controllers.iter().filter(|(_, c)| of_daemon(c));
        let ids: Vec<u16> = ids.map(|(id, _)| *id).collect();
        if self.group.is_some() {
            self.delay_orphans(daemon);
        }
        ids.into_iter().for_each(|cntlid| self.end_controller(cntlid));
    }

    fn daemon_of(&self, port: usize) -> &Daemon {
        &self.daemons[port % self.daemons.len()]
    }

    /// An association ends at the target: each of its commands has been carried out, or never will be.
    fn end_controller(&mut self, cntlid: u16) {
        self.controllers.remove(&cntlid);
        self.end_commands(|pending| pending.cntlid == cntlid);
    }

    /// Each of these commands has been carried out, or never will be.
    fn end_commands(&mut self, is_over: impl Fn(&Pending) -> bool) {
        let all = std::mem::take(&mut self.pending).into_iter();
        let (of_this, rest): (Vec<_>, _) = all.partition(is_over);
        self.pending = rest;
        for pending in of_this {
            if self.is_late(&pending) {
                self.pending.push(pending);
            } else if self.random.percent(50) {
                self.execute(pending);
            }
        }
    }

    /// Reports an event to all controllers, or those of a port.
    pub(crate) fn notify(&mut self, port: Option<usize>, event: AsyncEvent) {
        for controller in self.controllers.values_mut() {
            let is_known = controller.events.iter().any(|(other, _)| *other == event);
            if port.is_none_or(|port| port == controller.port) && !is_known {
                controller.events.push((event, false));
            }
        }
        self.report();
    }

    /// Reports what is not reported yet, as far as there are requests for events.
    fn report(&mut self) {
        let mut messages = Vec::new();
        for controller in self.controllers.values_mut() {
            for (event, is_reported) in controller.events.iter_mut().filter(|(_, told)| !told) {
                let Some(cid) = controller.event_requests.pop_front() else { break };
                *is_reported = true;
                messages.push((controller.qps[0], cid, *event));
            }
        }
        for (qp, cid, event) in messages {
            self.answer(qp, cid, Status::SUCCESS, event.0.into());
        }
    }

    fn answer(&mut self, qp: Qp, cid: u16, status: Status, result: u64) {
        self.message(qp, &Cqe { result, ..Cqe::new(cid, status) }.emit());
    }

    fn on_capsule(&mut self, qp: Qp, cntlid: u16, sqe: Sqe, data: Vec<u8>) {
        if let Some(controller) = self.controllers.get_mut(&cntlid) {
            controller.heard = self.now;
        }
        let qid = self.links[&qp].qid;
        if sqe.is_fabrics() {
            let (status, result) = self.fabrics(qp, &sqe, &data);
            return self.answer(qp, sqe.cid, status, result);
        }
        if qid == 0 {
            return self.admin(qp, cntlid, &sqe);
        }
        if !self.controllers.contains_key(&cntlid) {
            return;
        }
        self.commands += 1;
        // Most are quick; of the others, some are still there when the host has lost the path.
        let most_ms = if self.random.percent(70) { 5 } else { self.longest_ms };
        let at = self.now + Duration::from_millis(self.random.below(most_ms));
        let port = self.links[&qp].port;
        let client = self.daemon_of(port).client;
        let data = match self.exposed.get(&sqe) {
            Some(memory) if sqe.io_opcode() != IoOpcode::READ => memory.to_vec(),
            _ => data,
        };
        self.pending.push(Pending { at, port, cntlid, client, qp, sqe, data });
    }

    /// A command is carried out, and answered if the connection is there.
    fn execute(&mut self, Pending { port, cntlid, qp, sqe, data, .. }: Pending) {
        let status = self.refusal(port, &sqe).unwrap_or_else(|| self.perform(&sqe, &data));
        if self.controllers.contains_key(&cntlid) {
            self.answer(qp, sqe.cid, status, 0);
        }
    }

    fn refusal(&mut self, port: usize, sqe: &Sqe) -> Option<Status> {
        if self.is_removed {
            return Some(Status::INVALID_NAMESPACE.with_dnr());
        }
        match self.ports[port].ana {
            AnaState::INACCESSIBLE => return Some(Status::ANA_INACCESSIBLE),
            AnaState::CHANGE => return Some(Status::ANA_TRANSITION),
            _ => {}
        }
        if self.random.percent(self.transient_percent) {
            let statuses = [
                Status::INTERNAL_ERROR,
                Status::INTERNAL_PATH_ERROR,
                Status::NAMESPACE_NOT_READY.with_crd(2),
                Status::AUTHENTICATION_REQUIRED,
            ];
            return Some(statuses[self.random.below(4) as usize]);
        }
        if self.random.percent(self.fatal_percent) {
            self.fatal_statuses += 1;
            return Some(FATAL);
        }
        let end = sqe.slba() + u64::from(sqe.blocks());
        let ranged = matches!(sqe.io_opcode(), IoOpcode::READ | IoOpcode::WRITE);
        (ranged && end > self.size_blocks).then_some(Status::LBA_OUT_OF_RANGE.with_dnr())
    }

    fn perform(&mut self, sqe: &Sqe, data: &[u8]) -> Status {
        let range = |slba: u64, blocks: u32| slba as usize..slba as usize + blocks as usize;
        let of_command = range(sqe.slba(), sqe.blocks());
        match sqe.io_opcode() {
            IoOpcode::READ => {
                let found: Vec<u8> =
                    self.blocks[of_command].iter().flat_map(|stamp| content(*stamp)).collect();
                if let Some(memory) = self.exposed.get(sqe) {
                    memory.copy_from_slice(&found);
                }
            }
            IoOpcode::WRITE => {
                for (block, bytes) in of_command.clone().zip(data.chunks(BLOCK_BYTES)) {
                    self.blocks[block] = stamp(bytes);
                }
                self.persist(sqe.fua(), of_command);
            }
            IoOpcode::WRITE_ZEROES => {
                self.blocks[of_command.clone()].fill(0);
                self.persist(sqe.fua(), of_command);
            }
            IoOpcode::DATASET_MANAGEMENT => {
                let range = DsmRange::parse_all(data).map(|r| range(r.slba, r.blocks)).next();
                self.blocks[range.expect("a range")].fill(0);
            }
            IoOpcode::FLUSH => self.durable.clone_from(&self.blocks),
            other => panic!("{other:?}"),
        }
        Status::SUCCESS
    }

    fn persist(&mut self, fua: bool, range: std::ops::Range<usize>) {
        if fua {
            self.durable[range.clone()].copy_from_slice(&self.blocks[range]);
        }
    }
}

/// The content of a block.
pub(crate) fn content(stamp: u64) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    for word in block.chunks_mut(8) {
        word.copy_from_slice(&stamp.to_le_bytes());
    }
    block
}

/// The stamp of a block, all of which it fills.
pub(crate) fn stamp(block: &[u8]) -> u64 {
    let stamp = u64::from_le_bytes(block[..8].try_into().expect("8 bytes"));
    assert_eq!(block, content(stamp), "a torn block");
    stamp
}
