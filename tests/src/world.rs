//! Hosts, a network, a target and its disk in one thread, on a clock of their own, from one seed.

pub mod disk;
pub mod model;
pub mod stamp;
pub mod trace;
