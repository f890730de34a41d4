//! Deadlines of hosts that have connected and not authenticated, by source. Nobody gets the time
//! for a proof anew by coming again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdma::Source;

/// How long a claim is remembered that has come to nothing.
const MEMORY: Duration = Duration::from_secs(60);

/// Sources that are remembered.
const MOST_SOURCES: usize = 1024;

/// Unauthenticated hosts by source: since when, and when last.
#[derive(Debug, Default)]
pub(super) struct UnauthenticatedHosts(HashMap<Source, (Instant, Instant)>);

impl UnauthenticatedHosts {
    /// A host claims a name: since when its source has done so and proved nothing.
    pub(super) fn note(&mut self, from: Source, now: Instant) -> Instant {
        if self.0.len() >= MOST_SOURCES {
            self.0.retain(|_, (_, last)| !is_forgotten(*last, now));
        }
        if self.0.len() >= MOST_SOURCES && !self.0.contains_key(&from) {
            return now;
        }
        let (first, last) = self.0.entry(from).or_insert((now, now));
        if is_forgotten(*last, now) {
            *first = now;
        }
        *last = now;
        *first
    }

    /// A host of this source has proved itself.
    pub(super) fn forget(&mut self, from: Source) {
        self.0.remove(&from);
    }
}

fn is_forgotten(last: Instant, now: Instant) -> bool {
    now.saturating_duration_since(last) >= MEMORY
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use crate::registry::unauthenticated::*;

    #[test]
    fn time_runs_from_the_first_claim_until_one_is_proved_or_none_comes_for_long() {
        let (began, mut claims) = (Instant::now(), UnauthenticatedHosts::default());
        let source = |last| Source::V4(Ipv4Addr::new(10, 0, 0, last));
        let (here, there) = (source(1), source(2));
        let at = |s| began + Duration::from_secs(s);
        assert_eq!(claims.note(here, at(0)), at(0));
        assert_eq!((claims.note(here, at(50)), claims.note(there, at(50))), (at(0), at(50)));
        assert_eq!(claims.note(here, at(109)), at(0));
        assert_eq!(claims.note(here, at(169)), at(169), "long ago");
        claims.forget(here);
        assert_eq!((claims.note(here, at(170)), claims.note(there, at(100))), (at(170), at(50)));
    }

    #[test]
    fn it_does_not_grow_without_end() {
        let (now, mut claims) = (Instant::now(), UnauthenticatedHosts::default());
        for n in 0..5000u32 {
            claims.note(IpAddr::from(n.to_be_bytes()).into(), now);
        }
        assert_eq!(claims.0.len(), MOST_SOURCES);
        claims.note(Source::V4(Ipv4Addr::BROADCAST), now + MEMORY);
        assert_eq!(claims.0.len(), 1);
    }
}
