//! Images in standby are taken into service, and returned to standby, many at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, TryLockError, mpsc};
use std::time::{Duration, Instant};

use super::{DeviceMonitor, MonitoredDevice, Shared, lock};
use crate::BackingDevice;

/// Number of images that are acquired or released at once.
const IMAGES_AT_ONCE: usize = 16;
/// Images that the cluster has not given by then are served later than the others.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether the images are still those of the RADOS client that they are acquired or released for.
pub type IsCurrent = Arc<dyn Fn() -> bool + Send + Sync>;

impl DeviceMonitor {
    /// Takes stores in standby into service, in parallel: takes their locks, and breaks those of
    /// clients at these addresses, which are excluded from the cluster first. One that cannot be
    /// served obstructs no other: the reason is logged, and it stays in standby. Blocks for some
    /// seconds at most; what the cluster answers later is served then.
    ///
    /// # Errors
    /// Why none of them is in service.
    pub fn acquire(
        &self,
        devices: &[Arc<MonitoredDevice>],
        former: &[String],
        is_current: IsCurrent,
    ) -> Result<(), String> {
        let former = former.to_vec();
        let acquire = move |shared: &Shared, device: &MonitoredDevice| {
            let outcome = shared.take_into_service(device, &former, &is_current);
            match &outcome {
                Ok(()) => device.forget_reason(),
                Err(why) => device.log_once(why),
            }
            outcome
        };
        let outcomes = self.in_parallel(devices, acquire, Some(ACQUIRE_TIMEOUT));
        let mut all = Err(NO_ANSWER.to_owned());
        for (device, outcome) in devices.iter().zip(outcomes) {
            match outcome {
                Some(Err(why)) if all.is_err() => all = Err(why),
                Some(outcome) => all = all.or(outcome),
                None => device.log_once(NO_ANSWER),
            }
        }
        if devices.is_empty() { Ok(()) } else { all }
    }

    /// Returns stores to standby, in parallel: operations that have not started are refused, others
    /// land, then the locks are released. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// Why a lock is not released. None of them starts an operation any more.
    pub fn release(
        &self,
        devices: &[Arc<MonitoredDevice>],
        is_current: IsCurrent,
    ) -> Result<(), String> {
        devices.iter().for_each(|device| device.health.set_standby(true));
        let release = move |_: &Shared, device: &MonitoredDevice| {
            device.with_tenure(|| {
                check(&is_current)?;
                device.backing().release().map_err(|error| error.to_string())
            })
        };
        let mut outcomes = self.in_parallel(devices, release, None).into_iter();
        outcomes.try_for_each(|outcome| outcome.unwrap_or(Err("a task has failed".to_owned())))
    }

    /// Does something with all devices; returns the outcomes until a time limit, if there is one.
    fn in_parallel(
        &self,
        devices: &[Arc<MonitoredDevice>],
        act: impl Fn(&Shared, &MonitoredDevice) -> Result<(), String> + Send + Sync + 'static,
        limit: Option<Duration>,
    ) -> Vec<Option<Result<(), String>>> {
        let (act, next) = (Arc::new(act), Arc::new(AtomicUsize::new(0)));
        let all: Arc<[Arc<MonitoredDevice>]> = devices.into();
        let (sender, ended) = mpsc::channel();
        for _ in 0..devices.len().min(IMAGES_AT_ONCE) {
            let (own, act, sender) = (Arc::clone(&self.shared), Arc::clone(&act), sender.clone());
            let (all, next) = (Arc::clone(&all), Arc::clone(&next));
            let task = move || loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(device) = all.get(at) else { return };
                let _ = sender.send((at, act(&own, device)));
            };
            // Without another thread, those that there are do all of it.
            if self.shared.pool.spawn(task).is_err() {
                break;
            }
        }
        drop(sender);
        let until = limit.map(|limit| Instant::now() + limit);
        let mut outcomes: Vec<_> = devices.iter().map(|_| None).collect();
        for _ in devices {
            let next = match until {
                Some(at) => ended.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
                None => ended.recv().ok(),
            };
            let Some((at, outcome)) = next else { break };
            outcomes[at] = Some(outcome);
        }
        outcomes
    }
}

impl MonitoredDevice {
    /// Does what only the owner of an image may do: neither is it released meanwhile, nor acquired.
    /// Blocks as long as the cluster does not answer.
    pub fn with_tenure<T>(&self, act: impl FnOnce() -> T) -> T {
        let _tenure = lock(&self.tenure);
        act()
    }
}

const NO_ANSWER: &str =
    "the cluster has not given the image yet: its namespace waits, see `ceph -s`";

fn check(is_current: &IsCurrent) -> Result<(), String> {
    is_current().then_some(()).ok_or_else(|| "the RADOS client has changed".to_owned())
}

impl Shared {
    fn take_into_service(
        &self,
        device: &MonitoredDevice,
        former: &[String],
        is_current: &IsCurrent,
    ) -> Result<(), String> {
        let tenure = match device.tenure.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(NO_ANSWER.to_owned()),
            tenure => tenure,
        };
        check(is_current)?;
        let backing = device.backing();
        if backing.is_fenced_standby()
            && let Err(why) = self.replace(device, &backing)
            && device.backing().is_fenced_standby()
        {
            return Err(why);
        }
        // Rings may still have operations from before the last release. Another gateway has served
        // their hosts since, so none of them may be executed: they belong to a store that is
        // replaced by itself.
        let former_backing = device.backing();
        former_backing.set_lost(true);
        let acquired = self.acquire(device, &former_backing, former);
        acquired.inspect_err(|_| former_backing.set_lost(false))?;
        // Locks of another client than the one that owns the ANA group are no use.
        let checked = check(is_current);
        checked.inspect_err(|_| drop(device.backing().release()))?;
        drop(tenure);
        Ok(())
    }

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
