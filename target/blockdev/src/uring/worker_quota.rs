//! Quota of a backing store in the ring, and so of the kernel's io-wq workers.
//!
//! An operation that the kernel cannot do immediately (fsync, deallocation; a transfer without a
//! free tag of its device) goes to a worker and occupies it until completion. Operations that find
//! no worker wait in one queue, whatever their store. So the kernel gets only as many operations of
//! one store as leave workers to others; the rest is parked with the store, in order of arrival.

use std::iter::once;

use rdma::Tag;

use super::pending::Flights;
use crate::request::PendingIo;
use crate::uring::setup::MOST_WORKERS;
use crate::uring::sqe::Attachment;

/// Maximum of a store in the kernel while there are others. At the rate of a reactor (some 500,000
/// operations per second) this does not limit up to a latency of 400 us. Half a dozen stores may
/// block at once, because some of their operations are at the device, where they occupy no worker.
const BESIDE_OTHERS: u32 = 192;
/// Maximum of a store that is alone: another one that is attached finds workers.
const ALONE: u32 = MOST_WORKERS - BESIDE_OTHERS;

/// [`ALONE`] and [`BESIDE_OTHERS`].
pub(super) const SHARES: [u32; 2] = [ALONE, BESIDE_OTHERS];

impl Flights {
    /// Recomputes the shares: stores were attached or detached.
    pub(super) fn recompute_shares(&mut self) {
        let has_workers = |it: &&Attachment| it.backing.kind().is_external();
        let stores = self.attachments.iter().flatten().filter(has_workers).count();
        self.share = self.shares[usize::from(stores > 1)];
        (0..self.attachments.len()).for_each(|index| self.resume(index as u32));
    }

    /// Gives a slot to the next operation that may have one; parks those before it that may not.
    pub(super) fn take_slot(&mut self) -> Option<u32> {
        let slot = *self.free.last()?;
        let flight = self.next_resumed().or_else(|| self.next_queued())?;
        if let Some(attachment) = &mut self.attachments[flight.attachment as usize] {
            attachment.active += 1;
        }
        self.free.pop();
        self.slots[slot as usize] = Some(flight);
        Some(slot)
    }

    /// Frees a slot: the next operation of its store may have it.
    pub(super) fn leave_slot(&mut self, slot: u32, flight: &PendingIo) {
        self.free.push(slot);
        let index = flight.attachment;
        if let Some(attachment) = self.attachments[index as usize].as_mut().filter(|_| !flight.idle)
        {
            attachment.active = attachment.active.saturating_sub(1);
            self.resume(index);
        }
    }

    /// Removes operations that have no slot yet.
    pub(super) fn take_waiting(&mut self, is_wanted: impl Fn(Tag) -> bool) -> Vec<PendingIo> {
        let mut taken = Vec::new();
        let parked = self.attachments.iter_mut().flatten().map(|it| &mut it.parked);
        for line in once(&mut self.queue).chain(parked) {
            for _ in 0..line.len() {
                let Some(flight) = line.pop_front() else { break };
                match is_wanted(flight.tag()) {
                    true => taken.push(flight),
                    false => line.push_back(flight),
                }
            }
        }
        taken
    }

    /// Reconsiders the parked operations of a store.
    pub(super) fn resume(&mut self, index: u32) {
        let attachment = self.attachments[index as usize].as_ref();
        if attachment.is_some_and(|it| !it.parked.is_empty()) && !self.resumed.contains(&index) {
            self.resumed.push(index);
        }
    }

    fn next_resumed(&mut self) -> Option<PendingIo> {
        while let Some(index) = self.resumed.last() {
            let attachment = self.attachments[*index as usize].as_mut();
            let attachment = attachment.filter(|it| it.active < self.share);
            let next = attachment.and_then(|it| Some((it.parked.pop_front()?, &it.backing)));
            let Some((flight, backing)) = next else {
                self.resumed.pop();
                continue;
            };
            // The store may have failed, or become smaller, since the submission.
            let Some(outcome) = flight.immediate_result(backing) else { return Some(flight) };
            let done = self.finish(flight, outcome);
            self.ready.extend(done);
        }
        None
    }

    fn next_queued(&mut self) -> Option<PendingIo> {
        while let Some(flight) = self.queue.pop_front() {
            match &mut self.attachments[flight.attachment as usize] {
                Some(it) if it.active >= self.share || !it.parked.is_empty() => {
                    it.parked.push_back(flight);
                }
                _ => return Some(flight),
            }
        }
        None
    }
}
