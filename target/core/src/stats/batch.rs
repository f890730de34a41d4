//! Batches equal completions, so that they are counted together.
//!
//! The times of a command are those of iterations. So commands that a host has sent together and
//! that were processed together entered every stage at the same times, to the nanosecond, and each
//! adds the same to the counters. A batch of such commands is counted at once when it ends: when a
//! different command completes, and in any case when all events of the fabric are processed. Commands for
//! different namespaces are different, but those with the same times share their durations: such a
//! command is counted by itself, unless another one like it has just been.

use std::sync::Arc;

use super::io_stats::{Batch, Durations, IoStats, Kind};
use super::stage_timer::{Stage, StageTimer};
use crate::subsystem::work::WorkCounters;

/// Queue, namespace and kind of a command: a queue, a namespace and an operation code.
pub type BatchKey = (u32, u32, u8);

/// Arrival time that no command has: an unused batch.
const NEVER: u64 = u64::MAX;

/// Where commands of a key are counted.
#[derive(Clone, Copy, Debug)]
pub struct Counters<'a> {
    /// The row of their namespace and host.
    pub row: &'a Arc<IoStats>,
    /// Their kind in it.
    pub kind: Kind,
    /// The work of their namespace, to which Reads and Writes are added.
    pub work: Option<&'a Arc<WorkCounters>>,
}

impl Counters<'_> {
    /// Counts commands that took so long.
    #[inline(always)]
    fn count(&self, alike: &Batch, took: &Durations) {
        self.row.kinds[self.kind as usize].count(alike, took);
        if let Some(work) = self.work {
            work.add(&alike.work(self.kind));
        }
    }
}

/// A batch of commands, of which each reactor has one.
///
/// It keeps the row where it was last counted, so that row is not folded when its host has
/// disconnected.
#[derive(Debug)]
pub struct CompletionBatch {
    /// When the stages of each began, and when each was over.
    began_ns: [u64; Stage::ALL.len()],
    end_ns: u64,
    whose: BatchKey,
    /// The last command that was counted by itself.
    differed: BatchKey,
    alike: Batch,
    /// They are recorded one by one.
    slow: bool,
    /// The row of the commands of `whose`, and the work of their namespace.
    counted_in: Option<(Arc<IoStats>, Kind, Option<Arc<WorkCounters>>)>,
    /// The durations of commands with these times, once some of them are counted.
    took: Durations,
    is_timed: bool,
}

impl Default for CompletionBatch {
    fn default() -> CompletionBatch {
        CompletionBatch {
            began_ns: [NEVER, 0, 0, 0, 0, 0],
            end_ns: 0,
            whose: BatchKey::default(),
            differed: BatchKey::default(),
            alike: Batch::default(),
            slow: false,
            counted_in: None,
            took: Durations::default(),
            is_timed: false,
        }
    }
}

impl CompletionBatch {
    /// Whether a completed command belongs to this batch.
    #[inline]
    #[must_use]
    pub fn goes_on(&self, whose: BatchKey, clock: &StageTimer) -> bool {
        self.whose == whose && self.has_times(clock)
    }

    /// Whether a completed command entered its stages when those of this batch did.
    #[inline]
    fn has_times(&self, clock: &StageTimer) -> bool {
        // Without branches and calls: most commands that complete together are equal.
        let each = self.began_ns.iter().zip(clock.began_ns());
        each.fold(0, |differ, (own, other)| differ | (own ^ other)) == 0
    }

    /// Whether the counters of these commands are known.
    #[inline]
    pub fn knows(&self, whose: BatchKey) -> bool {
        self.whose == whose && self.counted_in.is_some()
    }

    /// Whether a successful command that does not continue the batch is counted by itself: it has
    /// the times of the batch, and differs from the last one that was.
    #[inline]
    #[must_use]
    pub fn is_single(&mut self, whose: BatchKey, clock: &StageTimer) -> bool {
        self.has_times(clock) && std::mem::replace(&mut self.differed, whose) != whose
    }

