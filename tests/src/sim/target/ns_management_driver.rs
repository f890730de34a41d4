//! Driver for Namespace Management in the simulation: executes the product's plan of each request,
//! with steps that take virtual time, and a simulated directory for the record and the files. Other
//! events happen between two steps, or during one.
//!
//! The directory behaves as `state/atomic_file.rs` uses a real one: a record is written beside its
//! name, synced, renamed, and the directory synced. A target that is killed meanwhile leaves the
//! old record or the new one; at a power failure, names that were not synced are old or new, each
//! independently.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel, sync_channel};
use std::time::{Duration, Instant};

use nvme::Nqn;
use nvmfd::blockdev::record::{seal, unseal};
use nvmfd::blockdev::{BlockSizes, DeviceId, Geometry, Health, IoCompletion};
use nvmfd::config::ManagedConfig;
use nvmfd::core::message::Message;
use nvmfd::core::sched::offload::NamespaceJob;
use nvmfd::core::subsystem::Namespace;
use nvmfd::core::subsystem::bad_blocks::BadBlocks;
use nvmfd::core::subsystem::ns_management::{Allocated, Entry, Management};
use nvmfd::core::subsystem::ns_request::NamespaceRequest;
use nvmfd::core::subsystem::reservation::Reservation;
use nvmfd::core::subsystem::write_protect::Protection;
use nvmfd::provision::{RequestContext, RequestPlan, Step};
use nvmfd::state::ns_catalog::NamespaceCatalogRecord;
use nvmfd::worker::ns_management::NamespaceAdminMessage;
use rdma::soft::sim::Rng;

use super::{Target, subnqn};
use crate::sim::device::SimDevice;
use crate::sim::mutants::SeededBug;
use crate::sim::oracle::ns_management::{DECLARED, GROUP, MOST, QUOTA_BYTES};
use crate::sim::scenario::Profile;

/// Maximum duration of a step that waits for a device.
const STEP: Duration = Duration::from_millis(8);

type Uuid = [u8; 16];

/// The directory of host-created namespaces.
#[derive(Debug, Default)]
struct Folder {
    now: Names,
    /// Names that survive a power failure.
    durable: Names,
}

/// The names in it.
#[derive(Clone, Debug, Default)]
struct Names {
    record: Option<Vec<u8>>,
    /// Files by UUID: backing stores.
    images: BTreeMap<Uuid, usize>,
}

/// An opened host-created namespace.
#[derive(Debug)]
struct Opened {
    id: DeviceId,
    health: Arc<Health>,
    protection: Arc<Protection>,
    reservation: Arc<Reservation>,
    marks: Arc<BadBlocks>,
}

/// A request in progress.
#[derive(Debug)]
struct Work {
    order: NamespaceJob,
    plan: RequestPlan,
    step: Step,
    due: Instant,
    /// Reactors that have not applied the change.
    awaited: Vec<Receiver<()>>,
}

/// Driver for Namespace Management; see the module.
#[derive(Debug)]
pub struct NsManagementDriver {
    granted: Option<Arc<ManagedConfig>>,
    words: Receiver<NamespaceAdminMessage>,
    sender: Sender<NamespaceAdminMessage>,
    directory: Folder,
    /// The record, and the served part of it.
    record: NamespaceCatalogRecord,
    served: NamespaceCatalogRecord,
    opened: BTreeMap<Uuid, Opened>,
    at_work: Option<Work>,
    /// Device errors per mille of steps.
    pub errors: u16,
    dice: Rng,
}

/// A namespace that has changed for these hosts.
pub type NamespaceChange = (u32, BTreeSet<Nqn>);

impl NsManagementDriver {
    /// With an empty directory.
    #[must_use]
    pub fn new(profile: &Profile, seed: u64) -> NsManagementDriver {
        let (sender, words) = channel();
        let granted = ManagedConfig {
            directory: "/managed".into(),
            quota_bytes: QUOTA_BYTES,
            namespaces: MOST as u32,
            any_host: true,
            hosts: BTreeSet::new(),
        };
        NsManagementDriver {
            granted: (profile.managing > 0).then(|| Arc::new(granted)),
            words,
            sender,
            directory: Folder::default(),
            record: NamespaceCatalogRecord::new(subnqn()),
            served: NamespaceCatalogRecord::new(subnqn()),
            opened: BTreeMap::new(),
            at_work: None,
            errors: if profile.disk.error > 0 { 30 } else { 0 },
            dice: Rng::new(seed ^ 0x57e3_a4d0),
        }
    }

