//! The transport of one address: parses datagrams, finds their queue pair, and runs connection
//! management. It owns the queue pairs and borrows time, datagrams and memory.
//!
//! After every call that changes its state the driver drains [`Endpoint::poll_transmit`] and
//! [`Endpoint::poll_event`], and it calls [`Endpoint::handle_timeout`] at the time of
//! [`Endpoint::poll_timeout`]. A [`Transmit`] is valid until the next call that changes the state:
//! after that [`Endpoint::copy_payload`] may have nothing to copy.

mod connect;
mod qp_context;
mod random_ids;
mod receive;
mod stale_connection;

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use super::cm::ConnectionManager;
use super::cm::connection::{Connection, Phase, marked_guid};
use super::cm::mad::MAD_BYTES;
use super::cm::message::local_comm_id;
use super::cm::request_handle::Token;
use super::qp::memory_region::Memory;
use super::qp::reorder_buffer::ReorderBuffer;
use super::qp::{Io, QueuePair, Settings, ecn};
use super::stats::datagrams::{Counters, DatagramOutcome};
use super::stats::link_errors::{ByAddress, LinkErrorCounts};
use super::timer_heap::TimerHeap;
use super::wire::header::{Bth, Deth, Extended, GSI_QKEY, Packet};
use super::wire::icrc::{Checker, Flow, Verdict};
use super::wire::ipv4_id::{Judgement, Pairs};
use super::wire::lookup::Table;
use super::wire::opcode::{Opcode, Operation};
use super::wire::psn::{Psn, Qpn};
use super::wire::tx_packet::{Payload, TxPacket};
use crate::{Event, Fault, Qp, Reason, Region, Tag, Work};
use qp_context::QpContext;

pub use super::config::{Config, FIRST_SOURCE_PORT, Path, ROCE_PORT};

/// Initial capacity for events: a batch, and the events of one more train.
const EVENTS: usize = 1024;
/// Maximum of messages of connection management that wait to be sent; more are dropped, as the
/// network may drop them.
const MOST_MESSAGES: usize = 1024;

/// One datagram to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Addresses and ports.
    pub flow: Flow,
    /// Its headers, and the location of its payload.
    pub outgoing: TxPacket,
    /// Type of service for the IP header: as requested by the peer; ECN-capable if the peer reacts
    /// to marks.
    pub tos: u8,
    /// The queue pair; messages of connection management share one slot.
    pub(super) slot: u32,
}

struct Message {
    from: IpAddr,
    to: IpAddr,
    tos: u8,
    mad: [u8; MAD_BYTES],
}

/// Whether an address is a broadcast or multicast address: connections are between two hosts.
fn is_broadcast(address: IpAddr) -> bool {
    address.is_multicast() || address == IpAddr::V4(Ipv4Addr::BROADCAST)
}

/// The transport of one address; see the module.
pub struct Endpoint {
    config: Config,
    entropy: Box<dyn FnMut() -> u64 + Send>,
    slots: Vec<Option<QpContext>>,
    free: Vec<u32>,
    by_qpn: Table<Qpn>,
    by_comm: Table<u32>,
    manager: ConnectionManager,
    messages: VecDeque<Message>,
    messages_sent: usize,
    gsi_psn: Psn,
    ready: VecDeque<u32>,
    /// Queue pairs whose address had no room for their packets.
    halted: Vec<u32>,
    /// Next deadline of each queue pair.
    deadlines: TimerHeap,
    /// Scratch: queue pairs whose deadline has expired.
    due: Vec<u32>,
    /// Queue pairs that delay an acknowledgement, or did.
    keeping: Vec<u32>,
    events: VecDeque<Event>,
    /// Number of events that were returned.
    told: u64,
    leaving: VecDeque<u32>,
    /// Handles whose `Gone` was returned, and which are not reused before [`Endpoint::release`].
    departed: Vec<u32>,
    checker: Checker,
    pairs: Arc<Pairs>,
    /// A peer whose identifications cannot be predicted, since the last query.
    erratic: Option<IpAddr>,
    /// A path on which trains are no longer used, since the last query.
    without_trains: Option<(IpAddr, IpAddr)>,
    memory: Memory,
    reorder: ReorderBuffer,
    counters: Counters,
    troubles: ByAddress,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("config", &self.config)
            .field("queue_pairs", &self.by_qpn.len())
            .field("half_open", &self.half_open())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An endpoint without listeners or connections. `entropy` generates the unpredictable numbers
    /// (of queue pairs, connections and first packets).
    #[must_use]
    pub fn new(config: Config, entropy: Box<dyn FnMut() -> u64 + Send>) -> Endpoint {
        let guid = if config.selective { marked_guid(config.guid) } else { config.guid };
        let config = Config { guid, ..config };
        Endpoint {
            config,
            entropy,
            slots: Vec::new(),
            free: Vec::new(),
            by_qpn: Table::default(),
            by_comm: Table::default(),
            manager: ConnectionManager::new(&config),
            messages: VecDeque::new(),
            messages_sent: 0,
            gsi_psn: Psn::default(),
            ready: VecDeque::new(),
            halted: Vec::new(),
            deadlines: TimerHeap::default(),
            due: Vec::new(),
            keeping: Vec::new(),
            events: VecDeque::with_capacity(EVENTS),
            told: 0,
            leaving: VecDeque::new(),
            departed: Vec::new(),
            checker: Checker::new(),
            pairs: Arc::new(Pairs::new(config.steer.0)),
            erratic: None,
            without_trains: None,
            memory: Memory::new(config.exposed),
            reorder: ReorderBuffer::new(config.early),
            counters: Counters::default(),
            troubles: ByAddress::default(),
        }
    }

