//! The device table: opened backing stores, and the subsystems that use them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvme::{Nqn, Text};
use tracing::{error, info};
use uuid::Uuid;

use super::interned::WeakByUuid;
use super::interned_bad_blocks::InternedBadBlocks;
use super::rollback::CreatedFiles;
use crate::blockdev::{BackingConfig, BackingDevice, BlockSizes, DeviceId, Kind};
use crate::config::{LimitConfig, Missing, NamespaceConfig, NamespaceKind, SubsystemConfig};
use crate::core::subsystem::lba_format::Format;
use crate::core::subsystem::write_protect::Protection;
use crate::state::atomic_file::PreparedFile;
use crate::state::block_size;
use crate::state::group_records::{GroupRecords, NamespaceObject};
use crate::state::identity::DeviceIdentities;
use crate::state::namespace_state::NamespaceFile;
use crate::state::served::Served;

use crate::blockdev::monitor::{MonitoredDevice, ResizeGuard};
use crate::core::subsystem::bad_blocks::BadBlocks;
use crate::core::subsystem::reservation::Reservation;
use crate::core::subsystem::usage::Usage;
use crate::core::subsystem::{Namespace, Subsystem};
use crate::state::trust::DeviceTrust;

use super::limiters::Limiters;
use super::pending::{PendingDevice, PendingProbe};
use crate::blockdev::blocking::{BlockingPool, BlockingTask};

/// Time limit for opening a device.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How long a start retries to open a device that may become available: the ring of a daemon that
/// was just killed may still hold locks, and a host that reconnects meanwhile and does not find its
/// namespace removes it.
const LINGER: Duration = Duration::from_secs(8);

/// A device that is open, and the state of its namespace.
#[derive(Clone, Debug)]
pub struct ServedDevice {
    /// The device, and its number on every ring.
    pub monitored: Arc<MonitoredDevice>,
    /// Reservations of hosts.
    pub reservation: Arc<Reservation>,
    /// Write protection by hosts.
    pub protection: Arc<Protection>,
    /// Blocks that hosts have made unreadable.
    pub marks: Arc<BadBlocks>,
    /// Block size that a host has chosen by a format.
    pub format: Arc<Format>,
    /// UUID, and for a file or block device its persisted identity.
    pub(super) name: (Uuid, Option<String>),
    /// Configured block size.
    pub(super) configured_block_bytes: u32,
    /// New size in bytes that takes effect when the table is adopted, if it differs.
    pub(super) resize: Option<NewSize>,
}

/// A size in bytes, and what keeps it that of the file.
pub(super) type NewSize = (u64, Arc<ResizeGuard>);

impl ServedDevice {
    /// UUID of the namespace.
    pub(crate) fn uuid(&self) -> Uuid {
        self.name.0
    }
}

/// The devices of a configuration, by subsystem and namespace id.
#[derive(Clone, Debug, Default)]
pub struct DeviceTable {
    pub(super) by_namespace: BTreeMap<(Nqn, u32), ServedDevice>,
    pub(super) next_id: u32,
    /// Number of rings.
    pub(super) rings: usize,
    /// Directory of the records that survive a power loss.
    pub(super) state_directory: Option<PathBuf>,
    /// Where the state of images is persisted instead, in a gateway group.
    pub(super) group_records: Option<Arc<GroupRecords>>,
    /// Rate limiters of namespaces and hosts.
    pub(super) limiters: Limiters,
    /// Namespaces whose device is missing, and missing directories.
    pub(super) pending: Vec<PendingDevice>,
    /// Notices for the administrator, reported when the table is adopted.
    pub(super) notices: Vec<String>,
    /// Tasks that may hang, of this table and its predecessors.
    pub(super) opening: Arc<BlockingPool>,
    /// Bad blocks of these devices, and of removed ones that are still in use.
    pub(super) marked: Arc<InternedBadBlocks>,
    /// The same for reservations and write protection.
    pub(super) reservations: Arc<WeakByUuid<Reservation>>,
    pub(super) protections: Arc<WeakByUuid<Protection>>,
    /// Devices that are not trusted.
    pub(super) trust: Arc<DeviceTrust>,
    /// How long a start retries.
    pub(super) linger: Option<Duration>,
    /// The daemon starts: a device that cannot be opened does not prevent others.
    pub(super) is_starting: bool,
    /// Files created for this table, removed unless it is adopted.
    pub(super) attempt: CreatedFiles,
    /// The list of served files could not be written.
    pub(super) has_unwritten_records: bool,
}

/// Identities of served files and names of devices, to be persisted.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Memory(Vec<PreparedFile>);

impl Memory {
    /// Writes the records, so that they survive a power loss.
    pub(crate) fn persist(self) -> std::io::Result<()> {
        self.0.into_iter().try_for_each(PreparedFile::persist)
    }
}

/// A namespace: its subsystem and its id.
pub(crate) type Place = (Nqn, u32);

impl DeviceTable {
    /// A table without devices, for this number of rings. `state_directory`: the directory of the
    /// records, if any.
    pub fn new(state_directory: Option<PathBuf>, rings: usize) -> DeviceTable {
        let (linger, is_starting) = (Some(LINGER), true);
        let trust = Arc::new(DeviceTrust::new(state_directory.clone()));
        DeviceTable { state_directory, rings, linger, is_starting, trust, ..DeviceTable::default() }
    }

    /// Persists the state of images in the object of a gateway group.
    pub fn in_group(self, records: Arc<GroupRecords>) -> DeviceTable {
        DeviceTable { group_records: Some(records), ..self }
    }

    /// Disables the retries of a start.
    #[cfg(test)]
    pub(crate) fn without_linger(self) -> DeviceTable {
        DeviceTable { linger: None, ..self }
    }

    /// Opens the devices that `subsystems` need, and retains those of `self` that do not change.
    /// Closes nothing: a device is closed when the old `DeviceTable` is dropped.
    ///
    /// # Errors
    /// One sentence about the first store that cannot be served.
    pub fn next(&self, subsystems: &[SubsystemConfig]) -> Result<DeviceTable, String> {
        self.next_or_wait(subsystems, Missing::Fail, &[])
    }

