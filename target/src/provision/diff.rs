//! Transition between the devices of two configurations: unchanged, to probe, to open.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::PendingDevice;
use super::devices::{DeviceTable, NewSize, PATIENCE, Place, ServedDevice, formatted, namespaces};
use super::probe::{self, FileId, ProbeResult, Probed};
use super::rollback::CreatedFiles;
use crate::blockdev::blocking::BlockingTask;
use crate::blockdev::monitor::{MonitoredDevice, TrustRecord};
use crate::blockdev::{
    BackingConfig, BackingDevice, BackingKind, CreatedFile, DeviceId, OpenError,
};
use crate::config::{Missing, NamespaceConfig, NamespaceKind, SubsystemConfig};
use crate::core::subsystem::lba_format::Format;
use crate::state::identity::{self, DeviceIdentities};
use crate::state::served::Served;

/// Interval between attempts to open a device.
const AGAIN: Duration = Duration::from_millis(50);

/// Reason why a device cannot be served.
struct Unserved {
    why: String,
    /// Waiting may help: see [`OpenError::may_pass`].
    may_pass: bool,
}

impl From<String> for Unserved {
    fn from(why: String) -> Unserved {
        Unserved { why, may_pass: false }
    }
}

/// Selects the namespaces whose open devices are probed for their size.
pub(super) type IsProbed<'a> = &'a dyn Fn(Place, &NamespaceConfig) -> bool;

/// A device that is about to be opened.
struct Plan<'a> {
    key: Place,
    namespace: &'a NamespaceConfig,
    /// UUID and persisted identity.
    name: (Uuid, Option<String>),
    format: Arc<Format>,
    config: BackingConfig,
    same: Option<FileId>,
}

/// A namespace whose device is not open, and the result of the probe of its path.
struct Added<'a> {
    key: Place,
    namespace: &'a NamespaceConfig,
    probed: Option<Probed>,
}

/// Results of the probes of one configuration.
struct Probes {
    /// Of paths that are new or due.
    paths: BTreeMap<Place, ProbeResult>,
    /// New sizes of devices that stay, where they differ. Other devices have no entry.
    sizes: BTreeMap<Place, Result<Option<NewSize>, String>>,
}

/// Persisted identities of devices, and the UUIDs of a configuration.
struct Identities {
    persisted: Result<DeviceIdentities, String>,
    configured: BTreeSet<Uuid>,
}

/// The device table of the next configuration, while it is computed from the current one.
struct Diff<'a> {
    current: &'a DeviceTable,
    missing: Missing,
    served: Served,
    next: DeviceTable,
}

