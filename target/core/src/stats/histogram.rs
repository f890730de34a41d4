//! Latency histogram with log-linear buckets: four to each power of two, so a percentile is exact
//! to a quarter, from a microsecond to a minute.

use std::sync::atomic::{AtomicU64, Ordering};

/// Width of the finest bucket in nanoseconds. A power of two, to avoid divisions on the data path;
/// iterations are hardly shorter than a microsecond.
pub const UNIT_NS: u64 = 1 << 10;

/// Buckets: up to 2^26 units, 69 s, and one for what is longer.
pub const BUCKETS: usize = 101;

/// The bucket of a latency.
#[inline]
pub const fn bucket(ns: u64) -> usize {
    // From 4 units on the three highest bits are 4 to 7, and each more below them is another four
    // buckets.
    const FOUR: u64 = 4 * UNIT_NS;
    let top = 63 ^ (ns | FOUR).leading_zeros();
    let at = 4 * (top - FOUR.ilog2()) as usize + (ns >> (top - 2)) as usize;
    if at < BUCKETS { at } else { BUCKETS - 1 }
}

/// Nanoseconds that everything in a bucket is below; none for the last.
pub const fn bound_ns(bucket: usize) -> Option<u64> {
    match bucket {
        0..4 => Some((bucket as u64 + 1) * UNIT_NS),
        4..100 => Some((bucket as u64 % 4 + 5) << (bucket / 4 - 1) << UNIT_NS.trailing_zeros()),
        _ => None,
    }
}

/// Counts of one reactor, its only writer; any thread may read.
#[derive(Debug)]
pub struct Histogram([AtomicU64; BUCKETS]);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Histogram {
    /// Counts a latency for this number of commands.
    #[inline]
    pub fn count(&self, ns: u64, commands: u64) {
        self.count_in(bucket(ns), commands);
    }

    /// The same for latencies whose bucket is known.
    #[inline]
    pub(super) fn count_in(&self, bucket: usize, commands: u64) {
        if let Some(cell) = self.0.get(bucket) {
            bump(cell, commands);
        }
    }

    /// The counts.
    pub fn read(&self) -> [u64; BUCKETS] {
        std::array::from_fn(|at| self.0[at].load(Ordering::Relaxed))
    }

    /// Adds the counts of a histogram that is no longer written.
    pub fn absorb(&self, other: &Histogram) {
        self.0.iter().zip(other.read()).for_each(|(cell, by)| bump(cell, by));
    }
}

/// Adds to a value with a single writer: a load and a store, without a locked instruction.
#[inline]
pub fn bump(cell: &AtomicU64, by: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use crate::stats::histogram::*;

    #[test]
    fn histogram_buckets_are_contiguous_and_match_their_bounds() {
        let mut below = 0;
        for at in 0..BUCKETS - 1 {
            let bound = bound_ns(at).unwrap();
            assert_eq!(bucket(below), at);
            assert_eq!(bucket(bound - 1), at);
            assert_eq!(bucket(bound), at + 1);
            assert!(at < 4 || (bound - below) * 4 <= below, "a quarter at most: {at}");
            below = bound;
        }
        assert_eq!(below, 1 << 36, "69 s");
        assert_eq!((bound_ns(BUCKETS - 1), bucket(u64::MAX)), (None, BUCKETS - 1));
    }

    #[test]
    fn histograms_can_be_merged() {
        let (one, two) = (Histogram::default(), Histogram::default());
        one.count(5_000, 1);
        two.count(5_000, 1);
        two.count(u64::MAX, 1);
        one.absorb(&two);
        let counts = one.read();
        assert_eq!((counts[bucket(5_000)], counts[BUCKETS - 1]), (2, 1));
        assert_eq!(counts.iter().sum::<u64>(), 3);
    }
}
