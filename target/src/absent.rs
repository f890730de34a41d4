//! What the configuration names and the machine does not have yet: addresses, devices, files whose
//! file system is not mounted. Boot brings them late; whoever waits for them must neither give up
//! nor make a file in the place of one that is about to appear.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};

use crate::config::{NamespaceConfig, NamespaceKind};

/// In the state directory: the paths of files that were served, one a line. Such a file is never
/// made again.
const SERVED: &str = "served";

/// Why an address cannot be listened at yet: no interface has it. Wildcards are always there.
pub(crate) fn address(ip: IpAddr) -> Option<String> {
    let bound = UdpSocket::bind((ip, 0));
    let missing = bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable);
    missing.then(|| "no interface of this machine has the address".to_owned())
}

/// Why the store of a namespace is not there yet; nothing where it is, or may be made. `served`:
/// the paths of files that were there once.
pub(crate) fn store(namespace: &NamespaceConfig, served: &BTreeSet<PathBuf>) -> Option<String> {
    let NamespaceKind::File { path, size } = &namespace.kind else { return None };
    let mount = expected(path);
    let shown = path.display();
    let found = fs::metadata(path);
    if let Some(Mount { point, is_automatic }) = mount
        && (found.is_err() || is_automatic)
    {
        return Some(format!("{shown}: {} is not mounted yet", point.display()));
    }
    match found {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
        // It is there; whatever else is wrong with it is told when it is opened.
        _ => return None,
    }
    let folder = path.parent().unwrap_or(path);
    let is_link = fs::symlink_metadata(path).is_ok();
    if is_link || path.starts_with("/dev") {
        return Some(format!("{shown} is not there yet"));
    }
    if !fs::metadata(folder).is_ok_and(|found| found.is_dir()) {
        return Some(format!("{shown}: there is no folder {} yet", folder.display()));
    }
    if namespace.read_only {
        return Some(format!("{shown} is not there yet"));
    }
    if size.is_none() {
        return Some(format!("{shown} is not there yet, and is not made without a `size`"));
    }
    served.contains(path).then(|| {
        format!(
            "{shown} was served before and is not there; it is not made anew: bring it back, or \
             make an empty one (truncate -s SIZE {shown})"
        )
    })
}

/// Why a folder of files that the daemon makes is not there yet: it, or its file system, is missing.
pub(crate) fn folder(path: &Path) -> Option<String> {
    let shown = path.display();
    let is_missing = !fs::metadata(path).is_ok_and(|found| found.is_dir());
    match expected(path) {
        Some(Mount { point, is_automatic }) if is_missing || is_automatic => {
            Some(format!("{shown}: {} is not mounted yet", point.display()))
        }
        _ => is_missing.then(|| format!("there is no folder {shown} yet")),
    }
}

/// The file system of a path that should be mounted and is not.
fn expected(path: &Path) -> Option<Mount> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    unmounted(path, &read("/etc/fstab"), &read("/proc/self/mountinfo"))
}

/// The files that were served before, as a state directory has them.
pub(crate) fn served(folder: Option<&Path>) -> BTreeSet<PathBuf> {
    let text = folder.and_then(|folder| fs::read_to_string(folder.join(SERVED)).ok());
    text.iter().flat_map(|text| text.lines()).map(PathBuf::from).collect()
}

/// Remembers which files are served. A path that is no text is not remembered.
///
/// # Errors
/// What the system says.
pub(crate) fn remember(folder: &Path, paths: &BTreeSet<PathBuf>) -> std::io::Result<()> {
    if served(Some(folder)) == *paths {
        return Ok(());
    }
    let lines = paths.iter().filter_map(|path| path.to_str()).filter(|text| !text.contains('\n'));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    crate::kept::write(folder, SERVED, text.as_bytes())
}

/// A file system that should be mounted.
#[derive(PartialEq, Eq, Debug)]
struct Mount {
    point: PathBuf,
    /// At boot, without anybody asking.
    is_automatic: bool,
}

/// The file system of `fstab` that a path belongs to, if that is not mounted.
fn unmounted(path: &Path, fstab: &str, mountinfo: &str) -> Option<Mount> {
    let entries = fstab.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let mounts = entries.filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, point, _, options, ..] = fields[..] else { return None };
        let is_automatic = !options.split(',').any(|option| option == "noauto");
        let point = PathBuf::from(unescaped(point));
        (point.is_absolute() && path.starts_with(&point)).then_some(Mount { point, is_automatic })
    });
    let mount = mounts.max_by_key(|mount| mount.point.components().count())?;
    let mounted = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescaped);
    let is_mounted = { mounted }.any(|point| Path::new(&point) == mount.point);
    (!is_mounted && mount.point != Path::new("/")).then_some(mount)
}

