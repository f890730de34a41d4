//! virtio-blk: the configuration space, and the header of a request.

use crate::nbd::Errno;

/// Bytes of the configuration space.
pub const CONFIG_BYTES: usize = 60;
/// Bytes of the header of a request.
pub const HEADER_BYTES: usize = 16;
/// Bytes of the range of a discard or of zeroes.
pub const RANGE_BYTES: usize = 16;
/// Bytes of the answer to [`Kind::Id`].
pub const ID_BYTES: usize = 20;
/// The unit of all positions.
pub const SECTOR_BYTES: u64 = 512;

/// Features of the device.
pub mod feature {
    /// `seg_max` is valid.
    pub const SEG_MAX: u64 = 1 << 2;
    /// The device is read only.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` is valid.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a cache, and a command that flushes it.
    pub const FLUSH: u64 = 1 << 9;
    /// The topology is valid.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// Several queues.
    pub const MQ: u64 = 1 << 12;
    /// Blocks can be discarded.
    pub const DISCARD: u64 = 1 << 13;
    /// Blocks can be written with zeros.
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// The configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Config {
    /// Size in sectors.
    pub capacity: u64,
    /// Descriptors with data of one request.
    pub seg_max: u32,
    /// Bytes of a block.
    pub blk_size: u32,
    /// Preferred size of reads and writes in blocks.
    pub opt_io_size: u32,
    /// Queues.
    pub num_queues: u16,
    /// Sectors of one discard.
    pub max_discard_sectors: u32,
    /// Sectors of one write of zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Sectors that a discard begins at a multiple of.
    pub discard_sector_alignment: u32,
    /// A write of zeroes may deallocate.
    pub write_zeroes_may_unmap: bool,
}

impl Config {
    /// Returns its bytes.
    pub fn emit(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.capacity.to_le_bytes());
        put(12, &self.seg_max.to_le_bytes());
        put(20, &self.blk_size.to_le_bytes());
        put(26, &1u16.to_le_bytes());
        put(28, &self.opt_io_size.to_le_bytes());
        put(34, &self.num_queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &self.discard_sector_alignment.to_le_bytes());
        put(48, &self.max_write_zeroes_sectors.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[u8::from(self.write_zeroes_may_unmap)]);
        bytes
    }
}

/// What is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Read.
    In,
    /// Write.
    Out,
    /// Flush.
    Flush,
    /// The serial number.
    Id,
    /// Discard.
    Discard,
    /// Write zeroes.
    WriteZeroes,
    /// Anything else.
    Unknown,
}

/// The header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What is requested.
    pub kind: Kind,
    /// Where.
    pub sector: u64,
}

impl Header {
    /// Reads a header.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Header {
        let (kind, rest) = bytes.split_at(8);
        let kind = match u32::from_le_bytes([kind[0], kind[1], kind[2], kind[3]]) {
            0 => Kind::In,
            1 => Kind::Out,
            4 => Kind::Flush,
            8 => Kind::Id,
            11 => Kind::Discard,
            13 => Kind::WriteZeroes,
            _ => Kind::Unknown,
        };
        let sector = rest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Header { kind, sector }
    }
}

/// The range of a discard or of zeroes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// Where it begins.
    pub sector: u64,
    /// Its length.
    pub sectors: u32,
    /// Blocks may be deallocated.
    pub unmap: bool,
}

impl Range {
    /// Reads a range; `None` with flags that are reserved.
    pub fn parse(bytes: &[u8; RANGE_BYTES]) -> Option<Range> {
        let u32_at = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let flags = u32_at(12)?;
        (flags & !1 == 0).then_some(Range {
            sector: u64::from_le_bytes(*bytes.first_chunk()?),
            sectors: u32_at(8)?,
            unmap: flags & 1 != 0,
        })
    }
}

/// The last byte of a request.
pub fn status(outcome: Result<(), Errno>) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(Errno::NotSupported) => 2,
        Err(_) => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_space_is_that_of_virtio() {
        let config = Config {
            capacity: 0x0102_0304_0506_0708,
            seg_max: 126,
            blk_size: 4096,
            opt_io_size: 2,
            num_queues: 16,
            max_discard_sectors: 0x40_0000,
            max_write_zeroes_sectors: 0x20_0000,
            discard_sector_alignment: 8,
            write_zeroes_may_unmap: true,
        };
        let mut expected = vec![8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 126, 0, 0, 0, 0, 0, 0, 0];
        expected.extend([0, 16, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0, 16, 0]);
        expected.extend([0, 0, 0x40, 0, 1, 0, 0, 0, 8, 0, 0, 0]);
        expected.extend([0, 0, 0x20, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(config.emit()[..], expected[..]);
    }

    #[test]
    fn requests_are_read_field_by_field() {
        let mut bytes = [0; HEADER_BYTES];
        (bytes[0], bytes[9]) = (1, 2);
        assert_eq!(Header::parse(&bytes), Header { kind: Kind::Out, sector: 512 });
        bytes[3] = 1;
        assert_eq!(Header::parse(&bytes).kind, Kind::Unknown);
        let mut range = [0; RANGE_BYTES];
        (range[0], range[8], range[12]) = (8, 16, 1);
        assert_eq!(Range::parse(&range), Some(Range { sector: 8, sectors: 16, unmap: true }));
        range[12] = 2;
        assert_eq!(Range::parse(&range), None);
    }
}
