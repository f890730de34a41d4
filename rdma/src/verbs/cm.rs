//! Connections: librdmacm events, and the lifetime of a queue pair from request to `Gone`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::capture::ConnectionCapture;
use super::device::Device;
use super::ffi::{
    Api, CmEvent, CmId, CmKind, ConnectParam, DeviceKey, DeviceList, EventChannel, RcQueuePair,
};
use super::work_requests::Fifo;
use super::{DescriptorPoll, Load, Verbs};
use crate::{Event, FabricError, Fault, Incoming, Qp, QpLimits, Reason};

/// Requests that the kernel queues.
const BACKLOG: i32 = 128;
/// Maximum of connection manager events processed at once.
const EVENTS_AT_ONCE: usize = 32;
/// Maximum time of a stopped queue pair to flush. Adapters and rxe flush immediately; siw never
/// reports work that was posted between the peer's disconnect and our notice of it. After the limit
/// the queue pair is destroyed, so that no device can access its buffers, and they are returned as
/// flushed.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// Maximum time of address resolution and of route resolution.
const RESOLVE_LIMIT_MS: i32 = 2000;
/// Time for which an id is kept after our disconnect request, so that the kernel repeats a lost
/// message.
const LINGER: Duration = Duration::from_secs(5);
/// Maximum of ids that are kept.
const LINGERERS: usize = 256;

/// Phase of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
enum ConnectPhase {
    /// Resolving address or route: there is no device yet, so no queue pair, and posted work waits.
    /// The private data are for the request.
    Resolving(Vec<u8>),
    /// Our request was sent.
    Requested,
    Opened,
    Accepted,
    Up,
    Closing {
        reason: Reason,
        deadline: Instant,
        linger: bool,
    },
}

/// One queue pair.
pub(super) struct VerbsConnection {
    // Dropped before its id. None before the queue pair is created, and after it was destroyed.
    pub(super) pair: Option<RcQueuePair>,
    id: Arc<CmId>,
    /// None while the address is not resolved.
    pub(super) device: Option<Arc<Device>>,
    /// Its `reads` are those granted (or offered), not those requested.
    pub(super) limits: QpLimits,
    phase: ConnectPhase,
    /// No more work is posted to the device.
    pub(super) dead: bool,
    /// On the list of queue pairs that `flush` visits.
    pub(super) dirty: bool,
    /// What is captured of it.
    pub(super) capture: Option<Box<ConnectionCapture>>,
    /// Posted and not completed.
    pub(super) receives: u32,
    pub(super) sends: u32,
    /// Completed, and not returned yet.
    pub(super) deferred: u32,
    /// Queued and not posted to the device.
    pub(super) new_receives: Fifo,
    pub(super) new_sends: Fifo,
    /// Sends and Writes that the device has, in order: it reports the last of several.
    pub(super) posted: Fifo,
}

/// An id without its queue pair, kept until the peer confirms.
pub(super) struct ClosingConnection {
    id: Arc<CmId>,
    until: Instant,
}

/// Whether an RDMA device of this machine has the address of `addr`, whose port does not matter (for
/// an unspecified address: whether there is any device). False also without rdma-core, so it can be
/// used to choose the provider.
pub fn owns(addr: SocketAddr) -> bool {
    let Ok(api) = Api::get() else { return false };
    if addr.ip().is_unspecified() {
        return DeviceList::new(api).is_ok_and(|list| !list.contexts().is_empty());
    }
    let Ok(channel) = EventChannel::new(api) else { return false };
    let Ok(id) = CmId::new(&channel) else { return false };
    id.bind(any_port(addr)).is_ok() && id.device().is_some()
}

fn any_port(mut addr: SocketAddr) -> SocketAddr {
    addr.set_port(0);
    addr
}

/// Creates a listener, or returns an error sentence.
pub(super) fn listen(channel: &Arc<EventChannel>, at: SocketAddr) -> Result<CmId, FabricError> {
    let attempt = || {
        let id = CmId::new(channel)?;
        id.bind(at)?;
        id.listen(BACKLOG)?;
        Ok(id)
    };
    attempt().map_err(|e: Errno| {
        // The kernel has two errnos for a port in use.
        let taken = e == Errno::EADDRINUSE || (e == Errno::EADDRNOTAVAIL && owns(at));
        let why = match e {
            _ if taken => "another listener has this address and port",
            Errno::EADDRNOTAVAIL | Errno::ENODEV => {
                "no RDMA device has this address (see `rdma link`); the soft provider serves any"
            }
            Errno::EACCES => "ports below 1024 need CAP_NET_BIND_SERVICE",
            other => other.desc(),
        };
        FabricError(format!("cannot listen on {at} with verbs: {why}"))
    })
}

