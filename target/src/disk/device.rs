//! What the system tells of a block device (`/sys/dev/block`).

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

/// Files that name a device for good, in the folder of a disk: those of NVMe namespaces, SCSI disks,
/// device mapper, MD arrays, virtio disks and memory cards.
const NAMES: [&str; 6] = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "serial", "device/cid"];

/// A block device's folder.
pub(super) struct Device(PathBuf);

impl Device {
    pub(super) fn of(rdev: u64) -> Device {
        Device(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)).into())
    }

    /// A limit of its queue.
    pub(super) fn text(&self, limit: &str) -> Option<String> {
        read(&self.disk().join("queue").join(limit))
    }

    /// The same as a number, 0 where it is none.
    pub(super) fn number(&self, limit: &str) -> u32 {
        self.text(limit).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// What no other device is called, if its kind has such a name.
    pub(super) fn identity(&self) -> Option<String> {
        let disk = self.disk();
        let name = NAMES.iter().find_map(|name| read(&disk.join(name)))?;
        Some(match read(&self.0.join("partition")) {
            Some(number) => format!("{name}, partition {number}"),
            None => name,
        })
    }

    /// A partition has no queue of its own: it is its disk's, one folder up.
    fn disk(&self) -> PathBuf {
        if self.0.join("queue").is_dir() { self.0.clone() } else { self.0.join("..") }
    }
}

/// What a file says, if anything.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the kernel lays them out: the partition's folder is inside that of its disk.
    #[test]
    fn disks_and_partitions_are_known_by_what_stays_with_them() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("sda");
        fs::create_dir_all(disk.join("queue")).unwrap();
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir(disk.join("sda2")).unwrap();
        fs::write(disk.join("queue/chunk_sectors"), "128\n").unwrap();
        fs::write(disk.join("sda2/partition"), "2\n").unwrap();
        let (whole, part) = (Device(disk.clone()), Device(disk.join("sda2")));
        assert_eq!((whole.identity(), part.identity()), (None, None), "it has no name");
        fs::write(disk.join("serial"), "\n").unwrap();
        assert_eq!(whole.identity(), None, "nor has it now");
        fs::write(disk.join("device/wwid"), "naa.5000c500a1b2c3d4\n").unwrap();
        fs::write(disk.join("serial"), "7\n").unwrap();
        assert_eq!(whole.identity().as_deref(), Some("naa.5000c500a1b2c3d4"));
        assert_eq!(part.identity().as_deref(), Some("naa.5000c500a1b2c3d4, partition 2"));
        assert_eq!((whole.number("chunk_sectors"), part.number("chunk_sectors")), (128, 128));
        assert_eq!((part.number("nothing"), part.text("nothing")), (0, None));
    }
}
