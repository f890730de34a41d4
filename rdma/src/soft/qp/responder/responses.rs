//! Response queue of the responder: acknowledgements, NAKs and read responses.
//!
//! Answers leave in the order of the requests. An acknowledgement that has not left yet is
//! replaced by a newer one, so a batch of requests costs one.
//!
//! The queue of answers is bounded by `depth`, the reads that the peer may have outstanding. At
//! most `depth` first answers are in it, and repeated ones are queued only as long as there are
//! fewer than `2 * depth` in all. With an acknowledgement between every two of them that makes
//! `4 * depth + 1`.

use std::collections::VecDeque;

use super::out_of_order::OutOfOrder;
use super::packets_of;
use crate::soft::qp::memory_region::{Denied, Memory, Rights};
use crate::soft::stats::link_errors::{LinkError, LinkErrorCounts};
use crate::soft::wire::header::{Aeth, Bth, Extended, Nak, Packet, Reth, Syndrome};
use crate::soft::wire::opcode::{Opcode, Position};
use crate::soft::wire::psn::{Msn, Psn, Qpn};
use crate::soft::wire::tx_packet::{Payload, TxPacket};

/// Action after a response was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Go on.
    Live,
    /// The queue pair is dead; the last answer says so to the peer.
    Dead,
}

/// A read or atomic kept for the case that its answer gets lost.
#[derive(Clone, Copy, Debug)]
struct Kept {
    psn: Psn,
    packets: u32,
    reth: Reth,
    /// The result of an atomic.
    atomic: Option<u64>,
}

impl Kept {
    /// Whether a request to read is that which is kept, or a part of it.
    fn covers(&self, psn: Psn, reth: &Reth, mtu: u32) -> bool {
        let Ok(skipped) = u64::try_from(psn.since(self.psn)) else { return false };
        let skipped = skipped * u64::from(mtu);
        self.atomic.is_none()
            && psn.is_within(self.psn, self.packets)
            && reth.key == self.reth.key
            && self.reth.address.checked_add(skipped) == Some(reth.address)
            && skipped + u64::from(reth.length) <= u64::from(self.reth.length)
    }
}

#[derive(Clone, Copy, Debug)]
struct ReadAnswer {
    /// The first packet's number.
    psn: Psn,
    packets: u32,
    /// Packets sent.
    sent: u32,
    reth: Reth,
    msn: Msn,
    /// The peer has seen it once, perhaps; so its memory may be gone by right.
    replay: bool,
    /// The first answer has not left whole: the peer counts this read as outstanding.
    counts: bool,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Acknowledge { psn: Psn, aeth: Aeth },
    Atomic { psn: Psn, msn: Msn, value: u64, replay: bool },
    Read(ReadAnswer),
}

/// Answers that have not left, and those that may be wanted once more.
#[derive(Debug)]
pub(super) struct ResponseQueue {
    mtu: u32,
    depth: usize,
    queue: VecDeque<Answer>,
    kept: VecDeque<Kept>,
    pub(super) troubles: LinkErrorCounts,
}

impl ResponseQueue {
    /// Without reads and atomics there is one acknowledgement at a time. Room for those is made when
    /// the first comes: to most queue pairs none ever does.
    pub(super) fn new(mtu: u32, depth: usize) -> ResponseQueue {
        let (queue, kept) = (VecDeque::with_capacity(1), VecDeque::new());
        ResponseQueue { mtu, depth, queue, kept, troubles: LinkErrorCounts::default() }
    }

    /// Whether the peer has as many reads and atomics outstanding as it may.
    pub(super) fn are_busy(&self) -> bool {
        // Rarely are there so many answers at all.
        self.queue.len() >= self.depth
            && self.queue.iter().filter(|answer| answer.is_new()).count() >= self.depth
    }

    /// Answers a read.
    pub(super) fn read(&mut self, psn: Psn, reth: Reth, msn: Msn) {
        let packets = packets_of(reth.length, self.mtu);
        self.keep(Kept { psn, packets, reth, atomic: None });
        let (replay, counts) = (false, true);
        let read = ReadAnswer { psn, packets, sent: 0, reth, msn, replay, counts };
        self.push_read(read);
    }

    /// The data acknowledge what came before, too. An acknowledgement beside them would only be in
    /// danger of coming between them, which ends the connection at `rdma_rxe`.
    fn push_read(&mut self, read: ReadAnswer) {
        if self.queue.back().is_some_and(Answer::is_plain) {
            self.queue.pop_back();
        }
        self.queue.push_back(Answer::Read(read));
    }

    /// Answers an atomic whose memory is that of `reth`.
    pub(super) fn atomic(&mut self, psn: Psn, reth: Reth, msn: Msn, value: u64) {
        self.keep(Kept { psn, packets: 1, reth, atomic: Some(value) });
        self.queue.push_back(Answer::Atomic { psn, msn, value, replay: false });
    }

