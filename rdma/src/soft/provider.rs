//! The provider: an [`Endpoint`] driven by sockets, as a [`Fabric`].
//!
//! ```text
//! poll:  wire ──datagrams──► endpoint ──events──► batch
//! flush: endpoint ──headers, payload, CRC──► wire
//! ```
//!
//! Everything that is not input or output is here or in the endpoint; the wire is UDP sockets
//! (`soft/udp/mod.rs`), in tests also a simulated network (`soft/sim/network.rs`). Calls of the
//! trait without a time use that of the last poll.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cm::connection::{ConnectRequest, mtu_bytes};
use super::cm::message::RejectReason;
use super::config::{Config, Options};
use super::endpoint::Endpoint;
use super::link_log::LinkLog;
use super::qp::memory_region::Rights;
#[cfg(any(test, feature = "testing"))]
use super::sim::wire::Wire;
use super::stats::datagrams::{Counters, DatagramOutcome};
use super::stats::link_errors::LinkError;
use super::udp::{Shared, SocketBuffers, Udp, train};
use crate::capture::Capture;
use crate::{
    Buf, Event, Fabric, FabricError, FabricHints, FabricStats, Incoming, Initiator, Qp, QpLimits,
    Region, RemoteRegion, Tag, Wake, Work,
};

/// Description of the interface of a capture.
const CAPTURED: &str = "sent and received by the provider soft; IP and UDP headers are synthesised, \
                        with the identification of packets sent and 0 in those received";

/// Interval at which a sleeping fabric checks whether requests held by users were dropped.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Minimum of writes that leave together, where there are more.
const FEW: u32 = 4;

/// Maximum delay of timers until all received datagrams are read.
const MOST_BEHIND: Duration = Duration::from_millis(10);

/// Bytes received in one poll that indicate data, not only the messages around them.
const RECEIVING_BYTES: usize = 4096;

/// Carries datagrams.
#[cfg(not(any(test, feature = "testing")))]
type Wire = Udp;

/// The provider over UDP sockets: needs no device, no kernel module and no privilege.
#[derive(Debug)]
pub struct Soft {
    endpoint: Endpoint,
    region: Arc<Region>,
    wire: Wire,
    now: Instant,
    /// Work was posted since the last flush.
    posted: bool,
    /// What the first queue pair that wrote since the last flush has written.
    written: Option<Written>,
    /// [`Fabric::arm`] was called after the last poll.
    armed: bool,
    /// The last poll received data.
    receiving: bool,
    /// Since when timers are delayed until all received datagrams are read.
    behind: Option<Instant>,
    link_log: LinkLog,
}

/// What a queue pair has written since a flush.
#[derive(Clone, Copy, Debug)]
struct Written {
    qp: Qp,
    bytes: u32,
    writes: u32,
    /// Bytes that fill a train of it.
    train_bytes: u32,
}

impl Written {
    /// Adds a write.
    fn add(&mut self, bytes: u32) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.writes = self.writes.saturating_add(1);
    }

    /// Whether the writes are enough for a train; with fewer, polling between them costs more than
    /// it saves. Only for one queue pair: with several peers each is to get as much.
    #[inline]
    fn is_train(&self) -> bool {
        self.writes >= FEW && self.bytes >= self.train_bytes
    }
}

/// Fabrics that listen at the same addresses, one for each reactor: a connection request arrives at
/// any of them, and the packets of a connection at the one that has opened it, because the kernel
/// steers them.
#[derive(Clone, Debug)]
pub struct Group(Arc<Shared>);

impl Group {
    /// A group of `count` fabrics (at least one), which are created by [`Group::fabric`]. All must
    /// be polled: each receives a part of the datagrams.
    ///
    /// # Errors
    /// The limit of descriptors is reached.
    pub fn new(count: u32, options: Options) -> Result<Group, FabricError> {
        Ok(Group(Arc::new(Shared::new(count, options)?)))
    }

