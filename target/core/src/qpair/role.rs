//! Role of a queue pair, and the checks of it that commands must pass.

use std::sync::Arc;
use std::time::Instant;

use nvme::Status;

use super::request::Request;
use crate::command::io as rules;
use crate::controller::Controller;
use crate::controller::association::Association;
use crate::subsystem::reservation::Barred;
use crate::subsystem::{Namespace, Subsystem};
use nvmfd_blockdev::{DeviceId, IoRequest};

/// Role of a queue pair.
#[derive(Debug)]
pub(super) enum QueueRole {
    /// None before Connect.
    Nothing { deadline: Instant },
    /// An admin queue owns its controller.
    Admin(Box<Controller>),
    /// An I/O queue.
    Io { association: Arc<Association>, subsystem: Arc<Subsystem>, epoch: u16 },
}

impl QueueRole {
    /// Returns the association of the queue; none before its Connect.
    #[inline]
    pub(super) fn association(&self) -> Option<&Arc<Association>> {
        match self {
            QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => Some(&controller.association),
            QueueRole::Io { association, .. } => Some(association),
        }
    }

    /// Returns the subsystem as its host sees it.
    pub(super) fn subsystem(&self) -> Option<&Subsystem> {
        match self {
            QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => controller.subsystem().map(|subsystem| &**subsystem),
            QueueRole::Io { subsystem, .. } => Some(subsystem),
        }
    }

    /// Returns the namespace on a device.
    pub(super) fn nsid_of(&self, backing: DeviceId) -> Option<u32> {
        let mut namespaces = self.subsystem()?.namespaces.iter();
        namespaces.find(|namespace| namespace.backing == backing).map(|namespace| namespace.nsid)
    }

    /// Whether this is an I/O queue.
    #[inline]
    pub(super) fn is_io(&self) -> bool {
        matches!(self, QueueRole::Io { .. })
    }

    /// Whether this is an I/O queue whose controller was reset or no longer exists. Reservations and
    /// ANA states of a controller that no longer exists do not change any more.
    #[inline]
    pub(super) fn is_stale(&self) -> bool {
        match self {
            QueueRole::Io { association, epoch, .. } => {
                !association.is_ready()
                    && (association.is_closed() || association.epoch() != *epoch)
            }
            _ => false,
        }
    }

    /// Whether a step of a command may begin now. The checks made on arrival are repeated: the
    /// command has waited for limits, buffers, its data or other commands, and a host to which
    /// a reservation was reported meanwhile must not see it executed afterwards.
    #[inline]
    pub(super) fn may_begin(&self, entry: &Request, op: &IoRequest) -> Result<(), Status> {
        // A flush after other steps changes nothing.
        match op {
            IoRequest::Flush if entry.step > 0 => Ok(()),
            op => self.may_begin_at(entry, op.range()),
        }
    }

    /// Whether a Write without state that few commands need may begin now: false if
    /// [`QueueRole::may_begin`] has to say why not. `blocks`: byte offset and length.
    #[inline(always)]
    pub(super) fn may_store(&self, nsid: u32, backing: DeviceId, blocks: (u64, u32)) -> bool {
        let QueueRole::Io { association, subsystem, .. } = self else { return false };
        if !association.is_ready() {
            return false;
        }
        reached(association, subsystem, nsid)
            .is_some_and(|(namespace, barred)| rules::may_store(backing, blocks, namespace, barred))
    }

    /// The same for a step that accesses this range of bytes.
    #[inline]
    pub(super) fn may_begin_at(
        &self,
        entry: &Request,
        range: Option<(u64, u64)>,
    ) -> Result<(), Status> {
        // Commands of an admin queue are for its whole subsystem.
        let QueueRole::Io { association, subsystem, .. } = self else { return Ok(()) };
        if self.is_stale() {
            // Without Do Not Retry: this queue is about to close, and its host tries another path.
            return Err(Status::ABORTED_SQ_DELETION);
        }
        let (namespace, barred) = access(association, subsystem, entry.sqe.nsid)?;
        rules::may_begin(&entry.sqe, &entry.plan, range, namespace, barred)
    }
}

/// Looks up the namespace of an I/O command, if there is one, and what reservations deny its host
/// there: once for all checks.
///
/// # Errors
/// The path related status of the ANA state of the namespace.
#[inline(always)]
pub(super) fn access<'a>(
    association: &Association,
    subsystem: &'a Subsystem,
    nsid: u32,
) -> Result<(Result<&'a Namespace, Status>, Barred), Status> {
    let namespace = subsystem.namespace(nsid);
    association.reach.check_io(namespace)?;
    Ok((namespace, association.reservations.barred(nsid)))
}

/// The same in the usual case: there is a namespace, and its ANA state permits commands.
#[inline(always)]
pub(super) fn reached<'a>(
    association: &Association,
    subsystem: &'a Subsystem,
    nsid: u32,
) -> Option<(&'a Namespace, Barred)> {
    let namespace = subsystem.namespace(nsid).ok()?;
    association.reach.check(namespace.ana_group).ok()?;
    Some((namespace, association.reservations.barred(nsid)))
}
