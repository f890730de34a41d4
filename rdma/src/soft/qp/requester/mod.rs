//! The send side of a reliable connection (IBTA volume 1, 9.7.3 and 9.7.5.1.3; 9.9.2 "Requester
//! side error behavior"): segments work requests into packets, holds them until acknowledged, and
//! retransmits lost ones.
//!
//! # Packet numbers
//!
//! Internally packets are counted from 0 in 64 bits, so numbers are ordered and do not wrap; packet
//! `n` has the sequence number `start + n` on the wire. A packet gets its number when it is sent
//! for the first time.
//!
//! ```text
//! work:    | send  | write    | read (requested in pieces)  | send |
//!          ^ una ........................ next
//! ```
//!
//! Everything before `una` is acknowledged and done. `next` has not been sent yet. The state of the
//! packets in between is on the [`Scoreboard`].
//!
//! # Loss
//!
//! * Data of a read are accepted in any order, and missing ones are requested again: but within one
//!   piece in rising order, and only when all before have arrived, because `rdma_rxe` forgets what
//!   is before the last repetition.
//! * A peer of this implementation keeps out-of-order packets and reports them, so only missing
//!   packets are sent again. Any other peer drops everything after a gap, and all of it is sent
//!   again.
//! * Without any response, the oldest packet is sent again after a timeout derived from round
//!   trips. That alone does not end the connection earlier: the peer has the time that was
//!   negotiated.
//!
//! # Design decisions
//!
//! * A write is sent as several `WRITE Only`, each with its own address: all its packets have the
//!   same length, as trains of segments require, and any one can be retransmitted alone. A write with
//!   immediate data is one message, because its length is part of the peer's completion.
//! * A read is sent in pieces of [`Settings::read_bytes`], so that the responses to one request fit
//!   the socket buffer; from a peer of this implementation, which sends trains, it is requested in
//!   pairs of packets, as long as nothing is lost. The number of a response packet determines its
//!   place in the buffer.
//! * An acknowledgement is requested where the requester would otherwise stop sending, and every
//!   [`ACK_INTERVAL`] packets: not for every message.

use std::collections::VecDeque;

use super::responder::packets_of;
use super::{Io, Settings};
use crate::soft::clock::{Time, ns_of};
use crate::soft::stats::link_errors::{LinkError, LinkErrorCounts};
use crate::wire::psn::{Psn, Qpn};
use crate::wire::tx_packet::TxPacket;
use crate::{Buf, Fault, Work};

use congestion_window::CongestionWindow;
use credits::CreditLimit;
use rtt::RttEstimator;
use scoreboard::Scoreboard;

pub(super) use wqe::Wqe;

mod ack;
mod congestion_window;
mod credits;
mod rtt;
mod scoreboard;
mod wqe;

/// Maximum of packets without an acknowledgement request.
const ACK_INTERVAL: u64 = 32;
/// Maximum of doublings of the ack timeout.
const MOST_DOUBLINGS: u32 = 6;
/// A timer that expires this late has waited for a machine that was suspended, or for CPU time.
const SUSPENDED_NS: u64 = 1_000_000_000;
/// The code for infinite retries.
const ENDLESS: u8 = 7;
/// Packets of a piece of a read whose response has one length in its first and last packet: such
/// responses form trains, which a middle packet would end.
const PAIR: u64 = 2;
/// Maximum of unacknowledged packets.
const MOST_WINDOW: u32 = 4096;

/// Room for new packets: in the congestion window, and on the scoreboard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Open {
    window: u64,
    span: u64,
}

impl Open {
    /// After this many, which may exceed the window.
    fn less(self, packets: u64) -> Open {
        Open { window: self.window.saturating_sub(packets), span: self.span - packets }
    }
}

/// The send side.
#[derive(Debug)]
pub(crate) struct Requester {
    start: Psn,
    mtu: u32,
    /// Packets of a piece of a read; and while nothing is lost.
    piece: u64,
    clean_piece: u64,
    depth: usize,
    /// The peer keeps out-of-order packets.
    selective: bool,
    /// `u64::MAX` is infinite.
    timeout_ns: u64,
    /// Maximum silence of the peer.
    patience_ns: u64,
    rnr_retries: u8,

