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
    pub(super) ticket: u64,
    pub(super) keeper: Sender<Word>,
}

impl Drop for Fence {
    fn drop(&mut self) {
        // A keeper that has ended answers nobody.
        let _ = self.keeper.send(Word::Drained(self.ticket));
    }
}