    /// Binds the sockets with which the group would listen at an address. They are closed when the
    /// value is dropped, and no fabric uses them.
    ///
    /// # Errors
    /// As [`Fabric::listen`].
    pub fn reserve(&self, at: SocketAddr) -> Result<impl Sized + use<>, FabricError> {
        self.0.reserve(at)
    }

    /// Creates the fabric with this index (below the group's count; each once). Its buffers are
    /// those of `region`. It opens no socket before `listen` or `connect`; if one of the group
    /// listens, all do.
    ///
    /// # Errors
    /// The system provides no random numbers or no epoll instance.
    ///
    /// # Panics
    /// The index is out of range.
    pub fn fabric(&self, index: u32, region: Arc<Region>) -> Result<Soft, FabricError> {
        assert!(index < self.0.count(), "fabric {index} of {}", self.0.count());
        let guid = getrandom::u64()
            .map_err(|e| FabricError(format!("the system gives no random numbers: {e}")))?;
        let udp = Udp::new(Arc::clone(&self.0), index)?;
        let steer = (self.0.count(), index);
        let config = Config { guid, steer, ..self.0.options().config };
        let mut entropy = Entropy { numbers: [0; 64], left: 0 };
        let endpoint = Endpoint::new(config, Box::new(move || entropy.next()));
        Ok(Soft::over(udp, endpoint.among(self.0.pairs()), region, Instant::now()))
    }
}

impl Soft {
    /// Creates a fabric that is alone in its group.
    ///
    /// # Errors
    /// As [`Group::fabric`].
    pub fn new(region: Arc<Region>, options: Options) -> Result<Soft, FabricError> {
        Group::new(1, options)?.fabric(0, region)
    }

    /// Creates a fabric over any wire.
    pub(super) fn over(
        wire: impl Into<Wire>,
        endpoint: Endpoint,
        region: Arc<Region>,
        now: Instant,
    ) -> Soft {
        Soft {
            endpoint,
            region,
            wire: wire.into(),
            now,
            posted: false,
            written: None,
            armed: false,
            receiving: false,
            behind: None,
            link_log: LinkLog::default(),
        }
    }

    /// Counters of datagrams.
    pub fn counters(&self) -> Counters {
        self.endpoint.counters()
    }

    /// Captures everything that is sent and received from now on.
    pub fn capture_to(&mut self, capture: &Capture) {
        self.wire.capture_to(capture.on("soft", CAPTURED));
    }

    /// Buffer sizes of each open socket.
    pub fn socket_buffers(&self) -> impl Iterator<Item = SocketBuffers> {
        self.wire.buffers()
    }

    /// Sends what there is to send. An iteration often has nothing.
    #[inline]
    fn transmit(&mut self) {
        if self.endpoint.has_transmits() || self.wire.is_blocked() {
            self.wire.transmit(self.now, &mut self.endpoint, &self.region);
        }
    }

    /// Handles expired timers. The packets they wait for may have arrived and not be read, so
    /// normally not before all are read (`all`), except if that takes too long.
    fn handle_timeout(&mut self, now: Instant, all: bool) {
        let due = self.endpoint.is_due(now);
        if due && !all && now < *self.behind.get_or_insert(now) + MOST_BEHIND {
            return;
        }
        self.behind = None;
        if due {
            self.endpoint.handle_timeout(now, &self.region);
        }
    }

    /// Logs peers that cannot connect, or whose packets are checked with fewer bits.
    #[inline(never)]
    fn log_link_errors(&mut self, now: Instant) {
        let (endpoint, log) = (&mut self.endpoint, &mut self.link_log);
        let erratic = endpoint.take_erratic().and_then(|peer| log.erratic(now, peer));
        let path = endpoint.take_without_trains();
        let without_trains = path.and_then(|path| log.without_trains(now, path));
        let barred = endpoint.take_barred().and_then(|peer| log.barred(now, peer));
        for line in [erratic, without_trains, barred].into_iter().flatten() {
            tracing::warn!("{line}");
        }
    }

