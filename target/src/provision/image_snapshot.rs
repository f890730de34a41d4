//! Snapshots of namespaces in images of Ceph RBD.
//!
//! As those of [`super::snapshot`]: of one moment, while all blocks are locked. Nothing has to be
//! flushed before, because a completed write is on all replicas. librbd takes the snapshot at one
//! moment, too, with its own writes suspended. So one that the cluster takes after the lock was given
//! up has what is durable, and may have a part of a command that was in progress.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::Nqn;
use tracing::info;

use super::snapshot::lock_device;
use crate::blockdev::blocking::BlockingTask;
use crate::blockdev::ceph::ImageName;
use crate::blockdev::monitor::{DeviceMonitor, MonitoredDevice};
use crate::blockdev::rbd::{Image, ImageError, ImageSnapshot};
use crate::core::shared::Shared;

/// How long changes of hosts wait for the cluster.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the administrator waits for it. Another client that has the image open and does not
/// answer delays the end of each change by five seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum ImageFailure {
    /// It had no effect.
    Refused(ImageError),
    /// The cluster does not answer: it may have had an effect, or have one later.
    NoAnswer,
}

impl From<ImageError> for ImageFailure {
    fn from(why: ImageError) -> ImageFailure {
        ImageFailure::Refused(why)
    }
}

/// A namespace in an image.
#[derive(Debug)]
pub(crate) struct ImageNamespace {
    pub(crate) nqn: Nqn,
    pub(crate) nsid: u32,
    pub(crate) device: Arc<MonitoredDevice>,
    pub(crate) image: Arc<Image>,
    pub(crate) monitor: Arc<DeviceMonitor>,
}

impl ImageNamespace {
    /// Takes a snapshot and protects it. Returns for how long changes waited.
    ///
    /// # Errors
    /// Why there is none, or none that is protected.
    pub(crate) fn snapshot(
        &self,
        shared: &Shared,
        name: &ImageName,
    ) -> Result<Duration, ImageFailure> {
        self.check(name)?;
        let (device, image) = (Arc::clone(&self.device), Arc::clone(&self.image));
        let snapshot = snapshot_of(name)?;
        let own = snapshot.clone();
        let take = move || device.with_tenure(|| image.create_snapshot(&own));
        let paused = locked(shared, &self.monitor, &self.device, &task_path(name), take)?;
        let (nqn, nsid, paused_us) = (&self.nqn, self.nsid, paused.as_micros() as u64);
        info!(subsystem = %nqn, nsid, snapshot = %name, paused_us, "snapshot of an image taken");
        self.change(name, move |image| {
            image.protect_snapshot(&snapshot).map_err(|why| ImageError {
                sentence: format!("it is taken, and not protected: {why}"),
                ..why
            })
        })?;
        Ok(paused)
    }

    /// Removes a snapshot, or says whether it can be removed.
    ///
    /// # Errors
    /// Why it is not removed.
    pub(crate) fn remove(&self, name: &ImageName, dry_run: bool) -> Result<(), ImageFailure> {
        let snapshot = snapshot_of(name)?;
        let own = snapshot.clone();
        self.within(name, move |image| image.check_removal(&own))?;
        if !dry_run {
            self.change(name, move |image| image.remove_snapshot(&snapshot))?;
            info!(subsystem = %self.nqn, nsid = self.nsid, snapshot = %name, "snapshot removed");
        }
        Ok(())
    }

