//! Tests of the whole system: simulation from one seed, fuzz targets, rules of the source tree.

pub mod fuzz;
pub mod sim;
pub mod structure;
