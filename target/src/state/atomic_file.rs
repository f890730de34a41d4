//! Small files that outlast a power loss: written beside their name, synced, renamed, and their
//! folder synced. Whenever the power goes, the name means the whole old content or the whole new
//! one.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::Lines;

use crate::blockdev::crash_point::crash_point;
use crate::blockdev::durable;

/// Gives `name` in `folder` this content. When it returns, it is so also after a power loss.
///
/// # Errors
/// What the system says. The name may then mean either content, but no mixture.
pub(crate) fn write(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    prepare(folder, name, content)?.persist()
}

/// Writes and syncs content beside `name` in `folder`: what takes room or a working disk is done
/// then, and the name still means what it did.
///
/// # Errors
/// What the system says.
pub(crate) fn prepare(folder: &Path, name: &str, content: &[u8]) -> io::Result<Prepared> {
    let beside = folder.join(format!("{name}.new"));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    crash_point();
    let mut file = options.open(&beside)?;
    crash_point();
    durable::write(&mut file, &beside, content)?;
    crash_point();
    durable::sync(&file, &beside)?;
    Ok(Prepared { path: folder.join(name), beside })
}

/// Content of a small file that is synced beside its name. What stays there is written over by the
/// next one.
#[derive(Debug)]
#[must_use]
pub(crate) struct Prepared {
    path: PathBuf,
    beside: PathBuf,
}

impl Prepared {
    /// Has the name mean it. When it returns, that is so also after a power loss.
    ///
    /// # Errors
    /// What the system says. The name may then mean either content, but no mixture.
    pub(crate) fn persist(self) -> io::Result<()> {
        crash_point();
        durable::rename(&self.beside, &self.path)?;
        sync(self.path.parent().unwrap_or(Path::new("/")))
    }
}

/// A text whose last line is a checksum of what stands before.
pub(crate) fn sealed(text: &str) -> String {
    format!("{text}crc32 {:08x}\n", crc32fast::hash(text.as_bytes()))
}

/// The lines of a text that [`sealed`] made, without its checksum and without its first line, which
/// must be this one.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn unsealed<'t>(text: &'t str, first_line: &str) -> Result<Lines<'t>, &'static str> {
    let at = text.rfind("crc32 ").ok_or("its last line is missing")?;
    let (body, _) = text.split_at(at);
    if sealed(body) != text {
        return Err("its checksum is wrong");
    }
    let mut lines = body.lines();
    match lines.next() {
        Some(line) if line == first_line => Ok(lines),
        _ => Err("it is of another version"),
    }
}

/// Removes `name` from `folder`, if it is there, as surely as [`write`] writes it.
///
/// # Errors
/// What the system says.
pub(crate) fn remove(folder: &Path, name: &str) -> io::Result<()> {
    crash_point();
    match durable::remove_file(&folder.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    sync(folder)
}

fn sync(folder: &Path) -> io::Result<()> {
    crash_point();
    durable::sync_directory(folder)?;
    crash_point();
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::blockdev::durable::tests::calls;

    #[test]
    fn what_is_kept_is_synchronised_before_it_has_its_name_and_so_is_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let directory = format!("sync directory {name}");
        let (written, did) = calls(|| super::write(path, "a", b"content"));
        written.unwrap();
        assert_eq!(did, ["write a.new", "sync a.new", "rename to a", &directory]);
        for removes in [true, false] {
            let (removed, did) = calls(|| super::remove(path, "a"));
            removed.unwrap();
            let all = ["remove a", &directory];
            assert_eq!(did, all[usize::from(!removes)..]);
        }
    }
}
