//! Oracle for Disconnect of single I/O queues: its completion is the last one on the queue.
//! Commands sent there before complete before, and may end with Command Aborted due to SQ Deletion;
//! no other command does, except after a reset, which deletes all queues. Written from the specifications, not from the implementation.

use std::collections::{BTreeMap, BTreeSet};

use nvme::Status;

/// State of the oracle for Disconnect.
#[derive(Debug)]
pub struct DisconnectOracle {
    /// Disconnects per mille of commands.
    chance: u16,
    /// Outstanding commands, and the host and queue of each.
    open: BTreeMap<u32, (usize, u16)>,
    /// Queues for which a host has sent Disconnect, during this association; the admin queue: a
    /// reset.
    leaving: BTreeSet<(usize, u16)>,
}

impl DisconnectOracle {
    /// With this number of Disconnects per mille of commands.
    pub fn new(chance: u16) -> DisconnectOracle {
        DisconnectOracle { chance, open: BTreeMap::new(), leaving: BTreeSet::new() }
    }

    /// Disconnects per mille of commands.
    pub fn chance(&self) -> u16 {
        self.chance
    }

    /// A command is sent on a queue of a host; `deletes`: a Disconnect, or a reset.
    pub fn leaves(&mut self, op: u32, at: (usize, u16), deletes: bool) {
        if self.chance > 0 {
            self.open.insert(op, at);
        }
        if deletes {
            self.leaving.insert(at);
        }
    }

    /// A command was answered.
    ///
    /// # Errors
    /// The response is invalid.
    pub fn answered(&mut self, op: u32, deletes: bool, status: Status) -> Result<(), String> {
        let Some(at) = self.open.remove(&op) else { return Ok(()) };
        let is_deleted = [at, (at.0, 0)].iter().any(|at| self.leaving.contains(at));
        if status.is(Status::ABORTED_SQ_DELETION) && !is_deleted {
            return Err("nobody deletes its queue".to_owned());
        }
        if !deletes {
            return Ok(());
        }
        if !status.is_success() {
            self.leaving.remove(&at);
            return Ok(());
        }
        match self.open.iter().find(|(_, of)| **of == at) {
            Some((other, _)) => Err(format!("it was answered before command {other} of its queue")),
            None => Ok(()),
        }
    }

    /// A command has ended without a response.
    pub fn lost(&mut self, op: u32) {
        self.open.remove(&op);
    }

    /// The association of a host has ended.
    pub fn forget(&mut self, host: usize) {
        self.open.retain(|_, (of, _)| *of != host);
        self.leaving.retain(|(of, _)| *of != host);
    }

    /// Whether this may explain a failed command; [`DisconnectOracle::answered`] is exact.
    pub fn excuses(&self, status: Status) -> bool {
        self.chance > 0 && status.is(Status::ABORTED_SQ_DELETION)
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::disconnect::*;

    #[test]
    fn the_answer_to_disconnect_is_the_last_one_of_its_queue() {
        for other in [1, 2] {
            let mut departures = DisconnectOracle::new(5);
            departures.leaves(1, (0, other), false);
            departures.leaves(2, (0, 1), true);
            let verdict = departures.answered(2, true, Status::SUCCESS);
            assert_eq!(verdict.is_err(), other == 1);
        }
    }

    #[test]
    fn only_commands_of_a_deleted_queue_may_be_aborted_for_it() {
        let aborted = Status::ABORTED_SQ_DELETION;
        let mut departures = DisconnectOracle::new(5);
        for (op, queue) in [(1, 1), (2, 1), (3, 2)] {
            departures.leaves(op, (0, queue), false);
        }
        assert!(departures.answered(2, false, aborted).is_err());
        departures.leaves(4, (0, 1), true);
        assert_eq!(departures.answered(1, false, aborted), Ok(()));
        assert!(departures.answered(3, false, aborted).is_err());
        assert_eq!(departures.answered(4, true, Status::SUCCESS), Ok(()));
        departures.leaves(5, (0, 2), false);
        departures.leaves(6, (0, 0), true);
        assert_eq!(departures.answered(5, false, aborted), Ok(()), "a reset");
        departures.forget(0);
        departures.leaves(7, (0, 1), false);
        assert!(departures.answered(7, false, aborted).is_err(), "another association");
    }
}
