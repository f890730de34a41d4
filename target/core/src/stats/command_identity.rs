//! Which command it is, for those that are described one by one.

use nvme::Nqn;

/// Identity of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CommandIdentity {
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
}
