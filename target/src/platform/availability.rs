//! Configured addresses, devices and files that are unavailable on this machine. Boot brings them
//! late; whoever waits for them must neither give up nor make a file in the place of one that is
//! about to appear.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::mounts::{Mount, unmounted};
use crate::config::{NamespaceConfig, NamespaceKind};
use crate::state::atomic_file::Prepared;
use crate::state::ns_catalog::RECORD;
use crate::state::record::{Record, StateDir};

/// In the state directory: the paths of files that were served, one a line. Such a file is never
/// made again.
const SERVED: &str = "served";

/// The files that were served once, as far as that is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// These, and no other ones.
    Known(BTreeSet<PathBuf>),
    /// Nobody knows, for this reason: each of them may have been.
    Unknown(String),
}

impl Served {
    /// As a state directory has them. Without one nothing is remembered.
    pub(crate) fn load(folder: Option<&Path>) -> Served {
        match folder.map_or(Ok(None), |folder| StateDir(folder).load(SERVED)) {
            Ok(list) => Served::Known(list.map_or_else(BTreeSet::new, |Paths(paths)| paths)),
            Err(why) => Served::Unknown(why),
        }
    }

    /// None was.
    pub(crate) fn none() -> Served {
        Served::Known(BTreeSet::new())
    }

    /// These were as well.
    pub(crate) fn with<'p>(mut self, more: impl Iterator<Item = &'p Path>) -> Served {
        if let Served::Known(paths) = &mut self {
            paths.extend(more.map(Path::to_owned));
        }
        self
    }

    /// What is known of this one file.
    pub(crate) fn of(&self, path: &Path) -> Served {
        match self {
            Served::Known(paths) => Served::Known(paths.get(path).cloned().into_iter().collect()),
            Served::Unknown(why) => Served::Unknown(why.clone()),
        }
    }

    /// Whether it was, or may have been.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        match self {
            Served::Known(paths) => paths.contains(path),
            Served::Unknown(_) => true,
        }
    }

    /// Has it kept from now on: synchronised beside its name, which [`Prepared::persist`] gives it;
    /// nothing where it is kept already.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn prepare(
        folder: &Path,
        paths: &BTreeSet<PathBuf>,
    ) -> std::io::Result<Option<Prepared>> {
        if matches!(Served::load(Some(folder)), Served::Known(kept) if kept == *paths) {
            return Ok(None);
        }
        StateDir(folder).prepare(SERVED, &Paths(paths.clone())).map(Some)
    }
}

/// The list of them.
struct Paths(BTreeSet<PathBuf>);

impl Record for Paths {
    const KIND: &'static str = "served";
    const REMEDY: &'static str = "remove it if every file that was served is there";

    fn emit(&self) -> String {
        self.0.iter().map(|path| escaped(path) + "\n").collect()
    }

    fn parse(body: &str) -> Option<Paths> {
        body.lines().map(unescaped).collect::<Option<_>>().map(Paths)
    }
}

/// Any path as a line of text: whatever is not plain is `%` and two hexadecimal digits.
fn escaped(path: &Path) -> String {
    let plain = |byte: u8| (byte.is_ascii_graphic() && byte != b'%') || byte == b' ';
    let bytes = path.as_os_str().as_bytes().iter();
    bytes.fold(String::new(), |mut text, byte| {
        match plain(*byte) {
            true => text.push(char::from(*byte)),
            // Writing to a string does not fail.
            false => drop(write!(text, "%{byte:02X}")),
        }
        text
    })
}

fn unescaped(line: &str) -> Option<PathBuf> {
    let mut parts = line.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend(&part.as_bytes()[2..]);
    }
    Some(OsString::from_vec(bytes).into())
}

/// Why an address cannot be listened at yet: no interface has it. Wildcards are always there.
pub(crate) fn address(ip: IpAddr) -> Option<String> {
    let bound = UdpSocket::bind((ip, 0));
    let missing = bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable);
    missing.then(|| "no interface of this machine has the address".to_owned())
}

/// Why the store of a namespace is not there yet; nothing where it is, or may be made.
pub(crate) fn store(namespace: &NamespaceConfig, served: &Served) -> Option<String> {
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
    let was = match served {
        Served::Known(paths) if !paths.contains(path) => return None,
        Served::Known(_) => "was served before".to_owned(),
        Served::Unknown(why) => format!("may have been served before ({why})"),
    };
    Some(format!(
        "{shown} {was} and is not there; it is not made anew: bring it back, or make an empty one \
         (truncate -s SIZE {shown})"
    ))
}

/// Why the folder of the namespaces that hosts make is not there yet: it, or its file system, is
/// missing. Of one that is mounted by hand only the record tells that it may be used as it is.
pub(crate) fn folder(path: &Path) -> Option<String> {
    folder_below(path, expected(path))
}

fn folder_below(path: &Path, unmounted: Option<Mount>) -> Option<String> {
    let shown = path.display();
    let is_missing = !fs::metadata(path).is_ok_and(|found| found.is_dir());
    match unmounted {
        Some(Mount { point, is_automatic })
            if is_missing || is_automatic || !path.join(RECORD).exists() =>
        {
            Some(format!("{shown}: {} is not mounted yet", point.display()))
        }
        _ => is_missing.then(|| format!("there is no folder {shown} yet")),
    }
}

/// The file system of a path that should be mounted and is not. Links on the way may lead into
/// another one.
fn expected(path: &Path) -> Option<Mount> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (fstab, mountinfo) = (read("/etc/fstab"), read("/proc/self/mountinfo"));
    let unmounted = |path: &Path| unmounted(path, &fstab, &mountinfo);
    unmounted(path).or_else(|| unmounted(&real(path)?))
}

