//! `Allocation`: what a backing file occupies in its file system, and what that has left.
//!
//! Read where a file is opened and once a second by the monitor, which may block on a device. A
//! reactor reads the values found then.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock;

/// Stands for a value that is not known.
const UNKNOWN: u64 = u64::MAX;
/// Unit of `st_blocks`, whatever the file system.
const STAT_BLOCK_BYTES: u64 = 512;
/// A file system with less than this part of its size free is almost full.
const LOW_PART: u64 = 20;
/// A state ends when the condition is exceeded by this part of the size.
const HYSTERESIS_PART: u64 = 100;

/// What a backing file occupies in its file system. Nothing is known of other backing stores.
#[derive(Debug)]
pub struct Allocation {
    allocated_bytes: AtomicU64,
    /// Written by the monitor, and read by the management interface only.
    file_system: Mutex<Option<FileSystemSpace>>,
}

impl Default for Allocation {
    fn default() -> Allocation {
        Allocation { allocated_bytes: AtomicU64::new(UNKNOWN), file_system: Mutex::default() }
    }
}

impl Allocation {
    /// Bytes allocated to the file, blocks that are preallocated or shared with a reflink included;
    /// some file systems add their own metadata, so this may exceed the size. None: not known.
    pub fn allocated_bytes(&self) -> Option<u64> {
        Some(self.allocated_bytes.load(Ordering::Relaxed)).filter(|bytes| *bytes != UNKNOWN)
    }

    /// Records what is allocated to a regular file; of others the kernel does not know it.
    pub(crate) fn record(&self, meta: &Metadata) {
        if meta.is_file() {
            self.set_allocated_bytes(meta.blocks().saturating_mul(STAT_BLOCK_BYTES));
        }
    }

    /// Sets the number of allocated bytes.
    pub fn set_allocated_bytes(&self, bytes: u64) {
        self.allocated_bytes.store(bytes.min(UNKNOWN - 1), Ordering::Relaxed);
    }

    /// The file system of the file. None: no file, or not examined yet.
    pub fn file_system(&self) -> Option<FileSystemSpace> {
        *lock(&self.file_system)
    }

    /// Sets what its file system has left.
    pub fn set_file_system(&self, space: FileSystemSpace) {
        *lock(&self.file_system) = Some(space);
    }
}

/// A file system with backing files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileSystemSpace {
    /// Its device number (`st_dev`).
    pub device: u64,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes that are free for the daemon: without those reserved for root, unless it is root.
    pub free_bytes: u64,
    /// Bytes that its backing files may still allocate, up to their sizes.
    pub unallocated_bytes: u64,
    /// Whether they suffice.
    pub state: SpaceState,
}

/// Whether the free space of a file system suffices for its backing files.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum SpaceState {
    /// Every write finds space.
    #[default]
    Sufficient,
    /// The files may allocate more than is free.
    Overcommitted,
    /// It is almost full, and a file may allocate more: less than 5 % is free.
    Low,
}

impl SpaceState {
    /// What that means for the file system of `name`, and what to do; none if the space suffices.
    pub fn warning(self, name: &str) -> Option<String> {
        match self {
            SpaceState::Sufficient => None,
            SpaceState::Overcommitted => Some(format!(
                "the file system of {name} has less free space than its backing files may still \
                 allocate: when it is full, writes fail with Capacity Exceeded"
            )),
            SpaceState::Low => Some(format!(
                "the file system of {name} is almost full: writes are about to fail with Capacity \
                 Exceeded; extend it, or have hosts deallocate (fstrim)"
            )),
        }
    }

    /// The state that follows this one. A state is left only when its condition is exceeded by 1 %
    /// of the size, so that it does not alternate.
    #[must_use]
    pub fn next(self, size_bytes: u64, free_bytes: u64, unallocated_bytes: u64) -> SpaceState {
        let more = |state| if self >= state { size_bytes / HYSTERESIS_PART } else { 0 };
        let low_bytes = size_bytes / LOW_PART + more(SpaceState::Low);
        let needed_bytes = unallocated_bytes.saturating_add(more(SpaceState::Overcommitted));
        if unallocated_bytes == 0 {
            SpaceState::Sufficient
        } else if free_bytes < low_bytes {
            SpaceState::Low
        } else if free_bytes < needed_bytes {
            SpaceState::Overcommitted
        } else {
            SpaceState::Sufficient
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::allocation::SpaceState::{self, Low, Overcommitted, Sufficient};

    #[test]
    fn space_states_have_a_hysteresis_of_one_percent() {
        // Free and unallocated bytes of a file system of 1000, and the state after these.
        let steps: [(u64, u64, SpaceState); 13] = [
            (500, 500, Sufficient),
            (500, 501, Overcommitted),
            (505, 501, Overcommitted),
            (511, 501, Sufficient),
            (50, 900, Overcommitted),
            (49, 900, Low),
            (59, 900, Low),
            (60, 900, Overcommitted),
            (49, 10, Low),
            (0, 1, Low),
            (0, 0, Sufficient),
            (0, u64::MAX, Low),
            (1000, u64::MAX, Overcommitted),
        ];
        let mut state = SpaceState::default();
        for (at, (free_bytes, unallocated_bytes, expected)) in steps.into_iter().enumerate() {
            state = state.next(1000, free_bytes, unallocated_bytes);
            assert_eq!(state, expected, "step {at}");
        }
        assert_eq!(SpaceState::default().next(0, 0, 1), Overcommitted, "a size that is not known");
    }
}
