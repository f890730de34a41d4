//! A file for the textfile collector of Prometheus' node_exporter. A thread writes it, because a
//! file system that hangs must not keep requests waiting.

use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::Error;

/// How often it is written.
const WRITE_EVERY: Duration = Duration::from_secs(5);
/// How long the end waits for the file to be removed.
const END_LIMIT: Duration = Duration::from_secs(1);

/// The file. It is removed when this is dropped: what is not served has no metrics.
pub(super) struct MetricsFile {
    texts: Option<SyncSender<String>>,
    ended: Receiver<()>,
    due: Instant,
}

impl MetricsFile {
    pub(super) fn new(path: PathBuf, now: Instant) -> Result<MetricsFile, Error> {
        let (texts, written) = sync_channel::<String>(1);
        let (end, ended) = channel();
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(move || {
            let mut has_failed = false;
            for text in written {
                let outcome = replace(&path, &text);
                if let (Err(error), false) = (&outcome, has_failed) {
                    warn!("cannot write metrics to {}: {error}", path.display());
                }
                has_failed = outcome.is_err();
            }
            let _ = std::fs::remove_file(&path);
            let _ = end.send(());
        });
        thread.map_err(|error| Error::Local(format!("no thread for metrics: {error}")))?;
        Ok(MetricsFile { texts: Some(texts), ended, due: now })
    }

    /// When it is to be written again.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Has it written. While the last text is still being written, this one is dropped.
    pub(super) fn write(&mut self, text: String, now: Instant) {
        self.due = now + WRITE_EVERY;
        if let Some(texts) = &self.texts {
            let _ = texts.try_send(text);
        }
    }
}

impl Drop for MetricsFile {
    fn drop(&mut self) {
        self.texts = None;
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}

/// Replaces a file as a whole. The collector reads names that end in `.prom` only, and is another
/// user's, whatever the umask of this process.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut new = OsString::from(path);
    new.push(".new");
    std::fs::write(&new, text)?;
    std::fs::set_permissions(&new, Permissions::from_mode(0o644))?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_file_is_written_on_schedule_and_removed_on_drop() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, now) = (directory.path().join("nvmf.prom"), Instant::now());
        let mut file = MetricsFile::new(path.clone(), now).expect("a thread");
        assert_eq!(file.due(), now);
        file.write("up 1\n".into(), now);
        assert_eq!(file.due(), now + WRITE_EVERY);
        while std::fs::read_to_string(&path).unwrap_or_default() != "up 1\n" {
            std::thread::yield_now();
        }
        drop(file);
        assert_eq!(std::fs::read_dir(directory.path()).expect("there").count(), 0);
        // The units have an umask of 077.
        let private = directory.path().join("nvmf.prom.new");
        std::fs::write(&private, "").expect("written");
        std::fs::set_permissions(&private, Permissions::from_mode(0o600)).expect("there");
        replace(&path, "up 1\n").expect("written");
        let mode = path.metadata().expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o644, "the collector may read it");
    }
}
