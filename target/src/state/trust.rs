//! Devices that are not trusted: a sync has failed, or a file was shortened while it was served.
//! Data that hosts have written may be missing, so this persists until an administrator trusts the
//! device again (`nvmfctl namespace trust`): no reload, restart or reopening ends it.
//!
//! It is persisted by the UUID of the namespace, in the state directory. Without such a directory
//! it ends with the daemon.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme::Status;
use tracing::error;
use uuid::Uuid;

use crate::blockdev::monitor::{Distrust, TrustRecords};
use crate::core::subsystem::persistence::Section;
use crate::state::namespace_state::NamespaceFile;

/// Devices that are not trusted, by the UUID of their namespaces.
#[derive(Debug, Default)]
pub(crate) struct DeviceTrust {
    directory: Option<PathBuf>,
    known: Mutex<BTreeMap<Uuid, Distrust>>,
}

impl DeviceTrust {
    /// Reads the state of this directory, if any.
    pub(crate) fn new(directory: Option<PathBuf>) -> DeviceTrust {
        DeviceTrust { directory, known: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Uuid, Distrust>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TrustRecords for DeviceTrust {
    fn is_durable(&self) -> bool {
        self.directory.is_some()
    }

    fn of(&self, uuid: Uuid) -> Distrust {
        let mut known = self.lock();
        if let Some(distrust) = known.get(&uuid) {
            return *distrust;
        }
        let Some(directory) = &self.directory else { return Distrust::default() };
        let found = NamespaceFile::new(directory, uuid).load();
        let distrust = found.map(|found| found.map_or_else(Distrust::default, |Reason(it)| it));
        let distrust = distrust.unwrap_or_else(|why| {
            error!(
                "{why}; its flush counts as failed: check the data, then \
                 `nvmfctl namespace trust`"
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
            let before = known.get(&uuid).copied().unwrap_or_default();
            let section = |it: Distrust| Some(Reason(it)).filter(|_| !it.is_nothing());
            let (new, before) = (section(distrust), section(before));
            NamespaceFile::new(directory, uuid).replace(new.as_ref(), before.as_ref())?;
        }
        known.insert(uuid, distrust);
        Ok(())
    }
}

/// Reason for the distrust of a device, as a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reason(pub(crate) Distrust);

impl Section for Reason {
    const NAME: &'static str = "trust";

    fn emit(&self) -> String {
        let Reason(Distrust { failed_sync, shortened }) = *self;
        let status = failed_sync.map_or(0, Status::field);
        format!("failed_sync {status:04x}\nshortened {}\n", u8::from(shortened))
    }

    fn parse(body: &str) -> Option<Reason> {
        let mut lines = body.lines();
        let field = u16::from_str_radix(lines.next()?.strip_prefix("failed_sync ")?, 16).ok()?;
        let failed_sync = (field != 0).then(|| Status::from_field(field));
        let shortened = lines.next()? == "shortened 1";
        let distrust = Distrust { failed_sync, shortened };
        Some(Reason(distrust)).filter(|_| !distrust.is_nothing())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::core::subsystem::persistence::Persist;
    use crate::state::trust::*;

    const FAILED: Distrust = Distrust { failed_sync: Some(Status::WRITE_FAULT), shortened: false };
    const UUID: Uuid = Uuid::from_u128(7);

    #[test]
    fn a_distrust_survives_restarts_until_it_is_cleared() {
        let directory = tempfile::tempdir().unwrap();
        let book = || DeviceTrust::new(Some(directory.path().to_owned()));
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
    fn a_distrust_without_a_state_directory_ends_with_the_daemon() {
        let book = DeviceTrust::new(None);
        book.set(UUID, FAILED).unwrap();
        assert_eq!((book.of(UUID), DeviceTrust::new(None).of(UUID)), (FAILED, Distrust::default()));
    }

    #[test]
    fn a_distrust_that_cannot_be_persisted_or_removed_is_in_force() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let book = DeviceTrust::new(Some(path.clone()));
        assert!(book.set(UUID, FAILED).is_err());
        assert_eq!(book.of(UUID), FAILED);
        assert!(book.set(UUID, Distrust::default()).is_err());
        assert_eq!(book.of(UUID), FAILED);
        fs::create_dir(&path).unwrap();
        book.set(UUID, FAILED).unwrap();
        assert_eq!(DeviceTrust::new(Some(path)).of(UUID), FAILED);
    }

    #[test]
    fn a_damaged_trust_record_counts_as_a_failed_sync() {
        let directory = tempfile::tempdir().unwrap();
        let new = || DeviceTrust::new(Some(directory.path().to_owned()));
        new().set(UUID, Distrust { failed_sync: None, shortened: true }).unwrap();
        let path = NamespaceFile::new(directory.path(), UUID).path();
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
