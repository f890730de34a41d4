//! Types for trusting a backing store again after a failed flush.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request to trust the backing store of a namespace again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// Only report whether it applies.
    #[serde(default)]
    pub dry_run: bool,
}
