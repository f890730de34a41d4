//! `Flights`: the operations of a ring, as a state machine without I/O.
//!
//! It makes no system call. It returns the next submission, is informed whether that was possible,
//! and takes the completions. So the same code runs over io_uring ([`super::Ring`]) and over a
//! simulated kernel.

use std::collections::VecDeque;
use std::sync::Arc;

use nvme::status::Status;
use rdma::Tag;

use super::{MAX_OPS, RingLimits, worker_quota};
use crate::fault_injection::{InjectedFault, Verdict};
use crate::request::{PendingIo, Step};
use crate::uring::cancel::Cancellations;
use crate::uring::sqe::Attachment;
use crate::{BackingDevice, DeviceId, Health, IoCompletion, IoRequest, Kind};

/// The operations of one ring, and the stores attached to it.
pub struct Flights {
    pub(super) attachments: Vec<Option<Attachment>>,
    /// By [`DeviceId`]: index into `attachments`.
    pub(super) by_id: Vec<Option<u32>>,
    /// Ids whose slots in the kernel's table of files are to be vacated.
    pub(super) vacated: Vec<u32>,
    pub(super) slots: Vec<Option<PendingIo>>,
    pub(super) free: Vec<u32>,
    /// Operations without a slot.
    pub(super) queue: VecDeque<PendingIo>,
    /// Slots whose next step is to be submitted.
    pub(super) again: VecDeque<u32>,
    /// Scratch: slots that complete with another one.
    pub(super) followers: Vec<u32>,
    /// Completed without the kernel.
    pub(super) ready: VecDeque<IoCompletion>,
    /// Completed, but not reported before the failed fsync of their store is persisted. The thread
    /// that persists it wakes the reactor.
    pub(super) unrecorded: Vec<(Arc<Health>, IoCompletion)>,
    pub(super) recalls: Cancellations,
    pub(super) in_kernel: usize,
    /// Operations in total: queued, parked with their store, or in a slot.
    pub(super) under_way: usize,
    /// Maximum of one store in the kernel: when it is alone, and when there are others.
    pub(super) shares: [u32; 2],
    pub(super) share: u32,
    /// Indexes of attachments with parked operations that may get a slot now.
    pub(super) resumed: Vec<u32>,
    /// Steps after the first one of an operation.
    pub(super) repeated: u64,
}

/// What to submit next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Submission {
    /// This step of the operation in this slot.
    Step(u32, Step),
    /// A timeout of 100 ms, for the operation in this slot.
    Pause(u32),
}

impl Submission {
    /// The slot.
    pub fn slot(self) -> u32 {
        match self {
            Submission::Step(slot, _) | Submission::Pause(slot) => slot,
        }
    }
}

impl std::fmt::Debug for Flights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (under_way, in_kernel) = (self.under_way, self.in_kernel);
        f.debug_struct("Flights")
            .field("under_way", &under_way)
            .field("in_kernel", &in_kernel)
            .finish_non_exhaustive()
    }
}

impl Flights {
    /// For a ring of this size.
    pub fn new(limits: RingLimits) -> Flights {
        let ops = limits.ops.clamp(1, MAX_OPS);
        let room = ops as usize;
        Flights {
            attachments: Vec::with_capacity(limits.backings as usize),
            by_id: vec![None; limits.backings as usize],
            vacated: Vec::new(),
            slots: (0..ops).map(|_| None).collect(),
            free: (0..ops).rev().collect(),
            queue: VecDeque::with_capacity(room),
            again: VecDeque::with_capacity(room),
            followers: Vec::new(),
            ready: VecDeque::with_capacity(room),
            unrecorded: Vec::new(),
            recalls: Cancellations::default(),
            in_kernel: 0,
            under_way: 0,
            shares: worker_quota::SHARES,
            share: worker_quota::SHARES[0],
            resumed: Vec::new(),
            repeated: 0,
        }
    }

    /// Sets the maximum of one store in the kernel, alone and with others.
    pub fn set_shares(&mut self, alone: u32, beside_others: u32) {
        self.shares = [alone, beside_others];
        self.recompute_shares();
    }

