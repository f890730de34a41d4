//! Fallback where UDP GSO is unavailable: a device without checksum offload cannot segment trains,
//! and the kernel does not do it instead (`EIO`; some return `EINVAL`).
//!
//! The same errors have other causes: a datagram that has become too long for its path, for
//! example. So a failed train is not sufficient evidence. Only if its datagrams can then be sent
//! one by one was the train the cause; and as devices and routes change, that is assumed for a
//! limited time.

use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Time without trains after one was refused.
const BELIEVED: Duration = Duration::from_secs(10);
/// Maximum of local addresses that are recorded.
const MOST: usize = 256;

/// The local addresses without trains.
#[derive(Debug, Default)]
pub(super) struct Singles(Vec<(IpAddr, Instant)>);

impl Singles {
    /// Maximum length of a train from this address; 1: no trains.
    pub(super) fn longest_train(&self, now: Instant, from: IpAddr) -> usize {
        let here = |(address, until): &(IpAddr, Instant)| *address == from && now < *until;
        if self.0.iter().any(here) { 1 } else { usize::MAX }
    }

    /// A train was refused, and its datagrams were sent one by one.
    pub(super) fn only(&mut self, now: Instant, from: IpAddr) {
        let (until, room) = (now + BELIEVED, self.0.len() < MOST);
        match self.0.iter_mut().find(|(address, _)| *address == from) {
            Some((_, known)) => *known = until,
            None if room => {
                self.0.push((from, until));
                tracing::info!(
                    address = %from,
                    "UDP GSO unavailable on this device: datagrams are sent one by one"
                );
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::udp::gso_fallback::*;

    #[test]
    fn gso_refusal_applies_temporarily_and_per_source_address() {
        let now = Instant::now();
        let [a, b]: [IpAddr; 2] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
        let mut singles = Singles::default();
        assert_eq!(singles.longest_train(now, a), usize::MAX);
        singles.only(now, a);
        let late = now + BELIEVED;
        let just_before = late - Duration::from_nanos(1);
        assert_eq!([a, b].map(|from| singles.longest_train(now, from)), [1, usize::MAX]);
        assert_eq!(singles.longest_train(just_before, a), 1);
        assert_eq!(singles.longest_train(late, a), usize::MAX);
        // Refused again.
        singles.only(late, a);
        assert_eq!(singles.longest_train(late, a), 1);
        assert_eq!(singles.0.len(), 1);
    }
}
