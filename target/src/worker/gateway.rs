//! The worker of a gateway group: a thread that drives the state machine of this gateway
//! (`nvmfd_gateway`). It starts its operations as tasks, publishes ANA states, and never waits for
//! the cluster itself: a heartbeat that hangs delays no decision about it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};
use nvme::Nqn;
use nvme::log::AnaState;
use nvmfd_gateway::record::{GroupObject, Key, Membership, Update};
use nvmfd_gateway::{
    Access, Action, EndReason, Event, Gateway, Member, Operation, OperationId, Outcome, Stage,
    Timing,
};
use tracing::{error, info, warn};

use crate::api::{GatewayAnaGroup, GatewayGroup, GatewayMember, GatewayState};
use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::ceph::ClusterConfig;
use crate::blockdev::monitor::{DeviceMonitor, MonitoredDevice};
use crate::blockdev::rados::{self, ObjectClient, UpdateError};
use crate::blockdev::rbd::DataClient;
use crate::config::{Config, GroupConfig};
use crate::core::diag::cause::Cause;
use crate::core::registry::Registry;
use crate::core::subsystem::Namespace;
use crate::core::subsystem::ana::AnaStates;
use crate::core::subsystem::reservation::Reservation;
use crate::core::subsystem::write_protect::Protection;
use crate::state::group_records::GroupRecords;
use crate::telemetry::gateway::{GroupRequest, GroupView};
use crate::worker_thread::WorkerThread;

/// RADOS namespace of the objects of groups.
const NAMESPACE: &str = "nvmfd";
/// Time limit of an operation on the object of the group; less than the time after which a gateway
/// doubts itself.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between checks of the data client and of images that were opened meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

enum Message {
    Event(Event),
    /// A task on images has ended; with the operation that it was for.
    ImagesDone(Option<OperationId>, Outcome),
    /// Leave the group; then say so.
    Leave(SyncSender<()>),
    Stop,
}

/// The worker, while it runs.
pub(crate) struct GatewayWorker {
    thread: WorkerThread,
    sender: Sender<Message>,
    view: Arc<GroupView>,
}

/// What the tasks of the worker use.
#[derive(Clone)]
struct Cluster {
    config: ClusterConfig,
    group: GroupConfig,
    objects: Arc<Mutex<Option<Arc<ObjectClient>>>>,
    data: Arc<Mutex<Option<DataClient>>>,
    /// Counts data clients: a task on images for a former one has no effect.
    generation: Arc<AtomicU64>,
    registry: Arc<Registry>,
    monitor: Arc<DeviceMonitor>,
    pool: Arc<BlockingPool>,
    /// Reservations and write protection, which follow the ANA groups.
    records: Arc<GroupRecords>,
}

/// The image of a namespace, and what follows it from gateway to gateway.
struct GroupImage {
    device: Arc<MonitoredDevice>,
    reservation: Arc<Reservation>,
    protection: Arc<Protection>,
}

struct Driver {
    gateway: Gateway,
    cluster: Cluster,
    sender: Sender<Message>,
    states: AnaStates,
    /// Tasks on images, one at a time and in order.
    jobs: VecDeque<ImageJob>,
    is_busy: bool,
    next_check: Duration,
    left: Option<SyncSender<()>>,
    ended: bool,
    differs: bool,
    view: Arc<GroupView>,
    requests: Receiver<GroupRequest>,
}

#[derive(Clone)]
struct ImageJob {
    id: Option<OperationId>,
    generation: u64,
    operation: Operation,
}

impl GatewayWorker {
    /// Makes every group inaccessible, until the group decides otherwise. Before anything listens.
    pub(crate) fn restrain(registry: &Registry) {
        registry.set_gateway_states(AnaStates::all(AnaState::INACCESSIBLE));
    }

