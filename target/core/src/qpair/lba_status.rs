//! Get LBA Status: a worker searches the backing store, and the list is sent afterwards. A command holds no
//! data buffer while it waits for the worker, whose device may hang.

use nvme::Status;

use super::Io;
use super::request::Request;
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::Plan;
use crate::command::lba_status::{AllocationProbe, respond};
use crate::message::Message;
use crate::sched::offload::{BoxedTask, Job, SearchJob};
use nvmfd_blockdev::IoCompletion;

/// Returns the job that searches for a command; none if there is nothing to search.
pub(super) fn search_job(
    requests: &mut Requests,
    slot: u16,
    role: &QueueRole,
    io: &mut Io<'_>,
) -> Option<Result<Job, Status>> {
    let tag = requests.tag(slot);
    let entry = &mut requests[slot];
    let Plan::LbaStatus(query) = &mut entry.plan else { return None };
    let device = query.extent.backing;
    let store = io.disk.searchable(device).filter(|_| !query.reports_all)?;
    let probe = AllocationProbe::new(store);
    query.probe = Some(probe.clone());
    let (search, reactor) = (query.search, io.shared.registry.reactor(io.reactor).clone());
    let connection = entry.watch_connection();
    let run = Box::new(move || {
        let outcome = probe.run(&search, &connection);
        // A reactor that has ended needs no completion.
        let _ = reactor.send(Message::Answer(IoCompletion { tag, buf: None, outcome }));
    });
    let host = role.association().map(|association| association.host_id);
    let job = host.map(|host| Job::Search(SearchJob { device, host, run: BoxedTask(run) }));
    Some(job.ok_or(Status::INTERNAL_ERROR))
}

/// Returns the plan that sends what was found.
pub(super) fn response(entry: &Request, role: &QueueRole, io: &mut Io<'_>) -> Result<Plan, Status> {
    let (Plan::LbaStatus(query), QueueRole::Admin(controller)) = (&entry.plan, role) else {
        return Err(Status::INTERNAL_ERROR);
    };
    // A rollback may have put another file there meanwhile.
    let device = query.extent.backing;
    let is_same = |probe: &AllocationProbe| probe.is_of(io.disk.searchable(device).as_ref());
    if !query.probe.as_ref().is_none_or(is_same) {
        return Err(Status::COMMAND_INTERRUPTED);
    }
    respond(&entry.sqe, query, controller)
}
