//! Throttle of failed authentications. Guessing costs arithmetic and fills the log, so a host that fails
//! repeatedly is refused for a while, by name and address: failures from elsewhere in a host's name do not
//! lock that host out.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nvme::Nqn;
use rdma::Source;
use rdma::source::{PerSourceTable, SourceKey};

/// Failures that are allowed within [`WINDOW`].
const MOST_FAILURES: u8 = 8;

/// How long failures count.
const WINDOW: Duration = Duration::from_secs(10);

/// Pairs of name and address that are remembered.
const MOST_ENTRIES: usize = 1024;

/// A host name, and the source of its connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Claimant {
    from: IpAddr,
    host: Nqn,
}

impl SourceKey for Claimant {
    fn source(&self) -> Source {
        self.from.into()
    }
}

/// Recent authentication failures.
#[derive(Debug)]
pub struct Throttle {
    /// How many, for [`WINDOW`] after the first.
    failures: PerSourceTable<Claimant, u8>,
}

impl Default for Throttle {
    fn default() -> Throttle {
        Throttle { failures: PerSourceTable::new(MOST_ENTRIES) }
    }
}

impl Throttle {
    /// Counts a failure.
    pub fn note(&mut self, from: IpAddr, host: Nqn, now: Instant) {
        self.failures.expire_all(now);
        let key = Claimant { from, host };
        match self.failures.get_mut(&key) {
            Some(count) => *count = count.saturating_add(1),
            None => drop(self.failures.insert(key, 1, Some(now + WINDOW))),
        }
    }

    /// Whether a host must wait.
    pub fn is_closed(&self, from: IpAddr, host: &Nqn, now: Instant) -> bool {
        let key = Claimant { from, host: *host };
        let is_closed = self.failures.get(&key).is_some_and(|count| *count >= MOST_FAILURES);
        is_closed && self.failures.until(&key).is_some_and(|until| until > now)
    }
}

#[cfg(test)]
mod tests {
    use crate::auth::throttle::*;

    #[test]
    fn repeated_failures_throttle_only_their_address_and_host() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let (here, there) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        for _ in 0..MOST_FAILURES {
            assert!(!throttle.is_closed(here, &host, now));
            throttle.note(here, host, now);
        }
        assert!(throttle.is_closed(here, &host, now));
        assert!(!throttle.is_closed(there, &host, now));
        assert!(!throttle.is_closed(here, &Nqn::DISCOVERY, now));
        let later = now + WINDOW;
        assert!(!throttle.is_closed(here, &host, later));
        throttle.note(here, host, later);
        assert!(!throttle.is_closed(here, &host, later), "the old ones no longer count");
    }

    /// Also for the source that is added last: it would have any number of attempts.
    #[test]
    fn failures_of_an_ipv6_subnet_do_not_evict_those_of_others() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        let at = |n: u16| IpAddr::from([0x2001, 0xDB8, 0, 7, 0, 0, 0, n]);
        let fail = |throttle: &mut Throttle, from| throttle.note(from, host, now);
        let other = [10, 0, 0, 1].into();
        (0..MOST_FAILURES).for_each(|_| fail(&mut throttle, other));
        (0..5000).for_each(|n| fail(&mut throttle, at(n)));
        assert!(throttle.is_closed(other, &host, now));
        (0..MOST_FAILURES).for_each(|_| fail(&mut throttle, [10, 0, 0, 2].into()));
        assert!(throttle.is_closed([10, 0, 0, 2].into(), &host, now));
        (0..MOST_FAILURES).for_each(|_| fail(&mut throttle, at(1)));
        assert!(throttle.is_closed(at(1), &host, now), "the latest of the subnet are remembered");
    }

    #[test]
    fn failure_records_are_bounded_and_the_oldest_is_evicted() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        for n in 0..5000u32 {
            throttle.note(IpAddr::from(n.to_be_bytes()), host, now);
        }
        assert_eq!(throttle.failures.len(), MOST_ENTRIES);
        let newest = [255, 0, 0, 1].into();
        (0..MOST_FAILURES).for_each(|_| throttle.note(newest, host, now));
        assert!(throttle.is_closed(newest, &host, now), "where all have one the oldest goes");
        throttle.note(newest, host, now + WINDOW);
        assert_eq!(throttle.failures.len(), 1);
    }
}