    /// As [`CompletionBatch::begin`], with a command of another key, which is counted here.
    #[inline(never)]
    pub fn begin_for(
        &mut self,
        whose: BatchKey,
        to: &Counters<'_>,
        (clock, end_ns): (&StageTimer, u64),
        slow: bool,
    ) {
        self.begin(clock, end_ns, slow);
        self.whose = whose;
        self.counted_in = Some((Arc::clone(to.row), to.kind, to.work.cloned()));
    }

    /// Counts a successful command of this length at the times of the batch by itself; returns true
    /// if it is slow.
    #[inline(always)]
    #[must_use]
    pub fn count_one(&mut self, bytes: u32, to: &Counters<'_>) -> bool {
        to.count(&Batch { commands: 1, bytes: bytes.into(), failures: 0 }, self.durations());
        self.slow
    }

    /// Counts the batch, and drops the row where it was counted: its host may have disconnected.
    #[cold]
    pub fn forget(&mut self) {
        self.end();
        self.counted_in = None;
    }

    /// Counts the batch, and begins another one of the same, with one that is over at `end_ns`: `slow`
    /// or not.
    #[inline]
    pub fn begin(&mut self, clock: &StageTimer, end_ns: u64, slow: bool) {
        self.count();
        (self.began_ns, self.end_ns, self.slow) = (*clock.began_ns(), end_ns, slow);
        self.is_timed = false;
    }

    /// Adds a command of this length to the batch; returns true if it is slow.
    #[inline]
    #[must_use]
    pub fn add(&mut self, bytes: u32) -> bool {
        let alike = &mut self.alike;
        alike.commands = alike.commands.wrapping_add(1);
        alike.bytes = alike.bytes.wrapping_add(bytes.into());
        self.slow
    }

    /// As [`CompletionBatch::add`], for a failed one.
    #[cold]
    #[must_use]
    pub fn add_failure(&mut self) -> bool {
        self.alike.failures = self.alike.failures.wrapping_add(1);
        self.add(0)
    }

    /// Counts the batch: the next command begins another one.
    #[inline]
    pub fn end(&mut self) {
        self.count();
        self.began_ns[Stage::Receive as usize] = NEVER;
    }

    #[inline]
    fn count(&mut self) {
        let alike = std::mem::take(&mut self.alike);
        if alike.commands != 0 {
            self.durations();
            if let Some((row, kind, work)) = &self.counted_in {
                Counters { row, kind: *kind, work: work.as_ref() }.count(&alike, &self.took);
            }
        }
    }

