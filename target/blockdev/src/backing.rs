//! Backing stores: what is configured, and what was found when one was opened.

use std::path::PathBuf;

/// What to open, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingConfig {
    /// Which store.
    pub kind: BackingKind,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size_bytes: u32,
    /// Refuse everything that changes data; the store is opened for reading only.
    pub read_only: bool,
    /// Other daemons may serve it as well, if they say so too.
    pub shared: bool,
}

/// Which store, and where it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackingKind {
    /// A regular file or a block device.
    File {
        /// Where it is. Symbolic links are followed.
        path: PathBuf,
        /// Its size in bytes: a missing file is created, sparse, with it; an existing file or
        /// device must have it.
        size: Option<u64>,
    },
    /// Memory of the kernel; lost when the daemon ends.
    Ram {
        /// Its size in bytes.
        size: u64,
    },
    /// Nothing: for measuring.
    Null {
        /// Its size in bytes.
        size: u64,
    },
}

/// What a [`crate::BackingDevice`] turned out to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A block device.
    Device,
    /// Memory of the kernel.
    Ram,
    /// Nothing.
    Null,
}

/// Sizes that a store works best with. Hints for Identify; zero means "not known".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Geometry {
    /// Smaller writes make the store read, change and write back.
    pub physical_block_bytes: u32,
    /// The preferred transfer.
    pub optimal_io_bytes: u32,
    /// The unit in which space can be given up.
    pub discard_granularity_bytes: u32,
    /// Transfers that cross a multiple of this are slower: stripes of a RAID.
    pub boundary_bytes: u32,
    /// What is written whole or not at all when the power fails: see [`crate::Below`].
    pub power_fail_atomic_bytes: u32,
}

/// What a closer look at a store has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// It is as long as it should be, and could be read where that was tried.
    Sound,
    /// It ends here, inside the namespace. A device that is gone ends at 0.
    Shortened(u64),
    /// The system fails it with this errno.
    Failing(i32),
}

/// The two ways to act on space without moving data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// `FALLOC_FL_PUNCH_HOLE`: give the space up; the range reads as zeros.
    Punch = 1,
    /// `FALLOC_FL_ZERO_RANGE`: keep the space; the range reads as zeros.
    ZeroRange = 2,
}
