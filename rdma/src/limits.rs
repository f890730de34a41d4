//! Limits for connections whose peers are not verified yet, common to all providers.

use std::time::Duration;

/// Maximum of queue pairs.
pub const QUEUE_PAIRS: u32 = 2048;
/// Maximum of connections that were requested and are not confirmed. A further request evicts the
/// oldest one of the source that has the most.
pub const HALF_OPEN: usize = 256;
/// The same for one source, whose own oldest one is evicted.
pub const HALF_OPEN_PER_SOURCE: usize = 64;
/// Minimum time between two evictions: setting up and ending a connection costs much more than
/// requesting one, and other peers need service meanwhile.
pub const DISPLACEMENT: Duration = Duration::from_millis(1);
