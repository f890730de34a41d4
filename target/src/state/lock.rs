//! Lock of the `state_directory`: two daemons would overwrite each other's changes and records, and
//! one would create files anew that the other has served.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use tracing::warn;

use super::atomic_file::give_to_owner;

/// The file that is locked.
const NAME: &str = "lock";

/// Lock of a directory against other daemons, released when dropped.
#[derive(Debug)]
pub(crate) struct StateDirLock {
    _held: File,
}

impl StateDirLock {
    /// Whether a daemon has locked the directory; `None` if this user cannot see it. Does not lock
    /// it.
    pub(crate) fn is_held(directory: &Path) -> Option<bool> {
        match File::open(directory.join(NAME)) {
            Ok(file) => Some(matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))),
            Err(error) => (error.kind() == io::ErrorKind::NotFound).then_some(false),
        }
    }

    /// Locks the directory; `None` if its file system is read-only: no daemon can write there.
    /// After any other failure two daemons might not detect each other, but might write.
    ///
    /// # Errors
    /// One sentence: another daemon has locked it, or it cannot be locked.
    pub(crate) fn take(directory: &Path) -> Result<Option<StateDirLock>, String> {
        let path = directory.join(NAME);
        let file = match open(directory, &path) {
            Ok(file) => file,
            Err(error) => return without(&path, &error),
        };
        match file.try_lock() {
            Ok(()) => Ok(Some(StateDirLock { _held: file })),
            Err(TryLockError::WouldBlock) => Err(format!(
                "state_directory {} is in use by another nvmfd: give each its own",
                directory.display()
            )),
            Err(TryLockError::Error(error)) => without(&path, &error),
        }
    }
}

/// Result of a failure to lock the directory.
fn without(path: &Path, error: &io::Error) -> Result<Option<StateDirLock>, String> {
    let shown = path.display();
    if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
        warn!("cannot lock {shown}: {error}; nothing can be persisted there");
        return Ok(None);
    }
    Err(format!(
        "{shown}, the lock against a second nvmfd, cannot be locked: {error}; give \
         its directory to the user of the daemon, or name another state_directory"
    ))
}

/// Opens the file, or creates it.
fn open(directory: &Path, path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        outcome => return outcome,
    }
    let file = match options.clone().create_new(true).open(path) {
        // Another daemon has created it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return options.open(path),
        outcome => outcome?,
    };
    give_to_owner(&file, directory);
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use crate::state::lock::*;

    #[test]
    fn a_directory_has_one_daemon_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let first = StateDirLock::take(directory.path()).unwrap();
        assert!(first.is_some());
        let sentence = StateDirLock::take(directory.path()).unwrap_err();
        assert!(sentence.contains("in use by another nvmfd"), "{sentence}");
        drop(first);
        assert!(StateDirLock::take(directory.path()).unwrap().is_some());
    }

    #[test]
    fn the_lock_file_has_the_owner_of_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        // Only root can test it with the directory of another user.
        let _ = std::os::unix::fs::chown(directory.path(), Some(65_534), Some(65_534));
        assert!(StateDirLock::take(directory.path()).unwrap().is_some());
        let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid()));
        let file = owner(&directory.path().join(NAME)).unwrap();
        assert_eq!(file, owner(directory.path()).unwrap());
    }

    /// Another daemon may have locked it, and write.
    #[test]
    fn a_directory_that_cannot_be_locked_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join(NAME)).unwrap();
        let sentence = StateDirLock::take(directory.path()).unwrap_err();
        assert!(sentence.contains("cannot be locked"), "{sentence}");
    }

    /// No daemon can write there, and the list of served files is retained.
    #[test]
    fn only_a_read_only_file_system_needs_no_lock() {
        let path = Path::new("/state/lock");
        let without = |errno| without(path, &io::Error::from_raw_os_error(errno));
        assert!(without(libc::EROFS).unwrap().is_none());
        for errno in [libc::EACCES, libc::ENOSPC, libc::EIO, libc::ENOLCK, libc::ELOOP] {
            assert!(without(errno).unwrap_err().contains("cannot be locked"), "{errno}");
        }
    }
}
