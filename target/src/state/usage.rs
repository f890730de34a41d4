//! Lifetime counters of each subsystem, over restarts of the daemon: the lifetime counters of the
//! SMART log, and the log of persistent events.
//!
//! The counters are one file in the `state_directory`, written beside its name, synced and renamed,
//! once a minute while they change, and at the end. So a crash loses at most the last minute. The
//! counters and events of a removed subsystem are kept in case it is added again: of the 256 that
//! were removed last, because those of all would fill memory and directory. Without a
//! `state_directory` the lifetime is that of the daemon.
//!
//! ```text
//! nvmfd usage 1
//! subsystem 3 240 1000 500 8000 4000 0 nqn.2026-11.io.nvmfd:disk1
//! namespace 1 240 1000 500 8000 4000 0
//! crc32 5f3a9c01
//! ```
//!
//! The numbers of a subsystem are: errors, quarters of a second with commands in flight, reads,
//! writes, 512-byte units read and written, media errors. Its namespaces follow, with their id
//! instead of the errors.
//!
//! The thread that writes this file also writes those of the persistent events (`event_log.rs`) and
//! of the times with power (`power.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::str::SplitN;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvme::{Nqn, Text};
use tracing::warn;

use crate::blockdev::lock;
use crate::blockdev::record::Record;
use crate::core::command::identify::FIRMWARE;
use crate::core::command::log_page;
use crate::core::subsystem::event_log::{NO_CONTROLLER, PersistentEvent};
use crate::core::subsystem::power::{Power, PowerMeter};
use crate::core::subsystem::usage::{SavedCounters, Usage};
use crate::core::subsystem::work::Work;
use crate::state::event_log;
use crate::state::power::{self, PowerLog};
use crate::state::record::StateDir;
use crate::worker_thread::WorkerThread;

const NAME: &str = "usage";
/// Interval of writes: the maximum loss by a crash.
const SAVE_EVERY: Duration = Duration::from_secs(60);
/// Minimum interval between writes of events, independent of their number.
const EVENTS_APART: Duration = Duration::from_secs(1);
/// Interval at which the SMART log is added as an event, besides at the start and at the end.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(24 * 3600);
/// Maximum of removed subsystems whose counters and events are kept.
const REMOVED_MAX: usize = 256;

type Usages = BTreeMap<Nqn, Arc<Usage>>;

/// Errors, the totals, and each namespace, as in the file.
#[derive(PartialEq, Eq, Debug, Default)]
struct Accounts(BTreeMap<Nqn, SubsystemCounters>);

type SubsystemCounters = (u64, SavedCounters, Vec<(u32, SavedCounters)>);

/// The counters and events of all subsystems.
#[derive(Debug)]
pub struct UsageStore {
    usages: Mutex<Usages>,
    /// Subsystems that are not served, in the order of their removal.
    removed: Mutex<Vec<Nqn>>,
    directory: Option<PathBuf>,
    power: PowerMeter,
    /// Wakes the thread that writes.
    wake: SyncSender<()>,
    woken: Mutex<Option<Receiver<()>>>,
    stopping: AtomicBool,
}

/// The thread that writes the files.
#[derive(Debug)]
pub struct UsageWriter {
    usage_store: Arc<UsageStore>,
    thread: WorkerThread,
}

impl UsageStore {
    /// Reads the counters in `directory`. Without a directory nothing is persisted.
    ///
    /// A file that cannot be read, or is invalid, is ignored with a warning: no data depend on
    /// these numbers.
    #[must_use]
    pub fn open(directory: Option<&Path>, power: PowerMeter) -> UsageStore {
        let (wake, woken) = sync_channel(1);
        let empty = UsageStore {
            usages: Mutex::default(),
            removed: Mutex::default(),
            directory: directory.map(Path::to_owned),
            power,
            wake,
            woken: Mutex::new(Some(woken)),
            stopping: AtomicBool::new(false),
        };
        let found = directory.and_then(|directory| StateDir(directory).load_if_usable(NAME));
        let Accounts(found) = found.unwrap_or_default();
        for (nqn, (errors, whole, namespaces)) in found {
            empty.usage(&nqn).carry(errors, &whole, &namespaces);
        }
        empty
    }

    /// Returns the counters of a subsystem, continued from the persisted ones.
    pub fn usage(&self, subsystem: &Nqn) -> Arc<Usage> {
        Arc::clone(lock(&self.usages).entry(*subsystem).or_insert_with(|| {
            let Some(directory) = &self.directory else { return Arc::default() };
            Arc::new(Usage::kept(event_log::open(directory, *subsystem, self.wake.clone())))
        }))
    }

