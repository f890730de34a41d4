//! Backing devices of a ring, and their slots in the kernel's table of registered files.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pending::Flights;
use crate::uring::sqe::Attachment;
use crate::uring::sync_group::Syncs;
use crate::{BackingDevice, DeviceId};

impl Flights {
    /// Whether the slot with this number in the kernel's table of files is vacant. If it still
    /// belongs to a store that is being released, the new one has none.
    pub(crate) fn is_file_vacant(&self, id: DeviceId) -> bool {
        !self.attachments.iter().flatten().any(|other| other.fixed && other.id == id.0)
    }

    /// Attaches a store under `id`, which has none now: see [`Flights::detach`]. `fixed`: it has
    /// the slot with this number in the kernel's table of files. Returns false if the id is out of
    /// range.
    pub fn attach(&mut self, id: DeviceId, backing: Arc<BackingDevice>, fixed: bool) -> bool {
        let Some(entry) = self.by_id.get_mut(id.0 as usize) else { return false };
        let attachment = Some(Attachment {
            sync_fd: backing.sync_fd(),
            syncs: Syncs::default(),
            backing,
            id: id.0,
            fixed,
            flights: 0,
            active: 0,
            parked: VecDeque::new(),
            leaving: false,
        });
        let index = match self.attachments.iter().position(Option::is_none) {
            Some(index) => {
                self.attachments[index] = attachment;
                index
            }
            None => {
                self.attachments.push(attachment);
                self.attachments.len() - 1
            }
        };
        *entry = u32::try_from(index).ok();
        self.recompute_shares();
        true
    }

    /// Detaches a store. New operations on `id` fail with Invalid Namespace; those in flight
    /// complete normally, and the store is released after the last of them.
    pub fn detach(&mut self, id: DeviceId) {
        let Some(index) = self.by_id.get_mut(id.0 as usize).and_then(Option::take) else { return };
        if let Some(attachment) = &mut self.attachments[index as usize] {
            attachment.leaving = true;
        }
        self.release(index);
    }

    /// The next id of a store that was released and had a slot in the kernel's table of files.
    pub(crate) fn next_vacated(&mut self) -> Option<u32> {
        self.vacated.pop()
    }

    /// Removes a detached store after its last operation.
    pub(super) fn release(&mut self, index: u32) {
        let entry = &mut self.attachments[index as usize];
        let Some(attachment) = entry.take_if(|it| it.leaving && it.flights == 0) else { return };
        if attachment.fixed {
            self.vacated.push(attachment.id);
        }
        self.recompute_shares();
    }
}
