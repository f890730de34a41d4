//! Snapshots, clones and rollbacks of namespaces in files, by reflink.
//!
//! A copy is that of one moment, as after a power loss: it contains every write that was completed
//! before it, and none that was begun after it. While the file system copies, all blocks are locked
//! ([`DeviceLock`]): changes wait, and go on afterwards. Everything that may take long on a device,
//! a sync of the file before and of the copy afterwards, is outside of that.

use std::path::Path;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nvme::{Nqn, Status};
use tracing::info;

use crate::blockdev::monitor::{DeviceMonitor, MonitoredDevice};
use crate::blockdev::{BackingDevice, Kind, Reflink, ReflinkError};
use crate::core::registry::ConnectBarrier;
use crate::core::sched::range_lock::{DeviceLock, RangeLocks};
use crate::core::shared::Shared;
use crate::core::subsystem::Namespace;
use crate::core::subsystem::write_protect::WriteProtectGuard;
use crate::plural;

/// How long changes of hosts wait for earlier ones: a device that hangs must not stop others.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// How long the connection of a controller that its host has shut down is waited for: `nvme
/// disconnect` ends before that arrives.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const DISCONNECT_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A namespace in a file that can be copied.
#[derive(Debug)]
pub(crate) struct FileNamespace<'a> {
    shared: &'a Shared,
    nqn: Nqn,
    nsid: u32,
    device: Arc<MonitoredDevice>,
}

impl<'a> FileNamespace<'a> {
    /// The namespace, if it can be copied now.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn new(
        shared: &'a Shared,
        nqn: Nqn,
        nsid: u32,
        device: Arc<MonitoredDevice>,
    ) -> Result<FileNamespace<'a>, ReflinkError> {
        let namespace = FileNamespace { shared, nqn, nsid, device };
        namespace.check()?;
        Ok(namespace)
    }

    /// Copies its file, as it is at one moment, to `path`. Returns for how long changes waited.
    ///
    /// # Errors
    /// Why there is no copy.
    pub(crate) fn copy(&self, path: &Path, writable: bool) -> Result<Duration, ReflinkError> {
        let backing = self.device.backing();
        let copy = Reflink::create(path)?;
        let mode = backing.file_mode().map_err(|error| failed(&error.to_string()))?;
        let (lock, began) = self.lock(&backing)?;
        copy.copy_device(&backing)?;
        // A format, or a mark of a block, that has begun before the lock.
        self.check()?;
        drop(lock);
        let paused = began.elapsed();
        if !writable {
            copy.mark_as_snapshot(backing.block_size_bytes());
        }
        copy.publish(if writable { mode } else { mode & !0o222 })?;
        let (nqn, nsid, paused_us) = (&self.nqn, self.nsid, paused.as_micros() as u64);
        info!(subsystem = %nqn, nsid, path = %path.display(), paused_us, "file copied by reflink");
        Ok(paused)
    }

    /// Serves a copy of `snapshot` instead of its file, while no host uses its subsystem, unless
    /// `force`. No host can connect before that is done.
    ///
    /// # Errors
    /// Why it is served as before.
    pub(crate) fn roll_back(
        &self,
        monitor: &DeviceMonitor,
        snapshot: &Path,
        force: bool,
    ) -> Result<(), ReflinkError> {
        let excluded = self.exclude(force)?;
        let (lock, _) = self.lock(&self.device.backing())?;
        self.check()?;
        monitor.roll_back(&self.device, snapshot)?;
        drop((lock, excluded));
        let (nqn, nsid) = (&self.nqn, self.nsid);
        info!(subsystem = %nqn, nsid, snapshot = %snapshot.display(), "rolled back");
        Ok(())
    }

    /// Has Connects of hosts to its subsystem refused until the result is dropped, and requests to
    /// protect, format or delete the namespace.
    ///
    /// # Errors
    /// A host uses the subsystem, and not `force`; or it is write-protected, or such a request is in
    /// progress.
    pub(crate) fn exclude(
        &self,
        force: bool,
    ) -> Result<(ConnectBarrier<'_>, WriteProtectGuard), ReflinkError> {
        let barrier = self.refuse_connects(force)?;
        let subsystem = self.shared.registry.subsystem(&self.nqn);
        let namespace = subsystem.as_ref().and_then(|it| it.namespace(self.nsid).ok());
        let protection = namespace.map(|it| &it.protection).ok_or_else(not_served)?;
        let guard = protection.hold().map_err(|status| match status {
            Status::FORMAT_IN_PROGRESS => {
                let sentence = "a host formats or deletes it, or it is being rolled back";
                ReflinkError::new(sentence, "try again afterwards")
            }
            _ => {
                let remedy = "`nvmfctl namespace unprotect` first, where that is possible; or serve \
                              a clone";
                ReflinkError::new("it is write-protected", remedy)
            }
        })?;
        Ok((barrier, guard))
    }

    fn refuse_connects(&self, force: bool) -> Result<ConnectBarrier<'_>, ReflinkError> {
        let began = Instant::now();
        let hosts = loop {
            match self.shared.registry.refuse_connects(&self.nqn, force) {
                Ok(barrier) => return Ok(barrier),
                Err(hosts) if hosts.any_ready || began.elapsed() >= DISCONNECT_TIMEOUT => {
                    break hosts;
                }
                Err(_) => sleep(DISCONNECT_POLL_INTERVAL),
            }
        };
        let sentence = format!(
            "{} of hosts on {}, one of {}: what they have in memory would be written over the \
             snapshot",
            plural::count(hosts.controllers, "controller"),
            self.nqn,
            hosts.one
        );
        let remedy = "unmount and disconnect there first; `--force` only if nothing of the \
                      namespace is in use";
        Err(ReflinkError::new(sentence, remedy))
    }

    /// Syncs its file, then locks it against changes.
    fn lock(&self, backing: &BackingDevice) -> Result<(DeviceLock<'_>, Instant), ReflinkError> {
        let synced = backing.make_durable(&|| self.shared.registry.is_halting());
        synced.map_err(|status| failed(&format!("its file cannot be synced: {status}")))?;
        let began = Instant::now();
        lock_device(&self.shared.range_locks, &self.device).map(|lock| (lock, began))
    }

    fn check(&self) -> Result<(), ReflinkError> {
        let subsystem = self.shared.registry.subsystem(&self.nqn);
        let namespace = subsystem.as_ref().and_then(|it| it.namespace(self.nsid).ok());
        check(namespace, &self.device)
    }
}

