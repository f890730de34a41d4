//! The worker of a gateway group: a thread that drives the state machine of this gateway
//! (`nvmfd_gateway`). It starts its operations as tasks, publishes ANA states, and never waits for
//! the cluster itself: a heartbeat that hangs delays no decision about it.

mod agreement;
mod cluster;
mod failures;
mod front;
mod image_queue;
pub(crate) mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use nix::time::{ClockId, clock_gettime};
use nvme::Nqn;
use nvme::log::AnaState;
use nvmfd_gateway::record::{Applied, Key, KeyedHosts, MemberRecord, Membership, Slot};
use nvmfd_gateway::{
    Access, Action, Declaration, DropReason, EndReason, Event, Gateway, Member, Operation,
    OperationId, Outcome, Stage, Timing,
};
use tracing::{error, info, warn};

use crate::api::{
    GatewayAnaGroup, GatewayConfigError, GatewayGroup, GatewayMember, GatewayMove, GatewayShared,
    GatewayState,
};
use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::lock;
use crate::blockdev::monitor::DeviceMonitor;
use crate::config::{Config, GroupConfig};
use crate::core::diag::cause::Cause;
use crate::core::registry::{PeerListener, Registry};
use crate::core::subsystem::ana::AnaStates;
use crate::state::group_records::GroupRecords;
use crate::state::revoked_hosts;
use crate::telemetry::gateway::{GroupRequest, GroupView};
use crate::worker_thread::WorkerThread;
use agreement::Agreement;
use cluster::{Cluster, GroupImage, ImageJob};
use failures::Step;
use image_queue::ImageQueue;

/// Interval between checks of the data client and of images that were opened meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Checks in a row after which it is logged that no host reaches this gateway: one that is connected
/// to another gateway for a moment is no reason.
const UNREACHED_CHECKS: u32 = 4;

enum Message {
    Event(Event),
    /// A task on the images of a generation and ANA group has ended; with the operation that it was
    /// for.
    ImagesDone((u64, u32), Option<OperationId>, Outcome),
    /// Leave the group; then say so.
    Leave(SyncSender<()>),
    Stop,
}

/// The worker, while it runs.
pub(crate) struct GatewayWorker {
    thread: WorkerThread,
    sender: Sender<Message>,
    view: Arc<GroupView>,
    cluster: Cluster,
}

