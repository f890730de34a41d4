//! Types of write protection of namespaces.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Write protection of a namespace, as in feature 84h.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WriteProtection {
    /// It is not.
    None,
    /// Until a host, or somebody here, takes that back.
    Protected,
    /// Until the daemon starts again; nobody takes it back before.
    UntilPowerCycle,
    /// For ever: nobody takes it back.
    Permanent,
}

/// Requested write protection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Protect {
    /// The state.
    pub state: WriteProtection,
    /// Only tell what would be different.
    #[serde(default)]
    pub dry_run: bool,
}
