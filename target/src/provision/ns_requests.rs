//! Executes Namespace Management requests of hosts. Each request is in the record of its catalog,
//! and published to all reactors, before it is completed. `provision/ns_request_plan.rs` defines
//! the steps and their order; [`RequestTask`] executes them, and borrows what it needs of those who
//! serve the namespaces ([`NamespaceServer`]). Operations on files, and the wait for reactors, are left
//! to whoever drives it: `execute` does so on a thread, with the provisioner.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::mem;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::statvfs::statvfs;
use nvme::namespace_management::ManagementSelect;
use nvme::persistent_event::ChangeNamespace;
use nvme::{Nqn, Status};
use tracing::{error, info, warn};
use uuid::Uuid;

use super::{Provisioner, Transition, wait_for_reactors};
use crate::blockdev::ceph::ClusterConfig;
use crate::blockdev::rbd::MakeError;
use crate::blockdev::{BlockSizes, Health, lock};
use crate::config::{ManagedConfig, NamespaceConfig, SubsystemConfig};
use crate::core::command::identify::SHARED;
use crate::core::message::MessageBarrier;
use crate::core::registry::Registry;
use crate::core::sched::offload::NamespaceJob;
use crate::core::subsystem::event_log::PersistentEvent;
use crate::core::subsystem::ns_management::Entry;
use crate::core::subsystem::ns_request::{FAILED, NamespaceRequest};
use crate::core::subsystem::reservation::{self, Barred, HostId};
use crate::core::subsystem::write_protect;
use crate::error::Fatal;
use crate::provision::devices::{self, Place};
use crate::provision::ns_catalog::Catalog;
use crate::provision::ns_images::{CreateOutcome, ImagePool, RequestImage};
use crate::provision::{NamespaceDirectory, RequestContext, RequestPlan, Step};
use crate::state::ns_catalog::{CatalogImage, NamespaceCatalogRecord};

/// Time limit for the free space of a directory.
const ANSWER: Duration = Duration::from_secs(10);

/// A namespace that is being deleted does not change.
pub type DeleteGuards = (write_protect::WriteProtectGuard, reservation::ReservationGuard);

/// Executes a request. Returns the id of the created namespace, or 0. Operations in the directory
/// of the subsystem may block for ever: the provisioner is not locked meanwhile, and the
/// configuration may have changed by then.
///
/// # Errors
/// The status of the completion; nothing has changed.
pub(crate) fn execute(
    provisioner: &Mutex<Provisioner>,
    order: &NamespaceJob,
) -> Result<u32, Status> {
    let nqn = order.subsystem;
    let (managed, directory, opening) = {
        let provisioner = lock(provisioner);
        let (managed, _) = provisioner.granted(order)?;
        let catalog = provisioner.catalogs.get(&nqn).ok_or(FAILED)?;
        (managed, Arc::clone(catalog.place()), provisioner.stores.opening())
    };
    // No request is begun for a directory that hangs.
    let measured = opening.begin(directory.path(), {
        let directory = Arc::clone(&directory);
        move || Ok(free_bytes(directory.path()))
    });
    let rejected = |why| {
        warn!("namespace request for {nqn} rejected: {why}");
        FAILED
    };
    let free_bytes = measured.by(Instant::now() + ANSWER).map_err(rejected)?;
    let pool = ImagePool::of(order, &managed, &opening).map_err(rejected)?;
    // No image is removed meanwhile: what this request announces may be one by then.
    let _turn = directory.turn();
    let mut held = lock(provisioner);
    let (now, subsystem) = held.granted(order)?;
    if (&now.pool, &now.cluster) != (&managed.pool, &managed.cluster) {
        return Err(rejected("its pool has changed meanwhile".to_owned()));
    }
    // The data of a deleted namespace are not available afterwards.
    let change = held.change_of(order);
    let image = pool.as_ref().and_then(|pool| pool.announced(&order.what));
    let (plan, guards) = held.plan(order, &subsystem, &now, (free_bytes, image.as_ref()))?;
    let task = RequestTask::new(nqn, Arc::clone(&directory), plan, guards);
    let mut task = task.with_images_of(now.cluster);
    let mut possible = true;
    let made = loop {
        match task.next(&mut *held, possible) {
            RequestStep::Files(step) => {
                drop(held);
                possible = step.execute(|namespace, size_bytes| match &pool {
                    Some(pool) => pool.make(namespace, size_bytes, &opening),
                    None => devices::make(namespace).map(|()| None).map_err(MakeError::Failed),
                });
                held = lock(provisioner);
            }
            RequestStep::Await(barrier) => {
                wait_for_reactors(barrier);
                possible = true;
            }
            RequestStep::Answer(outcome) => break outcome?,
        }
    };
    held.note(order, change, made);
    log_request(order, made);
    Ok(made)
}

