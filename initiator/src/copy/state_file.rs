//! How far a copy has come, in a file: who runs the same copy again continues there.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::verify::model_file::write_file;

/// The state of a copy. What is below `done_bytes` is in the target, and flushed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct CopyState {
    pub(super) source: String,
    pub(super) target: String,
    pub(super) size_bytes: u64,
    pub(super) done_bytes: u64,
}

/// The file, if one is to be kept.
pub(super) struct StateFile(pub(super) Option<PathBuf>);

impl StateFile {
    /// Returns where to begin: 0 if there is no file.
    pub(super) fn load(&self, expected: &CopyState) -> Result<u64, Error> {
        let Some(path) = &self.0 else { return Ok(0) };
        let failed = |why: &str| Err(Error::Local(format!("{}: {why}", path.display())));
        let bytes = match std::fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return failed(&error.to_string()),
        };
        let Ok(found) = serde_json::from_slice::<CopyState>(&bytes) else {
            return failed("it is no state of a copy");
        };
        let done_bytes = found.done_bytes;
        let is_same = CopyState { done_bytes: expected.done_bytes, ..found.clone() } == *expected;
        match is_same && done_bytes <= found.size_bytes {
            true => Ok(done_bytes),
            false => failed(&format!(
                "it is the state of another copy, of {} to {}, or the source was changed or the \
                 target made anew since; remove it to begin anew",
                found.source, found.target
            )),
        }
    }

    pub(super) fn save(&self, state: &CopyState) -> Result<(), Error> {
        let Some(path) = &self.0 else { return Ok(()) };
        let json = serde_json::to_string(state).unwrap_or_default() + "\n";
        write_file(path, json.as_bytes())
            .map_err(|error| Error::Local(format!("{}: {error}", path.display())))
    }

    /// The copy is complete.
    pub(super) fn remove(&self) {
        self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_copy_is_continued() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("state");
        let file = StateFile(Some(path.clone()));
        let begun = CopyState {
            source: "file /a of 1".into(),
            target: "namespace 1".into(),
            size_bytes: 100,
            done_bytes: 0,
        };
        assert_eq!(file.load(&begun), Ok(0));
        file.save(&CopyState { done_bytes: 60, ..begun.clone() }).expect("written");
        assert_eq!(file.load(&begun), Ok(60));
        for other in [
            CopyState { source: "file /a of 2".into(), ..begun.clone() },
            CopyState { target: "namespace 2".into(), ..begun.clone() },
            CopyState { size_bytes: 99, ..begun.clone() },
        ] {
            assert!(file.load(&other).is_err(), "{other:?}");
        }
        file.save(&CopyState { done_bytes: 101, ..begun.clone() }).expect("written");
        assert!(file.load(&begun).is_err(), "more than there is");
        std::fs::write(&path, "{}").expect("written");
        assert!(file.load(&begun).is_err(), "no state");
        file.remove();
        assert_eq!((file.load(&begun), StateFile(None).load(&begun)), (Ok(0), Ok(0)));
    }
}
