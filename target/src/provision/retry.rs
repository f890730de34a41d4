//! Retries unavailable addresses and devices while the rest is served, adopts sizes of images, and
//! removes those of deleted namespaces.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::lock;
use crate::provision::devices::Place;
use crate::provision::ns_images::ImageRemoval;
use crate::provision::{NamespaceDirectory, Provisioner};

/// Interval between probes of pending addresses and devices.
const LOOK: Duration = Duration::from_secs(1);

/// Time limit for records that are written again.
const REPAIR: Duration = Duration::from_secs(2);

/// A device that is available and could not be opened is retried after this time,
const PAUSE: Duration = Duration::from_secs(1);

/// and after twice as long each time, up to this limit.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The task of the blocking pool that probes pending addresses and devices.
pub(crate) struct RetryTask {
    /// Receives the end of the task; a `Mutex` makes the type `Sync`.
    ended: Mutex<Receiver<()>>,
    /// Ends the task when dropped.
    stop: Option<Sender<()>>,
}

impl RetryTask {
    /// Starts the task.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(
        provisioner: Arc<Mutex<Provisioner>>,
        pool: &BlockingPool,
    ) -> std::io::Result<RetryTask> {
        let (stop, stopped) = channel();
        let ended = pool.spawn(move || {
            let (mut pauses, mut images) = (Backoff::default(), ImageRemoval::default());
            let stops = || stopped.try_recv() == Err(TryRecvError::Disconnected);
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                look(&provisioner, &mut pauses);
                images.run(&provisioner, stops);
            }
        })?;
        Ok(RetryTask { ended: Mutex::new(ended), stop: Some(stop) })
    }

    /// Stops the task after its current step.
    pub(crate) fn cease(&mut self) {
        self.stop = None;
    }

    /// Ends the task; a step that hangs is abandoned.
    pub(crate) fn stop(mut self, deadline: Instant) {
        self.cease();
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(left);
    }
}

/// Back-off of devices that are available and could not be opened: each attempt may take as long as
/// its time limit, and no other change is possible meanwhile.
#[derive(Debug, Default)]
struct Backoff(BTreeMap<Place, Pause>);

#[derive(Clone, Copy, Debug)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl Backoff {
    /// Whether the device may be retried now.
    fn is_over(&self, place: Place, now: Instant) -> bool {
        self.0.get(&place).is_none_or(|pause| now >= pause.until)
    }

    /// Doubles the next pause after an attempt.
    fn tried(&mut self, place: Place, now: Instant) {
        let last = self.0.get(&place).map(|pause| pause.length * 2);
        let length = last.map_or(PAUSE, |length| length.min(PAUSE_MAX));
        self.0.insert(place, Pause { until: now + length, length });
    }

    /// Resets the pause of devices that are no longer available or pending.
    fn keep(&mut self, places: &[Place]) {
        self.0.retain(|place, _| places.contains(place));
    }
}

fn look(provisioner: &Mutex<Provisioner>, pauses: &mut Backoff) {
    let provisioner = || lock(provisioner);
    provisioner().add_lost_listeners();
    provisioner().remember_again();
    let trust = provisioner().device_trust();
    trust.update_hosts();
    let addresses = provisioner().pending_addresses();
    for at in addresses {
        provisioner().on_address(at);
    }
    // A path may hang as long as its server does not answer: no lock is held meanwhile.
    let unwritten_records = provisioner().unwritten_records();
    rewrite_records(unwritten_records, Instant::now() + REPAIR);
    let pending_probe = provisioner().pending_probe();
    let mut available = pending_probe.available();
    available.extend(provisioner().grown_images());
    pauses.keep(&available);
    let now = Instant::now();
    let due: Vec<Place> = available.into_iter().filter(|each| pauses.is_over(*each, now)).collect();
    if due.is_empty() {
        return;
    }
    provisioner().on_stores(&due);
    // The attempt may have taken long.
    let now = Instant::now();
    due.into_iter().for_each(|place| pauses.tried(place, now));
}

/// Writes the records of directories again, until the deadline.
pub(crate) fn rewrite_records(
    (directories, opening): (Vec<Arc<NamespaceDirectory>>, Arc<BlockingPool>),
    deadline: Instant,
) {
    let begun: Vec<_> = directories
        .into_iter()
        .map(|directory| {
            let path = directory.path().to_owned();
            opening.begin(&path, move || {
                directory.rewrite_record();
                Ok(())
            })
        })
        .collect();
    // Results are logged.
    begun.into_iter().for_each(|one| drop(one.by(deadline)));
}

#[cfg(test)]
impl RetryTask {
    /// A task with other work.
    pub(crate) fn at(work: impl FnOnce() + Send + 'static) -> RetryTask {
        let ended = BlockingPool::default().spawn(work).unwrap();
        RetryTask { ended: Mutex::new(ended), stop: None }
    }
}

#[cfg(test)]
mod tests {
    use crate::provision::retry::*;

    #[test]
    fn retries_of_a_namespace_back_off_exponentially() {
        let nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
        let [one, other] = [(nqn, 1), (nqn, 2)];
        let (mut pauses, mut now) = (Backoff::default(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(pauses.is_over(one, now));
            pauses.tried(one, now);
            now += Duration::from_secs(seconds);
            assert!(!pauses.is_over(one, now - Duration::from_millis(1)), "{seconds} s");
            assert!(pauses.is_over(other, now), "each has its own");
        }
        pauses.tried(one, now);
        pauses.keep(&[one]);
        assert!(!pauses.is_over(one, now));
        pauses.keep(&[other]);
        assert!(pauses.is_over(one, now), "it went, and came again");
    }
}
