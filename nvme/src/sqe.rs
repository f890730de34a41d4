//! The 64-byte command and its opcode families.
//!
//! Source: NVMe Base Specification 2.0, "Submission Queue Entry" and the opcode tables; NVM Command
//! Set Specification 1.0 for I/O commands.

use crate::{Sgl, Status};

open_enum! {
    /// Opcode of an Admin command.
    pub struct AdminOpcode(u8) {
        DELETE_IO_SQ = 0x00, "Delete I/O Submission Queue";
        CREATE_IO_SQ = 0x01, "Create I/O Submission Queue";
        GET_LOG_PAGE = 0x02, "Get Log Page";
        DELETE_IO_CQ = 0x04, "Delete I/O Completion Queue";
        CREATE_IO_CQ = 0x05, "Create I/O Completion Queue";
        IDENTIFY = 0x06, "Identify";
        ABORT = 0x08, "Abort";
        SET_FEATURES = 0x09, "Set Features";
        GET_FEATURES = 0x0A, "Get Features";
        ASYNC_EVENT_REQUEST = 0x0C, "Asynchronous Event Request";
        NAMESPACE_MANAGEMENT = 0x0D, "Namespace Management";
        FIRMWARE_COMMIT = 0x10, "Firmware Commit";
        FIRMWARE_DOWNLOAD = 0x11, "Firmware Image Download";
        DEVICE_SELF_TEST = 0x14, "Device Self-test";
        NAMESPACE_ATTACHMENT = 0x15, "Namespace Attachment";
        KEEP_ALIVE = 0x18, "Keep Alive";
        DIRECTIVE_SEND = 0x19, "Directive Send";
        DIRECTIVE_RECEIVE = 0x1A, "Directive Receive";
        VIRTUALIZATION_MANAGEMENT = 0x1C, "Virtualization Management";
        NVME_MI_SEND = 0x1D, "NVMe-MI Send";
        NVME_MI_RECEIVE = 0x1E, "NVMe-MI Receive";
        CAPACITY_MANAGEMENT = 0x20, "Capacity Management";
        DISCOVERY_INFORMATION_MANAGEMENT = 0x21, "Discovery Information Management";
        LOCKDOWN = 0x24, "Lockdown";
        DOORBELL_BUFFER_CONFIG = 0x7C, "Doorbell Buffer Config";
        FABRICS = 0x7F, "Fabrics Commands";
        FORMAT_NVM = 0x80, "Format NVM";
        SECURITY_SEND = 0x81, "Security Send";
        SECURITY_RECEIVE = 0x82, "Security Receive";
        SANITIZE = 0x84, "Sanitize";
        GET_LBA_STATUS = 0x86, "Get LBA Status";
    }
}

open_enum! {
    /// Opcode of an I/O command of the NVM command set, and of the zoned one.
    pub struct IoOpcode(u8) {
        FLUSH = 0x00, "Flush";
        WRITE = 0x01, "Write";
        READ = 0x02, "Read";
        WRITE_UNCORRECTABLE = 0x04, "Write Uncorrectable";
        COMPARE = 0x05, "Compare";
        WRITE_ZEROES = 0x08, "Write Zeroes";
        DATASET_MANAGEMENT = 0x09, "Dataset Management";
        VERIFY = 0x0C, "Verify";
        RESERVATION_REGISTER = 0x0D, "Reservation Register";
        RESERVATION_REPORT = 0x0E, "Reservation Report";
        RESERVATION_ACQUIRE = 0x11, "Reservation Acquire";
        IO_MANAGEMENT_RECEIVE = 0x12, "I/O Management Receive";
        RESERVATION_RELEASE = 0x15, "Reservation Release";
        COPY = 0x19, "Copy";
        IO_MANAGEMENT_SEND = 0x1D, "I/O Management Send";
        ZONE_MANAGEMENT_SEND = 0x79, "Zone Management Send";
        ZONE_MANAGEMENT_RECEIVE = 0x7A, "Zone Management Receive";
        ZONE_APPEND = 0x7D, "Zone Append";
        FABRICS = 0x7F, "Fabrics Commands";
    }
}

