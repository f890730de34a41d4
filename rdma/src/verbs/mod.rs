//! rdma-core: InfiniBand, RoCE and iWARP adapters, and the kernel's own `rdma_rxe` and `siw`.
//!
//! ```text
//! post ──► flights (slab) ──► flush: one chain, one doorbell a queue ──► device
//!                                                                          │ completions
//! batch ◄── ready (software events: connections, failed work, Gone) ◄──────┴──► batch
//! ```
//!
//! Every device has two completion queues per fabric; a work request's id is its slot, so a
//! completion finds its buffer without a search. Of Sends and Writes the device reports the last of
//! some (each on iWARP, see `Device::reports_all`): a completion is 64 bytes of its memory, and on
//! software devices a lock. The region is registered once per device, for local access only: peers
//! cannot access our memory, except for the remote regions of a host, and on iWARP, whose protocol
//! requires the sink of a Read to be writable by the peer: there the exact window is registered for
//! each Read, and deregistered before its completion is returned.
//!
//! `poll` reads completion queues from memory. The connection manager costs a system call, so it is
//! polled only after `arm` (twice: before and after the sleep) and at most once a millisecond
//! otherwise; a busy loop makes no system calls of its own.

mod capture;
mod cm;
mod completions;
mod connection_budget;
mod device;
mod device_removal;
mod ffi;
#[cfg(test)]
mod tests;
mod work_requests;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

pub use cm::owns;
use cm::{ClosingConnection, VerbsConnection};
use connection_budget::{Allowance, Counts};
use device::Device;
pub use device::Load;
use ffi::{
    Access, Api, CmId, DeviceKey, DeviceList, EventChannel, IdKey, Mr, RcQueuePair, RecvChain,
    Refused, SendChain, Verb, WorkCompletions,
};
use work_requests::{Flight, FlightTable};

use crate::capture::Capture;
use crate::{
    Buf, Event, Fabric, FabricError, FabricHints, FabricStats, Fault, Incoming, Initiator, Qp,
    QpLimits, Reason, Region, RemoteRegion, Tag, Wake, Work, explained, limits,
};

/// Completions fetched at once.
const COMPLETIONS_AT_ONCE: usize = 64;
/// Interval of polling the descriptors in a loop that never sleeps.
const DESCRIPTOR_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum length of an inline message: that of an NVMe response.
const INLINE_BYTES: u32 = 64;
/// 0.64 ms, as an InfiniBand code.
const RNR_TIMER: u8 = 12;
/// Maximum of queued software events before connection requests wait in the kernel.
const READY_MOST: usize = 1024;

/// User data of the connection manager's descriptor in the epoll set; devices have their own.
const CONNECTIONS: u64 = u64::MAX;

/// When `poll` polls the descriptors next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DescriptorPoll {
    /// Armed: the next poll is the one before the sleep, the one after that polls the descriptors.
    AfterSleep,
    Now,
    /// After [`DESCRIPTOR_POLL_INTERVAL`].
    Later,
}

struct Attached {
    device: Arc<Device>,
    /// It has failed, or the system has removed it; it is closed after its last connection.
    removed: bool,
    /// Completions arrived since it was armed, so there may be a notification in its channel. Taken
    /// before the next sleep, which it would end immediately.
    announced: bool,
}

