//! Identify Namespace data structures.
//!
//! Source: NVMe Base Specification 2.0, "Identify Namespace data structure", NVM Command Set
//! Specification 1.0.

use crate::PAGE_BYTES;
use crate::ids::Csi;
use crate::reservation::Rescap;

wire! {
    /// LBA format, 4 bytes.
    pub struct LbaFormat[4] {
        /// Metadata per block in bytes.
        metadata_bytes: u16 = 0,
        /// Block size: 2^n bytes, at least 9; 0 format not available.
        lbads: u8 = 2,
        /// Relative performance, 0 best to 3.
        rp: u8 = 3,
    }
}

bits! {
    /// Namespace features.
    pub struct Nsfeat(u8) {
        /// Thin provisioning.
        thin with_thin: bool = 0, 1;
        /// NAWUN, NAWUPF and NACWU are valid.
        atomics with_atomics: bool = 1, 1;
        /// NPWG, NPWA, NPDG, NPDA and NOWS are valid.
        optimal_io with_optimal_io: bool = 4, 1;
    }
}

wire! {
    /// Identify Namespace of the NVM command set (CNS 00h), 4096 bytes.
    pub struct IdentifyNamespace[page 4096] {
        /// Size in logical blocks.
        nsze: u64 = 0,
        /// Capacity in logical blocks; 0 makes hosts remove the namespace.
        ncap: u64 = 8,
        /// Utilization in logical blocks.
        nuse: u64 = 16,
        /// Features.
        nsfeat: Nsfeat = 24,
        /// Number of LBA formats, minus one.
        nlbaf_z: u8 = 25,
        /// Formatted LBA size: bits 3:0 and 6:5 format index, bit 4 metadata within the block.
        flbas: u8 = 26,
        /// Metadata capabilities.
        mc: u8 = 27,
        /// Protection capabilities.
        dpc: u8 = 28,
        /// Protection settings: bits 2:0 type, bit 3 first bytes of the metadata.
        dps: u8 = 29,
        /// Sharing: bit 0 the namespace may be attached to several controllers.
        nmic: u8 = 30,
        /// Reservation capabilities.
        rescap: Rescap = 31,
        /// Format progress: bit 7 supported, bits 6:0 remaining percentage.
        fpi: u8 = 32,
        /// Deallocation: bits 2:0 what reads return (1 zeroes), bit 3 Write Zeroes may deallocate.
        dlfeat: u8 = 33,
        /// Atomic write unit normal in logical blocks, minus one.
        nawun_z: u16 = 34,
        /// Atomic write unit power fail in logical blocks, minus one.
        nawupf_z: u16 = 36,
        /// Atomic compare and write unit in logical blocks, minus one.
        nacwu_z: u16 = 38,
        /// Atomic boundary size normal in logical blocks, minus one.
        nabsn_z: u16 = 40,
        /// Atomic boundary offset in logical blocks.
        nabo: u16 = 42,
        /// Atomic boundary size power fail in logical blocks, minus one.
        nabspf_z: u16 = 44,
        /// Optimal I/O boundary in logical blocks; 0 none.
        noiob: u16 = 46,
        /// Capacity in bytes.
        nvmcap_bytes: u128 = 48,
        /// Preferred write granularity in logical blocks, minus one.
        npwg_z: u16 = 64,
        /// Preferred write alignment in logical blocks, minus one.
        npwa_z: u16 = 66,
        /// Preferred deallocate granularity in logical blocks, minus one.
        npdg_z: u16 = 68,
        /// Preferred deallocate alignment in logical blocks, minus one.
        npda_z: u16 = 70,
        /// Optimal write size in logical blocks, minus one.
        nows_z: u16 = 72,
        /// Maximum single source range length of Copy in logical blocks.
        mssrl: u16 = 74,
        /// Maximum Copy length in logical blocks.
        mcl: u32 = 76,
        /// Maximum source ranges of Copy, minus one.
        msrc_z: u8 = 80,
        /// ANA group.
        anagrpid: u32 = 92,
        /// Attributes: bit 0 write protected.
        nsattr: u8 = 99,
        /// NVM set.
        nvmsetid: u16 = 100,
        /// Endurance group.
        endgid: u16 = 102,
        /// Namespace globally unique id, a byte string; zero for none.
        nguid: [u8; 16] = 104,
        /// IEEE extended unique id, a byte string; zero for none.
        eui64: [u8; 8] = 120,
        /// LBA formats 0 to 63.
        lbaf: [LbaFormat; 64] = 128,
    }
}

