//! How whoever shares state with a poll group has it look again.

use std::fmt::Debug;

/// Wakes a poll group that may sleep: something that it shares has changed.
pub trait Waker: Debug + Send + Sync {
    /// Wakes it; for any thread, and never waits.
    fn wake(&self);
}
