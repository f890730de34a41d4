//! A store that is monitored: what is served under an id, across reopening, and when it is examined
//! next.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvme::Nqn;
use tracing::{error, info, warn};

use super::file_events::{TOUCH_INTERVAL, Watch};
use super::{CHECK_INTERVAL, Distrust, RETRY_INTERVAL, RETRY_INTERVAL_MAX, TrustRecord, lock};
use crate::{BackingConfig, BackingDevice, BackingKind, Detached, DeviceId, Health, Inode};

/// A store in service under an id, also across reopening.
#[derive(Debug)]
pub struct MonitoredDevice {
    /// Its id on every ring.
    pub id: DeviceId,
    /// Namespace and subsystem, for output.
    pub(super) place: String,
    pub(super) config: BackingConfig,
    pub(super) health: Arc<Health>,
    pub(super) current: Mutex<Arc<BackingDevice>>,
    pub(super) check: Mutex<CheckState>,
    /// See [`BackingDevice::place`]. (A copy, because the store may be locked for some time.)
    pub(super) place_now: AtomicU64,
    /// Bytes that writes may still allocate, as last examined.
    pub(super) unallocated_bytes: AtomicU64,
    /// The record of its trust, and its namespace.
    pub(super) record: Option<((Nqn, u32), TrustRecord)>,
    /// The file that has what hosts have written, if its path leads elsewhere.
    pub(super) abandoned: Mutex<Option<Inode>>,
    /// It is being reopened for the administrator.
    pub(super) reopening: AtomicBool,
    /// Held while an image is acquired, released or changed: the cluster may not answer for long.
    pub(super) tenure: Mutex<()>,
    /// Number of [`ResizeGuard`]s.
    resizes: AtomicU32,
    /// No longer served.
    pub(super) retired: AtomicBool,
    pub(super) watch: Mutex<Watch>,
    /// Its file was opened or closed since it was last examined.
    pub(super) touched: AtomicBool,
}

#[derive(Debug)]
pub(super) struct CheckState {
    pub(super) next_check: Instant,
    /// From when on it is examined because its file was opened or closed.
    pub(super) next_touch: Instant,
    pub(super) next_record: Instant,
    pub(super) pause: Duration,
    /// Why it could not be reopened, as last logged.
    pub(super) last_reason: String,
}

impl MonitoredDevice {
    /// For a store that was just opened.
    pub fn new(
        id: DeviceId,
        place: String,
        config: BackingConfig,
        backing: BackingDevice,
    ) -> MonitoredDevice {
        MonitoredDevice {
            id,
            place,
            config,
            health: Arc::clone(backing.health()),
            place_now: AtomicU64::new(backing.place()),
            unallocated_bytes: AtomicU64::new(backing.unallocated_bytes()),
            record: None,
            abandoned: Mutex::default(),
            reopening: AtomicBool::new(false),
            tenure: Mutex::default(),
            resizes: AtomicU32::new(0),
            current: Mutex::new(Arc::new(backing)),
            check: Mutex::new(CheckState {
                next_check: Instant::now() + CHECK_INTERVAL,
                next_touch: Instant::now(),
                next_record: Instant::now(),
                pause: RETRY_INTERVAL,
                last_reason: String::new(),
            }),
            retired: AtomicBool::new(false),
            watch: Mutex::default(),
            touched: AtomicBool::new(false),
        }
    }

    /// Adds the namespace and its trust record, and applies what the record contains.
    pub fn recorded(self, of: (Nqn, u32), record: TrustRecord) -> MonitoredDevice {
        if let Some(status) = record.distrust().failed_sync {
            let why = "a flush has failed before the daemon was started or the namespace added";
            error!(
                "{}: {why} ({status}): every flush fails until `nvmfctl namespace trust`",
                self.place
            );
            self.health.fail_sync(status);
        }
        if record.distrust().shortened {
            self.health.note_shortened();
            let why = "its file was shortened before the daemon was started or the namespace added";
            lock(&self.current)
                .set_down(&format!("{why}: check it, then `nvmfctl namespace trust`"));
        }
        if let Some(then) = record.distrust().replaced {
            self.compare_file(then);
        }
        MonitoredDevice { record: Some((of, record)), ..self }
    }

    /// `then`: the file that hosts have written to, when its path led elsewhere.
    fn compare_file(&self, then: Inode) {
        let backing = lock(&self.current);
        if backing.inode().is_some_and(|inode| inode.is_still(then)) {
            return info!("{}: {} is the file again that was served", self.place, backing.name());
        }
        *lock(&self.abandoned) = Some(then);
        self.health.set_replaced();
        backing.set_down(&format!(
            "is not known to be the file that hosts have written to: that one (inode {} of device \
             {}) was replaced or removed while it was served; when this one has what hosts are to \
             find, `nvmfctl namespace trust`",
            then.number, then.device
        ));
    }

