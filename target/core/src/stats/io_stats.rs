//! I/O statistics by namespace and host: rows for the pair, on each reactor that serves it. Rows
//! are created when a queue connects and when its subsystem changes, never on the data path.
//!
//! Each controller of a host has a row of its own, so that a command counts once for its host and
//! its controller. The row of a controller that has ended is continued by the next controller of
//! its host, which remembers how much was in it. If a reactor has many rows, further controllers of
//! a host share its row, and are not counted apart: rows of hosts come first.
//!
//! A reactor has [`MOST_ROWS`] at most. If that is too few, rows of hosts that are not connected
//! are removed: their counts are added to the row *other*, which also counts commands without a
//! row. The counts of a host that reconnects continue, as long as its rows exist.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nvme::{IoOpcode, Nqn, Sqe};

use super::histogram::{BUCKETS, Histogram, bucket, bump};
use super::reactor_stats::ReactorStats;
use super::stage_timer::{Stage, each_stage};
use crate::subsystem::work::Work;

/// Maximum of rows of a reactor, without *other*. One takes about 23 KiB.
pub const MOST_ROWS: usize = 256;

/// Rows of a reactor up to which a further controller of a host has a row of its own.
const MOST_APART: usize = MOST_ROWS / 2;

rdma::named_enum! {
    /// Kinds of commands that are counted apart.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Kind {
        /// Read.
        Read = "read",
        /// Write.
        Write = "write",
        /// Flush.
        Flush = "flush",
        /// All other commands of the I/O command set.
        Other = "other",
    }
}

impl Kind {
    /// The kind of a command of an I/O queue; none for Fabrics commands.
    #[inline]
    pub fn of(sqe: &Sqe) -> Option<Kind> {
        if sqe.is_fabrics() {
            return None;
        }
        Some(match IoOpcode(sqe.opcode) {
            IoOpcode::READ => Kind::Read,
            IoOpcode::WRITE => Kind::Write,
            IoOpcode::FLUSH => Kind::Flush,
            _ => Kind::Other,
        })
    }
}

/// Host, subsystem and namespace of a row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StatsKey {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace.
    pub nsid: u32,
    /// The host, as it calls itself.
    pub host: Nqn,
}

/// Commands of one kind, all completed.
#[derive(Debug, Default)]
pub struct OpStats {
    /// Bytes read or written by successful commands.
    pub bytes: AtomicU64,
    /// Failed commands.
    pub failures: AtomicU64,
    /// Time in each stage, summed.
    pub spent_ns: [AtomicU64; Stage::ALL.len()],
    /// Distribution of the time that each took, from the capsule to the end of the reply.
    pub total: Histogram,
    /// Distribution of each stage, of the commands for which it took any time.
    pub stages: [Histogram; Stage::ALL.len()],
}

/// Commands of one kind that took the same time in every stage, all of them over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Batch {
    /// How many.
    pub commands: u64,
    /// Bytes that all of them have read or written.
    pub bytes: u64,
    /// How many have failed.
    pub failures: u64,
}

impl Batch {
    /// The work of those that have succeeded.
    #[inline(always)]
    pub(super) fn work(&self, kind: Kind) -> Work {
        let (done, units) = (self.commands.wrapping_sub(self.failures), self.bytes >> 9);
        match kind {
            Kind::Read => Work { reads: done, units_read: units, ..Work::default() },
            Kind::Write => Work { writes: done, units_written: units, ..Work::default() },
            Kind::Flush | Kind::Other => Work::default(),
        }
    }
}

/// How long commands were in each stage and in total, and the buckets of these times.
#[derive(Clone, Copy, Debug, Default)]
pub struct Durations {
    /// Stage, nanoseconds and bucket, of the stages that took any time.
    stages: [(usize, u64, usize); Stage::ALL.len()],
    count: usize,
    total_bucket: usize,
}

