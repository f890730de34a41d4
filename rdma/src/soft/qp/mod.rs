//! A queue pair: a requester and a responder with one lifetime (IBTA volume 1, 10.3 "Queue Pairs").
//!
//! ```text
//! Init ──► ReadyToReceive ──► ReadyToSend ──► Error
//!   └───────────┴────────────────────────────────^
//! ```
//!
//! Work posted between two flushes leaves in the order writes, sends, reads: datagrams of one
//! length are adjacent, for trains of them. Only a send reports that the writes before it are done.
//! It does not wait for more than `PASSING_BYTES` of other writes, so that the peer can start while
//! they arrive.
//!
//! In `Init` work may be posted and waits. In `Error` all work has completed, and posted work
//! completes immediately; only a NAK for the peer may still leave.

pub(super) mod ecn;
pub mod memory_region;
pub mod reorder_buffer;
mod requester;
mod responder;

use std::collections::VecDeque;
use std::time::Duration;

use super::clock::{Time, ns_of};
use super::qp::ecn::{NotificationPoint, RESERVED};
use super::qp::memory_region::{Memory, Rights};
use super::qp::reorder_buffer::ReorderBuffer;
use super::qp::requester::{Requester, Wqe};
use super::qp::responder::{Outcome, Responder};
use super::stats::datagrams::DatagramOutcome;
use super::stats::link_errors::{LinkError, LinkErrorCounts};
use crate::wire::header::{Packet, RnrTimer};
use crate::wire::opcode::Operation;
use crate::wire::psn::{Psn, Qpn};
use crate::wire::tx_packet::{Payload, TxPacket};
use crate::{Buf, Completion, Event, Fault, Qp, ReceivedWith, Region, Tag, Work};

/// Bytes of writes after which later ones do not overtake a send: two trains.
const PASSING_BYTES: u32 = 128 << 10;
/// Executed packets after which an acknowledgement is added to the next packets for a peer of this
/// implementation.
const ENOUGH_UNSAID: u32 = 4;
/// Maximum of executed packets without an acknowledgement: a requester asks for one at the latest
/// after a quarter of its window.
const MOST_UNSAID: u32 = 32;

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Accepts work, and does not execute it.
    Init,
    /// Executes the peer's requests and answers them.
    ReadyToReceive,
    /// Sends requests of its own as well.
    ReadyToSend,
    /// Failed.
    Error,
}

/// Negotiated and local parameters of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// The peer's queue pair.
    pub peer: Qpn,
    /// Path MTU: bytes of payload in a packet, 256 to 4096.
    pub mtu: u32,
    /// Number of our first request packet: the peer's choice.
    pub send_psn: Psn,
    /// Number of the peer's first request packet: our choice.
    pub receive_psn: Psn,
    /// Packets that may be unacknowledged at once.
    pub window: u32,
    /// Reads that may be outstanding: at most what the peer answers. 0 counts as 1.
    pub reads: u8,
    /// The peer is of this implementation: it keeps out-of-order packets, and both report them by
    /// [`crate::wire::opcode::Opcode::SelectiveAcknowledge`].
    pub selective: bool,
    /// Bytes requested by one read request; longer reads are split.
    pub read_bytes: u32,
    /// Reads of the peer that are answered concurrently.
    pub answered_reads: u8,
    /// Access rights of the peer to remote regions.
    pub rights: Rights,
    /// Ack timeout before a retransmission; it doubles with every retry, up to 64 times. None is
    /// infinite.
    pub ack_timeout: Option<Duration>,
    /// Retries without progress before the connection ends; connection management allows 0 to 7.
    pub retries: u8,
    /// The connection does not end before the peer has been silent for this time.
    pub silence: Duration,
    /// RNR NAKs before the connection ends; 7 is infinite.
    pub rnr_retries: u8,
    /// RNR timer in our RNR NAKs.
    pub rnr_timer: RnrTimer,
    /// Delay of a pure acknowledgement, to be sent with other packets.
    pub ack_delay: Duration,
}

