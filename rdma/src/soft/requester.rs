//! The send side of a reliable connection (IBTA volume 1, 9.7.3 and 9.7.5.1.3; 9.9.2 "Requester
//! side error behavior"): cuts posted work into packets, keeps it until acknowledged, goes back to
//! the oldest unacknowledged packet when something got lost.
//!
//! # Counting
//!
//! Inside, packets are counted from 0 in 64 bits, so order is order and nothing wraps; packet `n`
//! has the sequence number `start + n` on the wire. Three marks move over the posted work:
//!
//! ```text
//! works:   | send  | write    | read (asked for in pieces)  | send |
//!          ^ una ............ next ........ sent
//! ```
//!
//! Before `una` everything is acknowledged, and done. `next` is the packet to send next; it falls
//! back to `una` when packets are to be sent again. `sent` is the highest that ever was.
//!
//! # Choices
//!
//! * A write goes out as so many `WRITE Only`, each with its own address: all its packets have the
//!   same length, as trains of segments demand, and any one can be repeated by itself.
//! * A read goes out in pieces of [`Settings::read_bytes`], so that the answers to one request fit
//!   the socket buffer. A response packet's number tells its place in the buffer, whatever piece
//!   it belongs to, so pieces need no book-keeping of their own.
//! * An acknowledgement is asked for where the requester would otherwise fall silent, and every
//!   [`ACK_INTERVAL`] packets: not for every message.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::header::{Bth, Extended, Nak, Packet, Reth, Syndrome};
use super::opcode::{Opcode, Operation};
use super::outgoing::{Outgoing, Payload};
use super::psn::{Psn, Qpn};
use super::qp::{Io, Settings};
use super::responder::packets_of;
use crate::{Buf, Fault, Tag, Work};

/// Packets without a request for an acknowledgement, at most.
const ACK_INTERVAL: u32 = 32;
/// How often a peer's complaint about the same packet makes us go back before the timer does.
const MOST_REWINDS: u8 = 8;
/// How often the wait for an acknowledgement doubles.
const MOST_DOUBLINGS: u32 = 6;
/// The code for retries without end.
const ENDLESS: u8 = 7;

/// One posted piece of work.
#[derive(Debug)]
struct Item {
    tag: Tag,
    work: Work,
    /// Its first packet.
    first: u64,
    packets: u32,
}

impl Item {
    fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }

    /// Where packet `at` begins in the buffer, and how long it is.
    fn segment(&self, at: u64, mtu: u32) -> (u32, u32) {
        let offset = (at - self.first) * u64::from(mtu);
        let left = u64::from(self.work.buf().len()).saturating_sub(offset);
        (offset as u32, left.min(u64::from(mtu)) as u32)
    }
}

/// The send side.
#[derive(Debug)]
pub(crate) struct Requester {
    start: Psn,
    mtu: u32,
    window: u64,
    /// Packets of a piece of a read.
    piece: u64,
    depth: usize,
    timeout: Option<Duration>,
    retries: u8,
    rnr_retries: u8,

    works: VecDeque<Item>,
    /// Works done before those in `works`.
    done: u64,
    /// Where the packets of the next post begin.
    posted: u64,
    una: u64,
    next: u64,
    sent: u64,
    /// Index in `works` of the item that `next` is in.
    cursor: usize,
    /// Ends of the pieces of reads that have been asked for and not come.
    reads: VecDeque<u64>,
    /// Packets since an acknowledgement was asked for.
    silent: u32,

    deadline: Option<Instant>,
    /// The peer has no receive; nothing is sent before this.
    pause: Option<Instant>,
    retries_left: u8,
    rnr_left: u8,
    /// How often we went back to `una`, except by the timer.
    rewinds: u8,
}

