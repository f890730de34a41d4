//! Which hosts have had keys, kept over restarts: a key that is removed while the daemon is down, or
//! before it starts anew, leaves its name refused as well.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::Path;

use nvme::Nqn;

use crate::state::atomic_file;

/// Its name in the state directory.
const NAME: &str = "keyed-hosts";

/// Its first line.
const VERSION: &str = "nvmfd keyed hosts 1";

/// The hosts that had keys; none where there is no file yet.
///
/// # Errors
/// A sentence about a file that cannot be read. It never means that there are none.
pub fn read(folder: &Path) -> Result<BTreeSet<Nqn>, String> {
    let path = folder.join(NAME);
    let wrong = |what: &dyn std::fmt::Display| {
        format!(
            "{} cannot be used: {what}; it says which hosts have had keys and are refused without \
             one: restore it, or remove it if no key has been taken away",
            path.display()
        )
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(wrong(&error)),
    };
    let lines = atomic_file::unsealed(&text, VERSION).map_err(|what| wrong(&what))?;
    let hosts: Result<_, _> = lines.map(str::parse::<Nqn>).collect();
    hosts.map_err(|error| wrong(&error))
}

/// Whether this user may not read it, which says nothing about the daemon.
pub(crate) fn is_denied(folder: &Path) -> bool {
    let denied = ErrorKind::PermissionDenied;
    std::fs::File::open(folder.join(NAME)).is_err_and(|error| error.kind() == denied)
}

/// Keeps which hosts have or have had keys.
///
/// # Errors
/// What the system says.
pub fn write(folder: &Path, hosts: &BTreeSet<Nqn>) -> io::Result<()> {
    let lines: String = hosts.iter().map(|host| format!("{host}\n")).collect();
    let text = format!("{VERSION}\n{lines}");
    atomic_file::write(folder, NAME, atomic_file::sealed(&text).as_bytes())
}

#[cfg(test)]
mod tests {
    use crate::state::revoked_hosts::*;

    #[test]
    fn what_is_kept_is_found_again_and_what_is_damaged_is_not_taken_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()), Ok(BTreeSet::new()), "the first start");
        let names = ["nqn.2026-11.host:a", "nqn.2026-11.host:b"].map(|name| name.parse().unwrap());
        let hosts = BTreeSet::from(names);
        write(folder.path(), &hosts).unwrap();
        assert_eq!(read(folder.path()), Ok(hosts));
        let path = folder.path().join(NAME);
        for damaged in [String::new(), std::fs::read_to_string(&path).unwrap().replace(":b", ":c")]
        {
            std::fs::write(&path, damaged).unwrap();
            assert!(read(folder.path()).unwrap_err().contains("cannot be used"));
        }
        // Nor is what cannot be read at all.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(read(folder.path()).unwrap_err().contains("cannot be used"));
    }
}