/// Where a path leads, through all links; its last part may be missing.
fn real(path: &Path) -> Option<PathBuf> {
    let in_folder = || Some(fs::canonicalize(path.parent()?).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(in_folder)
}

#[cfg(test)]
mod tests {
    use crate::platform::availability::*;
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
        let (path, none) = (folder.path().join("disk.img"), Served::none());
        let why = |path: &Path, size| store(&namespace(path, size), &none);
        assert_eq!(why(&path, Some(4096)), None, "it will be made");
        assert!(why(&path, None).unwrap().contains("not there yet, and is not made without"));
        assert!(why(&path.join("no/disk.img"), Some(4096)).unwrap().contains("no folder"));
        let device = Path::new("/dev/nvmfd-no-such-device");
        assert!(why(device, Some(4096)).unwrap().contains("not there yet"));
        let read_only = NamespaceConfig { read_only: true, ..namespace(&path, Some(4096)) };
        assert!(store(&read_only, &none).is_some());
        let served = Served::Known(BTreeSet::from([path.clone()]));
        assert!(store(&namespace(&path, Some(4096)), &served).unwrap().contains("truncate"));
        std::os::unix::fs::symlink("nowhere", folder.path().join("link")).unwrap();
        assert!(why(&folder.path().join("link"), Some(4096)).is_some());
        fs::write(&path, [0; 4096]).unwrap();
        for size in [None, Some(4096)] {
            assert_eq!(store(&namespace(&path, size), &served), None, "it is there");
        }
    }

    #[test]
    fn a_folder_without_its_file_system_is_used_only_as_it_was() {
        let folder = tempdir().unwrap();
        let path = folder.path();
        let below =
            |is_automatic| folder_below(path, Some(Mount { point: "/srv".into(), is_automatic }));
        assert_eq!(folder_below(path, None), None);
        for is_automatic in [true, false] {
            assert!(below(is_automatic).unwrap().contains("/srv is not mounted yet"));
        }
        fs::write(path.join(RECORD), "").unwrap();
        assert!(below(true).is_some());
        assert_eq!(below(false), None);
        let gone = folder_below(&path.join("gone"), None).unwrap();
        assert!(gone.contains("there is no folder"), "{gone}");
    }

    #[test]
    fn links_are_followed_to_what_may_be_missing() {
        let folder = tempdir().unwrap();
        let path = fs::canonicalize(folder.path()).unwrap();
        fs::create_dir(path.join("disks")).unwrap();
        std::os::unix::fs::symlink("disks", path.join("link")).unwrap();
        assert_eq!(real(&path.join("link/a.img")), Some(path.join("disks/a.img")));
        assert_eq!(real(&path.join("link")), Some(path.join("disks")));
        assert_eq!(real(&path.join("no/a.img")), None);
    }

    #[test]
    fn addresses_are_there_or_not() {
        assert_eq!(address([127, 0, 0, 1].into()), None);
        assert_eq!(address([0, 0, 0, 0].into()), None);
        // Of the range for documentation: nobody has it.
        assert!(address([192, 0, 2, 77].into()).is_some());
    }

    fn remember(folder: &Path, paths: &BTreeSet<PathBuf>) {
        Served::prepare(folder, paths).unwrap().unwrap().persist().unwrap();
    }

    #[test]
    fn what_was_served_is_remembered_whatever_it_is_called() {
        let folder = tempdir().unwrap();
        let load = || Served::load(Some(folder.path()));
        assert_eq!((load(), Served::load(None)), (Served::none(), Served::none()));
        let no_text = OsString::from_vec(vec![b'/', 0xFF, b'\n', b'%']);
        let paths = ["/a b", "/c", "/100%41", "/über"].map(PathBuf::from).into_iter();
        let paths: BTreeSet<PathBuf> = paths.chain([PathBuf::from(no_text)]).collect();
        remember(folder.path(), &paths);
        assert_eq!(load(), Served::Known(paths.clone()));
        assert!(Served::prepare(folder.path(), &paths).unwrap().is_none(), "it is kept already");
        remember(folder.path(), &BTreeSet::new());
        assert_eq!(load(), Served::none());
    }

    /// Or a disk that is not mounted yet would be made anew, empty.
    #[test]
    fn of_a_list_that_cannot_be_read_everything_may_have_been_served() {
        let folder = tempdir().unwrap();
        let (list, path) = (folder.path().join(SERVED), folder.path().join("disk.img"));
        let why = || store(&namespace(&path, Some(4096)), &Served::load(Some(folder.path())));
        assert_eq!(why(), None, "without any it will be made");
        remember(folder.path(), &BTreeSet::from(["/other".into()]));
        assert_eq!(why(), None, "nor is it in this one");
        let good = fs::read(&list).unwrap();
        let damaged = (0..good.len()).flat_map(|at| {
            let mut bad = good.clone();
            bad[at] ^= 1;
            [bad, good[..at].to_vec()]
        });
        // Nor is it one that only lists paths, as an older version wrote it.
        for bad in damaged.chain([b"/other\n".to_vec(), Vec::new()]) {
            fs::write(&list, &bad).unwrap();
            let said = why().unwrap_or_default();
            assert!(said.contains("may have been served before") && said.contains("truncate"));
            assert!(Served::load(Some(folder.path())).contains(&path), "so it stays remembered");
        }
        fs::remove_file(&list).unwrap();
        fs::create_dir(&list).unwrap();
        assert!(why().unwrap().contains("cannot be read"));
        assert!(Served::prepare(folder.path(), &BTreeSet::new()).is_ok(), "it can be made good");
    }
}
