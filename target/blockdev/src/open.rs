//! Opens backing stores.
//!
//! Here a store can be rejected with an error sentence for the administrator, so everything is
//! checked that can be checked in advance: direct I/O, its alignment (by trying it), the size, and
//! that no other daemon serves the same data.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use tracing::warn;

use super::backing::{BackingConfig, BackingKind, Geometry, Kind};
use super::ceph::{ClusterConfig, CreatedImage, ImageName};
use super::device::BackingDevice;
use super::hold::{
    Hold, Stamp, claim_device, interrupted_rollback, is_same, lock, read_block, shares,
    snapshot_block_size_bytes,
};
use super::media_properties::{Below, is_on_tmpfs};
use super::open_error::{OpenError, failed, place, refused};
use super::owner_file::{self, Daemon, Owner};
use super::rbd::image::Image;
use super::step::Space;
use super::sysfs::Device;
use crate::durable;

/// Offsets in files and devices are a C `off_t`.
const MAX_BYTES: u64 = i64::MAX as u64;
impl BackingDevice {
    /// Opens a store. Creates a missing file if its size is configured.
    ///
    /// # Errors
    /// One sentence: what was tried, what the system answered, what to do.
    pub fn open(config: &BackingConfig) -> Result<BackingDevice, OpenError> {
        BackingDevice::open_or_make(config, true)
    }

    /// As [`BackingDevice::open`], but creates a missing file only if `may_make`: a file that was
    /// there a moment ago must not be replaced by an empty one.
    ///
    /// # Errors
    /// As [`BackingDevice::open`].
    pub fn open_or_make(
        config: &BackingConfig,
        may_make: bool,
    ) -> Result<BackingDevice, OpenError> {
        match &config.kind {
            BackingKind::File { path, size } => {
                open_path(path, *size, config, if may_make { Was::New } else { Was::Expected })
            }
            BackingKind::Ram { size } => {
                let name = format!("ram ({size} bytes)");
                check_shape(&name, *size, config.block_size_bytes)?;
                let file = memory_file(*size).map_err(|errno| {
                    OpenError::new(format!(
                        "cannot create a memory file of {size} bytes: {}; choose a smaller size \
                         or free memory",
                        errno.desc()
                    ))
                })?;
                Ok(BackingDevice::assemble(Kind::Ram, Some(Arc::new(file)), name, *size, config))
            }
            BackingKind::Null { size } => {
                let name = format!("null ({size} bytes)");
                check_shape(&name, *size, config.block_size_bytes)?;
                Ok(BackingDevice::assemble(Kind::Null, None, name, *size, config))
            }
            BackingKind::Rbd { image, cluster, made } => {
                open_image(image, cluster, made.as_deref(), config)
            }
        }
    }

