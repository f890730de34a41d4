//! The commands of the kernel's ublk driver as a codec: layouts and numbers, no system call.
//!
//! Source: Linux, `include/uapi/linux/ublk_cmd.h` (6.5 and later) and `Documentation/block/ublk.rst`.
//! Integers have the byte order of the machine.
//!
//! A program that serves a device adds it with [`control`] commands at `/dev/ublk-control`, and takes its
//! requests from `/dev/ublkcN`: a [`io::FETCH_REQ`] for each tag completes when the kernel has a
//! request, whose [`Descriptor`] is in memory that is mapped. [`io::COMMIT_AND_FETCH_REQ`] returns
//! the result and waits for the next one. Data are copied by `pread` and `pwrite` at
//! [`RequestId::data_offset`].

use crate::nbd::{Command, Errno, Kind, command_flag};

/// The device of control commands.
pub const CONTROL_PATH: &str = "/dev/ublk-control";
/// Bytes of a sector, the unit of the kernel.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes of a control command.
pub const CONTROL_BYTES: usize = 32;
/// Bytes of a command for requests.
pub const IO_BYTES: usize = 16;
/// Bytes of [`DeviceInfo`].
pub const DEVICE_INFO_BYTES: usize = 64;
/// Bytes of [`Parameters`], with those of discards.
pub const PARAMETERS_BYTES: usize = 60;
/// Bytes of a [`Descriptor`].
pub const DESCRIPTOR_BYTES: usize = 24;
/// Entries of a queue at most (`UBLK_MAX_QUEUE_DEPTH`): the distance of the descriptors of two queues.
pub const QUEUE_ENTRIES_MAX: usize = 4096;
/// Result of a command for requests when there will be no more: `-ENODEV`.
pub const ABORTED: i32 = -19;
/// The longest discard or write of zeroes, in bytes.
const MOST_RANGE_BYTES: u64 = 2 << 30;

