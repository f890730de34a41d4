//! `Allocation`: what a backing file occupies in its file system.
//!
//! Read where a file is opened and once a second by the monitor, which may block on a device. A
//! reactor reads the values found then.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Stands for a value that is not known.
const UNKNOWN: u64 = u64::MAX;
/// Unit of `st_blocks`, whatever the file system.
const STAT_BLOCK_BYTES: u64 = 512;

/// What a backing file occupies in its file system. Nothing is known of other backing stores.
#[derive(Debug)]
pub struct Allocation {
    allocated_bytes: AtomicU64,
}

impl Default for Allocation {
    fn default() -> Allocation {
        Allocation { allocated_bytes: AtomicU64::new(UNKNOWN) }
    }
}

impl Allocation {
    /// Bytes allocated to the file, blocks that are preallocated or shared with a reflink included;
    /// some file systems add their own metadata, so this may exceed the size. None: not known.
    #[must_use]
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
}