impl Durations {
    /// Sets those of commands whose stages began at these times and that ended at `end_ns`.
    #[inline(never)]
    pub fn set(&mut self, began_ns: &[u64; Stage::ALL.len()], end_ns: u64) {
        let mut total_ns = 0_u64;
        self.count = 0;
        each_stage(began_ns, end_ns, |stage, ns| {
            total_ns = total_ns.wrapping_add(ns);
            self.add(stage, ns);
        });
        self.total_bucket = bucket(total_ns);
    }

    fn add(&mut self, stage: usize, ns: u64) {
        if let Some(to) = self.stages.get_mut(self.count) {
            *to = (stage, ns, bucket(ns));
            self.count += 1;
        }
    }

    /// Of commands that were in these stages for so long, and in no other for any time.
    #[cfg(test)]
    pub(super) fn of(stages: impl IntoIterator<Item = (usize, u64)>) -> Durations {
        let (mut durations, mut total_ns) = (Durations::default(), 0);
        for (stage, ns) in stages {
            durations.add(stage, ns);
            total_ns += ns;
        }
        durations.total_bucket = bucket(total_ns);
        durations
    }
}

impl OpStats {
    /// Counts commands that took so long.
    #[inline(always)]
    pub fn count(&self, alike: &Batch, took: &Durations) {
        let Batch { commands, bytes, failures } = *alike;
        bump(&self.bytes, bytes);
        if failures != 0 {
            bump(&self.failures, failures);
        }
        for &(stage, ns, bucket) in took.stages.iter().take(took.count) {
            bump(&self.spent_ns[stage], ns.wrapping_mul(commands));
            self.stages[stage].count_in(bucket, commands);
        }
        self.total.count_in(took.total_bucket, commands);
    }

    /// Time and distribution of a stage for `commands`; those that spent no time in it are in the
    /// first bucket.
    pub fn stage(&self, stage: Stage, commands: u64) -> (u64, [u64; BUCKETS]) {
        let mut counts = self.stages[stage as usize].read();
        let longer: u64 = counts.iter().sum();
        counts[0] += commands.saturating_sub(longer);
        (self.spent_ns[stage as usize].load(Ordering::Relaxed), counts)
    }

    /// The sums.
    pub fn sums(&self) -> Sums {
        let spent_ns = self.spent_ns.iter().map(|ns| ns.load(Ordering::Relaxed));
        Sums {
            commands: self.total.read().iter().sum(),
            failures: self.failures.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            time_ns: spent_ns.fold(0, u64::wrapping_add),
        }
    }

    fn absorb(&self, other: &OpStats) {
        let add = |to: &AtomicU64, from: &AtomicU64| bump(to, from.load(Ordering::Relaxed));
        add(&self.bytes, &other.bytes);
        add(&self.failures, &other.failures);
        self.spent_ns.iter().zip(&other.spent_ns).for_each(|(to, from)| add(to, from));
        self.total.absorb(&other.total);
        self.stages.iter().zip(&other.stages).for_each(|(to, from)| to.absorb(from));
    }
}

/// Completed commands of one kind, without their distribution.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sums {
    /// How many.
    pub commands: u64,
    /// How many have failed.
    pub failures: u64,
    /// Bytes read or written by those that have succeeded.
    pub bytes: u64,
    /// Time from the capsule to the end of the reply, in nanoseconds.
    pub time_ns: u64,
}

impl Sums {
    /// Adds others.
    pub fn add(&mut self, other: &Sums) {
        self.commands = self.commands.wrapping_add(other.commands);
        self.failures = self.failures.wrapping_add(other.failures);
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.time_ns = self.time_ns.wrapping_add(other.time_ns);
    }

    fn since(&self, earlier: &Sums) -> Sums {
        Sums {
            commands: self.commands.wrapping_sub(earlier.commands),
            failures: self.failures.wrapping_sub(earlier.failures),
            bytes: self.bytes.wrapping_sub(earlier.bytes),
            time_ns: self.time_ns.wrapping_sub(earlier.time_ns),
        }
    }
}

