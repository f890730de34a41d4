//! The simulated target: the queues of its reactors on simulated fabrics and devices, its registry,
//! crash and restart.

pub mod format_driver;
mod namespace_state;
pub mod ns_management_driver;
mod rate_limits;
mod snapshot;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use nvme::log::AnaState;
use nvme::{Nqn, Text};
use nvmfd::blockdev::{DeviceId, IoCompletion};
use nvmfd::core::controller::Limits;
use nvmfd::core::message::{Mailbox, Message, mailbox};
use nvmfd::core::poll_group::{PollGroup, Resources};
use nvmfd::core::qpair::RECEIVES_FOR_ADMIN;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::range_lock::RangeLock;
use nvmfd::core::sched::{DrainBarrier, DrainScope};
use nvmfd::core::shared::Shared;
use nvmfd::core::subsystem::ana::AnaStates;
use nvmfd::core::subsystem::usage::Usage;
use nvmfd::core::subsystem::{AccessPolicy, ListenerConfig, Namespace, Subsystem};
use nvmfd::state::record::StateDir;
use nvmfd::worker::Workers;
use nvmfd::worker::ns_state::NamespaceStateWorker;
use rdma::soft::Soft;
use rdma::soft::sim::{Network, NetworkPort, Rng};
use rdma::{Event, Fabric, Pool, PoolPlan, Wake};

use self::format_driver::Formatter;
use self::namespace_state::NamespaceState;
use self::ns_management_driver::NsManagementDriver;
use self::rate_limits::Limiters;
use self::snapshot::Snapshot;
use super::auth_keys::keyring;
use super::device::{SimDevice, SimRing};
use super::directory::{SimDirectory, StepFault};
use super::host::hostnqn;
use super::instrument::{
    BufferTracker, Echo, InstrumentedDevice, InstrumentedFabric, SharedBufferTracker, lock,
};
use super::mutants::SeededBug;
use super::oracle::blocks::SECTOR_BYTES;
use super::oracle::visibility::name;
use super::scenario::Profile;
use super::trace::Trace;
use super::{Setup, config, entropy};

/// The port of the service.
pub const PORT: u16 = 4420;
/// Maximum of events that a reactor takes in one iteration.
const BATCH: usize = 64;
/// The subsystem.
pub const SUBNQN: &str = "nqn.2026-11.io.nvmfd:world";

/// A reactor without a thread.
struct Reactor {
    queues: PollGroup,
    fabric: InstrumentedFabric<Soft>,
    pool: Pool,
    mailbox: Mailbox,
    buffers: SharedBufferTracker,
    events: Vec<Event>,
    reaped: Vec<IoCompletion>,
    /// Completions that were reaped, and not yet handled.
    done: VecDeque<IoCompletion>,
    rung: bool,
    /// Bytes of a buffer that a seeded bug keeps.
    spare_bytes: u64,
}

/// The target.
pub struct Target {
    ports: Vec<NetworkPort>,
    registry: Arc<Registry>,
    shared: Arc<Shared>,
    reactors: Vec<Reactor>,
    usage: Arc<Usage>,
    /// Device id of each namespace, while it is served.
    served: Vec<Option<DeviceId>>,
    next_id: u32,
    published: bool,
    /// Persistent state of each namespace.
    states: Vec<NamespaceState>,
    /// The state directory, and one that is empty at each start, for seeded bugs.
    state: Arc<SimDirectory>,
    empty: SimDirectory,
    /// Block size of each device, in bytes.
    block_sizes: Vec<u32>,
    /// Sectors of each namespace.
    sizes: Vec<u32>,
    /// Backing store of each namespace, and the number of earlier ones.
    stores: Vec<(usize, u8)>,
    /// For each namespace the machines that do not see it.
    hidden: Vec<BTreeSet<usize>>,
    /// ANA states of each listener.
    paths: Vec<AnaStates>,
    formatter: Formatter,
    /// Runs between iterations of reactors, since it has no thread here.
    worker: NamespaceStateWorker,
    /// Executes namespace requests of hosts, also between iterations.
    pub ns_admin: NsManagementDriver,
    limiters: Limiters,
    snapshot: Option<Snapshot>,
    /// A seeded bug of the target.
    pub plant: Option<SeededBug>,
    /// For a seeded bug: the last ticket that was released.
    opened: u64,
    dice: Rng,
    /// The process is no longer killed during operations on files.
    pub spared: bool,
}

