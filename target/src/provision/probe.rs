//! Probes the path of a namespace before it is opened.

use std::fs;
use std::io::ErrorKind::{self, NotADirectory, NotFound};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::blockdev::blocking::{BlockingPool, BlockingTask};
use crate::blockdev::names_device;
use crate::config::{NamespaceConfig, NamespaceKind};
use crate::platform::availability;
use crate::state::served::Served;

/// Result of a probe: the file or device, if the namespace has a path, or why it is missing.
pub(super) type ProbeResult = Result<Option<Probed>, String>;

/// Result of a probe.
#[derive(Debug)]
pub(super) struct Probed {
    /// The persistent path of the file or device.
    pub(super) lasting: PathBuf,
    /// Identity of the target of the path.
    pub(super) same: FileId,
}

/// Identity of a file or device, equal for all paths to it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum FileId {
    Device(u64),
    /// Device and inode.
    File(u64, u64),
    /// A path without a regular file or block device.
    New(PathBuf),
    /// Unknown because of an error: the file may exist.
    Unknown(PathBuf),
}

impl Probed {
    /// Whether the file exists.
    pub(super) fn is_there(&self) -> bool {
        self.same.is_there()
    }
}

impl FileId {
    /// Identity of what a path leads to.
    pub(crate) fn at(path: &Path) -> FileId {
        match fs::metadata(path) {
            Ok(meta) if meta.file_type().is_block_device() => FileId::Device(meta.rdev()),
            Ok(meta) if meta.is_file() => FileId::File(meta.dev(), meta.ino()),
            found => FileId::of_nothing(availability::real(path), found.err().map(|e| e.kind())),
        }
    }

    /// Identity of a path without a file, or whose file cannot be examined.
    fn of_nothing(path: PathBuf, error: Option<ErrorKind>) -> FileId {
        match error {
            None | Some(NotFound | NotADirectory) => FileId::New(path),
            Some(_) => FileId::Unknown(path),
        }
    }

    /// As [`Probed::is_there`].
    pub(super) fn is_there(&self) -> bool {
        !matches!(self, FileId::New(_))
    }
}

/// Begins to probe the path of a namespace (see [`availability::store`]); `tell` converts the
/// result. `None`: it has no path.
pub(super) fn begin<'a, T: Send + 'static>(
    opening: &'a BlockingPool,
    namespace: &NamespaceConfig,
    served: &Served,
    tell: impl FnOnce(ProbeResult) -> T + Send + 'static,
) -> BlockingTask<'a, T> {
    let NamespaceKind::File { path, .. } = &namespace.kind else {
        return opening.over(Path::new(""), Ok(tell(Ok(None))));
    };
    let own = namespace.clone();
    let path = path.clone();
    let served = served.before(&path);
    opening.begin(&path.clone(), move || {
        Ok(tell(match availability::store(&own, served.as_deref()) {
            Some(why) => Err(why),
            None => Ok(Some(seen(path))),
        }))
    })
}

fn seen(path: PathBuf) -> Probed {
    let (same, found) = (FileId::at(&path), availability::real(&path));
    // Links to devices are not resolved: they persist, while their targets change at each start.
    let lasting = if names_device(&found) { path } else { found };
    Probed { lasting, same }
}

#[cfg(test)]
mod tests {
    use crate::provision::probe::*;

    /// A file that may exist is never created.
    #[test]
    fn only_a_file_known_not_to_exist_may_be_created() {
        let is_there = |error| FileId::of_nothing(PathBuf::from("/disk"), error).is_there();
        for error in [None, Some(NotFound), Some(NotADirectory)] {
            assert!(!is_there(error), "{error:?}");
        }
        for error in [ErrorKind::PermissionDenied, ErrorKind::TimedOut, ErrorKind::Other] {
            assert!(is_there(Some(error)), "{error:?}");
        }
    }
}
