//! Reservation commands, write protection, and the end of commands whose host was preempted.

use std::sync::Arc;

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};

use super::{Io, Link, QueuePair, QueueRole, State};
use crate::core::command::Plan;
use crate::core::sched::DrainBarrier;
use crate::core::sched::offload::{Job, ReplyTo, ReservationRequest, WriteProtectRequest};
use crate::core::stats::Stage;
use crate::core::subsystem::reservation::{Order, Reservation};
use crate::core::subsystem::write_protect::Protection;

impl QueuePair {
    /// Hands an order to the keeper. Its answer comes home as that of a disk does: until then the
    /// slot is taken, and the queue is not finished.
    pub(super) fn ask_keeper(
        &mut self,
        slot: u16,
        of: Vec<Arc<Reservation>>,
        order: Order,
        io: &mut Io<'_>,
    ) {
        let Some(association) = self.association() else {
            return self.answer(slot, Err(Status::INTERNAL_ERROR), io);
        };
        if association.host == Nqn::UNNAMED {
            // Nobody could say later whose reservation it is.
            return self.answer(slot, Err(Status::OPERATION_DENIED.with_dnr()), io);
        }
        let tag = self.tag(slot);
        let host = association.host_id;
        let request = ReservationRequest { of, host, order, reactor: io.reactor, tag };
        self.offload(slot, Job::Reserve(request), io);
    }

    /// Hands a wish about write protection to the keeper; the rest as for reservations.
    pub(super) fn protect(
        &mut self,
        slot: u16,
        of: Vec<Arc<Protection>>,
        state: WriteProtectState,
        io: &mut Io<'_>,
    ) {
        let from = ReplyTo::Reactor(io.reactor, self.tag(slot));
        self.offload(slot, Job::Protect(WriteProtectRequest { of, state, from }), io);
    }

    /// Hands a job over; its answer is a completion of the slot.
    pub(super) fn offload(&mut self, slot: u16, job: Job, io: &mut Io<'_>) {
        match io.shared.offload.submit(job) {
            true => {
                self.slot(slot).enter(State::Offloaded);
                self.at_disk += 1;
            }
            false => self.answer(slot, Err(Status::INTERNAL_ERROR), io),
        }
    }

    /// The keys of a reservation command are here.
    pub(super) fn reserve(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.slots[usize::from(slot)];
        let Plan::Reserve { of, .. } = &entry.plan else { return };
        let of = vec![Arc::clone(of)];
        entry.clock.enter(Stage::Wait, io.now_ns);
        match Order::parse(&entry.sqe, entry.bytes(io.pool)) {
            Ok(order) => self.ask_keeper(slot, of, order, io),
            Err(status) => self.answer(slot, Err(status), io),
        }
    }

    /// Hosts were preempted, or namespaces write protected, and commands shall end: what has not
    /// begun ends here, what is under way holds the fence until it is home. Nothing is recalled from
    /// a disk.
    pub fn on_fence(&mut self, fence: &Arc<DrainBarrier>, io: &mut Io<'_>) {
        let is_admin = matches!(self.serves, QueueRole::Admin(_));
        let Some(association) = self.association() else { return };
        if association.subsystem != fence.subsystem
            || !fence.concerns(&association.host_id, is_admin)
        {
            return;
        }
        for slot in 0..self.slots.len() as u16 {
            let entry = self.slot(slot);
            if matches!(entry.state(), State::Free | State::Replying) {
                continue;
            }
            let waits = entry.state().has_not_begun();
            // A fabrics command names no namespace: its type lies where others have one.
            if entry.sqe.is_fabrics() || !fence.ends(entry.plan.io_class(), entry.sqe.nsid) {
                continue;
            }
            match waits && self.link == Link::Open {
                true => {
                    self.leave_line(slot, io);
                    self.answer(slot, Err(fence.status()), io);
                }
                false => self.slot(slot).make_rare().fences.push(Arc::clone(fence)),
            }
        }
    }

    /// Why a command has to end before it has done (or gone on with) anything: its host was
    /// preempted, or wants it to, or the namespace was write protected.
    pub(super) fn ends_early(&self, slot: u16) -> Option<Status> {
        let entry = &self.slots[usize::from(slot)];
        let more_to_do = matches!(
            entry.plan,
            Plan::Deallocate { .. } | Plan::Zero { .. } | Plan::Copy { .. } | Plan::Verify { .. }
        );
        if entry.state() != State::Pulling && !more_to_do {
            return None;
        }
        let wanted = entry.rare().map(|rare| (rare.fences.first(), !rare.errands.is_empty()));
        match wanted.unwrap_or_default() {
            (Some(fence), _) => Some(fence.status()),
            (None, true) => Some(Status::ABORT_REQUESTED),
            (None, false) => self.leaver.map(|_| Status::ABORTED_SQ_DELETION),
        }
    }
}
