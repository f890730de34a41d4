//! What a host has written and not flushed ([`crate::core::subsystem::unflushed`]).

use nvme::Status;

use super::{Io, Link, QueuePair, QueueRole};
use crate::blockdev::DeviceId;
use crate::core::command::Plan;
use crate::core::subsystem::Subsystem;

impl QueuePair {
    /// A disk operation of a command is home: whether the host has something to flush now.
    #[inline]
    pub(super) fn note_unflushed(&mut self, slot: u16, outcome: Result<(), Status>) {
        let entry = &self.slots[usize::from(slot)];
        let Some(association) = self.association() else { return };
        let nsid = entry.sqe.nsid;
        match (&entry.plan, outcome) {
            (Plan::Store { fua: false, .. } | Plan::Zero { fua: false, .. }, Ok(()))
            | (Plan::Deallocate { .. }, Ok(())) => association.unflushed.note_write(nsid),
            (Plan::Copy { job, .. }, Ok(())) if !job.fua => association.unflushed.note_write(nsid),
            (Plan::Flush { .. }, Err(status)) => self.end_failed_flush(nsid, status),
            (Plan::ShutDown { backings, .. }, Err(status)) => {
                let backing = backings.get(entry.step as usize);
                if let Some(nsid) = backing.and_then(|backing| self.nsid_of(*backing)) {
                    self.end_failed_flush(nsid, status);
                }
            }
            _ => {}
        }
    }

    /// Whether a flush of this namespace may begin.
    ///
    /// # Errors
    /// Write Fault: what the host has written before may be lost, and it does not know yet.
    pub(super) fn begin_flush(&self, nsid: u32) -> Result<(), Status> {
        let unflushed = self.association().map(|association| &association.unflushed);
        match unflushed.is_none_or(|unflushed| unflushed.begin_flush(nsid)) {
            true => Ok(()),
            false => Err(Status::WRITE_FAULT),
        }
    }

    /// The same for one of the flushes of a shutdown.
    pub(super) fn begin_shutdown_flush(&self, backing: DeviceId) -> Result<(), Status> {
        self.nsid_of(backing).map_or(Ok(()), |nsid| self.begin_flush(nsid))
    }

    /// One of the flushes of a shutdown has failed. The other stores are flushed all the same; the
    /// status of the controller says that not all were.
    pub(super) fn on_failed_shutdown_flush(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        let step = entry.step;
        let Plan::ShutDown { backings, durable } = &mut entry.plan else { return };
        let backing = backings.get(step as usize).copied();
        if std::mem::replace(durable, false) {
            self.tell_unflushed(backing, status, io);
        }
    }

    fn end_failed_flush(&self, nsid: u32, status: Status) {
        let Some(association) = self.association() else { return };
        let namespace = self.subsystem().and_then(|subsystem| subsystem.namespace(nsid).ok());
        let failure = namespace.and_then(|namespace| namespace.health.sync_failure());
        let reported = failure == Some(status) && self.link == Link::Open;
        association.unflushed.end_failed_flush(nsid, reported);
    }

    fn nsid_of(&self, backing: DeviceId) -> Option<u32> {
        let mut namespaces = self.subsystem()?.namespaces.iter();
        namespaces.find(|namespace| namespace.backing == backing).map(|namespace| namespace.nsid)
    }

    fn subsystem(&self) -> Option<&Subsystem> {
        match &self.serves {
            QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => controller.subsystem().map(|subsystem| &**subsystem),
            QueueRole::Io { subsystem, .. } => Some(subsystem),
        }
    }
}
