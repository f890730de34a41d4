//! Adaptive polling: decides whether an idle driver of a fabric keeps polling or sleeps.
//!
//! Waking a sleeping CPU costs tens of microseconds, so polling for about that long pays if work
//! arrives soon, and wastes power if it does not. The poller learns which: after some unsuccessful
//! spins in a row it sleeps immediately, and tries again only once in a while.
//!
//! While a response of a device or a peer is pending, an event is certain, and only its time is
//! unknown. A fast device takes some hundred microseconds, of which a sleep would waste a good
//! part: the CPU enters a deeper sleep state the longer it lasts. So a driver with pending
//! operations may poll longer, as long as that is about their latency. The latency is measured both
//! when polling and when sleeping, so no trial is needed. Meanwhile the CPU is yielded to other
//! threads, because the pending operation may need it.

use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};

/// Unsuccessful spins in a row after which it stops.
const PATIENCE: u32 = 8;

/// One idle period in this many spins nevertheless, to find out whether that pays again.
const RETRY: u32 = 64;

/// Latency that a wake-up may add.
const WAKING: Duration = Duration::from_micros(100);

/// Whether polling can pay: on a machine with one CPU it only delays the thread that is waited for.
/// (For a driver that is pinned to one CPU of several, the others can work.)
pub(crate) fn is_worth_it() -> bool {
    matches!(sysconf(SysconfVar::_NPROCESSORS_ONLN), Ok(Some(cpus)) if cpus > 1)
}

/// Time that a driver may poll before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Budget {
    /// With nothing pending.
    pub any: Duration,
    /// With a pending response; if not longer, the same as `any`.
    pub awaited: Duration,
}

impl Budget {
    /// The same for both; zero never spins.
    pub fn of(both: Duration) -> Budget {
        Budget { any: both, awaited: both }
    }

    /// For this machine: `any` with nothing pending, and the latency of a fast device with a queue
    /// for pending responses. Zero on a machine with one CPU.
    pub fn auto(any: Duration) -> Budget {
        match is_worth_it() {
            true => Budget { any, awaited: Duration::from_micros(400) },
            false => Budget::default(),
        }
    }
}

/// Polling state of one driver.
#[derive(Debug)]
pub struct AdaptivePoller {
    budget: Budget,
    last_work: Instant,
    /// It spins in this idle period.
    spinning: bool,
    unanswered: u32,
    sleeps: u32,
    /// A response is pending in this idle period.
    awaiting: bool,
    /// Consecutive responses that took longer than it may poll for them.
    late: u32,
}

impl AdaptivePoller {
    /// Spins for at most `budget` after the last work.
    pub fn new(budget: Budget, now: Instant) -> AdaptivePoller {
        AdaptivePoller {
            budget,
            last_work: now,
            spinning: false,
            unanswered: 0,
            sleeps: 0,
            awaiting: false,
            late: 0,
        }
    }

    /// There was work at `now`.
    pub fn worked(&mut self, now: Instant) {
        if std::mem::take(&mut self.awaiting) {
            let took = now.saturating_duration_since(self.last_work);
            if took > self.budget.awaited + WAKING {
                self.late = self.late.saturating_add(1);
            } else if took >= self.budget.any {
                self.late = 0;
            }
        }
        if std::mem::take(&mut self.spinning) {
            self.unanswered = 0;
        }
        self.last_work = now;
    }

    /// There was no work at `now`: returns whether to poll again rather than to sleep. `awaiting`:
    /// a response is pending.
    pub fn goes_on(&mut self, now: Instant, awaiting: bool) -> bool {
        self.awaiting = awaiting;
        let idle = now.saturating_duration_since(self.last_work);
        if awaiting && self.late < PATIENCE && idle < self.budget.awaited {
            if idle >= self.budget.any {
                std::thread::yield_now();
            }
            return true;
        }
        let tired = self.unanswered >= PATIENCE && !self.sleeps.is_multiple_of(RETRY);
        if !tired && idle < self.budget.any {
            self.spinning = true;
            return true;
        }
        if std::mem::take(&mut self.spinning) {
            self.unanswered = self.unanswered.saturating_add(1);
        }
        self.sleeps = self.sleeps.wrapping_add(1);
        false
    }
}