    works: VecDeque<Wqe>,
    /// Number of work requests completed before those in `works`.
    done: u64,
    /// Index in `works` of the item with `next`, and number of its packets that were sent.
    cursor: usize,
    into: u64,
    /// Index in `works` of the read whose data arrived last.
    recent: usize,
    /// Responses were handled since [`Requester::settle`].
    unsettled: bool,
    /// The peer has executed all before this packet, as these responses tell.
    acknowledged: u64,
    board: Scoreboard,
    window: CongestionWindow,
    credits: CreditLimit,
    /// Ends of the pieces of reads that were requested and have not arrived.
    reads: VecDeque<u64>,
    /// Packets since the last acknowledgement request, and the end of those covered by it.
    silent: u64,
    asked: u64,

    trip: RttEstimator,
    /// A packet that was sent once, and its time.
    timed: Option<(u64, Time)>,
    /// Another packet was lost since, so its acknowledgement may have waited for that one.
    waited: bool,
    /// When the ack timer of the oldest packet was started, if it runs.
    timer_start: Time,
    /// When it was started first since the last packet of the peer.
    silent_since: Time,
    /// Packets done at the time of the last packet of the peer.
    finished: u64,
    /// Retransmissions of the oldest packet since the last packet of the peer.
    probes: u32,
    /// Maximum of those, since anything was acknowledged that was sent after them; and the end of
    /// what had been sent by then, whose responses may be to the first sending or to the last.
    most_probes: u32,
    probed: u64,
    /// When the packets that were overdue at an ordinal are lost.
    overdue: Option<(Time, u64)>,
    /// The packet that the peer reported as missing last, and when.
    missed: Option<(u64, Time)>,
    /// End of the RNR wait: nothing is sent before.
    pause: Time,
    rnr_left: u8,
    pub(super) troubles: LinkErrorCounts,
}

impl Requester {
    pub(crate) fn new(sends: u32) -> Requester {
        Requester {
            start: Psn::default(),
            mtu: 0,
            piece: 1,
            clean_piece: 1,
            depth: 1,
            selective: false,
            timeout_ns: u64::MAX,
            patience_ns: 0,
            rnr_retries: 0,
            works: VecDeque::with_capacity(sends as usize),
            done: 0,
            cursor: 0,
            into: 0,
            recent: 0,
            unsettled: false,
            acknowledged: 0,
            board: Scoreboard::new(0),
            window: CongestionWindow::new(1),
            credits: CreditLimit::default(),
            reads: VecDeque::new(),
            silent: 0,
            asked: 0,
            trip: RttEstimator::default(),
            timed: None,
            waited: false,
            timer_start: Time::NEVER,
            silent_since: Time::NEVER,
            finished: 0,
            probes: 0,
            most_probes: 0,
            probed: 0,
            overdue: None,
            missed: None,
            pause: Time::NEVER,
            rnr_left: 0,
            troubles: LinkErrorCounts::default(),
        }
    }

    /// Applies the negotiated settings. Work may have been posted before.
    pub(crate) fn start(&mut self, settings: &Settings) {
        self.start = settings.send_psn;
        self.mtu = settings.mtu.max(1);
        let window = u64::from(settings.window.clamp(1, MOST_WINDOW));
        self.piece = u64::from(settings.read_bytes / self.mtu).min(window / 4).max(1);
        // With fewer reads outstanding, small pieces would not fill the window.
        let many = u64::from(settings.reads) * PAIR >= window / 2;
        let pairs = settings.selective && many;
        self.clean_piece = if pairs { self.piece.min(PAIR) } else { self.piece };
        self.depth = usize::from(settings.reads.max(1));
        self.selective = settings.selective;
        self.board = Scoreboard::new(2 * window);
        self.window = CongestionWindow::new(window);
        self.reads.reserve(self.depth);
        self.timeout_ns = settings.ack_timeout.map_or(u64::MAX, ns_of);
        let waits = (0..=u32::from(settings.retries)).map(|n| 1 << n.min(MOST_DOUBLINGS));
        let own_ns = self.timeout_ns.saturating_mul(waits.sum());
        self.patience_ns = own_ns.max(ns_of(settings.silence));
        self.rnr_retries = settings.rnr_retries;
        self.rnr_left = self.rnr_retries;
    }

    /// Posts a send, write or read.
    #[inline]
    pub(crate) fn post(&mut self, item: Wqe) {
        self.works.push_back(item);
    }

