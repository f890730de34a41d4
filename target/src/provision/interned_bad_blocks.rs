//! Uncorrectable blocks, interned: one object per UUID, while it is in use.
//!
//! A namespace may be removed and added again while an earlier command is in flight at its device, or its
//! request at the state worker. Two objects for one file would overwrite each other's state: a mark would
//! be lost, and old data could be read, or a mark would remain on blocks that were written since.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use uuid::Uuid;

use crate::blockdev::lock;
use crate::core::subsystem::bad_blocks::BadBlocks;

/// Weak references to bad-block lists by UUID, each with the name of its device.
#[derive(Debug, Default)]
pub(super) struct InternedBadBlocks(Mutex<BTreeMap<Uuid, (String, Weak<BadBlocks>)>>);

impl InternedBadBlocks {
    /// Returns the bad blocks of this UUID: the object in use, if it is of the same device, else a new
    /// one. The object of another device does not apply, so it is closed, unless it `is_served`.
    ///
    /// # Errors
    /// As `load`, or one sentence: another store is served under this UUID. The change that is to replace
    /// it may still be rejected.
    pub(super) fn get(
        &self,
        uuid: Uuid,
        store: &str,
        is_served: impl FnOnce(&Arc<BadBlocks>) -> bool,
        load: impl FnOnce() -> Result<Arc<BadBlocks>, String>,
    ) -> Result<Arc<BadBlocks>, String> {
        let mut known = lock(&self.0);
        known.retain(|_, (_, marks)| marks.strong_count() > 0);
        let old = known.get(&uuid).and_then(|(of, marks)| Some((of, marks.upgrade()?)));
        match old {
            Some((of, marks)) if of == store => return Ok(marks),
            Some((of, marks)) if is_served(&marks) => {
                return Err(format!(
                    "{of} is in use as {uuid}: remove its namespace, reload, add this one, reload"
                ));
            }
            Some((_, marks)) => marks.end(),
            None => {}
        }
        let marks = load()?;
        known.insert(uuid, (store.to_owned(), Arc::downgrade(&marks)));
        Ok(marks)
    }

    /// Removes the object of this UUID, also while it is in use.
    pub(super) fn forget(&self, uuid: Uuid) {
        let gone = lock(&self.0).remove(&uuid);
        if let Some(marks) = gone.and_then(|(_, marks)| marks.upgrade()) {
            marks.end();
        }
    }
}