    /// The sender of requests, until the next start.
    #[must_use]
    pub fn sender(&self) -> Sender<NamespaceAdminMessage> {
        self.sender.clone()
    }

    /// Time of its next step.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let work = self.at_work.as_ref()?;
        (work.step != Step::Await).then_some(work.due)
    }

    /// Whether a request is in progress.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.at_work.is_some()
    }

    /// The target has crashed during its step; with `power` unsynced names are lost.
    pub fn crash(&mut self, power: bool, disk: &mut SimDevice) {
        let (directory, dice) = (&mut self.directory, &mut self.dice);
        match self.at_work.take().map(|work| work.step) {
            Some(Step::Keep(record)) if dice.per_mille(500) => {
                directory.now.record = Some(seal::<NamespaceCatalogRecord>(&record).into_bytes());
            }
            Some(Step::Remove(uuids)) => {
                for uuid in uuids {
                    if dice.per_mille(500) {
                        directory.now.images.remove(&uuid.into_bytes());
                    }
                }
            }
            Some(Step::Make { entry, .. }) if dice.per_mille(500) => {
                directory.now.images.insert(entry.uuid.into_bytes(), image(&entry, disk));
            }
            _ => {}
        }
        if power {
            directory.lose_power(dice);
        }
        self.opened.clear();
        // The recipients of responses are lost too.
        (self.sender, self.words) = channel();
    }

    /// Checks that exactly the known namespaces exist in the end.
    ///
    /// # Errors
    /// A namespace that should not exist, or a missing one.
    pub fn leftovers(&self) -> Result<(), String> {
        let known: BTreeSet<Uuid> = self.uuids(&self.record).collect();
        let unsettled = self.record.unsettled.iter().map(|uuid| uuid.into_bytes());
        let known: BTreeSet<Uuid> = known.into_iter().chain(unsettled).collect();
        let files: BTreeSet<Uuid> = self.directory.now.images.keys().copied().collect();
        if let Some(lost) = self.uuids(&self.record).find(|uuid| !files.contains(uuid)) {
            return Err(format!("the file of a namespace that a host made is gone: {lost:x?}"));
        }
        match files.difference(&known).next() {
            Some(more) => Err(format!("a file belongs to no namespace: {more:x?}")),
            None => Ok(()),
        }
    }

    /// The served host-created namespaces.
    #[must_use]
    pub fn entries(&self) -> &BTreeMap<u32, Entry> {
        &self.served.entries
    }

    fn uuids<'a>(
        &self,
        record: &'a NamespaceCatalogRecord,
    ) -> impl Iterator<Item = Uuid> + use<'a> {
        record.entries.values().map(|entry| entry.uuid.into_bytes())
    }

    /// Executes one of the steps on files; returns false if the device fails.
    fn on_files(&mut self, step: &Step, disk: &mut SimDevice, plant: Option<SeededBug>) -> bool {
        let fails = self.dice.per_mille(self.errors);
        let directory = &mut self.directory;
        match step {
            // The old content is restored.
            Step::Keep(_) if fails => return false,
            Step::Keep(record) => {
                directory.now.record = Some(seal::<NamespaceCatalogRecord>(record).into_bytes());
                if plant != Some(SeededBug::LostRecord) {
                    directory.durable = directory.now.clone();
                }
                self.record = NamespaceCatalogRecord::clone(record);
            }
            Step::Make { entry, .. } => {
                let uuid = entry.uuid.into_bytes();
                directory.now.images.insert(uuid, image(entry, disk));
                directory.durable = directory.now.clone();
                return !fails;
            }
            Step::Remove(uuids) => {
                for uuid in uuids.iter().skip(usize::from(fails)) {
                    directory.now.images.remove(&uuid.into_bytes());
                    directory.durable.images = directory.now.images.clone();
                }
                return !fails;
            }
            _ => {}
        }
        true
    }
}

