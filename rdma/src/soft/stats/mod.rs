//! Counters.

pub mod datagrams;
pub mod link_errors;
