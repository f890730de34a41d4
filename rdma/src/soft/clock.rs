//! Time of the queue pairs of an endpoint, in one word. An `Instant` has two, which every sum and
//! difference has to normalize.

use std::ops::{Add, AddAssign, Sub};
use std::time::{Duration, Instant};

/// A point in time: nanoseconds on the clock of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Time(u64);

impl Time {
    /// After all others: of a timer that does not run.
    pub(crate) const NEVER: Time = Time(u64::MAX);

    /// So many nanoseconds later; at most [`Time::NEVER`].
    #[inline]
    pub(crate) fn after_ns(self, ns: u64) -> Time {
        Time(self.0.saturating_add(ns))
    }

    /// Nanoseconds since an earlier time; 0 since a later one.
    #[inline]
    pub(crate) fn since_ns(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// None for [`Time::NEVER`].
    pub(crate) fn finite(self) -> Option<Time> {
        (self != Time::NEVER).then_some(self)
    }
}

/// The nanoseconds of a duration; `u64::MAX` if they are more than that.
pub(crate) fn ns_of(duration: Duration) -> u64 {
    let seconds_ns = duration.as_secs().saturating_mul(1_000_000_000);
    seconds_ns.saturating_add(duration.subsec_nanos().into())
}

impl Add<Duration> for Time {
    type Output = Time;

    fn add(self, later: Duration) -> Time {
        self.after_ns(ns_of(later))
    }
}

impl AddAssign<Duration> for Time {
    fn add_assign(&mut self, later: Duration) {
        *self = *self + later;
    }
}

impl Sub for Time {
    type Output = Duration;

    /// Zero since a later time.
    fn sub(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.since_ns(earlier))
    }
}

/// Converts instants. It begins at the first one, and does not run backwards.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Clock {
    last: Option<Instant>,
    time: Time,
}

impl Clock {
    #[inline]
    pub(crate) fn read(&mut self, now: Instant) -> Time {
        // Most calls of an iteration have the same one.
        if self.last != Some(now) {
            self.advance(now);
        }
        self.time
    }

    fn advance(&mut self, now: Instant) {
        let last = *self.last.get_or_insert(now);
        if now > last {
            self.time = self.time.after_ns(ns_of(now.saturating_duration_since(last)));
            self.last = Some(now);
        }
    }

    /// Whether a time was reached at the last instant read.
    #[inline]
    pub(crate) fn has_reached(&self, time: Time) -> bool {
        time <= self.time
    }

    /// The instant of a time; the last one read, if it is not later.
    pub(crate) fn instant(&self, time: Time) -> Option<Instant> {
        self.last?.checked_add(time.finite()? - self.time)
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::clock::*;

    #[test]
    fn clock_is_monotonic_and_preserves_intervals() {
        let (mut clock, start) = (Clock::default(), Instant::now());
        let ms = Duration::from_millis;
        assert_eq!(clock.instant(Time::default()), None, "nothing was read");
        let first = clock.read(start);
        let second = clock.read(start + ms(5));
        assert_eq!((second - first, first - second), (ms(5), Duration::ZERO));
        assert_eq!(clock.read(start + ms(2)), second);
        assert_eq!(clock.read(start + ms(7)), first + ms(7));
        assert_eq!(clock.instant(first + ms(9)), Some(start + ms(9)));
        assert_eq!(clock.instant(first), Some(start + ms(7)));
        assert_eq!(clock.instant(Time::NEVER), None);
        assert!(clock.has_reached(first + ms(7)) && !clock.has_reached(first + ms(8)));
        assert_eq!(first + Duration::MAX, Time::NEVER);
    }
}
