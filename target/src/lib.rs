//! nvmfd: a user-space NVMe over RDMA storage target.
//!
//! `control/` (tokio) reads the configuration and signals and drives a [`Target`]; the target runs
//! reactors, each on a thread of its own: see `reactor.rs` for a turn, `queue.rs` for the five
//! states of a command, `command/` for the rules of NVMe.

mod absent;
pub mod ana;
pub mod api;
pub mod association;
pub mod auth;
pub mod command;
pub mod config;
pub mod control;
pub mod controller;
pub mod declared;
pub mod disk;
pub mod doctor;
pub mod durable;
mod error;
pub mod events;
pub mod exclusion;
pub mod format;
pub mod history;
pub mod import;
mod kept;
pub mod ledger;
pub mod mailbox;
pub mod managed;
pub mod manual;
mod names;
pub mod ns_management;
pub mod ns_request;
pub mod observe;
pub mod pending;
pub mod power;
pub mod protection;
mod provider;
pub mod qos;
pub mod queue;
pub mod queues;
pub mod reactor;
pub mod recall;
pub mod refusals;
pub mod registry;
pub mod reservation;
pub mod ring;
pub mod sched;
pub mod shared;
mod shelf;
pub mod state;
pub mod stores;
pub mod subsystem;
mod target;
pub mod tender;
mod trust;
mod turns;
pub mod uncorrectable;
pub mod unflushed;
pub mod usage;
mod view;
mod wait;
pub mod waiters;
pub mod why;
pub mod worker;

pub use error::Fatal;
pub use target::{Pulse, Target};
pub use view::View;

/// What the programs call themselves: the version of the package, or what `NVMFD_VERSION` was while
/// they were built (packages add the commit).
pub const VERSION: &str = match option_env!("NVMFD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
