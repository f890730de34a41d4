//! Retries unavailable addresses and devices while the rest is served.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::blockdev::blocking::BlockingPool;
use crate::provision::devices::Place;
use crate::provision::{NamespaceDirectory, Provisioner};

/// How often it is looked whether something has come.
const LOOK: Duration = Duration::from_secs(1);

/// How long directories may take to write their records again.
const REPAIR: Duration = Duration::from_secs(2);

/// What has come and could not be served is tried again after this long,
const PAUSE: Duration = Duration::from_secs(1);

/// and after twice as long each time, up to this.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The task of the blocking pool that looks whether something has come.
pub(crate) struct RetryTask {
    /// What is received when it ends; behind a lock only so that whoever has this may be shared.
    ended: Mutex<Receiver<()>>,
    /// Dropped: it ends.
    stop: Option<Sender<()>>,
}

impl RetryTask {
    /// Starts to look.
    ///
    /// # Errors
    /// No thread to be had.
    pub(crate) fn start(
        provisioner: Arc<Mutex<Provisioner>>,
        pool: &BlockingPool,
    ) -> std::io::Result<RetryTask> {
        let (stop, stopped) = channel();
        let ended = pool.spawn(move || {
            let mut pauses = Backoff::default();
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                look(&provisioner, &mut pauses);
            }
        })?;
        Ok(RetryTask { ended: Mutex::new(ended), stop: Some(stop) })
    }

    /// Has it begin nothing more.
    pub(crate) fn cease(&mut self) {
        self.stop = None;
    }

    /// Ends it; what hangs in a disk is left to itself.
    pub(crate) fn stop(mut self, deadline: Instant) {
        self.cease();
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(left);
    }
}

/// When the stores that have come are tried again that could not be served: each try may take as
/// long as a person would wait, with nothing else changed meanwhile.
#[derive(Debug, Default)]
struct Backoff(BTreeMap<Place, Pause>);

#[derive(Clone, Copy, Debug)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl Backoff {
    /// Whether it may be tried now.
    fn is_over(&self, place: Place, now: Instant) -> bool {
        self.0.get(&place).is_none_or(|pause| now >= pause.until)
    }

    /// It has been tried: the next pause is twice as long.
    fn tried(&mut self, place: Place, now: Instant) {
        let last = self.0.get(&place).map(|pause| pause.length * 2);
        let length = last.map_or(PAUSE, |length| length.min(PAUSE_MAX));
        self.0.insert(place, Pause { until: now + length, length });
    }

    /// What is no longer there, or no longer awaited, begins anew.
    fn keep(&mut self, places: &[Place]) {
        self.0.retain(|place, _| places.contains(place));
    }
}

fn look(provisioner: &Mutex<Provisioner>, pauses: &mut Backoff) {
    let provisioner = || provisioner.lock().unwrap_or_else(PoisonError::into_inner);
    provisioner().add_lost_listeners();
    provisioner().remember_again();
    let addresses = provisioner().pending_addresses();
    for at in addresses {
        provisioner().on_address(at);
    }
    // A path may hang for as long as a server does not answer: nobody's lock is held meanwhile.
    let owing = provisioner().owing();
    make_good(owing, Instant::now() + REPAIR);
    let pending_probe = provisioner().pending_probe();
    let come = pending_probe.available();
    pauses.keep(&come);
    let now = Instant::now();
    let due: Vec<Place> = come.into_iter().filter(|each| pauses.is_over(*each, now)).collect();
    if due.is_empty() {
        return;
    }
    provisioner().on_stores(&due);
    // The try itself may have been long.
    let now = Instant::now();
    due.into_iter().for_each(|place| pauses.tried(place, now));
}

/// Has directories write again what they owe, until then.
pub(crate) fn make_good(
    (directories, opening): (Vec<Arc<NamespaceDirectory>>, Arc<BlockingPool>),
    deadline: Instant,
) {
    let begun: Vec<_> = directories
        .into_iter()
        .map(|directory| {
            let path = directory.path().to_owned();
            opening.begin(&path, move || {
                directory.make_good();
                Ok(())
            })
        })
        .collect();
    // It says itself what has come of it.
    begun.into_iter().for_each(|one| drop(one.by(deadline)));
}

#[cfg(test)]
impl RetryTask {
    /// One that does this instead.
    pub(crate) fn at(work: impl FnOnce() + Send + 'static) -> RetryTask {
        let ended = BlockingPool::default().spawn(work).unwrap();
        RetryTask { ended: Mutex::new(ended), stop: None }
    }
}

#[cfg(test)]
mod tests {
    use crate::provision::retry::*;

    #[test]
    fn what_has_come_and_cannot_be_served_is_tried_ever_more_rarely() {
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
