//! What may wait for a disk or a server for ever: done on a thread of its own, and awaited no
//! longer than a person would. There is one such thread a path that hangs, whoever asks for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// The threads that did not come back in time, by what they hang at.
#[derive(Debug, Default)]
pub(crate) struct Opening {
    hanging: Mutex<BTreeMap<PathBuf, JoinHandle<()>>>,
    /// Whatever is done waits for as many others as this says.
    #[cfg(test)]
    pub(crate) meet: Mutex<Option<std::sync::Arc<std::sync::Barrier>>>,
}

/// Something that was begun and is to be awaited with [`Begun::by`], also when its outcome does not
/// matter any more: what it opens would stay open a moment longer than anybody expects.
#[must_use]
pub(crate) struct Begun<'a, T> {
    opening: &'a Opening,
    path: PathBuf,
    state: State<T>,
}

enum State<T> {
    Over(Result<T, String>),
    UnderWay(Receiver<Result<T, String>>, JoinHandle<()>),
}

impl Opening {
    /// Does what may wait for the disk behind a path, unless something hangs there already.
    ///
    /// # Errors
    /// What `act` says, or that it does not answer.
    #[cfg(test)]
    pub(crate) fn within<T: Send + 'static>(
        &self,
        patience: std::time::Duration,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        self.begin(path, act).by(Instant::now() + patience)
    }

    /// The same, without waiting for it yet: paths of one server hang together, and so they cost no
    /// more time than one.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Begun<'_, T> {
        let begun = |state| Begun { opening: self, path: path.to_owned(), state };
        let mut hanging = self.hanging.lock().unwrap_or_else(PoisonError::into_inner);
        hanging.retain(|_, thread| !thread.is_finished());
        if hanging.contains_key(path) {
            return begun(State::Over(Err(silent(path))));
        }
        drop(hanging);
        let (say, said) = sync_channel(1);
        #[cfg(test)]
        let meet = self.meet.lock().unwrap().clone();
        let thread = std::thread::Builder::new().name("opening".to_owned()).spawn(move || {
            #[cfg(test)]
            if let Some(meet) = meet {
                meet.wait();
            }
            // Nobody may be listening any more: then what was opened is closed again.
            let _ = say.send(act());
        });
        begun(match thread {
            Ok(thread) => State::UnderWay(said, thread),
            Err(error) => State::Over(Err(format!("no thread to open it: {error}"))),
        })
    }

    /// Whether something hangs at a path.
    pub(crate) fn hangs_at(&self, path: &Path) -> bool {
        self.hanging.lock().unwrap_or_else(PoisonError::into_inner).contains_key(path)
    }

    /// What is known at once, where others have to be awaited.
    pub(super) fn over<T>(&self, path: &Path, outcome: Result<T, String>) -> Begun<'_, T> {
        Begun { opening: self, path: path.to_owned(), state: State::Over(outcome) }
    }
}

impl<T> Begun<'_, T> {
    /// Its outcome, if there is one by then.
    ///
    /// # Errors
    /// What it says, or that it does not answer.
    pub(crate) fn by(self, deadline: Instant) -> Result<T, String> {
        let (said, thread) = match self.state {
            State::Over(outcome) => return outcome,
            State::UnderWay(said, thread) => (said, thread),
        };
        let patience = deadline.saturating_duration_since(Instant::now());
        said.recv_timeout(patience).unwrap_or_else(|_| {
            let mut hanging = self.opening.hanging.lock().unwrap_or_else(PoisonError::into_inner);
            hanging.insert(self.path.clone(), thread);
            Err(silent(&self.path))
        })
    }
}

fn silent(path: &Path) -> String {
    format!("{} does not answer: check the disk or server that it is on", path.display())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

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
        assert_eq!(opening.hanging.lock().unwrap().len(), 1, "one thread, whoever asks");
        assert_eq!(opening.within(long, Path::new("/other"), || Ok(5)), Ok(5));
        drop(go_on);
        while opening.hanging.lock().unwrap().values().any(|thread| !thread.is_finished()) {
            std::thread::yield_now();
        }
        assert_eq!(opening.within(long, path, || Ok(6)), Ok(6));
        assert_eq!(opening.within(long, path, || Ok(7)), Ok(7));
        assert!(opening.hanging.lock().unwrap().is_empty());
    }
}
