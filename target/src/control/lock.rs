//! One daemon a `state_directory`: two would write over each other's changes and over what they
//! must remember, and what one has served the other would make anew.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use tracing::warn;

/// The file that is locked. (The folder itself may be the one of the configuration, which a save
/// locks.)
const NAME: &str = "lock";

/// Keeps other daemons out of a folder for as long as it is there.
#[derive(Debug)]
pub(super) struct Lock {
    _held: File,
}

impl Lock {
    /// Takes the folder; none where that is impossible, as in a file system that has become
    /// read-only: a daemon that cannot write there does not write over anything either.
    ///
    /// # Errors
    /// One sentence: another daemon has it.
    pub(super) fn take(folder: &Path) -> Result<Option<Lock>, String> {
        let path = folder.join(NAME);
        let failed = |error| warn!("{} cannot be locked: {error}", path.display());
        let Ok(file) = open(folder, &path).map_err(failed) else { return Ok(None) };
        match file.try_lock() {
            Ok(()) => Ok(Some(Lock { _held: file })),
            Err(TryLockError::WouldBlock) => Err(format!(
                "state_directory {} is in use by another nvmfd: give each its own",
                folder.display()
            )),
            Err(TryLockError::Error(error)) => {
                failed(error);
                Ok(None)
            }
        }
    }
}

/// Opens the file, or makes it.
fn open(folder: &Path, path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        outcome => return outcome,
    }
    let file = match options.clone().create_new(true).open(path) {
        // Another daemon was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return options.open(path),
        outcome => outcome?,
    };
    // Who runs the daemon as root once does not keep its own user from locking ever after.
    if let Ok(owner) = fs::metadata(folder) {
        let _ = fchown(&file, Some(owner.uid()), Some(owner.gid()));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_daemon_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let first = Lock::take(folder.path()).unwrap();
        assert!(first.is_some());
        let sentence = Lock::take(folder.path()).unwrap_err();
        assert!(sentence.contains("in use by another nvmfd"), "{sentence}");
        drop(first);
        assert!(Lock::take(folder.path()).unwrap().is_some());
    }

    #[test]
    fn the_owner_of_the_folder_may_lock_it_whoever_did_before() {
        let folder = tempfile::tempdir().unwrap();
        // Only root can try it with another user's.
        let _ = std::os::unix::fs::chown(folder.path(), Some(65_534), Some(65_534));
        assert!(Lock::take(folder.path()).unwrap().is_some());
        let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid()));
        let file = owner(&folder.path().join(NAME)).unwrap();
        assert_eq!(file, owner(folder.path()).unwrap());
    }

    #[test]
    fn a_folder_that_takes_no_file_keeps_nobody_from_serving() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join(NAME)).unwrap();
        assert!(Lock::take(folder.path()).unwrap().is_none());
    }
}
