//! Backing stores: their configuration, and the properties found when one is opened.

use std::path::{Path, PathBuf};

use super::ceph::{ClusterConfig, CreatedImage, ImageName};

/// Configuration of a backing store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingConfig {
    /// Kind and path or size.
    pub kind: BackingKind,
    /// Logical block size in bytes: 512 or 4096.
    pub block_size_bytes: u32,
    /// Opened for reading only; commands that change data are refused.
    pub read_only: bool,
    /// Other daemons that are configured likewise may serve the same store.
    pub shared: bool,
}

/// Whether a path is the name of a device: below `/dev`, but not in its file system for shared
/// memory (`shm_overview(7)`). A device may appear late, and no file is created in its place.
pub fn names_device(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// Kind of backing store, with its path or size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BackingKind {
    /// A regular file or a block device.
    File {
        /// Path. Symbolic links are followed.
        path: PathBuf,
        /// Size in bytes. A missing file is created with this size, sparse; an existing file or
        /// device must have it.
        size: Option<u64>,
    },
    /// A memory file (`memfd_create`). Its contents are lost when the daemon exits.
    Ram {
        /// Its size in bytes.
        size: u64,
    },
    /// No device: writes are discarded, reads return zeros. For measurements.
    Null {
        /// Its size in bytes.
        size: u64,
    },
    /// An image of Ceph RBD. It exists already.
    Rbd {
        /// Its name.
        image: ImageName,
        /// How its cluster is reached.
        cluster: ClusterConfig,
        /// For one that a host has made.
        made: Option<Box<CreatedImage>>,
    },
}

impl BackingKind {
    /// Whether both are the same store, whatever their sizes.
    pub fn is_store_of(&self, other: &BackingKind) -> bool {
        match (self, other) {
            (BackingKind::File { path: a, .. }, BackingKind::File { path: b, .. }) => a == b,
            (BackingKind::Ram { .. }, BackingKind::Ram { .. })
            | (BackingKind::Null { .. }, BackingKind::Null { .. }) => true,
            (BackingKind::Rbd { .. }, BackingKind::Rbd { .. }) => self == other,
            _ => false,
        }
    }

    /// The path of a file, or the name of an image: what opening and probing may wait for.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            BackingKind::File { path, .. } => Some(path.clone()),
            BackingKind::Rbd { image, .. } => Some(image.path()),
            BackingKind::Ram { .. } | BackingKind::Null { .. } => None,
        }
    }
}

/// Kind of an opened [`crate::BackingDevice`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A block device.
    Device,
    /// A memory file.
    Ram,
    /// No device.
    Null,
    /// An image of Ceph RBD.
    Rbd,
}

impl Kind {
    /// Whether the kernel executes its operations outside of this process: they may block and need
    /// the kernel's workers, and written data are durable only after a sync. (What librbd has
    /// written without a cache is durable.)
    pub(crate) fn is_external(self) -> bool {
        match self {
            Kind::File | Kind::Device => true,
            Kind::Ram | Kind::Null | Kind::Rbd => false,
        }
    }
}

/// I/O hints of a backing store, for Identify. Zero: not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Geometry {
    /// Physical block size: smaller writes cause read-modify-write.
    pub physical_block_bytes: u32,
    /// Optimal transfer size.
    pub optimal_io_bytes: u32,
    /// Discard granularity.
    pub discard_granularity_bytes: u32,
    /// Boundary (RAID stripe): transfers that cross a multiple of it are slower.
    pub boundary_bytes: u32,
    /// Power-fail write unit: see [`crate::Below`].
    pub power_fail_atomic_bytes: u32,
}

/// Result of an examination of a backing store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// It has its full size; where reading was tried, it succeeded.
    Sound,
    /// It ends at this offset, inside the namespace. A removed device ends at 0.
    Shortened(u64),
    /// It was truncated since it was opened, and has its full size again.
    Refilled,
    /// An access failed with this errno.
    Failing(i32),
}
