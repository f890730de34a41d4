//! Types of the management interface, shared by the daemon and its tool. JSON, names of the fields
//! as here; the OpenAPI document is derived from these types.
//!
//! Each area has a file. The daemon (`control/http/`) and `nvmfctl` (`bin/nvmfctl/`) share these
//! types, and have no others for the interface.

mod change;
mod controller;
mod disconnect;
mod event;
mod gateway;
mod history;
mod image;
mod log_level;
mod memory;
mod snapshot;
pub mod stats;
mod status;
mod subsystem;
mod trust;
mod write_protect;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use change::{Change, Changes, Outcome, SetAside, Settings, UNCHANGED, UnsavedChange, Wanted};
pub use controller::{Controller, ControllerState};
pub use disconnect::Why;
pub use event::{Event, Happened};
pub use gateway::{
    GatewayAnaGroup, GatewayConfigError, GatewayConfiguration, GatewayFront, GatewayGroup,
    GatewayMember, GatewayMove, GatewayRebalance, GatewayShared, GatewayState,
};
pub use history::HistoryEntry;
pub use image::{ImageCloneRequest, ImageSnapshot, ImageSnapshotRequest, ImageSnapshots};
pub use log_level::Log;
pub use memory::{HostMemory, Memory, PoolSection};
pub use snapshot::{RemoveSnapshot, RollbackRequest, SnapshotOutcome, SnapshotRequest};
pub use status::{ChangeAccess, Listener, Reload, Status};
pub use subsystem::{
    Detached, FileSystem, FileSystemState, Host, Kind, Namespace, NamespaceState, Subsystem,
};
pub use trust::Trust;
pub use write_protect::{Protect, WriteProtection};

/// Error of a request: problem details for HTTP APIs (RFC 9457), with a remedy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The HTTP status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The error: a sentence without its full stop.
    pub detail: String,
    /// The remedy.
    pub remedy: String,
}

impl Problem {
    /// Content type of the responses.
    pub const CONTENT_TYPE: &str = "application/problem+json";
}