impl Verbs {
    /// Rejects a request. It fails only if the peer has disconnected, which has the same effect.
    pub(super) fn reject_connection(&self, mut incoming: Incoming, private_data: &[u8]) {
        if let Ok(id) = incoming.take_handle().downcast::<CmId>() {
            self.capture_reject(&incoming, &id, private_data);
            let _ = id.reject(private_data);
        }
    }

    /// Accepts a request: creates its queue pair, on the device where it arrived.
    pub(super) fn open_connection(
        &mut self,
        mut incoming: Incoming,
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        let (remote, offered) = (incoming.remote, incoming.reads);
        let failed = |what: &str, e: Errno| {
            FabricError(format!("cannot take the connection from {remote}: {what}: {}", e.desc()))
        };
        let handle = incoming.take_handle().downcast::<CmId>();
        let mut id = *handle.map_err(|_| failed("it is another provider's", Errno::EINVAL))?;
        if !id.is_on(&self.channel) {
            id.migrate(&self.channel).map_err(|e| failed("moving it to its reactor", e))?;
        }
        let key = id.device().ok_or_else(|| failed("its device was removed", Errno::ENODEV))?;
        let device = self.device(key)?;
        let limits = QpLimits {
            receives: limits.receives.max(1),
            sends: limits.sends.max(1),
            reads: device.reads(offered, limits.reads),
        };
        device.admit(limits, self.promised(Some(key)))?;
        let id = Arc::new(id);
        let pair = self.queue_pair(&id, &device, limits).map_err(|e| {
            failed(&format!("a queue pair on {}: {limits:?}", device.ability.name), e)
        })?;
        let capture = self.capture_request(&incoming, &id, &device, pair.number());
        let connection = VerbsConnection::new(id, limits, ConnectPhase::Opened);
        let (pair, device) = (Some(pair), Some(device));
        Ok(self.admit(VerbsConnection { pair, device, capture, ..connection }))
    }

    /// Starts a connection. The device is known when the address is resolved, and with it the
    /// limits of a queue pair; until then posted work waits.
    pub(super) fn request_connection(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        let limits = QpLimits {
            receives: limits.receives.max(1),
            sends: limits.sends.max(1),
            reads: limits.reads,
        };
        let attempt = || {
            let id = CmId::new(&self.channel)?;
            id.resolve_address(self.source, to, RESOLVE_LIMIT_MS)?;
            Ok(Arc::new(id))
        };
        let id = attempt().map_err(|e: Errno| {
            let why = match e {
                Errno::ENODEV | Errno::EADDRNOTAVAIL | Errno::ENETUNREACH => {
                    "no RDMA device has a way there (see `rdma link` and `ip route get`)"
                }
                other => other.desc(),
            };
            FabricError(format!("cannot connect to {to} with verbs: {why}"))
        })?;
        let phase = ConnectPhase::Resolving(private_data.to_vec());
        Ok(self.admit(VerbsConnection::new(id, limits, phase)))
    }

    /// The address is resolved, so there is a device: creates the queue pair, posts the queued
    /// work, and resolves the route.
    fn on_address(&mut self, qp: Qp) {
        if let Err(e) = self.bind(qp) {
            tracing::info!(qp = qp.0, "cannot connect: {e}");
            return self.close(qp, Reason::NotEstablished);
        }
        self.post_queued(qp);
    }

    fn bind(&mut self, qp: Qp) -> Result<(), FabricError> {
        let Some(connection) = self.connection(qp) else { return Ok(()) };
        if !matches!(connection.phase, ConnectPhase::Resolving(_)) {
            return Ok(());
        }
        let (id, limits) = (Arc::clone(&connection.id), connection.limits);
        let failed = |what: &str, e: Errno| FabricError(format!("{what}: {}", e.desc()));
        let key = id.device().ok_or_else(|| failed("its device was removed", Errno::ENODEV))?;
        let device = self.device(key)?;
        device.admit(limits, self.promised(Some(key)))?;
        let pair = self.queue_pair(&id, &device, limits).map_err(|e| {
            failed(&format!("a queue pair on {}: {limits:?}", device.ability.name), e)
        })?;
        if let Some(connection) = self.connection(qp) {
            connection.limits.reads = device.answers(limits.reads);
            connection.pair = Some(pair);
            connection.device = Some(device);
        }
        id.resolve_route(RESOLVE_LIMIT_MS).map_err(|e| failed("no route", e))
    }

