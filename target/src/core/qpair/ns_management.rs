//! Orders of hosts about namespaces: handed to the steward, who may wait for disks.

use nvme::Status;

use super::{Io, QueuePair, QueueRole};
use crate::core::command::{Plan, ns_management};
use crate::core::sched::offload::{Job, NamespaceJob};
use crate::core::subsystem::ns_request::{CreatedNsid, NamespaceRequest};

impl QueuePair {
    /// The data of a Namespace Management or Attachment command are here.
    pub(super) fn manage(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let what = match &self.serves {
            QueueRole::Admin(controller) => {
                ns_management::order(&entry.sqe, entry.bytes(io.pool), controller)
            }
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        };
        match what {
            Ok(what) => self.ask_steward(slot, what, CreatedNsid::default(), io),
            Err(status) => self.answer(slot, Err(status), io),
        }
    }

    /// Hands an order to the steward. Its answer comes home as that of the keeper does.
    pub(super) fn ask_steward(
        &mut self,
        slot: u16,
        what: NamespaceRequest,
        made: CreatedNsid,
        io: &mut Io<'_>,
    ) {
        let Some(association) = self.association() else {
            return self.answer(slot, Err(Status::INTERNAL_ERROR), io);
        };
        let job = NamespaceJob {
            subsystem: association.subsystem,
            host: association.host,
            host_id: association.host_id,
            cntlid: association.cntlid,
            what: what.clone(),
            made: made.clone(),
            reactor: io.reactor,
            tag: self.tag(slot),
        };
        self.slot(slot).plan = Plan::Order { what, made };
        self.offload(slot, Job::Namespace(Box::new(job)), io);
    }
}
