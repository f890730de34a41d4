//! Time budget for connection setup: creating and destroying a queue pair takes system calls and
//! adapter commands, during which I/O waits. Connection setup may use a quarter of the time; more
//! of it waits.

use std::time::{Duration, Instant};

use nix::sys::epoll::{EpollEvent, EpollFlags};

use super::{CONNECTIONS, Verbs};

/// Connections may use one part in this many of the time.
const PARTS: u32 = 4;
/// Burst: several hosts with all their queues.
const BURST: Duration = Duration::from_millis(10);

/// The time used by connection setup, as the time from which it may use more: [`BURST`] before it
/// is compensated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    next: Instant,
}

impl Allowance {
    pub(super) fn new(now: Instant) -> Allowance {
        Allowance { next: now.checked_sub(BURST * PARTS).unwrap_or(now) }
    }

    /// Connection setup has used this time.
    pub(super) fn spend(&mut self, now: Instant, taken: Duration) {
        let rested = now.checked_sub(BURST * PARTS).unwrap_or(now);
        self.next = self.next.max(rested) + taken * PARTS;
    }

    /// When it may use more.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Whether it may use more now.
    pub(super) fn allows(&self, now: Instant) -> bool {
        self.next() <= now
    }
}

/// Counters of connection work.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counts {
    pub(super) made: u64,
    pub(super) destroyed: u64,
    nanos: u64,
    pauses: u64,
}

impl Counts {
    pub(super) fn named(self) -> [(&'static str, u64); 4] {
        let Counts { made, destroyed, nanos, pauses } = self;
        [
            ("queue_pairs_created", made),
            ("queue_pairs_destroyed", destroyed),
            ("connection_microseconds", nanos / 1000),
            ("connection_pauses", pauses),
        ]
    }
}

impl Verbs {
    /// Executes an operation of connection setup, and charges its time to the budget.
    pub(super) fn charged<T>(&mut self, act: impl FnOnce(&mut Verbs) -> T) -> T {
        let begun = Instant::now();
        let outcome = act(self);
        let taken = begun.elapsed();
        self.allowance.spend(self.now, taken);
        self.counts.nanos += taken.as_nanos() as u64;
        outcome
    }

    /// Leaves connection events in the kernel, without ending sleeps, or no longer.
    pub(super) fn set_muted(&mut self, muted: bool) {
        let flags = if muted { EpollFlags::empty() } else { EpollFlags::EPOLLIN };
        let mut event = EpollEvent::new(flags, CONNECTIONS);
        if self.epoll.modify(self.channel.fd(), &mut event).is_ok() {
            self.muted = muted;
            self.counts.pauses += u64::from(muted);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::connection_budget::*;

    #[test]
    fn connections_get_a_quarter_of_the_time_and_a_few_at_once() {
        let (cost, began) = (Duration::from_millis(1), Instant::now());
        let mut allowance = Allowance::new(began);
        let (mut now, mut taken) = (began, 0);
        while now < began + Duration::from_secs(10) {
            while allowance.allows(now) {
                allowance.spend(now, cost);
                taken += 1;
            }
            if now == began {
                assert_eq!(taken, 11, "at once");
            }
            now += Duration::from_micros(500);
        }
        assert!((2500..=2512).contains(&taken), "{taken} of 10,000 ms");
    }

    #[test]
    fn what_took_long_is_made_up_for_and_rest_is_not_saved_up() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now - Duration::from_secs(3600));
        allowance.spend(now, Duration::from_millis(100));
        assert_eq!(allowance.next(), now + Duration::from_millis(360));
        assert!(!allowance.allows(now + Duration::from_millis(359)));
        assert!(allowance.allows(now + Duration::from_millis(360)));
    }
}