/// Resources that a queue pair borrows for a step.
#[derive(Debug)]
pub struct Io<'a> {
    /// The memory of all posted buffers.
    pub region: &'a Region,
    /// The buffers that peers may access.
    pub memory: &'a mut Memory,
    /// Buffer for out-of-order packets.
    pub reorder: &'a mut ReorderBuffer,
    /// Receives completions.
    pub events: &'a mut Vec<Event>,
    /// Handle of the queue pair in its completions.
    pub qp: Qp,
}

impl Io<'_> {
    /// Completes work.
    pub(crate) fn done(&mut self, tag: Tag, work: Work, outcome: Result<u32, Fault>) {
        self.events.push(Event::Done(Completion::new(self.qp, tag, work, outcome)));
    }

    /// Completes a receive with a message of `len` bytes in its buffer.
    #[inline(always)] // for each message
    pub(crate) fn received(&mut self, tag: Tag, into: Buf, len: u32, with: ReceivedWith) {
        let (qp, work, outcome) = (self.qp, Work::Recv(into), Ok(len));
        self.events.push(Event::Done(Completion { qp, tag, work, outcome, with }));
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    state: State,
    peer: Qpn,
    requester: Requester,
    responder: Responder,
    /// Posted since the last flush, without a packet number yet.
    sends: VecDeque<Wqe>,
    reads: VecDeque<Wqe>,
    /// Bytes of the writes among them.
    written_bytes: u32,
    selective: bool,
    ack_delay_ns: u64,
    /// When a delayed pure acknowledgement is sent.
    ack_due: Time,
    /// The delay has expired; the acknowledgement waits only for room in the socket.
    ack_late: bool,
    /// A packet was sent since there was last nothing to send.
    spoke: bool,
    notification_point: NotificationPoint,
}