impl Target {
    /// A target that was not started.
    ///
    /// # Errors
    /// There is no directory for its files.
    pub fn new(
        profile: &Profile,
        air: &Arc<Mutex<Network>>,
        Setup { seed, plant, .. }: Setup,
    ) -> Result<Target, String> {
        let count = profile.reactors as u32;
        let port = |index| NetworkPort::new(air, profile.address(None), (count, index));
        let registry = Arc::new(Registry::new(Vec::new(), 0, 0));
        let state = SimDirectory::new(seed ^ 0x57a7)?;
        if plant == Some(SeededBug::UnsyncedFormat) {
            state.forget_syncs();
        }
        Ok(Target {
            ports: (0..count).map(port).collect(),
            shared: Arc::new(Shared::new(Arc::clone(&registry), Workers::default(), epoch)),
            registry,
            reactors: Vec::new(),
            usage: Arc::default(),
            served: vec![None; profile.shapes.len()],
            next_id: 0,
            published: false,
            states: Vec::new(),
            sizes: (0..profile.shapes.len()).map(|space| profile.sectors(space)).collect(),
            stores: (0..profile.shapes.len()).map(|space| (space, 0)).collect(),
            hidden: vec![BTreeSet::new(); profile.shapes.len()],
            paths: vec![AnaStates::default(); profile.paths],
            worker: NamespaceStateWorker::new(),
            state: Arc::new(state),
            empty: SimDirectory::new(0)?,
            block_sizes: profile.shapes.iter().map(|(_, block_bytes)| *block_bytes).collect(),
            ns_admin: NsManagementDriver::new(profile, seed, plant)?,
            formatter: Formatter::default(),
            limiters: Limiters::default(),
            snapshot: None,
            plant,
            opened: 0,
            dice: Rng::new(seed ^ 0x6b11),
            spared: false,
        })
    }

    /// Its places in the simulated network.
    pub fn places(&self) -> impl Iterator<Item = usize> {
        self.ports.iter().map(NetworkPort::place)
    }

    /// Whether it is running.
    pub fn is_up(&self) -> bool {
        !self.reactors.is_empty()
    }

    /// Number of running reactors.
    pub fn reactors(&self) -> usize {
        self.reactors.len()
    }

