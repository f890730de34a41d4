//! Types for snapshots, clones and rollbacks of namespaces in files.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Request for a copy of the file of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// Path of the copy, absolute, in the file system of the file. Nothing may be there.
    pub path: String,
    /// The copy may be written to: a clone, to be served as a namespace of its own.
    #[serde(default)]
    pub writable: bool,
    /// Only report whether the namespace can be copied now.
    #[serde(default)]
    pub dry_run: bool,
}

/// A copy of the file of a namespace, or a snapshot of its image.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SnapshotOutcome {
    /// Differences, a sentence each, with `+` in front.
    pub differences: Vec<String>,
    /// Block size of the namespace: that of a namespace in the copy.
    pub block_size_bytes: u32,
    /// For how long writes of hosts waited, in microseconds; absent for a dry run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_us: Option<u64>,
}

/// Request to remove a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveSnapshot {
    /// Path of the snapshot, absolute.
    pub path: String,
    /// Only report whether it can be removed now.
    #[serde(default)]
    pub dry_run: bool,
}

/// Request to give a namespace the contents of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RollbackRequest {
    /// Path of the snapshot, absolute, in the file system of the namespace's file.
    pub path: String,
    /// Also while hosts are connected, which have to forget what they have in memory.
    #[serde(default)]
    pub force: bool,
    /// Only report whether the namespace can be rolled back now.
    #[serde(default)]
    pub dry_run: bool,
}
