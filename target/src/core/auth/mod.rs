//! In-band authentication: the exchange, its keys and its limits.

mod compute;
pub mod exchange;
mod keys;
mod throttle;

pub use compute::{Job, Start, Worked};
pub use keys::{Demand, Keyring, Keys, Policy, Rules};
pub use throttle::Throttle;