fn log_request(order: &NamespaceJob, made: u32) {
    let (nqn, host) = (order.subsystem, order.host);
    match &order.what {
        NamespaceRequest::Create(_) => {
            info!(subsystem = %nqn, nsid = made, %host, "namespace created")
        }
        NamespaceRequest::Delete { nsid } => {
            info!(subsystem = %nqn, nsid, %host, "namespace deleted")
        }
        NamespaceRequest::Attach { nsid, cntlids } => {
            info!(subsystem = %nqn, nsid, ?cntlids, %host, "namespace attached");
        }
        NamespaceRequest::Detach { nsid, cntlids } => {
            info!(subsystem = %nqn, nsid, ?cntlids, %host, "namespace detached");
        }
        NamespaceRequest::Format(_) => {}
    }
}

/// What a request needs of those who serve the namespaces.
pub trait NamespaceServer {
    /// The registry in which subsystems are published.
    fn registry(&self) -> &Registry;

    /// The catalog of a subsystem.
    fn catalog(&mut self, nqn: Nqn) -> Option<&mut Catalog>;

    /// Publishes the namespaces of the record, `made` with a device that has to be opened. False if that
    /// is not possible, and nothing has changed.
    fn serve(&mut self, nqn: Nqn, made: Option<(u32, Uuid)>) -> bool;

    /// Removes the other persisted state of deleted namespaces.
    fn forget(&mut self, uuids: &[Uuid]);

    /// The record of a directory without a catalog could not be restored: that is retried.
    fn restore_later(&mut self, directory: &Arc<NamespaceDirectory>);
}

/// A request in progress.
#[derive(Debug)]
pub struct RequestTask {
    nqn: Nqn,
    plan: RequestPlan,
    /// Its directory, also after the catalog was closed.
    directory: Arc<NamespaceDirectory>,
    /// Held until the deleted namespaces are no longer served. Write protection or a reservation
    /// either precedes this, also while the request has waited, or fails.
    guards: Vec<DeleteGuards>,
    /// The namespace whose file was created.
    made: Option<(u32, Uuid)>,
    /// The image, if it is one.
    image: RequestImage,
    /// How the cluster of images is reached.
    cluster: ClusterConfig,
    /// The namespace cannot be served: its record is reverted.
    undoes: bool,
    writing: Writing,
}

/// The record that the last step on files has written.
#[derive(Debug)]
enum Writing {
    Nothing,
    Record(Arc<RecordChange>),
    /// That of before, because the catalog was closed.
    Closed,
}

/// A record, and the one that it replaces.
#[derive(Debug)]
struct RecordChange {
    record: NamespaceCatalogRecord,
    before: NamespaceCatalogRecord,
}

/// What a request does next.
#[derive(Debug)]
pub enum RequestStep {
    /// An operation on files, which may block for ever; [`RequestTask::next`] takes whether it
    /// succeeded.
    Files(Box<FileStep>),
    /// Wait until every reactor has the published state.
    Await(MessageBarrier),
    /// Complete the request with the id of the created namespace, or 0, or with an error status.
    Answer(Result<u32, Status>),
}

/// An operation on the files of a directory.
#[derive(Debug)]
pub struct FileStep {
    nqn: Nqn,
    directory: Arc<NamespaceDirectory>,
    operation: FileOperation,
}

#[derive(Debug)]
enum FileOperation {
    Keep(Arc<RecordChange>),
    /// The new record, because the namespaces of the one before cannot be served.
    Revert(Arc<RecordChange>),
    /// The record of before.
    Restore(Arc<RecordChange>),
    /// The file or image of a namespace, and its size.
    Make(Box<NamespaceConfig>, u64, RequestImage),
    Remove(BTreeSet<Uuid>),
}

impl RequestTask {
    /// A request of a subsystem whose catalog is in `directory`. `guards`: of the namespaces that it
    /// deletes.
    pub fn new(
        nqn: Nqn,
        directory: Arc<NamespaceDirectory>,
        plan: RequestPlan,
        guards: Vec<DeleteGuards>,
    ) -> RequestTask {
        RequestTask {
            nqn,
            plan,
            directory,
            guards,
            made: None,
            image: RequestImage::default(),
            cluster: ClusterConfig::default(),
            undoes: false,
            writing: Writing::Nothing,
        }
    }

