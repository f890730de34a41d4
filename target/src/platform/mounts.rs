//! File systems of `/etc/fstab`, and whether they are mounted.

use std::path::{Path, PathBuf};

/// A file system that should be mounted.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Mount {
    pub(super) point: PathBuf,
    /// It is mounted at boot.
    pub(super) is_automatic: bool,
}

/// The file system of `fstab` that a path belongs to, if it is not mounted.
pub(super) fn unmounted(path: &Path, fstab: &str, mountinfo: &str) -> Option<Mount> {
    let entries = fstab.lines().filter_map(FstabEntry::parse);
    let entry = entries
        .filter(|entry| path.starts_with(&entry.point) && entry.point != Path::new("/"))
        .max_by_key(|entry| entry.point.components().count())?;
    let lines: Vec<MountinfoLine> = mountinfo.lines().filter_map(MountinfoLine::parse).collect();
    let is_automatic = !entry.options.split(',').any(|option| option == "noauto");
    (!entry.is_mounted(&lines)).then_some(Mount { point: entry.point, is_automatic })
}

/// `UUID=1 /point ext4 defaults 0 2`.
struct FstabEntry<'t> {
    source: String,
    point: PathBuf,
    options: &'t str,
}

impl FstabEntry<'_> {
    fn parse(line: &str) -> Option<FstabEntry<'_>> {
        let line = line.trim();
        let mut fields = line.split_whitespace().filter(|_| !line.starts_with('#'));
        let [source, point, _, options] = [(); 4].map(|()| fields.next());
        let (source, point) = (unescaped(source?), unescaped(point?));
        // A directory bound onto itself always exists.
        let is_place = point.starts_with('/') && source != point;
        is_place.then_some(FstabEntry { source, point: point.into(), options: options? })
    }

    /// Whether the mount at its point shows more than the file system around it. A service with
    /// `ReadWritePaths=` has a directory that is not a mount point bound onto itself: then there is
    /// a mount, but the file system is not mounted.
    fn is_mounted(&self, lines: &[MountinfoLine<'_>]) -> bool {
        let Some(mut seen) = visible(&self.point, lines) else {
            // The root itself may not be listed: the list begins below it.
            return lines.iter().any(|line| line.point == self.point);
        };
        for _ in lines {
            if seen.point != self.point {
                return false;
            }
            let around = lines.iter().find(|line| line.id == seen.parent);
            match around.filter(|around| seen.is_place_in(around)) {
                Some(around) if !self.names(seen) => seen = around,
                _ => return true,
            }
        }
        false
    }

    /// Whether this very entry was mounted although its directory is visible without a mount, as
    /// possible for a subvolume of btrfs or an export of NFS within another.
    fn names(&self, line: &MountinfoLine<'_>) -> bool {
        let plain = |option: &str| option.replacen("subvol=/", "subvol=", 1);
        let has = |wanted: &str| line.options.split(',').any(|own| plain(own) == plain(wanted));
        let is_subvolume = |option: &&str| option.starts_with("subvol");
        let mut subvolumes = self.options.split(',').filter(is_subvolume).peekable();
        match subvolumes.peek() {
            Some(_) => subvolumes.all(has),
            None => line.source == self.source,
        }
    }
}

/// A line of mountinfo: `36 35 98:0 /root /point rw shared:1 - ext4 /dev/sda rw,errors=continue`.
struct MountinfoLine<'t> {
    id: &'t str,
    parent: &'t str,
    device: &'t str,
    /// Directory of the file system that is mounted.
    root: PathBuf,
    point: PathBuf,
    source: String,
    /// Options of the file system.
    options: &'t str,
}

impl MountinfoLine<'_> {
    fn parse(line: &str) -> Option<MountinfoLine<'_>> {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ');
        let [id, parent, device, root, point] = [(); 5].map(|()| fields.next());
        let mut system = system.split(' ').skip(1);
        Some(MountinfoLine {
            id: id?,
            parent: parent?,
            device: device?,
            root: unescaped(root?).into(),
            point: unescaped(point?).into(),
            source: unescaped(system.next()?),
            options: system.next()?,
        })
    }

    /// Whether it shows the same directory as the mount around it at its point.
    fn is_place_in(&self, around: &MountinfoLine<'_>) -> bool {
        let below = self.point.strip_prefix(&around.point);
        let is_same = below.is_ok_and(|below| around.root.join(below) == self.root);
        is_same && self.device == around.device && self.id != around.id
    }
}

