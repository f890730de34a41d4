//! Response queue of the responder: acknowledgements, NAKs and read responses.
//!
//! Responses leave in the order of the requests. An unsent acknowledgement is replaced by a newer
//! one, so a batch of requests costs one.
//!
//! The queue is bounded by `depth`, the reads that the peer may have outstanding. At most `depth`
//! first responses are in it, and repeated ones are queued only as long as there are fewer than `2
//! * depth` in total. With an acknowledgement between every two of them that makes `4 * depth + 1`.

use std::collections::VecDeque;

use super::out_of_order::OutOfOrder;
use super::packets_of;
use crate::soft::qp::memory_region::{Denied, Memory, Rights};
use crate::soft::stats::link_errors::{LinkError, LinkErrorCounts};
use crate::wire::header::{Aeth, Bth, Extended, Nak, Packet, Reth, SingleExt, Syndrome};
use crate::wire::opcode::{Opcode, Position};
use crate::wire::psn::{Msn, Psn, Qpn};
use crate::wire::tx_packet::{Payload, TxPacket};

/// Action after a response was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Continue.
    Live,
    /// The queue pair has failed; the last response tells the peer.
    Dead,
}

/// A read that was answered, in case that its response is lost.
#[derive(Clone, Copy, Debug)]
struct Kept {
    psn: Psn,
    packets: u32,
    reth: Reth,
}

impl Kept {
    /// Whether a read request equals it, or requests a part of it.
    fn covers(&self, psn: Psn, reth: &Reth, mtu: u32) -> bool {
        let Ok(skipped) = u64::try_from(psn.since(self.psn)) else { return false };
        let skipped = skipped * u64::from(mtu);
        psn.is_within(self.psn, self.packets)
            && reth.key == self.reth.key
            && self.reth.address.checked_add(skipped) == Some(reth.address)
            && skipped + u64::from(reth.length) <= u64::from(self.reth.length)
    }
}

#[derive(Clone, Copy, Debug)]
struct ReadAnswer {
    /// Number of its first packet.
    psn: Psn,
    packets: u32,
    /// Number of packets sent.
    sent: u32,
    reth: Reth,
    msn: Msn,
    /// A repetition: the peer may have received it before, and revoked the memory.
    replay: bool,
    /// Its first response is not complete: the peer counts this read as outstanding.
    counts: bool,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Acknowledge { psn: Psn, aeth: Aeth },
    Read(ReadAnswer),
}

/// Unsent responses, and those that may have to be repeated.
#[derive(Debug)]
pub(super) struct ResponseQueue {
    mtu: u32,
    depth: usize,
    queue: VecDeque<Answer>,
    kept: VecDeque<Kept>,
    pub(super) troubles: LinkErrorCounts,
}

impl ResponseQueue {
    /// Without reads there is one acknowledgement at a time. Room for others is
    /// allocated for the first one: most queue pairs never get one.
    pub(super) fn new(mtu: u32, depth: usize) -> ResponseQueue {
        let (queue, kept) = (VecDeque::with_capacity(1), VecDeque::new());
        ResponseQueue { mtu, depth, queue, kept, troubles: LinkErrorCounts::default() }
    }

    /// Whether the peer has as many reads outstanding as allowed.
    pub(super) fn are_busy(&self) -> bool {
        // The length alone decides in almost all cases.
        self.queue.len() >= self.depth
            && self.queue.iter().filter(|answer| answer.is_new()).count() >= self.depth
    }

    /// Queues the response to a read.
    pub(super) fn read(&mut self, psn: Psn, reth: Reth, msn: Msn) {
        let packets = packets_of(reth.length, self.mtu);
        self.keep(Kept { psn, packets, reth });
        let (replay, counts) = (false, true);
        let read = ReadAnswer { psn, packets, sent: 0, reth, msn, replay, counts };
        self.push_read(read);
    }