    /// With images of a cluster.
    pub fn with_images_of(self, cluster: ClusterConfig) -> RequestTask {
        RequestTask { cluster, ..self }
    }

    /// Goes on to the next step that waits. `possible`: whether the last one succeeded, true at the
    /// beginning.
    pub fn next(&mut self, server: &mut impl NamespaceServer, mut possible: bool) -> RequestStep {
        match mem::replace(&mut self.writing, Writing::Nothing) {
            Writing::Nothing => {}
            Writing::Record(change) => match self.catalog(server) {
                Some(catalog) if possible || self.undoes => catalog.hold(change.record.clone()),
                Some(_) => {}
                // A reload has closed the directory meanwhile. The next catalog there does not
                // contain this request.
                None => {
                    self.writing = Writing::Closed;
                    return self.files(FileOperation::Restore(change));
                }
            },
            Writing::Closed => {
                if !possible {
                    server.restore_later(&self.directory);
                }
                possible = false;
            }
        }
        loop {
            possible = match self.plan.next(possible) {
                Step::Keep(record) => {
                    let catalog = self.catalog(server);
                    let Some(before) = catalog.map(|catalog| catalog.record().clone()) else {
                        possible = false;
                        continue;
                    };
                    let record = self.image.completed(*record, self.made);
                    let change = Arc::new(RecordChange { record, before });
                    self.writing = Writing::Record(Arc::clone(&change));
                    return self.files(match self.undoes {
                        true => FileOperation::Revert(change),
                        false => FileOperation::Keep(change),
                    });
                }
                Step::Make { nsid, entry } => {
                    let catalog = self.catalog(server);
                    let Some(config) =
                        catalog.map(|catalog| catalog.namespace(nsid, &entry, &self.cluster))
                    else {
                        possible = false;
                        continue;
                    };
                    self.made = Some((nsid, entry.uuid));
                    let (config, image) = (Box::new(config), self.image.clone());
                    return self.files(FileOperation::Make(config, entry.bytes, image));
                }
                Step::Remove(uuids) => return self.files(FileOperation::Remove(uuids)),
                Step::Serve => {
                    let served = server.serve(self.nqn, self.made);
                    self.guards.clear();
                    self.undoes = !served;
                    served
                }
                Step::Forget(uuids) => {
                    server.forget(&uuids);
                    true
                }
                Step::Await => {
                    let barrier = MessageBarrier::send(server.registry().reactors());
                    return RequestStep::Await(barrier);
                }
                Step::Answer(outcome) => return RequestStep::Answer(self.image.explained(outcome)),
            };
        }
    }

    fn files(&self, operation: FileOperation) -> RequestStep {
        let (nqn, directory) = (self.nqn, Arc::clone(&self.directory));
        RequestStep::Files(Box::new(FileStep { nqn, directory, operation }))
    }

    /// The catalog of the subsystem, if it is in the directory of the request.
    fn catalog<'s>(&self, server: &'s mut impl NamespaceServer) -> Option<&'s mut Catalog> {
        let catalog = server.catalog(self.nqn)?;
        Arc::ptr_eq(catalog.place(), &self.directory).then_some(catalog)
    }
}

impl FileStep {
    /// Executes it, and may block; false if it fails. `make` creates the file of a namespace, or
    /// the image, of that size.
    pub fn execute(&self, make: impl FnOnce(&NamespaceConfig, u64) -> CreateOutcome) -> bool {
        let (nqn, directory) = (self.nqn, &self.directory);
        match &self.operation {
            FileOperation::Revert(change) => directory.restore(&change.record),
            FileOperation::Restore(change) => directory.restore(&change.before),
            FileOperation::Keep(change) => {
                let kept = directory.keep(&change.record, &change.before);
                if let Err(error) = &kept {
                    let shown = directory.path().display();
                    error!("cannot persist the catalog of managed namespaces in {shown}: {error}");
                }
                kept.is_ok()
            }
            FileOperation::Make(config, size_bytes, image) => {
                let in_place = directory.is_in_place();
                let in_place = in_place.map_err(|error| MakeError::Failed(error.to_string()));
                let made = in_place.and_then(|()| make(config, *size_bytes));
                if let Err(why) = &made {
                    error!("cannot create a namespace of {nqn}: {why}");
                }
                image.set(made)
            }
            FileOperation::Remove(uuids) => {
                let removed = directory.remove(uuids);
                if let Err(error) = &removed {
                    warn!("leftover namespace files of {nqn} cannot be removed yet: {error}");
                }
                removed.is_ok()
            }
        }
    }
}

