//! The NVMe-oF target as state machines: without threads, files, sockets, clock and
//! configuration (`clippy.toml` refuses them).
#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "tests read the clock"))]

pub mod auth;
pub mod command;
pub mod controller;
pub mod diag;
pub mod message;
pub mod poll_group;
pub mod qpair;
pub mod registry;
pub mod sched;
pub mod shared;
pub mod stats;
pub mod subsystem;
