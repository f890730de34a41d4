//! Packets of work with immediate data (IBTA volume 1, 9.4 "Transport Functions": SEND and RDMA WRITE
//! "with immediate").

use super::Wqe;
use crate::Work;
use crate::soft::wire::header::{Bth, Extended, Reth};
use crate::soft::wire::opcode::Opcode;
use crate::soft::wire::psn::{Psn, Qpn};
use crate::soft::wire::tx_packet::{Payload, TxPacket};

impl Wqe {
    /// As [`Wqe::emit`], of work with immediate data, which are in its last packet. A write is one
    /// message here, because the peer is told its length.
    #[inline(never)] // rare
    pub(super) fn emit_with_immediate(
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
