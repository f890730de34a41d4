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
//! and another flush in its place would succeed. It confirms what was written before it began: a
//! generation counts the flushes that began after a write, and only one of the latest generation
//! leads to Clean.
//!
//! All controllers of one host in a subsystem share one: it may write by one path and flush by
//! another.

use std::sync::atomic::{AtomicU16, Ordering};

use crate::subsystem::MAX_NSID;

const CLEAN: u16 = 0;
/// It has written since its last flush.
const WRITTEN: u16 = 1;
/// A flush of it has met the failure, so it knows.
const REPORTED: u16 = 2;
/// Its next flush fails.
const UNREPORTED: u16 = 3;
/// A flush of what it has written is in progress.
const FLUSHING: u16 = 4;
/// The bits of these states; the others are the generation, modulo 8192.
const STATE: u16 = 7;
const GENERATION: u16 = STATE + 1;

/// Unflushed writes of one host to the namespaces of a subsystem.
#[derive(Debug)]
pub struct Unflushed {
    /// By namespace id.
    states: Box<[AtomicU16]>,
}

impl Default for Unflushed {
    fn default() -> Unflushed {
        Unflushed { states: (0..=MAX_NSID).map(|_| AtomicU16::new(CLEAN)).collect() }
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
        if matches!(state.load(Ordering::Relaxed) & STATE, CLEAN | FLUSHING) {
            self.presume_written(nsid);
        }
    }

    /// A flush begins: what was written so far will be durable, or the flush fails. Returns its
    /// generation; none: it has to fail, because what was written before may be lost and the host
    /// does not know.
    #[must_use]
    pub fn begin_flush(&self, nsid: u32) -> Option<u16> {
        let Some(word) = self.states.get(nsid as usize) else { return Some(0) };
        let begin = |old: u16| match old & STATE {
            WRITTEN => (old & !STATE | FLUSHING).wrapping_add(GENERATION),
            FLUSHING => old,
            // Clean.
            _ => old & !STATE,
        };
        let update = |old| Some(begin(old));
        let old = match word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, update) {
            Ok(old) | Err(old) => old,
        };
        (old & STATE != UNREPORTED).then(|| begin(old) / GENERATION)
    }

    /// A flush of this generation has succeeded.
    pub(crate) fn end_flush(&self, nsid: u32, generation: u16) {
        let Some(word) = self.states.get(nsid as usize) else { return };
        let clean = generation * GENERATION;
        let flushing = clean | FLUSHING;
        let _ = word.compare_exchange(flushing, clean, Ordering::AcqRel, Ordering::Relaxed);
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

    /// Another namespace has this id from now on.
    pub(crate) fn reset(&self, nsid: u32) {
        self.change(nsid, |_| Some(CLEAN));
    }

    /// Restores what was persisted of a host: with the store trusted, its next flush fails.
    pub(crate) fn restore(&self, nsid: u32, is_trusted: bool) {
        self.change(nsid, |_| Some(if is_trusted { UNREPORTED } else { WRITTEN }));
    }

    /// Whether its next flush fails, with the store trusted; or would after a trust.
    pub(crate) fn is_unreported(&self, nsid: u32, is_trusted: bool) -> bool {
        let Some(word) = self.states.get(nsid as usize) else { return false };
        match word.load(Ordering::Relaxed) & STATE {
            UNREPORTED => true,
            WRITTEN | FLUSHING => !is_trusted,
            _ => false,
        }
    }

    /// Whether there is nothing to keep for a later controller of the host.
    pub(crate) fn is_clean(&self) -> bool {
        let is_clean = |state: &AtomicU16| state.load(Ordering::Relaxed) & STATE == CLEAN;
        self.states.iter().all(is_clean)
    }

    /// Changes the state of a namespace, unless `to` returns none.
    fn change(&self, nsid: u32, to: impl Fn(u16) -> Option<u16>) {
        let Some(word) = self.states.get(nsid as usize) else { return };
        let update = |old: u16| to(old & STATE).map(|state| old & !STATE | state);
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, update);
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::unflushed::*;

    /// Whether a flush that begins now may succeed.
    fn may_flush(host: &Unflushed, nsid: u32) -> bool {
        host.begin_flush(nsid).is_some()
    }

    #[test]
    fn hosts_with_unflushed_writes_get_one_flush_failure_after_a_trust() {
        let host = Unflushed::default();
        host.note_write(1);
        host.on_trust(1);
        assert!(may_flush(&host, 2), "another namespace");
        host.note_write(1);
        assert!(!host.is_clean() && !may_flush(&host, 1));
        assert!(may_flush(&host, 1) && host.is_clean());
    }

    #[test]
    fn a_trust_fails_no_flush_of_hosts_that_flushed_or_saw_the_failure() {
        let host = Unflushed::default();
        host.note_write(1);
        let flush = host.begin_flush(1).expect("well");
        host.end_flush(1, flush);
        host.on_trust(1);
        assert!(may_flush(&host, 1));
        host.note_write(1);
        assert!(may_flush(&host, 1), "it begins");
        host.end_failed_flush(1, true);
        // The trust makes durable what is written meanwhile.
        host.note_write(1);
        host.on_trust(1);
        assert!(may_flush(&host, 1));
    }

    #[test]
    fn an_abandoned_flush_does_not_count_as_a_reported_failure() {
        let host = Unflushed::default();
        host.note_write(1);
        assert!(may_flush(&host, 1));
        host.end_failed_flush(1, false);
        host.on_trust(1);
        assert!(!may_flush(&host, 1));
    }

    #[test]
    fn a_trust_during_a_flush_leaves_the_earlier_writes_unreported() {
        let host = Unflushed::default();
        host.note_write(1);
        let flushes = [1, 2].map(|_| host.begin_flush(1).expect("two at once"));
        host.on_trust(1);
        host.end_flush(1, flushes[0]);
        host.end_failed_flush(1, false);
        assert!(!may_flush(&host, 1) && may_flush(&host, 1));
        // What is written meanwhile is not part of it.
        host.note_write(1);
        let flush = host.begin_flush(1).unwrap();
        host.note_write(1);
        host.end_flush(1, flush);
        host.on_trust(1);
        assert!(!may_flush(&host, 1) && host.is_clean());
    }

    #[test]
    fn a_flush_confirms_no_write_that_completed_after_it_began() {
        let host = Unflushed::default();
        host.note_write(1);
        let first = host.begin_flush(1).unwrap();
        host.note_write(1);
        let second = host.begin_flush(1).unwrap();
        host.end_flush(1, first);
        host.on_trust(1);
        // Of the store that is served from now on.
        host.end_flush(1, second);
        assert!(!may_flush(&host, 1) && may_flush(&host, 1));
        // The later one covers the earlier writes as well.
        host.note_write(1);
        let first = host.begin_flush(1).unwrap();
        host.note_write(1);
        let second = host.begin_flush(1).unwrap();
        host.end_flush(1, second);
        assert!(host.is_clean());
        host.end_flush(1, first);
        host.on_trust(1);
        assert!(may_flush(&host, 1));
    }

    #[test]
    fn a_host_with_unknown_write_state_gets_a_flush_failure() {
        let host = Unflushed::default();
        host.presume_written(1);
        host.on_trust(1);
        assert!(!may_flush(&host, 1));
        let none = Unflushed::none();
        none.presume_written(1);
        none.on_trust(1);
        assert!(may_flush(&none, 1) && none.is_clean());
    }
}
