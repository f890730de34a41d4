//! Properties of the medium below a backing store: its power-fail write unit, and whether its
//! contents survive a restart of the machine. Determined when a store is opened, and by `nvmfd
//! check`.
//!
//! An NVMe controller guarantees that at least one block is written atomically at a power failure
//! (AWUPF is 0's based, so that is the minimum). This holds only if the power-fail write unit of
//! the device below is as large.
//!
//! Sources: `Documentation/ABI/stable/sysfs-block`; proc(5), mountinfo;
//! `include/uapi/linux/magic.h`.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use nix::sys::stat::major;
use nix::sys::statfs::fstatfs;

use super::file_system::{BTRFS, TMPFS, file_system};
use super::sysfs::Device;

/// `f_type` of statfs(2).
const ZFS: u32 = 0x2fc1_2fc1;
const BCACHEFS: u32 = 0xca45_1a4e;
const RAMFS: u32 = 0x8584_58f6;
const HUGETLBFS: u32 = 0x9584_58f6;

/// Maximum depth of loop devices over files on loop devices.
const DEEPEST: u32 = 8;

/// Maximum number of namespaces in one sentence.
const MOST_NAMED: usize = 4;

/// Properties of what is below a file or block device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Below {
    /// Power-fail write unit; none: unknown.
    pub power_fail_atomic_bytes: Option<u32>,
    /// Why flushed data may not survive a restart of the machine or a power failure, if so: the
    /// text after the name of the store.
    pub volatile: Option<String>,
}

impl Below {
    /// Properties of an open file, directory or block device. May block on the device.
    pub fn of(file: &File) -> Below {
        below(file, DEEPEST)
    }
}

/// Whether a file is on tmpfs: its pages are in memory and have no device below.
pub(super) fn is_on_tmpfs(file: &File) -> bool {
    file_system(file) == Some(TMPFS)
}

/// A namespace whose blocks may be torn at a power failure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Torn {
    /// Name of the namespace, for output.
    pub place: String,
    block_bytes: u32,
    whole_bytes: u32,
}

impl Torn {
    /// Returns a value if its blocks are larger than the power-fail write unit.
    pub fn of(place: String, block_bytes: u32, whole_bytes: Option<u32>) -> Option<Torn> {
        let whole_bytes = whole_bytes.filter(|bytes| *bytes < block_bytes)?;
        Some(Torn { place, block_bytes, whole_bytes })
    }

    /// One sentence about all of them, if there are any.
    pub fn sentence(all: &[Torn]) -> Option<String> {
        let (most, more) = all.split_at(all.len().min(MOST_NAMED));
        let named = most.iter().map(|torn| {
            let Torn { place, block_bytes, whole_bytes } = torn;
            format!("{place} ({whole_bytes} of {block_bytes} bytes)")
        });
        let mut named = named.collect::<Vec<_>>().join(", ");
        if !more.is_empty() {
            named += &format!(" and {} more", more.len());
        }
        (!all.is_empty()).then(|| {
            format!(
                "a block that is being written when the power fails may be left half old and half \
                 new, although NVMe promises hosts a whole one (AWUPF), because device or file \
                 system write less of it whole: {named}. For programs that rely on whole blocks \
                 (databases without double writes) use block_size = 512, or sectors and file system \
                 blocks as large as the blocks"
            )
        })
    }
}

fn below(file: &File, deep: u32) -> Below {
    let Ok(meta) = file.metadata() else { return Below::default() };
    if meta.file_type().is_block_device() {
        return of_device(&Device::of(meta.rdev()), deep);
    }
    let Ok(system) = fstatfs(file) else { return Below::default() };
    let block_bytes = u32::try_from(system.block_size()).ok();
    let kind = system.filesystem_type().0 as u32;
    // Numbers without a major number belong to file systems, not to devices.
    let device = (major(meta.dev()) != 0).then(|| of_device(&Device::of(meta.dev()), deep));
    on_file_system(kind, block_bytes, &options(file).unwrap_or_default(), device)
}

