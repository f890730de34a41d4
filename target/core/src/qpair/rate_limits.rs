//! Rate limits of the commands of a queue pair ([`crate::subsystem::rate_limit`]).

use std::sync::Arc;
use std::time::Instant;

use super::request::Request;
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::Plan;
use crate::subsystem::rate_limit::{Grant, Limiter, LimiterClock};

/// Rate limits of the commands of a queue pair.
#[derive(Debug, Default)]
pub(super) struct RateLimits {
    /// Its host is limited, or some namespace of its subsystem.
    limited: bool,
    of_host: Vec<Arc<Limiter>>,
    clock: LimiterClock,
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
        let of_namespaces = subsystem.namespaces.iter().flat_map(|n| &n.limiters);
        self.limited = !of_host.is_empty() || of_namespaces.clone().next().is_some();
        self.clock = LimiterClock::of(of_host.iter().chain(of_namespaces));
        self.of_host = of_host;
    }

    /// Whether a command for this namespace is under a limit.
    pub(super) fn apply_to(&self, nsid: u32, role: &QueueRole) -> bool {
        self.limiters(nsid, role).next().is_some()
    }

    /// Books a command for this namespace that moves `bytes` at its limits; returns the nanoseconds
    /// until it may begin, 0 also if it is under none.
    #[inline(always)]
    pub(super) fn book(&mut self, nsid: u32, bytes: u32, role: &QueueRole, now: Instant) -> u64 {
        let Some(now_ns) = self.clock.read(now) else {
            return self.book_apart(nsid, bytes, role, now);
        };
        let mut waits_ns = 0;
        for limiter in of_namespace(nsid, role) {
            limiter.book_at(now_ns, bytes.into(), &mut waits_ns);
        }
        for limiter in &self.of_host {
            limiter.book_at(now_ns, bytes.into(), &mut waits_ns);
        }
        waits_ns
    }

    /// As [`RateLimits::book`], at limits that were set at different times.
    #[cold]
    fn book_apart(&self, nsid: u32, bytes: u32, role: &QueueRole, now: Instant) -> u64 {
        let mut waits_ns = 0;
        let limiters = self.limiters(nsid, role);
        limiters.for_each(|it| it.book_at(it.ns_at(now), bytes.into(), &mut waits_ns));
        waits_ns
    }

    /// Returns what was booked so.
    pub(super) fn grant(
        &self,
        nsid: u32,
        bytes: u32,
        role: &QueueRole,
        (now, waits_ns): (Instant, u64),
    ) -> Grant {
        let bytes = bytes.into();
        let takes_ns = self.limiters(nsid, role).map(|limiter| limiter.takes_ns(bytes)).max();
        Grant::new(now, waits_ns, takes_ns.unwrap_or(0), bytes)
    }

    /// Refunds the booking of a command that will not begin as booked.
    pub(super) fn give_back(&self, entry: &Request, role: &QueueRole, grant: &Grant, now: Instant) {
        let limiters = self.limiters(entry.sqe.nsid, role);
        limiters.for_each(|limiter| limiter.give_back(now, grant.bytes));
    }

    /// Charges bytes of a command in progress.
    pub(super) fn charge(&self, entry: &Request, role: &QueueRole, bytes: u64, now: Instant) {
        if self.limited {
            let limiters = self.limiters(entry.sqe.nsid, role);
            limiters.for_each(|limiter| limiter.charge(now, bytes));
        }
    }

    fn limiters<'a>(
        &'a self,
        nsid: u32,
        role: &'a QueueRole,
    ) -> impl Iterator<Item = &'a Arc<Limiter>> {
        of_namespace(nsid, role).iter().chain(&self.of_host)
    }
}

/// Returns the limits of a namespace.
#[inline]
fn of_namespace(nsid: u32, role: &QueueRole) -> &[Arc<Limiter>] {
    match role {
        QueueRole::Io { subsystem, .. } => match subsystem.namespace(nsid) {
            Ok(namespace) => &namespace.limiters,
            Err(_) => &[],
        },
        _ => &[],
    }
}

/// Returns the bytes that a command moves, with those of the other half of a fused one, as far as
/// its submission queue entry gives them, below 4 GiB; none for a command that is never limited.
#[inline]
pub(super) fn bytes_moved(requests: &Requests, slot: u16) -> Option<u32> {
    let entry = &requests[slot];
    let other = entry.fused_with().and_then(|other| of_plan(&requests[other].plan));
    of_plan(&entry.plan).map(|bytes| bytes.saturating_add(other.unwrap_or(0)))
}

#[inline]
fn of_plan(plan: &Plan) -> Option<u32> {
    match plan {
        Plan::Load { to, .. } => Some(to.len),
        Plan::Store { from, .. } | Plan::Compare { from, .. } => Some(from.len_bytes()),
        Plan::Verify { len, .. } => Some(u32::try_from(*len).unwrap_or(u32::MAX)),
        // The bytes of a Copy are known later, and charged then.
        Plan::Copy { .. }
        | Plan::Flush { .. }
        | Plan::Deallocate { .. }
        | Plan::Zero { .. }
        | Plan::Mark { .. } => Some(0),
        _ => None,
    }
}
