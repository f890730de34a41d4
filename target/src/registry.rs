//! Who may connect to what, and who is: subsystems, listeners, associations, and how busy each
//! reactor is. Locked when a queue connects or closes and when the configuration changes; never
//! on I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Instant;

use nvme::auth::PrivateKey;
use nvme::fabrics::{
    CNTLID_DYNAMIC, CNTLID_MAX, CNTLID_STATIC, Connect, ConnectData, InvalidParameter,
};
use nvme::reservation::NotificationType;
use nvme::{Nqn, Status};
use zeroize::Zeroizing;

use crate::association::{Association, next_id};
use crate::auth::{Demand, Keyring, Start, Throttle, Worker};
use crate::command::discovery::{Record, Subtype};
use crate::command::fabrics::Refusal;
use crate::config::ListenerConfig;
use crate::mailbox::{Mail, Sender};
use crate::power::PowerMeter;
use crate::recall::{Errand, Recall};
use crate::reservation::keeper::{Ask, Word};
use crate::reservation::{Fence, HostId, Reservation};
use crate::subsystem::{Namespace, Subsystem};

/// Admission's answer for an admin queue.
#[derive(Debug)]
pub struct Admission {
    /// The new association.
    pub association: Arc<Association>,
    /// What it connects to; none for discovery.
    pub subsystem: Option<Arc<Subsystem>>,
    /// The host must prove itself before anything else.
    pub authenticate: bool,
}

/// The shared book of the target.
#[derive(Debug)]
pub struct Registry {
    book: Mutex<Book>,
    reactors: Vec<Sender>,
    /// Receive buffers in use on each reactor, for placing the next queue.
    loads: Vec<AtomicU32>,
    /// Receive buffers that I/O queues may use on each reactor.
    receives: u32,
    /// Most associations at once.
    controllers: usize,
    /// The way to who keeps the reservations.
    keeper: Option<mpsc::Sender<Word>>,
    /// Who does the arithmetic of authentication.
    pub worker: Worker,
    /// Since when the target has power.
    pub power: PowerMeter,
}

#[derive(Debug, Default)]
struct Book {
    subsystems: BTreeMap<Nqn, Arc<Subsystem>>,
    listeners: Vec<ListenerConfig>,
    generation: u64,
    associations: HashMap<u64, Entry>,
    last_cntlid: u16,
    keyring: Arc<Keyring>,
    throttle: Throttle,
    /// The sequence number of the last challenge.
    seqnum: u32,
}

#[derive(Debug)]
struct Entry {
    association: Arc<Association>,
    qids: BTreeSet<u16>,
    /// Its host must prove itself.
    authenticate: bool,
}

impl Registry {
    /// An empty book for these reactors, with room for `controllers` associations at once and
    /// `receives` buffers for I/O queues on each reactor.
    #[must_use]
    pub fn new(reactors: Vec<Sender>, controllers: u16, receives: u32) -> Registry {
        let loads = reactors.iter().map(|_| AtomicU32::new(0)).collect();
        let controllers = controllers.into();
        Registry {
            book: Mutex::default(),
            reactors,
            loads,
            receives,
            controllers,
            keeper: None,
            worker: Worker::default(),
            power: PowerMeter::default(),
        }
    }

    /// With who keeps the reservations. Without one, none can be changed.
    #[must_use]
    pub fn with_keeper(self, keeper: mpsc::Sender<Word>) -> Registry {
        Registry { keeper: Some(keeper), ..self }
    }

    /// With what is known of earlier times. Without, this is the first time that it has power.
    #[must_use]
    pub fn with_power(self, power: PowerMeter) -> Registry {
        Registry { power, ..self }
    }

