//! The fabric: four verbs over interchangeable providers, and the registered memory they move.
//!
//! This crate knows nothing of NVMe: connection private data are opaque bytes, messages are
//! buffers. A provider implements [`Fabric`]; whoever drives it owns it mutably, on one thread.
//!
//! # The contract of a queue pair's life
//!
//! ```text
//! listen ──► Event::Incoming ──► open ──► post(Recv) × n ──► accept ──► Event::Established
//!                        └─────► reject                          │              │
//! connect ──► post(Recv) × n ────────────────────────────────────┤              │
//!                                                                └──────┬───────┘
//!                         peer leaves, or a fault, or disconnect(qp) ───┤
//!                         every posted Work comes home as Event::Done ──┤
//!                                                                       ▼
//!                                                                  Event::Gone
//! ```
//!
//! * [`Fabric::post`] never fails and never loses a [`Buf`]: each posted [`Work`] comes back in
//!   exactly one [`Event::Done`], with an outcome, also when the queue pair has died.
//! * [`Event::Gone`] is the last thing heard of a [`Qp`]: no event names it afterwards, and every
//!   buffer that was posted on it has come home before. It follows `open` or `connect` exactly
//!   once, whatever happened in between (also when `accept` failed, or the peer rejected). The
//!   handle is then free for reuse.
//! * The first failed completion of a queue pair means the queue pair is dead: all work posted on
//!   it, before or after, comes back with a fault. Calling [`Fabric::disconnect`] is still
//!   required to get to `Gone` after a fault, and harmless when the peer was first.
//! * A `Write` is performed before every `Send` that is posted after it on its queue pair, so the
//!   `Send` tells the peer that the written data are there (reliable connection order); and sends
//!   are performed in the order of posting. Between two flushes a provider may let writes go first.
//!   A `Read` gives no such promise: what depends on its data waits for its completion.

pub mod event;
pub mod limits;
pub mod pool;
pub mod soft;
pub mod source;
pub mod spin;
#[cfg(feature = "verbs")]
pub mod verbs;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::time::Instant;

pub use event::{Event, Incoming, Reason};
pub use pool::{Buf, Pool, PoolPlan, Region, RemoteRegion};
pub use source::Source;
pub use spin::{AdaptivePoller, Budget as SpinBudget};

/// A queue pair as its [`Fabric`] names it: valid from `open` or `connect` to `Gone`, small and
/// dense enough to index a table with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Qp(pub u32);

/// Opaque value of a work request, returned in its completion. Opaque to the fabric.
pub type Tag = u64;

/// Memory as the other end names it: `len` bytes at `addr` under `key`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Address in the terms of whoever has the memory.
    pub addr: u64,
    /// Its remote key (STag).
    pub key: u32,
    /// Length in bytes.
    pub len: u32,
}

/// The four verbs. Each owns the buffer it moves; the buffer's window says which bytes.
#[derive(Debug)]
pub enum Work {
    /// Wait for one message of the peer; it lands at the start of the window.
    Recv(Buf),
    /// Send the window as one message.
    Send {
        /// The message.
        from: Buf,
        /// A key of the peer that its adapter shall invalidate on arrival. Providers whose device
        /// cannot do that send plainly, which every host accepts.
        invalidate: Option<u32>,
    },
    /// Pull the peer's memory into the window (RDMA Read). The window is as long as `from`.
    Read {
        /// Where the data land.
        into: Buf,
        /// What is read.
        from: Remote,
    },
    /// Push the window to the peer's memory (RDMA Write). `to` is at least as long as the window.
    Write {
        /// What is written.
        from: Buf,
        /// Where the data go.
        to: Remote,
    },
}

impl Work {
    /// Gives the buffer back.
    pub fn into_buf(self) -> Buf {
        match self {
            Work::Recv(buf)
            | Work::Send { from: buf, .. }
            | Work::Read { into: buf, .. }
            | Work::Write { from: buf, .. } => buf,
        }
    }

