//! What a queue notes in the Persistent Event log of its subsystem.

use nvme::persistent_event::FormatStart;
use nvme::{AdminOpcode, Sqe, Status, Text};

use super::{Io, Queue, Serves};
use crate::command::identify::FIRMWARE;
use crate::command::{FNA, Plan};
use crate::history::Happening;

impl Queue {
    /// The host has reset its controller.
    pub(super) fn note_reset(&self, io: &Io<'_>) {
        self.note(io, |cntlid| {
            Some(Happening::PowerOnOrReset { firmware: Text::lossy(FIRMWARE), cntlid })
        });
    }

    /// An admin command begins.
    pub(super) fn note_start(&self, sqe: &Sqe, io: &Io<'_>) {
        let start = FormatStart { nsid: sqe.nsid, fna: FNA, cdw10: sqe.cdw10 };
        let format = is_format(sqe);
        self.note(io, |cntlid| format.then_some(Happening::FormatStart(cntlid, start)));
    }

    /// An admin command that has begun is about to be answered.
    pub(super) fn note_end(&self, slot: u16, status: Status, io: &Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let (nsid, begun) = (entry.sqe.nsid, !matches!(entry.plan, Plan::Reply(_)));
        let format = begun && is_format(&entry.sqe);
        self.note(io, |cntlid| {
            format.then_some(Happening::FormatCompletion { cntlid, nsid, status })
        });
    }

    fn note<'a>(&self, io: &Io<'_>, happening: impl FnOnce(u16) -> Option<Happening<'a>>) {
        let Serves::Admin(controller) = &self.serves else { return };
        let Some(subsystem) = controller.subsystem() else { return };
        let Some(history) = subsystem.usage.history() else { return };
        if let Some(happening) = happening(controller.association.cntlid) {
            history.note(happening, &io.registry.power.at(io.now));
        }
    }
}

fn is_format(sqe: &Sqe) -> bool {
    !sqe.is_fabrics() && sqe.admin_opcode() == AdminOpcode::FORMAT_NVM
}
