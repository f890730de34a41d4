//! Whether an idle driver of a fabric looks for work a little longer or sleeps at once.
//!
//! Waking a sleeping CPU costs tens of microseconds, so looking for about that long pays when work
//! comes soon, and is heat when it does not. The spinner learns which: after a few vain spins in a
//! row it sleeps at once, and only now and then tries again.

use std::time::{Duration, Instant};

use nix::unistd::{SysconfVar, sysconf};

/// Vain spins in a row after which it gives up.
const PATIENCE: u32 = 8;

/// One idle period in so many is spun all the same, to see whether it would pay again.
const RETRY: u32 = 64;

/// Whether looking can be worth anything: on a machine with one CPU it only keeps whoever is waited
/// for from working. (A driver that is pinned to one CPU of several has the others to wait for.)
#[must_use]
pub fn is_worth_it() -> bool {
    matches!(sysconf(SysconfVar::_NPROCESSORS_ONLN), Ok(Some(cpus)) if cpus > 1)
}

/// Spins of one driver.
#[derive(Debug)]
pub struct Spinner {
    budget: Duration,
    last_work: Instant,
    /// This idle period is being spun.
    spinning: bool,
    vain: u32,
    sleeps: u32,
}

impl Spinner {
    /// Spins for at most `budget` after the last work; zero never spins.
    #[must_use]
    pub fn new(budget: Duration, now: Instant) -> Spinner {
        Spinner { budget, last_work: now, spinning: false, vain: 0, sleeps: 0 }
    }

    /// There was work at `now`.
    pub fn worked(&mut self, now: Instant) {
        if std::mem::take(&mut self.spinning) {
            self.vain = 0;
        }
        self.last_work = now;
    }

    /// There was none at `now`: whether to look again rather than sleep.
    pub fn goes_on(&mut self, now: Instant) -> bool {
        let tired = self.vain >= PATIENCE && !self.sleeps.is_multiple_of(RETRY);
        if !tired && now.saturating_duration_since(self.last_work) < self.budget {
            self.spinning = true;
            return true;
        }
        if std::mem::take(&mut self.spinning) {
            self.vain = self.vain.saturating_add(1);
        }
        self.sleeps = self.sleeps.wrapping_add(1);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(10);

    /// How long it looks before it sleeps, in steps.
    fn idle(spinner: &mut Spinner, now: &mut Instant) -> u32 {
        (0..)
            .find(|_| {
                *now += STEP;
                !spinner.goes_on(*now)
            })
            .unwrap()
    }

    #[test]
    fn it_spins_for_its_budget_until_that_is_vain() {
        let mut now = Instant::now();
        let mut spinner = Spinner::new(STEP * 5, now);
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
        let mut spinner = Spinner::new(STEP * 5, now);
        for _ in 0..PATIENCE * 2 {
            spinner.worked(now);
            idle(&mut spinner, &mut now);
        }
        spinner.sleeps = 0;
        spinner.worked(now);
        assert!(spinner.goes_on(now + STEP));
        spinner.worked(now + STEP);
        now += STEP;
        assert_eq!(idle(&mut spinner, &mut now), 4);
    }

    #[test]
    fn without_a_budget_it_sleeps_at_once_and_a_timeout_is_no_work() {
        let mut now = Instant::now();
        let mut spinner = Spinner::new(Duration::ZERO, now);
        spinner.worked(now);
        assert_eq!(idle(&mut spinner, &mut now), 0);
        let mut spinner = Spinner::new(STEP * 5, now);
        idle(&mut spinner, &mut now);
        assert_eq!(idle(&mut spinner, &mut now), 0, "woken by the clock: back to sleep");
    }
}
