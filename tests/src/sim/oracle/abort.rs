//! Oracle for Abort: requests, results, and the completions of the commands to abort. Written from
//! the specifications, not from the implementation.
//!
//! * An Abort command is answered once (which the session checks), and reports whether the command
//!   that it names was aborted. The report is true: if it says so, such a command ends with Command
//!   Abort Requested, before or after; otherwise this Abort does not explain such an end.
//! * No command ends so without an Abort that names it.
//!
//! A command id is reused, and Abort uses another queue than the command. So an Abort may concern
//! every command that was outstanding with that id at some time while the Abort was.

use std::collections::{BTreeMap, BTreeSet};

use rdma::soft::sim::Rng;

/// A command that an Abort may concern.
#[derive(Debug)]
struct Named {
    op: u32,
    /// Whether it has ended, and if so, aborted.
    ended: Option<bool>,
}

#[derive(Debug)]
struct Abort {
    /// The Abort command itself.
    op: u32,
    host: usize,
    queue: u16,
    cid: u16,
    named: Vec<Named>,
    /// Whether it has been answered, and if so, with success.
    answer: Option<bool>,
}

/// State of the oracle for Abort.
#[derive(Debug)]
pub struct Aborts {
    /// Aborts per mille of commands.
    chance: u16,
    /// Outstanding commands: host, queue, command id.
    open: BTreeMap<u32, (usize, u16, u16)>,
    aborts: Vec<Abort>,
}

impl Aborts {
    /// With this number of Aborts per mille of commands.
    pub fn new(chance: u16) -> Aborts {
        Aborts { chance, open: BTreeMap::new(), aborts: Vec::new() }
    }

    /// Whether any command may end aborted.
    pub fn are_there(&self) -> bool {
        self.chance > 0
    }

    /// The next command to abort for a host, if any: a queue and a command id, which need not
    /// exist.
    pub fn next_wish(&self, host: usize, dice: &mut Rng) -> Option<(u16, u16)> {
        if !dice.per_mille(self.chance) {
            return None;
        }
        if dice.per_mille(50) {
            return Some((1 + dice.below(9) as u16, 0xF00));
        }
        let own = self.open.values().filter(|(of, ..)| *of == host);
        let count = own.clone().count() as u64;
        // The latest one has most probably not started.
        let skip = if dice.per_mille(400) { count.saturating_sub(1) } else { dice.below(count) };
        own.map(|(_, queue, cid)| (*queue, *cid)).nth(skip as usize)
    }

    /// A command is sent. `names`: the command that it aborts.
    pub fn leaves(&mut self, op: u32, at: (usize, u16, u16), names: Option<(u16, u16)>) {
        let (host, queue, cid) = at;
        if self.chance == 0 {
            return;
        }
        let meets = |abort: &&mut Abort| {
            abort.answer.is_none() && (abort.host, abort.queue, abort.cid) == (host, queue, cid)
        };
        let met = self.aborts.iter_mut().filter(meets);
        met.for_each(|abort| abort.named.push(Named { op, ended: None }));
        if let Some((queue, cid)) = names {
            let named = self.open.iter().filter(|(_, at)| **at == (host, queue, cid));
            let named = named.map(|(op, _)| Named { op: *op, ended: None }).collect();
            self.aborts.push(Abort { op, host, queue, cid, named, answer: None });
        }
        self.open.insert(op, at);
    }

    /// A command was answered: whether as aborted, and the result if it was an Abort.
    ///
    /// # Errors
    /// The response is invalid.
    pub fn answered(&mut self, op: u32, aborted: bool, says: Option<bool>) -> Result<(), String> {
        let Some((host, ..)) = self.open.remove(&op) else { return Ok(()) };
        for abort in self.aborts.iter_mut().filter(|abort| abort.host == host) {
            if abort.op == op {
                abort.answer = Some(says == Some(true));
            }
            for named in abort.named.iter_mut().filter(|named| named.op == op) {
                named.ended = Some(aborted);
            }
        }
        let verdict = self.check(host);
        if aborted && !self.aborts.iter().any(|abort| abort.names(op)) {
            return Err("it was aborted, and no Abort has named it".to_owned());
        }
        self.tidy();
        verdict
    }

