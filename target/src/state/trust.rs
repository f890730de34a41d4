//! Devices that are not trusted: a sync has failed, a file was shortened while it was served, or its
//! path led to another one.
//! Data that hosts have written may be missing, so this persists until an administrator trusts the
//! device again (`nvmfctl namespace trust`): no reload, restart or reopening ends it.
//!
//! It is persisted by the UUID of the namespace, in the state directory, with the hosts that do not
//! know of the failure: after a trust the next flush of each fails
//! ([`crate::core::subsystem::unflushed`]). Without such a directory it ends with the daemon.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use nvme::Status;
use tracing::error;
use uuid::Uuid;

use crate::blockdev::monitor::{Distrust, TrustRecords};
use crate::blockdev::{Inode, lock};
use crate::core::registry::{HostKey, Registry};
use crate::core::subsystem::persistence::Section;
use crate::state::namespace_state::NamespaceFile;

/// Devices that are not trusted, by the UUID of their namespaces.
#[derive(Debug, Default)]
pub(crate) struct DeviceTrust {
    directory: Option<PathBuf>,
    known: Mutex<BTreeMap<Uuid, Reason>>,
    /// Has the hosts.
    registry: OnceLock<Arc<Registry>>,
}

impl DeviceTrust {
    /// Reads the state of this directory, if any.
    pub(crate) fn new(directory: Option<PathBuf>) -> DeviceTrust {
        DeviceTrust { directory, ..DeviceTrust::default() }
    }

    /// Persists hosts of this registry.
    pub(crate) fn with_hosts_of(&self, registry: &Arc<Registry>) {
        self.registry.get_or_init(|| Arc::clone(registry));
    }

    /// The persisted hosts of a namespace.
    pub(crate) fn hosts(&self, uuid: Uuid) -> Vec<HostKey> {
        self.reason(&mut lock(&self.known), uuid).hosts
    }

    /// Removes hosts that know of the failure now; where a file is served whose path leads elsewhere,
    /// follows which hosts have not flushed. What cannot be written is retried, and so is all of it
    /// while another record is written, which may hang.
    pub(crate) fn update_hosts(&self) {
        let Ok(mut known) = self.known.try_lock() else { return };
        let is_due = |it: &Reason| !it.hosts.is_empty() || it.distrust.replaced.is_some();
        let due = known.iter().filter(|(_, reason)| is_due(reason));
        let due: Vec<_> = due.map(|(uuid, it)| (*uuid, it.clone())).collect();
        for (uuid, mut reason) in due {
            let Some(now) = self.hosts_now(uuid, reason.distrust) else { continue };
            match reason.distrust.replaced {
                Some(_) => reason.hosts = now,
                None => reason.hosts.retain(|host| now.contains(host)),
            }
            if known.get(&uuid) != Some(&reason) {
                let _ = self.replace(&mut known, uuid, reason);
            }
        }
    }

    /// Removes the record of a deleted namespace.
    pub(crate) fn forget(&self, uuid: Uuid) -> io::Result<()> {
        self.replace(&mut lock(&self.known), uuid, Reason::default())
    }

    /// The hosts that do not know; none if the namespace was never served.
    fn hosts_now(&self, uuid: Uuid, distrust: Distrust) -> Option<Vec<HostKey>> {
        self.registry.get()?.unreported_hosts(uuid.into_bytes(), distrust.is_nothing())
    }

    fn reason(&self, known: &mut BTreeMap<Uuid, Reason>, uuid: Uuid) -> Reason {
        if let Some(reason) = known.get(&uuid) {
            return reason.clone();
        }
        let Some(directory) = &self.directory else { return Reason::default() };
        let reason = NamespaceFile::new(directory, uuid).load().unwrap_or_else(|why| {
            error!(
                "{why}; its flush counts as failed: check the data, then \
                 `nvmfctl namespace trust`"
            );
            let distrust =
                Distrust { failed_sync: Some(Status::WRITE_FAULT), ..Distrust::default() };
            Some(Reason { distrust, hosts: Vec::new() })
        });
        known.entry(uuid).or_insert(reason.unwrap_or_default()).clone()
    }