    /// Starts it.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(
        config: &Config,
        group: &GroupConfig,
        registry: &Arc<Registry>,
        monitor: &Arc<DeviceMonitor>,
        pool: &Arc<BlockingPool>,
        records: &Arc<GroupRecords>,
    ) -> std::io::Result<GatewayWorker> {
        let (sender, messages) = channel();
        let (requests_sender, requests) = channel();
        let view = Arc::new(GroupView::default());
        view.set_requests(requests_sender);
        let cluster = Cluster {
            config: config.group_cluster(),
            group: group.clone(),
            objects: Arc::default(),
            data: Arc::default(),
            generation: Arc::default(),
            registry: Arc::clone(registry),
            monitor: Arc::clone(monitor),
            pool: Arc::clone(pool),
            records: Arc::clone(records),
        };
        let listeners = config.listeners.iter().map(|it| format!("{}@{}", it.id, it.address));
        let member = Member {
            slot: group.slot,
            name: group.gateway.clone(),
            digest: config.group_digest(),
            listeners: listeners.collect(),
        };
        let namespaces = config.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
        let groups = namespaces.map(|namespace| namespace.ana_group);
        let mut driver = Driver {
            gateway: Gateway::new(member, groups, Timing::default(), now()),
            cluster,
            sender: sender.clone(),
            states: AnaStates::all(AnaState::INACCESSIBLE),
            jobs: VecDeque::new(),
            is_busy: false,
            next_check: Duration::ZERO,
            left: None,
            ended: false,
            differs: false,
            view: Arc::clone(&view),
            requests,
        };
        let thread = WorkerThread::start("gateway", move || driver.run(&messages))?;
        Ok(GatewayWorker { thread, sender, view })
    }

    /// Gives the groups to other gateways, and leaves. Waits until the deadline at most.
    pub(crate) fn leave(&self, deadline: Instant) {
        let (left, is_left) = sync_channel(1);
        let _ = self.sender.send(Message::Leave(left));
        let _ = is_left.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }

    /// The state of the group.
    pub(crate) fn view(&self) -> Arc<GroupView> {
        Arc::clone(&self.view)
    }

    /// Ends the thread. Operations under way are abandoned.
    pub(crate) fn stop(self, deadline: Instant) {
        let _ = self.sender.send(Message::Stop);
        self.thread.join_by(deadline);
    }
}

/// Time since the start of the machine, also while it was suspended.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

impl Driver {
    fn run(&mut self, messages: &Receiver<Message>) {
        self.handle(Event::Tick);
        loop {
            let deadline = self.gateway.deadline().min(self.next_check);
            let message = messages.recv_timeout(deadline.saturating_sub(now()));
            match message {
                Ok(Message::Event(event)) => self.handle(event),
                Ok(Message::ImagesDone(id, outcome)) => {
                    self.is_busy = false;
                    self.start_job();
                    if let Some(id) = id {
                        self.handle(Event::Completed(id, outcome));
                    }
                }
                Ok(Message::Leave(left)) if self.ended => drop(left.send(())),
                Ok(Message::Leave(left)) => {
                    self.left = Some(left);
                    self.handle(Event::Leave);
                }
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => self.handle(Event::Tick),
            }
            if self.next_check <= now() {
                self.next_check = now() + CHECK_INTERVAL;
                self.check();
            }
        }
    }

    /// Notices an excluded data client, and images of served groups that are still in standby.
    fn check(&mut self) {
        while let Ok(request) = self.requests.try_recv() {
            let slot = |name: &str| {
                let mut members = self.gateway.object().members();
                members.find(|(_, member)| member.name == name).map(|(slot, _)| slot)
            };
            let event = match request {
                GroupRequest::Move(group, to) => slot(&to).map(|to| Event::Move(group, to)),
                GroupRequest::Exclude(name) => slot(&name).map(Event::Exclude),
            };
            event.into_iter().for_each(|event| self.handle(event));
        }
        self.view.set(self.group());
        let data = lock(&self.cluster.data).clone();
        if data.is_some_and(|client| client.is_fenced()) {
            self.handle(Event::ClientExcluded);
        }
        let serving = self.gateway.stages().filter(|(_, stage)| *stage == Stage::Serving);
        let groups: Vec<u32> = serving.map(|(group, _)| group).collect();
        for group in groups {
            let images = self.cluster.images(group);
            let is_queued = self.is_busy || !self.jobs.is_empty();
            if !is_queued && images.iter().any(|image| image.device.health().is_standby()) {
                self.add_job(None, Operation::Acquire(group, Vec::new()));
            }
        }
        let differing = self.gateway.differing().map(|member| member.name.clone());
        if let Some(name) = differing.as_ref().filter(|_| !self.differs) {
            error!(
                "group {}: gateway {name} declares other subsystems or namespaces; this one serves \
                 nothing until both have the same, or the other one has ended",
                self.cluster.group.name
            );
        }
        self.differs = differing.is_some();
    }

