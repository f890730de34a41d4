//! Drives the namespace management of the product (`nvmfd::provision::ns_requests`) between iterations
//! of reactors: its steps take simulated time, during which the target may crash. The record and the
//! names of the files are in a simulated directory, the blocks on a simulated device.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use nvme::{Nqn, Status};
use nvmfd::blockdev::DeviceId;
use nvmfd::blockdev::durable;
use nvmfd::blockdev::rbd::MakeError;
use nvmfd::config::{ManagedConfig, NamespaceConfig, NamespaceKind};
use nvmfd::core::message::MessageBarrier;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::offload::NamespaceJob;
use nvmfd::core::subsystem::Namespace;
use nvmfd::core::subsystem::ns_management::{Allocated, Entry, Management};
use nvmfd::core::subsystem::ns_request::{FAILED, NamespaceRequest};
use nvmfd::provision::ns_catalog::Catalog;
use nvmfd::provision::ns_requests::{FileStep, NamespaceServer, RequestStep, RequestTask};
use nvmfd::provision::{NamespaceDirectory, RequestContext, RequestPlan};
use nvmfd::state::ns_catalog::NamespaceCatalogRecord;
use nvmfd::worker::ns_management::{NamespaceAdmin, NamespaceAdminMessage, complete};
use rdma::soft::sim::Rng;
use uuid::Uuid;

use super::namespace_state::NamespaceState;
use super::{Target, subnqn};
use crate::sim::device::SimDevice;
use crate::sim::directory::{SimDirectory, StepFault};
use crate::sim::mutants::SeededBug;
use crate::sim::oracle::ns_management::{DECLARED, GROUP, MOST, QUOTA_BYTES};
use crate::sim::scenario::Profile;

/// Maximum duration of a step that waits for a device.
const STEP: Duration = Duration::from_millis(8);
/// Steps of the longest operation on files: write, sync, rename, sync of the directory.
const FILE_STEPS: u64 = 4;

/// An opened host-created namespace.
#[derive(Debug)]
struct Opened {
    id: DeviceId,
    state: NamespaceState,
}

/// A request in progress.
#[derive(Debug)]
struct Work {
    order: NamespaceJob,
    task: RequestTask,
    next: Next,
}

/// Next step of a request.
#[derive(Debug)]
enum Next {
    /// An operation on files, and when it ends.
    Files(Box<FileStep>, Instant),
    /// Reactors do not have the published state yet.
    Await(MessageBarrier),
    Answer(Result<u32, Status>),
}

/// Driver for Namespace Management; see the module.
#[derive(Debug)]
pub struct NsManagementDriver {
    granted: Option<ManagedConfig>,
    worker: NamespaceAdmin,
    directory: SimDirectory,
    /// While the target is up.
    catalog: Option<Catalog>,
    /// The served record.
    served: NamespaceCatalogRecord,
    /// Stores of the device with the contents of the files.
    stores: BTreeMap<Uuid, usize>,
    opened: BTreeMap<Uuid, Opened>,
    at_work: Option<Work>,
    /// Of a thousand operations on files, those that fail.
    pub errors: u16,
    dice: Rng,
}

/// A namespace that has changed for these hosts.
pub type NamespaceChange = (u32, BTreeSet<Nqn>);

