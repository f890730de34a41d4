//! The provisioner: turns the configuration and host-created namespaces into opened devices and
//! subsystems, and publishes them to the reactors. A change holds its lock, and may wait for
//! devices and reactors; reactors never take the lock.

pub mod devices;
mod diff;
pub mod format_task;
pub(crate) mod image_snapshot;
mod interned;
mod interned_bad_blocks;
mod limiters;
pub mod ns_catalog;
mod ns_directory;
mod ns_directory_probe;
mod ns_images;
mod ns_request_plan;
pub mod ns_requests;
mod pending;
pub(crate) mod probe;
pub(crate) mod retry;
mod rollback;
pub(crate) mod snapshot;
pub(crate) mod torn;
mod transition;

use std::collections::BTreeMap;
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use nvme::Nqn;
use tracing::{info, warn};

use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::monitor::DeviceMonitor;
use crate::config::{Config, Missing, SubsystemConfig};
use crate::core::message::{Message, MessageBarrier};
use crate::core::registry::{Change, Registry};
use crate::core::shared::Shared;
use crate::core::subsystem::ns_management::{Allocated, Management, UnavailableNamespace};
use crate::core::subsystem::{ListenerConfig, Subsystem};
use crate::error::Fatal;
use crate::platform::availability;
use crate::reactor::fabric::owns;
use crate::state::trust::DeviceTrust;
use crate::state::usage::UsageStore;
use crate::telemetry::pending::Pending;
use devices::{DeviceTable, Memory, Place, ServedDevice};
use ns_catalog::{Catalog, Catalogs};
pub(crate) use transition::Transition;

pub use ns_directory::{DirectoryIdentity, NamespaceDirectory};
pub use ns_request_plan::{RequestContext, RequestPlan, Step};
pub use pending::{PendingDevice, PendingProbe};

/// Time limit for an answer of a reactor.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Time limit for closing directories.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Reason why a listener cannot be opened.
#[derive(Debug, thiserror::Error)]
enum ListenError {
    /// The address, or its RDMA device, is missing.
    #[error("{0}")]
    Missing(String),
    /// The address exists and cannot be used.
    #[error("{0}")]
    Failed(String),
}

/// The configuration in use, and its devices and catalogs.
pub(crate) struct Provisioner {
    /// The configuration of the files, without host-created namespaces.
    config: Config,
    catalogs: Catalogs,
    /// Directories without a catalog whose record has to be written again. They stay locked until
    /// then: it may contain a request that has failed.
    closed: Vec<Arc<NamespaceDirectory>>,
    stores: DeviceTable,
    registry: Arc<Registry>,
    shared: Arc<Shared>,
    pending: Arc<Pending>,
    monitor: Arc<DeviceMonitor>,
    usage_store: Arc<UsageStore>,
    /// Listeners whose address is missing, with the reason.
    pending_listeners: BTreeMap<SocketAddr, String>,
    /// Addresses of listeners must belong to RDMA devices.
    of_devices: bool,
}

impl Provisioner {
    /// A provisioner without devices. `of_devices`: addresses of listeners must belong to RDMA
    /// devices.
    pub(crate) fn new(
        config: Config,
        stores: DeviceTable,
        shared: Arc<Shared>,
        monitor: Arc<DeviceMonitor>,
        usage_store: Arc<UsageStore>,
        of_devices: bool,
    ) -> Provisioner {
        let registry = Arc::clone(&shared.registry);
        stores.trust.with_hosts_of(&registry);
        Provisioner {
            config,
            catalogs: Catalogs::new(),
            closed: Vec::new(),
            stores,
            registry,
            shared,
            pending: Arc::default(),
            monitor,
            usage_store,
            pending_listeners: BTreeMap::new(),
            of_devices,
        }
    }

    /// The configuration in use.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Listeners, devices and directories that are pending.
    pub(crate) fn pending(&self) -> &Arc<Pending> {
        &self.pending
    }

