//! Distrust of a backing store after a failed flush, a truncation or a replacement, and its
//! persistence.

use std::fmt::Debug;
use std::io;
use std::sync::{Arc, Mutex, TryLockError};

use crate::{Inode, lock};
use nvme::Status;
use uuid::Uuid;

/// Why a store is not trusted; the default: it is trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Distrust {
    /// Status of the failed fsync.
    pub failed_sync: Option<Status>,
    /// The file was truncated while it was served.
    pub shortened: bool,
    /// The file that was served for writing while its path led elsewhere. Another file is not what
    /// hosts have written.
    pub replaced: Option<Inode>,
}

impl Distrust {
    /// Whether it is trusted.
    pub fn is_nothing(self) -> bool {
        self == Distrust::default()
    }

    /// For these reasons, and for those.
    #[must_use]
    pub fn with(self, other: Distrust) -> Distrust {
        Distrust {
            failed_sync: self.failed_sync.or(other.failed_sync),
            shortened: self.shortened || other.shortened,
            replaced: self.replaced.or(other.replaced),
        }
    }
}

/// Persists which stores are untrusted, by the UUIDs of their namespaces.
pub trait TrustRecords: Debug + Send + Sync {
    /// Whether records survive the daemon.
    fn is_durable(&self) -> bool;

    /// Why the store of a namespace is untrusted. An invalid record counts as a failed fsync,
    /// because it was written for a reason.
    fn of(&self, uuid: Uuid) -> Distrust;

    /// Records that the store of a namespace is untrusted, or trusted again, and the hosts that do
    /// not know; durable when this returns.
    ///
    /// # Errors
    /// The error of the system. A distrust is in effect nevertheless until the daemon exits.
    fn set(&self, uuid: Uuid, distrust: Distrust) -> io::Result<()>;
}

/// The trust record of one store.
#[derive(Debug)]
pub struct TrustRecord {
    store: Arc<dyn TrustRecords>,
    uuid: Uuid,
    kept: Mutex<Distrust>,
}

impl TrustRecord {
    /// The record of the namespace with this UUID.
    pub fn new(store: &Arc<impl TrustRecords + 'static>, uuid: Uuid) -> TrustRecord {
        let kept = Mutex::new(store.of(uuid));
        TrustRecord { store: Arc::clone(store) as Arc<dyn TrustRecords>, uuid, kept }
    }

    /// Its contents.
    pub fn distrust(&self) -> Distrust {
        *lock(&self.kept)
    }

    /// Whether it has these contents. False while it is written, which may hang.
    pub(super) fn has(&self, distrust: Distrust) -> bool {
        match self.kept.try_lock() {
            Ok(kept) => *kept == distrust,
            Err(TryLockError::Poisoned(kept)) => *kept.into_inner() == distrust,
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// See [`TrustRecords::is_durable`].
    pub fn is_durable(&self) -> bool {
        self.store.is_durable()
    }

    /// See [`TrustRecords::set`].
    ///
    /// # Errors
    /// The error of the system.
    pub fn set(&self, distrust: Distrust) -> io::Result<()> {
        self.update(|| Some(distrust))
    }

    /// As [`TrustRecord::set`], with a value that is computed under the lock; none: unchanged.
    ///
    /// # Errors
    /// The error of the system.
    pub fn update(&self, distrust: impl FnOnce() -> Option<Distrust>) -> io::Result<()> {
        let mut kept = lock(&self.kept);
        if let Some(distrust) = distrust() {
            self.store.set(self.uuid, distrust)?;
            *kept = distrust;
        }
        Ok(())
    }
}
