//! I/O statistics by namespace and host: a row for the pair, on each reactor that serves it. Rows
//! are created when a queue connects and when its subsystem changes, never on the data path.
//!
//! A reactor has [`MOST_ROWS`] at most. If that is too few, rows of hosts that are not connected
//! are removed: their counts are added to the row *other*, which also counts commands without a
//! row. The counts of a host that reconnects continue, as long as its rows exist.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nvme::{IoOpcode, Nqn, Sqe};

use super::histogram::{BUCKETS, Histogram, bucket, bump};
use super::reactor_stats::ReactorStats;
use super::stage_timer::Stage;
use crate::subsystem::work::Work;

/// Maximum of rows of a reactor, without *other*. One takes about 23 KiB.
pub const MOST_ROWS: usize = 256;

/// Kinds of commands that are counted apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush.
    Flush,
    /// All other commands of the I/O command set.
    Other,
}

impl Kind {
    /// All, in the order of their numbers.
    pub const ALL: [Kind; 4] = [Kind::Read, Kind::Write, Kind::Flush, Kind::Other];

    /// The kind of a command of an I/O queue; none for Fabrics commands.
    #[inline]
    #[must_use]
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

    /// A word for it, for labels and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Flush => "flush",
            Kind::Other => "other",
        }
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
    /// Of commands that were in these stages for so long, and in no other for any time.
    #[inline]
    pub fn set(&mut self, stages: impl IntoIterator<Item = (usize, u64)>) {
        let mut total_ns = 0_u64;
        self.count = 0;
        for (to, (stage, ns)) in self.stages.iter_mut().zip(stages) {
            total_ns = total_ns.wrapping_add(ns);
            *to = (stage, ns, bucket(ns));
            self.count += 1;
        }
        self.total_bucket = bucket(total_ns);
    }

    #[cfg(test)]
    pub(super) fn of(stages: impl IntoIterator<Item = (usize, u64)>) -> Durations {
        let mut durations = Durations::default();
        durations.set(stages);
        durations
    }
}

impl OpStats {
    /// Counts commands that took so long.
    #[inline]
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
    #[must_use]
    pub fn stage(&self, stage: Stage, commands: u64) -> (u64, [u64; BUCKETS]) {
        let mut counts = self.stages[stage as usize].read();
        let longer: u64 = counts.iter().sum();
        counts[0] += commands.saturating_sub(longer);
        (self.spent_ns[stage as usize].load(Ordering::Relaxed), counts)
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

/// Counters of a host at a namespace, on one reactor.
#[derive(Debug)]
pub struct IoStats {
    /// Namespace and host; none: the row *other*.
    pub pair: Option<StatsKey>,
    /// By [`Kind`].
    pub kinds: [OpStats; Kind::ALL.len()],
}

impl IoStats {
    fn new(pair: Option<StatsKey>) -> Arc<IoStats> {
        Arc::new(IoStats { pair, kinds: Default::default() })
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
        StatsTable { rows: Vec::new(), other: IoStats::new(None) }
    }
}

impl StatsTable {
    /// The rows of a host for these namespaces. Called by the reactor that owns them.
    pub(super) fn rows(
        &mut self,
        observer: &Arc<ReactorStats>,
        subsystem: Nqn,
        host: Nqn,
        nsids: impl Iterator<Item = u32>,
    ) -> Rows {
        let mut own: Vec<(u32, Arc<IoStats>)> = nsids
            .filter_map(|nsid| Some((nsid, self.row(StatsKey { subsystem, nsid, host })?)))
            .collect();
        own.sort_unstable_by_key(|(nsid, _)| *nsid);
        Rows { own, other: Arc::clone(&self.other), observer: Arc::clone(observer) }
    }

    /// Every row, *other* last.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<IoStats>> {
        self.rows.iter().chain([&self.other]).cloned().collect()
    }

    fn row(&mut self, pair: StatsKey) -> Option<Arc<IoStats>> {
        if let Some(row) = self.rows.iter().find(|row| row.pair == Some(pair)) {
            return Some(Arc::clone(row));
        }
        if self.rows.len() >= MOST_ROWS {
            let idle = self.rows.iter().position(|row| Arc::strong_count(row) == 1)?;
            let gone = self.rows.remove(idle);
            self.other.kinds.iter().zip(&gone.kinds).for_each(|(to, from)| to.absorb(from));
        }
        let row = IoStats::new(Some(pair));
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
}

impl Rows {
    /// Where commands for a namespace are counted.
    #[inline]
    #[must_use]
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
    fn a_host_that_comes_again_counts_on() {
        let mut book = StatsTable::default();
        for _ in 0..3 {
            let rows = book.rows(&Arc::default(), nqn("disk"), nqn("host"), [7, 1].into_iter());
            count(&rows.of(7).kinds[0], 512, false, 9_000);
            count(&rows.of(8).kinds[0], 512, true, 0);
        }
        let all = book.all();
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
    fn rows_are_bounded_and_what_is_folded_is_kept() {
        let mut book = StatsTable::default();
        let kept = book.rows(&Arc::default(), nqn("disk"), nqn("stays"), 1..=1);
        for n in 0..MOST_ROWS * 2 {
            let rows = book.rows(&Arc::default(), nqn("disk"), nqn(&format!("host{n}")), 1..=1);
            count(&rows.of(1).kinds[1], 4096, false, 5);
            count(&kept.of(1).kinds[1], 4096, false, 5);
        }
        let all = book.all();
        assert_eq!(all.len(), MOST_ROWS + 1);
        let sum: u64 = all.iter().map(|row| commands(row)).sum();
        assert_eq!(sum, MOST_ROWS as u64 * 4);
        assert_eq!(commands(kept.of(1)), MOST_ROWS as u64 * 2, "who is connected keeps its row");
    }

    #[test]
    fn who_finds_no_row_is_counted_with_the_others() {
        let mut book = StatsTable::default();
        let most = MOST_ROWS as u32;
        let all = book.rows(&Arc::default(), nqn("disk"), nqn("host"), 1..=most + 5);
        count(&all.of(most + 5).kinds[3], 0, false, 1);
        assert_eq!(commands(&book.other), 1);
        assert_eq!(all.of(most).pair.unwrap().nsid, most);
    }
}
