//! What a queue pair serves, and what commands may do there.

use std::sync::Arc;
use std::time::Instant;

use nvme::Status;

use super::request::Request;
use crate::command::io as rules;
use crate::controller::Controller;
use crate::controller::association::Association;
use crate::subsystem::Subsystem;
use nvmfd_blockdev::{DeviceId, IoRequest};

/// What a queue pair serves.
#[derive(Debug)]
pub(super) enum QueueRole {
    /// Nothing before Connect.
    Nothing { deadline: Instant },
    /// An admin queue owns its controller.
    Admin(Box<Controller>),
    /// An I/O queue.
    Io { association: Arc<Association>, subsystem: Arc<Subsystem>, epoch: u16 },
}

impl QueueRole {
    /// The association of the queue; none before its Connect.
    #[inline]
    pub(super) fn association(&self) -> Option<&Arc<Association>> {
        match self {
            QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => Some(&controller.association),
            QueueRole::Io { association, .. } => Some(association),
        }
    }

    /// What its host sees of the subsystem.
    pub(super) fn subsystem(&self) -> Option<&Subsystem> {
        match self {
            QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => controller.subsystem().map(|subsystem| &**subsystem),
            QueueRole::Io { subsystem, .. } => Some(subsystem),
        }
    }

    /// The namespace on a device.
    pub(super) fn nsid_of(&self, backing: DeviceId) -> Option<u32> {
        let mut namespaces = self.subsystem()?.namespaces.iter();
        namespaces.find(|namespace| namespace.backing == backing).map(|namespace| namespace.nsid)
    }

    /// Whether this is an I/O queue.
    #[inline]
    pub(super) fn is_io(&self) -> bool {
        matches!(self, QueueRole::Io { .. })
    }

    /// Whether this is an I/O queue whose controller was reset or no longer exists.
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

    /// Whether a step of a command may begin now. What was checked when it came is checked again:
    /// it may have waited for limits, buffers, its data or other commands, and a host that was told
    /// of a reservation meanwhile must not find it carried out afterwards.
    #[inline]
    pub(super) fn may_begin(&self, entry: &Request, op: &IoRequest) -> Result<(), Status> {
        // To make durable what was done changes nothing.
        match op {
            IoRequest::Flush if entry.step > 0 => Ok(()),
            op => self.may_begin_at(entry, op.range()),
        }
    }

    /// The same of a step that touches this range of bytes.
    #[inline]
    pub(super) fn may_begin_at(
        &self,
        entry: &Request,
        range: Option<(u64, u64)>,
    ) -> Result<(), Status> {
        // An admin queue has orders for its whole subsystem.
        let QueueRole::Io { association, subsystem, .. } = self else { return Ok(()) };
        association.reach.check_io(&entry.sqe, subsystem)?;
        let barred = association.reservations.barred(entry.sqe.nsid);
        rules::may_begin(&entry.sqe, &entry.plan, range, subsystem, barred)
    }
}