impl NsManagementDriver {
    /// A driver with an empty directory.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn new(
        profile: &Profile,
        seed: u64,
        plant: Option<SeededBug>,
    ) -> Result<NsManagementDriver, String> {
        let directory = SimDirectory::new(seed ^ 0xd12e)?;
        if plant == Some(SeededBug::LostRecord) {
            directory.forget_syncs();
        }
        let granted = ManagedConfig {
            directory: directory.path().to_owned(),
            pool: None,
            cluster: Default::default(),
            quota_bytes: QUOTA_BYTES,
            namespaces: MOST as u32,
            any_host: true,
            hosts: BTreeSet::new(),
        };
        Ok(NsManagementDriver {
            granted: (profile.managing > 0).then_some(granted),
            worker: NamespaceAdmin::new(),
            directory,
            catalog: None,
            served: NamespaceCatalogRecord::new(subnqn()),
            stores: BTreeMap::new(),
            opened: BTreeMap::new(),
            at_work: None,
            errors: if profile.disk.error > 0 { 30 } else { 0 },
            dice: Rng::new(seed ^ 0x57e3_a4d0),
        })
    }

    /// The sender of requests, until the next start.
    pub fn sender(&self) -> Sender<NamespaceAdminMessage> {
        self.worker.sender()
    }

    /// Time of its next step.
    pub fn next_due(&self) -> Option<Instant> {
        match self.at_work.as_ref()?.next {
            Next::Files(_, due) => Some(due),
            Next::Await(_) | Next::Answer(_) => None,
        }
    }

    /// Whether a request is in progress.
    pub fn is_busy(&self) -> bool {
        self.at_work.is_some()
    }

    /// The target has crashed during its step; with `power` unsynced names are lost.
    pub fn crash(&mut self, power: bool, disk: &mut SimDevice) {
        if let Some(Work { next: Next::Files(step, _), .. }) = self.at_work.take() {
            let kill = StepFault::Kill(1 + self.dice.below(FILE_STEPS + 1));
            self.on_files(&step, kill, disk);
        }
        self.catalog = None;
        self.directory.crash(power);
        self.opened.clear();
        // Reactors that wait for a response have ended as well.
        self.worker = NamespaceAdmin::new();
    }

    /// Checks that exactly the known namespaces exist in the end.
    ///
    /// # Errors
    /// A namespace that should not exist, or a missing one.
    pub fn leftovers(&self) -> Result<(), String> {
        let Some(catalog) = &self.catalog else { return Ok(()) };
        let NamespaceCatalogRecord { entries, unsettled, .. } = catalog.record();
        let image = |uuid: &Uuid| catalog.image(*uuid);
        let made: BTreeSet<_> = entries.values().map(|entry| image(&entry.uuid)).collect();
        let known: BTreeSet<_> = made.iter().cloned().chain(unsettled.iter().map(image)).collect();
        let files = fs::read_dir(self.directory.path()).map_err(|error| error.to_string())?;
        let is_image = |path: &Path| path.extension().is_some_and(|extension| extension == "img");
        let files: BTreeSet<_> =
            files.flatten().map(|file| file.path()).filter(|path| is_image(path)).collect();
        if let Some(lost) = made.difference(&files).next() {
            return Err(format!("the file of a namespace that a host made is gone: {lost:?}"));
        }
        match files.difference(&known).next() {
            Some(more) => Err(format!("a file belongs to no namespace: {more:?}")),
            None => Ok(()),
        }
    }

    /// The served host-created namespaces.
    pub fn entries(&self) -> &BTreeMap<u32, Entry> {
        &self.served.entries
    }

    /// Executes an operation on files; false when it fails.
    fn on_files(&mut self, step: &FileStep, fault: StepFault, disk: &mut SimDevice) -> bool {
        let stores = &mut self.stores;
        self.directory.run(fault, || {
            step.execute(|config, _| {
                let blocks = make(config).map_err(MakeError::Failed)?;
                stores.insert(config.uuid, disk.add_store(blocks, config.block_size_bytes));
                Ok(None)
            })
        })
    }
}

/// Creates the file of a namespace, as durably as `blockdev/src/open.rs` does; gives its number of
/// blocks. Its contents are a store of the device.
fn make(config: &NamespaceConfig) -> Result<u32, String> {
    let NamespaceKind::File { path, size: Some(bytes) } = &config.kind else {
        return Err("no file".to_owned());
    };
    let file = File::create_new(path).map_err(|error| error.to_string())?;
    let made = durable::sync(&file, path)
        .and_then(|()| durable::sync_directory(path.parent().unwrap_or(Path::new("/"))));
    made.map_err(|error| {
        let _ = fs::remove_file(path);
        error.to_string()
    })?;
    Ok((bytes / u64::from(config.block_size_bytes)) as u32)
}

/// The target and its devices, for requests about namespaces.
struct Server<'a> {
    target: &'a mut Target,
    profile: &'a Profile,
    disk: &'a mut SimDevice,
    news: &'a mut Vec<NamespaceChange>,
}

impl NamespaceServer for Server<'_> {
    fn registry(&self) -> &Registry {
        &self.target.registry
    }

    fn catalog(&mut self, _: Nqn) -> Option<&mut Catalog> {
        self.target.ns_admin.catalog.as_mut()
    }

    fn serve(&mut self, _: Nqn, _: Option<(u32, Uuid)>) -> bool {
        let Some(catalog) = &self.target.ns_admin.catalog else { return false };
        let new = catalog.record().clone();
        if self.target.open_all(&new, self.disk).is_err() {
            return false;
        }
        let old = mem::replace(&mut self.target.ns_admin.served, new);
        self.news.extend(changes(&old, &self.target.ns_admin.served));
        self.target.publish_again(self.profile);
        self.target.close_strangers(self.disk);
        true
    }

    fn forget(&mut self, _: &[Uuid]) {}

    /// No reload closes the catalog.
    fn restore_later(&mut self, _: &Arc<NamespaceDirectory>) {}
}