/// The provider over rdma-core, one for each reactor.
pub struct Verbs {
    // Dropped in this order: queue pairs and ids, then registrations, then devices.
    connections: Vec<Option<VerbsConnection>>,
    closing_cm: Vec<ClosingConnection>,
    listeners: Vec<(SocketAddr, CmId)>,
    by_id: HashMap<IdKey, Qp>,
    /// Events that are in no completion queue. Declared before the fields that its requests depend
    /// on.
    ready: VecDeque<Event>,
    flights: FlightTable,
    devices: Vec<Attached>,
    channel: Arc<EventChannel>,
    epoll: Epoll,
    region: Arc<Region>,
    load: Load,
    /// The capture of connections that peers request.
    capture: Option<Capture>,
    /// Where our connections come from; none: as the route says.
    source: Option<SocketAddr>,
    /// That of the smallest device.
    queue_pairs_max: u32,
    /// Handles that may be reused, and those whose `Gone` the driver may not have processed.
    vacant: Vec<Qp>,
    departed: Vec<Qp>,
    /// Queue pairs with work that is not posted to the device yet.
    dirty: Vec<Qp>,
    closing: Vec<Qp>,
    completions: WorkCompletions,
    sends: SendChain,
    receives: RecvChain,
    descriptor_poll: DescriptorPoll,
    descriptors_polled: Instant,
    now: Instant,
    /// Time budget of connection setup, and whether connection events wait for it.
    allowance: Allowance,
    muted: bool,
    next_device_check: Instant,
    counts: Counts,
}

impl std::fmt::Debug for Verbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let devices: Vec<&str> =
            self.devices.iter().map(|d| d.device.ability.name.as_str()).collect();
        f.debug_struct("Verbs")
            .field("devices", &devices)
            .field("connections", &self.connections.iter().flatten().count())
            .field("flights", &self.flights.len())
            .finish_non_exhaustive()
    }
}

impl Verbs {
    /// Opens every RDMA device and registers `region` with each, for local access only, with
    /// completion queues for `load`; connections that would exceed it are rejected. A device that
    /// fails is omitted with a warning as long as another works; a device that is added later is
    /// opened for its first connection.
    ///
    /// # Errors
    /// rdma-core is not installed, there is no device, or the memory cannot be locked.
    pub fn new(region: Arc<Region>, load: Load) -> Result<Verbs, FabricError> {
        let api = Api::get().map_err(FabricError)?;
        let channel = EventChannel::new(api).map_err(|e| no_device(Some(e)))?;
        let failed = |e: Errno| {
            FabricError(format!("cannot make an epoll instance: {}", explained(&e.into())))
        };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
        epoll
            .add(channel.fd(), EpollEvent::new(EpollFlags::EPOLLIN, CONNECTIONS))
            .map_err(failed)?;
        let now = Instant::now();
        let mut verbs = Verbs {
            connections: Vec::new(),
            closing_cm: Vec::new(),
            listeners: Vec::new(),
            by_id: HashMap::new(),
            ready: VecDeque::with_capacity(READY_MOST),
            flights: FlightTable::default(),
            devices: Vec::new(),
            channel,
            epoll,
            region,
            load,
            capture: None,
            source: None,
            queue_pairs_max: limits::QUEUE_PAIRS,
            vacant: Vec::new(),
            departed: Vec::new(),
            dirty: Vec::new(),
            closing: Vec::new(),
            completions: WorkCompletions::new(COMPLETIONS_AT_ONCE),
            sends: SendChain::default(),
            receives: RecvChain::default(),
            descriptor_poll: DescriptorPoll::Now,
            descriptors_polled: now,
            now,
            allowance: Allowance::new(now),
            muted: false,
            next_device_check: now,
            counts: Counts::default(),
        };
        verbs.attach_all(api)?;
        Ok(verbs)
    }

    /// Connects from this address, whose port does not matter; without one the route chooses.
    #[must_use]
    pub fn with_source(self, source: Option<SocketAddr>) -> Verbs {
        Verbs { source, ..self }
    }

    /// Names of the devices in use, for log lines.
    pub fn devices(&self) -> Vec<String> {
        self.devices.iter().map(|d| d.device.ability.name.clone()).collect()
    }

    fn attach_all(&mut self, api: &'static Api) -> Result<(), FabricError> {
        let list = DeviceList::new(api).map_err(|e| no_device(Some(e)))?;
        let mut first_error = None;
        for context in list.contexts() {
            if let Err(e) = self.attach(&context) {
                tracing::warn!("{e}");
                first_error.get_or_insert(e);
            }
        }
        match self.devices.is_empty() {
            true => Err(first_error.unwrap_or_else(|| no_device(None))),
            false => Ok(()),
        }
    }

