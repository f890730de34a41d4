//! Durable file operations: write and fsync, rename, fsync of the directory. All code that needs
//! them, except the I/O of hosts, uses this module, so that tests can check the calls and their
//! order: killing a process does not lose unsynced data, so only a record of the calls shows that
//! one is missing.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags, RenameFlags, renameat2};
use nix::unistd::linkat;

/// A durable file operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step<'a> {
    /// Writes this content to a file.
    Write(&'a Path, &'a [u8]),
    /// fsync of a file.
    Sync(&'a Path),
    /// fdatasync of a file.
    SyncData(&'a Path),
    /// fsync of a directory.
    SyncDirectory(&'a Path),
    /// syncfs of the file system of a path.
    SyncFileSystem(&'a Path),
    /// Renames a file or directory.
    Rename(&'a Path, &'a Path),
    /// Gives a file without a name this one.
    Link(&'a Path),
    /// Exchanges two files.
    Exchange(&'a Path, &'a Path),
    /// Removes a file.
    Remove(&'a Path),
}

/// Called before each step. A step for which it returns an error is not done.
pub type Observer = Box<dyn FnMut(Step<'_>) -> io::Result<()>>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Installs an observer for the steps of this thread, to simulate the result of a power loss.
pub fn observe(observer: Option<Observer>) {
    OBSERVER.set(observer);
}

/// Calls the observer before a step.
fn ask(step: Step<'_>) -> io::Result<()> {
    OBSERVER.with_borrow_mut(|observer| observer.as_mut().map_or(Ok(()), |it| it(step)))
}

/// Writes all of `content` to an open file whose path is `path`.
pub fn write(file: &mut File, path: &Path, content: &[u8]) -> io::Result<()> {
    ask(Step::Write(path, content))?;
    file.write_all(content)?;
    note("write", path);
    Ok(())
}

/// Makes content and attributes of an open file durable.
pub fn sync(file: &File, path: &Path) -> io::Result<()> {
    ask(Step::Sync(path))?;
    file.sync_all()?;
    note("sync", path);
    Ok(())
}

/// Makes content and size of an open file durable (fdatasync).
pub(crate) fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    ask(Step::SyncData(path))?;
    file.sync_data()?;
    note("sync data", path);
    Ok(())
}

/// Makes the entries of a directory durable.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    ask(Step::SyncDirectory(path))?;
    File::open(path)?.sync_all()?;
    note("sync directory", path);
    Ok(())
}

/// Makes the whole file system of an open file or directory durable.
pub(crate) fn sync_file_system(file: impl AsFd, path: &Path) -> io::Result<()> {
    ask(Step::SyncFileSystem(path))?;
    nix::unistd::syncfs(file)?;
    note("sync file system", path);
    Ok(())
}

/// Renames a file or directory.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    ask(Step::Rename(from, to))?;
    fs::rename(from, to)?;
    note("rename to", to);
    Ok(())
}

/// Gives an open file without a name (O_TMPFILE) this one, which nothing may have yet.
pub(crate) fn link(file: &File, path: &Path) -> io::Result<()> {
    ask(Step::Link(path))?;
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(AT_FDCWD, own.as_str(), AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?;
    note("link", path);
    Ok(())
}

/// Exchanges two files: each has the name of the other, at once.
pub(crate) fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    ask(Step::Exchange(one, other))?;
    renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)?;
    note("exchange", other);
    Ok(())
}

/// Removes a file.
pub fn remove_file(path: &Path) -> io::Result<()> {
    ask(Step::Remove(path))?;
    fs::remove_file(path)?;
    note("remove", path);
    Ok(())
}

/// Makes a file of another process durable: content, size, and the directory entries that lead to
/// it, also where `path` is a symbolic link. May block on the device.
pub(crate) fn sync_with_entries(file: &File, path: &Path) -> io::Result<()> {
    // Some read-only file systems do not support fsync of a file. A directory with search
    // permission only cannot be opened for fsync.
    let or_all = |outcome: io::Result<()>, path: &Path| match outcome {
        Err(error) if cannot_be_synced(&error) => sync_file_system(file, path),
        outcome => outcome,
    };
    or_all(sync(file, path), path)?;
    let (entry, real) = (directory_of(path), directory_of(&fs::canonicalize(path)?));
    if fs::canonicalize(&entry)? != real {
        or_all(sync_directory(&entry), &entry)?;
    }
    or_all(sync_directory(&real), &real)
}

/// Whether an error of fsync means that the file system does not support it for such a file, or
/// that this user may not open it, rather than that data are lost.
pub fn cannot_be_synced(error: &io::Error) -> bool {
    use ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
}

/// The directory that contains the entry of a path.
fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// For tests: records a call and its path.
fn note(call: &'static str, path: &Path) {
    #[cfg(any(test, feature = "testing"))]
    testing::note(call, path);
    #[cfg(not(any(test, feature = "testing")))]
    let _ = (call, path);
}

/// For tests, also of other packages.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use std::cell::RefCell;
    use std::path::{Path, PathBuf};

    thread_local! {
        static CALLS: RefCell<Option<Vec<(&'static str, PathBuf)>>> = const { RefCell::new(None) };
    }

    pub(super) fn note(call: &'static str, path: &Path) {
        CALLS.with_borrow_mut(|calls| calls.iter_mut().for_each(|it| it.push((call, path.into()))));
    }

    /// The durable operations of this thread: each call with the name of its file.
    pub fn calls<T>(what: impl FnOnce() -> T) -> (T, Vec<String>) {
        CALLS.set(Some(Vec::new()));
        let outcome = what();
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let calls = CALLS.take().unwrap();
        (outcome, calls.iter().map(|(call, path)| format!("{call} {}", name(path))).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

    use crate::durable::testing::calls;
    use crate::durable::*;

    #[test]
    fn operations_refused_by_the_observer_are_not_executed() {
        let directory = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| directory.path().join(name));
        fs::write(&a, "a").unwrap();
        let mut file = File::options().write(true).open(&a).unwrap();
        observe(Some(Box::new(|_| Err(ErrorKind::Interrupted.into()))));
        let (refused, done) = calls(|| {
            let of_file = [write(&mut file, &a, b"b"), sync(&file, &a), sync_data(&file, &a)];
            let of_names = [rename(&a, &b), remove_file(&a), sync_directory(directory.path())];
            let refused = of_file.into_iter().chain(of_names).all(|outcome| outcome.is_err());
            refused && sync_file_system(&file, &a).is_err()
        });
        observe(None);
        assert!(refused && done.is_empty(), "{done:?}");
        assert_eq!((fs::read(&a).unwrap(), b.exists()), (b"a".to_vec(), false));
        rename(&a, &b).unwrap();
    }

    /// A descriptor that was opened with O_PATH: a function that does not call fsync does not fail
    /// with it.
    #[test]
    fn each_sync_function_issues_a_system_call() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        fs::write(&path, "a").unwrap();
        let file = File::options().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
        assert!(sync(&file, &path).is_err());
        assert!(sync_data(&file, &path).is_err());
        assert!(sync_file_system(&file, &path).is_err());
        // A pipe does not support fsync.
        let pipe = directory.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _writer = File::options().read(true).write(true).open(&pipe).unwrap();
        assert_eq!(sync_directory(&pipe).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_foreign_file_is_synced_with_all_directory_entries_of_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let [real, links] = ["real", "links"].map(|name| directory.path().join(name));
        [&real, &links].into_iter().for_each(|path| fs::create_dir(path).unwrap());
        let (image, link) = (real.join("a.img"), links.join("link"));
        fs::write(&image, "a").unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let calls_of = |path: &Path| {
            let file = File::open(path).unwrap();
            calls(|| sync_with_entries(&file, path).unwrap()).1
        };
        assert_eq!(calls_of(&image), ["sync a.img", "sync directory real"]);
        assert_eq!(calls_of(&link), ["sync link", "sync directory links", "sync directory real"]);
        fs::set_permissions(&real, fs::Permissions::from_mode(0o100)).unwrap();
        if !nix::unistd::geteuid().is_root() {
            assert_eq!(calls_of(&image), ["sync a.img", "sync file system real"]);
        }
        fs::set_permissions(&real, fs::Permissions::from_mode(0o700)).unwrap();
    }
}