    /// Replaces the configuration, and returns the previous one. [`Provisioner::adopt`] activates
    /// it.
    pub(crate) fn set_config(&mut self, config: Config) -> Config {
        mem::replace(&mut self.config, config)
    }

    /// Opens the devices and catalogs that a change of the configuration needs. Devices and
    /// directories of namespaces and subsystems that do not differ are not probed: one that fails
    /// or hangs prevents no other change. `None`: no device and no subsystem changes.
    ///
    /// # Errors
    /// One sentence about what cannot be served.
    pub(crate) fn next(&self, config: &Config) -> Result<Option<Transition>, Fatal> {
        let Config { subsystems, quotas, missing, .. } = config;
        let was = &self.config;
        if (subsystems, quotas, missing) == (&was.subsystems, &was.quotas, &was.missing) {
            return Ok(None);
        }
        let is_same = |subsystem: &SubsystemConfig| {
            config.missing == was.missing && was.subsystems.contains(subsystem)
        };
        let (stores, catalogs) = (&self.stores, &self.catalogs);
        let probes = ns_directory_probe::probe(config, stores, catalogs, &[], &is_same);
        let next = Transition::merge(config, stores, catalogs, probes, |subsystems| {
            stores.next_for_change(&self.merged(None), subsystems, config.missing)
        });
        next.map(Some)
    }

    /// As [`Provisioner::next`], for a reload, which also retries devices that are held.
    ///
    /// # Errors
    /// One sentence about what cannot be served.
    pub(crate) fn next_by_reload(&self, config: &Config) -> Result<Transition, Fatal> {
        Transition::with_due(config, &self.stores, &self.catalogs, &self.stores.held())
    }

    /// Checks that nothing becomes pending with `next`.
    ///
    /// # Errors
    /// One sentence about a device or directory that is missing.
    pub(crate) fn check_pending(&self, next: &Transition) -> Result<(), Fatal> {
        let pending = self.stores.pending();
        let mut more = next.stores.pending().iter().filter(|each| !pending.contains(each));
        more.next().map_or(Ok(()), |each| Err(Fatal(format!("{}: {}", each.place, each.why))))
    }

    /// Executes the steps that may fail before `next` is activated: writes records, attaches
    /// devices, opens the listeners `added`. Connections to those are held until `next` is adopted
    /// or abandoned, so no host sees a listener or device that the registry does not have.
    ///
    /// # Errors
    /// One sentence about what cannot be served; nothing has changed.
    pub(crate) fn prepare(
        &mut self,
        next: Option<&Transition>,
        added: &[SocketAddr],
        missing: Missing,
    ) -> Result<Memory, Fatal> {
        let mut memory = Memory::default();
        if let Some(next) = next {
            memory = next.stores.prepare_memory(&next.subsystems).map_err(Fatal)?;
            self.attach_new(next)?;
        }
        for (index, at) in added.iter().enumerate() {
            if let Err(fatal) = self.listen(*at, missing) {
                self.abandon(next, &added[..index]);
                return Err(fatal);
            }
        }
        Ok(memory)
    }

    /// Reverts [`Provisioner::prepare`].
    pub(crate) fn abandon(&mut self, next: Option<&Transition>, added: &[SocketAddr]) {
        added.iter().for_each(|at| self.unlisten(*at));
        if !added.is_empty() {
            // Connections that are held are rejected once the listener is closed.
            self.wait_for_reactors();
            self.registry.withdraw_listeners(added);
        }
        let added = next.into_iter().flat_map(|next| next.stores.without(&self.stores));
        added.for_each(|store| self.detach(store));
    }

