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
    /// The time that one command takes of the rate of commands.
    op_ns: u64,
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
    pub fn new(limit: Limit, now: Instant) -> Limiter {
        let ops = Schedule::new(limit.iops.map(u64::from));
        Limiter {
            limit,
            burst_ns: u64::from(limit.burst_ms) * 1_000_000,
            began: now,
            op_ns: ops.takes_ns(1),
            ops,
            bytes: Schedule::new(limit.bandwidth),
        }
    }

    /// Its rates.
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// Books one command of this length.
    #[must_use]
    pub fn book(&self, now: Instant, bytes: u64) -> Grant {
        let mut waits_ns = 0;
        self.book_at(self.ns_at(now), bytes, &mut waits_ns);
        Grant::new(now, waits_ns, self.takes_ns(bytes), bytes)
    }

    /// Books bytes of a command in progress: later ones wait for it.
    pub(crate) fn charge(&self, now: Instant, bytes: u64) {
        self.bytes.book((self.ns_at(now), u64::MAX), self.bytes.takes_ns(bytes), &mut 0);
    }

    /// Books one command of this length, `now_ns` after the beginning; `waits_ns` is at least the
    /// nanoseconds until its start then.
    #[inline(always)]
    pub(crate) fn book_at(&self, now_ns: u64, bytes: u64, waits_ns: &mut u64) {
        // What ends before begins at once.
        let times_ns = (now_ns, now_ns.saturating_add(self.burst_ns));
        self.ops.book(times_ns, self.op_ns, waits_ns);
        self.bytes.book(times_ns, self.bytes.takes_ns(bytes), waits_ns);
    }

    /// Returns the nanoseconds that one command of this length takes.
    pub(crate) fn takes_ns(&self, bytes: u64) -> u64 {
        self.op_ns.max(self.bytes.takes_ns(bytes))
    }

    /// Cancels the booking of a command of this length: later bookings are earlier by its time. The
    /// part of its time that has passed is lost.
    pub fn give_back(&self, now: Instant, bytes: u64) {
        let now_ns = self.ns_at(now);
        self.ops.give_back(now_ns, self.op_ns);
        self.bytes.give_back(now_ns, self.bytes.takes_ns(bytes));
    }

    /// Returns the nanoseconds since it began.
    pub(crate) fn ns_at(&self, now: Instant) -> u64 {
        ns_between(self.began, now)
    }
}

impl PartialEq for Limiter {
    fn eq(&self, other: &Limiter) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Limiter {}

/// The time since the limiters of a queue pair began: it is read once for all, if they began
/// together.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct LimiterClock {
    /// When they began, if all at once.
    began: Option<Instant>,
    /// The last time that was read, and the nanoseconds from the beginning to it.
    read: Option<Instant>,
    now_ns: u64,
}

impl LimiterClock {
    /// Returns the clock of these limiters.
    pub(crate) fn of<'a>(mut limiters: impl Iterator<Item = &'a Arc<Limiter>>) -> LimiterClock {
        let first = limiters.next().map(|limiter| limiter.began);
        let began = first.filter(|first| limiters.all(|limiter| limiter.began == *first));
        LimiterClock { began, ..LimiterClock::default() }
    }

    /// Returns the nanoseconds since they began; none if they did at different times.
    #[inline]
    pub(crate) fn read(&mut self, now: Instant) -> Option<u64> {
        let began = self.began?;
        if self.read != Some(now) {
            (self.read, self.now_ns) = (Some(now), ns_between(began, now));
        }
        Some(self.now_ns)
    }
}

fn ns_between(began: Instant, now: Instant) -> u64 {
    u64::try_from(now.saturating_duration_since(began).as_nanos()).unwrap_or(u64::MAX)
}

impl Grant {
    /// Of a command that starts `waits_ns` after `now`.
    pub(crate) fn new(now: Instant, waits_ns: u64, takes_ns: u64, bytes: u64) -> Grant {
        let start = match waits_ns {
            0 => now,
            waits_ns => now + Duration::from_nanos(waits_ns),
        };
        Grant { start, takes: Duration::from_nanos(takes_ns), bytes }
    }
}

/// The virtual schedule of one rate.
#[derive(Debug)]
struct Schedule {
    time: UnitTime,
    /// The theoretical arrival time of the next booking.
    arrival: AtomicU64,
}

impl Schedule {
    fn new(rate: Option<u64>) -> Schedule {
        let time = rate.map_or(UnitTime::UNLIMITED, UnitTime::of);
        Schedule { time, arrival: AtomicU64::new(0) }
    }

