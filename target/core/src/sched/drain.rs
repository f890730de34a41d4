//! Drain barrier for Preempt and Abort, write protection, and Format NVM: commands in its scope hold
//! it, and the request waits until the last one has completed.

use std::fmt;
use std::sync::mpsc::Sender;

use nvme::{NSID_ALL, Nqn, Status};

use crate::subsystem::reservation::HostId;

/// The commands that must end. Reactors complete those that have not begun; those at a device are
/// not recalled, so their slots hold the barrier until they complete.
pub struct DrainBarrier {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespaces.
    pub nsids: Vec<u32>,
    /// The commands in its scope.
    pub whose: DrainScope,
    drained: Option<Drained>,
}

/// Called when no command holds a barrier any more, on the thread of the last holder.
type Drained = Box<dyn FnOnce() + Send + Sync>;

/// Class of a command, for a drain barrier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IoClass {
    /// It changes blocks, or may.
    Changes,
    /// It uses blocks or information about them, and changes none.
    Uses,
    /// A command without blocks.
    Other,
    /// It is a reservation command or Disconnect, which continues also if its host was preempted.
    Exempt,
}

/// Commands covered by a drain barrier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DrainScope {
    /// All I/O commands of hosts that were preempted.
    Preempted(Vec<HostId>),
    /// Commands of all hosts that change blocks: the namespaces are write protected.
    Writers,
    /// Commands of all hosts that use or change blocks: the namespaces are formatted.
    Users,
}

impl DrainBarrier {
    /// Returns a barrier; `drained` is called when no command holds it any more, and must not
    /// block.
    #[must_use]
    pub fn new(
        subsystem: Nqn,
        nsids: Vec<u32>,
        whose: DrainScope,
        drained: impl FnOnce() + Send + Sync + 'static,
    ) -> DrainBarrier {
        DrainBarrier { subsystem, nsids, whose, drained: Some(Box::new(drained)) }
    }

    /// Returns a barrier for a namespace that is formatted; `waiting` is dropped when no command
    /// holds it any more.
    #[must_use]
    pub fn around(subsystem: Nqn, nsid: u32, waiting: Sender<()>) -> DrainBarrier {
        DrainBarrier::new(subsystem, vec![nsid], DrainScope::Users, move || drop(waiting))
    }

    /// Whether commands of a host, on the admin queue or an I/O queue, may have to end.
    pub fn concerns(&self, host: &HostId, is_admin: bool) -> bool {
        match &self.whose {
            DrainScope::Preempted(hosts) => !is_admin && hosts.contains(host),
            DrainScope::Writers | DrainScope::Users => true,
        }
    }

    /// Whether such a command has to end.
    pub fn ends(&self, class: IoClass, nsid: u32) -> bool {
        let ends = match self.whose {
            DrainScope::Preempted(_) => class != IoClass::Exempt,
            DrainScope::Writers => class == IoClass::Changes,
            DrainScope::Users => matches!(class, IoClass::Changes | IoClass::Uses),
        };
        // One command may protect all namespaces.
        let all = nsid == NSID_ALL && self.whose == DrainScope::Users;
        ends && (all || self.nsids.contains(&nsid))
    }

    /// Returns the status of commands that end.
    pub fn status(&self) -> Status {
        match self.whose {
            DrainScope::Preempted(_) => Status::ABORTED_PREEMPT.with_dnr(),
            DrainScope::Writers => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
            DrainScope::Users => Status::FORMAT_IN_PROGRESS,
        }
    }
}

impl Drop for DrainBarrier {
    fn drop(&mut self) {
        if let Some(drained) = self.drained.take() {
            drained();
        }
    }
}

impl fmt::Debug for DrainBarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DrainBarrier { subsystem, nsids, whose, drained: _ } = self;
        let mut shown = f.debug_struct("Fence");
        shown.field("subsystem", subsystem).field("nsids", nsids).field("whose", whose);
        shown.finish_non_exhaustive()
    }
}
