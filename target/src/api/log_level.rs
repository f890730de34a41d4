//! Types of the log level.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The log level, until the daemon ends.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Log {
    /// `off`, `error`, `warn`, `info`, `debug` or `trace`.
    pub level: String,
}