    /// Whether it has no failure that only the administrator may clear.
    pub fn is_trusted(&self) -> bool {
        self.health.sync_failure().is_none() && !self.health.is_untrusted()
    }

    /// Logs why it cannot be served, unless that was logged last.
    pub(super) fn log_once(&self, why: &str) {
        let mut check = lock(&self.check);
        if check.last_reason != why {
            warn!("{}: {why}", self.place);
            why.clone_into(&mut check.last_reason);
        }
    }

    /// It is served: a later reason is logged, also if it is the same.
    pub(super) fn forget_reason(&self) {
        lock(&self.check).last_reason.clear();
    }

    /// Checks whether its path still leads to it. It is served in any case, because hosts use the
    /// open file and not its name. But the next start would serve what is at the path.
    pub(super) fn check_path(&self, backing: &BackingDevice) {
        let Some(detached) = backing.detached(&self.config) else { return };
        // A rollback exchanges what is at its path, and then what is served.
        // In this order: what is served changes before the rollback has ended.
        if self.reopening.load(Ordering::SeqCst) || !std::ptr::eq(&*self.backing(), backing) {
            return;
        }
        if !self.health.is_replaced() && !self.config.read_only {
            *lock(&self.abandoned) = backing.inode().filter(|_| detached.is_some());
        }
        if !self.health.set_detached(detached) {
            return;
        }
        let (place, name) = (&self.place, backing.name());
        match detached {
            None => info!("{place}: {name} refers to the served file or device again"),
            Some(detached) => warn!("{place}: {}", self.describe(backing, detached)),
        }
    }

    fn describe(&self, backing: &BackingDevice, detached: Detached) -> String {
        let is_recorded = self.record.as_ref().is_some_and(|(_, record)| record.is_durable());
        detachment(backing, detached, is_recorded)
    }

    /// At exit: logs a store that the next start will not find at its path, or that was truncated
    /// since it was last examined.
    pub(super) fn report_detached(&self) {
        let backing = self.backing();
        self.check_path(&backing);
        backing.fail_truncated(backing.inspect(false));
        if let Some(detached) = self.health.detached() {
            error!("{}: the daemon stops while {}", self.place, self.describe(&backing, detached));
        }
    }

    pub(super) fn distrust(&self) -> Distrust {
        let (failed_sync, shortened) = (self.health.sync_failure(), self.health.is_shortened());
        Distrust { failed_sync, shortened, replaced: *lock(&self.abandoned) }
    }

    /// Whether its trust is not persisted yet. Never waits: the list of devices may be locked.
    pub(super) fn lacks_record(&self) -> bool {
        let distrust = self.distrust();
        self.record.as_ref().is_some_and(|(_, record)| !record.has(distrust))
    }

    /// Persists whether it is trusted.
    pub(super) fn keep_record(&self) {
        let Some((_, record)) = &self.record else { return };
        // The request to trust it removes the record first.
        let is_settled = || !self.reopening.load(Ordering::Relaxed);
        let kept = record.update(|| is_settled().then(|| self.distrust()));
        // A failure that cannot be persisted is reported without delay.
        if kept.is_err() || !self.lacks_record() {
            self.health.note_recorded();
        }
        let distrust = self.distrust();
        let last_reason = match kept {
            Ok(()) if record.is_durable() || distrust.is_nothing() => return,
            Ok(()) if distrust.failed_sync.is_none() => {
                "without a `state_directory` the next start serves whatever is at its path: restore \
                 its file before that"
                    .to_owned()
            }
            Ok(()) => "without a `state_directory` nobody knows of the failed flush after a \
                       restart of the daemon: trust the store before that, or tell the hosts"
                .to_owned(),
            Err(error) => format!("whether it is trusted cannot be recorded: {error}"),
        };
        let mut check = lock(&self.check);
        check.next_record = Instant::now() + RETRY_INTERVAL_MAX;
        if check.last_reason != last_reason {
            error!("{}: {last_reason}", self.place);
            check.last_reason = last_reason;
        }
    }

    /// The store that currently has the id.
    pub fn backing(&self) -> Arc<BackingDevice> {
        Arc::clone(&lock(&self.current))
    }

    /// Its health.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Whether it is served with this configuration, except for its size.
    pub fn is_as(&self, config: &BackingConfig) -> bool {
        let same = self.config.kind.is_store_of(&config.kind);
        let block_size_bytes = lock(&self.current).block_size_bytes();
        let rest = (block_size_bytes, self.config.read_only, self.config.shared);
        same && rest == (config.block_size_bytes, config.read_only, config.shared)
    }