impl QueuePair {
    /// A queue pair in `Init`, with capacity for this many posted receives and sends, of which at
    /// most half are reads and half are neither reads nor writes (more than that allocate).
    pub fn new(receives: u32, sends: u32) -> QueuePair {
        QueuePair {
            state: State::Init,
            peer: Qpn::default(),
            requester: Requester::new(sends),
            responder: Responder::new(receives),
            sends: VecDeque::with_capacity(sends.div_ceil(2) as usize),
            reads: VecDeque::with_capacity(sends.div_ceil(2) as usize),
            written_bytes: 0,
            selective: false,
            ack_delay_ns: 0,
            ack_due: Time::NEVER,
            ack_late: false,
            spoke: false,
            notification_point: NotificationPoint::default(),
        }
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// From `Init` to `ReadyToReceive`; otherwise no effect.
    pub fn ready_to_receive(&mut self, settings: &Settings) {
        if self.state == State::Init {
            self.peer = settings.peer;
            (self.selective, self.ack_delay_ns) = (settings.selective, ns_of(settings.ack_delay));
            self.responder.start(settings);
            self.requester.start(settings);
            self.state = State::ReadyToReceive;
        }
    }

    /// From `ReadyToReceive` to `ReadyToSend`; otherwise no effect.
    pub fn ready_to_send(&mut self) {
        if self.state == State::ReadyToReceive {
            self.state = State::ReadyToSend;
        }
    }

    /// Posts work. It completes exactly once, in an event.
    #[inline(always)] // for each work request, from one place
    pub fn post(&mut self, tag: Tag, work: Work, io: &mut Io<'_>) {
        match work {
            work if self.state == State::Error => io.done(tag, work, Err(Fault::Flushed)),
            Work::Recv(buf) => self.responder.post(tag, buf),
            Work::Write { .. } => {
                if !self.sends.is_empty() && self.written_bytes >= PASSING_BYTES {
                    self.commit();
                }
                self.written_bytes = self.written_bytes.saturating_add(work.buf().len());
                self.requester.post(Wqe::new(tag, work));
            }
            Work::Read { .. } => self.reads.push_back(Wqe::new(tag, work)),
            // What completes a receive of the peer leaves in the order of posting.
            sends => self.sends.push_back(Wqe::new(tag, sends)),
        }
    }

    /// Assigns packet numbers to posted work.
    #[inline]
    fn commit(&mut self) {
        self.written_bytes = 0;
        if !(self.sends.is_empty() && self.reads.is_empty()) {
            self.commit_sends();
        }
    }

    #[inline(never)]
    fn commit_sends(&mut self) {
        if !self.sends.is_empty() {
            self.requester.append(&mut self.sends);
        }
        if !self.reads.is_empty() {
            self.requester.append(&mut self.reads);
        }
    }

    /// A packet of the peer was marked by the network.
    pub(super) fn on_mark(&mut self, now: Time) {
        if matches!(self.state, State::ReadyToReceive | State::ReadyToSend) {
            self.notification_point.on_mark(now);
        }
    }

    /// Handles a packet whose sender and CRC were checked.
    pub fn handle(&mut self, now: Time, packet: &Packet<'_>, io: &mut Io<'_>) -> DatagramOutcome {
        let outcome = self.receive(now, packet, io);
        self.settle(now, io);
        outcome
    }

    /// Handles one of several packets; [`QueuePair::settle`] follows after the last one, before
    /// anything else.
    #[inline(always)] // for each packet, from one place
    pub(crate) fn receive(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        io: &mut Io<'_>,
    ) -> DatagramOutcome {
        let row = packet.row();
        match self.state {
            State::ReadyToReceive | State::ReadyToSend if row.request => {
                let outcome = self.responder.handle(packet, io);
                if outcome.is_fatal() {
                    self.requester.settle(now, io);
                    self.enter_error(None, io);
                }
                outcome
            }
            State::ReadyToSend if row.acknowledges => {
                match self.requester.handle(now, packet, io) {
                    Ok(true) => DatagramOutcome::Answered,
                    Ok(false) => DatagramOutcome::Unasked,
                    Err(failed) => {
                        self.enter_error(Some(failed), io);
                        DatagramOutcome::Answered
                    }
                }
            }
            State::ReadyToSend if row.operation == Operation::Congestion => {
                self.requester.on_congestion();
                DatagramOutcome::Congestion
            }
            _ => DatagramOutcome::Unfit,
        }
    }

    /// Completes what the received packets have acknowledged.
    #[inline]
    pub(crate) fn settle(&mut self, now: Time, io: &mut Io<'_>) {
        self.requester.settle(now, io);
    }

    /// Whether a packet is the next request, or a response to a pending one.
    pub(super) fn is_expected(&self, packet: &Packet<'_>) -> bool {
        match packet.row().request {
            true => self.responder.ahead(packet.bth.psn) == 0,
            false => self.requester.is_pending(packet),
        }
    }

    /// Whether a packet is an out-of-order request.
    pub(super) fn is_early(&self, packet: &Packet<'_>) -> bool {
        packet.row().request && self.responder.ahead(packet.bth.psn) > 0
    }

    /// Whether a packet is a request that was executed before.
    pub(super) fn is_late(&self, packet: &Packet<'_>) -> bool {
        packet.row().request && self.responder.ahead(packet.bth.psn) < 0
    }

    /// Number of request packets that the peer has executed.
    pub(super) fn executed(&self) -> u64 {
        self.requester.executed()
    }

    /// The next packet that the peer will execute, and whether it is known to be lost.
    pub(super) fn next_to_execute(&self) -> (Psn, bool) {
        self.requester.next_to_execute()
    }

    /// Trains are not used for this peer any more.
    pub(super) fn note_trains_ended(&mut self) {
        self.requester.troubles.note(LinkError::TrainsEnded);
    }

    /// The next datagram to send. To be called until there is none.
    pub fn poll_transmit(&mut self, now: Time, io: &mut Io<'_>) -> Option<TxPacket> {
        let mut packet = None;
        self.transmit(now, io, 1, &mut |next| packet = Some(next));
        packet
    }

    /// Sends datagrams, as many as there is room for (at least one): responses first, then requests;
    /// but a pure acknowledgement last, where it can be the short end of a train. Returns their
    /// number: fewer if there are no more.
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        io: &mut Io<'_>,
        room: usize,
        sink: &mut impl FnMut(TxPacket),
    ) -> usize {
        if self.state == State::Init {
            return 0;
        }
        let mut left = room;
        if let Some(notification) = self.notification_point.transmit(self.peer) {
            self.requester.troubles.note(LinkError::CongestionSent);
            sink(notification);
            (left, self.spoke) = (left - 1, true);
        }
        self.commit();
        while left > 0 {
            let sends = self.state == State::ReadyToSend;
            let last = sends && self.responder.only_acknowledges();
            if last {
                let sent = self.requester.transmit(now, self.peer, left, sink);
                self.spoke |= sent > 0;
                left -= sent;
                if left == 0 || !self.acknowledges(now) {
                    break;
                }
            }
            let sent = match self.responder.transmit(self.peer, io.memory) {
                Some((response, outcome)) => {
                    self.ack_due = Time::NEVER;
                    if outcome == Outcome::Dead {
                        self.enter_error(None, io);
                    }
                    sink(response);
                    1
                }
                None if sends => self.requester.transmit(now, self.peer, left, sink),
                None => 0,
            };
            if sent == 0 {
                break;
            }
            (left, self.spoke) = (left - sent, true);
            if last {
                break;
            }
        }
        self.spoke = left == 0;
        room - left
    }

