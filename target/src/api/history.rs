//! Types of the history of the configuration.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A change of the configuration in force.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HistoryEntry {
    /// When it took effect, in seconds since 1970.
    pub at_unix_s: u64,
    /// The requesting user, if known: a signal has none.
    pub uid: Option<u32>,
    /// It was requested with the token of `http_token_file`, which names no user.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_token: bool,
    /// The requested changes, or the reload, as sentences.
    pub requested: Vec<String>,
    /// What it changed, as `nvmfctl plan` prints it; of many lines the first ones.
    pub differences: Vec<String>,
}
