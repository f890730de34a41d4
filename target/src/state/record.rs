//! Persisted records: one text file each, readable by administrators (`blockdev/record.rs`).
//!
//! A record is replaced as a whole (`atomic_file`). A damaged or unreadable record never counts as
//! missing.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use tracing::warn;

use crate::blockdev::durable;
use crate::blockdev::record::{Record, seal, unseal};
use crate::state::atomic_file::{self, PreparedFile};

/// The longest record; a thousand subsystems with a hundred namespaces each need less.
const BYTES_MAX: u64 = 16 << 20;

/// A directory of records: the `state_directory`, or one of host-created namespaces.
#[derive(Clone, Copy, Debug)]
pub struct StateDir<'d>(pub &'d Path);

impl StateDir<'_> {
    /// Makes the names of all records durable, before any is read: a daemon that was killed between
    /// a rename and the sync of the directory has left names that a power loss would revert, after
    /// hosts have seen the content of the records. Does nothing where directories cannot be synced.
    ///
    /// # Errors
    /// The I/O error.
    pub fn sync_names(self) -> io::Result<()> {
        match durable::sync_directory(self.0) {
            Err(error) if durable::cannot_be_synced(&error) => Ok(()),
            outcome => outcome,
        }
    }

    /// Loads the record of this name; `None` if there is no such file.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or is no such record.
    pub(crate) fn load<R: Record>(self, name: &str) -> Result<Option<R>, String> {
        self.load_as(name, R::REMEDY, unseal)
    }

    /// Returns the result of `parse` for the file of this name.
    ///
    /// # Errors
    /// As [`StateDir::load`].
    pub(super) fn load_as<T>(
        self,
        name: &str,
        remedy: &str,
        parse: impl FnOnce(&[u8]) -> Result<T, &'static str>,
    ) -> Result<Option<T>, String> {
        let path = self.0.join(name);
        let shown = path.display();
        let mut text = Vec::new();
        let read =
            File::open(&path).and_then(|file| file.take(BYTES_MAX + 1).read_to_end(&mut text));
        let parsed = match read {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{shown} cannot be read: {error}")),
            Ok(_) if text.len() as u64 > BYTES_MAX => Err("it is too long"),
            Ok(_) => parse(&text),
        };
        parsed.map(Some).map_err(|why| {
            format!("{shown} is no record that nvmfd has written ({why}): restore it, or {remedy}")
        })
    }

    /// As [`StateDir::load`], for a record that no data depend on: one that cannot be used is
    /// reported and counts as missing. A copy of it is kept.
    pub(crate) fn load_if_usable<R: Record>(self, name: &str) -> Option<R> {
        self.load(name).unwrap_or_else(|why| {
            let aside = self.set_aside(name);
            warn!("{why}; it starts empty{aside}");
            None
        })
    }

    /// Keeps a record that cannot be used, and is about to be replaced, under another name. Returns
    /// the end of a sentence about that. The first one stays: those after it began empty.
    pub(crate) fn set_aside(self, name: &str) -> String {
        let aside = self.0.join(format!("{name}.damaged"));
        if aside.exists() {
            return format!("; {} has an earlier one", aside.display());
        }
        // Not renamed: a record that is missing for a moment would count as empty.
        match fs::copy(self.0.join(name), &aside) {
            Ok(_) => format!("; {} is a copy", aside.display()),
            Err(error) => {
                let _ = fs::remove_file(&aside);
                format!("; no copy of it can be kept: {error}")
            }
        }
    }

    /// Whether this user may not read the record, which does not imply that the daemon may not.
    pub(crate) fn is_denied(self, name: &str) -> bool {
        let opened = File::open(self.0.join(name));
        opened.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
    }

    /// Writes and syncs a record beside its name: the steps that need space or a working device.
    ///
    /// # Errors
    /// The I/O error, or that it is too long.
    pub(crate) fn prepare<R: Record>(self, name: &str, record: &R) -> io::Result<PreparedFile> {
        let text = seal(record);
        if text.len() as u64 > BYTES_MAX {
            return Err(io::Error::other("it would be too long"));
        }
        atomic_file::prepare(self.0, name, text.as_bytes())
    }

    /// Replaces a record. On return the record survives a power loss.
    ///
    /// # Errors
    /// As [`StateDir::prepare`]. Either record may then be there, but no mixture.
    pub(crate) fn replace<R: Record>(self, name: &str, record: &R) -> io::Result<()> {
        self.prepare(name, record)?.persist()
    }

    /// Removes a record, if it exists, as durably as it is replaced.
    pub(crate) fn remove(self, name: &str) -> io::Result<()> {
        atomic_file::remove(self.0, name)
    }

    /// Returns the names of all files; names that are not UTF-8 are not records.
    pub(crate) fn names(self) -> io::Result<Vec<String>> {
        let names = fs::read_dir(self.0)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Damages the only file of a directory in each of its bits, and truncates it at each position:
    /// each has to be rejected, with this message.
    pub(crate) fn damage(directory: &Path, refused: impl Fn() -> Option<String>) {
        let path = fs::read_dir(directory).unwrap().next().unwrap().unwrap().path();
        let good = fs::read(&path).unwrap();
        let flipped = (0..good.len()).flat_map(|at| (0..8).map(move |bit| (at, 1 << bit)));
        let flipped = flipped.map(|(at, bit)| {
            let mut bad = good.clone();
            bad[at] ^= bit;
            bad
        });
        let cut = (0..good.len()).map(|len| good[..len].to_vec());
        for bad in flipped.chain(cut) {
            fs::write(&path, &bad).unwrap();
            let said = refused().unwrap_or_default();
            assert!(said.contains("restore it, or remove it"), "{bad:?}: {said}");
        }
        fs::write(&path, good).unwrap();
    }

    /// Lines with numbers.
    #[derive(Clone, PartialEq, Eq, Debug)]
    struct Numbers(Vec<u8>);

    impl Record for Numbers {
        const KIND: &'static str = "some numbers";
        const VERSION: u32 = 2;
        const REMEDY: &'static str = "remove it if nobody counts";

        fn emit(&self) -> String {
            self.0.iter().map(|number| format!("{number}\n")).collect()
        }

        fn parse(body: &str) -> Option<Numbers> {
            body.lines().map(|line| line.parse().ok()).collect::<Option<_>>().map(Numbers)
        }
    }

    #[test]
    fn a_record_round_trips_and_damaged_or_foreign_ones_are_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir(directory.path());
        let load = || state.load::<Numbers>("a");
        assert_eq!(load(), Ok(None));
        for numbers in [Numbers(vec![]), Numbers(vec![7, 8])] {
            state.replace("a", &numbers).unwrap();
            assert_eq!(load(), Ok(Some(numbers)));
        }
        assert_eq!(seal(&Numbers(vec![7])), "nvmfd some numbers 2\n7\ncrc32 ab954318\n");
        damage(directory.path(), || load().err());
        assert_eq!(load().unwrap().unwrap().0, [7, 8]);
        let sealed = |text: &str| format!("{text}crc32 {:08x}\n", crc32fast::hash(text.as_bytes()));
        for (text, said) in [
            ("nvmfd some numbers 1\n7\n", None),
            ("nvmfd some numbers 3\n7\n", Some("another kind or version")),
            ("nvmfd numbers 1\n7\n", Some("another kind or version")),
            ("nvmfd some numbers 2\n07\n", Some("contradicts itself")),
            ("nvmfd some numbers 2\nx\n", Some("a line of it")),
        ] {
            fs::write(directory.path().join("a"), sealed(text)).unwrap();
            let why = load().err();
            assert_eq!(why.is_some(), said.is_some(), "{text}");
            assert!(why.unwrap_or_default().contains(said.unwrap_or("")), "{text}");
        }
        state.remove("a").unwrap();
        assert_eq!((load(), state.remove("a").is_ok()), (Ok(None), true));
    }

    /// Counters of years may be repaired by hand.
    #[test]
    fn a_damaged_record_that_starts_empty_is_kept_under_another_name() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir(directory.path());
        let content = |name| fs::read(directory.path().join(name)).unwrap();
        for damaged in ["first", "second"] {
            fs::write(directory.path().join("a"), damaged).unwrap();
            assert_eq!(state.load_if_usable::<Numbers>("a"), None);
            assert_eq!(content("a"), damaged.as_bytes(), "it is there until it is replaced");
            state.replace("a", &Numbers(vec![1])).unwrap();
            assert_eq!(content("a.damaged"), b"first");
            assert_eq!(state.load_if_usable("a"), Some(Numbers(vec![1])));
        }
        fs::remove_file(directory.path().join("a")).unwrap();
        assert_eq!(state.load_if_usable::<Numbers>("a"), None);
    }

    #[test]
    fn an_unreadable_or_overlong_record_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir(directory.path());
        fs::create_dir(directory.path().join("a")).unwrap();
        assert!(state.load::<Numbers>("a").unwrap_err().contains("cannot be read"));
        let long = vec![b'7'; BYTES_MAX as usize + 1];
        fs::write(directory.path().join("b"), long).unwrap();
        assert!(state.load::<Numbers>("b").unwrap_err().contains("too long"));
        let numbers = Numbers(vec![100; BYTES_MAX as usize / 4]);
        assert!(state.replace("c", &numbers).is_err(), "nobody could read it");
        assert_eq!(state.load_if_usable::<Numbers>("b"), None);
        assert!(!state.is_denied("b"));
    }
}