    /// Checks whether a file or device can be opened, and changes nothing. Returns whether the file
    /// would be created. `is_served`: a daemon with this configuration has the lock. May block on
    /// the device.
    ///
    /// # Errors
    /// As [`BackingDevice::open`].
    pub fn examine(config: &BackingConfig, is_served: bool) -> Result<bool, OpenError> {
        let BackingKind::File { path, size } = &config.kind else { return Ok(false) };
        let name = path.display().to_string();
        if let Some(size) = size {
            check_shape(&name, *size, config.block_size_bytes)?;
        }
        let meta = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return size_of_new(path, &name, *size, config).map(|_| true);
            }
            found => found.map_err(|error| failed(&format!("cannot look at {name}"), &error))?,
        };
        let file = open_existing(path, &name, &meta, config)?;
        inspect(&file, path, &name, (*size, None), config)?;
        if !is_served {
            exclude_others(&file, claim_device(path, &meta), &name, config, true)?;
            if owner_file::may_have_other_machines(&file) {
                Owner::guard(path, &Daemon::this(), true)?;
            }
        }
        Ok(false)
    }

    /// Opens what is at the path of a store now, because the store was removed. Its health stays
    /// the same. Nothing is created; kind and size must be as before (or the size as served). A
    /// file must be the same inode unless the administrator has `trusted` what is there. May block
    /// on the device.
    ///
    /// # Errors
    /// One sentence: what was tried, what the system answered, what to do.
    pub(crate) fn open_again(
        &self,
        config: &BackingConfig,
        trusted: bool,
    ) -> Result<BackingDevice, OpenError> {
        let mut fresh = match &config.kind {
            BackingKind::File { path, .. } => {
                open_path(path, Some(self.size_bytes()), config, Was::Lost(self.found_bytes()))?
            }
            BackingKind::Rbd { image, cluster, made } => {
                let fresh = open_image(image, cluster, made.as_deref(), config)?;
                fresh.has_served_size(self)?;
                if fresh.health.is_standby() {
                    self.health.set_standby(true);
                }
                fresh
            }
            BackingKind::Ram { .. } | BackingKind::Null { .. } => {
                return Err(OpenError::new(format!("{} cannot be opened again", self.name)));
            }
        };
        self.may_be_replaced_by(&fresh, trusted)?;
        fresh.health = Arc::clone(&self.health);
        if !fresh.allows(Space::Punch) {
            fresh.health.note_kept_space();
        }
        Ok(fresh)
    }

    /// An image may have grown, but not shrunk, since `old` was opened.
    fn has_served_size(&self, old: &BackingDevice) -> Result<(), OpenError> {
        match self.size_bytes() >= old.size_bytes() {
            true => Ok(()),
            false => Err(OpenError::new(format!(
                "{} has {} bytes, fewer than the {} that are served: restore its size (`rbd resize`)",
                self.name,
                self.size_bytes(),
                old.size_bytes()
            ))),
        }
    }

    /// Checks that a store that was opened again is the one that was served, or a file that the
    /// administrator has `trusted`.
    pub(super) fn may_be_replaced_by(
        &self,
        fresh: &BackingDevice,
        trusted: bool,
    ) -> Result<(), OpenError> {
        if fresh.kind != self.kind {
            return Err(OpenError::new(format!(
                "{} is now of another nature than it was: remove the namespace, reload, add it, \
                 reload",
                self.name
            )));
        }
        self.is_the_device(fresh)?;
        if !trusted {
            self.is_the_file(fresh)?;
        }
        Ok(())
    }

    /// Another file of the right length may be half restored, or older.
    fn is_the_file(&self, fresh: &BackingDevice) -> Result<(), OpenError> {
        match self.kind != Kind::File || self.inode() == fresh.inode() {
            true => Ok(()),
            false => Err(OpenError::new(format!(
                "{} is another file than the one that was served: when it has what hosts are to \
                 find, `nvmfctl namespace trust`",
                self.name
            ))),
        }
    }

    /// Opens the same store again: the kernel reports no earlier writeback errors through new
    /// descriptors. May block on the device.
    ///
    /// # Errors
    /// One sentence: what was tried, what the system answered, what to do.
    pub fn renewed(&self, config: &BackingConfig) -> Result<BackingDevice, OpenError> {
        let file = match &self.hold {
            Some(hold) => Some(Arc::new(hold.another(&self.name, self.read_only)?)),
            None if self.image.is_some() => None,
            None => {
                return Err(OpenError::new(format!("{} cannot be opened again", self.name)));
            }
        };
        let (name, size) = (self.name.clone(), self.size_bytes());
        let mut fresh = BackingDevice::assemble(self.kind, file, name, size, config);
        fresh.is_long(self.found_bytes());
        fresh.hold.clone_from(&self.hold);
        fresh.image.clone_from(&self.image);
        fresh.copy_locks.clone_from(&self.copy_locks);
        fresh.place = self.place;
        fresh.identity.clone_from(&self.identity);
        fresh.geometry = self.geometry;
        fresh.smallest_block_bytes = self.smallest_block_bytes;
        fresh.refused = AtomicU8::new(self.refused.load(Ordering::Relaxed));
        fresh.health = Arc::clone(&self.health);
        Ok(fresh)
    }
}

