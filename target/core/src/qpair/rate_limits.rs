//! Rate limits of the commands of a queue pair ([`crate::subsystem::rate_limit`]).

use std::sync::Arc;
use std::time::Instant;

use super::request::Request;
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::Plan;
use crate::subsystem::rate_limit::{Grant, Limiter, book_all};

/// Rate limits of the commands of a queue pair.
#[derive(Debug, Default)]
pub(super) struct RateLimits {
    /// Its host is limited, or some namespace of its subsystem.
    limited: bool,
    of_host: Vec<Arc<Limiter>>,
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
        *self = RateLimits { limited: limited || !of_host.is_empty(), of_host };
    }

    /// Whether a command is under a limit.
    pub(super) fn apply_to(&self, requests: &Requests, slot: u16, role: &QueueRole) -> bool {
        let mut limiters = self.limiters(&requests[slot], role);
        bytes_moved(requests, slot).is_some() && limiters.next().is_some()
    }

    /// Books a command at its limits; none if it is no longer limited.
    #[inline]
    pub(super) fn book(
        &self,
        requests: &Requests,
        slot: u16,
        role: &QueueRole,
        now: Instant,
    ) -> Option<Grant> {
        let bytes = bytes_moved(requests, slot)?;
        book_all(self.limiters(&requests[slot], role), now, bytes)
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

    #[inline]
    fn limiters<'a>(
        &'a self,
        entry: &Request,
        role: &'a QueueRole,
    ) -> impl Iterator<Item = &'a Arc<Limiter>> {
        let of_namespace = match role {
            QueueRole::Io { subsystem, .. } => match subsystem.namespace(entry.sqe.nsid) {
                Ok(namespace) => &namespace.limiters[..],
                Err(_) => &[],
            },
            _ => &[],
        };
        of_namespace.iter().chain(&self.of_host)
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
