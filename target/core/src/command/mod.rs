//! Rules of NVMe: every command is a function from 64 bytes to a [`Plan`] or a `Status`.
//!
//! Nothing here accesses a buffer, a fabric or a device; `qpair/mod.rs` does. Terms: *pull* (host to pool),
//! *push* (pool to host), *load* and *store* (device); `read` and `write` are used at the interfaces.

pub mod admin;
pub mod copy;
pub mod error_location;
pub mod fabrics;
pub mod features;
mod format_nvm;
pub mod identify;
pub mod io;
mod io_hints;
pub mod lba_status;
pub mod log_page;
pub mod ns_management;
mod persistent_event;
pub mod sgl;
mod write_protect;
pub mod write_uncorrectable;

pub(crate) use format_nvm::FNA;

use std::sync::Arc;

use nvme::feature::WriteProtectState;
use nvme::{Sgl, Sqe, Status};
use rdma::Remote;

use crate::sched::IoClass;
use crate::subsystem::Extent;
use crate::subsystem::bad_blocks::{BadBlocks, Change};
use crate::subsystem::ns_request::{CreatedNsid, NamespaceRequest};
use crate::subsystem::reservation::{Order, Reservation};
use crate::subsystem::write_protect::Protection;
use nvmfd_blockdev::DeviceId;

/// Bytes of the submission queue entry at the head of a capsule.
pub const SQE_BYTES: u32 = 64;

/// Location of the data of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// In the capsule itself: `len` bytes at `offset` after the submission queue entry. Both were
    /// checked against what was received.
    Capsule {
        /// Bytes after the submission queue entry.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// In the host's memory.
    Host(Remote),
}

impl Source {
    /// Returns the bytes of the data.
    pub fn len_bytes(&self) -> u32 {
        match self {
            Source::Capsule { len, .. } => *len,
            Source::Host(remote) => remote.len,
        }
    }

    /// Returns the same location, cut to `len` bytes.
    #[must_use]
    pub fn cut(self, len: u32) -> Source {
        match self {
            Source::Capsule { offset, len: had } => Source::Capsule { offset, len: len.min(had) },
            Source::Host(remote) => Source::Host(Remote { len: len.min(remote.len), ..remote }),
        }
    }
}

