//! `BackingDevice`: an opened backing store, shared by all reactors.
//!
//! # Kinds without a device
//!
//! *RAM* is a memory file, which the ring copies to and from at the speed of the page cache; its
//! contents are lost when the daemon exits. *Null* is for measuring everything except the device:
//! writes are discarded, and reads return zeros. The zeros are written into the buffer of every
//! read, about 40 ns for 4 KiB, because the buffer may contain data of another host, which must not
//! be disclosed.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nvme::status::Status;

use super::backing::{BackingConfig, BackingKind, Condition, Geometry, Kind};
use super::copy_locks::CopyLocks;
use super::errno::{OpKind, status_of};
use super::health::{Detached, Health};
use super::hold::{Hold, Inode, Stamp};
use super::open_error::OpenError;
use super::rbd::image::Image;
use super::step::Space;
use super::truncation::Truncation;
use crate::{durable, lock};

/// An opened backing store, on which the ring of every reactor operates, through an `Arc`.
#[derive(Debug)]
pub struct BackingDevice {
    pub(super) kind: Kind,
    /// The descriptor for reads and writes; none for [`Kind::Null`].
    pub(super) file: Option<Arc<File>>,
    /// For [`Kind::Rbd`].
    pub(super) image: Option<Arc<Image>>,
    /// For a file.
    pub(super) truncation: Truncation,
    /// For files and devices: the lock that prevents others from serving them.
    pub(super) hold: Option<Arc<Hold>>,
    /// Set if opening created the file: its attributes at that time.
    pub(super) made_as: Option<Stamp>,
    /// One descriptor for each ring, for fsync: see `uring/sync_group.rs`. They are closed with the
    /// backing store, not by a ring, because close may block on the device.
    sync_files: Mutex<SyncFiles>,
    pub(super) name: String,
    /// May change in service: see `resize`. A reactor that reads the old size has operations that
    /// are still in range or that the system refuses.
    pub(super) size_bytes: AtomicU64,
    /// Size at the last examination that found the namespace complete. Larger than the served size
    /// where only a part is served.
    found_bytes: AtomicU64,
    /// Changes when a host formats the namespace: see `erase`.
    pub(super) block_size_bytes: AtomicU32,
    /// Smallest block size that direct I/O supports here.
    pub(super) smallest_block_bytes: u32,
    pub(super) read_only: bool,
    /// For a memory file or a file on tmpfs: data are copied by the reactor, under these.
    pub(super) copy_locks: Option<Arc<CopyLocks>>,
    /// Device number of the file system or block device.
    pub(super) place: u64,
    /// For a block device: its unique identity, where known.
    pub(super) identity: Option<String>,
    /// Another backing store has replaced it: its operations are no longer valid.
    lost: AtomicBool,
    pub(super) geometry: Geometry,
    /// Modes of fallocate that the store does not support: bits of [`Space`]. Each is set once, so
    /// relaxed ordering suffices: a reactor that reads the old value only tries once more.
    pub(super) refused: AtomicU8,
    /// Until when its file is not searched for allocated blocks: see `extents`.
    pub(super) unsearched_until: Mutex<Option<Instant>>,
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

    /// Records the size that was found. A store that is shorter than that later has been truncated.
    pub(super) fn is_long(&self, bytes: u64) {
        if bytes >= self.size_bytes() {
            self.found_bytes.store(bytes, Ordering::Relaxed);
        }
    }

    /// Whether it is an image that has grown, and can be served with its new size.
    pub fn has_grown(&self) -> bool {
        let (found, block) = (self.found_bytes(), self.block_size_bytes());
        self.kind == Kind::Rbd
            && found > self.size_bytes()
            && found.is_multiple_of(u64::from(block))
    }

    /// Compares by identity where the path is assigned by the kernel, so that any device may appear
    /// there.
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

    /// Device number of the file system or block device: if one store blocks, others with the same
    /// number probably do. 0 for memory; images have one number in common.
    pub fn place(&self) -> u64 {
        self.place
    }

    /// Checks that the store has its full size and, if `thorough`, that its first and last block
    /// can be read. May block on the device.
    pub fn inspect(&self, thorough: bool) -> Condition {
        if let Some(image) = &self.image {
            let (condition, found) =
                image.inspect(self.size_bytes(), self.block_size_bytes(), thorough);
            self.is_long(found);
            return condition;
        }
        let Some(hold) = &self.hold else { return Condition::Sound };
        let measure = || hold.len_bytes(self.kind, self.health.allocation());
        match self.condition(hold, thorough, measure) {
            Condition::Sound if self.truncation.has_happened() => Condition::Refilled,
            Condition::Sound => {
                self.expect_truncation();
                Condition::Sound
            }
            condition => condition,
        }
    }