impl<'a> Diff<'a> {
    /// Retains the devices that stay, and pending ones that are not due. Returns the others.
    fn retain(
        &mut self,
        subsystems: &'a [SubsystemConfig],
        mut probes: Probes,
        is_probed: IsProbed<'_>,
    ) -> Result<Vec<Added<'a>>, String> {
        let mut added = Vec::new();
        for (subsystem, namespace) in namespaces(subsystems) {
            let key = (subsystem.nqn, namespace.nsid);
            if let Some(device) = self.current.by_namespace.get(&key) {
                let size = probes.sizes.remove(&key);
                let is_probed = is_probed(key, namespace);
                let (device, notices) = retained(key, device, namespace, size, is_probed)?;
                self.next.notices.extend(notices);
                if device.configured_block_bytes != namespace.block_size_bytes {
                    self.next
                        .notices
                        .extend(device.format.difference_from(namespace.block_size_bytes));
                }
                let configured_block_bytes = namespace.block_size_bytes;
                let device = ServedDevice { configured_block_bytes, ..device };
                self.next.by_namespace.insert(key, device);
                continue;
            }
            match probes.paths.remove(&key) {
                Some(Ok(probed)) => added.push(Added { key, namespace, probed }),
                Some(Err(why)) if !waits(self.missing, namespace) => {
                    return Err(format!("{}: {why}", place(key)));
                }
                Some(Err(why)) => {
                    let was_there = self.was_there(namespace);
                    let pending = PendingDevice::store(key, namespace, why);
                    self.next.pending.push(pending.there(was_there));
                }
                None => {
                    self.next.pending.extend(self.current.pending_as(key, namespace).cloned());
                }
            }
        }
        Ok(added)
    }

    /// Loads the records of devices to open, and checks them.
    fn plan(
        &mut self,
        subsystems: &[SubsystemConfig],
        added: Vec<Added<'a>>,
    ) -> Result<Vec<Plan<'a>>, String> {
        if added.is_empty() {
            return Ok(Vec::new());
        }
        let identities = self.current.identities(subsystems);
        let mut plans = Vec::new();
        for Added { key, namespace, probed } in added {
            let is_there = probed.as_ref().is_some_and(Probed::is_there);
            match self.current.plan(key, namespace, probed, &identities) {
                Ok(plan) => plans.push(plan),
                Err(why) => self.set_pending(key, namespace, is_there, why.into())?,
            }
        }
        Ok(plans)
    }

    /// Opens devices, and adds them to the next table.
    fn open(&mut self, plans: Vec<Plan<'_>>) -> Result<(), String> {
        let opened = self.current.open(&plans, self.missing, &self.next.attempt);
        for (plan, backing) in plans.into_iter().zip(opened) {
            let (key, namespace) = (plan.key, plan.namespace);
            let id = self.next.fresh_id(self.current).ok_or("too many namespaces")?;
            let is_there = plan.same.as_ref().is_some_and(FileId::is_there);
            match backing.and_then(|backing| Ok(self.current.make(id, plan, backing)?)) {
                Ok(device) => {
                    self.next
                        .notices
                        .extend(device.format.difference_from(namespace.block_size_bytes));
                    self.next.by_namespace.insert(key, device);
                }
                Err(unserved) => self.set_pending(key, namespace, is_there, unserved)?,
            }
        }
        Ok(())
    }

    /// Makes a device that cannot be served pending if the failure may be transient, or if it was
    /// pending before: a device that was replaced by something unusable prevents no other change.
    fn set_pending(
        &mut self,
        key: Place,
        namespace: &NamespaceConfig,
        is_there: bool,
        Unserved { why, may_pass }: Unserved,
    ) -> Result<(), String> {
        let is_there = is_there || self.was_there(namespace);
        let is_known =
            self.current.is_starting || self.current.pending_as(key, namespace).is_some();
        let is_file = matches!(namespace.kind, NamespaceKind::File { .. });
        let pending = PendingDevice::store(key, namespace, why.clone()).there(is_there);
        match waits(self.missing, namespace) && (may_pass || is_known) {
            true => {
                self.next.pending.push(pending.held(!may_pass && (is_there || !is_file)));
                Ok(())
            }
            false => Err(format!("{}: {why}", place(key))),
        }
    }

    /// Whether the file of a namespace was served before. Such a file is never created anew.
    fn was_there(&self, namespace: &NamespaceConfig) -> bool {
        matches!(&namespace.kind, NamespaceKind::File { path, .. } if self.served.contains(path))
    }
}

/// Whether a namespace without its device is pending. An image that a host has made and that is lost
/// stops no other subsystem, just as its file does not.
fn waits(missing: Missing, namespace: &NamespaceConfig) -> bool {
    missing == Missing::Wait || matches!(namespace.kind, NamespaceKind::Rbd { made: Some(_), .. })
}

