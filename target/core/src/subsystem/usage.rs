//! Usage counters for the SMART log: counted by each queue, flushed a few times a second. Their
//! persistence is in `state/usage.rs`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::subsystem::event_log::PersistentEventLog;
use nvmfd_blockdev::Health;

/// Namespaces that a queue counts apart at a time.
const APART: usize = 8;

/// Resolution of the busy time, and interval at which queues flush their counters.
const BUSY_GRAIN: Duration = Duration::from_millis(250);

/// Work done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Read commands (Compare and Verify included) completed.
    pub reads: u64,
    /// Write commands completed.
    pub writes: u64,
    /// 512-byte units read.
    pub units_read: u64,
    /// 512-byte units written.
    pub units_written: u64,
    /// Commands that ended with a media or data integrity error.
    pub media_errors: u64,
}

/// A queue's own counters, of the namespaces that it has served lately.
#[derive(Debug, Default)]
pub struct IoCounters([(u32, Work); APART]);

impl IoCounters {
    /// Whether there are counters of a namespace.
    #[inline]
    #[must_use]
    pub fn has(&self, nsid: u32) -> bool {
        self.0[nsid as usize % APART].0 == nsid
    }

    /// Begins to count the work of a namespace. Returns the counters of another one to be flushed
    /// because it is evicted.
    #[must_use]
    pub fn begin(&mut self, nsid: u32) -> Option<(u32, Work)> {
        let before = std::mem::replace(&mut self.0[nsid as usize % APART], (nsid, Work::default()));
        Some(before).filter(|(_, work)| *work != Work::default())
    }

    /// Returns the counters of a namespace.
    #[inline]
    pub fn of(&mut self, nsid: u32) -> &mut Work {
        &mut self.0[nsid as usize % APART].1
    }

    /// Takes all counters, to be flushed.
    pub fn take(&mut self) -> impl Iterator<Item = (u32, Work)> + '_ {
        let taken = self.0.iter_mut().map(|entry| (entry.0, std::mem::take(&mut entry.1)));
        taken.filter(|(_, work)| *work != Work::default())
    }
}

/// Sums of the counters of all queues.
#[derive(Debug, Default)]
pub struct SharedCounters {
    sums: [AtomicU64; 5],
    /// Busy time in grains: with commands in flight.
    busy_grains: AtomicU64,
    /// The last of them.
    last_grain: AtomicU64,
    since: OnceLock<Instant>,
}

impl SharedCounters {
    /// Adds a queue's work.
    pub fn add(&self, work: &Work) {
        let Work { reads, writes, units_read, units_written, media_errors } = *work;
        let values = [reads, writes, units_read, units_written, media_errors];
        for (sum, value) in self.sums.iter().zip(values) {
            if value != 0 {
                sum.fetch_add(value, Ordering::Relaxed);
            }
        }
    }

    /// Records that commands are in flight now, or were just before.
    pub fn note_busy(&self, now: Instant) {
        let since = *self.since.get_or_init(|| now);
        let grains = now.saturating_duration_since(since).as_millis() / BUSY_GRAIN.as_millis();
        // The first is 1.
        let grain = u64::try_from(grains).unwrap_or(u64::MAX - 1) + 1;
        if self.last_grain.swap(grain, Ordering::Relaxed) != grain {
            self.busy_grains.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The sums.
    #[must_use]
    pub fn total(&self) -> Work {
        let [reads, writes, units_read, units_written, media_errors] =
            std::array::from_fn(|i| self.sums[i].load(Ordering::Relaxed));
        Work { reads, writes, units_read, units_written, media_errors }
    }

    /// Busy time, in grains of a quarter of a second.
    #[must_use]
    pub fn busy(&self) -> Duration {
        let grains = self.busy_grains.load(Ordering::Relaxed);
        BUSY_GRAIN.saturating_mul(grains.try_into().unwrap_or(u32::MAX))
    }

    /// The counters to be persisted.
    #[must_use]
    pub fn account(&self) -> SavedCounters {
        SavedCounters { work: self.total(), busy_grains: self.busy_grains.load(Ordering::Relaxed) }
    }

    /// Adds persisted counters of earlier runs.
    pub fn carry(&self, kept: &SavedCounters) {
        self.add(&kept.work);
        self.busy_grains.fetch_add(kept.busy_grains, Ordering::Relaxed);
    }
}

/// Persisted counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SavedCounters {
    /// Work done.
    pub work: Work,
    /// Busy time in quarters of a second.
    pub busy_grains: u64,
}

/// Usage counters of a subsystem, kept across its snapshots.
#[derive(Debug, Default)]
pub struct Usage {
    /// Of all its namespaces, including removed ones.
    pub whole: SharedCounters,
    /// Entries ever made in the Error Information logs of its controllers.
    errors: AtomicU64,
    history: Option<PersistentEventLog>,
    /// Health of the backing stores of its namespaces.
    healths: Mutex<Vec<Arc<Health>>>,
    /// By namespace id, ascending. Locked when a queue flushes: on I/O only when it counts more
    /// namespaces than it has counters for. Counters of a namespace that is removed and added again
    /// continue.
    namespaces: Mutex<Vec<(u32, Arc<SharedCounters>)>>,
}

impl Usage {
    /// Of a subsystem with a Persistent Event log.
    #[must_use]
    pub fn kept(history: PersistentEventLog) -> Usage {
        Usage { history: Some(history), ..Usage::default() }
    }