/// Properties of a file on a file system with this block size and these options, on this device.
fn on_file_system(
    kind: u32,
    block_bytes: Option<u32>,
    options: &str,
    device: Option<Below>,
) -> Below {
    let has = |option: &str| options.split(',').any(|each| each == option);
    let volatile = match kind {
        TMPFS | RAMFS | HUGETLBFS => {
            Some("is in memory (tmpfs or the like): its data end with the machine".to_owned())
        }
        // Newer kernels show the first option as the second.
        _ if has("volatile") || options.split(',').any(|each| each.ends_with("sync=volatile")) => Some(
            "is on an overlay that is mounted with `volatile`: what is flushed is not written to \
             any device"
                .to_owned(),
        ),
        _ => ["nobarrier", "barrier=0"].into_iter().find(|option| has(option)).map(|option| {
            format!(
                "is on a file system that is mounted with `{option}`: a flush does not reach the \
                 device, and what that has in its cache is lost with the power"
            )
        }),
    };
    let power_fail_atomic_bytes = match (kind, &device) {
        // Copy on write: a block is written to a new place and then referred to.
        (BTRFS | ZFS | BCACHEFS, _) => block_bytes,
        (_, Some(device)) => smaller(block_bytes, device.power_fail_atomic_bytes),
        (_, None) => None,
    };
    let volatile = volatile.or_else(|| device.and_then(|device| device.volatile));
    Below { power_fail_atomic_bytes, volatile }
}

/// Properties of a device and of all its components.
fn of_device(device: &Device, deep: u32) -> Below {
    let volatile = device.is_memory().then(|| {
        "is on a device that is memory (ramdisk, zram): its data end with the machine".to_owned()
    });
    let own = Below { power_fail_atomic_bytes: device.power_fail_atomic_bytes(), volatile };
    let Some(deep) = deep.checked_sub(1) else { return own };
    let image = device.image().and_then(|path| File::open(path).ok());
    let image = image.map(|file| below(&file, deep));
    let parts = device.parts();
    let all = parts.iter().map(|part| of_device(part, deep)).chain(image);
    all.fold(own, |all, part| Below {
        // A property that one component does not report is unknown for the whole.
        power_fail_atomic_bytes: (all.power_fail_atomic_bytes)
            .and_then(|_| smaller(all.power_fail_atomic_bytes, part.power_fail_atomic_bytes)),
        volatile: all.volatile.or(part.volatile),
    })
}

/// The smaller one of the known values.
fn smaller(one: Option<u32>, other: Option<u32>) -> Option<u32> {
    Some(one?.min(other?))
}

/// Options of the mount through which a file was opened, and of its file system: `36 35 98:0 /root
/// /mount rw,noatime shared:1 - ext4 /dev/sda rw,nobarrier`.
fn options(file: &File) -> Option<String> {
    // The device number of a file on an overlay does not identify the mount; its descriptor does.
    let info = Path::new("/proc/self/fdinfo").join(file.as_raw_fd().to_string());
    let info = fs::read_to_string(info).ok()?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim();
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let line = mounts.lines().find(|line| line.split(' ').next() == Some(id))?;
    Some(line.split_once(" - ")?.1.split(' ').nth(2)?.to_owned())
}

#[cfg(test)]
mod tests {
    use crate::media_properties::*;

    const EXT4: u32 = 0xef53;

    fn device(bytes: u32) -> Option<Below> {
        Some(Below { power_fail_atomic_bytes: Some(bytes), volatile: None })
    }

    #[test]
    fn atomic_write_size_is_the_minimum_of_file_system_and_device() {
        let whole = |kind, block_bytes, device| {
            on_file_system(kind, Some(block_bytes), "rw", device).power_fail_atomic_bytes
        };
        assert_eq!(whole(EXT4, 4096, device(4096)), Some(4096));
        assert_eq!(whole(EXT4, 1024, device(4096)), Some(1024));
        assert_eq!(whole(EXT4, 4096, device(512)), Some(512));
        assert_eq!(whole(EXT4, 4096, Some(Below::default())), None, "it does not say");
        assert_eq!(whole(BTRFS, 4096, None), Some(4096), "copied on write");
        assert_eq!(whole(0x6969, 1 << 20, None), None, "a server has it");
    }

    #[test]
    fn a_single_message_lists_namespaces_whose_blocks_may_be_torn() {
        let torn = |whole| Torn::of("namespace 1".to_owned(), 4096, whole);
        assert_eq!([torn(None), torn(Some(4096)), torn(Some(8192))], [const { None }; 3]);
        let torn = torn(Some(512)).unwrap();
        assert_eq!(Torn::sentence(&[]), None);
        let one = Torn::sentence(std::slice::from_ref(&torn)).unwrap();
        assert!(one.contains(": namespace 1 (512 of 4096 bytes). For"), "{one}");
        let many = Torn::sentence(&vec![torn; MOST_NAMED + 3]).unwrap();
        assert!(many.contains(" and 3 more. For"), "{many}");
    }

