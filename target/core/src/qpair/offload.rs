//! Jobs that a worker executes for a command: changes of reservations, of write protection and of whole
//! namespaces, which may block on files and devices.

use std::sync::Arc;

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};

use super::Io;
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::{Plan, ns_management};
use crate::sched::offload::{Job, NamespaceJob, ReplyTo, ReservationRequest, WriteProtectRequest};
use crate::subsystem::ns_request::{CreatedNsid, NamespaceRequest};
use crate::subsystem::reservation::{Order, Reservation};
use crate::subsystem::write_protect::Protection;

/// Returns the job of a reservation command.
pub(super) fn reservation(
    requests: &Requests,
    slot: u16,
    (of, order): (Vec<Arc<Reservation>>, Order),
    role: &QueueRole,
    io: &Io<'_>,
) -> Result<Job, Status> {
    let Some(association) = role.association() else { return Err(Status::INTERNAL_ERROR) };
    if association.host == Nqn::UNNAMED {
        // The owner of the reservation could not be determined later.
        return Err(Status::OPERATION_DENIED.with_dnr());
    }
    let (reactor, tag) = (io.reactor, requests.tag(slot));
    let host = association.host_id;
    Ok(Job::Reserve(ReservationRequest { of, host, order, reactor, tag }))
}

/// Returns the job of a reservation command whose keys have arrived.
pub(super) fn reserve(
    requests: &Requests,
    slot: u16,
    role: &QueueRole,
    io: &Io<'_>,
) -> Result<Job, Status> {
    let entry = &requests[slot];
    let Plan::Reserve { of, .. } = &entry.plan else { return Err(Status::INTERNAL_ERROR) };
    let order = Order::parse(&entry.sqe, entry.bytes(io.pool))?;
    reservation(requests, slot, (vec![Arc::clone(of)], order), role, io)
}

/// Returns the job of a change of write protection.
pub(super) fn write_protect(
    requests: &Requests,
    slot: u16,
    of: Vec<Arc<Protection>>,
    state: WriteProtectState,
    io: &Io<'_>,
) -> Job {
    let from = ReplyTo::Reactor(io.reactor, requests.tag(slot));
    Job::Protect(WriteProtectRequest { of, state, from })
}

/// Returns the job of a request about a whole namespace, which becomes the plan of its command.
pub(super) fn namespace(
    requests: &mut Requests,
    slot: u16,
    (what, made): (NamespaceRequest, CreatedNsid),
    role: &QueueRole,
    io: &Io<'_>,
) -> Result<Job, Status> {
    let Some(association) = role.association() else { return Err(Status::INTERNAL_ERROR) };
    let connection = requests[slot].watch_connection();
    let job = NamespaceJob {
        subsystem: association.subsystem,
        host: association.host,
        host_id: association.host_id,
        cntlid: association.cntlid,
        connection,
        what: what.clone(),
        made: made.clone(),
        reactor: io.reactor,
        tag: requests.tag(slot),
    };
    requests[slot].plan = Plan::Order { what, made };
    Ok(Job::Namespace(Box::new(job)))
}

/// As [`reserve`], for a Namespace Management or Attachment command whose data have arrived.
pub(super) fn manage(
    requests: &mut Requests,
    slot: u16,
    role: &QueueRole,
    io: &Io<'_>,
) -> Result<Job, Status> {
    let QueueRole::Admin(controller) = role else { return Err(Status::INVALID_OPCODE.with_dnr()) };
    let entry = &requests[slot];
    let what = ns_management::order(&entry.sqe, entry.bytes(io.pool), controller)?;
    namespace(requests, slot, (what, CreatedNsid::default()), role, io)
}
