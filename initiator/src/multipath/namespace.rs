//! The namespace as a path shows it: size, limits, identity.

use nvme::PAGE_BYTES;
use nvme::identify::{
    IdentifyController, IdentifyControllerNvm, IdentifyNamespace, NamespaceIds,
    REPORTS_ALLOCATED_LBAS,
};

/// Blocks of one command: what its zero-based field of 16 bits can say.
const MOST_BLOCKS: u32 = 1 << 16;
/// Bytes of a block at most: as in Linux.
const MOST_BLOCK_BYTES: u32 = 64 << 10;

/// Properties of the namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Namespace {
    /// Size in blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Its identifiers.
    pub ids: NamespaceIds,
    /// The ANA group; 0: none.
    pub anagrpid: u32,
    /// Writes are refused.
    pub is_write_protected: bool,
    /// Blocks can be discarded.
    pub can_discard: bool,
    /// Blocks can be written with zeros without data.
    pub can_write_zeroes: bool,
    /// Write Zeroes may deallocate.
    pub zeroes_deallocate: bool,
    /// Deallocated blocks read as zeros.
    pub deallocated_are_zeros: bool,
    /// Get LBA Status may tell which blocks are allocated, and others read as zeros.
    pub tells_allocation: bool,
    /// Bytes of a Read or Write at most.
    pub max_transfer_bytes: u32,
    /// Blocks of a Write Zeroes at most.
    pub max_zeroes_blocks: u32,
    /// Blocks of a Discard at most.
    pub max_discard_blocks: u32,
    /// Preferred size of reads and writes, in bytes; no more than one of them may have.
    pub preferred_bytes: u32,
}

impl Namespace {
    /// Composes it from Identify; `None` if a host over RDMA cannot use it (its blocks have metadata,
    /// an impossible size, or more bytes than a command transfers), or if it is not attached to the
    /// controller.
    pub(super) fn new(
        controller: &IdentifyController,
        max_transfer_bytes: u32,
        page: &IdentifyNamespace,
    ) -> Option<Namespace> {
        let block_bytes = page.block_bytes()?;
        let format = page.lbaf.get(usize::from(page.format_index()))?;
        if format.metadata_bytes != 0
            || block_bytes > max_transfer_bytes.min(MOST_BLOCK_BYTES)
            || page.ncap == 0
            || page.nsze.checked_mul(block_bytes.into()).is_none()
        {
            return None;
        }
        let oncs = controller.oncs;
        let max_transfer_bytes = max_transfer_bytes.min(block_bytes.saturating_mul(MOST_BLOCKS));
        let nonzero = |id: &[u8]| id.iter().any(|byte| *byte != 0);
        Some(Namespace {
            blocks: page.nsze,
            block_bytes,
            ids: NamespaceIds {
                eui64: Some(page.eui64).filter(|id| nonzero(id)),
                nguid: Some(page.nguid).filter(|id| nonzero(id)),
                ..NamespaceIds::default()
            },
            anagrpid: page.anagrpid,
            is_write_protected: page.nsattr & 1 != 0,
            can_discard: oncs.dataset_management(),
            can_write_zeroes: oncs.write_zeroes(),
            zeroes_deallocate: page.dlfeat >> 3 & 1 == 1,
            deallocated_are_zeros: page.dlfeat & 7 == 1,
            tells_allocation: false,
            max_transfer_bytes,
            max_zeroes_blocks: (max_transfer_bytes / block_bytes).clamp(1, MOST_BLOCKS),
            max_discard_blocks: u32::MAX,
            preferred_bytes: match page.nsfeat.optimal_io() {
                true => (u32::from(page.npwg_z) + 1).saturating_mul(block_bytes),
                false => block_bytes,
            }
            .min(max_transfer_bytes),
        })
    }

    /// With the identifiers of the descriptor list. Those of Identify Namespace stay where the list has
    /// none.
    pub(super) fn identify(&mut self, ids: NamespaceIds) {
        self.ids = NamespaceIds {
            eui64: ids.eui64.or(self.ids.eui64),
            nguid: ids.nguid.or(self.ids.nguid),
            uuid: ids.uuid,
            csi: None,
        };
    }