    /// For one of several endpoints at the same addresses, which share the state of their peers'
    /// identifications.
    pub(super) fn among(self, pairs: Arc<Pairs>) -> Endpoint {
        Endpoint { pairs, ..self }
    }

    /// Counters of datagrams.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Link errors of connections by local address.
    pub fn troubles(&self, tell: impl FnMut(IpAddr, &LinkErrorCounts)) {
        let of = |slot: &QpContext| (slot.connection.local, slot.qp.troubles());
        self.troubles.each(self.slots.iter().flatten().map(of), tell);
    }

    /// A peer whose identifications cannot be predicted, if there is a new one since the last
    /// query.
    pub(super) fn take_erratic(&mut self) -> Option<IpAddr> {
        self.erratic.take()
    }

    /// A path on which trains are no longer used, if there is a new one since the last query.
    pub(super) fn take_without_trains(&mut self) -> Option<(IpAddr, IpAddr)> {
        self.without_trains.take()
    }

    /// Maximum length of a train with this datagram.
    pub(super) fn longest_train(&self, transmit: &Transmit) -> usize {
        let (from, to) = (transmit.flow.source.ip(), transmit.flow.destination.ip());
        let takes = match transmit.outgoing.payload() {
            Payload::Management(_) => {
                self.pairs.known(to, from).is_none_or(|pair| pair.segments.are_kept())
            }
            _ => {
                let slot = self.slots.get(transmit.slot as usize).and_then(Option::as_ref);
                slot.is_none_or(QpContext::takes_trains)
            }
        };
        if takes { usize::MAX } else { 1 }
    }

    /// Called when a datagram leaves at this place of its train.
    pub(super) fn depart(&mut self, transmit: &Transmit, place: usize) {
        let slot = self.slots.get_mut(transmit.slot as usize).and_then(Option::as_mut);
        if let Some(slot) = slot {
            slot.depart(&transmit.outgoing, place);
        }
    }

    /// The largest path MTU that it accepts, in bytes.
    pub(super) fn mtu(&self) -> u32 {
        self.config.mtu
    }

    /// Whether a connection is established.
    pub(super) fn is_established(&self, qp: Qp) -> bool {
        let slot = self.slots.get(qp.0 as usize).and_then(Option::as_ref);
        slot.is_some_and(|s| s.gone.is_none() && s.connection.phase == Phase::Established)
    }

    /// Bytes of payload in a packet of a connection.
    pub(super) fn path_mtu(&self, qp: Qp) -> u32 {
        let slot = self.slots.get(qp.0 as usize).and_then(Option::as_ref);
        slot.map_or(self.config.mtu, |slot| slot.settings.mtu)
    }

    /// Maximum of queue pairs.
    pub(super) fn queue_pairs(&self) -> u32 {
        self.config.queue_pairs
    }

