//! `Health`: the state of a backing store. Shared by the rings of all reactors, and kept when the
//! store is opened again: what has failed does not become good by that.
//!
//! While nothing is wrong, an operation costs one relaxed load here. Reactors only note what they
//! meet; looking closer, and opening again, is the business of a thread that may wait
//! (`monitor/mod.rs`).

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nvme::status::Status;

use super::fault_injection::InjectedFault;

/// Every operation is answered with Namespace Not Ready.
const DOWN: u32 = 1 << 17;
/// Its file was shortened: it stays down until the administrator trusts it again.
const SHORTENED: u32 = 1 << 18;
/// A synchronisation has failed, and that is not kept yet: nobody is told of it before.
const UNRECORDED: u32 = 1 << 19;
/// A synchronisation has failed; bits 15:0 are the status field that it was answered with.
const SYNC_FAILED: u32 = 1 << 16;

/// Bits 27:24: what it is told to do wrong.
const FAULT_SHIFT: u32 = 24;
const FAULT: u32 = 0xF << FAULT_SHIFT;

/// How a store fares.
#[derive(Debug, Default)]
pub struct Health {
    /// [`DOWN`], [`SYNC_FAILED`]; 0: nothing is wrong.
    standing: AtomicU32,
    /// Something has failed that a closer look may explain.
    suspect: AtomicBool,
    /// Something was written since the last synchronisation began.
    unsynced: AtomicBool,
    /// Synchronisations that have begun and not come home.
    syncing: AtomicU32,
    /// It gives no space up.
    keeps_space: AtomicBool,
    failures: AtomicU64,
    media_errors: AtomicU64,
    /// See [`Detached`]; 0: its path leads to it.
    detached: AtomicU8,
    /// Rung when a synchronisation fails, for the threads that keep that. None: nobody keeps it.
    recorders: Mutex<Option<Arc<Condvar>>>,
}

/// What is at the path of a store that is served, if not that store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Detached {
    /// Nothing: it was unlinked, or renamed.
    Removed = 1,
    /// Another file or device.
    Replaced = 2,
}

/// Two namespaces have the same health when they share it.
impl PartialEq for Health {
    fn eq(&self, other: &Health) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Health {}

impl Health {
    /// What an operation is answered with that meets a store which is down: not ready, and the
    /// host may ask again after the first of its retry delays.
    pub const NOT_READY: Status = Status::NAMESPACE_NOT_READY.with_crd(1);

    /// The status that keeps an operation from the store, if any does. `durable`: it promises that
    /// data are on stable storage.
    #[inline]
    #[must_use]
    pub fn bars(&self, durable: bool) -> Option<Status> {
        let standing = self.standing.load(Ordering::Relaxed);
        if standing == 0 {
            return None;
        }
        if standing & DOWN != 0 {
            return Some(Health::NOT_READY);
        }
        (durable && standing & SYNC_FAILED != 0).then(|| Status::from_field(standing as u16))
    }

    /// Whether the store is there at all. While it is down, it answers nothing.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & DOWN != 0
    }

    /// The status that every Flush and every write with FUA gets since one of them failed.
    ///
    /// The kernel reports a failed writeback once and forgets it, so a later success would vouch
    /// for data that are gone. Only the administrator who says that the store is trusted again (has
    /// looked at it, or restored it) clears this.
    #[must_use]
    pub fn sync_failure(&self) -> Option<Status> {
        let standing = self.standing.load(Ordering::Relaxed);
        (standing & SYNC_FAILED != 0).then(|| Status::from_field(standing as u16))
    }

    /// Whether its file was shortened since the administrator trusted it last.
    #[must_use]
    pub fn is_shortened(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & SHORTENED != 0
    }

    /// Whether it is down until the administrator trusts what is at its path now.
    #[must_use]
    pub fn is_untrusted(&self) -> bool {
        self.is_shortened() || self.is_down() && self.detached() == Some(Detached::Replaced)
    }

    /// Its file was shortened: it is down, and does not come back by itself.
    pub(crate) fn note_shortened(&self) {
        self.standing.fetch_or(SHORTENED, Ordering::Relaxed);
    }

