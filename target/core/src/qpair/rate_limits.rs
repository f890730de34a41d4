//! Rate limits of the commands of a queue pair ([`crate::subsystem::rate_limit`]).

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use super::request::Request;
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::Plan;
use crate::subsystem::rate_limit::{Booking, Grant, Limiter, LimiterClock};

/// Rate limits of the commands of a queue pair.
#[derive(Debug, Default)]
pub(super) struct RateLimits {
    /// Its host is limited, or some namespace of its subsystem.
    limited: bool,
    of_host: Vec<Arc<Limiter>>,
    clock: Cell<LimiterClock>,
}

impl RateLimits {
    /// Whether any command may be limited.
    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.limited
    }

    /// Looks up the limits of this queue again, because they may have changed.
    pub(super) fn find(&mut self, role: &QueueRole) {
        let QueueRole::Io { association, subsystem, .. } = role else { return };
        let of_host = subsystem.host_limiters.get(&association.host).cloned().unwrap_or_default();
        let limited = subsystem.namespaces.iter().any(|n| !n.limiters.is_empty());
        (self.limited, self.of_host) = (limited || !of_host.is_empty(), of_host);
    }

    /// Whether a command is under a limit.
    pub(super) fn apply_to(&self, requests: &Requests, slot: u16, role: &QueueRole) -> bool {
        let mut limiters = self.limiters(&requests[slot], role);
        bytes_moved(requests, slot).is_some() && limiters.next().is_some()
    }

    /// Books a command at its limits; none if it is no longer limited.
    pub(super) fn book(
        &self,
        requests: &Requests,
        slot: u16,
        role: &QueueRole,
        now: Instant,
    ) -> Option<Grant> {
        let (booking, bytes) = self.book_bytes(requests, slot, role, now)?;
        Some(booking.grant(now, bytes))
    }

    /// The same, with the bytes that the command moves.
    #[inline]
    pub(super) fn book_bytes(
        &self,
        requests: &Requests,
        slot: u16,
        role: &QueueRole,
        now: Instant,
    ) -> Option<(Booking, u64)> {
        let bytes = bytes_moved(requests, slot)?;
        let of_namespace = of_namespace(&requests[slot], role);
        if of_namespace.is_empty() && self.of_host.is_empty() {
            return None;
        }
        let (mut clock, mut booking) = (self.clock.get(), Booking::default());
        clock.book(of_namespace, now, bytes, &mut booking);
        clock.book(&self.of_host, now, bytes, &mut booking);
        self.clock.set(clock);
        Some((booking, bytes))
    }

    /// Refunds the booking of a command that will not begin as booked.
    pub(super) fn give_back(&self, entry: &Request, role: &QueueRole, grant: &Grant, now: Instant) {
        self.limiters(entry, role).for_each(|limiter| limiter.give_back(now, grant.bytes));
    }

    /// Charges bytes of a command in progress.
    pub(super) fn charge(&self, entry: &Request, role: &QueueRole, bytes: u64, now: Instant) {
        if self.limited {
            self.limiters(entry, role).for_each(|limiter| limiter.charge(now, bytes));
        }
    }

    fn limiters<'a>(
        &'a self,
        entry: &Request,
        role: &'a QueueRole,
    ) -> impl Iterator<Item = &'a Arc<Limiter>> {
        of_namespace(entry, role).iter().chain(&self.of_host)
    }
}

/// Returns the limits of the namespace of a command.
#[inline]
fn of_namespace<'a>(entry: &Request, role: &'a QueueRole) -> &'a [Arc<Limiter>] {
    match role {
        QueueRole::Io { subsystem, .. } => match subsystem.namespace(entry.sqe.nsid) {
            Ok(namespace) => &namespace.limiters,
            Err(_) => &[],
        },
        _ => &[],
    }
}

/// Returns the bytes that a command moves, with those of the other half of a fused one, as far as
/// its submission queue entry gives them; none for a command that is never limited.
#[inline]
fn bytes_moved(requests: &Requests, slot: u16) -> Option<u64> {
    let entry = &requests[slot];
    let other = entry.fused_with().and_then(|other| of_plan(&requests[other].plan));
    of_plan(&entry.plan).map(|bytes| bytes.saturating_add(other.unwrap_or(0)))
}

#[inline]
fn of_plan(plan: &Plan) -> Option<u64> {
    match plan {
        Plan::Load { to, .. } => Some(to.len.into()),
        Plan::Store { from, .. } | Plan::Compare { from, .. } => Some(from.len_bytes().into()),
        Plan::Verify { len, .. } => Some(*len),
        // The bytes of a Copy are known later, and charged then.
        Plan::Copy { .. }
        | Plan::Flush { .. }
        | Plan::Deallocate { .. }
        | Plan::Zero { .. }
        | Plan::Mark { .. } => Some(0),
        _ => None,
    }
}