    /// Returns the nanoseconds that an amount takes of it; 0: it is not limited.
    #[inline]
    fn takes_ns(&self, amount: u64) -> u64 {
        self.time.takes_ns(amount)
    }

    /// Books a time, now and with a burst that ends then; `waits_ns` is at least the nanoseconds until
    /// its start then.
    #[inline(always)]
    fn book(&self, times_ns: (u64, u64), takes_ns: u64, waits_ns: &mut u64) {
        if takes_ns != 0 {
            let (now_ns, burst_end_ns) = times_ns;
            let before = advance(&self.arrival, now_ns, takes_ns);
            if before > burst_end_ns {
                wait_for(before - burst_end_ns, waits_ns);
            }
        }
    }

    fn give_back(&self, now_ns: u64, takes_ns: u64) {
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
    /// The time without a limit: nothing takes any.
    const UNLIMITED: UnitTime = UnitTime(0);

    /// Returns the time at so many units a second, rounded up so that a limit is never exceeded by
    /// rounding.
    fn of(rate: u64) -> UnitTime {
        let second = u128::from(SECOND_NS) << FRACTION_BITS;
        UnitTime(u64::try_from(second.div_ceil(u128::from(rate.max(1)))).unwrap_or(u64::MAX))
    }

    /// Returns the nanoseconds that an amount takes, rounded up.
    #[inline(always)]
    fn takes_ns(self, amount: u64) -> u64 {
        match u32::try_from(amount) {
            // Fewer than 2^96 in the fraction, so none of it is lost.
            Ok(amount) => (self.fraction_of(amount.into()) >> FRACTION_BITS) as u64,
            Err(_) => self.takes_long_ns(amount),
        }
    }

    #[cold]
    fn takes_long_ns(self, amount: u64) -> u64 {
        u64::try_from(self.fraction_of(amount) >> FRACTION_BITS).unwrap_or(u64::MAX)
    }

    /// The time times 2^32, rounded up to a nanosecond. It cannot overflow.
    #[inline(always)]
    fn fraction_of(self, amount: u64) -> u128 {
        let ns = u128::from(amount) * u128::from(self.0);
        ns.wrapping_add(u128::from(u32::MAX))
    }
}

/// Advances the theoretical arrival time by a booking; returns the one before.
#[inline(always)]
fn advance(arrival: &AtomicU64, now_ns: u64, takes_ns: u64) -> u64 {
    let mut before = arrival.load(Ordering::Relaxed);
    loop {
        let after = before.max(now_ns).saturating_add(takes_ns);
        match arrival.compare_exchange_weak(before, after, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return before,
            Err(other) => before = other,
        }
    }
}

/// A call, so that a command that need not wait calculates no time.
#[cold]
#[inline(never)]
fn wait_for(ns: u64, waits_ns: &mut u64) {
    *waits_ns = ns.max(*waits_ns);
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
    fn limiters_with_a_common_start_share_one_clock_reading() {
        let (now, ms) = (Instant::now(), Duration::from_millis(1));
        let began = |at: &[Instant]| -> Vec<_> {
            at.iter().map(|at| Arc::new(Limiter::new(limit(1000, 0), *at))).collect()
        };
        let mut clock = LimiterClock::of(began(&[now, now]).iter());
        let read = [now + ms, now + ms, now + 3 * ms].map(|at| clock.read(at));
        assert_eq!(read, [Some(1_000_000), Some(1_000_000), Some(3_000_000)]);
        assert_eq!(LimiterClock::of(began(&[now, now, now + ms]).iter()).read(now + ms), None);
        assert_eq!(LimiterClock::of(began(&[]).iter()).read(now), None);
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
    fn refunded_capacity_is_available_to_the_next_command() {
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
        fn booked_times_match_the_rate_rounded_up(rate: u64, amount in 0..1u64 << 40) {
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
        fn no_interval_exceeds_its_rate_and_burst(
            rate in 1u64..5_000_000, burst_ms in 0u32..50,
            asks in prop::collection::vec((0u64..2_000_000, 1u64..100_000), 1..200)
        ) {
            let arrival = AtomicU64::new(0);
            let burst_ns = u64::from(burst_ms) * 1_000_000;
            let (mut now, mut begun) = (0u64, Vec::new());
            for (pause, amount) in asks {
                now += pause;
                let takes = UnitTime::of(rate).takes_ns(amount);
                let before = advance(&arrival, now, takes);
                let start = now + before.saturating_sub(now + burst_ns);
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
