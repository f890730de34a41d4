//! Read access to a running target, without locks that could delay it.

use std::sync::Arc;
use std::time::Instant;

use crate::blockdev::monitor::DeviceMonitor;
use crate::core::registry::Registry;
use crate::core::shared::Shared;
use crate::core::stats::PollStats;
use crate::telemetry::pending::Pending;

/// Read access to a running target.
#[derive(Clone, Debug)]
pub struct TargetView {
    /// Who may connect to what, and who is.
    pub registry: Arc<Registry>,
    /// What its poll groups share.
    pub shared: Arc<Shared>,
    /// What is configured and not there yet.
    pub pending: Arc<Pending>,
    /// Who looks after the stores.
    pub monitor: Option<Arc<DeviceMonitor>>,
    /// What each reactor counts.
    pub reactors: Vec<Arc<PollStats>>,
    /// What moves the data: `verbs` or `soft`.
    pub provider: String,
    /// Registered memory of all reactors, in bytes.
    pub pool_bytes: u64,
    /// Since when it is being looked at: its start.
    pub started: Instant,
}
