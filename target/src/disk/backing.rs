//! `Backing`: an opened store, shared by all reactors.
//!
//! Opening is where a store can still be refused with a sentence that a person can act upon, so
//! everything that can be found out beforehand is found out here: direct I/O, the alignment it
//! wants (by trying it), the size, and that no other daemon serves the same bytes.
//!
//! # Two kinds that are no disk
//!
//! *RAM* is a memory file of the kernel, which the ring copies to and from: page cache speed,
//! nothing survives the daemon. *Null* is for measuring everything but the disk: writes vanish and
//! reads are zeros. The zeros are written into every read's buffer, which costs some 40 ns for
//! 4 KiB: the buffer may hold another host's data, and no measurement is worth showing them.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nvme::status::Status;

use super::errno::{Doing, status_of};
use super::open;

/// What to open, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingConfig {
    /// Which store.
    pub kind: BackingKind,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size_bytes: u32,
    /// Refuse everything that changes data; the store is opened for reading only.
    pub read_only: bool,
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

/// What a [`Backing`] turned out to be.
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

/// Why a store cannot be served, as one sentence for a person: what was tried, what the system
/// said, what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct OpenError(pub String);

/// Sizes that a store works best with. Hints for Identify; zero means "not known".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Geometry {
    /// Smaller writes make the store read, change and write back.
    pub physical_block_bytes: u32,
    /// The preferred transfer.
    pub optimal_io_bytes: u32,
    /// The unit in which space can be given up.
    pub discard_granularity_bytes: u32,
}

/// An opened store: what every reactor's ring operates on, through an `Arc`.
#[derive(Debug)]
pub struct Backing {
    pub(super) kind: Kind,
    /// None for [`Kind::Null`]. Holds the lock on the store.
    pub(super) file: Option<File>,
    /// Devices: a second descriptor, with O_EXCL, that no ring ever sees (see `Drop`).
    pub(super) claim: Option<File>,
    pub(super) name: String,
    pub(super) size_bytes: u64,
    pub(super) block_size_bytes: u32,
    pub(super) read_only: bool,
    pub(super) volatile_cache: bool,
    pub(super) geometry: Geometry,
    state: State,
}

/// What is learned while serving. Written once or never, so relaxed atomics do: a reactor that
/// learns a moment later only asks the system once more.
#[derive(Debug, Default)]
struct State {
    /// Modes of fallocate that the store has refused: bits of [`Space`].
    refused: AtomicU8,
    /// `1 << 16 | status field` once a synchronisation has failed.
    sync_failed: AtomicU32,
    truncated: AtomicBool,
    failures: AtomicU64,
}

/// The two ways to act on space without moving data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// `FALLOC_FL_PUNCH_HOLE`: give the space up; the range reads as zeros.
    Punch = 1,
    /// `FALLOC_FL_ZERO_RANGE`: keep the space; the range reads as zeros.
    ZeroRange = 2,
}

impl Backing {
    /// Opens a store, creating a missing file when its size is given.
    ///
    /// # Errors
    /// One sentence: what was tried, what the system said, what to do.
    pub fn open(config: &BackingConfig) -> Result<Backing, OpenError> {
        match &config.kind {
            BackingKind::File { path, size } => open::open_path(path, *size, config),
            BackingKind::Ram { size } => {
                let name = format!("ram ({size} bytes)");
                open::check_shape(&name, *size, config.block_size_bytes)?;
                let file = memory_file(*size).map_err(|errno| {
                    OpenError(format!(
                        "cannot create a memory file of {size} bytes: {}; choose a smaller size \
                         or free memory",
                        errno.desc()
                    ))
                })?;
                Ok(Backing::assemble(Kind::Ram, Some(file), name, *size, config))
            }
            BackingKind::Null { size } => {
                let name = format!("null ({size} bytes)");
                open::check_shape(&name, *size, config.block_size_bytes)?;
                Ok(Backing::assemble(Kind::Null, None, name, *size, config))
            }
        }
    }

    /// A store with nothing behind it that is served as a file is: for a driver that plays the
    /// kernel itself.
    ///
    /// # Errors
    /// Size and block size make no sense together.
    pub fn simulated(size_bytes: u64, block_size_bytes: u32) -> Result<Backing, OpenError> {
        let name = format!("simulated ({size_bytes} bytes)");
        open::check_shape(&name, size_bytes, block_size_bytes)?;
        let kind = BackingKind::Null { size: size_bytes };
        let config = BackingConfig { kind, block_size_bytes, read_only: false };
        Ok(Backing::assemble(Kind::File, None, name, size_bytes, &config))
    }

    pub(super) fn assemble(
        kind: Kind,
        file: Option<File>,
        name: String,
        size_bytes: u64,
        config: &BackingConfig,
    ) -> Backing {
        Backing {
            kind,
            file,
            claim: None,
            name,
            size_bytes,
            block_size_bytes: config.block_size_bytes,
            read_only: config.read_only,
            // A file's data are durable only after fdatasync, whatever the disk below has: the
            // file's own metadata (which blocks are written) is cached by the system.
            volatile_cache: kind == Kind::File,
            geometry: Geometry::default(),
            state: State::default(),
        }
    }

