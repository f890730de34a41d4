//! Processing of acknowledgements and read responses.

use std::time::Instant;

use super::scoreboard::{Evidence, TOLERANCE};
use super::{ENDLESS, Requester};
use crate::soft::qp::Io;
use crate::soft::wire::header::{Aeth, Nak, Packet, Syndrome};
use crate::soft::wire::opcode::Operation;
use crate::{Fault, Work};

impl Requester {
    /// Handles a response; false when it answers nothing, or what has been answered. A fault is
    /// that of the work which it answers.
    pub(crate) fn handle(
        &mut self,
        now: Instant,
        packet: &Packet<'_>,
        io: &mut Io<'_>,
    ) -> Result<bool, (u64, Fault)> {
        let Some(at) = self.outstanding(packet) else { return Ok(false) };
        let syndrome = packet.ext.aeth.map_or(Syndrome::ACK, |aeth| aeth.syndrome);
        if let Some(Aeth { syndrome: Syndrome::Ack(code), msn }) = packet.ext.aeth {
            self.credits.update(msn, code);
        }
        if packet.row().operation == Operation::Acknowledge {
            self.troubles.note_received(syndrome);
        }
        match (packet.row().operation, syndrome) {
            (Operation::ReadResponse, Syndrome::Ack(_)) => {
                return Ok(self.data(now, at, packet, io));
            }
            (Operation::Acknowledge, Syndrome::Ack(_)) => {
                self.board.execute(at + 1);
                self.board.on_ack(at, Evidence::Report);
            }
            (Operation::Acknowledge, Syndrome::Rnr(timer)) => {
                // A late one about what has been executed since, although data of a read before it
                // are missing.
                if at < self.board.executed() {
                    return Ok(false);
                }
                self.board.execute(at);
                // Done first: it ends a pause that was about what the peer has executed now.
                self.settle(now, io);
                if self.pause.is_none() {
                    self.not_ready(at, now + timer.duration())?;
                }
                return Ok(true);
            }
            (Operation::Acknowledge, Syndrome::Nak(Nak::Sequence)) => {
                self.board.execute(at);
                match packet.ext.held.filter(|_| self.selective) {
                    Some(held) => self.kept(now, at, u128::from_le_bytes(held)),
                    None => self.missed(now, at),
                }
            }
            (Operation::Acknowledge, Syndrome::Nak(nak)) => {
                self.board.execute(at);
                self.settle(now, io);
                return Err((at, fault_of(nak)));
            }
            _ => return Ok(false),
        }
        self.settle(now, io);
        Ok(true)
    }

    /// Whether a packet answers one that is sent and not acknowledged.
    pub(crate) fn is_pending(&self, packet: &Packet<'_>) -> bool {
        self.outstanding(packet).is_some()
    }

    /// Which of the packets sent and not acknowledged has this number. Numbers come again after 2^24
    /// packets: a response that the network keeps for as long would be taken for another one, if that
    /// happens to be pending, and so would one at any adapter. That takes 5 s at 3 GB/s and 1 KiB a
    /// packet, and no switch has a buffer for as much; nothing in a packet tells the two apart.
    fn outstanding(&self, packet: &Packet<'_>) -> Option<u64> {
        let una = self.board.una();
        let ahead = u64::try_from(packet.bth.psn.since(self.psn(una))).ok()?;
        Some(una + ahead).filter(|at| *at < self.board.next())
    }

    /// Takes data of a read; false when they are not, or not those that are missing.
    fn data(&mut self, now: Instant, at: u64, packet: &Packet<'_>, io: &mut Io<'_>) -> bool {
        let index = self.item_of(at).filter(|_| self.board.is_read(at));
        let Some(item) = index.and_then(|index| self.works.get_mut(index)) else { return false };
        let (offset, len) = item.segment(at, self.mtu);
        let (first, end) = item.piece(at);
        let Work::Read { into, .. } = &mut item.work else { return false };
        if packet.payload.len() != len as usize || !self.board.finish(at) {
            return false;
        }
        let window = io.region.bytes_mut(into);
        window[offset as usize..(offset + len) as usize].copy_from_slice(packet.payload);
        if self.board.executed() < end {
            // Data acknowledge the request for them, and all before it.
            self.board.begin(at, first..end);
            self.board.execute(end);
        }
        self.board.on_ack(at, Evidence::Data);
        self.settle(now, io);
        true
    }