    fn attach(&mut self, context: &Arc<ffi::Context>) -> Result<Arc<Device>, FabricError> {
        let device = Arc::new(Device::new(context, &self.region, self.load)?);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, device.fd().as_raw_fd() as u64);
        self.epoll
            .add(device.fd(), event)
            .map_err(|e| FabricError(format!("cannot watch completions: {}", e.desc())))?;
        self.devices.push(Attached {
            device: Arc::clone(&device),
            removed: false,
            announced: false,
        });
        self.count_queue_pairs();
        Ok(device)
    }

    /// Called when a device was added or removed.
    fn count_queue_pairs(&mut self) {
        let devices = self.devices.iter().filter(|d| !d.removed);
        let least = devices.map(|d| d.device.ability.queue_pairs).min();
        self.queue_pairs_max = least.unwrap_or(u32::MAX).min(limits::QUEUE_PAIRS);
    }

    /// The device of an id; opened if it is new.
    fn device(&mut self, key: DeviceKey) -> Result<Arc<Device>, FabricError> {
        if let Some(attached) = self.devices.iter().find(|d| d.device.key() == key) {
            return match attached.removed {
                false => Ok(Arc::clone(&attached.device)),
                true => {
                    let name = &attached.device.ability.name;
                    Err(FabricError(format!("the RDMA device {name} is being closed")))
                }
            };
        }
        let api = Api::get().map_err(FabricError)?;
        let list = DeviceList::new(api).map_err(|e| no_device(Some(e)))?;
        match list.contexts().iter().find(|context| context.key() == key) {
            Some(context) => self.attach(context),
            None => Err(no_device(None)),
        }
    }

    fn connection(&mut self, qp: Qp) -> Option<&mut VerbsConnection> {
        self.connections.get_mut(qp.0 as usize)?.as_mut()
    }

    /// Work requests promised to the connections of one device, or of all.
    fn promised(&self, on: Option<DeviceKey>) -> Load {
        let ours = |c: &&VerbsConnection| on.is_none_or(|key| c.device_key() == Some(key));
        let connections = self.connections.iter().flatten().filter(ours);
        connections.fold(Load::NONE, |load, connection| load.and(connection.limits))
    }

    /// Stops a connection after its first fault: no more work is posted, and everything posted is
    /// flushed.
    fn stop_queue_pair(&mut self, qp: Qp) {
        if let Some(connection) = self.connection(qp) {
            connection.dead = true;
            let _ = connection.pair.as_ref().map(RcQueuePair::stop);
            self.flush_unposted(qp, Fault::Flushed);
        }
    }

    /// Completes work that was not posted to the device.
    fn flush_unposted(&mut self, qp: Qp, fault: Fault) {
        while let Some(id) = self.next_unposted(qp) {
            self.complete_unreported(id, Err(fault));
        }
    }

    fn next_unposted(&mut self, qp: Qp) -> Option<u64> {
        let connection = self.connections.get_mut(qp.0 as usize)?.as_mut()?;
        let receive = self.flights.next(&mut connection.new_receives).map(|(id, _)| id);
        receive.or_else(|| self.flights.next(&mut connection.new_sends).map(|(id, _)| id))
    }

    /// Posts the queued work of one queue pair to its device.
    fn post_queued(&mut self, qp: Qp) {
        let Some(connection) = self.connections.get_mut(qp.0 as usize).and_then(Option::as_mut)
        else {
            return;
        };
        connection.dirty = false;
        let (Some(pair), Some(device)) = (&connection.pair, &connection.device) else { return };
        self.receives.clear();
        while let Some((id, flight)) = self.flights.next(&mut connection.new_receives) {
            self.receives.push(id, &device.mr, window(&flight.work));
        }
        self.sends.clear();
        let mut unregistered = None;
        while let Some((id, flight)) = self.flights.next(&mut connection.new_sends) {
            if let Err(e) = chain(&mut self.sends, id, flight, device, pair.inline(), &self.region)
            {
                unregistered = Some((id, e));
                break;
            }
        }
        let mut refused: Vec<(u64, Errno)> = unregistered.into_iter().collect();
        let mut unsure = false;
        self.counts.receives.add(self.receives.len());
        self.counts.sends.add(self.sends.len());
        if !self.receives.is_empty()
            && let Err(Refused { taken, why }) = pair.receive(&mut self.receives)
        {
            unsure |= taken.is_none();
            refused.extend(taken.iter().flat_map(|&n| self.receives.ids(n)).map(|id| (id, why)));
        }
        if !self.sends.is_empty() {
            let mut posted = usize::MAX;
            if let Err(Refused { taken, why }) = pair.send(&mut self.sends) {
                unsure |= taken.is_none();
                refused.extend(taken.iter().flat_map(|&n| self.sends.ids(n)).map(|id| (id, why)));
                posted = taken.unwrap_or(posted);
            }
            if !device.reports_all() {
                for id in self.sends.ordered_ids(posted) {
                    self.flights.enqueue(&mut connection.posted, id);
                }
            }
            if let Some(capture) = &mut connection.capture {
                for id in self.sends.ids(0).take(posted) {
                    let Some(flight) = self.flights.get(id) else { continue };
                    capture.posted(id, &flight.work, device.ability.invalidate, &self.region);
                }
            }
        }
        for (id, why) in refused {
            tracing::debug!(qp = qp.0, "work request refused: {}", why.desc());
            self.complete_unreported(id, Err(Fault::Local(why as u32)));
        }
        if unsure {
            // Work that the device may have completes only by a flush or the end of the queue pair.
            self.close(qp, Reason::Device);
        }
    }

    /// Polling the descriptors is a system call: done once after each sleep, and at intervals while
    /// there is none. Before a sleep it is not needed, because a readable descriptor ends the sleep
    /// immediately.
    fn polls_descriptors(&mut self, now: Instant) -> bool {
        match self.descriptor_poll {
            DescriptorPoll::AfterSleep => {
                self.descriptor_poll = DescriptorPoll::Now;
                false
            }
            DescriptorPoll::Now => true,
            DescriptorPoll::Later => {
                now.duration_since(self.descriptors_polled) >= DESCRIPTOR_POLL_INTERVAL
            }
        }
    }

    /// Takes notifications from their channels, and events from the connection manager.
    fn poll_descriptors(&mut self) {
        (self.descriptor_poll, self.descriptors_polled) = (DescriptorPoll::Later, self.now);
        let mut found = [EpollEvent::empty(); 8];
        // At most a few sources are ready; the rest stays readable for the next poll.
        let Ok(count) = self.epoll.wait(&mut found, EpollTimeout::ZERO) else { return };
        for event in &found[..count] {
            match event.data() {
                CONNECTIONS if self.allowance.allows(self.now) => {
                    self.charged(Self::poll_connections);
                }
                CONNECTIONS => self.set_muted(true),
                fd => {
                    let device = |d: &&mut Attached| d.device.fd().as_raw_fd() as u64 == fd;
                    let Some(attached) = self.devices.iter_mut().find(device) else { continue };
                    attached.announced = false;
                    if attached.device.take_announcement().is_err() {
                        let key = attached.device.key();
                        self.device_lost(key, "its notifications cannot be read");
                    }
                }
            }
        }
    }
}

