//! The device monitor: examines backing stores after errors, detects truncated files, and resumes
//! service when a device is available again.
//!
//! All of this may block on a device, so it runs in tasks of the blocking pool that nobody waits
//! for: a file system or device that blocks occupies one of them, whatever the number of its
//! stores, and the others examine the rest.
//!
//! ```text
//! in service ──(removed)──► down ──(the same device is available again)──► in service
//!     ├──(truncated, or another file is at its path)──► untrusted ──(trust)──┘
//!     ├── a path that leads elsewhere is recorded: the next start does not trust another file
//!     └── a failed fsync stays recorded until the administrator trusts the store
//! ```
//!
//! A store keeps its id when it is opened again, so commands and namespaces do not notice.

mod device;
mod file_events;
mod rollback;
mod space;
mod standby;
mod trust;

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvme::{Nqn, Status};
use tracing::{error, info, warn};

use crate::blocking::BlockingPool;
use crate::{BackingDevice, Condition, DeviceId, Kind, lock};
pub use device::{MonitoredDevice, ResizeGuard};
use file_events::FileEvents;
pub use standby::IsCurrent;
pub use trust::{Distrust, TrustRecord, TrustRecords};

/// Interval of examinations after a failure.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Interval of examinations without a failure. Truncation of a file that was open before is not
/// reported.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Longest interval of attempts to reopen a failed store.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(2);
/// Poll interval while a store is being closed.
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Time for an answer of a reactor, and for a request of the administrator.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum of tasks, each at a file system or device of its own.
const TASKS_MAX: usize = 64;
/// Stands for the file system of the state directory.
const RECORDS: u64 = u64::MAX;

/// Why a request to trust a store failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Untrusted {
    /// The store is trusted already.
    AlreadyTrusted,
    /// The store does not answer.
    NoAnswer,
    /// The store fails, with this reason.
    Failing(String),
}

/// The rings of all reactors.
pub trait Rings: std::fmt::Debug + Send + Sync {
    /// Number of rings.
    fn count(&self) -> usize;

    /// Attaches a store under its id to a ring, which reports the result later.
    fn attach(
        &self,
        ring: usize,
        id: DeviceId,
        backing: &Arc<BackingDevice>,
    ) -> mpsc::Receiver<std::io::Result<()>>;

    /// Wakes all rings: the health of a store has changed.
    fn wake(&self);
}

/// Examines and reopens stores.
#[derive(Debug)]
pub struct DeviceMonitor {
    shared: Arc<Shared>,
    /// Signals the end of the first of its tasks.
    ended: Mutex<mpsc::Receiver<()>>,
}

#[derive(Debug)]
struct Shared {
    rings: Box<dyn Rings>,
    pool: Arc<BlockingPool>,
    state: Mutex<MonitorState>,
    wake: Arc<Condvar>,
    file_systems: space::FileSystems,
    events: Option<FileEvents>,
}

#[derive(Debug, Default)]
struct MonitorState {
    devices: Vec<Arc<MonitoredDevice>>,
    /// Stores to be closed. Closing may block, so no ring may hold the last reference.
    closing: Vec<Arc<BackingDevice>>,
    /// File systems and devices that a task is working on.
    busy: Vec<u64>,
    /// Number of tasks, and of those that are idle.
    tasks: usize,
    idle: usize,
    /// An idle task waits with a time limit, and the others until it takes work.
    is_timed: bool,
    stopping: bool,
}

impl DeviceMonitor {
    /// The threads for what may block on a device.
    pub fn blocking(&self) -> &BlockingPool {
        &self.shared.pool
    }

    /// Starts to monitor stores that these rings serve.
    ///
    /// # Errors
    /// A thread could not be created.
    pub fn start(
        rings: impl Rings + 'static,
        pool: Arc<BlockingPool>,
    ) -> std::io::Result<DeviceMonitor> {
        // Two, so that none has to be started while there is no failure.
        let busy = Vec::with_capacity(TASKS_MAX);
        let state = Mutex::new(MonitorState { tasks: 2, busy, ..MonitorState::default() });
        let rings = Box::new(rings);
        let (wake, file_systems) = (Arc::default(), space::FileSystems::default());
        let events = FileEvents::new();
        let shared = Arc::new(Shared { rings, pool, state, wake, file_systems, events });
        let own = Arc::clone(&shared);
        shared.pool.spawn(move || own.pass_events())?;
        let ended = Mutex::new(begin_work(&shared)?);
        begin_work(&shared)?;
        Ok(DeviceMonitor { shared, ended })
    }

