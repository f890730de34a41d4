//! Limits ([`crate::core::subsystem::rate_limit`]): a command that is under one waits until its time has come, then for
//! buffers as any other.

use std::sync::Arc;
use std::time::Instant;

use super::{Io, Link, QueuePair, QueueRole, State, WaitReason};
use crate::core::command::Plan;
use crate::core::sched::buffers::TryAlloc;
use crate::core::subsystem::rate_limit::{Grant, Limiter, book_all};

/// What limits the commands of a queue.
#[derive(Debug, Default)]
pub(super) struct Quota {
    /// Its host is limited, or some namespace of its subsystem.
    limited: bool,
    of_host: Vec<Arc<Limiter>>,
}

impl QueuePair {
    /// A command waits for what it needs: the time that limits give it, then buffers.
    pub(super) fn enter(&mut self, slot: u16, io: &mut Io<'_>) {
        if !self.quota.limited || !self.waits_for_limits(slot, io) {
            self.stand_in_line(slot, io);
        }
    }

    /// The time of a command that was limited has come.
    pub fn begin(&mut self, slot: u16, io: &mut Io<'_>) {
        let is_limited = self.slot(slot).state() == State::Waiting(WaitReason::RateLimit);
        if self.link == Link::Open && is_limited {
            self.slot(slot).enter(State::Waiting(WaitReason::Buffers));
            self.stand_in_line(slot, io);
        }
    }

    /// Books the time of a command; none: nothing limits it any more.
    #[must_use]
    pub fn book(&self, slot: u16, now: Instant) -> Option<Grant> {
        let bytes = self.bytes_moved(slot)?;
        book_all(self.limiters(slot), now, bytes)
    }

    /// A command no longer waits for limits and buffers: it ends before it has begun.
    pub(super) fn leave_line(&self, slot: u16, io: &mut Io<'_>) {
        if let Some(booking) = io.waiters.remove(self.key, slot) {
            self.give_back(slot, &booking, io.now);
        }
    }

    /// Gives back what a command has booked that will not begin as it is.
    pub fn give_back(&self, slot: u16, booking: &Grant, now: Instant) {
        self.limiters(slot).for_each(|limiter| limiter.give_back(now, booking.bytes));
    }

    /// Books bytes of a command that is under way.
    pub(super) fn charge(&self, slot: u16, bytes: u64, now: Instant) {
        if self.quota.limited {
            self.limiters(slot).for_each(|limiter| limiter.charge(now, bytes));
        }
    }

    /// Looks up what limits this queue, because that may be something else now.
    pub(super) fn find_limits(&mut self) {
        let QueueRole::Io { association, subsystem, .. } = &self.serves else { return };
        let of_host = subsystem.host_limiters.get(&association.host).cloned().unwrap_or_default();
        let limited = subsystem.namespaces.iter().any(|n| !n.limiters.is_empty());
        self.quota = Quota { limited: limited || !of_host.is_empty(), of_host };
    }

    fn waits_for_limits(&mut self, slot: u16, io: &mut Io<'_>) -> bool {
        let entry = &self.slots[usize::from(slot)];
        let (nsid, Some(share)) = (entry.sqe.nsid, self.share) else { return false };
        if self.bytes_moved(slot).is_none() || self.limiters(slot).next().is_none() {
            return false;
        }
        let booked = match io.waiters.tolls.may_book(share, nsid) {
            true => self.book(slot, io.now),
            false => None,
        };
        if booked.is_some_and(|booking| booking.start <= io.now) {
            return false;
        }
        io.waiters.tolls.push(share, (self.key, slot), nsid, booked);
        self.slot(slot).enter(State::Waiting(WaitReason::RateLimit));
        true
    }

    /// Stands in line for buffers.
    fn stand_in_line(&mut self, slot: u16, io: &mut Io<'_>) {
        self.spare_receives(slot, io);
        // What needs no buffer takes none from those who wait.
        let want = self.want(slot);
        let may_try = want.all_bytes == 0 || io.waiters.may_try(self.share, want.store);
        let tried = may_try.then(|| self.take_buffers(slot, want, false, io));
        match tried {
            Some(TryAlloc::Done) => self.proceed(slot, io),
            Some(TryAlloc::Over) if self.share.is_none() => self.put_off(slot, io),
            _ => io.waiters.push(self.share, self.waiter(slot, io.pool), tried),
        }
    }

    fn limiters(&self, slot: u16) -> impl Iterator<Item = &Arc<Limiter>> {
        let nsid = self.slots[usize::from(slot)].sqe.nsid;
        let namespace = match &self.serves {
            QueueRole::Io { subsystem, .. } => subsystem.namespace(nsid).ok(),
            _ => None,
        };
        let of_namespace = namespace.into_iter().flat_map(|namespace| &namespace.limiters);
        of_namespace.chain(&self.quota.of_host)
    }

    /// Bytes that a command moves, with the other half of a fused one, as far as it says so itself;
    /// none for one that is under no limit.
    fn bytes_moved(&self, slot: u16) -> Option<u64> {
        let entry = &self.slots[usize::from(slot)];
        let other = entry.mate.and_then(|mate| of_plan(&self.slots[usize::from(mate)].plan));
        of_plan(&entry.plan).map(|bytes| bytes.saturating_add(other.unwrap_or(0)))
    }
}

fn of_plan(plan: &Plan) -> Option<u64> {
    match plan {
        Plan::Load { to, .. } => Some(to.len.into()),
        Plan::Store { from, .. } | Plan::Compare { from, .. } => Some(from.len_bytes().into()),
        Plan::Verify { len, .. } => Some(*len),
        // How much a Copy moves it says later, and is charged for it then.
        Plan::Copy { .. }
        | Plan::Flush { .. }
        | Plan::Deallocate { .. }
        | Plan::Zero { .. }
        | Plan::Mark { .. } => Some(0),
        _ => None,
    }
}
