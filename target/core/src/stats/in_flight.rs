//! Commands in progress, as a reactor describes them when it is asked.

use super::command_identity::CommandIdentity;
use super::stage_timer::Stage;

/// A command in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlight {
    /// Which.
    pub command: CommandIdentity,
    /// The stage that it is in.
    pub stage: Stage,
    /// Time since its capsule has arrived.
    pub age_ns: u64,
}
