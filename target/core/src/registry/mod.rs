//! The registry: subsystems, listeners, associations, and the load of each reactor. Locked when a
//! queue connects or closes and when the configuration changes; never on I/O.

mod connect;
mod connect_barrier;
mod discovery;
mod eviction;
mod hosts;
mod list;
mod prepared;
mod queue_grants;
mod shares;
mod shutdown;
mod unauthenticated;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use nvme::Nqn;
use nvme::auth::PrivateKey;
use nvme::reservation::NotificationType;
use nvmfd_blockdev::lock;
use zeroize::Zeroizing;

use crate::auth::{Keyring, Requirement, Start, Throttle};
use crate::controller::Limits;
use crate::controller::association::Association;
use crate::diag::cause::Cause;
use crate::message::{Message, Sender};
use crate::sched::abort::{AbortRequest, AbortToken};
use crate::sched::{Adoption, DrainBarrier, ReactorLoads, RequestPlace};
use crate::subsystem::ana::AnaStates;
use crate::subsystem::reservation::{HostId, Reservation};
use crate::subsystem::{DiscoveryConfig, DuplicateHosts, ListenerConfig, Namespace, Subsystem};

pub use connect::{Admitted, ConnectContext, OpenQueue};
pub use connect_barrier::{ConnectBarrier, ConnectedHosts};
pub use discovery::PeerListener;
pub use hosts::HostKey;
use hosts::Hosts;
pub use list::Controller;
pub use prepared::Reached;
use unauthenticated::UnauthenticatedHosts;

/// The shared table of the target.
#[derive(Debug)]
pub struct Registry {
    table: Mutex<ControllerTable>,
    reactors: Vec<Sender>,
    loads: Arc<ReactorLoads>,
    /// Receive buffers that I/O queues may use on each reactor.
    receives: u32,
    /// Maximum of associations.
    controllers: usize,
    /// Long operations shall end.
    halting: AtomicBool,
}

/// A change of the served subsystems.
#[derive(Debug, Default)]
pub struct Change {
    /// The new listeners, if they have changed.
    pub listeners: Option<Vec<ListenerConfig>>,
    /// Removed listeners have lost their device.
    pub lost: bool,
    /// The new settings of discovery, if they have changed.
    pub discovery: Option<DiscoveryConfig>,
    /// New and changed subsystems.
    pub subsystems: Vec<Arc<Subsystem>>,
    /// Subsystems that are no longer there.
    pub gone: Vec<Nqn>,
}

#[derive(Debug, Default)]
struct ControllerTable {
    subsystems: BTreeMap<Nqn, Arc<Subsystem>>,
    /// The listeners. None before they are set: then there are no connections.
    listeners: Option<Vec<ListenerConfig>>,
    /// Listeners of a change that is not committed.
    prepared: Vec<ListenerConfig>,
    /// States by which a gateway group restricts those of the listeners.
    gateway: AnaStates,
    /// The listeners of the other gateways of the group, in order.
    peers: Vec<PeerListener>,
    discovery: DiscoveryConfig,
    generation: u64,
    /// The target is about to stop: discovery reports no subsystem.
    leaving: bool,
    associations: HashMap<u64, AssociationEntry>,
    /// Subsystems that refuse new hosts, each with the number of [`ConnectBarrier`]s.
    refusing: BTreeMap<Nqn, usize>,
    hosts: Hosts,
    /// The controller id that each subsystem gave last.
    last_cntlids: BTreeMap<Nqn, u16>,
    keyring: Arc<Keyring>,
    throttle: Throttle,
    claims: UnauthenticatedHosts,
    /// The sequence number of the last challenge.
    seqnum: u32,
}

#[derive(Debug)]
struct AssociationEntry {
    association: Arc<Association>,
    qids: BTreeSet<u16>,
    /// Its host must prove itself.
    authenticate: bool,
    /// The subsystem as its host sees it; none for discovery.
    view: Option<Arc<Subsystem>>,
    /// Granted limits.
    limits: Limits,
    /// I/O queues that the target and its subsystem allow it, where there is memory for them.
    most_io_queues: u16,
    /// Its source address.
    source: IpAddr,
    /// When it was admitted.
    since: Instant,
    /// Since when hosts at its address have claimed names without proving any.
    claimed: Instant,
    /// Until when receives are reserved for I/O queues that are not connected.
    kept_until: Instant,
}

