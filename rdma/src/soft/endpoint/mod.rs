//! The transport of one address: parses datagrams, finds their queue pair, and runs connection
//! management. It owns the queue pairs and borrows the world: time, datagrams, memory.
//!
//! After every call that changes something the driver drains [`Endpoint::poll_transmit`] and
//! [`Endpoint::poll_event`], and calls [`Endpoint::handle_timeout`] when
//! [`Endpoint::poll_timeout`] says. A [`Transmit`] is good until the next call that changes
//! something: after that [`Endpoint::copy_payload`] may have nothing to copy.

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

/// Events that there is room for at first: a batch, and what one train more may add to it.
const EVENTS: usize = 1024;
/// Messages of connection management that wait to be sent, at most; more are dropped, as the
/// network might.
const MOST_MESSAGES: usize = 1024;

/// One datagram to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// From where to where.
    pub flow: Flow,
    /// Its headers, and where its payload is.
    pub outgoing: TxPacket,
    /// Type of service for the IP header: what the peer asked for; ECN-capable where the peer heeds
    /// marks.
    pub tos: u8,
    /// The queue pair; those of connection management share one as well.
    pub(super) slot: u32,
}

struct Message {
    from: IpAddr,
    to: IpAddr,
    tos: u8,
    mad: [u8; MAD_BYTES],
}

