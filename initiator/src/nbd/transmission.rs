//! Requests, and the heads of their replies.

use super::command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
use super::{Export, Negotiated, flag};

/// Bytes of a request, without its data.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of the longest head of a reply.
pub const REPLY_BYTES: usize = 32;
/// The longest read and write: what a client may assume that was told nothing.
pub const MOST_BYTES: u32 = 32 << 20;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_MAGIC: u32 = 0x668e_33ef;

/// The last chunk of a structured reply; all replies have one.
const DONE: u16 = 1;
const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_BLOCK_STATUS: u16 = 5;
/// The id of `base:allocation`, the only context.
const CONTEXT: u32 = 1;
const CHUNK_ERROR: u16 = 1 << 15 | 1;

/// The errors of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: read only.
    Perm = 1,
    /// Input or output error.
    Io = 5,
    /// Invalid argument.
    Invalid = 22,
    /// Beyond the end, or the backing store is full.
    NoSpace = 28,
    /// Longer than the server permits.
    Overflow = 75,
    /// Not supported.
    NotSupported = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

/// What is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Disconnect; there is no reply.
    Disconnect,
    /// Flush.
    Flush,
    /// Trim.
    Trim,
    /// Cache.
    Cache,
    /// Write Zeroes.
    WriteZeroes,
    /// Block Status.
    BlockStatus,
    /// Anything else.
    Unknown(u16),
}

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Command {
    /// What is requested.
    pub kind: Kind,
    /// Command flags.
    pub flags: u16,
    /// Returned in the reply.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// Reads a request; `None` without its magic number, after which nothing can be understood.
pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Command> {
    let u16_at = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let (magic, rest) = bytes.split_first_chunk()?;
    if u32::from_be_bytes(*magic) != REQUEST_MAGIC {
        return None;
    }
    let kind = match u16_at(6) {
        0 => Kind::Read,
        1 => Kind::Write,
        2 => Kind::Disconnect,
        3 => Kind::Flush,
        4 => Kind::Trim,
        5 => Kind::Cache,
        6 => Kind::WriteZeroes,
        7 => Kind::BlockStatus,
        other => Kind::Unknown(other),
    };
    Some(Command {
        kind,
        flags: u16_at(4),
        cookie: u64::from_be_bytes(*rest[4..].first_chunk()?),
        offset: u64::from_be_bytes(*rest[12..].first_chunk()?),
        len: u32::from_be_bytes(*rest[20..].first_chunk()?),
    })
}

impl Command {
    /// Whether it has to reach the medium before the reply.
    pub fn is_fua(&self) -> bool {
        self.flags & FUA != 0
    }

    /// Whether Write Zeroes has to leave the blocks allocated.
    pub fn keeps_allocation(&self) -> bool {
        self.flags & NO_HOLE != 0
    }

    /// Bytes of data that follow the request.
    pub fn data_bytes(&self) -> u32 {
        if self.kind == Kind::Write { self.len } else { 0 }
    }

    /// Compares it with the export and what was negotiated.
    ///
    /// # Errors
    /// That of the reply.
    pub fn check(&self, export: &Export, negotiated: Negotiated) -> Result<(), Errno> {
        let (needed, flags, is_change) = match self.kind {
            Kind::Read => (0, FUA | DF, false),
            Kind::Write => (0, FUA, true),
            Kind::Disconnect => return Ok(()),
            // Lengths of a flush are reserved.
            Kind::Flush if self.offset != 0 || self.len != 0 => return Err(Errno::Invalid),
            Kind::Flush => (flag::SEND_FLUSH, FUA, false),
            Kind::Trim => (flag::SEND_TRIM, FUA, true),
            Kind::Cache => (flag::SEND_CACHE, FUA, false),
            Kind::WriteZeroes => (flag::SEND_WRITE_ZEROES, FUA | NO_HOLE, true),
            Kind::BlockStatus if !negotiated.base_allocation => return Err(Errno::Invalid),
            Kind::BlockStatus => (0, FUA | REQ_ONE, false),
            Kind::Unknown(_) => return Err(Errno::Invalid),
        };
        if is_change && export.flags & flag::READ_ONLY != 0 {
            return Err(Errno::Perm);
        }
        if export.flags & needed != needed || self.flags & !flags != 0 {
            return Err(Errno::Invalid);
        }
        if self.kind == Kind::Flush {
            return Ok(());
        }
        let block = u64::from(export.block_bytes);
        let (offset, len) = (self.offset, u64::from(self.len));
        if len == 0 || !offset.is_multiple_of(block) || !len.is_multiple_of(block) {
            return Err(Errno::Invalid);
        }
        if offset.checked_add(len).is_none_or(|end| end > export.size_bytes) {
            return Err(if is_change { Errno::NoSpace } else { Errno::Invalid });
        }
        let is_transfer = matches!(self.kind, Kind::Read | Kind::Write);
        if is_transfer && self.len > export.most_bytes { Err(Errno::Overflow) } else { Ok(()) }
    }
}

/// The head of a reply: what precedes the data of a successful read or the extents of a block status,
/// and all of any other.
#[derive(Clone, Copy, Debug)]
pub struct Reply {
    bytes: [u8; REPLY_BYTES],
    len: usize,
}

impl Reply {
    /// The reply to a command, with that many bytes of extents.
    pub fn new(
        command: &Command,
        outcome: Result<(), Errno>,
        negotiated: Negotiated,
        extents_bytes: usize,
    ) -> Reply {
        let mut reply = Reply { bytes: [0; REPLY_BYTES], len: 0 };
        let error = outcome.err().map_or(0, |errno| errno as u32);
        let needs_chunk = matches!(command.kind, Kind::Read | Kind::BlockStatus);
        if !negotiated.structured || !needs_chunk {
            reply.put(&SIMPLE_MAGIC.to_be_bytes());
            reply.put(&error.to_be_bytes());
            reply.put(&command.cookie.to_be_bytes());
            return reply;
        }
        let mut chunk = |kind: u16, len: u32| {
            reply.put(&STRUCTURED_MAGIC.to_be_bytes());
            reply.put(&DONE.to_be_bytes());
            reply.put(&kind.to_be_bytes());
            reply.put(&command.cookie.to_be_bytes());
            reply.put(&len.to_be_bytes());
        };
        match (outcome, command.kind) {
            (Err(_), _) => {
                chunk(CHUNK_ERROR, 6);
                reply.put(&error.to_be_bytes());
                reply.put(&[0; 2]);
            }
            (Ok(()), Kind::BlockStatus) => {
                chunk(CHUNK_BLOCK_STATUS, 4 + extents_bytes as u32);
                reply.put(&CONTEXT.to_be_bytes());
            }
            (Ok(()), _) => {
                chunk(CHUNK_OFFSET_DATA, command.len.saturating_add(8));
                reply.put(&command.offset.to_be_bytes());
            }
        }
        reply
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: u16 = flag::SEND_FLUSH
        | flag::SEND_FUA
        | flag::SEND_TRIM
        | flag::SEND_WRITE_ZEROES
        | flag::SEND_CACHE;

    fn export(flags: u16) -> Export {
        Export {
            name: String::new(),
            description: String::new(),
            size_bytes: 64 << 20,
            flags,
            block_bytes: 4096,
            preferred_bytes: 4096,
            most_bytes: MOST_BYTES,
        }
    }

    fn command(kind: Kind, offset: u64, len: u32) -> Command {
        Command { kind, flags: 0, cookie: 0x0102_0304_0506_0708, offset, len }
    }

    #[test]
    fn a_request_is_read_field_by_field() {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
        bytes[5] = 1;
        bytes[7] = 6;
        bytes[8..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        bytes[22] = 0x10;
        bytes[26] = 0x20;
        let read = parse(&bytes).expect("magic");
        let expected = Command { flags: 1, ..command(Kind::WriteZeroes, 0x1000, 0x2000) };
        assert_eq!(read, expected);
        assert!(read.is_fua() && !read.keeps_allocation());
        bytes[0] ^= 1;
        assert_eq!(parse(&bytes), None);
    }

    #[test]
    fn requests_beyond_the_export_or_its_features_are_refused() {
        let all = Negotiated { structured: true, base_allocation: true };
        let of = |command: Command, flags| command.check(&export(flags), all);
        let end = 64 << 20;
        for (kind, offset, len, expected) in [
            (Kind::Read, 0, 4096, Ok(())),
            (Kind::Read, end - 4096, 4096, Ok(())),
            (Kind::Read, end - 4096, 8192, Err(Errno::Invalid)),
            (Kind::Read, u64::MAX - 4095, 4096, Err(Errno::Invalid)),
            (Kind::Read, 512, 4096, Err(Errno::Invalid)),
            (Kind::Read, 0, 512, Err(Errno::Invalid)),
            (Kind::Read, 0, 0, Err(Errno::Invalid)),
            (Kind::Read, 0, MOST_BYTES + 4096, Err(Errno::Overflow)),
            (Kind::Write, end, 4096, Err(Errno::NoSpace)),
            (Kind::WriteZeroes, 0, 64 << 20, Ok(())),
            (Kind::Trim, 0, 64 << 20, Ok(())),
            (Kind::BlockStatus, 0, 64 << 20, Ok(())),
            (Kind::Flush, 0, 0, Ok(())),
            (Kind::Flush, 0, 4096, Err(Errno::Invalid)),
            (Kind::Unknown(9), 0, 4096, Err(Errno::Invalid)),
        ] {
            assert_eq!(of(command(kind, offset, len), ALL), expected, "{kind:?} {offset} {len}");
        }
        for kind in [Kind::Write, Kind::Trim, Kind::WriteZeroes] {
            let write = command(kind, 0, 4096);
            assert_eq!(of(write, ALL | flag::READ_ONLY), Err(Errno::Perm));
            assert_eq!(of(Command { flags: 64, ..write }, ALL), Err(Errno::Invalid));
        }
        // What the export does not have, and what was not negotiated.
        for kind in [Kind::Trim, Kind::WriteZeroes, Kind::Cache] {
            assert_eq!(of(command(kind, 0, 4096), 0), Err(Errno::Invalid));
        }
        let status = command(Kind::BlockStatus, 0, 4096);
        let none = Negotiated { base_allocation: false, ..all };
        assert_eq!(status.check(&export(ALL), none), Err(Errno::Invalid));
    }

    #[test]
    fn replies_are_those_of_the_protocol() {
        let (simple, all) =
            (Negotiated::default(), Negotiated { structured: true, base_allocation: true });
        let read = command(Kind::Read, 0x1000, 0x2000);
        let head = |outcome, negotiated| Reply::new(&read, outcome, negotiated, 0).bytes().to_vec();
        let cookie = [1, 2, 3, 4, 5, 6, 7, 8];
        let join = |parts: &[&[u8]]| parts.concat();
        assert_eq!(
            head(Err(Errno::Io), simple),
            join(&[&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5], &cookie])
        );
        let start = [0x66, 0x8e, 0x33, 0xef, 0, 1];
        assert_eq!(
            head(Ok(()), all),
            join(&[&start, &[0, 1], &cookie, &[0, 0, 0x20, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]])
        );
        assert_eq!(
            head(Err(Errno::Invalid), all),
            join(&[&start, &[0x80, 1], &cookie, &[0, 0, 0, 6, 0, 0, 0, 22, 0, 0]])
        );
        let status = command(Kind::BlockStatus, 0, 0x2000);
        assert_eq!(
            Reply::new(&status, Ok(()), all, 8).bytes(),
            join(&[&start, &[0, 5], &cookie, &[0, 0, 0, 12, 0, 0, 0, 1]])
        );
        // Others are simple, also where structured ones are possible.
        let write = command(Kind::Write, 0, 4096);
        assert_eq!(Reply::new(&write, Ok(()), all, 0).bytes().len(), 16);
    }

    proptest! {
        #[test]
        fn no_request_panics(mut bytes: [u8; REQUEST_BYTES], flags: u16, s: bool, b: bool) {
            bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
            let command = parse(&bytes).expect("magic");
            let negotiated = Negotiated { structured: s, base_allocation: b };
            let outcome = command.check(&export(flags), negotiated);
            prop_assert!(Reply::new(&command, outcome, negotiated, 0).bytes().len() >= 16);
        }
    }
}
