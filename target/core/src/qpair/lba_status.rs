//! Get LBA Status: a worker searches the backing store, and the list is sent afterwards. A command holds no
//! data buffer while it waits for the worker, whose device may hang.

use nvme::Status;

use super::request::{State, WaitReason};
use super::role::QueueRole;
use super::{Io, QueuePair};
use crate::command::Plan;
use crate::command::lba_status::{AllocationProbe, respond};
use crate::message::Message;
use crate::sched::offload::{Job, SearchJob, Work};
use nvmfd_blockdev::IoCompletion;

impl QueuePair {
    /// Submits the search of a command to a worker, or responds if there is nothing to search.
    pub(super) fn search_allocated(&mut self, slot: u16, io: &mut Io<'_>) {
        let tag = self.requests.tag(slot);
        let entry = &mut self.requests[slot];
        let Plan::LbaStatus(query) = &mut entry.plan else { return };
        let device = query.extent.backing;
        let store = Some(device).filter(|_| !query.reports_all);
        let Some(store) = store.and_then(|device| io.disk.searchable(device)) else {
            return self.respond_lba_status(slot, io);
        };
        let probe = AllocationProbe::new(store);
        query.probe = Some(probe.clone());
        let (search, reactor) = (query.search, io.shared.registry.reactor(io.reactor).clone());
        let connection = entry.watch_connection();
        let run = Box::new(move || {
            let outcome = probe.run(&search, &connection);
            // A reactor that has ended needs no completion.
            let _ = reactor.send(Message::Answer(IoCompletion { tag, buf: None, outcome }));
        });
        let host = self.conn.role.association().map(|association| association.host_id);
        let job = host.map(|host| Job::Search(SearchJob { device, host, run: Work(run) }));
        self.offload(slot, job.ok_or(Status::INTERNAL_ERROR), io);
    }

    /// Responds with what was found.
    pub(super) fn respond_lba_status(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        let (Plan::LbaStatus(query), QueueRole::Admin(controller)) = (&entry.plan, &self.conn.role)
        else {
            return self.complete(slot, Err(Status::INTERNAL_ERROR), io);
        };
        let mut plan = respond(&entry.sqe, query, controller);
        // A rollback may have put another file there meanwhile.
        let device = query.extent.backing;
        let is_same = |probe: &AllocationProbe| probe.is_of(io.disk.searchable(device).as_ref());
        if !query.probe.as_ref().is_none_or(is_same) {
            plan = Err(Status::COMMAND_INTERRUPTED);
        }
        match plan {
            Ok(plan) => {
                entry.plan = plan;
                entry.enter(State::Waiting(WaitReason::Buffers));
                self.admit(slot, io);
            }
            Err(status) => self.complete(slot, Err(status), io),
        }
    }
}