/// Locks all blocks of a device against changes, once those in progress have ended.
///
/// # Errors
/// They have not ended in time.
pub(super) fn lock_device<'a>(
    locks: &'a RangeLocks,
    device: &MonitoredDevice,
) -> Result<DeviceLock<'a>, ReflinkError> {
    let (lock, began) = (locks.lock_device(device.id), Instant::now());
    while !lock.is_granted() {
        if began.elapsed() > LOCK_TIMEOUT {
            let seconds = LOCK_TIMEOUT.as_secs();
            let sentence = format!("earlier writes are in progress after {seconds} s still");
            return Err(ReflinkError::new(sentence, "see `nvmfctl inflight` for what hangs"));
        }
        sleep(LOCK_POLL_INTERVAL);
    }
    Ok(lock)
}

/// Whether a copy of the file would be all of the namespace.
fn check(namespace: Option<&Namespace>, device: &MonitoredDevice) -> Result<(), ReflinkError> {
    let refused = |sentence: &str, remedy| Err(ReflinkError::new(sentence, remedy));
    let namespace = namespace.filter(|it| it.backing == device.id);
    let namespace = namespace.ok_or_else(not_served)?;
    match device.backing().kind() {
        Kind::File => {}
        Kind::Device => {
            return refused("a block device has no reflinks", "see `lvcreate --snapshot` for LVM");
        }
        Kind::Rbd => {
            return refused("an image has no reflinks", "see `nvmfctl image snapshot`");
        }
        Kind::Ram | Kind::Null => {
            return refused("it has no file", "only namespaces in files have reflinks");
        }
    }
    if device.is_shared() {
        let remedy = "stop the others, and remove `shared`";
        return refused("other daemons write to it as well (`shared = true`)", remedy);
    }
    if !device.is_trusted() || device.health().is_down() {
        let remedy = "see `nvmfctl namespace list`; `nvmfctl namespace trust` after a check";
        return refused("its file is not trusted, or down", remedy);
    }
    if namespace.formatting.is_some() {
        return refused("a host is formatting it", "try again afterwards");
    }
    if !namespace.marks.is_empty() {
        let remedy = "have a host write or deallocate these blocks first";
        return refused("it has blocks marked as unreadable, which a copy would not have", remedy);
    }
    Ok(())
}

fn not_served() -> ReflinkError {
    ReflinkError::new("it is not served", "see `nvmfctl namespace list`")
}

fn failed(sentence: &str) -> ReflinkError {
    ReflinkError::new(sentence, "look at its file and at the log")
}

#[cfg(test)]
mod tests;
