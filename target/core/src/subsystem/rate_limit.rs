//! Rate limits of operations and bytes per second: of a namespace, of hosts, of both together.
//!
//! A [`Limiter`] is a virtual schedule: a command books its time at the limited rate, after all
//! earlier bookings, and begins at the start of its booking. Reactors share one number for each
//! rate, which one atomic operation advances. Unused time is kept up to the burst, so a reactor
//! that is late catches up.
//!
//! [`crate::sched::rate_queue`] decides which command books next, which makes it fair.
//!
//! This is the generic cell rate algorithm (ITU-T I.371), whose numbers are theoretical arrival
//! times.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;

/// Rates of a limit. The default limits nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// Commands a second, at least 1.
    pub iops: Option<u32>,
    /// Bytes a second, at least 1.
    pub bandwidth: Option<u64>,
    /// Burst: milliseconds of unused rate that are kept.
    pub burst_ms: u32,
}

impl Limit {
    /// Default of [`Limit::burst_ms`].
    pub(crate) const BURST_MS: u32 = 100;

    /// Whether it limits nothing.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.iops.is_none() && self.bandwidth.is_none()
    }
}

impl Default for Limit {
    fn default() -> Limit {
        Limit { iops: None, bandwidth: None, burst_ms: Limit::BURST_MS }
    }
}

/// A limit at work, shared by all reactors. Two of them are equal when they are the same one.
#[derive(Debug)]
pub struct Limiter {
    limit: Limit,
    burst_ns: u64,
    began: Instant,
    ops: Schedule,
    bytes: Schedule,
}

/// Start time of a command, and its share of the rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The earliest start.
    pub start: Instant,
    /// The time that it takes at the limited rate.
    pub takes: Duration,
    /// Bytes that it moves.
    pub bytes: u64,
}

impl Limiter {
    /// A limiter with its full burst at `now`.
    #[must_use]
    pub fn new(limit: Limit, now: Instant) -> Limiter {
        Limiter {
            limit,
            burst_ns: u64::from(limit.burst_ms) * 1_000_000,
            began: now,
            ops: Schedule::new(limit.iops.map(u64::from)),
            bytes: Schedule::new(limit.bandwidth),
        }
    }

    /// Its rates.
    #[must_use]
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// Books one command of this length.
    #[must_use]
    pub fn book(&self, now: Instant, bytes: u64) -> Grant {
        self.book_ns(now, 1, bytes).grant(now, bytes)
    }

    /// Books bytes of a command in progress: later ones wait for it.
    pub(crate) fn charge(&self, now: Instant, bytes: u64) {
        let _ = self.book_ns(now, 0, bytes);
    }

    fn book_ns(&self, now: Instant, ops: u64, bytes: u64) -> Booking {
        self.book_at(self.ns_at(now), ops, bytes)
    }

    #[inline]
    fn book_at(&self, now_ns: u64, ops: u64, bytes: u64) -> Booking {
        let by_ops = self.ops.book(now_ns, ops, self.burst_ns);
        by_ops.and(self.bytes.book(now_ns, bytes, self.burst_ns))
    }

    /// Cancels the booking of a command of this length: later bookings are earlier by its time. The
    /// part of its time that has passed is lost.
    pub fn give_back(&self, now: Instant, bytes: u64) {
        let now_ns = self.ns_at(now);
        self.ops.give_back(now_ns, 1);
        self.bytes.give_back(now_ns, bytes);
    }

    fn ns_at(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.began).as_nanos();
        u64::try_from(elapsed).unwrap_or(u64::MAX)
    }
}

impl PartialEq for Limiter {
    fn eq(&self, other: &Limiter) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Limiter {}

/// The time since one limiter began: that of most others too, which began together.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LimiterClock {
    /// The time, and the beginning of the limiter.
    read: Option<(Instant, Instant)>,
    now_ns: u64,
}

impl LimiterClock {
    #[inline]
    fn read(&mut self, limiter: &Limiter, now: Instant) -> u64 {
        if self.read != Some((now, limiter.began)) {
            (self.read, self.now_ns) = (Some((now, limiter.began)), limiter.ns_at(now));
        }
        self.now_ns
    }

