//! Requests that poll groups hand to worker threads, because they block or take long.

use std::fmt;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};
use rdma::{Source, Tag};

use crate::subsystem::bad_blocks::{BadBlocks, Change};
use crate::subsystem::ns_request::{CreatedNsid, NamespaceRequest};
use crate::subsystem::reservation::{HostId, Order, Reservation};
use crate::subsystem::write_protect::Protection;
use nvmfd_blockdev::DeviceId;

/// Executes jobs on other threads. The outcome is sent to the poll group as a message.
pub trait Offload: fmt::Debug + Send + Sync {
    /// Submits a job, and never blocks. False: no worker can execute it, and no message will be
    /// sent.
    #[must_use]
    fn submit(&self, job: Job) -> bool;

    /// Cancels the authentication job of this ticket; false if it has begun, or is done.
    fn cancel(&self, ticket: u64) -> bool;
}

/// A job. Those for reservations, write protection and unreadable blocks are executed one after
/// another, in the order of submission.
#[derive(Debug)]
pub enum Job {
    /// A reservation command.
    Reserve(ReservationRequest),
    /// A change of write protection.
    Protect(WriteProtectRequest),
    /// A change of the blocks that cannot be read.
    MarkBlocks(Box<BadBlocksRequest>),
    /// A request that concerns a whole namespace.
    Namespace(Box<NamespaceJob>),
    /// A search for allocated blocks.
    Search(SearchJob),
    /// The computation of an authentication.
    Authenticate(AuthJob),
}

/// A reservation command, and the recipient of its outcome.
#[derive(Debug)]
pub struct ReservationRequest {
    /// The reservations; one after another, until one fails.
    pub of: Vec<Arc<Reservation>>,
    /// The host.
    pub host: HostId,
    /// The request.
    pub order: Order,
    /// The poll group to answer.
    pub reactor: usize,
    /// The tag of the answer.
    pub tag: Tag,
}

/// A change of write protection, and the recipient of its outcome.
#[derive(Debug)]
pub struct WriteProtectRequest {
    /// The namespaces; one after another, until one fails.
    pub of: Vec<Arc<Protection>>,
    /// The new state.
    pub state: WriteProtectState,
    /// The recipient of the answer.
    pub from: ReplyTo,
}

/// Address of a reply.
#[derive(Debug)]
pub enum ReplyTo {
    /// A poll group; the response has this tag.
    Reactor(usize, Tag),
    /// A caller that is no host. The channel has room for the answer.
    Caller(SyncSender<Result<(), Status>>),
}

/// Held by a command at a worker while its connection is open.
#[derive(Default, Debug)]
pub struct OpenConnection(Arc<()>);

impl OpenConnection {
    /// Returns what the request of the command takes along.
    pub fn watch(&self) -> ConnectionWatch {
        ConnectionWatch(Arc::downgrade(&self.0))
    }
}

/// Whether the connection of a request is open. A request that has waited for the worker until it
/// was closed is not executed: its host has given up, and may have written meanwhile, by another
/// connection, what the request would erase or hide.
#[derive(Clone, Debug)]
pub struct ConnectionWatch(Weak<()>);

impl ConnectionWatch {
    /// Checks that it is open.
    ///
    /// # Errors
    /// The status of a request that is not executed; nobody receives it.
    pub fn check(&self) -> Result<(), Status> {
        match self.0.strong_count() {
            0 => Err(Status::ABORTED_SQ_DELETION),
            _ => Ok(()),
        }
    }
}

/// A host that marks blocks, which must still be permitted to when the request is executed.
#[derive(Debug)]
pub struct MarkingHost {
    /// The subsystem.
    pub subsystem: Nqn,
    /// Its identifier in reservations.
    pub host_id: HostId,
    /// Its connection.
    pub connection: ConnectionWatch,
}

/// A change of the blocks that cannot be read, and the recipient of its outcome.
#[derive(Debug)]
pub struct BadBlocksRequest {
    /// The list of the namespace.
    pub of: Arc<BadBlocks>,
    /// The change.
    pub change: Change,
    /// Who marks blocks. None if blocks were written: that cannot be undone.
    pub by: Option<MarkingHost>,
    /// The namespace.
    pub nsid: u32,
    /// The poll group to answer.
    pub reactor: usize,
    /// The tag of the answer.
    pub tag: Tag,
}

/// A request that concerns a whole namespace, and the recipient of its outcome.
#[derive(Debug)]
pub struct NamespaceJob {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host.
    pub host: Nqn,
    /// Its identifier in reservations.
    pub host_id: HostId,
    /// Its controller.
    pub cntlid: u16,
    /// Its connection.
    pub connection: ConnectionWatch,
    /// The request.
    pub what: NamespaceRequest,
    /// Receives the id of a created namespace, before the answer.
    pub made: CreatedNsid,
    /// The poll group to answer.
    pub reactor: usize,
    /// The tag of the answer.
    pub tag: Tag,
}

/// What a worker executes.
pub struct BoxedTask(pub Box<dyn FnOnce() + Send>);

impl fmt::Debug for BoxedTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BoxedTask")
    }
}

/// A search for allocated blocks, which may wait for a device.
#[derive(Debug)]
pub struct SearchJob {
    /// The device: one search at a time.
    pub device: DeviceId,
    /// The host: hosts take turns.
    pub host: HostId,
    /// Executes it, if the connection is still open, and notifies the poll group.
    pub run: BoxedTask,
}

/// The computation of an authentication, which takes milliseconds.
#[derive(Debug)]
pub struct AuthJob {
    /// Address of the host: sources take turns.
    pub source: Source,
    /// A number that no other job has ever had.
    pub ticket: u64,
    /// Executes it, and notifies the poll group.
    pub run: BoxedTask,
}
