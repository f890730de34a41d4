//! Admission: the rules of Connect that need the registry.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Instant;

use nvme::fabrics::{CNTLID_DYNAMIC, CNTLID_STATIC, Connect, ConnectData, InvalidParameter};
use nvme::{Nqn, NqnError, Status};
use rdma::Source;

use super::eviction::Candidate;
use super::queue_grants::KEPT;
use super::{AssociationEntry, ControllerTable, DuplicateHosts, Registry, bar};
use crate::auth::{Keys, Requirement};
use crate::command::fabrics::ConnectError;
use crate::controller::Limits;
use crate::controller::association::{Association, next_id};
use crate::diag::cause::Cause;
use crate::subsystem::Subsystem;

/// Addresses and time of a Connect.
#[derive(Clone, Copy, Debug)]
pub struct ConnectContext {
    /// The address by which it reached us.
    pub local: SocketAddr,
    /// Its source address.
    pub source: IpAddr,
    /// Limits of the target.
    pub limits: Limits,
    /// Resources of its connection, as counted by `Registry::queue_opened`.
    pub held: Option<OpenQueue>,
    /// The time.
    pub now: Instant,
}

/// A queue, by what it holds.
#[derive(Clone, Copy, Debug)]
pub struct OpenQueue {
    /// The reactor that has it.
    pub reactor: usize,
    /// Number of receives.
    pub receives: u16,
}

/// Parameters of an admitted queue.
#[derive(Debug)]
pub struct Admitted {
    /// Its association; a new one for an admin queue.
    pub association: Arc<Association>,
    /// The name by which the host called the subsystem; of discovery there may be two.
    pub name: Nqn,
    /// The subsystem as its host sees it; none for discovery.
    pub subsystem: Option<Arc<Subsystem>>,
    /// Limits of its controller.
    pub limits: Limits,
    /// The host must prove itself before anything else.
    pub authenticate: bool,
    /// Number of controller resets before it.
    pub epoch: u16,
}

impl Registry {
    /// Admits an admin queue.
    ///
    /// # Errors
    /// The exact refusal, as the documents want it.
    pub fn connect_admin(
        &self,
        data: &ConnectData,
        visit: &ConnectContext,
    ) -> Result<Admitted, ConnectError> {
        if !matches!(data.cntlid, CNTLID_DYNAMIC | CNTLID_STATIC) {
            let cause = Cause::BadControllerId;
            return Err(ConnectError::parameter(cause, InvalidParameter::CNTLID));
        }
        let (name, host) = names(data)?;
        let mut table = self.lock();
        let subnqn = table.canonical(name);
        let subsystem = table.exposed(&subnqn, &host, visit.local)?;
        if table.refusing.contains_key(&subnqn) {
            return Err(ConnectError::busy(Cause::RollingBack));
        }
        let authenticate = table.demand(&host, &subnqn)?;
        let listener = table.listener(visit.local);
        let states = listener.map(|listener| listener.ana).unwrap_or_default();
        let states = states.within(&table.gateway);
        let association = Association::new(next_id(), 0, subnqn, host, data.hostid);
        let mut association = association.via(visit.local, &states);
        association.keep_alive_min_ms = listener.map_or(0, |listener| listener.keep_alive_min_ms);
        let is_named = subsystem.is_some_and(|subsystem| subsystem.hosts.contains(&host));
        association.anonymous = !authenticate && !is_named;
        let source = Source::from(visit.source);
        let newcomer = Candidate { source, now: visit.now, authenticate };
        let room_made = table.check_room(self.controllers, &association, subsystem, &newcomer)?;
        let cntlids = subsystem.map_or(&table.discovery.cntlids, |s| &s.offer.cntlids).clone();
        if let Some(subsystem) = subsystem {
            association.subsystem_usage = Arc::clone(&subsystem.usage);
        }
        let view = subsystem.map(|s| table.view(s, &host));
        let whole = subsystem.cloned();
        let mut limits = subsystem.map_or(visit.limits, |s| visit.limits.within(&s.offer));
        if let Some(subsystem) = &whole {
            association.unflushed = table.hosts.unflushed(&association, subsystem);
        }
        let of_source = (source, limits.queue_depth);
        self.check_share(&table, &association, of_source, false, visit.now)?;
        association.cntlid = table.free_cntlid(&subnqn, cntlids, &room_made.displaced)?;
        // No errors from here on.
        visit.held.iter().for_each(|held| self.queue_admitted(*held));
        // Promise no more I/O queues than there is memory for; the host takes what it gets.
        let most_io_queues = limits.io_queues;
        let unidentified = association.anonymous.then_some(source);
        limits.io_queues = self.grant(&table, limits, unidentified, visit.now);
        let association = Arc::new(association);
        // No queue of its own can query this before it is set, and every later change finds it. The
        // host may be permitted to delete a namespace that it does not see, so those count as well.
        whole.iter().for_each(|subsystem| bar(&association, &subsystem.namespaces));
        let claimed = if authenticate { table.claims.note(source, visit.now) } else { visit.now };
        let entry = AssociationEntry {
            association: Arc::clone(&association),
            qids: BTreeSet::new(),
            authenticate,
            view: view.clone(),
            limits,
            most_io_queues,
            source: visit.source,
            since: visit.now,
            claimed,
            kept_until: visit.now + KEPT,
        };
        if !room_made.is_empty() {
            room_made.end(&table, &newcomer);
            self.wake_reactors();
        }
        table.associations.insert(association.id, entry);
        let epoch = association.epoch();
        Ok(Admitted { association, name, subsystem: view, limits, authenticate, epoch })
    }

