//! Fused commands: Compare and Write, two capsules one behind the other, carried out as one step.
//!
//! The first waits for the second. Then the data of both are pulled, the blocks are claimed, loaded
//! and compared, and written when they are alike; nobody else changes them meanwhile. When one half
//! fails before the write has begun, so does the other.
//!
//! Source: NVMe Base Specification 2.0, "Fused Operation"; NVM Command Set Specification 1.0,
//! "Fused Operation".

use nvme::sqe::Flags;
use nvme::{Sqe, Status};

use super::{Io, QueuePair, QueueRole, State, WaitReason};
use crate::blockdev::IoRequest;
use crate::core::command::Plan;
use crate::core::stats::Stage;
use crate::core::subsystem::Namespace;

/// What has become of the first half of a fused command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum FusedState {
    /// There was none: the last command was no such half.
    #[default]
    None,
    /// It waits in this slot.
    Held(u16),
    /// It was answered already, with an error.
    Failed,
}

/// The other half has failed.
const FAILED: Status = Status::ABORTED_FAILED_FUSED.with_dnr();

impl QueuePair {
    /// Nobody but this daemon changes the blocks between the halves.
    fn may_fuse(&self, sqe: &Sqe) -> Result<(), Status> {
        let QueueRole::Io { subsystem, .. } = &self.serves else { return Ok(()) };
        match subsystem.namespace(sqe.nsid).is_ok_and(Namespace::is_shared) {
            true => Err(Status::INVALID_FIELD.with_dnr()),
            false => Ok(()),
        }
    }

    /// A command that is half of a fused one, or comes behind a first half.
    pub(super) fn on_half(&mut self, slot: u16, sqe: &Sqe, tail_bytes: u32, io: &mut Io<'_>) {
        let half = std::mem::take(&mut self.half);
        let may_be_fused = matches!(self.serves, QueueRole::Io { .. }) && !sqe.is_fabrics();
        let fuse = if may_be_fused { sqe.flags.fuse() } else { 0 };
        if let FusedState::Held(first) = half
            && fuse != Flags::FUSED_SECOND
        {
            self.answer(first, Err(Status::ABORTED_MISSING_FUSED.with_dnr()), io);
        }
        let alone = sqe.with_flags(sqe.flags.with_fuse(0));
        match (fuse, half) {
            (Flags::FUSED_FIRST, _) => {
                let plan = self.decide(slot, &alone, tail_bytes, io);
                match plan.and_then(|plan| self.may_fuse(sqe).and_then(|()| first(sqe, plan))) {
                    Ok(plan) => {
                        let entry = self.slot(slot);
                        entry.enter(State::Waiting(WaitReason::FusedPartner));
                        entry.plan = plan;
                        self.half = FusedState::Held(slot);
                    }
                    Err(status) => {
                        self.answer(slot, Err(status), io);
                        self.half = FusedState::Failed;
                    }
                }
            }
            (Flags::FUSED_SECOND, FusedState::Held(first)) => {
                let plan = self.decide(slot, &alone, tail_bytes, io);
                self.pair(first, slot, plan, io);
            }
            (Flags::FUSED_SECOND, FusedState::Failed) => self.answer(slot, Err(FAILED), io),
            (Flags::FUSED_SECOND, FusedState::None) => {
                self.answer(slot, Err(Status::ABORTED_MISSING_FUSED.with_dnr()), io);
            }
            _ => {
                let plan = self.decide(slot, sqe, tail_bytes, io);
                self.start(slot, plan, io);
            }
        }
    }

    fn pair(&mut self, first: u16, second: u16, plan: Result<Plan, Status>, io: &mut Io<'_>) {
        let invalid = Status::INVALID_FIELD.with_dnr();
        let [nsid, other] = [first, second].map(|half| self.slot(half).sqe.nsid);
        let (of_first, of_second) = match (&self.slot(first).plan, &plan) {
            (
                Plan::Compare { backing, at, from },
                Ok(Plan::Store { backing: to, at: there, from: data, .. }),
            ) if (backing, at, from.len_bytes()) == (to, there, data.len_bytes()) => {
                return self.start_pair(first, second, plan, io);
            }
            (Plan::Compare { backing, .. }, Ok(Plan::Store { backing: to, .. }))
                if backing != to && nsid == other =>
            {
                // The namespace that the first half was for has gone: another one has its number now.
                (Status::INVALID_NAMESPACE.with_dnr(), FAILED)
            }
            (_, Ok(Plan::Store { .. })) => (invalid, invalid),
            (_, Ok(_)) => (FAILED, invalid),
            (_, Err(status)) => (FAILED, *status),
        };
        self.answer(first, Err(of_first), io);
        self.answer(second, Err(of_second), io);
    }

