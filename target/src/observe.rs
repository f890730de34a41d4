//! How the target does: counts and latencies by namespace, host and kind of command, broken down
//! by stage; the commands that were slow; how busy each reactor is.
//!
//! Always on, in memory that is bounded ([`rows::MOST_ROWS`] a reactor). A reactor writes what it
//! alone writes, with plain loads and stores; whoever wants to know reads ([`sample`]). No clock is
//! read for it: the marks are the times of the reactor's turns ([`clock`] says what that means).

pub mod clock;
pub mod histogram;
pub mod metrics;
pub mod observer;
pub mod rows;
pub mod run;
pub mod sample;
pub mod slow;

pub use clock::{Clock, Stage};
pub use observer::{Observer, PollStats};
pub use rows::{Kind, Rows};
pub use run::Run;
