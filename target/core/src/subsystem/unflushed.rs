//! Hosts with unflushed writes to a namespace, which must be notified when data may be lost.
//!
//! A failed fsync is reported to every flush until the store is trusted again. A host that has
//! written before, and did not flush meanwhile, would not learn of it: its next flush would
//! succeed, and confirm data that may be lost. So that flush fails once.
//!
//! | state | a write | a flush begins | succeeds | meets the failure | ends otherwise | trust |
//! |---|---|---|---|---|---|---|
//! | Clean | Written | - | - | Reported | Written | - |
//! | Written | - | Flushing | - | Reported | - | Unreported |
//! | Flushing | Written | - | Clean | Reported | Written | Unreported |
//! | Reported | - | Clean | - | - | - | Clean |
//! | Unreported | - | Clean, and it fails | - | - | - | - |
//!
//! A flush that has begun confirms nothing before it succeeds: the store may be trusted meanwhile,
//! and another flush in its place would succeed.
//!
//! All controllers of one host in a subsystem share one: it may write by one path and flush by
//! another.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::subsystem::MAX_NSID;

const CLEAN: u8 = 0;
/// It has written since its last flush.
const WRITTEN: u8 = 1;
/// A flush of it has met the failure, so it knows.
const REPORTED: u8 = 2;
/// Its next flush fails.
const UNREPORTED: u8 = 3;
/// A flush of what it has written is in progress.
const FLUSHING: u8 = 4;

/// Unflushed writes of one host to the namespaces of a subsystem.
#[derive(Debug)]
pub struct Unflushed {
    /// By namespace id.
    states: Box<[AtomicU8]>,
}

impl Default for Unflushed {
    fn default() -> Unflushed {
        Unflushed { states: (0..=MAX_NSID).map(|_| AtomicU8::new(CLEAN)).collect() }
    }
}

impl Unflushed {
    /// For a controller without namespaces.
    pub fn none() -> Unflushed {
        Unflushed { states: Box::default() }
    }

    /// Something was written that is not durable yet. A load first: the line stays shared.
    #[inline]
    pub(crate) fn note_write(&self, nsid: u32) {
        let Some(state) = self.states.get(nsid as usize) else { return };
        if matches!(state.load(Ordering::Relaxed), CLEAN | FLUSHING) {
            self.presume_written(nsid);
        }
    }

    /// A flush begins: what was written so far will be durable, or the flush fails. False: it has
    /// to fail, because what was written before may be lost and the host does not know.
    #[must_use]
    pub(crate) fn begin_flush(&self, nsid: u32) -> bool {
        let before = self.change(nsid, |state| match state {
            CLEAN => None,
            WRITTEN | FLUSHING => Some(FLUSHING),
            _ => Some(CLEAN),
        });
        before != UNREPORTED
    }

    /// A flush has succeeded.
    pub(crate) fn end_flush(&self, nsid: u32) {
        self.change(nsid, |state| (state == FLUSHING).then_some(CLEAN));
    }

    /// A flush has failed. `reported`: with what every flush gets until the store is trusted.
    pub(crate) fn end_failed_flush(&self, nsid: u32, reported: bool) {
        self.change(nsid, |state| match (state, reported) {
            (CLEAN | FLUSHING | WRITTEN, true) => Some(REPORTED),
            (CLEAN | FLUSHING, false) => Some(WRITTEN),
            _ => None,
        });
    }

    /// Assumes unflushed writes of this host.
    pub fn presume_written(&self, nsid: u32) {
        self.change(nsid, |state| matches!(state, CLEAN | FLUSHING).then_some(WRITTEN));
    }

    /// The store is trusted from now on.
    pub(crate) fn on_trust(&self, nsid: u32) {
        self.change(nsid, |state| match state {
            WRITTEN | FLUSHING => Some(UNREPORTED),
            REPORTED => Some(CLEAN),
            _ => None,
        });
    }

    /// Whether there is nothing to keep for a later controller of the host.
    pub(crate) fn is_clean(&self) -> bool {
        let is_clean = |state: &AtomicU8| state.load(Ordering::Relaxed) == CLEAN;
        self.states.iter().all(is_clean)
    }

    /// Changes the state of a namespace, unless `to` returns none; returns the one before.
    fn change(&self, nsid: u32, to: impl Fn(u8) -> Option<u8>) -> u8 {
        let Some(state) = self.states.get(nsid as usize) else { return CLEAN };
        match state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, to) {
            Ok(before) | Err(before) => before,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::unflushed::*;

    #[test]
    fn hosts_with_unflushed_writes_get_one_flush_failure_after_a_trust() {
        let host = Unflushed::default();
        host.note_write(1);
        host.on_trust(1);
        assert!(host.begin_flush(2), "another namespace");
        host.note_write(1);
        assert!(!host.is_clean() && !host.begin_flush(1));
        assert!(host.begin_flush(1) && host.is_clean());
    }

    #[test]
    fn a_trust_fails_no_flush_of_hosts_that_flushed_or_saw_the_failure() {
        let host = Unflushed::default();
        host.note_write(1);
        assert!(host.begin_flush(1), "well");
        host.end_flush(1);
        host.on_trust(1);
        assert!(host.begin_flush(1));
        host.note_write(1);
        assert!(host.begin_flush(1), "it begins");
        host.end_failed_flush(1, true);
        // The trust makes durable what is written meanwhile.
        host.note_write(1);
        host.on_trust(1);
        assert!(host.begin_flush(1));
    }

    #[test]
    fn an_abandoned_flush_does_not_count_as_a_reported_failure() {
        let host = Unflushed::default();
        host.note_write(1);
        assert!(host.begin_flush(1));
        host.end_failed_flush(1, false);
        host.on_trust(1);
        assert!(!host.begin_flush(1));
    }

    #[test]
    fn a_trust_during_a_flush_leaves_the_earlier_writes_unreported() {
        let host = Unflushed::default();
        host.note_write(1);
        assert!(host.begin_flush(1) && host.begin_flush(1), "two at once");
        host.on_trust(1);
        host.end_flush(1);
        host.end_failed_flush(1, false);
        assert!(!host.begin_flush(1) && host.begin_flush(1));
        // What is written meanwhile is not part of it.
        host.note_write(1);
        assert!(host.begin_flush(1));
        host.note_write(1);
        host.end_flush(1);
        host.on_trust(1);
        assert!(!host.begin_flush(1) && host.is_clean());
    }

    #[test]
    fn a_host_with_unknown_write_state_gets_a_flush_failure() {
        let host = Unflushed::default();
        host.presume_written(1);
        host.on_trust(1);
        assert!(!host.begin_flush(1));
        let none = Unflushed::none();
        none.presume_written(1);
        none.on_trust(1);
        assert!(none.begin_flush(1) && none.is_clean());
    }
}