    /// Number of slots.
    pub(super) fn slot_count(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// Takes an operation. `at_once` executes one in memory without the ring, or returns none.
    pub fn submit(
        &mut self,
        backing: DeviceId,
        tag: Tag,
        op: IoRequest,
        at_once: impl FnOnce(&mut PendingIo, &BackingDevice) -> Option<Result<(), Status>>,
    ) {
        let index = self.by_id.get(backing.0 as usize).copied().flatten();
        let attached = index
            .and_then(|index| Some((index, self.attachments.get_mut(index as usize)?.as_mut()?)));
        let Some((index, attachment)) = attached else {
            let gone = Err(Status::INVALID_NAMESPACE.with_dnr());
            self.ready.push_back(PendingIo::new(u32::MAX, tag, op).done(gone));
            return;
        };
        let mut flight = PendingIo::new(index, tag, op);
        let backing = &attachment.backing;
        let outcome = match (flight.immediate_result(backing), backing.kind()) {
            (None, _) if backing.is_in_memory() && is_faultless(backing) => {
                at_once(&mut flight, backing)
            }
            (Some(outcome), Kind::Null) => at_once(&mut flight, backing).or(Some(outcome)),
            (outcome, _) => outcome,
        };
        if let Some(outcome) = outcome {
            let has_failed = outcome.is_err() && flight.is_durable();
            let health = has_failed.then(|| Arc::clone(backing.health()));
            let done = self.hold_unrecorded(flight.done(outcome), health);
            self.ready.extend(done);
            return;
        }
        attachment.flights += 1;
        self.under_way += 1;
        self.queue.push_back(flight);
    }

    /// The operations that have completed without the kernel.
    pub fn take_ready(&mut self) -> impl Iterator<Item = IoCompletion> + '_ {
        if !self.unrecorded.is_empty() {
            self.release_recorded();
        }
        self.ready.drain(..)
    }

