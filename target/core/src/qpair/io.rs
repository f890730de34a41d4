//! Resources that a queue pair borrows for a step.

use std::time::Instant;

use rdma::{Fabric, Pool};

use crate::diag::log_limiter::CauseLog;
use crate::sched::buffers::BufferScheduler;
use crate::shared::Shared;
use crate::stats::CompletionBatch;
use nvmfd_blockdev::BlockDevice;

/// The borrowed resources.
pub struct Io<'a> {
    /// Buffers.
    pub pool: &'a mut Pool,
    /// The fabric.
    pub fabric: &'a mut dyn Fabric,
    /// The backing stores.
    pub disk: &'a mut dyn BlockDevice,
    /// Subsystems, hosts and controllers, and what the poll groups share.
    pub shared: &'a Shared,
    /// Queues for data buffers.
    pub waiters: &'a mut BufferScheduler,
    /// Log of refused and disconnected hosts.
    pub refusals: &'a mut CauseLog,
    /// Index of this reactor.
    pub reactor: usize,
    /// The time of this turn.
    pub now: Instant,
    /// The same in nanoseconds since an arbitrary origin, for the clocks of commands.
    pub now_ns: u64,
    /// The time at which pushes and responses that are reported now have completed, likewise.
    pub sent_ns: u64,
    /// Commands that have ended and are not counted yet.
    pub run: &'a mut CompletionBatch,
}