impl Folder {
    /// Each unsynced name is as before or as after.
    fn lose_power(&mut self, dice: &mut Rng) {
        let Folder { now, durable } = self;
        if dice.per_mille(500) {
            durable.record.clone_from(&now.record);
        }
        let all: BTreeSet<Uuid> = now.images.keys().chain(durable.images.keys()).copied().collect();
        for uuid in all {
            let [is, was] = [&now.images, &durable.images].map(|images| images.get(&uuid).copied());
            let left = if dice.per_mille(500) { is } else { was };
            match left {
                Some(store) => drop(durable.images.insert(uuid, store)),
                None => drop(durable.images.remove(&uuid)),
            }
        }
        self.now = self.durable.clone();
    }
}

/// A new file of zeros.
fn image(entry: &Entry, disk: &mut SimDevice) -> usize {
    let blocks = entry.bytes / u64::from(entry.block_size_bytes);
    disk.add_store(blocks as u32, entry.block_size_bytes)
}

impl Target {
    /// Loads the record, removes incomplete files, and opens the namespaces.
    ///
    /// # Errors
    /// The record is invalid, or a file is missing.
    pub(super) fn open_made(&mut self, disk: &mut SimDevice) -> Result<(), String> {
        let ns_admin = &mut self.ns_admin;
        // A start syncs the directory before it reads the record.
        ns_admin.directory.durable = ns_admin.directory.now.clone();
        ns_admin.record = match &ns_admin.directory.now.record {
            Some(bytes) => unseal(bytes)?,
            None => NamespaceCatalogRecord::new(subnqn()),
        };
        let mut settling = RequestPlan::settling(&ns_admin.record);
        let mut possible = true;
        loop {
            match settling.next(possible) {
                Step::Answer(_) => break,
                step => possible = ns_admin.on_files(&step, disk, self.plant),
            }
        }
        ns_admin.leftovers()?;
        self.ns_admin.served = self.ns_admin.record.clone();
        for (nsid, entry) in self.ns_admin.served.entries.clone() {
            self.open_one(nsid, &entry, disk)?;
        }
        Ok(())
    }

    /// Opens the file of a namespace.
    fn open_one(&mut self, nsid: u32, entry: &Entry, disk: &mut SimDevice) -> Result<(), String> {
        let uuid = entry.uuid.into_bytes();
        let store = self.ns_admin.directory.now.images.get(&uuid).copied();
        let store = store.ok_or("the file of a namespace that a host made is gone")?;
        let id = self.fresh_id();
        disk.attach(id, store);
        let opened = Opened {
            id,
            health: Arc::default(),
            protection: Protection::simulated(subnqn(), nsid),
            reservation: Reservation::volatile(subnqn(), nsid),
            marks: BadBlocks::volatile(),
        };
        self.ns_admin.opened.insert(uuid, opened);
        Ok(())
    }