    /// These subsystems are served from now on, and no others.
    pub(crate) fn serve(&self, served: &BTreeSet<Nqn>) {
        let mut removed = lock(&self.removed);
        removed.retain(|nqn| !served.contains(nqn));
        let known: Vec<Nqn> = lock(&self.usages).keys().copied().collect();
        let is_new = |nqn: &Nqn| !served.contains(nqn) && !removed.contains(nqn);
        let new: Vec<Nqn> = known.into_iter().filter(is_new).collect();
        removed.extend(new);
    }

    /// Forgets the subsystems that were removed first, if there are too many.
    fn forget_removed(&self) {
        let mut removed = lock(&self.removed);
        let more = removed.len().saturating_sub(REMOVED_MAX);
        for nqn in removed.drain(..more) {
            lock(&self.usages).remove(&nqn);
            if let Some(directory) = &self.directory {
                event_log::remove(&nqn, directory);
            }
        }
    }

    /// Adds the power-on event of a subsystem that is served from now on.
    pub(crate) fn switched_on(&self, subsystem: &Nqn) {
        let (usage, power) = (self.usage(subsystem), self.power.at(Instant::now()));
        if let Some(history) = usage.history() {
            let (firmware, cntlid) = (Text::lossy(FIRMWARE), NO_CONTROLLER);
            history.note(PersistentEvent::PowerOnOrReset { firmware, cntlid }, &power);
            snapshot(&usage, power);
        }
    }

    /// Starts the thread that writes; `None` without a directory.
    pub fn keep(self: Arc<UsageStore>, power: PowerLog) -> Option<UsageWriter> {
        let directory = self.directory.clone()?;
        let woken = lock(&self.woken).take()?;
        power.save(Instant::now(), true);
        let usage_store = Arc::clone(&self);
        let work = move || usage_store.run(&directory, &power, &woken);
        match WorkerThread::start("writer", work) {
            Ok(thread) => Some(UsageWriter { usage_store: self, thread }),
            Err(error) => {
                warn!("no thread for usage counters: {error}");
                None
            }
        }
    }

    fn run(&self, directory: &Path, power: &PowerLog, woken: &Receiver<()>) {
        let start = Instant::now();
        let (mut usage_due, mut snapshot_due) = (start + SAVE_EVERY, start + SNAPSHOT_EVERY);
        let mut power_due = start + power::SAVE_EVERY;
        // Earlier events have set the flag.
        let (mut events_due, mut news) = (start, false);
        let mut kept = None;
        loop {
            let due = usage_due.min(power_due).min(if news { events_due } else { usage_due });
            let rung = woken.recv_timeout(due.saturating_duration_since(Instant::now()));
            news |= rung.is_ok();
            let now = Instant::now();
            // Acquire: events before the stop are visible.
            let stopping = self.stopping.load(Ordering::Acquire);
            let late = stopping || now >= usage_due;
            if stopping || now >= snapshot_due {
                snapshot_due = now + SNAPSHOT_EVERY;
                lock(&self.usages).values().for_each(|usage| snapshot(usage, self.power.at(now)));
            }
            if late || news && now >= events_due {
                news = false;
                events_due = now + EVENTS_APART;
                let usages: Vec<_> = lock(&self.usages).values().cloned().collect();
                usages
                    .iter()
                    .filter_map(|usage| usage.history())
                    .for_each(|log| event_log::save(log, directory));
            }
            if late {
                self.forget_removed();
                usage_due = now + SAVE_EVERY;
                let now = Some(Accounts::of(&lock(&self.usages)));
                if let Some(accounts) = now.as_ref().filter(|_| now != kept) {
                    match StateDir(directory).replace(NAME, accounts) {
                        Ok(()) => kept = now,
                        Err(error) => {
                            warn!("cannot write {}: {error}", directory.join(NAME).display());
                        }
                    }
                }
            }
            if stopping || now >= power_due {
                power_due = now + power::SAVE_EVERY;
                power.save(now, !stopping);
            }
            if stopping {
                return;
            }
        }
    }
}

impl UsageWriter {
    /// Writes all files for the last time; gives up at the deadline.
    pub fn close(self, deadline: Instant) {
        self.usage_store.stopping.store(true, Ordering::Release);
        // A thread that was woken earlier sees the flag as well.
        let _ = self.usage_store.wake.try_send(());
        self.thread.join_by(deadline);
    }
}

/// Adds the current SMART log of a subsystem as an event.
fn snapshot(usage: &Usage, power: Power) {
    if let Some(history) = usage.history() {
        let smart = log_page::health(&usage.whole(), usage.errors(), usage.is_degraded(), power);
        history.note(PersistentEvent::Smart(&smart), &power);
    }
}

impl Accounts {
    fn of(usages: &Usages) -> Accounts {
        // Also without counters: it names those that have events.
        Accounts(usages.iter().map(|(nqn, usage)| (*nqn, usage.accounts())).collect())
    }
}

