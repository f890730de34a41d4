//! `Health`: the state of a backing store. Shared by the rings of all reactors, and kept when the
//! store is opened again: reopening does not undo a failure.
//!
//! Without a failure, an operation costs one relaxed load here. Reactors only record failures; a
//! thread that may block (`monitor/mod.rs`) examines and reopens.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use nix::errno::Errno;
use nvme::status::Status;

use super::allocation::Allocation;
use super::fault_injection::InjectedFault;
use crate::lock;

/// Down: every operation fails with Namespace Not Ready.
const DOWN: u32 = 1 << 17;
/// The file was truncated: down until the administrator trusts the store again.
const SHORTENED: u32 = 1 << 18;
/// An fsync has failed, and the failure is not persisted yet: it is not reported before.
const UNRECORDED: u32 = 1 << 19;
/// Another gateway serves the store: operations fail with Asymmetric Access Inaccessible.
const STANDBY: u32 = 1 << 20;
/// Hosts have written to another file: down until the administrator trusts the store.
const REPLACED: u32 = 1 << 21;
/// An fsync has failed; bits 15:0 are the status field of its response.
const SYNC_FAILED: u32 = 1 << 16;

/// Bits 27:24: the injected fault.
const FAULT_SHIFT: u32 = 24;
const FAULT: u32 = 0xF << FAULT_SHIFT;

/// State of a backing store: failures, removal, injected fault.
#[derive(Debug, Default)]
pub struct Health {
    /// Bits such as [`DOWN`] and [`SYNC_FAILED`]; 0: no failure.
    standing: AtomicU32,
    /// An operation has failed in a way that the monitor has to examine.
    suspect: AtomicBool,
    /// Data were written since the last fsync began.
    unsynced: AtomicBool,
    /// fsync operations that have begun and not completed.
    syncing: AtomicU32,
    /// Deallocate does not free space.
    keeps_space: AtomicBool,
    failures: AtomicU64,
    media_errors: AtomicU64,
    /// See [`Detached`]; 0: its path leads to it.
    detached: AtomicU8,
    allocation: Allocation,
    /// Notified when an fsync fails, for the threads that persist that. None: failures are not
    /// persisted.
    recorders: Mutex<Option<Arc<Condvar>>>,
}

/// What is at the path of a served store instead of that store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Detached {
    /// Nothing: it was unlinked or renamed.
    Removed = 1,
    /// Another file or device.
    Replaced = 2,
}

/// Health is compared by identity: namespaces that share a store are equal.
impl PartialEq for Health {
    fn eq(&self, other: &Health) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Health {}

impl Health {
    /// Of a store that was just opened: what an earlier process has written, and hosts have not
    /// flushed, may be in a volatile cache.
    pub(crate) fn of_opened(read_only: bool) -> Health {
        Health { unsynced: AtomicBool::new(!read_only), ..Health::default() }
    }

    /// Status of operations while the store is down: Namespace Not Ready, to be retried after the
    /// first retry delay.
    pub const NOT_READY: Status = Status::NAMESPACE_NOT_READY.with_crd(1);

    /// The status with which an operation is rejected before it reaches the store, if any.
    /// `durable`: its success promises stable storage.
    #[inline]
    pub fn rejects(&self, durable: bool) -> Option<Status> {
        let standing = self.standing.load(Ordering::Relaxed);
        if standing == 0 {
            return None;
        }
        // Also where its ANA group is served without it: no other path leads to it.
        if standing & DOWN != 0 {
            return Some(Health::NOT_READY);
        }
        if standing & STANDBY != 0 {
            return Some(Status::ANA_INACCESSIBLE);
        }
        (durable && standing & SYNC_FAILED != 0).then(|| Status::from_field(standing as u16))
    }

    /// Whether another gateway serves the store, as far as this one knows.
    pub fn is_standby(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & STANDBY != 0
    }

    /// Whether it would be served if it were not in standby.
    pub fn is_only_standby(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & (STANDBY | DOWN) == STANDBY
    }

    /// Operations are refused, so that hosts use another path; or are not any more.
    pub fn set_standby(&self, standby: bool) {
        match standby {
            true => self.standing.fetch_or(STANDBY, Ordering::Relaxed),
            false => self.standing.fetch_and(!STANDBY, Ordering::Relaxed),
        };
    }

    /// Whether the store is unavailable. While it is down, no operation reaches it.
    pub fn is_down(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & DOWN != 0
    }

    /// Status of every Flush and every FUA write since one of them failed.
    ///
    /// The kernel reports a failed writeback once and then forgets it, so a later success would
    /// confirm data that are lost. Only the administrator, who has checked or restored the store,
    /// clears this by trusting it again.
    pub fn sync_failure(&self) -> Option<Status> {
        let standing = self.standing.load(Ordering::Relaxed);
        (standing & SYNC_FAILED != 0).then(|| Status::from_field(standing as u16))
    }

    /// Whether the file was truncated since the administrator last trusted it.
    pub fn is_shortened(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & SHORTENED != 0
    }

    /// Whether the store is down until the administrator trusts what is at its path.
    pub fn is_untrusted(&self) -> bool {
        self.is_shortened()
            || self.is_replaced()
            || self.is_down() && self.detached() == Some(Detached::Replaced)
    }