impl AsFd for Verbs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl Fabric for Verbs {
    fn listen(&mut self, at: SocketAddr) -> Result<(), FabricError> {
        let id = cm::listen(&self.channel, at)?;
        self.listeners.push((at, id));
        Ok(())
    }

    fn unlisten(&mut self, at: SocketAddr) {
        self.listeners.retain(|(address, _)| *address != at);
        self.ready.retain(|event| !matches!(event, Event::ListenerLost(lost) if *lost == at));
    }

    fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError> {
        self.charged(|this| this.open_connection(incoming, limits))
    }

    fn hints(&self) -> FabricHints {
        FabricHints {
            queue_pairs_max: self.queue_pairs_max,
            connections_exhausted: !self.allowance.allows(self.now),
            sends_deferred: true,
            ..FabricHints::default()
        }
    }

    fn stats(&self, stats: &mut FabricStats) {
        stats.device.extend(self.counts.named());
    }

    fn accept(&mut self, qp: Qp, private_data: &[u8]) {
        self.flush();
        self.charged(|this| this.accept_connection(qp, private_data));
    }

    fn reject(&mut self, incoming: Incoming, private_data: &[u8]) {
        self.charged(|this| this.reject_connection(incoming, private_data));
    }

    fn disconnect(&mut self, qp: Qp) {
        self.close(qp, Reason::Local);
    }

    fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        let Some(connection) = self.connections.get_mut(qp.0 as usize).and_then(Option::as_mut)
        else {
            return self.refuse(qp, tag, work, Fault::Flushed);
        };
        if connection.dead {
            return self.refuse(qp, tag, work, Fault::Flushed);
        }
        let limits = connection.limits;
        let (list, count, most) = match work {
            Work::Recv(_) => {
                (&mut connection.new_receives, &mut connection.receives, limits.receives)
            }
            _ => (&mut connection.new_sends, &mut connection.sends, limits.sends),
        };
        // More than was requested would overflow the completion queue: a bug of the driver.
        if *count >= most {
            self.refuse(qp, tag, work, Fault::Local(Errno::ENOBUFS as u32));
            return self.stop_queue_pair(qp);
        }
        *count += 1;
        self.flights.insert(list, Flight { qp, tag, work, sink: None });
        if !connection.dirty {
            connection.dirty = true;
            self.dirty.push(qp);
        }
    }

    fn flush(&mut self) {
        // Taken out for the loop, and put back to keep its capacity.
        let mut dirty = std::mem::take(&mut self.dirty);
        for qp in dirty.drain(..) {
            self.post_queued(qp);
        }
        self.dirty = dirty;
    }

    fn poll(&mut self, now: Instant, batch: &mut Vec<Event>) {
        self.now = now;
        // A handle is reused only when no event with it is left.
        if self.ready.is_empty() {
            self.vacant.append(&mut self.departed);
        }
        if !self.closing.is_empty() || !self.closing_cm.is_empty() {
            self.advance_closing();
        }
        let end = batch.len() + (batch.capacity() - batch.len()).max(1);
        self.deliver(end, batch);
        self.poll_devices(end, batch);
        self.look_for_removed();
        if self.muted && self.allowance.allows(now) {
            self.set_muted(false);
        }
        if self.polls_descriptors(now) && self.ready.len() < READY_MOST {
            self.poll_descriptors();
        }
        self.deliver(end, batch);
    }

    fn arm(&mut self, wake: Wake) -> Option<Instant> {
        self.descriptor_poll = DescriptorPoll::AfterSleep;
        // A Read is waited for, and so is the end of a connection.
        let ending = !(self.closing.is_empty() && self.closing_cm.is_empty());
        let wake = if self.flights.has_reads() || ending { Wake::Any } else { wake };
        let armed = |d: &mut Attached| {
            if std::mem::take(&mut d.announced) {
                d.device.take_announcement()?;
            }
            d.device.request_notify(wake)
        };
        // A queue whose notification cannot be requested belongs to a removed device.
        let working = self.devices.iter_mut().filter(|d| !d.removed);
        let lost: Vec<_> =
            working.filter_map(|d| armed(d).is_err().then(|| d.device.key())).collect();
        lost.into_iter().for_each(|key| self.device_lost(key, "it reports no completions"));
        self.next_deadline()
    }

    fn deadline(&self) -> Option<Instant> {
        self.next_deadline()
    }

    fn fd(&self) -> RawFd {
        self.epoll.0.as_raw_fd()
    }
}