    /// As [`DeviceTable::next`], except that missing devices may be pending. Of pending devices
    /// only those that are `due` are probed, since a probe may take long.
    ///
    /// # Errors
    /// One sentence about the first store that cannot be served, and cannot be pending.
    pub(crate) fn next_or_wait(
        &self,
        subsystems: &[SubsystemConfig],
        missing: Missing,
        due: &[Place],
    ) -> Result<DeviceTable, String> {
        self.next_as(subsystems, missing, due, &|_, _| true)
    }

    /// As [`DeviceTable::next_or_wait`], for a request of a host, which concerns one namespace: no
    /// other open device is probed, so a device that fails or hangs does not prevent it.
    ///
    /// # Errors
    /// One sentence about the first new store that cannot be served, and cannot be pending.
    pub(crate) fn next_for_order(
        &self,
        subsystems: &[SubsystemConfig],
        missing: Missing,
    ) -> Result<DeviceTable, String> {
        self.next_as(subsystems, missing, &[], &|_, _| false)
    }

    /// As [`DeviceTable::next_or_wait`], for a change of `served`: of the open devices, only those
    /// whose namespaces differ are probed.
    ///
    /// # Errors
    /// One sentence about the first store that cannot be served, and cannot be pending.
    pub(crate) fn next_for_change(
        &self,
        served: &[SubsystemConfig],
        subsystems: &[SubsystemConfig],
        missing: Missing,
    ) -> Result<DeviceTable, String> {
        let served: BTreeMap<Place, &NamespaceConfig> =
            namespaces(served).map(|(s, namespace)| ((s.nqn, namespace.nsid), namespace)).collect();
        let differs = |key: Place, namespace: &NamespaceConfig| {
            served.get(&key).is_none_or(|was| *was != namespace)
        };
        self.next_as(subsystems, missing, &[], &differs)
    }

    /// Returns the probe of pending devices, which holds no lock.
    pub(crate) fn pending_probe(&self) -> PendingProbe {
        PendingProbe {
            all: self.pending.clone(),
            state_directory: self.state_directory.clone(),
            opening: Arc::clone(&self.opening),
        }
    }

    /// The pool of tasks that may block, shared with later tables.
    pub(crate) fn opening(&self) -> Arc<BlockingPool> {
        Arc::clone(&self.opening)
    }