    /// Makes an image of a snapshot.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn clone_snapshot(
        &self,
        name: &ImageName,
        clone: &ImageName,
    ) -> Result<(), ImageFailure> {
        let (snapshot, to) = (snapshot_of(name)?, clone.clone());
        self.within(name, move |image| image.clone_snapshot(&snapshot, &to))?;
        info!(subsystem = %self.nqn, nsid = self.nsid, snapshot = %name, %clone, "snapshot cloned");
        Ok(())
    }

    /// Does what may wait for the cluster. Requests that hang occupy one thread for an image.
    fn within<T: Send + 'static>(
        &self,
        name: &ImageName,
        act: impl FnOnce(&Image) -> Result<T, ImageError> + Send + 'static,
    ) -> Result<T, ImageFailure> {
        let outcome = self.begin(name, act).by(Instant::now() + ANSWER_TIMEOUT);
        Ok(outcome.map_err(|_| ImageFailure::NoAnswer)??)
    }

    /// The same, for what only the owner of the image may do.
    fn change(
        &self,
        name: &ImageName,
        act: impl FnOnce(&Image) -> Result<(), ImageError> + Send + 'static,
    ) -> Result<(), ImageFailure> {
        let device = Arc::clone(&self.device);
        self.within(name, move |image| device.with_tenure(|| act(image)))
    }

    fn begin<T: Send + 'static>(
        &self,
        name: &ImageName,
        act: impl FnOnce(&Image) -> Result<T, ImageError> + Send + 'static,
    ) -> BlockingTask<'_, Result<T, ImageError>> {
        let image = Arc::clone(&self.image);
        self.monitor.blocking().begin(&task_path(name), move || Ok(act(&image)))
    }

    /// Whether a snapshot can be taken now, and has what hosts have written.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check(&self, name: &ImageName) -> Result<(), ImageError> {
        if !self.device.is_trusted() || self.device.health().is_down() {
            return Err(ImageError::new(
                "its image is not trusted, or down",
                "see `nvmfctl namespace list`; `nvmfctl namespace trust` after a check",
            ));
        }
        let prepared = self.begin(name, Image::prepare_snapshot).by(Instant::now() + LOCK_TIMEOUT);
        prepared.unwrap_or_else(|_| {
            let sentence = "the cluster does not answer, and writes would wait for it";
            Err(ImageError::new(sentence, "see `ceph -s`; there is no snapshot"))
        })
    }
}

/// The snapshots of each of these images. All are asked at once: one that does not answer leaves the
/// others their time.
///
/// # Errors
/// Why those of an image are not known.
pub(crate) fn list_snapshots(
    images: &[(ImageName, ImageNamespace)],
) -> Vec<Result<Vec<ImageSnapshot>, ImageFailure>> {
    let until = Instant::now() + ANSWER_TIMEOUT;
    let begun = images.iter().map(|(name, it)| it.begin(name, Image::snapshots));
    let begun: Vec<_> = begun.collect();
    let listed =
        |task: BlockingTask<'_, _>| Ok(task.by(until).map_err(|_| ImageFailure::NoAnswer)??);
    begun.into_iter().map(listed).collect()
}

/// One task of these runs for each image, beside those that open it.
fn task_path(name: &ImageName) -> PathBuf {
    ImageName { snapshot: Some(String::new()), ..name.clone() }.path()
}

fn snapshot_of(name: &ImageName) -> Result<String, ImageError> {
    name.snapshot.clone().ok_or_else(|| {
        ImageError::new(format!("{name} is no snapshot"), "write POOL/IMAGE@SNAPSHOT")
    })
}

/// Does what may wait for the cluster while all blocks of a device are locked, for as long as hosts
/// bear that. Returns for how long they were.
fn locked(
    shared: &Shared,
    monitor: &DeviceMonitor,
    device: &MonitoredDevice,
    path: &Path,
    act: impl FnOnce() -> Result<(), ImageError> + Send + 'static,
) -> Result<Duration, ImageFailure> {
    let began = Instant::now();
    let lock = lock_device(&shared.range_locks, device);
    let lock = lock.map_err(|why| ImageError::new(why.sentence, why.remedy))?;
    let task = monitor.blocking().begin(path, move || Ok(act()));
    let task = task.wait_until(Instant::now() + LOCK_TIMEOUT);
    drop(lock);
    let paused = began.elapsed();
    task.by(Instant::now() + ANSWER_TIMEOUT).map_err(|_| ImageFailure::NoAnswer)??;
    Ok(paused)
}

#[cfg(test)]
mod tests;
