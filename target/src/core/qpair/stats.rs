//! What is made known of a queue's commands: counts, where their time went, which were slow.

use super::{Io, QueuePair, QueueRole};
use crate::core::command::Plan;
use crate::core::stats::Kind;
use crate::core::stats::slow_log::SlowCommand;

impl QueuePair {
    /// Finds the rows that its commands are counted in. Not on the way of an I/O: when it
    /// connects, and when its subsystem has changed.
    pub(super) fn find_rows(&mut self, io: &mut Io<'_>) {
        let QueueRole::Io { association, subsystem, .. } = &self.serves else { return };
        let nsids = subsystem.namespaces.iter().map(|namespace| namespace.nsid);
        let observer = io.shared.observer(io.reactor);
        io.run.forget();
        self.rows = observer.map(|observer| observer.rows(subsystem.nqn, association.host, nsids));
    }

    /// A command was answered, and nothing of the answer is under way any more: the host's transport
    /// has it, or the connection has ended.
    #[inline]
    pub(super) fn observe(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let whose = (self.key, entry.sqe.nsid, entry.sqe.opcode);
        if !io.run.goes_on(whose, &entry.clock) && !self.begin_run(slot, io) {
            return;
        }
        let slow = match entry.status.is_success() {
            true => io.run.add(moved_bytes(&entry.plan)),
            false => io.run.add_failure(),
        };
        if slow {
            self.note_slow(slot, io);
        }
    }

    /// Begins another run with a command; false when it is none that is counted.
    #[inline(never)]
    fn begin_run(&self, slot: u16, io: &mut Io<'_>) -> bool {
        let entry = &self.slots[usize::from(slot)];
        let Some(rows) = &self.rows else { return false };
        let whose = (self.key, entry.sqe.nsid, entry.sqe.opcode);
        if !io.run.knows(whose) {
            let Some(kind) = Kind::of(&entry.sqe) else { return false };
            io.run.count_in(whose, rows.of(entry.sqe.nsid), kind);
        }
        let slow = rows.observer.is_slow(entry.clock.total_ns(io.sent_ns));
        io.run.begin(&entry.clock, io.sent_ns, slow);
        true
    }

    #[cold]
    fn note_slow(&self, slot: u16, io: &Io<'_>) {
        let (Some(rows), Some(association)) = (&self.rows, self.association()) else { return };
        let entry = &self.slots[usize::from(slot)];
        let bytes = if entry.status.is_success() { moved_bytes(&entry.plan) } else { 0 };
        rows.observer.note_slow(SlowCommand {
            at: io.now,
            subsystem: association.subsystem,
            host: association.host,
            qid: self.request.qid,
            cid: entry.sqe.cid,
            opcode: entry.sqe.opcode,
            nsid: entry.sqe.nsid,
            slba: entry.sqe.slba(),
            bytes: bytes.into(),
            status: entry.status,
            stages_ns: entry.clock.stages_ns(io.sent_ns),
            total_ns: entry.clock.total_ns(io.sent_ns),
        });
    }
}

/// Bytes that a command has read or written, when it has succeeded.
#[inline]
fn moved_bytes(plan: &Plan) -> u32 {
    match plan {
        Plan::Load { to, .. } => to.len,
        Plan::Store { from, .. } => from.len_bytes(),
        _ => 0,
    }
}
