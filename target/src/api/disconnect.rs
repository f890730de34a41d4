//! Types of recent disconnects and refused hosts, with their causes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A refused host or lost connection, with its cause and remedy.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Why {
    /// Ascends with everything that happens: the latest has the highest.
    pub number: u64,
    /// Which cause: a name that stays the same, as `docs/why.md` lists them.
    pub cause: String,
    /// How far the host had come: `request`, `connect`, `authentication` or `running`.
    pub stage: String,
    /// What happened.
    pub reason: String,
    /// What is known besides; may be empty.
    pub detail: String,
    /// What to do about it.
    pub remedy: String,
    /// The host, as it calls itself, once it has.
    pub host: Option<String>,
    /// Where it is: address and port of the last time.
    pub remote: String,
    /// The address and port that it came to.
    pub local: String,
    /// The subsystem that it asked for, once it has.
    pub subsystem: Option<String>,
    /// Its queue; 0 is the admin queue.
    pub qid: Option<u16>,
    /// How often that happened, as long as it was remembered.
    pub count: u64,
    /// The first time: seconds since 1970, UTC.
    pub first_s: u64,
    /// The last time, likewise.
    pub last_s: u64,
}