    /// Whether nothing is to be sent before work is posted or time passes. A pure acknowledgement is
    /// delayed from now on.
    pub(crate) fn rests(&mut self, now: Time) -> bool {
        self.state == State::ReadyToSend
            && !self.notification_point.is_due()
            && self.sends.is_empty()
            && self.reads.is_empty()
            && self.requester.rests()
            && self.responder.only_acknowledges()
            && !self.acknowledges(now)
    }

    /// Whether there is a pure acknowledgement to send now. Most requests are answered soon by a
    /// message, and an acknowledgement in the same train costs almost nothing: until then it is
    /// delayed.
    fn acknowledges(&mut self, now: Time) -> bool {
        if !self.responder.has_answers() {
            self.ack_due = Time::NEVER;
            self.responder.begin_unsaid();
            return false;
        }
        // A peer of this implementation does not wait for it once it has the message. Others may: a
        // Linux host completes a command only after its capsule was acknowledged.
        let enough = if self.selective { ENOUGH_UNSAID } else { 0 };
        let leaves = self.spoke && self.responder.unsaid() >= enough;
        if leaves || self.responder.unsaid() >= MOST_UNSAID {
            return true;
        }
        if self.ack_due == Time::NEVER {
            (self.ack_due, self.ack_late) = (now.after_ns(self.ack_delay_ns), false);
        }
        now >= self.ack_due
    }

    /// Whether an acknowledgement is delayed.
    pub fn is_keeping(&self) -> bool {
        self.ack_due != Time::NEVER
    }

    /// Sends delayed acknowledgements with the next packets.
    pub fn hasten(&mut self, now: Time) {
        if self.is_keeping() {
            self.ack_due = now;
        }
    }

    /// Appends the payload of a datagram to `into`; none if it has none, or the queue pair has
    /// changed since.
    ///
    /// # Panics
    /// It is in a remote region of another thread.
    pub fn copy_payload(
        &self,
        outgoing: &TxPacket,
        region: &Region,
        memory: &Memory,
        into: &mut Vec<u8>,
    ) {
        into.extend_from_slice(self.payload(outgoing, region, memory));
    }