    /// The data acknowledge earlier requests too. A separate acknowledgement could be sent between
    /// the data, which ends the connection at `rdma_rxe`.
    fn push_read(&mut self, read: ReadAnswer) {
        if self.queue.back().is_some_and(Answer::is_plain) {
            self.queue.pop_back();
        }
        self.queue.push_back(Answer::Read(read));
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

    /// Repeats the response to a read, or the requested part of it; no effect if it is not part of
    /// a known read.
    pub(super) fn repeat_read(&mut self, packet: &Packet<'_>, msn: Msn) {
        let (Some(reth), psn) = (packet.reth(), packet.bth.psn) else { return };
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

    /// Whether the last request before `end` was a read. A peer may take its number in an
    /// acknowledgement for its completion (`rdma_rxe` does, and continues with whatever is in its
    /// memory).
    pub(super) fn end_with_data(&self, end: Psn) -> bool {
        self.kept.back().is_some_and(|kept| kept.psn.add(kept.packets) == end)
    }

    /// Queues an acknowledgement. One with a higher number replaces an unsent earlier one, but does
    /// not overtake the data of a read.
    pub(super) fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome, msn: Msn) {
        let answer = Answer::Acknowledge { psn, aeth: Aeth { syndrome, msn } };
        match self.queue.back_mut() {
            Some(Answer::Acknowledge { psn: last, .. })
                if syndrome == Syndrome::ACK && last.since(psn) > 0 => {}
            Some(last @ Answer::Acknowledge { .. }) => *last = answer,
            _ => self.queue.push_back(answer),
        }
    }

    /// Whether there is nothing to send.
    pub(super) fn are_none(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether only acknowledgements of executed requests are to be sent.
    pub(super) fn only_acknowledge(&self) -> bool {
        // Of two in succession the later one has replaced the other.
        self.queue.len() <= 1 && self.queue.front().is_none_or(Answer::is_plain)
    }

    /// Drops all responses except the NAK that ends the connection.
    pub(super) fn end(&mut self, psn: Psn, nak: Nak, msn: Msn) {
        self.queue.clear();
        self.acknowledge(psn, Syndrome::Nak(nak), msn);
    }

    /// Drops all responses except a NAK.
    pub(super) fn flush(&mut self) {
        self.queue.retain(|answer| {
            let Answer::Acknowledge { aeth, .. } = answer else { return false };
            matches!(aeth.syndrome, Syndrome::Nak(nak) if nak != Nak::Sequence)
        });
        self.kept.clear();
    }

    /// The next response to send. `expected` is the missing packet, if any; `early` are those
    /// received after it.
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
                // The peer has received these data before, and has revoked the memory since.
                Err(Denied) if replay => {}
                Err(Denied) => {
                    self.end(psn, Nak::RemoteAccess, msn);
                    let (outgoing, _) = self.transmit(peer, memory, expected, early)?;
                    return Some((outgoing, Outcome::Dead));
                }
            }
        }
    }

    /// Whether the data of a read acknowledge a request.
    #[inline(never)] // rare
    fn acknowledges_by_data(&self, psn: Psn) -> bool {
        self.kept.iter().any(|kept| psn.is_within(kept.psn, kept.packets))
    }

    /// The acknowledgement for the state at the time of sending; none if there is nothing to
    /// report.
    fn acknowledgement(
        &self,
        peer: Qpn,
        psn: Psn,
        mut aeth: Aeth,
        expected: Psn,
        early: &OutOfOrder,
    ) -> Option<(TxPacket, Syndrome)> {
        let psn = match aeth.syndrome {
            // The missing packet has arrived meanwhile, so there is no NAK. Packets before it are
            // acknowledged, unless their data do that.
            Syndrome::Nak(Nak::Sequence) if psn != expected => {
                let psn = psn.previous();
                if self.acknowledges_by_data(psn) {
                    return None;
                }
                aeth.syndrome = Syndrome::ACK;
                psn
            }
            Syndrome::Nak(Nak::Sequence) if early.has_report() => {
                let held = Some(early.held().to_le_bytes());
                let ext = Extended { aeth: Some(aeth), held, ..Extended::default() };
                let bth = Bth::new(Opcode::SelectiveAcknowledge, peer, psn);
                return Some((TxPacket::new(bth, &ext, Payload::None, 0), aeth.syndrome));
            }
            _ => psn,
        };
        let bth = Bth::new(Opcode::Acknowledge, peer, psn);
        let packet = TxPacket::single(bth, SingleExt::Acknowledge(aeth), Payload::None, 0);
        Some((packet, aeth.syndrome))
    }
}

impl Answer {
    /// Whether it only acknowledges executed requests.
    fn is_plain(&self) -> bool {
        matches!(self, Answer::Acknowledge { aeth, .. } if matches!(aeth.syndrome, Syndrome::Ack(_)))
    }

    /// Whether it is the unfinished first response to a read, which counts as outstanding for the
    /// peer.
    fn is_new(&self) -> bool {
        matches!(self, Answer::Read(read) if read.counts)
    }
}

impl ReadAnswer {
    /// The next packet.
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
        let bth = Bth::new(opcode, peer, self.psn.add(self.sent));
        // Those between the first and the last acknowledge nothing.
        let ext = match position {
            Position::Middle => SingleExt::None,
            _ => SingleExt::Acknowledge(Aeth { syndrome: Syndrome::ACK, msn: self.msn }),
        };
        Ok(TxPacket::single(bth, ext, payload, len))
    }
}
