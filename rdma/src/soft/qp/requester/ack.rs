//! Processing of acknowledgements and read responses.

use super::scoreboard::{Evidence, TOLERANCE};
use super::{ENDLESS, Requester};
use crate::soft::clock::{Time, ns_of};
use crate::soft::qp::Io;
use crate::wire::header::{Aeth, Nak, Packet, Syndrome};
use crate::wire::opcode::Operation;
use crate::{Fault, Work};

impl Requester {
    /// Handles a response; returns false if it answers nothing, or an answered request. A fault
    /// belongs to the work that it answers. What it acknowledges is done in
    /// [`Requester::settle`], once for the responses that were received together.
    pub(crate) fn handle(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        io: &mut Io<'_>,
    ) -> Result<bool, (u64, Fault)> {
        let aeth = packet.aeth();
        let syndrome = aeth.map_or(Syndrome::ACK, |aeth| aeth.syndrome);
        if !matches!(syndrome, Syndrome::Ack(_)) {
            // It may be late: older than a response that was received before it.
            self.settle(now, io);
        }
        let Some(at) = self.outstanding(packet) else { return Ok(false) };
        if let Some(Aeth { syndrome: Syndrome::Ack(code), msn }) = aeth {
            self.credits.update(msn, code);
        }
        let operation = packet.row().operation;
        if operation == Operation::Acknowledge {
            self.troubles.note_received(syndrome);
        }
        self.unsettled = true;
        match (operation, syndrome) {
            (Operation::ReadResponse, Syndrome::Ack(_)) => return Ok(self.data(at, packet, io)),
            (Operation::Acknowledge, Syndrome::Ack(_)) => {
                self.acknowledged = self.acknowledged.max(at + 1);
                self.board.on_ack(at, Evidence::Report);
            }
            (Operation::Acknowledge, Syndrome::Rnr(timer)) => {
                // A late NAK for a packet that was executed since, although data of a read before
                // it are missing.
                if at < self.board.executed() {
                    return Ok(false);
                }
                self.board.execute(at);
                // First, because it ends a pause for a packet that the peer has executed now.
                self.settle(now, io);
                if self.pause == Time::NEVER {
                    self.not_ready(at, now.after_ns(ns_of(timer.duration())))?;
                }
                return Ok(true);
            }
            (Operation::Acknowledge, Syndrome::Nak(Nak::Sequence)) => {
                self.board.execute(at);
                match packet.held().filter(|_| self.selective) {
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
        Ok(true)
    }

    /// Whether a packet answers a packet that was sent and is not acknowledged.
    pub(crate) fn is_pending(&self, packet: &Packet<'_>) -> bool {
        self.outstanding(packet).is_some()
    }

    /// The unacknowledged packet with this number. Numbers repeat after 2^24 packets: a response
    /// that the network delays for as long could be taken for another one, as with any adapter.
    /// That takes 5 s at 3 GB/s and 1 KiB a packet, and no switch buffers as much; nothing in a
    /// packet distinguishes the two.
    fn outstanding(&self, packet: &Packet<'_>) -> Option<u64> {
        let una = self.board.una();
        let ahead = u64::try_from(packet.bth.psn.since(self.psn(una))).ok()?;
        Some(una + ahead).filter(|at| *at < self.board.next())
    }

    /// Takes data of a read; returns false if they are not missing data of a read.
    fn data(&mut self, at: u64, packet: &Packet<'_>, io: &mut Io<'_>) -> bool {
        let Some(index) = self.item_of(at).filter(|_| self.board.is_read(at)) else { return false };
        self.recent = index;
        let item = &mut self.works[index];
        let (offset, len) = item.segment(at, self.mtu);
        let (first, end) = item.piece(at);
        let Work::Read { into, .. } = &mut item.work else { return false };
        if packet.payload.len() != len as usize || !self.board.finish(at) {
            return false;
        }
        let window = io.region.bytes_mut(into);
        window[offset as usize..(offset + len) as usize].copy_from_slice(packet.payload);
        if self.acknowledged.max(self.board.executed()) < end {
            // Data acknowledge their request, and all before it.
            self.board.begin(at, first..end);
            self.acknowledged = end;
        }
        self.board.on_ack(at, Evidence::Data);
        true
    }

    /// RNR NAK: the peer has no receive for packet `at`.
    fn not_ready(&mut self, at: u64, until: Time) -> Result<(), (u64, Fault)> {
        if self.rnr_retries != ENDLESS {
            self.rnr_left = self.rnr_left.checked_sub(1).ok_or((at, Fault::NotReady))?;
        }
        self.board.reopen(at);
        let end = if self.selective { at + 1 } else { self.board.next() };
        self.board.lose(at..end);
        self.timed = None;
        (self.pause, self.timer_start, self.silent_since) = (until, Time::NEVER, Time::NEVER);
        Ok(())
    }

    /// Sequence error NAK: the peer lacks packet `at` and has dropped the following ones. It
    /// reports that once, and the network may duplicate the report.
    fn missed(&mut self, now: Time, at: u64) {
        let echo =
            |(seen, when): (u64, Time)| seen == at && now < when.after_ns(self.trip.echo_ns());
        if !self.missed.is_some_and(echo) {
            self.missed = Some((at, now));
            self.board.lose(at..self.board.next());
            self.window.lose_all(at, self.board.next());
            self.after_loss();
        }
    }

    /// Selective acknowledgement: the peer lacks packet `at`, and keeps the following ones whose
    /// bits are set.
    fn kept(&mut self, now: Time, at: u64, held: u128) {
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
                self.trip.sample(now.since_ns(when));
            }
            if !self.board.is_read(kept) {
                self.board.finish(kept);
            } else if let Some(index) = self.item_of(kept) {
                let (_, end) = self.works[index].piece(kept);
                self.board.mark_deferred(kept..end.min(next));
            }
        }
    }

    /// Completes work that is done, and marks overdue packets as lost: after responses.
    #[inline]
    pub(crate) fn settle(&mut self, now: Time, io: &mut Io<'_>) {
        if std::mem::take(&mut self.unsettled) {
            self.settle_responses(now, io);
        }
    }

    fn settle_responses(&mut self, now: Time, io: &mut Io<'_>) {
        let (before, una) = (self.board.una(), self.board.acknowledge(self.acknowledged));
        if una > before {
            (self.rnr_left, self.pause) = (self.rnr_retries, Time::NEVER);
        }
        let finished = self.board.finished() - self.finished;
        if finished > 0 || una > before {
            self.finished += finished;
            self.window.grow(finished);
            if let Some((_, when)) = self.timed.take_if(|(at, _)| *at < una)
                && !self.waited
            {
                self.trip.sample(now.since_ns(when));
            }
            self.restart(now);
        }
        let mut done = 0;
        while self.works.front().is_some_and(|item| item.end() <= una)
            && let Some(item) = self.works.pop_front()
        {
            let len = item.work.buf().len();
            io.done(item.tag, item.work, Ok(len));
            done += 1;
        }
        self.done += done as u64;
        self.cursor = self.cursor.saturating_sub(done);
        self.recent = self.recent.saturating_sub(done);
        while self.reads.front().is_some_and(|end| *end <= una) {
            self.reads.pop_front();
        }
        self.detect_loss(now, None);
    }

    /// Restarts the timers after a packet of the peer. If it was probed and nothing else was sent
    /// since, it may only be slower than before, without a sample of its round trip: the next
    /// timeout is as long as the longest was.
    fn restart(&mut self, now: Time) {
        let (una, next) = (self.board.una(), self.board.next());
        if una > self.probed {
            self.most_probes = 0;
        }
        self.probes = if una == next { self.most_probes } else { 0 };
        (self.silent_since, self.timer_start) = (Time::NEVER, Time::NEVER);
        if una < next && self.pause == Time::NEVER {
            self.start_timer(now);
        }
    }

    /// Marks packets as lost that are long overdue, or were overdue at an ordinal; waits a moment
    /// for those that are overdue since recently.
    pub(super) fn detect_loss(&mut self, now: Time, ordinal: Option<u64>) {
        let tolerance = if self.selective { TOLERANCE } else { 0 };
        let before = self.board.lost();
        if let Some(ordinal) = ordinal {
            self.board.mark_lost(ordinal);
        }
        let overdue = self.board.detect_loss(tolerance);
        let lost = self.board.lost() - before;
        self.overdue = match (overdue, self.overdue) {
            (false, _) => None,
            (true, None) => Some((now.after_ns(self.trip.patience_ns()), self.board.seen())),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::soft::qp::memory_region::Memory;
    use crate::soft::qp::reorder_buffer::ReorderBuffer;
    use crate::soft::qp::requester::ack::*;
    use crate::soft::qp::tests::settings;
    use crate::soft::qp::{QueuePair, Settings};
    use crate::wire::header::{Bth, Extended, HeaderBytes, ICRC_BYTES};
    use crate::wire::opcode::Opcode;
    use crate::wire::psn::{Msn, Psn, Qpn};
    use crate::{Pool, PoolPlan, Qp, Work};

    /// The bytes of an acknowledgement of packet `psn`.
    fn response(psn: u32, syndrome: Syndrome) -> Vec<u8> {
        let bth = Bth::new(Opcode::Acknowledge, Qpn::new(7), Psn::new(psn));
        let aeth = Some(Aeth { syndrome, msn: Msn::default() });
        let mut bytes =
            HeaderBytes::emit(&bth, &Extended { aeth, ..Extended::default() }).as_slice().to_vec();
        bytes.resize(bytes.len() + ICRC_BYTES, 0);
        bytes
    }

    /// A late NAK behind newer acknowledgements of its train, for a packet before them.
    #[test]
    fn a_stale_nak_behind_newer_acks_causes_no_retransmission() {
        let plan = PoolPlan::without_receives(16, 0, 4096);
        let (mut pool, mut memory) = (Pool::new(plan).unwrap(), Memory::new(0));
        let (mut reorder, mut events) = (ReorderBuffer::new(8), Vec::new());
        let settings = Settings { selective: false, ack_delay: Duration::ZERO, ..settings() };
        let mut qp = QueuePair::new(16, 16);
        qp.ready_to_receive(&settings);
        qp.ready_to_send();
        let cells: Vec<_> = (0..12).map(|_| pool.take_cell().unwrap()).collect();
        let region = std::sync::Arc::clone(pool.region());
        let mut io = Io {
            region: &region,
            memory: &mut memory,
            reorder: &mut reorder,
            events: &mut events,
            qp: Qp(0),
        };
        let now = Time::default();
        for from in cells {
            qp.post(0, Work::Send { from, invalidate: None }, &mut io);
        }
        while qp.poll_transmit(now, &mut io).is_some() {}
        for (psn, syndrome) in
            [(3, Syndrome::ACK), (9, Syndrome::ACK), (5, Syndrome::Nak(Nak::Sequence))]
        {
            let bytes = response(psn, syndrome);
            qp.receive(now, &Packet::parse(&bytes).unwrap(), &mut io);
        }
        qp.settle(now, &mut io);
        assert!(qp.poll_transmit(now, &mut io).is_none(), "packets 10 and 11 are not lost");
        assert_eq!(io.events.len(), 10);
        qp.close(&mut io);
        assert_eq!(io.events.len(), 12);
    }
}