    /// Has a truncation of a file noticed from now on. May block on the device.
    pub(super) fn expect_truncation(&self) {
        let Some(file) = self.file.as_ref().filter(|_| self.kind == Kind::File) else { return };
        if let Err(error) = self.truncation.follow(file, &self.size_bytes) {
            tracing::warn!(
                "{}: cannot map its last page: {error}; that it was truncated is only noticed while it \
                 is shorter",
                self.name
            );
        }
    }

    /// The condition of a store whose size `measure` finds. The namespace may get another size
    /// meanwhile, for which the store was resized before or is resized afterwards: the smaller one
    /// counts.
    pub(super) fn condition(
        &self,
        hold: &Hold,
        thorough: bool,
        measure: impl FnOnce() -> std::io::Result<u64>,
    ) -> Condition {
        let before = self.size_bytes();
        let served_bytes = || before.min(self.size_bytes());
        let look = || -> std::io::Result<u64> {
            let (bytes, size_bytes) = (measure()?, served_bytes());
            self.is_long(bytes);
            if !thorough || bytes < size_bytes {
                return Ok(bytes);
            }
            Ok(hold.probe_ends(size_bytes, self.block_size_bytes())?.unwrap_or(bytes))
        };
        match look() {
            Ok(bytes) if bytes < served_bytes() => Condition::Shortened(bytes),
            Ok(_) => Condition::Sound,
            Err(error) => Condition::Failing(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// Bytes that writes may still allocate: those of a file that is not read-only, up to its
    /// served size, which the file system has not allocated.
    pub(crate) fn unallocated_bytes(&self) -> u64 {
        let allocated_bytes = self.health.allocation().allocated_bytes();
        let allocated_bytes = allocated_bytes.filter(|_| !self.read_only);
        allocated_bytes.map_or(0, |bytes| self.size_bytes().saturating_sub(bytes))
    }

    /// Size and free bytes of the file system of a file. May block on the device.
    pub(crate) fn file_system_bytes(&self) -> Option<(u64, u64)> {
        let hold = self.hold.as_ref().filter(|_| self.kind == Kind::File)?;
        hold.file_system_bytes().ok().flatten()
    }

    /// Whether its path leads to something else now, or to nothing. May block on the device.
    pub(crate) fn has_moved(&self, config: &BackingConfig) -> bool {
        match (&self.hold, &config.kind) {
            (Some(hold), BackingKind::File { path, .. }) => !hold.is_at(path),
            _ => false,
        }
    }

    /// What is at its path instead of it, if it is detached. None if that cannot be determined. May
    /// block on the device.
    #[must_use]
    pub fn detached(&self, config: &BackingConfig) -> Option<Option<Detached>> {
        match (&self.hold, &config.kind) {
            (Some(hold), BackingKind::File { path, .. }) => hold.detached_from(path).ok(),
            _ => None,
        }
    }

    /// The identity of a file; none for other kinds.
    pub(crate) fn inode(&self) -> Option<Inode> {
        self.hold.as_ref().filter(|_| self.kind == Kind::File).map(|hold| hold.inode)
    }

    /// A path by which it can be read while the daemon runs, wherever its configured path leads.
    pub(crate) fn own_path(&self) -> String {
        self.hold.as_ref().map(|hold| hold.own_path()).unwrap_or_default()
    }

    /// fsync: makes what was written durable, and reports earlier writeback errors. Blocks on the
    /// device.
    ///
    /// # Errors
    /// The error of the system.
    pub fn synchronise(&self) -> std::io::Result<()> {
        let name = Path::new(&self.name);
        self.file.as_ref().map_or(Ok(()), |file| durable::sync_data(file, name))
    }

    /// Opens descriptors for fsync for this number of rings, so that no ring has to.
    ///
    /// # Errors
    /// The limit of open files is reached, or the store cannot be opened again.
    pub fn prepare(&self, rings: usize) -> Result<(), OpenError> {
        let Some(hold) = &self.hold else { return Ok(()) };
        let files = (0..rings).map(|_| hold.another(&self.name, self.read_only));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        lock(&self.sync_files).made.extend(files);
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
            image: None,
            truncation: Truncation::default(),
            hold: None,
            made_as: None,
            sync_files: Mutex::default(),
            name,
            size_bytes: AtomicU64::new(size_bytes),
            found_bytes: AtomicU64::new(size_bytes),
            block_size_bytes: AtomicU32::new(config.block_size_bytes),
            smallest_block_bytes: 512,
            read_only: config.read_only,
            copy_locks: (kind == Kind::Ram).then(Arc::default),
            place: 0,
            identity: None,
            lost: AtomicBool::new(false),
            geometry: Geometry::default(),
            refused: AtomicU8::new(0),
            unsearched_until: Mutex::default(),
            health: Arc::new(Health::of_opened(config.read_only)),
        }
    }

    /// Tests, without touching data, whether the file system can punch holes: punches one behind
    /// the end of the file (`end_bytes`, which may be more than what is served). For block devices
    /// the queue limits tell instead.
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

    /// Whether its data are in memory, so that the ring copies them without the kernel's workers.
    pub fn is_in_memory(&self) -> bool {
        self.copy_locks.is_some()
    }

    /// The locks under which data in memory are copied; none for other stores.
    pub(crate) fn copy_locks(&self) -> Option<&CopyLocks> {
        self.copy_locks.as_deref()
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The image, for [`Kind::Rbd`].
    pub fn image(&self) -> Option<&Arc<Image>> {
        self.image.as_ref()
    }

    /// Its path or a description, for log lines and output.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Size in logical blocks.
    pub fn blocks(&self) -> u64 {
        self.size_bytes() / u64::from(self.block_size_bytes())
    }

    /// Size in bytes, a multiple of the block size.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Relaxed)
    }

    /// Logical block size in bytes.
    pub fn block_size_bytes(&self) -> u32 {
        self.block_size_bytes.load(Ordering::Relaxed)
    }

    /// Whether commands that change data are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether completed writes may be lost at a power failure until a Flush: VWC in Identify.
    /// False for RAM and null, where a Flush has no effect.
    ///
    /// The kernel caches the metadata of a file (which blocks are written), whatever the device. A
    /// device may gain a cache while it is served (another table of the device mapper, another leg
    /// of a RAID, a setting), so its queue limit at one moment is not evidence for the next flush.
    /// The kernel omits flushes that a device does not need, with current information.
    pub fn has_volatile_cache(&self) -> bool {
        self.kind.is_external()
    }

    /// Whether Deallocate frees space. If so, the range reads as zeros afterwards; otherwise the
    /// data stay as they were.
    #[cfg(test)]
    pub(crate) fn can_discard(&self) -> bool {
        !self.read_only && self.kind != Kind::Null && self.allows(Space::Punch)
    }

    /// Its I/O hints.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Whether data were written that a host still expects a flush to make durable.
    pub(crate) fn has_unsynced_data(&self) -> bool {
        self.has_volatile_cache() && self.health.has_unsynced()
    }

    /// It is removed, and the rings are about to get in its place what was opened again, which has
    /// the same health. Unsynced data count as lost: flushes fail. What a ring completes before it
    /// has the new store counts as unsynced; what it completes later fails.
    pub fn begin_replacement(&self) {
        if self.has_unsynced_data() {
            self.fail_sync(Status::WRITE_FAULT);
        }
        self.set_lost(true);
    }

    /// Every ring has the new store: service resumes.
    pub fn end_replacement(&self) {
        if self.has_unsynced_data() {
            self.fail_sync(Status::WRITE_FAULT);
        }
        self.health.clear_suspicion();
        self.health.set_up();
    }

    /// Marks it as replaced by another store, or reverts that.
    pub(crate) fn set_lost(&self, lost: bool) {
        self.lost.store(lost, Ordering::Relaxed);
    }

    /// Whether another store has replaced it.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Its health.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Status of every Flush and every FUA write since one of them failed:
    /// [`Health::sync_failure`].
    pub fn sync_failure(&self) -> Option<Status> {
        self.health.sync_failure()
    }

    /// Records a failed fsync; the first status is kept.
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

    /// Whether `len` bytes at `at` are inside the store.
    pub fn contains(&self, at: u64, len: u64) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.size_bytes())
    }

