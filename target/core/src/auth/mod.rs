//! In-band authentication: the exchange, its keys and its limits.

mod compute;
pub mod exchange;
mod keys;
mod throttle;

pub use compute::{DhComputation, DhResult, Start};
pub use keys::{Keyring, Keys, Policy, Requirement, Rules};
pub use throttle::Throttle;
