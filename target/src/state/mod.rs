//! What outlasts the daemon.

pub mod revoked_hosts;
