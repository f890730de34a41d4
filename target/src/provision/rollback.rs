//! Rollback of a failed change: removes the files that it has created.

use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::{CreatedFile, lock};

/// Time limit for the removal of files.
const PATIENCE: Duration = Duration::from_secs(2);

/// Files created by a change. They are removed when the last clone is dropped, unless they are
/// kept.
#[derive(Clone, Debug, Default)]
pub(super) struct CreatedFiles(Arc<Files>);

#[derive(Debug, Default)]
struct Files {
    made: Mutex<Vec<CreatedFile>>,
    pool: Arc<BlockingPool>,
}

impl CreatedFiles {
    /// An empty list; a task of this pool removes its files.
    pub(super) fn new(pool: &Arc<BlockingPool>) -> CreatedFiles {
        CreatedFiles(Arc::new(Files { made: Mutex::default(), pool: Arc::clone(pool) }))
    }

    pub(super) fn add(&self, made: CreatedFile) {
        lock(&self.0.made).push(made);
    }

    /// Keeps the files.
    pub(super) fn keep(&self) {
        let made = take(&mut *lock(&self.0.made));
        made.into_iter().for_each(CreatedFile::keep);
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let made = take(self.made.get_mut().unwrap_or_else(PoisonError::into_inner));
        if made.is_empty() {
            return;
        }
        // The device may hang.
        self.pool.drop_within(PATIENCE, made);
    }
}
