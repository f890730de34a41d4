//! Rollback of a file to a snapshot: a copy of the snapshot takes the place of the served file.
//!
//! *Prepare*: a copy by reflink, durable beside the file. *Persist*: both exchange their names, and
//! their directory is synced. *Commit*: every ring gets the new file under the same id. Nothing was
//! served of the new file before, so a commit that fails exchanges the names again. A start after a
//! crash finds the old contents before the exchange, and those of the snapshot after it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::error;

use super::{DeviceMonitor, MonitoredDevice, Shared};
use crate::crash_point::crash_point;
use crate::hold::{rollback_copy, snapshot_block_size_bytes};
use crate::{BackingDevice, BackingKind, Condition, Kind, Reflink, ReflinkError, durable};

impl DeviceMonitor {
    /// Serves a copy of `snapshot` instead of the file of a device. The caller has locked the device
    /// against changes. May block on the device.
    ///
    /// # Errors
    /// Why it is served as before.
    pub fn roll_back(
        &self,
        device: &Arc<MonitoredDevice>,
        snapshot: &Path,
    ) -> Result<(), ReflinkError> {
        if device.reopening.swap(true, Ordering::SeqCst) {
            return Err(ReflinkError::new("its file is being opened again", "try again"));
        }
        let outcome = match device.is_resizing() {
            true => Err(ReflinkError::new("its size is being changed", "try again")),
            false => self.shared.roll_back(device, snapshot),
        };
        device.reopening.store(false, Ordering::Relaxed);
        outcome
    }
}

impl Shared {
    fn roll_back(&self, device: &MonitoredDevice, snapshot: &Path) -> Result<(), ReflinkError> {
        let old = device.backing();
        let path = path_of(device, &old)?;
        let source = open_snapshot(snapshot, &old)?;
        let temporary = rollback_copy(&path);
        if temporary.symlink_metadata().is_ok() {
            let sentence = format!("{} is left of an earlier rollback", temporary.display());
            return Err(ReflinkError::new(sentence, "remove it, unless you miss what it has"));
        }
        let replaced = fs::metadata(&path).map_err(|error| failed("examine", &path, &error))?;
        let copy = Reflink::create(&temporary)?;
        copy.copy(&source)?;
        copy.own_as(&replaced)?;
        copy.publish(replaced.mode())?;
        crash_point();
        let outcome = self.exchange_files(device, &old, &path, &temporary)?;
        // Of a success this is the old file, which a ring may have open for a moment more.
        if let Err(error) = durable::remove_file(&temporary) {
            error!("{}: cannot remove {}: {error}", device.place, temporary.display());
        }
        outcome
    }

    /// Persists and commits. The inner error: the files have their old names again. The outer one:
    /// they have not, so neither may be removed.
    fn exchange_files(
        &self,
        device: &MonitoredDevice,
        old: &Arc<BackingDevice>,
        path: &Path,
        temporary: &Path,
    ) -> Result<Result<(), ReflinkError>, ReflinkError> {
        let directory = path.parent().unwrap_or(path);
        if let Err(error) = durable::exchange(temporary, path) {
            return Ok(Err(failed("replace", path, &error)));
        }
        crash_point();
        let synced = durable::sync_directory(directory);
        let committed = synced.map_err(|error| failed("sync the directory of", path, &error));
        let committed = committed.and_then(|()| {
            crash_point();
            let remedy = "the namespace is unchanged; look at its file, then try again";
            self.serve_copy(device, old).map_err(|why| ReflinkError::new(why, remedy))
        });
        if committed.is_err() {
            let back = durable::exchange(temporary, path);
            back.and_then(|()| durable::sync_directory(directory)).map_err(|error| {
                let name = temporary.display();
                let sentence = format!("the file that is served has the name {name} now: {error}");
                ReflinkError::new(sentence, "give it its own name again before a restart")
            })?;
        }
        Ok(committed)
    }

    /// Gives every ring what is at the path now.
    fn serve_copy(&self, device: &MonitoredDevice, old: &Arc<BackingDevice>) -> Result<(), String> {
        let fresh = old.open_again(&device.config(), true).map_err(|error| error.to_string())?;
        match fresh.inspect(true) {
            Condition::Sound => {}
            Condition::Shortened(bytes) => return Err(format!("the copy ends at byte {bytes}")),
            Condition::Refilled => return Err("the copy was truncated".to_owned()),
            Condition::Failing(_) => return Err("the copy cannot be read".to_owned()),
        }
        self.put(device, old, fresh)
    }
}

/// The path of the served file, without symbolic links.
fn path_of(device: &MonitoredDevice, old: &BackingDevice) -> Result<PathBuf, ReflinkError> {
    let BackingKind::File { path, .. } = &device.config.kind else {
        return Err(ReflinkError::new("it has no file", "only files are rolled back"));
    };
    if old.kind() != Kind::File {
        let sentence = format!("{} is no file", old.name());
        return Err(ReflinkError::new(sentence, "see `lvconvert --merge` for LVM"));
    }
    let real = fs::canonicalize(path).map_err(|error| failed("find", path, &error))?;
    if old.has_moved(&device.config) {
        let sentence = format!("{} is not the file that is served", path.display());
        return Err(ReflinkError::new(sentence, "see `nvmfctl namespace list`"));
    }
    Ok(real)
}

/// Opens a snapshot, which nobody may write to meanwhile.
fn open_snapshot(path: &Path, old: &BackingDevice) -> Result<File, ReflinkError> {
    let open = |error| failed("open", path, &error);
    // A named pipe would wait for a writer, with all changes of hosts behind it.
    let nonblocking = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = nonblocking.map_err(open)?;
    let found = file.metadata().map_err(open)?;
    if !found.is_file() {
        let sentence = format!("{} is no file", path.display());
        return Err(ReflinkError::new(sentence, "name a file of `nvmfctl namespace snapshot`"));
    }
    if found.len() < old.size_bytes() {
        let (bytes, served) = (found.len(), old.size_bytes());
        let sentence =
            format!("{} has {bytes} bytes, and the namespace has {served}", path.display());
        let remedy = "resize the namespace to the size of the snapshot first";
        return Err(ReflinkError::new(sentence, remedy));
    }
    let own_bytes = old.block_size_bytes();
    if let Some(bytes) = snapshot_block_size_bytes(&file).filter(|bytes| *bytes != own_bytes) {
        let sentence = format!(
            "{} has blocks of {bytes} bytes, and the namespace has blocks of {own_bytes}",
            path.display()
        );
        let remedy = "have a host format the namespace to blocks of that size first";
        return Err(ReflinkError::new(sentence, remedy));
    }
    // A namespace that is served from it read-only has this lock too.
    if file.try_lock_shared().is_err() {
        let sentence = format!("{} is in use by a namespace that writes to it", path.display());
        return Err(ReflinkError::new(sentence, "remove that namespace, or make it read-only"));
    }
    Ok(file)
}

fn failed(tried: &str, path: &Path, error: &std::io::Error) -> ReflinkError {
    let sentence = format!("cannot {tried} {}: {error}", path.display());
    ReflinkError::new(sentence, "the namespace is unchanged; see the kernel's log")
}

#[cfg(test)]
mod tests;
