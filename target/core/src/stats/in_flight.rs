//! Commands in progress, as a reactor describes them when it is asked.

use nvme::Nqn;

use super::stage_timer::Stage;

/// A command in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InFlight {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host, as it calls itself.
    pub host: Nqn,
    /// Its queue; 0 is the admin queue.
    pub qid: u16,
    /// Its id.
    pub cid: u16,
    /// Its opcode.
    pub opcode: u8,
    /// Its namespace.
    pub nsid: u32,
    /// Its first block, where it has one.
    pub slba: u64,
    /// The stage that it is in.
    pub stage: Stage,
    /// Time since its capsule has arrived.
    pub age_ns: u64,
}