    /// Peers access remote regions by ordinary loads and stores of the thread that drives this
    /// fabric, and so does the owner of a [`RemoteRegion`], which cannot leave its thread. So while
    /// there is one, the fabric must not leave the thread either. Every access is checked
    /// elsewhere; this check finds the bug at the first call.
    ///
    /// # Panics
    /// The fabric was moved to another thread while there were remote regions.
    fn stay(&mut self) {
        self.endpoint.memory().stay();
    }

    /// Appends events until the batch is `end` long.
    #[inline(always)] // twice a poll, most times without any
    fn deliver(&mut self, end: usize, batch: &mut Vec<Event>) {
        if self.endpoint.waiting_events() > 0 {
            self.endpoint.take_events(end.saturating_sub(batch.len()), batch);
        }
    }
}

impl AsFd for Soft {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

impl Fabric for Soft {
    fn listen(&mut self, at: SocketAddr) -> Result<(), FabricError> {
        self.wire.listen(at, &mut self.endpoint)
    }

    fn unlisten(&mut self, at: SocketAddr) {
        self.wire.unlisten(at, &mut self.endpoint);
    }

    fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError> {
        self.wire.apply_shared_state(&mut self.endpoint);
        if let Some(request) = ConnectRequest::of(&incoming) {
            let asked = mtu_bytes(request.message.path_mtu).unwrap_or_default();
            let (from, remote) = (request.to, request.from);
            if !self.wire.has(from) {
                return Err(FabricError(format!("nobody listens at {from} any more")));
            }
            let carried = self.wire.path_mtu(from, remote, asked);
            let carried = carried.unwrap_or(self.endpoint.mtu());
            if asked > carried {
                self.endpoint.refuse(incoming, RejectReason::INVALID_MTU, &[]);
                return Err(FabricError(format!(
                    "{remote} asks for packets of {asked} bytes, but the way there carries only \
                     {carried}: give both ends' links the same MTU"
                )));
            }
        }
        self.endpoint.open(incoming, limits)
    }

    fn accept(&mut self, qp: Qp, private_data: &[u8]) {
        self.endpoint.accept(self.now, qp, private_data);
    }

    fn reject(&mut self, incoming: Incoming, private_data: &[u8]) {
        self.endpoint.reject(incoming, private_data);
    }

    fn admit(&mut self, qp: Qp) {
        self.endpoint.admit(qp);
    }

    fn disconnect(&mut self, qp: Qp) {
        self.endpoint.disconnect(self.now, qp, &self.region);
    }

    fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        self.posted = true;
        if let Work::Write { from, .. } = &work {
            let endpoint = &self.endpoint;
            let written = self.written.get_or_insert_with(|| {
                let train_bytes = train::payload_bytes(endpoint.path_mtu(qp));
                Written { qp, bytes: 0, writes: 0, train_bytes }
            });
            if written.qp == qp {
                written.add(from.len());
            }
        }
        self.endpoint.post(qp, tag, work, &self.region);
    }

    fn flush(&mut self) {
        self.stay();
        (self.posted, self.written) = (false, None);
        self.transmit();
    }

    fn hints(&self) -> FabricHints {
        FabricHints {
            queue_pairs_max: self.endpoint.queue_pairs(),
            receiving: self.receiving,
            ..FabricHints::default()
        }
    }

    fn is_batch_full(&self) -> bool {
        self.written.is_some_and(|written| written.is_train())
    }

    fn poll(&mut self, now: Instant, batch: &mut Vec<Event>) {
        self.stay();
        self.now = now;
        let (start, end) = (batch.len(), batch.len() + (batch.capacity() - batch.len()).max(1));
        if start == 0 {
            // The user has processed all its events.
            self.endpoint.release();
        }
        // The end of a queue pair is reported after the user has processed all its other events.
        while batch.len() < end {
            let heard = |qp| !batch.iter().any(|event| event.qp() == Some(qp));
            let Some(event) = self.endpoint.next_gone(heard) else { break };
            batch.push(event);
        }
        self.deliver(end, batch);
        self.wire.apply_shared_state(&mut self.endpoint);
        let room = end - batch.len();
        let taken = self.wire.receive(now, &mut self.endpoint, &self.region, room);
        self.receiving = taken.bytes >= RECEIVING_BYTES;
        self.handle_timeout(now, taken.all);
        self.endpoint.apply_updates(now);
        if self.endpoint.has_link_errors() {
            self.log_link_errors(now);
        }
        self.deliver(end, batch);
        // A user that has no event after `arm` sleeps, and does not flush.
        let sleeps = std::mem::take(&mut self.armed) && batch.len() == start && !self.posted;
        if sleeps {
            self.transmit();
        }
    }