    fn start_pair(&mut self, first: u16, second: u16, plan: Result<Plan, Status>, io: &mut Io<'_>) {
        let Ok(plan) = plan else { return };
        let entry = self.slot(first);
        entry.enter(State::Waiting(WaitReason::Buffers));
        entry.mate = Some(second);
        let entry = self.slot(second);
        entry.enter(State::Waiting(WaitReason::FusedPartner));
        entry.plan = plan;
        entry.mate = Some(first);
        // The first half stands in line for both.
        self.enter(first, io);
    }

    /// The data of one half are here: when those of the other are as well, it begins.
    pub(super) fn on_half_pulled(&mut self, slot: u16, mate: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        entry.enter(State::Pulling);
        entry.clock.enter(Stage::Wait, io.now_ns);
        let other = self.slot(mate);
        if other.state() != State::Pulling || other.posted > 0 {
            return;
        }
        let compares = matches!(self.slot(slot).plan, Plan::Compare { .. });
        let (first, second) = if compares { (slot, mate) } else { (mate, slot) };
        for half in [first, second] {
            let refused = || self.may_begin_at(half, None).err();
            if let Some(status) = self.ends_early(half).or_else(refused) {
                return self.answer(half, Err(status), io);
            }
        }
        let entry = self.slot(first);
        let into = entry.make_rare().second.take();
        let (Plan::Compare { backing, at, from }, Some(into)) = (&entry.plan, into) else {
            return self.answer(first, Err(Status::INTERNAL_ERROR), io);
        };
        let (backing, at, len) = (*backing, *at, from.len_bytes());
        self.take_turn(first, backing, IoRequest::Read { into, at }, Some((at, len.into())), io);
    }

    /// The blocks are what the first half says. The second has them now.
    pub(super) fn write_behind(&mut self, first: u16, second: u16, io: &mut Io<'_>) {
        let entry = self.slot(first);
        entry.enter(State::Waiting(WaitReason::FusedWrite));
        let turn = std::mem::take(&mut entry.turn);
        let entry = self.slot(second);
        entry.turn = turn;
        if let Plan::Store { backing, at, fua, .. } = entry.plan {
            let buf = entry.data.take().or_else(|| entry.capsule.take());
            self.submit(second, backing, buf.map(|from| IoRequest::Write { from, at, fua }), io);
        }
    }

    /// The write of a fused command is home, however it went: the comparison had succeeded.
    pub(super) fn end_pair(&mut self, second: u16, io: &mut Io<'_>) {
        let entry = self.slot(second);
        if matches!(entry.plan, Plan::Store { .. })
            && let Some(first) = entry.mate.take()
        {
            self.slot(first).mate = None;
            self.answer(first, Ok(0), io);
        }
    }

    /// One half was answered, so the other has none any more: it fails, or it is on its own.
    pub(super) fn part(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        if self.half == FusedState::Held(slot) {
            self.half = FusedState::Failed;
        }
        let Some(mate) = self.slot(slot).mate.take() else { return };
        let entry = self.slot(mate);
        entry.mate = None;
        let state = entry.state();
        match (state, entry.posted) {
            _ if status.is_success() => {}
            (State::Pulling, 1..) => entry.doomed = true,
            (State::Pulling | State::Waiting(WaitReason::FusedWrite), _) => {
                self.answer(mate, Err(FAILED), io);
            }
            _ if state.has_not_begun() => {
                // The first half stands in line for both, and may be the one that is left.
                self.leave_line(mate, io);
                self.answer(mate, Err(FAILED), io);
            }
            _ => {}
        }
    }
}

/// A first half: Compare, of no more than what is written at once whatever happens (ACWU).
fn first(sqe: &Sqe, plan: Plan) -> Result<Plan, Status> {
    match plan {
        Plan::Compare { .. } if sqe.blocks() > 1 => {
            Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr())
        }
        Plan::Compare { .. } => Ok(plan),
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}