    /// Finds out, without touching data, whether space can be given up: punches a hole behind the
    /// end of the file. Devices answer by their queue limits instead.
    pub(super) fn probe_punch(&self) {
        let (Some(file), Kind::File, false) = (&self.file, self.kind, self.read_only) else {
            return;
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let at = libc::off_t::try_from(self.size_bytes).unwrap_or(libc::off_t::MAX);
        let len = libc::off_t::from(self.block_size_bytes);
        if fallocate(file.as_fd(), flags, at, len) == Err(Errno::EOPNOTSUPP) {
            self.refuse(Space::Punch);
        }
    }

    /// What it is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The path, or what stands for it: for logs and for people.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in logical blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.size_bytes / u64::from(self.block_size_bytes)
    }

    /// Size in bytes: a whole number of blocks.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of a logical block.
    #[must_use]
    pub fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes
    }

    /// Whether everything that changes data is refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether completed writes may be lost with the power until a Flush: what Identify shall say
    /// in VWC. False for RAM and null, where a Flush changes nothing.
    #[must_use]
    pub fn has_volatile_cache(&self) -> bool {
        self.volatile_cache
    }

    /// Whether a Discard gives space up. When it does, the range reads as zeros afterwards; when
    /// it does not, the data stay as they were.
    #[must_use]
    pub fn can_discard(&self) -> bool {
        !self.read_only && self.kind != Kind::Null && self.allows(Space::Punch)
    }

    /// Sizes that it works best with.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Operations that the system has failed since the store was opened.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.state.failures.load(Ordering::Relaxed)
    }

    /// The status that every Flush and every write with FUA gets since one of them failed.
    ///
    /// The kernel reports a failed writeback once and forgets it, so a later success would vouch
    /// for data that are gone. Only reopening the store (which means: reading it back, or
    /// restoring it) clears this.
    #[must_use]
    pub fn sync_failure(&self) -> Option<Status> {
        let value = self.state.sync_failed.load(Ordering::Relaxed);
        (value != 0).then(|| Status::from_field(value as u16))
    }

    /// Remembers a failed synchronisation; the first one stays.
    pub(crate) fn fail_sync(&self, status: Status) {
        let value = 1 << 16 | u32::from(status.field());
        let first =
            self.state.sync_failed.compare_exchange(0, value, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_ok() {
            tracing::error!(
                "{}: making data durable failed ({status}); what was written since the last \
                 successful flush may be lost, so every flush fails from now on: check the disk, \
                 then reopen the namespace",
                self.name
            );
        }
    }

    /// Whether an operation of `len` bytes at `at` lies inside.
    pub(crate) fn contains(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.size_bytes)
    }

    /// Whether the store has not refused this mode so far.
    pub(crate) fn allows(&self, space: Space) -> bool {
        self.state.refused.load(Ordering::Relaxed) & space as u8 == 0
    }

    /// Remembers that the store cannot do this.
    pub(crate) fn refuse(&self, space: Space) {
        self.state.refused.fetch_or(space as u8, Ordering::Relaxed);
    }

    /// The descriptor, for the ring; the backing outlives every operation on it.
    pub(crate) fn fd(&self) -> Option<RawFd> {
        self.file.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Turns what the system said into a status, counts it, and says so in the log: at the first
    /// failure and at each doubling, so that a dying disk cannot flood it.
    pub(crate) fn fail(&self, doing: Doing, errno: i32, at: u64) -> Status {
        let status = status_of(doing, errno);
        self.count_failure(|count| {
            let said = Errno::from_raw(errno).desc();
            let what = doing.word();
            tracing::warn!("{}: {what} at byte {at}: {said}; failures: {count}", self.name);
        });
        status
    }

    /// The file ends inside the namespace: somebody has shortened it.
    pub(crate) fn fail_truncated(&self, at: u64) -> Status {
        self.count_failure(|_| ());
        if !self.state.truncated.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "{}: ends at or before byte {at}, inside the namespace of {} bytes: it was \
                 shortened while being served; restore it to its size",
                self.name,
                self.size_bytes
            );
        }
        Status::INTERNAL_ERROR.with_dnr()
    }

    fn count_failure(&self, log: impl FnOnce(u64)) {
        let count = self.state.failures.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        if count.is_power_of_two() {
            log(count);
        }
    }
}

/// A kernel may keep a file that was registered with a ring for a second or so after everyone has
/// closed it (6.1 does). So the lock is given up here and not left to the last close, and the claim
/// on a device is a descriptor of its own: a store can be reopened at once.
impl Drop for Backing {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = file.unlock();
        }
    }
}

fn memory_file(size: u64) -> Result<File, Errno> {
    let file = File::from(memfd_create("nvmfd-ram", MFdFlags::MFD_CLOEXEC)?);
    file.set_len(size).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))?;
    Ok(file)
}