/// Returns a command number, as `_IOR` (2) or `_IOWR` (3) does on most architectures.
const fn number(direction: u32, number: u32, bytes: usize) -> u32 {
    direction << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

/// Control commands (`UBLK_U_CMD_*`).
pub mod control {
    use super::{CONTROL_BYTES, number};

    /// Returns the [`DeviceInfo`](super::DeviceInfo).
    pub const GET_DEV_INFO: u32 = number(2, 0x02, CONTROL_BYTES);
    /// Adds a device.
    pub const ADD_DEV: u32 = number(3, 0x04, CONTROL_BYTES);
    /// Removes a stopped device.
    pub const DEL_DEV: u32 = number(3, 0x05, CONTROL_BYTES);
    /// Starts a device all of whose tags are fetched.
    pub const START_DEV: u32 = number(3, 0x06, CONTROL_BYTES);
    /// Stops a device.
    pub const STOP_DEV: u32 = number(3, 0x07, CONTROL_BYTES);
    /// Sets the [`Parameters`](super::Parameters).
    pub const SET_PARAMS: u32 = number(3, 0x08, CONTROL_BYTES);
    /// Returns the [`Parameters`](super::Parameters).
    pub const GET_PARAMS: u32 = number(2, 0x09, CONTROL_BYTES);
    /// Begins to serve a device whose process has ended.
    pub const START_USER_RECOVERY: u32 = number(3, 0x10, CONTROL_BYTES);
    /// Continues the device.
    pub const END_USER_RECOVERY: u32 = number(3, 0x11, CONTROL_BYTES);
    /// Returns the [`feature`](super::feature)s of the driver.
    pub const GET_FEATURES: u32 = number(2, 0x13, CONTROL_BYTES);
    /// Sets another size.
    pub const UPDATE_SIZE: u32 = number(3, 0x15, CONTROL_BYTES);
}

/// Commands for requests (`UBLK_U_IO_*`).
pub mod io {
    use super::{IO_BYTES, number};

    /// Waits for a request.
    pub const FETCH_REQ: u32 = number(3, 0x20, IO_BYTES);
    /// Returns the result of a request, and waits for the next one.
    pub const COMMIT_AND_FETCH_REQ: u32 = number(3, 0x21, IO_BYTES);
}

/// Features of driver and device (`UBLK_F_*`).
pub mod feature {
    /// A device survives its process, and another one can serve it.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// The requests that the process had are repeated.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have the numbers of [`control`](super::control).
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// Data are read and written at `/dev/ublkcN`.
    pub const USER_COPY: u64 = 1 << 7;
    /// The size can be changed.
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// States of a device (`UBLK_S_DEV_*`).
pub mod state {
    /// It is not started, or stopped.
    pub const DEAD: u16 = 0;
    /// It is served.
    pub const LIVE: u16 = 1;
    /// Its process has ended; requests wait.
    pub const QUIESCED: u16 = 2;
}

/// Attributes of a device (`UBLK_ATTR_*`).
mod attribute {
    pub(super) const READ_ONLY: u32 = 1;
    pub(super) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(super) const FUA: u32 = 1 << 3;
}

/// A control command (`struct ublksrv_ctrl_cmd`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Control {
    /// The device; `u32::MAX`: the next free number.
    pub device: u32,
    /// Process, size, or 0.
    pub data: u64,
}

impl Control {
    /// Returns its bytes, with the address and the length of the data.
    pub fn emit(&self, address: u64, len: u16) -> [u8; CONTROL_BYTES] {
        let mut bytes = [0; CONTROL_BYTES];
        bytes[0..4].copy_from_slice(&self.device.to_ne_bytes());
        // No queue.
        bytes[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
        bytes[6..8].copy_from_slice(&len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes
    }
}

/// A device (`struct ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceInfo {
    /// Number of queues.
    pub queues: u16,
    /// Entries of a queue.
    pub entries: u16,
    /// One of [`state`].
    pub state: u16,
    /// The longest read or write, in bytes.
    pub most_bytes: u32,
    /// Its number.
    pub device: u32,
    /// The process that serves it.
    pub process: i32,
    /// Bits of [`feature`].
    pub features: u64,
    /// The kernel keeps it for the process that serves the device.
    pub identity: u64,
}

impl DeviceInfo {
    /// Returns its bytes.
    pub fn emit(&self) -> [u8; DEVICE_INFO_BYTES] {
        let mut bytes = [0; DEVICE_INFO_BYTES];
        bytes[0..2].copy_from_slice(&self.queues.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.entries.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.most_bytes.to_ne_bytes());
        bytes[12..16].copy_from_slice(&self.device.to_ne_bytes());
        bytes[16..20].copy_from_slice(&self.process.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.features.to_ne_bytes());
        bytes[32..40].copy_from_slice(&self.identity.to_ne_bytes());
        bytes
    }

    /// Reads them.
    pub fn parse(bytes: &[u8; DEVICE_INFO_BYTES]) -> DeviceInfo {
        let u16_at = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        DeviceInfo {
            queues: u16_at(0),
            entries: u16_at(2),
            state: u16_at(4),
            most_bytes: u32_at(bytes, 8),
            device: u32_at(bytes, 12),
            process: u32_at(bytes, 16) as i32,
            features: u64_at(bytes, 24),
            identity: u64_at(bytes, 32),
        }
    }
}

/// What the block layer has to know of a device (`struct ublk_params`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Parameters {
    /// Bytes of a block, a power of two.
    pub block_bytes: u32,
    /// Preferred bytes of a read or write, a power of two.
    pub preferred_bytes: u32,
    /// The longest read or write, in bytes.
    pub most_bytes: u32,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Blocks can be discarded.
    pub can_discard: bool,
    /// Blocks can be written with zeroes without data.
    pub can_write_zeroes: bool,
}

impl Parameters {
    /// Returns their bytes.
    pub fn emit(&self) -> [u8; PARAMETERS_BYTES] {
        let mut bytes = [0; PARAMETERS_BYTES];
        let mut put =
            |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        let sectors = (MOST_RANGE_BYTES / SECTOR_BYTES) as u32;
        let with = |is_so: bool, value: u32| if is_so { value } else { 0 };
        let has_ranges = self.can_discard || self.can_write_zeroes;
        put(0, PARAMETERS_BYTES as u32);
        // Basic, and discard.
        put(4, 1 | with(has_ranges, 2));
        let read_only = with(self.is_read_only, attribute::READ_ONLY);
        put(8, attribute::VOLATILE_CACHE | attribute::FUA | read_only);
        put(16, (u64::from(self.most_bytes) / SECTOR_BYTES) as u32);
        put(44, self.block_bytes);
        put(48, with(self.can_discard, sectors));
        put(52, with(self.can_write_zeroes, sectors));
        let shift = self.block_bytes.trailing_zeros() as u8;
        let preferred = self.preferred_bytes.max(self.block_bytes).trailing_zeros() as u8;
        bytes[12..16].copy_from_slice(&[shift, shift, preferred, shift]);
        let sectors = self.size_bytes / SECTOR_BYTES;
        bytes[24..32].copy_from_slice(&sectors.to_ne_bytes());
        // Ranges of a discard.
        bytes[56..58].copy_from_slice(&1u16.to_ne_bytes());
        bytes
    }

    /// Returns the bytes of a block and the size in bytes that they have.
    pub fn parse_size(bytes: &[u8; PARAMETERS_BYTES]) -> (u32, u64) {
        let block_bytes = 1u32.checked_shl(bytes[12].into()).unwrap_or(0);
        (block_bytes, u64_at(bytes, 24).saturating_mul(SECTOR_BYTES))
    }
}

/// Which request of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestId {
    /// Its queue.
    pub queue: u16,
    /// Its entry there.
    pub tag: u16,
}

