//! Copies of a file that share its extents (reflink, FICLONE), on XFS, btrfs and others that have
//! them: snapshots and clones of a backing file, and the file that a rollback serves instead of it.
//!
//! A copy has no name (O_TMPFILE) until it is complete and durable, so none is ever found half made,
//! and a crash leaves nothing behind.

use std::fs::{File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{
    IFlags, XattrFlags, fgetxattr, fsetxattr, ioctl_ficlone, ioctl_getflags, ioctl_setflags,
};
use rustix::io::Errno;

use super::backing::Kind;
use super::device::BackingDevice;
use super::file_system::{BTRFS, file_system};
use super::hold::{BLOCK_SIZE, is_same};
use crate::durable;

/// A copy that has no name yet.
#[derive(Debug)]
pub struct Reflink {
    file: File,
    path: PathBuf,
    directory: PathBuf,
}

/// Why there is no copy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct ReflinkError {
    /// What was tried, and what the system answered.
    pub sentence: String,
    /// What to do.
    pub remedy: &'static str,
}

/// Extended attribute of a snapshot, and its value.
const MARK: &str = "user.nvmfd";
const MARK_VALUE: &[u8; 8] = b"snapshot";

/// How long a removal waits until the device of a removed namespace is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(20);

const ELSEWHERE: &str = "choose a path in the file system of the backing file";

impl ReflinkError {
    /// An error with this text.
    pub fn new(sentence: impl Into<String>, remedy: &'static str) -> ReflinkError {
        ReflinkError { sentence: sentence.into(), remedy }
    }

    fn failed(tried: &str, path: &Path, error: &io::Error) -> ReflinkError {
        let remedy = match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => "make room there",
            Some(libc::EROFS) => {
                "choose a directory that the daemon may write to: its unit \
                                  restricts it (`systemctl edit nvmfd`, `ReadWritePaths=`)"
            }
            Some(libc::EACCES | libc::EPERM) => "let the user of the daemon write there",
            _ => "see the kernel's log",
        };
        ReflinkError::new(format!("cannot {tried} {}: {error}", path.display()), remedy)
    }
}

