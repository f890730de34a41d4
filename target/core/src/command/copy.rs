//! Copy: copies blocks within a namespace, without the host.
//!
//! All data that a command copies fit one buffer, so they are loaded completely before any are stored: ranges
//! may overlap their destination, and a command that fails has changed nothing.
//!
//! Source: NVM Command Set Specification 1.0, "Copy command".

use nvme::copy::{Copy, CopyRange};
use nvme::{Sqe, Status};

use super::{CapsuleInfo, Plan, source};
use crate::subsystem::bad_blocks::BadBlocks;
use crate::subsystem::{Extent, Namespace};

/// Bytes of the longer descriptor.
const LONGEST_BYTES: u32 = 40;

/// Supported descriptor formats, one bit each (CDFS).
pub const FORMATS: u16 = 0b11;

/// Returns how many blocks one command, and one range of it, may copy (MCL, MSSRL): as many as fit
/// a buffer.
pub fn most_blocks(mdts_bytes: u32, block_shift: u8) -> u16 {
    (mdts_bytes >> block_shift).try_into().unwrap_or(u16::MAX)
}

/// Returns how many source ranges one command may have, minus one (MSRC): as many as the field can
/// hold, unless their descriptors exceed one transfer.
pub fn msrc_z(mdts_bytes: u32) -> u8 {
    (mdts_bytes / LONGEST_BYTES).saturating_sub(1).try_into().unwrap_or(u8::MAX)
}

/// Decides on a Copy command, without its ranges, which have not arrived yet. The namespace is
/// writable.
///
/// # Errors
/// Invalid Field for an unsupported format, Command Size Limit Exceeded for too many ranges, and
/// errors of the SGL.
pub fn plan(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    let copy = Copy::parse(sqe);
    let range_bytes = copy.range_bytes().ok_or(Status::INVALID_FIELD.with_dnr())?;
    let nr = copy.ranges();
    if copy.flags.nr_z() > msrc_z(received.mdts_bytes) {
        return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
    }
    let from = source(sqe, received, nr * range_bytes, false)?;
    let blocks = most_blocks(received.mdts_bytes, namespace.block_shift);
    let job = Job {
        extent: namespace.extent(),
        sdlba: copy.sdlba,
        nr,
        range_bytes,
        most_blocks: blocks.into(),
        fua: copy.flags.fua(),
    };
    Ok(Plan::Copy { job, from })
}

/// Source and destination of a Copy command, fixed when it was checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Job {
    /// The blocks of the namespace.
    pub extent: Extent,
    /// First block of the destination.
    pub sdlba: u64,
    /// How many ranges, 1 to 256.
    pub nr: u32,
    /// Bytes of one descriptor: 32 or 40.
    pub range_bytes: u32,
    /// Blocks of one range and of all together, at most.
    pub most_blocks: u32,
    /// Complete only when it is durable.
    pub fua: bool,
}

impl Job {
    /// Returns the bytes of the buffer that it needs: as many as may be copied, because the actual
    /// number is in the ranges.
    pub fn room_bytes(&self) -> u32 {
        self.most_blocks << self.extent.block_shift
    }

    /// Checks all ranges and the destination, before anything is loaded.
    ///
    /// # Errors
    /// Command Size Limit Exceeded, LBA Out of Range.
    pub fn check(&self, data: &[u8]) -> Result<(), Status> {
        let mut blocks = 0;
        for range in self.ranges(data) {
            // Each is at most 65536, and there are at most 256.
            blocks += range.blocks();
            if range.blocks() > self.most_blocks || blocks > self.most_blocks {
                return Err(Status::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr());
            }
            self.extent.range(range.slba, range.blocks().into())?;
        }
        self.extent.range(self.sdlba, blocks.into()).map(drop)
    }

    /// Returns the byte offset and length of a range, counted from 0, and its offset in the buffer;
    /// none after the last. The ranges have been checked.
    ///
    /// # Errors
    /// LBA Out of Range.
    pub fn load(&self, data: &[u8], index: u32) -> Result<Option<(u64, u32, u32)>, Status> {
        let before = self.ranges(data).take(index as usize).map(|range| range.blocks());
        let skip = before.sum::<u32>() << self.extent.block_shift;
        let Some(range) = self.ranges(data).nth(index as usize) else { return Ok(None) };
        let (at, _) = self.extent.range(range.slba, range.blocks().into())?;
        Ok(Some((at, range.blocks() << self.extent.block_shift, skip)))
    }

