//! Oracle for ANA: which commands a path must reject in the state set by the administrator, which
//! it must not, and with which status. Written from the specifications, not from the
//! implementation.
//!
//! A command that was sent after the state of its path was set, and was answered before it was set
//! again, saw one state. If two hosts are the two paths of one machine, commands that one path
//! rejects or loses are sent on the other, as native multipath does.

use std::collections::VecDeque;

use nvme::Status;
use nvme::log::{AnaGroup, AnaHeader, AnaState};

use super::blocks::{Moment, Span};
use super::ns_management::GROUP;
use crate::sim::scenario::Profile;
use crate::sim::workload::command::{Kind, Op};

/// State of the oracle for ANA.
#[derive(Debug)]
pub struct Paths {
    /// State of each path and namespace, and since when.
    states: Vec<Vec<(AnaState, Moment)>>,
    /// For each host the commands that failed on the other path of its machine.
    again: Vec<VecDeque<(Kind, Span)>>,
    twins: bool,
}

impl Paths {
    /// All optimized.
    pub fn new(profile: &Profile) -> Paths {
        let optimized = vec![(AnaState::OPTIMIZED, 0); profile.shapes.len()];
        Paths {
            states: vec![optimized; profile.paths],
            again: vec![VecDeque::new(); profile.hosts],
            twins: profile.twins,
        }
    }

    /// Records the state of a path; returns whether it has changed.
    pub fn set(&mut self, path: usize, space: usize, state: AnaState, now: Moment) -> bool {
        let old = std::mem::replace(&mut self.states[path][space], (state, now));
        old.0 != state
    }

    /// Checks whether the ANA state permits this response.
    ///
    /// # Errors
    /// It does not.
    pub fn check(&self, op: &Op, status: Status) -> Result<(), String> {
        let (state, since) = self.of(op);
        if since >= op.began {
            return Ok(());
        }
        let expected = refusal(state);
        if is_of_paths(status) && !expected.is_some_and(|expected| status.is(expected)) {
            let state = state.name().unwrap_or_default();
            return Err(format!("it was refused on a path that is {state}: {status}"));
        }
        if status.is_success() && expected.is_some() && op.is_for_blocks() {
            return Err("it was carried out on a path that does not reach its namespace".to_owned());
        }
        Ok(())
    }

    /// Whether an ANA state may explain a refused command; [`Paths::check`] is exact.
    pub fn excuses(&self, op: &Op, status: Status) -> bool {
        is_of_paths(status)
            && (op.is_for_blocks()
                || matches!(op.kind, Kind::Protect(_) | Kind::Format { .. } | Kind::Wrong(_)))
    }

    /// A command has failed on its path.
    pub fn failed(&mut self, op: &Op) {
        let other = op.host ^ 1;
        let tries = matches!(op.kind, Kind::Read | Kind::Write { .. } | Kind::Zeroes { .. });
        if self.twins && tries && op.half == 0 && other < self.again.len() {
            self.again[other].push_back((op.kind.clone(), op.span));
        }
    }

    /// The next command of a host that failed on the other path.
    pub fn next_again(&mut self, host: usize) -> Option<(Kind, Span)> {
        self.again[host].pop_front()
    }

    /// Checks a log that a host has read, as far as the states have not changed since. Returns
    /// whether it has the present states.
    ///
    /// # Errors
    /// The log is wrong.
    pub fn check_log(&self, op: &Op, page: &[u8]) -> Result<bool, String> {
        let mut is_current = true;
        let states = &self.states[op.host % self.states.len()];
        let groups = page.first_chunk().map_or(0, |header| AnaHeader::parse(header).ngrps);
        let mut rest = page.get(AnaHeader::BYTES..).unwrap_or_default();
        for _ in 0..groups {
            let group = rest.first_chunk().map(AnaGroup::parse).ok_or("the log is cut off")?;
            let index = (group.grpid as usize).wrapping_sub(1);
            // The group of host-created namespaces is optimized on every path.
            let made = (index + 1 == GROUP as usize).then_some(&(AnaState::OPTIMIZED, 0));
            let (state, since) = states.get(index).or(made).ok_or("there is no such group")?;
            if *state != group.state {
                is_current = false;
                if *since < op.began {
                    let reported = group.state;
                    return Err(format!(
                        "group {} is reported as {reported:?}, not {state:?}",
                        index + 1
                    ));
                }
            }
            let end = AnaGroup::BYTES + 4 * group.nnsids as usize;
            rest = rest.get(end..).ok_or("the log is cut off")?;
        }
        Ok(is_current)
    }

