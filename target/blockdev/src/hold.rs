//! Exclusive use of a backing store while it is served: a lock, an exclusive open, an owner file.

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::time::SystemTime;

use nix::sys::statvfs::fstatvfs;
use rustix::fs::fgetxattr;

use super::allocation::Allocation;
use super::backing::{BackingConfig, Kind};
use super::health::Detached;
use super::open_error::{OpenError, failed};
use super::owner_file::Owner;

/// The largest logical block, and the alignment of buffers.
const PAGE_BYTES: usize = 4096;

/// Prevents others from serving a store: a lock, and for a device an exclusive open (O_EXCL).
///
/// A kernel may keep a file that was registered with a ring open for about a second after the last
/// close (6.1 does). So the lock is released explicitly, and the exclusive open has a descriptor of
/// its own: a store can be reopened immediately.
#[derive(Debug)]
pub(super) struct Hold {
    locked: Arc<File>,
    pub(super) inode: Inode,
    _claim: Option<File>,
    /// Excludes other machines where locks are local.
    owner: Option<Owner>,
}

impl Hold {
    /// For a file that is locked already.
    pub(super) fn new(
        locked: Arc<File>,
        meta: &Metadata,
        claim: Option<File>,
        owner: Option<Owner>,
    ) -> Hold {
        Hold { locked, inode: Inode::of(meta), _claim: claim, owner }
    }

    /// Opens the same store once more: the kernel reports writeback errors for each open file.
    pub(super) fn another(&self, name: &str, read_only: bool) -> Result<File, OpenError> {
        OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", self.locked.as_raw_fd()))
            .map_err(|error| failed(&format!("cannot open {name} once more"), &error))
    }

    /// Size of the file or device. Records what is allocated to a file.
    pub(super) fn len_bytes(&self, kind: Kind, allocation: &Allocation) -> io::Result<u64> {
        if kind == Kind::Device {
            return (&*self.locked).seek(SeekFrom::End(0));
        }
        let meta = self.locked.metadata()?;
        allocation.record(&meta);
        Ok(meta.len())
    }

    /// Size and free bytes of its file system; none where it does not tell.
    pub(super) fn file_system_bytes(&self) -> io::Result<Option<(u64, u64)>> {
        let found = fstatvfs(&self.locked)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
        let space = (bytes(found.blocks()), bytes(found.blocks_available()));
        Ok(Some(space).filter(|(size_bytes, _)| *size_bytes > 0))
    }

    /// Reads the first and the last block of `size_bytes`. Returns the offset of the one that is
    /// beyond the end.
    pub(super) fn probe_ends(
        &self,
        size_bytes: u64,
        block_size_bytes: u32,
    ) -> io::Result<Option<u64>> {
        for at in [0, size_bytes - u64::from(block_size_bytes)] {
            if read_block(&self.locked, at, block_size_bytes)? == 0 {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// What is at a path instead of this store, if the path does not lead to it. A device may have
    /// another node there that stands for the same device.
    ///
    /// # Errors
    /// It cannot be determined.
    pub(super) fn detached_from(&self, path: &Path) -> io::Result<Option<Detached>> {
        let here = self.locked.metadata()?;
        let is_same = |there: &Metadata| match here.file_type().is_block_device() {
            true => there.rdev() == here.rdev() && there.file_type().is_block_device(),
            false => (there.dev(), there.ino()) == (here.dev(), here.ino()),
        };
        match fs::metadata(path) {
            Ok(there) if is_same(&there) => Ok(None),
            Ok(_) => Ok(Some(Detached::Replaced)),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Ok(Some(Detached::Removed))
            }
            Err(error) => Err(error),
        }
    }

    /// A path by which it can be read while the daemon runs, wherever its configured path leads.
    pub(super) fn own_path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.locked.as_raw_fd())
    }

    /// Whether a path leads to this inode. A device that returns gets the number of the removed
    /// one, so for devices this is not sufficient.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|there| is_same(&there, &self.locked))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // The next holder of the lock checks that the file is still at its path.
        drop(self.owner.take());
        let _ = self.locked.unlock();
    }
}

pub(super) fn is_same(there: &Metadata, file: &File) -> bool {
    let identity = |meta: &Metadata| (meta.dev(), meta.ino(), meta.rdev());
    file.metadata().is_ok_and(|here| identity(there) == identity(&here))
}

/// Extended attribute of the size of the blocks in which hosts have written a snapshot, in decimal.
pub(super) const BLOCK_SIZE: &str = "user.nvmfd.block_size";

/// The size of the blocks of a marked snapshot, if it is known.
pub(super) fn snapshot_block_size_bytes(file: &File) -> Option<u32> {
    let mut value = [0; 8];
    let length = fgetxattr(file, BLOCK_SIZE, &mut value).ok()?;
    str::from_utf8(value.get(..length)?).ok()?.parse().ok()
}

/// The name of the copy of a snapshot until a rollback exchanges it with the file at `path`, and of
/// the former file from then on until that is removed: a hidden file in the same directory.
pub fn rollback_copy(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".nvmfd-rollback");
    path.with_file_name(name)
}

