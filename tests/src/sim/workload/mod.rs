//! Workload of simulated hosts and administrators.

pub mod command;
mod next;
pub mod ns_command;
pub mod reservation;