    /// The association of a host has ended.
    pub fn forget(&mut self, host: usize) {
        self.open.retain(|_, (of, ..)| *of != host);
        self.aborts.retain(|abort| abort.host != host);
    }

    /// Removes Aborts whose outcome is complete, and that explain no end of other commands.
    fn tidy(&mut self) {
        let open = self.aborts.iter().filter(|abort| !abort.is_over());
        let asked: BTreeSet<u32> =
            open.flat_map(|w| w.named.iter().map(|named| named.op)).collect();
        self.aborts.retain(|abort| {
            !abort.is_over() || abort.named.iter().any(|named| asked.contains(&named.op))
        });
    }

    fn check(&self, host: usize) -> Result<(), String> {
        for abort in self.aborts.iter().filter(|abort| abort.host == host) {
            let ends = |how| abort.named.iter().any(|named| named.ended == how);
            if abort.answer == Some(true) && !ends(None) && !ends(Some(true)) {
                return Err(format!(
                    "Abort of command {:04x} on queue {} says that it was aborted, and it was not",
                    abort.cid, abort.queue
                ));
            }
            let aborted = abort.named.iter().filter(|named| named.ended == Some(true));
            for named in aborted {
                let by = |other: &Abort| other.names(named.op) && other.answer != Some(false);
                if !self.aborts.iter().any(by) {
                    return Err(format!(
                        "Abort of command {:04x} on queue {} says that it was not aborted, and it \
                         was",
                        abort.cid, abort.queue
                    ));
                }
            }
        }
        Ok(())
    }
}

impl Abort {
    fn is_over(&self) -> bool {
        self.answer.is_some() && self.named.iter().all(|named| named.ended.is_some())
    }

    fn names(&self, op: u32) -> bool {
        self.named.iter().any(|named| named.op == op)
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::abort::*;

    const AT: (usize, u16, u16) = (0, 1, 7);
    const ADMIN: (usize, u16, u16) = (0, 0, 3);

    fn abort() -> Aborts {
        let mut aborts = Aborts::new(10);
        aborts.leaves(1, AT, None);
        aborts.leaves(2, ADMIN, Some((1, 7)));
        aborts
    }

    #[test]
    fn abort_result_must_match_the_outcome_of_its_command() {
        for abort_first in [true, false] {
            for (aborted, says) in [(true, true), (true, false), (false, true), (false, false)] {
                let mut aborts = abort();
                let first = match abort_first {
                    true => aborts.answered(2, false, Some(says)),
                    false => aborts.answered(1, aborted, None),
                };
                let second = match abort_first {
                    true => aborts.answered(1, aborted, None),
                    false => aborts.answered(2, false, Some(says)),
                };
                assert!(first.is_ok());
                assert_eq!(second.is_ok(), aborted == says, "{abort_first} {aborted} {says}");
                assert!(aborts.aborts.is_empty(), "all is known");
            }
        }
    }

    #[test]
    fn commands_without_an_abort_must_not_end_aborted() {
        let mut aborts = abort();
        aborts.leaves(3, (0, 2, 7), None);
        assert!(aborts.answered(3, true, None).is_err());
    }

    #[test]
    fn an_abort_of_a_missing_command_must_not_succeed() {
        let mut aborts = Aborts::new(10);
        aborts.leaves(2, ADMIN, Some((1, 7)));
        assert!(aborts.answered(2, false, Some(true)).is_err());
    }

    #[test]
    fn an_abort_may_hit_a_later_command_of_the_same_id() {
        let mut aborts = abort();
        aborts.answered(1, false, None).unwrap();
        aborts.leaves(3, AT, None);
        aborts.answered(2, false, Some(true)).unwrap();
        assert!(aborts.answered(3, false, None).is_err());
    }

    #[test]
    fn an_aborted_command_must_be_reported_by_one_of_two_aborts() {
        let mut aborts = abort();
        aborts.leaves(4, (0, 0, 4), Some((1, 7)));
        aborts.answered(1, true, None).unwrap();
        aborts.answered(2, false, Some(false)).unwrap();
        assert!(aborts.answered(4, false, Some(false)).is_err());
    }
}
