//! Limits for connections whose peers are not verified yet, common to all providers.

use std::time::Duration;

/// Queue pairs at once.
pub const QUEUE_PAIRS: u32 = 2048;
/// Connections that were asked for and are not confirmed, at once. When one more is asked for, the
/// oldest of the source that has the most makes room.
pub const HALF_OPEN: usize = 256;
/// The same of one source, whose own oldest makes room.
pub const HALF_OPEN_PER_SOURCE: usize = 64;
/// How often one connection makes room for another, at most: to make and end them costs much more
/// than to ask, and others want to be served meanwhile.
pub const DISPLACEMENT: Duration = Duration::from_millis(1);