impl NamespaceServer for Provisioner {
    fn registry(&self) -> &Registry {
        &self.registry
    }

    fn catalog(&mut self, nqn: Nqn) -> Option<&mut Catalog> {
        self.catalogs.get_mut(&nqn)
    }

    fn serve(&mut self, nqn: Nqn, made: Option<(u32, Uuid)>) -> bool {
        match self.of_record(nqn, made) {
            Ok(next) => {
                self.adopt(next, Vec::new());
                true
            }
            Err(why) => {
                error!("namespace request for {nqn} failed: {why}");
                false
            }
        }
    }

    fn forget(&mut self, uuids: &[Uuid]) {
        self.stores.forget_kept(uuids);
    }

    fn restore_later(&mut self, directory: &Arc<NamespaceDirectory>) {
        if !self.closed.iter().any(|other| Arc::ptr_eq(other, directory)) {
            self.closed.push(Arc::clone(directory));
        }
    }
}

impl Provisioner {
    /// Permission of a host that is still connected, and its subsystem.
    ///
    /// # Errors
    /// Invalid Opcode: a reload may have revoked the permission since.
    fn granted(&self, order: &NamespaceJob) -> Result<(ManagedConfig, SubsystemConfig), Status> {
        order.connection.check()?;
        let subsystem = self.config.subsystems.iter().find(|s| s.nqn == order.subsystem);
        let granted = subsystem.and_then(|s| Some((s.managed.clone()?, s.clone())));
        let granted = granted.filter(|(managed, _)| managed.admits(&order.host));
        granted.ok_or(Status::INVALID_OPCODE.with_dnr())
    }

    /// Data for the Persistent Event log, as far as known before the request.
    fn change_of(&self, order: &NamespaceJob) -> Option<ChangeNamespace> {
        let sel = |sel: ManagementSelect| u32::from(sel.0);
        match order.what {
            NamespaceRequest::Create(new) => {
                let shift = new.block_size_bytes.trailing_zeros() as u8;
                let blocks = new.bytes >> shift;
                Some(ChangeNamespace {
                    cdw10: sel(ManagementSelect::CREATE),
                    nsze: blocks,
                    ncap: blocks,
                    flbas: BlockSizes::those(|_| true).index(shift),
                    nmic: u8::from(!new.private) * SHARED,
                    anagrpid: new.ana_group,
                    ..ChangeNamespace::default()
                })
            }
            NamespaceRequest::Delete { nsid } => {
                // For NSID_ALL only the NSID is recorded.
                let store = self.stores.store(order.subsystem, nsid);
                let entry = self.catalogs.get(&order.subsystem);
                let entry = entry.and_then(|catalog| catalog.record().entries.get(&nsid));
                let backing = store.map(|store| store.monitored.backing());
                let blocks = backing.as_ref().map_or(0, |backing| backing.blocks());
                let index = |shift| BlockSizes::those(|_| true).index(shift);
                Some(ChangeNamespace {
                    cdw10: sel(ManagementSelect::DELETE),
                    nsze: blocks,
                    ncap: blocks,
                    flbas: backing
                        .map_or(0, |b| index(b.block_size_bytes().trailing_zeros() as u8)),
                    nmic: entry.map_or(0, |entry| u8::from(!entry.private) * SHARED),
                    anagrpid: entry.map_or(0, |entry| entry.ana_group),
                    nsid,
                    ..ChangeNamespace::default()
                })
            }
            _ => None,
        }
    }

    /// Adds the event of a request to the Persistent Event log.
    fn note(&self, order: &NamespaceJob, told: Option<ChangeNamespace>, made: u32) {
        let subsystem = self.registry.subsystem(&order.subsystem);
        let history = subsystem.as_ref().and_then(|subsystem| subsystem.usage.history());
        if let (Some(history), Some(change)) = (history, told) {
            let nsid = if made == 0 { change.nsid } else { made };
            let happening =
                PersistentEvent::ChangeNamespace(order.cntlid, ChangeNamespace { nsid, ..change });
            history.note(happening, &self.shared.power.at(Instant::now()));
        }
    }