impl Requester {
    pub(crate) fn new(sends: u32) -> Requester {
        Requester {
            start: Psn::default(),
            mtu: 0,
            window: 0,
            piece: 1,
            depth: 1,
            timeout: None,
            retries: 0,
            rnr_retries: 0,
            works: VecDeque::with_capacity(sends as usize),
            done: 0,
            posted: 0,
            una: 0,
            next: 0,
            sent: 0,
            cursor: 0,
            reads: VecDeque::new(),
            silent: 0,
            deadline: None,
            pause: None,
            retries_left: 0,
            rnr_left: 0,
            rewinds: 0,
        }
    }

    /// Settles what the connection has agreed on. Work may have been posted before.
    pub(crate) fn start(&mut self, settings: &Settings) {
        self.start = settings.send_psn;
        self.mtu = settings.mtu.max(1);
        // Half of half the number space: an answer can then never be taken for another.
        self.window = u64::from(settings.window.clamp(1, 1 << 22));
        self.piece = u64::from(settings.read_bytes / self.mtu).clamp(1, self.window);
        self.depth = usize::from(settings.reads.max(1));
        self.reads.reserve(self.depth);
        self.timeout = settings.ack_timeout;
        self.retries = settings.retries;
        self.rnr_retries = settings.rnr_retries;
        (self.retries_left, self.rnr_left) = (self.retries, self.rnr_retries);
        for item in &mut self.works {
            item.first = self.posted;
            item.packets = packets_of(item.work.buf().len(), self.mtu);
            self.posted = item.end();
        }
    }

    /// Queues a send, write or read.
    pub(crate) fn post(&mut self, tag: Tag, work: Work) {
        let packets = if self.mtu == 0 { 0 } else { packets_of(work.buf().len(), self.mtu) };
        self.works.push_back(Item { tag, work, first: self.posted, packets });
        self.posted += u64::from(packets);
    }

    fn psn(&self, at: u64) -> Psn {
        self.start.add(at as u32)
    }

    /// Which of the packets sent and not acknowledged has this number.
    fn outstanding(&self, psn: Psn) -> Option<u64> {
        let ahead = u64::try_from(psn.since(self.psn(self.una))).ok()?;
        Some(self.una + ahead).filter(|at| *at < self.sent)
    }

