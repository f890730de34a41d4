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
/// Time that an operation counts at most. Drivers wait up to a minute for a command that an adapter
/// does not answer: hosts that reconnect after that should not wait four times as long again.
const CHARGE_MAX: Duration = Duration::from_millis(250);

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
        self.next = self.next.max(rested) + taken.min(CHARGE_MAX) * PARTS;
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

/// What the device was given of one kind of queue.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Posted {
    /// Chains of work requests: the device is told once of each.
    doorbells: u64,
    work_requests: u64,
}

impl Posted {
    /// A chain is posted; none if it is empty.
    #[inline]
    pub(super) fn add(&mut self, work_requests: usize) {
        self.doorbells += u64::from(work_requests > 0);
        self.work_requests += work_requests as u64;
    }
}

/// Counters of the work of devices, and of connection work.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Counts {
    pub(super) receives: Posted,
    pub(super) sends: Posted,
    pub(super) made: u64,
    pub(super) destroyed: u64,
    nanos: u64,
    pauses: u64,
}

impl Counts {
    pub(super) fn named(self) -> [(&'static str, u64); 8] {
        let Counts { receives, sends, made, destroyed, nanos, pauses } = self;
        [
            ("receive_doorbells", receives.doorbells),
            ("receive_work_requests", receives.work_requests),
            ("send_doorbells", sends.doorbells),
            ("send_work_requests", sends.work_requests),
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
    fn a_chain_is_one_doorbell_and_as_many_work_requests_as_it_has() {
        let mut counts = Counts::default();
        [3, 0, 1].into_iter().for_each(|length| counts.sends.add(length));
        [0, 0, 5].into_iter().for_each(|length| counts.receives.add(length));
        let expected = [
            ("receive_doorbells", 1),
            ("receive_work_requests", 5),
            ("send_doorbells", 2),
            ("send_work_requests", 4),
        ];
        assert_eq!(counts.named()[..4], expected);
    }

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
    fn setup_overruns_are_repaid_and_idle_time_is_not_saved() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now - Duration::from_secs(3600));
        allowance.spend(now, Duration::from_millis(100));
        assert_eq!(allowance.next(), now + Duration::from_millis(360));
        assert!(!allowance.allows(now + Duration::from_millis(359)));
        assert!(allowance.allows(now + Duration::from_millis(360)));
    }

    #[test]
    fn an_operation_that_hangs_pauses_connections_for_a_second() {
        let now = Instant::now();
        let mut allowance = Allowance::new(now);
        allowance.spend(now, Duration::from_secs(60));
        assert_eq!(allowance.next(), now + Duration::from_millis(960));
    }
}
