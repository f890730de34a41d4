//! Writes of a host that are not flushed ([`crate::subsystem::unflushed`]).

use nvme::Status;

use super::request::Request;
use super::role::QueueRole;
use crate::command::Plan;
use nvmfd_blockdev::DeviceId;

/// Records whether the host has data to flush after an operation has completed. `is_open`: its
/// connection is open, so a failure is reported to it.
#[inline(always)]
pub(super) fn note(role: &QueueRole, entry: &Request, outcome: Result<(), Status>, is_open: bool) {
    let Some(association) = role.association() else { return };
    let nsid = entry.sqe.nsid;
    match (&entry.plan, outcome) {
        (Plan::Store { fua: false, .. } | Plan::Zero { fua: false, .. }, Ok(()))
        | (Plan::Deallocate { .. }, Ok(())) => association.unflushed.note_write(nsid),
        (Plan::Copy { job, .. }, Ok(())) if !job.fua => association.unflushed.note_write(nsid),
        (Plan::Flush { covers, .. }, outcome) => {
            end_flush(role, (nsid, *covers), outcome, is_open);
        }
        (Plan::ShutDown { backings, covers, .. }, outcome) => {
            let backing = backings.get(entry.step as usize);
            if let Some(nsid) = backing.and_then(|backing| role.nsid_of(*backing)) {
                end_flush(role, (nsid, *covers), outcome, is_open);
            }
        }
        _ => {}
    }
}

/// Records that an I/O queue has written to a namespace.
#[inline]
pub(super) fn note_write(role: &QueueRole, nsid: u32) {
    if let QueueRole::Io { association, .. } = role {
        association.unflushed.note_write(nsid);
    }
}

/// Whether a flush of its namespace may begin; if so, it covers what was written so far.
///
/// # Errors
/// Write Fault: earlier writes of the host may be lost, and this has not been reported to it. With
/// Do Not Retry: Linux would repeat the flush by itself, and report the success of that instead.
pub(super) fn begin_flush(role: &QueueRole, entry: &mut Request) -> Result<(), Status> {
    let nsid = entry.sqe.nsid;
    begin(role, entry, nsid)
}

/// The same for one of the flushes of a shutdown.
pub(super) fn begin_shutdown_flush(
    role: &QueueRole,
    entry: &mut Request,
    backing: DeviceId,
) -> Result<(), Status> {
    role.nsid_of(backing).map_or(Ok(()), |nsid| begin(role, entry, nsid))
}

fn begin(role: &QueueRole, entry: &mut Request, nsid: u32) -> Result<(), Status> {
    let Some(association) = role.association() else { return Ok(()) };
    let begun = association.unflushed.begin_flush(nsid).ok_or(Status::WRITE_FAULT.with_dnr())?;
    if let Plan::Flush { covers, .. } | Plan::ShutDown { covers, .. } = &mut entry.plan {
        *covers = begun;
    }
    Ok(())
}

/// Records that a flush of a shutdown has failed. The other devices are flushed all the same; the
/// status of the controller reports that not all were. Returns the device of the first failure
/// only.
pub(super) fn fail_shutdown(entry: &mut Request) -> Option<Option<DeviceId>> {
    let step = entry.step;
    let Plan::ShutDown { backings, durable, .. } = &mut entry.plan else { return None };
    let backing = backings.get(step as usize).copied();
    std::mem::replace(durable, false).then_some(backing)
}

fn end_flush(
    role: &QueueRole,
    (nsid, covers): (u32, u16),
    outcome: Result<(), Status>,
    is_open: bool,
) {
    let Some(association) = role.association() else { return };
    let Err(status) = outcome else { return association.unflushed.end_flush(nsid, covers) };
    let namespace = role.subsystem().and_then(|subsystem| subsystem.namespace(nsid).ok());
    let failure = namespace.and_then(|namespace| namespace.health.sync_failure());
    let reported = failure == Some(status) && is_open;
    association.unflushed.end_failed_flush(nsid, reported);
}
