//! Statistics of a queue pair's commands: work for the SMART log, and times of their stages.

use std::sync::Arc;
use std::time::Instant;

use nvme::Status;

use super::in_flight::identity;
use super::request::{Request, State};
use super::requests::Requests;
use super::role::QueueRole;
use super::{Connection, Io};
use crate::command::Plan;
use crate::stats::batch::Counters;
use crate::stats::slow_log::SlowCommand;
use crate::stats::{Kind, Rows};
use crate::subsystem::usage::{NsidSet, ReactorUsage};
use crate::subsystem::work::Work;

/// Statistics of a queue pair's commands.
#[derive(Debug, Default)]
pub(super) struct QueueStats {
    /// Where work is counted for the SMART log; empty before it is an I/O queue.
    usage: Arc<ReactorUsage>,
    /// The namespaces of commands since their busy time was noted.
    busy: NsidSet,
    /// The rows in which commands are counted, once it is an I/O queue.
    rows: Option<Rows>,
}

impl QueueStats {
    /// Counts work, but for that of Reads and Writes: [`QueueStats::observe`] counts it.
    fn count(&mut self, nsid: u32, work: &Work) {
        self.busy.insert(nsid);
        self.usage.of(nsid).into_iter().for_each(|counters| counters.add(work));
    }

    /// Counts what a command has read.
    pub(super) fn count_read(&mut self, entry: &Request, bytes: u64) {
        let work = Work { reads: 1, units_read: bytes >> 9, ..Work::default() };
        self.count(entry.sqe.nsid, &work);
    }

    /// Counts what a command has written.
    pub(super) fn count_write(&mut self, entry: &Request, bytes: u64) {
        let work = Work { writes: 1, units_written: bytes >> 9, ..Work::default() };
        self.count(entry.sqe.nsid, &work);
    }

    /// Counts a failure, if it is a media error.
    pub(super) fn count_failure(&mut self, nsid: u32, status: Status) {
        const MEDIA: u8 = 2;
        let harmless = [Status::COMPARE_FAILURE, Status::ACCESS_DENIED, Status::DEALLOCATED_BLOCK];
        let is_harmless = || harmless.iter().any(|other| status.is(*other));
        if status.sct() == MEDIA && !is_harmless() {
            self.count(nsid, &Work { media_errors: 1, ..Work::default() });
        }
    }

    /// Notes the busy time of the namespaces that have commands, or had any since the last time.
    pub(super) fn note_busy(&mut self, role: &QueueRole, requests: &Requests, now: Instant) {
        let QueueRole::Io { subsystem, .. } = role else { return };
        if !requests.is_empty() {
            for entry in requests.iter() {
                let under_way = !matches!(entry.state(), State::Free | State::Replying);
                if under_way && subsystem.namespace(entry.sqe.nsid).is_ok() {
                    self.busy.insert(entry.sqe.nsid);
                }
            }
        }
        let mut busy = self.busy.take().peekable();
        if busy.peek().is_some() {
            subsystem.usage.note_busy(busy, now);
        }
    }

    /// Looks up where its commands are counted: when it connects and when its subsystem
    /// has changed, not for each I/O.
    pub(super) fn find_rows(&mut self, role: &QueueRole, io: &mut Io<'_>) {
        let QueueRole::Io { association, subsystem, .. } = role else { return };
        let nsids = subsystem.namespaces.iter().map(|namespace| namespace.nsid);
        self.usage = subsystem.usage.reactor(io.reactor, nsids.clone());
        let observer = io.shared.observer(io.reactor);
        io.run.forget();
        let controller = (subsystem.nqn, association.host, association.id);
        self.rows = observer.map(|observer| observer.rows(controller, nsids));
        if self.rows.as_ref().is_some_and(|rows| !rows.apart) {
            association.note_shared_stats();
        }
    }

    /// Counts a completed command whose response is no longer in flight: the host's transport has
    /// acknowledged it, or the connection has ended. `key`: of the queue pair.
    #[inline]
    pub(super) fn observe(
        &mut self,
        entry: &Request,
        key: u32,
        conn: &Connection,
        io: &mut Io<'_>,
    ) {
        let whose = (key, entry.sqe.nsid, entry.sqe.opcode);
        if !io.run.goes_on(whose, &entry.clock) && !self.observe_other(entry, key, conn, io) {
            return;
        }
        let slow = match entry.status.is_success() {
            true => io.run.add(moved_bytes(&entry.plan)),
            false => io.run.add_failure(),
        };
        if slow {
            self.note_slow(entry, conn, io);
        }
    }

    /// Counts a command that differs from those of the run; true if it is the first of a new run
    /// instead. A command for another namespace that took its times is counted by itself.
    #[inline(never)]
    fn observe_other(
        &mut self,
        entry: &Request,
        key: u32,
        conn: &Connection,
        io: &mut Io<'_>,
    ) -> bool {
        let Some(rows) = &self.rows else { return false };
        let nsid = entry.sqe.nsid;
        let whose = (key, nsid, entry.sqe.opcode);
        let slow = || rows.observer.is_slow(entry.clock.total_ns(io.sent_ns));
        if io.run.knows(whose) {
            self.busy.insert(nsid);
            io.run.begin(&entry.clock, io.sent_ns, slow());
            return true;
        }
        let Some(kind) = Kind::of(&entry.sqe) else { return false };
        self.busy.insert(nsid);
        let counters = Counters { row: rows.of(nsid), kind, work: self.usage.of(nsid) };
        let is_single = entry.status.is_success() && io.run.is_single(whose, &entry.clock);
        if !is_single {
            io.run.begin_for(whose, &counters, (&entry.clock, io.sent_ns), slow());
        } else if io.run.count_one(moved_bytes(&entry.plan), &counters) {
            self.note_slow(entry, conn, io);
        }
        !is_single
    }

    #[cold]
    fn note_slow(&self, entry: &Request, conn: &Connection, io: &Io<'_>) {
        let (Some(rows), Some(command)) = (&self.rows, identity(entry, conn)) else { return };
        let bytes = if entry.status.is_success() { moved_bytes(&entry.plan) } else { 0 };
        rows.observer.note_slow(SlowCommand {
            at: io.now,
            command,
            bytes: bytes.into(),
            status: entry.status,
            stages_ns: entry.clock.stages_ns(io.sent_ns),
            total_ns: entry.clock.total_ns(io.sent_ns),
        });
    }
}

/// Returns the bytes that a successful command has read or written.
#[inline]
fn moved_bytes(plan: &Plan) -> u32 {
    match plan {
        Plan::Load { to, .. } => to.len,
        Plan::Store { from, .. } => from.len_bytes(),
        _ => 0,
    }
}