impl RequestId {
    /// Returns it as a number below 2^32.
    pub fn number(self) -> u64 {
        u64::from(self.queue) << 16 | u64::from(self.tag)
    }

    /// The id with this number.
    pub fn of(number: u64) -> RequestId {
        RequestId { queue: (number >> 16) as u16, tag: number as u16 }
    }

    /// Returns a command for it (`struct ublksrv_io_cmd`).
    pub fn emit(self, result: i32) -> [u8; IO_BYTES] {
        let mut bytes = [0; IO_BYTES];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&result.to_ne_bytes());
        bytes
    }

    /// Returns the offset of a byte of its data at `/dev/ublkcN`.
    pub fn data_offset(self, byte: u32) -> u64 {
        const START: u64 = 0x8000_0000;
        START + (u64::from(self.queue) << 41 | u64::from(self.tag) << 25 | u64::from(byte))
    }
}

/// A request (`struct ublksrv_io_desc`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    flags: u32,
    sectors: u32,
    first_sector: u64,
}

impl Descriptor {
    /// Reads its bytes.
    pub fn parse(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        Descriptor {
            flags: u32_at(bytes, 0),
            sectors: u32_at(bytes, 4),
            first_sector: u64_at(bytes, 8),
        }
    }

    /// Returns what it requests, with the number of `id` as its cookie.
    ///
    /// # Errors
    /// There is no such command, or it is too long.
    pub fn command(&self, id: RequestId) -> Result<Command, Errno> {
        const FUA: u32 = 1 << 13;
        const NO_UNMAP: u32 = 1 << 15;
        let cookie = id.number();
        let kind = match self.flags & 0xff {
            0 => Kind::Read,
            1 => Kind::Write,
            2 => {
                return Ok(Command { kind: Kind::Flush, flags: 0, cookie, offset: 0, len: 0 });
            }
            3 => Kind::Trim,
            5 => Kind::WriteZeroes,
            _ => return Err(Errno::NotSupported),
        };
        let bytes = u64::from(self.sectors) * SECTOR_BYTES;
        let len = u32::try_from(bytes).map_err(|_| Errno::Invalid)?;
        let offset = self.first_sector.checked_mul(SECTOR_BYTES).ok_or(Errno::Invalid)?;
        let with = |bit: u32, flag: u16| if self.flags & bit != 0 { flag } else { 0 };
        let fua = if kind == Kind::Read { 0 } else { with(FUA, command_flag::FUA) };
        let keeps = match kind {
            Kind::WriteZeroes => with(NO_UNMAP, command_flag::NO_HOLE),
            _ => 0,
        };
        Ok(Command { kind, flags: fua | keeps, cookie, offset, len })
    }
}

