//! Throttle of failed authentications. Guessing costs us arithmetic and fills the log, so whoever
//! fails repeatedly is refused for a while, by name and address: a stranger elsewhere cannot lock a
//! host out by failing in its name.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nvme::Nqn;
use rdma::Source;

/// Failures that are allowed within [`WINDOW`].
const MOST_FAILURES: u8 = 8;

/// How long failures count.
const WINDOW: Duration = Duration::from_secs(10);

/// Pairs of name and address that are remembered.
const MOST_ENTRIES: usize = 1024;

/// Of these, pairs of one source: an IPv6 subnet has no end of addresses.
const MOST_OF_SOURCE: usize = 64;

/// Recent authentication failures.
#[derive(Debug, Default)]
pub struct Throttle {
    failures: HashMap<(IpAddr, Nqn), (Instant, u8)>,
}

impl Throttle {
    /// Notes a failure.
    pub fn note(&mut self, from: IpAddr, host: Nqn, now: Instant) {
        if self.failures.len() >= MOST_ENTRIES {
            self.failures.retain(|_, (since, _)| !is_over(*since, now));
        }
        if !self.failures.contains_key(&(from, host)) && !self.make_room(from.into()) {
            return;
        }
        let (since, count) = self.failures.entry((from, host)).or_insert((now, 0));
        if is_over(*since, now) {
            (*since, *count) = (now, 0);
        }
        *count = count.saturating_add(1);
    }

    /// Makes room for one more pair of a source; false where others have it all. Of too many of one
    /// source, the oldest goes.
    fn make_room(&mut self, source: Source) -> bool {
        let own = self.failures.iter().filter(|((from, _), _)| Source::from(*from) == source);
        let (count, oldest) = own.fold((0, None), |(count, oldest), (pair, (since, _))| {
            let oldest: Option<(Instant, _)> =
                oldest.filter(|(first, _)| first <= since).or(Some((*since, *pair)));
            (count + 1, oldest)
        });
        let is_full = self.failures.len() >= MOST_ENTRIES;
        match oldest.filter(|_| is_full || count >= MOST_OF_SOURCE) {
            Some((_, pair)) => self.failures.remove(&pair).is_some(),
            None => !is_full,
        }
    }

    /// Whether a host must wait.
    #[must_use]
    pub fn is_closed(&self, from: IpAddr, host: &Nqn, now: Instant) -> bool {
        let entry = self.failures.get(&(from, *host));
        entry.is_some_and(|(since, count)| *count >= MOST_FAILURES && !is_over(*since, now))
    }
}

fn is_over(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= WINDOW
}

#[cfg(test)]
mod tests {
    use crate::auth::throttle::*;

    #[test]
    fn who_fails_too_often_waits_and_others_do_not() {
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

    #[test]
    fn one_ipv6_subnet_leaves_room_for_the_failures_of_others() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        let at = |n: u16| IpAddr::from([0x2001, 0xDB8, 0, 7, 0, 0, 0, n]);
        (0..5000).for_each(|n| throttle.note(at(n), host, now + Duration::from_millis(n.into())));
        assert_eq!(throttle.failures.len(), MOST_OF_SOURCE);
        assert!(throttle.failures.contains_key(&(at(4999), host)), "the latest are remembered");
        throttle.note([10, 0, 0, 1].into(), host, now);
        assert_eq!(throttle.failures.len(), MOST_OF_SOURCE + 1);
    }

    #[test]
    fn it_does_not_grow_without_end() {
        let (now, mut throttle) = (Instant::now(), Throttle::default());
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        for n in 0..5000u32 {
            throttle.note(IpAddr::from(n.to_be_bytes()), host, now);
        }
        assert_eq!(throttle.failures.len(), MOST_ENTRIES);
        throttle.note([255, 0, 0, 1].into(), host, now + WINDOW);
        assert_eq!(throttle.failures.len(), 1);
    }
}
