//! A copy of a backing store at one moment, as by reflink. Changes of hosts wait meanwhile, as the
//! product has them do (`nvmfd::provision`).

use nvmfd::blockdev::DeviceId;
use nvmfd::core::sched::range_lock::RangeLock;

use super::Target;
use crate::sim::device::SimDevice;
use crate::sim::mutants::SeededBug;

/// A copy in progress.
#[derive(Debug)]
pub(super) struct Snapshot {
    space: usize,
    id: DeviceId,
    ticket: u64,
    /// The lock is granted: nothing of the store changes.
    is_copying: bool,
}

impl Target {
    /// Locks a namespace that is served, unless another copy is in progress.
    pub fn begin_snapshot(&mut self, space: usize) {
        let Some(id) = self.served[space].filter(|_| self.is_up() && self.snapshot.is_none())
        else {
            return;
        };
        let all = RangeLock { backing: id, at: 0, len: u64::MAX, alone: true, reactor: usize::MAX };
        let (ticket, _) = self.shared.range_locks.claim(all);
        self.snapshot = Some(Snapshot { space, id, ticket, is_copying: false });
    }

    /// Copies, once the lock is granted.
    ///
    /// # Errors
    /// A change is in progress.
    pub fn look_at_snapshot(&mut self, disk: &mut SimDevice) -> Result<(), String> {
        let hasty = self.plant == Some(SeededBug::EarlySnapshot);
        let Some(snapshot) = self.snapshot.as_mut().filter(|it| !it.is_copying) else {
            return Ok(());
        };
        if hasty || self.shared.range_locks.is_granted(snapshot.ticket) {
            snapshot.is_copying = true;
            return disk.begin_copy(snapshot.id);
        }
        Ok(())
    }

    /// Ends a copy, or gives up waiting for its lock.
    pub fn end_snapshot(&mut self, disk: &mut SimDevice) {
        let Some(Snapshot { ticket, .. }) = self.snapshot.take() else { return };
        disk.end_copy();
        self.shared.range_locks.give_up(ticket);
    }

    /// Ends a copy of a namespace that is removed.
    pub(super) fn end_snapshot_of(&mut self, space: usize, disk: &mut SimDevice) {
        if self.snapshot.as_ref().is_some_and(|it| it.space == space) {
            self.end_snapshot(disk);
        }
    }
}
