//! Operations on files for requests. Each may hang for ever, and occupies one of the 512 threads of the
//! control plane meanwhile, also when its client has left: without a bound, requests that are repeated
//! would take all of them, and no change, reload or stop would begin any more.

use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use tokio::task::spawn_blocking;

use super::ApiError;
use super::write_protect::stopping;
use crate::blockdev::lock;

/// The most operations at once.
const MOST: usize = 64;

/// The most operations on one namespace, or file.
const MOST_OF_ONE: usize = 4;

/// The operations in progress, each by the namespace or file that it is about.
#[derive(Clone, Debug, Default)]
pub(super) struct FileOperations(Arc<Mutex<Vec<String>>>);

/// An operation in progress.
#[derive(Debug)]
struct Permit {
    operations: FileOperations,
    about: String,
}

impl FileOperations {
    /// Does what may block, on a thread where that is allowed.
    ///
    /// # Errors
    /// 503: too many are in progress, or the daemon is stopping.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        about: String,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.begin(about)?;
        let ran = spawn_blocking(move || {
            let _permit = permit;
            act()
        });
        ran.await.map_err(|_| stopping())
    }

    fn begin(&self, about: String) -> Result<Permit, ApiError> {
        let mut all = lock(&self.0);
        let of_one = all.iter().filter(|other| **other == about).count();
        if of_one >= MOST_OF_ONE || all.len() >= MOST {
            let error = match all.first() {
                Some(first) if of_one < MOST_OF_ONE => {
                    format!("{MOST} operations on files are in progress, the oldest on {first}")
                }
                _ => format!("{of_one} operations on {about} are in progress"),
            };
            let remedy = "try again when they have ended; if they do not, its device or server does \
                          not answer: see the kernel's log";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, remedy));
        }
        all.push(about.clone());
        drop(all);
        Ok(Permit { operations: self.clone(), about })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut all = lock(&self.operations.0);
        if let Some(at) = all.iter().position(|other| *other == self.about) {
            all.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use crate::control::http::file_operations::*;

    #[test]
    fn operations_that_hang_are_bounded_in_total_and_for_each_namespace() {
        let operations = FileOperations::default();
        let name = |nsid: usize| format!("namespace {nsid} of a");
        let mut permits: Vec<Permit> =
            (0..MOST_OF_ONE).map(|_| operations.begin(name(1)).unwrap()).collect();
        let refused = |nsid| format!("{:?}", operations.begin(name(nsid)).unwrap_err());
        let partial = format!("{:?}", operations.begin(name(1)).unwrap_err().after("it is set"));
        assert!(partial.contains("it is set: 4 operations on namespace 1"), "{partial}");
        assert!(refused(1).contains("4 operations on namespace 1 of a are in progress"));
        let others = MOST_OF_ONE + 1..=MOST;
        permits.extend(others.map(|nsid| operations.begin(name(nsid)).unwrap()));
        assert!(
            refused(2)
                .contains("64 operations on files are in progress, the oldest on namespace 1")
        );
        drop(permits.remove(0));
        assert!(operations.begin(name(1)).is_ok());
    }

    /// Its client has left, and it hangs.
    #[test]
    fn an_abandoned_operation_counts_until_it_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let operations = FileOperations::default();
        let (go_on, hangs) = channel::<()>();
        runtime.block_on(async {
            let running = operations.run("it".to_owned(), move || hangs.recv().is_err());
            tokio::select! {
                biased;
                _ = running => panic!("it has ended"),
                () = std::future::ready(()) => {}
            }
        });
        assert_eq!(lock(&operations.0).len(), 1);
        drop(go_on);
        while !lock(&operations.0).is_empty() {
            std::thread::yield_now();
        }
    }
}