    /// The file was truncated: the store goes down and needs the administrator to return.
    pub(crate) fn note_shortened(&self) {
        self.standing.fetch_or(SHORTENED, Ordering::Relaxed);
    }

    /// Whether it is not the file that hosts have written to, and was not trusted since.
    pub fn is_replaced(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & REPLACED != 0
    }

    /// Hosts have written to another file: this needs the administrator.
    pub(crate) fn set_replaced(&self) {
        self.standing.fetch_or(REPLACED, Ordering::Relaxed);
    }

    /// This is the file again that hosts have written to: available, unless it was shortened.
    pub(crate) fn end_replaced(&self) {
        self.standing.fetch_and(!REPLACED, Ordering::Relaxed);
        self.set_up();
    }

    /// What is at its path instead of it. The store is served nevertheless.
    #[must_use]
    pub fn detached(&self) -> Option<Detached> {
        match self.detached.load(Ordering::Relaxed) {
            0 => None,
            1 => Some(Detached::Removed),
            _ => Some(Detached::Replaced),
        }
    }

    /// Sets what is at its path instead of it; returns true if that is a change.
    pub fn set_detached(&self, detached: Option<Detached>) -> bool {
        let new = detached.map_or(0, |detached| detached as u8);
        self.detached.swap(new, Ordering::Relaxed) != new
    }

    /// Whether it is down, or an fsync has failed.
    pub fn is_degraded(&self) -> bool {
        self.standing.load(Ordering::Relaxed) & !(FAULT | STANDBY) != 0
    }

    /// The injected fault.
    #[inline]
    pub fn fault(&self) -> InjectedFault {
        match self.standing.load(Ordering::Relaxed) >> FAULT_SHIFT {
            0 => InjectedFault::None,
            number => InjectedFault::from_number(number as u8),
        }
    }

    /// Sets the injected fault; for tests.
    pub fn set_fault(&self, fault: InjectedFault) {
        let mark = u32::from(fault as u8) << FAULT_SHIFT;
        let mut old = self.standing.load(Ordering::Relaxed);
        while let Err(now) = self.exchange(old, old & !FAULT | mark) {
            old = now;
        }
    }

    /// Whether deallocated blocks keep their contents, because the store cannot free space. Some
    /// stores reveal that only when asked to.
    pub fn keeps_space(&self) -> bool {
        self.keeps_space.load(Ordering::Relaxed)
    }

    /// Records that the store cannot free space.
    pub(super) fn note_kept_space(&self) {
        self.keeps_space.store(true, Ordering::Relaxed);
    }

    /// What it occupies in its file system.
    pub fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Number of operations that the system has failed.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Number of those that were medium errors: data could not be read or written.
    pub fn media_errors(&self) -> u64 {
        self.media_errors.load(Ordering::Relaxed)
    }

