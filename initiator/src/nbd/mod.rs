//! The server's side of the NBD protocol as a codec: bytes in, bytes out, no socket.
//!
//! Source: the NBD protocol (`doc/proto.md` of the project NetworkBlockDevice). Fixed newstyle
//! without TLS: a Unix socket has an owner and a mode. What a client sends is checked before it is
//! believed: lengths of options and names, ranges and flags of requests. Whoever breaks the protocol
//! so that its next message cannot be found loses its connection; anything else is an error reply.
//!
//! * [`Handshake`] negotiates options until the transmission begins.
//! * [`parse`] reads a request and [`Command::check`] compares it with the export.
//! * [`Reply`] is the head of a reply, simple or structured; [`BlockStatus`] is what follows for that
//!   command.

mod block_status;
mod handshake;
mod transmission;

pub use block_status::BlockStatus;
pub use handshake::{Export, Handshake, Negotiated, Progress};
pub use transmission::{
    Command, Errno, Kind, MOST_BYTES, REPLY_BYTES, REQUEST_BYTES, Reply, parse,
};

/// Flags of a command.
pub mod command_flag {
    /// Force Unit Access.
    pub const FUA: u16 = 1;
    /// Write Zeroes leaves the blocks allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// A read is answered as a whole.
    pub const DF: u16 = 1 << 2;
    /// Block Status returns one extent.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Transmission flags of an export.
pub mod flag {
    /// The field is valid.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flush is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Force Unit Access is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Trim is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Write Zeroes is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Don't Fragment is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush by one connection covers the writes of all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Cache is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
}
