//! The Copy command: its dwords, and the source ranges in its data.
//!
//! Source: NVM Command Set Specification 1.0, "Copy command".

use crate::{IoOpcode, Sgl, Sqe};

bits! {
    /// Dword 12 of Copy.
    pub struct CopyFlags(u32) {
        /// Number of source ranges, minus one.
        nr_z with_nr_z: u8 = 0, 8;
        /// Format of their descriptors.
        format with_format: u8 = 8, 4;
        /// Directive type of the writes.
        dtype with_dtype: u8 = 20, 4;
        /// Force Unit Access, of the writes.
        fua with_fua: bool = 30, 1;
        /// Limited Retry.
        limited_retry with_limited_retry: bool = 31, 1;
    }
}

wire! {
    /// Common part of both formats of a source range; tags of protection information follow.
    pub struct CopyRange[32] {
        /// Starting LBA.
        slba: u64 = 8,
        /// Number of logical blocks, minus one.
        nlb_z: u16 = 16,
    }
}

/// Fields of a Copy command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Copy {
    /// First block of the destination.
    pub sdlba: u64,
    /// Everything else.
    pub flags: CopyFlags,
}

impl Copy {
    /// Reads dwords 10, 11 and 12.
    pub const fn parse(command: &Sqe) -> Self {
        Self { sdlba: command.slba(), flags: CopyFlags(command.cdw12) }
    }

    /// Returns the command, with its ranges at `data`.
    pub fn emit(&self, nsid: u32, data: Sgl) -> Sqe {
        let command = Sqe::io(IoOpcode::COPY, nsid).with_range(self.sdlba, 0).with_sgl(data);
        Sqe { cdw12: self.flags.0, ..command }
    }

    /// Number of source ranges, 1 to 256.
    pub fn ranges(&self) -> u32 {
        u32::from(self.flags.nr_z()) + 1
    }

    /// Bytes of one descriptor; `None` for an undefined format.
    pub fn range_bytes(&self) -> Option<u32> {
        match self.flags.format() {
            0 => Some(32),
            1 => Some(40),
            _ => None,
        }
    }
}

impl CopyRange {
    /// Number of logical blocks, 1 to 65536.
    pub const fn blocks(&self) -> u32 {
        self.nlb_z as u32 + 1
    }

    /// The whole descriptors of `range_bytes` each in `data`, in order.
    pub fn parse_all(data: &[u8], range_bytes: u32) -> impl Iterator<Item = Self> + '_ {
        let descriptors = data.chunks_exact((range_bytes as usize).max(Self::BYTES));
        descriptors.filter_map(|bytes| bytes.first_chunk().map(Self::parse))
    }
}

#[cfg(test)]
mod tests {
    use crate::copy::*;
    use proptest::prelude::*;

    #[test]
    fn copy_command_encodes_destination_ranges_and_format() {
        let flags = CopyFlags(0).with_nr_z(2).with_format(1).with_fua(true);
        let copy = Copy { sdlba: 0x1_0000_0002, flags };
        let sqe = copy.emit(7, Sgl::NONE);
        assert_eq!((sqe.opcode, sqe.nsid, sqe.cdw10, sqe.cdw11), (0x19, 7, 2, 1));
        assert_eq!(sqe.cdw12, 0x4000_0102);
        assert_eq!(Copy::parse(&sqe), copy);
        assert_eq!((copy.ranges(), copy.range_bytes()), (3, Some(40)));
        let bytes = |format| {
            let flags = CopyFlags(0).with_format(format);
            Copy { flags, ..copy }.range_bytes()
        };
        assert_eq!([0, 1, 2, 3, 15].map(bytes), [Some(32), Some(40), None, None, None]);
    }

    #[test]
    fn descriptors_of_either_format_begin_alike() {
        let first = CopyRange { slba: 5, nlb_z: 0 };
        let second = CopyRange { slba: u64::MAX, nlb_z: u16::MAX };
        for range_bytes in [32, 40] {
            let mut data = vec![0xFF; 2 * range_bytes as usize + 31];
            data[..32].copy_from_slice(&first.emit());
            data[range_bytes as usize..][..32].copy_from_slice(&second.emit());
            let found: Vec<_> = CopyRange::parse_all(&data, range_bytes).collect();
            assert_eq!(found, [first, second], "{range_bytes}");
        }
        assert_eq!((first.blocks(), second.blocks()), (1, 65536));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_parse_to_a_bounded_number_of_ranges(data in prop::collection::vec(any::<u8>(), 0..200), size: u32) {
            prop_assert!(CopyRange::parse_all(&data, size).count() <= data.len() / 32);
        }
    }
}
