//! Usage counters for the SMART log. Each reactor counts the work of a subsystem in a table of its
//! own, without locks; readers add up the tables. Their persistence is in `state/usage.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::subsystem::MAX_NSID;
use crate::subsystem::event_log::PersistentEventLog;
use crate::subsystem::work::{Work, WorkCounters};
use nvmfd_blockdev::{Health, lock};

/// Resolution of the busy time, and interval at which queues report the namespaces that are busy.
const BUSY_GRAIN: Duration = Duration::from_millis(250);

/// The counters of a subsystem that one reactor writes, by ascending namespace id. Those of a
/// namespace that is removed remain.
#[derive(Debug, Default)]
pub struct ReactorUsage(Vec<(u32, Arc<WorkCounters>)>);

impl ReactorUsage {
    /// The counters of a namespace.
    #[inline]
    pub fn of(&self, nsid: u32) -> Option<&Arc<WorkCounters>> {
        // Ids are usually 1, 2, 3 ..: this position is tried first.
        match self.0.get((nsid as usize).wrapping_sub(1)) {
            Some((id, counters)) if *id == nsid => Some(counters),
            _ => self.search(nsid),
        }
    }

    #[inline(never)]
    fn search(&self, nsid: u32) -> Option<&Arc<WorkCounters>> {
        let at = self.0.binary_search_by_key(&nsid, |(id, _)| *id).ok()?;
        Some(&self.0[at].1)
    }
}

/// A set of namespace ids.
#[derive(Debug, Default)]
pub struct NsidSet([u64; (MAX_NSID / u64::BITS) as usize + 1]);

impl NsidSet {
    /// Adds an id, if it is valid.
    #[inline]
    pub fn insert(&mut self, nsid: u32) {
        if let Some(word) = self.0.get_mut((nsid / u64::BITS) as usize) {
            *word |= 1 << (nsid % u64::BITS);
        }
    }

    /// Takes all ids.
    pub fn take(&mut self) -> impl Iterator<Item = u32> + '_ {
        (0..).step_by(u64::BITS as usize).zip(&mut self.0).flat_map(|(first, word)| {
            let word = std::mem::take(word);
            (0..u64::BITS).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
        })
    }
}

/// Counters of a namespace or of a subsystem, as they are persisted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SavedCounters {
    /// Work done.
    pub work: Work,
    /// Busy time in quarters of a second.
    pub busy_grains: u64,
}

impl SavedCounters {
    /// Busy time, in grains of a quarter of a second.
    pub fn busy(&self) -> Duration {
        BUSY_GRAIN.saturating_mul(self.busy_grains.try_into().unwrap_or(u32::MAX))
    }

    fn with(self, work: &Work) -> SavedCounters {
        SavedCounters { work: self.work.plus(work), ..self }
    }
}

/// What no reactor counts.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// The work of earlier runs, and the busy time of all: with commands in flight.
    kept: SavedCounters,
    /// The last grain of the busy time.
    last_grain: u64,
}

impl Account {
    fn carry(&mut self, kept: &SavedCounters) {
        self.kept = self.kept.with(&kept.work);
        self.kept.busy_grains = self.kept.busy_grains.wrapping_add(kept.busy_grains);
    }

    fn note_busy(&mut self, grain: u64) {
        if std::mem::replace(&mut self.last_grain, grain) != grain {
            self.kept.busy_grains = self.kept.busy_grains.wrapping_add(1);
        }
    }
}

/// The accounts of a subsystem and of its namespaces, and the tables of the reactors.
#[derive(Debug, Default)]
struct Accounts {
    whole: Account,
    namespaces: BTreeMap<u32, Account>,
    reactors: Vec<Arc<ReactorUsage>>,
    /// When its first namespace was busy.
    since: Option<Instant>,
}