    /// With the limits of the command set.
    pub(super) fn limit(&mut self, page: &IdentifyControllerNvm, page_shift: u32) {
        self.tells_allocation =
            self.deallocated_are_zeros && page.aocs & REPORTS_ALLOCATED_LBAS != 0;
        if page.wzsl != 0 {
            let bytes = 1u64.checked_shl(page_shift + u32::from(page.wzsl)).unwrap_or(u64::MAX);
            let blocks = bytes / u64::from(self.block_bytes);
            self.max_zeroes_blocks = blocks.clamp(1, MOST_BLOCKS.into()) as u32;
        }
        if page.dmrsl != 0 {
            self.max_discard_blocks = page.dmrsl;
        }
        if page.dmsl != 0 {
            let most = u32::try_from(page.dmsl).unwrap_or(u32::MAX);
            self.max_discard_blocks = self.max_discard_blocks.min(most);
        }
    }

    /// What may change: size and write protection are as now. Limits become no larger, because what they
    /// allow has to be possible by each path. (Those of reads and writes stay: buffers have been made by
    /// them.)
    pub(super) fn adopt(&mut self, found: &Namespace) {
        self.blocks = found.blocks;
        self.is_write_protected = found.is_write_protected;
        self.zeroes_deallocate &= found.zeroes_deallocate;
        self.deallocated_are_zeros &= found.deallocated_are_zeros;
        self.tells_allocation &= found.tells_allocation;
        self.max_zeroes_blocks = self.max_zeroes_blocks.min(found.max_zeroes_blocks);
        self.max_discard_blocks = self.max_discard_blocks.min(found.max_discard_blocks);
    }

    /// Why another path's namespace cannot stand in for this one, if it cannot.
    pub(super) fn difference(&self, other: &Namespace) -> Option<String> {
        if self.ids != other.ids {
            return Some("its namespace has other identifiers: it is another one".into());
        }
        if self.block_bytes != other.block_bytes {
            return Some(format!(
                "its namespace has blocks of {} bytes instead of {}",
                other.block_bytes, self.block_bytes
            ));
        }
        (self.max_transfer_bytes > other.max_transfer_bytes).then(|| {
            format!(
                "its commands transfer at most {} bytes, and those of the first path {}",
                other.max_transfer_bytes, self.max_transfer_bytes
            )
        })
    }
}

/// Bytes of the pages that Identify returns.
pub(super) const IDENTIFY_BYTES: u32 = PAGE_BYTES as u32;

#[cfg(test)]
mod tests {
    use nvme::identify::{LbaFormat, Nsfeat};

    use super::*;

    fn found(lbads: u8, dlfeat: u8, max_transfer_bytes: u32) -> Option<Namespace> {
        let mut lbaf = [LbaFormat::default(); 64];
        lbaf[0].lbads = lbads;
        let page = IdentifyNamespace {
            nsze: 1 << 20,
            ncap: 1 << 20,
            dlfeat,
            nsfeat: Nsfeat(0).with_optimal_io(true),
            npwg_z: u16::MAX,
            lbaf,
            ..IdentifyNamespace::default()
        };
        Namespace::new(&IdentifyController::default(), max_transfer_bytes, &page)
    }

    #[test]
    fn blocks_are_no_larger_than_what_a_command_transfers() {
        for (lbads, max_transfer_bytes, is_usable) in [
            (9, 4096, true),
            (12, 4096, true),
            (13, 4096, false),
            (16, 1 << 20, true),
            (17, 1 << 20, false),
            (31, 1 << 20, false),
        ] {
            let found = found(lbads, 0, max_transfer_bytes);
            assert_eq!(found.is_some(), is_usable, "{lbads} {max_transfer_bytes}");
        }
    }

    #[test]
    fn the_preferred_size_is_that_of_one_command_at_most() {
        for lbads in 9..=16 {
            let found = found(lbads, 0, 1 << 20).expect("usable");
            assert_eq!(found.preferred_bytes, 1 << 20, "{lbads}");
        }
    }

    #[test]
    fn reported_allocation_needs_zeros_in_deallocated_blocks_and_aocs() {
        for (dlfeat, aocs, is_reported) in [
            (1, Some(REPORTS_ALLOCATED_LBAS), true),
            (0, Some(REPORTS_ALLOCATED_LBAS), false),
            (1, Some(0), false),
            (1, None, false),
        ] {
            let mut found = found(9, dlfeat, 4096).expect("usable");
            let limits = |aocs| IdentifyControllerNvm { aocs, ..IdentifyControllerNvm::default() };
            aocs.into_iter().for_each(|aocs| found.limit(&limits(aocs), 12));
            assert_eq!(found.tells_allocation, is_reported, "{dlfeat} {aocs:?}");
        }
    }
}
