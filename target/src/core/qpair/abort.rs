//! Abort: commands end at their host's wish, when they have done nothing yet or a disk gives them
//! back. Whatever goes on is said to go on.

use nvme::Status;

use super::{Io, Link, QueuePair, QueueRole, State, WaitReason};
use crate::blockdev::CancelRequest;
use crate::core::command::Plan;
use crate::core::sched::abort::AbortToken;

/// Marks the tag of a disk's answer to the wish to have an operation back.
const RECALL: u64 = 1 << 16;

impl QueuePair {
    /// An Abort command begins. It waits until the command that it names has ended or is known to
    /// go on.
    pub(super) fn abort(&mut self, slot: u16, sqid: u16, cid: u16, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.serves else {
            return self.answer(slot, Err(Status::INVALID_OPCODE.with_dnr()), io);
        };
        let (recall, errand) =
            io.shared.registry.recall(controller.association.id, sqid, cid, io.reactor);
        controller.aborts.push((slot, recall));
        match sqid == self.request.qid {
            true => self.on_errand(&errand, io),
            false => io.shared.registry.send_errand(errand),
        }
        // Whatever is known already is answered with the events.
    }

    /// An Abort command of the association looks for its command.
    pub fn on_errand(&mut self, errand: &AbortToken, io: &mut Io<'_>) {
        let Some(association) = self.association() else { return };
        // Anybody can claim a queue of this number, and would answer for the host's own.
        let is_its_own = self.link == Link::Open && self.is_admitted();
        if !is_its_own || !errand.is_for(association.id, self.request.qid) {
            return;
        }
        let named = self.slots.iter().position(|entry| {
            entry.sqe.cid == errand.cid() && !matches!(entry.state(), State::Free | State::Replying)
        });
        if let Some(slot) = named {
            self.recall(slot as u16, errand, io);
        }
    }

    /// The answer of a command has reached its host. If that was aborted, its Abort commands are
    /// answered from now on: on another queue, and so on another connection, nothing else keeps their
    /// answers from overtaking.
    #[inline]
    pub(super) fn settle_errands(&mut self, slot: u16) {
        if let Some(rare) = self.slot(slot).rare_mut() {
            rare.errands.drain(..).for_each(AbortToken::succeed);
        }
    }

    /// The disk has heard the wish to have an operation back.
    pub fn on_recalled(&mut self, slot: u16, outcome: Result<(), Status>, io: &mut Io<'_>) {
        self.at_disk -= 1;
        let entry = self.slot(slot);
        entry.recalling = false;
        let goes_on = matches!(
            entry.state(),
            State::AtDevice | State::Offloaded | State::Waiting(WaitReason::RangeLock)
        );
        if outcome.is_err() && goes_on {
            // It comes home as if nobody had asked; no Abort command need wait for that. (One that is
            // being answered already was given back otherwise, and is told so.)
            if let Some(rare) = entry.rare_mut() {
                rare.errands.clear();
            }
        }
        self.raise_events(io);
    }

    /// Answers the Abort commands of which it is known what they have come to.
    pub(super) fn answer_aborts(&mut self, io: &mut Io<'_>) {
        while let QueueRole::Admin(controller) = &mut self.serves
            && let Some(at) =
                controller.aborts.iter().position(|(_, recall)| recall.outcome().is_some())
        {
            let (slot, recall) = controller.aborts.remove(at);
            self.answer(slot, Ok(u64::from(recall.outcome() != Some(true))), io);
        }
    }

    /// Whether a tag of this queue's is about a wish, not about the operation.
    #[must_use]
    pub fn is_about_recall(tag: u64) -> bool {
        tag & RECALL != 0
    }

    /// The connection is over: whatever disks have not begun comes back, before they begin it, and with
    /// it its buffers. They may hang, and keep the rest for as long.
    pub(super) fn recall_all(&mut self, io: &mut Io<'_>) {
        if self.at_disk == 0 {
            return;
        }
        let slots = (0u16..).zip(&self.slots).filter(|(_, entry)| {
            entry.state() == State::AtDevice && is_recallable(&entry.plan) && !entry.recalling
        });
        let slots: Vec<u16> = slots.map(|(slot, _)| slot).collect();
        let wishes: Vec<CancelRequest> = slots.into_iter().map(|slot| self.wish(slot)).collect();
        if !wishes.is_empty() {
            io.disk.recall_all(&wishes);
        }
    }

    fn recall(&mut self, slot: u16, errand: &AbortToken, io: &mut Io<'_>) {
        let entry = &mut self.slots[usize::from(slot)];
        // Of several Abort commands for one command, each is told what becomes of it.
        let copy = || errand.clone();
        let is_wanted = entry.rare().is_some_and(|rare| !rare.errands.is_empty());
        match (entry.state(), &entry.plan) {
            (State::Waiting(WaitReason::RangeLock), _) => {
                entry.make_rare().errands.push(copy());
                self.end_held_back(slot, Status::ABORT_REQUESTED, io);
            }
            (State::Pulling | State::Waiting(WaitReason::FusedWrite), _) => {
                entry.make_rare().errands.push(copy());
            }
            (State::Waiting(_), Plan::Abort { .. } | Plan::Disconnect | Plan::Reply(_)) => {}
            (State::Waiting(_), plan) => {
                if *plan == Plan::Park
                    && let QueueRole::Admin(controller) = &mut self.serves
                {
                    controller.events.unpark(slot);
                }
                entry.make_rare().errands.push(copy());
                self.leave_line(slot, io);
                self.answer(slot, Err(Status::ABORT_REQUESTED), io);
            }
            // The disk has been asked already, or has given the piece back that was under way.
            (State::AtDevice | State::Offloaded, _) if is_wanted => {
                entry.make_rare().errands.push(copy())
            }
            (State::AtDevice, plan) if is_recallable(plan) && !entry.recalling => {
                entry.make_rare().errands.push(copy());
                let CancelRequest { of, tag } = self.wish(slot);
                io.disk.recall(tag, of);
            }
            _ => {}
        }
    }

    /// A wish to have an operation back, which goes to the disk now.
    fn wish(&mut self, slot: u16) -> CancelRequest {
        let of = self.tag(slot);
        self.slot(slot).recalling = true;
        self.at_disk += 1;
        CancelRequest { of, tag: of | RECALL }
    }
}

/// Whether what is under way for a plan is at a disk, rather than at the keeper of reservations,
/// and nobody but its host waits for it.
fn is_recallable(plan: &Plan) -> bool {
    matches!(
        plan,
        Plan::Load { .. }
            | Plan::Store { .. }
            | Plan::Compare { .. }
            | Plan::Flush { .. }
            | Plan::Deallocate { .. }
            | Plan::Zero { .. }
            | Plan::Copy { .. }
            | Plan::Verify { .. }
    )
}