    /// The state of the group, for the administrator.
    fn group(&self) -> GatewayGroup {
        let (object, live) = (self.gateway.object(), self.gateway.live_members());
        let gateways = object.members().map(|(slot, member)| GatewayMember {
            name: member.name.clone(),
            slot,
            state: match member.membership {
                Membership::Live if live.contains(&slot) => GatewayState::Live,
                Membership::Live => GatewayState::Silent,
                Membership::Excluded => GatewayState::Excluded,
                Membership::Left => GatewayState::Left,
            },
            address: member.address.clone(),
            listeners: member.listeners.clone(),
        });
        let ana_groups = self.gateway.stages().map(|(id, stage)| {
            let record = object.group(id);
            let owner = record.and_then(|record| record.owner());
            let owner = owner.and_then(|owner| object.live_owner(owner));
            GatewayAnaGroup {
                id,
                owner: owner.map(|owner| owner.name.clone()),
                epoch: record.map_or(0, |record| record.epoch),
                stage: stage.to_string(),
                serving: stage == Stage::Serving && self.gateway.is_fresh(),
            }
        });
        GatewayGroup {
            name: self.cluster.group.name.clone(),
            gateway: self.cluster.group.gateway.clone(),
            fresh: self.gateway.is_fresh(),
            gateways: gateways.collect(),
            ana_groups: ana_groups.collect(),
        }
    }

    fn handle(&mut self, event: Event) {
        let was = self.states;
        let actions = self.gateway.handle(now(), event);
        for (group, record) in self.gateway.records() {
            match record {
                Some(record) => {
                    let (key, value) = (Key::Group(group).to_string(), record.to_string());
                    self.cluster.records.set_owned(group, &key, value.as_bytes());
                }
                None => self.cluster.records.set_not_owned(group),
            }
        }
        for action in actions {
            match action {
                Action::Start(id, operation) => self.begin(id, operation),
                Action::Publish(group, access) => {
                    let state = match access {
                        Access::Optimized => AnaState::OPTIMIZED,
                        Access::Inaccessible => AnaState::INACCESSIBLE,
                    };
                    self.states.set(group, state);
                    self.cluster.registry.set_gateway_states(self.states);
                    // What is pending at the cluster may be so for long.
                    let mut stages = self.gateway.stages();
                    if access == Access::Inaccessible
                        && stages.any(|it| it == (group, Stage::Serving))
                    {
                        self.cluster.registry.end_paths(group, Cause::GatewayCut);
                    }
                }
                Action::DropClient => self.drop_client(),
                Action::End(reason) => self.end(&reason),
            }
        }
        for (group, state) in self.states.unlike(&was) {
            info!("group {}: ANA group {group} is {state} here", self.cluster.group.name);
        }
    }

    fn drop_client(&mut self) {
        self.cluster.generation.fetch_add(1, Ordering::SeqCst);
        self.jobs.clear();
        if let Some(client) = lock(&self.cluster.data).take() {
            client.abandon();
            warn!(
                "group {}: the RADOS client {} is used no more: this gateway was excluded, or has \
                 lost its membership",
                self.cluster.group.name,
                client.address()
            );
        }
    }

    fn end(&mut self, reason: &EndReason) {
        self.ended = true;
        let group = &self.cluster.group;
        match reason {
            EndReason::Left => info!("group {}: left", group.name),
            EndReason::Superseded => error!(
                "group {}: a later process is gateway {} in slot {}; this one serves nothing any \
                 more",
                group.name, group.gateway, group.slot
            ),
            EndReason::SlotInUse(name) => error!(
                "group {}: slot {} belongs to gateway {name}; give {} another `slot`",
                group.name, group.slot, group.gateway
            ),
        }
        if *reason != EndReason::Left {
            self.drop_client();
        }
        if let Some(left) = self.left.take() {
            let _ = left.send(());
        }
    }

    fn begin(&mut self, id: OperationId, operation: Operation) {
        if matches!(operation, Operation::Acquire(..) | Operation::Release(_)) {
            return self.add_job(Some(id), operation);
        }
        let (cluster, sender) = (self.cluster.clone(), self.sender.clone());
        let task = move || {
            let outcome = cluster.execute(operation);
            let _ = sender.send(Message::Event(Event::Completed(id, outcome)));
        };
        if self.cluster.pool.spawn(task).is_err() {
            let failed = Event::Completed(id, Outcome::Failed);
            let _ = self.sender.send(Message::Event(failed));
        }
    }

    fn add_job(&mut self, id: Option<OperationId>, operation: Operation) {
        let generation = self.cluster.generation.load(Ordering::SeqCst);
        self.jobs.push_back(ImageJob { id, generation, operation });
        self.start_job();
    }

