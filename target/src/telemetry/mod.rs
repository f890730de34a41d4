//! What may be seen of a running target.

pub mod pending;
pub mod prometheus;
pub mod snapshot;
pub(crate) mod view;
