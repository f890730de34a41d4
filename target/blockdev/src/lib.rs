//! The block device interface: operations that a queue pair submits to the backing store of a
//! namespace.

mod allocation;
mod backing;
mod block_sizes;
pub mod blocking;
pub mod ceph;
mod ceph_client;
mod copy_locks;
pub mod crash_point;
mod created_file;
mod device;
pub mod durable;
mod erase;
mod errno;
mod extents;
pub(crate) mod fault_injection;
mod file_system;
mod health;
mod hold;
mod io_engine;
mod media_properties;
pub mod monitor;
mod mutex;
mod open;
mod open_error;
mod owner_file;
pub mod rados;
pub mod rbd;
pub mod record;
mod reflink;
pub mod request;
mod resize;
mod step;
mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod truncation;
pub mod uring;

pub use allocation::{Allocation, FileSystemSpace, SpaceState};
pub use backing::{BackingConfig, BackingKind, Condition, Geometry, Kind, names_device};
pub use block_sizes::{BlockSizes, SHIFTS};
pub use created_file::CreatedFile;
pub use device::BackingDevice;
pub use errno::OpKind;
pub use extents::{AllocatedExtents, ExtentSearch};
pub use fault_injection::InjectedFault;
pub use health::{Detached, Health};
pub use hold::{Inode, rollback_copy};
pub use io_engine::IoEngine;
pub use media_properties::Below;
pub use media_properties::Torn;
pub use mutex::lock;
pub use open_error::OpenError;
pub use reflink::{Reflink, ReflinkError, remove_snapshot};
pub use step::Space;

use std::sync::Weak;

use nvme::status::Status;
use rdma::{Buf, Tag};

/// Number of a backing store: the same on every reactor, assigned by the registry, and its index in
/// the table of registered files of each ring.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// Ids are below this: 1,024 subsystems, or one with 1,024 namespaces, and the same number
    /// again while a reload replaces them.
    pub const COUNT: u32 = 4096;
}

/// One operation. Offsets and lengths are bytes, multiples of the logical block, inside the
/// namespace: checked by the command rules.
#[derive(Debug)]
pub enum IoRequest {
    /// Reads from `at` into the window of the buffer.
    Read {
        /// The buffer.
        into: Buf,
        /// Byte offset.
        at: u64,
    },
    /// Writes the window of the buffer at `at`.
    Write {
        /// The buffer.
        from: Buf,
        /// Byte offset.
        at: u64,
        /// FUA: completes only when the data are on stable storage.
        fua: bool,
    },
    /// Makes everything that has completed durable.
    Flush,
    /// Deallocates the range: reads return zeros or the old data of this range, as DLFEAT of the
    /// namespace reports. Advisory: a store without support succeeds without effect.
    Discard {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Zeros the range.
    Zero {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
        /// Whether to deallocate as well (DEAC).
        deallocate: bool,
    },
}

impl IoRequest {
    /// Byte offset and length of the range that it changes, if any.
    #[inline]
    pub fn changes(&self) -> Option<(u64, u64)> {
        match self {
            IoRequest::Write { from, at, .. } => Some((*at, from.len().into())),
            IoRequest::Discard { at, len } | IoRequest::Zero { at, len, .. } => Some((*at, *len)),
            IoRequest::Read { .. } | IoRequest::Flush => None,
        }
    }

    /// Byte offset and length of the range that it reads or changes, if any.
    #[inline]
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            IoRequest::Read { into, at } => Some((*at, into.len().into())),
            _ => self.changes(),
        }
    }

    /// Its buffer, if it has one.
    #[inline]
    pub fn buf(&self) -> Option<&Buf> {
        match self {
            IoRequest::Read { into: buf, .. } | IoRequest::Write { from: buf, .. } => Some(buf),
            IoRequest::Flush | IoRequest::Discard { .. } | IoRequest::Zero { .. } => None,
        }
    }

    /// Takes its buffer, if it has one.
    #[must_use]
    #[inline]
    pub fn into_buf(self) -> Option<Buf> {
        match self {
            IoRequest::Read { into: buf, .. } | IoRequest::Write { from: buf, .. } => Some(buf),
            IoRequest::Flush | IoRequest::Discard { .. } | IoRequest::Zero { .. } => None,
        }
    }
}

/// A completed operation.
#[derive(Debug)]
pub struct IoCompletion {
    /// The submitter's tag.
    pub tag: Tag,
    /// The buffer of a `Read` or `Write`, with its window as it was submitted.
    pub buf: Option<Buf>,
    /// Success, or the status for the host.
    pub outcome: Result<(), Status>,
}

/// A request to cancel an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CancelRequest {
    /// Tag of the operation to cancel.
    pub of: Tag,
    /// Tag of the request itself.
    pub tag: Tag,
}

/// Executes the operations of namespaces: driven by one thread, in batches.
///
/// `submit` cannot fail and never loses a buffer: each operation completes in exactly one
/// [`IoCompletion`]. Operations complete in any order; a caller that needs an order waits for
/// completions.
pub trait BlockDevice {
    /// Queues one operation. It starts with the next submission of the driver.
    fn submit(&mut self, backing: DeviceId, tag: Tag, op: IoRequest);

    /// Requests cancellation of the operation `of`. The request completes under its own `tag`,
    /// without a buffer: successfully if the operation completes with Command Abort Requested, else
    /// with a failure, when the operation is unknown or completes normally. The order of the two
    /// completions is undefined.
    fn recall(&mut self, tag: Tag, of: Tag);

    /// Requests many cancellations, of different operations, in ascending order of their tags.
    fn recall_all(&mut self, requests: &[CancelRequest]) {
        requests.iter().for_each(|request| self.recall(request.tag, request.of));
    }

    /// The backing store, if it may have blocks that are not allocated.
    fn searchable(&self, _backing: DeviceId) -> Option<Weak<BackingDevice>> {
        None
    }
}
