//! Why hosts are refused or disconnected.

pub mod cause;
pub mod log_limiter;
mod recent;

pub use recent::{RecentDisconnects, Record};
