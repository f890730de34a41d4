//! What keeps others from a backing store while it is served: a lock, a claim, an owner file.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::sync::Arc;

use super::backing::{BackingConfig, Kind};
use super::health::Detached;
use super::open_error::{OpenError, failed};
use super::owner_file::Owner;

/// As large as any logical block, and what buffers are aligned to.
const PAGE_BYTES: usize = 4096;

/// What keeps others from serving a store: a lock on it and, on a device, a claim.
///
/// A kernel may keep a file that was registered with a ring for a second or so after everyone has
/// closed it (6.1 does). So the lock is given up here and not left to the last close, and the claim
/// is a descriptor of its own: a store can be reopened at once.
#[derive(Debug)]
pub(super) struct Hold {
    locked: Arc<File>,
    /// Which file it is: device and inode.
    pub(super) id: (u64, u64),
    _claim: Option<File>,
    /// Keeps other machines out, where the lock does not.
    owner: Option<Owner>,
}

impl Hold {
    /// Of a locked file.
    pub(super) fn new(
        locked: Arc<File>,
        meta: &Metadata,
        claim: Option<File>,
        owner: Option<Owner>,
    ) -> Hold {
        Hold { locked, id: (meta.dev(), meta.ino()), _claim: claim, owner }
    }

    /// One more open file of the same store, with a memory of failures of its own.
    pub(super) fn another(&self, name: &str, read_only: bool) -> Result<File, OpenError> {
        OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", self.locked.as_raw_fd()))
            .map_err(|error| failed(&format!("cannot open {name} once more"), &error))
    }

    /// How long it is.
    pub(super) fn len_bytes(&self, kind: Kind) -> io::Result<u64> {
        match kind {
            Kind::Device => (&*self.locked).seek(SeekFrom::End(0)),
            _ => Ok(self.locked.metadata()?.len()),
        }
    }

    /// Reads the first and the last block of so many bytes. The offset of the one that is not there.
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

    /// What is at a path instead of this, if it does not lead here. A device may have another node
    /// there, as long as that stands for it.
    ///
    /// # Errors
    /// Nobody knows.
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

    /// How it can be read as long as the daemon runs, wherever its path leads.
    pub(super) fn own_path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.locked.as_raw_fd())
    }

    /// Whether a path leads here. A device that came back has the number of the one that went, so
    /// for devices this says little.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|there| is_same(&there, &self.locked))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Whoever gets the lock next looks for the file.
        drop(self.owner.take());
        let _ = self.locked.unlock();
    }
}

pub(super) fn is_same(there: &Metadata, file: &File) -> bool {
    let identity = |meta: &Metadata| (meta.dev(), meta.ino(), meta.rdev());
    file.metadata().is_ok_and(|here| identity(there) == identity(&here))
}

/// Claims a block device, so that it is neither mounted nor part of something else meanwhile.
pub(super) fn claim_device(path: &Path, meta: &Metadata) -> io::Result<Option<File>> {
    if !meta.file_type().is_block_device() {
        return Ok(None);
    }
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path).map(Some)
}

/// One daemon a store: a lock that ends with the descriptor. Readers share it, and those that are
/// told that others serve it as well.
pub(super) fn lock(file: &File, name: &str, config: &BackingConfig) -> Result<(), OpenError> {
    let locked = if shares(config) { file.try_lock_shared() } else { file.try_lock() };
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

/// Whether others may have it as well that say the same.
pub(super) fn shares(config: &BackingConfig) -> bool {
    config.read_only || config.shared
}

/// The process that holds the lock on this file: one that `/proc/locks` lists and that has the file
/// open. (The inode numbers listed there are not those that btrfs and overlays show.)
/// `1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`.
fn lock_holder(file: &File) -> Option<u32> {
    // What the list leaves out while others change it, it has the next time.
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
    // Where a read ends, the kernel goes on by number, and passes over a lock when one before it is
    // given up. So there is room for all of them from the first read on.
    let mut locks = String::with_capacity(1 << 16);
    File::open("/proc/locks").and_then(|mut list| list.read_to_string(&mut locks)).ok()?;
    let pids = locks.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| *word != "FLOCK");
        words.nth(3)?.parse().ok()
    });
    pids.into_iter().find(has_it)
}

/// Reads a block past the page cache; how many bytes there were.
pub(super) fn read_block(file: &File, at: u64, block: u32) -> io::Result<usize> {
    let mut scratch = vec![0u8; 2 * PAGE_BYTES];
    let start = scratch.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
    file.read_at(&mut scratch[start..start + block as usize], at)
}

/// Which file it is, and what of it changes with whatever is done to it.
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
