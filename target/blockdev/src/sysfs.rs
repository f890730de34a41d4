//! Properties of a block device from sysfs (`/sys/dev/block`).

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

/// Files with a permanent identity, in the directory of a block device: for NVMe namespaces, SCSI
/// disks, device mapper, MD arrays, virtio disks and memory cards.
const NAMES: [&str; 6] = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "serial", "device/cid"];

/// The directory of a block device.
pub(super) struct Device(PathBuf);

impl Device {
    pub(super) fn of(rdev: u64) -> Device {
        Device(format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev)).into())
    }

    /// An attribute of its queue.
    pub(super) fn text(&self, limit: &str) -> Option<String> {
        read(&self.disk().join("queue").join(limit))
    }

    /// An attribute of its queue as a number; 0 if it is not a number.
    pub(super) fn number(&self, limit: &str) -> u32 {
        self.text(limit).and_then(|text| text.parse().ok()).unwrap_or(0)
    }

    /// Its unique identity, if its kind has one.
    pub(super) fn identity(&self) -> Option<String> {
        let disk = self.disk();
        let name = NAMES.iter().find_map(|name| read(&disk.join(name)))?;
        Some(match read(&self.0.join("partition")) {
            Some(number) => format!("{name}, partition {number}"),
            None => name,
        })
    }

    /// Its power-fail write unit, for blocks at multiples of their size; none: unknown. Its
    /// components may have a smaller one.
    pub(super) fn power_fail_atomic_bytes(&self) -> Option<u32> {
        let known = |limit: &str| Some(self.number(limit)).filter(|bytes| *bytes > 0);
        let own = |name: &str| read(&self.0.join(name)).unwrap_or_default();
        // Its blocks begin within a sector of the device.
        if !matches!(&*own("alignment_offset"), "" | "0") {
            return known("logical_block_size");
        }
        let physical = known("physical_block_size")?;
        // For NVMe the kernel reports AWUPF here, which applies to every write. (For SCSI it
        // reports a limit of a command of its own, which is not used here.)
        let start_bytes = own("start").parse::<u64>().unwrap_or(0) * 512;
        let unit = known("atomic_write_unit_max_bytes").filter(|unit| {
            self.kernel_name().starts_with("nvme") && start_bytes.is_multiple_of((*unit).into())
        });
        Some(unit.map_or(physical, |unit| unit.max(physical)))
    }

    /// Whether it is memory: `brd`, `zram`, `null_blk`.
    pub(super) fn is_memory(&self) -> bool {
        let name = self.kernel_name();
        let prefixes = ["ram", "zram", "nullb"];
        prefixes.iter().any(|prefix| {
            let number = name.strip_prefix(prefix).unwrap_or_default();
            number.starts_with(|letter: char| letter.is_ascii_digit())
        })
    }

    /// The devices that it consists of: device mapper, MD.
    pub(super) fn parts(&self) -> Vec<Device> {
        let slaves = fs::read_dir(self.disk().join("slaves"));
        slaves.into_iter().flatten().flatten().map(|slave| Device(slave.path())).collect()
    }

    /// The file behind a loop device.
    pub(super) fn image(&self) -> Option<PathBuf> {
        read(&self.disk().join("loop/backing_file")).map(PathBuf::from)
    }

    fn kernel_name(&self) -> String {
        let path = fs::canonicalize(self.disk()).unwrap_or_default();
        path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned()
    }

    #[cfg(test)]
    pub(super) fn at(directory: &Path) -> Device {
        Device(directory.to_owned())
    }

    /// The whole disk. A partition has no queue of its own; the directory of its disk is one level
    /// up.
    fn disk(&self) -> PathBuf {
        if self.0.join("queue").is_dir() { self.0.clone() } else { self.0.join("..") }
    }
}

/// Content of a file, if it can be read.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?.trim().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use crate::sysfs::*;

    /// The layout of the kernel: the directory of a partition is inside that of its disk.
    #[test]
    fn block_devices_and_partitions_are_identified_by_their_wwid() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("sda");
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
        // Its blocks are written as the disk writes them, except where they begin within a sector
        // of it.
        fs::write(disk.join("queue/physical_block_size"), "4096\n").unwrap();
        fs::write(disk.join("queue/logical_block_size"), "512\n").unwrap();
        let atomic = || [&whole, &part].map(|device| device.power_fail_atomic_bytes());
        assert_eq!(atomic(), [Some(4096); 2]);
        fs::write(disk.join("sda2/alignment_offset"), "3072\n").unwrap();
        assert_eq!(atomic(), [Some(4096), Some(512)]);
        assert_eq!((part.number("nothing"), part.text("nothing")), (0, None));
    }

    #[test]
    fn nvme_atomic_write_size_requires_an_aligned_partition() {
        let directory = tempfile::tempdir().unwrap();
        for (name, bytes) in [("nvme0n1", [16384, 512]), ("sda", [512, 512])] {
            let disk = directory.path().join(name);
            fs::create_dir_all(disk.join("queue")).unwrap();
            fs::create_dir(disk.join("p1")).unwrap();
            fs::write(disk.join("p1/start"), "63\n").unwrap();
            fs::write(disk.join("queue/physical_block_size"), "512\n").unwrap();
            fs::write(disk.join("queue/atomic_write_unit_max_bytes"), "16384\n").unwrap();
            let devices = [Device(disk.clone()), Device(disk.join("p1"))];
            assert_eq!(devices.map(|device| device.power_fail_atomic_bytes()), bytes.map(Some));
        }
    }

    #[test]
    fn memory_devices_are_recognized_by_name() {
        let directory = tempfile::tempdir().unwrap();
        for (name, is_memory) in
            [("ram0", true), ("zram12", true), ("nullb0", true), ("sda", false), ("ramx", false)]
        {
            let disk = directory.path().join(name);
            fs::create_dir_all(disk.join("queue")).unwrap();
            assert_eq!(Device(disk).is_memory(), is_memory, "{name}");
        }
    }
}
