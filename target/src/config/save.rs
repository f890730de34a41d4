//! Replaces several files atomically, also across a power loss.
//!
//! ```text
//! new texts beside the files ─► the record ─► rename, rename, .. ─► no record
//!                                   └─ from here on the new texts are those of the files
//! ```
//!
//! The record is beside the configuration file and contains, for each file, the digests of the old
//! and new text. So a reader of partially renamed files uses the new text where it is not yet in
//! place. Files that were edited since are not changed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{ConfigFiles, Rewritten};
use crate::blockdev::crash_point::crash_point;
use crate::blockdev::durable;

/// Name space of the digests of texts.
const DIGEST_SPACE: Uuid = Uuid::from_u128(0x6e0f_5f0c_7c0b_4f5e_8a61_6b65_7074_6368);

/// Version of the record.
const FORM: u32 = 2;

/// The version before: new texts are in FILE.new, which an administrator may have as well.
const OLD_FORM: u32 = 1;

pub(crate) fn digest(text: &str) -> String {
    Uuid::new_v5(&DIGEST_SPACE, text.as_bytes()).to_string()
}

/// Writer of the files of a configuration. There is only one at a time.
#[derive(Debug)]
pub struct Saving {
    file: PathBuf,
    finished: bool,
    _lock: SaveLock,
}

impl Saving {
    /// Locks the files, and completes an interrupted save. `file`: the configuration file, by the
    /// name that the daemon uses.
    ///
    /// # Errors
    /// A sentence: another save is in progress, or a file cannot be written.
    pub fn begin(file: &Path) -> Result<Saving, String> {
        let lock = SaveLock::take(beside(&waiting(file), ".lock"))?;
        let mut saving = Saving { file: file.to_owned(), finished: false, _lock: lock };
        saving.finished = saving.finish()?;
        Ok(saving)
    }

    /// Whether an interrupted save was completed.
    pub fn has_finished_another(&self) -> bool {
        self.finished
    }

    /// Writes the files that differ. They keep their owners and modes; new ones get those of the
    /// configuration file, and a new directory those of its parent. `old`: the current texts.
    ///
    /// # Errors
    /// A sentence. Either nothing has changed, or the new texts are in force but not yet in place,
    /// as the sentence says.
    pub fn write(&self, old: &ConfigFiles, new: &ConfigFiles) -> Result<(), String> {
        if !self.commit(old, new)? {
            return Ok(());
        }
        let on = "the saved texts are in force, and `nvmfctl save` completes the save";
        self.finish().map(drop).map_err(|error| format!("{error}: {on}"))
    }

    /// Executes every step that can fail: afterwards the new texts are in force. Returns whether
    /// any differ. After an error the old texts are in force or, if the sentence says so, the new
    /// ones.
    pub(crate) fn commit(&self, old: &ConfigFiles, new: &ConfigFiles) -> Result<bool, String> {
        let mut made = Vec::new();
        let ready = self.ready(&old.rewritten(new), &mut made);
        if ready.is_err() {
            made.iter().for_each(|beside| drop(fs::remove_file(beside)));
        }
        ready
    }