impl Reflink {
    /// An empty file without a name, for a copy at `path`, where nothing may be yet.
    ///
    /// # Errors
    /// Why that is not possible.
    pub fn create(path: &Path) -> Result<Reflink, ReflinkError> {
        let parent = path.parent().filter(|_| path.is_absolute() && path.file_name().is_some());
        let Some(directory) = parent else {
            let sentence = format!("{} is no absolute path of a file", path.display());
            return Err(ReflinkError::new(sentence, ELSEWHERE));
        };
        if path.symlink_metadata().is_ok() {
            let sentence = format!("there is something at {} already", path.display());
            return Err(ReflinkError::new(sentence, "choose another path, or remove it"));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        let file = options.open(directory).map_err(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EISDIR) => unsupported(directory),
            _ => ReflinkError::failed("create a file in", directory, &error),
        })?;
        Ok(Reflink { file, path: path.to_owned(), directory: directory.to_owned() })
    }

    /// Makes it a copy of a backing file, as that is at one moment if nobody changes it meanwhile.
    ///
    /// # Errors
    /// The device is no file, or its file system does not copy it so.
    pub fn copy_device(&self, device: &BackingDevice) -> Result<(), ReflinkError> {
        match (&device.file, device.kind) {
            (Some(file), Kind::File) => self.copy(file),
            _ => {
                let sentence = format!("{} is no file", device.name());
                let remedy = "only files have reflinks: see `lvcreate --snapshot`, `rbd snap \
                              create`, or copy it with `nvmf copy`";
                Err(ReflinkError::new(sentence, remedy))
            }
        }
    }

    /// Makes it a copy of an open file.
    ///
    /// # Errors
    /// The file system does not copy it so.
    pub(crate) fn copy(&self, from: &File) -> Result<(), ReflinkError> {
        self.adopt_nocow(from);
        ioctl_ficlone(&self.file, from).map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS => unsupported(&self.directory),
            Errno::XDEV => ReflinkError::new(
                format!("{} is in another file system than the file", self.path.display()),
                ELSEWHERE,
            ),
            Errno::INVAL if is_btrfs(from) => ReflinkError::new(
                format!("btrfs shares no blocks between the file and {}", self.path.display()),
                "one of them has checksums and the other one has none (`nodatasum`): mount it as \
                 when the file was created",
            ),
            errno => ReflinkError::failed("copy to", &self.path, &errno.into()),
        })
    }

    /// Gives the empty file the attribute NOCOW of another one (`chattr +C`), or takes it away where its
    /// directory has it: btrfs shares no blocks between files with and without checksums.
    fn adopt_nocow(&self, from: &File) {
        let (Ok(other), Ok(own)) = (ioctl_getflags(from), ioctl_getflags(&self.file)) else {
            return;
        };
        let nocow = other & IFlags::NOCOW;
        if own & IFlags::NOCOW == nocow {
            return;
        }
        // What its directory says of compression goes before: btrfs has one of both only. The copy
        // that follows reports what is not possible.
        for flags in [IFlags::empty(), nocow] {
            let _ = ioctl_setflags(&self.file, flags);
        }
    }

    /// Gives it the owner of another file.
    ///
    /// # Errors
    /// The system does not let the daemon do that.
    pub(crate) fn own_as(&self, other: &Metadata) -> Result<(), ReflinkError> {
        let own = |error| ReflinkError::failed("give its owner to a copy at", &self.path, &error);
        let here = self.file.metadata().map_err(own)?;
        if (here.uid(), here.gid()) == (other.uid(), other.gid()) {
            return Ok(());
        }
        fchown(&self.file, Some(other.uid()), Some(other.gid())).map_err(own)
    }

    /// Marks it as a snapshot of a namespace with blocks of this size, which [`remove_snapshot`] may
    /// remove. Without extended attributes it is not marked, and only its owner can remove it.
    pub fn mark_as_snapshot(&self, block_size_bytes: u32) {
        let _ = fsetxattr(&self.file, MARK, MARK_VALUE, XattrFlags::empty());
        let size = block_size_bytes.to_string();
        let _ = fsetxattr(&self.file, BLOCK_SIZE, size.as_bytes(), XattrFlags::empty());
    }

    /// Makes it durable, then gives it its name, durably, and this mode.
    ///
    /// # Errors
    /// The error of the system: there is no copy.
    pub fn publish(self, mode: u32) -> Result<(), ReflinkError> {
        let Reflink { file, path, directory } = &self;
        let failed =
            |tried: &'static str| move |error: io::Error| ReflinkError::failed(tried, path, &error);
        file.set_permissions(Permissions::from_mode(mode & 0o777))
            .map_err(failed("set the mode of"))?;
        durable::sync(file, path).map_err(failed("sync the copy for"))?;
        durable::link(file, path).map_err(failed("give a copy the name"))?;
        durable::sync_directory(directory)
            .inspect_err(|_| drop(durable::remove_file(path)))
            .map_err(failed("sync the directory of"))
    }
}

/// Removes a file that was marked as a snapshot and that nobody serves; waits for the namespace that
/// has just been removed. With `dry_run` the file stays. May block on the device.
///
/// # Errors
/// Why the file stays.
pub fn remove_snapshot(path: &Path, dry_run: bool) -> Result<(), ReflinkError> {
    let failed =
        |tried: &'static str| move |error: io::Error| ReflinkError::failed(tried, path, &error);
    let refused = |sentence: String, remedy| Err(ReflinkError::new(sentence, remedy));
    let shown = path.display();
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(failed("open"))?;
    let mut value = [0; MARK_VALUE.len()];
    let is_marked =
        fgetxattr(&file, MARK, &mut value).is_ok_and(|length| value[..length] == *MARK_VALUE);
    if !path.is_absolute() || !file.metadata().is_ok_and(|meta| meta.is_file()) || !is_marked {
        return refused(format!("{shown} is no snapshot"), "remove the file yourself");
    }
    let deadline = Instant::now() + CLOSE_TIMEOUT;
    while let Err(error) = file.try_lock() {
        let TryLockError::WouldBlock = error else {
            return refused(
                format!("{shown} cannot be locked: {error}"),
                "remove the file yourself",
            );
        };
        if Instant::now() >= deadline {
            let remedy = "remove the namespace first, see `nvmfctl namespace list`";
            return refused(format!("{shown} is served"), remedy);
        }
        sleep(CLOSE_POLL_INTERVAL);
    }
    // The locked file, and not one that has taken its place.
    if !path.symlink_metadata().is_ok_and(|there| is_same(&there, &file)) {
        return refused(format!("{shown} was replaced meanwhile"), "try again");
    }
    if dry_run {
        return Ok(());
    }
    durable::remove_file(path).map_err(failed("remove"))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    durable::sync_directory(directory).map_err(failed("sync the directory of"))
}

