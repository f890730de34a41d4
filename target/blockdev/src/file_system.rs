//! The type of a file system: `f_type` of statfs(2), in `include/uapi/linux/magic.h`.

use std::fs::File;

use nix::sys::statfs::fstatfs;

pub(crate) const BTRFS: u32 = 0x9123_683e;
pub(crate) const TMPFS: u32 = 0x0102_1994;

/// The type of the file system of a file, if it is known. May block on the device.
pub(crate) fn file_system(file: &File) -> Option<u32> {
    fstatfs(file).ok().map(|system| system.filesystem_type().0 as u32)
}
