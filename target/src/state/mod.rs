//! Persistent state.

pub(crate) mod atomic_file;
pub mod block_size;
pub(crate) mod event_log;
pub mod group_records;
pub(crate) mod identity;
pub(crate) mod lock;
pub mod namespace_state;
pub mod ns_catalog;
pub mod power;
pub mod record;
pub mod revoked_hosts;
pub(crate) mod served;
pub mod shared_config;
pub(crate) mod trust;
pub mod usage;

#[cfg(test)]
mod tests;
