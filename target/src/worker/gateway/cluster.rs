//! Operations of the worker on the cluster: tasks that may block, on threads of their own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::errno::Errno;
use nvme::Nqn;
use nvmfd_gateway::record::{GroupObject, Key, Update};
use nvmfd_gateway::{Operation, OperationId, Outcome};
use tracing::info;

use super::failures::{Failures, Step};
use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::ceph::{ClusterConfig, rights_command};
use crate::blockdev::monitor::{DeviceMonitor, IsCurrent, MonitoredDevice};
use crate::blockdev::rados::{self, ObjectClient, UpdateError};
use crate::blockdev::rbd::DataClient;
use crate::blockdev::{OpenError, lock};
use crate::config::GroupConfig;
use crate::core::registry::Registry;
use crate::core::subsystem::Namespace;
use crate::core::subsystem::reservation::Reservation;
use crate::core::subsystem::write_protect::Protection;
use crate::state::group_records::GroupRecords;

/// Time limit of an operation on the object of the group; less than the time after which a gateway
/// doubts itself.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);

/// What the tasks of the worker use.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) config: ClusterConfig,
    pub(super) group: GroupConfig,
    pub(super) objects: Arc<Mutex<Option<Arc<ObjectClient>>>>,
    pub(super) data: Arc<Mutex<Option<DataClient>>>,
    /// Counts data clients: a task on images for a former one has no effect.
    pub(super) generation: Arc<AtomicU64>,
    pub(super) registry: Arc<Registry>,
    pub(super) monitor: Arc<DeviceMonitor>,
    pub(super) pool: Arc<BlockingPool>,
    /// Reservations and write protection, which follow the ANA groups.
    pub(super) records: Arc<GroupRecords>,
    /// Held while records are read and put in force, so that those of one group are not taken from
    /// what was read earlier for another.
    pub(super) loading: Arc<Mutex<()>>,
    /// What fails at present.
    pub(super) failures: Arc<Failures>,
}

/// The image of a namespace, and what follows it from gateway to gateway.
pub(super) struct GroupImage {
    pub(super) device: Arc<MonitoredDevice>,
    pub(super) reservation: Arc<Reservation>,
    pub(super) protection: Arc<Protection>,
}

impl GroupImage {
    /// It was not acquired with its group, and may be now.
    pub(super) fn is_left(&self) -> bool {
        self.device.health().is_only_standby()
    }
}

/// A task on the images of a group: an operation, for the data client of a generation.
#[derive(Clone)]
pub(super) struct ImageJob {
    pub(super) id: Option<OperationId>,
    pub(super) generation: u64,
    pub(super) group: u32,
    pub(super) operation: Operation,
}

impl ImageJob {
    /// Whose image it is: the generation and the ANA group.
    pub(super) fn tenure(&self) -> (u64, u32) {
        (self.generation, self.group)
    }
}

impl Cluster {
    /// Images of a group.
    pub(super) fn images(&self, group: u32) -> Vec<GroupImage> {
        let subsystems = self.registry.subsystems();
        let all = subsystems.iter().flat_map(|it| it.namespaces.iter().map(|n| (it.nqn, n)));
        let own = all.filter(|(_, namespace)| namespace.ana_group == group);
        let image = |(nqn, namespace): (Nqn, &Namespace)| {
            Some(GroupImage {
                device: self.monitor.find(&nqn, namespace.nsid)?,
                reservation: Arc::clone(&namespace.reservation),
                protection: Arc::clone(&namespace.protection),
            })
        };
        own.filter_map(image).collect()
    }

    /// The client for the object of the group, if it is connected or can be. May block.
    pub(super) fn objects(&self) -> Option<Arc<ObjectClient>> {
        let mut objects = lock(&self.objects);
        if objects.is_none() {
            match open_objects(&self.config, &self.group) {
                Ok(client) => {
                    let client = Arc::new(client);
                    self.records.connect(Arc::clone(&client), &self.group.object());
                    *objects = Some(client);
                    self.failures.end(Step::ConnectObjects);
                }
                Err(error) => self.note_failure(Step::ConnectObjects, error.to_string()),
            }
        }
        objects.clone()
    }

    pub(super) fn execute(&self, operation: Operation) -> Outcome {
        match operation {
            Operation::Connect => match DataClient::connect(&self.config) {
                Ok(client) => {
                    let address = client.address().to_owned();
                    *lock(&self.data) = Some(client);
                    self.failures.end(Step::ConnectData);
                    Outcome::Client(address)
                }
                Err(error) => {
                    self.note_failure(Step::ConnectData, error.to_string());
                    Outcome::Failed
                }
            },
            Operation::Read => self.read(),
            Operation::Update(update) => self.update(&update),
            Operation::Exclude(addresses) => {
                let client = lock(&self.data).clone();
                match client.map(|client| client.exclude(&addresses)) {
                    Some(Ok(())) => {
                        info!("group {}: {} excluded", self.group.name, addresses.join(", "));
                        self.failures.end(Step::Exclude);
                        Outcome::Done
                    }
                    Some(Err(errno)) => {
                        let sentence = self.failed("exclude a former owner from", errno);
                        self.note_failure(Step::Exclude, sentence);
                        Outcome::Failed
                    }
                    None => Outcome::Failed,
                }
            }
            Operation::Acquire(..) | Operation::Release(_) => Outcome::Failed,
        }
    }

