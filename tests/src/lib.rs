//! What no single crate can test: the whole system, simulated from one seed.

pub mod fuzz;
pub mod sim;
pub mod structure;
