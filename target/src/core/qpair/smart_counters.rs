//! What is counted of a queue's commands, for the SMART log.

use std::time::Instant;

use nvme::Status;

use super::{QueuePair, QueueRole, State};
use crate::core::subsystem::usage::Work;

impl QueuePair {
    /// Where the work of a command is counted.
    pub(super) fn work(&mut self, slot: u16) -> &mut Work {
        let nsid = self.slots[usize::from(slot)].sqe.nsid;
        let (work, evicted) = self.tally.of(nsid);
        if let (Some((nsid, evicted)), QueueRole::Io { association, subsystem, .. }) =
            (evicted, &self.serves)
        {
            association.usage.add(&evicted);
            subsystem.usage.add(nsid, &evicted);
        }
        work
    }

    /// Counts a failure, if it is one of the medium.
    pub(super) fn count_failure(&mut self, slot: u16, status: Status) {
        const MEDIA: u8 = 2;
        let harmless = [Status::COMPARE_FAILURE, Status::ACCESS_DENIED, Status::DEALLOCATED_BLOCK];
        let io = matches!(self.serves, QueueRole::Io { .. });
        if io && status.sct() == MEDIA && !harmless.iter().any(|other| status.is(*other)) {
            self.work(slot).media_errors += 1;
        }
    }

    /// Hands in what was counted.
    pub(super) fn hand_in(&mut self, now: Instant) {
        let QueueRole::Io { association, subsystem, .. } = &self.serves else { return };
        for (nsid, work) in self.tally.take() {
            association.usage.add(&work);
            association.usage.note_busy(now);
            subsystem.usage.add(nsid, &work);
            subsystem.usage.note_busy(nsid, now);
        }
        if self.free.len() == self.slots.len() {
            return;
        }
        let mut noted = 0;
        for entry in &self.slots {
            let under_way = !matches!(entry.state(), State::Free | State::Replying);
            if under_way && entry.sqe.nsid != noted && subsystem.namespace(entry.sqe.nsid).is_ok() {
                noted = entry.sqe.nsid;
                association.usage.note_busy(now);
                subsystem.usage.note_busy(noted, now);
            }
        }
    }
}