#[cfg(test)]
mod tests {
    use crate::spin::*;

    const STEP: Duration = Duration::from_micros(10);

    /// Number of polls before it sleeps.
    fn idle(spinner: &mut AdaptivePoller, now: &mut Instant) -> u32 {
        look(spinner, now, false)
    }

    fn look(spinner: &mut AdaptivePoller, now: &mut Instant, awaiting: bool) -> u32 {
        (0..)
            .find(|_| {
                *now += STEP;
                !spinner.goes_on(*now, awaiting)
            })
            .unwrap()
    }

    #[test]
    fn poller_spins_for_its_budget_until_spins_fail_repeatedly() {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(Budget::of(STEP * 5), now);
        for _ in 0..PATIENCE {
            spinner.worked(now);
            assert_eq!(idle(&mut spinner, &mut now), 4);
        }
        let spun = (0..RETRY * 2)
            .filter(|_| {
                spinner.worked(now);
                idle(&mut spinner, &mut now) > 0
            })
            .count();
        assert_eq!(spun, 2, "now and then it tries again");
    }

    #[test]
    fn work_arriving_in_time_resumes_spinning() {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(Budget::of(STEP * 5), now);
        for _ in 0..PATIENCE * 2 {
            spinner.worked(now);
            idle(&mut spinner, &mut now);
        }
        spinner.sleeps = 0;
        spinner.worked(now);
        assert!(spinner.goes_on(now + STEP, false));
        spinner.worked(now + STEP);
        now += STEP;
        assert_eq!(idle(&mut spinner, &mut now), 4);
    }

    #[test]
    fn poller_sleeps_without_a_budget_and_after_a_timeout() {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(Budget::default(), now);
        spinner.worked(now);
        assert_eq!(idle(&mut spinner, &mut now), 0);
        let mut spinner = AdaptivePoller::new(Budget::of(STEP * 5), now);
        idle(&mut spinner, &mut now);
        assert_eq!(idle(&mut spinner, &mut now), 0, "woken by the clock: back to sleep");
    }

    #[test]
    fn poller_spins_longer_for_pending_responses_unless_slow() {
        let mut now = Instant::now();
        let budget = Budget { any: STEP * 2, awaited: STEP * 6 };
        let mut spinner = AdaptivePoller::new(budget, now);
        for _ in 0..PATIENCE {
            spinner.worked(now);
            assert_eq!(look(&mut spinner, &mut now, true), 5);
            now += WAKING + STEP;
        }
        // Whether it then polls for a shorter time or not at all is decided as for other events.
        spinner.worked(now);
        assert_eq!(look(&mut spinner, &mut now, true), 1, "all answers came later than that");
        now += WAKING * 2;
        for _ in 0..2 {
            spinner.worked(now);
            assert!(spinner.goes_on(now + STEP, true));
            now += STEP;
        }
        spinner.worked(now);
        assert_eq!(look(&mut spinner, &mut now, true), 1, "that they come at once proves nothing");
        now += STEP * 2;
        spinner.worked(now);
        assert_eq!(
            look(&mut spinner, &mut now, true),
            5,
            "slept, and saw that it had been worth it"
        );
        // Idle periods without a pending response are no samples.
        for _ in 0..PATIENCE * 2 {
            spinner.worked(now);
            idle(&mut spinner, &mut now);
            now += WAKING * 9;
        }
        spinner.worked(now);
        assert_eq!(look(&mut spinner, &mut now, true), 5);
    }

    #[test]
    fn a_common_budget_applies_to_pending_responses() {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(Budget::of(STEP * 3), now);
        spinner.worked(now);
        assert_eq!(look(&mut spinner, &mut now, true), 2);
        let mut spinner = AdaptivePoller::new(Budget::of(Duration::ZERO), now);
        assert_eq!(look(&mut spinner, &mut now, true), 0);
    }
}
