//! The running target: reactor threads, and the operations of the control plane on them.

mod keys;
mod liveness;

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use nvme::Nqn;
use rdma::{FabricError, SpinBudget};
use tracing::{info, warn};

use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::monitor::DeviceMonitor;
use crate::config::{Auto, Config, Missing, memory_estimate};
use crate::core::controller::Limits;
use crate::core::message::{Mailbox, Message, ReactorRings, Sender, mailbox};
use crate::core::qpair::{DATA_FOR_ADMIN_BYTES, RECEIVES_FOR_ADMIN};
use crate::core::registry::Registry;
use crate::core::shared::Shared;
use crate::core::stats::PollStats;
use crate::error::{Fatal, NotServed};
use crate::overlay::diff::differences;
use crate::platform::availability;
use crate::plural;
use crate::provision::devices::DeviceTable;
use crate::provision::ns_catalog::Catalogs;
use crate::provision::retry::{RetryTask, rewrite_records};
use crate::provision::{PATIENCE, Provisioner, Transition, torn};
use crate::reactor::fabric::{self, Choice, Fabrics, choose, owns};
use crate::reactor::{Parts, Reactor, map_pool};
use crate::state::group_records::GroupRecords;
use crate::state::power::PowerLog;
use crate::state::record::StateDir;
use crate::state::revoked_hosts::{self, PreparedHosts};
use crate::state::usage::{UsageStore, UsageWriter};
use crate::telemetry::pending::Pending;
use crate::telemetry::view::TargetView;
use crate::worker::Workers;
use crate::worker::gateway::GatewayWorker;
use crate::worker::gateway::shared::SharedConfigClient;
use crate::worker::ns_management::{NamespaceAdmin, NamespaceAdminMessage};
use crate::worker::ns_state::{NamespaceStateMessage, NamespaceStateWorker};
use crate::worker_thread::WorkerThread;

pub use liveness::Liveness;

/// Spin time of `spin_us = "auto"` while no device is busy: about the cost of waking up a sleeping
/// CPU.
const SPIN_AUTO: Duration = Duration::from_micros(50);

/// Time for giving the ANA groups to other gateways.
const LEAVING: Duration = Duration::from_secs(3);

/// Time for writing persistent state during a stop, also if hosts or devices have used up the
/// rest.
const KEEPING: Duration = Duration::from_millis(400);

/// What a change of the configuration has done, a line each.
#[derive(Debug, Default)]
pub struct AppliedChange {
    /// Sections that only a restart changes, and differences of the others.
    pub configured: Vec<String>,
    /// Differences of what the configuration names, such as keys in their files.
    pub others: Vec<String>,
}

impl AppliedChange {
    /// Logs all of it, and returns the number of lines.
    pub(crate) fn log(&self) -> usize {
        let lines = self.configured.iter().chain(&self.others);
        lines.inspect(|line| info!("{line}")).count()
    }
}

/// A running target.
pub struct RunningTarget {
    provider: Choice,
    registry: Arc<Registry>,
    shared: Arc<Shared>,
    pending: Arc<Pending>,
    provisioner: Arc<Mutex<Provisioner>>,
    monitor: Arc<DeviceMonitor>,
    fabrics: Arc<Fabrics>,
    reactors: Vec<ReactorThread>,
    worker: (WorkerThread, mpsc::Sender<NamespaceStateMessage>),
    ns_admin: (WorkerThread, mpsc::Sender<NamespaceAdminMessage>),
    usage_store: Option<UsageWriter>,
    waiting: Option<RetryTask>,
    gateway: Option<GatewayWorker>,
}

struct ReactorThread {
    thread: JoinHandle<()>,
    stats: Arc<PollStats>,
}

