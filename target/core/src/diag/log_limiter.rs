//! Rate-limited log of refused and disconnected hosts.
//!
//! Any peer can send requests that are refused, as fast as the network carries them, and must not fill
//! the log. So the first of a cause is logged at once, and those within a second after it as a number.

use std::net::SocketAddr;
use std::slice;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use nvme::Nqn;
use rdma::log_interval::LogInterval;
use tracing::warn;

use crate::diag::RecentDisconnects;
use crate::diag::cause::{Cause, DisconnectRecord};

/// Time for which a cause is only counted after it was logged.
const QUIET: Duration = Duration::from_secs(1);

/// A number for each cause, for everyone to read.
#[derive(Debug)]
pub struct Totals([AtomicU64; Cause::COUNT]);

impl Default for Totals {
    fn default() -> Totals {
        Totals(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<'a> IntoIterator for &'a Totals {
    type Item = &'a AtomicU64;
    type IntoIter = slice::Iter<'a, AtomicU64>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// Rate limit of log lines by cause, on one reactor.
#[derive(Debug, Default)]
pub struct CauseLog {
    causes: Vec<CauseLines>,
}

#[derive(Clone, Copy, Debug, Default)]
struct CauseLines {
    line: LogInterval,
    /// Refusals since the last line that were not logged.
    more: u64,
    /// The last of these.
    last: Option<Peer>,
    /// Total count.
    total: u64,
}

/// Address of a host, and its name, if known.
type Peer = (SocketAddr, Option<Nqn>);

impl CauseLog {
    /// Writes down what has happened, and logs it unless the same cause was logged just before.
    pub fn record(&mut self, why: DisconnectRecord, disconnects: &RecentDisconnects, now: Instant) {
        if self.count(why.cause, now) {
            log(&why);
        } else {
            self.causes[why.cause as usize].last = Some((why.remote, why.host));
        }
        disconnects.note(why);
    }

    /// Counts a cause. Returns true if it is to be logged now.
    fn count(&mut self, cause: Cause, now: Instant) -> bool {
        self.causes.resize(Cause::COUNT, CauseLines::default());
        let entry = &mut self.causes[cause as usize];
        entry.total += 1;
        // The count before it is logged first, by `overdue`.
        let is_due = entry.more == 0 && entry.line.is_due(now, QUIET);
        entry.more += u64::from(!is_due);
        is_due
    }

    /// Total count of each of [`Cause::ALL`], logged or not.
    pub fn totals(&self) -> impl Iterator<Item = u64> {
        self.causes.iter().map(|entry| entry.total)
    }

    /// Logs how often causes occurred beyond what was logged a while ago, with the last host of each.
    pub fn log_overdue(&mut self, now: Instant) {
        while let Some((cause, more)) = self.overdue(now) {
            let (remote, host) = self.causes[cause as usize].last.take().unzip();
            let remote = remote.as_ref().map(tracing::field::display);
            let host = host.flatten();
            let host = host.as_ref().map(tracing::field::display);
            warn!(remote, host, cause = cause.name(), "{}, {more} more", cause.reason());
        }
    }

    /// A cause that occurred more often than it was logged, a while ago, and how often; to be
    /// called until there is none.
    fn overdue(&mut self, now: Instant) -> Option<(Cause, u64)> {
        let is_due = |entry: &mut CauseLines| entry.more > 0 && entry.line.is_due(now, QUIET);
        let at = self.causes.iter_mut().position(is_due)?;
        Some((Cause::ALL[at], std::mem::take(&mut self.causes[at].more)))
    }
}

/// Logs one line, with the details as fields.
fn log(why: &DisconnectRecord) {
    let DisconnectRecord { remote, local, qid, .. } = why;
    let cause = why.cause.name();
    let host = why.host.as_ref().map(tracing::field::display);
    let subsystem = why.subsystem.as_ref().map(tracing::field::display);
    warn!(%remote, %local, host, subsystem, qid, cause, "{why}");
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use crate::diag::log_limiter::*;

    #[test]
    fn repeated_refusals_are_logged_once_per_second_and_cause() {
        let (start, mut refusals) = (Instant::now(), CauseLog::default());
        let (mut singly, mut summed, mut lines) = (0, 0, 0);
        // Ten seconds of 1000 refusals each, looked after four times a second.
        for ms in 0..10_000 {
            let now = start + Duration::from_millis(ms);
            singly += u64::from(refusals.count(Cause::NoRoom, now));
            if ms % 250 == 0
                && let Some((cause, more)) = refusals.overdue(now)
            {
                assert_eq!(cause, Cause::NoRoom);
                (summed, lines) = (summed + more, lines + 1);
            }
        }
        assert_eq!((singly, lines), (1, 9));
        // Another cause is logged immediately, whatever is counted.
        let now = start + Duration::from_millis(9_999);
        assert!(refusals.count(Cause::Overloaded, now));
        assert!(!refusals.count(Cause::Overloaded, now));
        // The rest is logged after the flood, and then nothing.
        let later = start + Duration::from_secs(12);
        while let Some((_, more)) = refusals.overdue(later) {
            summed += more;
        }
        assert_eq!(singly + summed, 10_000 + 1);
        assert_eq!(refusals.overdue(later + QUIET), None);
        assert!(refusals.count(Cause::NoRoom, later + QUIET));
    }

    #[test]
    fn every_refusal_is_recorded_even_if_not_logged() {
        let (now, mut refusals, disconnects) = (
            Instant::now(),
            CauseLog::default(),
            RecentDisconnects::new(|| SystemTime::UNIX_EPOCH),
        );
        let at = ([192, 0, 2, 1], 4420).into();
        for _ in 0..100 {
            refusals.record(DisconnectRecord::nameless(Cause::NoRoom, at, at), &disconnects, now);
        }
        assert_eq!((disconnects.count(Cause::NoRoom), disconnects.list(None)[0].count), (100, 100));
        let last = refusals.causes[Cause::NoRoom as usize].last;
        assert_eq!(last, Some((at, None)), "the line names the last host");
        assert_eq!(refusals.overdue(now + QUIET), Some((Cause::NoRoom, 99)));
    }
}