    fn replace(
        &self,
        known: &mut BTreeMap<Uuid, Reason>,
        uuid: Uuid,
        reason: Reason,
    ) -> io::Result<()> {
        if let Some(directory) = &self.directory {
            let before = known.get(&uuid).filter(|before| !before.is_nothing());
            let new = Some(&reason).filter(|_| !reason.is_nothing());
            NamespaceFile::new(directory, uuid).replace(new, before)?;
        }
        known.insert(uuid, reason);
        Ok(())
    }
}

impl TrustRecords for DeviceTrust {
    fn is_durable(&self) -> bool {
        self.directory.is_some()
    }

    fn of(&self, uuid: Uuid) -> Distrust {
        self.reason(&mut lock(&self.known), uuid).distrust
    }

    fn set(&self, uuid: Uuid, distrust: Distrust) -> io::Result<()> {
        let hosts = self.hosts_now(uuid, distrust);
        let mut known = lock(&self.known);
        let hosts = hosts.unwrap_or_else(|| self.reason(&mut known, uuid).hosts);
        let reason = Reason { distrust, hosts };
        if !distrust.is_nothing() {
            known.insert(uuid, reason.clone());
        }
        self.replace(&mut known, uuid, reason)
    }
}

/// Reason for the distrust of a device, and the hosts that do not know of it, as a section.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Reason {
    pub(crate) distrust: Distrust,
    pub(crate) hosts: Vec<HostKey>,
}

impl Reason {
    fn is_nothing(&self) -> bool {
        *self == Reason::default()
    }
}

impl Section for Reason {
    const NAME: &'static str = "trust";

    fn emit(&self) -> String {
        let Distrust { failed_sync, shortened, replaced } = self.distrust;
        let status = failed_sync.map_or(0, Status::field);
        let mut text = format!("failed_sync {status:04x}\nshortened {}\n", u8::from(shortened));
        // Writing to a string does not fail.
        if let Some(Inode { device, number, born_ns }) = replaced {
            let _ = writeln!(text, "replaced {device} {number} {born_ns}");
        }
        for (host, id) in &self.hosts {
            let _ = writeln!(text, "host {} {host}", Uuid::from_bytes(*id));
        }
        text
    }

    fn parse(body: &str) -> Option<Reason> {
        let mut lines = body.lines();
        let field = u16::from_str_radix(lines.next()?.strip_prefix("failed_sync ")?, 16).ok()?;
        let failed_sync = (field != 0).then(|| Status::from_field(field));
        let shortened = lines.next()? == "shortened 1";
        let mut lines = lines.peekable();
        let inode = lines.next_if(|line| line.starts_with("replaced "));
        let replaced = match inode {
            Some(line) => Some(parse_inode(line.strip_prefix("replaced ")?)?),
            None => None,
        };
        let distrust = Distrust { failed_sync, shortened, replaced };
        let host = |line: &str| {
            let (id, host) = line.strip_prefix("host ")?.split_once(' ')?;
            Some((host.parse().ok()?, id.parse::<Uuid>().ok()?.into_bytes()))
        };
        let reason = Reason { distrust, hosts: lines.map(host).collect::<Option<_>>()? };
        Some(reason).filter(|it| !it.is_nothing())
    }
}

