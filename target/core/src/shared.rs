//! State shared by the poll groups of a target.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::diag::RecentDisconnects;
use crate::message::Sender;
use crate::registry::Registry;
use crate::sched::Offload;
use crate::sched::range_lock::RangeLocks;
use crate::stats::ReactorStats;
use crate::subsystem::power::PowerMeter;

/// State shared by the poll groups of a target.
#[derive(Debug)]
pub struct Shared {
    /// Subsystems, listeners, hosts and controllers.
    pub registry: Arc<Registry>,
    /// Which command changes which blocks.
    pub range_locks: RangeLocks,
    /// Executes jobs that may block.
    pub offload: Arc<dyn Offload>,
    /// Since when the target has power.
    pub power: PowerMeter,
    /// The hosts that were refused or disconnected, and why.
    pub disconnects: RecentDisconnects,
    stats: Vec<Arc<ReactorStats>>,
}

impl Shared {
    /// State shared by the poll groups of `registry`, with power counters of a first start. `clock`
    /// is the machine's clock, for the records of disconnects.
    pub fn new(
        registry: Arc<Registry>,
        offload: impl Offload + 'static,
        clock: fn() -> SystemTime,
    ) -> Shared {
        let reactors = registry.reactors();
        Shared {
            range_locks: RangeLocks::new(reactors.iter().map(Sender::waker).collect()),
            stats: reactors.iter().map(|_| Arc::default()).collect(),
            offload: Arc::new(offload),
            power: PowerMeter::default(),
            disconnects: RecentDisconnects::new(clock),
            registry,
        }
    }

    /// Continues the counters of earlier runs.
    #[must_use]
    pub fn with_power(self, power: PowerMeter) -> Shared {
        Shared { power, ..self }
    }

    /// Counters of a reactor.
    pub fn observer(&self, reactor: usize) -> Option<&Arc<ReactorStats>> {
        self.stats.get(reactor)
    }

    /// Counters of all reactors.
    pub fn observers(&self) -> &[Arc<ReactorStats>] {
        &self.stats
    }

    /// Sets from which time on a command is slow; zero: none is.
    pub fn set_slow(&self, slow: Duration) {
        let ns = slow.as_nanos().try_into().unwrap_or(u64::MAX);
        self.stats.iter().for_each(|observer| observer.set_slow_ns(ns));
    }
}