    /// Returns the first block of the ranges that cannot be read. The ranges have been checked.
    pub fn first_marked(&self, data: &[u8], marks: &BadBlocks) -> Option<u64> {
        self.ranges(data).find_map(|range| {
            let (at, len) = self.extent.range(range.slba, range.blocks().into()).ok()?;
            marks.first(at, len).map(|at| at >> self.extent.block_shift)
        })
    }

    /// Returns the byte offset and length of the destination.
    ///
    /// # Errors
    /// LBA Out of Range.
    pub fn store(&self, data: &[u8]) -> Result<(u64, u32), Status> {
        let blocks = self.ranges(data).map(|range| range.blocks()).sum::<u32>();
        let (at, _) = self.extent.range(self.sdlba, blocks.into())?;
        Ok((at, blocks << self.extent.block_shift))
    }

    fn ranges<'a>(&self, data: &'a [u8]) -> impl Iterator<Item = CopyRange> + use<'a> {
        CopyRange::parse_all(data, self.range_bytes).take(self.nr as usize)
    }
}

#[cfg(test)]
mod tests {
    use nvme::Sgl;
    use nvme::copy::CopyFlags;
    use proptest::prelude::*;
    use rdma::Remote;

    use crate::command::Source;
    use crate::command::copy::*;
    use crate::subsystem::testing::sample;

    const RECEIVED: CapsuleInfo =
        CapsuleInfo { tail_bytes: 4096, in_capsule_bytes: 4096, mdts_bytes: 1 << 20 };

    /// First block and number of blocks.
    type Ranges<'a> = &'a [(u64, u32)];

    fn ask(copy: Copy, bytes: u32) -> Result<Plan, Status> {
        let sgl = Sgl::keyed(0x1000, bytes, 7, true).unwrap();
        plan(&copy.emit(1, sgl), &sample().namespaces[0], RECEIVED)
    }

    fn copy(nr_z: u8, format: u8) -> Copy {
        Copy { sdlba: 100, flags: CopyFlags(0).with_nr_z(nr_z).with_format(format) }
    }

    fn job(nr_z: u8, format: u8) -> Job {
        match ask(copy(nr_z, format), 1 << 20) {
            Ok(Plan::Copy { job, .. }) => job,
            other => panic!("{other:?}"),
        }
    }

    fn ranges(of: Ranges<'_>, range_bytes: usize) -> Vec<u8> {
        of.iter()
            .flat_map(|&(slba, blocks)| {
                let mut bytes = vec![0; range_bytes];
                let range = CopyRange { slba, nlb_z: (blocks - 1) as u16 };
                bytes[..32].copy_from_slice(&range.emit());
                bytes
            })
            .collect()
    }

    #[test]
    fn copy_accepts_descriptor_formats_0_and_1_only() {
        for (format, bytes) in [(0, 32), (1, 40)] {
            let from = |len| Source::Host(Remote { addr: 0x1000, key: 7, len });
            for (nr_z, given) in [(0, bytes), (0, 4096), (255, 256 * bytes)] {
                let expected = Job {
                    extent: sample().namespaces[0].extent(),
                    sdlba: 100,
                    nr: u32::from(nr_z) + 1,
                    range_bytes: bytes,
                    most_blocks: 256,
                    fua: false,
                };
                let len = expected.nr * bytes;
                let expected = Plan::Copy { job: expected, from: from(len) };
                assert_eq!(ask(copy(nr_z, format), given), Ok(expected));
            }
            let status = ask(copy(0, format), bytes - 1).unwrap_err();
            assert!(status.is(Status::DATA_SGL_LENGTH_INVALID) && status.dnr());
        }
        let small = CapsuleInfo { mdts_bytes: 8192, ..RECEIVED };
        let sgl = Sgl::keyed(0x1000, 8192, 7, true).unwrap();
        let with =
            |nr_z, format| plan(&copy(nr_z, format).emit(1, sgl), &sample().namespaces[0], small);
        assert_eq!(msrc_z(8192), 203);
        assert!(with(203, 1).is_ok() && with(203, 0).is_ok());
        assert!(with(204, 0).unwrap_err().is(Status::COMMAND_SIZE_LIMIT_EXCEEDED));
        for format in 2..16 {
            let status = ask(copy(0, format), 4096).unwrap_err();
            assert!(status.is(Status::INVALID_FIELD) && status.dnr(), "{format}");
        }
    }