impl IdentifyNamespace {
    /// Index of the LBA format in use, 0 to 63.
    pub const fn format_index(&self) -> u8 {
        self.flbas & 0xF | (self.flbas >> 5 & 3) << 4
    }

    /// Size of a logical block in bytes; `None` if the format in use has an invalid size.
    pub fn block_bytes(&self) -> Option<u32> {
        match self.lbaf.get(usize::from(self.format_index()))?.lbads {
            lbads @ 9..=31 => Some(1 << lbads),
            _ => None,
        }
    }
}

wire! {
    /// Identify Namespace independent of the command set (CNS 08h), 4096 bytes.
    pub struct IdentifyNamespaceIndependent[page 4096] {
        /// Features: bit 3 ids are not reused, 4 rotational, 5 no volatile write cache.
        nsfeat: u8 = 0,
        /// Sharing: bit 0 the namespace may be attached to several controllers.
        nmic: u8 = 1,
        /// Reservation capabilities.
        rescap: Rescap = 2,
        /// Format progress.
        fpi: u8 = 3,
        /// ANA group.
        anagrpid: u32 = 4,
        /// Attributes: bit 0 write protected.
        nsattr: u8 = 8,
        /// NVM set.
        nvmsetid: u16 = 10,
        /// Endurance group.
        endgid: u16 = 12,
        /// Status: bit 0 ready, required by hosts.
        nstat: u8 = 14,
    }
}

/// Namespace Identification Descriptor list (CNS 03h). All are byte strings in wire order, stable
/// and unique; a namespace has at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct NamespaceIds {
    /// Type 1.
    pub eui64: Option<[u8; 8]>,
    /// Type 2.
    pub nguid: Option<[u8; 16]>,
    /// Type 3, in the byte order in which a UUID is written.
    pub uuid: Option<[u8; 16]>,
    /// Type 4: the command set. Not an identifier, but a descriptor of the same list.
    pub csi: Option<Csi>,
}

impl NamespaceIds {
    /// Writes the list, UUID first, which hosts prefer; the rest of the page is zero.
    pub fn emit(&self, page: &mut [u8; PAGE_BYTES]) {
        *page = [0; PAGE_BYTES];
        let mut rest: &mut [u8] = page;
        let csi = self.csi.map(|csi| [csi.0]);
        let descriptors = [
            (3, self.uuid.as_ref().map(<[u8; 16]>::as_slice)),
            (2, self.nguid.as_ref().map(<[u8; 16]>::as_slice)),
            (1, self.eui64.as_ref().map(<[u8; 8]>::as_slice)),
            (4, csi.as_ref().map(<[u8; 1]>::as_slice)),
        ];
        for (kind, id) in descriptors {
            let Some(id) = id else { continue };
            let Some((to, left)) = rest.split_at_mut_checked(4 + id.len()) else { return };
            to[0] = kind;
            to[1] = id.len() as u8;
            to[4..].copy_from_slice(id);
            rest = left;
        }
    }

    /// Reads the list to its end. Unknown types and known ones of a wrong length are skipped; of
    /// two descriptors of one type the later one is used.
    pub fn parse(page: &[u8; PAGE_BYTES]) -> Self {
        let mut ids = Self::default();
        let mut rest: &[u8] = page;
        while let [kind, len, _, _, tail @ ..] = rest {
            let Some((id, left)) = tail.split_at_checked((*len).into()) else { break };
            if id.is_empty() {
                break;
            }
            match kind {
                1 => ids.eui64 = id.try_into().ok().or(ids.eui64),
                2 => ids.nguid = id.try_into().ok().or(ids.nguid),
                3 => ids.uuid = id.try_into().ok().or(ids.uuid),
                4 => {
                    if let [csi] = id {
                        ids.csi = Some(Csi(*csi));
                    }
                }
                _ => {}
            }
            rest = left;
        }
        ids
    }
}