/// Returns the result of a request: bytes, or a negative errno.
pub fn result(command: &Command, outcome: Result<(), Errno>) -> i32 {
    match (outcome, command.kind) {
        (Err(errno), _) => -(errno as u32 as i32),
        (Ok(()), Kind::Read | Kind::Write) => i32::try_from(command.len).unwrap_or(i32::MAX),
        (Ok(()), _) => 0,
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |four| u32::from_ne_bytes(*four))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |eight| u64::from_ne_bytes(*eight))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by a C program with `linux/ublk_cmd.h` of 6.12 on x86-64.
    #[test]
    fn constants_match_the_kernel_header() {
        assert_eq!(control::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(control::ADD_DEV, 0xc020_7504);
        assert_eq!(control::SET_PARAMS, 0xc020_7508);
        assert_eq!(control::GET_FEATURES, 0x8020_7513);
        assert_eq!(io::FETCH_REQ, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH_REQ, 0xc010_7521);
        let id = RequestId { queue: 3, tag: 5 };
        assert_eq!(id.data_offset(4096), 0x600_8a00_1000);
        assert_eq!(RequestId::of(id.number()), id);
    }

    #[test]
    fn device_info_and_size_round_trip() {
        let info = DeviceInfo {
            queues: 4,
            entries: 128,
            state: state::QUIESCED,
            most_bytes: 1 << 20,
            device: 7,
            process: -1,
            features: feature::USER_COPY,
            identity: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(DeviceInfo::parse(&info.emit()), info);
        let parameters = Parameters {
            block_bytes: 4096,
            size_bytes: 96 << 20,
            can_discard: true,
            ..Parameters::default()
        };
        assert_eq!(Parameters::parse_size(&parameters.emit()), (4096, 96 << 20));
    }

    fn command(op: u32, sectors: u32, first: u64) -> Result<Command, Errno> {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[0..4].copy_from_slice(&op.to_ne_bytes());
        bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
        bytes[8..16].copy_from_slice(&first.to_ne_bytes());
        Descriptor::parse(&bytes).command(RequestId { queue: 1, tag: 2 })
    }

    #[test]
    fn kernel_requests_map_to_export_commands() {
        let write = command(1 | 1 << 13 | 1 << 11, 8, 16).unwrap();
        let expected = Command {
            kind: Kind::Write,
            flags: command_flag::FUA,
            cookie: 1 << 16 | 2,
            offset: 8192,
            len: 4096,
        };
        assert_eq!(write, expected);
        assert_eq!((result(&write, Ok(())), result(&write, Err(Errno::NoSpace))), (4096, -28));
        // Sectors of a flush are those of the request that it precedes, or rubbish.
        let flush = command(2, 8, 16).unwrap();
        assert_eq!((flush.kind, flush.offset, flush.len), (Kind::Flush, 0, 0));
        let zeroes = command(5 | 1 << 15, 1 << 20, 0).unwrap();
        assert_eq!((zeroes.flags, result(&zeroes, Ok(()))), (command_flag::NO_HOLE, 0));
        assert_eq!(command(13, 8, 0), Err(Errno::NotSupported));
        assert_eq!(command(3, u32::MAX, 0), Err(Errno::Invalid));
        assert_eq!(command(0, 8, u64::MAX / 256), Err(Errno::Invalid));
    }
}
