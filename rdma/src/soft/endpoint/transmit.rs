//! Sending: messages of connection management, then packets of the queue pairs that are ready.

use std::net::IpAddr;
use std::time::Instant;

use super::Endpoint;
use super::qp_context::QpContext;
use crate::soft::cm::mad::MAD_BYTES;
use crate::soft::qp::Io;
use crate::wire::flow_crc::FlowCrc;
use crate::wire::header::{Bth, Deth, Extended, GSI_QKEY};
use crate::wire::icrc::Flow;
use crate::wire::opcode::Opcode;
use crate::wire::psn::Qpn;
use crate::wire::tx_packet::{Payload, TxPacket};
use crate::{Qp, Region};

/// One datagram to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Source and destination.
    pub flow: Flow,
    /// Its headers, and the location of its payload.
    pub outgoing: TxPacket,
    /// Type of service of the IP header: as requested by the peer; ECN-capable if the peer reacts to
    /// marks.
    pub tos: u8,
    slot: u32,
}

/// A packet to send. What all packets of a queue pair have in common is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuedPacket {
    /// The queue pair; messages of connection management share one slot.
    pub(crate) slot: u32,
    pub(crate) packet: TxPacket,
}

impl Endpoint {
    /// The next datagram to send; none if there is none at present.
    pub fn poll_transmit(&mut self, now: Instant, region: &Region) -> Option<Transmit> {
        let mut next = Vec::with_capacity(1);
        self.gather(now, region, &|_| true, 1, &mut next);
        let queued = next.pop()?;
        let (flow, tos) = self.envelope(&queued)?;
        Some(Transmit { flow, outgoing: queued.packet, tos, slot: queued.slot })
    }

    /// Appends at most `room` packets that are to be sent now: from the `open` local addresses only,
    /// but messages of connection management from any. The others wait for [`Endpoint::resume`].
    #[inline]
    pub(crate) fn gather(
        &mut self,
        now: Instant,
        region: &Region,
        open: &dyn Fn(IpAddr) -> bool,
        room: usize,
        into: &mut Vec<QueuedPacket>,
    ) {
        if self.has_transmits() {
            self.gather_ready(now, region, open, room, into);
        }
    }

    #[inline(never)]
    fn gather_ready(
        &mut self,
        now: Instant,
        region: &Region,
        open: &dyn Fn(IpAddr) -> bool,
        room: usize,
        into: &mut Vec<QueuedPacket>,
    ) {
        if !self.manager.displaced.is_empty() {
            self.end_displaced(now, region);
        }
        let time = self.clock.read(now);
        let mut left = room;
        while left > 0 && self.messages_sent < self.messages.len() {
            into.push(QueuedPacket { slot: 0, packet: self.next_message() });
            left -= 1;
        }
        while left > 0
            && let Some(number) = self.ready.front().copied()
        {
            let slot = self.slots.get_mut(number as usize).and_then(Option::as_mut);
            if let Some(slot) = slot.as_ref().filter(|slot| !open(slot.connection.local)) {
                self.deadlines.set(number, slot.deadline());
                self.halted.push(number);
            } else if let Some(slot) = slot {
                let (memory, events, reorder) =
                    (&mut self.memory, &mut self.events, &mut self.reorder);
                let mut io = Io { region, memory, events, reorder, qp: Qp(number) };
                let mut sink = |packet| into.push(QueuedPacket { slot: number, packet });
                left -= slot.qp.transmit(time, &mut io, left, &mut sink);
                if left == 0 {
                    return;
                }
                // Once, after everything was sent: the deadline is not read before.
                slot.ready = false;
                slot.rest(number, &mut self.deadlines, &mut self.keeping);
            }
            self.ready.pop_front();
        }
    }

