//! The receive side of a reliable connection (IBTA volume 1, 9.7.4 and 9.7.5; 9.9 "Error detection
//! and handling"). A request passes the steps that Linux's `rdma_rxe` names the same: `check_psn`,
//! `check_op_seq`, `check_op_valid`, `check_resource`, `check_length`, `check_rkey`, `execute`
//! (part of `check_resource` comes last, as `check_answers`).
//!
//! An out-of-order packet is kept, as far as there is room, and executed when the gap is filled. A
//! peer of this implementation gets a list of received packets immediately; any other gets one
//! NAK for the missing one, and sends everything from there on again.

use std::collections::VecDeque;

use super::memory_region::{Denied, Memory, Rights};
use super::{Io, Settings};
use crate::soft::stats::datagrams::DatagramOutcome;
use crate::soft::stats::link_errors::LinkErrorCounts;
use crate::wire::header::{MAX_MESSAGE_BYTES, Nak, Packet, RnrTimer, Syndrome, padding};
use crate::wire::opcode::{Headers, Operation};
use crate::wire::psn::{Msn, Psn, Qpn};
use crate::wire::tx_packet::TxPacket;
use crate::{Buf, Fault, ReceivedWith, Tag, Work};

use out_of_order::{OutOfOrder, ReorderOutcome};
pub(crate) use responses::Outcome;
use responses::ResponseQueue;

mod out_of_order;
mod responses;

/// Reason for not executing a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refusal {
    /// No receive is posted.
    NotReady,
    /// Send this NAK, and end the connection.
    Fatal(Nak),
    /// The posted receive is too short; send a NAK, and end the connection.
    TooLong,
}

impl From<Denied> for Refusal {
    fn from(_: Denied) -> Refusal {
        Refusal::Fatal(Nak::RemoteAccess)
    }
}

/// Payload from which on a packet counts as data, not as a message of the protocol above.
const LONG_BYTES: usize = 256;

const INVALID: Refusal = Refusal::Fatal(Nak::InvalidRequest);

/// The message that is being received.
#[derive(Debug)]
enum Current {
    None,
    Send { tag: Tag, buf: Buf, filled: u32 },
    Write { key: u32, address: u64, left: u32, length: u32 },
}

/// Maximum of out-of-order packets of a queue pair.
const MOST_EARLY: u32 = 1024;
/// The same for a peer of another implementation. It sends everything after the gap again anyway,
/// so keeping packets only helps where they were overtaken. And each number ahead of the expected
/// one makes it easier to forge a packet: an attacker who does not see the connection must guess 24
/// bits of the queue pair, 24 of the packet, less four for sixteen valid ones, and the source port
/// (14 bits from `rdma_rxe`, or eight where its queue pairs can be guessed). That is 2^52, more
/// than the 2^48 of the protocol itself.
const MOST_OVERTAKEN: u32 = 16;

/// The receive side.
#[derive(Debug)]
pub(crate) struct Responder {
    /// Packets executed since the last response, large ones weighted; saturated when the peer has
    /// sent something again.
    unsaid: u32,
    expected: Psn,
    msn: Msn,
    mtu: u32,
    rights: Rights,
    rnr: RnrTimer,
    current: Current,
    receives: VecDeque<(Tag, Buf)>,
    /// The expected packet has arrived without a receive, and an RNR NAK was sent; packets after it
    /// are kept without a report.
    waits: bool,
    /// A gap was reported: the last packet received after it.
    reported: Option<Psn>,
    early: OutOfOrder,
    /// A repeated packet before a read that was not acknowledged again.
    repeated: Option<Psn>,
    /// The last executed packet with an acknowledgement request.
    asked: Option<Psn>,
    answers: ResponseQueue,
}

impl Responder {
    pub(crate) fn new(receives: u32) -> Responder {
        Responder {
            unsaid: 0,
            expected: Psn::default(),
            msn: Msn::default(),
            mtu: 0,
            rights: Rights::NONE,
            rnr: RnrTimer::new(0),
            current: Current::None,
            receives: VecDeque::with_capacity(receives as usize),
            waits: false,
            reported: None,
            early: OutOfOrder::new(0, 0, false),
            repeated: None,
            asked: None,
            answers: ResponseQueue::new(0, 0),
        }
    }