    /// The host-created namespaces, as served.
    pub(super) fn made(&self) -> Vec<Namespace> {
        let made = |(nsid, entry): (&u32, &Entry)| {
            let uuid = entry.uuid.into_bytes();
            let Opened { id, health, protection, reservation, marks } =
                self.ns_admin.opened.get(&uuid)?;
            let block_shift = entry.block_size_bytes.trailing_zeros() as u8;
            Some(Namespace {
                nsid: *nsid,
                backing: *id,
                health: Arc::clone(health),
                geometry: Geometry::default(),
                blocks: entry.bytes >> block_shift,
                block_shift,
                read_only: false,
                protection: Arc::clone(protection),
                allow_format: false,
                formats: BlockSizes::only(block_shift),
                formatting: None,
                write_uncorrectable: false,
                marks: Arc::clone(marks),
                limiters: Vec::new(),
                ana_group: entry.ana_group,
                volatile_cache: true,
                uuid,
                nguid: uuid,
                eui64: None,
                reservation: Arc::clone(reservation),
            })
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
        Some(Arc::new(Management { grant, allocated, absent, used_bytes }))
    }

    /// Executes requests of hosts, as far as possible now. Returns the namespaces that have
    /// changed, and for which hosts; none, if nothing was done.
    pub fn manage(
        &mut self,
        profile: &Profile,
        disk: &mut SimDevice,
        now: Instant,
    ) -> Option<Vec<NamespaceChange>> {
        let mut news = None;
        while let Some(mut work) = self.ns_admin.at_work.take().or_else(|| self.take_order(now)) {
            let waits = |each: &mut Receiver<()>| each.try_recv() == Err(TryRecvError::Empty);
            work.awaited.retain_mut(waits);
            let is_due = work.step == Step::Await || work.due <= now;
            if !is_due || !work.awaited.is_empty() {
                self.ns_admin.at_work = Some(work);
                break;
            }
            let news = news.get_or_insert_with(Vec::new);
            let step = mem::replace(&mut work.step, Step::Await);
            if let Step::Answer(outcome) = step {
                let NamespaceJob { made, reactor, tag, .. } = work.order;
                let outcome = outcome.map(|nsid| made.set(nsid));
                self.registry.reactor(reactor).send(Message::Answer(IoCompletion {
                    tag,
                    buf: None,
                    outcome,
                }));
                continue;
            }
            let possible = self.take_step(&step, profile, disk, news);
            self.begin_step(&mut work, possible, now);
            self.ns_admin.at_work = Some(work);
        }
        news
    }

    /// The next request.
    fn take_order(&mut self, now: Instant) -> Option<Work> {
        let order = loop {
            let Ok(NamespaceAdminMessage::Order(order)) = self.ns_admin.words.try_recv() else {
                return None;
            };
            match order.what {
                NamespaceRequest::Format(_) => self.order_format(*order),
                _ => break order,
            }
        };
        let random = [self.ns_admin.dice.roll(), self.ns_admin.dice.roll()];
        let fresh = format!("{:016x}{:016x}", random[0], random[1]);
        let granted = self.ns_admin.granted.clone()?;
        let situation = RequestContext {
            granted: &granted,
            declared: &DECLARED.into(),
            max_nsid: 1024,
            free_bytes: u64::MAX,
            fresh: fresh.parse().expect("32 digits"),
            controllers: &self.registry.controllers_of(&subnqn()),
            may_go: &|_, _| Ok(()),
        };
        let plan = RequestPlan::new(&order.what, &self.ns_admin.record, &situation);
        let mut work = Work {
            order: *order,
            plan: RequestPlan::settling(&NamespaceCatalogRecord::new(subnqn())),
            step: Step::Await,
            due: now,
            awaited: Vec::new(),
        };
        match plan {
            Ok(plan) => {
                work.plan = plan;
                self.begin_step(&mut work, true, now);
            }
            Err(status) => work.step = Step::Answer(Err(status)),
        }
        Some(work)
    }

    fn begin_step(&mut self, work: &mut Work, possible: bool, now: Instant) {
        work.step = work.plan.next(possible);
        let waits = matches!(work.step, Step::Keep(_) | Step::Make { .. } | Step::Remove(_));
        work.due = if waits { now + self.ns_admin.dice.part(STEP) } else { now };
        if work.step == Step::Await {
            for reactor in self.registry.reactors() {
                let (caught, is_caught) = sync_channel(1);
                reactor.send(Message::Caught(caught));
                work.awaited.push(is_caught);
            }
        }
    }

    /// Completes a step; returns false if that was not possible.
    fn take_step(
        &mut self,
        step: &Step,
        profile: &Profile,
        disk: &mut SimDevice,
        news: &mut Vec<NamespaceChange>,
    ) -> bool {
        match step {
            Step::Keep(_) | Step::Make { .. } | Step::Remove(_) => {
                self.ns_admin.on_files(step, disk, self.plant)
            }
            Step::Serve => {
                let new = self.ns_admin.record.clone();
                for (nsid, entry) in &new.entries {
                    let is_open = self.ns_admin.opened.contains_key(&entry.uuid.into_bytes());
                    if !is_open && self.open_one(*nsid, entry, disk).is_err() {
                        return false;
                    }
                }
                let old = mem::replace(&mut self.ns_admin.served, new);
                news.extend(changes(&old, &self.ns_admin.served));
                if self.is_published() {
                    self.publish(profile);
                }
                self.close_strangers(disk);
                true
            }
            Step::Forget(_) | Step::Await | Step::Answer(_) => true,
        }
    }

    /// Closes files that are not namespaces.
    fn close_strangers(&mut self, disk: &mut SimDevice) {
        let ns_admin = &mut self.ns_admin;
        let known: BTreeSet<Uuid> = ns_admin.uuids(&ns_admin.served).collect();
        ns_admin.opened.retain(|uuid, opened| {
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
