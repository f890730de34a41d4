//! Errors of opening a backing store, as sentences: what was tried, what the system answered, what
//! to do.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use nix::sys::stat::{major, minor};

/// Why a store cannot be served, as one sentence for the administrator: what was tried, what the
/// system answered, what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct OpenError {
    /// The sentence.
    pub sentence: String,
    /// Whether the cause may end without a change of the configuration: a device that reports
    /// errors or is not attached, a lock that is held, another user of a device.
    pub may_pass: bool,
}

impl OpenError {
    /// An error that lasts until somebody corrects its cause.
    pub(super) fn new(sentence: String) -> OpenError {
        OpenError { sentence, may_pass: false }
    }
}

/// An error of open(2). File systems without direct I/O return EINVAL.
pub(super) fn refused(path: &Path, name: &str, dev: u64, error: &io::Error) -> OpenError {
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => OpenError::new(format!(
            "cannot open {name} for direct I/O (O_DIRECT): the {} refuses it: {error}; put the \
             file on ext4, XFS or btrfs, or serve a block device",
            place(path, dev)
        )),
        _ => failed(&format!("cannot open {name}"), error),
    }
}

/// Describes the file system of a path.
pub(super) fn place(path: &Path, dev: u64) -> String {
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

/// The sentence: what was tried, what the system answered, what to do.
pub(super) fn failed(tried: &str, error: &io::Error) -> OpenError {
    let remedy = match error.raw_os_error().unwrap_or(0) {
        libc::EACCES => "give the user of nvmfd the right to it and to the directories above it",
        // For a device, EPERM and EACCES need not be about permissions of its node.
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

/// Whether the cause may end without a change of the configuration: the device has errors, is
/// missing or does not answer, or another process uses it.
fn may_pass(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error().unwrap_or(0),
        libc::EIO
            | libc::ENXIO
            | libc::ENODEV
            | libc::EBUSY
            // Errnos of the block layer for errors of the medium and of its integrity, for failed
            // paths and for a reservation conflict; and a stale file of a server.
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
    use super::*;

    #[test]
    fn a_reservation_of_another_initiator_is_a_temporary_open_error() {
        let refused = failed("cannot read /a", &io::Error::from_raw_os_error(libc::EBADE));
        assert!(refused.may_pass && refused.sentence.contains("has reserved"), "{refused}");
    }

    #[test]
    fn access_denied_by_the_systemd_unit_is_reported_with_a_remedy() {
        let told = |errno| failed("cannot open /a", &io::Error::from_raw_os_error(errno)).sentence;
        for (errno, remedy) in [
            (libc::EPERM, "DeviceAllow="),
            (libc::EROFS, "ReadWritePaths="),
            (libc::EACCES, "the user of nvmfd"),
        ] {
            let sentence = told(errno);
            // Hosts may have mounted its contents, and must not find it read-only.
            assert!(sentence.contains(remedy) && !sentence.contains("read_only"), "{sentence}");
        }
    }
}
