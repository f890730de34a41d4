//! How Preempt and Abort waits, write protection, and Format NVM: everybody who still works for a
//! preempted host, still changes blocks, or still does anything with them, holds the fence, and when
//! the last one lets go, who waits behind it goes on.

use std::sync::mpsc::Sender;

use nvme::{NSID_ALL, Nqn, Status};

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
    /// Drops it where nobody is told: who waits sees that.
    _waiting: Option<Sender<()>>,
    keeper: Option<(u64, Sender<Word>)>,
}

/// Whose commands end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fenced {
    /// All I/O commands of hosts that were preempted.
    Preempted(Vec<HostId>),
    /// Everybody's that change blocks: the namespaces are write protected.
    Writers,
    /// Everybody's that do anything with blocks: the namespaces are formatted.
    Users,
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
        let keeper = Some((ticket, keeper));
        Fence { subsystem, nsids, whose, _waiting: None, keeper }
    }

    /// A fence around a namespace that is formatted; `waiting` goes when nobody holds it any more.
    #[must_use]
    pub fn around(subsystem: Nqn, nsid: u32, waiting: Sender<()>) -> Fence {
        let (nsids, whose) = (vec![nsid], Fenced::Users);
        Fence { subsystem, nsids, whose, _waiting: Some(waiting), keeper: None }
    }

    /// Whether commands of a host, on the admin queue or an I/O queue, may have to end.
    #[must_use]
    pub fn concerns(&self, host: &HostId, is_admin: bool) -> bool {
        match &self.whose {
            Fenced::Preempted(hosts) => !is_admin && hosts.contains(host),
            Fenced::Writers | Fenced::Users => true,
        }
    }

    /// Whether such a command has to end.
    #[must_use]
    pub fn ends(&self, plan: &Plan, nsid: u32) -> bool {
        let ends = match self.whose {
            Fenced::Preempted(_) => !matches!(plan, Plan::Reserve { .. } | Plan::Disconnect),
            Fenced::Writers => plan.changes_blocks(),
            Fenced::Users => plan.uses_blocks(),
        };
        // One command may protect all namespaces.
        let all = nsid == NSID_ALL && self.whose == Fenced::Users;
        ends && (all || self.nsids.contains(&nsid))
    }

    /// What commands are told that end.
    #[must_use]
    pub fn status(&self) -> Status {
        match self.whose {
            Fenced::Preempted(_) => Status::ABORTED_PREEMPT.with_dnr(),
            Fenced::Writers => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
            Fenced::Users => Status::FORMAT_IN_PROGRESS,
        }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        if let Some((ticket, keeper)) = &self.keeper {
            // A keeper that has ended answers nobody.
            let _ = keeper.send(Word::Drained(*ticket));
        }
    }
}
