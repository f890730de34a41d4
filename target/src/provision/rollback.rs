//! What an attempt to serve something has made on the way, and takes away again where it comes to
//! nothing.

use std::mem::take;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::blockdev::CreatedFile;

/// How long taking it away may keep others waiting.
const PATIENCE: Duration = Duration::from_secs(2);

/// The files that an attempt has made. They go when the last of its clones is dropped, unless they
/// are kept.
#[derive(Clone, Debug, Default)]
pub(super) struct CreatedFiles(Arc<Files>);

#[derive(Debug, Default)]
struct Files(Mutex<Vec<CreatedFile>>);

impl CreatedFiles {
    /// It has made one more.
    pub(super) fn add(&self, made: CreatedFile) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).push(made);
    }

    /// It has come to something.
    pub(super) fn keep(&self) {
        let made = take(&mut *self.0.0.lock().unwrap_or_else(PoisonError::into_inner));
        made.into_iter().for_each(CreatedFile::keep);
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let made = take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        if made.is_empty() {
            return;
        }
        // Their disk may have begun to hang.
        let (say, said) = sync_channel(1);
        let spawned = std::thread::Builder::new().name("removal".to_owned()).spawn(move || {
            drop(made);
            let _ = say.send(());
        });
        if spawned.is_ok() {
            let _ = said.recv_timeout(PATIENCE);
        }
    }
}