impl Record for Accounts {
    const KIND: &'static str = "usage";
    const REMEDY: &'static str = "remove it";

    fn emit(&self) -> String {
        let mut text = String::new();
        for (nqn, (errors, whole, namespaces)) in &self.0 {
            // Writing to a string does not fail.
            let _ = writeln!(text, "subsystem {errors} {} {nqn}", numbers(whole));
            for (nsid, account) in namespaces {
                let _ = writeln!(text, "namespace {nsid} {}", numbers(account));
            }
        }
        text
    }

    fn parse(body: &str) -> Option<Accounts> {
        let mut accounts = BTreeMap::new();
        let mut lines = body.lines().peekable();
        while let Some(line) = lines.next() {
            let mut words = line.strip_prefix("subsystem ")?.splitn(8, ' ');
            let (errors, whole) = entry(&mut words)?;
            let nqn = words.next()?.parse().ok()?;
            let mut namespaces = Vec::new();
            while let Some(line) = lines.next_if(|line| line.starts_with("namespace ")) {
                let mut words = line.strip_prefix("namespace ")?.splitn(7, ' ');
                let (nsid, account) = entry(&mut words)?;
                namespaces.push((u32::try_from(nsid).ok()?, account));
            }
            accounts.insert(nqn, (errors, whole, namespaces));
        }
        Some(Accounts(accounts))
    }
}

fn numbers(account: &SavedCounters) -> String {
    let SavedCounters { work, busy_grains } = account;
    let Work { reads, writes, units_read, units_written, media_errors } = work;
    format!("{busy_grains} {reads} {writes} {units_read} {units_written} {media_errors}")
}