impl Registry {
    /// An empty registry for these reactors, with room for `controllers` associations and
    /// `receives` buffers for I/O queues on each reactor.
    pub fn new(reactors: Vec<Sender>, controllers: u16, receives: u32) -> Registry {
        let loads = ReactorLoads::new(reactors.len());
        let controllers = controllers.into();
        Registry {
            table: Mutex::default(),
            reactors,
            loads,
            receives,
            controllers,
            halting: AtomicBool::new(false),
        }
    }

    /// An I/O queue has closed and all its work has completed.
    pub(crate) fn io_closed(&self, association: &Association, qid: u16) {
        association.count_io_queue(false);
        if let Some(entry) = self.lock().associations.get_mut(&association.id) {
            entry.qids.remove(&qid);
        }
    }

    /// The admin queue has closed: the association is over, and so are its I/O queues.
    pub fn admin_closed(&self, association: &Association) {
        association.close();
        self.lock().associations.remove(&association.id);
        self.wake_reactors();
    }

    /// Publishes a new or changed subsystem to everyone.
    pub fn publish(&self, subsystem: Arc<Subsystem>) {
        self.change(Change { subsystems: vec![subsystem], ..Change::default() });
    }

    /// Withdraws a subsystem: its hosts are disconnected.
    pub fn withdraw(&self, nqn: &Nqn) {
        self.change(Change { gone: vec![*nqn], ..Change::default() });
    }

    /// Sets the listeners.
    pub fn set_listeners(&self, listeners: Vec<ListenerConfig>) {
        self.change(Change { listeners: Some(listeners), ..Change::default() });
    }

    /// Applies a change at once. Hosts that may not use a subsystem any more, or not through their
    /// listener, are disconnected.
    pub fn change(&self, change: Change) {
        let mut in_use = BTreeMap::new();
        let is_discovery_changed = {
            let mut table = self.lock();
            let is_discovery_changed = table.adopt(&change);
            table.generation += u64::from(is_discovery_changed);
            table.renew(&change, &mut in_use);
            is_discovery_changed
        };
        let adoption = Adoption::by(self.reactors.iter().map(Sender::waker));
        for reactor in &self.reactors {
            for subsystem in in_use.values() {
                let (subsystem, adoption) = (Arc::clone(subsystem), Arc::clone(&adoption));
                reactor.send(Message::Subsystem(subsystem, adoption));
            }
        }
        match is_discovery_changed {
            true => self.announce_discovery(),
            false => self.wake_reactors(),
        }
    }

    /// Replaces the secrets and the rules of authentication. Hosts that must authenticate now and
    /// did not have to, or whose key was removed, are disconnected; those with a new key get some
    /// time to authenticate with it. Returns the changes, one line each.
    pub fn set_keyring(&self, mut keyring: Keyring) -> Vec<String> {
        let changes = {
            let mut table = self.lock();
            keyring.revoke(table.keyring.known());
            let changes = keyring.differences(&table.keyring);
            table.replace_keyring(keyring);
            changes
        };
        self.wake_reactors();
        changes
    }

    /// Hosts have keys elsewhere: without a key here they are refused, as if theirs had been removed
    /// here. Returns those of which that was not known.
    pub fn revoke(&self, hosts: &BTreeSet<Nqn>) -> BTreeSet<Nqn> {
        let mut table = self.lock();
        let old = table.keyring.known();
        if hosts.is_subset(&old) {
            return BTreeSet::new();
        }
        let mut keyring = Keyring::clone(&table.keyring);
        keyring.revoke(hosts.iter().copied());
        let added: BTreeSet<Nqn> = keyring.known().difference(&old).copied().collect();
        if !added.is_empty() {
            table.replace_keyring(keyring);
            drop(table);
            self.wake_reactors();
        }
        added
    }

    /// Hosts that have or have had keys, to be persisted.
    pub fn keyed_hosts(&self) -> BTreeSet<Nqn> {
        self.lock().keyring.known()
    }

    /// Why it is not known which hosts have had keys, if it is not: then that list is not persisted.
    pub fn unknown_keyed_hosts(&self) -> Option<String> {
        self.lock().keyring.unknown().map(str::to_owned)
    }

