//! Counters of the provider.

pub mod datagrams;
pub mod link_errors;
