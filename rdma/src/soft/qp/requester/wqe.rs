//! Work queue elements and their packets (IBTA volume 1, 9.4 "Transport Functions").

use crate::wire::header::{Bth, Extended, Reth, SingleExt};
use crate::wire::opcode::Opcode;
use crate::wire::psn::{Psn, Qpn};
use crate::wire::tx_packet::{Payload, TxPacket};
use crate::{Tag, Work};

/// One posted work request (work queue element).
#[derive(Debug)]
pub(in crate::soft::qp) struct Wqe {
    pub(super) tag: Tag,
    pub(super) work: Work,
    /// Its first packet; far away until that is sent.
    pub(super) first: u64,
    pub(super) packets: u32,
    /// Packets of one read request.
    pub(super) piece: u32,
}

impl Wqe {
    #[inline]
    pub(in crate::soft::qp) fn new(tag: Tag, work: Work) -> Wqe {
        Wqe { tag, work, first: u64::MAX, packets: 0, piece: 1 }
    }

    pub(super) fn end(&self) -> u64 {
        self.first.saturating_add(u64::from(self.packets))
    }

    pub(super) fn is_read(&self) -> bool {
        matches!(self.work, Work::Read { .. })
    }

    /// Whether it completes a receive of the peer.
    pub(super) fn takes_receive(&self) -> bool {
        !matches!(self.work, Work::Read { .. } | Work::Write { .. })
    }

    /// Offset and length of packet `at` in the buffer.
    pub(super) fn segment(&self, at: u64, mtu: u32) -> (u32, u32) {
        self.segments(at, 1, mtu)
    }

    /// Offset and length of some packets from `at` on.
    #[inline(always)] // for each packet
    fn segments(&self, at: u64, packets: u64, mtu: u32) -> (u32, u32) {
        let offset = (at - self.first) * u64::from(mtu);
        let left = u64::from(self.work.buf().len()).saturating_sub(offset);
        (offset as u32, left.min(packets * u64::from(mtu)) as u32)
    }

    /// The datagram of some packets from `at` on: one packet, or as many as a read request asks for.
    /// `work` is the number of this one.
    pub(super) fn datagram(
        &self,
        work: u64,
        (at, packets): (u64, u64),
        mtu: u32,
        to: (Qpn, Psn),
    ) -> TxPacket {
        let ends = (at == self.first, at + 1 == self.end());
        self.emit(work, self.segments(at, packets, mtu), ends, to)
    }

    /// The datagram of work that is one packet.
    #[inline(always)] // for each packet
    pub(super) fn whole(&self, work: u64, to: (Qpn, Psn)) -> TxPacket {
        self.emit(work, (0, self.work.buf().len()), (true, true), to)
    }

    /// The datagram of this offset and length, for a queue pair and with this number; `first` and
    /// `last`: of the packets of the work.
    #[inline(always)] // for each packet
    fn emit(
        &self,
        work: u64,
        (offset, len): (u32, u32),
        (first, last): (bool, bool),
        (peer, psn): (Qpn, Psn),
    ) -> TxPacket {
        let (opcode, ext, payload_bytes) = match &self.work {
            Work::Read { from, .. } => {
                (Opcode::ReadRequest, memory_of(from.addr, from.key, offset, len), 0)
            }
            Work::Write { to, .. } => {
                (Opcode::WriteOnly, memory_of(to.addr, to.key, offset, len), len)
            }
            Work::Send { invalidate, .. } => {
                let ext = invalidate.map_or(SingleExt::None, SingleExt::Invalidate);
                (send_opcode(first, last, invalidate.is_some()), ext, len)
            }
            _ => return self.emit_with_immediate(work, (offset, len), (first, last), (peer, psn)),
        };
        let payload = match payload_bytes {
            0 => Payload::None,
            _ => Payload::Posted { work, at: offset },
        };
        TxPacket::single(Bth::new(opcode, peer, psn), ext, payload, payload_bytes)
    }

    /// The packets of the piece of a read that contains packet `at`. Pieces begin at multiples of
    /// their length.
    pub(super) fn piece(&self, at: u64) -> (u64, u64) {
        let piece = u64::from(self.piece);
        let first = at - (at - self.first) % piece;
        (first, self.end().min(first + piece))
    }

    /// As [`Wqe::emit`], of work with immediate data, which are in its last packet. A write is one
    /// message here, because the peer is told its length.
    #[inline(never)] // rare
    fn emit_with_immediate(
        &self,
        work: u64,
        (offset, len): (u32, u32),
        (first, last): (bool, bool),
        (peer, psn): (Qpn, Psn),
    ) -> TxPacket {
        let mut ext = Extended::default();
        let opcode = match &self.work {
            Work::WriteImmediate { from, to, immediate } => {
                let reth = Reth { address: to.addr, key: to.key, length: from.len() };
                (ext.reth, ext.immediate) = (Some(reth), Some(immediate.to_be_bytes()));
                opcode_with_immediate(true, first, last)
            }
            Work::SendImmediate { immediate, .. } => {
                ext.immediate = Some(immediate.to_be_bytes());
                opcode_with_immediate(false, first, last)
            }
            // Others have none; receives are posted on the responder.
            _ => Opcode::SendOnly,
        };
        let payload = if len == 0 { Payload::None } else { Payload::Posted { work, at: offset } };
        // Headers that the operation code does not have are not written.
        TxPacket::new(Bth::new(opcode, peer, psn), &ext, payload, len)
    }
}

fn memory_of(base: u64, key: u32, offset: u32, length: u32) -> SingleExt {
    let address = base.wrapping_add(u64::from(offset));
    SingleExt::Memory(Reth { address, key, length })
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

fn opcode_with_immediate(is_write: bool, first: bool, last: bool) -> Opcode {
    match (is_write, first, last) {
        (false, true, true) => Opcode::SendOnlyImmediate,
        (false, true, false) => Opcode::SendFirst,
        (false, false, false) => Opcode::SendMiddle,
        (false, false, true) => Opcode::SendLastImmediate,
        (true, true, true) => Opcode::WriteOnlyImmediate,
        (true, true, false) => Opcode::WriteFirst,
        (true, false, false) => Opcode::WriteMiddle,
        (true, false, true) => Opcode::WriteLastImmediate,
    }
}
