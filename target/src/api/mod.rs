//! Types of the management interface, shared by the daemon and its tool. JSON, names of the fields
//! as here; the OpenAPI document is derived from these types.
//!
//! Each area has a file. The daemon (`control/http/`) and `nvmfctl` (`bin/nvmfctl/`) share these
//! types, and have no others for the interface.

mod change;
mod controller;
mod disconnect;
mod event;
mod log_level;
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
pub use log_level::Log;
pub use status::{Listener, Status};
pub use subsystem::{Detached, Host, Kind, Namespace, NamespaceState, Subsystem};
pub use trust::Trust;
pub use write_protect::{Protect, WriteProtection};

/// Error of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The error: a sentence without its full stop.
    pub error: String,
    /// The remedy.
    pub remedy: String,
}

impl Problem {
    /// A problem with this text.
    #[must_use]
    pub fn new(error: impl Into<String>, remedy: impl Into<String>) -> Problem {
        Problem { error: error.into(), remedy: remedy.into() }
    }
}