/// Decision of a command handler; the queue pair executes it and then completes the command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[repr(u8)] // a tag of its own, which is read in every step
pub enum Plan {
    /// Answer with success and this result.
    Reply(u64),
    /// Push a page to the host, then answer. The page is cut or followed by zeros to `to.len`.
    Give {
        /// The bytes, made for this command.
        page: Vec<u8>,
        /// The destination.
        to: Remote,
    },
    /// Load blocks and push them.
    Load {
        /// The namespace's device.
        backing: DeviceId,
        /// Byte offset.
        at: u64,
        /// The destination; its length is the length of the transfer.
        to: Remote,
    },
    /// Pull blocks and store them.
    Store {
        /// The namespace's device.
        backing: DeviceId,
        /// Byte offset.
        at: u64,
        /// The data; its length is the length of the transfer.
        from: Source,
        /// Complete only when it is durable.
        fua: bool,
    },
    /// Pull blocks, load the same range, and compare.
    Compare {
        /// The namespace's device.
        backing: DeviceId,
        /// Byte offset.
        at: u64,
        /// The data; its length is the length of the transfer.
        from: Source,
    },
    /// Load blocks without a transfer: the answer is whether they can be read.
    Verify {
        /// The namespace's device.
        backing: DeviceId,
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
        /// Maximum of bytes that are loaded at once.
        piece_bytes: u32,
    },
    /// Pull range descriptors, check them all, load the ranges, then store them elsewhere.
    Copy {
        /// Source and destination.
        job: copy::Job,
        /// The descriptors, exactly as many as the job has.
        from: Source,
    },
    /// Make earlier completed changes durable.
    Flush {
        /// The namespace's device.
        backing: DeviceId,
        /// The generation of unflushed writes that it covers, once it has begun.
        covers: u16,
    },
    /// Pull `nr` range descriptors (16 bytes each), check them all, then deallocate the ranges.
    Deallocate {
        /// The namespace's blocks at the arrival of the command.
        extent: Extent,
        /// How many ranges, 1 to 256.
        nr: u32,
        /// The descriptors, exactly `nr` × 16 bytes.
        from: Source,
    },
    /// Make a range read as zeros.
    Zero {
        /// The namespace's device.
        backing: DeviceId,
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
        /// The space may be deallocated.
        deallocate: bool,
        /// Complete only when it is durable.
        fua: bool,
    },
    /// Pull the 1024 bytes of Connect data, then admit or reject the queue.
    Connect {
        /// The data, exactly 1024 bytes.
        from: Source,
    },
    /// Pull an authentication message, then process it.
    Authenticate {
        /// The message, exactly as long as the command says.
        from: Source,
    },
    /// Pull the data of a Set Features command, then set it.
    SetFeature {
        /// The data, exactly as long as the feature is.
        from: Source,
    },
    /// Pull the keys of a reservation command, then hand it to the state worker.
    Reserve {
        /// The reservations.
        of: Arc<Reservation>,
        /// The data, exactly as long as the command requires.
        from: Source,
    },
    /// Hand a reservation request without data to the state worker.
    Keep {
        /// The reservations.
        of: Vec<Arc<Reservation>>,
        /// The request.
        order: Order,
    },
    /// Have the state worker set the write protection of namespaces, then flush the devices.
    Protect {
        /// The state to change.
        of: Vec<Arc<Protection>>,
        /// The new state.
        state: WriteProtectState,
        /// The devices, one after another.
        backings: Vec<DeviceId>,
    },
    /// Have the state worker make blocks unreadable.
    Mark {
        /// The state to change.
        of: Arc<BadBlocks>,
        /// The change.
        change: Change,
    },
    /// Execute the plan, then have the state worker record that the blocks that it has changed,
    /// durably, can be read again.
    Mend {
        /// A plan that changes blocks; or copies some, of which none may be unreadable.
        plan: Box<Plan>,
        /// The blocks that cannot be read.
        of: Arc<BadBlocks>,
    },
    /// Pull the data of a command about namespaces, then hand its request to the management worker.
    Manage {
        /// The data: 4096 bytes.
        from: Source,
    },
    /// Hand a request about namespaces to the management worker.
    Order {
        /// The request.
        what: NamespaceRequest,
        /// Receives the id of a new namespace, which is the result.
        made: CreatedNsid,
    },
    /// Flush every namespace, then report to the host that shutdown is complete.
    ShutDown {
        /// Its number among those of the controller.
        number: u32,
        /// The devices, one after another.
        backings: Vec<DeviceId>,
        /// No flush has failed.
        durable: bool,
        /// Of the present flush, as for [`Plan::Flush`].
        covers: u16,
    },
    /// Hold the command until there is an event to report (Asynchronous Event Request).
    Park,
    /// End every other command of the queue, answer, and close the connection.
    Disconnect,
    /// Abort the command `cid` of queue `sqid` if possible, and report whether it was.
    Abort {
        /// Queue id.
        sqid: u16,
        /// Command id.
        cid: u16,
    },
    /// Have a worker search for allocated blocks, then push the list of them.
    LbaStatus(Box<lba_status::LbaStatusQuery>),
}

impl Plan {
    /// Returns its class for a drain barrier.
    pub fn io_class(&self) -> IoClass {
        match self {
            _ if self.changes_blocks() => IoClass::Changes,
            Plan::Load { .. }
            | Plan::Compare { .. }
            | Plan::Verify { .. }
            | Plan::Flush { .. }
            | Plan::Protect { .. } => IoClass::Uses,
            Plan::Reserve { .. } | Plan::Disconnect => IoClass::Exempt,
            _ => IoClass::Other,
        }
    }

    /// Returns the device that it accesses, if it is a single one.
    #[inline(always)]
    pub fn backing(&self) -> Option<DeviceId> {
        match self {
            Plan::Load { backing, .. }
            | Plan::Store { backing, .. }
            | Plan::Compare { backing, .. }
            | Plan::Verify { backing, .. }
            | Plan::Flush { backing, .. }
            | Plan::Zero { backing, .. } => Some(*backing),
            Plan::Copy { job: copy::Job { extent, .. }, .. } | Plan::Deallocate { extent, .. } => {
                Some(extent.backing)
            }
            Plan::Mend { plan, .. } => plan.backing(),
            _ => None,
        }
    }

