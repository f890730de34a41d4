//! What a queue notes in the Persistent Event log of its subsystem.

use nvme::persistent_event::FormatStart;
use nvme::{AdminOpcode, Sqe, Text};

use super::{Io, QueuePair, QueueRole};
use crate::core::command::FNA;
use crate::core::command::identify::FIRMWARE;
use crate::core::subsystem::event_log::PersistentEvent;

impl QueuePair {
    /// The host has reset its controller.
    pub(super) fn note_reset(&self, io: &Io<'_>) {
        self.note(io, |cntlid| {
            Some(PersistentEvent::PowerOnOrReset { firmware: Text::lossy(FIRMWARE), cntlid })
        });
    }

    /// An admin command begins. That a format has ended is told by who carries it out: its host may
    /// be gone by then.
    pub(super) fn note_start(&self, sqe: &Sqe, io: &Io<'_>) {
        let start = FormatStart { nsid: sqe.nsid, fna: FNA, cdw10: sqe.cdw10 };
        let format = is_format(sqe);
        self.note(io, |cntlid| format.then_some(PersistentEvent::FormatStart(cntlid, start)));
    }

    fn note<'a>(&self, io: &Io<'_>, happening: impl FnOnce(u16) -> Option<PersistentEvent<'a>>) {
        let QueueRole::Admin(controller) = &self.serves else { return };
        let Some(subsystem) = controller.subsystem() else { return };
        let Some(history) = subsystem.usage.history() else { return };
        if let Some(happening) = happening(controller.association.cntlid) {
            history.note(happening, &io.shared.power.at(io.now));
        }
    }
}

fn is_format(sqe: &Sqe) -> bool {
    !sqe.is_fabrics() && sqe.admin_opcode() == AdminOpcode::FORMAT_NVM
}