    /// Admits an I/O queue of an existing association.
    ///
    /// # Errors
    /// The exact refusal, as the documents want it.
    pub fn connect_io(
        &self,
        connect: &Connect,
        data: &ConnectData,
        visit: &ConnectContext,
    ) -> Result<Admitted, ConnectError> {
        let (name, host) = names(data)?;
        let mut table = self.lock();
        let subnqn = table.canonical(name);
        table.exposed(&subnqn, &host, visit.local)?;
        let known = |e: &&AssociationEntry| {
            let a = &e.association;
            // All queues of a controller are at one port.
            let here = a.local == visit.local;
            here && a.cntlid == data.cntlid
                && a.subsystem == subnqn
                && a.host == host
                && !a.is_closed()
        };
        // A host without authentication could have connected with an admin queue as well.
        let is_late = matches!(table.keyring.demand(&host, &subnqn), Requirement::Nothing);
        let unknown = || ConnectError { is_late, ..unknown_controller() };
        let entry = table.associations.values().find(known).ok_or_else(unknown)?;
        if entry.association.host_id != data.hostid {
            return Err(ConnectError::parameter(Cause::OtherHostId, InvalidParameter::HOSTID));
        }
        let granted = entry.granted_queues();
        // Before anything that a reset ends.
        let epoch = entry.association.epoch();
        // A discovery controller has no I/O queues at all.
        let refused = ConnectError::parameter(Cause::BadQueueId, InvalidParameter::QID);
        if entry.view.is_none() || connect.qid > granted {
            return Err(refused);
        }
        if !entry.association.is_ready() {
            return Err(refused.without_dnr());
        }
        if connect.sqsize_z >= entry.limits.queue_depth {
            return Err(ConnectError::parameter(Cause::BadQueueSize, InvalidParameter::SQSIZE));
        }
        let of_source = (entry.source(), entry.limits.queue_depth);
        let is_promised = entry.kept_queues(visit.now) > 0;
        self.check_share(&table, &entry.association, of_source, is_promised, visit.now)?;
        let id = entry.association.id;
        let entry = table.associations.get_mut(&id).ok_or_else(unknown)?;
        // Associations that only claim the name do not obstruct one that has authenticated.
        let is_free = match entry.authenticate {
            true => !entry.qids.contains(&connect.qid),
            false => entry.take(connect.qid),
        };
        if !is_free {
            return Err(queue_in_use());
        }
        let (association, authenticate) = (Arc::clone(&entry.association), entry.authenticate);
        if let (false, Some(held)) = (authenticate, visit.held) {
            self.queue_admitted(held);
        }
        let (subsystem, limits) = (entry.view.clone(), entry.limits);
        Ok(Admitted { association, name, subsystem, limits, authenticate, epoch })
    }

    /// A host has authenticated on an I/O queue, which has its id from now on; `epoch`: the number
    /// of resets before its Connect.
    ///
    /// # Errors
    /// The queue must close: another one had authenticated before, or its controller was reset or
    /// removed.
    pub fn io_proved(
        &self,
        association: &Association,
        qid: u16,
        epoch: u16,
        held: Option<OpenQueue>,
    ) -> Result<(), ConnectError> {
        let mut table = self.lock();
        let entry = table.associations.get_mut(&association.id);
        let is_there = !association.is_closed() && association.epoch() == epoch;
        let Some(entry) = entry.filter(|_| is_there) else { return Err(unknown_controller()) };
        if !entry.take(qid) {
            return Err(queue_in_use());
        }
        held.iter().for_each(|held| self.queue_admitted(*held));
        association.note_proof();
        Ok(())
    }

