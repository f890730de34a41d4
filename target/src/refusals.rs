//! Connection requests and proofs of identity that a reactor refuses, and how often that is told.
//!
//! Anybody can send requests that are refused, as fast as the network carries them, and must not
//! fill the log that way. So the first of a cause is told at once, and those that follow within a
//! second only as their number.

use std::fmt;
use std::time::{Duration, Instant};

use nvme::auth::Failure;
use nvme::cm::RejectStatus;
use rdma::FabricError;

/// How long a cause that was told is only counted.
const QUIET: Duration = Duration::from_secs(1);

/// Why a connection request, or a host, was refused.
#[derive(Debug)]
pub enum Refusal {
    /// Its private data or its depth of reads are not acceptable.
    Request(RejectStatus),
    /// The fabric has no queue pair for it.
    NoQueuePair(FabricError),
    /// Too many connections have not sent their Connect.
    NoConnect,
    /// The reactor that it was meant for has no room for letters.
    MailboxFull,
    /// A host has not proved who it is.
    Authentication(Failure),
    /// A host has failed to prove who it is too often.
    Throttled,
}

/// What each kind of refusal is.
pub const KINDS: [&str; 6] = [
    "connection request rejected",
    "no queue pair for a connection request",
    "too many connections without a Connect",
    "a reactor's mailbox is full",
    "authentication failed",
    "too many failed authentications",
];

impl Refusal {
    const fn kind(&self) -> usize {
        match self {
            Refusal::Request(_) => 0,
            Refusal::NoQueuePair(_) => 1,
            Refusal::NoConnect => 2,
            Refusal::MailboxFull => 3,
            Refusal::Authentication(_) => 4,
            Refusal::Throttled => 5,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(KINDS[self.kind()])?;
        match self {
            Refusal::Request(status) => write!(f, ": {status}"),
            Refusal::NoQueuePair(error) => write!(f, ": {error}"),
            Refusal::Authentication(why) => write!(f, ": {why}"),
            Refusal::NoConnect | Refusal::MailboxFull | Refusal::Throttled => Ok(()),
        }
    }
}

/// The refusals of one reactor, counted.
#[derive(Debug, Default)]
pub struct Refusals {
    kinds: [Told; KINDS.len()],
    totals: [u64; KINDS.len()],
}

#[derive(Clone, Copy, Debug, Default)]
struct Told {
    last: Option<Instant>,
    /// Refusals since then that were not told.
    more: u64,
}

impl Refusals {
    /// Counts a refusal. True: it is to be told now, by itself.
    pub fn count(&mut self, refusal: &Refusal, now: Instant) -> bool {
        self.totals[refusal.kind()] += 1;
        let told = &mut self.kinds[refusal.kind()];
        let quiet = told.last.is_some_and(|last| now.saturating_duration_since(last) < QUIET);
        // What was counted before is told first, by `overdue`.
        if quiet || told.more > 0 {
            told.more += 1;
            return false;
        }
        told.last = Some(now);
        true
    }

    /// How many there were of each of [`KINDS`], told or not.
    #[must_use]
    pub fn totals(&self) -> [u64; KINDS.len()] {
        self.totals
    }

    /// A kind of refusal of which more came a while ago than were told, and how many; again until
    /// there is none.
    pub fn overdue(&mut self, now: Instant) -> Option<(&'static str, u64)> {
        let due = |told: &Told| {
            told.more > 0
                && told.last.is_none_or(|last| now.saturating_duration_since(last) >= QUIET)
        };
        let kind = self.kinds.iter().position(due)?;
        let told = &mut self.kinds[kind];
        told.last = Some(now);
        Some((KINDS[kind], std::mem::take(&mut told.more)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_refusals_is_told_once_a_second_for_each_cause() {
        let (start, mut refusals) = (Instant::now(), Refusals::default());
        let (mut singly, mut summed, mut lines) = (0, 0, 0);
        // Ten seconds of 1000 refusals each, looked after four times a second.
        for ms in 0..10_000 {
            let now = start + Duration::from_millis(ms);
            singly += u64::from(refusals.count(&Refusal::NoConnect, now));
            if ms % 250 == 0
                && let Some((kind, more)) = refusals.overdue(now)
            {
                assert_eq!(kind, "too many connections without a Connect");
                (summed, lines) = (summed + more, lines + 1);
            }
        }
        assert_eq!((singly, lines), (1, 9));
        // Another cause is told at once, whatever is counted.
        let now = start + Duration::from_millis(9_999);
        assert!(refusals.count(&Refusal::MailboxFull, now));
        assert!(!refusals.count(&Refusal::MailboxFull, now));
        // The rest is told when the flood is over, and then nothing.
        let later = start + Duration::from_secs(12);
        while let Some((_, more)) = refusals.overdue(later) {
            summed += more;
        }
        assert_eq!(singly + summed, 10_000 + 1);
        assert_eq!(refusals.overdue(later + QUIET), None);
        assert!(refusals.count(&Refusal::NoConnect, later + QUIET));
    }
}