/// For tests, also of other packages.
#[cfg(any(test, feature = "testing"))]
impl BackingDevice {
    /// A store without a file that behaves like a file: for a driver that simulates the kernel.
    ///
    /// # Errors
    /// The block size is not supported, or the size is out of range or not a multiple of it.
    pub fn simulated(size_bytes: u64, block_size_bytes: u32) -> Result<BackingDevice, OpenError> {
        let name = format!("simulated ({size_bytes} bytes)");
        check_shape(&name, size_bytes, block_size_bytes)?;
        let kind = BackingKind::Null { size: size_bytes };
        let config = BackingConfig { kind, block_size_bytes, read_only: false, shared: false };
        Ok(BackingDevice::assemble(Kind::File, None, name, size_bytes, &config))
    }

    /// A simulated store that was removed and is opened again.
    ///
    /// # Errors
    /// Its size or block size is invalid.
    pub fn simulated_again(&self) -> Result<BackingDevice, OpenError> {
        let mut fresh = BackingDevice::simulated(self.found_bytes(), self.block_size_bytes())?;
        fresh.resize(self.size_bytes());
        fresh.health = Arc::clone(&self.health);
        Ok(fresh)
    }
}

/// What the caller knows of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Was {
    /// Nothing: a missing file is created.
    New,
    /// A file was there a moment ago.
    Expected,
    /// It was served and removed; its size in bytes.
    Lost(u64),
}

