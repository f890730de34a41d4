//! The backings that a ring knows, and their slots in the kernel's table of files.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::Ring;
use crate::disk::entry::Attachment;
use crate::disk::syncs::Syncs;
use crate::disk::{Backing, BackingId};

impl Ring {
    /// Makes a backing known under `id`; one that had this id before is detached.
    ///
    /// # Errors
    /// The id is not below [`super::RingLimits::backings`].
    pub fn attach(&mut self, id: BackingId, backing: Arc<Backing>) -> io::Result<()> {
        self.detach(id);
        let Some(entry) = self.by_id.get_mut(id.0 as usize) else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("backing {} is beyond this ring's table", id.0),
            ));
        };
        // The slot may still belong to a predecessor on its way out; then this one goes without.
        let taken = self.attachments.iter().flatten().any(|other| other.fixed && other.id == id.0);
        let fixed = match backing.fd() {
            Some(fd) if !taken && id.0 < self.files => {
                self.io.submitter().register_files_update(id.0, &[fd]).is_ok()
            }
            _ => false,
        };
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
        Ok(())
    }

    /// Takes a backing out. New operations on `id` come home as Invalid Namespace; those under way
    /// complete normally, and the ring lets the backing go with the last of them.
    pub fn detach(&mut self, id: BackingId) {
        let Some(index) = self.by_id.get_mut(id.0 as usize).and_then(Option::take) else { return };
        if let Some(attachment) = &mut self.attachments[index as usize] {
            attachment.leaving = true;
        }
        self.release(index);
    }

    /// Forgets a leaving attachment whose last flight is home.
    pub(super) fn release(&mut self, index: u32) {
        let entry = &mut self.attachments[index as usize];
        let Some(attachment) = entry.take_if(|it| it.leaving && it.flights == 0) else { return };
        if attachment.fixed {
            let cleared = self.io.submitter().register_files_update(attachment.id, &[-1]);
            if let Err(error) = cleared {
                tracing::warn!(
                    "{}: the ring keeps its file open: {error}",
                    attachment.backing.name()
                );
            }
        }
        self.share_anew();
    }
}
