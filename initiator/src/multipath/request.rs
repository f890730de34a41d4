//! Requests to the namespace, and how they end.

use nvme::lba_status::{ActionType, GetLbaStatus};
use nvme::sqe::{DsmRange, RwFlags};
use nvme::{IoOpcode, Sgl, Sqe, Status};
use rdma::Buf;

/// What is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Read: the data have the length of the blocks.
    Read,
    /// Write: the data have the length of the blocks.
    Write {
        /// On the medium when it is done.
        fua: bool,
    },
    /// Flush: what was written before is on the medium when it is done.
    Flush,
    /// Write Zeroes.
    WriteZeroes {
        /// The backing store may deallocate the blocks.
        deallocate: bool,
        /// On the medium when it is done.
        fua: bool,
    },
    /// Dataset Management with Deallocate: afterwards, the contents are undefined.
    Discard,
    /// Get LBA Status: which blocks are allocated, for [`Allocation::of`](super::Allocation::of).
    LbaStatus,
}

/// Bytes of the list that [`Operation::LbaStatus`] reads: 255 descriptors.
pub(super) const LBA_STATUS_BYTES: u32 = 4096;

impl Operation {
    /// Whether it changes blocks.
    pub fn is_change(self) -> bool {
        match self {
            Operation::Write { .. } | Operation::WriteZeroes { .. } | Operation::Discard => true,
            Operation::Read | Operation::Flush | Operation::LbaStatus => false,
        }
    }

    /// Whether its command is one of the admin queue.
    pub(crate) fn is_admin(self) -> bool {
        self == Operation::LbaStatus
    }

    /// Returns the name of its command.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Read => "Read",
            Operation::Write { .. } => "Write",
            Operation::Flush => "Flush",
            Operation::WriteZeroes { .. } => "Write Zeroes",
            Operation::Discard => "Dataset Management",
            Operation::LbaStatus => "Get LBA Status",
        }
    }

    /// Returns the number of ranges in the data of a Discard; else 1.
    pub(crate) fn ranges(self, data: &Buf) -> u8 {
        match self {
            Operation::Discard => (data.len() / DsmRange::BYTES as u32) as u8,
            _ => 1,
        }
    }

    /// Returns its command.
    pub(crate) fn command(
        self,
        nsid: u32,
        slba: u64,
        blocks: u32,
        ranges: u8,
        write_through: bool,
    ) -> Sqe {
        let range =
            |opcode| Sqe::io(opcode, nsid).with_range(slba, blocks.saturating_sub(1) as u16);
        match self {
            Operation::Read => range(IoOpcode::READ),
            Operation::Write { fua } => range(IoOpcode::WRITE).with_fua(fua || write_through),
            Operation::Flush => Sqe::io(IoOpcode::FLUSH, nsid),
            Operation::WriteZeroes { deallocate, fua } => {
                let sqe = range(IoOpcode::WRITE_ZEROES);
                let flags = RwFlags(sqe.cdw12).with_deac(deallocate);
                Sqe { cdw12: flags.with_fua(fua || write_through).0, ..sqe }
            }
            Operation::Discard => Sqe::deallocation(nsid, ranges.saturating_sub(1)),
            Operation::LbaStatus => {
                // Of more blocks than the field has bits for: up to the end of the namespace.
                let rl = u16::try_from(blocks).unwrap_or(0);
                let (mndw_z, action) = (LBA_STATUS_BYTES / 4 - 1, ActionType::ALLOCATED);
                GetLbaStatus { nsid, slba, mndw_z, rl, action }.emit(Sgl::NONE)
            }
        }
    }
}

/// A request: one command of the namespace.
#[derive(Debug)]
pub struct BlockRequest {
    /// What is requested.
    pub operation: Operation,
    /// The first block.
    pub slba: u64,
    /// The number of blocks: within the limits of the [`Namespace`](super::Namespace), 0 for a Flush, any
    /// for [`Operation::LbaStatus`].
    pub blocks: u32,
    /// The data of Read and Write, from the pool of the [`Resources`](super::Resources). A Discard may
    /// have ranges ([`DsmRange`]) instead of its blocks: they are not returned.
    /// [`Operation::LbaStatus`] has none before it is done.
    pub data: Option<Buf>,
    /// Identifies the request in the [`BlockDone`].
    pub tag: u64,
}

/// A request that is done.
#[derive(Debug)]
pub struct BlockDone {
    /// The caller's tag.
    pub tag: u64,
    /// What was requested.
    pub operation: Operation,
    /// The outcome.
    pub outcome: Result<(), Failure>,
    /// The data.
    pub data: Option<Buf>,
}

/// What happens to requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestOutcome {
    /// A path carries them out.
    CarriedOut,
    /// They wait for a path.
    Wait,
    /// There is no path, nor one to wait for.
    Fail,
}

/// Why a request has failed. But for a status, blocks may have been changed all the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// A controller has completed it with this status.
    #[error("{0}")]
    Status(Status),
    /// No path is there, nor one to wait for.
    #[error("no path to the namespace")]
    NoPath,
    /// [`Multipath::close`](super::Multipath::close) was called.
    #[error("the namespace is being detached")]
    Closed,
}
