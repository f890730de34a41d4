//! Files that were served: such a file is never created anew.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use tracing::warn;

use crate::blockdev::record::Record;
use crate::state::atomic_file::PreparedFile;
use crate::state::record::StateDir;

/// Name in the state directory: the paths of served files, one per line.
const SERVED: &str = "served";

/// Files that were served before, as far as known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Served {
    /// These, and no others.
    Known(BTreeSet<PathBuf>),
    /// Unknown, for this reason: each file may have been served.
    Unknown(String),
}

impl Served {
    /// Loads the list of a state directory. Without a directory nothing is known.
    pub(crate) fn load(directory: Option<&Path>) -> Served {
        match directory.map_or(Ok(None), |directory| StateDir(directory).load(SERVED)) {
            Ok(list) => Served::Known(list.map_or_else(BTreeSet::new, |Paths(paths)| paths)),
            Err(why) => Served::Unknown(why),
        }
    }

    /// No file was served.
    pub(crate) fn none() -> Served {
        Served::Known(BTreeSet::new())
    }

    /// Adds files.
    pub(crate) fn with<'p>(mut self, more: impl Iterator<Item = &'p Path>) -> Served {
        if let Served::Known(paths) = &mut self {
            paths.extend(more.map(Path::to_owned));
        }
        self
    }

    /// States that this file was served, or may have been, as the end of a sentence.
    pub(crate) fn before(&self, path: &Path) -> Option<String> {
        match self {
            Served::Known(paths) => paths.contains(path).then(|| "was served before".to_owned()),
            Served::Unknown(why) => Some(format!("may have been served before ({why})")),
        }
    }

    /// Whether a file was served, or may have been.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        match self {
            Served::Known(paths) => paths.contains(path),
            Served::Unknown(_) => true,
        }
    }

    /// Prepares the list: synced beside its name, which [`PreparedFile::persist`] sets; `None` if
    /// it is persisted already.
    pub(crate) fn prepare(
        directory: &Path,
        paths: &BTreeSet<PathBuf>,
    ) -> std::io::Result<Option<PreparedFile>> {
        match Served::load(Some(directory)) {
            Served::Known(kept) if kept == *paths => return Ok(None),
            Served::Known(_) => {}
            Served::Unknown(why) => {
                let aside = StateDir(directory).set_aside(SERVED);
                warn!("{why}; from now on it has the files of the configuration only{aside}");
            }
        }
        StateDir(directory).prepare(SERVED, &Paths(paths.clone())).map(Some)
    }
}

/// The list of served files.
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

/// Encodes any path as a line of text: other bytes than plain ones are `%` and two hexadecimal digits.
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

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;

    fn remember(directory: &Path, paths: &BTreeSet<PathBuf>) {
        Served::prepare(directory, paths).unwrap().unwrap().persist().unwrap();
    }

    #[test]
    fn served_paths_round_trip_with_any_characters() {
        let directory = tempdir().unwrap();
        let load = || Served::load(Some(directory.path()));
        assert_eq!((load(), Served::load(None)), (Served::none(), Served::none()));
        let no_text = OsString::from_vec(vec![b'/', 0xFF, b'\n', b'%']);
        let paths = ["/a b", "/c", "/100%41", "/über"].map(PathBuf::from).into_iter();
        let paths: BTreeSet<PathBuf> = paths.chain([PathBuf::from(no_text)]).collect();
        remember(directory.path(), &paths);
        assert_eq!(load(), Served::Known(paths.clone()));
        assert!(Served::prepare(directory.path(), &paths).unwrap().is_none(), "it is kept already");
        remember(directory.path(), &BTreeSet::new());
        assert_eq!(load(), Served::none());
    }

    /// Otherwise a file on a file system that is not mounted yet would be created anew, empty.
    #[test]
    fn an_unreadable_list_counts_every_path_as_possibly_served() {
        let directory = tempdir().unwrap();
        let (list, path) = (directory.path().join(SERVED), directory.path().join("disk.img"));
        let why = || Served::load(Some(directory.path())).before(&path);
        assert_eq!(why(), None, "without any it will be made");
        remember(directory.path(), &BTreeSet::from(["/other".into()]));
        assert_eq!(why(), None, "nor is it in this one");
        remember(directory.path(), &BTreeSet::from([path.clone()]));
        assert_eq!(why().as_deref(), Some("was served before"));
        let good = fs::read(&list).unwrap();
        let damaged = (0..good.len()).flat_map(|at| {
            let mut bad = good.clone();
            bad[at] ^= 1;
            [bad, good[..at].to_vec()]
        });
        // A file that only lists paths, as an older version wrote it, is not accepted either.
        for bad in damaged.chain([b"/other\n".to_vec(), Vec::new()]) {
            fs::write(&list, &bad).unwrap();
            let said = why().unwrap_or_default();
            assert!(said.contains("may have been served before"), "{said}");
            assert!(Served::load(Some(directory.path())).contains(&path), "so it stays remembered");
        }
        let damaged = fs::read(&list).unwrap();
        remember(directory.path(), &BTreeSet::from([path.clone()]));
        assert_eq!(fs::read(directory.path().join("served.damaged")).unwrap(), damaged);
        fs::remove_file(&list).unwrap();
        fs::create_dir(&list).unwrap();
        assert!(why().unwrap().contains("cannot be read"));
        assert!(Served::prepare(directory.path(), &BTreeSet::new()).is_ok(), "it can be made good");
    }
}