impl Target {
    /// Opens the catalog, which completes unfinished requests, and the files of all namespaces.
    ///
    /// # Errors
    /// The record is invalid, or a file is missing.
    pub(super) fn open_made(&mut self, disk: &mut SimDevice) -> Result<(), String> {
        let ns_admin = &mut self.ns_admin;
        if ns_admin.granted.is_none() {
            return Ok(());
        }
        let directory = &ns_admin.directory;
        let (catalog, lines) =
            directory.run(StepFault::None, || Catalog::open(directory.path(), subnqn()))?;
        if let Some(line) = lines.first() {
            return Err(line.clone());
        }
        let record = catalog.record().clone();
        ns_admin.catalog = Some(catalog);
        ns_admin.leftovers()?;
        ns_admin.served.clone_from(&record);
        self.open_all(&record, disk)
    }

    /// Opens the files of all namespaces that are not open.
    fn open_all(
        &mut self,
        record: &NamespaceCatalogRecord,
        disk: &mut SimDevice,
    ) -> Result<(), String> {
        for (nsid, entry) in &record.entries {
            let uuid = entry.uuid;
            if self.ns_admin.opened.contains_key(&uuid) {
                continue;
            }
            let store = self.ns_admin.stores.get(&uuid).copied();
            let store = store.ok_or("the file of a namespace that a host made is gone")?;
            let id = self.fresh_id();
            disk.attach(id, store);
            let opened = Opened { id, state: self.state_of(*nsid, uuid)? };
            self.ns_admin.opened.insert(uuid, opened);
        }
        Ok(())
    }

    /// The host-created namespaces, as served.
    pub(super) fn made(&self) -> Vec<Namespace> {
        let made = |(nsid, entry): (&u32, &Entry)| {
            let Opened { id, state } = self.ns_admin.opened.get(&entry.uuid)?;
            let blocks = entry.bytes / u64::from(entry.block_size_bytes);
            let uuid = entry.uuid.into_bytes();
            Some(state.namespace((*nsid, uuid), *id, (blocks, entry.block_size_bytes)))
        };
        self.ns_admin.served.entries.iter().filter_map(made).collect()
    }

    /// Management as seen by hosts that may use it.
    pub(super) fn management(&self) -> Option<Arc<Management>> {
        let grant = self.ns_admin.granted.as_ref()?.grant();
        let entries = &self.ns_admin.served.entries;
        let allocated = self.made().into_iter().map(|namespace| {
            let entry = entries.get(&namespace.nsid);
            let hosts = entry.map(|entry| entry.hosts.clone()).unwrap_or_default();
            Allocated { namespace, hosts }
        });
        let used_bytes = self.ns_admin.served.used_bytes();
        let (allocated, absent) = (allocated.collect(), Vec::new());
        let images = BTreeMap::new();
        Some(Arc::new(Management { grant, allocated, absent, used_bytes, images }))
    }

    /// Executes requests of hosts, as far as possible now. Returns the namespaces that have
    /// changed, and for which hosts; none, if nothing was done.
    pub fn manage(
        &mut self,
        profile: &Profile,
        disk: &mut SimDevice,
        now: Instant,
    ) -> Option<Vec<NamespaceChange>> {
        // A format that hangs in its record has the provisioner locked, so nothing is published.
        if self.is_dead() {
            return None;
        }
        let mut done = None;
        loop {
            let Some(Work { order, mut task, next }) = self.ns_admin.at_work.take() else {
                let Some(order) = self.next_order() else { return done };
                let news = done.get_or_insert_default();
                match self.plan(&order) {
                    Ok(mut task) => {
                        let next = self.go_on_with(&mut task, true, profile, disk, now, news);
                        self.ns_admin.at_work = Some(Work { order, task, next });
                    }
                    Err(status) => complete(&self.registry, &order, Err(status)),
                }
                continue;
            };
            let possible = match next {
                Next::Files(step, due) if due <= now => {
                    let fails = self.ns_admin.dice.per_mille(self.ns_admin.errors);
                    let step_z = self.ns_admin.dice.below(FILE_STEPS);
                    let fault = if fails { StepFault::Error(1 + step_z) } else { StepFault::None };
                    self.ns_admin.on_files(&step, fault, disk)
                }
                Next::Await(barrier) if barrier.is_passed() => true,
                Next::Answer(outcome) => {
                    done.get_or_insert_default();
                    complete(&self.registry, &order, outcome);
                    continue;
                }
                next => {
                    self.ns_admin.at_work = Some(Work { order, task, next });
                    return done;
                }
            };
            let news = done.get_or_insert_default();
            let next = self.go_on_with(&mut task, possible, profile, disk, now, news);
            self.ns_admin.at_work = Some(Work { order, task, next });
        }
    }

