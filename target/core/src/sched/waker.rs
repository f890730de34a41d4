//! Wakes a poll group after a change of shared state.

use std::fmt::Debug;

/// Wakes a poll group that may sleep: something that it shares has changed.
pub trait Waker: Debug + Send + Sync {
    /// Wakes it; for any thread, and never waits.
    fn wake(&self);
}
