//! What the machine has and lacks.

pub(crate) mod availability;
pub mod doctor;
mod mounts;
