//! Small files that outlast a power loss: written beside their name, synced, renamed, and their
//! folder synced. Whenever the power goes, the name means the whole old content or the whole new
//! one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Gives `name` in `folder` this content. When it returns, it is so also after a power loss.
///
/// # Errors
/// What the system says. The name may then mean either content, but no mixture.
pub(crate) fn write(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let beside = folder.join(format!("{name}.new"));
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&beside, folder.join(name))?;
    File::open(folder)?.sync_all()
}

/// Removes `name` from `folder`, if it is there, as surely as [`write`] writes it.
///
/// # Errors
/// What the system says.
pub(crate) fn remove(folder: &Path, name: &str) -> io::Result<()> {
    match fs::remove_file(folder.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::open(folder)?.sync_all()
}