    /// Posts several.
    pub(crate) fn append(&mut self, items: &mut VecDeque<Wqe>) {
        if items.len() > 1 {
            self.works.append(items);
        } else if let Some(item) = items.pop_front() {
            // Of a command that is alone: cheaper than to append a queue.
            self.works.push_back(item);
        }
    }

    fn psn(&self, at: u64) -> Psn {
        self.start.add(at as u32)
    }

    /// Number of packets that the peer has executed.
    pub(crate) fn executed(&self) -> u64 {
        self.board.executed()
    }

    /// The next packet that the peer will execute, and whether it is known to be lost.
    pub(crate) fn next_to_execute(&self) -> (Psn, bool) {
        let next = self.board.executed();
        (self.psn(next), next < self.board.next() && self.board.is_lost(next))
    }

    /// Time of the next [`Requester::handle_timeout`].
    pub(crate) fn poll_timeout(&self) -> Time {
        if self.pause != Time::NEVER {
            return self.pause;
        }
        let overdue = self.overdue.map_or(Time::NEVER, |(until, _)| until);
        self.deadline().min(overdue)
    }

    /// Handles expired timers.
    pub(crate) fn handle_timeout(&mut self, now: Time) -> Result<(), (u64, Fault)> {
        if self.pause <= now {
            self.pause = Time::NEVER;
            // There may be nothing to send again: only data of a read are pending.
            if self.timer_start == Time::NEVER && self.board.una() < self.board.next() {
                self.start_timer(now);
            }
        }
        if let Some((_, ordinal)) = self.overdue.filter(|(until, _)| *until <= now) {
            self.overdue = None;
            self.detect_loss(now, Some(ordinal));
        }
        let due = self.deadline();
        if due <= now {
            let late_ns = now.since_ns(due);
            if late_ns >= SUSPENDED_NS {
                // That was no silence of the peer: nothing was sent to it.
                self.silent_since = self.silent_since.after_ns(late_ns);
            }
            if self.silent_since.after_ns(self.patience_ns) <= now {
                return Err((self.board.una(), Fault::Unreachable));
            }
            self.probe(now);
        }
        Ok(())
    }

    /// No response: sends the oldest packet again. Its response shows the state of the others.
    fn probe(&mut self, now: Time) {
        self.probes += 1;
        self.most_probes = self.most_probes.max(self.probes);
        self.probed = self.board.next();
        self.troubles.note(LinkError::Timeout);
        self.start_timer(now);
        let una = self.board.una();
        let end = match self.works.front().filter(|item| item.is_read()) {
            Some(item) => item.piece(una).1,
            None => una + 1,
        };
        // The peer may have reported that it keeps this packet, and the report of its execution was
        // lost.
        self.board.reopen(una);
        self.board.lose(una..end.min(self.board.next()));
        self.after_loss();
    }

    /// Starts the ack timer, also again. It is restarted for every packet of the peer, and its
    /// expiry is computed where it is read: once for all packets that were received together.
    fn start_timer(&mut self, now: Time) {
        self.timer_start = now;
        // No time is later than one that was never set.
        self.silent_since = self.silent_since.min(now);
    }

    /// When the oldest packet is sent again, or the connection is given up. The timeout doubles with
    /// every retry: a lost packet is noticed soon, and a peer that stalls for seconds, as virtual
    /// machines do, is not given up.
    #[inline]
    fn deadline(&self) -> Time {
        if self.timer_start == Time::NEVER || self.timeout_ns == u64::MAX {
            return Time::NEVER;
        }
        let wait_ns = self.trip.timeout_ns(self.timeout_ns);
        let wait_ns = wait_ns.saturating_mul(1 << self.probes.min(MOST_DOUBLINGS));
        let due = self.timer_start.after_ns(wait_ns);
        due.min(self.silent_since.after_ns(self.patience_ns))
    }

    /// The peer reports congestion on the path to it.
    pub(crate) fn on_congestion(&mut self) {
        self.troubles.note(LinkError::CongestionReceived);
        self.window.on_congestion(self.board.una(), self.board.next());
    }

    /// Packets were marked as lost: they are to be sent again.
    fn after_loss(&mut self) {
        self.waited = true;
        self.timed.take_if(|(at, _)| self.board.is_lost(*at));
    }

    /// Sends requests, at most as many datagrams as there is room for; returns their number.
    #[inline]
    pub(crate) fn transmit(
        &mut self,
        now: Time,
        peer: Qpn,
        room: usize,
        sink: &mut impl FnMut(TxPacket),
    ) -> usize {
        if self.rests() { 0 } else { self.transmit_pending(now, peer, room, sink) }
    }

