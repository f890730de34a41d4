//! Events that a queue pair records in the Persistent Event log of its subsystem.

use nvme::persistent_event::{FormatStart, TimestampChange};
use nvme::{AdminOpcode, Sqe, Text};

use super::Io;
use super::role::QueueRole;
use crate::command::FNA;
use crate::command::identify::FIRMWARE;
use crate::subsystem::event_log::PersistentEvent;

/// Records that the host has reset its controller.
pub(super) fn note_reset(role: &QueueRole, io: &Io<'_>) {
    note(role, io, |cntlid| {
        Some(PersistentEvent::PowerOnOrReset { firmware: Text::lossy(FIRMWARE), cntlid })
    });
}

/// Records that an admin command begins. The end of a format is recorded by the code that executes
/// it, because the host may have disconnected by then.
pub(super) fn note_start(role: &QueueRole, sqe: &Sqe, io: &Io<'_>) {
    let start = FormatStart { nsid: sqe.nsid, fna: FNA, cdw10: sqe.cdw10 };
    let format = !sqe.is_fabrics() && sqe.admin_opcode() == AdminOpcode::FORMAT_NVM;
    note(role, io, |cntlid| format.then_some(PersistentEvent::FormatStart(cntlid, start)));
}

/// Records that the host has set the timestamp of its controller.
pub(super) fn note_timestamp(role: &QueueRole, change: TimestampChange, io: &Io<'_>) {
    note(role, io, |cntlid| Some(PersistentEvent::TimestampChange(cntlid, change)));
}

fn note<'a>(role: &QueueRole, io: &Io<'_>, event: impl FnOnce(u16) -> Option<PersistentEvent<'a>>) {
    let QueueRole::Admin(controller) = role else { return };
    let Some(subsystem) = controller.subsystem() else { return };
    let Some(log) = subsystem.usage.history() else { return };
    if let Some(event) = event(controller.association.cntlid) {
        log.note(event, &io.shared.power.at(io.now));
    }
}
