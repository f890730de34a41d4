//! The directory of a catalog. Operations may block for ever: they hold no lock except the one that
//! serializes them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, TryLockError};

use tracing::{error, info};
use uuid::Uuid;

use crate::blockdev::{lock, rollback_copy};
use crate::config::CATALOG_RECORD;
use crate::state::ns_catalog::NamespaceCatalogRecord;
use crate::state::record::StateDir;

/// A directory that this daemon has locked.
#[derive(Debug)]
pub struct NamespaceDirectory {
    path: PathBuf,
    identity: DirectoryIdentity,
    /// The record that could not be written.
    unwritten: Mutex<Option<NamespaceCatalogRecord>>,
    /// Held by a request from its plan to its end, and by the removal of images.
    turn: Mutex<()>,
    /// The lock of the directory.
    _lock: File,
}

/// Identity of a directory, independent of its path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectoryIdentity {
    dev: u64,
    ino: u64,
}

impl DirectoryIdentity {
    fn of(directory: &fs::Metadata) -> DirectoryIdentity {
        DirectoryIdentity { dev: directory.dev(), ino: directory.ino() }
    }

    /// Fails if the path leads to another directory: a file system was mounted over it, or it was
    /// replaced. The record there must not be overwritten. May wait for devices.
    ///
    /// # Errors
    /// A sentence about that, or the I/O error.
    pub fn is_at(self, directory: &Path) -> io::Result<()> {
        if DirectoryIdentity::of(&fs::metadata(directory)?) == self {
            return Ok(());
        }
        let shown = directory.display();
        Err(io::Error::other(format!(
            "{shown} is another directory than when it was opened (was something mounted there?): reload"
        )))
    }
}

impl NamespaceDirectory {
    /// The directory at a path, opened and locked.
    pub(super) fn new(path: &Path, lock: File) -> io::Result<NamespaceDirectory> {
        let identity = DirectoryIdentity::of(&lock.metadata()?);
        Ok(NamespaceDirectory {
            path: path.to_owned(),
            identity,
            unwritten: Mutex::default(),
            turn: Mutex::default(),
            _lock: lock,
        })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity of the directory.
    pub fn identity(&self) -> DirectoryIdentity {
        self.identity
    }

    /// The file of the namespace with this UUID.
    pub fn image(&self, uuid: Uuid) -> PathBuf {
        self.path.join(format!("{uuid}.img"))
    }

    /// Waits until nobody else changes the catalog, and keeps others from doing so. To be taken
    /// before the lock of the provisioner.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    /// As [`NamespaceDirectory::turn`], unless somebody changes it.
    pub(super) fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Replaces the record, so that it survives a power loss.
    ///
    /// # Errors
    /// The I/O error: the previous record is in place, or remains to be written.
    pub fn keep(
        &self,
        new: &NamespaceCatalogRecord,
        before: &NamespaceCatalogRecord,
    ) -> io::Result<()> {
        let mut unwritten = lock(&self.unwritten);
        self.is_in_place()?;
        let kept = StateDir(&self.path).replace(CATALOG_RECORD, new);
        match kept {
            Ok(()) => *unwritten = None,
            // The rename may have happened. Hosts were reported the previous state, so restore it.
            Err(_) => self.put_back(&mut unwritten, before),
        }
        kept
    }

    /// Restores this record. Returns false if that has to be retried.
    pub fn restore(&self, record: &NamespaceCatalogRecord) -> bool {
        let mut unwritten = lock(&self.unwritten);
        self.put_back(&mut unwritten, record);
        unwritten.is_none()
    }

    /// Whether a record has to be written again. Does not wait for an operation in progress.
    pub(crate) fn has_unwritten_record(&self) -> bool {
        match self.unwritten.try_lock() {
            Ok(unwritten) => unwritten.is_some(),
            Err(TryLockError::Poisoned(unwritten)) => unwritten.into_inner().is_some(),
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// Whether the record is written. False during an operation.
    pub(super) fn is_written(&self) -> bool {
        self.unwritten.try_lock().is_ok_and(|unwritten| unwritten.is_none())
    }

    /// Writes the record again, if that is needed.
    pub(crate) fn rewrite_record(&self) {
        let mut unwritten = lock(&self.unwritten);
        if let Some(record) = unwritten.clone() {
            self.put_back(&mut unwritten, &record);
        }
    }

    /// Removes the files of these namespaces, so that a power loss does not restore them.
    ///
    /// # Errors
    /// The I/O error; some files may have been removed.
    pub fn remove(&self, uuids: &BTreeSet<Uuid>) -> io::Result<()> {
        let _unwritten = lock(&self.unwritten);
        self.is_in_place()?;
        let directory = StateDir(&self.path);
        uuids.iter().try_for_each(|uuid| {
            // What a rollback that was interrupted has left of it.
            let left = rollback_copy(&self.image(*uuid));
            if let Some(name) = left.file_name().and_then(OsStr::to_str).filter(|_| left.exists()) {
                directory.remove(name)?;
            }
            directory.remove(&format!("{uuid}.img"))
        })
    }

    /// Fails if its path leads to another directory than the one that was opened.
    ///
    /// # Errors
    /// A sentence about that, or the I/O error.
    pub(crate) fn is_in_place(&self) -> io::Result<()> {
        self.identity.is_at(&self.path)
    }

    fn put_back(
        &self,
        unwritten: &mut Option<NamespaceCatalogRecord>,
        record: &NamespaceCatalogRecord,
    ) {
        let shown = self.path.display();
        let kept =
            self.is_in_place().and_then(|()| StateDir(&self.path).replace(CATALOG_RECORD, record));
        match kept {
            Ok(()) => {
                if unwritten.take().is_some() {
                    info!("{shown}/{CATALOG_RECORD} matches the state reported to hosts again");
                }
            }
            Err(error) => {
                if unwritten.is_none() {
                    error!(
                        "{shown}/{CATALOG_RECORD} may differ from the state reported to hosts and would be \
                         used at the next start: {error}; the write is retried"
                    );
                }
                *unwritten = Some(record.clone());
            }
        }
    }
}
