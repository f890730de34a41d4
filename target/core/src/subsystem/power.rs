//! Power-on time, power cycles and unsafe shutdowns of the target, for the SMART log. The power of
//! a daemon is that it runs.

use std::time::{Duration, Instant};

/// Power counters of the SMART log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Power {
    /// Starts.
    pub cycles: u64,
    /// Hours with power, all starts together.
    pub on_hours: u64,
    /// Starts that found no end before them.
    pub unsafe_shutdowns: u64,
    /// Milliseconds since this start.
    pub on_ms: u64,
    /// Milliseconds since 1970 by the clock of the machine, as it was at this start, and the time
    /// since then.
    pub unix_ms: u64,
}

/// Saved power counters, and the start of this period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PowerMeter {
    /// Starts, with this one.
    pub cycles: u64,
    /// Starts that found no end before them.
    pub unsafe_shutdowns: u64,
    /// Seconds with power before this start.
    pub seconds_before: u64,
    /// When this start was.
    pub since: Option<Instant>,
    /// The machine's clock then, in milliseconds since 1970.
    pub since_unix_ms: u64,
}

impl Default for PowerMeter {
    fn default() -> PowerMeter {
        PowerMeter {
            cycles: 1,
            unsafe_shutdowns: 0,
            seconds_before: 0,
            since: None,
            since_unix_ms: 0,
        }
    }
}

impl PowerMeter {
    /// The values at `now`.
    pub fn at(&self, now: Instant) -> Power {
        let here = self.here(now);
        let on_ms = here.as_millis().try_into().unwrap_or(u64::MAX);
        Power {
            cycles: self.cycles,
            on_hours: self.seconds_before.saturating_add(here.as_secs()) / 3600,
            unsafe_shutdowns: self.unsafe_shutdowns,
            on_ms,
            unix_ms: self.since_unix_ms.saturating_add(on_ms),
        }
    }

    /// The time since this start.
    pub fn here(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}
