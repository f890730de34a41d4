//! Rollback of a failed change: removes what it has created.

use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::blockdev::CreatedFile;
use crate::blockdev::blocking::BlockingPool;

/// How long taking it away may keep others waiting.
const PATIENCE: Duration = Duration::from_secs(2);

/// The files that an attempt has made. They go when the last of its clones is dropped, unless they
/// are kept.
#[derive(Clone, Debug, Default)]
pub(super) struct CreatedFiles(Arc<Files>);

#[derive(Debug, Default)]
struct Files {
    made: Mutex<Vec<CreatedFile>>,
    pool: Arc<BlockingPool>,
}

impl CreatedFiles {
    /// None yet; a task of this pool takes them away.
    pub(super) fn new(pool: &Arc<BlockingPool>) -> CreatedFiles {
        CreatedFiles(Arc::new(Files { made: Mutex::default(), pool: Arc::clone(pool) }))
    }

    /// It has made one more.
    pub(super) fn add(&self, made: CreatedFile) {
        self.0.made.lock().unwrap_or_else(PoisonError::into_inner).push(made);
    }

    /// It has come to something.
    pub(super) fn keep(&self) {
        let made = take(&mut *self.0.made.lock().unwrap_or_else(PoisonError::into_inner));
        made.into_iter().for_each(CreatedFile::keep);
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let made = take(self.made.get_mut().unwrap_or_else(PoisonError::into_inner));
        if made.is_empty() {
            return;
        }
        // Their device may have begun to hang. Where no thread is to be had they go here and now.
        if let Ok(removed) = self.pool.spawn(move || drop(made)) {
            let _ = removed.recv_timeout(PATIENCE);
        }
    }
}
