//! Host-created namespaces in images of Ceph RBD: how they are made, and removed.
//!
//! An image is made between two records: the first announces it, with the client that makes it,
//! the second has its id. Removed are images of requests that have not reached the second record,
//! and of deleted namespaces: beside the requests, because that takes as long as there is data, and
//! again and again as long as the cluster does not answer or somebody has the image open. Until
//! then the record has them, and they count against the quota.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use nvme::{Nqn, Status};
use tracing::{error, info, warn};
use uuid::Uuid;

use super::{NamespaceDirectory, Provisioner};
use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::ceph::{ClusterConfig, ImageIdentity, ImageName, ImageOrigin};
use crate::blockdev::rbd::{DataClient, MakeError, Removal, remove_made};
use crate::blockdev::{BackingKind, OpenError, lock};
use crate::config::{ManagedConfig, NamespaceConfig};
use crate::core::sched::offload::NamespaceJob;
use crate::core::subsystem::ns_request::NamespaceRequest;
use crate::state::ns_catalog::{CatalogImage, NamespaceCatalogRecord};

/// How long a request waits for the cluster.
const ANSWER: Duration = Duration::from_secs(10);
/// Time limit for the removals of a subsystem, and then for its record. What takes longer goes on.
const REMOVAL: Duration = Duration::from_secs(2);
/// Maximum of removals in progress, of all subsystems, including those that do not end in time: each
/// occupies a thread of the daemon.
const REMOVALS_MAX: usize = 4;
/// The pause after a removal that failed,
const PAUSE: Duration = Duration::from_secs(1);
/// which doubles each time, up to this many times.
const DOUBLINGS_MAX: u32 = 6;
/// The administrator learns of what fails for the third time: a namespace that was just deleted may
/// still be open.
const PATIENCE: u32 = 3;

/// The id of an image that was made, nothing of a file, or why there is neither.
pub(crate) type CreateOutcome = Result<Option<String>, MakeError>;

/// Where a request makes its image, and the client that does it.
pub(super) struct ImagePool {
    pool: String,
    client: DataClient,
}

impl ImagePool {
    /// The pool of a request that makes a namespace, if namespaces are images.
    ///
    /// # Errors
    /// One sentence: the cluster, or the pool, cannot be used.
    pub(super) fn of(
        order: &NamespaceJob,
        managed: &ManagedConfig,
        opening: &BlockingPool,
    ) -> Result<Option<ImagePool>, String> {
        let is_create = matches!(order.what, NamespaceRequest::Create(_));
        let Some(pool) = managed.pool.clone().filter(|_| is_create) else { return Ok(None) };
        let name = CatalogImage::name_in(&pool, Uuid::nil()).ok_or("the pool has no name")?;
        let (cluster, path) = (managed.cluster.clone(), Path::new("rbd:").join(&pool));
        let connected = opening.begin(&path, move || {
            DataClient::for_pool(&cluster, &name).map_err(|error| error.sentence)
        });
        let client = connected.by(Instant::now() + ANSWER)?;
        Ok(Some(ImagePool { pool, client }))
    }

    /// What the record has of the image before it is made.
    pub(super) fn announced(&self, what: &NamespaceRequest) -> Option<CatalogImage> {
        let NamespaceRequest::Create(new) = what else { return None };
        let identity = ImageIdentity::Client(self.client.address().to_owned());
        let cluster = self.client.cluster().to_owned();
        let origin = ImageOrigin { cluster, size_bytes: new.bytes, identity };
        Some(CatalogImage { pool: self.pool.clone(), origin })
    }

    /// Makes the image of a namespace. Without an answer it may be made later.
    pub(super) fn make(
        &self,
        namespace: &NamespaceConfig,
        size_bytes: u64,
        opening: &BlockingPool,
    ) -> CreateOutcome {
        let BackingKind::Rbd { image, .. } = namespace.backing().kind else {
            return Err(MakeError::Failed("its namespace is no image".to_owned()));
        };
        let (client, path) = (self.client.clone(), image.path());
        let task = opening.begin(&path, move || Ok(client.make_image(&image, size_bytes)));
        let made = task.by(Instant::now() + ANSWER).map_err(MakeError::Failed)?;
        made.map(Some)
    }
}

