//! Types of the log level.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How much the daemon logs, until it ends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Log {
    /// `off`, `error`, `warn`, `info`, `debug` or `trace`.
    pub level: String,
}