    /// Handles a response; false when it answers nothing, or is out of its turn. A fault is that
    /// of the work which it answers.
    pub(crate) fn handle(
        &mut self,
        now: Instant,
        packet: &Packet<'_>,
        io: &mut Io<'_>,
    ) -> Result<bool, (u64, Fault)> {
        let Some(at) = self.outstanding(packet.bth.psn) else { return Ok(false) };
        let syndrome = packet.ext.aeth.map_or(Syndrome::ACK, |aeth| aeth.syndrome);
        match (packet.row().operation, syndrome) {
            (Operation::ReadResponse, Syndrome::Ack(_)) => {
                return Ok(self.read_response(now, at, packet, io));
            }
            (Operation::Acknowledge, Syndrome::Ack(_)) => {
                self.advance(now, at + 1, io);
            }
            (Operation::Acknowledge, Syndrome::Rnr(timer)) => {
                let arrived = self.advance(now, at, io);
                if arrived && self.pause.is_none() {
                    self.wait(now + timer.duration())?;
                }
            }
            (Operation::Acknowledge, Syndrome::Nak(Nak::Sequence)) => {
                let arrived = self.advance(now, at, io);
                if arrived && self.rewinds < MOST_REWINDS {
                    self.rewinds += 1;
                    self.rewind();
                }
            }
            (Operation::Acknowledge, Syndrome::Nak(nak)) => {
                self.advance(now, at, io);
                return Err((at, fault_of(nak)));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Everything before `upto` has been executed: completes it. False when the data of a read
    /// among it are missing; their responses got lost, so the read is asked for again.
    fn advance(&mut self, now: Instant, upto: u64, io: &mut Io<'_>) -> bool {
        while self.una < upto {
            let Some(item) = self.works.front() else { return false };
            if matches!(item.work, Work::Read { .. }) {
                if self.rewinds == 0 {
                    self.rewinds = 1;
                    self.rewind();
                }
                return false;
            }
            let to = upto.min(item.end());
            self.progress(now, to, io);
        }
        true
    }

    /// Moves `una` within the front item, and completes that at its end.
    fn progress(&mut self, now: Instant, to: u64, io: &mut Io<'_>) {
        self.una = to;
        (self.retries_left, self.rnr_left) = (self.retries, self.rnr_retries);
        (self.rewinds, self.pause) = (0, None);
        if self.works.front().is_some_and(|item| item.end() <= to)
            && let Some(item) = self.works.pop_front()
        {
            let len = item.work.buf().len();
            io.done(item.tag, item.work, Ok(len));
            self.done += 1;
            self.cursor = self.cursor.saturating_sub(1);
        }
        while self.reads.front().is_some_and(|end| *end <= to) {
            self.reads.pop_front();
        }
        if self.next < to {
            // An answer to an earlier round came while we were sending again.
            (self.next, self.cursor) = (to, 0);
        }
        let waiting = self.una < self.sent;
        self.deadline = self.timeout.filter(|_| waiting).map(|timeout| now + timeout);
    }

    /// Takes the data of a read; false when they are not those that come next.
    fn read_response(
        &mut self,
        now: Instant,
        at: u64,
        packet: &Packet<'_>,
        io: &mut Io<'_>,
    ) -> bool {
        // A response acknowledges all before it. Only the very next one is taken.
        if !self.advance(now, at, io) || self.una != at {
            return false;
        }
        let (mtu, Some(item)) = (self.mtu, self.works.front_mut()) else { return false };
        let (offset, len) = item.segment(at, mtu);
        let Work::Read { into, .. } = &mut item.work else { return false };
        if packet.payload.len() != len as usize {
            return false;
        }
        let window = io.region.bytes_mut(into);
        window[offset as usize..(offset + len) as usize].copy_from_slice(packet.payload);
        self.progress(now, at + 1, io);
        true
    }

    /// The peer asks to wait.
    fn wait(&mut self, until: Instant) -> Result<(), (u64, Fault)> {
        if self.rnr_retries != ENDLESS {
            self.rnr_left = self.rnr_left.checked_sub(1).ok_or((self.una, Fault::NotReady))?;
        }
        self.rewind();
        (self.pause, self.deadline) = (Some(until), None);
        Ok(())
    }

    /// Goes back to the oldest unacknowledged packet.
    fn rewind(&mut self) {
        (self.next, self.cursor, self.silent) = (self.una, 0, 0);
        self.reads.clear();
    }

    /// When [`Requester::handle_timeout`] wants to be called.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.pause.or(self.deadline)
    }

    /// A deadline may have passed.
    pub(crate) fn handle_timeout(&mut self, now: Instant) -> Result<(), (u64, Fault)> {
        if self.pause.is_some_and(|until| until <= now) {
            self.pause = None;
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.retries_left =
                self.retries_left.checked_sub(1).ok_or((self.una, Fault::Unreachable))?;
            self.deadline = self.timeout.map(|timeout| now + self.backed_off(timeout));
            self.rewinds = 0;
            self.rewind();
        }
        Ok(())
    }

    /// Twice as long a wait after every retry: a lost packet is noticed soon, and a peer that
    /// stands still for seconds, as virtual machines do, is not given up.
    fn backed_off(&self, timeout: Duration) -> Duration {
        let used = u32::from(self.retries.saturating_sub(self.retries_left));
        timeout.saturating_mul(1 << used.min(MOST_DOUBLINGS))
    }

    /// How many packets the next datagram stands for, or 0 when none may leave now.
    fn sendable(&self) -> u64 {
        let Some(item) = self.works.get(self.cursor).filter(|_| self.pause.is_none()) else {
            return 0;
        };
        let used = self.next - self.una;
        match item.work {
            Work::Read { .. } => {
                // Pieces begin at multiples of their length, also when one is asked for in part.
                let into = self.next - item.first;
                let end = item.first + (into / self.piece + 1) * self.piece;
                let packets = end.min(item.end()) - self.next;
                let room = used + packets <= self.window.max(self.piece);
                if room && self.reads.len() < self.depth { packets } else { 0 }
            }
            _ => u64::from(used < self.window),
        }
    }

    /// The next request to send.
    pub(crate) fn transmit(&mut self, now: Instant, peer: Qpn) -> Option<Outgoing> {
        let packets = self.sendable();
        let item = self.works.get(self.cursor).filter(|_| packets > 0)?;
        let (at, work) = (self.next, self.done + self.cursor as u64);
        let (offset, len) = item.segment(at, self.mtu);
        let (opcode, ext) = match &item.work {
            Work::Read { into, from } => {
                let asked = packets * u64::from(self.mtu);
                let length = asked.min(u64::from(into.len() - offset.min(into.len()))) as u32;
                (Opcode::ReadRequest, memory_of(from.addr, from.key, offset, length))
            }
            Work::Write { to, .. } => (Opcode::WriteOnly, memory_of(to.addr, to.key, offset, len)),
            Work::Send { invalidate, .. } => {
                let last = at + 1 == item.end();
                let ext = Extended { invalidate: *invalidate, ..Extended::default() };
                (send_opcode(at == item.first, last, invalidate.is_some()), ext)
            }
            // Receives are the responder's; the queue pair posts none here.
            Work::Recv(_) => return None,
        };
        let (payload, payload_bytes) = match item.work {
            Work::Read { .. } => (Payload::None, 0),
            _ if len == 0 => (Payload::None, 0),
            _ => (Payload::Posted { work, at: offset }, len),
        };
        let is_read = matches!(item.work, Work::Read { .. });
        let mut bth = Bth::new(opcode, peer, self.psn(at));
        self.next += packets;
        if is_read {
            self.reads.push_back(self.next);
        }
        if self.next >= item.end() {
            self.cursor += 1;
        }
        self.sent = self.sent.max(self.next);
        self.silent += 1;
        if is_read || self.silent >= ACK_INTERVAL || self.sendable() == 0 {
            bth.ack_request = true;
            self.silent = 0;
        }
        if self.deadline.is_none() {
            self.deadline = self.timeout.map(|timeout| now + timeout);
        }
        Some(Outgoing::new(bth, &ext, payload, payload_bytes))
    }

    /// The buffer of a posted work, by the number that [`Payload::Posted`] has.
    pub(crate) fn buf(&self, work: u64) -> Option<&Buf> {
        let index = usize::try_from(work.checked_sub(self.done)?).ok()?;
        self.works.get(index).map(|item| item.work.buf())
    }

    /// Gives all work back: that to which packet `at` belongs with its own fault.
    pub(crate) fn flush(&mut self, failed: Option<(u64, Fault)>, io: &mut Io<'_>) {
        while let Some(item) = self.works.pop_front() {
            let own = failed.filter(|(at, _)| (item.first..item.end()).contains(at));
            let fault = own.map_or(Fault::Flushed, |(_, fault)| fault);
            io.done(item.tag, item.work, Err(fault));
            self.done += 1;
        }
        self.reads.clear();
        (self.cursor, self.deadline, self.pause) = (0, None, None);
    }
}

fn memory_of(base: u64, key: u32, offset: u32, length: u32) -> Extended {
    let address = base.wrapping_add(u64::from(offset));
    Extended { reth: Some(Reth { address, key, length }), ..Extended::default() }
}

fn send_opcode(first: bool, last: bool, invalidate: bool) -> Opcode {
    match (first, last, invalidate) {
        (true, true, false) => Opcode::SendOnly,
        (true, true, true) => Opcode::SendOnlyInvalidate,
        (true, false, _) => Opcode::SendFirst,
        (false, false, _) => Opcode::SendMiddle,
        (false, true, false) => Opcode::SendLast,
        (false, true, true) => Opcode::SendLastInvalidate,
    }
}

fn fault_of(nak: Nak) -> Fault {
    match nak {
        Nak::RemoteAccess => Fault::RemoteAccess,
        _ => Fault::RemoteOperation,
    }
}
