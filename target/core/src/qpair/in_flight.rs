//! Commands of a queue pair that are in progress.

use super::request::{Request, State, WaitReason};
use super::{Connection, QueuePair};
use crate::stats::command_identity::CommandIdentity;
use crate::stats::in_flight::InFlight;

/// Describes the commands in progress of a queue pair; none before the Connect of its queue. An
/// Asynchronous Event Request is none: it waits for an event.
pub fn in_flight(queue: &QueuePair, now_ns: u64) -> impl Iterator<Item = InFlight> {
    let is_in_progress = |entry: &&Request| {
        !matches!(entry.state(), State::Free | State::Waiting(WaitReason::Event))
    };
    let any = (!queue.requests.is_empty()).then(|| queue.requests.iter());
    any.into_iter().flatten().filter(is_in_progress).filter_map(move |entry| {
        let command = identity(entry, &queue.conn)?;
        let age_ns = entry.clock.total_ns(now_ns);
        Some(InFlight { command, stage: entry.clock.stage(), age_ns })
    })
}

/// Identity of a command; none before the Connect of its queue.
pub(super) fn identity(entry: &Request, conn: &Connection) -> Option<CommandIdentity> {
    let association = conn.role.association()?;
    Some(CommandIdentity {
        subsystem: association.subsystem,
        host: association.host,
        qid: conn.qid,
        cid: entry.sqe.cid,
        opcode: entry.sqe.opcode,
        nsid: entry.sqe.nsid,
        slba: entry.sqe.slba(),
    })
}