    fn ready(&self, all: &[Rewritten<'_>], made: &mut Vec<PathBuf>) -> Result<bool, String> {
        if all.is_empty() {
            return Ok(false);
        }
        let like = fs::metadata(&self.file).map_err(|e| cannot("read", &self.file, &e))?;
        let mut files = Vec::new();
        let mut directories = BTreeSet::new();
        for Rewritten { file, old, new } in all {
            make_directory(parent(file))?;
            // A link is kept, and its target is replaced or removed.
            let found = if new.is_some() { real(file) } else { itself(file) };
            let file = found.map_err(|error| cannot("find", file, &error))?;
            if let Some(text) = new {
                let beside = waiting(&file);
                let like = fs::metadata(&file).unwrap_or_else(|_| like.clone());
                made.push(beside.clone());
                put(&beside, text, &like, like.permissions())
                    .map_err(|error| cannot("write", &beside, &error))?;
                directories.insert(parent(&file).to_owned());
            }
            files.push(SavedFile { file, old: old.map(digest), new: new.map(digest) });
        }
        sync_directories(&directories)?;
        let record = record(&self.file);
        let shown = |error: &dyn std::fmt::Display| cannot("write", &record, error);
        let content = SaveRecord { form: FORM, files };
        let text = serde_json::to_string_pretty(&content).map_err(|error| shown(&error))?;
        let beside = waiting(&record);
        made.push(beside.clone());
        // The record may be readable by others: readers of the files may know their names.
        put(&beside, &text, &like, Permissions::from_mode(0o644)).map_err(|error| shown(&error))?;
        crash_point();
        durable::rename(&beside, &record).map_err(|error| shown(&error))?;
        // From here on the new texts are read, even if a later step fails.
        made.clear();
        let on = "the saved texts are in force, but a power loss may revert them: run `nvmfctl \
                  save` again";
        sync_directories(&BTreeSet::from([parent(&record).to_owned()]))
            .map_err(|error| format!("{error}: {on}"))?;
        Ok(true)
    }

    /// Renames new texts into place. Returns whether there was a record.
    fn finish(&self) -> Result<bool, String> {
        let Some(begun) = UnfinishedSave::beside(&self.file)? else { return Ok(false) };
        let mut directories = BTreeSet::new();
        for entry in &begun.files {
            let SavedFile { file, new, .. } = entry;
            let failed = |error: &io::Error| cannot("write", file, error);
            let waiting = begun.waiting(file);
            crash_point();
            match (entry.is_old(read(file).as_deref()), new) {
                (true, Some(_)) if entry.waits(&waiting) => {
                    durable::rename(&waiting, file).map_err(|e| failed(&e))?;
                }
                (true, None) => durable::remove_file(file).map_err(|e| failed(&e))?,
                // The file is in place, or was edited since.
                _ => drop(durable::remove_file(&waiting)),
            }
            directories.insert(parent(file).to_owned());
        }
        sync_directories(&directories)?;
        crash_point();
        durable::remove_file(&begun.record)
            .map_err(|error| cannot("remove", &begun.record, &error))?;
        sync_directories(&BTreeSet::from([parent(&begun.record).to_owned()]))?;
        Ok(true)
    }
}

/// The lock of the files of a configuration: a file of its own, which nobody else can open. Any user
/// could lock their directory, and keep administrators from saving. Removed when dropped.
#[derive(Debug)]
struct SaveLock {
    path: PathBuf,
    _held: File,
}

impl SaveLock {
    fn take(path: PathBuf) -> Result<SaveLock, String> {
        let mut options = File::options();
        options.write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        loop {
            let file = options.open(&path).map_err(|error| cannot("open", &path, &error))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err("another save is in progress: try again".to_owned());
                }
                Err(TryLockError::Error(error)) => return Err(cannot("lock", &path, &error)),
            }
            // The save that had it may have removed it meanwhile.
            let id = |meta: Metadata| (meta.dev(), meta.ino());
            let found = fs::symlink_metadata(&path).map(id).ok();
            if found.is_some() && found == file.metadata().map(id).ok() {
                return Ok(SaveLock { path, _held: file });
            }
        }
    }
}

impl Drop for SaveLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A save whose new texts are not all in place.
#[derive(Debug)]
pub(super) struct UnfinishedSave {
    pub(super) record: PathBuf,
    form: u32,
    files: Vec<SavedFile>,
}

#[derive(Serialize, Deserialize)]
struct SaveRecord {
    form: u32,
    files: Vec<SavedFile>,
}

/// A file, and the digests of its old and new text; `None`: no file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedFile {
    file: PathBuf,
    old: Option<String>,
    new: Option<String>,
}