    /// Starts it: pools, fabrics, listener, backing stores and the subsystem.
    pub fn start(
        &mut self,
        profile: &Profile,
        dice: &mut Rng,
        disk: &mut SimDevice,
        trace: &Arc<Trace>,
        now: Instant,
    ) -> Result<(), String> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let plan = PoolPlan {
            cells: profile.receives * 2,
            receives: profile.receives,
            lead_bytes: 64,
            tail_bytes: 4096,
            data_bytes: profile.data_bytes,
            largest_bytes: profile.mdts_bytes,
        };
        let limits = Limits {
            queue_depth: 32,
            io_queues: 4,
            in_capsule_bytes: 4096,
            mdts_bytes: profile.mdts_bytes,
        };
        let mut senders = Vec::new();
        for (index, port) in self.ports.iter().enumerate() {
            let pool = Pool::new(plan).map_err(|e| said(&e))?;
            let (sender, mailbox) = mailbox().map_err(|e| said(&e))?;
            senders.push(sender);
            let config = config(profile, dice.roll(), (self.ports.len() as u32, index as u32));
            let entropy = entropy(dice.roll());
            let region = Arc::clone(pool.region());
            let soft = Soft::simulated(port.clone(), config, entropy, now, Arc::clone(&region))
                .map_err(|e| said(&e))?;
            let buffers = Arc::new(Mutex::new(BufferTracker::new(&plan)));
            let name = ("target", index as u64);
            let fabric = InstrumentedFabric::new(
                soft,
                name,
                region,
                Arc::clone(&buffers),
                Arc::clone(trace),
            );
            self.reactors.push(Reactor {
                queues: PollGroup::new(index, limits, now),
                fabric,
                pool,
                mailbox,
                buffers,
                events: Vec::with_capacity(BATCH),
                reaped: Vec::new(),
                done: VecDeque::new(),
                rung: true,
                spare_bytes: 0,
            });
        }
        for path in 0..profile.paths {
            let at = SocketAddr::new(profile.address(None), PORT + path as u16);
            for reactor in &mut self.reactors {
                reactor.fabric.listen(at).map_err(|e| said(&e))?;
            }
        }
        let receives = profile.receives - RECEIVES_FOR_ADMIN;
        (self.worker, self.opened) = (NamespaceStateWorker::new(), 0);
        self.registry = Arc::new(Registry::new(senders, 16, receives));
        let workers = Workers::default().with_ns_state(self.worker.sender());
        let workers = workers.with_ns_management(self.ns_admin.sender());
        self.shared = Arc::new(Shared::new(Arc::clone(&self.registry), workers, epoch));
        self.empty = SimDirectory::new(0)?;
        let names = StateDir(self.state.path());
        self.state.run(StepFault::None, || names.sync_names()).map_err(|e| said(&e))?;
        self.start_formats(profile)?;
        if let Some(keyring) = keyring(profile).filter(|_| self.plant != Some(SeededBug::OpenDoor))
        {
            self.registry.set_keyring(keyring);
        }
        let states = (0..profile.shapes.len()).map(|space| self.open_state(space));
        self.states = states.collect::<Result<_, _>>()?;
        disk.open(self.reactors.iter().map(|r| Arc::clone(r.pool.region())).collect());
        for space in 0..profile.shapes.len() {
            self.serve(profile, space, disk)?;
            let store = self.stores[space].0;
            disk.reformat(store, self.block_sizes[space]);
            disk.resize(store, self.sizes[space]);
        }
        self.open_made(disk)?;
        self.publish(profile);
        self.registry.set_listeners(self.listeners(profile));
        Ok(())
    }

    /// Identity of a namespace: its UUID and its NGUID.
    pub fn name(&self, space: usize) -> [u8; 16] {
        name(space, self.stores[space].1)
    }

    /// The backing store of a namespace.
    pub fn store(&self, space: usize) -> usize {
        self.stores[space].0
    }

    /// Replaces the backing store of a namespace that is not served.
    ///
    /// # Errors
    /// There is no directory for its files.
    pub fn exchange(
        &mut self,
        profile: &Profile,
        space: usize,
        disk: &mut SimDevice,
    ) -> Result<(), String> {
        let (blocks, block_bytes) = profile.shapes[space];
        let (old, generation) = self.stores[space];
        let new = match self.plant {
            Some(SeededBug::OldStore) => old,
            _ => disk.add_store(blocks, block_bytes),
        };
        self.stores[space] = (new, generation.wrapping_add(1));
        disk.resize(new, self.sizes[space]);
        self.states[space] = self.open_state(space)?;
        Ok(())
    }

    fn listeners(&self, profile: &Profile) -> Vec<ListenerConfig> {
        let listener = |(path, ana): (usize, &AnaStates)| {
            let address = SocketAddr::new(profile.address(None), PORT + path as u16);
            let id = path as u16 + 1;
            ListenerConfig { id, address, ana: *ana, keep_alive_min_ms: 0 }
        };
        self.paths.iter().enumerate().map(listener).collect()
    }

    /// Sets the ANA state of a namespace on a path.
    pub fn set_reach(&mut self, profile: &Profile, path: usize, space: usize, state: AnaState) {
        let path = match self.plant {
            Some(SeededBug::WrongPath) => (path + 1) % self.paths.len(),
            _ => path,
        };
        self.paths[path].set(space as u32 + 1, state);
        if self.is_up() {
            self.registry.set_listeners(self.listeners(profile));
        }
    }

    /// Crashes it: everything in memory is lost; with `power` also what is not durable.
    pub fn crash(&mut self, power: bool) {
        self.state.crash(power);
        self.reactors.clear();
        self.served.fill(None);
        (self.published, self.snapshot) = (false, None);
        self.drop_formats();
    }

    /// Serves a namespace (from the next publication on).
    ///
    /// # Errors
    /// Its persisted state is invalid.
    pub fn serve(
        &mut self,
        profile: &Profile,
        space: usize,
        disk: &mut SimDevice,
    ) -> Result<(), String> {
        self.renew_format(profile, space)?;
        let id = self.fresh_id();
        disk.attach(id, self.stores[space].0);
        self.served[space] = Some(id);
        Ok(())
    }

    fn fresh_id(&mut self) -> DeviceId {
        self.next_id += 1;
        DeviceId(self.next_id - 1)
    }

    /// Stops serving a namespace (after the next publication).
    pub fn remove(&mut self, space: usize, disk: &mut SimDevice) -> Option<DeviceId> {
        self.interrupt_format(space, disk);
        self.end_snapshot_of(space, disk);
        self.served[space].take()
    }

    /// Publishes the present subsystem.
    pub fn publish(&mut self, profile: &Profile) {
        self.limiters.next(profile);
        let namespace = |(space, id): (usize, &Option<DeviceId>)| {
            let block_bytes = self.block_sizes[space];
            let blocks = self.sizes[space] / (block_bytes / SECTOR_BYTES);
            let (nsid, uuid) = (space as u32 + 1, self.name(space));
            id.map(|backing| Namespace {
                allow_format: profile.formats > 0,
                formats: self.formats_of(profile, space),
                formatting: self.format(space).under_way(),
                write_uncorrectable: profile.spoils > 0,
                ana_group: nsid,
                limiters: self.limiters.of_namespace(space),
                ..self.states[space].namespace((nsid, uuid), backing, (blocks.into(), block_bytes))
            })
        };
        let declared = self.served.iter().enumerate().filter_map(namespace);
        self.registry.publish(Arc::new(Subsystem {
            nqn: subnqn(),
            serial: Text::lossy("WORLD"),
            model: Text::lossy("nvmfd"),
            allow_any_host: true,
            hosts: BTreeSet::new(),
            offer: Arc::new(AccessPolicy { masks: self.masks(profile), ..AccessPolicy::default() }),
            namespaces: declared.chain(self.made()).collect(),
            management: self.management(),
            host_limiters: self.limiters.of_hosts(),
            usage: Arc::clone(&self.usage),
        }));
        self.published = true;
    }

    fn masks(&self, profile: &Profile) -> BTreeMap<u32, BTreeSet<Nqn>> {
        let masked = self.hidden.iter().enumerate().filter(|(_, from)| !from.is_empty());
        let machines = || (0..profile.hosts).map(|host| profile.machine(host));
        let made = self.ns_admin.entries().iter();
        masked
            .map(|(space, from)| {
                let hosts = machines().filter(|machine| !from.contains(machine)).map(hostnqn);
                (space as u32 + 1, hosts.collect())
            })
            .chain(made.map(|(nsid, entry)| (*nsid, entry.hosts.clone())))
            .collect()
    }

    /// Resizes a namespace to this number of sectors.
    pub fn resize(&mut self, profile: &Profile, space: usize, sectors: u32, disk: &mut SimDevice) {
        self.sizes[space] = sectors;
        if self.is_up() {
            disk.resize(self.stores[space].0, sectors);
            self.publish_again(profile);
        }
    }

    /// Before a start: sets the machines that do not see each namespace.
    pub fn set_hidden(&mut self, hidden: Vec<BTreeSet<usize>>) {
        self.hidden = hidden;
    }

    /// Shows a namespace to a machine, or hides it.
    pub fn show(&mut self, profile: &Profile, space: usize, machine: usize, shown: bool) {
        let hidden = &mut self.hidden[space];
        if shown {
            hidden.remove(&machine)
        } else {
            hidden.insert(machine)
        };
        if self.is_up() {
            self.publish_again(profile);
        }
    }

    /// Publishes the present subsystem, if it is published. A process that hangs in an operation on
    /// files does not: a format may have changed the block size, and not persisted it.
    pub fn publish_again(&mut self, profile: &Profile) {
        if self.published && !self.is_dead() {
            self.publish(profile);
        }
    }

    /// Whether a namespace can be served again.
    pub fn may_serve(&self, space: usize) -> bool {
        self.is_up() && !self.is_dead() && !self.is_served(space)
    }

    /// Whether a namespace is served.
    pub fn is_served(&self, space: usize) -> bool {
        self.served[space].is_some()
    }

    /// Whether a machine may see a namespace.
    pub fn is_shown(&self, space: usize, machine: usize) -> bool {
        !self.hidden[space].contains(&machine)
    }

    /// Withdraws the subsystem.
    pub fn withdraw(&mut self) {
        self.registry.withdraw(&subnqn());
        self.published = false;
    }

    /// Whether the subsystem is published.
    pub fn is_published(&self) -> bool {
        self.published
    }

    /// One iteration of a reactor, in the steps of the real one. Returns the time of the next one.
    pub fn turn(&mut self, index: usize, now: Instant, disk: &mut SimDevice) -> Option<Instant> {
        self.limiters.now = Some(now);
        let reactor = &mut self.reactors[index];
        reactor.rung |= reactor.mailbox.hush();
        disk.reap(index, &mut reactor.reaped);
        InstrumentedDevice::<SimRing<'_>>::returned(&reactor.buffers, &reactor.reaped);
        reactor.done.extend(reactor.reaped.drain(..));
        reactor.fabric.poll(now, &mut reactor.events);
        let mut worked = reactor.rung || !reactor.events.is_empty() || !reactor.done.is_empty();
        let ring = SimRing { disk, ring: index };
        let mut seam = InstrumentedDevice { disk: ring, buffers: &reactor.buffers };
        let mut lent = Resources {
            pool: &mut reactor.pool,
            fabric: &mut reactor.fabric,
            disk: &mut seam,
            shared: &self.shared,
            now,
        };
        reactor.queues.on_events(&mut reactor.events, &mut lent);
        worked |= reactor.queues.tick(&mut lent);
        reactor.queues.on_disks(&mut reactor.done, &mut lent);
        if std::mem::take(&mut reactor.rung) {
            while let Some(message) = reactor.mailbox.take() {
                if let Message::Caught(answer) = message {
                    // The queue of the request may be closed.
                    let _ = answer.send(());
                    continue;
                }
                match (self.plant, &message) {
                    (Some(SeededBug::MissingFence), Message::Fence(fence))
                        if is_of_preemption(fence) =>
                    {
                        continue;
                    }
                    (Some(SeededBug::LateShield), Message::Fence(fence)) if is_shield(fence) => {
                        continue;
                    }
                    (Some(SeededBug::LateFormat), Message::Fence(fence))
                        if fence.whose == DrainScope::Users =>
                    {
                        continue;
                    }
                    (Some(SeededBug::StaleView), Message::Subsystem(..)) => continue,
                    (Some(SeededBug::LostAbort), Message::Errand(_)) => {
                        std::mem::forget(message);
                        continue;
                    }
                    (Some(SeededBug::FalseAbort), Message::Errand(token)) => {
                        token.clone().succeed()
                    }
                    _ => {}
                }
                reactor.queues.on_message(message, &mut lent);
            }
            reactor.queues.look(&mut lent);
        }
        if worked {
            reactor.queues.serve_waiters(&mut lent);
        }
        reactor.fabric.flush();
        disk.submit(index);
        let deadline = reactor.fabric.arm(Wake::Any);
        // Completions that exceed the batch are first in the next iteration.
        let tick = if reactor.done.is_empty() { reactor.queues.next_tick() } else { now };
        self.serve_state_requests();
        if self.plant == Some(SeededBug::OpenBlocks) {
            self.open_blocks();
        }
        Some(deadline.map_or(tick, |deadline| deadline.min(tick)))
    }

    /// A seeded bug: releases all locks of closed connections.
    fn open_blocks(&mut self) {
        let exclusion = &self.shared.range_locks;
        let nothing =
            RangeLock { backing: DeviceId(0), at: u64::MAX - 1, len: 1, alone: false, reactor: 0 };
        let (last, _) = exclusion.claim(nothing);
        (self.opened + 1..=last).for_each(|ticket| exclusion.give_up(ticket));
        self.opened = last;
    }

    /// Whether a reactor was woken.
    pub fn is_rung(&mut self, index: usize) -> bool {
        let reactor = &mut self.reactors[index];
        reactor.rung |= reactor.mailbox.hush();
        reactor.rung
    }

    /// Checks that every buffer of a reactor has exactly one owner.
    pub fn audit(&self, index: usize) -> Result<(), String> {
        let reactor = &self.reactors[index];
        let buffers = lock(&reactor.buffers);
        if let Some(fault) = buffers.fault() {
            return Err(format!("target {index}: {fault}"));
        }
        let plan = reactor.pool.plan();
        let (cells, receives, data) = reactor.pool.free();
        let free = u64::from(cells) * 64 + u64::from(receives) * plan.receive_bytes() + data;
        let left = reactor.done.iter().filter_map(|done| done.buf.as_ref());
        let left: u64 = left.map(|buf| u64::from(buf.capacity())).sum();
        let given = [buffers.bytes() + left, reactor.queues.held_bytes(), reactor.spare_bytes];
        let all = u64::from(plan.cells) * 64
            + u64::from(plan.receives) * plan.receive_bytes()
            + plan.data_bytes.next_multiple_of(plan.largest_bytes.into());
        match free + given.iter().sum::<u64>() == all {
            true => Ok(()),
            false => Err(format!(
                "target {index}: of {all} bytes of buffers {free} are free, {} with fabric and \
                 disk, {} with queues: some are lost or in two hands",
                given[0], given[1]
            )),
        }
    }

    /// What is left at the end, if anything.
    pub fn leftovers(&self) -> Result<(), String> {
        for (index, reactor) in self.reactors.iter().enumerate() {
            self.audit(index)?;
            let (queues, free) = (reactor.queues.count(), reactor.pool.free());
            if queues > 0 || lock(&reactor.buffers).bytes() > 0 {
                return Err(format!("target {index}: at rest, and {queues} queues are left"));
            }
            if reactor.spare_bytes == 0 && !reactor.pool.is_full() {
                return Err(format!("target {index}: at rest, and only {free:?} are free"));
            }
        }
        match self.registry.associations() {
            0 => Ok(()),
            count => Err(format!("at rest, and {count} associations are left")),
        }
    }

    /// Number of queues of all reactors.
    pub fn queues(&self) -> usize {
        self.reactors.iter().map(|reactor| reactor.queues.count()).sum()
    }

    /// A seeded bug: a response is sent twice after this number of responses.
    pub fn plant_echo(&mut self, after: u32) {
        for reactor in &mut self.reactors {
            let spare = reactor.pool.take_cell();
            reactor.spare_bytes = 64;
            reactor.fabric.echo = Some(Echo { after, spare });
        }
    }
}

fn is_of_preemption(fence: &DrainBarrier) -> bool {
    matches!(fence.whose, DrainScope::Preempted(_))
}

fn is_shield(fence: &DrainBarrier) -> bool {
    fence.whose == DrainScope::Writers
}

/// The subsystem's name.
pub fn subnqn() -> Nqn {
    SUBNQN.parse().expect("a name")
}

/// The clock of the machine, which no rule uses.
fn epoch() -> SystemTime {
    SystemTime::UNIX_EPOCH
}