    /// The peer has no receive for packet `at`, and asks to wait.
    fn not_ready(&mut self, at: u64, until: Instant) -> Result<(), (u64, Fault)> {
        if self.rnr_retries != ENDLESS {
            self.rnr_left = self.rnr_left.checked_sub(1).ok_or((at, Fault::NotReady))?;
        }
        self.board.reopen(at);
        let end = if self.selective { at + 1 } else { self.board.next() };
        self.board.lose(at..end);
        self.timed = None;
        (self.pause, self.deadline, self.end) = (Some(until), None, None);
        Ok(())
    }

    /// The peer lacks packet `at` and has dropped what came behind it. It complains once, and the
    /// network may repeat that.
    fn missed(&mut self, now: Instant, at: u64) {
        let echo = |(seen, when): (u64, Instant)| seen == at && now < when + self.trip.echo();
        if !self.missed.is_some_and(echo) {
            self.missed = Some((at, now));
            self.board.lose(at..self.board.next());
            self.window.lose_all(at, self.board.next());
            self.after_loss();
        }
    }

    /// The peer lacks packet `at`, and keeps those behind it whose bits are set.
    fn kept(&mut self, now: Instant, at: u64, held: u128) {
        let next = self.board.next();
        self.board.on_gap(at, at + 1 + u64::from(u128::BITS));
        let mut rest = held;
        while rest != 0 {
            let kept = at + 1 + u64::from(rest.trailing_zeros());
            rest &= rest - 1;
            if kept >= next {
                break;
            }
            self.board.on_ack(kept, Evidence::Report);
            if let Some((_, when)) = self.timed.take_if(|(at, _)| *at == kept) {
                self.trip.sample(now.saturating_duration_since(when));
            }
            if !self.board.is_read(kept) {
                self.board.finish(kept);
            } else if let Some(index) = self.item_of(kept) {
                let (_, end) = self.works[index].piece(kept);
                self.board.mark_deferred(kept..end.min(next));
            }
        }
    }

    /// Draws the conclusions: completes what is done, and gives up what is lost.
    fn settle(&mut self, now: Instant, io: &mut Io<'_>) {
        let (before, una) = (self.board.una(), self.board.advance());
        if una > before {
            (self.rnr_left, self.pause) = (self.rnr_retries, None);
        }
        let finished = self.board.finished() - self.finished;
        if finished > 0 || una > before {
            self.finished += finished;
            self.window.grow(finished);
            if let Some((_, when)) = self.timed.take_if(|(at, _)| *at < una)
                && !self.waited
            {
                self.trip.sample(now.saturating_duration_since(when));
            }
            self.restart(now);
        }
        while self.works.front().is_some_and(|item| item.end() <= una)
            && let Some(item) = self.works.pop_front()
        {
            let len = item.work.buf().len();
            io.done(item.tag, item.work, Ok(len));
            self.done += 1;
            self.cursor = self.cursor.saturating_sub(1);
        }
        while self.reads.front().is_some_and(|end| *end <= una) {
            self.reads.pop_front();
        }
        self.detect_loss(now, None);
    }

    /// The peer has been heard: its time begins anew. But who has been probed, and then was sent nothing
    /// more, may only be further away than it was, and no answer has said how far: the next wait is as
    /// long as the longest has been.
    fn restart(&mut self, now: Instant) {
        let (una, next) = (self.board.una(), self.board.next());
        if una > self.probed {
            self.most_probes = 0;
        }
        self.probes = if una == next { self.most_probes } else { 0 };
        (self.end, self.deadline) = (None, None);
        if una < next && self.pause.is_none() {
            self.set_deadline(now);
        }
    }

    /// Gives up what is long overdue, or was so at an ordinal, and waits a moment for what is so of
    /// late.
    pub(super) fn detect_loss(&mut self, now: Instant, ordinal: Option<u64>) {
        let tolerance = if self.selective { TOLERANCE } else { 0 };
        let before = self.board.lost();
        if let Some(ordinal) = ordinal {
            self.board.mark_lost(ordinal);
        }
        let overdue = self.board.detect_loss(tolerance);
        let lost = self.board.lost() - before;
        self.overdue = match (overdue, self.overdue) {
            (false, _) => None,
            (true, None) => Some((now + self.trip.patience(), self.board.seen())),
            (true, waiting) => waiting,
        };
        if lost > 0 {
            self.window.lose(lost);
            self.after_loss();
        }
    }
}

fn fault_of(nak: Nak) -> Fault {
    match nak {
        Nak::RemoteAccess => Fault::RemoteAccess,
        _ => Fault::RemoteOperation,
    }
}
