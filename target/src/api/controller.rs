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
    /// The host, as it calls itself.
    pub host: String,
    /// Its identifier: 32 hexadecimal digits.
    pub host_id: String,
    /// The address that it came from.
    pub source: String,
    /// The address and port that it came to.
    pub local: String,
    /// I/O queues that are connected.
    pub io_queues: u16,
    /// I/O queues that it was granted.
    pub granted_io_queues: u16,
    /// Entries that an I/O queue may have.
    pub queue_depth: u16,
    /// Seconds since it was admitted.
    pub connected_s: u64,
    /// What it is at.
    pub state: ControllerState,
    /// The host has proved who it is.
    pub authenticated: bool,
    /// Commands that were answered with an error.
    pub errors: u64,
}

/// State of a controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ControllerState {
    /// The host has yet to prove itself.
    Authenticating,
    /// Connected, and not enabled yet or being reset.
    Disabled,
    /// Commands are served.
    Live,
    /// Its queues are closing.
    Closing,
}
