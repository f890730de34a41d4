//! Persistent state of namespaces, interned: one object per UUID, while it is in use.
//!
//! A namespace may be removed and added again while an earlier request is pending at the state worker.
//! With two objects for one file that request would be granted and persisted, but later requests would
//! not see it, and the next of them would overwrite it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use uuid::Uuid;

use super::devices::Place;
use crate::blockdev::lock;

/// Weak references by UUID, each with its namespace.
#[derive(Debug)]
pub(super) struct WeakByUuid<T>(Mutex<BTreeMap<Uuid, (Place, Weak<T>)>>);

impl<T> Default for WeakByUuid<T> {
    fn default() -> WeakByUuid<T> {
        WeakByUuid(Mutex::default())
    }
}

impl<T> WeakByUuid<T> {
    /// Returns the object of this UUID: the one in use for this namespace, else the result of `load`.
    ///
    /// # Errors
    /// As `load`.
    pub(super) fn get(
        &self,
        uuid: Uuid,
        place: Place,
        load: impl FnOnce() -> Result<Arc<T>, String>,
    ) -> Result<Arc<T>, String> {
        let mut known = lock(&self.0);
        known.retain(|_, (_, one)| one.strong_count() > 0);
        let old = known.get(&uuid).filter(|(of, _)| *of == place);
        if let Some(old) = old.and_then(|(_, one)| one.upgrade()) {
            return Ok(old);
        }
        let new = load()?;
        known.insert(uuid, (place, Arc::downgrade(&new)));
        Ok(new)
    }

    /// Removes the object of this UUID.
    pub(super) fn forget(&self, uuid: Uuid) {
        lock(&self.0).remove(&uuid);
    }
}