    /// Whether the store may support this mode of fallocate: it has not refused it so far.
    pub fn allows(&self, space: Space) -> bool {
        self.refused.load(Ordering::Relaxed) & space as u8 == 0
    }

    /// Records that the store does not support this mode.
    pub fn refuse(&self, space: Space) {
        self.refused.fetch_or(space as u8, Ordering::Relaxed);
        if space == Space::Punch {
            self.health.note_kept_space();
        }
    }

    /// Descriptor for the ring; the store stays open longer than every operation on it.
    pub fn fd(&self) -> Option<RawFd> {
        self.file.as_ref().map(|file| file.as_raw_fd())
    }

    /// A descriptor for fsync for one more ring.
    pub(crate) fn sync_fd(&self) -> Option<RawFd> {
        let mut files = lock(&self.sync_files);
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

    /// Converts an errno to a status, counts it, and logs it at the first failure and at each
    /// doubling of their number, so that a failing device does not flood the log. For a store of a
    /// gateway group that was excluded or released it is the status of standby.
    pub fn fail(&self, doing: OpKind, errno: i32, at: u64) -> Status {
        if let Some(image) = self.image.as_ref().filter(|image| image.is_on_demand()) {
            if matches!(errno, libc::ESHUTDOWN | libc::ENOTCONN) && image.serving().is_some() {
                image.note_fenced();
                self.health.suspect();
            }
            if image.serving().is_none() {
                self.health.set_standby(true);
                return Status::ANA_INACCESSIBLE;
            }
        }
        let count = self.health.count_failure(errno);
        if count.is_power_of_two() {
            let said = Errno::from_raw(errno).desc();
            let what = doing.name();
            tracing::warn!("{}: {what} at byte {at}: {said}; failures: {count}", self.name);
        }
        match (Errno::from_raw(errno), self.kind) {
            // ENOSPC: a thin pool that may be extended, or a removed device: the kernel reports a
            // write beyond the end, which is then at 0. The monitor finds out within a second.
            (Errno::ENOSPC, Kind::Device) => Status::CAPACITY_EXCEEDED.with_crd(1),
            // The image was removed, or its lock was broken: the monitor finds out.
            (Errno::ENOENT | Errno::EROFS | Errno::ENOTCONN, Kind::Rbd) => Health::NOT_READY,
            _ => status_of(doing, errno),
        }
    }

    /// The store ends inside the namespace: it was truncated, or the device was removed. No
    /// operation reaches it any more, so that no write extends it, with zeros in between.
    pub(crate) fn fail_shortened(&self, at: u64) -> Status {
        self.health.count_failure(0);
        self.note_shortened();
        self.set_down(&format!(
            "ends at or before byte {at}, inside the namespace of {} bytes: it was shortened while \
             being served, or its device was removed; {}",
            self.size_bytes(),
            self.remedy_of_shortened()
        ));
        Health::NOT_READY
    }

    /// It is not served any more if an examination has found that it was truncated, or that its
    /// device was removed.
    pub(crate) fn fail_truncated(&self, condition: Condition) {
        let what = match condition {
            Condition::Shortened(bytes) => format!(
                "ends at byte {bytes}, inside the namespace of {} bytes: it was shortened while \
                 being served, or its device was removed",
                self.size_bytes()
            ),
            Condition::Refilled => "was truncated and filled again while being served: it is not \
                                    what hosts have written"
                .to_owned(),
            Condition::Sound | Condition::Failing(_) => return,
        };
        self.note_shortened();
        self.set_down(&format!("{what}; {}", self.remedy_of_shortened()));
    }

    /// For a file or an image: even if it is extended again, its data are lost.
    pub(crate) fn note_shortened(&self) {
        if matches!(self.kind, Kind::File | Kind::Rbd) {
            self.health.note_shortened();
        }
    }

    /// What the administrator has to do about it.
    pub(crate) fn remedy_of_shortened(&self) -> &'static str {
        match self.kind {
            Kind::File | Kind::Rbd => "restore it, then `nvmfctl namespace trust`",
            _ => "restore it",
        }
    }

    /// Takes a store in standby into service: takes its lock, and breaks that of a client at one of
    /// these addresses, which is excluded from the cluster first. Blocks as long as the cluster
    /// does not answer.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub(crate) fn acquire(&self, former: &[String]) -> Result<(), OpenError> {
        let Some(image) = &self.image else { return Ok(()) };
        image.acquire(former, self.size_bytes())?;
        self.health.set_standby(false);
        Ok(())
    }

    /// Whether the client of an image that is acquired on demand was excluded: it can only be opened
    /// again.
    pub(crate) fn is_fenced_standby(&self) -> bool {
        self.image.as_ref().is_some_and(|image| image.is_on_demand() && image.is_fenced())
    }

    /// Returns a store to standby: operations that have not started are refused, others land, then
    /// the lock is released. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// One sentence. No operation is started any more.
    pub(crate) fn release(&self) -> Result<(), OpenError> {
        let Some(image) = &self.image else { return Ok(()) };
        self.health.set_standby(true);
        image.release()
    }

    /// Takes the store out of service until it is available again.
    pub fn set_down(&self, why: &str) {
        if self.health.set_down() {
            tracing::error!("{}: {why}; hosts get Namespace Not Ready", self.name);
        }
    }
}