    /// Books a command at limits.
    #[inline]
    pub(crate) fn book(
        &mut self,
        limiters: &[Arc<Limiter>],
        now: Instant,
        bytes: u64,
        booking: &mut Booking,
    ) {
        for limiter in limiters {
            let now_ns = self.read(limiter, now);
            *booking = booking.and(limiter.book_at(now_ns, 1, bytes));
        }
    }
}

/// A place in schedules: the nanoseconds until its start, and those that it takes.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Booking {
    waits_ns: u64,
    takes_ns: u64,
}

impl Booking {
    /// Returns the booking of a command that has both.
    #[inline]
    fn and(self, other: Booking) -> Booking {
        Booking {
            waits_ns: self.waits_ns.max(other.waits_ns),
            takes_ns: self.takes_ns.max(other.takes_ns),
        }
    }

    /// Whether the command begins at once.
    #[inline]
    pub(crate) fn is_now(self) -> bool {
        self.waits_ns == 0
    }

    #[inline]
    pub(crate) fn grant(self, now: Instant, bytes: u64) -> Grant {
        let start = match self.waits_ns {
            0 => now,
            waits_ns => now + Duration::from_nanos(waits_ns),
        };
        Grant { start, takes: Duration::from_nanos(self.takes_ns), bytes }
    }
}

/// The virtual schedule of one rate, if that is limited.
#[derive(Debug)]
struct Schedule {
    time: Option<UnitTime>,
    /// The theoretical arrival time of the next booking.
    arrival: AtomicU64,
}

impl Schedule {
    fn new(rate: Option<u64>) -> Schedule {
        Schedule { time: rate.map(UnitTime::of), arrival: AtomicU64::new(0) }
    }

    /// Returns the nanoseconds that an amount takes of it; 0: nothing.
    #[inline]
    fn takes_ns(&self, amount: u64) -> u64 {
        self.time.map_or(0, |time| time.takes_ns(amount))
    }

    #[inline]
    fn book(&self, now_ns: u64, amount: u64, burst_ns: u64) -> Booking {
        match self.takes_ns(amount) {
            0 => Booking::default(),
            takes_ns => {
                let start_ns = book(&self.arrival, now_ns, takes_ns, burst_ns);
                Booking { waits_ns: start_ns.saturating_sub(now_ns), takes_ns }
            }
        }
    }

    fn give_back(&self, now_ns: u64, amount: u64) {
        let takes_ns = self.takes_ns(amount);
        let back = |before: u64| {
            let after = before.saturating_sub(takes_ns).max(now_ns);
            (after < before).then_some(after)
        };
        let _ = self.arrival.fetch_update(Ordering::Relaxed, Ordering::Relaxed, back);
    }
}

/// Fraction bits of a [`UnitTime`].
const FRACTION_BITS: u32 = 32;

/// The time that one unit takes at a rate, in nanoseconds times 2^32. It is divided by the rate once,
/// not for each command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct UnitTime(u64);

impl UnitTime {
    /// Returns the time at so many units a second, rounded up so that a limit is never exceeded by
    /// rounding.
    fn of(rate: u64) -> UnitTime {
        let second = u128::from(SECOND_NS) << FRACTION_BITS;
        UnitTime(u64::try_from(second.div_ceil(u128::from(rate.max(1)))).unwrap_or(u64::MAX))
    }

    /// Returns the nanoseconds that an amount takes, rounded up.
    #[inline]
    fn takes_ns(self, amount: u64) -> u64 {
        let ns = u128::from(amount) * u128::from(self.0);
        // It cannot overflow.
        let whole_ns = ns.wrapping_add(u128::from(u32::MAX)) >> FRACTION_BITS;
        u64::try_from(whole_ns).unwrap_or(u64::MAX)
    }
}

