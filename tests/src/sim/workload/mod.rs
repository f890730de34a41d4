//! What hosts and administrators ask for.

pub mod command;
mod next;
pub mod ns_command;
pub mod reservation;