    /// Whether an operation has failed in a way that the monitor has to examine.
    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Relaxed)
    }

    /// The monitor has to examine the store.
    pub(crate) fn suspect(&self) {
        self.suspect.store(true, Ordering::Relaxed);
    }

    /// Called after an examination that found no failure.
    pub(crate) fn clear_suspicion(&self) {
        self.suspect.store(false, Ordering::Relaxed);
    }

    /// Counts a failure and returns the new number of failures.
    pub fn count_failure(&self, errno: i32) -> u64 {
        match Errno::from_raw(errno) {
            Errno::EIO | Errno::ENODATA | Errno::EILSEQ => {
                self.media_errors.fetch_add(1, Ordering::Relaxed);
                self.suspect.store(true, Ordering::Relaxed);
            }
            // These failures do not indicate that the store is unavailable.
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

    /// Records a failed fsync; returns true for the first one.
    pub fn fail_sync(&self, status: Status) -> bool {
        let recorders = lock(&self.recorders);
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

    /// Sets who persists a failed fsync and is notified of it: until [`Health::note_recorded`] the
    /// failure is not reported to hosts. None: failures are not persisted any more.
    pub(crate) fn record_by(&self, wake: Option<Arc<Condvar>>) {
        let mut recorders = lock(&self.recorders);
        if wake.is_none() {
            self.note_recorded();
        }
        *recorders = wake;
    }

    /// Whether an fsync has failed and the failure is not persisted yet. If it were reported
    /// before, a daemon that is killed then would let later flushes succeed after its restart.
    #[inline]
    pub(crate) fn is_unrecorded(&self) -> bool {
        self.standing.load(Ordering::Acquire) & UNRECORDED != 0
    }

    /// The failure is persisted, or cannot be: it is reported now.
    pub(crate) fn note_recorded(&self) {
        self.standing.fetch_and(!UNRECORDED, Ordering::Release);
    }

    /// Compares and exchanges the state; returns the current one if it differs from `expected`.
    fn exchange(&self, expected: u32, new: u32) -> Result<u32, u32> {
        self.standing.compare_exchange_weak(expected, new, Ordering::Relaxed, Ordering::Relaxed)
    }

    /// The administrator trusts the store again: clears its failures.
    pub fn trust(&self) {
        let failures = SYNC_FAILED | UNRECORDED | SHORTENED | REPLACED | 0xFFFF;
        self.standing.fetch_and(!failures, Ordering::Relaxed);
    }

    /// The store is unavailable; returns true if that is a change.
    pub fn set_down(&self) -> bool {
        self.suspect.store(true, Ordering::Relaxed);
        self.standing.fetch_or(DOWN, Ordering::Relaxed) & DOWN == 0
    }

    /// The store is available again; returns true if it was down. A truncated file stays down,
    /// and so does one that hosts have not written to.
    pub fn set_up(&self) -> bool {
        let mut old = self.standing.load(Ordering::Relaxed);
        while old & (DOWN | SHORTENED | REPLACED) == DOWN {
            match self.exchange(old, old & !DOWN) {
                Ok(_) => return true,
                Err(now) => old = now,
            }
        }
        false
    }

    /// Data were written that are not durable yet. Loads first, so that the cache line stays
    /// shared.
    #[inline]
    pub fn note_write(&self) {
        if !self.unsynced.load(Ordering::Relaxed) {
            self.unsynced.store(true, Ordering::Relaxed);
        }
    }

    /// An fsync begins: it makes everything written so far durable, or fails.
    pub(crate) fn begin_sync(&self) {
        self.syncing.fetch_add(1, Ordering::Relaxed);
        self.unsynced.store(false, Ordering::Release);
    }

    /// An fsync ends. If it failed, the caller has called [`Health::note_write`] before.
    pub(crate) fn end_sync(&self) {
        self.syncing.fetch_sub(1, Ordering::Release);
    }

    /// Whether data were written since the last fsync began, or an fsync is in flight.
    pub(crate) fn has_unsynced(&self) -> bool {
        // An fsync that ends between the two loads is seen by one of them.
        self.unsynced.load(Ordering::Acquire)
            || self.syncing.load(Ordering::Acquire) > 0
            || self.unsynced.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use crate::health::*;

    #[test]
    fn a_down_device_rejects_all_io_and_a_failed_sync_only_durable_io() {
        let health = Health::default();
        assert_eq!((health.rejects(false), health.rejects(true)), (None, None));
        assert!(health.fail_sync(Status::WRITE_FAULT));
        assert!(!health.fail_sync(Status::INTERNAL_ERROR), "the first one stays");
        assert_eq!(
            (health.rejects(false), health.rejects(true)),
            (None, Some(Status::WRITE_FAULT))
        );
        assert!(health.set_down() && !health.set_down());
        let not_ready = Some(Status::NAMESPACE_NOT_READY.with_crd(1));
        assert_eq!((health.rejects(false), health.rejects(true)), (not_ready, not_ready));
        assert!(health.set_up() && !health.set_up());
        assert_eq!(health.sync_failure(), Some(Status::WRITE_FAULT), "coming back heals nothing");
        assert!(health.is_degraded());
        health.trust();
        assert!(!health.is_degraded());
        health.set_fault(InjectedFault::Sync);
        assert_eq!((health.fault(), health.rejects(true)), (InjectedFault::Sync, None));
        health.set_down();
        assert_eq!((health.set_up(), health.fault()), (true, InjectedFault::Sync));
        health.set_fault(InjectedFault::None);
        assert_eq!((health.fault(), health.is_degraded()), (InjectedFault::None, false));
    }

    #[test]
    fn a_sync_failure_counts_as_unrecorded_only_with_a_recorder() {
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
    fn a_standby_device_returns_ana_inaccessible_unless_it_is_down() {
        let health = Health::default();
        health.set_standby(true);
        let elsewhere = Some(Status::ANA_INACCESSIBLE);
        assert_eq!((health.rejects(false), health.rejects(true)), (elsewhere, elsewhere));
        assert!(health.is_standby() && !health.is_degraded());
        health.set_down();
        assert_eq!(health.rejects(false), Some(Health::NOT_READY), "no other path leads to it");
        health.set_up();
        assert_eq!(health.rejects(false), elsewhere);
        health.set_standby(false);
        assert_eq!(health.rejects(false), None);
    }

    #[test]
    fn a_shortened_device_stays_down_until_trusted() {
        let health = Health::default();
        health.note_shortened();
        assert!(health.set_down() && !health.set_up() && health.is_down());
        assert!(health.is_untrusted());
        health.trust();
        assert!(!health.is_untrusted() && health.set_up() && !health.is_down());
        health.set_replaced();
        assert!(health.set_down() && !health.set_up() && health.is_untrusted());
        health.trust();
        assert!(!health.is_untrusted() && health.set_up());
        // Another file at its path needs trust only if it is to replace the store.
        assert!(health.set_detached(Some(Detached::Replaced)) && !health.is_untrusted());
        health.set_down();
        assert!(health.is_untrusted() && health.set_detached(Some(Detached::Removed)));
        assert!(!health.is_untrusted() && !health.set_detached(Some(Detached::Removed)));
        assert!(health.set_detached(None) && health.detached().is_none());
    }

    #[test]
    fn errors_of_a_possibly_failed_device_mark_the_device_as_suspect() {
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
