//! Wakes a poll group after a change of shared state.

use std::fmt::Debug;

/// Wakes a poll group that may sleep: state that it shares has changed.
pub trait Waker: Debug + Send + Sync {
    /// Wakes it; from any thread, and never blocks.
    fn wake(&self);
}
