//! How Preempt and Abort waits, and write protection: everybody who still works for a preempted
//! host, or still changes blocks, holds the fence, and when the last one lets go the keeper answers.

use std::sync::mpsc::Sender;

use nvme::{Nqn, Status};

use super::HostId;
use super::keeper::Word;
use crate::command::Plan;

/// Which commands are to end. Reactors answer those that have not begun; those that are at the
/// disk cannot be recalled, so their slots hold the fence until they come home.
#[derive(Debug)]
pub struct Fence {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespaces.
    pub nsids: Vec<u32>,
    /// Whose commands.
    pub whose: Fenced,
    ticket: u64,
    keeper: Sender<Word>,
}

/// Whose commands end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fenced {
    /// All I/O commands of hosts that were preempted.
    Preempted(Vec<HostId>),
    /// Everybody's that change blocks: the namespaces are write protected.
    Writers,
}

impl Fence {
    /// A fence that tells `keeper` of this ticket when nobody holds it any more.
    #[must_use]
    pub fn new(
        subsystem: Nqn,
        nsids: Vec<u32>,
        whose: Fenced,
        ticket: u64,
        keeper: Sender<Word>,
    ) -> Fence {
        Fence { subsystem, nsids, whose, ticket, keeper }
    }

    /// Whether commands of a host, on the admin queue or an I/O queue, may have to end.
    #[must_use]
    pub fn concerns(&self, host: &HostId, is_admin: bool) -> bool {
        match &self.whose {
            Fenced::Preempted(hosts) => !is_admin && hosts.contains(host),
            Fenced::Writers => true,
        }
    }

    /// Whether such a command has to end.
    #[must_use]
    pub fn ends(&self, plan: &Plan, nsid: u32) -> bool {
        let ends = match self.whose {
            Fenced::Preempted(_) => !matches!(plan, Plan::Reserve { .. } | Plan::Disconnect),
            Fenced::Writers => plan.changes_blocks(),
        };
        ends && self.nsids.contains(&nsid)
    }

    /// What commands are told that end.
    #[must_use]
    pub fn status(&self) -> Status {
        match self.whose {
            Fenced::Preempted(_) => Status::ABORTED_PREEMPT.with_dnr(),
            Fenced::Writers => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // A keeper that has ended answers nobody.
        let _ = self.keeper.send(Word::Drained(self.ticket));
    }
}