    /// The route is resolved: sends the request.
    fn on_route(&mut self, qp: Qp) {
        let Some(connection) = self.connection(qp) else { return };
        let (ConnectPhase::Resolving(private_data), Some(pair)) =
            (&connection.phase, &connection.pair)
        else {
            return;
        };
        match pair.connect(private_data, connection.limits.reads) {
            Ok(()) => connection.phase = ConnectPhase::Requested,
            Err(e) => {
                tracing::info!(qp = qp.0, "cannot connect: {}", e.desc());
                self.close(qp, Reason::NotEstablished);
            }
        }
    }

    fn on_established(&mut self, qp: Qp) {
        let Some(connection) = self.connection(qp) else { return };
        if !matches!(connection.phase, ConnectPhase::Accepted | ConnectPhase::Requested) {
            return;
        }
        if connection.phase == ConnectPhase::Requested {
            connection.hasten_peer();
        }
        connection.phase = ConnectPhase::Up;
        if let Some(capture) = &connection.capture {
            capture.established();
        }
        self.ready.push_back(Event::Established(qp));
    }

    fn queue_pair(
        &mut self,
        id: &Arc<CmId>,
        device: &Device,
        limits: QpLimits,
    ) -> Result<RcQueuePair, Errno> {
        let make = |inline| {
            let QpLimits { sends, receives, .. } = limits;
            let signal_all = device.reports_all();
            let depths = super::ffi::Depths { sends, receives, inline, signal_all };
            RcQueuePair::new(id, &device.pd, &device.sent, &device.received, depths)
        };
        let pair = make(super::INLINE_BYTES).or_else(|_| make(0))?;
        self.counts.made += 1;
        Ok(pair)
    }

    fn admit(&mut self, connection: VerbsConnection) -> Qp {
        let limits = connection.limits;
        let all = self.promised(None).and(limits);
        self.flights.reserve(all.receives as usize + all.sends as usize);
        self.sends.reserve(limits.sends as usize);
        self.receives.reserve(limits.receives as usize);
        let key = connection.id.key();
        let qp = match self.vacant.pop() {
            Some(qp) => qp,
            None => {
                self.connections.push(None);
                Qp(self.connections.len() as u32 - 1)
            }
        };
        self.connections[qp.0 as usize] = Some(connection);
        self.by_id.insert(key, qp);
        qp
    }

    /// Answers the request of an opened queue pair.
    pub(super) fn accept_connection(&mut self, qp: Qp, private_data: &[u8]) {
        let Some(connection) = self.connection(qp) else { return };
        if connection.phase != ConnectPhase::Opened {
            return;
        }
        let Some(pair) = &connection.pair else { return };
        match pair.accept(private_data, connection.limits.reads) {
            Ok(()) => {
                connection.phase = ConnectPhase::Accepted;
                connection.hasten_peer();
                if let Some(capture) = &connection.capture {
                    capture.accepted(connection.limits.reads, private_data);
                }
            }
            Err(e) => {
                tracing::debug!(qp = qp.0, "cannot accept: {}", e.desc());
                self.close(qp, Reason::NotEstablished);
            }
        }
    }

    /// Processes events of the connection manager; a limited number, so that data are not delayed.
    pub(super) fn poll_connections(&mut self) {
        for _ in 0..EVENTS_AT_ONCE {
            match self.channel.next() {
                Ok(Some(event)) => self.on_event(event),
                end => {
                    if let Err(e) = end {
                        tracing::warn!("connection manager: {}", e.desc());
                    }
                    return;
                }
            }
        }
        // There may be more: continue in the next poll.
        self.descriptor_poll = DescriptorPoll::Now;
    }

