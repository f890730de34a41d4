//! Types of recent disconnects and refused hosts, with their causes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A refused host or lost connection, with its cause and remedy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Why {
    /// A number that ascends with each event: the latest has the highest.
    pub number: u64,
    /// Cause: a stable name, as in `docs/why.md`.
    pub cause: String,
    /// Phase: `request`, `connect`, `authentication` or `running`.
    pub stage: String,
    /// Description.
    pub reason: String,
    /// Further details; may be empty.
    pub detail: String,
    /// Remedy.
    pub remedy: String,
    /// NQN of the host, if known.
    pub host: Option<String>,
    /// Address and port of the host, the last time.
    pub remote: String,
    /// Address and port of the listener.
    pub local: String,
    /// NQN of the requested subsystem, if known.
    pub subsystem: Option<String>,
    /// Its queue; 0 is the admin queue.
    pub qid: Option<u16>,
    /// Number of occurrences that are recorded.
    pub count: u64,
    /// The first time: seconds since 1970, UTC.
    pub first_s: u64,
    /// The last time, likewise.
    pub last_s: u64,
}
