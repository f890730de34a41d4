//! nvmfd: a user-space NVMe over RDMA storage target.
//!
//! `control/` (tokio) reads the configuration and signals and drives a [`RunningTarget`]; the target runs
//! reactors, each on its own thread: see `reactor/mod.rs` for an iteration, `qpair/mod.rs` for the states
//! of a command, `command/` for the rules of NVMe.

pub mod api;
pub mod config;
pub mod config_page;
pub mod control;
mod daemon;
mod error;
pub mod manpages;
pub mod overlay;
mod platform;
mod plural;
pub mod provision;
mod reactor;
pub mod state;
mod telemetry;
pub mod worker;
mod worker_thread;

pub use nvmfd_blockdev as blockdev;
pub use nvmfd_core as core;

pub use daemon::{AppliedChange, Liveness, RunningTarget};
pub use error::Fatal;
pub use platform::doctor;
pub use plural::count;
pub use telemetry::{snapshot, view::TargetView};

/// Version of the programs: that of the package, or `NVMFD_VERSION` at build time (packages add the
/// commit).
pub const VERSION: &str = match option_env!("NVMFD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