    fn on_event(&mut self, event: CmEvent) {
        let qp = self.by_id.get(&event.id).copied();
        tracing::trace!(?qp, status = event.status, "connection event");
        match event.kind {
            CmKind::Request(id, param) => self.on_request(id, param),
            CmKind::AddressResolved => qp.into_iter().for_each(|qp| self.on_address(qp)),
            CmKind::RouteResolved => qp.into_iter().for_each(|qp| self.on_route(qp)),
            CmKind::Established => qp.into_iter().for_each(|qp| self.on_established(qp)),
            CmKind::Failed => {
                if let Some(qp) = qp {
                    self.close(qp, Reason::Peer);
                }
            }
            CmKind::Rejected(private_data) => {
                if let Some(qp) = qp {
                    self.close(qp, Reason::Rejected { code: event.status, private_data });
                }
            }
            CmKind::Disconnected => match qp {
                Some(qp) => self.on_disconnected(qp),
                None => self.closing_cm.retain(|closing| closing.id.key() != event.id),
            },
            CmKind::DeviceRemoval => match qp {
                Some(qp) => match self.connection(qp).and_then(|c| c.device_key()) {
                    Some(key) => self.device_lost(key, "removed"),
                    None => self.close(qp, Reason::Device),
                },
                None => {
                    self.lose_listener(event.id, "the RDMA device of this listener was removed")
                }
            },
            // As for the kernel's target: the path of a connection leads elsewhere, and requests may
            // arrive at another device.
            CmKind::AddressChanged => match qp {
                Some(qp) => self.close(qp, Reason::Device),
                None => self.lose_listener(event.id, "a bond has changed to another port"),
            },
            CmKind::Other(number) => tracing::debug!(number, "connection event ignored"),
        }
    }

    fn on_request(&mut self, id: CmId, param: ConnectParam) {
        let Some((local, remote)) = id.addresses() else {
            tracing::warn!("a connection request without addresses was rejected");
            return;
        };
        self.ready.push_back(Event::Incoming(Incoming {
            local,
            remote,
            private_data: param.private_data,
            reads: param.reads,
            handle: Box::new(id),
        }));
    }

    fn on_disconnected(&mut self, qp: Qp) {
        if let Some(connection) = self.connection(qp)
            && let ConnectPhase::Closing { linger, .. } = &mut connection.phase
        {
            *linger = false;
        }
        self.close(qp, Reason::Peer);
    }

    /// A device has failed or was removed: so have its connections. It is opened again for the next
    /// connection, if it is there.
    pub(super) fn device_lost(&mut self, key: DeviceKey, why: &str) {
        let devices = self.devices.iter_mut();
        let Some(attached) = devices.into_iter().find(|d| d.device.key() == key && !d.removed)
        else {
            return;
        };
        attached.removed = true;
        // Its notifications would never end, or never arrive.
        let _ = self.epoll.delete(attached.device.fd());
        tracing::error!(device = %attached.device.ability.name, "RDMA device lost: {why}");
        self.count_queue_pairs();
        for index in 0..self.connections.len() {
            let qp = Qp(index as u32);
            if self.connection(qp).is_some_and(|c| c.device_key() == Some(key)) {
                self.close(qp, Reason::Device);
            }
        }
        self.forget_lost(key);
    }

    /// Closes a removed device after its last connection.
    fn forget_lost(&mut self, key: DeviceKey) {
        if self.promised(Some(key)) == Load::NONE {
            self.devices.retain(|d| !(d.removed && d.device.key() == key));
        }
    }

    fn lose_listener(&mut self, id: super::ffi::IdKey, why: &str) {
        self.closing_cm.retain(|closing| closing.id.key() != id);
        let gone = self.listeners.extract_if(.., |(_, listener)| listener.key() == id);
        for (at, _) in gone {
            tracing::warn!(%at, "{why}");
            self.ready.push_back(Event::ListenerLost(at));
        }
    }

    /// Starts to end a connection, once: work that was not posted to the device completes
    /// immediately, the rest when the stopped queue pair has flushed it.
    pub(super) fn close(&mut self, qp: Qp, reason: Reason) {
        let deadline = self.now + FLUSH_LIMIT;
        let Some(connection) = self.connection(qp) else { return };
        if connection.is_closing() {
            return;
        }
        let answered = matches!(connection.phase, ConnectPhase::Accepted | ConnectPhase::Up);
        let reason = match reason {
            Reason::Peer if connection.phase != ConnectPhase::Up => Reason::NotEstablished,
            // For our reply: there is no further message of the peer about that.
            Reason::Rejected { .. } if connection.phase != ConnectPhase::Requested => {
                Reason::NotEstablished
            }
            other => other,
        };
        if answered && let Some(capture) = &connection.capture {
            capture.ended(reason == Reason::Peer);
        }
        let linger = answered && reason == Reason::Local && !connection.is_iwarp();
        connection.phase = ConnectPhase::Closing { reason, deadline, linger };
        connection.dead = true;
        // An error means that it had stopped before; the deadline covers everything else. The
        // second call is for iWARP, where a disconnect alone lets receives wait for the peer.
        if let Some(pair) = &connection.pair {
            if answered {
                let _ = pair.disconnect();
            }
            let _ = pair.stop();
        }
        self.closing.push(qp);
        self.flush_unposted(qp, Fault::Flushed);
    }

