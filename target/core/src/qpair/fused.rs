//! Fused commands: Compare and Write, two consecutive capsules, executed as one step.
//!
//! The first waits for the second. Then the data of both are pulled, the blocks are locked, loaded and
//! compared, and written if they are equal; no other command changes them meanwhile. If one half fails
//! before the write has begun, the other fails as well.
//!
//! Source: NVMe Base Specification 2.0, "Fused Operation"; NVM Command Set Specification 1.0,
//! "Fused Operation".

use nvme::{Sqe, Status};

use super::request::{Request, State, WaitReason};
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::Plan;
use crate::subsystem::Namespace;

/// State of the first half of a fused command, if that was the last command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum FusedState {
    /// The last command was no first half.
    #[default]
    None,
    /// It waits in this slot.
    Held(u16),
    /// It was completed already, with an error.
    Failed,
}

/// Status of a half whose other half has failed.
pub(super) const FAILED: Status = Status::ABORTED_FAILED_FUSED.with_dnr();

/// Effect on the other half of a fused command when one was completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Partner {
    /// There is none, or it continues alone.
    GoesOn,
    /// It fails.
    Fails(u16),
    /// It fails, and waits no longer.
    FailsWaiting(u16),
}

impl FusedState {
    /// Separates the halves when a command was completed that is half of a fused command: the other
    /// one fails, or continues alone.
    pub(super) fn part(&mut self, requests: &mut Requests, slot: u16, status: Status) -> Partner {
        if *self == FusedState::Held(slot) {
            *self = FusedState::Failed;
        }
        let Some(other) = requests[slot].ext_mut().and_then(|ext| ext.fused_with.take()) else {
            return Partner::GoesOn;
        };
        let entry = &mut requests[other];
        entry.make_ext().fused_with = None;
        let state = entry.state();
        match (state, entry.posted) {
            _ if status.is_success() => Partner::GoesOn,
            (State::Pulling, 1..) => {
                entry.make_ext().fused_failed = true;
                Partner::GoesOn
            }
            (State::Pulling | State::Waiting(WaitReason::FusedWrite), _) => Partner::Fails(other),
            // The first half waits for both, and may be the remaining one.
            _ if state.has_not_begun() => Partner::FailsWaiting(other),
            _ => Partner::GoesOn,
        }
    }
}

/// Checks a first half: a Compare of no more than the atomic compare and write unit (ACWU), of a
/// namespace whose blocks only this daemon changes between the halves.
pub(super) fn check_first(sqe: &Sqe, plan: Plan, role: &QueueRole) -> Result<Plan, Status> {
    if let QueueRole::Io { subsystem, .. } = role
        && subsystem.namespace(sqe.nsid).is_ok_and(Namespace::is_shared)
    {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    match plan {
        Plan::Compare { .. } if sqe.blocks() > 1 => {
            Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr())
        }
        Plan::Compare { .. } => Ok(plan),
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

/// Joins both halves; `plan` is that of the second.
///
/// # Errors
/// The status of each half, if they form no fused command.
pub(super) fn join(
    requests: &mut Requests,
    first: u16,
    second: u16,
    plan: Result<Plan, Status>,
) -> Result<(), (Status, Status)> {
    let invalid = Status::INVALID_FIELD.with_dnr();
    let [nsid, other] = [first, second].map(|half| requests[half].sqe.nsid);
    match (&requests[first].plan, &plan) {
        (
            Plan::Compare { backing, at, from },
            Ok(Plan::Store { backing: to, at: there, from: data, .. }),
        ) if (backing, at, from.len_bytes()) == (to, there, data.len_bytes()) => {}
        (Plan::Compare { backing, .. }, Ok(Plan::Store { backing: to, .. }))
            if backing != to && nsid == other =>
        {
            // The namespace of the first half was removed: another one has its NSID now.
            return Err((Status::INVALID_NAMESPACE.with_dnr(), FAILED));
        }
        (_, Ok(Plan::Store { .. })) => return Err((invalid, invalid)),
        (_, Ok(_)) => return Err((FAILED, invalid)),
        (_, Err(status)) => return Err((FAILED, *status)),
    }
    let entry = &mut requests[first];
    entry.enter(State::Waiting(WaitReason::Buffers));
    entry.make_ext().fused_with = Some(second);
    let entry = &mut requests[second];
    entry.enter(State::Waiting(WaitReason::FusedPartner));
    entry.make_ext().fused_with = Some(first);
    if let Ok(plan) = plan {
        entry.plan = plan;
    }
    Ok(())
}

/// Records that the data of one half have arrived; if those of the other have too, returns the
/// first half and the second.
pub(super) fn on_pulled(requests: &mut Requests, slot: u16, other: u16) -> Option<(u16, u16)> {
    requests[slot].enter(State::Pulling);
    let entry = &requests[other];
    if entry.state() != State::Pulling || entry.posted > 0 {
        return None;
    }
    let compares = matches!(requests[slot].plan, Plan::Compare { .. });
    Some(if compares { (slot, other) } else { (other, slot) })
}

/// Passes the range lock to the second half, after the comparison has succeeded.
pub(super) fn pass_lock(requests: &mut Requests, first: u16, second: u16) {
    let entry = &mut requests[first];
    entry.enter(State::Waiting(WaitReason::FusedWrite));
    let lock = std::mem::take(&mut entry.lock);
    requests[second].lock = lock;
}

/// Returns the first half when the write of a fused command has completed or failed: it is
/// completed now, because the comparison has succeeded.
pub(super) fn end_write(requests: &mut Requests, second: u16) -> Option<u16> {
    let entry = &mut requests[second];
    if !matches!(entry.plan, Plan::Store { .. }) {
        return None;
    }
    let first = entry.ext_mut()?.fused_with.take()?;
    requests[first].make_ext().fused_with = None;
    Some(first)
}

/// Returns the other half of a fused command with a status, if it may not begin any more.
pub(super) fn refused(
    requests: &Requests,
    entry: &Request,
    role: &QueueRole,
) -> Option<(u16, Status)> {
    let other = entry.fused_with()?;
    let status = role.may_begin_at(&requests[other], None).err()?;
    Some((other, status))
}

pub(super) fn separate(requests: &mut Requests, halves: [u16; 2]) {
    for half in halves {
        if let Some(ext) = requests[half].ext_mut() {
            ext.fused_with = None;
        }
    }
}