    fn keep(&mut self, kept: Kept) {
        if self.kept.is_empty() {
            self.kept.reserve(self.depth);
            self.queue.reserve(4 * self.depth + 1);
        }
        if self.kept.len() >= self.depth {
            self.kept.pop_front();
        }
        self.kept.push_back(kept);
    }

    /// Whether one more repetition may be queued.
    fn has_room(&self) -> bool {
        let acknowledges = |answer: &&Answer| matches!(answer, Answer::Acknowledge { .. });
        let others = self.queue.len() - self.queue.iter().filter(acknowledges).count();
        others < 2 * self.depth
    }

    /// Answers an atomic once more.
    pub(super) fn repeat_atomic(&mut self, psn: Psn, msn: Msn) {
        let kept = self.kept.iter().find(|kept| kept.psn == psn).and_then(|kept| kept.atomic);
        let queued = |a: &Answer| matches!(a, Answer::Atomic { psn: queued, .. } if *queued == psn);
        if let Some(value) = kept.filter(|_| self.has_room() && !self.queue.iter().any(queued)) {
            self.queue.push_back(Answer::Atomic { psn, msn, value, replay: true });
        }
    }

    /// Answers a read once more, or the part of it that the peer asks for; but not when that is
    /// no part of a read that we remember.
    pub(super) fn repeat_read(&mut self, packet: &Packet<'_>, msn: Msn) {
        let (Some(reth), psn) = (packet.ext.reth, packet.bth.psn) else { return };
        let Some(kept) = self.kept.iter().find(|kept| kept.covers(psn, &reth, self.mtu)) else {
            return;
        };
        let (first, packets) = (kept.psn, packets_of(reth.length, self.mtu));
        let (replay, counts) = (true, false);
        let mut answer = ReadAnswer { psn, packets, sent: 0, reth, msn, replay, counts };
        let end = psn.add(packets);
        for queued in &mut self.queue {
            let Answer::Read(queued) = queued else { continue };
            let (unsent, last) = (queued.psn.add(queued.sent), queued.psn.add(queued.packets));
            if queued.psn.since(first) < 0 || end.since(last) > 0 || last.since(first) < 0 {
                continue;
            }
            if psn.since(unsent) >= 0 {
                // It is about to be sent.
                return;
            }
            if end == last && psn.since(queued.psn) >= 0 {
                answer.counts = queued.counts;
                *queued = answer;
                return;
            }
        }
        if self.has_room() {
            self.push_read(answer);
        }
    }

    /// Whether the last request before `end` was a read or atomic. A peer may take its number in an
    /// acknowledgement for its end (`rdma_rxe` does, and goes on with what happened to be in its
    /// memory).
    pub(super) fn end_with_data(&self, end: Psn) -> bool {
        self.kept.back().is_some_and(|kept| kept.psn.add(kept.packets) == end)
    }