/// Returns the mount of a path, resolved as by the kernel: from the root on, and at each directory
/// into the mount over it.
fn visible<'l, 't>(path: &Path, lines: &'l [MountinfoLine<'t>]) -> Option<&'l MountinfoLine<'t>> {
    let is_lowest =
        |line: &&MountinfoLine| lines.iter().all(|o| o.id == line.id || o.id != line.parent);
    let mut at = lines.iter().filter(is_lowest).find(|line| line.point == Path::new("/"))?;
    let directories: Vec<&Path> = path.ancestors().collect();
    for directory in directories.into_iter().rev() {
        // Mounts may be stacked, at most all of them.
        for _ in lines {
            let is_over = |line: &&MountinfoLine| line.parent == at.id && line.point == directory;
            match lines.iter().filter(|line| line.id != at.id).find(is_over) {
                Some(over) => at = over,
                None => break,
            }
        }
    }
    Some(at)
}

/// Decodes the three octal digits of fstab and mountinfo.
fn unescaped(text: &str) -> String {
    let escapes =
        [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\")];
    escapes.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use crate::platform::mounts::*;

    /// The mounts of a process with a root file system only.
    const ROOT: &str = "44 43 254:0 / / rw,relatime - ext4 /dev/vda rw,discard\n\
                        46 44 0:21 / /proc rw,relatime - proc proc rw\n";

    fn is_mounted(path: &str, fstab: &str, lines: &str) -> bool {
        unmounted(Path::new(path), fstab, &format!("{ROOT}{lines}")).is_none()
    }

    #[test]
    fn a_file_system_that_is_not_mounted_is_known_from_fstab() {
        let fstab = "# comment\nUUID=1 / ext4 defaults 0 1\nUUID=2 /srv/my\\040disks xfs defaults \
                     0 2\nUUID=3 /srv ext4 noauto,ro 0 2\nUUID=4 none swap sw 0 0\n";
        let srv = "60 44 98:0 / /srv rw shared:1 - ext4 /dev/sda rw\n";
        let both = format!("{srv}61 60 98:1 / /srv/my\\040disks rw - xfs /dev/sdb rw\n");
        let why =
            |path: &str, more: &str| unmounted(Path::new(path), fstab, &format!("{ROOT}{more}"));
        assert_eq!(why("/var/lib/a.img", ""), None);
        let mount = |point: &str, is_automatic| Mount { point: point.into(), is_automatic };
        let deep = "/srv/my disks/a.img";
        assert_eq!(why(deep, srv), Some(mount("/srv/my disks", true)));
        assert_eq!(why(deep, &both), None);
        assert_eq!(why("/srv/b.img", ""), Some(mount("/srv", false)));
        assert_eq!(why("/srvb/b.img", ""), None);
        // Mounted, but then hidden by another mount over the parent directory.
        let hidden = format!("{both}62 60 98:2 / /srv rw - ext4 /dev/sdc rw\n");
        assert_eq!(why(deep, &hidden), Some(mount("/srv/my disks", true)));
        // A process whose root is a plain directory sees only the mounts below it.
        let below = "61 60 98:1 / /srv/my\\040disks rw - xfs /dev/sdb rw\n";
        assert_eq!(unmounted(Path::new(deep), fstab, below), None);
    }

    /// The lines are those of Linux 6.x, of `mount --bind` in mount namespaces that are slaves.
    #[test]
    fn a_directory_that_is_bound_onto_itself_is_not_mounted() {
        let fstab = "UUID=2 /srv/disks ext4 nofail 0 2\n";
        let own = "89 44 254:0 /srv/disks /srv/disks rw,relatime master:2 - ext4 /dev/vda rw\n";
        assert!(!is_mounted("/srv/disks/a.img", fstab, own));
        assert!(!is_mounted("/srv/disks", fstab, own));
        // Twice, and within a directory that is bound onto itself.
        let twice = format!("{own}90 89 254:0 /srv/disks /srv/disks rw - ext4 /dev/vda rw\n");
        assert!(!is_mounted("/srv/disks", fstab, &twice));
        let above = "88 44 254:0 /srv /srv rw,relatime master:2 - ext4 /dev/vda rw\n\
                     89 88 254:0 /srv/disks /srv/disks rw,relatime - ext4 /dev/vda rw\n";
        assert!(!is_mounted("/srv/disks", fstab, above));
        // A late mount is inserted below and above that.
        let late = "89 91 254:0 /srv/disks /srv/disks rw,relatime master:2 - ext4 /dev/vda rw\n\
                    91 44 8:1 / /srv/disks rw,relatime master:3 - ext4 /dev/sda1 rw\n\
                    92 89 8:1 / /srv/disks rw,relatime master:3 - ext4 /dev/sda1 rw\n";
        assert!(is_mounted("/srv/disks/a.img", fstab, late));
        // A file system that was mounted before, and then bound onto itself, is mounted.
        let before = "91 44 8:1 / /srv/disks rw,relatime - ext4 /dev/sda1 rw\n\
                      92 91 8:1 / /srv/disks rw,relatime - ext4 /dev/sda1 rw\n";
        assert!(is_mounted("/srv/disks/a.img", fstab, before));
        // An automount point, which is mounted on access.
        let asked = "91 44 0:40 / /srv/disks rw,relatime - autofs systemd-1 rw,fd=52\n";
        assert!(is_mounted("/srv/disks/a.img", fstab, asked));
    }

    #[test]
    fn a_bind_mount_of_another_directory_counts_as_mounted() {
        // An intended bind mount.
        let fstab = "/data/disks /srv/disks none bind 0 0\n";
        let bound = "89 44 254:0 /data/disks /srv/disks rw,relatime - ext4 /dev/vda rw\n";
        assert!(is_mounted("/srv/disks/a.img", fstab, bound));
        let own = "89 44 254:0 /srv/disks /srv/disks rw,relatime - ext4 /dev/vda rw\n";
        assert!(!is_mounted("/srv/disks/a.img", fstab, own));
        assert!(is_mounted("/srv/disks/a.img", "/srv/disks /srv/disks none bind 0 0\n", own));
        assert!(is_mounted("/srv/disks/a.img", "/srv/disks /srv/disks none bind 0 0\n", ""));
    }

    #[test]
    fn btrfs_subvolumes_and_nested_nfs_exports_count_as_mounted() {
        let other = "UUID=1 /srv/disks btrfs subvol=@disks 0 0\n";
        let at = |root: &str, options: &str| {
            format!("89 44 254:0 {root} /srv/disks rw - btrfs /dev/vda rw,{options}\n")
        };
        let path = "/srv/disks/a.img";
        assert!(is_mounted(path, other, &at("/@disks", "subvolid=257,subvol=/@disks")));
        assert!(!is_mounted(path, other, &at("/srv/disks", "subvolid=5,subvol=/")));
        let natural = at("/srv/disks", "subvolid=258,subvol=/srv/disks");
        for options in ["subvol=srv/disks", "subvol=/srv/disks", "noatime,subvolid=258"] {
            let fstab = format!("UUID=1 /srv/disks btrfs {options} 0 0\n");
            assert!(is_mounted(path, &fstab, &natural), "{options}");
            let plain = at("/srv/disks", "subvolid=5,subvol=/");
            assert!(!is_mounted(path, &fstab, &plain), "{options}");
        }
        let fstab = "nas:/all /nfs nfs defaults 0 0\nnas:/all/disks /nfs/disks nfs nofail 0 0\n";
        let all = "89 44 0:50 / /nfs rw - nfs4 nas:/all rw,vers=4.2\n";
        let disks = format!("{all}90 89 0:50 /disks /nfs/disks rw - nfs4 nas:/all/disks rw\n");
        assert!(is_mounted("/nfs/disks/a.img", fstab, &disks));
        let bound = format!("{all}90 89 0:50 /disks /nfs/disks rw - nfs4 nas:/all rw\n");
        assert!(!is_mounted("/nfs/disks/a.img", fstab, &bound));
    }
}