/// Counters of a host at a namespace, on one reactor.
#[derive(Debug)]
pub struct IoStats {
    /// Namespace and host; none: the row *other*.
    pub pair: Option<StatsKey>,
    /// By [`Kind`].
    pub kinds: [OpStats; Kind::ALL.len()],
    /// The id of the association whose commands are counted here from `before` on.
    controller: u64,
    /// What earlier controllers of the host have left here.
    before: [Sums; Kind::ALL.len()],
    /// Other controllers of the host are counted here as well.
    shared: AtomicBool,
}

impl IoStats {
    fn new(pair: Option<StatsKey>, controller: u64) -> IoStats {
        let (kinds, before) = Default::default();
        IoStats { pair, kinds, controller, before, shared: AtomicBool::new(false) }
    }

    /// The row of the next controller of the host, which continues the counts.
    fn continued(&self, controller: u64) -> IoStats {
        let mut next = IoStats::new(self.pair, controller);
        next.kinds.iter().zip(&self.kinds).for_each(|(to, from)| to.absorb(from));
        next.before = std::array::from_fn(|kind| next.kinds[kind].sums());
        next
    }

    /// The id of the association that is counted here, and its commands by [`Kind`]; no commands if
    /// others are counted here as well. None for the row *other*.
    pub fn of_controller(&self) -> Option<(u64, Option<[Sums; Kind::ALL.len()]>)> {
        self.pair?;
        let own = || std::array::from_fn(|kind| self.kinds[kind].sums().since(&self.before[kind]));
        Some((self.controller, (!self.shared.load(Ordering::Relaxed)).then(own)))
    }
}

/// All rows of a reactor.
#[derive(Debug)]
pub struct StatsTable {
    rows: Vec<Arc<IoStats>>,
    other: Arc<IoStats>,
}

impl Default for StatsTable {
    fn default() -> StatsTable {
        StatsTable { rows: Vec::new(), other: Arc::new(IoStats::new(None, 0)) }
    }
}

impl StatsTable {
    /// The rows of a controller of a host for these namespaces. Called by the reactor that owns
    /// them.
    pub(super) fn rows(
        &mut self,
        observer: &Arc<ReactorStats>,
        (subsystem, host, controller): (Nqn, Nqn, u64),
        nsids: impl Iterator<Item = u32>,
    ) -> Rows {
        let (mut own, mut apart) = (Vec::new(), true);
        for nsid in nsids {
            let row = self.row(StatsKey { subsystem, nsid, host }, controller);
            apart &= row.as_ref().is_some_and(|row| row.controller == controller);
            own.extend(row.map(|row| (nsid, row)));
        }
        own.sort_unstable_by_key(|(nsid, _)| *nsid);
        Rows { own, other: Arc::clone(&self.other), observer: Arc::clone(observer), apart }
    }

    /// Every row, *other* last.
    pub fn all(&self) -> Vec<Arc<IoStats>> {
        self.rows.iter().chain([&self.other]).cloned().collect()
    }

    fn row(&mut self, pair: StatsKey, controller: u64) -> Option<Arc<IoStats>> {
        let idle = |row: &Arc<IoStats>| Arc::strong_count(row) == 1;
        let of_host = |row: &&mut Arc<IoStats>| row.pair == Some(pair);
        let own = |row: &&mut Arc<IoStats>| row.controller == controller;
        if let Some(own) = self.rows.iter_mut().filter(of_host).find(own) {
            return Some(Arc::clone(own));
        }
        if let Some(ended) = self.rows.iter_mut().filter(of_host).find(|row| idle(row)) {
            *ended = Arc::new(ended.continued(controller));
            return Some(Arc::clone(ended));
        }
        if self.rows.len() >= MOST_APART
            && let Some(other) = self.rows.iter_mut().find(of_host)
        {
            other.shared.store(true, Ordering::Relaxed);
            return Some(Arc::clone(other));
        }
        if self.rows.len() >= MOST_ROWS {
            let gone = self.rows.remove(self.rows.iter().position(idle)?);
            self.other.kinds.iter().zip(&gone.kinds).for_each(|(to, from)| to.absorb(from));
        }
        let row = Arc::new(IoStats::new(Some(pair), controller));
        self.rows.push(Arc::clone(&row));
        Some(row)
    }
}