    /// Whether a host has a key that it can prove.
    pub fn has_key(&self, host: &Nqn) -> bool {
        self.lock().keyring.keys(host).is_some()
    }

    /// The number of this key among those that the host had during its association, as counted by
    /// [`Association::key_changes`]; none for an earlier one.
    pub(crate) fn key_number(&self, association: &Association, keys: &Keys) -> Option<u32> {
        // No key is replaced meanwhile, because the lock is held.
        let table = self.lock();
        let current = table.keyring.keys(&association.host)?;
        current.host.is(&keys.host).then(|| association.key_changes())
    }

    /// A host has authenticated, so the policy for duplicate hosts applies now: an unauthenticated
    /// claim ends no association.
    pub fn proved(&self, association: &Association) {
        let closed = {
            let mut table = self.lock();
            if association.is_closed() {
                return;
            }
            if let Some(from) = table.associations.get(&association.id).map(|entry| entry.source) {
                table.claims.forget(from.into());
                table.throttle.note_proof(from, association.host);
            }
            association.set_proved();
            association.note_proof();
            let Some(subsystem) = table.subsystems.get(&association.subsystem) else { return };
            let others: Vec<_> = table.duplicates(association).collect();
            match subsystem.offer.duplicates {
                DuplicateHosts::Replace => {
                    others.iter().for_each(|old| old.end(Cause::Replaced));
                }
                DuplicateHosts::Refuse if !others.is_empty() => {
                    association.end(Cause::DuplicateHost);
                }
                DuplicateHosts::Refuse | DuplicateHosts::Allow => {}
            }
            !others.is_empty()
        };
        if closed {
            self.wake_reactors();
        }
    }

    /// Another host, by name, that uses the same subsystem with the same host identifier, by which
    /// reservations know it.
    pub fn twin(&self, association: &Association) -> Option<Nqn> {
        let is_twin = |a: &Association| {
            a.host != association.host
                && a.host_id == association.host_id
                && a.subsystem == association.subsystem
        };
        let table = self.lock();
        let settled = table.associations.values().filter(|e| e.view.is_some() && !e.is_claim());
        let mut hosts = settled.map(|e| &e.association).filter(|a| is_twin(a) && !a.is_closed());
        hosts.next().map(|a| a.host)
    }
}

impl AssociationEntry {
    /// Its source, for fair shares.
    pub(super) fn source(&self) -> Source {
        self.source.into()
    }

    /// Its host has yet to prove itself.
    pub(super) fn is_claim(&self) -> bool {
        self.authenticate && !self.association.is_proved()
    }

    /// Its host is not identified, and it has no I/O queues.
    pub(super) fn is_idle_stranger(&self) -> bool {
        self.association.anonymous && self.association.io_queues() == 0
    }

    /// An I/O queue has this id from now on, unless another one has it.
    fn take(&mut self, qid: u16) -> bool {
        let is_free = self.qids.insert(qid);
        if is_free {
            self.association.count_io_queue(true);
        }
        is_free
    }
}

impl ControllerTable {
    /// The one name by which the registry knows discovery.
    fn canonical(&self, name: Nqn) -> Nqn {
        if name == self.discovery.nqn { Nqn::DISCOVERY } else { name }
    }

    /// The subsystem of this name, if the host may use it through its listener; none for discovery.
    fn exposed(
        &self,
        subnqn: &Nqn,
        host: &Nqn,
        local: SocketAddr,
    ) -> Result<Option<&Arc<Subsystem>>, ConnectError> {
        let listener = self.listener(local);
        if self.listeners.is_some() && listener.is_none() {
            // It is being removed or added: a host that gets Do Not Retry for a temporary condition
            // gives the path up for good. An admitted host would not be disconnected with it.
            return Err(ConnectError::busy(Cause::NotExported));
        }
        if *subnqn == Nqn::DISCOVERY {
            return Ok(None);
        }
        // At a listener that does not offer it there is no such subsystem.
        let unknown = |cause| ConnectError::parameter(cause, InvalidParameter::SUBNQN);
        let subsystem = self.subsystems.get(subnqn);
        let subsystem = subsystem.ok_or_else(|| unknown(Cause::UnknownSubsystem))?;
        if !subsystem.offer.is_at(listener.map(|listener| listener.id)) {
            return Err(unknown(Cause::NotExported));
        }
        match subsystem.admits(host) {
            true => Ok(Some(subsystem)),
            false => Err(ConnectError::host(Cause::HostNotAllowed)),
        }
    }