impl Initiator for Verbs {
    fn connect(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        self.request_connection(to, private_data, limits)
    }

    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)> {
        let connection = self.connection(qp).filter(|connection| connection.is_up());
        let Some(device) = connection.and_then(|c| c.device.clone()) else {
            return Err((buf, FabricError("only an established connection exposes memory".into())));
        };
        assert!(buf.is_of(&self.region), "a buffer of another pool");
        let (at, len) = (buf.offset(), buf.len());
        match Mr::new(&device.pd, &self.region, at, len.into(), Access::Exposed) {
            Ok(mr) => Ok(RemoteRegion::new(buf, mr.remote(), Box::new(mr))),
            Err(e) => {
                let name = &device.ability.name;
                let why = format!("cannot expose {len} bytes through {name}: {}", e.desc());
                Err((buf, FabricError(why)))
            }
        }
    }
}

/// Appends one flight to a chain.
fn chain(
    sends: &mut SendChain,
    id: u64,
    flight: &mut Flight,
    device: &Device,
    inline_most: u32,
    region: &Arc<Region>,
) -> Result<(), Errno> {
    let at = window(&flight.work);
    match &flight.work {
        Work::Recv(_) => {}
        Work::Send { invalidate, .. } => {
            let invalidate = invalidate.filter(|_| device.ability.invalidate);
            let inline = at.1 > 0 && at.1 <= inline_most;
            sends.push(id, Verb::Send { invalidate }, &device.mr, at, inline);
        }
        Work::SendImmediate { .. } | Work::WriteImmediate { .. } if device.ability.iwarp => {
            return Err(Errno::EOPNOTSUPP);
        }
        Work::SendImmediate { immediate, .. } => {
            let inline = at.1 > 0 && at.1 <= inline_most;
            let verb = Verb::SendImmediate { immediate: *immediate };
            sends.push(id, verb, &device.mr, at, inline);
        }
        Work::WriteImmediate { to, immediate, .. } => {
            let (addr, key) = (to.addr, to.key);
            let verb = Verb::WriteImmediate { addr, key, immediate: *immediate };
            sends.push(id, verb, &device.mr, at, false);
        }
        Work::Write { to, .. } => {
            let verb = Verb::Write { addr: to.addr, key: to.key };
            sends.push(id, verb, &device.mr, at, false);
        }
        Work::Read { from, .. } => {
            let verb = Verb::Read { addr: from.addr, key: from.key };
            if device.ability.iwarp && at.1 > 0 {
                let sink = Mr::new(&device.pd, region, at.0, at.1.into(), Access::ReadSink)?;
                sends.push(id, verb, flight.sink.insert(Box::new(sink)), at, false);
            } else {
                sends.push(id, verb, &device.mr, at, false);
            }
        }
    }
    Ok(())
}

/// Offset and length of the bytes that move.
fn window(work: &Work) -> (u64, u32) {
    (work.buf().offset(), work.buf().len())
}

fn no_device(e: Option<Errno>) -> FabricError {
    if let Some(why) = device::too_few_descriptors().or_else(device::closed_node) {
        return FabricError(why);
    }
    let system = e.map(|e| format!(" ({})", e.desc())).unwrap_or_default();
    FabricError(format!(
        "no RDMA device{system}: `rdma link` lists them; for an adapter load its driver and \
         ib_uverbs and rdma_ucm (package rdma-core), for a software device `modprobe rdma_rxe` and \
         `rdma link add rxe0 type rxe netdev eth0`, or use the soft provider"
    ))
}
