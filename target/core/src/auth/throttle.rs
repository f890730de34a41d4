//! Throttle of failed authentications. Guessing costs arithmetic and fills the log, so a host that fails
//! repeatedly is refused for a while, by name and address: failures from elsewhere in a host's name do not
//! lock that host out.
//!
//! The owner of one IPv6 address has those of its subnet, each with attempts of its own. So the failures
//! of a subnet in one name are limited as well. A neighbour may reach that limit in the name of a host, so
//! it does not apply to an address at which the host has authenticated before.

use std::hash::Hash;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nvme::Nqn;
use rdma::Source;
use rdma::source::{PerSourceTable, SourceKey};

/// Failures of an address that are allowed within [`WINDOW`].
const MOST_FAILURES: u8 = 8;

/// Failures of all addresses of an IPv6 subnet that are allowed within [`WINDOW`].
const MOST_FAILURES_OF_SUBNET: u8 = 64;

/// How long failures count.
const WINDOW: Duration = Duration::from_secs(10);

/// Entries of each table.
const MOST_ENTRIES: usize = 1024;

/// A host name, and the address or source of its connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Claimant<A> {
    from: A,
    host: Nqn,
}

impl<A: Copy + Eq + Hash + Into<Source>> SourceKey for Claimant<A> {
    fn source(&self) -> Source {
        self.from.into()
    }
}

/// Numbers of failures, for [`WINDOW`] after the first.
type Failures<A> = PerSourceTable<Claimant<A>, u8>;

/// Recent authentication failures.
#[derive(Debug)]
pub struct Throttle {
    of_address: Failures<IpAddr>,
    /// Of IPv6 only: an IPv4 address is a source by itself.
    of_subnet: Failures<Source>,
    /// Addresses at which a host has authenticated.
    proved: PerSourceTable<Claimant<IpAddr>, ()>,
}

impl Default for Throttle {
    fn default() -> Throttle {
        Throttle {
            of_address: PerSourceTable::new(MOST_ENTRIES),
            of_subnet: PerSourceTable::new(MOST_ENTRIES),
            proved: PerSourceTable::new(MOST_ENTRIES),
        }
    }
}

impl Throttle {
    /// Counts a failure.
    pub fn note(&mut self, from: IpAddr, host: Nqn, now: Instant) {
        count(&mut self.of_address, Claimant { from, host }, now);
        if let from @ Source::V6(_) = from.into() {
            count(&mut self.of_subnet, Claimant { from, host }, now);
        }
    }

    /// A host has authenticated at this address.
    pub fn note_proof(&mut self, from: IpAddr, host: Nqn) {
        if !from.is_ipv6() {
            return;
        }
        self.proved.insert(Claimant { from, host }, (), None);
    }

    /// Whether a host must wait.
    pub fn is_closed(&self, from: IpAddr, host: &Nqn, now: Instant) -> bool {
        let (host, at) = (*host, Claimant { from, host: *host });
        let subnet = Claimant { from: from.into(), host };
        has_reached(&self.of_address, &at, MOST_FAILURES, now)
            || has_reached(&self.of_subnet, &subnet, MOST_FAILURES_OF_SUBNET, now)
                && self.proved.get(&at).is_none()
    }
}

fn count<A>(failures: &mut Failures<A>, key: Claimant<A>, now: Instant)
where
    Claimant<A>: SourceKey,
{
    failures.expire_all(now);
    match failures.get_mut(&key) {
        Some(count) => *count = count.saturating_add(1),
        None => drop(failures.insert(key, 1, Some(now + WINDOW))),
    }
}

fn has_reached<A>(failures: &Failures<A>, key: &Claimant<A>, limit: u8, now: Instant) -> bool
where
    Claimant<A>: SourceKey,
{
    failures.get(key).is_some_and(|count| *count >= limit)
        && failures.until(key).is_some_and(|until| until > now)
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

    /// The owner of a subnet has 2^64 addresses to guess from.
    #[test]
    fn failures_of_an_ipv6_subnet_are_limited_over_all_its_addresses() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        let at = |n: u16| IpAddr::from([0x2001, 0xDB8, 0, 7, 0, 0, 0, n]);
        throttle.note_proof(at(1), host);
        for n in 0..u16::from(MOST_FAILURES_OF_SUBNET) {
            assert!(!throttle.is_closed(at(1000 + n), &host, now), "after {n}");
            throttle.note(at(1000 + n), host, now);
        }
        assert!(throttle.is_closed(at(2000), &host, now), "an address without any failure");
        assert!(!throttle.is_closed(at(1), &host, now), "the host has authenticated there");
        assert!(!throttle.is_closed(at(2000), &Nqn::DISCOVERY, now));
        let neighbour = IpAddr::from([0x2001, 0xDB8, 0, 8, 0, 0, 0, 1]);
        assert!(!throttle.is_closed(neighbour, &host, now));
        assert!(!throttle.is_closed(at(2000), &host, now + WINDOW));
        (0..MOST_FAILURES).for_each(|_| throttle.note(at(1), host, now));
        assert!(throttle.is_closed(at(1), &host, now), "the limit of an address has no exception");
    }

    /// Each IPv4 address has an owner of its own.
    #[test]
    fn failures_of_ipv4_addresses_do_not_add_up() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        (0..200u8).for_each(|n| throttle.note(IpAddr::from([192, 0, 2, n]), host, now));
        assert!(!throttle.is_closed([192, 0, 2, 1].into(), &host, now));
    }

    #[test]
    fn failure_records_are_bounded_and_the_oldest_is_evicted() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        for n in 0..5000u32 {
            throttle.note(IpAddr::from(n.to_be_bytes()), host, now);
        }
        assert_eq!(throttle.of_address.len(), MOST_ENTRIES);
        let newest = [255, 0, 0, 1].into();
        (0..MOST_FAILURES).for_each(|_| throttle.note(newest, host, now));
        assert!(throttle.is_closed(newest, &host, now), "where all have one the oldest goes");
        throttle.note(newest, host, now + WINDOW);
        assert_eq!(throttle.of_address.len(), 1);
    }
}