    /// Whether everything was sent, or waits for a receive of the peer.
    #[inline]
    pub(crate) fn rests(&self) -> bool {
        let all_sent = self.cursor >= self.works.len() && self.board.lost() == 0;
        all_sent || self.pause != Time::NEVER
    }

    #[inline(never)]
    fn transmit_pending(
        &mut self,
        now: Time,
        peer: Qpn,
        room: usize,
        sink: &mut impl FnMut(TxPacket),
    ) -> usize {
        let mut sent = 0;
        while sent < room
            && self.board.lost() > 0
            && let Some((index, at, packets)) = self.next_lost()
        {
            self.board.send_again(at..at + packets);
            self.troubles.note(LinkError::SentAgain);
            let must = self.selective || self.probes > 0 || self.works[index].is_read();
            let (work, to) = (self.done + index as u64, (peer, self.psn(at)));
            let mut datagram = self.works[index].datagram(work, (at, packets), self.mtu, to);
            if self.asks(must, at + packets, self.sendable(self.open())) {
                datagram.request_ack();
            }
            sink(datagram);
            sent += 1;
        }
        sent += self.transmit_new(now, peer, room - sent, sink);
        if sent > 0 && self.timer_start == Time::NEVER {
            self.start_timer(now);
        }
        sent
    }

    /// Sends requests for the first time. Nothing is lost meanwhile.
    fn transmit_new(
        &mut self,
        now: Time,
        peer: Qpn,
        room: usize,
        sink: &mut impl FnMut(TxPacket),
    ) -> usize {
        let mut open = self.open();
        let (mut sent, mut packets) = (0, self.sendable(open));
        while sent < room
            && packets > 0
            && let at = self.board.next()
            && let psn = self.psn(at)
            && let Some(item) = self.works.get_mut(self.cursor)
        {
            let read = item.is_read();
            let mut datagram = if item.work.buf().len() <= self.mtu {
                // Most work is one packet.
                (item.first, item.packets) = (at, 1);
                let datagram = item.whole(self.done + self.cursor as u64, (peer, psn));
                self.credits.begin();
                self.board.send(1, read);
                self.cursor += 1;
                datagram
            } else {
                self.transmit_part(peer, packets)
            };
            if read {
                self.reads.push_back(at + packets);
            }
            open = open.less(packets);
            let next = self.sendable(open);
            if self.asks(read, at + packets, next) {
                datagram.request_ack();
                if self.timed.is_none() {
                    (self.timed, self.waited) = (Some((at, now)), false);
                }
            }
            sink(datagram);
            (sent, packets) = (sent + 1, next);
        }
        sent
    }

    /// The next datagram of work that takes several packets.
    #[inline(never)]
    fn transmit_part(&mut self, peer: Qpn, packets: u64) -> TxPacket {
        let (at, piece) = (self.board.next(), self.fresh_piece());
        let (work, to) = (self.done + self.cursor as u64, (peer, self.psn(at)));
        let item = &mut self.works[self.cursor];
        let read = item.is_read();
        if self.into == 0 || !item.takes_receive() {
            self.credits.begin();
        }
        if self.into == 0 {
            (item.first, item.packets) = (at, packets_of(item.work.buf().len(), self.mtu));
            item.piece = if read { piece as u32 } else { 1 };
        }
        let datagram = item.datagram(work, (at, packets), self.mtu, to);
        self.into += packets;
        self.board.send(packets, read);
        if self.into >= u64::from(item.packets) {
            (self.cursor, self.into) = (self.cursor + 1, 0);
        }
        datagram
    }

    /// The first packets to send again: index of their work, the first packet, and their number.
    fn next_lost(&self) -> Option<(usize, u64, u64)> {
        let una = self.board.una();
        let mut at = self.board.first_lost(una)?;
        if at != una && self.board.in_flight() >= self.window.size() {
            return None;
        }
        loop {
            let index = self.item_of(at)?;
            let item = &self.works[index];
            if !item.is_read() {
                return Some((index, at, 1));
            }
            let (first, end) = item.piece(at);
            if self.board.executed() <= first {
                // The request itself may be lost: it is repeated unchanged.
                return Some((index, first, end - first));
            }
            if self.selective || self.board.are_done(first.max(una)..at) {
                return Some((index, at, self.board.lost_run(at, end)));
            }
            at = self.board.first_lost(end)?;
        }
    }