/// The rows that a queue counts in.
#[derive(Debug)]
pub struct Rows {
    /// By namespace id, ascending.
    own: Vec<(u32, Arc<IoStats>)>,
    other: Arc<IoStats>,
    /// The statistics of the reactor.
    pub observer: Arc<ReactorStats>,
    /// Each row counts the commands of its controller alone.
    pub apart: bool,
}

impl Rows {
    /// Where commands for a namespace are counted.
    #[inline]
    pub fn of(&self, nsid: u32) -> &Arc<IoStats> {
        // Ids are usually 1, 2, 3 ..: this position is tried first, and the end.
        match self.own.get((nsid as usize).wrapping_sub(1)) {
            Some((id, row)) if *id == nsid => return row,
            None if self.own.last().is_none_or(|(last, _)| *last < nsid) => return &self.other,
            _ => {}
        }
        match self.own.binary_search_by_key(&nsid, |(nsid, _)| *nsid) {
            Ok(at) => &self.own[at].1,
            Err(_) => &self.other,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::stats::io_stats::*;

    fn nqn(name: &str) -> Nqn {
        format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap()
    }

    /// Counts a command that was at the device for this long.
    fn count(tally: &OpStats, bytes: u64, failed: bool, disk_ns: u64) {
        let one = Batch { commands: 1, bytes, failures: failed.into() };
        tally.count(&one, &Durations::of([(Stage::Disk as usize, disk_ns)]));
    }

    fn commands(row: &IoStats) -> u64 {
        row.kinds.iter().map(|tally| tally.total.read().iter().sum::<u64>()).sum()
    }

    #[test]
    fn counters_continue_when_a_host_reconnects() {
        let mut table = StatsTable::default();
        for id in 1..=3 {
            let rows =
                table.rows(&Arc::default(), (nqn("disk"), nqn("host"), id), [7, 1].into_iter());
            count(&rows.of(7).kinds[0], 512, false, 9_000);
            count(&rows.of(8).kinds[0], 512, true, 0);
        }
        let all = table.all();
        assert_eq!(all.len(), 3);
        assert_eq!(all.iter().map(|row| commands(row)).collect::<Vec<_>>(), [3, 0, 3]);
        assert_eq!(all[2].pair, None);
        let tally = &all[0].kinds[Kind::Read as usize];
        let (spent, counts) = tally.stage(Stage::Disk, 3);
        assert_eq!((spent, counts.iter().sum::<u64>(), counts[0]), (27_000, 3, 0));
        assert_eq!(tally.stage(Stage::Pull, 3).1[0], 3, "it took no time");
        assert_eq!(tally.total.read()[bucket(9_000)], 3);
        assert_eq!(tally.bytes.load(Ordering::Relaxed), 3 * 512);
    }

    /// Anybody may make up names. The table does not grow, and no count is lost.
    #[test]
    fn rows_are_bounded_and_folded_counts_are_preserved() {
        let mut table = StatsTable::default();
        let kept = table.rows(&Arc::default(), (nqn("disk"), nqn("stays"), 1), 1..=1);
        for n in 0..MOST_ROWS * 2 {
            let host = nqn(&format!("host{n}"));
            let rows = table.rows(&Arc::default(), (nqn("disk"), host, 2 + n as u64), 1..=1);
            count(&rows.of(1).kinds[1], 4096, false, 5);
            count(&kept.of(1).kinds[1], 4096, false, 5);
        }
        let all = table.all();
        assert_eq!(all.len(), MOST_ROWS + 1);
        let sum: u64 = all.iter().map(|row| commands(row)).sum();
        assert_eq!(sum, MOST_ROWS as u64 * 4);
        assert_eq!(commands(kept.of(1)), MOST_ROWS as u64 * 2, "who is connected keeps its row");
    }

    #[test]
    fn commands_without_a_row_are_counted_in_the_shared_row() {
        let mut table = StatsTable::default();
        let most = MOST_ROWS as u32;
        let all = table.rows(&Arc::default(), (nqn("disk"), nqn("host"), 1), 1..=most + 5);
        count(&all.of(most + 5).kinds[3], 0, false, 1);
        assert_eq!(commands(&table.other), 1);
        assert_eq!(all.of(most).pair.unwrap().nsid, most);
    }

    /// Commands of a controller, and whether it is counted alone, on all rows.
    fn of(table: &StatsTable, controller: u64) -> Option<u64> {
        let rows = table.all();
        let own = rows.iter().filter_map(|row| row.of_controller());
        let own: Vec<_> = own.filter(|(id, _)| *id == controller).collect();
        let all = own.into_iter().map(|(_, sums)| sums).collect::<Option<Vec<_>>>()?;
        Some(all.iter().flatten().map(|sums| sums.commands).sum())
    }

    #[test]
    fn controllers_of_one_host_are_counted_apart_and_from_their_own_start() {
        let mut table = StatsTable::default();
        let mut rows = |id| {
            let rows = table.rows(&Arc::default(), (nqn("disk"), nqn("host"), id), 1..=1);
            assert!(rows.apart);
            rows
        };
        let (first, second) = (rows(1), rows(2));
        assert!(Arc::ptr_eq(first.of(1), rows(1).of(1)), "another queue of the same controller");
        (0..3).for_each(|_| count(&first.of(1).kinds[0], 512, false, 9_000));
        count(&second.of(1).kinds[1], 512, true, 7_000);
        drop(first);
        let third = rows(3);
        count(&third.of(1).kinds[0], 4096, false, 5_000);
        let (id, sums) = third.of(1).of_controller().unwrap();
        let read = Sums { commands: 1, failures: 0, bytes: 4096, time_ns: 5_000 };
        assert_eq!((id, sums.unwrap()[0]), (3, read));
        let failed = Sums { commands: 1, failures: 1, bytes: 512, time_ns: 7_000 };
        assert_eq!(second.of(1).of_controller().unwrap().1.unwrap()[1], failed);
        assert_eq!([1, 2, 3].map(|id| of(&table, id)), [Some(0), Some(1), Some(1)]);
        let all: u64 = table.all().iter().map(|row| commands(row)).sum();
        assert_eq!(all, 5, "and the counts of the host go on");
        assert_eq!(table.all().len(), 3, "two, and the others'");
    }

    #[test]
    fn additional_controllers_of_a_host_share_one_row() {
        let mut table = StatsTable::default();
        let rows = |table: &mut StatsTable, id| {
            table.rows(&Arc::default(), (nqn("disk"), nqn("host"), id), 1..=1)
        };
        let apart: Vec<_> = (1..=MOST_APART as u64).map(|id| rows(&mut table, id)).collect();
        assert!(apart.iter().all(|rows| rows.apart));
        let further = rows(&mut table, 500);
        assert!(!further.apart);
        count(&further.of(1).kinds[0], 512, false, 9_000);
        assert_eq!(table.all().len(), MOST_APART + 1);
        assert_eq!((of(&table, 1), of(&table, 2)), (None, Some(0)), "which is whose is not known");
        let all: u64 = table.all().iter().map(|row| commands(row)).sum();
        assert_eq!(all, 1);
        let other = (nqn("disk"), nqn("other"), 501);
        let other = table.rows(&Arc::default(), other, 1..=1);
        assert!(other.apart && table.all().len() == MOST_APART + 2, "another host has a row");
    }
}
