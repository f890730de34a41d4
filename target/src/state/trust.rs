//! Devices that are not trusted: a sync has failed, a file was shortened while it was served, or its
//! path led to another one.
//! Data that hosts have written may be missing, so this persists until an administrator trusts the
//! device again (`nvmfctl namespace trust`): no reload, restart or reopening ends it.
//!
//! It is persisted by the UUID of the namespace, in the state directory, with the hosts that do not
//! know of the failure: after a trust the next flush of each fails
//! ([`crate::core::subsystem::unflushed`]). Without such a directory it ends with the daemon.
//!
//! That the path of a file leads elsewhere has a section of its own, with the hosts that have not
//! flushed what they wrote to that file: this is lost only if another file is trusted.

use std::collections::BTreeMap;
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
use crate::state::namespace_state::{NamedLines, NamespaceFile};

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

    /// The persisted hosts of a namespace: those that do not know of a failure, and those with
    /// unflushed writes to a file whose path led elsewhere.
    pub(crate) fn hosts(&self, uuid: Uuid) -> [Vec<HostKey>; 2] {
        self.reason(&mut lock(&self.known), uuid).hosts()
    }

    /// Removes hosts that know of the failure now; where a file is served whose path leads elsewhere,
    /// follows which hosts have not flushed. What cannot be written is retried, and so is all of it
    /// while another record is written, which may hang.
    pub(crate) fn update_hosts(&self) {
        let Ok(mut known) = self.known.try_lock() else { return };
        let is_due = |it: &Reason| !it.lost.hosts.is_empty() || it.replaced.is_some();
        let due = known.iter().filter(|(_, reason)| is_due(reason));
        let due: Vec<_> = due.map(|(uuid, it)| (*uuid, it.clone())).collect();
        for (uuid, mut reason) in due {
            let hosts = self.hosts_now(uuid, reason.distrust());
            let Some([unreported, unflushed]) = hosts else { continue };
            reason.lost.hosts.retain(|host| unreported.contains(host));
            if let Some(replaced) = &mut reason.replaced {
                replaced.hosts = unflushed;
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

    /// The same hosts as they are now; none if the namespace was never served.
    fn hosts_now(&self, uuid: Uuid, distrust: Distrust) -> Option<[Vec<HostKey>; 2]> {
        let registry = self.registry.get()?;
        let hosts = |is_trusted| registry.unreported_hosts(uuid.into_bytes(), is_trusted);
        // While only the path of a file leads elsewhere, nothing is lost.
        let is_trusted = Distrust { replaced: None, ..distrust }.is_nothing();
        Some([hosts(is_trusted)?, hosts(false)?])
    }

    fn reason(&self, known: &mut BTreeMap<Uuid, Reason>, uuid: Uuid) -> Reason {
        if let Some(reason) = known.get(&uuid) {
            return reason.clone();
        }
        let Some(directory) = &self.directory else { return Reason::default() };
        let file = NamespaceFile::new(directory, uuid);
        let load = || Ok(Reason { lost: file.load()?.unwrap_or_default(), replaced: file.load()? });
        let reason = load().unwrap_or_else(|why: String| {
            error!(
                "{why}; its flush counts as failed: check the data, then \
                 `nvmfctl namespace trust`"
            );
            let distrust =
                Distrust { failed_sync: Some(Status::WRITE_FAULT), ..Distrust::default() };
            Reason::new(distrust, [Vec::new(), Vec::new()])
        });
        known.entry(uuid).or_insert(reason).clone()
    }

    fn replace(
        &self,
        known: &mut BTreeMap<Uuid, Reason>,
        uuid: Uuid,
        reason: Reason,
    ) -> io::Result<()> {
        if let Some(directory) = &self.directory {
            let before = known.get(&uuid).cloned().unwrap_or_default().sections();
            let new = reason.sections();
            NamespaceFile::new(directory, uuid).replace_all(new, before)?;
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
        self.reason(&mut lock(&self.known), uuid).distrust()
    }

    fn set(&self, uuid: Uuid, distrust: Distrust) -> io::Result<()> {
        let hosts = self.hosts_now(uuid, distrust);
        let mut known = lock(&self.known);
        let before = self.reason(&mut known, uuid);
        let hosts = hosts.unwrap_or_else(|| before.hosts());
        let reason = Reason::new(distrust, hosts.clone());
        self.replace(&mut known, uuid, reason).inspect_err(|_| {
            // What cannot be persisted is in force, and so is what cannot be removed.
            let in_force = Reason::new(distrust.with(before.distrust()), hosts);
            known.insert(uuid, in_force);
        })
    }
}

/// Reason for the distrust of a device, and the hosts that do not know of it, as sections.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Reason {
    lost: LostWrites,
    replaced: Option<ReplacedFile>,
}

impl Reason {
    fn new(distrust: Distrust, [hosts, unflushed]: [Vec<HostKey>; 2]) -> Reason {
        let Distrust { failed_sync, shortened, replaced } = distrust;
        let replaced = replaced.map(|inode| ReplacedFile { inode, hosts: unflushed });
        Reason { lost: LostWrites { failed_sync, shortened, hosts }, replaced }
    }

    fn distrust(&self) -> Distrust {
        let LostWrites { failed_sync, shortened, .. } = self.lost;
        Distrust { failed_sync, shortened, replaced: self.replaced.as_ref().map(|it| it.inode) }
    }

    fn hosts(&self) -> [Vec<HostKey>; 2] {
        let unflushed = self.replaced.as_ref().map(|it| it.hosts.clone());
        [self.lost.hosts.clone(), unflushed.unwrap_or_default()]
    }

    fn sections(&self) -> [NamedLines; 2] {
        let lost = Some(&self.lost).filter(|it| **it != LostWrites::default());
        let replaced = self.replaced.as_ref();
        [
            (LostWrites::NAME, lost.map(Section::emit)),
            (ReplacedFile::NAME, replaced.map(Section::emit)),
        ]
    }
}

/// Writes that may be lost, and the hosts that do not know of it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct LostWrites {
    pub(crate) failed_sync: Option<Status>,
    pub(crate) shortened: bool,
    pub(crate) hosts: Vec<HostKey>,
}

impl Section for LostWrites {
    const NAME: &'static str = "trust";

    fn emit(&self) -> String {
        let status = self.failed_sync.map_or(0, Status::field);
        let (shortened, hosts) = (u8::from(self.shortened), emit_hosts(&self.hosts));
        format!("failed_sync {status:04x}\nshortened {shortened}\n{hosts}")
    }

    fn parse(body: &str) -> Option<LostWrites> {
        let mut lines = body.lines();
        let field = u16::from_str_radix(lines.next()?.strip_prefix("failed_sync ")?, 16).ok()?;
        let failed_sync = (field != 0).then(|| Status::from_field(field));
        let shortened = lines.next()? == "shortened 1";
        let lost = LostWrites { failed_sync, shortened, hosts: parse_hosts(lines)? };
        Some(lost).filter(|it| *it != LostWrites::default())
    }
}

/// A file that was served for writing while its path led elsewhere, and the hosts that have not
/// flushed what they have written to it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ReplacedFile {
    pub(crate) inode: Inode,
    pub(crate) hosts: Vec<HostKey>,
}