    /// The payload in place; see [`Memory::bytes`] for the conditions of its use.
    #[inline(always)] // for each packet, from one place
    pub(crate) fn payload<'a>(
        &'a self,
        outgoing: &TxPacket,
        region: &'a Region,
        memory: &'a Memory,
    ) -> &'a [u8] {
        match outgoing.payload() {
            Payload::None | Payload::Management(_) => &[],
            Payload::Reserved => &RESERVED,
            Payload::Exposed(place) => memory.bytes(region, place),
            Payload::Posted { work, at } => {
                let range = at as usize..at as usize + outgoing.payload_bytes() as usize;
                let buf = self.requester.buf(work);
                buf.and_then(|buf| region.bytes(buf).get(range)).unwrap_or_default()
            }
        }
    }

    /// Its link errors, in both directions.
    pub(super) fn troubles(&self) -> LinkErrorCounts {
        let mut all = self.requester.troubles;
        all.add(self.responder.troubles());
        all
    }

    /// Time of the next [`QueuePair::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        self.deadline().finite()
    }

    #[inline]
    pub(super) fn deadline(&self) -> Time {
        let ack_due = if self.ack_late { Time::NEVER } else { self.ack_due };
        self.requester.poll_timeout().min(ack_due)
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Time, io: &mut Io<'_>) {
        self.ack_late |= self.ack_due <= now;
        if let Err(failed) = self.requester.handle_timeout(now) {
            self.enter_error(Some(failed), io);
        }
    }

    /// Closes it: all work completes.
    pub fn close(&mut self, io: &mut Io<'_>) {
        self.enter_error(None, io);
    }

    fn enter_error(&mut self, failed: Option<(u64, Fault)>, io: &mut Io<'_>) {
        self.state = State::Error;
        self.ack_due = Time::NEVER;
        self.commit();
        self.requester.flush(failed, io);
        self.responder.flush(io);
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::*;
    use crate::wire::header::{Bth, Extended, HeaderBytes, ICRC_BYTES};
    use crate::wire::opcode::Opcode;
    use crate::{Pool, PoolPlan};

    const ACK_DELAY: Duration = Duration::from_micros(50);

    pub(super) fn settings() -> Settings {
        Settings {
            peer: Qpn::new(7),
            mtu: 1024,
            send_psn: Psn::new(0),
            receive_psn: Psn::new(0),
            window: 64,
            selective: true,
            reads: 4,
            read_bytes: 4096,
            answered_reads: 4,
            rights: Rights::NONE,
            ack_timeout: Some(Duration::from_millis(10)),
            retries: 7,
            silence: Duration::ZERO,
            rnr_retries: 7,
            rnr_timer: RnrTimer::new(12),
            ack_delay: ACK_DELAY,
        }
    }

    /// What is asked before packets are made is what making them would show.
    #[test]
    fn a_queue_pair_rests_when_it_has_nothing_to_send_and_only_then() {
        let plan = PoolPlan::without_receives(2, 0, 4096);
        let (mut pool, mut memory) = (Pool::new(plan).unwrap(), Memory::new(0));
        let (mut reorder, mut events) = (ReorderBuffer::new(8), Vec::new());
        let cells = [pool.take_cell().unwrap(), pool.take_cell().unwrap()];
        let region = std::sync::Arc::clone(pool.region());
        let (reorder, events) = (&mut reorder, &mut events);
        let mut io = Io { region: &region, memory: &mut memory, reorder, events, qp: Qp(0) };
        let [receive, response] = cells;
        let (mut qp, now) = (QueuePair::new(4, 4), Time::default());
        assert!(!qp.rests(now), "it is not connected");
        qp.post(0, Work::Recv(receive), &mut io);
        qp.ready_to_receive(&settings());
        qp.ready_to_send();
        assert!(qp.rests(now) && qp.poll_timeout().is_none());

        let bth = Bth::new(Opcode::SendOnly, Qpn::new(9), Psn::new(0));
        let bth = Bth { ack_request: true, ..bth };
        let mut capsule = HeaderBytes::emit(&bth, &Extended::default()).as_slice().to_vec();
        capsule.resize(capsule.len() + 64 + ICRC_BYTES, 0);
        let outcome = qp.handle(now, &Packet::parse(&capsule).unwrap(), &mut io);
        assert_eq!((outcome, io.events.len()), (DatagramOutcome::Executed, 1));
        let due = now + ACK_DELAY;
        assert!(qp.rests(now) && qp.is_keeping(), "the acknowledgement is delayed");
        assert_eq!((qp.poll_timeout(), qp.poll_transmit(now, &mut io)), (Some(due), None));
        assert!(!qp.rests(due), "it is due");

        qp.post(1, Work::Send { from: response, invalidate: None }, &mut io);
        assert!(!qp.rests(now), "work was posted");
        let sent = qp.poll_transmit(now, &mut io).unwrap();
        assert_eq!(sent.header()[0], Opcode::SendOnly.to_wire());
        assert!(qp.rests(now));
        qp.on_mark(now);
        assert!(!qp.rests(now), "a congestion notification is due");
        assert!(qp.poll_transmit(now, &mut io).is_some() && qp.rests(now));
        qp.close(&mut io);
        assert!(!qp.rests(now), "it has failed");
    }
}
