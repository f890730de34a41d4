//! The block size that a host has chosen by a format.

use std::path::Path;
use std::sync::Arc;

use nvme::Nqn;
use uuid::Uuid;

use crate::core::subsystem::lba_format::{ChosenFormat, Format};
use crate::state::namespace_state::NamespaceFile;

/// The persisted format of a namespace in `directory`, under its UUID. `store`: path of the data;
/// `configured_bytes`: block size of data that was never formatted.
///
/// # Errors
/// One sentence about a file that cannot be read or is invalid, or about one of another UUID for
/// this very store. Such a file is never ignored: the data would be read as blocks of another size.
pub fn open(
    (subsystem, nsid): (Nqn, u32),
    directory: &Path,
    uuid: [u8; 16],
    store: &Path,
    configured_bytes: u32,
) -> Result<Arc<Format>, String> {
    let file = NamespaceFile::new(directory, Uuid::from_bytes(uuid));
    let format = Format::kept(subsystem, nsid, file.clone(), store)?;
    if format.block_size_bytes().is_none() {
        not_of_another_uuid(directory, &file, &format!("{store:?}"), configured_bytes)?;
    }
    Ok(format)
}

/// Rejects a namespace whose device a host has formatted when the namespace had another UUID, which
/// changes with the name of its subsystem if none is configured.
fn not_of_another_uuid(
    directory: &Path,
    own: &NamespaceFile,
    store: &str,
    configured_bytes: u32,
) -> Result<(), String> {
    let all = NamespaceFile::all(directory).unwrap_or_default();
    for other in all.iter().filter(|other| *other != own) {
        // A damaged record prevents only its own namespace from being served.
        let Ok(Some(ChosenFormat { block_size_bytes: size, store: Some(of) })) = other.load()
        else {
            continue;
        };
        if of == store && size != configured_bytes {
            let (old, new) = (other.uuid(), own.uuid());
            return Err(format!(
                "{store} has blocks of {size} bytes, as a host has formatted it, which is kept in \
                 {} under another UUID: write `uuid = \"{old}\"` for its namespace, or stop the \
                 daemon and rename {} to begin with {new} (or remove it, if no data there are needed)",
                directory.display(),
                other.files().join(", ")
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(directory: &Path) -> Result<Arc<Format>, String> {
        let nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        open((nqn, 1), directory, [7; 16], Path::new(STORE), 4096)
    }

    const STORE: &str = "/srv/one\n.img";

    #[test]
    fn a_block_size_recorded_under_another_uuid_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        let other = |store: &str, bytes| {
            let made = open((nqn, 1), directory.path(), [8; 16], Path::new(store), bytes);
            made.map(|format| format.block_size_bytes())
        };
        let format = made(directory.path()).unwrap();
        assert_eq!(other(STORE, 4096), Ok(None));
        format.choose(512).unwrap();
        let name = |byte| format!("{}.namespace", Uuid::from_bytes([byte; 16]));
        let (old, new) = (name(7), name(8));
        let why = other(STORE, 4096).unwrap_err();
        assert!(why.contains("512") && why.contains(&old) && why.contains(&new[..36]), "{why}");
        assert_eq!(other("/srv/two.img", 4096), Ok(None), "another store");
        assert_eq!(other(STORE, 512), Ok(None), "as it is anyway");
        std::fs::rename(directory.path().join(&old), directory.path().join(&new)).unwrap();
        assert_eq!(other(STORE, 4096), Ok(Some(512)), "as the remedy says");
        // The first version did not record the store. This is its file.
        std::fs::remove_file(directory.path().join(&new)).unwrap();
        let first = "nvmfd format 1\nblock_size 512\ncrc32 3f2eaf18\n";
        std::fs::write(directory.path().join(new.replace("namespace", "format")), first).unwrap();
        assert_eq!(other(STORE, 4096), Ok(Some(512)));
        assert_eq!(made(directory.path()).unwrap().block_size_bytes(), None);
    }
}
