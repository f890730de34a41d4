//! Backing devices of a ring, and their slots in the kernel's table of registered files.

use std::collections::VecDeque;
use std::sync::Arc;

use super::pending::Flights;
use crate::uring::sqe::Attachment;
use crate::uring::sync_group::Syncs;
use crate::{BackingDevice, DeviceId};

impl Flights {
    /// Whether the slot of this number in the kernel's table of files is vacant. It may still belong
    /// to a backing on its way out; then the next one goes without.
    #[must_use]
    pub fn is_file_vacant(&self, id: DeviceId) -> bool {
        !self.attachments.iter().flatten().any(|other| other.fixed && other.id == id.0)
    }

    /// Makes a backing known under `id`, which none has now: see [`Flights::detach`]. `fixed`: it has
    /// the slot of this number in the kernel's table of files. False where the id is beyond the end.
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
        self.share_anew();
        true
    }

    /// Takes a backing out. New operations on `id` come home as Invalid Namespace; those under way
    /// complete normally, and the backing is let go with the last of them.
    pub fn detach(&mut self, id: DeviceId) {
        let Some(index) = self.by_id.get_mut(id.0 as usize).and_then(Option::take) else { return };
        if let Some(attachment) = &mut self.attachments[index as usize] {
            attachment.leaving = true;
        }
        self.release(index);
    }

    /// The ids of those backings that were let go and had a slot in the kernel's table of files.
    pub fn next_vacated(&mut self) -> Option<u32> {
        self.vacated.pop()
    }

    /// Forgets a leaving attachment whose last flight is home.
    pub(super) fn release(&mut self, index: u32) {
        let entry = &mut self.attachments[index as usize];
        let Some(attachment) = entry.take_if(|it| it.leaving && it.flights == 0) else { return };
        if attachment.fixed {
            self.vacated.push(attachment.id);
        }
        self.share_anew();
    }
}
