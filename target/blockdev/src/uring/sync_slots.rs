//! Coalesced fsync operations of a ring: which of them is submitted, and which flushes it covers.

use std::mem::take;

use super::pending::Flights;

impl Flights {
    /// Whether this slot is to be submitted as the fsync of its store now; otherwise it waits for
    /// the next.
    pub(super) fn leads_sync(&mut self, slot: u32) -> bool {
        let Some(flight) = self.slots[slot as usize].as_mut() else { return true };
        let index = flight.attachment;
        let Some(attachment) = self.attachments[index as usize].as_mut() else { return true };
        let leads = attachment.syncs.join(slot);
        if !leads {
            // It occupies no worker meanwhile.
            flight.idle = true;
            attachment.active = attachment.active.saturating_sub(1);
            self.resume(index);
        }
        leads
    }

    /// Whether this slot was waiting for an fsync of others; removes it.
    pub(super) fn leaves_sync(&mut self, slot: u32) -> bool {
        let flight = self.slots[slot as usize].as_ref();
        let attachment = flight.and_then(|f| self.attachments[f.attachment as usize].as_mut());
        attachment.is_some_and(|attachment| attachment.syncs.leave(slot))
    }

    /// Starts the fsync, unless the store was replaced: that would make nothing durable.
    pub(super) fn begin_sync(&mut self, slot: u32) {
        let Some(flight) = self.slots[slot as usize].as_mut() else { return };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        if let Some(backing) = attachment.map(|it| &it.backing).filter(|it| !it.is_lost()) {
            backing.health().begin_sync();
            flight.syncs = true;
        }
    }

    pub(super) fn take_sync_back(&mut self, slot: u32) {
        let Some(flight) = self.slots[slot as usize].as_mut() else { return };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        if let Some(attachment) = attachment.filter(|_| take(&mut flight.syncs)) {
            attachment.backing.health().note_write();
            attachment.backing.health().end_sync();
        }
    }
}