    /// Inputs of a new exchange with `host`; none if it has no key, or there are no random numbers.
    #[must_use]
    pub fn start_exchange(&self, host: &Nqn) -> Option<Start> {
        let mut random = Zeroizing::new([0; 64 + PrivateKey::BYTES + 4]);
        getrandom::fill(&mut *random).ok()?;
        let (challenge, rest) = random.split_first_chunk()?;
        let (private, rest) = rest.split_first_chunk()?;
        let first = rest.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))?;
        let mut table = self.lock();
        let keys = table.keyring.keys(host)?;
        let last = if table.seqnum == 0 { first } else { table.seqnum };
        table.seqnum = last.wrapping_add(1).max(1);
        let (policy, seqnum) = (table.keyring.policy_of(host), table.seqnum);
        Some(Start {
            keys,
            policy,
            challenge: *challenge,
            private: PrivateKey::new(*private),
            seqnum,
        })
    }

    /// Records a failed authentication of a host at an address.
    pub fn note_failed_proof(&self, from: IpAddr, host: Nqn, now: Instant) {
        self.lock().throttle.note(from, host, now);
    }

    /// Whether a host at an address has failed to prove itself too often.
    pub fn is_throttled(&self, from: IpAddr, host: &Nqn, now: Instant) -> bool {
        self.lock().throttle.is_closed(from, host, now)
    }

    /// The subsystem of this name.
    pub fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        self.lock().subsystems.get(nqn).cloned()
    }

    /// The subsystem of an association as its host sees it; none for discovery.
    pub fn view(&self, association: &Association) -> Option<Arc<Subsystem>> {
        self.lock().associations.get(&association.id)?.view.clone()
    }

    /// Number of associations.
    pub fn associations(&self) -> usize {
        self.lock().associations.len()
    }

    /// The live controllers of a subsystem, by ascending id, each with its host.
    pub fn controllers_of(&self, nqn: &Nqn) -> Vec<(u16, Nqn)> {
        let table = self.lock();
        let live = table.associations.values().filter(|e| e.view.is_some());
        let live = live.map(|e| &e.association).filter(|a| a.subsystem == *nqn && !a.is_closed());
        let mut found: Vec<(u16, Nqn)> = live.map(|a| (a.cntlid, a.host)).collect();
        found.sort_unstable();
        found
    }

    /// Notifies all controllers of a change of a namespace that no new snapshot contains.
    pub fn announce(&self, nqn: &Nqn, nsid: u32) {
        for entry in self.lock().associations.values() {
            let sees = |view: &Arc<Subsystem>| view.namespace(nsid).is_ok();
            if entry.association.subsystem == *nqn && entry.view.as_ref().is_some_and(sees) {
                entry.association.changes.insert(nsid);
            }
        }
        self.wake_reactors();
    }

    /// Applies the present state of a reservation to every controller, if the namespace is still
    /// served.
    pub fn apply_reservation(&self, reservation: &Arc<Reservation>) {
        let table = self.lock();
        let Some(subsystem) = table.subsystems.get(&reservation.subsystem) else { return };
        let Ok(namespace) = subsystem.namespace(reservation.nsid) else { return };
        if namespace.reservation == *reservation {
            let of = |e: &&AssociationEntry| e.association.subsystem == subsystem.nqn;
            let namespaces = std::slice::from_ref(namespace);
            table.associations.values().filter(of).for_each(|e| bar(&e.association, namespaces));
        }
    }

    /// Assumes that all hosts have unflushed writes to a namespace.
    pub fn presume_written(&self, nqn: &Nqn, nsid: u32) {
        self.lock().hosts.of(nqn).for_each(|host| host.presume_written(nsid));
    }

    /// Hosts, to be persisted, of which the next flush to a namespace fails if its store is
    /// trusted, or would after a trust. None: it was never served.
    #[must_use]
    pub fn unreported_hosts(&self, uuid: [u8; 16], is_trusted: bool) -> Option<Vec<HostKey>> {
        self.lock().hosts.unreported(uuid, is_trusted)
    }

    /// Restores the hosts that were persisted of a namespace which is served from now on: those that
    /// do not know of a failure, and those with unflushed writes to a file whose path led elsewhere,
    /// of which nothing is lost before another file is trusted. All of them in one step: from then on
    /// the hosts are as the registry has them.
    pub fn restore_hosts(
        &self,
        (namespace, uuid): ((Nqn, u32), [u8; 16]),
        [unreported, unflushed]: &[Vec<HostKey>; 2],
        is_trusted: bool,
    ) {
        let mut table = self.lock();
        table.hosts.serve_one(namespace, uuid);
        table.hosts.restore(namespace, unflushed, false);
        table.hosts.restore(namespace, unreported, is_trusted);
    }

    /// Called before the backing store of a namespace is trusted again: makes the next flush of
    /// each host fail that has written to it, and has neither flushed nor received the failure
    /// since.
    pub fn report_lost_writes(&self, nqn: &Nqn, nsid: u32) {
        self.lock().hosts.of(nqn).for_each(|host| host.on_trust(nsid));
    }

    /// Notifies all controllers of these hosts of a change of a reservation.
    pub fn notify(&self, of: &Reservation, notices: &[(HostId, NotificationType)]) {
        if notices.is_empty() {
            return;
        }
        let notices: BTreeMap<&HostId, NotificationType> =
            notices.iter().map(|(host, kind)| (host, *kind)).collect();
        for entry in self.lock().associations.values() {
            let a = &entry.association;
            // A host that no longer sees the namespace gets no notification.
            let sees = |view: &Arc<Subsystem>| view.namespace(of.nsid).is_ok();
            let heard = a.subsystem == of.subsystem && entry.view.as_ref().is_some_and(sees);
            if let Some(kind) = notices.get(&a.host_id).filter(|_| heard) {
                a.reservations.notify(of.nsid, *kind);
            }
        }
        self.wake_reactors();
    }

    /// Passes a drain barrier to every reactor.
    pub fn fence(&self, fence: &Arc<DrainBarrier>) {
        for reactor in &self.reactors {
            reactor.send(Message::Fence(Arc::clone(fence)));
        }
    }

    /// Creates the request of an Abort command on this reactor, and its first token.
    #[must_use]
    pub fn recall(
        &self,
        association: u64,
        sqid: u16,
        cid: u16,
        reactor: usize,
    ) -> (AbortRequest, AbortToken) {
        AbortRequest::new(association, sqid, cid, self.reactors[reactor].waker())
    }

    /// Sends the token to every reactor, because the registry does not know which has the queue. A
    /// reactor whose channel is full does not get it, so its commands are not aborted.
    pub(crate) fn send_abort(&self, token: AbortToken) {
        for reactor in &self.reactors {
            drop(reactor.try_send(Message::Errand(token.clone())));
        }
    }

    /// Places a request for a queue of so many receives.
    pub(crate) fn place(&self, receives: u16) -> RequestPlace {
        self.loads.place(receives)
    }

    /// Counts a queue of `depth` receives on a reactor, which is not admitted yet.
    pub(crate) fn queue_opened(&self, held: OpenQueue) {
        self.loads.open(held.reactor, held.receives);
    }

    /// A queue is admitted, or ends without that.
    pub(crate) fn queue_admitted(&self, held: OpenQueue) {
        self.loads.admit(held.reactor, held.receives);
    }

    /// Returns receives to those available for the next queue.
    pub(crate) fn receives_returned(&self, held: OpenQueue) {
        self.loads.give_back(held.reactor, held.receives);
    }

    /// A reactor's mailbox.
    #[must_use]
    pub fn reactor(&self, index: usize) -> &Sender {
        &self.reactors[index]
    }

    /// Sets the states of ANA groups as a gateway group decides them: no listener reaches a group in
    /// a better one. Hosts are notified.
    pub fn set_gateway_states(&self, states: AnaStates) {
        {
            let mut table = self.lock();
            table.gateway = states;
            let listeners = table.listeners().to_vec();
            if !listeners.is_empty() {
                table.move_paths(&listeners, Cause::ListenerRemoved);
            }
        }
        self.wake_reactors();
    }

    /// Disconnects the hosts of an ANA group, so that what they have pending goes another path.
    pub fn end_paths(&self, group: u32, cause: Cause) {
        let has_group = |entry: &&AssociationEntry| {
            let namespaces = entry.view.as_ref().map(|view| &view.namespaces);
            namespaces.is_some_and(|all| all.iter().any(|one| one.ana_group == group))
        };
        let table = self.lock();
        let entries = table.associations.values().filter(has_group);
        entries.for_each(|entry| entry.association.end(cause));
        drop(table);
        self.wake_reactors();
    }

    /// All mailboxes, in the order of the reactors.
    pub fn reactors(&self) -> &[Sender] {
        &self.reactors
    }

    /// Makes every reactor check the shared state.
    pub fn wake_reactors(&self) {
        for reactor in &self.reactors {
            reactor.ring();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ControllerTable> {
        lock(&self.table)
    }
}

impl ControllerTable {
    /// Puts secrets and rules in force, and disconnects whom they do not admit.
    fn replace_keyring(&mut self, keyring: Keyring) {
        let old = std::mem::replace(&mut self.keyring, Arc::new(keyring));
        for entry in self.associations.values() {
            let a = &entry.association;
            let is_stale = entry.authenticate && self.keyring.differs_for(&a.host, &old);
            match self.keyring.keys(&a.host) {
                Some(_) if is_stale => a.note_key_change(),
                None if is_stale => a.end(Cause::KeyChanged),
                _ => {}
            }
            match self.keyring.demand(&a.host, &a.subsystem) {
                Requirement::Proof if !entry.authenticate => a.end(Cause::KeyChanged),
                Requirement::Impossible => a.end(Cause::KeyChanged),
                Requirement::Proof | Requirement::Nothing => {}
            }
        }
    }

    fn listeners(&self) -> &[ListenerConfig] {
        self.listeners.as_deref().unwrap_or_default()
    }

    /// The listener through which a host reached us at `local`.
    fn listener(&self, local: SocketAddr) -> Option<&ListenerConfig> {
        ListenerConfig::of(self.listeners(), local)
    }

    /// Records a change; returns whether discovery has changed.
    fn adopt(&mut self, change: &Change) -> bool {
        let mut is_discovery_changed = false;
        // After shutdown has begun, no path is announced.
        if let Some(listeners) = change.listeners.as_ref().filter(|_| !self.leaving) {
            let ports = |all: &[ListenerConfig]| -> Vec<_> {
                all.iter().map(|listener| (listener.id, listener.address)).collect()
            };
            is_discovery_changed |= ports(self.listeners()) != ports(listeners);
            self.settle_prepared(listeners);
            let gone = if change.lost { Cause::DeviceGone } else { Cause::ListenerRemoved };
            self.move_paths(listeners, gone);
        }
        if let Some(discovery) = &change.discovery {
            is_discovery_changed |= self.discovery != *discovery;
            self.discovery.clone_from(discovery);
        }
        for nqn in &change.gone {
            self.last_cntlids.remove(nqn);
            is_discovery_changed |= self.subsystems.remove(nqn).is_some();
        }
        for new in &change.subsystems {
            self.hosts.serve(new);
            let old = self.subsystems.insert(new.nqn, Arc::clone(new));
            let alike = |old: Arc<Subsystem>| {
                old.allow_any_host == new.allow_any_host
                    && old.hosts == new.hosts
                    && old.offer.listeners == new.offer.listeners
            };
            is_discovery_changed |= !old.is_some_and(alike);
        }
        is_discovery_changed
    }

    /// Sets the listeners. Hosts whose listener was removed are disconnected, so that they try
    /// another path.
    fn move_paths(&mut self, listeners: &[ListenerConfig], gone: Cause) {
        for entry in self.associations.values() {
            let a = &entry.association;
            match ListenerConfig::of(listeners, a.local) {
                Some(listener) => a.reach.set(&listener.ana.within(&self.gateway)),
                None if self.listener(a.local).is_some() => a.end(gone),
                None => {}
            }
        }
        self.listeners = Some(listeners.to_vec());
    }

    /// Brings associations up to date. The new subsystems that they use are added to `in_use`.
    fn renew(&mut self, change: &Change, in_use: &mut BTreeMap<Nqn, Arc<Subsystem>>) {
        let changed: BTreeMap<Nqn, _> = change.subsystems.iter().map(|s| (s.nqn, s)).collect();
        // All controllers of one host share what it sees.
        let mut views: BTreeMap<(Nqn, Nqn), Arc<Subsystem>> = BTreeMap::new();
        let listeners = self.listeners.as_deref().unwrap_or_default();
        for entry in self.associations.values_mut() {
            let a = &entry.association;
            let Some(old) = &entry.view else { continue };
            let new = changed.get(&a.subsystem).copied();
            let at = ListenerConfig::of(listeners, a.local).map(|listener| listener.id);
            let current = new.unwrap_or(old);
            if change.gone.contains(&a.subsystem) {
                a.end(Cause::SubsystemRemoved);
            } else if !current.admits(&a.host) {
                a.end(Cause::HostRemoved);
            } else if !current.offer.is_at(at) {
                a.end(Cause::ListenerRemoved);
            }
            let Some(new) = new else { continue };
            bar(a, &new.namespaces);
            let view = views.entry((new.nqn, a.host)).or_insert_with(|| new.seen_by(&a.host));
            entry.view = Some(Arc::clone(view));
            in_use.insert(new.nqn, Arc::clone(new));
        }
    }
}

/// Applies the reservations of namespaces to a controller.
fn bar(association: &Association, namespaces: &[Namespace]) {
    for namespace in namespaces {
        let barred = namespace.reservation.barred(&association.host_id);
        association.reservations.set_barred(namespace.nsid, barred);
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
pub mod tests;