    /// The Persistent Event log, if there is one.
    #[must_use]
    pub fn history(&self) -> Option<&PersistentEventLog> {
        self.history.as_ref()
    }

    /// Creates the counters of namespaces, so that no reactor has to when it flushes; and replaces
    /// the health of their backing stores.
    pub fn prepare(&self, namespaces: impl Iterator<Item = (u32, Arc<Health>)>) {
        let mut healths = self.healths.lock().unwrap_or_else(PoisonError::into_inner);
        healths.clear();
        for (nsid, health) in namespaces {
            drop(self.of(nsid));
            healths.push(health);
        }
    }

    /// Whether the backing store of any namespace is degraded.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        let healths = self.healths.lock().unwrap_or_else(PoisonError::into_inner);
        healths.iter().any(|health| health.is_degraded())
    }

    /// The counters of a namespace.
    #[must_use]
    pub fn of(&self, nsid: u32) -> Arc<SharedCounters> {
        self.with(nsid, Arc::clone)
    }

    fn with<T>(&self, nsid: u32, f: impl FnOnce(&Arc<SharedCounters>) -> T) -> T {
        let mut namespaces = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        // Ids are usually 1, 2, 3 ..: this position is tried first.
        let guess = namespaces.get((nsid as usize).wrapping_sub(1));
        if let Some((_, counters)) = guess.filter(|(id, _)| *id == nsid) {
            return f(counters);
        }
        let at = namespaces.binary_search_by_key(&nsid, |(id, _)| *id).unwrap_or_else(|at| {
            namespaces.insert(at, (nsid, Arc::default()));
            at
        });
        f(&namespaces[at].1)
    }

    /// Adds a queue's work with a namespace.
    pub fn add(&self, nsid: u32, work: &Work) {
        self.whole.add(work);
        self.with(nsid, |counters| counters.add(work));
    }

    /// Records that commands for a namespace are in flight now, or were just before.
    pub fn note_busy(&self, nsid: u32, now: Instant) {
        self.whole.note_busy(now);
        self.with(nsid, |counters| counters.note_busy(now));
    }

    /// Counts an entry of an error log; its number, from 1.
    pub fn count_error(&self) -> u64 {
        self.errors.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Entries ever made in error logs.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Counters to be persisted: errors, the sum, and each namespace with commands.
    #[must_use]
    pub fn accounts(&self) -> (u64, SavedCounters, Vec<(u32, SavedCounters)>) {
        let namespaces = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        let each = namespaces.iter().map(|(nsid, counters)| (*nsid, counters.account()));
        let used = each.filter(|(_, account)| *account != SavedCounters::default()).collect();
        (self.errors(), self.whole.account(), used)
    }

    /// Adds persisted counters of earlier runs.
    pub fn carry(&self, errors: u64, whole: &SavedCounters, namespaces: &[(u32, SavedCounters)]) {
        self.errors.fetch_add(errors, Ordering::Relaxed);
        self.whole.carry(whole);
        namespaces.iter().for_each(|(nsid, kept)| self.of(*nsid).carry(kept));
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::usage::*;

    fn work(reads: u64) -> Work {
        Work { reads, units_read: reads * 8, ..Work::default() }
    }

    #[test]
    fn nothing_is_lost_when_namespaces_share_a_place() {
        let (usage, mut tally) = (Usage::default(), IoCounters::default());
        for round in 0..100u32 {
            let nsid = 1 + round % 12;
            let evicted = if tally.has(nsid) { None } else { tally.begin(nsid) };
            let counted = tally.of(nsid);
            counted.reads += 1;
            counted.units_read += 8;
            evicted.iter().for_each(|(nsid, work)| usage.of(*nsid).add(work));
        }
        tally.take().for_each(|(nsid, work)| usage.of(nsid).add(&work));
        assert_eq!(tally.take().count(), 0);
        let each: Vec<_> = (1..=12).map(|nsid| usage.of(nsid).total()).collect();
        assert_eq!(each[..4], [work(9); 4]);
        assert_eq!(each[4..], [work(8); 8]);
    }

    #[test]
    fn busy_time_counts_each_grain_once_whoever_notes_it() {
        let counters = SharedCounters::default();
        let start = Instant::now();
        for ms in [0, 10, 249, 250, 250, 499, 1000, 1010] {
            counters.note_busy(start + Duration::from_millis(ms));
        }
        assert_eq!(counters.busy(), Duration::from_millis(750));
    }
}
