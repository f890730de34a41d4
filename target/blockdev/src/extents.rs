//! Which blocks of a backing store are allocated, as far as its file system tells.
//!
//! A block that is not allocated reads as zeros. What was written before a search begins is found by
//! it: on these file systems a hole is neither in the page cache nor under a direct write that has
//! completed. Of others that is not known (OpenZFS once reported holes where data were not on its
//! disks yet; btrfs records a direct write after it has completed), so all blocks count as allocated.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Weak;
use std::time::{Duration, Instant};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::backing::Kind;
use super::device::BackingDevice;
use super::file_system::{TMPFS, file_system};
use crate::lock;

/// `f_type` of statfs(2): ext2, ext3 and ext4; XFS; tmpfs.
const FILE_SYSTEMS: [u32; 3] = [0xEF53, 0x5846_5342, TMPFS];

/// Allocated bytes of a file in memory, at most: a search visits each of its pages, while the reactors
/// that write to it wait for the lock of the inode.
const IN_MEMORY_BYTES_MAX: u64 = 64 << 20;

/// How long a store is not searched after a slow search, by the time that this took.
const PAUSE_FACTOR: u32 = 100;

/// Where to search, and how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentSearch {
    /// Byte offset, a multiple of the logical block.
    pub at: u64,
    /// Its end, likewise.
    pub end: u64,
    /// Bytes of a logical block.
    pub block_size_bytes: u64,
    /// Maximum of extents to return.
    pub most: usize,
}

/// Extents of allocated blocks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AllocatedExtents {
    /// Byte offsets and ends, ascending and not adjacent: whole logical blocks.
    pub extents: Vec<(u64, u64)>,
    /// There are more behind the last one.
    pub has_more: bool,
}

impl AllocatedExtents {
    /// Appends an extent that begins at or behind the last one. False if it is one too many.
    fn push(&mut self, (at, end): (u64, u64), most: usize) -> bool {
        let count = self.extents.len();
        match self.extents.last_mut() {
            Some(last) if last.1 >= at => last.1 = end,
            _ if count == most => self.has_more = true,
            _ => self.extents.push((at, end)),
        }
        !self.has_more
    }
}

impl ExtentSearch {
    /// The result where nothing is known: all blocks are allocated.
    pub fn all(&self) -> AllocatedExtents {
        self.rest(AllocatedExtents::default(), self.at)
    }

    fn rest(&self, mut found: AllocatedExtents, at: u64) -> AllocatedExtents {
        found.push((at, self.end), self.most);
        found
    }

    /// Searches a store, unless it was closed. What was not reached by the end of the time counts as
    /// allocated. May block on the device. Meanwhile the store may be closed, and opened again.
    ///
    /// The time is looked at between two calls of lseek(2), and one of them may pass millions of
    /// extents, while others wait for the lock of the inode. A store whose search has taken longer is
    /// not searched for `PAUSE_FACTOR` times as long.
    pub fn run(&self, store: &Weak<BackingDevice>, time: Duration) -> Option<AllocatedExtents> {
        let (began, opened) = (Instant::now(), store.upgrade()?);
        let pauses = lock(&opened.unsearched_until).is_some_and(|until| began < until);
        let file = opened.file.clone().filter(|_| opened.may_have_holes() && !pauses);
        drop(opened);
        let Some(file) = file.filter(|file| is_searchable(file)) else { return Some(self.all()) };
        let found = self.in_file(&file, began + time);
        let took = began.elapsed();
        if took > time
            && let Some(opened) = store.upgrade()
        {
            *lock(&opened.unsearched_until) = began.checked_add(took.saturating_mul(PAUSE_FACTOR));
        }
        // Behind the end of a file that was shortened there are no holes: nothing can be read there.
        let is_whole = file.metadata().is_ok_and(|meta| meta.len() >= self.end);
        Some(if is_whole { found } else { self.all() })
    }

    fn in_file(&self, file: &File, deadline: Instant) -> AllocatedExtents {
        let mut found = AllocatedExtents::default();
        let mut at = self.at;
        while at < self.end {
            let data = match seek(file, SeekFrom::Data(at)) {
                Ok(data) if data < self.end => data.max(at),
                Ok(_) | Err(Errno::NXIO) => return found,
                Err(_) => return self.rest(found, at),
            };
            let first = data - data % self.block_size_bytes;
            let hole = seek(file, SeekFrom::Hole(data)).ok().filter(|hole| *hole > data);
            let hole = hole.filter(|_| Instant::now() < deadline).unwrap_or(self.end);
            let end = hole.min(self.end).next_multiple_of(self.block_size_bytes);
            if !found.push((first, end), self.most) {
                return found;
            }
            at = end;
        }
        found
    }
}

/// Whether the file system tells, and has holes to tell of: lseek(2) goes to the end of a run of
/// blocks, however long that is.
fn is_searchable(file: &File) -> bool {
    let (Some(system), Ok(meta)) = (file_system(file), file.metadata()) else { return false };
    let most = if system == TMPFS { meta.len().min(IN_MEMORY_BYTES_MAX) } else { meta.len() };
    FILE_SYSTEMS.contains(&system) && meta.blocks().saturating_mul(512) < most
}

impl BackingDevice {
    /// Whether it may have blocks that are not allocated.
    pub fn may_have_holes(&self) -> bool {
        matches!(self.kind(), Kind::File | Kind::Ram)
    }
}

#[cfg(test)]
mod tests;