fn parse_inode(text: &str) -> Option<Inode> {
    let numbers: Vec<_> = text.split(' ').map(|each| each.parse().ok()).collect::<Option<_>>()?;
    let [device, number, born_ns] = numbers.try_into().ok()?;
    Some(Inode { device, number, born_ns })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};

    use crate::core::registry::testing::visit;
    use crate::core::subsystem::persistence::Persist;
    use crate::core::subsystem::testing::sample;
    use crate::state::trust::*;

    const FAILED: Distrust =
        Distrust { failed_sync: Some(Status::WRITE_FAULT), shortened: false, replaced: None };
    const MOVED: Distrust = Distrust {
        failed_sync: None,
        shortened: false,
        replaced: Some(Inode { device: 64769, number: u64::MAX, born_ns: 1 }),
    };
    const UUID: Uuid = Uuid::from_u128(7);

    #[test]
    fn a_distrust_survives_restarts_until_it_is_cleared() {
        let directory = tempfile::tempdir().unwrap();
        let records = || DeviceTrust::new(Some(directory.path().to_owned()));
        assert_eq!(records().of(UUID), Distrust::default());
        for distrust in [FAILED, Distrust { shortened: true, ..FAILED }, MOVED] {
            records().set(UUID, distrust).unwrap();
            assert_eq!(
                (records().of(UUID), records().of(Uuid::nil())),
                (distrust, Distrust::default())
            );
        }
        records().set(UUID, Distrust::default()).unwrap();
        assert_eq!(records().of(UUID), Distrust::default());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    /// Otherwise the first flush after the restart would confirm lost data.
    #[test]
    fn hosts_without_the_failure_are_persisted_until_they_know_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let records = || DeviceTrust::new(Some(directory.path().to_owned()));
        let (registry, subsystem) = (Registry::new(vec![], 8, 1 << 20), sample());
        let (registry, nqn) = (Arc::new(registry), subsystem.nqn);
        let uuid = Uuid::from_bytes(subsystem.namespaces[0].uuid);
        registry.publish(Arc::new(subsystem));
        let hosts = [1, 2].map(|host| ("nqn.2026-11.host:a".parse().unwrap(), [host; 16]));
        let connect = |(host, id)| {
            let data = ConnectData::new(id, CNTLID_DYNAMIC, &nqn, &host);
            registry.connect_admin(&data, &visit()).unwrap().association
        };
        let hosts_of = hosts.map(connect);
        hosts_of[1].unflushed.presume_written(2);
        let first = records();
        first.with_hosts_of(&registry);
        first.set(uuid, FAILED).unwrap();
        assert_eq!(records().hosts(uuid), []);
        first.set(uuid, MOVED).unwrap();
        hosts_of[0].unflushed.presume_written(1);
        first.update_hosts();
        assert_eq!(records().hosts(uuid), hosts[..1], "it writes to the file that has no path");
        registry.presume_written(&nqn, 1);
        first.set(uuid, FAILED).unwrap();
        assert_eq!((records().of(uuid), records().hosts(uuid)), (FAILED, hosts.to_vec()));
        registry.report_lost_writes(&nqn, 1);
        first.set(uuid, Distrust::default()).unwrap();
        assert_eq!(
            (records().of(uuid), records().hosts(uuid)),
            (Distrust::default(), hosts.to_vec())
        );
        first.update_hosts();
        assert_eq!(records().hosts(uuid), hosts);
        assert_eq!(hosts_of[0].unflushed.begin_flush(1), None);
        first.update_hosts();
        assert_eq!(records().hosts(uuid), hosts[1..]);
        first.forget(uuid).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn a_distrust_without_a_state_directory_ends_with_the_daemon() {
        let records = DeviceTrust::new(None);
        records.set(UUID, FAILED).unwrap();
        assert_eq!(
            (records.of(UUID), DeviceTrust::new(None).of(UUID)),
            (FAILED, Distrust::default())
        );
    }

    #[test]
    fn a_distrust_that_cannot_be_persisted_or_removed_is_in_force() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        let records = DeviceTrust::new(Some(path.clone()));
        assert!(records.set(UUID, FAILED).is_err());
        assert_eq!(records.of(UUID), FAILED);
        assert!(records.set(UUID, Distrust::default()).is_err());
        assert_eq!(records.of(UUID), FAILED);
        fs::create_dir(&path).unwrap();
        records.set(UUID, FAILED).unwrap();
        assert_eq!(DeviceTrust::new(Some(path)).of(UUID), FAILED);
    }

    #[test]
    fn a_damaged_trust_record_counts_as_a_failed_sync() {
        let directory = tempfile::tempdir().unwrap();
        let new = || DeviceTrust::new(Some(directory.path().to_owned()));
        new().set(UUID, Distrust { shortened: true, ..MOVED }).unwrap();
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