    /// Attaches the devices that `next` adds to every ring; all or none.
    ///
    /// # Errors
    /// One sentence about the device that a ring rejects.
    pub(crate) fn attach_new(&self, next: &Transition) -> Result<(), Fatal> {
        let added: Vec<_> = next.stores.without(&self.stores).collect();
        for (index, store) in added.iter().enumerate() {
            if let Err(fatal) = self.attach(store) {
                added[..=index].iter().for_each(|store| self.detach(store));
                return Err(fatal);
            }
        }
        Ok(())
    }

    /// Activates `next` and publishes it. Hosts of removed subsystems are disconnected before their
    /// devices are closed. Returns one line for each new size of a device.
    pub(crate) fn adopt(&mut self, next: Transition, gone: Vec<Nqn>) -> Vec<String> {
        let Transition { subsystems: configs, mut stores, catalogs } = next;
        let directory =
            |nqn: &Nqn| Some(&configs.iter().find(|s| s.nqn == *nqn)?.managed.as_ref()?.directory);
        let is_kept = |nqn: &Nqn, open: &Catalog| {
            directory(nqn).is_some_and(|directory| directory == open.directory())
        };
        // While another directory is pending, requests for the old one are rejected.
        let (kept, closed): (Catalogs, Catalogs) =
            mem::take(&mut self.catalogs).into_iter().partition(|(nqn, open)| is_kept(nqn, open));
        self.catalogs = kept;
        let places = closed.values().map(Catalog::place);
        self.closed.extend(places.filter(|place| !place.is_written()).cloned());
        self.close(closed);
        self.catalogs.extend(catalogs);
        stores.keep();
        let lines = stores.resize();
        stores.set_faults(&configs);
        let mut subsystems = Vec::new();
        for config in &configs {
            let running = self.registry.subsystem(&config.nqn);
            if running.is_none() {
                self.usage_store.switched_on(&config.nqn);
            }
            let subsystem = self.snapshot(&stores, config);
            // A start reports all of them at once.
            if !self.stores.is_starting() {
                warn_of_torn(&subsystem, running.as_deref());
            }
            if running.is_none_or(|running| *running != subsystem) {
                subsystems.push(Arc::new(subsystem));
            }
        }
        self.usage_store.serve(&configs.iter().map(|config| config.nqn).collect());
        self.restore_hosts(&stores);
        stores.remember(&configs);
        self.change(subsystems, gone);
        let old = mem::replace(&mut self.stores, stores);
        format_task::interrupt(old.without(&self.stores));
        old.without(&self.stores).for_each(|store| self.detach(store));
        self.report_pending();
        lines
    }

    /// Closes catalogs, which unlocks their directories: their server may not answer.
    fn close(&self, catalogs: Catalogs) {
        if !catalogs.is_empty() {
            self.stores.opening().drop_within(CLOSE_TIMEOUT, catalogs);
        }
    }

    /// Restores which hosts have to learn of a failed flush of the devices that are served from now
    /// on: this was lost with the device, except what is persisted.
    fn restore_hosts(&self, stores: &DeviceTable) {
        for (place @ (nqn, nsid), store) in stores.named() {
            let uuid = store.uuid();
            if self.stores.store(nqn, nsid).is_some_and(|old| old.uuid() == uuid) {
                continue;
            }
            let is_trusted = store.monitored.health().sync_failure().is_none();
            let hosts = stores.trust.hosts(uuid);
            self.registry.restore_hosts((place, uuid.into_bytes()), &hosts, is_trusted);
            if !store.monitored.is_trusted() {
                self.registry.presume_written(&nqn, nsid);
            }
        }
    }

    /// Activates a configuration with the devices and subsystems of the previous one.
    pub(crate) fn adopt_listeners(&self) {
        self.change(Vec::new(), Vec::new());
        self.report_pending();
    }

    /// Replaces the subsystems of the registry, and its listeners by the configured ones.
    fn change(&self, subsystems: Vec<Arc<Subsystem>>, gone: Vec<Nqn>) {
        let listeners = Some(self.reachable());
        let discovery = Some(self.config.discovery.clone());
        self.registry.change(Change { listeners, discovery, subsystems, gone, lost: false });
        self.shared.set_slow(Duration::from_millis(self.config.observe.slow_ms.into()));
    }

