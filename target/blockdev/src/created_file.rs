//! A file created for a namespace: removed again unless the change is committed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::info;

use super::backing::{BackingConfig, BackingKind};
use super::device::BackingDevice;
use super::hold::{Hold, Stamp};

/// A file that was just created and has not been served. Unless it is kept, drop removes it,
/// provided that its path still leads to this file and that nobody has modified it. May block on
/// the device.
#[derive(Debug)]
pub struct CreatedFile {
    path: PathBuf,
    stamp: Stamp,
    is_kept: bool,
    /// Prevents others from serving the file before it is removed.
    _hold: Arc<Hold>,
}

impl CreatedFile {
    /// The file of a backing store, if opening the store has created it.
    pub fn by_opening(backing: &BackingDevice, config: &BackingConfig) -> Option<CreatedFile> {
        let BackingKind::File { path, .. } = &config.kind else { return None };
        let (stamp, hold) = (backing.made_as?, Arc::clone(backing.hold.as_ref()?));
        Some(CreatedFile { path: path.clone(), stamp, is_kept: false, _hold: hold })
    }

    /// Keeps the file: it is served from now on.
    pub fn keep(mut self) {
        self.is_kept = true;
    }

    fn is_untouched(&self) -> bool {
        let is_so = |path: &Path| Some(Stamp::of(&fs::symlink_metadata(path).ok()?) == self.stamp);
        is_so(&self.path).unwrap_or(false)
    }
}

impl Drop for CreatedFile {
    fn drop(&mut self) {
        if !self.is_kept && self.is_untouched() && fs::remove_file(&self.path).is_ok() {
            let shown = self.path.display();
            info!("{shown} was created for a rejected change and is removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use crate::created_file::*;
    use crate::open_error::OpenError;

    fn open(path: &Path) -> Result<(BackingDevice, Option<CreatedFile>), OpenError> {
        let kind = BackingKind::File { path: path.to_owned(), size: Some(1 << 20) };
        let config =
            BackingConfig { kind, block_size_bytes: 4096, read_only: false, shared: false };
        let backing = BackingDevice::open(&config)?;
        let made = CreatedFile::by_opening(&backing, &config);
        Ok((backing, made))
    }

    fn made(path: &Path) -> (BackingDevice, Option<CreatedFile>) {
        open(path).unwrap()
    }

    #[test]
    fn only_a_newly_created_and_unmodified_file_is_removed() {
        let in_memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        for path in [&in_memory.path().join("disk"), &path] {
            match open(path) {
                Ok((_, made)) => drop(made.expect("made")),
                // tmpfs allows direct I/O since Linux 6.6.
                Err(why) => assert!(why.sentence.contains("(tmpfs) refuses it"), "{why:?}"),
            }
            assert!(!path.exists());
        }
        made(&path).1.expect("made").keep();
        assert!(path.exists());
        assert!(made(&path).1.is_none(), "it was there");
        fs::remove_file(&path).unwrap();

        // The file was modified, or another one is at its path.
        let (_, written) = made(&path);
        let file = File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, b"precious", 0).unwrap();
        file.sync_all().unwrap();
        drop(written);
        assert_eq!(fs::read(&path).unwrap()[..8], *b"precious");
        fs::remove_file(&path).unwrap();
        let (_, replaced) = made(&path);
        fs::write(directory.path().join("other"), vec![0; 1 << 20]).unwrap();
        fs::rename(directory.path().join("other"), &path).unwrap();
        drop(replaced);
        assert!(path.exists());
    }
}