    /// Whether it changes blocks, or may. A worker creates, formats and deletes namespaces.
    pub fn changes_blocks(&self) -> bool {
        match self {
            Plan::Store { .. }
            | Plan::Copy { .. }
            | Plan::Deallocate { .. }
            | Plan::Zero { .. }
            | Plan::Mark { .. }
            | Plan::Mend { .. } => true,
            Plan::Reply(_)
            | Plan::Give { .. }
            | Plan::Load { .. }
            | Plan::Compare { .. }
            | Plan::Verify { .. }
            | Plan::Flush { .. }
            | Plan::Connect { .. }
            | Plan::Authenticate { .. }
            | Plan::SetFeature { .. }
            | Plan::Reserve { .. }
            | Plan::Keep { .. }
            | Plan::Protect { .. }
            | Plan::Manage { .. }
            | Plan::Order { .. }
            | Plan::ShutDown { .. }
            | Plan::Park
            | Plan::Disconnect
            | Plan::Abort { .. }
            | Plan::LbaStatus(_) => false,
        }
    }
}

/// Transport properties of a command: needed to check its SGL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CapsuleInfo {
    /// Bytes that arrived after the submission queue entry.
    pub tail_bytes: u32,
    /// Largest offset of in-capsule data, and of the end of a capsule, after the entry: as reported
    /// by Identify Controller (IOCCSZ).
    pub in_capsule_bytes: u32,
    /// The largest transfer in bytes (MDTS).
    pub mdts_bytes: u32,
}

/// Returns the location of the data of a command that sends exactly `len` bytes to the controller.
/// A longer keyed or in-capsule descriptor is accepted when `exact` is false, and cut.
///
/// # Errors
/// The SGL statuses of the NVMe documents, each with do not retry.
#[inline(always)]
pub fn source(sqe: &Sqe, received: CapsuleInfo, len: u32, exact: bool) -> Result<Source, Status> {
    let short = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
    match sqe.sgl()? {
        Sgl::InCapsule { offset, len: given } => {
            let limit = u64::from(received.tail_bytes.min(received.in_capsule_bytes));
            if offset > limit {
                return Err(Status::SGL_OFFSET_INVALID.with_dnr());
            }
            // The limit is the number of bytes received, never the size of the buffer.
            let end = offset.checked_add(u64::from(given)).ok_or(short)?;
            if end > limit || given < len || (exact && given != len) {
                return Err(short);
            }
            let offset = u32::try_from(offset).map_err(|_| short)?;
            Ok(Source::Capsule { offset, len })
        }
        Sgl::Keyed { addr, len: given, key, .. } => {
            let given = given.get();
            if given < len || (exact && given != len) {
                return Err(short);
            }
            if len > received.mdts_bytes {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            Ok(Source::Host(Remote { addr, key, len }))
        }
    }
}

/// Returns the destination of a command that reads exactly `len` bytes from the controller.
///
/// # Errors
/// The SGL statuses of the NVMe documents, each with do not retry.
#[inline(always)]
pub fn destination(
    sqe: &Sqe,
    received: CapsuleInfo,
    len: u32,
    exact: bool,
) -> Result<Remote, Status> {
    match sqe.sgl()? {
        Sgl::InCapsule { .. } => Err(Status::INVALID_FIELD.with_dnr()),
        Sgl::Keyed { addr, len: given, key, .. } => {
            if given.get() < len || (exact && given.get() != len) {
                return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            }
            if len > received.mdts_bytes {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            Ok(Remote { addr, key, len })
        }
    }
}

/// Checks that a command without data describes none.
///
/// # Errors
/// Data SGL Length Invalid, or the error of the descriptor itself.
pub fn no_data(sqe: &Sqe) -> Result<(), Status> {
    match sqe.sgl()?.len_bytes() {
        0 => Ok(()),
        _ => Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr()),
    }
}