    fn of(&self, op: &Op) -> (AnaState, Moment) {
        self.states[op.host % self.states.len()][op.span.space]
    }
}

/// The status of commands in a state, if they are rejected.
fn refusal(state: AnaState) -> Option<Status> {
    match state {
        AnaState::INACCESSIBLE => Some(Status::ANA_INACCESSIBLE),
        AnaState::PERSISTENT_LOSS => Some(Status::ANA_PERSISTENT_LOSS),
        AnaState::CHANGE => Some(Status::ANA_TRANSITION),
        _ => None,
    }
}

/// Whether a status asks for another path.
pub fn is_of_paths(status: Status) -> bool {
    [Status::ANA_INACCESSIBLE, Status::ANA_PERSISTENT_LOSS, Status::ANA_TRANSITION]
        .into_iter()
        .any(|of| status.is(of))
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::ana::*;

    fn paths() -> Paths {
        let profile = Profile { paths: 2, hosts: 2, twins: true, ..Profile::new(1, 10) };
        Paths::new(&profile)
    }

    fn op(host: usize, began: Moment) -> Op {
        let span = Span { space: 0, lba: 0, blocks: 1 };
        Op { kind: Kind::Read, host, id: 1, span, began, half: 0, shift: 0 }
    }

    #[test]
    fn command_status_must_match_the_ana_state() {
        let mut paths = paths();
        assert!(paths.set(1, 0, AnaState::INACCESSIBLE, 10));
        assert!(!paths.set(1, 0, AnaState::INACCESSIBLE, 10));
        let check = |host, began, status| paths.check(&op(host, began), status).is_ok();
        assert!(check(1, 11, Status::ANA_INACCESSIBLE) && !check(1, 11, Status::SUCCESS));
        assert!(!check(1, 11, Status::ANA_TRANSITION), "another state's");
        assert!(check(0, 11, Status::SUCCESS) && !check(0, 11, Status::ANA_INACCESSIBLE));
        assert!(check(1, 9, Status::SUCCESS) && check(1, 9, Status::ANA_INACCESSIBLE));
    }

    #[test]
    fn failed_commands_are_retried_on_the_other_path() {
        let mut paths = paths();
        paths.failed(&op(1, 5));
        assert!(paths.next_again(1).is_none());
        assert_eq!(paths.next_again(0).map(|(kind, _)| kind), Some(Kind::Read));
    }

    #[test]
    fn ana_log_must_show_states_set_before_the_request() {
        let mut paths = paths();
        paths.set(0, 1, AnaState::CHANGE, 10);
        let page = |second| {
            let mut page = AnaHeader { chgcnt: 1, ngrps: 2 }.emit().to_vec();
            for (grpid, state) in [(1, AnaState::OPTIMIZED), (2, second)] {
                page.extend(AnaGroup { grpid, nnsids: 1, chgcnt: 1, state }.emit());
                page.extend(grpid.to_le_bytes());
            }
            page
        };
        assert_eq!(paths.check_log(&op(0, 11), &page(AnaState::CHANGE)), Ok(true));
        assert!(paths.check_log(&op(0, 11), &page(AnaState::OPTIMIZED)).is_err());
        assert_eq!(paths.check_log(&op(0, 9), &page(AnaState::OPTIMIZED)), Ok(false));
        assert!(paths.check_log(&op(0, 9), &page(AnaState::CHANGE)[..60]).is_err());
    }
}