    /// Admits an admin queue of a host that reached us at `local`.
    ///
    /// # Errors
    /// The exact refusal, as the documents want it.
    pub fn connect_admin(
        &self,
        data: &ConnectData,
        local: SocketAddr,
    ) -> Result<Admission, Refusal> {
        if !matches!(data.cntlid, CNTLID_DYNAMIC | CNTLID_STATIC) {
            return Err(Refusal::parameter(InvalidParameter::CNTLID));
        }
        let (subnqn, host) = names(data)?;
        let mut book = self.lock();
        let subsystem = match subnqn == Nqn::DISCOVERY {
            true => None,
            false => Some(book.exposed(&subnqn, &host)?),
        };
        let authenticate = book.demand(&host, &subnqn)?;
        // Discovery controllers have a budget of their own: they must not keep disks away.
        let discovery = subnqn == Nqn::DISCOVERY;
        let alike = |e: &&Entry| (e.association.subsystem == Nqn::DISCOVERY) == discovery;
        if book.associations.values().filter(alike).count() >= self.controllers {
            return Err(Status::CONNECT_CONTROLLER_BUSY.into());
        }
        // Whoever only claims a name must not keep those away who can prove it.
        let claims = |e: &&Entry| alike(e) && e.authenticate && !e.association.is_proved();
        let half = self.controllers.div_ceil(2);
        if authenticate && book.associations.values().filter(claims).count() >= half {
            return Err(Status::CONNECT_CONTROLLER_BUSY.into());
        }
        let cntlid = book.free_cntlid(&subnqn)?;
        let states = ListenerConfig::of(&book.listeners, local).map(|l| l.ana).unwrap_or_default();
        let association = Association::new(next_id(), cntlid, subnqn, host, data.hostid);
        let association = Arc::new(association.via(local, &states));
        // No queue of its own can ask before this is set, and every later change finds it.
        subsystem.iter().for_each(|subsystem| bar(&association, &subsystem.namespaces));
        let entry =
            Entry { association: Arc::clone(&association), qids: BTreeSet::new(), authenticate };
        book.associations.insert(association.id, entry);
        Ok(Admission { association, subsystem, authenticate })
    }

