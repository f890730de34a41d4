//! Whether the reactors of a target run, also while its owner changes it or hangs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::core::message::Message;
use crate::core::registry::Registry;
use crate::core::stats::PollStats;
use crate::error::Fatal;
use crate::telemetry::gateway::GroupView;
use crate::telemetry::pending::Pending;

/// Liveness of the reactors; independent of the owner of the [`RunningTarget`](crate::RunningTarget).
#[derive(Debug)]
pub struct Liveness {
    registry: Arc<Registry>,
    pending: Arc<Pending>,
    gateway: Option<Arc<GroupView>>,
    /// Counters of each reactor, and its iterations at the last call.
    reactors: Vec<(Arc<PollStats>, u64)>,
}

impl Liveness {
    /// Liveness of these, whose reactors have not iterated yet.
    pub(super) fn new(
        registry: Arc<Registry>,
        pending: Arc<Pending>,
        gateway: Option<Arc<GroupView>>,
        reactors: Vec<Arc<PollStats>>,
    ) -> Liveness {
        let reactors = reactors.into_iter().map(|stats| (stats, 0)).collect();
        Liveness { registry, pending, gateway, reactors }
    }

    /// Whether every reactor has iterated since the last call. Wakes all of them, so that sleeping
    /// reactors have iterated at the next call.
    pub fn alive(&mut self) -> bool {
        let mut alive = true;
        for (stats, seen_iterations) in &mut self.reactors {
            let iterations = stats.iterations.load(Ordering::Relaxed);
            alive &= iterations != *seen_iterations && !stats.ended.load(Ordering::Relaxed);
            *seen_iterations = iterations;
        }
        self.registry.wake_reactors();
        alive
    }

    /// Disconnects every host and ends the reactors when pending I/O of devices has finished, also
    /// while the target is in use elsewhere; gives up at the deadline. Omits the other steps of a
    /// stop.
    pub fn part(&self, deadline: Instant) {
        self.registry.leave();
        for reactor in self.registry.reactors() {
            reactor.send(Message::Stop);
        }
        let is_over = |(stats, _): &(Arc<PollStats>, u64)| stats.ended.load(Ordering::Relaxed);
        while !self.reactors.iter().all(is_over) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Pending listeners, devices and directories, a sentence each.
    pub fn pending(&self) -> Vec<String> {
        self.pending.list()
    }

    /// Why this gateway of a group serves nothing, if it does not.
    pub fn idle(&self) -> Option<String> {
        self.gateway.as_ref().and_then(|gateway| gateway.idle())
    }

    /// The error of a reactor whose thread has ended before a stop.
    pub fn failed(&self) -> Option<Fatal> {
        if self.registry.is_leaving() {
            return None;
        }
        let has_ended = |(stats, _): &(Arc<PollStats>, u64)| stats.ended.load(Ordering::Relaxed);
        let ended = self.reactors.iter().position(has_ended)?;
        Some(Fatal(format!("reactor {ended} has ended; this is a defect, please report it")))
    }
}
