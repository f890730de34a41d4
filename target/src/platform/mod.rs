//! The machine: availability of configured devices, mounts, and the doctor's checks.

pub(crate) mod availability;
pub mod doctor;
mod mounts;
pub(crate) mod probes;
