//! Requests that poll groups hand to worker threads, because they block or take long.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};
use rdma::{Source, Tag};

use crate::subsystem::bad_blocks::{BadBlocks, Change};
use crate::subsystem::ns_request::{CreatedNsid, NamespaceRequest};
use crate::subsystem::reservation::{HostId, Order, Reservation};
use crate::subsystem::write_protect::Protection;

/// Carries out jobs elsewhere. What comes of one reaches the poll group as a message.
pub trait Offload: fmt::Debug + Send + Sync {
    /// Hands a job over, and never waits. False: there is nobody who could do it, and no message
    /// will come.
    #[must_use]
    fn submit(&self, job: Job) -> bool;

    /// Takes the authentication job of this ticket back; false when it has begun, or is done.
    fn cancel(&self, ticket: u64) -> bool;
}

/// A job. Those about reservations, write protection and unreadable blocks are carried out one
/// after another, in the order in which they were handed over.
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
    /// The arithmetic of an authentication.
    Authenticate(AuthJob),
}

/// A reservation command, and who waits for its outcome.
#[derive(Debug)]
pub struct ReservationRequest {
    /// What it is about; one after another, until one fails.
    pub of: Vec<Arc<Reservation>>,
    /// The host.
    pub host: HostId,
    /// What it wants.
    pub order: Order,
    /// The poll group to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

/// A change of write protection, and who waits for its outcome.
#[derive(Debug)]
pub struct WriteProtectRequest {
    /// Whose; one after another, until one fails.
    pub of: Vec<Arc<Protection>>,
    /// The new state.
    pub state: WriteProtectState,
    /// Whom to answer.
    pub from: ReplyTo,
}

/// Address of a reply.
#[derive(Debug)]
pub enum ReplyTo {
    /// A poll group, whose answer has this tag.
    Reactor(usize, Tag),
    /// Somebody who is no host. The channel has room for the answer.
    Caller(SyncSender<Result<(), Status>>),
}

/// A change of the blocks that cannot be read, and who waits for its outcome.
#[derive(Debug)]
pub struct BadBlocksRequest {
    /// Whose.
    pub of: Arc<BadBlocks>,
    /// The change.
    pub change: Change,
    /// The subsystem, and the host that wants blocks to be unreadable, which must be allowed to
    /// still when the request is carried out. None where they were written: nobody can take that
    /// back.
    pub by: Option<(Nqn, HostId)>,
    /// The namespace.
    pub nsid: u32,
    /// The poll group to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

/// A request that concerns a whole namespace, and who waits for its outcome.
#[derive(Debug)]
pub struct NamespaceJob {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host.
    pub host: Nqn,
    /// Its identifier, by which reservations know it.
    pub host_id: HostId,
    /// Its controller.
    pub cntlid: u16,
    /// What it wants.
    pub what: NamespaceRequest,
    /// Where the id of a created namespace is left, before the answer.
    pub made: CreatedNsid,
    /// The poll group to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

/// The arithmetic of an authentication, which takes milliseconds.
pub struct AuthJob {
    /// Where the host is: sources take turns.
    pub source: Source,
    /// No other job ever had this number.
    pub ticket: u64,
    /// Does it, and tells the poll group.
    pub run: Box<dyn FnOnce() + Send>,
}

impl fmt::Debug for AuthJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AuthJob { source, ticket, run: _ } = self;
        let mut shown = f.debug_struct("AuthJob");
        shown.field("source", source).field("ticket", ticket).finish_non_exhaustive()
    }
}
