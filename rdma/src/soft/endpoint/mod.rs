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
mod train;
mod transmit;

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use super::clock::{Clock, Time};
use super::cm::ConnectionManager;
use super::cm::connection::{Connection, Phase, marked_guid};
use super::cm::mad::MAD_BYTES;
use super::cm::message::local_comm_id;
use super::cm::request_handle::{RequestState, Token};
use super::ipv4_id::Pairs;
use super::lookup::Table;
use super::qp::memory_region::Memory;
use super::qp::reorder_buffer::ReorderBuffer;
use super::qp::{Io, QueuePair, Settings, ecn};
use super::stats::datagrams::Counters;
use super::stats::link_errors::{ByAddress, LinkErrorCounts};
use super::timer_heap::TimerHeap;
use crate::wire::icrc::{Checker, Flow};
use crate::wire::psn::{Psn, Qpn};
use crate::{Event, Fault, Qp, Reason, Region, Tag, Work};
use qp_context::QpContext;

pub(crate) use transmit::QueuedPacket;
pub use transmit::Transmit;

pub use super::config::{Config, FIRST_SOURCE_PORT, Path, ROCE_PORT};

/// Initial capacity for events: a batch, and the events of one more train.
const EVENTS: usize = 1024;
/// Maximum of messages of connection management that wait to be sent; more are dropped, as the
/// network may drop them.
const MOST_MESSAGES: usize = 1024;

struct Message {
    from: IpAddr,
    to: IpAddr,
    tos: u8,
    /// It belongs to no connection that the peer has confirmed: its destination may be forged.
    unconfirmed: bool,
    mad: [u8; MAD_BYTES],
}

impl Message {
    fn flow(&self) -> Flow {
        flow((self.from, ROCE_PORT), self.to)
    }
}