/// Advances the theoretical arrival time by a booking; returns the start of the booking.
#[inline]
fn book(arrival: &AtomicU64, now_ns: u64, takes_ns: u64, burst_ns: u64) -> u64 {
    let mut before = arrival.load(Ordering::Relaxed);
    loop {
        let after = before.max(now_ns).saturating_add(takes_ns);
        match arrival.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return before.saturating_sub(burst_ns).max(now_ns),
            Err(other) => before = other,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::rate_limit::*;
    use proptest::prelude::*;

    fn limit(iops: u32, burst_ms: u32) -> Limit {
        Limit { iops: Some(iops), bandwidth: None, burst_ms }
    }

    #[test]
    fn commands_come_at_the_rate_once_the_burst_is_used_up() {
        let now = Instant::now();
        let limiter = Limiter::new(limit(1000, 10), now);
        let starts: Vec<u128> = (0..20)
            .map(|_| limiter.book(now, 4096).start.duration_since(now).as_millis())
            .collect();
        // Ten of the burst, and one because nothing is in progress.
        let expected: Vec<u128> = (0..20u128).map(|n| n.saturating_sub(10)).collect();
        assert_eq!(starts, expected);
        let later = now + Duration::from_secs(60);
        assert_eq!(limiter.book(later, 0).start, later, "unused time brings the burst back");
        for _ in 0..10 {
            assert_eq!(limiter.book(later, 0).start, later);
        }
        assert_eq!(limiter.book(later, 0).start, later + Duration::from_millis(1), "and no more");
    }

    #[test]
    fn the_slower_of_two_rates_counts() {
        let now = Instant::now();
        let both = Limit { iops: Some(1000), bandwidth: Some(1 << 20), burst_ms: 0 };
        let limiter = Limiter::new(both, now);
        let takes = |bytes| limiter.book(now, bytes).takes;
        assert_eq!(takes(1), Duration::from_millis(1));
        assert_eq!(takes(1 << 20), Duration::from_secs(1));
        assert_eq!(takes(0), Duration::from_millis(1));
        let start = limiter.book(now, 0).start.duration_since(now);
        assert_eq!(start, Duration::from_millis(3), "three commands were booked");
        limiter.charge(now, 1 << 20);
        let start = limiter.book(now, 1).start.duration_since(now);
        assert!(start > Duration::from_secs(2), "bytes of commands under way: {start:?}");
    }

    #[test]
    fn what_is_given_back_is_booked_by_the_next() {
        let now = Instant::now();
        let both = Limit { iops: Some(1000), bandwidth: Some(1 << 20), burst_ms: 0 };
        let limiter = Limiter::new(both, now);
        let start = |bytes| limiter.book(now, bytes).start.duration_since(now);
        assert_eq!([start(1 << 20), start(1 << 20)].map(|start| start.as_secs()), [0, 1]);
        limiter.give_back(now, 1 << 20);
        assert_eq!(start(1), Duration::from_secs(1));
        let later = now + Duration::from_secs(5);
        limiter.give_back(later, 1 << 20);
        limiter.give_back(later, 1 << 20);
        assert_eq!(limiter.book(later, 1 << 20).start, later, "its time was over");
        let next = limiter.book(later, 1).start;
        assert_eq!(next, later + Duration::from_secs(1), "no more than there is");
    }

    proptest! {
        /// Rounding costs a nanosecond for each 4 GiB or operations, at most, and gains none.
        #[test]
        fn times_are_those_of_the_rate_rounded_up(rate: u64, amount in 0..1u64 << 40) {
            let exact = u128::from(amount) * u128::from(SECOND_NS);
            let exact = exact.div_ceil(u128::from(rate.max(1)));
            let takes = u128::from(UnitTime::of(rate).takes_ns(amount));
            prop_assert!(takes >= exact && takes <= exact + 1 + u128::from(amount >> 32));
            if amount == 1 {
                prop_assert_eq!(takes, exact);
            }
        }

        /// In no interval begins more than the rate and the burst allow.
        #[test]
        fn no_stretch_of_time_has_more_than_its_rate_and_the_burst(
            rate in 1u64..5_000_000, burst_ms in 0u32..50,
            asks in prop::collection::vec((0u64..2_000_000, 1u64..100_000), 1..200)
        ) {
            let arrival = AtomicU64::new(0);
            let burst_ns = u64::from(burst_ms) * 1_000_000;
            let (mut now, mut begun) = (0u64, Vec::new());
            for (pause, amount) in asks {
                now += pause;
                let takes = UnitTime::of(rate).takes_ns(amount);
                let start = book(&arrival, now, takes, burst_ns);
                prop_assert!(start >= now);
                begun.push((start, takes));
            }
            for (first, &(from, _)) in begun.iter().enumerate() {
                let mut taken = 0;
                for &(start, takes) in &begun[first..] {
                    prop_assert!(start >= from, "in the order in which they were booked");
                    // Commands that begin in this interval, without its last one.
                    prop_assert!(taken <= start - from + burst_ns);
                    taken += takes;
                }
            }
        }
    }
}
