//! UUID of each served device. State that hosts rely on (reservations, write protection, bad
//! blocks) is persisted by UUID, and the UUID may differ in the next configuration: because of its
//! key, or, without such a key, because of a new name of the subsystem or a new spelling of the
//! path. The state would then be lost silently, so a device is not served under another UUID as
//! long as state is persisted under the first.
//!
//! For the block size that a host has chosen there is another rule
//! ([`crate::core::subsystem::lba_format`]): its record names the device, and the configured size
//! may be equal.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use tracing::warn;
use uuid::Uuid;

use crate::blockdev::record::Record;
use crate::state::atomic_file::PreparedFile;
use crate::state::namespace_state::NamespaceFile;
use crate::state::record::StateDir;

/// Name in the state directory: the UUID and the store of each namespace, one per line.
const FILE: &str = "names";

/// The devices by UUID, as [`of_path`] writes them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct DeviceIdentities(BTreeMap<Uuid, String>);

/// Returns the identity of a device: its path in quotes, which then contains no line end.
pub(crate) fn of_path(path: &Path) -> String {
    format!("{path:?}")
}

impl DeviceIdentities {
    /// Loads the identities.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or is invalid. It is not ignored:
    /// hosts may rely on state under another UUID.
    pub(crate) fn load(directory: &Path) -> Result<DeviceIdentities, String> {
        Ok(StateDir(directory).load(FILE)?.unwrap_or_default())
    }

    /// Checks that a device may be served under this UUID; `configured`: the UUIDs of all
    /// namespaces.
    ///
    /// # Errors
    /// One sentence: state of the device is persisted under another UUID.
    pub(crate) fn check(
        &self,
        directory: &Path,
        (uuid, configured): (Uuid, &BTreeSet<Uuid>),
        store: &str,
    ) -> Result<(), String> {
        let others = self.0.iter().filter(|(other, of)| **other != uuid && *of == store);
        for (other, _) in others {
            let file = NamespaceFile::new(directory, *other);
            let things = file.relied_on();
            if things.is_empty() {
                continue;
            }
            if configured.contains(other) {
                return Err(format!(
                    "{store} was served as {other}, which is another namespace now, and hosts \
                     rely on the state of that UUID ({}): if their data are elsewhere now, start \
                     once without this namespace; if not, exchange the two `uuid`",
                    things.join(", ")
                ));
            }
            return Err(format!(
                "{store} was served as {other}, and hosts rely on the state of that UUID ({}): \
                 write `uuid = \"{other}\"` for its namespace, or stop the daemon and rename {} \
                 in {} to begin with {uuid} (or remove them if no host relies on them any more)",
                things.join(", "),
                file.files().join(", "),
                directory.display()
            ));
        }
        Ok(())
    }

    /// Prepares the record of served devices, and of others with persisted state. A damaged record
    /// is kept while any state is persisted: it prevents new devices until an administrator has
    /// restored it, and nothing else.
    pub(crate) fn prepare(
        directory: &Path,
        mut served: BTreeMap<Uuid, String>,
    ) -> io::Result<Option<PreparedFile>> {
        let DeviceIdentities(before) = match DeviceIdentities::load(directory) {
            Ok(before) => before,
            Err(why) if !is_any_kept(directory) => {
                let aside = StateDir(directory).set_aside(FILE);
                warn!("{why}; no namespace has state that depends on it, so it is replaced{aside}");
                DeviceIdentities::default()
            }
            Err(why) => {
                warn!("device identities cannot be recorded: {why}");
                return Ok(None);
            }
        };
        for (uuid, store) in &before {
            let is_of_use = || !NamespaceFile::new(directory, *uuid).relied_on().is_empty();
            if !served.contains_key(uuid) && is_of_use() {
                served.insert(*uuid, store.clone());
            }
        }
        if served == before {
            return Ok(None);
        }
        StateDir(directory).prepare(FILE, &DeviceIdentities(served)).map(Some)
    }
}

/// Whether any state is persisted under an earlier name; state that cannot be listed counts.
pub(crate) fn is_any_kept(directory: &Path) -> bool {
    let all = NamespaceFile::all(directory);
    all.map_or(true, |all| all.iter().any(|file| !file.relied_on().is_empty()))
}

impl Record for DeviceIdentities {
    const KIND: &'static str = "names";
    const REMEDY: &'static str = "remove it if no namespace has got another UUID since";

    fn emit(&self) -> String {
        self.0.iter().map(|(uuid, store)| format!("{uuid} {store}\n")).collect()
    }