    /// Admits an I/O queue of an existing association.
    ///
    /// # Errors
    /// The exact refusal, as the documents want it.
    pub fn connect_io(&self, connect: &Connect, data: &ConnectData) -> Result<Admission, Refusal> {
        let (subnqn, host) = names(data)?;
        let mut book = self.lock();
        let subsystem = match subnqn == Nqn::DISCOVERY {
            true => None,
            false => Some(book.exposed(&subnqn, &host)?),
        };
        let known = |e: &&mut Entry| {
            let a = &e.association;
            a.cntlid == data.cntlid && a.subsystem == subnqn && a.host == host && !a.is_closed()
        };
        let entry = book
            .associations
            .values_mut()
            .find(known)
            .ok_or(Refusal::parameter(InvalidParameter::CNTLID))?;
        if entry.association.host_id != data.hostid {
            return Err(Refusal::parameter(InvalidParameter::HOSTID));
        }
        let granted = entry.association.granted_queues();
        // A discovery controller has no I/O queues at all.
        if subsystem.is_none() || !entry.association.is_ready() || connect.qid > granted {
            return Err(Refusal::parameter(InvalidParameter::QID));
        }
        if !entry.qids.insert(connect.qid) {
            return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr().into());
        }
        entry.association.count_io_queue(true);
        let (association, authenticate) = (Arc::clone(&entry.association), entry.authenticate);
        Ok(Admission { association, subsystem, authenticate })
    }

    /// An I/O queue has closed and all its work is home.
    pub fn io_closed(&self, association: &Association, qid: u16) {
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

    /// What discovery tells a host that reached us at `local`: generation and records.
    #[must_use]
    pub fn discovery(&self, host: &Nqn, local: SocketAddr) -> (u64, Vec<Record>) {
        let book = self.lock();
        let mut records = Vec::new();
        for (index, listener) in book.listeners.iter().enumerate() {
            let Some(address) = reachable(listener.address, local) else { continue };
            let port_id = index as u16 + 1;
            let mut add = |subtype, nqn| records.push(Record { subtype, nqn, address, port_id });
            if address == local {
                add(Subtype::CURRENT_DISCOVERY, Nqn::DISCOVERY);
            }
            for subsystem in book.subsystems.values().filter(|s| s.admits(host)) {
                add(Subtype::NVM, subsystem.nqn);
            }
        }
        (book.generation, records)
    }

    /// Publishes a new or changed subsystem to everyone.
    pub fn publish(&self, subsystem: Arc<Subsystem>) {
        {
            let mut book = self.lock();
            let old = book.subsystems.insert(subsystem.nqn, Arc::clone(&subsystem));
            let same_hosts = |old: &Arc<Subsystem>| {
                old.allow_any_host == subsystem.allow_any_host && old.hosts == subsystem.hosts
            };
            if !old.as_ref().is_some_and(same_hosts) {
                book.generation += 1;
            }
            for entry in book.associations.values() {
                let a = &entry.association;
                if a.subsystem == subsystem.nqn && !subsystem.admits(&a.host) {
                    a.close();
                }
                if a.subsystem == subsystem.nqn {
                    bar(a, &subsystem.namespaces);
                }
            }
        }
        for reactor in &self.reactors {
            reactor.send(Mail::Subsystem(Arc::clone(&subsystem)));
            reactor.send(Mail::DiscoveryChanged);
        }
    }

    /// Withdraws a subsystem: its hosts are disconnected.
    pub fn withdraw(&self, nqn: &Nqn) {
        {
            let mut book = self.lock();
            book.subsystems.remove(nqn);
            book.generation += 1;
            for entry in book.associations.values() {
                if entry.association.subsystem == *nqn {
                    entry.association.close();
                }
            }
        }
        for reactor in &self.reactors {
            reactor.send(Mail::DiscoveryChanged);
        }
    }

    /// Sets the listeners: the addresses that discovery names, and how well groups of namespaces
    /// are reached there. Hosts that came through a listener which is no longer there are
    /// disconnected, so that they try another path.
    pub fn set_listeners(&self, listeners: Vec<ListenerConfig>) {
        let moved = {
            let mut book = self.lock();
            let old = std::mem::replace(&mut book.listeners, listeners);
            for entry in book.associations.values() {
                let a = &entry.association;
                match ListenerConfig::of(&book.listeners, a.local) {
                    Some(listener) => a.reach.set(&listener.ana),
                    None if ListenerConfig::of(&old, a.local).is_some() => a.close(),
                    None => {}
                }
            }
            let addresses = |all: &[ListenerConfig]| all.iter().map(|l| l.address).collect();
            let [old, new]: [Vec<SocketAddr>; 2] = [addresses(&old), addresses(&book.listeners)];
            book.generation += u64::from(old != new);
            old != new
        };
        for reactor in self.reactors.iter().filter(|_| moved) {
            reactor.send(Mail::DiscoveryChanged);
        }
        self.wake_reactors();
    }

    /// Replaces the secrets and the rules of authentication. Hosts that must prove themselves now
    /// and have not had to, or no longer can, are disconnected; others prove themselves with the
    /// new secrets next time. Returns what has changed, one line each.
    pub fn set_keyring(&self, keyring: Keyring) -> Vec<String> {
        let changes = {
            let mut book = self.lock();
            let changes = keyring.differences(&book.keyring);
            book.keyring = Arc::new(keyring);
            for entry in book.associations.values() {
                let a = &entry.association;
                match book.keyring.demand(&a.host, &a.subsystem) {
                    Demand::Proof if !entry.authenticate => a.close(),
                    Demand::Impossible => a.close(),
                    Demand::Proof | Demand::Nothing => {}
                }
            }
            changes
        };
        self.wake_reactors();
        changes
    }

    /// What a new exchange with `host` needs; none when it has no key, or there are no random
    /// numbers to be had.
    #[must_use]
    pub fn start_exchange(&self, host: &Nqn) -> Option<Start> {
        let mut random = Zeroizing::new([0; 64 + PrivateKey::BYTES + 4]);
        getrandom::fill(&mut *random).ok()?;
        let (challenge, rest) = random.split_first_chunk()?;
        let (private, rest) = rest.split_first_chunk()?;
        let first = rest.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))?;
        let mut book = self.lock();
        let keys = book.keyring.keys(host)?;
        let last = if book.seqnum == 0 { first } else { book.seqnum };
        book.seqnum = last.wrapping_add(1).max(1);
        let (policy, seqnum) = (book.keyring.policy(), book.seqnum);
        Some(Start {
            keys,
            policy,
            challenge: *challenge,
            private: PrivateKey::new(*private),
            seqnum,
        })
    }

    /// Notes that a host at an address has not proved itself.
    pub fn note_failed_proof(&self, from: IpAddr, host: Nqn, now: Instant) {
        self.lock().throttle.note(from, host, now);
    }

    /// Whether a host at an address has failed to prove itself too often.
    #[must_use]
    pub fn is_throttled(&self, from: IpAddr, host: &Nqn, now: Instant) -> bool {
        self.lock().throttle.is_closed(from, host, now)
    }

    /// The subsystem of this name.
    #[must_use]
    pub fn subsystem(&self, nqn: &Nqn) -> Option<Arc<Subsystem>> {
        self.lock().subsystems.get(nqn).cloned()
    }

    /// How many associations there are.
    #[must_use]
    pub fn associations(&self) -> usize {
        self.lock().associations.len()
    }

    /// Hands an order to who keeps the reservations; false when there is nobody.
    #[must_use]
    pub fn ask_keeper(&self, ask: Ask) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.send(Word::Ask(ask)).is_ok())
    }

    /// Has every controller heed a reservation as it is now, if it is still served.
    pub fn apply_reservation(&self, reservation: &Arc<Reservation>) {
        let book = self.lock();
        let Some(subsystem) = book.subsystems.get(&reservation.subsystem) else { return };
        let Ok(namespace) = subsystem.namespace(reservation.nsid) else { return };
        if namespace.reservation == *reservation {
            let of = |e: &&Entry| e.association.subsystem == subsystem.nqn;
            let namespaces = std::slice::from_ref(namespace);
            book.associations.values().filter(of).for_each(|e| bar(&e.association, namespaces));
        }
    }

    /// Tells all controllers of these hosts what has become of a reservation.
    pub fn notify(&self, of: &Reservation, notices: &[(HostId, NotificationType)]) {
        if notices.is_empty() {
            return;
        }
        let notices: BTreeMap<&HostId, NotificationType> =
            notices.iter().map(|(host, kind)| (host, *kind)).collect();
        for entry in self.lock().associations.values() {
            let a = &entry.association;
            if let Some(kind) = notices.get(&a.host_id).filter(|_| a.subsystem == of.subsystem) {
                a.reservations.notify(of.nsid, *kind);
            }
        }
        self.wake_reactors();
    }

    /// Has every reactor end the commands of preempted hosts.
    pub fn fence(&self, fence: &Arc<Fence>) {
        for reactor in &self.reactors {
            reactor.send(Mail::Fence(Arc::clone(fence)));
        }
    }

    /// The wish of an association's Abort command on this reactor, with its first errand.
    #[must_use]
    pub fn recall(
        &self,
        association: u64,
        sqid: u16,
        cid: u16,
        reactor: usize,
    ) -> (Recall, Errand) {
        Recall::new(association, sqid, cid, self.reactors[reactor].clone())
    }

    /// Sends an errand to every reactor: nobody knows here which has the queue. One whose mailbox
    /// is full does not get it, and so its commands are not aborted.
    pub fn send_errand(&self, errand: Errand) {
        for reactor in &self.reactors {
            drop(reactor.try_send(Mail::Errand(errand.clone())));
        }
    }

    /// The reactor that shall serve the next queue: the one with the fewest receives in use.
    #[must_use]
    pub fn place(&self) -> usize {
        let load = |i: &usize| self.loads[*i].load(Ordering::Relaxed);
        (0..self.loads.len()).min_by_key(load).unwrap_or(0)
    }

    /// Counts a queue of `depth` receives on a reactor in or out.
    pub fn count_queue(&self, reactor: usize, depth: u16, opened: bool) {
        match opened {
            true => self.loads[reactor].fetch_add(depth.into(), Ordering::Relaxed),
            false => self.loads[reactor].fetch_sub(depth.into(), Ordering::Relaxed),
        };
    }

    /// How many I/O queues of `depth` entries one more controller may have: what there is memory
    /// for, and no more than may be half open at once, because hosts bring up all connections
    /// before the first Connect.
    #[must_use]
    pub fn room(&self, depth: u16) -> u16 {
        let left = |load: &AtomicU32| self.receives.saturating_sub(load.load(Ordering::Relaxed));
        let depth = u32::from(depth.max(1));
        let queues: u32 = self.loads.iter().map(|load| left(load) / depth).sum();
        let half = self.receives / 2 / depth * self.loads.len() as u32;
        queues.min(half).try_into().unwrap_or(u16::MAX)
    }

    /// A reactor's mailbox.
    #[must_use]
    pub fn reactor(&self, index: usize) -> &Sender {
        &self.reactors[index]
    }

    /// Makes every reactor look at what it shares.
    pub fn wake_reactors(&self) {
        for reactor in &self.reactors {
            reactor.ring();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn exposed(&self, subnqn: &Nqn, host: &Nqn) -> Result<Arc<Subsystem>, Refusal> {
        let unknown = || Refusal::parameter(InvalidParameter::SUBNQN);
        let subsystem = self.subsystems.get(subnqn).ok_or_else(unknown)?;
        match subsystem.admits(host) {
            true => Ok(Arc::clone(subsystem)),
            false => Err(Refusal::host()),
        }
    }

    /// Whether a host must prove itself; refused when it would have to and cannot.
    fn demand(&self, host: &Nqn, subnqn: &Nqn) -> Result<bool, Refusal> {
        match self.keyring.demand(host, subnqn) {
            Demand::Nothing => Ok(false),
            Demand::Proof => Ok(true),
            Demand::Impossible => Err(Refusal::host()),
        }
    }

    /// A controller id that no live controller of the subsystem has; old ones are not reused soon.
    fn free_cntlid(&mut self, subnqn: &Nqn) -> Result<u16, Refusal> {
        let live = self.associations.values().map(|e| &e.association);
        let taken: BTreeSet<u16> =
            live.filter(|a| a.subsystem == *subnqn).map(|a| a.cntlid).collect();
        for _ in 0..CNTLID_MAX {
            self.last_cntlid = self.last_cntlid % CNTLID_MAX + 1;
            if !taken.contains(&self.last_cntlid) {
                return Ok(self.last_cntlid);
            }
        }
        Err(Status::CONNECT_CONTROLLER_BUSY.into())
    }
}

/// Has a controller heed the reservations of namespaces.
fn bar(association: &Association, namespaces: &[Namespace]) {
    for namespace in namespaces {
        let barred = namespace.reservation.barred(&association.host_id);
        association.reservations.set_barred(namespace.nsid, barred);
    }
}

/// The two names of Connect data, each with its own refusal.
fn names(data: &ConnectData) -> Result<(Nqn, Nqn), Refusal> {
    let subnqn = data.subnqn().map_err(|_| Refusal::parameter(InvalidParameter::SUBNQN))?;
    let host = data.hostnqn().map_err(|_| Refusal::parameter(InvalidParameter::HOSTNQN))?;
    Ok((subnqn, host))
}

/// The address at which a host that reached us at `local` reaches `listener`: a wildcard is the
/// very address that it used, if of the same family.
fn reachable(listener: SocketAddr, local: SocketAddr) -> Option<SocketAddr> {
    if !listener.ip().is_unspecified() {
        return Some(listener);
    }
    let same = listener.is_ipv4() == local.is_ipv4();
    same.then(|| SocketAddr::new(local.ip(), listener.port()))
}

#[cfg(test)]
mod tests {
    use nvme::log::AnaState;

    use super::*;
    use crate::ana::AnaStates;
    use crate::subsystem::tests::sample;

    fn nqn(name: &str) -> Nqn {
        name.parse().unwrap()
    }

    fn registry() -> Registry {
        let registry = Registry::new(Vec::new(), 3, 0);
        registry.publish(Arc::new(sample()));
        let closed = Subsystem {
            nqn: nqn("nqn.2026-11.io.nvmfd:closed"),
            allow_any_host: false,
            hosts: [nqn("nqn.2026-11.host:friend")].into(),
            ..sample()
        };
        registry.publish(Arc::new(closed));
        registry.set_listeners(vec![at("0.0.0.0:4420").into()]);
        registry
    }

    fn data(cntlid: u16, subnqn: &str, host: &str) -> ConnectData {
        ConnectData::new([9; 16], cntlid, &nqn(subnqn), &nqn(host))
    }

    const TEST: &str = "nqn.2026-11.io.nvmfd:test";
    const CLOSED: &str = "nqn.2026-11.io.nvmfd:closed";
    const HOST: &str = "nqn.2026-11.host:a";
    const LOCAL: &str = "192.0.2.1:4420";

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    fn code(result: Result<Admission, Refusal>) -> (u16, u32, bool) {
        let refusal = result.unwrap_err();
        (refusal.status.code(), refusal.dw0, refusal.status.dnr())
    }

    #[test]
    fn an_admin_queue_is_admitted_or_told_exactly_why_not() {
        let registry = registry();
        let admin = |d: &ConnectData| registry.connect_admin(d, at(LOCAL));
        let first = admin(&data(0xFFFF, TEST, HOST)).unwrap().association;
        let second = admin(&data(0xFFFE, TEST, HOST)).unwrap().association;
        assert_ne!(first.cntlid, second.cntlid, "the same host may connect twice");
        assert_eq!(code(admin(&data(1, TEST, HOST))), (0x182, 0x10010, true));
        assert_eq!(
            code(admin(&data(0xFFFF, "nqn.2026-11.io.nvmfd:nosuch", HOST))),
            (0x182, 0x10100, true)
        );
        assert_eq!(code(admin(&data(0xFFFF, CLOSED, HOST))), (0x184, 0x10200, true));
        assert!(admin(&data(0xFFFF, CLOSED, "nqn.2026-11.host:friend")).is_ok());
        let mut nameless = data(0xFFFF, TEST, HOST);
        nameless.hostnqn_field = nvme::NqnField([b'x'; 256]);
        assert_eq!(code(admin(&nameless)), (0x182, 0x10200, true));
        nameless.subnqn_field = nvme::NqnField([b'x'; 256]);
        assert_eq!(code(admin(&nameless)), (0x182, 0x10100, true));
    }

    #[test]
    fn there_is_an_end_to_controllers_and_a_way_back() {
        let registry = registry();
        let ask = || registry.connect_admin(&data(0xFFFF, TEST, HOST), at(LOCAL));
        let first = ask().unwrap().association;
        assert!(ask().is_ok() && ask().is_ok());
        assert_eq!(code(ask()), (0x181, 0, false), "busy now, perhaps not later");
        let discovery = Nqn::DISCOVERY.to_string();
        let discovery = registry.connect_admin(&data(0xFFFF, &discovery, HOST), at(LOCAL));
        assert!(discovery.is_ok(), "its own budget");
        registry.admin_closed(&first);
        assert!(ask().is_ok());
    }

    #[test]
    fn an_io_queue_must_belong_to_a_ready_controller_of_the_same_host() {
        let registry = registry();
        let a = registry.connect_admin(&data(0xFFFF, TEST, HOST), at(LOCAL)).unwrap().association;
        let io = |qid, d: &ConnectData| {
            registry.connect_io(&Connect { qid, sqsize_z: 31, ..Connect::default() }, d)
        };
        let own = data(a.cntlid, TEST, HOST);
        assert_eq!(code(io(1, &own)), (0x182, 42, true), "not enabled");
        a.set_ready(true);
        a.grant_queues(2);
        assert!(io(1, &own).is_ok());
        assert_eq!(code(io(1, &own)), (0x00C, 0, true), "in use");
        assert_eq!(code(io(3, &own)), (0x182, 42, true), "not granted");
        assert_eq!(code(io(2, &data(a.cntlid + 1, TEST, HOST))), (0x182, 0x10010, true));
        assert_eq!(
            code(io(2, &data(a.cntlid, TEST, "nqn.2026-11.host:b"))),
            (0x182, 0x10010, true)
        );
        assert_eq!(code(io(2, &ConnectData { hostid: [1; 16], ..own })), (0x182, 0x10000, true));
        assert_eq!(a.io_queues(), 1);
        registry.io_closed(&a, 1);
        assert_eq!(a.io_queues(), 0);
        assert!(io(1, &own).is_ok(), "the id is free again");
        registry.admin_closed(&a);
        assert_eq!(code(io(2, &own)), (0x182, 0x10010, true));
        let name = Nqn::DISCOVERY.to_string();
        let discovery = registry.connect_admin(&data(0xFFFF, &name, HOST), at(LOCAL));
        let discovery = discovery.unwrap().association;
        discovery.set_ready(true);
        let beside = data(discovery.cntlid, &name, HOST);
        assert_eq!(code(io(1, &beside)), (0x182, 42, true), "discovery has no I/O queues");
        registry.admin_closed(&discovery);
        assert_eq!(registry.associations(), 0);
    }

    #[test]
    fn discovery_tells_a_host_what_it_may_use_at_the_address_it_used() {
        let registry = registry();
        let local = "192.0.2.1:4420".parse().unwrap();
        let (generation, records) = registry.discovery(&nqn(HOST), local);
        let names: Vec<_> = records.iter().map(|r| r.nqn.to_string()).collect();
        assert_eq!(names, [Nqn::DISCOVERY.to_string(), TEST.to_string()]);
        assert!(records.iter().all(|r| r.address == local));
        let (_, records) = registry.discovery(&nqn("nqn.2026-11.host:friend"), local);
        assert_eq!(records.len(), 3);
        registry.withdraw(&nqn(CLOSED));
        let (later, records) = registry.discovery(&nqn("nqn.2026-11.host:friend"), local);
        assert_eq!(records.len(), 2);
        assert!(later > generation);
        // A wildcard of the other family cannot be reached by this host.
        registry.set_listeners(vec![at("[::]:4420").into()]);
        assert!(registry.discovery(&nqn(HOST), local).1.is_empty());
    }

    #[test]
    fn new_listeners_are_told_to_those_who_watch_discovery() {
        let (sender, mailbox) = crate::mailbox::mailbox().unwrap();
        let registry = Registry::new(vec![sender], 3, 0);
        registry.set_listeners(vec![at(LOCAL).into()]);
        assert!(matches!(mailbox.take(), Some(Mail::DiscoveryChanged)));
    }

    #[test]
    fn a_path_has_the_states_of_its_listener_until_that_goes() {
        let registry = registry();
        let listener = |address, state| {
            let ana = AnaStates::all(state);
            ListenerConfig { ana, ..ListenerConfig::from(at(address)) }
        };
        let (good, bad) = (AnaState::OPTIMIZED, AnaState::INACCESSIBLE);
        let generation = || registry.discovery(&nqn(HOST), at(LOCAL)).0;
        registry.set_listeners(vec![listener(LOCAL, good), listener("192.0.2.2:4420", bad)]);
        let connect = |local| registry.connect_admin(&data(0xFFFF, TEST, HOST), at(local));
        let paths = [LOCAL, "192.0.2.2:4420", "192.0.2.3:4420"];
        let [first, second, strange] = paths.map(|local| connect(local).unwrap().association);
        let codes = || [&first, &second].map(|a| a.reach.check(1).err().map(Status::code));
        assert_eq!(codes(), [None, Some(0x302)]);
        let before = generation();
        registry.set_listeners(vec![listener(LOCAL, bad), listener("192.0.2.2:4420", good)]);
        assert_eq!(codes(), [Some(0x302), None]);
        assert_eq!(generation(), before, "the same addresses");
        registry.set_listeners(vec![listener("0.0.0.0:4420", good)]);
        assert!(!first.is_closed(), "a wildcard serves its address as well");
        registry.set_listeners(vec![listener("192.0.2.2:4420", good)]);
        assert!(first.is_closed() && !second.is_closed() && strange.is_closed());
        assert!(generation() > before);
    }

    #[test]
    fn a_host_that_is_no_longer_admitted_is_disconnected() {
        let registry = registry();
        let friend = data(0xFFFF, CLOSED, "nqn.2026-11.host:friend");
        let a = registry.connect_admin(&friend, at(LOCAL)).unwrap().association;
        let changed = Subsystem {
            hosts: BTreeSet::new(),
            ..Subsystem::clone(&registry.subsystem(&nqn(CLOSED)).unwrap())
        };
        registry.publish(Arc::new(changed));
        assert!(a.is_closed());
    }
}