    /// The buffer that moves.
    pub fn buf(&self) -> &Buf {
        match self {
            Work::Recv(buf)
            | Work::Send { from: buf, .. }
            | Work::Read { into: buf, .. }
            | Work::Write { from: buf, .. } => buf,
        }
    }
}

/// Posted work, come home.
#[derive(Debug)]
pub struct Completion {
    /// The queue pair it was posted on.
    pub qp: Qp,
    /// The poster's tag.
    pub tag: Tag,
    /// The same work; its buffer belongs to the receiver of this completion again.
    pub work: Work,
    /// Bytes moved (for `Recv` the length of the message), or why the queue pair died.
    pub outcome: Result<u32, Fault>,
    /// The key of exposed memory that the peer's message took back (Send with Invalidate). Only
    /// for memory of which [`RemoteRegion::bears_invalidation`] is true: with other memory, such a
    /// message ends the connection.
    pub invalidated: Option<u32>,
}

/// Error that ended a queue pair. There is no milder kind: a failed completion is always the end of
/// its connection; the host reconnects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// Came home because the queue pair had died before (or was disconnected).
    #[error("flushed: the connection had ended")]
    Flushed,
    /// The peer refused access to its memory (bad key, range or right).
    #[error("the peer refused access to its memory")]
    RemoteAccess,
    /// The peer called the request invalid, or failed to perform it.
    #[error("the peer refused or failed the operation")]
    RemoteOperation,
    /// No acknowledgement within the retry limit.
    #[error("the peer does not answer (retries exceeded)")]
    Unreachable,
    /// The peer had no receive posted within the retry limit.
    #[error("the peer has no receive buffers (RNR retries exceeded)")]
    NotReady,
    /// A message longer than the receive buffer, or another local length error.
    #[error("message longer than the posted buffer")]
    Length,
    /// A local protection or programming fault.
    #[error("local fault (code {0})")]
    Local(u32),
}

/// Required capacity of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpLimits {
    /// Receives posted at once.
    pub receives: u32,
    /// Sends, reads and writes posted at once.
    pub sends: u32,
    /// RDMA Reads outstanding on the wire that we would like; what is granted is at most what the
    /// peer answers and the device issues, and never less than one. For `connect` the other way
    /// round: reads of the peer that we offer to answer at once, at most what the device can;
    /// then 0 is possible, and means that the peer cannot read.
    pub reads: u8,
}

/// A call that failed, as one sentence for a person: what was tried, what the system said, what
/// to do about it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct FabricError(pub String);

/// Hints of a provider to its driver. Correctness never depends on them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FabricHints {
    /// Queue pairs that there may be at once, those in use among them: what the smallest device has.
    /// Changes when a device comes or goes. By default `u32::MAX`: no limit is known.
    pub queue_pairs_max: u32,
    /// Connections have taken their share of the time, so that none should be opened now; who waits
    /// asks again in a millisecond. Changes with each [`Fabric::open`], [`Fabric::accept`] and
    /// [`Fabric::reject`], and with each poll.
    pub connections_exhausted: bool,
    /// What is queued fills what leaves at once, so that whoever has much more to queue had better
    /// flush first: the peer gets something to do, and nothing is lost by it. Changes with each
    /// [`Fabric::post`] and [`Fabric::flush`].
    pub batch_full: bool,
    /// The last poll has moved data, although it may have had nothing to report. More are probably on
    /// their way, so that it pays to look again rather than to sleep.
    pub receiving: bool,
    /// A sleep that [`Wake::Needed`] prepares is not ended by the completion of a `Send` or a `Write`,
    /// so that it is not known when that was. Never changes.
    pub sends_deferred: bool,
}

impl Default for FabricHints {
    fn default() -> FabricHints {
        FabricHints {
            queue_pairs_max: u32::MAX,
            connections_exhausted: false,
            batch_full: false,
            receiving: false,
            sends_deferred: false,
        }
    }
}