    /// Number of events that are not returned yet.
    pub(super) fn waiting_events(&self) -> usize {
        self.events.len()
    }

    /// Number of connections that peers have requested and not confirmed.
    #[must_use]
    pub fn half_open(&self) -> usize {
        self.manager.half_open.len()
    }

    /// Number of requests that wait for an answer to a challenge.
    #[must_use]
    pub fn challenges(&self) -> usize {
        self.manager.challenges.len()
    }

    /// The remote regions.
    pub fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Posts work on a queue pair. It completes exactly once; immediately, if there is no such
    /// queue pair.
    pub fn post(&mut self, qp: Qp, tag: Tag, work: Work, region: &Region) {
        self.forget_sent();
        match self.slots.get_mut(qp.0 as usize).and_then(Option::as_mut) {
            Some(slot) => {
                let (memory, events, reorder) =
                    (&mut self.memory, &mut self.events, &mut self.reorder);
                slot.qp.post(tag, work, &mut Io { region, memory, events, reorder, qp });
                slot.last_event = self.told + self.events.len() as u64;
                self.mark_ready(qp.0);
            }
            None => self.events.push_back(Event::Done(crate::Completion {
                qp,
                tag,
                work,
                outcome: Err(Fault::Flushed),
                invalidated: None,
            })),
        }
    }

    /// Handles a datagram (the payload of UDP) from a peer to this local address, with the type of
    /// service `tos` of its IP header (0 if unknown).
    pub fn handle(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: SocketAddr,
        tos: u8,
        datagram: &[u8],
        region: &Region,
    ) {
        self.forget_sent();
        self.counters.received += 1;
        self.counters.marked += u64::from(ecn::is_marked(tos));
        let flow = Flow { source: from, destination: SocketAddr::new(to.ip(), ROCE_PORT) };
        let outcome = match &Packet::parse(datagram) {
            Err(_) => DatagramOutcome::Malformed,
            Ok(_) if is_broadcast(to.ip()) => DatagramOutcome::Broadcast,
            Ok(packet) if packet.bth.destination == Qpn::GSI => {
                self.handle_management(now, &flow, packet, datagram, region)
            }
            Ok(packet) => self.handle_packet(now, &flow, tos, packet, datagram, region),
        };
        self.counters.count(outcome);
    }

    fn handle_packet(
        &mut self,
        now: Instant,
        flow: &Flow,
        tos: u8,
        packet: &Packet<'_>,
        datagram: &[u8],
        region: &Region,
    ) -> DatagramOutcome {
        let ends = (flow.source.ip(), flow.destination.ip());
        let number = self.by_qpn.get(&packet.bth.destination).copied();
        let found = number.and_then(|n| Some((n, self.slots.get_mut(n as usize)?.as_mut()?)));
        let Some((number, slot)) = found else { return DatagramOutcome::Stray };
        if (slot.connection.remote, slot.connection.local) != ends {
            return DatagramOutcome::Foreign;
        }
        if !packet.bth.is_default_partition() {
            return DatagramOutcome::Partition;
        }
        let verdict = self.checker.check(flow, datagram);
        if verdict == Verdict::Wrong {
            return DatagramOutcome::Damaged;
        }
        let is_notification = packet.row().operation == Operation::Congestion;
        // Adapters send these differently, and nothing in them is lasting.
        if !is_notification {
            if let Err(outcome) = slot.check_port(flow.source.port(), packet) {
                return outcome;
            }
            match slot
                .check_identification(self.config.steer.1, verdict, || self.pairs.clock_ms(now))
            {
                Judgement::Plausible => {}
                Judgement::Implausible => return DatagramOutcome::Implausible,
                Judgement::Erratic => {
                    self.erratic = Some(ends.0);
                    return DatagramOutcome::Implausible;
                }
            }
        }
        if ecn::is_capable(tos) {
            slot.on_capable(now, tos, packet);
        }
        if is_notification && !ecn::is_capable(slot.connection.tos) {
            // None of our packets to it can have been marked.
            return DatagramOutcome::Unasked;
        }
        let (memory, events, reorder) = (&mut self.memory, &mut self.events, &mut self.reorder);
        let mut io = Io { region, memory, events, reorder, qp: Qp(number) };
        let executed = slot.executed();
        let outcome = slot.qp.handle(now, packet, &mut io);
        if slot.note_arrivals(executed, Some(packet)) {
            self.without_trains = Some((ends.1, ends.0));
        }
        if matches!(
            outcome,
            DatagramOutcome::Executed | DatagramOutcome::Answered | DatagramOutcome::NotReady
        ) {
            slot.source_port.learn(flow.source.port());
        }
        // A fatal one has the expected number as well.
        let confirms = outcome.shows_life() || outcome.is_fatal();
        let waiting = slot.connection.phase == Phase::ReplySent && confirms;
        slot.heard = if outcome.shows_life() { Some(now) } else { slot.heard };
        // Its deadline is updated after all resulting packets have been sent.
        self.mark_ready(number);
        if waiting {
            // The peer's confirmation was lost or overtaken: this packet is equivalent, because the
            // number of its first packet was in our reply.
            self.establish(number);
        }
        outcome
    }