    /// Applies the negotiated settings.
    pub(crate) fn start(&mut self, settings: &Settings) {
        self.expected = settings.receive_psn;
        self.mtu = settings.mtu;
        self.rights = settings.rights;
        self.rnr = settings.rnr_timer;
        let most = match settings.selective {
            true => settings.window.saturating_mul(2).min(MOST_EARLY),
            false => MOST_OVERTAKEN,
        };
        self.early = OutOfOrder::new(most, settings.mtu, settings.selective);
        self.answers = ResponseQueue::new(settings.mtu, usize::from(settings.answered_reads));
    }

    pub(crate) fn post(&mut self, tag: Tag, buf: Buf) {
        self.receives.push_back((tag, buf));
    }

    /// Number of missing requests before the one with this number, if any.
    pub(crate) fn ahead(&self, psn: Psn) -> i32 {
        psn.since(self.expected)
    }

    /// Handles a request. After a fatal one the queue pair has failed; the last response is a NAK.
    pub(crate) fn handle(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> DatagramOutcome {
        let psn = packet.bth.psn;
        match psn.since(self.expected) {
            0 => {
                let outcome = self.take(packet, io);
                self.catch_up(psn, outcome, io)
            }
            ahead @ 1.. => self.keep(ahead as u32, packet, io),
            _ => {
                self.duplicate(packet);
                DatagramOutcome::Late
            }
        }
    }

    /// `check_psn`, packet from the future: there is a gap.
    fn keep(&mut self, ahead: u32, packet: &Packet<'_>, io: &mut Io<'_>) -> DatagramOutcome {
        let (verdict, report) = self.early.keep(ahead, packet, io.reorder);
        if self.early.has_report() {
            if report && !self.waits {
                self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
            }
        } else {
            self.report_gap(packet.bth.psn, verdict);
        }
        if verdict == ReorderOutcome::Kept { DatagramOutcome::Kept } else { DatagramOutcome::Early }
    }

    /// Other peers get one NAK for a missing packet, and another one after they have evidently
    /// retransmitted and the packet was lost again.
    fn report_gap(&mut self, psn: Psn, verdict: ReorderOutcome) {
        let repeat = match (self.reported, verdict) {
            (None, _) => !self.waits,
            (Some(_), ReorderOutcome::Kept) => false,
            (Some(_), ReorderOutcome::Again) => true,
            (Some(last), ReorderOutcome::Dropped) => psn.since(last) <= 0,
        };
        if repeat {
            self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
        }
        // A kept packet may just have been overtaken; it is no evidence about dropped ones.
        let overtaken = |last: &Psn| verdict == ReorderOutcome::Kept && psn.since(*last) < 0;
        self.reported = Some(self.reported.filter(overtaken).unwrap_or(psn));
    }

    /// `check_psn`, packet from the past: the peer has not received the response.
    fn duplicate(&mut self, packet: &Packet<'_>) {
        match packet.row().operation {
            Operation::Send | Operation::Write if self.early.has_report() && !self.waits => {
                self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
            }
            Operation::Send | Operation::Write => {
                self.unsaid = u32::MAX;
                if !self.answers.end_with_data(self.expected) {
                    self.acknowledge(self.expected.previous(), Syndrome::ACK);
                } else if self.early.is_selective() || self.is_repeated_alone(packet.bth.psn) {
                    self.acknowledge(packet.bth.psn, Syndrome::ACK);
                }
            }
            Operation::ReadRequest => {
                self.repeated = None;
                self.answers.repeat_read(packet, self.msn);
            }
            _ => {}
        }
    }

    /// Whether a packet before the last read was repeated once more without that read. A peer that
    /// goes back, as other implementations do, requests the read as well, whose data acknowledge
    /// everything. An acknowledgement between the data and their repetition ends the connection at
    /// `rdma_rxe`.
    fn is_repeated_alone(&mut self, psn: Psn) -> bool {
        self.repeated.replace(psn).is_some_and(|last| psn.since(last) <= 0)
    }

    /// The expected packet was handled, with outcome `from`; handles those that waited for it.
    /// Returns the outcome of the first, or a fatal one.
    fn catch_up(
        &mut self,
        mut from: Psn,
        first: DatagramOutcome,
        io: &mut Io<'_>,
    ) -> DatagramOutcome {
        let mut outcome = first;
        while outcome == DatagramOutcome::Executed && !self.early.is_empty() {
            let passed = self.expected.since(from).unsigned_abs();
            from = self.expected;
            let Some(place) = self.early.pass(passed, io.reorder) else { break };
            let bytes = io.reorder.take(place);
            // It was a valid packet when it was kept.
            if let Ok(packet) = Packet::parse(&bytes) {
                outcome = self.take(&packet, io);
            }
            io.reorder.give(place, bytes);
        }
        let asked = self.asked.take();
        match outcome {
            _ if outcome.is_fatal() => return outcome,
            DatagramOutcome::Executed if self.early.has_report() => {
                self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
            }
            DatagramOutcome::Executed => {
                if let Some(psn) = asked {
                    self.acknowledge(psn, Syndrome::ACK);
                }
            }
            _ => {}
        }
        first
    }

    /// Executes the expected packet, or returns why not.
    fn take(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> DatagramOutcome {
        (self.reported, self.waits, self.repeated) = (None, false, None);
        match self.receive(packet, io) {
            Ok(()) => DatagramOutcome::Executed,
            Err(Refusal::NotReady) => {
                self.waits = true;
                self.acknowledge(packet.bth.psn, Syndrome::Rnr(self.rnr));
                DatagramOutcome::NotReady
            }
            Err(Refusal::Fatal(nak)) => {
                self.answers.end(packet.bth.psn, nak, self.msn);
                if nak == Nak::RemoteAccess {
                    DatagramOutcome::NoAccess
                } else {
                    DatagramOutcome::Invalid
                }
            }
            Err(Refusal::TooLong) => {
                let receive = match std::mem::replace(&mut self.current, Current::None) {
                    Current::Send { tag, buf, .. } => Some((tag, buf)),
                    _ => self.receives.pop_front(),
                };
                if let Some((tag, buf)) = receive {
                    io.done(tag, Work::Recv(buf), Err(Fault::Length));
                }
                self.answers.end(packet.bth.psn, Nak::InvalidRequest, self.msn);
                DatagramOutcome::Invalid
            }
        }
    }

    fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome) {
        self.answers.acknowledge(psn, syndrome, self.msn);
    }

    /// Handles the expected packet.
    fn receive(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        self.check_op_seq(packet)?;
        self.check_op_valid(packet)?;
        self.check_resource(packet)?;
        self.check_length(packet)?;
        self.check_rkey(packet, io.memory)?;
        self.check_answers(packet)?;
        self.execute(packet, io)
    }

    /// A message begins when none is in progress, and continues with its own kind.
    fn check_op_seq(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let right = match (&self.current, row.operation) {
            (Current::None, _) => row.position.begins(),
            (Current::Send { .. }, Operation::Send) => !row.position.begins(),
            (Current::Write { .. }, Operation::Write) => !row.position.begins(),
            _ => false,
        };
        if right { Ok(()) } else { Err(INVALID) }
    }

    /// The queue pair grants this right to peers. (`rdma_rxe` answers Invalid Request if not; for a
    /// target without remote regions it is an access error, whatever key and address the request
    /// names.)
    fn check_op_valid(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let needed = rights_for(packet.row().operation);
        if self.rights.has(needed) { Ok(()) } else { Err(Denied.into()) }
    }

    /// There is a receive for a message.
    fn check_resource(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        if row.takes_receive && self.receives.is_empty() {
            return Err(Refusal::NotReady);
        }
        Ok(())
    }

    /// There is room for the response to a read. The last check, so that a peer without access gets
    /// an access error, and not an error about the number of its requests.
    #[inline(always)] // for each packet, from one place
    fn check_answers(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let answered = packet.row().operation == Operation::ReadRequest;
        if answered && self.answers.are_busy() { Err(INVALID) } else { Ok(()) }
    }

    /// The payload has the length of its position in the message, and fits its destination.
    fn check_length(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let (row, len) = (packet.row(), packet.payload.len());
        if !row.payload.allows(len, self.mtu as usize) {
            return Err(INVALID);
        }
        let ends = row.position.ends();
        let padded = packet.bth.pad == padding(len);
        let total = packet.reth().map_or(0, |reth| reth.length);
        if !padded || total > MAX_MESSAGE_BYTES {
            return Err(INVALID);
        }
        match (row.operation, &self.current) {
            (Operation::Send, Current::Send { buf, filled, .. }) => {
                let room = buf.len().saturating_sub(*filled) as usize;
                if len > room { Err(Refusal::TooLong) } else { Ok(()) }
            }
            (Operation::Send, _) => match self.receives.front() {
                Some((_, buf)) if len > buf.len() as usize => Err(Refusal::TooLong),
                _ => Ok(()),
            },
            (Operation::Write, current) => {
                let left = match current {
                    Current::Write { left, .. } => *left as usize,
                    _ => total as usize,
                };
                // The announced length ends exactly with the last packet.
                if if ends { len == left } else { len < left } { Ok(()) } else { Err(INVALID) }
            }
            _ => Ok(()),
        }
    }

    /// The peer has access to the memory; to all of it, including that of later packets.
    fn check_rkey(&self, packet: &Packet<'_>, memory: &Memory) -> Result<(), Refusal> {
        let needed = rights_for(packet.row().operation);
        if needed == Rights::NONE {
            return Ok(());
        }
        if let Some(reth) = packet.reth().filter(|reth| reth.length > 0) {
            memory.place(reth.key, reth.address, reth.length, needed)?;
        }
        Ok(())
    }

    #[inline(always)] // for each packet, from one place
    fn execute(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        match packet.row().operation {
            Operation::Send => self.execute_send(packet, io)?,
            Operation::Write => self.execute_write(packet, io)?,
            Operation::ReadRequest => self.execute_read(packet),
            _ => return Err(INVALID),
        }
        Ok(())
    }

    #[inline(always)] // for each packet, from one place
    fn execute_send(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let (tag, mut buf, filled) = if row.position.begins() {
            self.receives.pop_front().map(|(t, b)| (t, b, 0)).ok_or(Refusal::NotReady)?
        } else {
            match std::mem::replace(&mut self.current, Current::None) {
                Current::Send { tag, buf, filled } => (tag, buf, filled),
                _ => return Err(INVALID),
            }
        };
        let end = filled + packet.payload.len() as u32;
        io.region.bytes_mut(&mut buf)[filled as usize..end as usize]
            .copy_from_slice(packet.payload);
        let with = sent_with(packet);
        if row.position.ends() {
            io.received(tag, buf, end, with);
            self.msn = self.msn.next();
        } else {
            self.current = Current::Send { tag, buf, filled: end };
        }
        self.executed(packet, 1);
        // The message has been delivered; a peer that invalidates a key that it does not have is
        // broken.
        match with {
            ReceivedWith::Invalidate(key) => io.memory.invalidate(key).map_err(|Denied| INVALID),
            _ => Ok(()),
        }
    }

    fn execute_write(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let len = packet.payload.len() as u32;
        let (key, address, left, length) = match (&self.current, packet.reth()) {
            (Current::Write { key, address, left, length }, _) => (*key, *address, *left, *length),
            (_, Some(reth)) => (reth.key, reth.address, reth.length, reth.length),
            _ => return Err(INVALID),
        };
        if len > 0 {
            let place = io.memory.place(key, address, len, Rights::WRITE)?;
            io.memory.write(io.region, place, packet.payload);
        }
        self.current = Current::None;
        if row.position.ends() {
            self.msn = self.msn.next();
            if row.takes_receive {
                self.complete_write(packet, length, io);
            }
        } else {
            let address = address.wrapping_add(u64::from(len));
            self.current = Current::Write { key, address, left: left.saturating_sub(len), length };
        }
        self.executed(packet, 1);
        Ok(())
    }

    /// A write with immediate data, of `bytes` in all its packets, completes a receive.
    #[inline(never)] // rare
    fn complete_write(&mut self, packet: &Packet<'_>, bytes: u32, io: &mut Io<'_>) {
        if let Some(immediate) = packet.immediate()
            && let Some((tag, buf)) = self.receives.pop_front()
        {
            let immediate = u32::from_be_bytes(immediate);
            io.received(tag, buf, 0, ReceivedWith::Write { immediate, bytes });
        }
    }

    fn execute_read(&mut self, packet: &Packet<'_>) {
        let Some(reth) = packet.reth() else { return };
        self.msn = self.msn.next();
        self.answers.read(packet.bth.psn, reth, self.msn);
        // The data are the acknowledgement.
        self.asked = None;
        self.expected = self.expected.add(packets_of(reth.length, self.mtu));
    }

    fn executed(&mut self, packet: &Packet<'_>, packets: u32) {
        self.expected = self.expected.add(packets);
        let weight = if packet.payload.len() < LONG_BYTES { 1 } else { 4 };
        self.unsaid = self.unsaid.saturating_add(packets.saturating_mul(weight));
        if packet.bth.ack_request {
            self.asked = Some(packet.bth.psn);
        }
    }

    /// The next response to send.
    pub(crate) fn transmit(&mut self, peer: Qpn, memory: &Memory) -> Option<(TxPacket, Outcome)> {
        self.begin_unsaid();
        self.answers.transmit(peer, memory, self.expected, &self.early)
    }

    /// Counts [`Responder::unsaid`] from now on: whatever there was to answer was sent.
    pub(crate) fn begin_unsaid(&mut self) {
        self.unsaid = 0;
    }

    pub(crate) fn troubles(&self) -> &LinkErrorCounts {
        &self.answers.troubles
    }

    /// Whether there is a response to send.
    pub(crate) fn has_answers(&self) -> bool {
        !self.answers.are_none()
    }

    /// Whether the only pending response is an acknowledgement of executed requests.
    pub(crate) fn only_acknowledges(&self) -> bool {
        self.answers.only_acknowledge()
    }

    /// How much the peer has sent since our last response, in packets: long ones count four times,
    /// and a repetition saturates.
    pub(crate) fn unsaid(&self) -> u32 {
        self.unsaid
    }

    /// Completes every receive, the unfinished one first, and drops all responses except a NAK.
    pub(crate) fn flush(&mut self, io: &mut Io<'_>) {
        if let Current::Send { tag, buf, .. } = std::mem::replace(&mut self.current, Current::None)
        {
            io.done(tag, Work::Recv(buf), Err(Fault::Flushed));
        }
        while let Some((tag, buf)) = self.receives.pop_front() {
            io.done(tag, Work::Recv(buf), Err(Fault::Flushed));
        }
        self.early.clear(io.reorder);
        self.answers.flush();
    }
}

/// What a packet of a message has for the completion of its receive.
#[inline(always)] // for each packet, from one place
fn sent_with(packet: &Packet<'_>) -> ReceivedWith {
    // Most have no extended header.
    if packet.row().headers == Headers::NONE {
        return ReceivedWith::Nothing;
    }
    match (packet.invalidate(), packet.immediate()) {
        (Some(key), _) => ReceivedWith::Invalidate(key),
        (_, Some(immediate)) => ReceivedWith::Immediate(u32::from_be_bytes(immediate)),
        _ => ReceivedWith::Nothing,
    }
}

/// The right that an operation needs.
fn rights_for(operation: Operation) -> Rights {
    match operation {
        Operation::Write => Rights::WRITE,
        Operation::ReadRequest => Rights::READ,
        Operation::Atomic => Rights::ATOMIC,
        _ => Rights::NONE,
    }
}

/// Number of packets, and so of sequence numbers, for `len` bytes: at least one.
pub(crate) fn packets_of(len: u32, mtu: u32) -> u32 {
    // Most are one packet: no division.
    if len <= mtu { 1 } else { len.div_ceil(mtu.max(1)) }
}