    /// Queues an acknowledgement. One with a higher number says all that another would have said,
    /// which therefore need not leave any more; but it may not overtake the data of a read.
    pub(super) fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome, msn: Msn) {
        let answer = Answer::Acknowledge { psn, aeth: Aeth { syndrome, msn } };
        match self.queue.back_mut() {
            Some(Answer::Acknowledge { psn: last, .. })
                if syndrome == Syndrome::ACK && last.since(psn) > 0 => {}
            Some(last @ Answer::Acknowledge { .. }) => *last = answer,
            _ => self.queue.push_back(answer),
        }
    }

    /// Whether there is nothing to say.
    pub(super) fn are_none(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether all that there is to say is that requests have been executed.
    pub(super) fn only_acknowledge(&self) -> bool {
        self.queue.iter().all(Answer::is_plain)
    }

    /// Says nothing more but why the connection ends.
    pub(super) fn end(&mut self, psn: Psn, nak: Nak, msn: Msn) {
        self.queue.clear();
        self.acknowledge(psn, Syndrome::Nak(nak), msn);
    }

    /// Forgets all answers but a refusal.
    pub(super) fn flush(&mut self) {
        self.queue.retain(|answer| {
            let Answer::Acknowledge { aeth, .. } = answer else { return false };
            matches!(aeth.syndrome, Syndrome::Nak(nak) if nak != Nak::Sequence)
        });
        self.kept.clear();
    }

    /// The next answer to send. `expected` is the packet that is missing, if any; `early` are
    /// those behind it.
    pub(super) fn transmit(
        &mut self,
        peer: Qpn,
        memory: &Memory,
        expected: Psn,
        early: &OutOfOrder,
    ) -> Option<(TxPacket, Outcome)> {
        loop {
            let read = match self.queue.front_mut()? {
                Answer::Read(read) => read,
                Answer::Acknowledge { psn, aeth } => {
                    let (psn, aeth) = (*psn, *aeth);
                    self.queue.pop_front();
                    let made = self.acknowledgement(peer, psn, aeth, expected, early);
                    let Some((outgoing, syndrome)) = made else { continue };
                    self.troubles.note_sent(syndrome);
                    return Some((outgoing, Outcome::Live));
                }
                Answer::Atomic { psn, msn, value, .. } => {
                    let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: *msn });
                    let ext = Extended { aeth, atomic_ack: Some(*value), ..Extended::default() };
                    let bth = Bth::new(Opcode::AtomicAcknowledge, peer, *psn);
                    self.queue.pop_front();
                    return Some((TxPacket::new(bth, &ext, Payload::None, 0), Outcome::Live));
                }
            };
            let made = read.packet(peer, self.mtu, memory);
            let (psn, replay, msn) = (read.psn.add(read.sent), read.replay, read.msn);
            read.sent += 1;
            if made.is_err() || read.sent >= read.packets {
                self.queue.pop_front();
            }
            match made {
                Ok(outgoing) => {
                    if replay {
                        self.troubles.note(LinkError::SentAgain);
                    }
                    return Some((outgoing, Outcome::Live));
                }
                // The peer has got these data before, and has taken the memory back since.
                Err(Denied) if replay => {}
                Err(Denied) => {
                    self.end(psn, Nak::RemoteAccess, msn);
                    let (outgoing, _) = self.transmit(peer, memory, expected, early)?;
                    return Some((outgoing, Outcome::Dead));
                }
            }
        }
    }

    /// An acknowledgement, as things stand when it leaves, and what it says; none when there is
    /// nothing to say.
    fn acknowledgement(
        &self,
        peer: Qpn,
        psn: Psn,
        aeth: Aeth,
        expected: Psn,
        early: &OutOfOrder,
    ) -> Option<(TxPacket, Syndrome)> {
        let mut syndrome = aeth.syndrome;
        let mut ext = Extended { aeth: Some(aeth), ..Extended::default() };
        let (opcode, psn) = match aeth.syndrome {
            // What was missing has come meanwhile: nothing to complain of. What came before it is
            // acknowledged, if its data have not done so.
            Syndrome::Nak(Nak::Sequence) if psn != expected => {
                let psn = psn.previous();
                if self.kept.iter().any(|kept| psn.is_within(kept.psn, kept.packets)) {
                    return None;
                }
                syndrome = Syndrome::ACK;
                ext.aeth = Some(Aeth { syndrome, ..aeth });
                (Opcode::Acknowledge, psn)
            }
            Syndrome::Nak(Nak::Sequence) if early.is_told() => {
                ext.held = Some(early.held().to_le_bytes());
                (Opcode::SelectiveAcknowledge, psn)
            }
            _ => (Opcode::Acknowledge, psn),
        };
        let bth = Bth::new(opcode, peer, psn);
        Some((TxPacket::new(bth, &ext, Payload::None, 0), syndrome))
    }
}

impl Answer {
    /// Says no more than that requests were executed.
    fn is_plain(&self) -> bool {
        matches!(self, Answer::Acknowledge { aeth, .. } if matches!(aeth.syndrome, Syndrome::Ack(_)))
    }

    /// The unfinished first answer to a read or atomic: one of those that the peer may have outstanding.
    fn is_new(&self) -> bool {
        match self {
            Answer::Acknowledge { .. } => false,
            Answer::Atomic { replay, .. } => !replay,
            Answer::Read(read) => read.counts,
        }
    }
}

impl ReadAnswer {
    /// The packet that is next.
    fn packet(&self, peer: Qpn, mtu: u32, memory: &Memory) -> Result<TxPacket, Denied> {
        let position = match (self.sent == 0, self.sent + 1 >= self.packets) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, false) => Position::Middle,
            (false, true) => Position::Last,
        };
        let opcode = match position {
            Position::Only => Opcode::ReadResponseOnly,
            Position::First => Opcode::ReadResponseFirst,
            Position::Middle => Opcode::ReadResponseMiddle,
            Position::Last => Opcode::ReadResponseLast,
        };
        let skipped = u64::from(self.sent) * u64::from(mtu);
        let len = u64::from(self.reth.length).saturating_sub(skipped).min(u64::from(mtu)) as u32;
        let payload = if len == 0 {
            Payload::None
        } else {
            let address = self.reth.address.wrapping_add(skipped);
            Payload::Exposed(memory.place(self.reth.key, address, len, Rights::READ)?)
        };
        let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: self.msn });
        let bth = Bth::new(opcode, peer, self.psn.add(self.sent));
        Ok(TxPacket::new(bth, &Extended { aeth, ..Extended::default() }, payload, len))
    }
}