struct Driver {
    gateway: Gateway,
    cluster: Cluster,
    sender: Sender<Message>,
    states: AnaStates,
    jobs: ImageQueue,
    next_check: Duration,
    left: Option<SyncSender<()>>,
    ended: bool,
    differs: bool,
    /// Those that were reported.
    conflicts: Vec<String>,
    /// The last checks, by which no host reaches this gateway.
    unreached_checks: u32,
    /// The gateways that have the same namespaces.
    agreement: Agreement,
    /// Hosts with keys at any gateway, as they were put in force.
    keyed: BTreeSet<Nqn>,
    state_directory: Option<PathBuf>,
    /// Groups with an owner: the epoch, and when it was first seen, in seconds since 1970.
    owners: BTreeMap<u32, (u64, u64)>,
    view: Arc<GroupView>,
    requests: Receiver<GroupRequest>,
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
            loading: Arc::default(),
            failures: Arc::default(),
        };
        let (slot, name) = (group.slot, group.gateway.clone());
        // It joins when the control plane has named the version that is in force.
        let applied = group.shared.then(Applied::default);
        let member = Member { slot, name, declared: declaration(config), applied };
        let shared_cluster = cluster.clone();
        let mut driver = Driver {
            gateway: Gateway::new(member, Timing::default(), now()),
            cluster,
            sender: sender.clone(),
            states: AnaStates::all(AnaState::INACCESSIBLE),
            jobs: ImageQueue::default(),
            next_check: Duration::ZERO,
            left: None,
            ended: false,
            differs: false,
            conflicts: Vec::new(),
            unreached_checks: 0,
            agreement: Agreement::default(),
            keyed: BTreeSet::new(),
            state_directory: config.state_directory.clone(),
            owners: BTreeMap::new(),
            view: Arc::clone(&view),
            requests,
        };
        let thread = WorkerThread::start("gateway", move || driver.run(&messages))?;
        Ok(GatewayWorker { thread, sender, view, cluster: shared_cluster })
    }

    /// Gives the groups to other gateways, and leaves. Waits until the deadline at most.
    pub(crate) fn leave(&self, deadline: Instant) {
        let (left, is_left) = sync_channel(1);
        let _ = self.sender.send(Message::Leave(left));
        let _ = is_left.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }

    /// Another configuration is in force.
    pub(crate) fn declare(&self, config: &Config) {
        let _ = self.sender.send(Message::Event(Event::Declared(declaration(config))));
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

fn unix_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Driver {
    fn run(&mut self, messages: &Receiver<Message>) {
        self.note_front();
        self.handle(Event::Tick);
        loop {
            let deadline = self.gateway.deadline().min(self.next_check);
            let message = messages.recv_timeout(deadline.saturating_sub(now()));
            match message {
                Ok(Message::Event(event)) => self.handle(event),
                Ok(Message::ImagesDone(tenure, id, outcome)) => {
                    self.jobs.end(tenure);
                    self.start_jobs();
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
        self.note_owners();
        self.note_front();
        let group = self.group();
        for conflict in group.conflicts.iter().filter(|it| !self.conflicts.contains(it)) {
            warn!("group {}: {conflict}: give each its own `id` and address", group.name);
        }
        self.conflicts.clone_from(&group.conflicts);
        self.view.set(group);
        self.publish_peers();
        self.announce_agreed();
        let data = lock(&self.cluster.data).clone();
        if data.is_some_and(|client| client.is_fenced()) {
            self.handle(Event::ClientExcluded);
        }
        let serving = self.gateway.stages().filter(|(_, stage)| *stage == Stage::Serving);
        let groups: Vec<u32> = serving.map(|(group, _)| group).collect();
        for group in groups {
            let images = self.cluster.images(group);
            let tenure = (self.cluster.generation.load(Ordering::SeqCst), group);
            if !self.jobs.has(tenure) && images.iter().any(GroupImage::is_left) {
                self.add_job(None, group, Operation::Acquire(group, Vec::new()));
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

    /// Notes how hosts reach this gateway.
    fn note_front(&mut self) {
        let (slot, front) = (self.cluster.group.slot, front::look(&self.cluster.registry));
        if self.gateway.front(slot) != Some(front) {
            self.handle(Event::Front(front));
        }
        let unreached = front::unreached(&self.gateway, slot);
        self.unreached_checks = unreached.as_ref().map_or(0, |_| self.unreached_checks + 1);
        if let Some(why) = unreached.filter(|_| self.unreached_checks == UNREACHED_CHECKS) {
            warn!(
                "group {}: {why}: its ANA groups go to a gateway that hosts reach, if there is one",
                self.cluster.group.name
            );
        }
    }

    /// Announces the namespaces to hosts again when another gateway has the same.
    fn announce_agreed(&mut self) {
        let Some(peers) = self.gateway.peers() else { return };
        let others = peers.iter().map(|peer| (peer.name.as_str(), peer.digest.as_str()));
        if self.agreement.is_due(now(), self.gateway.digest(), others) {
            let registry = &self.cluster.registry;
            for subsystem in registry.subsystems() {
                let namespaces = subsystem.namespaces.iter();
                namespaces.for_each(|namespace| registry.announce(&subsystem.nqn, namespace.nsid));
            }
        }
    }

    /// Reports the listeners of the other gateways in discovery; those known last while nothing is
    /// known of the others.
    fn publish_peers(&self) {
        let Some(peers) = self.gateway.peers() else { return };
        let listeners = peers.iter().flat_map(|peer| &peer.listeners);
        let listeners = listeners.filter_map(|text| peer_listener(text));
        self.cluster.registry.set_peer_listeners(listeners.collect());
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
            front: self.gateway.front(slot).map(front::reported),
            unreached: front::unreached(&self.gateway, slot).filter(|_| live.contains(&slot)),
            applied: object.applied(slot).map(|applied| applied.version),
            refused: object.applied(slot).and_then(refusal),
        });
        let ana_groups = self.gateway.stages().map(|(id, stage)| {
            let record = object.group(id);
            let owner = record.and_then(|record| record.owner());
            let is_owned = owner.is_some_and(|owner| live.contains(&owner.slot));
            let owner = owner.and_then(|owner| object.live_owner(owner));
            let pending = self.pending(id, stage, is_owned && owner.is_some());
            GatewayAnaGroup {
                id,
                owner: owner.map(|owner| owner.name.clone()),
                epoch: record.map_or(0, |record| record.epoch),
                stage: stage.to_string(),
                serving: stage == Stage::Serving && self.gateway.is_fresh(),
                since_unix_s: self.owners.get(&id).map(|(_, since_unix_s)| *since_unix_s),
                pending,
            }
        });
        GatewayGroup {
            name: self.cluster.group.name.clone(),
            gateway: self.cluster.group.gateway.clone(),
            fresh: self.gateway.is_fresh(),
            gateways: gateways.collect(),
            ana_groups: ana_groups.collect(),
            shared: self.shared(),
            balance: self.gateway.balance().into_iter().filter_map(|it| self.named(it)).collect(),
            moving: self.gateway.next_move().and_then(|it| self.named(it)),
            conflicts: self.conflicts(),
            failure: self.failure(),
        }
    }

    /// Notes when the present owners were first seen.
    fn note_owners(&mut self) {
        let object = self.gateway.object();
        let records = self.gateway.stages().filter_map(|(id, _)| Some((id, object.group(id)?)));
        let owned = records.filter(|(_, record)| record.owner().is_some());
        let owned: BTreeMap<u32, u64> = owned.map(|(id, record)| (id, record.epoch)).collect();
        self.owners.retain(|id, (epoch, _)| owned.get(id) == Some(epoch));
        for (id, epoch) in owned {
            self.owners.entry(id).or_insert_with(|| (epoch, unix_s()));
        }
    }

    /// What is under way with a group, or obstructs it.
    fn pending(&self, id: u32, stage: Stage, is_owned: bool) -> Option<String> {
        let moving = self.gateway.next_move().filter(|(group, _)| *group == id);
        let asked = self.gateway.object().move_request(id).or(moving.map(|(_, to)| to));
        let to = asked.and_then(|to| self.gateway.object().member(to));
        Some(match stage {
            _ if !self.gateway.is_fresh() => {
                let why = self.failure();
                let why = why.unwrap_or_else(|| "see `ceph -s` and its network".to_owned());
                format!("the heartbeats of this gateway are not confirmed: {why}")
            }
            Stage::Serving | Stage::Standby if to.is_some() => {
                format!("it is being moved to gateway {}", to.map_or("", |to| &to.name))
            }
            Stage::Serving => return self.left_images(id),
            Stage::Standby if is_owned => return None,
            Stage::Standby if self.gateway.is_outdated() => {
                "this gateway takes no group: another one has had a later version of the shared \
                 configuration in force"
                    .to_owned()
            }
            Stage::Standby if self.gateway.is_closed(self.cluster.group.slot) => {
                "this gateway takes no group: none of its listeners is open".to_owned()
            }
            Stage::Standby => "a live gateway takes it".to_owned(),
            Stage::Requesting => "this gateway asks for it".to_owned(),
            Stage::Excluding => {
                let what = "this gateway excludes the former owner from the cluster";
                self.with_failure(what, Step::Exclude)
            }
            Stage::Acquiring => {
                self.with_failure("this gateway takes the locks of the images", Step::Images(id))
            }
            Stage::Confirming => "this gateway notes that it serves it".to_owned(),
            Stage::Releasing(_) => "this gateway releases the locks of the images".to_owned(),
            Stage::Giving(_) => "this gateway gives it to another one".to_owned(),
        })
    }

    /// What is under way, and why it has not succeeded.
    fn with_failure(&self, what: &str, step: Step) -> String {
        let failure = self.cluster.failures.of(step);
        what.to_owned() + &failure.map_or_else(String::new, |failure| format!(": {failure}"))
    }

    /// Why the heartbeats of this gateway are not confirmed, as far as is known.
    fn failure(&self) -> Option<String> {
        if self.gateway.is_fresh() {
            return None;
        }
        let differing = |member: &MemberRecord| {
            format!("gateway {} declares other subsystems or namespaces", member.name)
        };
        // A gateway that differs is known while reads succeed, and nothing is written meanwhile.
        let differing = self.gateway.differing().map(differing);
        differing.or_else(|| self.cluster.failures.of_heartbeats())
    }

    /// Whether images of a group that is served are not.
    fn left_images(&self, group: u32) -> Option<String> {
        let images = self.cluster.images(group);
        let left = images.iter().filter(|image| image.is_left()).count();
        let all = images.len();
        (left > 0).then(|| {
            format!(
                "this gateway has not acquired {left} of {all} images, and tries again: see its log"
            )
        })
    }

    fn named(&self, (ana_group, to): (u32, Slot)) -> Option<GatewayMove> {
        let to = self.gateway.object().member(to)?.name.clone();
        Some(GatewayMove { ana_group, to })
    }

    /// Port identifiers and addresses that two live gateways have, a sentence each.
    fn conflicts(&self) -> Vec<String> {
        let (object, live) = (self.gateway.object(), self.gateway.live_members());
        let members = object.members().filter(|(slot, _)| live.contains(slot));
        let each = members.flat_map(|(_, member)| {
            member.listeners.iter().map(|listener| (member.name.as_str(), listener.as_str()))
        });
        listener_conflicts(&each.collect::<Vec<_>>())
    }

    /// The shared configuration, if this gateway uses it.
    fn shared(&self) -> Option<GatewayShared> {
        let applied = self.gateway.applied()?;
        let newest = self.gateway.object().version();
        Some(GatewayShared {
            version: newest.map_or(0, |newest| newest.number),
            gateway: newest.map(|newest| newest.gateway.clone()),
            at_unix_s: newest.map(|newest| newest.at_unix_s),
            applied: applied.version,
            refused: refusal(applied),
        })
    }

    fn newest_version(&self) -> Option<u64> {
        self.gateway.object().version().map(|newest| newest.number)
    }

    /// Refuses hosts that have keys at other gateways and none here: hosts choose the gateway.
    fn revoke_unkeyed(&mut self) {
        let keyed = self.gateway.object().keyed_hosts();
        let keyed: BTreeSet<Nqn> = keyed.filter_map(|nqn| nqn.parse().ok()).collect();
        if keyed == self.keyed {
            return;
        }
        for nqn in self.cluster.registry.revoke(&keyed) {
            warn!(
                "group {}: host {nqn} has a key at another gateway and none here: it is refused \
                 here until a [[host]] gives it the key, or `nvmfctl host unkey` says that it needs \
                 none",
                self.cluster.group.name
            );
        }
        let directory = self.state_directory.as_deref();
        let kept = revoked_hosts::keep(&self.cluster.registry, directory);
        kept.iter().for_each(|sentence| warn!("{sentence}"));
        self.keyed = keyed;
    }

    fn handle(&mut self, event: Event) {
        let was = self.states;
        if matches!(event, Event::Declared(_)) {
            // A host may need a key from now on.
            self.keyed.clear();
        }
        let newest = self.newest_version();
        let actions = self.gateway.handle(now(), event);
        if self.newest_version() != newest {
            self.view.set(self.group());
        }
        // Before any path is usable.
        self.revoke_unkeyed();
        let owned = self.gateway.records().filter_map(|(group, record)| {
            Some((group, (Key::Group(group).to_string(), record?.to_string().into_bytes())))
        });
        self.cluster.records.set_owned(owned.collect());
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
                Action::DropClient(reason) => self.drop_client(reason),
                Action::End(reason) => self.end(&reason),
            }
        }
        for (group, state) in self.states.unlike(&was) {
            info!("group {}: ANA group {group} is {state} here", self.cluster.group.name);
        }
    }

    fn drop_client(&mut self, reason: DropReason) {
        self.cluster.failures.end_of_client();
        self.cluster.generation.fetch_add(1, Ordering::SeqCst);
        self.jobs.clear();
        if let Some(client) = lock(&self.cluster.data).take() {
            client.abandon();
            let why = match reason {
                DropReason::Excluded => {
                    "this gateway was excluded, or has lost its membership".to_owned()
                }
                DropReason::Unreleased(group) => format!(
                    "an operation on an image of ANA group {group} does not end (see `ceph -s`), so \
                     the groups of this gateway are taken anew"
                ),
            };
            let (name, address) = (&self.cluster.group.name, client.address());
            warn!("group {name}: the RADOS client {address} is used no more: {why}");
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
            self.drop_client(DropReason::Excluded);
        }
        if let Some(left) = self.left.take() {
            let _ = left.send(());
        }
    }

    fn begin(&mut self, id: OperationId, operation: Operation) {
        if let Operation::Acquire(group, _) | Operation::Release(group) = operation {
            return self.add_job(Some(id), group, operation);
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

    fn add_job(&mut self, id: Option<OperationId>, group: u32, operation: Operation) {
        let generation = self.cluster.generation.load(Ordering::SeqCst);
        self.jobs.push(ImageJob { id, generation, group, operation });
        self.start_jobs();
    }

    fn start_jobs(&mut self) {
        while let Some(job) = self.jobs.start() {
            let (cluster, sender) = (self.cluster.clone(), self.sender.clone());
            let (tenure, id) = (job.tenure(), job.id);
            let task = move || {
                let outcome = cluster.execute_on_images(&job);
                let _ = sender.send(Message::ImagesDone(tenure, id, outcome));
            };
            if self.cluster.pool.spawn(task).is_err() {
                let _ = self.sender.send(Message::ImagesDone(tenure, id, Outcome::Failed));
            }
        }
    }
}

fn refusal(applied: &Applied) -> Option<GatewayConfigError> {
    let refused = applied.refused.clone();
    refused.map(|(version, why)| GatewayConfigError { version, why })
}

fn declaration(config: &Config) -> Declaration {
    let listeners = config.listeners.iter().map(|it| format!("{}@{}", it.id, it.address));
    let namespaces = config.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
    let keyed = config.authentication.hosts.iter();
    Declaration {
        digest: config.group_digest(),
        listeners: listeners.collect(),
        groups: namespaces.map(|namespace| namespace.ana_group).collect(),
        keyed: KeyedHosts(keyed.map(|host| host.nqn.to_string()).collect()),
    }
}

/// What two gateways have alike of their listeners. `all`: gateway and listener.
fn listener_conflicts(all: &[(&str, &str)]) -> Vec<String> {
    let mut sentences = Vec::new();
    for (at, (gateway, listener)) in all.iter().enumerate() {
        for (other, known) in all.iter().take(at).filter(|(other, _)| other != gateway) {
            let (Some((id, address)), Some((known_id, known_address))) =
                (listener.split_once('@'), known.split_once('@'))
            else {
                continue;
            };
            if id == known_id {
                sentences.push(format!("gateways {other} and {gateway} both have port id {id}"));
            }
            if address == known_address && peer_listener(listener).is_some() {
                sentences.push(format!("gateways {other} and {gateway} both have {address}"));
            }
        }
    }
    sentences
}

/// A listener of a member record, `ID@ADDRESS:PORT`, if hosts of other gateways can reach it.
fn peer_listener(text: &str) -> Option<PeerListener> {
    let (id, address) = text.split_once('@')?;
    let listener = PeerListener { id: id.parse().ok()?, address: address.parse().ok()? };
    (!listener.address.ip().is_unspecified()).then_some(listener)
}

#[cfg(test)]
mod tests {
    use crate::worker::gateway::*;

    #[test]
    fn port_ids_and_addresses_shared_by_two_gateways_are_reported() {
        let sentences = |all: &[(&str, &str)]| listener_conflicts(all).join("; ");
        let (a, b) = ("1@192.0.2.1:4420", "2@192.0.2.2:4420");
        assert_eq!(sentences(&[("a", a), ("a", "3@192.0.2.3:4420"), ("b", b)]), "");
        assert_eq!(
            sentences(&[("a", a), ("b", "1@192.0.2.2:4420")]),
            "gateways a and b both have port id 1"
        );
        assert_eq!(
            sentences(&[("a", a), ("b", "2@192.0.2.1:4420")]),
            "gateways a and b both have 192.0.2.1:4420"
        );
        assert_eq!(sentences(&[("a", "1@0.0.0.0:4420"), ("b", "2@0.0.0.0:4420")]), "");
    }

    #[test]
    fn a_peer_listener_is_parsed_unless_it_is_a_wildcard() {
        let read = |text| peer_listener(text).map(|it| format!("{}@{}", it.id, it.address));
        for text in ["2@192.0.2.1:4420", "65535@[2001:db8::1]:1"] {
            assert_eq!(read(text).as_deref(), Some(text));
        }
        for text in ["1@0.0.0.0:4420", "1@[::]:4420", "192.0.2.1:4420", "0x1@192.0.2.1:4420", ""] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