    /// Starts to monitor a store that every ring has.
    pub fn add(&self, device: Arc<MonitoredDevice>) {
        if device.record.is_some() {
            device.health.record_by(Some(Arc::clone(&self.shared.wake)));
        }
        lock(&self.shared.state).devices.push(device);
    }

    /// Stops to monitor a store, and closes it when the last ring has released it.
    pub fn remove(&self, device: &Arc<MonitoredDevice>) {
        device.retired.store(true, Ordering::Relaxed);
        if device.lacks_record() {
            device.keep_record();
        }
        self.shared.stop_recording(device);
        // After a task that attaches it to rings at the moment.
        let backing = device.backing();
        let mut state = lock(&self.shared.state);
        state.devices.retain(|other| !Arc::ptr_eq(other, device));
        state.closing.push(backing);
        drop(state);
        self.shared.wake.notify_all();
    }

    /// The monitored store of a namespace.
    pub fn find(&self, subsystem: &Nqn, nsid: u32) -> Option<Arc<MonitoredDevice>> {
        let of = Some((*subsystem, nsid));
        let state = lock(&self.shared.state);
        let mut devices = state.devices.iter();
        devices.find(|device| device.record.as_ref().map(|(of, _)| *of) == of).cloned()
    }

    /// Trusts a store again whose fsync has failed, or whose file was truncated or replaced: opens
    /// and syncs what is at its path. `mark_hosts` marks the hosts whose next flush fails: it is called
    /// before the record is removed, which persists them, and just before the store is served.
    /// Without an answer within ten seconds nothing changes.
    ///
    /// # Errors
    /// Why it is not trusted.
    pub fn trust(
        &self,
        device: &Arc<MonitoredDevice>,
        mark_hosts: impl Fn() + Send + 'static,
    ) -> Result<(), Untrusted> {
        if device.is_trusted() {
            return Err(Untrusted::AlreadyTrusted);
        }
        if device.reopening.swap(true, Ordering::Relaxed) {
            return Err(Untrusted::NoAnswer);
        }
        let (own, store) = (Arc::clone(&self.shared), Arc::clone(device));
        let waits = Arc::new(AtomicBool::new(true));
        let waited = Arc::clone(&waits);
        let spawned = self.shared.pool.spawn(move || {
            // The caller has timed out and has reported that it is not trusted.
            let is_wanted = || waited.swap(false, Ordering::Relaxed);
            let outcome = own.trust(&store, is_wanted, mark_hosts);
            store.reopening.store(false, Ordering::Relaxed);
            outcome
        });
        let said = spawned.map_err(|error| {
            device.reopening.store(false, Ordering::Relaxed);
            Untrusted::Failing(format!("no thread to open it: {error}"))
        })?;
        let outcome = said.recv_timeout(ANSWER_TIMEOUT);
        let outcome = match outcome {
            Err(_) if waits.swap(false, Ordering::Relaxed) => return Err(Untrusted::NoAnswer),
            // The result was decided meanwhile.
            Err(_) => said.recv().map_err(|_| Untrusted::NoAnswer)?,
            Ok(outcome) => outcome,
        };
        outcome.map_err(Untrusted::Failing)?;
        warn!("{}: trusted again by the administrator: flushes succeed", device.place);
        Ok(())
    }

    /// Logs the stores that the next start will not find, and has that recorded: one that does not
    /// answer hides none of another place. Waits until the deadline at most.
    pub fn report_detached(&self, deadline: Instant) {
        let mut places = BTreeMap::<u64, Vec<Arc<MonitoredDevice>>>::new();
        for device in lock(&self.shared.state).devices.iter().filter(|it| it.has_path()) {
            let place = device.place_now.load(Ordering::Relaxed);
            places.entry(place).or_default().push(Arc::clone(device));
        }
        let begun = places.into_values().filter_map(|mut devices| {
            // One whose directory does not answer hides no other that is known.
            devices.sort_by_key(|it| it.health.detached().is_none());
            let report = move || devices.iter().for_each(|it| it.report_detached());
            self.shared.pool.spawn(report).ok()
        });
        for done in begun.collect::<Vec<_>>() {
            let _ = done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        }
    }