    fn start_job(&mut self) {
        if self.is_busy {
            return;
        }
        let Some(job) = self.jobs.pop_front() else { return };
        self.is_busy = true;
        let (cluster, sender, id) = (self.cluster.clone(), self.sender.clone(), job.id);
        let task = move || {
            let outcome = cluster.execute_on_images(&job);
            let _ = sender.send(Message::ImagesDone(id, outcome));
        };
        if self.cluster.pool.spawn(task).is_err() {
            let _ = self.sender.send(Message::ImagesDone(id, Outcome::Failed));
        }
    }
}

impl Cluster {
    /// Images of a group.
    fn images(&self, group: u32) -> Vec<GroupImage> {
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

    fn objects(&self) -> Option<Arc<ObjectClient>> {
        let mut objects = lock(&self.objects);
        if objects.is_none() {
            let opened =
                ObjectClient::open(&self.config, &self.group.pool, NAMESPACE, OPERATION_TIMEOUT);
            match opened {
                Ok(client) => {
                    let client = Arc::new(client);
                    self.records.connect(Arc::clone(&client), &self.group.object());
                    *objects = Some(client);
                }
                Err(error) => warn!("group {}: {error}", self.group.name),
            }
        }
        objects.clone()
    }

    fn execute(&self, operation: Operation) -> Outcome {
        match operation {
            Operation::Connect => match DataClient::connect(&self.config) {
                Ok(client) => {
                    let address = client.address().to_owned();
                    *lock(&self.data) = Some(client);
                    Outcome::Client(address)
                }
                Err(error) => {
                    warn!("group {}: {error}", self.group.name);
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
                        Outcome::Done
                    }
                    Some(Err(errno)) => {
                        let (name, said) = (&self.group.name, errno.desc());
                        warn!("group {name}: cannot exclude {}: {said}", addresses.join(", "));
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
        let keys = ["gw.", "hb.", "ana."];
        let pairs = match objects.read_prefixes(&self.group.object(), &keys) {
            Ok(pairs) => pairs,
            Err(Errno::ENOENT) => return Outcome::Object(GroupObject::default()),
            Err(errno) => return self.fail(errno),
        };
        let text = |value| str::from_utf8(value).unwrap_or_default();
        match GroupObject::parse(pairs.iter().map(|(key, value)| (key.as_str(), text(value)))) {
            Ok(object) => Outcome::Object(object),
            Err(damage) => {
                error!("the object {} is damaged: {damage}", self.group.object());
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
            Ok(()) => Outcome::Done,
            Err(UpdateError::Conflict) => Outcome::Conflict,
            Err(UpdateError::Errno(errno)) => self.fail(errno),
        }
    }

    fn fail(&self, errno: Errno) -> Outcome {
        if errno == Errno::ESHUTDOWN {
            // Somebody has excluded this client: another one is connected.
            *lock(&self.objects) = None;
        }
        Outcome::Failed
    }

    /// Loads what the former owner has persisted of these namespaces.
    fn load_records(&self, images: &[GroupImage]) -> Result<(), String> {
        self.records.refresh()?;
        for GroupImage { reservation, protection, .. } in images {
            reservation.reload()?;
            protection.reload()?;
            self.registry.apply_reservation(reservation);
        }
        Ok(())
    }

    /// Acquires or releases the images of a group, if they are still those of the same data client.
    fn execute_on_images(&self, job: &ImageJob) -> Outcome {
        let is_current = || {
            let client = lock(&self.data).clone();
            self.generation.load(Ordering::SeqCst) == job.generation
                && client.is_some_and(|client| !client.is_fenced())
        };
        if !is_current() {
            return Outcome::Failed;
        }
        let (group, mut images) = match &job.operation {
            Operation::Acquire(group, _) | Operation::Release(group) => {
                (*group, self.images(*group))
            }
            _ => return Outcome::Failed,
        };
        if job.id.is_none() {
            // The others of the group are served.
            images.retain(|image| image.device.health().is_standby());
        }
        let devices: Vec<_> = images.iter().map(|image| Arc::clone(&image.device)).collect();
        let outcome = match &job.operation {
            Operation::Acquire(_, former) => {
                // The record of the group names this gateway, so nobody else changes those of its
                // namespaces any more, and no command is executed before they are in force.
                let loaded = self.load_records(&images);
                let mut outcome = loaded.and_then(|()| self.monitor.acquire(&devices, former));
                // The record of the group names this client: locks of another one are no use.
                if !is_current() {
                    let _ = self.monitor.release(&devices);
                    outcome = Err("the RADOS client has changed".to_owned());
                }
                outcome
            }
            _ => self.monitor.release(&devices),
        };
        match outcome {
            Ok(()) => Outcome::Done,
            Err(sentence) => {
                warn!("group {}: ANA group {group}: {sentence}", self.group.name);
                Outcome::Failed
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