    #[test]
    fn volatile_file_systems_are_detected_by_type_and_mount_options() {
        let says =
            |kind, options: &str, device| on_file_system(kind, None, options, device).volatile;
        let overlay = 0x794c_7630;
        assert!(says(TMPFS, "rw", None).unwrap().contains("in memory"));
        assert!(says(RAMFS, "rw", None).unwrap().contains("in memory"));
        assert_eq!(says(overlay, "rw,lowerdir=/volatile,upperdir=/b", None), None);
        for volatile in ["rw,upperdir=/b,volatile", "rw,uuid=on,fsync=volatile"] {
            assert!(says(overlay, volatile, None).unwrap().contains("`volatile`"), "{volatile}");
        }
        assert_eq!(says(EXT4, "rw,errors=continue", device(512)), None);
        assert!(says(EXT4, "rw,nobarrier", device(512)).unwrap().contains("`nobarrier`"));
        assert!(says(EXT4, "rw,barrier=0", device(512)).unwrap().contains("`barrier=0`"));
        let zram = Below { volatile: Some("zram".to_owned()), ..Below::default() };
        assert_eq!(says(EXT4, "rw", Some(zram)), Some("zram".to_owned()));
    }

    #[test]
    fn files_in_memory_and_on_a_block_device_are_distinguished() {
        use nix::sys::memfd::{MFdFlags, memfd_create};
        let memory = File::from(memfd_create("below", MFdFlags::MFD_CLOEXEC).unwrap());
        let found = Below::of(&memory);
        assert!(found.volatile.unwrap().contains("in memory"));
        assert_eq!(found.power_fail_atomic_bytes, None);
        let directory = crate::testing::directory();
        let file = File::create(directory.path().join("a")).unwrap();
        assert!(options(&file).unwrap().split(',').any(|option| option == "rw"));
        assert_eq!(Below::of(&file), Below::of(&File::open(directory.path()).unwrap()));
    }

    /// A stripe over a partition of a device with large sectors and one with small ones.
    #[test]
    fn a_stacked_device_is_as_atomic_and_durable_as_its_weakest_part() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let disk = |name: &str, bytes: &str| {
            fs::create_dir_all(at(name).join("queue")).unwrap();
            fs::write(at(name).join("queue/physical_block_size"), bytes).unwrap();
            fs::write(at(name).join("queue/logical_block_size"), "512\n").unwrap();
        };
        disk("sda", "4096\n");
        disk("sdb", "512\n");
        disk("dm-0", "4096\n");
        fs::create_dir(at("sda/sda1")).unwrap();
        fs::write(at("sda/sda1/partition"), "1\n").unwrap();
        fs::create_dir(at("dm-0/slaves")).unwrap();
        let add = |name: &str| {
            let link = at("dm-0/slaves").join(Path::new(name).file_name().unwrap());
            std::os::unix::fs::symlink(at(name), link).unwrap();
            of_device(&Device::at(&at("dm-0")), DEEPEST)
        };
        let is_whole = |bytes| Below { power_fail_atomic_bytes: Some(bytes), volatile: None };
        assert_eq!(add("sda/sda1"), is_whole(4096));
        assert_eq!(add("sdb"), is_whole(512));
        // A partition that begins within a sector.
        fs::remove_file(at("dm-0/slaves/sdb")).unwrap();
        fs::write(at("sda/sda1/alignment_offset"), "3584\n").unwrap();
        assert_eq!(of_device(&Device::at(&at("dm-0")), DEEPEST), is_whole(512));
        disk("zram0", "4096\n");
        assert!(add("zram0").volatile.unwrap().contains("memory"));
    }

    #[test]
    fn a_loop_device_has_the_properties_of_its_file() {
        let directory = crate::testing::directory();
        let at = directory.path().join("loop0");
        fs::create_dir_all(at.join("queue")).unwrap();
        fs::create_dir(at.join("loop")).unwrap();
        fs::write(at.join("queue/physical_block_size"), "4096\n").unwrap();
        fs::write(at.join("loop/backing_file"), "/proc/version\n").unwrap();
        let found = of_device(&Device::at(&at), DEEPEST);
        assert_eq!(found.power_fail_atomic_bytes, None, "nobody knows what procfs writes whole");
        fs::write(at.join("loop/backing_file"), "/gone\n").unwrap();
        let found = of_device(&Device::at(&at), DEEPEST);
        assert_eq!(found.power_fail_atomic_bytes, Some(4096), "what the device says itself");
    }
}
