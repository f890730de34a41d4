//! Completions: from the kernel to pending operations, and from those to their submitter.

use std::mem::take;
use std::sync::Arc;

use nvme::status::Status;
use rdma::Tag;

use super::pending::Flights;
use crate::request::PendingIo;
use crate::uring::cancel::Cancellation;
use crate::{CancelRequest, Health, IoCompletion};

impl Flights {
    /// Takes the kernel's result of a cancellation, by its index.
    pub fn recall_answered(&mut self, index: usize, answer: i32, done: &mut Vec<IoCompletion>) {
        let recall = self.recalls.answered(index);
        let Some(Cancellation { tag, of, slot, aborted }) = recall else { return };
        let granted = answer >= 0 || aborted;
        // Not found, or already running: the operation continues.
        if !granted
            && let Some(flight) = self.slots[slot as usize].as_mut()
            && flight.tag() == of
        {
            flight.not_cancelled();
        }
        let outcome = if granted { Ok(()) } else { Err(Status::INTERNAL_ERROR) };
        done.push(IoCompletion { tag, buf: None, outcome });
    }

    /// Takes the kernel's result of the step of a slot.
    pub fn answered(&mut self, slot: u32, answer: i32, done: &mut Vec<IoCompletion>) {
        let flight = self.slots.get_mut(slot as usize).and_then(Option::as_mut);
        let Some(flight) = flight else { return };
        self.in_kernel = self.in_kernel.saturating_sub(1);
        if flight.take_wait() && answer != -libc::ECANCELED {
            return self.again.push_back(slot);
        }
        if answer == -libc::ECANCELED {
            self.recalls.on_aborted(flight.tag());
        }
        let attached = self.attachments[flight.attachment as usize].as_ref();
        let outcome = match attached {
            Some(attachment) => {
                let outcome = flight.advance(answer, &attachment.backing);
                if take(&mut flight.syncs) {
                    attachment.backing.health().end_sync();
                }
                outcome
            }
            None => Some(Err(Status::INTERNAL_ERROR.with_dnr())),
        };
        match outcome {
            None => {
                self.repeated += 1;
                self.again.push_back(slot);
            }
            Some(outcome) => done.extend(self.complete(slot, outcome)),
        }
    }

    /// Cancels operations. Those that the kernel does not have (any more) complete immediately. Of
    /// the rest the kernel cancels those that wait for a worker; those at a device continue. All
    /// hosts of a store that blocks time out at about the same time, with thousands of operations,
    /// so all operations of a queue are searched for together, in as many steps as there are
    /// operations.
    pub fn cancel_all(&mut self, requests: &[CancelRequest]) {
        let aborted = Err(Status::ABORT_REQUESTED);
        let mut left: Vec<Option<CancelRequest>> = requests.iter().copied().map(Some).collect();
        let at = |of: Tag| requests.binary_search_by_key(&of, |request| request.of).ok();
        let answer = |CancelRequest { tag, .. }: CancelRequest, outcome| IoCompletion {
            tag,
            buf: None,
            outcome,
        };
        for flight in self.take_waiting(|of| at(of).is_some()) {
            let request = at(flight.tag()).and_then(|at| left[at].take());
            let done = self.finish(flight, aborted);
            self.ready.extend(done);
            self.ready.extend(request.map(|request| answer(request, Ok(()))));
        }
        let in_slots = (0u32..).zip(&self.slots).filter_map(|(slot, flight)| {
            let request = left[at(flight.as_ref()?.tag())?].take()?;
            Some((slot, request))
        });
        for (slot, request) in in_slots.collect::<Vec<_>>() {
            if let Some(at) = self.again.iter().position(|other| *other == slot) {
                self.again.remove(at);
            } else if !self.leaves_sync(slot) {
                self.recalls.push(request.tag, request.of, slot);
                continue;
            }
            let done = self.complete(slot, aborted);
            self.ready.extend(done);
            self.ready.push_back(answer(request, Ok(())));
        }
        let unknown = left.into_iter().flatten();
        self.ready.extend(unknown.map(|request| answer(request, Err(Status::INTERNAL_ERROR))));
    }

    /// Completes the operation in a slot and frees the slot; also completes those that share its
    /// fsync.
    pub(super) fn complete(
        &mut self,
        slot: u32,
        outcome: Result<(), Status>,
    ) -> Option<IoCompletion> {
        let index = self.slots[slot as usize].as_ref()?.attachment;
        if let Some(attachment) = &mut self.attachments[index as usize] {
            let alone = outcome.is_err_and(|status| status.is(Status::ABORT_REQUESTED));
            let next = attachment.syncs.end(slot, alone, &mut self.followers);
            if let Some(next) = next.and_then(|next| self.slots[next as usize].as_mut()) {
                next.idle = false;
                attachment.active += 1;
            }
            self.again.extend(next);
            while let Some(follower) = self.followers.pop() {
                let done = self.land_one(follower, outcome);
                self.ready.extend(done);
            }
        }
        self.land_one(slot, outcome)
    }

    fn land_one(&mut self, slot: u32, outcome: Result<(), Status>) -> Option<IoCompletion> {
        let flight = self.slots[slot as usize].take()?;
        self.leave_slot(slot, &flight);
        self.finish(flight, outcome)
    }

    /// Completes an operation that has no slot (any more).
    pub(super) fn finish(
        &mut self,
        flight: PendingIo,
        outcome: Result<(), Status>,
    ) -> Option<IoCompletion> {
        let index = flight.attachment;
        self.under_way = self.under_way.saturating_sub(1);
        let has_failed = outcome.is_err() && flight.is_durable();
        let attachment = self.attachments[index as usize].as_ref().filter(|_| has_failed);
        let health = attachment.map(|it| Arc::clone(it.backing.health()));
        if let Some(attachment) = &mut self.attachments[index as usize] {
            attachment.flights = attachment.flights.saturating_sub(1);
            if attachment.leaving {
                self.release(index);
            }
        }
        self.hold_unrecorded(flight.done(outcome), health)
    }

    /// Delays the report of a failed fsync until the failure is persisted, whatever the status: rings
    /// may get different errors. `health`: of the store, if a flush or a write with FUA has failed.
    pub(super) fn hold_unrecorded(
        &mut self,
        done: IoCompletion,
        health: Option<Arc<Health>>,
    ) -> Option<IoCompletion> {
        match health.filter(|health| health.is_unrecorded()) {
            Some(health) => {
                self.unrecorded.push((health, done));
                None
            }
            None => Some(done),
        }
    }

    /// Completes operations whose failure has been persisted.
    pub(super) fn release_recorded(&mut self) {
        let is_recorded = |(health, _): &mut (Arc<Health>, IoCompletion)| !health.is_unrecorded();
        self.ready.extend(self.unrecorded.extract_if(.., is_recorded).map(|(_, done)| done));
    }
}
