//! Trace of a run: a hash that is equal for equal runs, and lines for reading.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Verbosity of the trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Telling {
    /// Only the hash.
    #[default]
    Nothing,
    /// The last lines are kept, this many.
    Last(usize),
    /// Every line is printed immediately.
    All,
}

/// The trace of one run.
#[derive(Debug)]
pub struct Trace {
    telling: Telling,
    start: Instant,
    /// Nanoseconds since `start`.
    now: AtomicU64,
    sum: AtomicU64,
    lines: Mutex<VecDeque<String>>,
}

impl Trace {
    /// The trace of a run that begins at `start`.
    pub fn new(telling: Telling, start: Instant) -> Trace {
        Trace {
            telling,
            start,
            now: AtomicU64::new(0),
            sum: AtomicU64::new(0xcbf2_9ce4_8422_2325),
            lines: Mutex::default(),
        }
    }

    /// Advances the time of the trace.
    pub fn advance(&self, now: Instant) {
        let since = now.saturating_duration_since(self.start).as_nanos() as u64;
        self.now.store(since, Ordering::Relaxed);
    }

    /// Adds an event: numbers that are equal for equal runs, and its line.
    #[inline]
    pub fn note<T: Display>(&self, what: [u64; 3], line: impl FnOnce() -> T) {
        let mut sum = self.sum.load(Ordering::Relaxed);
        for word in [self.now.load(Ordering::Relaxed), what[0], what[1], what[2]] {
            sum = (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        self.sum.store(sum, Ordering::Relaxed);
        if self.telling != Telling::Nothing {
            self.tell(&line());
        }
    }

    /// Whether lines are kept or printed.
    pub fn is_told(&self) -> bool {
        self.telling != Telling::Nothing
    }

    /// Adds a line that is not part of the hash.
    pub fn tell(&self, line: &dyn Display) {
        let at = Duration::from_nanos(self.now.load(Ordering::Relaxed));
        let line = format!("{:5}.{:06} {line}", at.as_secs(), at.subsec_micros());
        match self.telling {
            Telling::Nothing => {}
            Telling::All => println!("{line}"),
            Telling::Last(count) => {
                let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
                if lines.len() >= count {
                    lines.pop_front();
                }
                lines.push_back(line);
            }
        }
    }

    /// The hash.
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// The lines that were kept.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::trace::*;

    #[test]
    fn the_trace_checksum_covers_order_and_time_of_steps() {
        let start = Instant::now();
        let run = |steps: &[(u64, u64)]| {
            let trace = Trace::new(Telling::Last(2), start);
            for (at, what) in steps {
                trace.advance(start + Duration::from_micros(*at));
                trace.note([*what, 0, 0], || format!("step {what}"));
            }
            (trace.sum(), trace.lines())
        };
        let (sum, lines) = run(&[(1, 1), (2, 2), (1_000_003, 3)]);
        assert_eq!(lines, ["    0.000002 step 2", "    1.000003 step 3"]);
        assert_eq!(sum, run(&[(1, 1), (2, 2), (1_000_003, 3)]).0);
        assert_ne!(sum, run(&[(1, 2), (2, 1), (1_000_003, 3)]).0);
        assert_ne!(sum, run(&[(1, 1), (2, 2), (1_000_004, 3)]).0);
    }
}
