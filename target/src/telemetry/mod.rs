//! Monitoring of a running target.

pub(crate) mod gateway;
pub(crate) mod pending;
pub(crate) mod process;
pub(crate) mod prometheus;
pub mod snapshot;
pub(crate) mod view;
