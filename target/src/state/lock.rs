//! One daemon a `state_directory`: two would write over each other's changes and over what they
//! must remember, and what one has served the other would make anew.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::Path;

use tracing::warn;

/// The file that is locked. (The directory itself may be the one of the configuration, which a save
/// locks.)
const NAME: &str = "lock";

/// Keeps other daemons out of a directory for as long as it is there.
#[derive(Debug)]
pub(crate) struct StateDirLock {
    _held: File,
}

impl StateDirLock {
    /// Whether a daemon has the directory, as far as that can be seen. Keeps none out.
    pub(crate) fn is_held(directory: &Path) -> bool {
        let file = File::open(directory.join(NAME));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Takes the directory; none where its file system is read-only: nobody writes over anything
    /// there. Whatever else keeps the lock from being taken may keep two daemons from seeing each
    /// other, and not from writing.
    ///
    /// # Errors
    /// One sentence: another daemon has it, or it cannot be locked.
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

/// What becomes of a start that cannot lock the directory.
fn without(path: &Path, error: &io::Error) -> Result<Option<StateDirLock>, String> {
    let shown = path.display();
    if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
        warn!("cannot lock {shown}: {error}; nothing can be persisted there");
        return Ok(None);
    }
    Err(format!(
        "{shown}, which keeps a second nvmfd from writing there, cannot be locked: {error}; give \
         its directory to the user of the daemon, or name another state_directory"
    ))
}

/// Opens the file, or makes it.
fn open(directory: &Path, path: &Path) -> io::Result<File> {
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
    if let Ok(owner) = fs::metadata(directory) {
        let _ = fchown(&file, Some(owner.uid()), Some(owner.gid()));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
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
    fn the_owner_of_the_directory_may_lock_it_whoever_did_before() {
        let directory = tempfile::tempdir().unwrap();
        // Only root can try it with another user's.
        let _ = std::os::unix::fs::chown(directory.path(), Some(65_534), Some(65_534));
        assert!(StateDirLock::take(directory.path()).unwrap().is_some());
        let owner = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.gid()));
        let file = owner(&directory.path().join(NAME)).unwrap();
        assert_eq!(file, owner(directory.path()).unwrap());
    }

    /// Another daemon may have it, and write.
    #[test]
    fn a_directory_that_cannot_be_locked_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join(NAME)).unwrap();
        let sentence = StateDirLock::take(directory.path()).unwrap_err();
        assert!(sentence.contains("cannot be locked"), "{sentence}");
    }

    /// Nobody writes there, and who was served before is served again.
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