    /// The devices that are not trusted.
    pub(crate) fn device_trust(&self) -> Arc<DeviceTrust> {
        Arc::clone(&self.stores.trust)
    }

    /// Retries to write the records of served files, if that has failed.
    pub(crate) fn remember_again(&mut self) {
        if self.stores.has_unwritten_records() {
            let subsystems = self.merged(None);
            self.stores.remember(&subsystems);
        }
    }

    /// Publishes a subsystem whose devices have changed.
    fn publish_again(&self, nqn: &Nqn) {
        let config = self.merged(None).into_iter().find(|config| config.nqn == *nqn);
        // The subsystem may have been removed meanwhile.
        let Some((config, old)) = config.zip(self.registry.subsystem(nqn)) else { return };
        let subsystem = self.snapshot(&self.stores, &config);
        warn_of_torn(&subsystem, Some(&old));
        let subsystems = vec![Arc::new(subsystem)];
        self.registry.change(Change { subsystems, ..Change::default() });
    }

    fn snapshot(&self, stores: &DeviceTable, config: &SubsystemConfig) -> Subsystem {
        let mut subsystem = stores.subsystem(config, self.usage_store.usage(&config.nqn));
        subsystem.management = self.management(stores, config, &subsystem);
        subsystem
    }

    /// Returns the configured subsystems with host-created namespaces, including `made`, whose file
    /// was just created.
    fn merged(&self, made: Option<Place>) -> Vec<SubsystemConfig> {
        let mut subsystems = self.config.subsystems.clone();
        for subsystem in &mut subsystems {
            let nqn = subsystem.nqn;
            if let Some(catalog) = self.catalogs.get(&nqn) {
                // Files that existed at the last probe: another probe may hang.
                catalog.merge_into(subsystem, |nsid, image| {
                    self.stores.serves((nqn, nsid), image)
                        || self.stores.why_pending(nqn, nsid).is_some()
                        || made == Some((nqn, nsid))
                });
            }
        }
        subsystems
    }

    /// Returns the namespace management data for hosts that may manage a subsystem.
    fn management(
        &self,
        stores: &DeviceTable,
        config: &SubsystemConfig,
        made: &Subsystem,
    ) -> Option<Arc<Management>> {
        let record = self.catalogs.get(&config.nqn)?.record();
        // A configured namespace with the same id, or a lower highest id, is a decision of the
        // administrator.
        let is_wanted = |nsid: &u32, uuid| {
            let mut same_id = config.namespaces.iter().filter(|n| n.nsid == *nsid);
            *nsid <= config.offer.max_nsid && same_id.all(|n| n.uuid == uuid)
        };
        let absent = record.entries.iter().filter(|(nsid, entry)| {
            is_wanted(nsid, entry.uuid) && stores.store(config.nqn, **nsid).is_none()
        });
        let absent = absent.map(|(&nsid, entry)| UnavailableNamespace {
            nsid,
            entry: entry.clone(),
            is_pending: stores.why_pending(config.nqn, nsid).is_some(),
        });
        let allocated = record.entries.iter().filter_map(|(&nsid, entry)| {
            let namespace = made.namespace(nsid).ok()?;
            let its_own = namespace.uuid == entry.uuid.into_bytes();
            let (namespace, hosts) = (namespace.clone(), entry.hosts.clone());
            its_own.then_some(Allocated { namespace, hosts })
        });
        Some(Arc::new(Management {
            grant: config.managed.as_ref()?.grant(),
            allocated: allocated.collect(),
            absent: absent.collect(),
            used_bytes: record.used_bytes(),
            images: record.image_names(),
        }))
    }

