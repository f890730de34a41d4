//! Requests of hosts that concern whole namespaces: Namespace Management, Namespace Attachment and
//! Format NVM.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nvme::Status;

use crate::subsystem::reservation::HostId;

/// A request of a host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NamespaceRequest {
    /// A new namespace, not attached.
    Create(CreateRequest),
    /// A namespace deleted, and detached before; FFFFFFFFh: all that hosts have made.
    Delete {
        /// Namespace id.
        nsid: u32,
    },
    /// A namespace attached to the hosts of controllers.
    Attach {
        /// Namespace id.
        nsid: u32,
        /// Controller ids, ascending.
        cntlids: Vec<u16>,
    },
    /// A namespace erased, with blocks of a size afterwards.
    Format(FormatRequest),
    /// A namespace detached from the hosts of controllers.
    Detach {
        /// Namespace id.
        nsid: u32,
        /// Controller ids, ascending.
        cntlids: Vec<u16>,
    },
}

/// A Format NVM command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FormatRequest {
    /// Namespace id.
    pub nsid: u32,
    /// Bytes of a logical block afterwards: 512 or 4096.
    pub block_size_bytes: u32,
    /// The controller that has the command.
    pub cntlid: u16,
    /// Its host.
    pub host_id: HostId,
}

/// The namespace that a host creates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CreateRequest {
    /// Its size: whole blocks.
    pub bytes: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size_bytes: u32,
    /// Its ANA group.
    pub ana_group: u32,
    /// Attached to one host at a time.
    pub private: bool,
}

/// The id of a namespace that was created, for the answer. Two of them are equal when they are the
/// same cell.
#[derive(Clone, Debug, Default)]
pub struct CreatedNsid(Arc<AtomicU32>);

impl CreatedNsid {
    /// The id; 0 when no namespace was created.
    pub fn nsid(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the id.
    pub fn set(&self, nsid: u32) {
        self.0.store(nsid, Ordering::Release);
    }
}

impl PartialEq for CreatedNsid {
    fn eq(&self, other: &CreatedNsid) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for CreatedNsid {}

/// Status of a request that could not be executed or persisted, with the reason in the log.
pub const FAILED: Status = Status::INTERNAL_ERROR;