/// Usage counters of a subsystem, kept across its snapshots.
#[derive(Debug, Default)]
pub struct Usage {
    /// Entries ever made in the Error Information logs of its controllers.
    errors: AtomicU64,
    history: Option<PersistentEventLog>,
    /// Health of the backing stores of its namespaces.
    healths: Mutex<Vec<Arc<Health>>>,
    /// Locked by readers, and by a queue when it connects, when its subsystem changes, and a few
    /// times a second.
    accounts: Mutex<Accounts>,
}

impl Usage {
    /// Of a subsystem with a Persistent Event log.
    pub fn kept(history: PersistentEventLog) -> Usage {
        Usage { history: Some(history), ..Usage::default() }
    }

    /// The Persistent Event log, if there is one.
    pub fn history(&self) -> Option<&PersistentEventLog> {
        self.history.as_ref()
    }

    /// Replaces the health of the backing stores of its namespaces.
    pub fn prepare(&self, healths: impl Iterator<Item = Arc<Health>>) {
        let mut own = lock(&self.healths);
        own.clear();
        own.extend(healths);
    }

    /// Whether the backing store of any namespace is degraded.
    pub fn is_degraded(&self) -> bool {
        let healths = lock(&self.healths);
        healths.iter().any(|health| health.is_degraded())
    }

    /// The table in which a reactor, by its index, counts the work of these namespaces. No other
    /// thread may write to it.
    #[must_use]
    pub fn reactor(&self, index: usize, nsids: impl Iterator<Item = u32>) -> Arc<ReactorUsage> {
        let mut accounts = lock(&self.accounts);
        if accounts.reactors.len() <= index {
            accounts.reactors.resize_with(index + 1, Arc::default);
        }
        let Accounts { reactors, namespaces, .. } = &mut *accounts;
        let table = &mut reactors[index];
        let missing: Vec<u32> = nsids.filter(|nsid| table.of(*nsid).is_none()).collect();
        if !missing.is_empty() {
            // Made here, so that commands allocate nothing.
            missing.iter().for_each(|nsid| _ = namespaces.entry(*nsid).or_default());
            let mut all: BTreeMap<u32, Arc<WorkCounters>> = table.0.iter().cloned().collect();
            all.extend(missing.into_iter().map(|nsid| (nsid, Arc::default())));
            *table = Arc::new(ReactorUsage(all.into_iter().collect()));
        }
        Arc::clone(table)
    }

    /// Records that commands for these namespaces are in flight now, or were just before.
    pub fn note_busy(&self, nsids: impl Iterator<Item = u32>, now: Instant) {
        let mut accounts = lock(&self.accounts);
        let since = *accounts.since.get_or_insert(now);
        let grains = now.saturating_duration_since(since).as_millis() / BUSY_GRAIN.as_millis();
        // The first is 1.
        let grain = u64::try_from(grains).unwrap_or(u64::MAX - 1) + 1;
        for nsid in nsids {
            accounts.namespaces.entry(nsid).or_default().note_busy(grain);
            accounts.whole.note_busy(grain);
        }
    }

    /// The counters of all its namespaces, including removed ones.
    pub fn whole(&self) -> SavedCounters {
        lock(&self.accounts).whole()
    }

    /// The counters of a namespace.
    pub fn of(&self, nsid: u32) -> SavedCounters {
        let accounts = lock(&self.accounts);
        let kept = accounts.namespaces.get(&nsid).map_or_else(Default::default, |own| own.kept);
        let tables = accounts.reactors.iter().filter_map(|table| table.of(nsid));
        tables.fold(kept, |sum, counters| sum.with(&counters.total()))
    }