    /// Opens a listener, or makes it pending.
    ///
    /// # Errors
    /// One sentence with the reason.
    pub(crate) fn listen(&mut self, at: SocketAddr, missing: Missing) -> Result<(), Fatal> {
        match self.try_listening(at) {
            Err(ListenError::Missing(why)) if missing == Missing::Wait => {
                self.pending_listeners.insert(at, why);
                Ok(())
            }
            outcome => outcome.map_err(|error| Fatal(format!("listener {at}: {error}"))),
        }
    }

    /// Closes a listener, pending or not.
    pub(crate) fn unlisten(&mut self, at: SocketAddr) {
        self.pending.forget(at);
        if self.pending_listeners.remove(&at).is_none() {
            self.registry.reactor(0).send(Message::Unlisten(at));
            info!(%at, "no longer listening");
        }
    }

    /// Publishes the listeners that hosts can reach, and the pending ones.
    pub(crate) fn publish(&mut self) {
        let listeners = Some(self.reachable());
        self.registry.change(Change { listeners, ..Change::default() });
        self.report_pending();
    }

    /// Makes listeners pending whose RDMA device was removed.
    pub(crate) fn add_lost_listeners(&mut self) {
        let lost = self.pending.take_lost();
        let lost: Vec<_> = lost.into_iter().filter(|at| self.listens_at(at)).collect();
        if lost.is_empty() {
            return;
        }
        let why = "its RDMA device was removed, or the address has moved to another port or device; \
                   it is listened at again when a device has the address";
        for at in lost {
            // Also if the state of the listener has changed meanwhile.
            self.registry.reactor(0).send(Message::Unlisten(at));
            self.pending_listeners.insert(at, why.to_owned());
        }
        let listeners = Some(self.reachable());
        self.registry.change(Change { listeners, lost: true, ..Change::default() });
        self.report_pending();
    }

    fn listens_at(&self, at: &SocketAddr) -> bool {
        self.config.listeners.iter().any(|each| each.address == *at)
    }

    /// Addresses of pending listeners.
    pub(crate) fn pending_addresses(&self) -> Vec<SocketAddr> {
        self.pending_listeners.keys().copied().collect()
    }

    /// Directories whose record has to be written again, and the pool for that.
    pub(crate) fn unwritten_records(
        &mut self,
    ) -> (Vec<Arc<NamespaceDirectory>>, Arc<BlockingPool>) {
        self.closed.retain(|directory| !directory.is_written());
        let directories = self
            .catalogs
            .values()
            .map(Catalog::place)
            .chain(&self.closed)
            .filter(|directory| directory.has_unwritten_record());
        (directories.cloned().collect(), self.stores.opening())
    }

    /// The probe of pending devices.
    pub(crate) fn pending_probe(&self) -> PendingProbe {
        self.stores.pending_probe()
    }

    /// Opens a pending listener, if its address is available.
    pub(crate) fn on_address(&mut self, at: SocketAddr) {
        if !self.pending_listeners.contains_key(&at) {
            return;
        }
        match self.try_listening(at) {
            Ok(()) => drop(self.pending_listeners.remove(&at)),
            Err(error) => drop(self.pending_listeners.insert(at, error.to_string())),
        }
        self.publish();
    }

    /// Namespaces whose image has grown since it was served.
    pub(crate) fn grown_images(&self) -> Vec<Place> {
        self.stores.grown_images()
    }

    /// Opens pending devices that are available, and adopts the sizes of images.
    pub(crate) fn on_stores(&mut self, due: &[Place]) {
        let next = Transition::with_due(&self.config, &self.stores, &self.catalogs, due);
        let next = next.and_then(|next| {
            self.attach_new(&next)?;
            Ok(next)
        });
        match next {
            Ok(next)
                if next.catalogs.is_empty()
                    && next.stores.without(&self.stores).next().is_none()
                    && !next.stores.has_new_sizes() =>
            {
                // Some were available, but could not be opened.
                let Transition { subsystems, stores, .. } = next;
                self.stores.replace_pending(stores);
                self.stores.remember(&subsystems);
                self.report_pending();
            }
            Ok(next) => {
                for line in self.adopt(next, Vec::new()) {
                    info!("{line}");
                }
            }
            Err(Fatal(why)) => self.pending.report_failure(why),
        }
    }