/// Whether an address is that of many hosts: connections are between two.
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
    /// Those of them whose address had no room for what they say.
    halted: Vec<u32>,
    /// When each queue pair wants to be looked at.
    deadlines: TimerHeap,
    /// Those whose time has come; only while they are looked at.
    due: Vec<u32>,
    /// Those that keep an acknowledgement back, or did.
    keeping: Vec<u32>,
    events: VecDeque<Event>,
    /// How many have been handed out.
    told: u64,
    leaving: VecDeque<u32>,
    /// Handles whose `Gone` has been handed out, and which are not used again before
    /// [`Endpoint::release`].
    departed: Vec<u32>,
    checker: Checker,
    pairs: Arc<Pairs>,
    /// Whose identifications cannot be foretold, since this was asked last.
    erratic: Option<IpAddr>,
    /// From and to where there are no trains any more, since this was asked last.
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
    /// An endpoint without listeners or connections. `entropy` makes the numbers that nobody may
    /// guess (those of queue pairs, connections and first packets).
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

    /// The same, as one of several at the same addresses, which share what is known of their peers.
    pub(super) fn among(self, pairs: Arc<Pairs>) -> Endpoint {
        Endpoint { pairs, ..self }
    }

    /// What happened to datagrams so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What connections have met so far, by our address.
    pub fn troubles(&self, tell: impl FnMut(IpAddr, &LinkErrorCounts)) {
        let of = |slot: &QpContext| (slot.connection.local, slot.qp.troubles());
        self.troubles.each(self.slots.iter().flatten().map(of), tell);
    }

    /// An address whose identifications cannot be foretold, if there is one since this was asked last.
    pub(super) fn take_erratic(&mut self) -> Option<IpAddr> {
        self.erratic.take()
    }

    /// From and to where packets do not leave in trains any more, if there is such a path since this
    /// was asked last.
    pub(super) fn take_without_trains(&mut self) -> Option<(IpAddr, IpAddr)> {
        self.without_trains.take()
    }

    /// How many datagrams may leave together with one, at most.
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

    /// A datagram leaves at this place of its train.
    pub(super) fn depart(&mut self, transmit: &Transmit, place: usize) {
        let slot = self.slots.get_mut(transmit.slot as usize).and_then(Option::as_mut);
        if let Some(slot) = slot {
            slot.depart(&transmit.outgoing, place);
        }
    }

    /// The largest path MTU that it agrees to, in bytes.
    pub(super) fn mtu(&self) -> u32 {
        self.config.mtu
    }

    /// Whether a connection is up.
    pub(super) fn is_established(&self, qp: Qp) -> bool {
        let slot = self.slots.get(qp.0 as usize).and_then(Option::as_ref);
        slot.is_some_and(|s| s.gone.is_none() && s.connection.phase == Phase::Established)
    }

    /// Bytes of payload in a packet of a connection.
    pub(super) fn path_mtu(&self, qp: Qp) -> u32 {
        let slot = self.slots.get(qp.0 as usize).and_then(Option::as_ref);
        slot.map_or(self.config.mtu, |slot| slot.settings.mtu)
    }

    /// How many queue pairs there may be.
    pub(super) fn queue_pairs(&self) -> u32 {
        self.config.queue_pairs
    }

    /// How many events wait to be told.
    pub(super) fn waiting_events(&self) -> usize {
        self.events.len()
    }

    /// Connections that peers have asked for and not confirmed.
    #[must_use]
    pub fn half_open(&self) -> usize {
        self.manager.half_open.len()
    }

    /// Requests to connect that wait for a sign of life of their senders.
    #[must_use]
    pub fn challenges(&self) -> usize {
        self.manager.challenges.len()
    }

    /// The memory that peers may access.
    pub fn memory(&mut self) -> &mut Memory {
        &mut self.memory
    }

    /// Takes work for a queue pair. It comes home exactly once; at once, if there is no such
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

    /// Handles a datagram (all that UDP carries) that came `from` a peer `to` this address of
    /// ours, with the type of service `tos` of its IP header (0 if unknown).
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
        // Adapters send these otherwise, and nothing in them is lasting.
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
        // A fatal one has the right number as well.
        let confirms = outcome.shows_life() || outcome.is_fatal();
        let waiting = slot.connection.phase == Phase::ReplySent && confirms;
        slot.heard = if outcome.shows_life() { Some(now) } else { slot.heard };
        // Its deadline is looked at when all has been said that this makes it say.
        self.mark_ready(number);
        if waiting {
            // The peer's confirmation got lost, or overtaken: this says as much, because the number
            // of its first packet was in our reply.
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

    /// The next datagram to send; none when there is nothing more to say just now.
    pub fn poll_transmit(&mut self, now: Instant, region: &Region) -> Option<Transmit> {
        self.poll_transmit_where(now, region, |_| true)
    }

    /// The same, but from the addresses of ours only that are `open`, where messages of connection
    /// management are concerned from any. The rest waits for [`Endpoint::resume`].
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
                // Once, when all has been said: nobody asks for it before.
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

    /// All addresses of ours are worth a try again.
    pub(super) fn resume(&mut self) {
        self.ready.extend(self.halted.drain(..));
    }

    /// Before a long silence: what waits for company leaves now. True when there is such.
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

    /// Appends the bytes of a datagram's payload to `into`.
    ///
    /// # Panics
    /// When they are in memory that another thread has exposed.
    pub fn copy_payload(&self, transmit: &Transmit, region: &Region, into: &mut Vec<u8>) {
        into.extend_from_slice(self.payload(transmit, region));
    }

    /// The same bytes where they lie; see [`Memory::bytes`] for what must not happen meanwhile.
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

    /// What has happened, in order. A handle that is gone may be used again at once.
    pub fn poll_event(&mut self) -> Option<Event> {
        // Only when all completions have been handed out, those included that the driver caused
        // by posting in answer to others: so `Gone` is the last that is heard of a queue pair.
        let event = self.next_event().or_else(|| self.next_gone(|_| true));
        self.release();
        event
    }

    /// The next event but `Gone`.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        self.told += 1;
        Some(event)
    }

    /// The next end of a queue pair about which no other event waits, and for which `heard` says
    /// that its user has dealt with all it was told. The handle is not used again yet.
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

    /// Lets the handles of what has gone be used again: its user knows.
    pub(super) fn release(&mut self) {
        self.free.append(&mut self.departed);
    }

    /// Whether there is something to tell the user.
    pub(super) fn has_events(&self) -> bool {
        !(self.events.is_empty() && self.leaving.is_empty())
    }

    /// Whether there may be something to send.
    pub(super) fn has_transmits(&self) -> bool {
        self.messages_sent < self.messages.len() || !self.ready.is_empty()
    }

    /// Whether anything here talks from this address of ours (an unspecified one: from any).
    pub(super) fn uses(&self, address: IpAddr) -> bool {
        let covered = |at: IpAddr| {
            address == at || address.is_unspecified() && address.is_ipv4() == at.is_ipv4()
        };
        self.slots.iter().flatten().any(|slot| covered(slot.connection.local))
            || self.manager.uses(covered)
    }

    /// When [`Endpoint::handle_timeout`] wants to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let of_slots = self.deadlines.first().map(|(due, _)| due);
        let of_manager = self.manager.deadlines();
        of_manager.into_iter().flatten().chain(of_slots).min()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant, region: &Region) {
        self.forget_sent();
        // Each once, also one that is due again at once.
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

    /// Lists a queue pair among those that may have something to send.
    fn mark_ready(&mut self, number: u32) {
        if let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_mut)
            && !std::mem::replace(&mut slot.ready, true)
        {
            self.ready.push_back(number);
        }
    }

    /// Queues a message of connection management. One about a connection leaves in its traffic class,
    /// so that the network does not lose it where it loses no data; no window heeds its marks.
    pub(crate) fn send_mad(&mut self, from: IpAddr, to: IpAddr, mad: [u8; MAD_BYTES]) {
        if self.messages.len() < MOST_MESSAGES {
            let number = self.by_comm.get(&local_comm_id(&mad)).copied();
            let slot = number.and_then(|number| self.slots.get(number as usize)?.as_ref());
            let tos = slot.map_or(0, |slot| ecn::without(slot.connection.tos));
            self.messages.push_back(Message { from, to, tos, mad });
        }
    }

    /// Makes a queue pair for a connection; none when there are as many as there may be.
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

    /// Ends a connection here: all work comes home, then `Gone`.
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

    /// Messages that have been sent need not be shown any more.
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