    fn parse(body: &str) -> Option<DeviceIdentities> {
        let entry = |line: &str| {
            let (uuid, store) = line.split_once(' ')?;
            Some((uuid.parse().ok()?, store.to_owned()))
        };
        body.lines().map(entry).collect::<Option<_>>().map(DeviceIdentities)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nvme::feature::WriteProtectState;

    use crate::core::subsystem::persistence::Persist;
    use crate::state::block_size;
    use crate::state::identity::*;

    fn remember(directory: &Path, served: BTreeMap<Uuid, String>) {
        DeviceIdentities::prepare(directory, served)
            .unwrap()
            .map_or(Ok(()), PreparedFile::persist)
            .unwrap();
    }

    /// Sets or clears the write protection of OLD.
    fn protect(directory: &Path, is_on: bool) {
        let file = NamespaceFile::new(directory, OLD);
        let state = WriteProtectState::PROTECTED;
        file.replace(Some(&state).filter(|_| is_on), None).unwrap();
    }

    const OLD: Uuid = Uuid::from_u128(1);
    const NEW: Uuid = Uuid::from_u128(2);

    #[test]
    fn a_device_with_persistent_state_is_not_served_under_another_uuid() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let (one, two) = (of_path(Path::new("/srv/a\nb.img")), of_path(Path::new("/srv/two")));
        remember(at, BTreeMap::from([(OLD, one.clone())]));
        let check = |uuid, store: &_| {
            DeviceIdentities::load(at).unwrap().check(at, (uuid, &BTreeSet::from([uuid])), store)
        };
        assert_eq!((check(OLD, &one), check(NEW, &one)), (Ok(()), Ok(())));
        // The block size has another rule.
        let nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        let format = block_size::open((nqn, 1), at, OLD.into_bytes(), Path::new("/srv/one"), 512);
        format.unwrap().choose(4096).unwrap();
        assert_eq!(check(NEW, &one), Ok(()));
        fs::remove_file(NamespaceFile::new(at, OLD).path()).unwrap();
        let file = |uuid: Uuid, end: &str| at.join(format!("{uuid}.{end}"));
        for (end, thing) in [("namespace", "write protection"), ("trust", "what cannot be read")] {
            match end {
                "namespace" => protect(at, true),
                _ => fs::write(file(OLD, end), "").unwrap(),
            }
            let why = check(NEW, &one).unwrap_err();
            let parts = [thing, &*format!("uuid = \"{OLD}\""), &*format!("{OLD}.{end}")];
            assert!(parts.iter().all(|part| why.contains(part)), "{why}");
            assert_eq!((check(OLD, &one), check(NEW, &two)), (Ok(()), Ok(())));
            let both = BTreeSet::from([OLD, NEW]);
            let why =
                DeviceIdentities::load(at).unwrap().check(at, (NEW, &both), &one).unwrap_err();
            assert!(why.contains("start once without") && !why.contains("rename"), "{why}");
            // The remedy in the message.
            fs::rename(file(OLD, end), file(NEW, end)).unwrap();
            assert_eq!(check(NEW, &one), Ok(()));
        }
    }

    #[test]
    fn identities_of_removed_devices_with_persistent_state_are_retained() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let served =
            |uuids: &[Uuid]| uuids.iter().map(|uuid| (*uuid, "\"/a\"".to_owned())).collect();
        protect(at, true);
        for (now, after) in
            [(&[OLD, NEW][..], &[OLD, NEW][..]), (&[], &[OLD]), (&[NEW], &[OLD, NEW])]
        {
            remember(at, served(now));
            assert_eq!(DeviceIdentities::load(at).unwrap(), DeviceIdentities(served(after)));
        }
        protect(at, false);
        remember(at, served(&[NEW]));
        assert_eq!(DeviceIdentities::load(at).unwrap(), DeviceIdentities(served(&[NEW])));
    }

    #[test]
    fn a_damaged_identity_list_is_rejected_and_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        remember(at, BTreeMap::from([(OLD, "\"/a\"".to_owned())]));
        let good = fs::read(at.join(FILE)).unwrap();
        for (place, bit) in (0..good.len()).flat_map(|at| (0..8).map(move |bit| (at, 1 << bit))) {
            let mut bad = good.clone();
            bad[place] ^= bit;
            fs::write(at.join(FILE), bad).unwrap();
            assert!(DeviceIdentities::load(at).unwrap_err().contains("restore it, or remove it"));
        }
        for cut in 0..good.len() {
            fs::write(at.join(FILE), &good[..cut]).unwrap();
            assert!(DeviceIdentities::load(at).is_err(), "{cut} bytes of it");
            protect(at, true);
            let served = BTreeMap::from([(NEW, "\"/b\"".to_owned())]);
            assert!(DeviceIdentities::prepare(at, served).unwrap().is_none(), "nor written over");
            protect(at, false);
        }
    }
}
