//! Distrust of a backing store after a failed flush, and its persistence.

use std::fmt::Debug;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme::Status;
use uuid::Uuid;

/// Why a store is not trusted; nothing: it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Distrust {
    /// What a failed synchronisation was answered with.
    pub failed_sync: Option<Status>,
    /// Its file was shortened while it was served.
    pub shortened: bool,
}

impl Distrust {
    /// Whether it is trusted.
    pub fn is_nothing(self) -> bool {
        self == Distrust::default()
    }
}

/// Keeps which stores are not trusted, by the UUID of their namespaces.
pub trait TrustRecords: Debug + Send + Sync {
    /// Whether it outlasts the daemon.
    fn is_durable(&self) -> bool;

    /// Why the store of a namespace is not trusted. A record that is invalid stands for a failed
    /// synchronisation: it was written because of something.
    fn of(&self, uuid: Uuid) -> Distrust;

    /// The store of a namespace is trusted no more, or is again; also after a power loss when this
    /// returns.
    ///
    /// # Errors
    /// What the system says. A distrust is in force all the same until the daemon ends.
    fn set(&self, uuid: Uuid, distrust: Distrust) -> io::Result<()>;
}

/// Where it is kept whether one store is trusted.
#[derive(Debug)]
pub struct TrustRecord {
    store: Arc<dyn TrustRecords>,
    uuid: Uuid,
    kept: Mutex<Distrust>,
}

impl TrustRecord {
    /// Of the namespace with this UUID.
    pub fn new(store: &Arc<impl TrustRecords + 'static>, uuid: Uuid) -> TrustRecord {
        let kept = Mutex::new(store.of(uuid));
        TrustRecord { store: Arc::clone(store) as Arc<dyn TrustRecords>, uuid, kept }
    }

    /// What is kept.
    pub fn distrust(&self) -> Distrust {
        *self.lock()
    }

    /// See [`TrustRecords::is_durable`].
    pub fn is_durable(&self) -> bool {
        self.store.is_durable()
    }

    /// See [`TrustRecords::set`].
    ///
    /// # Errors
    /// What the system says.
    pub fn set(&self, distrust: Distrust) -> io::Result<()> {
        self.update(|| Some(distrust))
    }

    /// The same, of what is so when nobody else is at it; nothing: it stays.
    ///
    /// # Errors
    /// What the system says.
    pub fn update(&self, distrust: impl FnOnce() -> Option<Distrust>) -> io::Result<()> {
        let mut kept = self.lock();
        if let Some(distrust) = distrust() {
            self.store.set(self.uuid, distrust)?;
            *kept = distrust;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Distrust> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