bits! {
    /// Byte 1 of a command.
    pub struct Flags(u8) {
        /// Fused operation: 0 normal, 1 first, 2 second command, 3 reserved.
        fuse with_fuse: u8 = 0, 2;
        /// PRP or SGL for data transfer: 0 PRP, 1 SGL with a metadata buffer address, 2 SGL with a
        /// metadata SGL, 3 reserved. Fabrics hosts send 1.
        psdt with_psdt: u8 = 6, 2;
    }
}

impl Flags {
    /// Value for commands over a fabric: not fused, SGL.
    pub const SGL: Self = Self(0x40);
    /// FUSE: the first half of a fused command.
    pub const FUSED_FIRST: u8 = 1;
    /// FUSE: the second half.
    pub const FUSED_SECOND: u8 = 2;
}

wire! {
    /// Submission queue entry: a command of 64 bytes. The fields cover every byte, so any content
    /// parses and `emit` returns it unchanged. In memory they are as on the wire, so that reading one
    /// is a copy.
    #[repr(C)]
    pub struct Sqe[64] {
        /// Opcode; see [`AdminOpcode`] and [`IoOpcode`].
        opcode: u8 = 0,
        /// Fused operation and kind of data pointer.
        flags: Flags = 1,
        /// Command id: echoed in the completion, unique among the queue's outstanding commands.
        cid: u16 = 2,
        /// Namespace id. In fabrics commands byte 4 is the command type; see
        /// [`fabrics_type`](Self::fabrics_type).
        nsid: u32 = 4,
        /// Command dword 2.
        cdw2: u32 = 8,
        /// Command dword 3.
        cdw3: u32 = 12,
        /// Metadata pointer; unused over RDMA.
        mptr: u64 = 16,
        /// The data pointer, raw; see [`sgl`](Self::sgl).
        dptr: [u8; 16] = 24,
        /// Command dword 10.
        cdw10: u32 = 40,
        /// Command dword 11.
        cdw11: u32 = 44,
        /// Command dword 12.
        cdw12: u32 = 48,
        /// Command dword 13.
        cdw13: u32 = 52,
        /// Command dword 14.
        cdw14: u32 = 56,
        /// Command dword 15.
        cdw15: u32 = 60,
    }
}

/// Building commands, for a host.
impl Sqe {
    /// Admin command for no particular namespace, without data.
    pub fn admin(opcode: AdminOpcode) -> Self {
        Self { opcode: opcode.0, ..Self::default() }.with_flags(Flags::SGL).with_sgl(Sgl::NONE)
    }

    /// I/O command for namespace `nsid`, without data.
    pub fn io(opcode: IoOpcode, nsid: u32) -> Self {
        Self { opcode: opcode.0, nsid, ..Self::default() }
            .with_flags(Flags::SGL)
            .with_sgl(Sgl::NONE)
    }

    /// With command id.
    #[must_use]
    pub fn with_cid(self, cid: u16) -> Self {
        Self { cid, ..self }
    }

    /// With namespace id.
    #[must_use]
    pub fn with_nsid(self, nsid: u32) -> Self {
        Self { nsid, ..self }
    }

    /// With fused operation and kind of data pointer.
    #[must_use]
    pub fn with_flags(self, flags: Flags) -> Self {
        Self { flags, ..self }
    }

    /// With a data descriptor.
    #[must_use]
    pub fn with_sgl(self, sgl: Sgl) -> Self {
        Self { dptr: sgl.emit(), ..self }
    }

    /// With the range of a Read, Write, Compare, Verify, Write Zeroes or Write Uncorrectable: first
    /// block, and number of blocks minus one. The upper half of dword 12 (control bits) stays.
    #[must_use]
    pub fn with_range(self, slba: u64, nlb_z: u16) -> Self {
        Self {
            cdw10: slba as u32,
            cdw11: (slba >> 32) as u32,
            cdw12: self.cdw12 & 0xFFFF_0000 | u32::from(nlb_z),
            ..self
        }
    }

    /// With Force Unit Access as given.
    #[must_use]
    pub fn with_fua(self, fua: bool) -> Self {
        Self { cdw12: RwFlags(self.cdw12).with_fua(fua).0, ..self }
    }