    /// Whether other daemons may serve it too.
    pub fn is_shared(&self) -> bool {
        self.config.shared
    }

    /// Whether it is a file or device, which has a path.
    pub(super) fn has_path(&self) -> bool {
        matches!(self.config.kind, BackingKind::File { .. })
    }

    /// Whether it is this file, or the image with this name ([`BackingKind::path`]).
    pub fn is_at(&self, other: &Path) -> bool {
        self.config.kind.path().is_some_and(|path| path == other)
    }

    /// Called before the size of its file is read, to serve that many bytes. None: it is being
    /// reopened, and the next file may have another size.
    #[must_use]
    pub fn begin_resize(self: &Arc<Self>) -> Option<ResizeGuard> {
        self.resizes.fetch_add(1, Ordering::SeqCst);
        let guard = ResizeGuard(Arc::clone(self));
        (!self.reopening.load(Ordering::SeqCst)).then_some(guard)
    }

    /// Whether the size of its file was read and is not served yet. The caller has set `reopening`.
    pub(super) fn is_resizing(&self) -> bool {
        self.resizes.load(Ordering::SeqCst) > 0
    }

    /// Serves this number of bytes: see [`BackingDevice::resize`]. Returns the previous number.
    pub fn resize(&self, bytes: u64) -> u64 {
        let current = lock(&self.current);
        let old = current.size_bytes();
        current.resize(bytes);
        old
    }

    /// Sets the block size, unless another store has replaced `backing`: see
    /// [`BackingDevice::reformat`]. Returns whether it was set.
    #[must_use]
    pub fn reformat(&self, backing: &Arc<BackingDevice>, block_size_bytes: u32) -> bool {
        let current = lock(&self.current);
        let same = Arc::ptr_eq(&current, backing);
        if same {
            current.reformat(block_size_bytes);
        }
        same
    }

    /// The configuration for opening it now.
    pub(super) fn config(&self) -> BackingConfig {
        let block_size_bytes = lock(&self.current).block_size_bytes();
        BackingConfig { block_size_bytes, ..self.config.clone() }
    }

    pub(super) fn is_record_due(&self, now: Instant) -> bool {
        let reopening = self.reopening.load(Ordering::Relaxed);
        let is_due = self.lacks_record() || self.health.is_unrecorded();
        is_due && !reopening && lock(&self.check).next_record <= now
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        let watched =
            matches!(self.config.kind, BackingKind::File { .. } | BackingKind::Rbd { .. });
        watched && self.due_at() <= now
    }

    /// When it is examined next. Whoever opens and closes its file all the time delays no other
    /// device by that, nor has one examined early that is down.
    pub(super) fn due_at(&self) -> Instant {
        let check = lock(&self.check);
        match self.touched.load(Ordering::Relaxed) && !self.health.is_down() {
            true => check.next_check.min(check.next_touch),
            false => check.next_check,
        }
    }

    /// Schedules the next examination: soon after a failure, then at increasing intervals.
    pub(super) fn reschedule(&self) {
        let mut check = lock(&self.check);
        let wrong = self.health.is_suspect() || self.health.is_down();
        let pause = if wrong { check.pause } else { CHECK_INTERVAL };
        check.pause = if wrong { (pause * 2).min(RETRY_INTERVAL_MAX) } else { RETRY_INTERVAL };
        check.next_check = Instant::now() + pause;
        check.next_touch = Instant::now() + TOUCH_INTERVAL;
    }
}

/// No rollback replaces the file of a device meanwhile.
#[derive(Debug)]
pub struct ResizeGuard(Arc<MonitoredDevice>);

impl Drop for ResizeGuard {
    fn drop(&mut self) {
        self.0.resizes.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Describes what is at the path of a store instead of it.
/// `is_recorded`: the next start knows of it.
pub(super) fn detachment(backing: &BackingDevice, detached: Detached, is_recorded: bool) -> String {
    let (name, own_path) = (backing.name(), backing.own_path());
    let what = match detached {
        Detached::Removed => "was unlinked or renamed",
        Detached::Replaced => "was replaced by another file or device",
    };
    format!(
        "{name} {what} while it is served: hosts go on with the old one, which the next start \
         will not find; before that, have hosts stop, and copy it from {own_path} or bring its \
         path back{}",
        match is_recorded && backing.inode().is_some() && !backing.is_read_only() {
            true => "; another file is not served before `nvmfctl namespace trust`",
            false => "",
        }
    )
}
