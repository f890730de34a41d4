//! What is made known of a queue's commands: counts, where their time went, which were slow.

use nvme::Sqe;

use super::{Io, Queue, Serves};
use crate::command::Plan;
use crate::observe::run::Whose;
use crate::observe::slow::SlowCommand;
use crate::observe::{Kind, Rows, Run};

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
    pub(super) fn observe(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.slots[usize::from(slot)];
        let failed = !entry.status.is_success();
        let bytes = match &entry.plan {
            _ if failed => 0,
            Plan::Load { to, .. } => to.len,
            Plan::Store { from, .. } => from.len_bytes(),
            _ => 0,
        };
        let (stages_ns, total_ns) = entry.clock.end(io.sent_ns);
        let whose = (self.key, entry.sqe.nsid, entry.sqe.opcode);
        if !io.run.goes_on(whose, stages_ns)
            && !begin(io.run, self.rows.as_ref(), (&entry.sqe, whose), (stages_ns, total_ns))
        {
            return;
        }
        if io.run.add(bytes, failed) {
            let stages_ns = *stages_ns;
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

/// Begins another run with a command; false when it is none that is counted.
#[inline(never)]
fn begin(
    run: &mut Run,
    rows: Option<&Rows>,
    (sqe, whose): (&Sqe, Whose),
    (stages_ns, total_ns): (&[u64; 6], u64),
) -> bool {
    let (Some(rows), Some(kind)) = (rows, Kind::of(sqe)) else { return false };
    let slow = rows.observer.is_slow(total_ns);
    run.begin(whose, (rows.of(sqe.nsid), kind), stages_ns, (total_ns, slow));
    true
}