    #[test]
    fn limits_and_ends_are_checked_before_anything_is_loaded() {
        let end = 1 << 20;
        let limit = Status::COMMAND_SIZE_LIMIT_EXCEEDED;
        let beyond = Status::LBA_OUT_OF_RANGE;
        let cases: [(Ranges<'_>, Option<Status>); 9] = [
            (&[(0, 256)], None),
            (&[(0, 257)], Some(limit)),
            (&[(0, 128), (0, 128)], None),
            (&[(0, 128), (0, 129)], Some(limit)),
            (&[(0, 65536), (0, 65536)], Some(limit)),
            (&[(end - 1, 1)], None),
            (&[(end, 1)], Some(beyond)),
            (&[(0, 1), (end - 1, 2)], Some(beyond)),
            (&[(u64::MAX, 2)], Some(beyond)),
        ];
        for (of, refused) in cases {
            for (format, bytes) in [(0, 32), (1, 40)] {
                let job = job((of.len() - 1) as u8, format);
                let got = job.check(&ranges(of, bytes));
                let expected = refused.map_or(Ok(()), |status| Err(status.with_dnr()));
                assert_eq!(got, expected, "{of:?}");
            }
        }
        let last = Job { sdlba: end - 2, ..job(1, 0) };
        assert_eq!(last.check(&ranges(&[(5, 1), (7, 1)], 32)), Ok(()));
        assert_eq!(last.check(&ranges(&[(5, 1), (7, 2)], 32)), Err(beyond.with_dnr()));
    }

    #[test]
    fn copy_ranges_are_loaded_contiguously_and_stored_as_one_range() {
        let job = job(2, 1);
        let data = ranges(&[(9, 1), (3, 4), (5, 2)], 40);
        assert_eq!(job.check(&data), Ok(()));
        assert_eq!(job.load(&data, 0), Ok(Some((9 << 12, 1 << 12, 0))));
        assert_eq!(job.load(&data, 1), Ok(Some((3 << 12, 4 << 12, 1 << 12))));
        assert_eq!(job.load(&data, 2), Ok(Some((5 << 12, 2 << 12, 5 << 12))));
        assert_eq!(job.load(&data, 3), Ok(None));
        assert_eq!(job.store(&data), Ok((100 << 12, 7 << 12)));
        assert_eq!(job.room_bytes(), 1 << 20);
    }

    proptest! {
        #[test]
        fn valid_copy_commands_fit_the_buffer_and_the_namespace(
            data in prop::collection::vec(any::<u8>(), 0..600),
            small in any::<bool>(), nr_z: u8, format in 0u8..2, sdlba in 0u64..2 << 20
        ) {
            let mut data = data;
            if small {
                // Ranges that can be valid.
                for bytes in data.chunks_mut(if format == 0 { 32 } else { 40 }) {
                    if bytes.len() > 18 {
                        bytes[10..16].fill(0);
                        bytes[16] &= 31;
                        bytes[17] = 0;
                    }
                }
            }
            let job = Job { sdlba, ..job(nr_z, format) };
            if job.check(&data).is_ok() {
                let size = job.extent.blocks << job.extent.block_shift;
                let mut index = 0;
                while let Some((at, len, skip)) = job.load(&data, index).unwrap() {
                    prop_assert!(at + u64::from(len) <= size && skip + len <= job.room_bytes());
                    index += 1;
                }
                let (at, len) = job.store(&data).unwrap();
                prop_assert!(at + u64::from(len) <= size && len <= job.room_bytes());
            }
        }
    }
}