impl DeviceTable {
    /// Returns the table of the next configuration. Of devices that stay, those selected by
    /// `is_probed` are probed for their size; of pending ones, those that are `due`.
    ///
    /// # Errors
    /// One sentence about a device that cannot be served.
    pub(super) fn next_as(
        &self,
        subsystems: &[SubsystemConfig],
        missing: Missing,
        due: &[Place],
        is_probed: IsProbed<'_>,
    ) -> Result<DeviceTable, String> {
        self.check_state_directory(subsystems)?;
        let served = self.served().with(self.pending.iter().filter_map(PendingDevice::seen));
        let paths = self.begin_path_probes(subsystems, (missing, due), &served);
        let sizes = self.begin_size_probes(subsystems, is_probed);
        let deadline = Instant::now() + PATIENCE;
        let probes =
            Probes { paths: found_by(deadline, paths), sizes: answers_by(deadline, sizes) };
        let mut diff = Diff { current: self, missing, served, next: self.successor() };
        // No device is opened and no file created before it is certain that served devices may stay.
        let added = diff.retain(subsystems, probes, is_probed)?;
        let plans = diff.plan(subsystems, added)?;
        diff.open(plans)?;
        Ok(diff.next)
    }

    fn check_state_directory(&self, subsystems: &[SubsystemConfig]) -> Result<(), String> {
        let needs_state = namespaces(subsystems).find(|(_, namespace)| namespace.needs_state());
        match needs_state {
            Some((subsystem, namespace)) if self.state_directory.is_none() => Err(format!(
                "{}: `write_uncorrectable` keeps its unreadable blocks in the `state_directory`, \
                 and there is none: name one in the configuration",
                place((subsystem.nqn, namespace.nsid))
            )),
            _ => Ok(()),
        }?;
        let mut all = subsystems.iter();
        let pool = all.find(|it| it.managed.as_ref().is_some_and(|it| it.pool.is_some()));
        match pool {
            Some(subsystem) if self.state_directory.is_none() => Err(format!(
                "managed namespaces of {}: `pool` needs a `state_directory`, whose list of clients \
                 excludes a process that was killed while it made an image: name one in the \
                 configuration",
                subsystem.nqn
            )),
            _ => Ok(()),
        }
    }

    /// A table without devices, which shares the records of this one.
    fn successor(&self) -> DeviceTable {
        DeviceTable {
            by_namespace: BTreeMap::new(),
            next_id: self.next_id,
            rings: self.rings,
            state_directory: self.state_directory.clone(),
            group_records: self.group_records.clone(),
            limiters: self.limiters.clone(),
            pending: Vec::new(),
            notices: Vec::new(),
            opening: Arc::clone(&self.opening),
            marked: Arc::clone(&self.marked),
            reservations: Arc::clone(&self.reservations),
            protections: Arc::clone(&self.protections),
            trust: Arc::clone(&self.trust),
            linger: self.linger,
            is_starting: false,
            attempt: CreatedFiles::new(&self.opening),
            has_unwritten_records: false,
        }
    }

    fn identities(&self, subsystems: &[SubsystemConfig]) -> Identities {
        let persisted = self.state_directory.as_deref().map(DeviceIdentities::load);
        Identities {
            persisted: persisted.unwrap_or_else(|| Ok(DeviceIdentities::default())),
            configured: namespaces(subsystems).map(|(_, namespace)| namespace.uuid).collect(),
        }
    }

    /// Returns the namespaces that cannot be served though their devices are available: records
    /// that hosts rely on are damaged, or persisted under another UUID. Opens and changes nothing.
    pub(crate) fn unusable_records(&self, subsystems: &[SubsystemConfig]) -> Vec<(Place, String)> {
        let identities = self.identities(subsystems);
        let probes = self.begin_path_probes(subsystems, (Missing::Fail, &[]), &Served::none());
        let mut probes = found_by(Instant::now() + PATIENCE, probes);
        let unusable_records = namespaces(subsystems).filter_map(|(subsystem, namespace)| {
            let key = (subsystem.nqn, namespace.nsid);
            // Missing devices are reported elsewhere.
            let Ok(probed) = probes.remove(&key)? else { return None };
            let plan = self.plan(key, namespace, probed, &identities);
            let kept = plan.and_then(|plan| {
                self.guards(key, namespace.uuid)?;
                self.marks(namespace.uuid, plan.name.1.as_deref()).map(drop)
            });
            kept.err().map(|why| (key, why))
        });
        unusable_records.collect()
    }

