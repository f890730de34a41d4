//! Read access to a running target, without locks that could delay it.

use std::sync::Arc;
use std::time::Instant;

use crate::blockdev::monitor::DeviceMonitor;
use crate::core::registry::Registry;
use crate::core::shared::Shared;
use crate::core::stats::PollStats;
use crate::telemetry::gateway::GroupView;
use crate::telemetry::pending::Pending;

/// Read access to a running target.
#[derive(Clone, Debug)]
pub struct TargetView {
    /// Subsystems, hosts and controllers.
    pub registry: Arc<Registry>,
    /// State shared by its poll groups.
    pub shared: Arc<Shared>,
    /// Pending listeners, devices and directories.
    pub pending: Arc<Pending>,
    /// Monitor of the devices.
    pub monitor: Option<Arc<DeviceMonitor>>,
    /// The gateway group, if the daemon is a member of one.
    pub gateway: Option<Arc<GroupView>>,
    /// Counters of each reactor.
    pub reactors: Vec<Arc<PollStats>>,
    /// Fabric provider: `verbs` or `soft`.
    pub provider: String,
    /// Registered memory of all reactors, in bytes.
    pub pool_bytes: u64,
    /// Start time.
    pub started: Instant,
}
