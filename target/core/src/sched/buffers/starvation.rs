//! Starvation guard: holds back others for a limited time, and reserves blocks of the pool, so that
//! large requests make progress among small ones.
//!
//! A part of the pool is set aside for as long as a device may take for its pieces of that part. If it did
//! not become free, another part is set aside: a device may keep a piece of the first for ever.

use std::time::{Duration, Instant};

use super::{PoolState, QueuedCommand};

/// Time for which others wait for a command that lacks buffers.
const HOLD: Duration = Duration::from_millis(250);
/// Time without a hold after one that ended without the buffers.
const AFTER_HOLD: Duration = Duration::from_secs(10);
/// Time for which a part of the pool is set aside at first; doubled after a round of all parts.
const ASIDE: Duration = Duration::from_millis(250);
/// Maximum of that time.
const LONGEST_ASIDE: Duration = Duration::from_secs(8);

/// Part of the pool to reserve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Starved {
    /// Nothing.
    None,
    /// The part that is set aside already.
    Stay,
    /// A part of the pool of this size, the first for a command.
    First(u64),
    /// The next such part.
    Next(u64),
}

/// A starved command, and the share in whose queue it waits; none: an admin command.
pub(super) type StarvedCommand = (Option<u32>, QueuedCommand);

#[derive(Debug, Default)]
pub(super) struct StarvationGuard {
    /// End of the current hold.
    held_until: Option<Instant>,
    /// There is no hold until then.
    none_until: Option<Instant>,
    /// The command for which a part is set aside.
    claimant: Option<StarvedCommand>,
    /// Until when that part is set aside.
    aside_until: Option<Instant>,
    /// Present time for which a part is set aside.
    patience: Duration,
    /// The share of the last claimant.
    last: Option<u32>,
}

impl StarvationGuard {
    /// Whether others still wait for a command that lacks buffers.
    pub(super) fn holds_up(&mut self, now: Instant) -> bool {
        let vain = |until: Option<Instant>| until.is_some_and(|until| now < until);
        if self.claimant.is_some() || vain(self.none_until) {
            self.held_until = None;
            return false;
        }
        if now < *self.held_until.get_or_insert(now + HOLD) {
            return true;
        }
        (self.held_until, self.none_until) = (None, Some(now + AFTER_HOLD));
        false
    }

    /// Records that a command has got its buffers.
    pub(super) fn served(&mut self, waiter: &QueuedCommand) {
        self.held_until = None;
        if waiter.claims {
            self.retain(|name| name != (waiter.key, waiter.slot));
        }
    }

    /// Ends the hold.
    pub(super) fn rest(&mut self) {
        self.held_until = None;
    }

    /// Withdraws the part set aside from its command.
    pub(super) fn give_up(&mut self) {
        self.claimant = None;
    }

    pub(super) fn retain(&mut self, keep: impl Fn((u32, u16)) -> bool) {
        self.claimant = self.claimant.filter(|(_, waiter)| keep((waiter.key, waiter.slot)));
    }

    /// Returns the command for which a part is set aside, if that suffices.
    pub(super) fn ready(&self, room: &PoolState) -> Option<StarvedCommand> {
        self.claimant.filter(|(_, waiter)| u64::from(waiter.block_bytes) <= room.aside_bytes)
    }

    /// Returns the command whose time with a part set aside is over without success.
    pub(super) fn unserved(&self, now: Instant) -> Option<StarvedCommand> {
        self.claimant.filter(|_| self.aside_until.is_none_or(|until| now >= until))
    }

    /// Whether no part is set aside for a command.
    pub(super) fn is_vacant(&self) -> bool {
        self.claimant.is_none()
    }

    /// Whether [`StarvationGuard::look`] without a next command would change nothing.
    #[inline]
    pub(super) fn is_at_rest(&self) -> bool {
        self.claimant.is_none() && self.aside_until.is_none() && self.patience == ASIDE
    }

    /// The share of the last claimant.
    pub(super) fn last_share(&self) -> Option<u32> {
        self.last
    }

    /// Checks whether another part of the pool is to be set aside; for `next`, if there is no
    /// command yet.
    pub(super) fn look(&mut self, now: Instant, next: Option<StarvedCommand>) -> Starved {
        let is_new = self.claimant.is_none();
        if is_new {
            let Some((share, waiter)) = next else {
                (self.aside_until, self.patience) = (None, ASIDE);
                return Starved::None;
            };
            self.claimant = Some((share, waiter));
            self.last = share.or(self.last);
        }
        let Some((_, waiter)) = self.claimant else { return Starved::None };
        let bytes = waiter.block_bytes.into();
        let goes_on = self.aside_until.is_some_and(|until| now < until);
        if goes_on && !is_new {
            return Starved::Stay;
        }
        self.aside_until = Some(now + self.patience.max(ASIDE));
        match is_new {
            true => Starved::First(bytes),
            false => Starved::Next(bytes),
        }
    }

    /// Doubles the time that a part is set aside, because no part became free: devices may be
    /// slower.
    pub(super) fn round_over(&mut self) {
        self.patience = (self.patience.max(ASIDE) * 2).min(LONGEST_ASIDE);
    }
}