    fn next_message(&mut self) -> TxPacket {
        let mut bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, self.gsi_psn);
        bth.ack_request = true;
        self.gsi_psn = self.gsi_psn.add(1);
        let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
        let ext = Extended { deth, ..Extended::default() };
        let payload = Payload::Management(self.messages_sent);
        self.messages_sent += 1;
        TxPacket::new(bth, &ext, payload, MAD_BYTES as u32)
    }

    /// Tries all local addresses again.
    pub(crate) fn resume(&mut self) {
        self.ready.extend(self.halted.drain(..));
    }

    /// Before a long sleep: delayed acknowledgements are sent now. Returns true if there are any.
    pub(crate) fn hasten(&mut self, now: Instant) -> bool {
        let time = self.clock.read(now);
        while let Some(number) = self.keeping.pop() {
            if let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::as_mut)
                && std::mem::take(&mut slot.keeping)
                && slot.qp.is_keeping()
            {
                slot.qp.hasten(time);
                self.mark_ready(number);
            }
        }
        !self.ready.is_empty()
    }

    fn slot(&self, slot: u32) -> Option<&QpContext> {
        self.slots.get(slot as usize).and_then(Option::as_ref)
    }

    /// Flow and type of service of a packet.
    pub(crate) fn envelope(&self, queued: &QueuedPacket) -> Option<(Flow, u8)> {
        if let Payload::Management(at) = queued.packet.payload() {
            return self.messages.get(at).map(|message| (message.flow(), message.tos));
        }
        self.slot(queued.slot).map(|slot| (*slot.tx_crc.flow(), slot.connection.tos))
    }

    /// The local address of a message of connection management that belongs to no confirmed
    /// connection; none for any other packet.
    pub(crate) fn unconfirmed(&self, queued: &QueuedPacket) -> Option<IpAddr> {
        let Payload::Management(at) = queued.packet.payload() else { return None };
        self.messages.get(at).filter(|message| message.unconfirmed).map(|message| message.from)
    }

    /// Maximum length of a train with this packet.
    pub(crate) fn longest_train(&self, queued: &QueuedPacket) -> usize {
        let takes = match queued.packet.payload() {
            Payload::Management(at) => self.messages.get(at).is_none_or(|message| {
                let pair = self.pairs.known(message.to, message.from);
                pair.is_none_or(|pair| pair.segments.are_kept())
            }),
            _ => self.slot(queued.slot).is_none_or(QpContext::takes_trains),
        };
        if takes { usize::MAX } else { 1 }
    }

    /// Called when a packet leaves at this place of its train.
    pub(crate) fn depart(&mut self, queued: &QueuedPacket, place: usize) {
        let slot = self.slots.get_mut(queued.slot as usize).and_then(Option::as_mut);
        if let Some(slot) = slot {
            slot.depart(&queued.packet, place);
        }
    }

    /// Appends a datagram to others of its train; see [`TxPacket::append`] for `identification`, and
    /// for when nothing is appended.
    pub(crate) fn append(
        &mut self,
        queued: &QueuedPacket,
        identification: u16,
        region: &Region,
        train: &mut Vec<u8>,
    ) -> bool {
        let QueuedPacket { slot, packet } = queued;
        if let Payload::Management(at) = packet.payload() {
            let Some(message) = self.messages.get(at) else { return false };
            let mut crc = FlowCrc::new(message.flow());
            return packet.append(&mut crc, identification, &message.mad, train);
        }
        let slot = self.slots.get_mut(*slot as usize).and_then(Option::as_mut);
        let Some(slot) = slot else { return false };
        let payload = slot.qp.payload(packet, region, &self.memory);
        packet.append(&mut slot.tx_crc, identification, payload, train)
    }

    /// Appends the payload of a datagram to `into`.
    ///
    /// # Panics
    /// It is in a remote region of another thread.
    pub fn copy_payload(&self, transmit: &Transmit, region: &Region, into: &mut Vec<u8>) {
        let Transmit { outgoing, slot, .. } = transmit;
        let payload = match outgoing.payload() {
            Payload::Management(at) => self.messages.get(at).map(|message| &message.mad[..]),
            _ => self.slot(*slot).map(|slot| slot.qp.payload(outgoing, region, &self.memory)),
        };
        into.extend_from_slice(payload.unwrap_or_default());
    }
}
