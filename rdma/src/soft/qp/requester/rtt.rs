//! Round-trip time estimator of RFC 6298 ("Computing TCP's Retransmission Timer"), with limits for
//! data center networks.

use std::time::Duration;

/// Minimum margin over the mean: a wake-up may take longer than it did so far.
const LEAST_MARGIN: Duration = Duration::from_micros(100);
/// Time to wait for an overdue acknowledgement: minimum and maximum.
const PATIENCE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));

/// The estimator.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct RttEstimator {
    /// None before the first sample.
    mean: Option<Duration>,
    deviation: Duration,
    /// Retransmission timeout, without a maximum.
    timeout: Duration,
}

impl RttEstimator {
    /// Adds a sample. Packets that were sent twice are no samples, because it is unknown which
    /// sending was acknowledged.
    pub(super) fn sample(&mut self, took: Duration) {
        let (mean, deviation) = match self.mean {
            None => (took, took / 2),
            Some(mean) => ((mean * 7 + took) / 8, (self.deviation * 3 + mean.abs_diff(took)) / 4),
        };
        (self.mean, self.deviation) = (Some(mean), deviation);
        self.timeout = mean + (deviation * 4).max(mean).max(LEAST_MARGIN);
    }

    /// Retransmission timeout of the oldest packet, at most `most`: an eighth of that before the
    /// first sample.
    pub(super) fn timeout(&self, most: Duration) -> Duration {
        if self.mean.is_none() { most / 8 } else { most.min(self.timeout) }
    }

    /// How much longer a packet may take than a later one before it is lost.
    pub(super) fn patience(&self) -> Duration {
        let (least, most) = PATIENCE;
        self.mean.map_or(most, |mean| (mean / 4).clamp(least, most))
    }

    /// Time within which a second NAK for the same packet is taken for the first.
    pub(super) fn echo(&self) -> Duration {
        self.mean.unwrap_or_default() / 2
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::requester::rtt::*;

    const MOST: Duration = Duration::from_millis(67);

    fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn nothing_is_known_before_the_first_answer() {
        let mut trip = RttEstimator::default();
        assert_eq!((trip.timeout(MOST), trip.patience()), (MOST / 8, Duration::from_millis(2)));
        trip.sample(micros(1000));
        assert_eq!(trip.timeout(MOST), micros(3000));
        assert_eq!((trip.patience(), trip.echo()), (micros(250), micros(500)));
    }

    #[test]
    fn steady_answers_make_it_sharp_and_scattered_ones_careful() {
        let mut trip = RttEstimator::default();
        (0..100).for_each(|_| trip.sample(micros(100)));
        assert_eq!((trip.timeout(MOST), trip.patience()), (micros(200), micros(50)));
        for at in 0..100 {
            trip.sample(micros(if at % 2 == 0 { 100 } else { 2100 }));
        }
        let careful = trip.timeout(MOST);
        assert!(careful > micros(4000) && careful < micros(8000), "{careful:?}");
        trip.sample(Duration::from_secs(9));
        assert_eq!(trip.timeout(MOST), MOST, "never longer than was agreed");
    }
}
