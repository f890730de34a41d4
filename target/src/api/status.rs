//! Types of the daemon's status.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether an address of the interface accepts requests that change the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangeAccess {
    /// It has only requests that read.
    #[default]
    No,
    /// With the token of `http_token_file`.
    WithToken,
    /// It does: the Unix socket.
    Yes,
}

/// Status of the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since it started to serve.
    pub uptime_s: u64,
    /// The configuration file.
    pub config_file: String,
    /// Fabric provider: `verbs` or `soft`.
    pub provider: String,
    /// Reactors.
    pub reactors: u32,
    /// Registered memory of all reactors, in bytes.
    pub pool_bytes: u64,
    /// Listeners.
    pub listeners: Vec<Listener>,
    /// Number of subsystems.
    pub subsystems: u32,
    /// Number of namespaces, of all subsystems.
    pub namespaces: u32,
    /// Number of controllers, without those of discovery.
    pub controllers: u32,
    /// Configured addresses and devices that are missing or damaged, a sentence each.
    pub pending: Vec<String>,
    /// Namespaces, hosts and gateways that are not served as configured, a sentence each.
    pub degraded: Vec<String>,
    /// File systems of namespaces that are almost full, a sentence each: writes are about to fail.
    #[serde(default)]
    pub low_space: Vec<String>,
    /// Sections that were changed and take effect only after a restart.
    pub needs_restart: Vec<String>,
    /// Changes in force that the configuration file does not contain.
    pub unsaved_changes: u32,
    /// Changes that no longer apply to the configuration file, and are not in force.
    pub set_aside_changes: u32,
    /// Warnings about the configuration, about file systems whose backing files may still allocate
    /// more than is free, and about blocks that a power failure may tear; a sentence each.
    pub warnings: Vec<String>,
    /// The last reload; null before the first.
    #[serde(default)]
    pub last_reload: Option<Reload>,
    /// Whether changes are accepted where this was asked.
    #[serde(default)]
    pub accepts_changes: ChangeAccess,
}

/// Result of a reload of the configuration files.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Reload {
    /// Seconds since 1970.
    pub at_unix_s: u64,
    /// False: it was refused, and the running configuration differs from the files.
    pub successful: bool,
    /// The errors, a sentence each.
    pub errors: Vec<String>,
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
    /// The shortest keep alive timeout of its hosts, in milliseconds; 0: as requested.
    pub keep_alive_min_ms: u32,
    /// Controllers of its connections, without those of discovery.
    pub controllers: u32,
}
