//! The value of the Timestamp feature: a clock of each controller, which its host sets.
//!
//! Hosts need not agree about the time, and a controller has one host: so each controller counts
//! from what its own host set. It is not maintained across a Controller Level Reset, as the value
//! of no other feature is. Nothing of the daemon is timed by it.
//!
//! Source: NVMe Base Specification 2.1, "Timestamp (Feature Identifier 0Eh)".

use std::time::Instant;

use nvme::feature::Timestamp;
use nvme::persistent_event::TimestampChange;

/// Timestamp of one controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ControllerTimestamp {
    /// The last Controller Level Reset, or the Connect that created the controller.
    reset: Instant,
    /// What the host set since then, in milliseconds since 1970, and when.
    set: Option<(u64, Instant)>,
}

impl ControllerTimestamp {
    /// Counts from 0: the controller was reset `now`.
    pub fn new(now: Instant) -> ControllerTimestamp {
        ControllerTimestamp { reset: now, set: None }
    }

    /// Returns the value for Get Features, modulo 2^48 milliseconds. The clock is that of the
    /// machine, which does not stop while the daemon serves: Synch is 0.
    pub fn at(&self, now: Instant) -> Timestamp {
        match self.set {
            Some((ms, since)) => Timestamp::new(ms.wrapping_add(elapsed_ms(since, now)))
                .with_origin(Timestamp::ORIGIN_HOST),
            None => Timestamp::new(elapsed_ms(self.reset, now)),
        }
    }

    /// Sets the value of Set Features, and returns the event that this is.
    pub fn set(&mut self, stamp: &Timestamp, now: Instant) -> TimestampChange {
        let previous = Timestamp::new(self.at(now).ms());
        self.set = Some((stamp.ms(), now));
        TimestampChange { previous, since_reset_ms: elapsed_ms(self.reset, now) }
    }
}

fn elapsed_ms(since: Instant, now: Instant) -> u64 {
    now.saturating_duration_since(since).as_millis().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::controller::timestamp::*;

    #[test]
    fn a_timestamp_counts_from_reset_or_host_value_modulo_48_bits() {
        let start = Instant::now();
        let later = |ms| start + Duration::from_millis(ms);
        let mut clock = ControllerTimestamp::new(start);
        let (ms, origin) = (clock.at(later(1500)).ms(), clock.at(later(1500)).origin());
        assert_eq!((ms, origin), (1500, Timestamp::ORIGIN_RESET));

        let event = clock.set(&Timestamp::new(1_764_000_000_000), later(2000));
        assert_eq!((event.previous, event.since_reset_ms), (Timestamp::new(2000), 2000));
        assert_eq!(
            clock.at(later(2250)),
            Timestamp::new(1_764_000_000_250).with_origin(Timestamp::ORIGIN_HOST)
        );
        // The value before has no attributes: the event has them reserved.
        let event = clock.set(&Timestamp::new((1 << 48) - 10), later(2300));
        assert_eq!(event.previous, Timestamp::new(1_764_000_000_300));
        assert_eq!(event.since_reset_ms, 2300);
        assert_eq!(clock.at(later(2305)).ms(), (1 << 48) - 5);
        assert_eq!(clock.at(later(2320)).ms(), 10);
        // 0 is a value like any other.
        clock.set(&Timestamp::new(0), later(3000));
        assert_eq!(clock.at(later(3000)), Timestamp::new(0).with_origin(Timestamp::ORIGIN_HOST));
    }
}