    /// Stops the monitor. Tasks that block on a device are detached.
    pub fn stop(&self, deadline: Instant) {
        let mut state = lock(&self.shared.state);
        // A failure of the last moment is still persisted.
        while state.devices.iter().any(|it| it.lacks_record()) && Instant::now() < deadline {
            drop(state);
            self.shared.wake.notify_all();
            std::thread::sleep(CLOSE_POLL_INTERVAL);
            state = lock(&self.shared.state);
        }
        state.stopping = true;
        // The last task must not keep the stores open.
        let (devices, closing) = (take(&mut state.devices), take(&mut state.closing));
        drop(state);
        self.shared.wake.notify_all();
        self.shared.events.iter().for_each(FileEvents::stop);
        devices.iter().for_each(|device| self.shared.stop_recording(device));
        drop((devices, closing));
        let left = deadline.saturating_duration_since(Instant::now());
        let _ = lock(&self.ended).recv_timeout(left);
    }
}

/// Work for a task.
#[derive(Debug)]
enum Work {
    Look(Arc<MonitoredDevice>),
    Record(Arc<MonitoredDevice>),
    Close(Arc<BackingDevice>),
}

/// One task of the pool: does what is due, one item at a time. If no other task is idle, one more
/// is started before the work begins, so that a store that blocks does not delay the others.
fn work(shared: &Arc<Shared>) {
    let mut wait = RETRY_INTERVAL;
    let mut state = lock(&shared.state);
    state.idle += 1;
    while !state.stopping {
        let Some((place, work)) = state.next_due() else {
            // A store that is being closed may have to be opened again.
            wait = if state.closing.is_empty() {
                state.longest_wait()
            } else {
                (wait / 2).max(CLOSE_POLL_INTERVAL)
            };
            state = shared.wait(state, wait);
            continue;
        };
        state.idle -= 1;
        if state.idle > 0 && !state.is_timed {
            shared.wake.notify_one();
        }
        let short = state.idle == 0 && state.tasks < TASKS_MAX;
        if short && begin_work(shared).is_ok() {
            state.tasks += 1;
        }
        drop(state);
        shared.execute(work);
        state = lock(&shared.state);
        state.busy.retain(|busy| *busy != place);
        state.idle += 1;
    }
}

/// Starts one more task; the receiver signals its end.
fn begin_work(shared: &Arc<Shared>) -> std::io::Result<mpsc::Receiver<()>> {
    let own = Arc::clone(shared);
    shared.pool.spawn(move || work(&own))
}

impl MonitorState {
    /// The next item that is due, if its device is free, which is then marked as busy.
    fn next_due(&mut self) -> Option<(u64, Work)> {
        let now = Instant::now();
        let is_free = |place: u64| !self.busy.contains(&place);
        let is_let_go = |it: &Arc<BackingDevice>| Arc::strong_count(it) == 1;
        let unrecorded = self.devices.iter().find(|it| it.is_record_due(now));
        if let Some(device) = unrecorded.filter(|_| is_free(RECORDS)) {
            let work = Work::Record(Arc::clone(device));
            self.busy.push(RECORDS);
            return Some((RECORDS, work));
        }
        let closed = self.closing.iter().position(|it| is_let_go(it) && is_free(it.place()));
        let (place, work) = match closed {
            Some(at) => {
                let backing = self.closing.swap_remove(at);
                (backing.place(), Work::Close(backing))
            }
            None => {
                let place = |it: &MonitoredDevice| it.place_now.load(Ordering::Relaxed);
                let due = self.devices.iter().filter(|it| is_free(place(it)) && it.is_due(now));
                let due = due.min_by_key(|it| it.due_at())?;
                (place(due), Work::Look(Arc::clone(due)))
            }
        };
        self.busy.push(place);
        Some((place, work))
    }
}