    /// Plans a request, and locks the namespaces that it deletes.
    ///
    /// # Errors
    /// The status of the completion: the request is rejected.
    fn plan(
        &self,
        order: &NamespaceJob,
        subsystem: &SubsystemConfig,
        managed: &ManagedConfig,
        (free_bytes, image): (u64, Option<&CatalogImage>),
    ) -> Result<(RequestPlan, Vec<DeleteGuards>), Status> {
        let nqn = subsystem.nqn;
        let catalog = self.catalogs.get(&nqn).ok_or(FAILED)?;
        self.check_attachment(order)?;
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|_| FAILED)?;
        let held = RefCell::new(Vec::new());
        let may_go = |nsid, entry: &Entry| {
            held.borrow_mut().push(self.may_go((nqn, nsid), entry, &order.host_id)?);
            Ok(())
        };
        let situation = RequestContext {
            granted: managed,
            declared: &subsystem.namespaces.iter().map(|n| n.nsid).collect(),
            max_nsid: subsystem.offer.max_nsid,
            // The free space of a cluster is that of its pools, which nobody reserves.
            free_bytes: if image.is_some() { u64::MAX } else { free_bytes },
            fresh: uuid::Builder::from_random_bytes(random).into_uuid(),
            image,
            controllers: &self.registry.controllers_of(&nqn),
            may_go: &may_go,
        };
        let plan = RequestPlan::new(&order.what, catalog.record(), &situation)?;
        Ok((plan, held.into_inner()))
    }

    /// Whether a host may attach or detach a namespace: another one may have reserved it while the
    /// request has waited.
    ///
    /// # Errors
    /// Reservation Conflict.
    fn check_attachment(&self, order: &NamespaceJob) -> Result<(), Status> {
        let (NamespaceRequest::Attach { nsid, .. } | NamespaceRequest::Detach { nsid, .. }) =
            order.what
        else {
            return Ok(());
        };
        let store = self.stores.store(order.subsystem, nsid);
        store.map_or(Ok(()), |it| it.reservation.barred(&order.host_id).check(Barred::WRITE))
    }

    /// Whether a host may delete a namespace. Until the result is dropped, the namespace cannot be
    /// protected, or reserved against that host.
    ///
    /// # Errors
    /// The namespace is protected or reserved, or its state cannot be read.
    fn may_go(&self, place: Place, entry: &Entry, host: &HostId) -> Result<DeleteGuards, Status> {
        let (nqn, nsid) = place;
        // A configured namespace with the same id is another one.
        let served = self.stores.store(nqn, nsid).filter(|store| store.uuid() == entry.uuid);
        if served.is_some_and(|store| store.format.under_way().is_some()) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let is_image = self.catalogs.get(&nqn).is_some_and(|it| it.is_image(entry.uuid));
        let (protection, reservation) = match served {
            Some(store) => (Arc::clone(&store.protection), Arc::clone(&store.reservation)),
            // Its file may become available any moment, with the state that hosts rely on. (That of
            // an image is in the state directory, and an image that is gone stays pending.)
            None if self.stores.why_pending(nqn, nsid).is_some() && !is_image => {
                return Err(Health::NOT_READY);
            }
            None => self.stores.guards(place, entry.uuid).map_err(|why| {
                error!("cannot delete namespace {nsid} of {nqn}: {why}");
                FAILED
            })?,
        };
        Ok((protection.hold()?, reservation.hold(host)?))
    }

    fn of_record(&self, nqn: Nqn, made: Option<(u32, Uuid)>) -> Result<Transition, Fatal> {
        let subsystems = self.merged(made.map(|(nsid, _)| (nqn, nsid)));
        if let Some((nsid, uuid)) = made {
            let own = subsystems.iter().filter(|s| s.nqn == nqn).flat_map(|s| &s.namespaces);
            // A reload may have changed the configuration meanwhile.
            if !{ own }.any(|n| (n.nsid, n.uuid) == (nsid, uuid)) {
                return Err(Fatal(format!("namespace {nsid} is declared by now")));
            }
        }
        let next = Transition::of_order(subsystems, &self.stores, self.config.missing)?;
        if let Some(why) = made.and_then(|(nsid, _)| next.stores.why_pending(nqn, nsid)) {
            return Err(Fatal(why.to_owned()));
        }
        self.attach_new(&next)?;
        Ok(next)
    }
}

/// Free space of the file system of a directory, in bytes; unlimited if unknown.
fn free_bytes(directory: &Path) -> u64 {
    let found = statvfs(directory);
    found.map_or(u64::MAX, |found| found.blocks_available().saturating_mul(found.fragment_size()))
}

#[cfg(test)]
mod tests;