    /// Whether there is work before the next completion of the kernel.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.again.is_empty()
    }

    /// Operations submitted and not yet returned.
    pub fn in_flight(&self) -> usize {
        self.under_way + self.ready.len() + self.unrecorded.len() + self.recalls.len()
    }

    /// Entries that the kernel has, cancellations not counted.
    pub(crate) fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// The next cancellation to submit: its index, and the slot of the operation. All of them
    /// precede any [`Flights::next_ask`]: the slot must not belong to another operation by then.
    pub fn next_recall(&mut self) -> Option<(usize, u32)> {
        while let Some((index, recall)) = self.recalls.next_request() {
            let flight = self.slots[recall.slot as usize].as_ref();
            if flight.is_some_and(|flight| flight.tag() == recall.of) {
                return Some((index, recall.slot));
            }
            self.recalls.submitted();
            let (home, outcome) = (self.recalls.answered(index), Err(Status::INTERNAL_ERROR));
            self.ready.extend(home.map(|it| IoCompletion { tag: it.tag, buf: None, outcome }));
        }
        None
    }

    /// The cancellation that [`Flights::next_recall`] returned was submitted.
    pub fn recall_asked(&mut self) {
        self.recalls.submitted();
    }

    /// The next step to submit. [`Flights::submitted`] or [`Flights::not_submitted`] follows.
    pub fn next_ask(&mut self) -> Option<Submission> {
        loop {
            let slot = self.again.pop_front().or_else(|| self.take_slot())?;
            if let Some(ask) = self.next_submission(slot) {
                return Some(ask);
            }
        }
    }

    /// Its entry was submitted to the kernel.
    pub fn submitted(&mut self, _: Submission) {
        self.in_kernel += 1;
    }

    /// There was no room for it: it is the next one again.
    pub fn not_submitted(&mut self, ask: Submission) {
        if let Submission::Step(slot, Step::Sync) = ask {
            self.take_sync_back(slot);
        }
        self.again.push_front(ask.slot());
    }

    /// Drops everything that has not started.
    pub(super) fn drop_waiting(&mut self) {
        self.queue.clear();
        self.again.clear();
        self.attachments.iter_mut().flatten().for_each(|it| it.parked.clear());
    }

    /// Keeps the stores open for ever.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.attachments));
    }

    /// Fails an operation for which no entry can be built.
    pub(super) fn fail_invalid(&mut self, slot: u32) {
        tracing::error!(
            "invalid request: buffer outside the registered region or unknown device (bug)"
        );
        self.take_sync_back(slot);
        let done = self.complete(slot, Err(Status::INTERNAL_ERROR.with_dnr()));
        self.ready.extend(done);
    }

    /// The operation in a slot, for a driver that moves its data.
    pub fn flight_mut(&mut self, slot: u32) -> Option<&mut PendingIo> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// The store of the operation in a slot.
    pub fn backing_id(&self, slot: u32) -> Option<DeviceId> {
        Some(DeviceId(self.parts(slot)?.1.id))
    }

    /// The store that executes the operation in a slot: one that has replaced it since has none of
    /// its operations.
    pub fn store(&self, slot: u32) -> Option<&Arc<BackingDevice>> {
        Some(&self.parts(slot)?.1.backing)
    }

    /// Whether a store is attached under this id.
    pub fn is_attached(&self, id: DeviceId) -> bool {
        self.by_id.get(id.0 as usize).is_some_and(Option::is_some)
    }

    /// The store that is attached under this id.
    pub fn attached(&self, id: DeviceId) -> Option<&Arc<BackingDevice>> {
        let index = (*self.by_id.get(id.0 as usize)?)?;
        Some(&self.attachments.get(index as usize)?.as_ref()?.backing)
    }

    pub(super) fn parts(&self, slot: u32) -> Option<(&PendingIo, &Attachment)> {
        let flight = self.slots.get(slot as usize)?.as_ref()?;
        Some((flight, self.attachments[flight.attachment as usize].as_ref()?))
    }

    /// The next step of the operation in a slot; none if it waits for others, or has completed.
    pub(super) fn next_submission(&mut self, slot: u32) -> Option<Submission> {
        let flight = self.slots[slot as usize].as_mut()?;
        let backing = &self.attachments[flight.attachment as usize].as_ref()?.backing;
        if backing.is_lost() {
            // It has been replaced, and nothing more is executed there.
            self.fail(slot, nix::libc::ENODEV);
            return None;
        }
        let step = flight.step(backing);
        let step = backing.health().fault().cut(step, backing.block_size_bytes());
        if step == Step::Sync && !self.leads_sync(slot) {
            return None;
        }
        match self.verdict(slot, step) {
            Verdict::Wait => return Some(Submission::Pause(slot)),
            Verdict::Fail(errno) => {
                self.fail(slot, errno);
                return None;
            }
            Verdict::Go => {}
        }
        if step == Step::Sync {
            // Not before: an operation that waits for another fsync has not started its own.
            self.begin_sync(slot);
        }
        Some(Submission::Step(slot, step))
    }

    /// How an injected fault changes a step.
    fn verdict(&mut self, slot: u32, step: Step) -> Verdict {
        let Some(flight) = self.slots[slot as usize].as_mut() else { return Verdict::Go };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        attachment.map_or(Verdict::Go, |it| flight.verdict(step, &it.backing))
    }

    /// Takes the result of a step that the reactor has executed; false if there is another one.
    pub(super) fn copied(&mut self, slot: u32, answer: i32) -> bool {
        let Some(flight) = self.slots[slot as usize].as_mut() else { return true };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        let Some(outcome) = attachment.and_then(|it| flight.advance(answer, &it.backing)) else {
            return false;
        };
        let done = self.complete(slot, outcome);
        self.ready.extend(done);
        true
    }

    /// Handles a step as failed by the kernel.
    fn fail(&mut self, slot: u32, errno: i32) {
        let Some(flight) = self.slots[slot as usize].as_mut() else { return };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        let outcome = attachment.and_then(|it| flight.advance(-errno, &it.backing));
        let done = self.complete(slot, outcome.unwrap_or(Err(Status::INTERNAL_ERROR.with_dnr())));
        self.ready.extend(done);
    }
}

/// Whether the kernel's results are used as they are.
pub(super) fn is_faultless(backing: &BackingDevice) -> bool {
    backing.health().fault() == InjectedFault::None
}