/// What fstab and mountinfo write as three octal digits.
fn unescaped(text: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::tempdir;

    fn namespace(path: &Path, size: Option<u64>) -> NamespaceConfig {
        let text = "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
                    \"nqn.2026-11.io.nvmfd:d\"\n[[subsystem.namespace]]\nnsid = 1\nkind = \
                    \"null\"\nsize = \"1MiB\"\n";
        let mut config = crate::config::Config::parse(text).unwrap();
        let mut namespace = config.subsystems.remove(0).namespaces.remove(0);
        namespace.kind = NamespaceKind::File { path: path.to_owned(), size };
        namespace
    }

    #[test]
    fn only_what_may_be_made_is_not_awaited() {
        let folder = tempdir().unwrap();
        let (path, none) = (folder.path().join("disk.img"), BTreeSet::new());
        let why = |path: &Path, size| store(&namespace(path, size), &none);
        assert_eq!(why(&path, Some(4096)), None, "it will be made");
        assert!(why(&path, None).unwrap().contains("not there yet, and is not made without"));
        assert!(why(&path.join("no/disk.img"), Some(4096)).unwrap().contains("no folder"));
        let device = Path::new("/dev/nvmfd-no-such-device");
        assert!(why(device, Some(4096)).unwrap().contains("not there yet"));
        let read_only = NamespaceConfig { read_only: true, ..namespace(&path, Some(4096)) };
        assert!(store(&read_only, &none).is_some());
        let served = BTreeSet::from([path.clone()]);
        assert!(store(&namespace(&path, Some(4096)), &served).unwrap().contains("truncate"));
        std::os::unix::fs::symlink("nowhere", folder.path().join("link")).unwrap();
        assert!(why(&folder.path().join("link"), Some(4096)).is_some());
        fs::write(&path, [0; 4096]).unwrap();
        for size in [None, Some(4096)] {
            assert_eq!(store(&namespace(&path, size), &served), None, "it is there");
        }
    }

    #[test]
    fn a_file_system_that_is_not_mounted_is_known_from_fstab() {
        let fstab = "# comment\nUUID=1 / ext4 defaults 0 1\nUUID=2 /srv/my\\040disks xfs defaults \
                     0 2\nUUID=3 /srv ext4 noauto,ro 0 2\nUUID=4 none swap sw 0 0\n";
        let info = |points: &[&str]| -> String {
            let line = |point| format!("36 35 98:0 / {point} rw shared:1 - ext4 /dev/sda rw\n");
            points.iter().map(line).collect()
        };
        let why = |path: &str, points: &[&str]| unmounted(Path::new(path), fstab, &info(points));
        assert_eq!(why("/var/lib/a.img", &["/"]), None);
        let mount = |point: &str, is_automatic| Mount { point: point.into(), is_automatic };
        let deep = "/srv/my disks/a.img";
        assert_eq!(why(deep, &["/", "/srv"]), Some(mount("/srv/my disks", true)));
        assert_eq!(why(deep, &["/", "/srv/my\\040disks"]), None);
        assert_eq!(why("/srv/b.img", &["/"]), Some(mount("/srv", false)));
        assert_eq!(why("/srvb/b.img", &["/"]), None);
    }

    #[test]
    fn addresses_are_there_or_not() {
        assert_eq!(address([127, 0, 0, 1].into()), None);
        assert_eq!(address([0, 0, 0, 0].into()), None);
        // Of the range for documentation: nobody has it.
        assert!(address([192, 0, 2, 77].into()).is_some());
    }

    #[test]
    fn what_was_served_is_remembered() {
        let folder = tempdir().unwrap();
        assert_eq!(served(Some(folder.path())), BTreeSet::new());
        assert_eq!(served(None), BTreeSet::new());
        let paths = BTreeSet::from([PathBuf::from("/a b"), PathBuf::from("/c")]);
        remember(folder.path(), &paths).unwrap();
        assert_eq!(served(Some(folder.path())), paths);
        remember(folder.path(), &BTreeSet::new()).unwrap();
        assert_eq!(served(Some(folder.path())), BTreeSet::new());
    }
}
