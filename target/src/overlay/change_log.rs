//! The file of unsaved changes, replaced atomically for each change.

use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::api::{Changes, SetAside, UnsavedChange};
use crate::state::atomic_file::{self, PreparedFile};
use crate::state::record::StateDir;

/// Name in the state directory.
const NAME: &str = "changes.json";

/// Version of the file.
const FORM: u32 = 2;
/// The version before: without a checksum.
const OLD_FORM: u32 = 1;

/// The longest file, in bytes.
const MOST_BYTES: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChangeLogRecord {
    form: u32,
    crc32: Option<String>,
    kept: Vec<UnsavedChange>,
    set_aside: Vec<SetAside>,
}

/// The file of unsaved changes, if any.
pub(super) struct ChangeLog<'d> {
    directory: Option<&'d Path>,
}

impl<'d> ChangeLog<'d> {
    pub(super) fn new(directory: Option<&'d Path>) -> ChangeLog<'d> {
        ChangeLog { directory }
    }

    /// Whether this user may not read it.
    pub(super) fn is_denied(&self) -> bool {
        let found = self.directory.map(|directory| fs::File::open(directory.join(NAME)));
        matches!(found, Some(Err(error)) if error.kind() == ErrorKind::PermissionDenied)
    }

    /// Loads the persisted changes.
    pub(super) fn read(&self) -> Result<Changes, String> {
        let Some(directory) = self.directory else { return Ok(Changes::default()) };
        let path = directory.join(NAME);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Changes::default()),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        StateDir(directory)
            .sync_names()
            .map_err(|error| format!("{}: {error}", directory.display()))?;
        parse(&bytes).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Whether changes are too long to be persisted.
    pub(super) fn is_too_long(&self, changes: &Changes) -> bool {
        self.directory.is_some() && emit(changes).is_ok_and(|bytes| bytes.len() > MOST_BYTES)
    }

    /// Writes and syncs changes beside the persisted ones.
    pub(super) fn prepare(&self, changes: &Changes) -> Result<PreparedChangeLog, String> {
        let Some(directory) = self.directory else { return Ok(PreparedChangeLog(None)) };
        let path = directory.join(NAME);
        if *changes == Changes::default() {
            let next =
                if path.exists() { Next::Removal } else { return Ok(PreparedChangeLog(None)) };
            return Ok(PreparedChangeLog(Some((path, next))));
        }
        let bytes = emit(changes).map_err(|error| failed(&path, &error))?;
        if bytes.len() > MOST_BYTES {
            let alone = Changes { set_aside: Vec::new(), ..changes.clone() };
            return Err(match self.is_too_long(&alone) {
                true => "there are too many changes that no file has: `nvmfctl save`".to_owned(),
                false => "there are too many changes that were set aside: `nvmfctl changes list`, \
                          `nvmfctl changes forget`"
                    .to_owned(),
            });
        }
        let file =
            atomic_file::prepare(directory, NAME, &bytes).map_err(|error| failed(&path, &error))?;
        Ok(PreparedChangeLog(Some((path, Next::File(file)))))
    }
}

/// Changes that are synced beside the persisted ones; `None` if nothing is persisted, or if they
/// are equal.
#[derive(Debug)]
pub(super) struct PreparedChangeLog(Option<(PathBuf, Next)>);

#[derive(Debug)]
enum Next {
    File(PreparedFile),
    /// The file is removed.
    Removal,
}

impl PreparedChangeLog {
    /// Replaces the persisted changes by these.
    pub(super) fn persist(self) -> Result<(), String> {
        let Some((path, next)) = self.0 else { return Ok(()) };
        let directory = path.parent().unwrap_or(Path::new("/"));
        let persisted = match next {
            Next::File(file) => file.persist(),
            Next::Removal => atomic_file::remove(directory, NAME),
        };
        persisted.map_err(|error| failed(&path, &error))
    }
}

fn failed(path: &Path, error: &dyn Display) -> String {
    format!("{} cannot be written: {error}", path.display())
}

/// Returns a JSON text whose first line contains the checksum of the rest.
fn emit(changes: &Changes) -> serde_json::Result<Vec<u8>> {
    let changes = serde_json::to_string_pretty(changes)?;
    let rest = changes.strip_prefix("{\n").unwrap_or_default();
    Ok(format!("{}\n{rest}\n", first_line(rest)).into_bytes())
}

fn first_line(rest: &str) -> String {
    let crc32 = crc32fast::hash(rest.as_bytes());
    format!("{{\"form\": {FORM}, \"crc32\": \"{crc32:08x}\",")
}

/// Parses the output of [`emit`], or of an older version without a checksum.
fn parse(bytes: &[u8]) -> Result<Changes, String> {
    let text = str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let ChangeLogRecord { form, crc32, kept, set_aside } =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    match form {
        FORM => {
            let parts = text
                .split_once('\n')
                .and_then(|(first, rest)| Some((first, rest.strip_suffix('\n')?)));
            match parts {
                Some((first, rest)) if first == first_line(rest) => Ok(Changes { kept, set_aside }),
                _ => Err("its checksum is wrong".to_owned()),
            }
        }
        OLD_FORM if crc32.is_none() => Ok(Changes { kept, set_aside }),
        _ => Err(format!("it has form {form}")),
    }
}

#[cfg(test)]
mod tests {
    use crate::api::Change;
    use crate::overlay::change_log::*;

    fn changes() -> Changes {
        let change = Change::RemoveListener { id: 1 };
        let (base, after) = ("a".to_owned(), "b".to_owned());
        let (listener, offered_at) = (None, Vec::new());
        let kept = UnsavedChange {
            at_unix_s: 7,
            uid: None,
            change,
            listener,
            offered_at,
            base,
            after,
            replaced: Vec::new(),
        };
        let set_aside = SetAside { kept: kept.clone(), why: "it\ndoes not fit".to_owned() };
        Changes { kept: vec![kept], set_aside: vec![set_aside] }
    }

    #[test]
    fn a_damaged_or_truncated_change_log_is_rejected() {
        let good = emit(&changes()).unwrap();
        assert_eq!(parse(&good), Ok(changes()));
        serde_json::from_slice::<serde_json::Value>(&good).expect("it is JSON");
        for (at, bit) in (0..good.len()).flat_map(|at| (0..8).map(move |bit| (at, 1 << bit))) {
            let mut bad = good.clone();
            bad[at] ^= bit;
            assert!(parse(&bad).is_err(), "byte {at}, {bit:#x}");
        }
        for cut in 0..good.len() {
            assert!(parse(&good[..cut]).is_err(), "{cut} bytes of it");
        }
    }

    #[test]
    fn form_1_change_logs_without_a_checksum_are_read() {
        let Changes { kept, set_aside } = changes();
        let mut old = serde_json::json!({"form": 1, "kept": kept, "set_aside": set_aside});
        assert_eq!(parse(old.to_string().as_bytes()), Ok(changes()));
        old["crc32"] = serde_json::json!("00000000");
        assert!(parse(old.to_string().as_bytes()).is_err(), "it is none of that version");
    }
}
