//! Commands of a queue pair that are in progress.

use super::request::{Request, State, WaitReason};
use super::{Connection, QueuePair};
use crate::stats::command_identity::CommandIdentity;
use crate::stats::in_flight::InFlight;

impl QueuePair {
    /// Ages of the commands in progress, with their slots. An Asynchronous Event Request is none:
    /// it waits for an event.
    pub fn ages_ns(&self, now_ns: u64) -> impl Iterator<Item = (u64, u16)> {
        let is_in_progress = |entry: &Request| {
            !matches!(entry.state(), State::Free | State::Waiting(WaitReason::Event))
        };
        let slots = if self.requests.is_empty() { 0 } else { self.requests.count() };
        let all = (0..slots).map(|slot| (slot, &self.requests[slot]));
        let found = all.filter(move |(_, entry)| is_in_progress(entry));
        found.map(move |(slot, entry)| (entry.clock.total_ns(now_ns), slot))
    }

    /// Describes the command of a slot; none before the Connect of its queue.
    pub fn in_flight(&self, slot: u16, age_ns: u64) -> Option<InFlight> {
        let entry = &self.requests[slot];
        let command = identity(entry, &self.conn)?;
        Some(InFlight { command, stage: entry.clock.stage(), age_ns })
    }
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