impl UnfinishedSave {
    /// Reads the record of this configuration file.
    ///
    /// # Errors
    /// A sentence: the record cannot be read.
    pub(super) fn beside(file: &Path) -> Result<Option<UnfinishedSave>, String> {
        let record = record(file);
        let text = match fs::read_to_string(&record) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(cannot("read", &record, &error)),
        };
        match serde_json::from_str(&text) {
            Ok(SaveRecord { form: form @ (OLD_FORM | FORM), files }) => {
                Ok(Some(UnfinishedSave { record, form, files }))
            }
            Ok(SaveRecord { form, .. }) => {
                Err(cannot("read", &record, &format!("its form is {form}")))
            }
            Err(error) => Err(cannot("read", &record, &error)),
        }
    }

    /// The text of a file whose current text is `text`; `None`: there is no such file.
    pub(super) fn text(&self, file: &Path, text: Option<String>) -> Option<String> {
        let named = |name: PathBuf| self.files.iter().find(|entry| entry.file == name);
        let real = || real(file).ok().and_then(named);
        match itself(file).ok().and_then(named).or_else(real) {
            Some(entry) if entry.is_old(text.as_deref()) => {
                let waiting = self.waiting(&entry.file);
                match entry.new {
                    Some(_) if entry.waits(&waiting) => read(&waiting).or(text),
                    Some(_) => text,
                    None => None,
                }
            }
            _ => text,
        }
    }

    /// Path of the new text of a file.
    fn waiting(&self, file: &Path) -> PathBuf {
        match self.form {
            OLD_FORM => beside(file, ".new"),
            _ => waiting(file),
        }
    }

    /// Returns its files in a directory.
    pub(super) fn of_directory(&self, directory: &Path) -> impl Iterator<Item = PathBuf> {
        let real = fs::canonicalize(directory).ok();
        let here =
            self.files.iter().filter(move |entry| Some(parent(&entry.file)) == real.as_deref());
        here.filter_map(|entry| Some(directory.join(entry.file.file_name()?)))
    }
}

impl SavedFile {
    fn is_old(&self, text: Option<&str>) -> bool {
        text.map(digest) == self.old
    }

    /// Whether the new text is at this path.
    fn waits(&self, waiting: &Path) -> bool {
        self.new.is_some() && read(waiting).as_deref().map(digest) == self.new
    }
}

/// Creates a durable file with the owner and mode of another one.
fn put(file: &Path, text: &str, like: &Metadata, mode: Permissions) -> io::Result<()> {
    // A file may remain from a power loss.
    crash_point();
    let _ = fs::remove_file(file);
    crash_point();
    let mut new = File::options().write(true).create_new(true).mode(0o600).open(file)?;
    crash_point();
    durable::write(&mut new, file, text.as_bytes())?;
    let mine = new.metadata()?;
    if (mine.uid(), mine.gid()) != (like.uid(), like.gid()) {
        fchown(&new, Some(like.uid()), Some(like.gid()))?;
    }
    new.set_permissions(mode)?;
    crash_point();
    durable::sync(&new, file)
}

/// Creates the directory of included files. Readers of its parent may read it, independent of the
/// umask; but it is not writable for all users.
fn make_directory(directory: &Path) -> Result<(), String> {
    if directory.exists() {
        return Ok(());
    }
    let beside = waiting(directory);
    let made = put_directory(&beside, parent(directory))
        .and_then(|()| durable::rename(&beside, directory));
    made.map_err(|error| {
        let _ = fs::remove_dir(&beside);
        cannot("make", directory, &error)
    })?;
    sync_directories(&BTreeSet::from([parent(directory).to_owned()]))
}

/// Creates a directory with the owner of another one.
fn put_directory(directory: &Path, like: &Path) -> io::Result<()> {
    let like = fs::metadata(like)?;
    // A directory may remain from a power loss.
    crash_point();
    let _ = fs::remove_dir(directory);
    crash_point();
    DirBuilder::new().mode(0o700).create(directory)?;
    let new = File::open(directory)?;
    let mine = new.metadata()?;
    if (mine.uid(), mine.gid()) != (like.uid(), like.gid()) {
        // Without the permission to change the owner, the directory belongs to this user, and to
        // the group that may read its parent.
        fchown(&new, Some(like.uid()), Some(like.gid()))
            .or_else(|_| fchown(&new, None, Some(like.gid())))?;
    }
    new.set_permissions(Permissions::from_mode(like.mode() & 0o2775))?;
    crash_point();
    durable::sync(&new, directory)?;
    crash_point();
    Ok(())
}