    /// Begins a task that may block: see [`BlockingPool::begin`].
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> BlockingTask<'_, T> {
        self.opening.begin(path, act)
    }

    /// Whether the next table is that of a start.
    pub(crate) fn is_starting(&self) -> bool {
        self.is_starting
    }

    /// Pending devices and directories that only a reload retries.
    pub(crate) fn held(&self) -> Vec<Place> {
        self.pending.iter().filter(|each| each.is_held).map(PendingDevice::key).collect()
    }

    /// Namespaces whose device is missing, and missing directories.
    pub fn pending(&self) -> &[PendingDevice] {
        &self.pending
    }

    /// Takes over the pending devices of another table.
    pub(crate) fn replace_pending(&mut self, other: DeviceTable) {
        self.pending = other.pending;
    }

    /// Adds a missing directory of host-created namespaces.
    pub(crate) fn add_pending_directory(&mut self, directory: PendingDevice) {
        self.pending.push(directory);
    }

    /// The directory of the host-created namespaces of a subsystem, if it is pending.
    pub(crate) fn pending_directory(&self, nqn: Nqn) -> Option<&PendingDevice> {
        self.pending.iter().find(|each| each.is_directory_of(nqn))
    }

    /// Why a namespace is pending, if it is.
    pub(crate) fn why_pending(&self, nqn: Nqn, nsid: u32) -> Option<&str> {
        let pending = self.pending.iter().find(|each| each.key() == (nqn, nsid));
        pending.map(|each| each.why.as_str())
    }

    /// Persisted list of the files that were served before.
    pub(super) fn served(&self) -> Served {
        Served::load(self.state_directory.as_deref())
    }

    /// Prepares the records of served files and identities, which prevent that a served file is
    /// created anew. Pending files stay in the records.
    ///
    /// # Errors
    /// One sentence if a record cannot be prepared.
    pub(crate) fn prepare_memory(&self, subsystems: &[SubsystemConfig]) -> Result<Memory, String> {
        let Some(directory) = &self.state_directory else { return Ok(Memory::default()) };
        let before = self.served();
        let paths = namespaces(subsystems).filter_map(|(subsystem, namespace)| {
            let NamespaceKind::File { path, .. } = &namespace.kind else { return None };
            let is_open = self.by_namespace.contains_key(&(subsystem.nqn, namespace.nsid));
            let was_there = self.pending.iter().any(|each| each.seen() == Some(path));
            (is_open || was_there || before.contains(path)).then(|| path.clone())
        });
        let failed = |error| {
            format!("{} cannot record which files are served: {error}", directory.display())
        };
        let files = Served::prepare(directory, &paths.collect()).map_err(failed)?;
        let named = |store: &ServedDevice| Some((store.name.0, store.name.1.clone()?));
        let named = self.by_namespace.values().filter_map(named).collect();
        let names = DeviceIdentities::prepare(directory, named).map_err(|error| {
            format!("{} cannot record the identities of devices: {error}", directory.display())
        })?;
        Ok(Memory(files.into_iter().chain(names).collect()))
    }

    /// Writes the records of served files and identities. A failure is logged, and retried: see
    /// [`DeviceTable::has_unwritten_records`].
    pub(crate) fn remember(&mut self, subsystems: &[SubsystemConfig]) {
        let Some(directory) = self.state_directory.clone() else { return };
        let kept = self.prepare_memory(subsystems).and_then(|memory| {
            let failed = |error| {
                format!("{} cannot record which files are served: {error}", directory.display())
            };
            memory.persist().map_err(failed)
        });
        let was_unwritten = std::mem::replace(&mut self.has_unwritten_records, kept.is_err());
        match kept {
            Ok(()) if was_unwritten => {
                info!("{} lists all served devices again", directory.display())
            }
            Err(sentence) if !was_unwritten => error!(
                "{sentence}; a file missing at the next start may be created anew, empty: the \
                 write is retried each second"
            ),
            _ => {}
        }
    }

    /// Whether the records could not be written, and have to be retried.
    pub(crate) fn has_unwritten_records(&self) -> bool {
        self.has_unwritten_records
    }

    /// The pending device of this namespace, if its configuration is the same.
    pub(super) fn pending_as(
        &self,
        key: Place,
        namespace: &NamespaceConfig,
    ) -> Option<&PendingDevice> {
        self.pending.iter().find(|each| each.is_for(key, namespace))
    }

    pub(super) fn reservation_of(
        &self,
        key: Place,
        namespace: &NamespaceConfig,
    ) -> Result<Arc<Reservation>, String> {
        match (namespace.shared, self.group_record(namespace)) {
            (true, _) => Ok(Reservation::none(key.0, key.1)),
            (false, None) => self.reservation(key, namespace.uuid),
            (false, Some(record)) => {
                let load = || Reservation::kept(key.0, key.1, record);
                self.reservations.get(namespace.uuid, key, load)
            }
        }
    }

    pub(super) fn protection_of(
        &self,
        key: Place,
        namespace: &NamespaceConfig,
    ) -> Result<Arc<Protection>, String> {
        match (namespace.shared, self.group_record(namespace)) {
            (true, _) => Ok(Protection::none(key.0, key.1)),
            (false, None) => self.protection(key, namespace.uuid),
            (false, Some(record)) => {
                let load = || Protection::kept(key.0, key.1, record);
                self.protections.get(namespace.uuid, key, load)
            }
        }
    }

    /// The record of an image that a gateway group serves.
    fn group_record(&self, namespace: &NamespaceConfig) -> Option<NamespaceObject> {
        let is_of_group = matches!(namespace.kind, NamespaceKind::Rbd { .. });
        let records = self.group_records.as_ref().filter(|_| is_of_group)?;
        Some(records.namespace(namespace.ana_group, namespace.uuid))
    }

    fn reservation(&self, key: (Nqn, u32), uuid: Uuid) -> Result<Arc<Reservation>, String> {
        match &self.state_directory {
            Some(directory) => self.reservations.get(uuid, key, || {
                Reservation::kept(key.0, key.1, NamespaceFile::new(directory, uuid))
            }),
            None => Ok(Reservation::volatile(key.0, key.1)),
        }
    }

    fn protection(&self, key: (Nqn, u32), uuid: Uuid) -> Result<Arc<Protection>, String> {
        match &self.state_directory {
            Some(directory) => self.protections.get(uuid, key, || {
                Protection::kept(key.0, key.1, NamespaceFile::new(directory, uuid))
            }),
            None => Ok(Protection::none(key.0, key.1)),
        }
    }

    /// Returns persisted write protection and reservations of a namespace that is not open, by UUID.
    ///
    /// # Errors
    /// One sentence if the persisted state cannot be used.
    pub(crate) fn guards(
        &self,
        key: Place,
        uuid: Uuid,
    ) -> Result<(Arc<Protection>, Arc<Reservation>), String> {
        Ok((self.protection(key, uuid)?, self.reservation(key, uuid)?))
    }

    /// Returns the bad blocks of a device; those of a RAM device are volatile like its data.
    /// `store`: the persisted identity of a file or block device.
    pub(super) fn marks(&self, uuid: Uuid, store: Option<&str>) -> Result<Arc<BadBlocks>, String> {
        match (&self.state_directory, store) {
            (Some(directory), Some(store)) => {
                let load = || BadBlocks::kept(NamespaceFile::new(directory, uuid));
                let served = self.by_namespace.values();
                let is_served = |marks: &Arc<BadBlocks>| {
                    { served }.any(|store| Arc::ptr_eq(&store.marks, marks))
                };
                self.marked.get(uuid, store, is_served, load)
            }
            _ => Ok(BadBlocks::volatile()),
        }
    }

    /// Returns the format of a device; without a state directory a file or block device retains its
    /// block size. `path`: its persistent path.
    pub(super) fn format(
        &self,
        key: (Nqn, u32),
        namespace: &NamespaceConfig,
        path: Option<&Path>,
    ) -> Result<Arc<Format>, String> {
        match (&self.state_directory, &namespace.kind, path) {
            (Some(directory), NamespaceKind::File { .. }, Some(path)) => {
                let (uuid, bytes) = (namespace.uuid.into_bytes(), namespace.block_size_bytes);
                block_size::open(key, directory, uuid, path, bytes)
            }
            (_, NamespaceKind::File { .. } | NamespaceKind::Rbd { .. }, _) => {
                Ok(Format::fixed(key.0, key.1))
            }
            _ => Ok(Format::volatile(key.0, key.1)),
        }
    }

    /// Namespaces whose image has grown since it was served.
    pub(super) fn grown_images(&self) -> Vec<Place> {
        let grown = |store: &ServedDevice| store.monitored.backing().has_grown();
        let places = self.by_namespace.iter().filter(|(_, store)| grown(store));
        places.map(|(place, _)| *place).collect()
    }

    /// Whether the adoption of this table changes the size of an image.
    pub(super) fn has_new_sizes(&self) -> bool {
        let is_new =
            |store: &ServedDevice| store.resize.is_some() && store.monitored.backing().has_grown();
        self.by_namespace.values().any(is_new)
    }

    /// The device of a namespace.
    pub fn store(&self, nqn: Nqn, nsid: u32) -> Option<&ServedDevice> {
        self.by_namespace.get(&(nqn, nsid))
    }

    /// Whether a namespace is served from this file, or image.
    pub(crate) fn serves(&self, key: Place, path: &Path) -> bool {
        self.by_namespace.get(&key).is_some_and(|store| store.monitored.is_at(path))
    }

    /// Removes the persisted state of namespaces that are deleted, by UUID.
    pub(crate) fn forget_kept(&self, gone: &[Uuid]) {
        let Some(directory) = &self.state_directory else { return };
        for uuid in gone {
            self.marked.forget(*uuid);
            self.reservations.forget(*uuid);
            self.protections.forget(*uuid);
            // Files that could not be removed belong to no namespace, and are not used.
            let _ = self.trust.forget(*uuid);
            let _ = NamespaceFile::new(directory, *uuid).remove();
        }
    }

    /// Keeps the created files: the table is in use.
    pub fn keep(&self) {
        self.attempt.keep();
    }

    /// Applies new sizes of devices. Returns one line for each change, and for each configured
    /// value that cannot be applied.
    pub fn resize(&mut self) -> Vec<String> {
        let mut lines = std::mem::take(&mut self.notices);
        for ((nqn, nsid), store) in &mut self.by_namespace {
            let Some((bytes, _guard)) = store.resize.take() else { continue };
            let old = store.monitored.resize(bytes);
            let mut line = format!("namespace {nsid} of {nqn} has {bytes} bytes now, {old} before");
            if bytes < old && store.monitored.backing().kind() == Kind::File {
                line += "; its file is as long as before";
            }
            lines.push(line);
        }
        lines
    }

    /// Sets the rate limiters of a configuration; unchanged limits keep their state.
    pub fn limit(&mut self, quotas: &[LimitConfig], subsystems: &[SubsystemConfig]) {
        self.limiters = self.limiters.next(quotas, subsystems);
    }

    /// Injects the configured faults.
    pub(crate) fn set_faults(&self, subsystems: &[SubsystemConfig]) {
        for (subsystem, namespace) in namespaces(subsystems) {
            if let Some(store) = self.by_namespace.get(&(subsystem.nqn, namespace.nsid)) {
                store.monitored.health().set_fault(namespace.fault);
            }
        }
    }

    /// All devices, with their namespaces.
    pub(crate) fn named(&self) -> impl Iterator<Item = (Place, &ServedDevice)> {
        self.by_namespace.iter().map(|(place, store)| (*place, store))
    }

    /// Devices of this table that `other` does not have.
    pub fn without<'a>(&'a self, other: &'a DeviceTable) -> impl Iterator<Item = &'a ServedDevice> {
        let ids =
            |stores: &DeviceTable, id| stores.by_namespace.values().any(|s| s.monitored.id == id);
        self.by_namespace.values().filter(move |store| !ids(other, store.monitored.id))
    }

    /// The snapshot of a subsystem, with its counters in `usage`.
    pub fn subsystem(&self, config: &SubsystemConfig, usage: Arc<Usage>) -> Subsystem {
        let namespace = |namespace: &NamespaceConfig| {
            let store = self.by_namespace.get(&(config.nqn, namespace.nsid))?;
            let backing = store.monitored.backing();
            let block_shift = backing.block_size_bytes().trailing_zeros() as u8;
            let formats = match namespace.allow_format && store.format.can_change() {
                true => backing.formats(),
                false => BlockSizes::only(block_shift),
            };
            Some(Namespace {
                nsid: namespace.nsid,
                backing: store.monitored.id,
                health: Arc::clone(store.monitored.health()),
                geometry: backing.geometry(),
                blocks: backing.blocks(),
                block_shift,
                read_only: namespace.read_only,
                protection: Arc::clone(&store.protection),
                allow_format: namespace.allow_format,
                formats,
                formatting: store.format.under_way(),
                write_uncorrectable: namespace.write_uncorrectable,
                marks: Arc::clone(&store.marks),
                limiters: self.limiters.of_namespace(
                    config.nqn,
                    namespace.nsid,
                    namespace.shared_limit.as_deref(),
                ),
                ana_group: namespace.ana_group,
                volatile_cache: backing.has_volatile_cache(),
                uuid: namespace.uuid.into_bytes(),
                nguid: namespace.nguid,
                eui64: namespace.eui64,
                reservation: Arc::clone(&store.reservation),
            })
        };
        let mut namespaces: Vec<Namespace> =
            config.namespaces.iter().filter_map(namespace).collect();
        namespaces.sort_by_key(|n| n.nsid);
        usage.prepare(namespaces.iter().map(|n| Arc::clone(&n.health)));
        Subsystem {
            nqn: config.nqn,
            serial: Text::lossy(&config.serial),
            model: Text::lossy(&config.model),
            allow_any_host: config.allow_any_host,
            hosts: config.hosts.clone(),
            offer: Arc::new(config.offer.clone()),
            namespaces,
            management: None,
            host_limiters: Arc::clone(self.limiters.of_hosts()),
            usage,
        }
    }

    /// Returns the next free device number. A number is reused as late as possible: a command for
    /// the previous device may still be in flight.
    pub(super) fn fresh_id(&mut self, old: &DeviceTable) -> Option<DeviceId> {
        let taken = |id| {
            [&*old, &*self]
                .iter()
                .any(|s| s.by_namespace.values().any(|store| store.monitored.id.0 == id))
        };
        let mut ids = (0..DeviceId::COUNT).map(|step| (self.next_id + step) % DeviceId::COUNT);
        let id = ids.find(|&id| !taken(id))?;
        self.next_id = (id + 1) % DeviceId::COUNT;
        Some(DeviceId(id))
    }
}

