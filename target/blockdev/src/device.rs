//! `BackingDevice`: an opened backing store, shared by all reactors.
//!
//! # Two kinds that are no disk
//!
//! *RAM* is a memory file of the kernel, which the ring copies to and from: page cache speed,
//! nothing survives the daemon. *Null* is for measuring everything but the disk: writes vanish and
//! reads are zeros. The zeros are written into every read's buffer, which costs some 40 ns for
//! 4 KiB: the buffer may hold another host's data, and no measurement is worth showing them.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nvme::status::Status;

use super::backing::{BackingConfig, BackingKind, Condition, Geometry, Kind, Space};
use super::errno::{OpKind, status_of};
use super::health::{Detached, Health};
use super::hold::{Hold, Stamp};
use super::open_error::OpenError;
use crate::durable;

/// An opened store: what every reactor's ring operates on, through an `Arc`.
#[derive(Debug)]
pub struct BackingDevice {
    pub(super) kind: Kind,
    /// What rings read and write through; none for [`Kind::Null`].
    pub(super) file: Option<Arc<File>>,
    /// Files and devices: what keeps others from serving them.
    pub(super) hold: Option<Arc<Hold>>,
    /// Its file was made when it was opened, like this.
    pub(super) made_as: Option<Stamp>,
    /// One descriptor a ring, for synchronising: see `uring/sync_group.rs`. They are closed with the store
    /// and not by a ring, because that may wait for the disk.
    sync_files: Mutex<SyncFiles>,
    pub(super) name: String,
    /// Changes while it is served: see `resize`. A reactor that learns of it a moment later has
    /// operations that are in range still, or are refused by the system.
    pub(super) size_bytes: AtomicU64,
    /// How long it was when that was last seen and all that is served was there: longer than its
    /// size where a part is served.
    found_bytes: AtomicU64,
    /// Changes while it is served, when a host formats it: see `erase`.
    pub(super) block_size_bytes: AtomicU32,
    /// Direct I/O reaches blocks of this size and no smaller ones.
    pub(super) smallest_block_bytes: u32,
    pub(super) read_only: bool,
    /// The number of its file system or device.
    pub(super) place: u64,
    /// A device: what no other is called, where that is known.
    pub(super) identity: Option<String>,
    /// Another store takes its place: what it still does is done for nobody.
    lost: AtomicBool,
    pub(super) geometry: Geometry,
    /// Modes of fallocate that the store has refused: bits of [`Space`]. Written once or never, so
    /// relaxed does: a reactor that learns a moment later only asks the system once more.
    pub(super) refused: AtomicU8,
    pub(super) health: Arc<Health>,
}

#[derive(Debug, Default)]
struct SyncFiles {
    made: Vec<File>,
    given: usize,
}

impl BackingDevice {
    pub(super) fn found_bytes(&self) -> u64 {
        self.found_bytes.load(Ordering::Relaxed)
    }