    /// With Deallocate (of Write Zeroes) as given.
    #[must_use]
    pub fn with_deac(self, deac: bool) -> Self {
        Self { cdw12: RwFlags(self.cdw12).with_deac(deac).0, ..self }
    }

    /// Dataset Management that deallocates `nr_z + 1` ranges of namespace `nsid`.
    pub fn deallocation(nsid: u32, nr_z: u8) -> Self {
        let command = Self::io(IoOpcode::DATASET_MANAGEMENT, nsid);
        let attributes = DsmAttributes(0).with_deallocate(true).0;
        Self { cdw10: nr_z.into(), cdw11: attributes, ..command }
    }
}

/// Reading commands of either family.
impl Sqe {
    /// The opcode as that of an Admin command.
    pub const fn admin_opcode(&self) -> AdminOpcode {
        AdminOpcode(self.opcode)
    }

    /// The opcode as that of an I/O command.
    pub const fn io_opcode(&self) -> IoOpcode {
        IoOpcode(self.opcode)
    }

    /// Whether it is a fabrics command (opcode 7Fh, on any queue).
    pub const fn is_fabrics(&self) -> bool {
        self.opcode == AdminOpcode::FABRICS.0
    }

    /// Returns the data descriptor, or the status that rejects its type.
    #[inline]
    pub fn sgl(&self) -> Result<Sgl, Status> {
        Sgl::parse(&self.dptr)
    }

    /// The key to invalidate with the response, if the host requested it.
    #[inline]
    pub const fn invalidate_key(&self) -> Option<u32> {
        Sgl::invalidate_key_of(&self.dptr)
    }

    /// Checks that the command uses an SGL with a metadata address, as required over a fabric, and
    /// is not fused. If not: the status that rejects it.
    #[inline]
    pub fn check_flags(&self) -> Result<(), Status> {
        if self.flags.psdt() == Flags::SGL.psdt() && self.flags.fuse() == 0 {
            Ok(())
        } else {
            Err(Status::INVALID_FIELD.with_dnr())
        }
    }
}

/// Reading I/O commands: Read, Write, Compare, Verify, Write Zeroes, Write Uncorrectable.
impl Sqe {
    /// Starting LBA, in logical blocks.
    pub const fn slba(&self) -> u64 {
        self.cdw10 as u64 | (self.cdw11 as u64) << 32
    }

    /// Number of logical blocks, minus one.
    pub const fn nlb_z(&self) -> u16 {
        self.cdw12 as u16
    }

    /// Number of logical blocks, 1 to 65536.
    pub const fn blocks(&self) -> u32 {
        self.nlb_z() as u32 + 1
    }

    /// Force Unit Access.
    pub fn fua(&self) -> bool {
        RwFlags(self.cdw12).fua()
    }

    /// Deallocate, of Write Zeroes.
    pub fn deac(&self) -> bool {
        RwFlags(self.cdw12).deac()
    }

    /// Limited Retry.
    pub fn limited_retry(&self) -> bool {
        RwFlags(self.cdw12).limited_retry()
    }
}

/// Reading Dataset Management.
impl Sqe {
    /// Number of ranges, minus one.
    pub const fn nr_z(&self) -> u8 {
        self.cdw10 as u8
    }

    /// Number of ranges, 1 to 256.
    pub const fn ranges(&self) -> usize {
        self.nr_z() as usize + 1
    }

    /// Attribute Deallocate.
    pub fn deallocate(&self) -> bool {
        DsmAttributes(self.cdw11).deallocate()
    }
}

bits! {
    /// Dword 12 of Read, Write and their relatives.
    pub struct RwFlags(u32) {
        /// Number of logical blocks, minus one.
        nlb_z with_nlb_z: u16 = 0, 16;
        /// Directive type.
        dtype with_dtype: u8 = 20, 4;
        /// Deallocate; Write Zeroes only.
        deac with_deac: bool = 25, 1;
        /// Force Unit Access.
        fua with_fua: bool = 30, 1;
        /// Limited Retry.
        limited_retry with_limited_retry: bool = 31, 1;
    }
}

