//! What may wait for a disk or a server for ever: done on a thread of its own, and awaited no
//! longer than a person would. There is one such thread a path that hangs, whoever asks for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::absent;
use crate::config::{NamespaceConfig, NamespaceKind};

/// The threads that did not come back in time, by what they hang at.
#[derive(Debug, Default)]
pub(super) struct Opening(Mutex<BTreeMap<PathBuf, JoinHandle<()>>>);

impl Opening {
    /// Does what may wait for the disk behind a path, unless something hangs there already.
    ///
    /// # Errors
    /// What `act` says, or that it does not answer.
    pub(super) fn within<T: Send + 'static>(
        &self,
        patience: Duration,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        let mut hanging = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hanging.retain(|_, thread| !thread.is_finished());
        if hanging.contains_key(path) {
            return Err(silent(path));
        }
        drop(hanging);
        let (say, said) = sync_channel(1);
        let thread = std::thread::Builder::new().name("opening".to_owned()).spawn(move || {
            // Nobody may be listening any more: then what was opened is closed again.
            let _ = say.send(act());
        });
        let thread = thread.map_err(|error| format!("no thread to open it: {error}"))?;
        said.recv_timeout(patience).unwrap_or_else(|_| {
            let mut hanging = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            hanging.insert(path.to_owned(), thread);
            Err(silent(path))
        })
    }

    /// Why the store of a namespace is not there yet, where it is not: see [`absent::store`].
    pub(super) fn absent(
        &self,
        patience: Duration,
        namespace: &NamespaceConfig,
        served: &BTreeSet<PathBuf>,
    ) -> Option<String> {
        let NamespaceKind::File { path, .. } = &namespace.kind else { return None };
        let own = namespace.clone();
        let served: BTreeSet<PathBuf> = served.get(path).cloned().into_iter().collect();
        let look = move || Ok(absent::store(&own, &served));
        self.within(patience, path, look).unwrap_or_else(Some)
    }
}

fn silent(path: &Path) -> String {
    format!("{} does not answer: check the disk or server that it is on", path.display())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_hangs_is_not_tried_again_before_it_has_come_back() {
        let (opening, path) = (Opening::default(), Path::new("/disk"));
        let long = Duration::from_secs(600);
        let (go_on, hangs) = channel::<()>();
        let hang = move || hangs.recv().map_err(|_| "too late".to_owned());
        let said = opening.within(Duration::from_millis(1), path, hang).unwrap_err();
        assert!(said.contains("/disk does not answer"), "{said}");
        for _ in 0..3 {
            let again = opening.within(long, path, || Err::<(), _>("tried again".to_owned()));
            assert_eq!(again, Err(said.clone()));
        }
        assert_eq!(opening.0.lock().unwrap().len(), 1, "one thread, whoever asks");
        assert_eq!(opening.within(long, Path::new("/other"), || Ok(5)), Ok(5));
        drop(go_on);
        while opening.0.lock().unwrap().values().any(|thread| !thread.is_finished()) {
            std::thread::yield_now();
        }
        assert_eq!(opening.within(long, path, || Ok(6)), Ok(6));
        assert_eq!(opening.within(long, path, || Ok(7)), Ok(7));
        assert!(opening.0.lock().unwrap().is_empty());
    }
}