    /// Ends connections that have flushed, or whose time is over. Called at the start of a poll,
    /// when the driver has processed all events: it may have posted work in response, which
    /// completes first. So nothing can follow `Gone`.
    pub(super) fn advance_closing(&mut self) {
        let (now, mut late) = (self.now, Vec::new());
        let mut index = 0;
        while let Some(qp) = self.closing.get(index).copied() {
            let Some(connection) = self.connection(qp) else {
                self.closing.swap_remove(index);
                continue;
            };
            let under_way = connection.receives + connection.sends;
            if under_way + connection.deferred == 0 {
                // Resources of a removed device prevent the system from releasing it.
                if connection.is_lost() || self.allowance.allows(now) {
                    self.closing.swap_remove(index);
                    self.charged(|this| this.finish(qp));
                } else {
                    index += 1;
                }
                continue;
            }
            if under_way > 0 && connection.is_late(now) {
                tracing::debug!(qp = qp.0, under_way, "flushed by destroying the queue pair");
                let pair = connection.pair.take();
                connection.posted = Fifo::default();
                self.destroy(pair);
                late.push(qp);
            }
            index += 1;
        }
        // Those of a failed device all at once: each scan takes long where there are many.
        if !late.is_empty() {
            late.sort_unstable();
            for id in self.flights.of(&late) {
                self.complete_unreported(id, Err(Fault::Flushed));
            }
        }
        self.closing_cm.retain(|closing| closing.until > now);
    }

    fn destroy(&mut self, pair: Option<RcQueuePair>) {
        self.counts.destroyed += u64::from(pair.is_some());
        drop(pair);
    }

    /// Destroys a connection without remaining work.
    fn finish(&mut self, qp: Qp) {
        let slot = self.connections.get_mut(qp.0 as usize);
        let Some(connection) = slot.and_then(Option::take) else { return };
        let VerbsConnection { pair, id, device, phase, .. } = connection;
        self.by_id.remove(&id.key());
        self.destroy(pair);
        let ConnectPhase::Closing { reason, linger, .. } = phase else { return };
        if linger && self.closing_cm.len() < LINGERERS {
            self.closing_cm.push(ClosingConnection { id, until: self.now + LINGER });
        }
        if let Some(key) = device.as_ref().map(|device| device.key()) {
            drop(device);
            self.forget_lost(key);
        }
        self.ready.push_back(Event::Gone(qp, reason));
    }

    /// The next deadline of `advance_closing`.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let closing = self.closing.iter().filter_map(|qp| {
            let connection = self.connections.get(qp.0 as usize)?.as_ref()?;
            match connection.phase {
                _ if connection.receives + connection.sends == 0 => {
                    Some(self.allowance.next().max(self.now))
                }
                ConnectPhase::Closing { deadline, .. } => Some(deadline),
                _ => None,
            }
        });
        let muted = self.muted.then(|| self.allowance.next());
        let closing_cm = self.closing_cm.iter().map(|closing| closing.until);
        closing.chain(closing_cm).chain(muted).min()
    }
}

impl VerbsConnection {
    fn new(id: Arc<CmId>, limits: QpLimits, phase: ConnectPhase) -> VerbsConnection {
        VerbsConnection {
            pair: None,
            id,
            device: None,
            limits,
            phase,
            dead: false,
            dirty: false,
            capture: None,
            receives: 0,
            sends: 0,
            deferred: 0,
            new_receives: Fifo::default(),
            new_sends: Fifo::default(),
            posted: Fifo::default(),
        }
    }

    pub(super) fn device_key(&self) -> Option<DeviceKey> {
        self.device.as_ref().map(|device| device.key())
    }

    pub(super) fn is_up(&self) -> bool {
        self.phase == ConnectPhase::Up
    }

    pub(super) fn is_closing(&self) -> bool {
        matches!(self.phase, ConnectPhase::Closing { .. })
    }

    fn is_iwarp(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.ability.iwarp)
    }

    /// An optimisation: without it a peer that lacks our receives waits long.
    fn hasten_peer(&self) {
        if let Some(pair) = &self.pair
            && !self.is_iwarp()
        {
            let _ = pair.set_rnr_timer(super::RNR_TIMER);
        }
    }

    /// Ends it because its device was removed.
    fn is_lost(&self) -> bool {
        matches!(self.phase, ConnectPhase::Closing { reason: Reason::Device, .. })
    }

    fn is_late(&self, now: Instant) -> bool {
        matches!(self.phase, ConnectPhase::Closing { deadline, .. } if now >= deadline)
    }
}