    /// The next request; formats are queued separately.
    fn next_order(&mut self) -> Option<NamespaceJob> {
        loop {
            let order = self.ns_admin.worker.take()?;
            match order.what {
                NamespaceRequest::Format(request) => {
                    self.order_format(request, (order.reactor, order.tag))
                }
                _ => return Some(order),
            }
        }
    }

    /// Plans a request; none of its namespaces is protected or reserved.
    fn plan(&mut self, order: &NamespaceJob) -> Result<RequestTask, Status> {
        let dice = &mut self.ns_admin.dice;
        let fresh = Uuid::from_u64_pair(dice.roll(), dice.roll());
        let catalog = self.ns_admin.catalog.as_ref().ok_or(FAILED)?;
        let situation = RequestContext {
            granted: self.ns_admin.granted.as_ref().ok_or(FAILED)?,
            declared: &DECLARED.into(),
            max_nsid: 1024,
            free_bytes: u64::MAX,
            fresh,
            image: None,
            controllers: &self.registry.controllers_of(&subnqn()),
            may_go: &|_, _| Ok(()),
        };
        let plan = RequestPlan::new(&order.what, catalog.record(), &situation)?;
        let directory = Arc::clone(catalog.place());
        Ok(RequestTask::new(subnqn(), directory, plan, Vec::new()))
    }

    fn go_on_with(
        &mut self,
        task: &mut RequestTask,
        possible: bool,
        profile: &Profile,
        disk: &mut SimDevice,
        now: Instant,
        news: &mut Vec<NamespaceChange>,
    ) -> Next {
        match task.next(&mut Server { target: self, profile, disk, news }, possible) {
            RequestStep::Files(step) => Next::Files(step, now + self.ns_admin.dice.part(STEP)),
            RequestStep::Await(barrier) => Next::Await(barrier),
            RequestStep::Answer(outcome) => Next::Answer(outcome),
        }
    }

    /// Closes files that are not namespaces.
    fn close_strangers(&mut self, disk: &mut SimDevice) {
        let NsManagementDriver { served, opened, .. } = &mut self.ns_admin;
        let known: BTreeSet<Uuid> = served.entries.values().map(|entry| entry.uuid).collect();
        opened.retain(|uuid, opened| {
            let stays = known.contains(uuid);
            if !stays {
                disk.detach(opened.id);
            }
            stays
        });
    }
}

/// The changed namespaces of each host.
fn changes(old: &NamespaceCatalogRecord, new: &NamespaceCatalogRecord) -> Vec<NamespaceChange> {
    let nsids: BTreeSet<u32> = old.entries.keys().chain(new.entries.keys()).copied().collect();
    let hosts = |record: &NamespaceCatalogRecord, nsid| {
        let entry: Option<&Entry> = record.entries.get(&nsid);
        entry.map(|entry| (entry.uuid, entry.hosts.clone()))
    };
    let of = |nsid: u32| {
        let (was, is) = (hosts(old, nsid), hosts(new, nsid));
        let same = was.as_ref().map(|(uuid, _)| uuid) == is.as_ref().map(|(uuid, _)| uuid);
        let [was, is] = [was, is].map(|each| each.map(|(_, hosts)| hosts).unwrap_or_default());
        let told: BTreeSet<Nqn> = match same {
            true => was.symmetric_difference(&is).copied().collect(),
            false => was.union(&is).copied().collect(),
        };
        (!told.is_empty()).then_some((nsid, told))
    };
    debug_assert!(new.entries.values().all(|entry| entry.ana_group == GROUP));
    nsids.into_iter().filter_map(of).collect()
}
