//! Deadlines of hosts that have connected and not authenticated, by source. Connecting again does not
//! extend the time to authenticate.

use std::time::{Duration, Instant};

use rdma::Source;
use rdma::source::PerSourceTable;

/// How long an unsuccessful claim is remembered.
const MEMORY: Duration = Duration::from_secs(60);

/// Sources that are remembered.
const MOST_SOURCES: usize = 1024;

/// Unauthenticated hosts by source: since when, until [`MEMORY`] after the last one.
#[derive(Debug)]
pub(super) struct UnauthenticatedHosts(PerSourceTable<Source, Instant>);

impl Default for UnauthenticatedHosts {
    fn default() -> UnauthenticatedHosts {
        UnauthenticatedHosts(PerSourceTable::new(MOST_SOURCES))
    }
}

impl UnauthenticatedHosts {
    /// A host claims a name: returns since when its source has done so without authentication.
    pub(super) fn note(&mut self, from: Source, now: Instant) -> Instant {
        self.0.expire_all(now);
        let first = self.0.get(&from).copied().unwrap_or(now);
        self.0.insert(from, first, Some(now + MEMORY));
        first
    }

    /// A host of this source has proved itself.
    pub(super) fn forget(&mut self, from: Source) {
        self.0.remove(&from);
    }
}

#[cfg(test)]
mod tests {
    use crate::registry::unauthenticated::*;

    #[test]
    fn unauthenticated_time_runs_from_first_attempt_to_success_or_expiry() {
        let (began, mut claims) = (Instant::now(), UnauthenticatedHosts::default());
        let (here, there) = (Source::V4(1), Source::V4(2));
        let at = |s| began + Duration::from_secs(s);
        assert_eq!(claims.note(here, at(0)), at(0));
        assert_eq!((claims.note(here, at(50)), claims.note(there, at(50))), (at(0), at(50)));
        assert_eq!((claims.note(here, at(109)), claims.note(there, at(109))), (at(0), at(50)));
        claims.forget(there);
        assert_eq!((claims.note(here, at(110)), claims.note(there, at(110))), (at(0), at(110)));
        assert_eq!(claims.note(here, at(170)), at(170), "long ago");
    }

    #[test]
    fn unauthenticated_sources_are_bounded_and_expire() {
        let (now, mut claims) = (Instant::now(), UnauthenticatedHosts::default());
        for n in 0..5000u32 {
            claims.note(Source::V4(n), now);
        }
        assert_eq!(claims.0.len(), MOST_SOURCES);
        let (newest, later) = (Source::V4(10_001), now + MEMORY / 2);
        assert_eq!((claims.note(newest, now), claims.note(newest, later)), (now, now));
        claims.note(Source::V4(u32::MAX), now + MEMORY * 2);
        assert_eq!(claims.0.len(), 1);
    }
}
