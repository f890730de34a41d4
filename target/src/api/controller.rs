//! Types of connected controllers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One controller: the association of a host with a subsystem.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Controller {
    /// Unique while the daemon runs.
    pub id: u64,
    /// The subsystem, or the discovery service.
    pub subsystem: String,
    /// Controller id.
    pub cntlid: u16,
    /// NQN of the host.
    pub host: String,
    /// Its identifier: 32 hexadecimal digits.
    pub host_id: String,
    /// Address of the host.
    pub source: String,
    /// Address and port of the listener.
    pub local: String,
    /// I/O queues that are connected.
    pub io_queues: u16,
    /// I/O queues that were granted.
    pub granted_io_queues: u16,
    /// Entries that an I/O queue may have.
    pub queue_depth: u16,
    /// Seconds since it was admitted.
    pub connected_s: u64,
    /// Its state.
    pub state: ControllerState,
    /// The host has authenticated.
    pub authenticated: bool,
    /// Commands that failed.
    pub errors: u64,
}

rdma::named_enum! {
    /// State of a controller.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum ControllerState {
        /// The host has yet to authenticate.
        Authenticating = "authenticating",
        /// Connected, and not enabled yet or being reset.
        Disabled = "disabled",
        /// Commands are served.
        Live = "live",
        /// Its queues are closing.
        Closing = "closing",
    }
}