impl Shared {
    /// Waits until there may be work. One task at a time has a time limit, so that the number of
    /// idle tasks costs no wake-ups.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, MonitorState>,
        limit: Duration,
    ) -> MutexGuard<'a, MonitorState> {
        if state.is_timed {
            return self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_timed = true;
        let waited = self.wake.wait_timeout(state, limit);
        (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_timed = false;
        state
    }

    fn execute(&self, work: Work) {
        match work {
            Work::Close(backing) => drop(backing),
            Work::Record(device) => {
                device.keep_record();
                self.rings.wake();
            }
            Work::Look(device) => {
                device.touched.store(false, Ordering::Relaxed);
                if !device.retired.load(Ordering::Relaxed) {
                    self.look(&device);
                }
                device.reschedule();
            }
        }
    }

    /// Failures of this store are not persisted any more, so reports do not wait for that.
    fn stop_recording(&self, device: &MonitoredDevice) {
        device.health.record_by(None);
        self.rings.wake();
    }

    /// Examines a store and acts on the result.
    fn look(&self, device: &MonitoredDevice) {
        let (backing, health) = (device.backing(), &device.health);
        if let Some(events) = &self.events {
            events.watch(device, &backing);
        }
        let thorough = health.is_suspect() || health.is_down();
        health.clear_suspicion();
        // A rollback exchanges what is at its path, and then what is served.
        if !device.reopening.load(Ordering::Relaxed) {
            device.check_path(&backing);
        }
        let moved = || backing.has_moved(&device.config);
        let condition = backing.inspect(thorough);
        self.look_at_space(device, &backing);
        if backing.is_fenced_standby() {
            health.set_standby(true);
            if let Err(why) = self.replace(device, &backing) {
                device.log_once(&why);
            }
            return;
        }
        match condition {
            Condition::Sound | Condition::Refilled if health.is_shortened() => {
                return device.log_once(
                    "is whole again, and waits for `nvmfctl namespace trust`: it was shortened \
                     meanwhile, so what hosts find there may not be what they have written",
                );
            }
            Condition::Sound if health.is_replaced() => {
                if moved()
                    && let Err(why) = self.return_to(device, &backing)
                {
                    device.log_once(&why);
                }
                return;
            }
            Condition::Sound => {
                if health.is_down() && backing.has_unsynced_data() {
                    // The volatile cache of a device may have been lost while it was away.
                    backing.fail_sync(Status::WRITE_FAULT);
                }
                if health.set_up() {
                    info!("{}: {} is available again, I/O resumed", device.place, backing.name());
                }
                return;
            }
            // Trusted meanwhile: that is another open file.
            Condition::Refilled if !Arc::ptr_eq(&device.backing(), &backing) => return,
            Condition::Shortened(_) | Condition::Refilled => backing.fail_truncated(condition),
            Condition::Failing(errno) if is_gone(errno) || moved() => {
                let said = nix::errno::Errno::from_raw(errno).desc();
                backing.set_down(&format!("is gone ({said}): attach or mount it again"));
            }
            // A bad block: only commands that access it fail.
            Condition::Failing(_) => {}
        }
        if !health.is_down() {
            return;
        }
        let elsewhere = match backing.image() {
            Some(image) => image.is_fenced(),
            None => backing.kind() == Kind::Device || moved() && !health.is_shortened(),
        };
        if elsewhere && let Err(why) = self.replace(device, &backing) {
            device.log_once(&why);
        }
    }

    /// Replaces a removed store by what is at its path now.
    fn replace(&self, device: &MonitoredDevice, gone: &Arc<BackingDevice>) -> Result<(), String> {
        let fresh = gone.open_again(&device.config(), false).map_err(|error| {
            let is_there = gone.image().is_none() && !gone.has_moved(&device.config);
            match error.may_pass && is_there {
                // Its lock, which this daemon has, prevents that it is opened again.
                true => "the same device is at its path: it is served when it has its size again \
                         and answers"
                    .to_owned(),
                false => error.to_string(),
            }
        })?;
        self.exchange(device, gone, fresh)?;
        info!("{}: {} is available again, I/O resumed", device.place, gone.name());
        Ok(())
    }

    /// Serves the file that hosts have written to, if it is at its path again.
    fn return_to(
        &self,
        device: &MonitoredDevice,
        other: &Arc<BackingDevice>,
    ) -> Result<(), String> {
        let fresh = other.open_again(&device.config(), true).map_err(|error| error.to_string())?;
        let then = *lock(&device.abandoned);
        if !then.zip(fresh.inode()).is_some_and(|(then, inode)| inode.is_still(then)) {
            return Ok(());
        }
        other.set_lost(true);
        self.put(device, other, fresh).inspect_err(|_| other.set_lost(false))?;
        *lock(&device.abandoned) = None;
        device.health.end_replaced();
        info!("{}: {} is the file again that was served", device.place, other.name());
        Ok(())
    }

    /// Replaces a removed store by another one, and records unsynced data as lost.
    fn exchange(
        &self,
        device: &MonitoredDevice,
        gone: &Arc<BackingDevice>,
        fresh: BackingDevice,
    ) -> Result<(), String> {
        gone.begin_replacement();
        self.put(device, gone, fresh).inspect_err(|_| gone.set_lost(false))?;
        gone.end_replacement();
        Ok(())
    }

    /// See [`DeviceMonitor::trust`]. All checks precede the first change.
    fn trust(
        &self,
        device: &MonitoredDevice,
        is_wanted: impl FnOnce() -> bool,
        mark_hosts: impl Fn(),
    ) -> Result<(), String> {
        let old = device.backing();
        let elsewhere = device.health.is_down() && old.has_moved(&device.config);
        let fresh = match elsewhere {
            true => old.open_again(&device.config(), true),
            false => old.renewed(&device.config()),
        };
        let fresh = fresh.map_err(|error| error.to_string())?;
        match fresh.inspect(true) {
            Condition::Sound => {}
            Condition::Shortened(bytes) => return Err(format!("it ends at byte {bytes}")),
            Condition::Refilled => return Err("it was truncated again".to_owned()),
            Condition::Failing(_) => return Err("it still fails".to_owned()),
        }
        fresh.synchronise().map_err(|error| format!("it fails again: {error}"))?;
        if !is_wanted() {
            return Err("it took too long".to_owned());
        }
        let distrust = device.distrust();
        // What is served still has another path, or none.
        let replaced = distrust.replaced.filter(|_| !elsewhere && !device.health.is_replaced());
        let trusted = Distrust { replaced, ..Distrust::default() };
        mark_hosts();
        if let Some((_, record)) = &device.record {
            let kept = record.set(trusted);
            kept.map_err(|error| format!("its record cannot be removed: {error}"))?;
        }
        // What a ring completes from now on is not in the store that is served.
        old.set_lost(elsewhere);
        self.put(device, &old, fresh).inspect_err(|_| {
            old.set_lost(false);
            if let Some(Err(error)) = device.record.as_ref().map(|(_, it)| it.set(distrust)) {
                error!("{}: cannot persist that the device is not trusted: {error}", device.place);
            }
        })?;
        mark_hosts();
        *lock(&device.abandoned) = replaced;
        device.health.trust();
        device.health.clear_suspicion();
        device.health.set_up();
        Ok(())
    }

    /// Attaches a store to every ring in the place of `old`, unless that has been replaced
    /// meanwhile.
    fn put(
        &self,
        device: &MonitoredDevice,
        old: &Arc<BackingDevice>,
        fresh: BackingDevice,
    ) -> Result<(), String> {
        fresh.prepare(self.rings.count()).map_err(|error| error.to_string())?;
        let fresh = Arc::new(fresh);
        let mut current = lock(&device.current);
        // Size or block size may have changed since the store was opened.
        fresh.resize(current.size_bytes());
        fresh.reformat(current.block_size_bytes());
        if device.retired.load(Ordering::Relaxed) {
            return Err("it is no longer served".to_owned());
        }
        if !Arc::ptr_eq(&current, old) {
            return Err("it was opened again meanwhile".to_owned());
        }
        let given = (0..self.rings.count()).try_for_each(|ring| {
            let attached = self.rings.attach(ring, device.id, &fresh);
            match attached.recv_timeout(ANSWER_TIMEOUT) {
                Ok(outcome) => outcome.map_err(|error| error.to_string()),
                Err(_) => Err("a reactor does not answer".to_owned()),
            }
        });
        let parts = match &given {
            Ok(()) => {
                device.place_now.store(fresh.place(), Ordering::Relaxed);
                std::mem::replace(&mut *current, fresh)
            }
            // Some rings have it, or will: all get the old one again, or it could not be opened
            // again.
            Err(_) => {
                for ring in 0..self.rings.count() {
                    drop(self.rings.attach(ring, device.id, &current));
                }
                fresh
            }
        };
        drop(current);
        lock(&self.state).closing.push(parts);
        given
    }
}

/// Whether an errno means that the device is removed, rather than that it fails.
fn is_gone(errno: i32) -> bool {
    matches!(
        errno,
        libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM | libc::ESTALE | libc::ESHUTDOWN | libc::EBADF
    )
}

#[cfg(test)]
mod tests;
