//! Round-trip time estimator of RFC 6298 ("Computing TCP's Retransmission Timer"), with limits for
//! data center networks.

/// Minimum margin over the mean: a wake-up may take longer than it did so far.
const LEAST_MARGIN_NS: u64 = 100_000;
/// Time to wait for an overdue acknowledgement: minimum and maximum.
const PATIENCE_NS: (u64, u64) = (50_000, 2_000_000);
/// Maximum of a sample: weighted sums fit.
const LONGEST_NS: u64 = u64::MAX >> 4;

#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct RttEstimator {
    /// None before the first sample.
    mean_ns: Option<u64>,
    deviation_ns: u64,
    /// Retransmission timeout, without a maximum.
    timeout_ns: u64,
}

impl RttEstimator {
    /// Adds a sample. Packets that were sent twice are no samples, because it is unknown which
    /// sending was acknowledged.
    pub(super) fn sample(&mut self, took_ns: u64) {
        let took = took_ns.min(LONGEST_NS);
        let (mean, deviation) = match self.mean_ns {
            None => (took, took / 2),
            Some(mean) => {
                ((mean * 7 + took) / 8, (self.deviation_ns * 3 + mean.abs_diff(took)) / 4)
            }
        };
        (self.mean_ns, self.deviation_ns) = (Some(mean), deviation);
        self.timeout_ns = mean + (deviation * 4).max(mean).max(LEAST_MARGIN_NS);
    }

    /// Retransmission timeout of the oldest packet, at most `most`: an eighth of that before the
    /// first sample.
    #[inline]
    pub(super) fn timeout_ns(&self, most_ns: u64) -> u64 {
        if self.mean_ns.is_none() { most_ns / 8 } else { most_ns.min(self.timeout_ns) }
    }

    /// How much longer a packet may take than a later one before it is lost.
    pub(super) fn patience_ns(&self) -> u64 {
        let (least, most) = PATIENCE_NS;
        self.mean_ns.map_or(most, |mean| (mean / 4).clamp(least, most))
    }

    /// Time within which a second NAK for the same packet is taken for the first.
    pub(super) fn echo_ns(&self) -> u64 {
        self.mean_ns.unwrap_or_default() / 2
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::requester::rtt::*;

    const MOST: u64 = 67_000_000;

    fn micros(count: u64) -> u64 {
        count * 1000
    }

    #[test]
    fn rtt_estimator_uses_defaults_before_the_first_sample() {
        let mut trip = RttEstimator::default();
        assert_eq!((trip.timeout_ns(MOST), trip.patience_ns()), (MOST / 8, micros(2000)));
        trip.sample(micros(1000));
        assert_eq!(trip.timeout_ns(MOST), micros(3000));
        assert_eq!((trip.patience_ns(), trip.echo_ns()), (micros(250), micros(500)));
    }

    #[test]
    fn timeout_is_short_for_steady_rtt_and_long_for_jitter() {
        let mut trip = RttEstimator::default();
        (0..100).for_each(|_| trip.sample(micros(100)));
        assert_eq!((trip.timeout_ns(MOST), trip.patience_ns()), (micros(200), micros(50)));
        for at in 0..100 {
            trip.sample(micros(if at % 2 == 0 { 100 } else { 2100 }));
        }
        let careful = trip.timeout_ns(MOST);
        assert!(careful > micros(4000) && careful < micros(8000), "{careful:?}");
        trip.sample(9_000_000_000);
        assert_eq!(trip.timeout_ns(MOST), MOST, "never longer than was agreed");
    }
}