bits! {
    /// Dword 11 of Dataset Management.
    pub struct DsmAttributes(u32) {
        /// The ranges will be read as an integral dataset.
        integral_read with_integral_read: bool = 0, 1;
        /// The ranges will be written as an integral dataset.
        integral_write with_integral_write: bool = 1, 1;
        /// Deallocate the ranges.
        deallocate with_deallocate: bool = 2, 1;
    }
}

wire! {
    /// One range of Dataset Management, 16 bytes; a command has 1 to 256 of them.
    ///
    /// Source: NVM Command Set Specification 1.0, "Dataset Management command".
    pub struct DsmRange[16] {
        /// Context attributes: hints.
        attributes: u32 = 0,
        /// Length in logical blocks; not zero-based.
        blocks: u32 = 4,
        /// Starting LBA.
        slba: u64 = 8,
    }
}

impl DsmRange {
    /// The whole ranges in `data`, in order; a partial one at the end is ignored.
    pub fn parse_all(data: &[u8]) -> impl Iterator<Item = Self> + '_ {
        data.as_chunks().0.iter().map(Self::parse)
    }
}

#[cfg(test)]
mod tests {
    use crate::sqe::*;
    use proptest::prelude::*;

    #[test]
    fn command_builders_and_accessors_agree() {
        let write = Sqe::io(IoOpcode::WRITE, 7)
            .with_cid(0x1234)
            .with_fua(true)
            .with_range(0x1_2345_6789, 0xFFFF)
            .with_sgl(Sgl::in_capsule(0, 4096));
        assert_eq!((write.slba(), write.nlb_z(), write.blocks()), (0x1_2345_6789, 0xFFFF, 65536));
        assert!(write.fua() && !write.deac() && !write.limited_retry());
        assert_eq!(write.cdw12, 0x4000_FFFF);
        assert_eq!(write.sgl(), Ok(Sgl::in_capsule(0, 4096)));
        assert_eq!(write.check_flags(), Ok(()));
        assert_eq!(write.emit()[..8], [1, 0x40, 0x34, 0x12, 7, 0, 0, 0]);

        let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_deac(true);
        assert_eq!(zeroes.cdw12, 0x0200_0000);
        let dsm = Sqe::deallocation(1, 255);
        assert_eq!((dsm.ranges(), dsm.deallocate()), (256, true));
        assert!(Sqe::admin(AdminOpcode::FABRICS).is_fabrics());
    }

    #[test]
    fn fused_commands_and_other_data_pointers_are_refused() {
        for flags in 0..=0xFF {
            let command = Sqe::default().with_flags(Flags(flags));
            let accepted = flags & 0b1100_0011 == 0x40;
            assert_eq!(command.check_flags().is_ok(), accepted, "{flags:#x}");
        }
    }

    #[test]
    fn incomplete_dataset_management_ranges_are_ignored() {
        let mut data = [0; 40];
        data[4] = 8;
        data[16 + 8] = 9;
        let expected = [
            DsmRange { attributes: 0, blocks: 8, slba: 0 },
            DsmRange { attributes: 0, blocks: 0, slba: 9 },
        ];
        assert!(DsmRange::parse_all(&data).eq(expected));
        assert_eq!(DsmRange::parse_all(&data[..15]).count(), 0);
    }

    proptest! {
        #[test]
        fn every_command_round_trips(bytes: [u8; 64]) {
            prop_assert_eq!(Sqe::parse(&bytes).emit(), bytes);
        }

        #[test]
        fn every_dataset_management_range_round_trips(bytes: [u8; 16]) {
            prop_assert_eq!(DsmRange::parse(&bytes).emit(), bytes);
        }

        #[test]
        fn readers_never_panic(bytes: [u8; 64]) {
            let command = Sqe::parse(&bytes);
            prop_assert!(command.blocks() >= 1 && command.blocks() <= 65536);
            prop_assert!(command.ranges() >= 1 && command.ranges() <= 256);
            prop_assert_eq!(command.slba() as u32, command.cdw10);
            let printed = format!("{command:?}");
            prop_assert!(printed.contains("cdw15"));
        }
    }
}