    fn read(&self) -> Outcome {
        let Some(objects) = self.objects() else { return Outcome::Failed };
        let pairs = match objects.read_prefixes(&self.group.object(), &Key::PREFIXES) {
            Ok(pairs) => pairs,
            Err(Errno::ENOENT) => Default::default(),
            Err(errno) => return self.fail(Step::Read, errno),
        };
        let text = |value| str::from_utf8(value).unwrap_or_default();
        match GroupObject::parse(pairs.iter().map(|(key, value)| (key.as_str(), text(value)))) {
            Ok(object) => {
                self.failures.end(Step::Read);
                Outcome::Object(object)
            }
            Err(damage) => {
                let sentence = format!("the object {} is damaged: {damage}", self.group.object());
                self.note_failure(Step::Read, sentence);
                Outcome::Failed
            }
        }
    }

    fn update(&self, update: &Update) -> Outcome {
        let Some(objects) = self.objects() else { return Outcome::Failed };
        let compares = update.compares.iter();
        let update = rados::Update {
            create: true,
            compare: compares
                .map(|(key, text)| (key.to_string(), text.clone().map(String::into_bytes)))
                .collect(),
            set: update
                .sets
                .iter()
                .map(|(key, text)| (key.to_string(), text.clone().into_bytes()))
                .collect(),
            remove: Vec::new(),
        };
        match objects.update(&self.group.object(), &update) {
            Err(UpdateError::Errno(errno)) => self.fail(Step::Update, errno),
            outcome => {
                self.failures.end(Step::Update);
                outcome.map_or(Outcome::Conflict, |()| Outcome::Done)
            }
        }
    }

    fn fail(&self, step: Step, errno: Errno) -> Outcome {
        if errno == Errno::ESHUTDOWN {
            // Somebody has excluded this client: another one is connected.
            *lock(&self.objects) = None;
        }
        let tried = if step == Step::Read { "read" } else { "write" };
        let tried = format!("{tried} the object {} of the pool", self.group.object());
        self.note_failure(step, self.failed(&format!("{tried} {} of", self.group.pool), errno));
        Outcome::Failed
    }

    /// The sentence about an operation that the cluster has refused.
    fn failed(&self, tried: &str, errno: Errno) -> String {
        let remedy = match errno {
            Errno::EACCES | Errno::EPERM => format!("`{}`", rights_command(&self.config.entity())),
            _ => "see `ceph -s`".to_owned(),
        };
        format!("cannot {tried} the cluster: {} ({remedy})", errno.desc())
    }

    fn note_failure(&self, step: Step, sentence: String) {
        self.failures.note(&self.group.name, step, sentence);
    }

    /// Loads what the former owner has persisted of these namespaces.
    fn load_records(&self, images: &[GroupImage]) -> Result<(), String> {
        let _loading = lock(&self.loading);
        self.records.refresh()?;
        for GroupImage { reservation, protection, .. } in images {
            reservation.reload()?;
            if protection.reload()? {
                self.registry.announce(&protection.subsystem, protection.nsid);
            }
            self.registry.apply_reservation(reservation);
        }
        Ok(())
    }

    /// Whether the data client is still that of a generation.
    fn is_current(&self, generation: u64) -> IsCurrent {
        let (data, current) = (Arc::clone(&self.data), Arc::clone(&self.generation));
        Arc::new(move || {
            let client = lock(&data).clone();
            current.load(Ordering::SeqCst) == generation
                && client.is_some_and(|client| !client.is_fenced())
        })
    }

    /// Acquires or releases the images of a group, if they are still those of the same data client.
    pub(super) fn execute_on_images(&self, job: &ImageJob) -> Outcome {
        let is_current = self.is_current(job.generation);
        if !is_current() {
            return Outcome::Failed;
        }
        let (group, mut images) = (job.group, self.images(job.group));
        if job.id.is_none() {
            // The others of the group are served.
            images.retain(GroupImage::is_left);
        }
        let devices = |images: &[GroupImage]| -> Vec<_> {
            images.iter().map(|image| Arc::clone(&image.device)).collect()
        };
        let outcome = match &job.operation {
            Operation::Acquire(_, former) => {
                // The record of the group names this gateway, so nobody else changes those of its
                // namespaces any more, and no command is executed before they are in force.
                let loaded = self.load_records(&images);
                // One that cannot be served is no obstacle to the service of the others.
                images.retain(|image| !image.device.health().is_down());
                let devices = devices(&images);
                loaded.and_then(|()| self.monitor.acquire(&devices, former, is_current))
            }
            _ => self.monitor.release(&devices(&images), is_current),
        };
        // Controllers report to their hosts which namespaces are served.
        self.registry.wake_reactors();
        match outcome {
            Ok(()) => {
                self.failures.end(Step::Images(group));
                Outcome::Done
            }
            Err(sentence) => {
                // Of images that are left it was logged, once.
                if job.id.is_some() {
                    let sentence = format!("ANA group {group}: {sentence}");
                    self.note_failure(Step::Images(group), sentence);
                }
                Outcome::Failed
            }
        }
    }
}

/// Connects a client for the object of a group. May block for some seconds.
///
/// # Errors
/// One sentence: what was tried, what the cluster answered, what to do.
pub(super) fn open_objects(
    cluster: &ClusterConfig,
    group: &GroupConfig,
) -> Result<ObjectClient, OpenError> {
    ObjectClient::open(cluster, &group.pool, GroupConfig::NAMESPACE, OPERATION_TIMEOUT)
}
