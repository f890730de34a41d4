//! Types of the memory of the daemon, by the formula of the documentation.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Memory of the daemon: measured, and by the formula.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Memory {
    /// Resident memory of the process, in bytes; null: not known.
    pub resident_bytes: Option<u64>,
    /// Reactors: each has a pool.
    pub reactors: u32,
    /// Registered memory of all reactors, in bytes: `reactors` times the sum of `pool`.
    pub pool_bytes: u64,
    /// Sections of the pool of one reactor.
    pub pool: Vec<PoolSection>,
    /// Memory of the connected controllers, by the formula, in bytes.
    pub controllers_bytes: u64,
    /// Memory of a host with all queues that the configuration grants.
    pub host: HostMemory,
    /// Controllers that may be connected at once.
    pub max_controllers: u16,
}

/// A section of a pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PoolSection {
    /// `cells`, `receives` or `data`.
    pub name: String,
    /// Buffers; absent: buffers of several sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub buffers: Option<u32>,
    /// Size of the section in bytes, in whole pages.
    pub size_bytes: u64,
}

/// Memory of a host, beside the pools, by the formula.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostMemory {
    /// I/O queues.
    pub io_queues: u16,
    /// Entries of each.
    pub queue_depth: u16,
    /// Bytes of an I/O queue.
    pub io_queue_bytes: u64,
    /// Bytes of the controller and its admin queue.
    pub controller_bytes: u64,
    /// The sum, with all I/O queues.
    pub size_bytes: u64,
}