    /// Index of the work that contains a sent packet.
    fn item_of(&self, at: u64) -> Option<usize> {
        let has = |index: &usize| {
            self.works.get(*index).is_some_and(|item| (item.first..item.end()).contains(&at))
        };
        // Data of a read follow those of the one before.
        let (recent, next) = (self.recent, self.recent + 1);
        if has(&recent) {
            return Some(recent);
        }
        if has(&next) {
            return Some(next);
        }
        self.works.partition_point(|item| item.first <= at).checked_sub(1)
    }

    /// Room for new packets now.
    fn open(&self) -> Open {
        Open {
            window: self.window.size().saturating_sub(self.board.outstanding()),
            span: self.board.span() - (self.board.next() - self.board.una()),
        }
    }

    /// Number of new packets in the next datagram, or 0 if none may be sent now.
    #[inline(always)] // for each packet
    fn sendable(&self, open: Open) -> u64 {
        if open.window == 0 {
            return 0;
        }
        let Some(item) = self.works.get(self.cursor) else { return 0 };
        let packets = match item.work {
            Work::Write { .. } => 1,
            Work::Read { .. } if self.reads.len() >= self.depth => return 0,
            Work::Read { .. } if item.work.buf().len() <= self.mtu => 1,
            Work::Read { .. } => {
                let piece = if self.into == 0 { self.fresh_piece() } else { item.piece.into() };
                let end = (self.into / piece + 1) * piece;
                end.min(u64::from(packets_of(item.work.buf().len(), self.mtu))) - self.into
            }
            // It takes a receive. Without others in flight it is a probe for credits.
            _ if self.into == 0 && !self.credits.allow() && open.span < self.board.span() => {
                return 0;
            }
            _ => 1,
        };
        // A piece of a read may extend beyond the window, so that the next one is requested before
        // the last one has arrived.
        if packets <= open.span { packets } else { 0 }
    }

    /// Packets of a new piece of a read.
    fn fresh_piece(&self) -> u64 {
        if self.window.is_whole() { self.clean_piece } else { self.piece }
    }

    /// Whether the packets before `end`, which are sent now, are to be acknowledged: one of those that
    /// `must` be, or `next` is 0, the number of new packets that may be sent then.
    #[inline(always)] // for each packet
    fn asks(&mut self, must: bool, end: u64, next: u64) -> bool {
        self.silent += 1;
        let asks = must || self.silent >= self.interval() || next == 0 && self.is_last();
        if asks {
            (self.silent, self.asked) = (0, end);
        }
        asks
    }

    /// Maximum of packets without an acknowledgement request: a fraction of the window, so that it
    /// opens again before it is used up.
    fn interval(&self) -> u64 {
        (self.window.size() / 4).clamp(1, ACK_INTERVAL)
    }

    /// Whether nothing is sent before a response arrives, and none is due; new packets are not.
    fn is_last(&self) -> bool {
        let all_sent = self.cursor >= self.works.len();
        // A pending one may bring no new credits.
        let due = self.asked > self.board.una() && !all_sent && self.credits.allow();
        let lost = || self.board.lost() > 0 && self.next_lost().is_some();
        !due && !lost()
    }

    /// The buffer of posted work, by the number in its packets.
    #[inline(always)] // for each packet
    pub(crate) fn buf(&self, work: u64) -> Option<&Buf> {
        let index = usize::try_from(work.checked_sub(self.done)?).ok()?;
        self.works.get(index).map(|item| item.work.buf())
    }

    /// Completes all work: that of packet `at` with its own fault.
    pub(crate) fn flush(&mut self, failed: Option<(u64, Fault)>, io: &mut Io<'_>) {
        while let Some(item) = self.works.pop_front() {
            let own = failed.filter(|(at, _)| (item.first..item.end()).contains(at));
            let fault = own.map_or(Fault::Flushed, |(_, fault)| fault);
            io.done(item.tag, item.work, Err(fault));
            self.done += 1;
        }
        self.reads.clear();
        (self.cursor, self.into, self.recent, self.unsettled) = (0, 0, 0, false);
        (self.timer_start, self.pause, self.overdue) = (Time::NEVER, Time::NEVER, None);
    }
}