    /// Counts an entry of an error log; its number, from 1.
    pub fn count_error(&self) -> u64 {
        self.errors.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Entries ever made in error logs.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// Counters to be persisted: errors, the sum, and each namespace with commands.
    pub fn accounts(&self) -> (u64, SavedCounters, Vec<(u32, SavedCounters)>) {
        let accounts = lock(&self.accounts);
        let kept = accounts.namespaces.iter().map(|(nsid, own)| (*nsid, own.kept));
        let mut each: BTreeMap<u32, SavedCounters> = kept.collect();
        for (nsid, counters) in accounts.reactors.iter().flat_map(|table| &table.0) {
            let own = each.entry(*nsid).or_default();
            *own = own.with(&counters.total());
        }
        let used = each.into_iter().filter(|(_, own)| *own != SavedCounters::default()).collect();
        (self.errors(), accounts.whole(), used)
    }

    /// Adds persisted counters of earlier runs.
    pub fn carry(&self, errors: u64, whole: &SavedCounters, namespaces: &[(u32, SavedCounters)]) {
        self.errors.fetch_add(errors, Ordering::Relaxed);
        let mut accounts = lock(&self.accounts);
        accounts.whole.carry(whole);
        for (nsid, kept) in namespaces {
            accounts.namespaces.entry(*nsid).or_default().carry(kept);
        }
    }
}

impl Accounts {
    fn whole(&self) -> SavedCounters {
        let all = self.reactors.iter().flat_map(|table| &table.0);
        all.fold(self.whole.kept, |sum, (_, counters)| sum.with(&counters.total()))
    }
}

#[cfg(any(test, feature = "testing"))]
impl Usage {
    /// Adds work with a namespace, as the first reactor does.
    pub fn add(&self, nsid: u32, work: &Work) {
        let table = self.reactor(0, std::iter::once(nsid));
        table.of(nsid).into_iter().for_each(|counters| counters.add(work));
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crate::subsystem::usage::*;

    fn work(reads: u64) -> Work {
        Work { reads, units_read: reads * 8, ..Work::default() }
    }

    /// Each in a table of its own: nothing that one counts is overwritten by another.
    #[test]
    fn concurrent_reactors_lose_no_counts_while_namespaces_are_added() {
        const ROUNDS: u32 = 1000;
        let usage = Usage::default();
        thread::scope(|scope| {
            for index in 0..3 {
                let usage = &usage;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        // Namespaces are added meanwhile, 12 in all, and not in their order.
                        let present = (1..=12).rev().take(1 + round as usize / 80);
                        let table = usage.reactor(index, present.clone());
                        present.for_each(|nsid| table.of(nsid).unwrap().add(&work(1)));
                    }
                });
            }
        });
        let expected: u64 = (0..12).map(|nth| 3 * u64::from(ROUNDS - 80 * nth)).sum();
        assert_eq!(usage.whole().work, work(expected));
        let rounds = |nth: u32| 3 * u64::from(ROUNDS - 80 * nth);
        for nsid in 1..=12 {
            assert_eq!(usage.of(nsid).work, work(rounds(12 - nsid)), "{nsid}");
        }
        assert_eq!(usage.accounts().2.len(), 12);
        assert_eq!(usage.of(13), SavedCounters::default());
    }

    #[test]
    fn busy_time_counts_each_interval_once() {
        let usage = Usage::default();
        let start = Instant::now();
        for ms in [0, 10, 249, 250, 250, 499, 1000, 1010] {
            usage.note_busy([1, 7].into_iter(), start + Duration::from_millis(ms));
        }
        usage.note_busy([].into_iter(), start + Duration::from_millis(1500));
        let busy = [usage.whole(), usage.of(1), usage.of(7)].map(|counters| counters.busy());
        assert_eq!(busy, [Duration::from_millis(750); 3]);
        assert_eq!(usage.of(2).busy(), Duration::ZERO);
    }

    #[test]
    fn a_namespace_id_set_yields_each_valid_id_once() {
        let mut set = NsidSet::default();
        for nsid in [1, 64, 63, MAX_NSID, 1, 0, u32::MAX] {
            set.insert(nsid);
        }
        assert_eq!(set.take().collect::<Vec<_>>(), [0, 1, 63, 64, MAX_NSID]);
        assert_eq!(set.take().count(), 0);
    }
}
