//! Reservations: which hosts may use a namespace, as the hosts themselves have settled it.

pub mod state;

pub use state::{Barred, Effect, HostId, Order, State};
