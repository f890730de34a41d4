//! Statistics of the target: counts and latencies by namespace, host and kind of command, broken
//! down by stage; sums by controller; slow commands; utilization of each reactor.
//!
//! Always on, in bounded memory ([`io_stats::MOST_ROWS`] per reactor). Each value has one writer, a
//! reactor, which uses plain loads and stores; any thread may read. No clock is read for it: the
//! times are those of the reactor's iterations (see [`stage_timer`]).

pub mod batch;
pub mod command_identity;
pub mod histogram;
pub mod in_flight;
pub mod io_stats;
pub mod reactor_stats;
pub mod slow_log;
pub mod stage_timer;

pub use batch::CompletionBatch;
pub use io_stats::{Kind, Rows};
pub use reactor_stats::{PollStats, ReactorStats};
pub use stage_timer::{Stage, StageTimer};
