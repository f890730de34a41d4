//! Images in standby are taken into service, and returned to standby, many at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use super::{DeviceMonitor, MonitoredDevice, Shared};
use crate::BackingDevice;

/// Number of images that are acquired or released at once.
const IMAGES_AT_ONCE: usize = 16;

impl DeviceMonitor {
    /// Takes stores in standby into service, in parallel: takes their locks, and breaks those of
    /// clients at these addresses, which are excluded from the cluster first. Blocks as long as the
    /// cluster does not answer.
    ///
    /// # Errors
    /// Why one of them cannot be served; others may be in service.
    pub fn acquire(
        &self,
        devices: &[Arc<MonitoredDevice>],
        former: &[String],
    ) -> Result<(), String> {
        let former = former.to_vec();
        self.in_parallel(devices, move |shared, device| {
            let backing = device.backing();
            if backing.is_fenced_standby()
                && let Err(why) = shared.replace(device, &backing)
                && device.backing().is_fenced_standby()
            {
                return Err(why);
            }
            // Rings may still have operations from before the last release. Another gateway has
            // served their hosts since, so none of them may be executed: they belong to a store
            // that is replaced by itself.
            let former_backing = device.backing();
            former_backing.set_lost(true);
            shared.acquire(device, &former_backing, &former).inspect_err(|_| {
                former_backing.set_lost(false);
            })
        })
    }

    /// Returns stores to standby, in parallel: operations that have not started are refused, others
    /// land, then the locks are released. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// Why a lock is not released. None of them starts an operation any more.
    pub fn release(&self, devices: &[Arc<MonitoredDevice>]) -> Result<(), String> {
        devices.iter().for_each(|device| device.health.set_standby(true));
        self.in_parallel(devices, |_, device| {
            device.backing().release().map_err(|error| error.to_string())
        })
    }

    /// Does something with all devices; returns the first error.
    fn in_parallel(
        &self,
        devices: &[Arc<MonitoredDevice>],
        act: impl Fn(&Shared, &MonitoredDevice) -> Result<(), String> + Send + Sync + 'static,
    ) -> Result<(), String> {
        let (act, next) = (Arc::new(act), Arc::new(AtomicUsize::new(0)));
        let devices: Arc<[Arc<MonitoredDevice>]> = devices.into();
        let begin = |_| {
            let (own, act) = (Arc::clone(&self.shared), Arc::clone(&act));
            let (devices, next) = (Arc::clone(&devices), Arc::clone(&next));
            self.shared.pool.spawn(move || {
                let mut outcome = Ok(());
                while let Some(device) = devices.get(next.fetch_add(1, Ordering::Relaxed)) {
                    outcome = outcome.and(act(&own, device));
                }
                outcome
            })
        };
        let tasks = (0..devices.len().min(IMAGES_AT_ONCE)).map(begin).collect::<Vec<_>>();
        let end = |task: std::io::Result<mpsc::Receiver<Result<(), String>>>| {
            let task = task.map_err(|error| format!("no thread: {error}"))?;
            task.recv().unwrap_or_else(|_| Err("a task has failed".to_owned()))
        };
        tasks.into_iter().map(end).fold(Ok(()), Result::and)
    }
}

impl Shared {
    fn acquire(
        &self,
        device: &MonitoredDevice,
        backing: &Arc<BackingDevice>,
        former: &[String],
    ) -> Result<(), String> {
        backing.acquire(former).map_err(|error| error.to_string())?;
        let renewed = backing.renewed(&device.config()).map_err(|error| error.to_string());
        let given = renewed.and_then(|fresh| self.put(device, backing, fresh));
        given.inspect_err(|_| drop(backing.release()))
    }
}

#[cfg(test)]
mod tests;
