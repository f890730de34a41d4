//! Fuzz targets: functions that turn arbitrary bytes into the input of a peer or a user, and check
//! invariants. `make fuzz` lets a fuzzer choose the bytes; a test runs all of them over bytes of
//! real hosts and over mutations of these.
//!
//! Each returns whether the bytes passed the first checks, so that the test detects inputs that are
//! all rejected immediately.

pub mod authentication;
mod bytes;
pub mod config;
pub mod endpoint;
mod nvme;
pub mod queue;
pub mod session;
mod wire;

pub use self::authentication::authentication;
pub use self::config::config;
pub use self::endpoint::endpoint;
pub use self::nvme::{command, page};
pub use self::queue::queue;
pub use self::session::session;
pub use self::wire::{datagram, message};

/// One of these functions.
pub type Target = fn(&[u8]) -> bool;

/// All fuzz targets, by the names of their seeds and programs.
pub const TARGETS: [(&str, Target); 9] = [
    ("authentication", authentication),
    ("command", command),
    ("config", config),
    ("datagram", datagram),
    ("endpoint", endpoint),
    ("message", message),
    ("page", page),
    ("queue", queue),
    ("session", session),
];
