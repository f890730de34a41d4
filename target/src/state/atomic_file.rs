//! Small files that survive a power loss: written beside their name, synced, renamed, and their directory
//! synced. At any time the name has either the complete old content or the complete new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use crate::blockdev::crash_point::crash_point;
use crate::blockdev::durable;

/// Writes and syncs content beside `name` in `directory`: all steps that need space or a working
/// device are then complete, and the name still has the old content.
pub(crate) fn prepare(directory: &Path, name: &str, content: &[u8]) -> io::Result<PreparedFile> {
    let beside = directory.join(format!("{name}.new"));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    crash_point();
    let opened = options.open(&beside).or_else(|error| {
        // Another user has left it.
        fs::remove_file(&beside).map_err(|_| error)?;
        options.open(&beside)
    });
    let mut file = opened?;
    give_to_owner(&file, directory);
    crash_point();
    durable::write(&mut file, &beside, content)?;
    crash_point();
    durable::sync(&file, &beside)?;
    Ok(PreparedFile { path: directory.join(name), beside })
}

/// Gives a new file to the owner of its directory: a daemon that root has run by hand once must not
/// keep the daemon's own user from its records.
pub(super) fn give_to_owner(file: &File, directory: &Path) {
    let (Ok(mine), Ok(owner)) = (file.metadata(), fs::metadata(directory)) else { return };
    if (mine.uid(), mine.gid()) != (owner.uid(), owner.gid()) {
        let _ = fchown(file, Some(owner.uid()), Some(owner.gid()));
    }
}

/// Content of a small file that is synced beside its name. If it is abandoned, the next one
/// overwrites it.
#[derive(Debug)]
#[must_use]
pub(crate) struct PreparedFile {
    path: PathBuf,
    beside: PathBuf,
}

impl PreparedFile {
    /// Renames the file to its name. On return the name has the content also after a power loss.
    ///
    /// # Errors
    /// The I/O error. The name may then have either content, but no mixture.
    pub(crate) fn persist(self) -> io::Result<()> {
        crash_point();
        durable::rename(&self.beside, &self.path)?;
        sync(self.path.parent().unwrap_or(Path::new("/")))
    }
}

/// Removes `name` from `directory`, if it exists, as durably as [`PreparedFile::persist`] sets it.
pub(crate) fn remove(directory: &Path, name: &str) -> io::Result<()> {
    crash_point();
    match durable::remove_file(&directory.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    sync(directory)
}

fn sync(directory: &Path) -> io::Result<()> {
    crash_point();
    durable::sync_directory(directory)?;
    crash_point();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, chown, symlink};

    use crate::blockdev::durable::testing::calls;

    #[test]
    fn a_file_belongs_to_the_owner_of_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // Only root can test it with the directory of another user.
        let _ = chown(path, Some(65_534), Some(65_534));
        symlink("elsewhere", path.join("a.new")).unwrap();
        super::prepare(path, "a", b"content").unwrap().persist().unwrap();
        assert_eq!(fs::read(path.join("a")).unwrap(), b"content");
        assert!(!path.join("elsewhere").exists(), "no link is followed");
        let [file, own] = [&path.join("a"), path].map(|at| fs::symlink_metadata(at).unwrap());
        assert_eq!((file.uid(), file.gid(), file.is_file()), (own.uid(), own.gid(), true));
    }

    #[test]
    fn a_file_is_synced_before_its_rename_and_its_directory_after() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let directory = format!("sync directory {name}");
        let (written, did) = calls(|| super::prepare(path, "a", b"content")?.persist());
        written.unwrap();
        assert_eq!(did, ["write a.new", "sync a.new", "rename to a", &directory]);
        for removes in [true, false] {
            let (removed, did) = calls(|| super::remove(path, "a"));
            removed.unwrap();
            let all = ["remove a", &directory];
            assert_eq!(did, all[usize::from(!removes)..]);
        }
    }
}
