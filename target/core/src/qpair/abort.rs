//! Abort: ends commands that have changed nothing yet, or that a device returns. The response says of any
//! other command that it was not aborted.

use super::request::{Request, State, WaitReason};
use super::requests::Requests;
use crate::command::Plan;
use crate::sched::abort::AbortToken;
use nvmfd_blockdev::CancelRequest;

/// Marks the tag of a device's answer to the request to cancel an operation.
const CANCEL: u64 = 1 << 16;

/// Action for a command to abort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Aborting {
    /// No change now: the command continues, or ends with its next step.
    Nothing,
    /// It waits, and is completed.
    EndWaiting,
    /// It waits for its range lock, and is completed.
    EndLocked,
    /// Its device is requested to cancel its operation.
    Cancel,
}

/// Whether a tag identifies a request to cancel rather than an operation.
pub(super) fn is_about_cancel(tag: u64) -> bool {
    tag & CANCEL != 0
}

/// Records that a command is to be aborted. If several Abort commands name it, the outcome is
/// reported to each.
pub(super) fn begin(entry: &mut Request, token: &AbortToken) -> Aborting {
    let is_wanted = entry.ext().is_some_and(|ext| !ext.aborts.is_empty());
    let action = match (entry.state(), &entry.plan) {
        (State::Waiting(WaitReason::RangeLock), _) => Aborting::EndLocked,
        (State::Pulling | State::Waiting(WaitReason::FusedWrite), _) => Aborting::Nothing,
        (State::Waiting(_), Plan::Abort { .. } | Plan::Disconnect | Plan::Reply(_)) => {
            return Aborting::Nothing;
        }
        (State::Waiting(_), _) => Aborting::EndWaiting,
        // The device was requested to cancel already, or has returned the piece in progress.
        (State::AtDevice | State::Offloaded, _) if is_wanted => Aborting::Nothing,
        (State::AtDevice, plan) if is_cancellable(plan) && !entry.cancelling => Aborting::Cancel,
        _ => return Aborting::Nothing,
    };
    entry.make_ext().aborts.push(token.clone());
    action
}

/// Handles the answer of a device to the request to cancel. An operation that continues completes
/// as if there had been no request; no Abort command has to wait for it. (A command that is already
/// being completed ended otherwise, and its Abort commands are answered accordingly.)
pub(super) fn on_cancelled(entry: &mut Request, is_cancelled: bool) {
    entry.cancelling = false;
    let goes_on = matches!(
        entry.state(),
        State::AtDevice | State::Offloaded | State::Waiting(WaitReason::RangeLock)
    );
    if !is_cancelled
        && goes_on
        && let Some(ext) = entry.ext_mut()
    {
        ext.aborts.clear();
    }
}

/// Returns the request to cancel the operation of a command, to be sent to its device now.
pub(super) fn cancel(requests: &mut Requests, slot: u16) -> CancelRequest {
    let of = requests.tag(slot);
    requests[slot].cancelling = true;
    requests.outstanding += 1;
    CancelRequest { of, tag: of | CANCEL }
}

/// Returns the same for all operations that a device may not have begun.
pub(super) fn cancel_all(requests: &mut Requests) -> Vec<CancelRequest> {
    if requests.outstanding == 0 {
        return Vec::new();
    }
    let slots = requests.numbered().filter(|(_, entry)| {
        entry.state() == State::AtDevice && is_cancellable(&entry.plan) && !entry.cancelling
    });
    let slots: Vec<u16> = slots.map(|(slot, _)| slot).collect();
    slots.into_iter().map(|slot| cancel(requests, slot)).collect()
}

/// Whether operations of a plan are executed by a device, not by a worker, and only its host waits
/// for them.
fn is_cancellable(plan: &Plan) -> bool {
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
