//! Adaptive polling: decides whether an idle driver of a fabric keeps polling or sleeps.
//!
//! Waking a sleeping CPU costs tens of microseconds, so looking for about that long pays when work
//! comes soon, and is heat when it does not. The spinner learns which: after a few vain spins in a
//! row it sleeps at once, and only now and then tries again.
//!
//! While an answer is on its way, from a disk or a peer, something will come for certain, and the
//! only question is when. A fast disk takes some hundred microseconds, and of those a sleep wastes a
//! good part: the CPU falls into a deeper sleep the longer it lasts. So a driver that awaits
//! something may look longer, as long as that is about what it takes. How long it takes shows
//! whether one looks or sleeps, so nothing needs to be tried for that. Meanwhile the CPU is given
//! to whoever wants it: what is awaited may need that very one.

use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};

/// Vain spins in a row after which it gives up.
const PATIENCE: u32 = 8;

/// One idle period in so many is spun all the same, to see whether it would pay again.
const RETRY: u32 = 64;

/// What waking up may add to a wait.
const WAKING: Duration = Duration::from_micros(100);

/// Whether looking can be worth anything: on a machine with one CPU it only keeps whoever is waited
/// for from working. (A driver that is pinned to one CPU of several has the others to wait for.)
#[must_use]
pub fn is_worth_it() -> bool {
    matches!(sysconf(SysconfVar::_NPROCESSORS_ONLN), Ok(Some(cpus)) if cpus > 1)
}

/// Time that a driver may poll before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Budget {
    /// When nobody knows whether anything will come.
    pub any: Duration,
    /// While an answer is on its way; where this is not longer, it is the same as `any`.
    pub awaited: Duration,
}

impl Budget {
    /// The same, whatever may come; zero never spins.
    #[must_use]
    pub fn of(both: Duration) -> Budget {
        Budget { any: both, awaited: both }
    }

    /// What suits this machine: `any` for what nobody has promised, and for answers as long as a
    /// fast disk takes for a queue of them. Nothing on a machine with one CPU.
    #[must_use]
    pub fn auto(any: Duration) -> Budget {
        match is_worth_it() {
            true => Budget { any, awaited: Duration::from_micros(400) },
            false => Budget::default(),
        }
    }
}

/// Spins of one driver.
#[derive(Debug)]
pub struct AdaptivePoller {
    budget: Budget,
    last_work: Instant,
    /// This idle period is being spun.
    spinning: bool,
    unanswered: u32,
    sleeps: u32,
    /// In this idle period an answer is on its way.
    awaiting: bool,
    /// Answers in a row that took longer than one looks for them.
    late: u32,
}

impl AdaptivePoller {
    /// Spins for at most `budget` after the last work.
    #[must_use]
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

    /// There was none at `now`: whether to look again rather than sleep. `awaiting`: an answer is
    /// on its way.
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

    /// How long it looks before it sleeps, in steps.
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
    fn it_spins_for_its_budget_until_that_is_vain() {
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
    fn work_that_comes_in_time_makes_it_hopeful_again() {
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
    fn without_a_budget_it_sleeps_at_once_and_a_timeout_is_no_work() {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(Budget::default(), now);
        spinner.worked(now);
        assert_eq!(idle(&mut spinner, &mut now), 0);
        let mut spinner = AdaptivePoller::new(Budget::of(STEP * 5), now);
        idle(&mut spinner, &mut now);
        assert_eq!(idle(&mut spinner, &mut now), 0, "woken by the clock: back to sleep");
    }

    #[test]
    fn it_looks_longer_for_answers_until_they_take_too_long() {
        let mut now = Instant::now();
        let budget = Budget { any: STEP * 2, awaited: STEP * 6 };
        let mut spinner = AdaptivePoller::new(budget, now);
        for _ in 0..PATIENCE {
            spinner.worked(now);
            assert_eq!(look(&mut spinner, &mut now, true), 5);
            now += WAKING + STEP;
        }
        // Whether it looks shorter or not at all then, is as with anything else.
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
        // What is not awaited says nothing about answers.
        for _ in 0..PATIENCE * 2 {
            spinner.worked(now);
            idle(&mut spinner, &mut now);
            now += WAKING * 9;
        }
        spinner.worked(now);
        assert_eq!(look(&mut spinner, &mut now, true), 5);
    }

    #[test]
    fn a_budget_for_all_is_the_same_for_answers() {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(Budget::of(STEP * 3), now);
        spinner.worked(now);
        assert_eq!(look(&mut spinner, &mut now, true), 2);
        let mut spinner = AdaptivePoller::new(Budget::of(Duration::ZERO), now);
        assert_eq!(look(&mut spinner, &mut now, true), 0);
    }
}
