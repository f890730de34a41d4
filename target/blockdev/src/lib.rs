//! The block device interface: operations that a queue pair submits to the backing store of a
//! namespace.

mod backing;
mod block_sizes;
pub mod blocking;
pub mod crash_point;
mod created_file;
mod device;
pub mod durable;
mod erase;
mod errno;
pub(crate) mod fault_injection;
mod health;
mod hold;
mod media_properties;
pub mod monitor;
mod open;
mod open_error;
mod owner_file;
pub mod record;
pub mod request;
mod resize;
mod step;
mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod uring;

pub use backing::{BackingConfig, BackingKind, Condition, Geometry, Kind, Space};
pub use block_sizes::{BlockSizes, SHIFTS};
pub use created_file::CreatedFile;
pub use device::BackingDevice;
pub use errno::{OpKind, status_of};
pub use fault_injection::InjectedFault;
pub use health::{Detached, Health};
pub use media_properties::Below;
pub use media_properties::Torn;
pub use open_error::OpenError;
pub use owner_file::another_machine;

use nvme::status::Status;
use rdma::{Buf, Tag};

/// Which backing store: the same small number on every reactor, chosen by the registry, and the
/// index in each ring's table of registered files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// Ids are below that: 1,024 subsystems, or one with 1,024 namespaces, and as many again while a
    /// reload replaces them.
    pub const COUNT: u32 = 4096;
}

/// One operation. Offsets and lengths are bytes, whole logical blocks, inside the namespace: the
/// command rules have checked that before.
#[derive(Debug)]
pub enum IoRequest {
    /// Fills the buffer's window from `at`.
    Read {
        /// Where the data land.
        into: Buf,
        /// Byte offset.
        at: u64,
    },
    /// Stores the buffer's window at `at`.
    Write {
        /// The data.
        from: Buf,
        /// Byte offset.
        at: u64,
        /// Complete only when the data are on stable storage.
        fua: bool,
    },
    /// Makes everything completed so far durable.
    Flush,
    /// Gives the range up: reads return zeros or old data of this very range, as the namespace
    /// says in DLFEAT. A hint: a store that cannot do it succeeds without acting.
    Discard {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Makes the range read as zeros.
    Zero {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
        /// The space may be given up (DEAC).
        deallocate: bool,
    },
}

impl IoRequest {
    /// Byte offset and length of what it changes, if it does.
    #[must_use]
    #[inline]
    pub fn changes(&self) -> Option<(u64, u64)> {
        match self {
            IoRequest::Write { from, at, .. } => Some((*at, from.len().into())),
            IoRequest::Discard { at, len } | IoRequest::Zero { at, len, .. } => Some((*at, *len)),
            IoRequest::Read { .. } | IoRequest::Flush => None,
        }
    }

    /// Byte offset and length of what it reads or changes, if it does.
    #[must_use]
    #[inline]
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            IoRequest::Read { into, at } => Some((*at, into.len().into())),
            _ => self.changes(),
        }
    }

    /// Its buffer.
    #[must_use]
    #[inline]
    pub fn buf(&self) -> Option<&Buf> {
        match self {
            IoRequest::Read { into: buf, .. } | IoRequest::Write { from: buf, .. } => Some(buf),
            IoRequest::Flush | IoRequest::Discard { .. } | IoRequest::Zero { .. } => None,
        }
    }

    /// Its buffer, for keeps.
    #[must_use]
    #[inline]
    pub fn into_buf(self) -> Option<Buf> {
        match self {
            IoRequest::Read { into: buf, .. } | IoRequest::Write { from: buf, .. } => Some(buf),
            IoRequest::Flush | IoRequest::Discard { .. } | IoRequest::Zero { .. } => None,
        }
    }
}

/// An operation, come home.
#[derive(Debug)]
pub struct IoCompletion {
    /// The submitter's tag.
    pub tag: Tag,
    /// The buffer of a `Read` or `Write`, with its window as it was submitted.
    pub buf: Option<Buf>,
    /// Done, or the status to answer with.
    pub outcome: Result<(), Status>,
}

/// A wish to have an operation back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CancelRequest {
    /// The operation's tag.
    pub of: Tag,
    /// Its own.
    pub tag: Tag,
}

/// **Seam 2.** Where namespaces keep their blocks, driven by one thread, in batches.
///
/// `submit` never fails and never loses a buffer: each operation comes home in exactly one
/// [`IoCompletion`]. Operations may complete in any order; nothing orders two of them but waiting.
pub trait BlockDevice {
    /// Queues one operation. Nothing happens before the driver's next submission.
    fn submit(&mut self, backing: DeviceId, tag: Tag, op: IoRequest);

    /// Asks for the operation `of` back. The wish comes home under its own `tag`, without a buffer:
    /// with success when the operation comes home with Command Abort Requested, else when it is not
    /// there or will come home as if nobody had asked. In which order the two come home is open.
    fn recall(&mut self, tag: Tag, of: Tag);

    /// The same for many, each other than the others, by the tags of operations in ascending order.
    fn recall_all(&mut self, wishes: &[CancelRequest]) {
        wishes.iter().for_each(|wish| self.recall(wish.tag, wish.of));
    }
}
