//! Disconnect causes, their log, and recent records.

pub mod cause;
pub mod log_limiter;
mod recent;

pub use recent::{RecentDisconnects, Record};