    /// Begins the probes of all paths that are new, or due.
    fn begin_path_probes(
        &self,
        subsystems: &[SubsystemConfig],
        (missing, due): (Missing, &[Place]),
        served: &Served,
    ) -> Vec<(Place, BlockingTask<'_, ProbeResult>)> {
        let new = namespaces(subsystems).filter_map(|(subsystem, namespace)| {
            let key = (subsystem.nqn, namespace.nsid);
            let stays_pending = waits(missing, namespace)
                && !due.contains(&key)
                && self.pending_as(key, namespace).is_some();
            let is_new = !self.by_namespace.contains_key(&key) && !stays_pending;
            is_new.then(|| (key, probe::begin(&self.opening, namespace, served, |seen| seen)))
        });
        new.collect()
    }

    /// Begins the probes for new sizes of open devices.
    fn begin_size_probes(
        &self,
        subsystems: &[SubsystemConfig],
        is_probed: IsProbed<'_>,
    ) -> Vec<(Place, BlockingTask<'_, Option<NewSize>>)> {
        let stays = namespaces(subsystems).filter_map(|(subsystem, namespace)| {
            let key = (subsystem.nqn, namespace.nsid);
            let store = self.by_namespace.get(&key).filter(|_| is_probed(key, namespace))?;
            let is_same = store.monitored.is_as(&formatted(namespace, &store.format));
            let kind = namespace.backing().kind;
            is_same.then(|| (key, self.next_size(&store.monitored, kind)))
        });
        stays.collect()
    }

