//! What outlasts the daemon.

pub mod power;
pub mod revoked_hosts;