    /// Opens a listener; connections are held until the registry has it.
    fn try_listening(&self, at: SocketAddr) -> Result<(), ListenError> {
        if let Some(why) = availability::address(at) {
            return Err(ListenError::Missing(why));
        }
        self.registry.prepare_listener(at);
        let (answer, answered) = sync_channel(1);
        self.registry.reactor(0).send(Message::Listen(at, answer));
        let failed = match answered.recv_timeout(PATIENCE) {
            Ok(Ok(())) => {
                info!(%at, "listening");
                return Ok(());
            }
            Ok(Err(error)) => match self.of_devices && !owns(&at) {
                true => ListenError::Missing(error.to_string()),
                false => ListenError::Failed(error.to_string()),
            },
            Err(_) => {
                // The reactor may read the message later.
                self.registry.reactor(0).send(Message::Unlisten(at));
                ListenError::Failed("reactor 0 does not answer".to_owned())
            }
        };
        self.registry.withdraw_listeners(&[at]);
        Err(failed)
    }

    /// Listeners that are not pending.
    fn reachable(&self) -> Vec<ListenerConfig> {
        let listeners = self.config.listeners.iter();
        listeners
            .filter(|each| !self.pending_listeners.contains_key(&each.address))
            .cloned()
            .collect()
    }

    /// Reports pending listeners, devices and directories.
    fn report_pending(&self) {
        let listeners =
            self.pending_listeners.iter().map(|(at, why)| format!("listener {at}: {why}"));
        let (held, stores): (Vec<_>, Vec<_>) =
            self.stores.pending().iter().partition(|each| each.is_held);
        let stores = stores.iter().map(|each| format!("{}: {}", each.place, each.why));
        let held = held.iter().map(|each| {
            format!("{}: {}; it is served after a repair and a reload", each.place, each.why)
        });
        self.pending.set(listeners.chain(stores).collect(), held.collect());
    }

    /// Returns when every reactor has the published state.
    pub(crate) fn wait_for_reactors(&self) {
        wait_for_reactors(MessageBarrier::send(self.registry.reactors()));
    }

    fn attach(&self, store: &ServedDevice) -> Result<(), Fatal> {
        let (id, backing) = (store.monitored.id, store.monitored.backing());
        let name = backing.name();
        for (index, reactor) in self.registry.reactors().iter().enumerate() {
            let (answer, answered) = sync_channel(1);
            reactor.send(Message::Attach(id, Arc::clone(&backing), answer));
            match answered.recv_timeout(PATIENCE) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(Fatal(format!("{name} cannot be served: {error}"))),
                Err(_) => return Err(Fatal(format!("reactor {index} does not answer"))),
            }
        }
        info!(store = name, blocks = backing.blocks(), "backing store opened");
        self.monitor.add(Arc::clone(&store.monitored));
        Ok(())
    }

    fn detach(&self, store: &ServedDevice) {
        self.monitor.remove(&store.monitored);
        for reactor in self.registry.reactors() {
            reactor.send(Message::Detach(store.monitored.id));
        }
    }
}

/// Logs which namespaces have blocks that a power failure may tear, and had none before.
fn warn_of_torn(new: &Subsystem, old: Option<&Subsystem>) {
    torn::of_new(new, old).iter().for_each(|sentence| warn!("{sentence}"));
}

/// Returns when every reactor has passed the barrier: a completion must not contradict what was
/// published.
fn wait_for_reactors(barrier: MessageBarrier) {
    for reactor in barrier.wait(PATIENCE) {
        warn!(reactor, "does not answer");
    }
}

#[cfg(test)]
mod tests;