fn entry(words: &mut SplitN<'_, char>) -> Option<(u64, SavedCounters)> {
    let mut number = || words.next()?.parse::<u64>().ok();
    let (first, busy_grains) = (number()?, number()?);
    let work = Work {
        reads: number()?,
        writes: number()?,
        units_read: number()?,
        units_written: number()?,
        media_errors: number()?,
    };
    Some((first, SavedCounters { work, busy_grains }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nvme::persistent_event::PersistentEventHeader;

    use crate::blockdev::record::unseal;
    use crate::core::subsystem::event_log::LogHeader;
    use crate::state::usage::*;

    fn work(reads: u64) -> Work {
        Work { reads, writes: 2, units_read: reads * 8, units_written: 16, media_errors: 1 }
    }

    fn nqn(name: &str) -> Nqn {
        format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap()
    }

    fn started(directory: &Path) -> (Arc<UsageStore>, UsageWriter) {
        let usage_store = Arc::new(UsageStore::open(Some(directory), PowerMeter::default()));
        let keeping =
            Arc::clone(&usage_store).keep(PowerLog::open(Some(directory), Instant::now())).unwrap();
        (usage_store, keeping)
    }

    fn stopped(keeping: UsageWriter) {
        keeping.close(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn usage_survives_restarts_even_of_subsystems_not_served_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let now = Instant::now();
        let [a, b] = ["a", "b"].map(nqn);
        let (first, keeping) = started(directory.path());
        let usage = first.usage(&a);
        usage.add(1, &work(10));
        usage.add(7, &work(100));
        usage.note_busy([7].into_iter(), now);
        assert_eq!([usage.count_error(), usage.count_error()], [1, 2]);
        first.usage(&b).add(1, &work(5));
        stopped(keeping);

        let (second, keeping) = started(directory.path());
        let usage = second.usage(&a);
        assert_eq!(usage.whole().work.reads, 110);
        assert_eq!((usage.of(1).work, usage.of(7).work), (work(10), work(100)));
        assert_eq!(usage.whole().busy(), Duration::from_millis(250));
        assert_eq!(usage.count_error(), 3, "no number comes twice");
        usage.add(7, &work(1));
        // A start that fails persists nothing, and removes nothing.
        drop(UsageStore::open(Some(directory.path()), PowerMeter::default()));
        stopped(keeping);

        let third = UsageStore::open(Some(directory.path()), PowerMeter::default());
        assert_eq!(third.usage(&a).of(7).work.reads, 101);
        assert_eq!(third.usage(&b).whole().work, work(5), "nobody asked for it meanwhile");
        assert_eq!(third.usage(&nqn("c")).whole().work, Work::default());
        assert!(Arc::ptr_eq(&third.usage(&a), &third.usage(&a)));
    }

    #[test]
    fn usage_and_events_of_removed_subsystems_are_kept_up_to_a_limit() {
        let directory = tempfile::tempdir().unwrap();
        let (usage_store, keeping) = started(directory.path());
        let served = |names: &[usize]| {
            let nqns: BTreeSet<Nqn> = names.iter().map(|name| nqn(&name.to_string())).collect();
            nqns.iter().for_each(|nqn| usage_store.switched_on(nqn));
            usage_store.serve(&nqns);
        };
        let events = || {
            let files = fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path());
            files.filter(|path| path.extension().is_some_and(|end| end == "events")).count()
        };
        for name in (0..REMOVED_MAX + 9).rev() {
            served(&[7, name]);
        }
        served(&[7]);
        stopped(keeping);
        let kept = || StateDir(directory.path()).load::<Accounts>(NAME).unwrap().unwrap().0;
        assert_eq!((events(), kept().len()), (REMOVED_MAX + 1, REMOVED_MAX + 1));
        assert!(kept().contains_key(&nqn("7")) && kept().contains_key(&nqn("0")));
        assert!(!kept().contains_key(&nqn(&(REMOVED_MAX + 8).to_string())));
        // Those of an earlier run are counted as well.
        let (usage_store, keeping) = started(directory.path());
        usage_store.switched_on(&nqn("new"));
        usage_store.serve(&[nqn("new")].into());
        stopped(keeping);
        assert_eq!((events(), kept().len()), (REMOVED_MAX + 1, REMOVED_MAX + 1));
    }

    #[test]
    fn damaged_files_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(NAME);
        let (usage_store, keeping) = started(directory.path());
        usage_store.usage(&nqn("a")).add(3, &work(u64::MAX / 8));
        stopped(keeping);
        let good = fs::read(&path).unwrap();
        assert_eq!(unseal::<Accounts>(&good).unwrap().0.len(), 1);
        let sealed = |body: &str| format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()));
        let bodies = [
            "",
            "nvmfd usage 2\n",
            "nvmfd usage 1\nnamespace 1 0 0 0 0 0 0\n",
            "nvmfd usage 1\nsubsystem 0 0 0 0 0 0 0 not a name\n",
            "nvmfd usage 1\nsubsystem 0 0 0 0 0 0 nqn.2026-11.io.nvmfd:a\n",
            "nvmfd usage 1\nsubsystem 0 0 0 0 0 0 0 nqn.2026-11.io.nvmfd:a\nnamespace 4294967296 0 0 0 0 0 0\n",
        ];
        for bad in bodies.map(sealed).into_iter().chain(["x".to_owned()]) {
            assert!(unseal::<Accounts>(bad.as_bytes()).is_err(), "{bad:?}");
            fs::write(&path, bad).unwrap();
            let usage_store = UsageStore::open(Some(directory.path()), PowerMeter::default());
            assert_eq!(usage_store.usage(&nqn("a")).whole().work, Work::default());
        }
    }

    #[test]
    fn usage_without_a_state_directory_is_not_persisted() {
        let usage_store = Arc::new(UsageStore::open(None, PowerMeter::default()));
        usage_store.usage(&nqn("a")).add(1, &work(1));
        assert_eq!(usage_store.usage(&nqn("a")).whole().work, work(1));
        usage_store.switched_on(&nqn("a"));
        assert!(usage_store.usage(&nqn("a")).history().is_none());
        assert!(usage_store.keep(PowerLog::open(None, Instant::now())).is_none());
    }

    #[test]
    fn power_on_and_snapshot_events_survive_restarts() {
        let directory = tempfile::tempdir().unwrap();
        let about = LogHeader { nqn: nqn("a"), serial: Text::lossy("S"), model: Text::lossy("M") };
        let told = |usage_store: &UsageStore| {
            let usage = usage_store.usage(&nqn("a"));
            let page = usage.history().unwrap().report(&about, &Power::default());
            PersistentEventHeader::parse(page.first_chunk().unwrap()).events
        };
        for starts in 0..3 {
            let (usage_store, keeping) = started(directory.path());
            assert_eq!(told(&usage_store), 3 * starts, "a start and two snapshots each");
            usage_store.switched_on(&nqn("a"));
            assert_eq!(told(&usage_store), 3 * starts + 2);
            stopped(keeping);
        }
        // A start that fails does not count.
        UsageStore::open(Some(directory.path()), PowerMeter::default()).switched_on(&nqn("a"));
        assert_eq!(told(&started(directory.path()).0), 9);
    }

    #[test]
    fn the_power_state_is_written_at_startup_and_at_shutdown() {
        let directory = tempfile::tempdir().unwrap();
        let state = || {
            let text = std::fs::read_to_string(directory.path().join("power")).unwrap();
            text.lines().nth(4).unwrap().to_owned()
        };
        let (_ledger, keeping) = started(directory.path());
        assert_eq!(state(), "on");
        stopped(keeping);
        assert_eq!(state(), "off");
    }
}
