//! Statistics of the target: counts and latencies by namespace, host and kind of command, broken
//! down by stage; slow commands; utilization of each reactor.
//!
//! Always on, in memory that is bounded ([`io_stats::MOST_ROWS`] a reactor). A reactor writes what it
//! alone writes, with plain loads and stores; whoever wants to know reads. No clock is
//! read for it: the marks are the times of the reactor's turns ([`stage_timer`] says what that means).

pub mod batch;
pub mod histogram;
pub mod io_stats;
pub mod reactor_stats;
pub mod slow_log;
pub mod stage_timer;

pub use batch::CompletionBatch;
pub use io_stats::{Kind, Rows};
pub use reactor_stats::{PollStats, ReactorStats};
pub use stage_timer::{Stage, StageTimer};
