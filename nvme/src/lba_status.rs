//! The Get LBA Status command, and the list of descriptors that it returns.
//!
//! Source: NVM Command Set Specification 1.1, "Get LBA Status command". Revision 1.0 has no action type
//! for allocated blocks.

use crate::{AdminOpcode, Sgl, Sqe};

open_enum! {
    /// Action type (ATYPE): what the descriptors are about.
    pub struct ActionType(u8) {
        ALLOCATED = 0x02, "Return Allocated LBAs";
        SCAN = 0x10, "Return Untracked and Tracked LBAs";
        TRACKED = 0x11, "Return Tracked LBAs";
    }
}

open_enum! {
    /// Completion condition (CMPC).
    pub struct CompletionCondition(u8) {
        NONE = 0, "No indication";
        INCOMPLETE = 1, "Incomplete: there are more descriptors";
        COMPLETE = 2, "Complete";
    }
}

command! {
    /// Fields of a Get LBA Status command.
    pub struct GetLbaStatus {
        /// Namespace id.
        nsid: u32 = nsid[0, 32];
        /// Starting LBA.
        slba: u64 = cdw10[0, 32] cdw11[0, 32];
        /// Maximum number of dwords to return, minus one.
        mndw_z: u32 = cdw12[0, 32];
        /// Range length in logical blocks; 0: to the end of the namespace.
        rl: u16 = cdw13[0, 16];
        /// Action type.
        action: ActionType = cdw13[24, 8];
    }
}

impl GetLbaStatus {
    /// Returns the command, with its data at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::GET_LBA_STATUS).with_sgl(data))
    }

    /// Maximum length of the list in bytes: 4 to 2^34.
    pub const fn len_bytes(&self) -> u64 {
        (self.mndw_z as u64 + 1) * 4
    }
}

wire! {
    /// Header of the LBA Status Descriptor List.
    pub struct LbaStatusHeader[8] {
        /// Number of descriptors.
        nlsd: u32 = 0,
        /// Completion condition.
        cmpc: CompletionCondition = 4,
    }
}

wire! {
    /// LBA Status Descriptor Entry.
    pub struct LbaStatusDescriptor[16] {
        /// Its first LBA.
        dslba: u64 = 0,
        /// Number of logical blocks, minus one.
        nlb_z: u32 = 8,
        /// LBA Range Status, bits 2:0.
        status: u8 = 13,
    }
}

impl LbaStatusDescriptor {
    /// LBA Range Status: one or more of the logical blocks are allocated.
    pub const ALLOCATED: u8 = 2;

    /// Number of logical blocks, 1 to 2^32.
    pub const fn blocks(&self) -> u64 {
        self.nlb_z as u64 + 1
    }

    /// The descriptors of a list that are in `data`, which begins with the header, in order.
    pub fn parse_all(data: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (header, entries) = data.split_first_chunk().unwrap_or((&[0; 8], &[]));
        let count = LbaStatusHeader::parse(header).nlsd;
        let entries = entries.chunks_exact(Self::BYTES).take(count as usize);
        entries.filter_map(|bytes| bytes.first_chunk().map(Self::parse))
    }
}