impl Section for ReplacedFile {
    const NAME: &'static str = "replaced";

    fn emit(&self) -> String {
        let Inode { device, number, born_ns } = self.inode;
        format!("inode {device} {number} {born_ns}\n{}", emit_hosts(&self.hosts))
    }

    fn parse(body: &str) -> Option<ReplacedFile> {
        let mut lines = body.lines();
        let numbers = lines.next()?.strip_prefix("inode ")?.split(' ');
        let numbers: Vec<_> = numbers.map(|each| each.parse().ok()).collect::<Option<_>>()?;
        let [device, number, born_ns] = numbers.try_into().ok()?;
        let inode = Inode { device, number, born_ns };
        Some(ReplacedFile { inode, hosts: parse_hosts(lines)? })
    }
}

fn emit_hosts(hosts: &[HostKey]) -> String {
    hosts.iter().map(|(host, id)| format!("host {} {host}\n", Uuid::from_bytes(*id))).collect()
}

fn parse_hosts<'a>(lines: impl Iterator<Item = &'a str>) -> Option<Vec<HostKey>> {
    let host = |line: &str| {
        let (id, host) = line.strip_prefix("host ")?.split_once(' ')?;
        Some((host.parse().ok()?, id.parse::<Uuid>().ok()?.into_bytes()))
    };
    lines.map(host).collect()
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
        let kept = || records().hosts(uuid)[0].clone();
        first.set(uuid, FAILED).unwrap();
        assert_eq!(kept(), []);
        registry.presume_written(&nqn, 1);
        first.set(uuid, FAILED).unwrap();
        assert_eq!((records().of(uuid), kept()), (FAILED, hosts.to_vec()));
        registry.report_lost_writes(&nqn, 1);
        first.set(uuid, Distrust::default()).unwrap();
        assert_eq!((records().of(uuid), kept()), (Distrust::default(), hosts.to_vec()));
        first.update_hosts();
        assert_eq!(kept(), hosts);
        assert_eq!(hosts_of[0].unflushed.begin_flush(1), None);
        first.update_hosts();
        assert_eq!(kept(), hosts[1..]);
        // The path of the file leads elsewhere, and the host that knows writes to it.
        hosts_of[0].unflushed.presume_written(1);
        first.set(uuid, MOVED).unwrap();
        assert_eq!(records().hosts(uuid), [hosts[1..].to_vec(), hosts.to_vec()]);
        assert_eq!(hosts_of[1].unflushed.begin_flush(1), None);
        first.update_hosts();
        assert_eq!(records().hosts(uuid), [vec![], hosts[..1].to_vec()]);
        // One that writes afterwards.
        hosts_of[1].unflushed.presume_written(1);
        first.update_hosts();
        assert_eq!(records().hosts(uuid), [vec![], hosts.to_vec()]);
        first.forget(uuid).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    /// The monitor of the next start may record that before the hosts are restored.
    #[test]
    fn a_file_that_is_back_after_a_restart_leaves_the_hosts_of_an_earlier_failure() {
        let directory = tempfile::tempdir().unwrap();
        let records = || DeviceTrust::new(Some(directory.path().to_owned()));
        let hosts = [1, 2].map(|host| ("nqn.2026-11.host:a".parse().unwrap(), [host; 16]));
        let file = NamespaceFile::new(directory.path(), UUID);
        let moved = Reason::new(MOVED, [hosts[..1].to_vec(), hosts.to_vec()]);
        file.replace_all(moved.sections(), Reason::default().sections()).unwrap();
        assert_eq!(records().hosts(UUID), moved.hosts());
        records().set(UUID, Distrust::default()).unwrap();
        assert_eq!(records().hosts(UUID), [hosts[..1].to_vec(), vec![]]);
        records().forget(UUID).unwrap();
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
        assert!(records.set(UUID, MOVED).is_err());
        assert_eq!(records.of(UUID), Distrust { replaced: MOVED.replaced, ..FAILED });
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
