//! Namespace Management and Namespace Attachment commands.
//!
//! Source: NVMe Base Specification 2.0, "Namespace Management command" and "Namespace Attachment
//! command"; NVM Command Set Specification 1.0 for the data of the former.

use crate::identify::{Csi, IdentifyNamespace};
use crate::{AdminOpcode, PAGE_BYTES, Sgl, Sqe};

open_enum! {
    /// Select field of Namespace Management (SEL).
    pub struct ManagementSelect(u8) {
        CREATE = 0, "Create";
        DELETE = 1, "Delete";
    }
}

open_enum! {
    /// Select field of Namespace Attachment (SEL).
    pub struct AttachmentSelect(u8) {
        ATTACH = 0, "Controller Attach";
        DETACH = 1, "Controller Detach";
    }
}

command! {
    /// Fields of a Namespace Management command.
    pub struct NamespaceManagement {
        /// The operation.
        sel: ManagementSelect = cdw10[0, 4];
        /// The namespace to delete, or FFFFFFFFh for all.
        nsid: u32 = nsid[0, 32];
        /// Command set of the namespace to create.
        csi: Csi = cdw11[24, 8];
    }
}

impl NamespaceManagement {
    /// Returns the command; to create, with its 4096 bytes of data at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::NAMESPACE_MANAGEMENT).with_sgl(data))
    }
}

command! {
    /// Fields of a Namespace Attachment command.
    pub struct NamespaceAttachment {
        /// The operation.
        sel: AttachmentSelect = cdw10[0, 4];
        /// The namespace.
        nsid: u32 = nsid[0, 32];
    }
}

impl NamespaceAttachment {
    /// Returns the command, with its Controller List of 4096 bytes at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::NAMESPACE_ATTACHMENT).with_sgl(data))
    }
}

/// Parameters of a namespace to create: the fields of Identify Namespace that a host may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NewNamespace {
    /// Size in logical blocks.
    pub nsze: u64,
    /// Capacity in logical blocks.
    pub ncap: u64,
    /// Formatted LBA size, as in Identify Namespace.
    pub flbas: u8,
    /// Protection settings.
    pub dps: u8,
    /// Sharing: bit 0 the namespace may be attached to several controllers.
    pub nmic: u8,
    /// ANA group; 0: the controller chooses.
    pub anagrpid: u32,
    /// NVM set; 0: the controller chooses.
    pub nvmsetid: u16,
    /// Endurance group; 0: the controller chooses.
    pub endgid: u16,
}

impl NewNamespace {
    /// Bytes of the data of a Create.
    pub const BYTES: usize = PAGE_BYTES;

    /// Reads the data of a Create; bytes that belong to no field are ignored.
    pub fn parse(data: &[u8; PAGE_BYTES]) -> Self {
        let page = IdentifyNamespace::parse(data);
        let IdentifyNamespace { nsze, ncap, flbas, dps, nmic, anagrpid, nvmsetid, endgid, .. } =
            page;
        Self { nsze, ncap, flbas, dps, nmic, anagrpid, nvmsetid, endgid }
    }

    /// Writes the data of a Create.
    pub fn emit(&self, data: &mut [u8; PAGE_BYTES]) {
        let Self { nsze, ncap, flbas, dps, nmic, anagrpid, nvmsetid, endgid } = *self;
        let page = IdentifyNamespace {
            nsze,
            ncap,
            flbas,
            dps,
            nmic,
            anagrpid,
            nvmsetid,
            endgid,
            ..IdentifyNamespace::default()
        };
        page.emit(data);
    }

    /// Index of the LBA format: bits 3:0 of FLBAS, and 6:5 as its upper half.
    pub const fn format_index(&self) -> u8 {
        self.flbas & 0xF | self.flbas >> 1 & 0x30
    }
}

#[cfg(test)]
mod tests {
    use crate::namespace_management::*;
    use proptest::prelude::*;

    #[test]
    fn namespace_management_layouts_match_the_specification() {
        let create = NamespaceManagement { csi: Csi(2), ..NamespaceManagement::default() };
        let sqe = create.emit(Sgl::NONE);
        assert_eq!((sqe.opcode, sqe.cdw10, sqe.cdw11), (0x0D, 0, 2 << 24));
        let detach = NamespaceAttachment { sel: AttachmentSelect::DETACH, nsid: 7 };
        let sqe = detach.emit(Sgl::NONE);
        assert_eq!((sqe.opcode, sqe.cdw10, sqe.nsid), (0x15, 1, 7));
        let mut data = [0; PAGE_BYTES];
        let new = NewNamespace {
            nsze: 0x0102,
            ncap: 3,
            flbas: 0x61,
            dps: 4,
            nmic: 1,
            anagrpid: 5,
            nvmsetid: 6,
            endgid: 7,
        };
        new.emit(&mut data);
        assert_eq!((data[0], data[1], data[8], data[26], data[29]), (2, 1, 3, 0x61, 4));
        assert_eq!((data[30], data[92], data[100], data[102]), (1, 5, 6, 7));
        assert_eq!(new.format_index(), 0x31);
    }

    proptest! {
        #[test]
        fn namespace_management_commands_and_data_round_trip(
            sel in 0u8..16, nsid: u32, csi: u8, nsze: u64, ncap: u64, flbas: u8, nmic: u8,
        ) {
            let sqe = NamespaceManagement { sel: ManagementSelect(sel), nsid, csi: Csi(csi) };
            prop_assert_eq!(NamespaceManagement::parse(&sqe.emit(Sgl::NONE)), sqe);
            let sqe = NamespaceAttachment { sel: AttachmentSelect(sel), nsid };
            prop_assert_eq!(NamespaceAttachment::parse(&sqe.emit(Sgl::NONE)), sqe);
            let new = NewNamespace { nsze, ncap, flbas, nmic, ..NewNamespace::default() };
            let mut data = [0; PAGE_BYTES];
            new.emit(&mut data);
            prop_assert_eq!(NewNamespace::parse(&data), new);
        }
    }
}