    /// Returns the durations of commands at these times, which are calculated once for all of them.
    #[inline(always)]
    fn durations(&mut self) -> &Durations {
        if !std::mem::replace(&mut self.is_timed, true) {
            self.took.set(&self.began_ns, self.end_ns);
        }
        &self.took
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::super::reactor_stats::ReactorStats;
    use crate::stats::batch::*;
    use crate::subsystem::work::Work;

    const READ: BatchKey = (1, 1, 2);

    /// Arrival and completion times of the commands in these tests.
    const CAME_NS: u64 = 1_000_000;
    const END_NS: u64 = 2_000_000;

    /// For a command that was at the device for this long, and was then answered.
    fn clock(disk_ns: u64) -> StageTimer {
        let mut clock = StageTimer::default();
        clock.start(CAME_NS, CAME_NS);
        clock.enter(Stage::Disk, CAME_NS);
        clock.enter(Stage::Reply, CAME_NS + disk_ns);
        clock
    }

    /// A command of the run, or the first of another one.
    fn observe(
        run: &mut CompletionBatch,
        whose: BatchKey,
        (row, work): (&Arc<IoStats>, Option<&Arc<WorkCounters>>),
        disk_ns: u64,
        bytes: u32,
    ) {
        let counters = Counters { row, kind: Kind::Read, work };
        let goes_on = run.goes_on(whose, &clock(disk_ns));
        let slow = if !goes_on && bytes > 0 && run.is_single(whose, &clock(disk_ns)) {
            run.count_one(bytes, &counters)
        } else {
            if !goes_on {
                run.begin_for(whose, &counters, (&clock(disk_ns), END_NS), disk_ns > 80_000);
            }
            if bytes == 0 { run.add_failure() } else { run.add(bytes) }
        };
        assert_eq!(slow, disk_ns > 80_000);
    }

    #[test]
    fn batched_commands_are_counted_like_individual_ones() {
        let nqn = |name: &str| format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap();
        let observer = Arc::<ReactorStats>::default();
        let rows = observer.rows((nqn("disk"), nqn("host"), 1), [1, 2].into_iter());
        let (one, two) = (rows.of(1), rows.of(2));
        let commands = [
            (READ, one, 5_000, 512),
            (READ, one, 5_000, 1024),
            (READ, one, 5_000, 0),
            (READ, one, 90_000, 512),
            ((1, 2, 2), two, 90_000, 512),
            ((2, 1, 2), one, 90_000, 512),
            ((2, 1, 2), one, 90_000, 512),
            (READ, one, 5_000, 512),
        ];
        let works: [Arc<WorkCounters>; 2] = Default::default();
        let mut run = CompletionBatch::default();
        for (whose, row, disk_ns, bytes) in commands {
            let work = &works[usize::from(Arc::ptr_eq(row, two))];
            observe(&mut run, whose, (row, Some(work)), disk_ns, bytes);
        }
        run.end();
        run.end();
        assert!(!run.goes_on(READ, &clock(5_000)), "it has ended");
        for row in [one, two] {
            let fresh = Arc::<ReactorStats>::default();
            let alone = fresh.rows((nqn("disk"), nqn("host"), 1), [1].into_iter());
            let of = |it: &&(BatchKey, &Arc<IoStats>, u64, u32)| Arc::ptr_eq(it.1, row);
            let mine: Vec<_> = commands.iter().filter(of).collect();
            let (tally, expected) = (&row.kinds[0], &alone.of(1).kinds[0]);
            for (_, _, disk_ns, bytes) in &mine {
                let bytes = u64::from(*bytes);
                let one = Batch { commands: 1, bytes, failures: u64::from(bytes == 0) };
                let reply_ns = END_NS - CAME_NS - disk_ns;
                let stages = [(Stage::Disk, *disk_ns), (Stage::Reply, reply_ns)];
                expected
                    .count(&one, &Durations::of(stages.map(|(stage, ns)| (stage as usize, ns))));
            }
            let got = (tally.total.read(), tally.bytes.load(Ordering::Relaxed));
            assert_eq!(got, (expected.total.read(), expected.bytes.load(Ordering::Relaxed)));
            assert_eq!(got.0.iter().sum::<u64>(), mine.len() as u64);
            assert_eq!(format!("{tally:?}"), format!("{expected:?}"), "everything");
            let units: u64 = mine.iter().map(|(.., bytes)| u64::from(*bytes) / 512).sum();
            let reads = mine.iter().filter(|(.., bytes)| *bytes > 0).count() as u64;
            let work = Work { reads, units_read: units, ..Work::default() };
            assert_eq!(
                works[usize::from(Arc::ptr_eq(row, two))].total(),
                work,
                "the failed one not"
            );
        }
    }

    /// The key of a closed queue is reused by another one.
    #[test]
    fn a_reused_queue_key_is_counted_in_the_new_row() {
        let nqn = |name: &str| format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap();
        let observer = Arc::<ReactorStats>::default();
        let before = observer.rows((nqn("disk"), nqn("gone"), 1), [1].into_iter());
        let after = observer.rows((nqn("disk"), nqn("new"), 2), [1].into_iter());
        let mut run = CompletionBatch::default();
        assert!(!run.knows(BatchKey::default()) && !run.knows(READ));
        observe(&mut run, READ, (before.of(1), None), 5_000, 512);
        assert!(run.knows(READ));
        run.forget();
        assert!(!run.knows(READ));
        observe(&mut run, READ, (after.of(1), None), 5_000, 512);
        run.end();
        let commands = |rows: &super::super::Rows| rows.of(1).kinds[0].total.read().iter().sum();
        let counts: [u64; 2] = [commands(&before), commands(&after)];
        assert_eq!(counts, [1, 1]);
    }

    #[test]
    fn an_empty_batch_is_never_continued() {
        assert!(!CompletionBatch::default().goes_on(BatchKey::default(), &StageTimer::default()));
        assert!(!CompletionBatch::default().goes_on(BatchKey::default(), &clock(0)));
    }
}
