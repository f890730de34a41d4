//! What is made known of a queue's commands: counts, where their time went, which were slow.

use super::{Io, Queue, Serves};
use crate::command::Plan;
use crate::observe::Kind;
use crate::observe::slow::SlowCommand;

impl Queue {
    /// Finds the rows that its commands are counted in. Not on the way of an I/O: when it
    /// connects, and when its subsystem has changed.
    pub(super) fn find_rows(&mut self, io: &mut Io<'_>) {
        let Serves::Io { association, subsystem, .. } = &self.serves else { return };
        let nsids = subsystem.namespaces.iter().map(|namespace| namespace.nsid);
        let observer = io.registry.observer(io.reactor);
        self.rows = observer.map(|observer| observer.rows(subsystem.nqn, association.host, nsids));
    }

    /// A command was answered, and nothing of the answer is under way any more: the host's transport
    /// has it, or the connection has ended.
    #[inline]
    pub(super) fn observe(&self, slot: u16, io: &Io<'_>) {
        let Some(rows) = &self.rows else { return };
        let entry = &self.slots[usize::from(slot)];
        let Some(kind) = Kind::of(&entry.sqe) else { return };
        let bytes = match &entry.plan {
            _ if !entry.status.is_success() => 0,
            Plan::Load { to, .. } => to.len,
            Plan::Store { from, .. } => from.len_bytes(),
            _ => 0,
        };
        let (stages_ns, total_ns) = entry.clock.end(io.sent_ns);
        let tally = &rows.of(entry.sqe.nsid).kinds[kind as usize];
        tally.count(bytes.into(), !entry.status.is_success(), &stages_ns, total_ns);
        if rows.observer.is_slow(total_ns) {
            self.note_slow(slot, bytes, (stages_ns, total_ns), io);
        }
    }

    #[cold]
    fn note_slow(
        &self,
        slot: u16,
        bytes: u32,
        (stages_ns, total_ns): ([u64; 6], u64),
        io: &Io<'_>,
    ) {
        let (Some(rows), Some(association)) = (&self.rows, self.association()) else { return };
        let entry = &self.slots[usize::from(slot)];
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
            stages_ns,
            total_ns,
        });
    }
}
