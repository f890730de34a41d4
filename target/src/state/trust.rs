//! Stores that are not trusted: a synchronisation has failed, or a file was shortened while it was
//! served. What hosts believe to be there may not be there, so this lasts until an administrator
//! says otherwise (`nvmfctl namespace trust`): no reload, restart or reopening ends it.
//!
//! It is kept by the UUID of the namespace, in the state directory. Without one it lasts as long as
//! the daemon does.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme::Status;
use tracing::error;
use uuid::Uuid;

use crate::blockdev::monitor::{Distrust, TrustRecords};
use crate::state::atomic_file;

const FIRST_LINE: &str = "nvmfd trust 1";

/// Which stores are not trusted, by the UUID of their namespaces.
#[derive(Debug, Default)]
pub(crate) struct TrustBook {
    directory: Option<PathBuf>,
    known: Mutex<BTreeMap<Uuid, Distrust>>,
}

impl TrustBook {
    /// As it is kept in this directory, if in any.
    pub(crate) fn new(directory: Option<PathBuf>) -> TrustBook {
        TrustBook { directory, known: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Distrust>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TrustRecords for TrustBook {
    fn is_durable(&self) -> bool {
        self.directory.is_some()
    }

    fn of(&self, uuid: Uuid) -> Distrust {
        let mut known = self.lock();
        if let Some(distrust) = known.get(&uuid) {
            return *distrust;
        }
        let Some(directory) = &self.directory else { return Distrust::default() };
        let path = directory.join(name(uuid));
        let distrust = load(&path).unwrap_or_else(|why| {
            error!(
                "{}: {why}; its namespace counts as one whose flush has failed: check the data, \
                 then `nvmfctl namespace trust`",
                path.display()
            );
            Distrust { failed_sync: Some(Status::WRITE_FAULT), shortened: false }
        });
        known.insert(uuid, distrust);
        distrust
    }

    fn set(&self, uuid: Uuid, distrust: Distrust) -> io::Result<()> {
        let mut known = self.lock();
        if !distrust.is_nothing() {
            known.insert(uuid, distrust);
        }
        if let Some(directory) = &self.directory {
            match distrust.is_nothing() {
                true => atomic_file::remove(directory, &name(uuid))?,
                false => atomic_file::write(directory, &name(uuid), emit(distrust).as_bytes())?,
            }
        }
        known.insert(uuid, distrust);
        Ok(())
    }
}

fn name(uuid: Uuid) -> String {
    format!("{uuid}.trust")
}

fn emit(distrust: Distrust) -> String {
    let status = distrust.failed_sync.map_or(0, Status::field);
    let shortened = u8::from(distrust.shortened);
    atomic_file::sealed(&format!("{FIRST_LINE}\nfailed_sync {status:04x}\nshortened {shortened}\n"))
}

fn load(path: &Path) -> Result<Distrust, String> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Distrust::default()),
        Err(error) => Err(format!("it cannot be read: {error}")),
        Ok(bytes) => parse(&bytes).ok_or_else(|| "it is no record that we wrote".to_owned()),
    }
}

fn parse(bytes: &[u8]) -> Option<Distrust> {
    let text = std::str::from_utf8(bytes).ok()?;
    let mut lines = atomic_file::unsealed(text, FIRST_LINE).ok()?;
    let field = u16::from_str_radix(lines.next()?.strip_prefix("failed_sync ")?, 16).ok()?;
    let shortened = match lines.next()?.strip_prefix("shortened ")? {
        "0" => false,
        "1" => true,
        _ => return None,
    };
    let failed_sync = (field != 0).then(|| Status::from_field(field));
    let distrust = Distrust { failed_sync, shortened };
    (lines.next().is_none() && !distrust.is_nothing()).then_some(distrust)
}

#[cfg(test)]
mod tests {
    use crate::state::trust::*;

    const FAILED: Distrust = Distrust { failed_sync: Some(Status::WRITE_FAULT), shortened: false };
    const UUID: Uuid = Uuid::from_u128(7);

    #[test]
    fn a_distrust_outlasts_the_daemon_until_it_is_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let book = || TrustBook::new(Some(directory.path().to_owned()));
        assert_eq!(book().of(UUID), Distrust::default());
        for distrust in [FAILED, Distrust { shortened: true, ..FAILED }] {
            book().set(UUID, distrust).unwrap();
            assert_eq!((book().of(UUID), book().of(Uuid::nil())), (distrust, Distrust::default()));
        }
        book().set(UUID, Distrust::default()).unwrap();
        assert_eq!(book().of(UUID), Distrust::default());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn without_a_state_directory_it_lasts_as_long_as_the_daemon() {
        let book = TrustBook::new(None);
        book.set(UUID, FAILED).unwrap();
        assert_eq!((book.of(UUID), TrustBook::new(None).of(UUID)), (FAILED, Distrust::default()));
    }

    #[test]
    fn what_cannot_be_kept_is_in_force_and_what_cannot_be_removed_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let book = TrustBook::new(Some(path.clone()));
        assert!(book.set(UUID, FAILED).is_err());
        assert_eq!(book.of(UUID), FAILED);
        assert!(book.set(UUID, Distrust::default()).is_err());
        assert_eq!(book.of(UUID), FAILED);
        fs::create_dir(&path).unwrap();
        book.set(UUID, FAILED).unwrap();
        assert_eq!(TrustBook::new(Some(path)).of(UUID), FAILED);
    }

    #[test]
    fn a_record_that_makes_no_sense_is_a_failed_sync() {
        let directory = tempfile::tempdir().unwrap();
        let new = || TrustBook::new(Some(directory.path().to_owned()));
        new().set(UUID, Distrust { failed_sync: None, shortened: true }).unwrap();
        let path = directory.path().join(name(UUID));
        let good = fs::read(&path).unwrap();
        for (at, bit) in (0..good.len()).flat_map(|at| (0..8).map(move |bit| (at, 1 << bit))) {
            let mut bad = good.clone();
            bad[at] ^= bit;
            fs::write(&path, bad).unwrap();
            assert_eq!(new().of(UUID), FAILED, "bit {bit} of byte {at}");
        }
        for cut in 0..good.len() {
            fs::write(&path, &good[..cut]).unwrap();
            assert_eq!(new().of(UUID), FAILED, "{cut} bytes of it");
        }
    }
}