    /// Loads the records that a namespace needs, before any device is opened. `seen`: result of
    /// the probe, if the namespace has a path.
    fn plan<'a>(
        &self,
        key: Place,
        namespace: &'a NamespaceConfig,
        seen: Option<Probed>,
        Identities { persisted, configured }: &Identities,
    ) -> Result<Plan<'a>, String> {
        let (path, same) = seen.map(|seen| (seen.lasting, seen.same)).unzip();
        // Without a state directory identities are not persisted.
        let path = path.filter(|_| self.state_directory.is_some());
        let name = (namespace.uuid, path.as_deref().map(identity::of_path));
        if let (Some(directory), (uuid, Some(store))) = (&self.state_directory, &name) {
            match persisted {
                Ok(names) => names.check(directory, (*uuid, configured), store)?,
                Err(why) if identity::is_any_kept(directory) => return Err(why.clone()),
                Err(_) => {}
            }
        }
        let format = self.format(key, namespace, path.as_deref())?;
        let config = formatted(namespace, &format);
        Ok(Plan { key, namespace, name, format, config, same })
    }

    /// Adds the state of its namespace to a device that was opened.
    fn make(
        &self,
        id: DeviceId,
        plan: Plan<'_>,
        backing: BackingDevice,
    ) -> Result<ServedDevice, String> {
        let Plan { key, namespace, name, format, config, .. } = plan;
        let reservation = self.reservation_of(key, namespace)?;
        let protection = self.protection_of(key, namespace)?;
        let marks = self.marks(namespace.uuid, name.1.as_deref())?;
        let is_external =
            matches!(namespace.kind, NamespaceKind::File { .. } | NamespaceKind::Rbd { .. });
        let mut monitored = MonitoredDevice::new(id, place(key), config, backing);
        if is_external {
            monitored = monitored.recorded(key, TrustRecord::new(&self.trust, namespace.uuid));
        }
        let monitored = Arc::new(monitored);
        let configured_block_bytes = namespace.block_size_bytes;
        Ok(ServedDevice {
            monitored,
            reservation,
            protection,
            marks,
            format,
            name,
            configured_block_bytes,
            resize: None,
        })
    }

    /// Opens devices, all within one time limit. Created files belong to `attempt`.
    fn open(
        &self,
        plans: &[Plan<'_>],
        missing: Missing,
        attempt: &CreatedFiles,
    ) -> Vec<Result<BackingDevice, Unserved>> {
        let is_start = self.by_namespace.is_empty() && self.pending.is_empty();
        let linger = self.linger.filter(|_| is_start && missing == Missing::Wait);
        let mut taken = BTreeSet::new();
        // Of two paths to the same file the first is opened, and then the other.
        let mut is_first = |same: &Option<FileId>| match same {
            Some(same) => taken.insert(same.clone()),
            None => true,
        };
        let begun: Vec<_> = plans
            .iter()
            .map(|plan| is_first(&plan.same).then(|| self.begin_opening(plan, linger)))
            .collect();
        let deadline = Instant::now() + PATIENCE;
        let opened: Vec<_> =
            begun.into_iter().map(|begun| begun.map(|begun| begun.by(deadline))).collect();
        // A lock of this process is not released by waiting.
        let second = |plan: &Plan<'_>| self.begin_opening(plan, None).by(Instant::now() + PATIENCE);
        let all = plans.iter().zip(opened);
        all.map(|(plan, opened)| match opened.unwrap_or_else(|| second(plan)) {
            Ok(Ok((backing, made))) => {
                made.into_iter().for_each(|made| attempt.add(made));
                Ok(backing)
            }
            Ok(Err(OpenError { sentence: why, may_pass })) => Err(Unserved { why, may_pass }),
            // The device does not answer.
            Err(why) => Err(Unserved { why, may_pass: true }),
        })
        .collect()
    }

    /// Begins to open a device, and retries for `linger` where that may help. A file that existed
    /// when it was probed is not created.
    fn begin_opening(
        &self,
        plan: &Plan<'_>,
        linger: Option<Duration>,
    ) -> BlockingTask<'_, Result<(BackingDevice, Option<CreatedFile>), OpenError>> {
        let (config, rings) = (&plan.config, self.rings);
        let may_make = plan.same.as_ref().is_none_or(|same| !same.is_there());
        let until = linger.map(|linger| Instant::now() + linger);
        let open = move |config: &BackingConfig| loop {
            let opened = BackingDevice::open_or_make(config, may_make).and_then(|backing| {
                // After the time limit the file is not used.
                let made = CreatedFile::by_opening(&backing, config);
                backing.prepare(rings)?;
                Ok((backing, made))
            });
            match opened {
                Err(error)
                    if error.may_pass && until.is_some_and(|until| Instant::now() < until) =>
                {
                    std::thread::sleep(AGAIN);
                }
                opened => return opened,
            }
        };
        match config.kind.path() {
            Some(path) => {
                let own = config.clone();
                self.opening.begin(&path, move || Ok(open(&own)))
            }
            None => self.opening.over(Path::new(""), Ok(open(config))),
        }
    }

    /// Begins the probe for the new size of a device, if it differs.
    fn next_size(
        &self,
        device: &Arc<MonitoredDevice>,
        kind: BackingKind,
    ) -> BlockingTask<'_, Option<NewSize>> {
        // Before the file is looked at, which a rollback would replace.
        let (guard, backing) = (device.begin_resize(), device.backing());
        let path = kind.path().unwrap_or_default();
        let is_as_it_was = matches!(&kind, BackingKind::File { size, .. }
            if *size == Some(backing.size_bytes()));
        let next_size = move || {
            let bytes = backing.next_size(&kind).map_err(|error| error.to_string())?;
            let Some(bytes) = bytes else { return Ok(None) };
            let guard = guard.ok_or("its file is being opened again: try again")?;
            Ok(Some((bytes, Arc::new(guard))))
        };
        match path.as_os_str().is_empty() {
            _ if is_as_it_was => self.opening.over(&path, Ok(None)),
            true => self.opening.over(&path, next_size()),
            false => self.opening.begin(&path.clone(), next_size),
        }
    }
}