/// Counters of a provider. Names are lower case, with underscores.
#[derive(Clone, Debug, Default)]
pub struct FabricStats {
    /// Of the provider as a whole: name, count.
    pub counters: Vec<(&'static str, u64)>,
    /// What connections have met, by the address here: packets sent again, negative acknowledgements.
    /// Empty where a device keeps that to itself. A provider bounds the number of addresses.
    pub link_errors: Vec<(IpAddr, &'static str, u64)>,
}

impl FabricStats {
    /// Removes all, and keeps the memory for the next time.
    pub fn clear(&mut self) {
        self.counters.clear();
        self.link_errors.clear();
    }
}

/// Events that end a sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// Every event.
    Any,
    /// Every event but the completion of a `Send` or a `Write`: nobody waits for their buffers.
    /// Those are reported by the next poll, whenever that is. It saves a wake-up a command. (A
    /// provider that cannot tell them apart in advance wakes for all.)
    Needed,
}

/// **Seam 1.** A provider of reliable connections, driven by one thread, in batches.
///
/// A turn is: `poll`, act on the events (`post` ..), `flush`. Before sleeping on `fd`: `arm`,
/// then `poll` once more, and sleep only when that brought nothing.
///
/// No method blocks. Only calls whose failure the caller can act upon at once return a [`FabricError`];
/// whatever happens to a connection after that is told by [`Event::Gone`]. A handle that is unknown, or
/// whose connection has ended, is no mistake, for the driver hears of the end later than the fabric:
/// `post` gives the work back, all else does nothing. Each method names what of rdma-core it stands for,
/// where that is one thing.
pub trait Fabric: Send {
    /// Starts to accept connections at `at` (an unspecified address means all). Requests arrive
    /// as [`Event::Incoming`], until [`Fabric::unlisten`] or [`Event::ListenerLost`].
    /// (`rdma_bind_addr`, `rdma_listen`.)
    ///
    /// # Errors
    /// The address is not ours, is taken, or has no device of this provider.
    fn listen(&mut self, at: SocketAddr) -> Result<(), FabricError>;

    /// Stops accepting at `at`. Requests that have been reported, and connections made there, stay.
    /// (`rdma_destroy_id` of the listener.)
    fn unlisten(&mut self, at: SocketAddr);

    /// Creates the queue pair that will serve `incoming`: receives may be posted at once, and
    /// must be posted before [`Fabric::accept`], as the peer may send as soon as it has the reply.
    /// Takes the request over; on error it has been rejected without private data.
    /// (`rdma_migrate_id` where another fabric was asked, `rdma_create_qp`.)
    ///
    /// # Errors
    /// The device or the system has no room; nobody listens there any more; the request is another
    /// provider's.
    fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError>;

    /// Answers the request of an opened queue pair with a reply that carries `private_data`: at most
    /// 196 bytes, which is what a REP has (IBTA volume 1, 12.6.8). Once for each `open`. Failure
    /// shows as [`Event::Gone`]. (`rdma_accept`.)
    fn accept(&mut self, qp: Qp, private_data: &[u8]);

    /// Refuses a request that has not been opened; the peer sees a consumer-defined reject (reason
    /// 28) with `private_data`, at most the 148 bytes of a REJ (IBTA volume 1, 12.6.7).
    /// (`rdma_reject`.)
    fn reject(&mut self, incoming: Incoming, private_data: &[u8]);

    /// Ends a connection: all posted work comes home, then [`Event::Gone`]. Idempotent. (`rdma_disconnect`,
    /// the queue pair to the state Error; when all is flushed, `rdma_destroy_qp` and `rdma_destroy_id`.)
    fn disconnect(&mut self, qp: Qp);