/// What is known of the image that a request makes.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestImage(Arc<OnceLock<CreateOutcome>>);

impl RequestImage {
    /// Sets the outcome of the step that makes a file or image; returns whether there is one.
    pub(super) fn set(&self, made: CreateOutcome) -> bool {
        self.0.get_or_init(|| made).is_ok()
    }

    /// A record with what is known of the image of a namespace by now: its id, or that somebody else
    /// has made the one with its name.
    pub(super) fn completed(
        &self,
        mut record: NamespaceCatalogRecord,
        made: Option<(u32, Uuid)>,
    ) -> NamespaceCatalogRecord {
        let Some((outcome, (_, uuid))) = self.0.get().zip(made) else { return record };
        match outcome {
            Ok(Some(id)) => {
                if let Some(image) = record.images.get_mut(&uuid) {
                    image.origin.identity = ImageIdentity::Id(id.clone());
                }
            }
            Err(MakeError::Exists(_)) => record.settle(uuid),
            _ => {}
        }
        record
    }

    /// The outcome of a request, with the status of a pool without space.
    pub(super) fn explained(&self, outcome: Result<u32, Status>) -> Result<u32, Status> {
        match self.0.get() {
            Some(Err(MakeError::NoSpace(_))) => {
                outcome.map_err(|_| Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr())
            }
            _ => outcome,
        }
    }
}

/// Images of a catalog that are to be removed.
pub(super) struct UnsettledImages {
    nqn: Nqn,
    directory: Arc<NamespaceDirectory>,
    cluster: ClusterConfig,
    opening: Arc<BlockingPool>,
}

/// Removes images of all catalogs; retries what fails.
#[derive(Debug, Default)]
pub(super) struct ImageRemoval {
    /// Cloned by each removal in progress.
    running: Arc<()>,
    failed: BTreeMap<Nqn, Failure>,
}

#[derive(Debug)]
struct Failure {
    times: u32,
    until: Instant,
    told: String,
}

impl ImageRemoval {
    /// Removes what can be removed now, until the daemon stops.
    pub(super) fn run(&mut self, provisioner: &Mutex<Provisioner>, stops: impl Fn() -> bool) {
        let all = lock(provisioner).unsettled_images();
        self.failed.retain(|nqn, _| all.iter().any(|each| each.nqn == *nqn));
        for each in all {
            if stops() {
                return;
            }
            let now = Instant::now();
            if self.failed.get(&each.nqn).is_some_and(|failure| now < failure.until) {
                continue;
            }
            match each.remove(provisioner, &self.running, remove_made) {
                None => {}
                Some(Ok(())) => drop(self.failed.remove(&each.nqn)),
                Some(Err(why)) => self.note(each.nqn, why),
            }
        }
    }

    /// Notes a failure, and reports it once.
    fn note(&mut self, nqn: Nqn, why: String) {
        let now = Instant::now();
        let new = || Failure { times: 0, until: now, told: String::new() };
        let failure = self.failed.entry(nqn).or_insert_with(new);
        failure.until = now + PAUSE * (1 << failure.times.min(DOUBLINGS_MAX));
        failure.times += 1;
        if failure.times >= PATIENCE && failure.told != why {
            warn!("an image that is no namespace of {nqn} any more is not removed yet: {why}");
            failure.told = why;
        }
    }
}