/// Results of tasks at the deadline.
fn answers_by<T>(
    deadline: Instant,
    tasks: Vec<(Place, BlockingTask<'_, T>)>,
) -> BTreeMap<Place, Result<T, String>> {
    tasks.into_iter().map(|(key, task)| (key, task.by(deadline))).collect()
}

/// Results of probes of paths. A path whose probe has no result by the deadline is missing.
fn found_by(
    deadline: Instant,
    tasks: Vec<(Place, BlockingTask<'_, ProbeResult>)>,
) -> BTreeMap<Place, ProbeResult> {
    let answers = answers_by(deadline, tasks).into_iter();
    answers.map(|(key, answer)| (key, answer.and_then(|found| found))).collect()
}

/// Retains an open device; returns it with a notice for the administrator. `size`: the result of
/// the probe, if the device is the configured one. Without `is_probed` the size was not probed.
///
/// # Errors
/// One sentence about what cannot be changed.
fn retained(
    key: Place,
    store: &ServedDevice,
    namespace: &NamespaceConfig,
    size: Option<Result<Option<NewSize>, String>>,
    is_probed: bool,
) -> Result<(ServedDevice, Option<String>), String> {
    let place = place(key);
    if !is_probed && store.name.0 == namespace.uuid {
        return Ok((ServedDevice { resize: None, ..store.clone() }, None));
    }
    if store.monitored.is_shared() != namespace.shared {
        return Err(format!(
            "{place} is in use, and `shared` cannot change meanwhile: features that hosts rely on \
             (reservations, fused commands, write protection) would begin or end without notice; \
             remove it, reload, add it, reload (or `nvmfctl namespace remove`, and then `add`)"
        ));
    }
    let Some(resize) = size else {
        return Err(format!(
            "{place} is in use and cannot get another device at once: pending writes of hosts \
             would reach that; remove it, reload, add it, reload (or `nvmfctl namespace remove`, \
             and then `add`)"
        ));
    };
    let is_open_ended = matches!(
        namespace.kind,
        NamespaceKind::File { size: None, .. } | NamespaceKind::Rbd { .. }
    );
    let (resize, notices) = match resize {
        Ok(resize) => (resize, None),
        // No new size was configured: the error prevents no other change.
        Err(why) if is_open_ended => (None, Some(format!("{place} keeps its size: {why}"))),
        Err(why) => return Err(format!("{place}: {why}")),
    };
    if resize.is_some() && store.format.under_way().is_some() {
        return Err(format!(
            "{place} is being formatted by a host and cannot get another size meanwhile: try again \
             when that is done"
        ));
    }
    let (uuid, _) = store.name;
    if uuid != namespace.uuid {
        return Err(format!(
            "{place} is in use as {uuid}, and hosts identify it by that: write `uuid = \
             \"{uuid}\"`, or remove it, reload, add it, reload"
        ));
    }
    Ok((ServedDevice { resize, ..store.clone() }, notices))
}

/// Name of a namespace in messages.
fn place((nqn, nsid): Place) -> String {
    format!("namespace {nsid} of {nqn}")
}

#[cfg(test)]
mod tests {
    use super::super::devices::tests::subsystem;
    use crate::provision::diff::*;

    #[test]
    fn a_file_that_vanishes_after_its_probe_is_not_created() {
        let directory = crate::blockdev::testing::directory();
        let path = directory.path().join("1");
        let mut config = subsystem(&[1], 1 << 20);
        config.namespaces[0].kind = NamespaceKind::File { path: path.clone(), size: Some(1 << 20) };
        let (key, namespace) = ((config.nqn, 1), &config.namespaces[0]);
        let stores = DeviceTable { linger: None, ..DeviceTable::new(None, 0) };
        let open = |is_there: bool| {
            if is_there {
                std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            }
            let deadline = Instant::now() + Duration::from_secs(600);
            let look = probe::begin(&stores.opening, namespace, &Served::none(), |seen| seen);
            let seen = look.by(deadline).unwrap().unwrap();
            let plan = stores.plan(key, namespace, seen, &stores.identities(&[])).unwrap();
            if is_there {
                std::fs::remove_file(&path).unwrap();
            }
            stores.open(&[plan], Missing::Wait, &stores.attempt).remove(0)
        };
        let unserved = open(true).err().unwrap();
        assert!(unserved.why.contains("was there a moment ago") && unserved.may_pass);
        assert!(!path.exists());
        assert!(open(false).is_ok() && path.exists());
    }
}
