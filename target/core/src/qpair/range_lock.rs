//! Operations that change blocks, and their range locks ([`crate::sched::range_lock`]).

use super::Io;
use super::bad_blocks;
use super::request::{Request, State, WaitReason};
use super::requests::Requests;
use crate::command::Plan;
use crate::sched::range_lock::RangeLock;
use crate::stats::Stage;
use nvmfd_blockdev::{DeviceId, IoRequest};

/// State of an operation with regard to range locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum LockState {
    /// It changes no blocks, or there is no operation.
    #[default]
    None,
    /// It changes blocks, by byte offset and length, and holds no lock.
    Unclaimed(u64, u64),
    /// It has requested a lock, with this ticket.
    Claimed(u64),
}

/// The requests of a queue pair that wait for a range lock.
#[derive(Debug, Default)]
pub(super) struct RangeLockState {
    waiting: u16,
}

impl RangeLockState {
    /// Locks the range of bytes that an operation changes, or needs exclusively; returns whether it
    /// may proceed.
    #[inline]
    pub(super) fn lock(
        entry: &mut Request,
        backing: DeviceId,
        changes: Option<(u64, u64)>,
        exclusive: Option<(u64, u64)>,
        io: &Io<'_>,
    ) -> bool {
        let Some((at, len)) = exclusive.or(changes) else { return true };
        if matches!(entry.lock, LockState::Claimed(_)) {
            return true;
        }
        if exclusive.is_none() && begin_unlocked(entry, backing, (at, len), io) {
            return true;
        }
        let alone = exclusive.is_some();
        let lock = RangeLock { backing, at, len, alone, reactor: io.reactor };
        let (ticket, granted) = io.shared.range_locks.claim(lock);
        entry.lock = LockState::Claimed(ticket);
        granted
    }

    /// Keeps an operation until its lock is granted.
    #[cold]
    pub(super) fn wait(
        &mut self,
        entry: &mut Request,
        waiting_op: (DeviceId, IoRequest),
        now_ns: u64,
    ) {
        entry.clock.enter(Stage::Wait, now_ns);
        entry.enter(State::Waiting(WaitReason::RangeLock));
        entry.make_ext().waiting_op = Some(waiting_op);
        self.waiting += 1;
    }

    /// Whether any request waits.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Takes the operation of a request that waits, and no longer waits.
    pub(super) fn take_waiting(&mut self, entry: &mut Request) -> Option<(DeviceId, IoRequest)> {
        let waiting = entry.ext_mut()?.waiting_op.take()?;
        self.waiting -= 1;
        Some(waiting)
    }
}

/// Lets an operation that changes `blocks`, by byte offset and length, begin without a lock; false if
/// they have to be locked.
#[inline(always)]
pub(super) fn begin_unlocked(
    entry: &mut Request,
    backing: DeviceId,
    (at, len): (u64, u64),
    io: &Io<'_>,
) -> bool {
    let none = !io.shared.range_locks.is_watching(backing);
    if none {
        entry.lock = LockState::Unclaimed(at, len);
    }
    none
}

/// Locks the blocks of an operation that a device still has when its connection is closed, until it
/// completes: later changes wait.
pub(super) fn orphan(entry: &mut Request, io: &Io<'_>) {
    let locks = &io.shared.range_locks;
    match entry.lock {
        LockState::Claimed(ticket) => locks.leave_claimed(ticket),
        _ => lock_begun(entry, io, |lock| locks.leave(lock)),
    }
}

/// Locks the blocks of an operation that began without a lock.
fn lock_begun(entry: &mut Request, io: &Io<'_>, lock: impl FnOnce(RangeLock) -> u64) {
    let LockState::Unclaimed(at, len) = entry.lock else { return };
    let Some(backing) = entry.plan.backing() else { return };
    let range = RangeLock { backing, at, len, alone: false, reactor: io.reactor };
    entry.lock = LockState::Claimed(lock(range));
}

/// Returns the operation of a request that waits, if its lock is granted.
pub(super) fn granted<'a>(entry: &'a Request, io: &Io<'_>) -> Option<&'a IoRequest> {
    let (_, op) = entry.ext()?.waiting_op.as_ref()?;
    let LockState::Claimed(ticket) = entry.lock else { return None };
    io.shared.range_locks.is_granted(ticket).then_some(op)
}

/// Releases the lock of a completed operation. A fused command keeps it between its halves, and a
/// command that makes blocks readable until the marks are removed.
#[inline]
pub(super) fn end_op(entry: &mut Request, io: &Io<'_>) {
    if entry.has_ext() {
        let between = entry.fused_with().is_some() && matches!(entry.plan, Plan::Compare { .. });
        if between || bad_blocks::keeps_lock(entry) {
            return;
        }
    }
    unlock(entry, io);
}

/// Releases the lock of a command, granted or not.
#[inline(always)]
pub(super) fn unlock(entry: &mut Request, io: &Io<'_>) {
    match std::mem::take(&mut entry.lock) {
        LockState::None | LockState::Unclaimed(..) => {}
        LockState::Claimed(ticket) => io.shared.range_locks.give_up(ticket),
    }
}

/// Locks the blocks of all changes in progress that began without a lock.
pub(super) fn claim_begun(requests: &mut Requests, io: &Io<'_>) {
    for entry in requests.iter_mut() {
        lock_begun(entry, io, |lock| io.shared.range_locks.claim_begun(lock));
    }
}