/// Creates the file of a namespace, and closes it.
///
/// # Errors
/// One sentence about why that is not possible.
pub(crate) fn make(namespace: &NamespaceConfig) -> Result<(), String> {
    let made = BackingDevice::open(&namespace.backing());
    made.map(drop).map_err(|error| error.to_string())
}

pub(super) fn namespaces(
    subsystems: &[SubsystemConfig],
) -> impl Iterator<Item = (&SubsystemConfig, &NamespaceConfig)> {
    subsystems.iter().flat_map(|s| s.namespaces.iter().map(move |n| (s, n)))
}

/// Backing configuration, with the block size that a host has chosen.
pub(super) fn formatted(namespace: &NamespaceConfig, format: &Format) -> BackingConfig {
    let config = namespace.backing();
    let chosen = format.block_size_bytes();
    BackingConfig { block_size_bytes: chosen.unwrap_or(config.block_size_bytes), ..config }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use nvme::Status;
    use nvme::feature::WriteProtectState;

    use crate::blockdev::InjectedFault;
    use crate::core::subsystem::bad_blocks::Change;
    use crate::core::subsystem::reservation::Barred;
    use crate::core::subsystem::reservation::testing::reserve;
    use crate::provision::devices::*;

    pub(crate) fn subsystem(nsids: &[u32], size: u64) -> SubsystemConfig {
        let namespace = |&nsid: &u32| NamespaceConfig {
            nsid,
            kind: NamespaceKind::Null { size },
            block_size_bytes: 4096,
            uuid: Uuid::from_u128(nsid.into()),
            nguid: [nsid as u8; 16],
            eui64: None,
            read_only: false,
            allow_format: false,
            write_uncorrectable: false,
            limit: Default::default(),
            shared_limit: None,
            ana_group: 1,
            fault: InjectedFault::None,
            shared: false,
        };
        SubsystemConfig {
            nqn: "nqn.2026-11.io.nvmfd:test".parse().unwrap(),
            allow_any_host: true,
            hosts: BTreeSet::new(),
            offer: Default::default(),
            serial: "S".to_owned(),
            model: "M".to_owned(),
            namespaces: nsids.iter().map(namespace).collect(),
            managed: None,
        }
    }

    fn ids(stores: &DeviceTable) -> Vec<u32> {
        stores.by_namespace.values().map(|store| store.monitored.id.0).collect()
    }

    #[test]
    fn write_uncorrectable_on_a_file_needs_a_state_directory() {
        let directory = crate::blockdev::testing::directory();
        let mut config = subsystem(&[1], 1 << 20);
        config.namespaces[0].write_uncorrectable = true;
        let first = DeviceTable::default().next(&[config.clone()]);
        assert!(first.is_ok(), "they end with what they are of");
        let (path, size) = (directory.path().join("disk"), Some(1 << 20));
        config.namespaces[0].kind = NamespaceKind::File { path: path.clone(), size };
        let why = DeviceTable::default().next(&[config.clone()]).unwrap_err();
        assert!(why.contains("`state_directory`, and there is none"), "{why}");
        assert!(!path.exists(), "nothing was made");
        let state = directory.path().join("state");
        std::fs::create_dir(&state).unwrap();
        assert!(DeviceTable::new(Some(state), 1).next(&[config]).is_ok());
    }

    #[test]
    fn the_id_of_a_removed_device_is_not_reused_for_the_next() {
        let first = DeviceTable::default().next(&[subsystem(&[1, 2], 1 << 20)]).unwrap();
        assert_eq!(ids(&first), [0, 1]);
        let second = first.next(&[subsystem(&[1], 1 << 20)]).unwrap();
        let third = second.next(&[subsystem(&[1, 3], 1 << 20)]).unwrap();
        assert_eq!(ids(&third), [0, 2], "a command for the old 1 may still be under way");
        assert_eq!(second.without(&third).count(), 0);
        assert_eq!(first.without(&second).map(|s| s.monitored.id.0).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn device_ids_wrap_around() {
        let mut stores = DeviceTable { next_id: DeviceId::COUNT - 1, ..DeviceTable::default() };
        stores = stores.next(&[subsystem(&[1, 2], 1 << 20)]).unwrap();
        assert_eq!(ids(&stores), [DeviceId::COUNT - 1, 0]);
    }

    #[test]
    fn a_namespace_in_use_cannot_change_its_backing_device() {
        let stores = DeviceTable::default().next(&[subsystem(&[1], 1 << 20)]).unwrap();
        let mut other = subsystem(&[1], 1 << 20);
        other.namespaces[0].kind = NamespaceKind::Ram { size: 1 << 20 };
        let refusal = stores.next(std::slice::from_ref(&other)).unwrap_err();
        assert!(refusal.contains("remove it, reload, add it"), "{refusal}");
        assert!(stores.next(&[]).unwrap().next(&[other]).is_ok());
    }

    #[test]
    fn a_request_cannot_give_an_open_device_another_uuid() {
        let stores = DeviceTable::default().next(&[subsystem(&[1], 1 << 20)]).unwrap();
        let mut other = subsystem(&[1], 1 << 20);
        assert!(stores.next_for_order(std::slice::from_ref(&other), Missing::Wait).is_ok());
        other.namespaces[0].uuid = Uuid::from_u128(9);
        let refusal = stores.next_for_order(&[other], Missing::Wait).unwrap_err();
        assert!(refusal.contains("remove it, reload, add it"), "{refusal}");
    }

    #[test]
    fn a_namespace_is_resized_without_reopening_its_device() {
        let stores = DeviceTable::default().next(&[subsystem(&[1, 2], 1 << 20)]).unwrap();
        let config = subsystem(&[1, 2], 1 << 21);
        let mut next = stores.next(std::slice::from_ref(&config)).unwrap();
        assert_eq!(next.subsystem(&config, Arc::default()).namespaces[0].blocks, 256, "not yet");
        let lines = next.resize();
        let expected =
            "namespace 1 of nqn.2026-11.io.nvmfd:test has 2097152 bytes now, 1048576 before";
        assert_eq!((lines.len(), &*lines[0]), (2, expected));
        assert_eq!(next.subsystem(&config, Arc::default()).namespaces[1].blocks, 512);
        assert_eq!((ids(&next), next.without(&stores).count()), (vec![0, 1], 0));
        assert!(next.resize().is_empty());
    }

    #[test]
    fn a_pending_device_is_opened_only_by_an_attempt_that_is_due() {
        let directory = crate::blockdev::testing::directory();
        let path = directory.path().join("mount/disk.img");
        let mut config = subsystem(&[1], 1 << 20);
        config.namespaces[0].kind = NamespaceKind::File { path: path.clone(), size: None };
        let key = (config.nqn, 1);
        let subsystems = std::slice::from_ref(&config);
        let next = |stores: &DeviceTable, due: &[Place]| {
            stores.next_or_wait(subsystems, Missing::Wait, due).unwrap()
        };
        let stores = next(&DeviceTable::default(), &[]);
        assert_eq!(stores.pending().len(), 1);
        std::fs::create_dir(directory.path().join("mount")).unwrap();
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let carried = next(&stores, &[]);
        assert_eq!((carried.pending(), ids(&carried)), (stores.pending(), vec![]));
        let other = next(&carried, &[(config.nqn, 2)]);
        assert_eq!((other.pending().len(), ids(&other).len()), (1, 0));
        let opened = next(&other, &[key]);
        assert_eq!((opened.pending().len(), ids(&opened)), (0, vec![0]));
        drop(opened);
        // With `Missing::Fail` the result is the device, or an error.
        assert_eq!(ids(&carried.next(subsystems).unwrap()), [0]);
    }

    #[test]
    fn a_hung_path_does_not_delay_probes_of_other_paths() {
        let directory = crate::blockdev::testing::directory();
        let paths = ["one", "two"].map(|name| directory.path().join(name));
        let mut config = subsystem(&[1, 2], 1 << 20);
        for (namespace, path) in config.namespaces.iter_mut().zip(&paths) {
            namespace.kind = NamespaceKind::File { path: path.clone(), size: None };
        }
        let subsystems = std::slice::from_ref(&config);
        let keys = [1, 2].map(|nsid| (config.nqn, nsid));
        let stores = DeviceTable::default().next_or_wait(subsystems, Missing::Wait, &[]).unwrap();
        assert_eq!((stores.pending().len(), stores.pending_probe().available()), (2, vec![]));
        paths.iter().for_each(|path| std::fs::write(path, vec![0; 1 << 20]).unwrap());
        // On a busy machine a probe may time out, so it is repeated.
        let until_come = |keys: &[Place]| {
            while stores.pending_probe().available() != keys {
                std::thread::yield_now();
            }
        };
        until_come(&keys);
        let go_on = stores.opening.hang_at(&paths[0]);
        until_come(&keys[1..]);
        // A later attempt reports the time-out, and does not wait either.
        let fresh = DeviceTable { pending: Vec::new(), ..stores.clone() };
        let next = fresh.next_or_wait(subsystems, Missing::Wait, &[]).unwrap();
        assert!(next.why_pending(config.nqn, 1).unwrap().contains("does not answer"));
        assert_eq!(ids(&next), [0]);
        drop(next);
        let said = fresh.next(subsystems).unwrap_err();
        assert!(said.starts_with("namespace 1 of ") && said.contains("does not answer"), "{said}");
        drop(go_on);
        until_come(&keys);
    }

    /// Each task that may hang waits until the others have begun: sequentially, all of them would
    /// time out.
    #[test]
    fn all_paths_are_probed_opened_and_measured_concurrently() {
        let directory = crate::blockdev::testing::directory();
        let mut config = subsystem(&[1, 2, 3], 1 << 20);
        for namespace in &mut config.namespaces {
            let path = directory.path().join(namespace.nsid.to_string());
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            namespace.kind = NamespaceKind::File { path, size: None };
        }
        let subsystems = std::slice::from_ref(&config);
        let stores = DeviceTable::default();
        *stores.opening.meet.lock().unwrap() = Some(Arc::new(std::sync::Barrier::new(3)));
        let mut next = stores.next_or_wait(subsystems, Missing::Wait, &[]).unwrap();
        assert_eq!((ids(&next), next.pending().len()), (vec![0, 1, 2], 0));
        for namespace in &config.namespaces {
            let NamespaceKind::File { path, .. } = &namespace.kind else { continue };
            std::fs::File::options().append(true).open(path).unwrap().set_len(1 << 21).unwrap();
        }
        next = next.next(subsystems).unwrap();
        assert_eq!(next.resize().len(), 3);
    }

    #[test]
    fn a_locked_file_is_pending_at_startup_and_never_recreated() {
        let directory = crate::blockdev::testing::directory();
        let state = directory.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mut config = subsystem(&[1, 2], 1 << 20);
        let path = |nsid: u32| directory.path().join(nsid.to_string());
        for namespace in &mut config.namespaces {
            let path = path(namespace.nsid);
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            namespace.kind = NamespaceKind::File { path, size: Some(1 << 20) };
        }
        let subsystems = std::slice::from_ref(&config);
        let other = std::fs::File::open(path(1)).unwrap();
        other.lock().unwrap();
        let new = || DeviceTable { linger: None, ..DeviceTable::new(Some(state.clone()), 0) };
        let said = new().next(subsystems).unwrap_err();
        assert!(said.starts_with("namespace 1 of ") && said.contains("lock on it"), "{said}");
        let mut stores = new().next_or_wait(subsystems, Missing::Wait, &[]).unwrap();
        assert_eq!((ids(&stores).len(), stores.pending().len()), (1, 1));
        assert!(stores.why_pending(config.nqn, 1).unwrap().contains("a lock on it is held"));
        // The file is created anew neither while it is pending nor by the next daemon.
        stores.remember(subsystems);
        std::fs::rename(path(1), directory.path().join("aside")).unwrap();
        let due = [(config.nqn, 1)];
        assert_eq!(stores.pending_probe().available(), []);
        let next = stores.next_or_wait(subsystems, Missing::Wait, &due).unwrap();
        assert!(next.why_pending(config.nqn, 1).unwrap().contains("is not created anew"));
        let without = config.namespaces[..1].to_vec();
        let alone = [SubsystemConfig { namespaces: without, ..config.clone() }];
        let fresh = new().next_or_wait(&alone, Missing::Wait, &[]).unwrap();
        assert!(fresh.why_pending(config.nqn, 1).unwrap().contains("is not created anew"));
        std::fs::rename(directory.path().join("aside"), path(1)).unwrap();
        other.unlock().unwrap();
        let last = next.next_or_wait(subsystems, Missing::Wait, &due).unwrap();
        assert_eq!((ids(&last).len(), last.pending().len()), (2, 0));
    }

    #[test]
    fn a_pending_file_is_not_recreated_without_a_state_directory() {
        let directory = crate::blockdev::testing::directory();
        let (path, aside) = (directory.path().join("1"), directory.path().join("aside"));
        let mut config = subsystem(&[1], 1 << 20);
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        config.namespaces[0].kind = NamespaceKind::File { path: path.clone(), size: Some(1 << 20) };
        let subsystems = std::slice::from_ref(&config);
        let other = std::fs::File::open(&path).unwrap();
        other.lock().unwrap();
        let first = DeviceTable { linger: None, ..DeviceTable::new(None, 0) };
        let mut stores = first.next_or_wait(subsystems, Missing::Wait, &[]).unwrap();
        assert_eq!(stores.pending().len(), 1);
        std::fs::rename(&path, &aside).unwrap();
        // However often it is probed, and whatever else of its configuration is changed meanwhile.
        let mut changed = config.clone();
        changed.namespaces[0].read_only = true;
        for config in [&config, &changed, &config, &config] {
            let due = [(config.nqn, 1)];
            let subsystems = std::slice::from_ref(config);
            stores = stores.next_or_wait(subsystems, Missing::Wait, &due).unwrap();
            assert_eq!((stores.pending().len(), path.exists()), (1, false));
            assert_eq!(stores.pending_probe().available(), []);
        }
        std::fs::rename(&aside, &path).unwrap();
        other.unlock().unwrap();
        let last = stores.next_or_wait(subsystems, Missing::Wait, &[(config.nqn, 1)]).unwrap();
        assert_eq!((ids(&last).len(), last.pending().len()), (1, 0));
    }

    #[test]
    fn a_device_of_invalid_size_does_not_block_other_changes() {
        let directory = crate::blockdev::testing::directory();
        let path = directory.path().join("disk");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let mut config = subsystem(&[1], 1 << 20);
        let of = |size| NamespaceKind::File { path: path.clone(), size };
        config.namespaces[0].kind = of(None);
        let stores = DeviceTable::default().next(std::slice::from_ref(&config)).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len((1 << 20) + 100).unwrap();
        let mut next = stores.next(std::slice::from_ref(&config)).unwrap();
        let lines = next.resize();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("keeps its size") && lines[0].contains("whole number of blocks"));
        let backing = next.store(config.nqn, 1).unwrap().monitored.backing();
        assert_eq!(backing.size_bytes(), 1 << 20);
        // A configured size is set, or rejected with the reason.
        config.namespaces[0].kind = of(Some(1 << 21));
        assert!(stores.next(&[config]).unwrap_err().contains("the configuration says"));
    }

    #[test]
    fn a_size_that_contradicts_the_configuration_is_an_error() {
        let directory = crate::blockdev::testing::directory();
        let mut config = subsystem(&[1], 1 << 20);
        let path = directory.path().join("disk");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        config.namespaces[0].kind = NamespaceKind::File { path, size: Some(1 << 21) };
        let start = DeviceTable::default().next_or_wait(&[config], Missing::Wait, &[]);
        assert!(start.unwrap_err().contains("but the configuration says 2097152"));
    }

    #[test]
    fn unwritten_records_are_pending_until_they_can_be_written() {
        let directory = crate::blockdev::testing::directory();
        let (state, path) = (directory.path().join("state"), directory.path().join("disk"));
        std::fs::create_dir(&state).unwrap();
        let mut config = subsystem(&[1], 1 << 20);
        config.namespaces[0].kind = NamespaceKind::File { path: path.clone(), size: Some(1 << 20) };
        let subsystems = std::slice::from_ref(&config);
        let mut stores = DeviceTable::new(Some(state.clone()), 0).next(subsystems).unwrap();
        for (file, what) in
            [("served", "which files are served"), ("names", "identities of devices")]
        {
            let in_the_way = state.join(format!("{file}.new"));
            std::fs::create_dir(&in_the_way).unwrap();
            let refused = stores.prepare_memory(subsystems).unwrap_err();
            assert!(refused.contains("cannot record") && refused.contains(what), "{refused}");
            stores.remember(subsystems);
            assert!(stores.has_unwritten_records() && !state.join(file).exists());
            std::fs::remove_dir(&in_the_way).unwrap();
        }
        stores.remember(subsystems);
        assert!(!stores.has_unwritten_records() && stores.served().contains(&path));
        assert!(DeviceIdentities::load(&state).unwrap() != DeviceIdentities::default());
    }

    #[test]
    fn a_second_path_to_the_same_file_is_refused() {
        let directory = crate::blockdev::testing::directory();
        let mut config = subsystem(&[1, 2], 1 << 20);
        let path = |nsid| directory.path().join(format!("{nsid}"));
        std::fs::write(path(1), vec![0; 1 << 20]).unwrap();
        std::fs::hard_link(path(1), path(2)).unwrap();
        for namespace in &mut config.namespaces {
            namespace.kind = NamespaceKind::File { path: path(namespace.nsid), size: None };
        }
        let said = DeviceTable::default().next(std::slice::from_ref(&config)).unwrap_err();
        assert!(
            said.starts_with("namespace 2 of ") && said.contains("lock on it is held"),
            "{said}"
        );
    }

    /// A state directory, and a namespace of 1 MiB with a file.
    fn one_with_state() -> (tempfile::TempDir, PathBuf, SubsystemConfig) {
        let directory = crate::blockdev::testing::directory();
        let state = directory.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mut config = subsystem(&[1], 1 << 20);
        let path = directory.path().join("disk.img");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        config.namespaces[0].kind = NamespaceKind::File { path, size: None };
        (directory, state, config)
    }

    #[test]
    fn the_uuid_of_a_namespace_with_persistent_state_cannot_change() {
        let (_directory, state, config) = one_with_state();
        let mut renamed = config.clone();
        renamed.namespaces[0].uuid = Uuid::from_u128(7);
        let new = || DeviceTable::new(Some(state.clone()), 0);
        let next = |stores: &DeviceTable, config: &SubsystemConfig| {
            // The lock of a file that was just closed may not be released yet.
            loop {
                match stores.next(std::slice::from_ref(config)) {
                    Err(why) if why.contains("a lock on it is held") => {}
                    done => return done,
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let mut stores = next(&new(), &config).unwrap();
        stores.remember(std::slice::from_ref(&config));
        let refused = stores.next(std::slice::from_ref(&renamed)).map(drop).unwrap_err();
        let uuid = Uuid::from_u128(1);
        assert!(refused.contains(&format!("uuid = \"{uuid}\"")), "{refused}");
        let store = stores.store(config.nqn, 1).unwrap();
        store.protection.change(nvme::feature::WriteProtectState::PERMANENT).unwrap();
        drop(stores);
        let refused = next(&new(), &renamed).map(drop).unwrap_err();
        assert!(refused.contains("write protection") && refused.contains("uuid = "), "{refused}");
        let again = next(&new(), &config).unwrap();
        assert!(again.store(config.nqn, 1).unwrap().protection.is_on());
        drop(again);
        let file = |uuid: Uuid| state.join(format!("{uuid}.namespace"));
        std::fs::rename(file(uuid), file(Uuid::from_u128(7))).unwrap();
        let third = next(&new(), &renamed).unwrap();
        assert!(third.store(config.nqn, 1).unwrap().protection.is_on(), "as the remedy says");
    }

    /// A command is in flight, or its request pending, while its namespace is removed and added
    /// again: its later changes of bad blocks take effect, and are persisted.
    #[test]
    fn late_bad_block_changes_apply_to_a_readded_namespace() {
        let (_directory, state, config) = one_with_state();
        let next = |stores: &DeviceTable, config: &[SubsystemConfig]| loop {
            match stores.next(config) {
                Err(why) if why.contains("a lock on it is held") => {}
                done => return done.unwrap(),
            }
            // The lock of a file that was just closed may not be released yet.
            std::thread::sleep(Duration::from_millis(5));
        };
        let marks = |stores: &DeviceTable| Arc::clone(&stores.store(config.nqn, 1).unwrap().marks);
        let mark = |at| Change::Mark { at, len: 4096, most_bytes: 1 << 20 };
        let first = |marks: &BadBlocks| marks.first(0, 1 << 20);

        let stores = next(&DeviceTable::new(Some(state.clone()), 0), std::slice::from_ref(&config));
        let before = marks(&stores);
        before.change(&mark(0)).unwrap();
        let until = before.orders();
        let away = next(&stores, &[]);
        drop(stores);
        let back = next(&away, std::slice::from_ref(&config));
        let now = marks(&back);
        assert_eq!(first(&now), Some(0));
        // Blocks are marked by the new object before the earlier requests are executed.
        now.change(&mark(8192)).unwrap();
        before.change(&Change::Mend { ranges: vec![(0, 1 << 20)], until }).unwrap();
        assert_eq!(first(&now), Some(8192), "it was written, and the other was not");
        before.change(&mark(4096)).unwrap();
        assert_eq!(first(&now), Some(4096));
        drop((before, now, back, away));
        let again = next(&DeviceTable::new(Some(state.clone()), 0), std::slice::from_ref(&config));
        let kept = marks(&again);
        assert_eq!(first(&kept), Some(4096), "as the file has it");

        // No state of a deleted namespace is persisted, even if a request completes late.
        again.forget_kept(&[config.namespaces[0].uuid]);
        assert_eq!(kept.change(&mark(0)), Err(Status::INTERNAL_ERROR));
        assert!(std::fs::read_dir(&state).unwrap().next().is_none());
    }

    /// The same for reservations and write protection, with an earlier request pending.
    #[test]
    fn late_reservation_requests_apply_to_a_readded_namespace() {
        let (_directory, state, config) = one_with_state();
        let place = (config.nqn, 1);
        let uuid = config.namespaces[0].uuid;
        let stores = DeviceTable::new(Some(state), 0);
        let guards = |stores: &DeviceTable| stores.guards(place, uuid).unwrap();
        let (protection, reservation) = guards(&stores);
        let again = stores.next(&[]).unwrap();
        let (protected_now, reserved_now) = guards(&again);
        reserve(&reservation, [1; 16]);
        protection.change(WriteProtectState::PROTECTED).unwrap();
        assert!(protected_now.is_on() && reserved_now.barred(&[2; 16]).has(Barred::WRITE));
        let other = again.guards((config.nqn, 2), uuid).unwrap();
        assert!(!Arc::ptr_eq(&other.1, &reservation), "another namespace");
        again.forget_kept(&[uuid]);
        let (unprotected, free) = guards(&stores);
        assert!(!unprotected.is_on() && free.barred(&[2; 16]) == Barred(0), "one made anew");
    }

    /// Bad blocks of one device do not apply to another, not even under the same UUID.
    #[test]
    fn bad_blocks_of_a_device_do_not_apply_to_another_device() {
        let marked = InternedBadBlocks::default();
        let load = || Ok(BadBlocks::volatile());
        let uuid = Uuid::from_u128(1);
        let get = |store| marked.get(uuid, store, |_| false, load).unwrap();
        let one = get("one");
        assert!(Arc::ptr_eq(&one, &get("one")));
        let other = get("other");
        let mark = Change::Mark { at: 0, len: 512, most_bytes: 512 };
        assert_eq!((one.change(&mark), other.change(&mark)), (Err(Status::INTERNAL_ERROR), Ok(())));
        assert!(!Arc::ptr_eq(&one, &other));
        drop(other);
        assert!(get("other").is_empty(), "nobody had it");
    }

    /// A rejected change has no effect.
    #[test]
    fn a_refused_duplicate_uuid_does_not_affect_the_bad_blocks() {
        let directory = crate::blockdev::testing::directory();
        let state = directory.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let of = |nsid: u32| {
            let path = directory.path().join(nsid.to_string());
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            let mut config = subsystem(&[nsid], 1 << 20);
            config.namespaces[0].kind = NamespaceKind::File { path, size: None };
            config.namespaces[0].uuid = Uuid::from_u128(1);
            config
        };
        let (one, two) = (of(1), of(2));
        let stores = DeviceTable::new(Some(state), 0).next(std::slice::from_ref(&one)).unwrap();
        let refused = stores.next(std::slice::from_ref(&two)).map(drop).unwrap_err();
        assert!(refused.contains("is in use as 00000000-"), "{refused}");
        let mark = Change::Mark { at: 0, len: 4096, most_bytes: 1 << 20 };
        assert_eq!(stores.store(one.nqn, 1).unwrap().marks.change(&mark), Ok(()));
    }
}
