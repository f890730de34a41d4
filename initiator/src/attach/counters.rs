//! What clients have requested since the start.

use crate::nbd::Kind;

/// The kinds of requests that are counted, by name.
pub(super) const KINDS: [&str; 5] = ["read", "write", "flush", "trim", "write-zeroes"];

/// Requests of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct KindCounters {
    pub(super) requests: u64,
    pub(super) bytes: u64,
    pub(super) errors: u64,
}

/// Requests of all kinds.
#[derive(Debug, Default)]
pub(super) struct Counters {
    kinds: [KindCounters; KINDS.len()],
}

impl Counters {
    /// A request is answered.
    pub(super) fn add(&mut self, kind: Kind, len: u32, success: bool) {
        let number = match kind {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::Flush => 2,
            Kind::Trim => 3,
            Kind::WriteZeroes => 4,
            Kind::Cache | Kind::BlockStatus | Kind::Disconnect | Kind::Unknown(_) => return,
        };
        let counters = &mut self.kinds[number];
        counters.requests += 1;
        match success {
            true => counters.bytes += u64::from(len),
            false => counters.errors += 1,
        }
    }

    /// Requests other than reads that were answered.
    pub(super) fn written(&self) -> u64 {
        self.kinds.iter().skip(1).map(|kind| kind.requests).sum()
    }

    /// Returns the counters in the order of [`KINDS`].
    pub(super) fn all(&self) -> impl Iterator<Item = KindCounters> {
        self.kinds.iter().copied()
    }
}
