//! Types of the daemon's status.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Status of the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since it began to serve.
    pub uptime_s: u64,
    /// The configuration file that was declared.
    pub config_file: String,
    /// What moves the data: `verbs` or `soft`.
    pub provider: String,
    /// Threads that move data.
    pub reactors: u32,
    /// Registered memory of all reactors, in bytes.
    pub pool_bytes: u64,
    /// Where hosts connect.
    pub listeners: Vec<Listener>,
    /// How many subsystems are served.
    pub subsystems: u32,
    /// How many namespaces, of all subsystems.
    pub namespaces: u32,
    /// How many controllers hosts have, those of discovery not counted.
    pub controllers: u32,
    /// Addresses and stores that are configured and not there yet, or there and damaged, a
    /// sentence each.
    pub pending: Vec<String>,
    /// Namespaces whose store is not well, a sentence each.
    pub degraded: Vec<String>,
    /// Sections that were changed and take effect only after a restart.
    pub needs_restart: Vec<String>,
    /// Changes that are in force and that the configuration file does not have.
    pub unsaved_changes: u32,
    /// Changes that do not fit the configuration file any more and are not in force.
    pub set_aside_changes: u32,
    /// What is configured but probably not meant, a sentence each.
    pub warnings: Vec<String>,
}

/// An address that accepts connections.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Listener {
    /// Port identifier, from 1.
    pub id: u16,
    /// Address and port.
    pub address: String,
    /// ANA state of each group that is not `optimized` there, by its number (1 to 64).
    pub ana: BTreeMap<u32, String>,
    /// The shortest keep alive timeout that its hosts get, in milliseconds; 0: as they ask.
    pub keep_alive_min_ms: u32,
    /// Controllers that came through it, those of discovery not counted.
    pub controllers: u32,
}
