//! Types of write protection of namespaces.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Write protection of a namespace, as in feature 84h.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WriteProtection {
    /// Not protected.
    None,
    /// Protected until a host or an administrator clears it.
    Protected,
    /// Protected until the daemon restarts; it cannot be cleared before.
    UntilPowerCycle,
    /// Protected permanently.
    Permanent,
}

/// Requested write protection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Protect {
    /// The state.
    pub state: WriteProtection,
    /// Only report the differences.
    #[serde(default)]
    pub dry_run: bool,
}