    /// Queues one piece of work, whose buffer is the fabric's until its [`Event::Done`]. Nothing
    /// reaches the peer before [`Fabric::flush`]. More receives or sends at once than the [`QpLimits`] of
    /// the queue pair allow may end the connection. Never fails: see the contract above. (A work request
    /// in the chain of its queue pair.)
    fn post(&mut self, qp: Qp, tag: Tag, work: Work);

    /// Hands everything queued to the device, one doorbell a queue pair. (`ibv_post_recv` and
    /// `ibv_post_send` of the chains.)
    fn flush(&mut self);

    /// Appends what has happened to `batch`, in order, at most as much as `batch` has spare
    /// capacity for (and at least one event when there is any). `now` never runs backwards; calls that
    /// bring no time use that of the last poll. (`ibv_poll_cq`, `rdma_get_cm_event`.)
    fn poll(&mut self, now: Instant, batch: &mut Vec<Event>);

    /// Prepares for sleep: from now on any new event makes [`Fabric::fd`] readable. Returns
    /// [`Fabric::deadline`]. Holds for one sleep. (`ibv_req_notify_cq`, of the completion queue of sends
    /// only for [`Wake::Any`].)
    fn arm(&mut self, wake: Wake) -> Option<Instant>;

    /// When the provider is to be polled even if nothing comes, if ever: a timer of its own. Whoever
    /// polls or flushes after [`Fabric::arm`] asks for it once more: there may be an earlier one.
    fn deadline(&self) -> Option<Instant>;

    /// Becomes readable when there is something to poll (after `arm`). Stays the same for life. (An
    /// epoll instance over the completion channels and the event channel.)
    fn fd(&self) -> RawFd;

    /// What the provider advises now. Cheap: it is asked for between commands.
    fn hints(&self) -> FabricHints {
        FabricHints::default()
    }

    /// Appends what the provider has counted to `stats`, always under the same names in the same
    /// order. Asked for a few times a second.
    fn stats(&self, stats: &mut FabricStats) {
        let _ = stats;
    }

    /// Says that the peer of an accepted connection has been let in: it has done what the user demands
    /// of newcomers. A provider may pass over requests from where connections keep coming up and ending
    /// before that; so who asks for this (of the provider `soft` by its configuration) says it of every
    /// connection, once, as soon as it is so.
    fn admit(&mut self, qp: Qp) {
        let _ = qp;
    }
}

/// What only the end uses that asks for connections: a host. A target never does.
pub trait Initiator: Fabric {
    /// Asks a listener at `to` for a connection, with at most 56 bytes of `private_data`: those of a
    /// REQ without the header of the IP service (IBTA volume 1, 12.6.5 and annex A11). Receives may be
    /// posted at once, everything else after [`Event::Established`]. A peer that refuses shows as
    /// [`Event::Gone`] with [`Reason::Rejected`], any other failure as `Gone` as well.
    /// (`rdma_resolve_addr`, `rdma_resolve_route`, `rdma_create_qp`, `rdma_connect`.)
    ///
    /// # Errors
    /// There is no route, no device for it, or the system has no room.
    fn connect(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError>;

    /// Lets peers read and write the window of `buf`, until [`Initiator::deregister_remote`]: what a
    /// host does with the data buffers of its commands. `qp`, which must be established, says through
    /// which device; every peer connected through that may use the key. (`ibv_reg_mr`.)
    ///
    /// # Errors
    /// The provider or the device cannot; the buffer comes back.
    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)>;

    /// Takes the peers' access away. The buffer is ours alone again. (`ibv_dereg_mr`.)
    fn deregister_remote(&mut self, region: RemoteRegion) -> Buf {
        region.into_buf()
    }

    /// Bytes of a message up to which it costs no more than its bytes. A longer one takes packets of
    /// its own: where much else is under way, the peer had better read the data that made it long.
    /// Never changes once `qp` is established.
    fn short_message_bytes(&self, qp: Qp) -> u32 {
        let _ = qp;
        u32::MAX
    }
}