impl UnsettledImages {
    /// Removes the images, and then their entries in the record. None: a request is in progress.
    ///
    /// # Errors
    /// Why one of them still exists, or the record was not written.
    pub(super) fn remove(
        &self,
        provisioner: &Mutex<Provisioner>,
        running: &Arc<()>,
        remove_made: RemoveImage,
    ) -> Option<Result<(), String>> {
        // A request may be making what its record announces.
        let _turn = self.directory.try_turn()?;
        let before = self.record(&lock(provisioner))?;
        let mut settled = before.clone();
        let mut outcome = Ok(());
        let images = before.unsettled_images();
        let images: Vec<_> = images
            .filter_map(|(uuid, image)| Some((uuid, image.name(uuid)?, image.origin.clone())))
            .collect();
        let mut images = images.into_iter();
        let (deadline, mut begun) = (Instant::now() + REMOVAL, VecDeque::new());
        loop {
            let is_free = Arc::strong_count(running) <= REMOVALS_MAX && Instant::now() < deadline;
            if is_free && let Some((uuid, name, origin)) = images.next() {
                let (cluster, own, running) =
                    (self.cluster.clone(), name.clone(), Arc::clone(running));
                let task = self.opening.begin(&name.path(), move || {
                    let _running = running;
                    remove_made(&cluster, &own, &origin).map_err(|error| error.sentence)
                });
                begun.push_back((uuid, name, task));
                continue;
            }
            let Some((uuid, name, task)) = begun.pop_front() else { break };
            match task.by(deadline) {
                Ok(removal) => {
                    self.log(&name, removal);
                    settled.settle(uuid);
                }
                Err(why) => outcome = Err(why),
            }
        }
        if settled == before && images.len() > 0 {
            outcome = outcome.and(Err("the removal of others takes its time".to_owned()));
        }
        if settled != before {
            let kept = self.keep(provisioner, settled, before);
            outcome = outcome.and(kept);
        }
        Some(outcome)
    }

    fn log(&self, name: &ImageName, removal: Removal) {
        let nqn = self.nqn;
        match removal {
            Removal::Removed => info!(subsystem = %nqn, image = %name, "image removed"),
            Removal::Absent => {
                info!(subsystem = %nqn, image = %name, "there is no image to remove")
            }
            Removal::NotOwn => warn!(
                "{name} is not the image that was made for a namespace of {nqn}: it is left (if the \
                 name is free, it is in the trash: `rbd trash ls`)"
            ),
        }
    }

    /// Writes the record. If the directory does not answer, all of this is done again.
    fn keep(
        &self,
        provisioner: &Mutex<Provisioner>,
        settled: NamespaceCatalogRecord,
        before: NamespaceCatalogRecord,
    ) -> Result<(), String> {
        let (directory, new) = (Arc::clone(&self.directory), settled.clone());
        let task = self.opening.begin(self.directory.path(), move || {
            directory.keep(&new, &before).map_err(|error| error.to_string())
        });
        let kept = task.by(Instant::now() + REMOVAL);
        let mut provisioner = lock(provisioner);
        let catalog = provisioner.catalogs.get_mut(&self.nqn);
        let catalog = catalog.filter(|it| Arc::ptr_eq(it.place(), &self.directory));
        if let (Ok(()), Some(catalog)) = (&kept, catalog) {
            catalog.hold(settled);
        }
        kept.inspect_err(|why| {
            let shown = self.directory.path().display();
            error!("cannot persist the catalog of managed namespaces in {shown}: {why}");
        })
    }

    /// The record, if the catalog is still open.
    fn record(&self, provisioner: &Provisioner) -> Option<NamespaceCatalogRecord> {
        let catalog = provisioner.catalogs.get(&self.nqn)?;
        Arc::ptr_eq(catalog.place(), &self.directory).then(|| catalog.record().clone())
    }
}

/// [`remove_made`].
type RemoveImage = fn(&ClusterConfig, &ImageName, &ImageOrigin) -> Result<Removal, OpenError>;

impl Provisioner {
    /// The catalogs that have images to be removed.
    pub(super) fn unsettled_images(&self) -> Vec<UnsettledImages> {
        let unsettled = self.catalogs.iter().filter_map(|(nqn, catalog)| {
            catalog.record().unsettled_images().next()?;
            let subsystem = self.config.subsystems.iter().find(|each| each.nqn == *nqn)?;
            Some(UnsettledImages {
                nqn: *nqn,
                directory: Arc::clone(catalog.place()),
                cluster: subsystem.managed.as_ref()?.cluster.clone(),
                opening: self.stores.opening(),
            })
        });
        unsettled.collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::provision::ns_images::*;

    #[test]
    fn a_removal_that_fails_is_reported_once_and_retried_less_and_less_often() {
        let nqn: Nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
        let mut removal = ImageRemoval::default();
        let mut pauses = Vec::new();
        for attempt in 1..=9 {
            let before = Instant::now();
            removal.note(nqn, "it is open".to_owned());
            let failure = &removal.failed[&nqn];
            pauses.push((failure.until - before).as_secs());
            let told = if attempt < PATIENCE { "" } else { "it is open" };
            assert_eq!(failure.told, told, "{attempt}");
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
    }
}