    /// Received datagrams, those with congestion marks, and those of each outcome.
    fn stats(&self, stats: &mut FabricStats) {
        let counters = self.endpoint.counters();
        stats.counters.extend([("received", counters.received), ("marked", counters.marked)]);
        let named = |outcome: &DatagramOutcome| (outcome.name(), counters[*outcome]);
        stats.counters.extend(DatagramOutcome::ALL.iter().map(named));
        self.endpoint.troubles(|at, troubles| {
            let named = |each: &LinkError| (at, each.name(), troubles.of(*each));
            stats.link_errors.extend(LinkError::ALL.iter().map(named));
        });
    }

    /// Every datagram ends the sleep, including the acknowledgement of a send, because a socket
    /// cannot suppress it. A peer of this implementation delays pure acknowledgements, so most
    /// arrive with the next request.
    fn arm(&mut self, _wake: Wake) -> Option<Instant> {
        self.stay();
        if !self.posted && self.endpoint.hasten(self.now) {
            self.transmit();
        }
        self.armed = true;
        self.wire.arm();
        self.deadline()
    }

    fn deadline(&self) -> Option<Instant> {
        if self.endpoint.has_events() || self.posted {
            return Some(self.now);
        }
        let look = self.endpoint.is_asking().then(|| self.now + LOOK_INTERVAL);
        self.endpoint.poll_timeout().into_iter().chain(look).min()
    }

    fn fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Initiator for Soft {
    fn connect(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        let path = self.wire.path(to, &mut self.endpoint)?;
        self.endpoint.connect(self.now, path, to, private_data, limits)
    }

    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)> {
        self.stay();
        if !self.endpoint.is_established(qp) {
            return Err((buf, FabricError("only an established connection exposes memory".into())));
        }
        assert!(buf.is_of(&self.region), "a buffer of another pool");
        let memory = self.endpoint.memory();
        memory.expose(buf, Rights::READ.and(Rights::WRITE)).map_err(|buf| {
            (buf, FabricError("as many buffers are exposed as there may be at once".into()))
        })
    }

    fn deregister_remote(&mut self, region: RemoteRegion) -> Buf {
        self.stay();
        self.endpoint.memory().revoke(region)
    }

    fn short_message_bytes(&self, qp: Qp) -> u32 {
        self.endpoint.path_mtu(qp)
    }
}

impl Drop for Soft {
    /// Sends the pending disconnect requests.
    fn drop(&mut self) {
        if self.endpoint.memory().is_home() {
            self.transmit();
        }
    }
}

/// Unpredictable numbers, of which the system provides several at a time: in a flood one is needed
/// for every datagram.
struct Entropy {
    numbers: [u64; 64],
    /// Unused ones, at the front.
    left: usize,
}

impl Entropy {
    /// The system has provided some before, and does not fail later; if it did, the best random
    /// numbers of the standard library are used.
    fn next(&mut self) -> u64 {
        use std::hash::{BuildHasher, RandomState};
        if self.left == 0 {
            let mut bytes = [0; size_of::<[u64; 64]>()];
            if getrandom::fill(&mut bytes).is_err() {
                return RandomState::new().hash_one(0);
            }
            let words = bytes.chunks_exact(8).filter_map(|chunk| chunk.first_chunk::<8>());
            for (number, word) in self.numbers.iter_mut().zip(words) {
                *number = u64::from_ne_bytes(*word);
            }
            self.left = self.numbers.len();
        }
        self.left -= 1;
        // Used once, and not kept elsewhere.
        std::mem::take(&mut self.numbers[self.left])
    }
}