/// Opens a store at a path. Creates a missing file for `New` only. A store may be larger than
/// `size`, because its namespace may have been made smaller in service: the rest is not served. A
/// replacement of a removed store has its size, or the size found before.
fn open_path(
    path: &Path,
    size: Option<u64>,
    config: &BackingConfig,
    was: Was,
) -> Result<BackingDevice, OpenError> {
    let name = path.display().to_string();
    let before = if let Was::Lost(bytes) = was { Some(bytes) } else { None };
    if let Some(size) = size {
        check_shape(&name, size, config.block_size_bytes)?;
    }
    let mut claim = Ok(None);
    let (file, created) = match fs::metadata(path) {
        Ok(meta) => {
            claim = claim_device(path, &meta);
            (open_existing(path, &name, &meta, config)?, false)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && was == Was::New => {
            (create(path, &name, size, config)?, true)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && was == Was::Expected => {
            let sentence = format!("{name} was there a moment ago and is not now");
            return Err(OpenError { sentence, may_pass: true });
        }
        Err(error) => return Err(failed(&format!("cannot look at {name}"), &error)),
    };
    let claim = exclude_others(&file, claim, &name, config, false)?;
    // The former holder of the lock may have removed or replaced the file.
    let is_there = fs::metadata(path).is_ok_and(|there| is_same(&there, &file));
    if !is_there {
        let sentence = format!("{name} was replaced or removed while it was opened");
        return Err(OpenError { sentence, may_pass: true });
    }
    let owner = match owner_file::may_have_other_machines(&file) {
        true => Owner::guard(path, &Daemon::this(), shares(config))?,
        false => None,
    };
    match inspect(&file, path, &name, (size, before), config) {
        Ok((kind, bytes, found_bytes)) => {
            // Not while one is in progress.
            if let Some(left) = before.is_none().then(|| interrupted_rollback(path)).flatten() {
                warn!("{left}");
            }
            if kind == Kind::File && !created {
                // Another process created the file, perhaps a moment ago: it must survive a power
                // loss with its present size and name, because the configuration refers to it.
                durable::sync_with_entries(&file, path)
                    .map_err(|error| failed(&format!("cannot make {name} durable"), &error))?;
            }
            let file = Arc::new(file);
            let meta = file
                .metadata()
                .map_err(|error| failed(&format!("cannot look at {name}"), &error))?;
            let hold = Hold::new(Arc::clone(&file), &meta, claim, owner);
            let mut backing = finish(kind, Arc::clone(&file), name, bytes, config)?;
            backing.hold = Some(Arc::new(hold));
            backing.is_long(found_bytes);
            backing.expect_truncation();
            // That allocates a page of a file in memory.
            backing.made_as = file.metadata().ok().filter(|_| created).map(|meta| Stamp::of(&meta));
            Ok(backing)
        }
        Err(error) => {
            if created {
                // Created and locked by us, and unusable: it is removed again.
                let _ = fs::remove_file(path);
            }
            Err(error)
        }
    }
}

/// Stands for all images where others have the number of a file system or device.
const IMAGES: u64 = u64::MAX - 1;

/// Opens an image of Ceph RBD, and takes its lock.
fn open_image(
    name: &ImageName,
    cluster: &ClusterConfig,
    made: Option<&CreatedImage>,
    config: &BackingConfig,
) -> Result<BackingDevice, OpenError> {
    let image = Image::open(cluster, name, made, config.read_only)?;
    let name = format!("rbd image {name}");
    let bytes = image.size_bytes().map_err(|errno| {
        OpenError::new(format!("cannot find out how large {name} is: {}", errno.desc()))
    })?;
    check_shape(&name, bytes, config.block_size_bytes)?;
    let mut backing = BackingDevice::assemble(Kind::Rbd, None, name, bytes, config);
    backing.geometry = image.geometry();
    backing.identity = Some(image.identity.clone());
    backing.place = IMAGES;
    backing.health.set_standby(image.is_on_demand());
    backing.image = Some(Arc::new(image));
    Ok(backing)
}

/// Checks that the block size is supported, and that the size is a multiple of it in range.
pub(super) fn check_shape(name: &str, size: u64, block: u32) -> Result<(), OpenError> {
    if block != 512 && block != 4096 {
        return Err(OpenError::new(format!(
            "{name}: block size {block} is not supported; set block_size to 512 or 4096"
        )));
    }
    let unit = u64::from(block);
    if size == 0 || size > MAX_BYTES {
        return Err(OpenError::new(format!(
            "{name}: a size of {size} bytes cannot be served; choose one from {unit} to {MAX_BYTES}"
        )));
    }
    if !size.is_multiple_of(unit) {
        let below = size - size % unit;
        return Err(OpenError::new(format!(
            "{name}: {size} bytes is not a whole number of blocks of {unit} bytes; use {} bytes{}",
            below.max(unit),
            if unit == 4096 && size.is_multiple_of(512) { ", or block_size = 512" } else { "" }
        )));
    }
    Ok(())
}

fn open_existing(
    path: &Path,
    name: &str,
    meta: &Metadata,
    config: &BackingConfig,
) -> Result<File, OpenError> {
    let what = match meta.file_type() {
        kind if kind.is_file() => None,
        kind if kind.is_block_device() => None,
        kind if kind.is_dir() => Some("a directory"),
        kind if kind.is_char_device() => Some("a character device"),
        kind if kind.is_fifo() => Some("a named pipe"),
        kind if kind.is_socket() => Some("a socket"),
        _ => Some("neither a file nor a block device"),
    };
    if let Some(what) = what {
        return Err(OpenError::new(format!(
            "{name} is {what}; a namespace needs a regular file or a block device, so give the \
             path of one"
        )));
    }
    OpenOptions::new()
        .read(true)
        .write(!config.read_only)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(|error| refused(path, name, meta.dev(), &error))
}

/// Locks an open store. `claim`: result of its exclusive open, which is returned. Examinations
/// (`is_examined`) do not exclude each other.
fn exclude_others(
    file: &File,
    claim: io::Result<Option<File>>,
    name: &str,
    config: &BackingConfig,
    is_examined: bool,
) -> Result<Option<File>, OpenError> {
    // Another daemon has the device open exclusively. A daemon shows in its lock; a mount has none.
    let is_busy = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
    let is_others = claim.as_ref().is_err_and(is_busy)
        && shares(config)
        && matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    lock(file, name, is_examined || shares(config))?;
    match claim {
        Err(_) if is_others => Ok(None),
        claim => claim.map_err(|error| failed(&format!("cannot claim {name}"), &error)),
    }
}

/// Returns the size of a missing file that may be created, and its directory.
fn size_of_new<'p>(
    path: &'p Path,
    name: &str,
    size: Option<u64>,
    config: &BackingConfig,
) -> Result<(u64, &'p Path, Metadata), OpenError> {
    if let Ok(link) = fs::read_link(path) {
        return Err(OpenError::new(format!(
            "{name} is a symbolic link to {}, which does not exist, and no file is created \
             through a link; create the file there or correct the link",
            link.display()
        )));
    }
    if config.read_only {
        return Err(OpenError::new(format!(
            "{name} does not exist and a read-only namespace is not created; correct the path or \
             remove read_only"
        )));
    }
    let Some(size) = size else {
        return Err(OpenError::new(format!(
            "{name} does not exist; correct the path, or give a size to have the file created"
        )));
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let meta =
        fs::metadata(parent).map_err(|error| failed(&format!("cannot create {name}"), &error))?;
    Ok((size, parent, meta))
}

/// Creates a missing file: sparse, only for this user, and durable (file and directory entry)
/// before it is served.
fn create(
    path: &Path,
    name: &str,
    size: Option<u64>,
    config: &BackingConfig,
) -> Result<File, OpenError> {
    let (size, parent, meta) = size_of_new(path, name, size, config)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(|error| {
            // Some file systems create the file and then refuse O_DIRECT: the empty file would be
            // rejected next time for its size.
            if error.raw_os_error() == Some(libc::EINVAL)
                && fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == 0)
            {
                let _ = fs::remove_file(path);
            }
            refused(path, name, meta.dev(), &error)
        })?;
    let made = file
        .set_len(size)
        .and_then(|()| durable::sync(&file, path))
        .and_then(|()| durable::sync_directory(parent));
    made.map_err(|error| {
        let _ = fs::remove_file(path);
        failed(&format!("cannot give the new file {name} its {size} bytes"), &error)
    })?;
    Ok(file)
}

/// Checks whether an opened store can be served; returns its kind, its size and its current length.
fn inspect(
    file: &File,
    path: &Path,
    name: &str,
    (size, before): (Option<u64>, Option<u64>),
    config: &BackingConfig,
) -> Result<(Kind, u64, u64), OpenError> {
    let looked = |error| failed(&format!("cannot look at {name}"), &error);
    let meta = file.metadata().map_err(looked)?;
    let kind = if meta.file_type().is_block_device() { Kind::Device } else { Kind::File };
    let found_bytes = match kind {
        Kind::Device => (&mut &*file).seek(SeekFrom::End(0)).map_err(looked)?,
        _ => meta.len(),
    };
    let mut bytes = found_bytes;
    let may_be_longer = before.is_none_or(|before| before == found_bytes);
    if let Some(wanted) = size.filter(|wanted| may_be_longer && *wanted < bytes) {
        warn!("{name} has {bytes} bytes, of which {wanted} are exported");
        bytes = wanted;
    }
    if let Some(wanted) = size
        && wanted != bytes
    {
        return Err(OpenError::new(format!(
            "{name} has {bytes} bytes but the configuration says {wanted}; it is never grown or \
             shrunk behind your back: set the size to {bytes}, or change the {} yourself{}",
            if kind == Kind::Device { "device" } else { "file" },
            if bytes == 0 {
                " (an empty file may simply be removed: it is created anew)"
            } else {
                ""
            }
        )));
    }
    check_shape(name, bytes, config.block_size_bytes)?;
    probe_alignment(file, path, name, meta.dev(), config.block_size_bytes)?;
    check_snapshot(file, name, &meta, config)?;
    Ok((kind, bytes, found_bytes))
}

/// Checks that a snapshot, which nobody has made writable, is served read-only, and with its block
/// size: hosts would change it, or find its blocks at other addresses. (They may have formatted one
/// that was writable.)
fn check_snapshot(
    file: &File,
    name: &str,
    meta: &Metadata,
    config: &BackingConfig,
) -> Result<(), OpenError> {
    let refused = |sentence| Err(OpenError::new(sentence));
    match snapshot_block_size_bytes(file) {
        Some(_) if !config.read_only && meta.mode() & 0o222 == 0 => refused(format!(
            "{name} is a snapshot, which hosts would change: set read_only = true, or serve a \
             clone (`nvmfctl namespace clone`)"
        )),
        Some(bytes) if config.read_only && bytes != config.block_size_bytes => refused(format!(
            "{name} is a snapshot of a namespace with blocks of {bytes} bytes: set block_size = \
             {bytes}"
        )),
        _ => Ok(()),
    }
}

fn finish(
    kind: Kind,
    file: Arc<File>,
    name: String,
    bytes: u64,
    config: &BackingConfig,
) -> Result<BackingDevice, OpenError> {
    let meta =
        file.metadata().map_err(|error| failed(&format!("cannot look at {name}"), &error))?;
    let below = Below::of(&file);
    let in_memory = kind == Kind::File && is_on_tmpfs(&file);
    // If the half of a block can be read, so can the other half.
    let fine = config.block_size_bytes == 512 || read_block(&file, 0, 512).is_ok();
    let mut backing = BackingDevice::assemble(kind, Some(file), name, bytes, config);
    backing.copy_locks = in_memory.then(Arc::default);
    backing.smallest_block_bytes = if fine { 512 } else { config.block_size_bytes };
    backing.place = if kind == Kind::Device { meta.rdev() } else { meta.dev() };
    if kind == Kind::Device {
        let queue = Device::of(meta.rdev());
        backing.identity = queue.identity();
        backing.geometry = Geometry {
            physical_block_bytes: queue.number("physical_block_size"),
            optimal_io_bytes: queue.number("optimal_io_size"),
            discard_granularity_bytes: queue.number("discard_granularity"),
            boundary_bytes: queue.number("chunk_sectors").saturating_mul(512),
            ..Geometry::default()
        };
        // Without this limit the kernel refuses to punch holes in a device (it does not fall back
        // to writing zeros).
        if queue.text("write_zeroes_max_bytes").as_deref() == Some("0") {
            backing.refuse(Space::Punch);
        }
    } else {
        let block = u32::try_from(meta.blksize()).unwrap_or(0);
        backing.geometry = Geometry {
            physical_block_bytes: block,
            discard_granularity_bytes: block,
            ..Geometry::default()
        };
        backing.probe_punch(meta.len());
        backing.health.allocation().record(&meta);
    }
    backing.geometry.power_fail_atomic_bytes = below.power_fail_atomic_bytes.unwrap_or(0);
    if let Some(why) = below.volatile.filter(|_| !config.read_only) {
        warn!("{} {why}", backing.name);
    }
    Ok(backing)
}

/// Tries a direct read of one block, which gives the answer for every file system, device and
/// kernel. (`statx` reports the alignment since 6.1, for some file systems.)
fn probe_alignment(
    file: &File,
    path: &Path,
    name: &str,
    dev: u64,
    block: u32,
) -> Result<(), OpenError> {
    match read_block(file, 0, block) {
        Ok(_) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) && block == 512 => {
            Err(OpenError::new(format!(
                "{name}: direct I/O in blocks of 512 bytes is refused by the {}: {error}; set \
                 block_size = 4096",
                place(path, dev)
            )))
        }
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(OpenError::new(format!(
            "{name}: direct I/O in blocks of {block} bytes is refused by the {}: {error}; use a \
             file system or device with smaller sectors",
            place(path, dev)
        ))),
        Err(error) => Err(failed(&format!("cannot read the first block of {name}"), &error)),
    }
}

fn memory_file(size: u64) -> Result<File, Errno> {
    let file = File::from(memfd_create("nvmfd-ram", MFdFlags::MFD_CLOEXEC)?);
    file.set_len(size).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))?;
    Ok(file)
}
