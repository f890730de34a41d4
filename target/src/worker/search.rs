//! Searches for allocated blocks (Get LBA Status), as tasks of a blocking pool: one at a time for each
//! device, so a device that hangs occupies one thread. Hosts take turns.
//!
//! The queues need no bound of their own: a command that was handed over occupies its slot until it
//! is completed. One whose connection has closed searches nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tracing::error;

use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::{DeviceId, lock};
use crate::core::sched::fair_queue::FairQueue;
use crate::core::sched::offload::SearchJob;
use crate::core::subsystem::reservation::HostId;

/// Executes searches.
#[derive(Debug, Default)]
pub(super) struct SearchWorker {
    pool: BlockingPool,
    queues: Arc<Mutex<Queues>>,
}

/// The devices that are being searched, and the searches of them that wait.
type Queues = BTreeMap<DeviceId, FairQueue<SearchJob, HostId>>;

impl SearchWorker {
    /// Begins a search, or queues it. False if there is no thread for it.
    pub(super) fn submit(&self, job: SearchJob) -> bool {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.get_mut(&job.device) {
            queue.push(job.host, job);
            return true;
        }
        let (device, own) = (job.device, Arc::clone(&self.queues));
        let spawned = self.pool.spawn(move || {
            let mut next = Some(job);
            while let Some(job) = next {
                (job.run.0)();
                next = next_of(device, &mut lock(&own));
            }
        });
        if let Err(error) = &spawned {
            error!("no thread for a search for allocated blocks: {error}");
            return false;
        }
        queues.insert(device, FairQueue::default());
        true
    }
}

/// The next search of a device, which is no longer searched if there is none.
fn next_of(device: DeviceId, queues: &mut Queues) -> Option<SearchJob> {
    let next = queues.get_mut(&device).and_then(FairQueue::pop);
    if next.is_none() {
        queues.remove(&device);
    }
    next
}

#[cfg(test)]
mod tests;