    /// Whether a host must authenticate. Fails if it must and has no key.
    fn demand(&self, host: &Nqn, subnqn: &Nqn) -> Result<bool, ConnectError> {
        match self.keyring.demand(host, subnqn) {
            Requirement::Nothing => Ok(false),
            Requirement::Proof => Ok(true),
            Requirement::Impossible => Err(ConnectError::host(Cause::NoKey)),
        }
    }

    /// Other associations of the same host with the same subsystem, from the same address; without
    /// those whose host has yet to authenticate.
    pub(super) fn duplicates(&self, new: &Association) -> impl Iterator<Item = &Arc<Association>> {
        let (host, subsystem, local) = (new.host, new.subsystem, new.local);
        let (host_id, id) = (new.host_id, new.id);
        let entries = self.associations.values();
        let settled = entries.filter(|e| !e.is_claim());
        settled.map(|e| &e.association).filter(move |a| {
            a.id != id
                && a.host == host
                && a.host_id == host_id
                && a.subsystem == subsystem
                && a.local == local
                && !a.is_closed()
        })
    }

    /// The subsystem as a host sees it; one for all of its controllers.
    fn view(&self, subsystem: &Arc<Subsystem>, host: &Nqn) -> Arc<Subsystem> {
        if subsystem.is_the_same_for_all() {
            return Arc::clone(subsystem);
        }
        let of = |e: &&AssociationEntry| {
            e.association.subsystem == subsystem.nqn && e.association.host == *host
        };
        let view = self.associations.values().find(of).and_then(|e| e.view.clone());
        view.unwrap_or_else(|| subsystem.seen_by(host))
    }

    /// A controller id that no live controller of the subsystem has; used ones are not reused soon.
    /// The id of an unauthenticated association is free when that ends, because no command was
    /// executed under it. `displaced` associations are about to end.
    fn free_cntlid(
        &mut self,
        subnqn: &Nqn,
        range: RangeInclusive<u16>,
        displaced: &[Arc<Association>],
    ) -> Result<u16, ConnectError> {
        let has_one = |e: &&AssociationEntry| {
            let a = &e.association;
            let ends = a.is_closed() || displaced.iter().any(|old| old.id == a.id);
            a.subsystem == *subnqn && !(ends && e.is_claim())
        };
        let live = self.associations.values().filter(has_one);
        let taken: BTreeSet<u16> = live.map(|e| e.association.cntlid).collect();
        let last = self.last_cntlids.entry(*subnqn).or_insert(*range.end());
        let after = range.clone().filter(|id| *id > *last);
        let free = after.chain(range.clone()).find(|id| !taken.contains(id));
        let found = free.ok_or(ConnectError::busy(Cause::NoControllerId))?;
        *last = found;
        Ok(found)
    }
}

/// An I/O queue has no controller, or no longer: its host requests a new one.
fn unknown_controller() -> ConnectError {
    ConnectError::parameter(Cause::UnknownController, InvalidParameter::CNTLID).without_dnr()
}

/// An I/O queue has an id that another one has.
fn queue_in_use() -> ConnectError {
    ConnectError::new(Cause::QueueInUse, Status::COMMAND_SEQUENCE_ERROR.with_dnr())
}

/// The two names of Connect data, each with its own refusal.
fn names(data: &ConnectData) -> Result<(Nqn, Nqn), ConnectError> {
    let unnamed = |cause, field| ConnectError::parameter(cause, field);
    let (subnqn, host) = (data.subnqn(), data.hostnqn());
    let subnqn = subnqn.map_err(|_| unnamed(Cause::BadSubsystemName, InvalidParameter::SUBNQN))?;
    let host = match host {
        // SPDK's `perf` sends none. A subsystem that admits all hosts admits it; no list and no key
        // can name it.
        Err(NqnError::Empty) => Nqn::UNNAMED,
        host => host.map_err(|_| unnamed(Cause::BadHostName, InvalidParameter::HOSTNQN))?,
    };
    Ok((subnqn, host))
}