impl BackingDevice {
    /// The permissions of its file.
    ///
    /// # Errors
    /// It has none, or the system does not tell.
    pub fn file_mode(&self) -> io::Result<u32> {
        let file = self.file.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        Ok(file.metadata()?.mode())
    }
}

fn is_btrfs(file: &File) -> bool {
    file_system(file) == Some(BTRFS)
}

fn unsupported(directory: &Path) -> ReflinkError {
    let sentence = format!("the file system of {} has no reflinks", directory.display());
    let remedy = "keep backing files on XFS or btrfs for snapshots and clones; elsewhere copy a \
                  namespace with `nvmf copy` while no host writes to it";
    ReflinkError::new(sentence, remedy)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::durable::testing::calls;
    use crate::reflink::*;

    /// A directory of tmpfs, which has O_TMPFILE and no reflinks, on every machine.
    fn in_memory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn a_copy_without_reflink_support_fails_with_a_remedy() {
        let directory = in_memory();
        let source = directory.path().join("source");
        fs::write(&source, "data").unwrap();
        let copy = Reflink::create(&directory.path().join("copy")).unwrap();
        let error = copy.copy(&File::open(&source).unwrap()).unwrap_err();
        assert!(error.sentence.ends_with("has no reflinks"), "{error}");
        assert!(error.remedy.contains("XFS or btrfs") && error.remedy.contains("nvmf copy"));
        drop(copy);
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1, "nothing is left");
    }

    #[test]
    fn a_file_of_another_file_system_is_refused() {
        let (here, there) =
            (in_memory(), tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap());
        let source = there.path().join("source");
        fs::write(&source, "data").unwrap();
        let copy = Reflink::create(&here.path().join("copy")).unwrap();
        let error = copy.copy(&File::open(&source).unwrap()).unwrap_err();
        let known = ["in another file system than the file", "has no reflinks"];
        assert!(known.iter().any(|end| error.sentence.ends_with(end)), "{error}");
    }

    #[test]
    fn a_copy_is_synced_before_its_name_is_linked() {
        let directory = in_memory();
        let path = directory.path().join("copy");
        let copy = Reflink::create(&path).unwrap();
        let (published, calls) = calls(|| copy.publish(0o440));
        published.unwrap();
        let name = directory.path().file_name().unwrap().to_string_lossy();
        let expected = ["sync copy", "link copy", &format!("sync directory {name}")];
        assert_eq!(calls, expected);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o440);
    }

    #[test]
    fn only_snapshots_not_in_use_are_removed() {
        let directory = crate::testing::directory();
        let path = directory.path().join("copy");
        let copy = Reflink::create(&path).unwrap();
        copy.mark_as_snapshot(4096);
        copy.publish(0o444).unwrap();
        let own = directory.path().join("own");
        fs::write(&own, "precious").unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let refused = |path: &Path| remove_snapshot(path, false).unwrap_err().sentence;
        assert!(refused(&own).ends_with("is no snapshot"));
        assert!(refused(directory.path()).ends_with("is no snapshot"));
        assert!(refused(&link).starts_with("cannot open"), "no link is followed");
        assert!(refused(&directory.path().join("none")).starts_with("cannot open"));
        let served = File::open(&path).unwrap();
        if fgetxattr(&served, MARK, &mut [0; 8]).is_err() {
            // A file system without extended attributes, as tmpfs before Linux 6.6.
            return assert!(refused(&path).ends_with("is no snapshot"));
        }
        served.try_lock_shared().unwrap();
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| calls(|| remove_snapshot(&path, false)));
            sleep(CLOSE_POLL_INTERVAL);
            assert!(path.exists(), "it is served");
            served.unlock().unwrap();
            let (removed, calls) = removing.join().unwrap();
            removed.unwrap();
            let name = directory.path().file_name().unwrap().to_string_lossy();
            assert_eq!(calls, ["remove copy", &format!("sync directory {name}")]);
        });
        assert!(!path.exists() && own.exists());
    }

    #[test]
    fn a_reflink_never_replaces_an_existing_file() {
        let directory = in_memory();
        let path = directory.path().join("copy");
        let late = Reflink::create(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(Reflink::create(&path).unwrap_err().sentence.contains("already"));
        let error = late.publish(0o600).unwrap_err();
        assert!(error.sentence.contains("File exists"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        for path in ["copy", "/", "/dev/shm/.."] {
            assert!(Reflink::create(Path::new(path)).is_err(), "{path}");
        }
    }
}