/// Records the end of a reactor's thread, also by a panic.
struct Ending(Arc<PollStats>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

/// Returns the provider that serves the configured addresses, and the source of its fabrics.
fn fabrics_of(config: &Config) -> Result<(Choice, Fabrics), Fatal> {
    let (provider, why) = choose(config.provider, &config.addresses(), will_own);
    info!(%provider, "fabric provider chosen: {why}");
    let capture = config.capture.as_ref().map(fabric::capture).transpose();
    let capture = capture.map_err(|error| Fatal(error.to_string()))?;
    let fabrics = provider.fabrics(config.reactor.count(), config.soft, capture);
    Ok((provider, fabrics.map_err(|error| Fatal(error.to_string()))?))
}

/// Creates a mailbox for each reactor.
pub(crate) fn mailboxes(reactors: usize) -> Result<(Vec<Sender>, Vec<Mailbox>), Fatal> {
    let boxes = (0..reactors).map(|_| mailbox()).collect::<io::Result<_>>();
    boxes.map_err(|error| Fatal(format!("no eventfd for a reactor: {}", rdma::explained(&error))))
}

impl RunningTarget {
    /// Starts the reactors, opens every device and listens.
    ///
    /// # Errors
    /// One sentence about the obstacle. Nothing is left running.
    pub fn start(config: Config) -> Result<RunningTarget, Fatal> {
        let directory = checked(config.state_directory.as_deref())?;
        let keyring = keys::first(&config, directory.as_deref())?;
        let records = Arc::default();
        let stores = device_table(&config, directory, &records);
        let pool = stores.opening();
        let next = Transition::open(&config, &stores, &Catalogs::new())?;
        let (senders, boxes) = mailboxes(config.reactor.count())?;
        let receives = config.memory.receives.saturating_sub(RECEIVES_FOR_ADMIN);
        let monitor = DeviceMonitor::start(ReactorRings(senders.clone()), Arc::clone(&pool))
            .map_err(|error| Fatal(format!("no thread for the device monitor: {error}")))?;
        let monitor = Arc::new(monitor);
        let (worker, ns_admin) = (NamespaceStateWorker::new(), NamespaceAdmin::new());
        let registry = Arc::new(Registry::new(senders, config.limits.controllers, receives));
        let power = PowerLog::open(config.state_directory.as_deref(), Instant::now());
        let usage = Arc::new(UsageStore::open(config.state_directory.as_deref(), power.meter));
        let workers = Workers::default().with_ns_state(worker.sender());
        let workers = workers.with_ns_management(ns_admin.sender());
        let shared = Arc::new(
            Shared::new(Arc::clone(&registry), workers, SystemTime::now).with_power(power.meter),
        );
        registry.set_keyring(keyring);
        let kept = revoked_hosts::keep(&registry, config.state_directory.as_deref());
        kept.iter().for_each(|sentence| warn!("{sentence}"));
        let (provider, fabrics) = fabrics_of(&config)?;
        let worker = keep(worker, &registry)?;
        let provisioner = Provisioner::new(
            config.clone(),
            stores,
            Arc::clone(&shared),
            Arc::clone(&monitor),
            Arc::clone(&usage),
            provider == Choice::Verbs,
        );
        let pending = Arc::clone(provisioner.pending());
        let provisioner = Arc::new(Mutex::new(provisioner));
        let ns_admin = ns_admin_worker(ns_admin, &provisioner, &shared, Arc::clone(&pool))?;
        let mut target = RunningTarget {
            provider,
            registry,
            shared,
            pending,
            provisioner,
            monitor,
            fabrics: Arc::new(fabrics),
            reactors: Vec::new(),
            worker,
            ns_admin,
            usage_store: None,
            waiting: None,
            gateway: None,
        };
        let started = boxes
            .into_iter()
            .enumerate()
            .try_for_each(|(index, mailbox)| target.spawn(&config, index, mailbox))
            .and_then(|()| target.serve(&config, next, &pool, &records));
        match started {
            Ok(()) => {
                target.usage_store = usage.keep(power);
                Ok(target)
            }
            Err(fatal) => {
                target.stop(Instant::now() + Duration::from_secs(5));
                Err(fatal)
            }
        }
    }

    /// Serves the configuration, and starts to retry missing devices.
    fn serve(
        &mut self,
        config: &Config,
        next: Transition,
        pool: &Arc<BlockingPool>,
        records: &Arc<GroupRecords>,
    ) -> Result<(), Fatal> {
        if config.group.is_some() {
            GatewayWorker::restrain(&self.registry);
        }
        let mut provisioner = self.provisioner();
        provisioner.attach_new(&next)?;
        provisioner.adopt(next, Vec::new()).iter().for_each(|line| info!("{line}"));
        config.addresses().iter().try_for_each(|at| provisioner.listen(*at, config.missing))?;
        provisioner.publish();
        drop(provisioner);
        let waiting = RetryTask::start(Arc::clone(&self.provisioner), pool);
        let no_thread = |error| Fatal(format!("no thread for retries: {error}"));
        self.waiting = Some(waiting.map_err(no_thread)?);
        self.join_group(config, pool, records)
    }

    /// Joins the configured gateway group.
    fn join_group(
        &mut self,
        config: &Config,
        pool: &Arc<BlockingPool>,
        records: &Arc<GroupRecords>,
    ) -> Result<(), Fatal> {
        let Some(group) = &config.group else { return Ok(()) };
        let (registry, monitor) = (&self.registry, &self.monitor);
        let worker = GatewayWorker::start(config, group, registry, monitor, pool, records);
        let no_thread = |error| Fatal(format!("no thread for the gateway group: {error}"));
        self.gateway = Some(worker.map_err(no_thread)?);
        Ok(())
    }

    /// Replaces the configuration: subsystems, hosts, namespaces, listeners; all or nothing.
    /// Returns when it applies to every queue of connected hosts.
    ///
    /// # Errors
    /// One sentence about what cannot be served; nothing has changed.
    pub fn apply(&mut self, config: Config) -> Result<AppliedChange, Fatal> {
        self.put(config, true, || Ok(())).map_err(|not_served| match not_served {
            NotServed::Unservable(fatal) => fatal,
            NotServed::Unkept(sentence) => Fatal(sentence),
        })
    }

    /// As [`RunningTarget::apply`], for a request that waits for the result: new devices and
    /// addresses must be available; only a start and a reload make missing ones pending. `persist`
    /// makes the change durable: it is called when no later step can fail, and before any host
    /// sees the change.
    ///
    /// # Errors
    /// The reason why it cannot be served, or the error of `persist`; nothing has changed.
    pub fn change(
        &mut self,
        config: Config,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<AppliedChange, NotServed> {
        self.put(config, false, persist)
    }

    /// Prepares, persists and commits a configuration.
    fn put(
        &mut self,
        mut config: Config,
        may_wait: bool,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<AppliedChange, NotServed> {
        let mut provisioner = self.provisioner();
        let mut configured: Vec<String> = provisioner
            .config()
            .needs_restart(&config)
            .into_iter()
            .map(|section| format!("{section} has changed and needs a restart"))
            .collect();
        config.keep_fixed(provisioner.config());
        provisioner.config().check_regrouped(&config).map_err(Fatal)?;
        // A change of other settings reads no key file; a change without differences reloads
        // replaced key files.
        let is_about_keys = config.authentication != provisioner.config().authentication;
        let keyring = match may_wait || is_about_keys || config == *provisioner.config() {
            true => Some(keys::next(&self.registry, &config)?),
            false => None,
        };
        let next = match may_wait {
            true => Some(provisioner.next_by_reload(&config)?),
            false => provisioner.next(&config)?,
        };
        let missing = if may_wait { config.missing } else { Missing::Fail };
        if let Some(next) = next.as_ref().filter(|_| !may_wait) {
            provisioner.check_pending(next)?;
        }
        configured.extend(differences(provisioner.config(), &config));
        let (was, is) = (provisioner.config().addresses(), config.addresses());
        let added: Vec<SocketAddr> = is.iter().filter(|at| !was.contains(at)).copied().collect();
        let removed: Vec<SocketAddr> = was.iter().filter(|at| !is.contains(at)).copied().collect();
        let keyed = match &keyring {
            Some(keyring) => {
                keys::prepare(&self.registry, keyring, &config).map_err(NotServed::Unkept)?
            }
            None => PreparedHosts::default(),
        };
        let memory = provisioner.prepare(next.as_ref(), &added, missing)?;
        if let Err(sentence) = persist() {
            provisioner.abandon(next.as_ref(), &added);
            return Err(NotServed::Unkept(sentence));
        }
        // From here on no step can fail, and hosts see the change. (A record that is not put in
        // place now is written again with what is adopted.)
        let _ = (memory.persist(), keyed.persist());
        let old = provisioner.set_config(config);
        let mut others = Vec::new();
        if let Some(keyring) = keyring {
            others.extend(self.registry.set_keyring(keyring));
            // If it was not put in place, or another gateway has a key since.
            let directory = provisioner.config().state_directory.as_deref();
            others.extend(revoked_hosts::keep(&self.registry, directory));
        }
        removed.iter().for_each(|at| provisioner.unlisten(*at));
        let kept: BTreeSet<Nqn> = provisioner.config().subsystems.iter().map(|s| s.nqn).collect();
        let gone = old.subsystems.iter().map(|s| s.nqn).filter(|nqn| !kept.contains(nqn)).collect();
        match next {
            Some(next) => others.extend(provisioner.adopt(next, gone)),
            None => provisioner.adopt_listeners(),
        }
        // On return no queue serves a host by the old configuration.
        provisioner.wait_for_reactors();
        if let Some(gateway) = &self.gateway {
            gateway.declare(provisioner.config());
        }
        Ok(AppliedChange { configured, others })
    }

    /// The shared configuration of the gateway group, if the daemon is a member of one.
    pub(crate) fn shared(&self) -> Option<SharedConfigClient> {
        self.gateway.as_ref().map(GatewayWorker::shared)
    }

    /// Liveness of the target, also while it is being changed.
    pub fn pulse(&self) -> Liveness {
        let reactors = self.reactors.iter().map(|r| Arc::clone(&r.stats)).collect();
        let (registry, pending) = (Arc::clone(&self.registry), Arc::clone(&self.pending));
        let gateway = self.gateway.as_ref().map(GatewayWorker::view);
        Liveness::new(registry, pending, gateway, reactors)
    }

    /// A read-only view, also while the target is being changed.
    pub fn view(&self) -> TargetView {
        TargetView {
            gateway: self.gateway.as_ref().map(GatewayWorker::view),
            registry: Arc::clone(&self.registry),
            shared: Arc::clone(&self.shared),
            pending: Arc::clone(&self.pending),
            monitor: Some(Arc::clone(&self.monitor)),
            reactors: self.reactors.iter().map(|r| Arc::clone(&r.stats)).collect(),
            provider: self.provider.to_string(),
            pool_bytes: self.provisioner().config().pool_plan().total_bytes()
                * self.reactors.len() as u64,
            started: Instant::now(),
        }
    }

    /// A summary for the log: listeners, subsystems, and the memory formula.
    pub fn summary(&self) -> String {
        let provisioner = self.provisioner();
        let config = provisioner.config();
        let plan = config.pool_plan();
        let count = self.reactors.len() as u64;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        format!(
            "{}, pool {:.1} MiB = {count} x ({} cells x 64 B + {} receives x {} B + \
             data {:.1} MiB); {} at {}\n{}",
            plural::count(count, "reactor"),
            mib(plan.total_bytes() * count),
            plan.cells,
            plan.receives,
            plan.receive_bytes(),
            mib(plan.data_bytes),
            plural::count(config.subsystems.len(), "subsystem"),
            config.addresses().iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            memory_estimate::sentence(config),
        )
    }

    /// Warning about blocks that a power failure may leave half written, if any.
    pub fn torn(&self) -> Option<String> {
        torn::of_all(&self.registry)
    }

    /// Reports all paths as inaccessible, and waits until then for hosts to use other paths;
    /// returns earlier when no host is connected. Only [`RunningTarget::stop`] may follow.
    pub fn leave(&self, until: Instant) {
        self.leave_group(until);
        self.registry.leave();
        while self.registry.has_hosts() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Gives the ANA groups to other gateways of the group.
    fn leave_group(&self, deadline: Instant) {
        if let Some(gateway) = &self.gateway {
            gateway.leave(deadline.min(Instant::now() + LEAVING));
        }
    }

    /// Disconnects every host, lets pending I/O of devices finish, and ends the reactors; gives up
    /// at the deadline, or 400 ms later for persistent state.
    pub fn stop(mut self, deadline: Instant) {
        self.leave_group(deadline);
        // A format by a host would delay its reactor beyond any deadline.
        self.registry.halt();
        self.monitor.report_detached(deadline.min(Instant::now() + KEEPING));
        // The task may hang in a device: hosts and persistent state have priority.
        self.waiting.iter_mut().for_each(RetryTask::cease);
        for index in 0..self.reactors.len() {
            self.registry.reactor(index).send(Message::Stop);
        }
        for (index, running) in self.reactors.into_iter().enumerate() {
            while !running.thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            if running.thread.is_finished() {
                let _ = running.thread.join();
            } else {
                warn!(reactor = index, "did not stop in time");
            }
        }
        let kept = deadline.max(Instant::now() + KEEPING);
        self.usage_store.into_iter().for_each(|usage_store| usage_store.close(kept));
        self.waiting.into_iter().for_each(|waiting| waiting.stop(deadline));
        self.monitor.stop(deadline);
        self.gateway.into_iter().for_each(|gateway| gateway.stop(deadline));
        let _ = self.worker.1.send(NamespaceStateMessage::Stop);
        let _ = self.ns_admin.1.send(NamespaceAdminMessage::Stop);
        self.worker.0.join_by(deadline);
        self.ns_admin.0.join_by(deadline);
        // If the lock is held now, its owner hangs in a device.
        if let Ok(mut provisioner) = self.provisioner.try_lock() {
            provisioner.device_trust().update_hosts();
            rewrite_records(provisioner.unwritten_records(), deadline);
        }
    }

    /// Locks the provisioner.
    fn provisioner(&self) -> MutexGuard<'_, Provisioner> {
        self.provisioner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&mut self, config: &Config, index: usize, mailbox: Mailbox) -> Result<(), Fatal> {
        let plan = config.pool_plan();
        let least = u64::from(plan.largest_bytes) * 2 + DATA_FOR_ADMIN_BYTES;
        if plan.data_bytes < least {
            return Err(Fatal(format!(
                "memory.data is {} bytes, but two transfers of mdts and a reserve need {least}",
                plan.data_bytes
            )));
        }
        let limits = &config.limits;
        let pending = Arc::clone(&self.pending);
        let stats: Arc<PollStats> = Arc::default();
        let (fabrics, shared) = (Arc::clone(&self.fabrics), Arc::clone(&self.shared));
        let of_reactor = Arc::clone(&stats);
        let limits = Limits {
            queue_depth: limits.queue_depth,
            io_queues: limits.io_queues,
            in_capsule_bytes: limits.in_capsule_bytes,
            mdts_bytes: limits.mdts_bytes,
        };
        let spin = match config.reactor.spin {
            Auto::Auto => SpinBudget::auto(SPIN_AUTO),
            Auto::Number(micros) => SpinBudget::of(Duration::from_micros(micros.into())),
        };
        let io_engine = config.reactor.io_engine;
        // On the thread of the reactor, so that memory is of the node of its CPU.
        let make = move || {
            let failed = |error: FabricError| Fatal(error.to_string());
            let pool = map_pool(plan).map_err(failed)?;
            let fabric = fabrics.make(index, pool.region().clone(), plan.receives);
            let parts = Parts {
                index,
                pool,
                fabric: fabric.map_err(failed)?,
                mailbox,
                shared,
                on_lost_address: Box::new(move |at| pending.add_lost(at)),
                limits,
                spin,
                io_engine,
                stats: of_reactor,
            };
            Reactor::new(parts).map_err(|error| Fatal(format!("no ring: {error}")))
        };
        let ending = Ending(Arc::clone(&stats));
        let cpu = config.reactor.cpus.get(index).copied();
        let (ready, is_ready) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(format!("reactor-{index}"))
            .spawn(move || {
                let _ending = ending;
                pin(cpu);
                match make() {
                    Ok(reactor) => {
                        let _ = ready.send(Ok(()));
                        reactor.run();
                    }
                    Err(fatal) => drop(ready.send(Err(fatal))),
                }
            })
            .map_err(|error| Fatal(format!("no thread for a reactor: {error}")))?;
        match is_ready.recv_timeout(PATIENCE) {
            Ok(Ok(())) => {
                self.reactors.push(ReactorThread { thread, stats });
                Ok(())
            }
            Ok(Err(fatal)) => Err(fatal),
            Err(_) => Err(Fatal(format!("reactor {index} did not start"))),
        }
    }
}

/// The devices, whose state a gateway group has if there is one.
fn device_table(
    config: &Config,
    directory: Option<PathBuf>,
    records: &Arc<GroupRecords>,
) -> DeviceTable {
    let devices = DeviceTable::new(directory, config.reactor.count());
    match config.group {
        Some(_) => devices.in_group(Arc::clone(records)),
        None => devices,
    }
}

/// The state directory, if it is configured and usable.
fn checked(directory: Option<&Path>) -> Result<Option<PathBuf>, Fatal> {
    let Some(directory) = directory else { return Ok(None) };
    match std::fs::metadata(directory) {
        Ok(found) if found.is_dir() => {
            let failed = |error| format!("{} cannot be synced: {error}", directory.display());
            StateDir(directory).sync_names().map_err(|error| Fatal(failed(error)))?;
            Ok(Some(directory.to_owned()))
        }
        Ok(_) => Err(Fatal(format!("state_directory {} is no directory", directory.display()))),
        Err(error) => {
            Err(Fatal(format!("state_directory {} cannot be used: {error}", directory.display())))
        }
    }
}

/// Starts the thread of namespace states.
fn keep(
    worker: NamespaceStateWorker,
    registry: &Arc<Registry>,
) -> Result<(WorkerThread, mpsc::Sender<NamespaceStateMessage>), Fatal> {
    let (sender, registry) = (worker.sender(), Arc::clone(registry));
    let thread = WorkerThread::start("ns-state", move || worker.run(&registry));
    let thread = thread.map_err(|e| Fatal(format!("no thread for reservations: {e}")))?;
    Ok((thread, sender))
}

/// Starts the thread of namespace management.
fn ns_admin_worker(
    ns_admin: NamespaceAdmin,
    provisioner: &Arc<Mutex<Provisioner>>,
    shared: &Arc<Shared>,
    pool: Arc<BlockingPool>,
) -> Result<(WorkerThread, mpsc::Sender<NamespaceAdminMessage>), Fatal> {
    let (sender, provisioner, shared) =
        (ns_admin.sender(), Arc::clone(provisioner), Arc::clone(shared));
    let thread =
        WorkerThread::start("ns-admin", move || ns_admin.run(&provisioner, &shared, &pool));
    let thread = thread.map_err(|e| Fatal(format!("no thread for namespace management: {e}")))?;
    Ok((thread, sender))
}

fn pin(cpu: Option<u32>) {
    let Some(cpu) = cpu else { return };
    let mut set = CpuSet::new();
    let pinned = set.set(cpu as usize).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
    if let Err(error) = pinned {
        warn!(cpu, %error, "cannot pin a reactor to its CPU");
    }
}

/// Whether an RDMA device has this address, or may get it: if the machine has an RDMA device, an
/// address that appears later may belong to it.
pub(crate) fn will_own(at: &SocketAddr) -> bool {
    let any = SocketAddr::from(([0, 0, 0, 0], at.port()));
    owns(at) || availability::address(*at).is_some() && owns(&any)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use crate::blockdev::durable::testing::calls;
    use crate::config::{CATALOG_RECORD, HostConfig, NamespaceKind};
    use crate::daemon::*;

    /// Records that a start finds would be served, and then reverted by a power loss.
    #[test]
    fn the_state_directory_is_synced_at_startup() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().file_name().unwrap().to_str().unwrap();
        let (found, did) = calls(|| checked(Some(directory.path())));
        assert_eq!(found.unwrap().as_deref(), Some(directory.path()));
        assert_eq!(did, [format!("sync directory {name}")]);
    }

    /// A target that cannot listen: its address is one of the range for documentation.
    fn config(directory: &Path) -> Config {
        let text = format!(
            "provider = \"soft\"\nstate_directory = {directory:?}\n[[listener]]\naddress = \
             \"192.0.2.1\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = \
             true\n[[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = \"1MiB\"\n"
        );
        Config::parse(&text).unwrap()
    }

    #[test]
    fn a_listener_whose_device_was_removed_is_pending_and_reopened() {
        let directory = tempfile::tempdir().unwrap();
        let at: SocketAddr = "127.99.71.1:4420".parse().unwrap();
        let mut config = config(directory.path());
        config.listeners[0].address = at;
        let mut target = RunningTarget::start(config).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let nowhere: [String; 0] = [];
        assert_eq!(target.pending.list(), nowhere);
        target.pending.add_lost(at);
        // A listener that was removed does not become pending.
        target.provisioner().unlisten(at);
        target.provisioner().add_lost_listeners();
        assert_eq!(target.pending.list(), nowhere);
        target.provisioner().listen(at, Missing::Wait).unwrap();
        target.pending.add_lost(at);
        target.pending.add_lost("127.99.71.2:4420".parse().unwrap());
        target.provisioner().add_lost_listeners();
        let pending = target.pending.list();
        assert_eq!(pending.len(), 1, "{pending:?}");
        assert!(pending[0].contains("its RDMA device was removed"), "{pending:?}");
        assert_eq!(target.provisioner().pending_addresses(), [at]);
        target.provisioner().on_address(at);
        assert_eq!(target.pending.list(), nowhere);
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    /// Whatever the devices of this machine write whole.
    #[test]
    fn startup_reports_blocks_that_a_power_loss_may_tear() {
        let directory = tempfile::tempdir().unwrap();
        let target = RunningTarget::start(config(directory.path())).unwrap();
        let says = |whole_bytes| {
            let mut subsystem = (*target.registry.subsystems()[0]).clone();
            subsystem.namespaces[0].geometry.power_fail_atomic_bytes = whole_bytes;
            target.registry.publish(Arc::new(subsystem));
            target.torn().unwrap_or_default()
        };
        let named = "namespace 1 of nqn.2026-11.io.nvmfd:a (512 of 4096 bytes)";
        assert!(says(512).contains(named), "{}", says(512));
        assert!(!says(4096).contains("half old and half new"));
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn a_refused_change_removes_only_the_files_it_has_created() {
        let directory = tempfile::tempdir().unwrap();
        let mut target = RunningTarget::start(config(directory.path())).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let disks = crate::blockdev::testing::directory();
        let kept = || Ok(());
        let [new, old, none] = ["new", "old", "none/disk"].map(|name| disks.path().join(name));
        std::fs::write(&old, vec![0; 1 << 20]).unwrap();
        let with = |paths: &[(u32, &PathBuf)]| {
            let mut config = config(directory.path());
            for &(nsid, path) in paths {
                let mut namespace = config.subsystems[0].namespaces[0].clone();
                (namespace.nsid, namespace.uuid) = (nsid, uuid::Uuid::from_u128(nsid.into()));
                let size = Some(1 << 20);
                namespace.kind = NamespaceKind::File { path: path.clone(), size };
                config.subsystems[0].namespaces.push(namespace);
            }
            config
        };
        let refused = target.change(with(&[(2, &new), (3, &old), (4, &none)]), kept).unwrap_err();
        assert!(refused.to_string().contains("there is no directory"), "{refused}");
        assert_eq!((new.exists(), old.exists()), (false, true));
        // A port in use: an error after everything else was opened.
        let taken = std::net::UdpSocket::bind("127.99.71.3:4791").unwrap();
        let mut elsewhere = with(&[(2, &new), (3, &old)]);
        let mut listener = elsewhere.listeners[0];
        (listener.id, listener.address) = (9, "127.99.71.3:4420".parse().unwrap());
        elsewhere.listeners.push(listener);
        let refused = target.change(elsewhere, kept).unwrap_err();
        assert!(refused.to_string().contains("127.99.71.3"), "{refused}");
        assert_eq!((new.exists(), old.exists()), (false, true));
        drop(taken);
        // The devices that were opened for that may not be closed yet.
        let deadline = Instant::now() + Duration::from_secs(60);
        while let Err(refused) = target.change(with(&[(2, &new), (3, &old)]), kept) {
            assert!(refused.to_string().contains("a lock on it is held"), "{refused}");
            assert!(Instant::now() < deadline, "{refused}");
            std::thread::sleep(Duration::from_millis(5));
        }
        target.change(config(directory.path()), kept).unwrap();
        assert!(new.exists() && old.exists(), "it was served");
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn an_ana_state_change_reads_no_key_file_and_probes_no_device() {
        let directory = tempfile::tempdir().unwrap();
        let disks = crate::blockdev::testing::directory();
        let (disk, key) = (disks.path().join("1"), directory.path().join("key"));
        let (managed, aside) = (disks.path().join("managed"), disks.path().join("aside"));
        std::fs::create_dir(&managed).unwrap();
        let secret = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n";
        let write_key = || {
            std::fs::write(&key, secret).unwrap();
            std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        };
        std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
        write_key();
        let text = format!(
            "provider = \"soft\"\nstate_directory = {:?}\n[[host]]\nnqn = \
             \"nqn.2026-11.host:a\"\ndhchap_key_file = {key:?}\n[[listener]]\naddress = \
             \"192.0.2.1\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = \
             true\n[[subsystem.namespace]]\nnsid = 1\npath = {disk:?}\n[subsystem.managed]\n\
             directory = {managed:?}\nquota = \"4MiB\"\nnamespaces = 3\nhosts = \
             [\"nqn.2026-11.host:a\"]\n",
            directory.path()
        );
        let config = Config::parse(&text).unwrap();
        let mut target = RunningTarget::start(config.clone()).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let size = |target: &RunningTarget| {
            let subsystem = target.registry.subsystem(&config.subsystems[0].nqn).unwrap();
            subsystem.namespace(1).unwrap().blocks
        };
        let blocks = size(&target);
        std::fs::remove_file(&key).unwrap();
        std::fs::OpenOptions::new().append(true).open(&disk).unwrap().set_len(2 << 20).unwrap();
        let ana = Config::parse(
            &text.replace("\"192.0.2.1\"\n", "\"192.0.2.1\"\nana = \"inaccessible\"\n"),
        );
        let ana = ana.unwrap();
        std::fs::rename(&managed, &aside).unwrap();
        std::fs::create_dir(&managed).unwrap();
        std::fs::write(managed.join(CATALOG_RECORD), "damaged").unwrap();
        target.change(ana.clone(), || Ok(())).unwrap();
        let mut more = ana.clone();
        more.subsystems.push(self::config(directory.path()).subsystems.remove(0));
        more.subsystems[1].nqn = "nqn.2026-11.io.nvmfd:b".parse().unwrap();
        target.change(more, || Ok(())).unwrap();
        target.change(ana.clone(), || Ok(())).unwrap();
        assert_eq!(size(&target), blocks, "nobody has looked at the file");
        assert!(target.apply(ana.clone()).is_err(), "a reload reads key files");
        write_key();
        let refused = target.apply(ana.clone()).unwrap_err();
        assert!(refused.0.contains("managed"), "a reload probes directories: {refused}");
        std::fs::remove_dir_all(&managed).unwrap();
        std::fs::rename(&aside, &managed).unwrap();
        target.apply(ana).unwrap();
        assert_eq!(size(&target), 2 * blocks, "and sizes");
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    /// They would keep all others from being served, from the next restart on.
    #[test]
    fn a_start_refuses_only_the_hosts_whose_keys_cannot_be_used() {
        let directory = tempfile::tempdir().unwrap();
        let write_key = |name: &str| {
            let key = directory.path().join(name);
            std::fs::write(&key, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:")
                .unwrap();
            std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        };
        write_key("a");
        let [a, b] =
            ["a", "b"].map(|name| format!("nqn.2026-11.host:{name}").parse::<Nqn>().unwrap());
        let mut config = config(directory.path());
        let host = |(nqn, name)| HostConfig {
            nqn,
            key_file: directory.path().join(name),
            controller_key_file: None,
            hashes: None,
            groups: None,
        };
        config.authentication.hosts = [(a, "a"), (b, "b")].map(host).into();
        let mut target = RunningTarget::start(config.clone()).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        assert!(target.registry.has_key(&a) && !target.registry.has_key(&b));
        assert!(target.registry.keyed_hosts().contains(&b), "it is refused");
        assert!(target.apply(config.clone()).is_err(), "a reload needs all of them");
        write_key("b");
        target.apply(config.clone()).unwrap();
        assert!(target.registry.has_key(&b));
        target.stop(Instant::now() + Duration::from_secs(60));
        std::fs::remove_file(directory.path().join("b")).unwrap();
        config.missing = Missing::Fail;
        let refused = RunningTarget::start(config).err().unwrap();
        assert!(refused.0.contains("b cannot be read"), "{refused}");
    }

    #[test]
    fn a_damaged_list_of_keyed_hosts_refuses_unkeyed_hosts_until_it_is_restored() {
        let directory = tempfile::tempdir().unwrap();
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        revoked_hosts::write(directory.path(), &BTreeSet::from([host])).unwrap();
        let list = directory.path().join("keyed-hosts");
        let good = std::fs::read(&list).unwrap();
        std::fs::write(&list, &good[..good.len() - 5]).unwrap();
        let start = || {
            let mut target = RunningTarget::start(config(directory.path())).unwrap();
            target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
            assert!(target.registry.unknown_keyed_hosts().unwrap().contains("keyed-hosts"));
            target
        };
        start().stop(Instant::now() + Duration::from_secs(60));
        let mut target = start();
        target.apply(config(directory.path())).unwrap();
        assert!(target.registry.unknown_keyed_hosts().is_some(), "it is still damaged");
        assert_eq!(std::fs::read(&list).unwrap(), good[..good.len() - 5], "it is not written over");
        std::fs::write(&list, &good).unwrap();
        target.apply(config(directory.path())).unwrap();
        assert_eq!(target.registry.unknown_keyed_hosts(), None);
        assert_eq!(target.registry.keyed_hosts(), BTreeSet::from([host]));
        target.stop(Instant::now() + Duration::from_secs(60));
        std::fs::write(&list, &good[..good.len() - 5]).unwrap();
        let strict = Config { missing: Missing::Fail, ..config(directory.path()) };
        assert!(RunningTarget::start(strict).err().unwrap().0.contains("keyed-hosts"));
    }

    /// Otherwise a restart would admit whoever uses the name once the key is removed.
    #[test]
    fn a_key_whose_host_cannot_be_recorded_is_not_in_force() {
        let directory = tempfile::tempdir().unwrap();
        let mut target = RunningTarget::start(config(directory.path())).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let key = directory.path().join("key");
        std::fs::write(&key, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:")
            .unwrap();
        std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
        let host: Nqn = "nqn.2026-11.host:a".parse().unwrap();
        let with_key = || {
            let mut config = config(directory.path());
            let (key_file, controller_key_file) = (key.clone(), None);
            let (hashes, groups) = (None, None);
            config.authentication.hosts =
                vec![HostConfig { nqn: host, key_file, controller_key_file, hashes, groups }];
            config
        };
        let in_the_way = directory.path().join("keyed-hosts.new");
        std::fs::create_dir(&in_the_way).unwrap();
        let mut persisted = false;
        let refused = target.change(with_key(), || {
            persisted = true;
            Ok(())
        });
        assert!(
            matches!(&refused, Err(NotServed::Unkept(why)) if why.contains("hosts")),
            "{refused:?}"
        );
        assert!(!persisted && target.registry.keyed_hosts().is_empty());
        assert!(target.apply(with_key()).is_err(), "nor by a reload");
        std::fs::remove_dir(&in_the_way).unwrap();
        let kept = || revoked_hosts::read(directory.path()).unwrap();
        // A change that is refused afterwards leaves the list as it was.
        target.change(with_key(), || Err("no".to_owned())).unwrap_err();
        assert!(kept().is_empty() && target.registry.keyed_hosts().is_empty());
        target.change(with_key(), || Ok(())).unwrap();
        assert_eq!(kept(), BTreeSet::from([host]));
        target.change(config(directory.path()), || Ok(())).unwrap();
        assert_eq!(kept(), BTreeSet::from([host]), "it is refused without a key");
        // Nothing else is refused because of a host that is in force.
        std::fs::remove_file(directory.path().join("keyed-hosts")).unwrap();
        std::fs::create_dir(&in_the_way).unwrap();
        target.apply(config(directory.path())).unwrap();
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    /// Otherwise a start that does not find the file would create it anew, empty.
    #[test]
    fn a_file_that_cannot_be_recorded_as_served_is_not_served() {
        let directory = tempfile::tempdir().unwrap();
        let mut target = RunningTarget::start(config(directory.path())).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let disks = crate::blockdev::testing::directory();
        let path = disks.path().join("disk");
        let with_file = || {
            let mut config = config(directory.path());
            config.subsystems[0].namespaces[0].kind =
                NamespaceKind::File { path: path.clone(), size: Some(1 << 20) };
            config.subsystems[0].namespaces[0].nsid = 2;
            config
        };
        let in_the_way = directory.path().join("served.new");
        std::fs::create_dir(&in_the_way).unwrap();
        let persist = || panic!("it is kept before it is known that it can be served");
        let refused = target.change(with_file(), persist).unwrap_err();
        assert!(refused.to_string().contains("cannot record"), "{refused}");
        let subsystem = target.registry.subsystem(&with_file().subsystems[0].nqn).unwrap();
        assert!(subsystem.namespace(1).is_ok() && subsystem.namespace(2).is_err());
        assert!(!path.exists(), "what was made for it is gone");
        std::fs::remove_dir(&in_the_way).unwrap();
        target.change(with_file(), || Ok(())).unwrap();
        let served = crate::state::served::Served::load(Some(directory.path()));
        assert!(served.contains(&path) && !served.contains(Path::new("/other")));
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    /// At a start, an image that is shorter than configured makes only its own namespace pending.
    #[test]
    fn a_short_image_at_startup_makes_only_its_namespace_pending() {
        let directory = tempfile::tempdir().unwrap();
        let disks = crate::blockdev::testing::directory();
        let path = disks.path().join("short");
        std::fs::write(&path, [0; 4096]).unwrap();
        let mut with_short = config(directory.path());
        let mut namespace = with_short.subsystems[0].namespaces[0].clone();
        (namespace.nsid, namespace.uuid) = (2, uuid::Uuid::from_u128(2));
        namespace.kind = NamespaceKind::File { path, size: Some(1 << 20) };
        with_short.subsystems[0].namespaces.push(namespace);
        let nqn = with_short.subsystems[0].nqn;
        let mut target = RunningTarget::start(with_short).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let subsystem = target.registry.subsystem(&nqn).unwrap();
        assert!(subsystem.namespace(1).is_ok() && subsystem.namespace(2).is_err());
        let pending = target.pending.list();
        assert!(pending.iter().any(|line| line.contains("has 4096 bytes")), "{pending:?}");
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    /// A change that cannot be persisted has no effect, and is invisible until it is persisted.
    #[test]
    fn a_change_is_seen_only_when_it_was_persisted() {
        let directory = tempfile::tempdir().unwrap();
        let mut target = RunningTarget::start(config(directory.path())).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let registry = Arc::clone(&target.registry);
        let nqn = config(directory.path()).subsystems[0].nqn;
        let has_namespace =
            || registry.subsystem(&nqn).is_some_and(|subsystem| subsystem.namespace(1).is_ok());
        let mut without = config(directory.path());
        without.subsystems[0].namespaces.clear();
        let full = || {
            assert!(has_namespace(), "seen before it is persisted");
            Err("no space left on device".to_owned())
        };
        let refused = target.change(without.clone(), full).unwrap_err();
        assert!(
            matches!(&refused, NotServed::Unkept(why) if why.contains("no space")),
            "{refused}"
        );
        assert!(has_namespace(), "removed by a change that was refused");
        target.change(without, || Ok(())).unwrap();
        assert!(!has_namespace());
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn a_refused_reload_does_not_clear_a_failed_sync() {
        let directory = tempfile::tempdir().unwrap();
        let disks = crate::blockdev::testing::directory();
        let with_file = || {
            let mut config = config(directory.path());
            config.subsystems[0].namespaces[0].kind =
                NamespaceKind::File { path: disks.path().join("1"), size: Some(1 << 20) };
            config
        };
        let mut target = RunningTarget::start(with_file()).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let nqn = with_file().subsystems[0].nqn;
        let health =
            Arc::clone(&target.registry.subsystem(&nqn).unwrap().namespace(1).unwrap().health);
        health.fail_sync(nvme::Status::WRITE_FAULT);
        let _taken = std::net::UdpSocket::bind("127.99.71.4:4791").unwrap();
        let mut elsewhere = with_file();
        let mut listener = elsewhere.listeners[0];
        (listener.id, listener.address) = (9, "127.99.71.4:4420".parse().unwrap());
        elsewhere.listeners.push(listener);
        let refused = target.apply(elsewhere).unwrap_err();
        assert!(refused.0.contains("127.99.71.4"), "{refused}");
        assert_eq!(health.sync_failure(), Some(nvme::Status::WRITE_FAULT));
        target.stop(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn a_stop_ends_reactors_and_saves_records_despite_a_hung_device() {
        let directory = tempfile::tempdir().unwrap();
        let mut target = RunningTarget::start(config(directory.path())).unwrap();
        target.waiting.take().unwrap().stop(Instant::now() + Duration::from_secs(60));
        let stats: Vec<_> = target.reactors.iter().map(|each| Arc::clone(&each.stats)).collect();
        let (say, said) = mpsc::channel();
        let (power, usage) = (directory.path().join("power"), directory.path().join("usage"));
        let at_work = std::fs::read(&power).unwrap();
        let is_kept = move || usage.exists() && std::fs::read(&power).unwrap() != at_work;
        target.waiting = Some(RetryTask::at(move || {
            // Returns after everything else has stopped, or after a time-out.
            let hopeless = Instant::now() + Duration::from_secs(30);
            let has_stopped =
                || is_kept() && stats.iter().all(|each| each.ended.load(Ordering::Relaxed));
            while !has_stopped() && Instant::now() < hopeless {
                std::thread::sleep(Duration::from_millis(2));
            }
            let _ = say.send(has_stopped());
        }));
        target.stop(Instant::now() + Duration::from_secs(60));
        assert_eq!(said.recv(), Ok(true), "hosts and what is kept come first");
    }
}