/// Says what a rollback has left beside a file, if it was interrupted.
pub(super) fn interrupted_rollback(path: &Path) -> Option<String> {
    let left = rollback_copy(&fs::canonicalize(path).ok()?);
    left.symlink_metadata().ok()?;
    Some(format!(
        "{} is left of a rollback that was interrupted: it has what {} had before, or else a copy of \
         the snapshot; look at both, and remove it",
        left.display(),
        path.display()
    ))
}

/// Opens a block device exclusively, so that it cannot be mounted or become part of another device.
pub(super) fn claim_device(path: &Path, meta: &Metadata) -> io::Result<Option<File>> {
    if !meta.file_type().is_block_device() {
        return Ok(None);
    }
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path).map(Some)
}

/// Locks the store for this daemon, until the descriptor is closed.
pub(super) fn lock(file: &File, name: &str, is_shared: bool) -> Result<(), OpenError> {
    let locked = if is_shared { file.try_lock_shared() } else { file.try_lock() };
    match locked {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let holder =
                lock_holder(file).map_or_else(String::new, |pid| format!(" (process {pid})"));
            let sentence = format!(
                "{name} is in use by another nvmfd{holder}, or by another namespace of this one: \
                 a lock on it is held; serve it from one place only, or say `shared = true` at \
                 each"
            );
            Err(OpenError { sentence, may_pass: true })
        }
        Err(TryLockError::Error(error)) => Err(failed(
            &format!("cannot lock {name}, which guards it against being served twice"),
            &error,
        )),
    }
}

/// Whether other daemons with the same configuration may serve it too: readers, and what is
/// configured as shared.
pub(super) fn shares(config: &BackingConfig) -> bool {
    config.read_only || config.shared
}

/// The process that holds the lock on this file: one that `/proc/locks` lists and that has the file
/// open. (The inode numbers listed there are not those that btrfs and overlays show.) `1: FLOCK
/// ADVISORY  WRITE 1234 fe:00:5678 0 EOF`.
fn lock_holder(file: &File) -> Option<u32> {
    // An entry that the list omits because others change the list is in the next one.
    (0..3).find_map(|_| listed_holder(file))
}

fn listed_holder(file: &File) -> Option<u32> {
    let ours = Path::new("/proc").join(process::id().to_string()).join("fd");
    let ours = ours.join(file.as_raw_fd().to_string());
    let path = fs::read_link(&ours).ok()?;
    let has_it = |pid: &u32| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.map(|fd| fd.path())
            .any(|fd| fd != ours && fs::read_link(fd).is_ok_and(|each| each == path))
    };
    // The kernel continues a partial read by entry number, and skips a lock if an earlier one is
    // released. So the buffer has room for the whole list in one read.
    let mut locks = String::with_capacity(1 << 16);
    File::open("/proc/locks").and_then(|mut list| list.read_to_string(&mut locks)).ok()?;
    let pids = locks.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK");
        words.nth(3)?.parse().ok()
    });
    pids.into_iter().find(has_it)
}

/// Reads a block with direct I/O; returns the number of bytes.
pub(super) fn read_block(file: &File, at: u64, block: u32) -> io::Result<usize> {
    let mut scratch = vec![0u8; 2 * PAGE_BYTES];
    let start = scratch.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
    file.read_at(&mut scratch[start..start + block as usize], at)
}

/// Identity of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Inode {
    /// Device number of its file system.
    pub device: u64,
    /// Inode number.
    pub number: u64,
    /// When it was created, in nanoseconds since 1970; 0 where the file system does not tell.
    pub born_ns: u64,
}

impl Inode {
    fn of(meta: &Metadata) -> Inode {
        let age = meta.created().ok().and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        let born_ns = age.and_then(|age| u64::try_from(age.as_nanos()).ok()).unwrap_or(0);
        Inode { device: meta.dev(), number: meta.ino(), born_ns }
    }

    /// Whether it is certainly that file, also if that was closed meanwhile: the number of a
    /// removed file is assigned again, but not with the same time.
    pub(crate) fn is_still(self, then: Inode) -> bool {
        self == then && self.born_ns != 0
    }
}

/// Identity of a file, and attributes that change with every modification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stamp {
    file: (u64, u64),
    extent: (u64, u64, u64),
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(meta: &Metadata) -> Stamp {
        Stamp {
            file: (meta.dev(), meta.ino()),
            extent: (meta.len(), meta.blocks(), meta.nlink()),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::hold::*;

    #[test]
    fn the_number_of_a_removed_file_does_not_identify_the_next_one() {
        let then = Inode { device: 1, number: 12, born_ns: 7 };
        assert!(then.is_still(then));
        assert!(!Inode { born_ns: 8, ..then }.is_still(then));
        assert!(!Inode { device: 2, ..then }.is_still(then));
        let unknown = Inode { born_ns: 0, ..then };
        assert!(!unknown.is_still(unknown), "its number may have been assigned again");
    }
}
