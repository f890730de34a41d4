//! Opens files and devices; errors as sentences.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::sync::Arc;

use nix::sys::stat::{major, minor};
use tracing::warn;

use super::created_file::Stamp;
use super::device::{BackingConfig, BackingDevice, Condition, Geometry, Kind, OpenError, Space};
use super::health::Detached;
use super::media_properties::Below;
use super::owner_file::{self, Daemon, Owner};
use super::sysfs::Device;
use crate::durable;

/// Files and devices are named by a C `off_t`.
const MAX_BYTES: u64 = i64::MAX as u64;
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
    /// One more open file of the same store, with a memory of failures of its own.
    pub(super) fn another(&self, name: &str, read_only: bool) -> Result<File, OpenError> {
        OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", self.locked.as_raw_fd()))
            .map_err(|error| failed(&format!("cannot open {name} once more"), &error))
    }

    /// See [`BackingDevice::inspect`].
    pub(super) fn inspect(&self, backing: &BackingDevice, thorough: bool) -> Condition {
        match self.look(backing, thorough) {
            Ok(bytes) if bytes < backing.size_bytes() => Condition::Shortened(bytes),
            Ok(_) => Condition::Sound,
            Err(error) => Condition::Failing(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// The size in bytes; the ends are read when it is not too short.
    fn look(&self, backing: &BackingDevice, thorough: bool) -> io::Result<u64> {
        let bytes = match backing.kind {
            Kind::Device => (&*self.locked).seek(SeekFrom::End(0))?,
            _ => self.locked.metadata()?.len(),
        };
        backing.is_long(bytes);
        if !thorough || bytes < backing.size_bytes() {
            return Ok(bytes);
        }
        let block = backing.block_size_bytes();
        let last = backing.size_bytes() - u64::from(block);
        for at in [0, last] {
            if read_block(&self.locked, at, block)? == 0 {
                return Ok(at);
            }
        }
        Ok(bytes)
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

fn is_same(there: &Metadata, file: &File) -> bool {
    let identity = |meta: &Metadata| (meta.dev(), meta.ino(), meta.rdev());
    file.metadata().is_ok_and(|here| identity(there) == identity(&here))
}

/// What is known of a path before it is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Was {
    /// It may be missing: then its file is created.
    New,
    /// It was there a moment ago.
    Expected,
    /// It was served and lost; its length in bytes.
    Lost(u64),
}

/// Opens a store at a path. A missing file is created where nothing was, and a store may also be
/// longer than `size`, as a namespace is that was made smaller while it was served: the rest is not.
/// What takes the place of a store that was lost has its size, or the length that was found before.
pub(super) fn open_path(
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
    // Another daemon has a claim as well. That it is one its lock tells: a mount has none.
    let is_busy = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
    let is_others = claim.as_ref().is_err_and(is_busy)
        && shares(config)
        && matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    lock(&file, &name, config)?;
    let claim = match claim {
        Err(_) if is_others => None,
        claim => claim.map_err(|error| failed(&format!("cannot claim {name}"), &error))?,
    };
    // Who had the lock may have removed it, or somebody has put another one there.
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
            if kind == Kind::File && !created {
                // Somebody has made it, perhaps a moment ago: as large as it is now, and under this
                // name, it must be there after a power loss, because what is configured says so.
                durable::sync_with_entries(&file, path)
                    .map_err(|error| failed(&format!("cannot make {name} durable"), &error))?;
            }
            let file = Arc::new(file);
            let meta = file
                .metadata()
                .map_err(|error| failed(&format!("cannot look at {name}"), &error))?;
            let id = (meta.dev(), meta.ino());
            let hold = Hold { locked: Arc::clone(&file), id, _claim: claim, owner };
            let mut backing = finish(kind, Arc::clone(&file), name, bytes, config)?;
            backing.hold = Some(Arc::new(hold));
            backing.made_as = file.metadata().ok().filter(|_| created).map(|meta| Stamp::of(&meta));
            backing.is_long(found_bytes);
            Ok(backing)
        }
        Err(error) => {
            if created {
                // Made a moment ago by us, locked by us, and unusable: leave no trace.
                let _ = fs::remove_file(path);
            }
            Err(error)
        }
    }
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

/// Claims a block device, so that it is neither mounted nor part of something else meanwhile.
fn claim_device(path: &Path, meta: &Metadata) -> io::Result<Option<File>> {
    if !meta.file_type().is_block_device() {
        return Ok(None);
    }
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path).map(Some)
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

/// Creates a missing file: sparse, ours alone, and on disk (file and directory entry) before
/// anything is served from it.
fn create(
    path: &Path,
    name: &str,
    size: Option<u64>,
    config: &BackingConfig,
) -> Result<File, OpenError> {
    if let Ok(link) = fs::read_link(path) {
        return Err(OpenError::new(format!(
            "{name} is a symbolic link to {}, which does not exist, and no file is created \
             through a link; create the file there or correct the link",
            link.display()
        )));
    }
    let Some(size) = size else {
        return Err(OpenError::new(format!(
            "{name} does not exist; correct the path, or give a size to have the file created"
        )));
    };
    if config.read_only {
        return Err(OpenError::new(format!(
            "{name} does not exist and a read-only namespace is not created; correct the path or \
             remove read_only"
        )));
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let dev = fs::metadata(parent)
        .map_err(|error| failed(&format!("cannot create {name}"), &error))?
        .dev();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(|error| {
            // Some file systems create first and refuse O_DIRECT afterwards: the empty file that
            // they leave behind would be taken for a namespace of the wrong size next time.
            if error.raw_os_error() == Some(libc::EINVAL)
                && fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == 0)
            {
                let _ = fs::remove_file(path);
            }
            refused(path, name, dev, &error)
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

/// Whether an opened store can be served; gives its kind, its size and how long it is.
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
    Ok((kind, bytes, found_bytes))
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
    // Half of a block that can be read: then so can the other.
    let fine = config.block_size_bytes == 512 || read_block(&file, 0, 512).is_ok();
    let mut backing = BackingDevice::assemble(kind, Some(file), name, bytes, config);
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
        // Without this limit the kernel refuses to punch into a device (it never falls back to
        // writing zeros for that).
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
    }
    backing.geometry.power_fail_atomic_bytes = below.power_fail_atomic_bytes.unwrap_or(0);
    if let Some(why) = below.volatile.filter(|_| !config.read_only) {
        warn!("{} {why}", backing.name);
    }
    Ok(backing)
}

/// One daemon a store: a lock that ends with the descriptor. Readers share it, and those that are
/// told that others serve it as well.
fn lock(file: &File, name: &str, config: &BackingConfig) -> Result<(), OpenError> {
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
fn shares(config: &BackingConfig) -> bool {
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

/// Tries a direct read of one block: the one question whose answer holds for every file system,
/// device and kernel. (`statx` knows the alignment since 6.1, for some file systems.)
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

/// Reads a block past the page cache; how many bytes there were.
fn read_block(file: &File, at: u64, block: u32) -> io::Result<usize> {
    let mut scratch = vec![0u8; 2 * PAGE_BYTES];
    let start = scratch.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
    file.read_at(&mut scratch[start..start + block as usize], at)
}

/// Opening failed. EINVAL is how a file system says that it has no direct I/O.
fn refused(path: &Path, name: &str, dev: u64, error: &io::Error) -> OpenError {
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => OpenError::new(format!(
            "cannot open {name} for direct I/O (O_DIRECT): the {} refuses it: {error}; put the \
             file on ext4, XFS or btrfs, or serve a block device",
            place(path, dev)
        )),
        _ => failed(&format!("cannot open {name}"), error),
    }
}

/// Where a path lives, in words.
fn place(path: &Path, dev: u64) -> String {
    if fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device()) {
        return "device".to_owned();
    }
    match file_system(dev) {
        Some(kind) => format!("file system ({kind})"),
        None => "file system".to_owned(),
    }
}

/// The type of the file system that is mounted from device `dev`:
/// `36 35 98:0 /root /mount rw shared:1 - ext4 /dev/sda rw`.
fn file_system(dev: u64) -> Option<String> {
    let wanted = format!("{}:{}", major(dev), minor(dev));
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let matches = mount.split(' ').nth(2) == Some(wanted.as_str());
        matches.then(|| source.split(' ').next().map(str::to_owned))?
    })
}

/// What was tried, what the system said, what to do.
fn failed(tried: &str, error: &io::Error) -> OpenError {
    let remedy = match error.raw_os_error().unwrap_or(0) {
        libc::EACCES => "give the user of nvmfd the right to it and to the directories above it",
        // Of a device, what keeps it away is no permission of the device itself.
        libc::EPERM => {
            "a unit or container lets nvmfd have the devices only that it names, and that were \
             there when it was started: name it (systemd: DeviceAllow=), and restart nvmfd. A file \
             may be immutable (lsattr)"
        }
        libc::ENOENT | libc::ENOTDIR => "create the directory first, or correct the path",
        libc::EROFS => {
            "where the file system itself can be written, the unit forbids it: name the directory \
             (systemd: ReadWritePaths=), and restart nvmfd"
        }
        libc::EBUSY => "it is mounted or in use elsewhere: unmount it or choose another",
        libc::ETXTBSY => "it is in use as a program or for swapping: choose another",
        libc::ENOSPC | libc::EDQUOT => "free space on the file system, or choose another",
        libc::EFBIG => "choose a smaller size: the file system cannot hold such a file",
        libc::EMFILE | libc::ENFILE => "raise the limit of open files (systemd: LimitNOFILE=)",
        libc::ELOOP => "correct the symbolic links on the path",
        libc::ENXIO | libc::ENODEV => "there is no device behind it: check that it is attached",
        libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS => {
            "use a file system that supports locks, or a block device"
        }
        libc::EIO => "the disk reports an error: see the kernel log",
        libc::EBADE => {
            "another initiator has reserved the device (Persistent Reservations: `nvme resv-report`, \
             `sg_persist -r`): have the reservation released or preempted"
        }
        _ => "see the kernel log for more",
    };
    OpenError { sentence: format!("{tried}: {error}; {remedy}"), may_pass: may_pass(error) }
}

/// Whether it may be over without anybody correcting the configuration: the disk has errors, is not
/// there, does not answer, or somebody else has it.
fn may_pass(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().unwrap_or(0),
        libc::EIO
            | libc::ENXIO
            | libc::ENODEV
            | libc::EBUSY
            // The block layer's words for errors of the medium and of its integrity, for paths that
            // fail and for a reservation of somebody else; and a file of a server that is gone.
            | libc::ENODATA
            | libc::EILSEQ
            | libc::ENOMEDIUM
            | libc::ETIMEDOUT
            | libc::ENOLINK
            | libc::EBADE
            | libc::ESTALE
    )
}

#[cfg(test)]
mod tests {
    use crate::open::*;

    #[test]
    fn a_device_that_another_initiator_has_reserved_is_awaited() {
        let refused = failed("cannot read /a", &io::Error::from_raw_os_error(libc::EBADE));
        assert!(refused.may_pass && refused.sentence.contains("has reserved"), "{refused}");
    }

    #[test]
    fn what_a_unit_denies_is_told_with_what_helps_there() {
        let told = |errno| failed("cannot open /a", &io::Error::from_raw_os_error(errno)).sentence;
        for (errno, remedy) in [
            (libc::EPERM, "DeviceAllow="),
            (libc::EROFS, "ReadWritePaths="),
            (libc::EACCES, "the user of nvmfd"),
        ] {
            let sentence = told(errno);
            // Hosts may have mounted what is on it, and are not to find it read-only.
            assert!(sentence.contains(remedy) && !sentence.contains("read_only"), "{sentence}");
        }
    }
}