fn sync_directories(directories: &BTreeSet<PathBuf>) -> Result<(), String> {
    directories.iter().try_for_each(|directory| {
        crash_point();
        durable::sync_directory(directory).map_err(|error| cannot("write", directory, &error))
    })
}

fn record(file: &Path) -> PathBuf {
    beside(file, ".saving")
}

/// Path of the new text of a file: a hidden name, which is not that of a file of an administrator.
fn waiting(file: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(beside(file, ".saving").file_name().unwrap_or_default());
    file.with_file_name(name)
}

fn beside(file: &Path, end: &str) -> PathBuf {
    let mut name: OsString = file.file_name().unwrap_or_default().to_owned();
    name.push(end);
    file.with_file_name(name)
}

/// Resolves links, also for a missing file.
fn real(file: &Path) -> io::Result<PathBuf> {
    fs::canonicalize(file).or_else(|error| match (error.kind(), file.file_name()) {
        (ErrorKind::NotFound, Some(name)) => Ok(fs::canonicalize(parent(file))?.join(name)),
        _ => Err(error),
    })
}

/// The file or link of that name, in the resolved directory.
fn itself(file: &Path) -> io::Result<PathBuf> {
    let name = file.file_name().ok_or(ErrorKind::InvalidInput)?;
    Ok(fs::canonicalize(parent(file))?.join(name))
}

fn read(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok()
}

/// The directory of a file.
pub(super) fn parent(file: &Path) -> &Path {
    match file.parent() {
        Some(directory) if directory.as_os_str().is_empty() => Path::new("."),
        Some(directory) => directory,
        None => Path::new("/"),
    }
}

fn cannot(what: &str, file: &Path, error: &dyn std::fmt::Display) -> String {
    format!("cannot {what} {}: {error}", file.display())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use nix::unistd::{Gid, Uid, setfsgid, setfsuid};

    use crate::blockdev::durable::testing::calls;
    use crate::config::save::*;

    /// A file of another owner is not replaced, because the daemon may depend on that owner to read
    /// it; a directory may belong to the user of the save, in the group of its parent.
    #[test]
    fn unprivileged_saves_replace_no_foreign_files_but_create_directories() {
        const SAVER: u32 = 65_534;
        let directory = tempfile::tempdir().unwrap();
        if chown(directory.path(), None, Some(SAVER)).is_err() {
            // Only root can become another user.
            return;
        }
        fs::set_permissions(directory.path(), Permissions::from_mode(0o2775)).unwrap();
        let file = directory.path().join("nvmfd.toml");
        fs::write(&file, "").unwrap();
        let like = fs::metadata(&file).unwrap();
        let (beside, more) =
            (directory.path().join("nvmfd.toml.new"), directory.path().join("conf.d"));
        // These two apply to this thread only.
        setfsgid(Gid::from_raw(SAVER));
        setfsuid(Uid::from_raw(SAVER));
        let refused = put(&beside, "text", &like, like.permissions());
        let made = put_directory(&more, directory.path());
        setfsuid(Uid::from_raw(0));
        setfsgid(Gid::from_raw(0));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
        made.unwrap();
        let more = fs::metadata(more).unwrap();
        assert_eq!((more.uid(), more.gid(), more.mode() & 0o7777), (SAVER, SAVER, 0o2775));
    }

    #[test]
    fn a_directory_is_durable_before_anything_is_put_into_it() {
        let directory = tempfile::tempdir().unwrap();
        let around = directory.path().file_name().unwrap().display().to_string();
        let (made, calls) = calls(|| make_directory(&directory.path().join("conf.d")));
        made.unwrap();
        let all = ["sync .conf.d.saving", "rename to conf.d", &format!("sync directory {around}")];
        assert_eq!(calls, all);
    }
}