    /// It has been seen to be so long. What has lost some of its blocks is not as it should be.
    pub(super) fn is_long(&self, bytes: u64) {
        if bytes >= self.size_bytes() {
            self.found_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    /// Where a path is the kernel's own, and a device is plugged in, any other may get it.
    pub(super) fn is_the_device(&self, fresh: &BackingDevice) -> Result<(), OpenError> {
        match (&self.identity, &fresh.identity) {
            (Some(old), Some(new)) if old != new => Err(OpenError::new(format!(
                "{} is another device now ({new}) than it was ({old}): attach that one again, or \
                 remove the namespace, reload, add it, reload",
                self.name
            ))),
            _ => Ok(()),
        }
    }

    /// The number of the file system or device that it is on: where one store hangs, others of the
    /// same number probably do. Memory has none, 0.
    #[must_use]
    pub fn place(&self) -> u64 {
        self.place
    }

    /// Looks whether the store is as long as it should be and, if `thorough`, whether its ends can
    /// be read. May wait for disks.
    #[must_use]
    pub fn inspect(&self, thorough: bool) -> Condition {
        let Some(hold) = &self.hold else { return Condition::Sound };
        let look = || -> std::io::Result<u64> {
            let (bytes, size_bytes) = (hold.len_bytes(self.kind)?, self.size_bytes());
            self.is_long(bytes);
            if !thorough || bytes < size_bytes {
                return Ok(bytes);
            }
            Ok(hold.probe_ends(size_bytes, self.block_size_bytes())?.unwrap_or(bytes))
        };
        match look() {
            Ok(bytes) if bytes < self.size_bytes() => Condition::Shortened(bytes),
            Ok(_) => Condition::Sound,
            Err(error) => Condition::Failing(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// Whether its path leads to something else by now, or nowhere. May wait for disks.
    #[must_use]
    pub fn has_moved(&self, config: &BackingConfig) -> bool {
        match (&self.hold, &config.kind) {
            (Some(hold), BackingKind::File { path, .. }) => !hold.is_at(path),
            _ => false,
        }
    }

    /// What is at its path instead of it, if anything is amiss. None where nobody knows. May wait
    /// for disks.
    #[must_use]
    pub fn detached(&self, config: &BackingConfig) -> Option<Option<Detached>> {
        match (&self.hold, &config.kind) {
            (Some(hold), BackingKind::File { path, .. }) => hold.detached_from(path).ok(),
            _ => None,
        }
    }

    /// How it can be read as long as the daemon runs, wherever its path leads.
    pub(crate) fn own_path(&self) -> String {
        self.hold.as_ref().map(|hold| hold.own_path()).unwrap_or_default()
    }

    /// Makes durable what has been written, and hears of what was lost before. Waits for the disk.
    ///
    /// # Errors
    /// What the system says.
    pub fn synchronise(&self) -> std::io::Result<()> {
        let name = Path::new(&self.name);
        self.file.as_ref().map_or(Ok(()), |file| durable::sync_data(file, name))
    }

    /// Has descriptors ready for so many rings, so that no ring must open its own.
    ///
    /// # Errors
    /// The limit of open files, or the store does not let itself be opened.
    pub fn prepare(&self, rings: usize) -> Result<(), OpenError> {
        let Some(hold) = &self.hold else { return Ok(()) };
        let files = (0..rings).map(|_| hold.another(&self.name, self.read_only));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        self.sync_files.lock().unwrap_or_else(PoisonError::into_inner).made.extend(files);
        Ok(())
    }

    pub(super) fn assemble(
        kind: Kind,
        file: Option<Arc<File>>,
        name: String,
        size_bytes: u64,
        config: &BackingConfig,
    ) -> BackingDevice {
        BackingDevice {
            kind,
            file,
            hold: None,
            made_as: None,
            sync_files: Mutex::default(),
            name,
            size_bytes: AtomicU64::new(size_bytes),
            found_bytes: AtomicU64::new(size_bytes),
            block_size_bytes: AtomicU32::new(config.block_size_bytes),
            smallest_block_bytes: 512,
            read_only: config.read_only,
            place: 0,
            identity: None,
            lost: AtomicBool::new(false),
            geometry: Geometry::default(),
            refused: AtomicU8::new(0),
            health: Arc::default(),
        }
    }

    /// Finds out, without touching data, whether space can be given up: punches a hole behind the
    /// end of the file, which is `end_bytes` long: perhaps longer than what is served of it. Devices
    /// answer by their queue limits instead.
    pub(super) fn probe_punch(&self, end_bytes: u64) {
        let (Some(file), Kind::File, false) = (&self.file, self.kind, self.read_only) else {
            return;
        };
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let Ok(at) = libc::off_t::try_from(end_bytes) else { return };
        let len = libc::off_t::from(self.block_size_bytes());
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
        self.size_bytes() / u64::from(self.block_size_bytes())
    }

    /// Size in bytes: a whole number of blocks.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of a logical block.
    #[must_use]
    pub fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes.load(Ordering::Relaxed)
    }

    /// Whether everything that changes data is refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether completed writes may be lost with the power until a Flush: what Identify shall say
    /// in VWC. False for RAM and null, where a Flush changes nothing.
    ///
    /// A file's own metadata (which blocks are written) is cached by the system, whatever the
    /// device below has. A device may get a cache while it is served (another table of the device
    /// mapper, another leg of a RAID, a setting), so what its queue says at one moment says nothing
    /// of the next flush. The kernel leaves out what a device does not need, and knows better.
    #[must_use]
    pub fn has_volatile_cache(&self) -> bool {
        matches!(self.kind, Kind::File | Kind::Device)
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

    /// Another store takes its place; or does not, after all.
    pub(crate) fn set_lost(&self, lost: bool) {
        self.lost.store(lost, Ordering::Relaxed);
    }

    /// Whether another store takes its place.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// How it fares.
    #[must_use]
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// The status that every Flush and every write with FUA gets since one of them failed:
    /// [`Health::sync_failure`].
    #[must_use]
    pub fn sync_failure(&self) -> Option<Status> {
        self.health.sync_failure()
    }

    /// Remembers a failed synchronisation; the first one stays.
    pub fn fail_sync(&self, status: Status) {
        if self.health.fail_sync(status) {
            tracing::error!(
                "{}: flush failed ({status}); data written since the last successful flush may be \
                 lost, so every flush fails from now on, also after a restart: check \
                 the device and the data, then `nvmfctl namespace trust`",
                self.name
            );
        }
    }

    /// Whether an operation of `len` bytes at `at` lies inside.
    pub fn contains(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.size_bytes())
    }

    /// Whether the store has not refused this mode so far.
    pub fn allows(&self, space: Space) -> bool {
        self.refused.load(Ordering::Relaxed) & space as u8 == 0
    }

    /// Remembers that the store cannot do this.
    pub fn refuse(&self, space: Space) {
        self.refused.fetch_or(space as u8, Ordering::Relaxed);
        if space == Space::Punch {
            self.health.note_kept_space();
        }
    }

    /// The descriptor, for the ring; the backing outlives every operation on it.
    pub fn fd(&self) -> Option<RawFd> {
        self.file.as_ref().map(|file| file.as_raw_fd())
    }

    /// A descriptor for the synchronisations of one more ring.
    pub(crate) fn sync_fd(&self) -> Option<RawFd> {
        let mut files = self.sync_files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.given == files.made.len()
            && let Some(Ok(file)) =
                self.hold.as_ref().map(|h| h.another(&self.name, self.read_only))
        {
            files.made.push(file);
        }
        let given = files.given;
        let Some(file) = files.made.get(given) else { return self.fd() };
        let fd = file.as_raw_fd();
        files.given += 1;
        Some(fd)
    }

    /// Turns what the system said into a status, counts it, and says so in the log: at the first
    /// failure and at each doubling, so that a dying disk cannot flood it.
    pub fn fail(&self, doing: OpKind, errno: i32, at: u64) -> Status {
        let count = self.health.count_failure(errno);
        if count.is_power_of_two() {
            let said = Errno::from_raw(errno).desc();
            let what = doing.word();
            tracing::warn!("{}: {what} at byte {at}: {said}; failures: {count}", self.name);
        }
        match (Errno::from_raw(errno), self.kind) {
            // A pool that may be given more space, or a device that is gone: the kernel's answer to
            // a write beyond its end, which is at 0 then. A second later the host learns which.
            (Errno::ENOSPC, Kind::Device) => Status::CAPACITY_EXCEEDED.with_crd(1),
            _ => status_of(doing, errno),
        }
    }

    /// The store ends inside the namespace: somebody has shortened it, or the device is gone. From
    /// now on nothing reaches it, so that no write makes it long again, with zeros in between.
    pub(crate) fn fail_shortened(&self, at: u64) -> Status {
        self.health.count_failure(0);
        self.note_shortened();
        self.set_down(&format!(
            "ends at or before byte {at}, inside the namespace of {} bytes: it was shortened while \
             being served, or its device is gone; {}",
            self.size_bytes(),
            self.remedy_of_shortened()
        ));
        Health::NOT_READY
    }

    /// Of a file: whatever makes it long again, what was there is gone.
    pub(crate) fn note_shortened(&self) {
        if self.kind == Kind::File {
            self.health.note_shortened();
        }
    }

    /// What there is to be done about it.
    pub(crate) fn remedy_of_shortened(&self) -> &'static str {
        match self.kind {
            Kind::File => "restore it, then `nvmfctl namespace trust`",
            _ => "restore it",
        }
    }

    /// Takes the store out of service until it is back.
    pub fn set_down(&self, why: &str) {
        if self.health.set_down() {
            tracing::error!("{}: {why}; hosts get Namespace Not Ready", self.name);
        }
    }
}