    fn handle_management(
        &mut self,
        now: Instant,
        flow: &Flow,
        packet: &Packet<'_>,
        datagram: &[u8],
        region: &Region,
    ) -> DatagramOutcome {
        if !packet.bth.is_default_partition() {
            return DatagramOutcome::Partition;
        }
        let right = packet.bth.opcode == Opcode::UdSendOnly
            && packet.ext.deth.is_some_and(|deth| deth.qkey == GSI_QKEY);
        let Some(mad) = packet.payload.first_chunk::<MAD_BYTES>().filter(|_| right) else {
            return DatagramOutcome::Unfit;
        };
        if self.checker.check(flow, datagram) == Verdict::Wrong {
            return DatagramOutcome::Damaged;
        }
        self.on_message(now, flow.source.ip(), flow.destination.ip(), mad, region)
    }

    /// The next datagram to send; none if there is none at present.
    pub fn poll_transmit(&mut self, now: Instant, region: &Region) -> Option<Transmit> {
        self.poll_transmit_where(now, region, |_| true)
    }

    /// As [`Endpoint::poll_transmit`], from the `open` local addresses only; messages of connection
    /// management from any. The others wait for [`Endpoint::resume`].
    pub(super) fn poll_transmit_where(
        &mut self,
        now: Instant,
        region: &Region,
        open: impl Fn(IpAddr) -> bool,
    ) -> Option<Transmit> {
        if !self.manager.displaced.is_empty() {
            self.end_displaced(now, region);
        }
        if let Some(message) = self.messages.get(self.messages_sent) {
            let mut bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, self.gsi_psn);
            bth.ack_request = true;
            self.gsi_psn = self.gsi_psn.add(1);
            let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
            let ext = Extended { deth, ..Extended::default() };
            let payload = Payload::Management(self.messages_sent);
            let outgoing = TxPacket::new(bth, &ext, payload, MAD_BYTES as u32);
            let (flow, tos) = (flow((message.from, ROCE_PORT), message.to), message.tos);
            self.messages_sent += 1;
            return Some(Transmit { flow, outgoing, tos, slot: 0 });
        }
        while let Some(number) = self.ready.front().copied() {
            let slot = self.slots.get_mut(number as usize).and_then(Option::as_mut);
            if let Some(slot) = slot.as_ref().filter(|slot| !open(slot.connection.local)) {
                self.deadlines.set(number, slot.deadline());
                self.halted.push(number);
            } else if let Some(slot) = slot {
                let (memory, events, reorder) =
                    (&mut self.memory, &mut self.events, &mut self.reorder);
                let mut io = Io { region, memory, events, reorder, qp: Qp(number) };
                if let Some(outgoing) = slot.qp.poll_transmit(now, &mut io) {
                    let Connection { local, remote, tos, local_qpn, remote_qpn, .. } =
                        slot.connection;
                    let port = self.config.source_port(local_qpn, remote_qpn);
                    let flow = flow((local, port), remote);
                    return Some(Transmit { flow, outgoing, tos, slot: number });
                }
                // Once, after everything was sent: the deadline is not read before.
                self.deadlines.set(number, slot.deadline());
                slot.ready = false;
                if slot.qp.is_keeping() && !std::mem::replace(&mut slot.keeping, true) {
                    self.keeping.push(number);
                }
            }
            self.ready.pop_front();
        }
        None
    }

    /// Tries all local addresses again.
    pub(super) fn resume(&mut self) {
        self.ready.extend(self.halted.drain(..));
    }

    /// Before a long sleep: delayed acknowledgements are sent now. Returns true if there are any.
    pub(super) fn hasten(&mut self, now: Instant) -> bool {
        while let Some(number) = self.keeping.pop() {
            if let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_mut)
                && std::mem::take(&mut slot.keeping)
                && slot.qp.is_keeping()
            {
                slot.qp.hasten(now);
                self.mark_ready(number);
            }
        }
        !self.ready.is_empty()
    }

    /// Appends the payload of a datagram to `into`.
    ///
    /// # Panics
    /// It is in a remote region of another thread.
    pub fn copy_payload(&self, transmit: &Transmit, region: &Region, into: &mut Vec<u8>) {
        into.extend_from_slice(self.payload(transmit, region));
    }

    /// The payload in place; see [`Memory::bytes`] for the conditions of its use.
    pub(crate) fn payload<'a>(&'a self, transmit: &Transmit, region: &'a Region) -> &'a [u8] {
        match transmit.outgoing.payload() {
            Payload::Management(at) => {
                self.messages.get(at).map(|message| &message.mad[..]).unwrap_or_default()
            }
            _ => self
                .slots
                .get(transmit.slot as usize)
                .and_then(Option::as_ref)
                .map(|slot| slot.qp.payload(&transmit.outgoing, region, &self.memory))
                .unwrap_or_default(),
        }
    }

    /// The next event. A handle may be reused immediately after `Gone`.
    pub fn poll_event(&mut self) -> Option<Event> {
        // Only after all completions were returned, including those of work that the driver posted
        // in response: `Gone` is the last event of a queue pair.
        let event = self.next_event().or_else(|| self.next_gone(|_| true));
        self.release();
        event
    }

    /// The next event other than `Gone`.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        self.told += 1;
        Some(event)
    }

    /// The next `Gone` of a queue pair without other pending events, for which `heard` confirms
    /// that its user has processed all events. Its handle is not reused yet.
    pub(super) fn next_gone(&mut self, heard: impl Fn(Qp) -> bool) -> Option<Event> {
        let told = |number: &u32| {
            let slot = self.slots.get(*number as usize).and_then(Option::as_ref);
            slot.is_none_or(|slot| slot.last_event <= self.told) && heard(Qp(*number))
        };
        let at = self.leaving.iter().position(told)?;
        let number = self.leaving.remove(at)?;
        let slot = self.slots.get_mut(number as usize)?.take()?;
        if slot.keeping {
            self.keeping.retain(|keeping| *keeping != number);
        }
        self.troubles.end(slot.connection.local, &slot.qp.troubles());
        self.departed.push(number);
        Some(Event::Gone(Qp(number), slot.gone.unwrap_or(Reason::Local)))
    }

    /// Allows handles to be reused: the user has processed their `Gone`.
    pub(super) fn release(&mut self) {
        self.free.append(&mut self.departed);
    }

    /// Whether there are events.
    pub(super) fn has_events(&self) -> bool {
        !(self.events.is_empty() && self.leaving.is_empty())
    }

    /// Whether there may be something to send.
    pub(super) fn has_transmits(&self) -> bool {
        self.messages_sent < self.messages.len() || !self.ready.is_empty()
    }

    /// Whether a connection or message uses this local address (an unspecified one: any).
    pub(super) fn uses(&self, address: IpAddr) -> bool {
        let covered = |at: IpAddr| {
            address == at || address.is_unspecified() && address.is_ipv4() == at.is_ipv4()
        };
        self.slots.iter().flatten().any(|slot| covered(slot.connection.local))
            || self.manager.uses(covered)
    }

    /// Time of the next [`Endpoint::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let of_slots = self.deadlines.first().map(|(due, _)| due);
        let of_manager = self.manager.deadlines();
        of_manager.into_iter().flatten().chain(of_slots).min()
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Instant, region: &Region) {
        self.forget_sent();
        // Each once, even if it is due again immediately.
        let mut due = std::mem::take(&mut self.due);
        while let Some((_, number)) = self.deadlines.first().filter(|(at, _)| *at <= now) {
            self.deadlines.set(number, None);
            due.push(number);
        }
        for number in due.drain(..) {
            let slot = self.slots.get_mut(number as usize).and_then(Option::as_mut);
            let Some(slot) = slot else { continue };
            let (memory, events, reorder) = (&mut self.memory, &mut self.events, &mut self.reorder);
            let mut io = Io { region, memory, events, reorder, qp: Qp(number) };
            slot.qp.handle_timeout(now, &mut io);
            if slot.note_arrivals(slot.executed(), None) {
                self.without_trains = Some((slot.connection.local, slot.connection.remote));
            }
            self.deadlines.set(number, slot.deadline());
            self.mark_ready(number);
        }
        self.due = due;
        self.retry(now, region);
    }

    /// Adds a queue pair to those that may have something to send.
    fn mark_ready(&mut self, number: u32) {
        if let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_mut)
            && !std::mem::replace(&mut slot.ready, true)
        {
            self.ready.push_back(number);
        }
    }

    /// Queues a message of connection management. A message about a connection has its traffic
    /// class, so that a network that does not drop data does not drop it either; it ignores marks,
    /// as it has no window.
    pub(crate) fn send_mad(&mut self, from: IpAddr, to: IpAddr, mad: [u8; MAD_BYTES]) {
        if self.messages.len() < MOST_MESSAGES {
            let number = self.by_comm.get(&local_comm_id(&mad)).copied();
            let slot = number.and_then(|number| self.slots.get(number as usize)?.as_ref());
            let tos = slot.map_or(0, |slot| ecn::without(slot.connection.tos));
            self.messages.push_back(Message { from, to, tos, mad });
        }
    }

    /// Creates a queue pair for a connection; none if the maximum is reached.
    fn insert(
        &mut self,
        qp: QueuePair,
        connection: Connection,
        settings: Settings,
        token: Option<Token>,
    ) -> Option<u32> {
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.slots.len() < self.config.queue_pairs as usize => {
                self.slots.push(None);
                self.deadlines.fit(self.slots.len());
                self.due.reserve(self.slots.len());
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        self.troubles.begin(connection.local);
        self.by_qpn.insert(connection.local_qpn, number);
        self.by_comm.insert(connection.local_comm, number);
        if connection.phase == Phase::Opened {
            self.manager.index(&connection, number);
        }
        let pair = self.pairs.of(connection.remote, connection.local);
        self.slots[number as usize] = Some(QpContext::new(qp, connection, settings, token, pair));
        // Each is listed once: no later push allocates.
        self.keeping.reserve(self.slots.len() - self.keeping.len());
        Some(number)
    }

    /// Ends a connection: all work completes, then `Gone`.
    fn remove(&mut self, now: Instant, number: u32, reason: Reason, region: &Region) {
        let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_mut) else {
            return;
        };
        if slot.gone.is_some() {
            return;
        }
        slot.gone = Some(reason);
        if let Some(token) = &slot.token {
            token.end(slot.connection.phase == Phase::Established && !slot.admitted);
        }
        let (memory, events, reorder) = (&mut self.memory, &mut self.events, &mut self.reorder);
        slot.qp.close(&mut Io { region, memory, events, reorder, qp: Qp(number) });
        slot.last_event = self.told + self.events.len() as u64;
        self.deadlines.set(number, None);
        let connection = &slot.connection;
        self.by_qpn.remove(&connection.local_qpn);
        self.by_comm.remove(&connection.local_comm);
        self.manager.forget(connection, number);
        if connection.remote_comm != 0 {
            let until = now + self.config.patience;
            self.manager.ended.insert(connection.key(), (), Some(until));
        }
        self.leaving.push_back(number);
    }

    /// The live connection of a queue pair.
    fn live(&mut self, qp: Qp) -> Option<&mut QpContext> {
        let slot = self.slots.get_mut(qp.0 as usize)?.as_mut()?;
        slot.gone.is_none().then_some(slot)
    }

    /// Frees messages that were sent.
    pub(crate) fn forget_sent(&mut self) {
        if self.messages_sent > 0 {
            self.messages.drain(..self.messages_sent);
            self.messages_sent = 0;
        }
    }
}

fn flow(from: (IpAddr, u16), to: IpAddr) -> Flow {
    Flow { source: SocketAddr::from(from), destination: SocketAddr::new(to, ROCE_PORT) }
}