    /// What is at its path instead of it. It is served all the same.
    #[must_use]
    pub fn detached(&self) -> Option<Detached> {
        match self.detached.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(Detached::Removed),
            _ => Some(Detached::Replaced),
        }
    }

    /// Notes what is at its path instead of it; true when that is news.
    pub fn set_detached(&self, detached: Option<Detached>) -> bool {
        let new = detached.map_or(0, |detached| detached as u8);
        self.detached.swap(new, Ordering::Relaxed) != new
    }

    /// Whether what hosts rely on is not as it should be: down, or a failed synchronisation.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & !FAULT != 0
    }

    /// What the store is told to do wrong.
    #[inline]
    #[must_use]
    pub fn fault(&self) -> InjectedFault {
        match self.standing.load(Ordering::Relaxed) >> FAULT_SHIFT {
            0 => InjectedFault::None,
            number => InjectedFault::from_number(number as u8),
        }
    }

    /// Has the store do something wrong from now on; for tests.
    pub fn set_fault(&self, fault: InjectedFault) {
        let mark = u32::from(fault as u8) << FAULT_SHIFT;
        let mut old = self.standing.load(Ordering::Relaxed);
        while let Err(now) = self.exchange(old, old & !FAULT | mark) {
            old = now;
        }
    }

    /// Whether what hosts deallocate stays as it is, because the store gives no space up. Some say so
    /// only when they shall.
    #[must_use]
    pub fn keeps_space(&self) -> bool {
        self.keeps_space.load(Ordering::Relaxed)
    }

    /// The store gives no space up.
    pub(super) fn note_kept_space(&self) {
        self.keeps_space.store(true, Ordering::Relaxed);
    }

    /// Operations that the system has failed.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Those of them that were errors of the medium: data that could not be read or written.
    #[must_use]
    pub fn media_errors(&self) -> u64 {
        self.media_errors.load(Ordering::Relaxed)
    }

    /// Whether something has happened that a closer look may explain.
    #[must_use]
    pub fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// The closer look has found nothing wrong.
    pub(crate) fn clear_suspicion(&self) {
        self.suspect.store(false, Ordering::Relaxed);
    }

    /// Counts a failure. Gives how many there were.
    pub fn count_failure(&self, errno: i32) -> u64 {
        match Errno::from_raw(errno) {
            Errno::EIO | Errno::ENODATA | Errno::EILSEQ => {
                self.media_errors.fetch_add(1, Ordering::Relaxed);
                self.suspect.store(true, Ordering::Relaxed);
            }
            // Failures that say nothing about whether the store is there.
            Errno::EOPNOTSUPP
            | Errno::EINVAL
            | Errno::EDQUOT
            | Errno::EFBIG
            | Errno::EAGAIN
            | Errno::EINTR
            | Errno::ENOMEM
            | Errno::EBADE
            | Errno::ECANCELED => {}
            _ => self.suspect.store(true, Ordering::Relaxed),
        }
        self.failures.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// Remembers a failed synchronisation; true when it is the first.
    pub fn fail_sync(&self, status: Status) -> bool {
        let recorders = self.recorders();
        let unrecorded = if recorders.is_some() { UNRECORDED } else { 0 };
        let mark = SYNC_FAILED | unrecorded | u32::from(status.field());
        let mut old = self.standing.load(Ordering::Relaxed);
        while old & SYNC_FAILED == 0 {
            match self.exchange(old, old | mark) {
                Ok(_) => {
                    recorders.iter().for_each(|wake| wake.notify_all());
                    return true;
                }
                Err(now) => old = now,
            }
        }
        false
    }

    /// From now on somebody keeps that a synchronisation has failed, and is woken up for it: until
    /// [`Health::note_recorded`] the failure is told to nobody. None: nobody does any more.
    pub(crate) fn record_by(&self, wake: Option<Arc<Condvar>>) {
        let mut recorders = self.recorders();
        if wake.is_none() {
            self.note_recorded();
        }
        *recorders = wake;
    }

    /// Whether a synchronisation has failed and that is not kept yet. Were it told, and the daemon
    /// killed then, the next one would have later flushes succeed.
    #[inline]
    #[must_use]
    pub(crate) fn is_unrecorded(&self) -> bool {
        self.standing.load(Ordering::Acquire) & UNRECORDED != 0
    }

    /// It is kept, or cannot be: who waits is told.
    pub(crate) fn note_recorded(&self) {
        self.standing.fetch_and(!UNRECORDED, Ordering::Release);
    }

    fn recorders(&self) -> MutexGuard<'_, Option<Arc<Condvar>>> {
        self.recorders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what is there when it is not, or not yet, what is expected.
    fn exchange(&self, expected: u32, new: u32) -> Result<u32, u32> {
        self.standing.compare_exchange_weak(expected, new, Ordering::Relaxed, Ordering::Relaxed)
    }

    /// The administrator trusts the store again.
    pub fn trust(&self) {
        self.standing
            .fetch_and(!(SYNC_FAILED | UNRECORDED | SHORTENED | 0xFFFF), Ordering::Relaxed);
    }

    /// The store is not there any more; true when that is news.
    pub fn set_down(&self) -> bool {
        self.suspect.store(true, Ordering::Relaxed);
        self.standing.fetch_or(DOWN, Ordering::Relaxed) & DOWN == 0
    }

    /// The store is there again; true when it was down. One whose file was shortened stays down.
    pub(crate) fn set_up(&self) -> bool {
        let mut old = self.standing.load(Ordering::Relaxed);
        while old & (DOWN | SHORTENED) == DOWN {
            match self.exchange(old, old & !DOWN) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        false
    }

    /// Something was written that is not durable yet. A load first: the line stays shared.
    #[inline]
    pub fn note_write(&self) {
        if !self.unsynced.load(Ordering::Relaxed) {
            self.unsynced.store(true, Ordering::Relaxed);
        }
    }

    /// A synchronisation begins: what has been written so far will be durable, or it fails.
    pub(crate) fn begin_sync(&self) {
        self.syncing.fetch_add(1, Ordering::Relaxed);
        self.unsynced.store(false, Ordering::Release);
    }

    /// A synchronisation is over. Where it has failed, [`Health::note_write`] comes before this.
    pub(crate) fn end_sync(&self) {
        self.syncing.fetch_sub(1, Ordering::Release);
    }

    /// Whether something was written since the last synchronisation began, or that one has not said
    /// yet what has become of it.
    #[must_use]
    pub(crate) fn has_unsynced(&self) -> bool {
        // Of what ends in between either the one or the other tells.
        self.unsynced.load(Ordering::Acquire)
            || self.syncing.load(Ordering::Acquire) > 0
            || self.unsynced.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use crate::health::*;

    #[test]
    fn down_bars_everything_and_a_failed_sync_bars_promises() {
        let health = Health::default();
        assert_eq!((health.bars(false), health.bars(true)), (None, None));
        assert!(health.fail_sync(Status::WRITE_FAULT));
        assert!(!health.fail_sync(Status::INTERNAL_ERROR), "the first one stays");
        assert_eq!((health.bars(false), health.bars(true)), (None, Some(Status::WRITE_FAULT)));
        assert!(health.set_down() && !health.set_down());
        let not_ready = Some(Status::NAMESPACE_NOT_READY.with_crd(1));
        assert_eq!((health.bars(false), health.bars(true)), (not_ready, not_ready));
        assert!(health.set_up() && !health.set_up());
        assert_eq!(health.sync_failure(), Some(Status::WRITE_FAULT), "coming back heals nothing");
        assert!(health.is_degraded());
        health.trust();
        assert!(!health.is_degraded());
        health.set_fault(InjectedFault::Sync);
        assert_eq!((health.fault(), health.bars(true)), (InjectedFault::Sync, None));
        health.set_down();
        assert_eq!((health.set_up(), health.fault()), (true, InjectedFault::Sync));
        health.set_fault(InjectedFault::None);
        assert_eq!((health.fault(), health.is_degraded()), (InjectedFault::None, false));
    }

    #[test]
    fn a_failure_is_unrecorded_only_while_somebody_is_to_keep_it() {
        let health = Health::default();
        let failed = || {
            health.trust();
            assert!(health.fail_sync(Status::WRITE_FAULT));
            health.is_unrecorded()
        };
        assert!(!failed(), "nobody would ever keep it");
        health.record_by(Some(Arc::default()));
        assert!(!health.is_unrecorded() && failed());
        health.note_recorded();
        assert!(!health.is_unrecorded() && health.sync_failure().is_some());
        assert!(failed());
        health.trust();
        assert!(!health.is_unrecorded() && failed());
        health.record_by(None);
        assert!(!health.is_unrecorded() && !failed());
    }

    #[test]
    fn what_was_shortened_stays_down_until_it_is_trusted() {
        let health = Health::default();
        health.note_shortened();
        assert!(health.set_down() && !health.set_up() && health.is_down());
        assert!(health.is_untrusted());
        health.trust();
        assert!(!health.is_untrusted() && health.set_up() && !health.is_down());
        // Another one at its path is a matter of trust only where that is to take its place.
        assert!(health.set_detached(Some(Detached::Replaced)) && !health.is_untrusted());
        health.set_down();
        assert!(health.is_untrusted() && health.set_detached(Some(Detached::Removed)));
        assert!(!health.is_untrusted() && !health.set_detached(Some(Detached::Removed)));
        assert!(health.set_detached(None) && health.detached().is_none());
    }

    #[test]
    fn failures_that_may_mean_the_end_are_looked_into() {
        for (errno, suspect, media) in [
            (libc::EIO, true, 1),
            (libc::ENODEV, true, 0),
            (libc::ENXIO, true, 0),
            (libc::ENOSPC, true, 0),
            (libc::EINVAL, false, 0),
            (libc::ENOMEM, false, 0),
        ] {
            let health = Health::default();
            assert_eq!(health.count_failure(errno), 1);
            assert_eq!((health.is_suspect(), health.media_errors()), (suspect, media), "{errno}");
        }
    }
}
