//! Statistics of one reactor.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nvme::Nqn;
use nvmfd_blockdev::lock;
use rdma::FabricStats;

use super::io_stats::{IoStats, Rows, StatsTable};
use super::slow_log::{SlowCommand, SlowLog};
use crate::diag::log_limiter::Totals;

/// Counters of a reactor's poll loop, readable by all threads. Reactors write them each turn, so no
/// two of them are in a cache line, nor in a pair of lines, which processors fetch together.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct PollStats {
    /// Turns of the loop: it lives as long as this grows.
    pub iterations: AtomicU64,
    /// Its thread has ended.
    pub ended: AtomicBool,
    /// Times it slept.
    pub sleeps: AtomicU64,
    /// Nanoseconds in iterations that had something to do.
    pub busy_ns: AtomicU64,
    /// Turns without anything to do, after which it looked again rather than slept.
    pub idle_iterations: AtomicU64,
    /// Queue pairs it serves.
    pub queues: AtomicU64,
}

/// Written by one reactor, read by any thread. The locks are taken when a queue connects, when its
/// subsystem changes, when a command was slow, a few times a second, and by readers, who only copy
/// pointers.
#[derive(Debug)]
pub struct ReactorStats {
    table: Mutex<StatsTable>,
    slow: Mutex<SlowLog>,
    /// From how many nanoseconds on a command is slow; none is as slow as `u64::MAX`.
    slow_ns: AtomicU64,
    fabric: Mutex<FabricStats>,
    /// Updated a few times a second.
    pub gauges: Gauges,
}

/// Gauges of a reactor.
#[derive(Debug, Default)]
pub struct Gauges {
    /// Free cells of the pool.
    pub cells_free: AtomicU64,
    /// Free receive buffers.
    pub receives_free: AtomicU64,
    /// Free bytes for data.
    pub data_free_bytes: AtomicU64,
    /// Bytes for data, free or not.
    pub data_bytes: AtomicU64,
    /// Commands that wait for data buffers.
    pub waiting_for_buffer: AtomicU64,
    /// Hosts refused or dropped, by cause.
    pub refusals: Totals,
}

impl Default for ReactorStats {
    fn default() -> ReactorStats {
        ReactorStats {
            table: Mutex::default(),
            slow: Mutex::default(),
            slow_ns: AtomicU64::new(u64::MAX),
            fabric: Mutex::default(),
            gauges: Gauges::default(),
        }
    }
}

impl ReactorStats {
    /// The rows of a controller for these namespaces: of its subsystem, its host, and the id of its
    /// association. Called by the reactor that this is of.
    pub fn rows(
        self: &Arc<Self>,
        controller: (Nqn, Nqn, u64),
        nsids: impl Iterator<Item = u32>,
    ) -> Rows {
        lock(&self.table).rows(self, controller, nsids)
    }

    /// Every row, the one of all others last.
    pub fn all_rows(&self) -> Vec<Arc<IoStats>> {
        lock(&self.table).all()
    }

    /// Sets the latency from which on a command is slow; 0: none is.
    pub fn set_slow_ns(&self, ns: u64) {
        let least_ns = if ns == 0 { u64::MAX } else { ns };
        self.slow_ns.store(least_ns, Ordering::Relaxed);
    }

    /// Whether a command that took so long is to be noted.
    #[inline]
    pub fn is_slow(&self, total_ns: u64) -> bool {
        total_ns >= self.slow_ns.load(Ordering::Relaxed)
    }

    /// Records a slow command.
    #[cold]
    pub fn note_slow(&self, command: SlowCommand) {
        lock(&self.slow).note(command);
    }

    /// The last slow commands, oldest first, and how many there were in all.
    pub fn slow(&self) -> (Vec<SlowCommand>, u64) {
        lock(&self.slow).read()
    }

    /// Updates the counters of the fabric.
    pub fn set_fabric(&self, write: impl FnOnce(&mut FabricStats)) {
        let mut stats = lock(&self.fabric);
        stats.clear();
        write(&mut stats);
    }

    /// The counters of the fabric at the last update.
    pub fn fabric(&self) -> FabricStats {
        lock(&self.fabric).clone()
    }
}