/// The transport of one address; see the module.
pub struct Endpoint {
    config: Config,
    entropy: Box<dyn FnMut() -> u64 + Send>,
    clock: Clock,
    slots: Vec<Option<QpContext>>,
    free: Vec<u32>,
    by_qpn: Table<Qpn>,
    /// The queue pair of the last packet: most arrive in trains.
    recent: u32,
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
    events: Vec<Event>,
    /// Number of events that were returned.
    returned: u64,
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
    pub fn new(config: Config, entropy: Box<dyn FnMut() -> u64 + Send>) -> Endpoint {
        let guid = if config.selective { marked_guid(config.guid) } else { config.guid };
        let config = Config { guid, ..config };
        Endpoint {
            config,
            entropy,
            clock: Clock::default(),
            slots: Vec::new(),
            free: Vec::new(),
            by_qpn: Table::default(),
            recent: 0,
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
            events: Vec::with_capacity(EVENTS),
            returned: 0,
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
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Link errors of connections by local address.
    pub fn troubles(&self, visit: impl FnMut(IpAddr, &LinkErrorCounts)) {
        let of = |slot: &QpContext| (slot.connection.local, slot.qp.troubles());
        self.troubles.each(self.slots.iter().flatten().map(of), visit);
    }

    /// Whether one of the next two functions or [`Endpoint::take_barred`] returns an address.
    #[inline]
    pub(super) fn has_link_errors(&self) -> bool {
        let new = (self.erratic.is_some(), self.without_trains.is_some());
        new.0 | new.1 | self.manager.barred.is_some()
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

    /// Number of messages of connection management to send.
    pub(super) fn waiting_messages(&self) -> usize {
        self.messages.len() - self.messages_sent
    }

    /// Number of connections that peers have requested and not confirmed.
    pub fn half_open(&self) -> usize {
        self.manager.half_open.len()
    }

    /// Number of requests that wait for an answer to a challenge.
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
                if slot.gone.is_some() {
                    slot.last_event = self.returned + self.events.len() as u64;
                }
                if !std::mem::replace(&mut slot.ready, true) {
                    self.ready.push_back(qp.0);
                }
            }
            None => self.events.push(Event::Done(crate::Completion::new(
                qp,
                tag,
                work,
                Err(Fault::Flushed),
            ))),
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
        if self.events.is_empty() {
            return None;
        }
        self.returned += 1;
        Some(self.events.remove(0))
    }

    /// Moves events to a batch, at most `most`, but not `Gone`.
    #[inline(never)]
    pub(super) fn take_events(&mut self, most: usize, batch: &mut Vec<Event>) {
        let before = batch.len();
        if self.events.len() <= most {
            batch.append(&mut self.events);
        } else {
            batch.extend(self.events.drain(..most));
        }
        self.returned += (batch.len() - before) as u64;
    }

    /// The next `Gone` of a queue pair without other pending events, for which `heard` confirms
    /// that its user has processed all events. Its handle is not reused yet.
    pub(super) fn next_gone(&mut self, heard: impl Fn(Qp) -> bool) -> Option<Event> {
        let returned = |number: &u32| {
            let slot = self.slots.get(*number as usize).and_then(Option::as_ref);
            slot.is_none_or(|slot| slot.last_event <= self.returned) && heard(Qp(*number))
        };
        let at = self.leaving.iter().position(returned)?;
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
    #[inline]
    pub(super) fn has_transmits(&self) -> bool {
        !self.ready.is_empty()
            || self.waiting_messages() > 0
            || !self.halted.is_empty()
            || !self.manager.displaced.is_empty()
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
    pub fn poll_timeout(&self) -> Option<Instant> {
        let of_slots = self.clock.instant(self.deadlines.earliest());
        self.manager.next_deadline().into_iter().chain(of_slots).min()
    }

    /// Whether [`Endpoint::handle_timeout`] is due.
    #[inline]
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        self.clock.read(now);
        self.clock.has_reached(self.deadlines.earliest()) || self.manager.is_due(now)
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Instant, region: &Region) {
        self.forget_sent();
        let time = self.clock.read(now);
        // Each once, even if it is due again immediately.
        let mut due = std::mem::take(&mut self.due);
        while let Some((_, number)) = self.deadlines.first().filter(|(at, _)| *at <= time) {
            self.deadlines.set(number, Time::NEVER);
            due.push(number);
        }
        for number in due.drain(..) {
            let slot = self.slots.get_mut(number as usize).and_then(Option::as_mut);
            let Some(slot) = slot else { continue };
            let (memory, events, reorder) = (&mut self.memory, &mut self.events, &mut self.reorder);
            let mut io = Io { region, memory, events, reorder, qp: Qp(number) };
            slot.qp.handle_timeout(time, &mut io);
            if slot.note_arrivals(slot.executed()) {
                self.without_trains = Some((slot.connection.local, slot.connection.remote));
            }
            if std::mem::replace(&mut slot.ready, true) {
                // Its address may have no room for its packets for long.
                self.deadlines.set(number, slot.deadline());
            } else {
                // Its deadline is set after all resulting packets have been sent.
                self.ready.push_back(number);
            }
        }
        self.due = due;
        if self.manager.is_due(now) {
            self.retry(now, region);
        }
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
            let confirmed = |slot: &QpContext| !slot.connection.phase.is_half_open();
            let unconfirmed = !slot.is_some_and(confirmed);
            self.messages.push_back(Message { from, to, tos, unconfirmed, mad });
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
        let mut slot = QpContext::new(qp, connection, settings, token, pair);
        slot.set_source_port(&self.config);
        self.slots[number as usize] = Some(slot);
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
        // A peer that never answered may not have received our messages, and repeats its request.
        let was_answered = slot.connection.phase == Phase::Established || slot.declined;
        if let Some(token) = &slot.token {
            match was_answered {
                true => token.end(!slot.admitted),
                false => token.set(RequestState::Refused),
            }
        }
        let (memory, events, reorder) = (&mut self.memory, &mut self.events, &mut self.reorder);
        slot.qp.close(&mut Io { region, memory, events, reorder, qp: Qp(number) });
        slot.last_event = self.returned + self.events.len() as u64;
        self.deadlines.set(number, Time::NEVER);
        let connection = &slot.connection;
        self.by_qpn.remove(&connection.local_qpn);
        self.by_comm.remove(&connection.local_comm);
        self.manager.forget(connection, number);
        if was_answered {
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
