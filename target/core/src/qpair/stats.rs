//! Statistics of a queue pair's commands: counters for the SMART log, and times of their stages.

use std::time::Instant;

use nvme::Status;

use super::in_flight::identity;
use super::request::{Request, State};
use super::requests::Requests;
use super::role::QueueRole;
use super::{Connection, Io};
use crate::command::Plan;
use crate::stats::slow_log::SlowCommand;
use crate::stats::{Kind, Rows};
use crate::subsystem::usage::{IoCounters, Work};

/// Statistics of a queue pair's commands.
#[derive(Debug, Default)]
pub(super) struct QueueStats {
    /// For the SMART log, until they are flushed.
    counters: IoCounters,
    /// The rows in which commands are counted, once it is an I/O queue.
    rows: Option<Rows>,
}

impl QueueStats {
    /// Returns the counters of a namespace.
    #[inline]
    fn work(&mut self, nsid: u32, role: &QueueRole) -> &mut Work {
        if !self.counters.has(nsid) {
            self.begin_counting(nsid, role);
        }
        self.counters.of(nsid)
    }

    #[inline(never)]
    fn begin_counting(&mut self, nsid: u32, role: &QueueRole) {
        if let (Some((nsid, evicted)), QueueRole::Io { association, subsystem, .. }) =
            (self.counters.begin(nsid), role)
        {
            association.usage.add(&evicted);
            subsystem.usage.add(nsid, &evicted);
        }
    }

    /// Counts a read of this length.
    #[inline]
    pub(super) fn count_read(&mut self, entry: &Request, bytes: u64, role: &QueueRole) {
        let work = self.work(entry.sqe.nsid, role);
        work.reads += 1;
        work.units_read += bytes >> 9;
    }

    /// Counts a write of this length.
    #[inline]
    pub(super) fn count_write(&mut self, entry: &Request, bytes: u64, role: &QueueRole) {
        let work = self.work(entry.sqe.nsid, role);
        work.writes += 1;
        work.units_written += bytes >> 9;
    }

    /// Counts a failure, if it is a media error.
    pub(super) fn count_failure(&mut self, nsid: u32, status: Status, role: &QueueRole) {
        const MEDIA: u8 = 2;
        let harmless = [Status::COMPARE_FAILURE, Status::ACCESS_DENIED, Status::DEALLOCATED_BLOCK];
        let is_harmless = || harmless.iter().any(|other| status.is(*other));
        if role.is_io() && status.sct() == MEDIA && !is_harmless() {
            self.work(nsid, role).media_errors += 1;
        }
    }

    /// Adds the counters to those of the association and the subsystem.
    pub(super) fn hand_in(&mut self, role: &QueueRole, requests: &Requests, now: Instant) {
        let QueueRole::Io { association, subsystem, .. } = role else { return };
        for (nsid, work) in self.counters.take() {
            association.usage.add(&work);
            association.usage.note_busy(now);
            subsystem.usage.add(nsid, &work);
            subsystem.usage.note_busy(nsid, now);
        }
        if requests.is_empty() {
            return;
        }
        let mut noted = 0;
        for entry in requests.iter() {
            let under_way = !matches!(entry.state(), State::Free | State::Replying);
            if under_way && entry.sqe.nsid != noted && subsystem.namespace(entry.sqe.nsid).is_ok() {
                noted = entry.sqe.nsid;
                association.usage.note_busy(now);
                subsystem.usage.note_busy(noted, now);
            }
        }
    }

    /// Looks up the rows in which its commands are counted: when it connects and when its subsystem
    /// has changed, not for each I/O.
    pub(super) fn find_rows(&mut self, role: &QueueRole, io: &mut Io<'_>) {
        let QueueRole::Io { association, subsystem, .. } = role else { return };
        let nsids = subsystem.namespaces.iter().map(|namespace| namespace.nsid);
        let observer = io.shared.observer(io.reactor);
        io.run.forget();
        self.rows = observer.map(|observer| observer.rows(subsystem.nqn, association.host, nsids));
    }

    /// Counts a completed command whose response is no longer in flight: the host's transport has
    /// acknowledged it, or the connection has ended. `key`: of the queue pair.
    #[inline]
    pub(super) fn observe(&self, entry: &Request, key: u32, conn: &Connection, io: &mut Io<'_>) {
        let whose = (key, entry.sqe.nsid, entry.sqe.opcode);
        if !io.run.goes_on(whose, &entry.clock) && !self.begin_run(entry, key, io) {
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

    /// Begins a new run with a command; false if it is not a command that is counted.
    #[inline(never)]
    fn begin_run(&self, entry: &Request, key: u32, io: &mut Io<'_>) -> bool {
        let Some(rows) = &self.rows else { return false };
        let whose = (key, entry.sqe.nsid, entry.sqe.opcode);
        if !io.run.knows(whose) {
            let Some(kind) = Kind::of(&entry.sqe) else { return false };
            io.run.count_in(whose, rows.of(entry.sqe.nsid), kind);
        }
        let slow = rows.observer.is_slow(entry.clock.total_ns(io.sent_ns));
        io.run.begin(&entry.clock, io.sent_ns, slow);
        true
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
