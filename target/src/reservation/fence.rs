//! How Preempt and Abort waits: everybody who still works for a preempted host holds the fence,
//! and when the last one lets go the keeper answers.

use std::sync::mpsc::Sender;

use nvme::Nqn;

use super::HostId;
use super::keeper::Word;

/// Which commands are to end. Reactors answer those that have not begun; those that are at the
/// disk cannot be recalled, so their slots hold the fence until they come home.
#[derive(Debug)]
pub struct Fence {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace.
    pub nsid: u32,
    /// The hosts that were preempted.
    pub hosts: Vec<HostId>,
    ticket: u64,
    keeper: Sender<Word>,
}

impl Fence {
    /// A fence that tells `keeper` of this ticket when nobody holds it any more.
    #[must_use]
    pub fn new(
        subsystem: Nqn,
        nsid: u32,
        hosts: Vec<HostId>,
        ticket: u64,
        keeper: Sender<Word>,
    ) -> Fence {
        Fence { subsystem, nsid, hosts, ticket, keeper }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // A keeper that has ended answers nobody.
        let _ = self.keeper.send(Word::Drained(self.ticket));
    }
}
