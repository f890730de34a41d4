//! The fabric: verbs over interchangeable providers, and the registered memory they move.
//!
//! This crate has no knowledge of NVMe: private data of a connection are opaque bytes, messages are
//! buffers. A provider implements [`Fabric`]; its driver owns it mutably, on one thread.
//!
//! # Life of a queue pair
//!
//! ```text
//! listen ──► Event::Incoming ──► open ──► post(Recv) × n ──► accept ──► Event::Established
//!                        └─────► reject                          │              │
//! connect ──► post(Recv) × n ────────────────────────────────────┤              │
//!                                                                └──────┬───────┘
//!                    peer disconnects, or a fault, or disconnect(qp) ───┤
//!                    every posted Work completes as Event::Done ────────┤
//!                                                                       ▼
//!                                                                  Event::Gone
//! ```
//!
//! * [`Fabric::post`] never fails and never loses a [`Buf`]: each posted [`Work`] is returned in
//!   exactly one [`Event::Done`], with an outcome, also when the queue pair has failed.
//! * [`Event::Gone`] is the last event of a [`Qp`]: every buffer that was posted on it has been
//!   returned before. It follows `open` or `connect` exactly once, whatever happened in between
//!   (also when `accept` failed, or the peer rejected). The handle may then be reused.
//! * The first failed completion of a queue pair means that the queue pair is in the state Error:
//!   all work posted on it, before or after, completes with a fault. Calling [`Fabric::disconnect`]
//!   is still required to get to `Gone` after a fault, and harmless when the peer was first.
//! * A `Write` is performed before every `Send` that is posted after it on its queue pair, so the
//!   `Send` tells the peer that the written data are there (reliable connection order); and sends
//!   are performed in the order of posting. Between two flushes a provider may let writes go first.
//!   A `Read` has no such order: an operation that depends on its data waits for its completion.
//! * A `SendImmediate` and a `WriteImmediate` consume a receive of the peer, and have the order of a
//!   `Send`.

pub mod capture;
pub mod event;
pub mod limits;
pub mod log_interval;
mod named_enum;
pub mod pool;
pub mod soft;
pub mod source;
pub mod spin;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod wire;
pub mod zone;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::time::Instant;

use nix::sys::resource::{Resource, getrlimit};

pub use event::{Event, Incoming, Reason};
pub use pool::{Buf, Pool, PoolPlan, Region, RemoteRegion};
pub use source::Source;
pub use spin::{AdaptivePoller, Budget as SpinBudget};
pub use zone::ZonedIp;

/// Handle of a queue pair: valid from `open` or `connect` to `Gone`, small and dense enough to
/// index a table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Qp(pub u32);

/// Value of a work request that is returned in its completion. Opaque to the fabric.
pub type Tag = u64;

/// Remote memory: `len` bytes at `addr` under `key`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Address, in the address space of its owner.
    pub addr: u64,
    /// Its remote key (STag).
    pub key: u32,
    /// Length in bytes.
    pub len: u32,
}

/// The verbs. Each owns the buffer it moves; the buffer's window says which bytes.
///
/// Immediate data are 32 bits, opaque to the fabric and big-endian on the wire (IBTA volume 1, 9.3
/// "Extended Transport Headers" and 9.4 "Transport Functions"). iWARP has none: a device of iWARP
/// refuses the work, which ends the connection.
#[derive(Debug)]
pub enum Work {
    /// Receives one message, at the start of the window.
    Recv(Buf),
    /// Send the window as one message.
    Send {
        /// The message.
        from: Buf,
        /// A key of the peer that its adapter is to invalidate on arrival. Providers whose device
        /// does not support that send without, which every host accepts.
        invalidate: Option<u32>,
    },
    /// Sends the window as one message with immediate data (Send with Immediate).
    SendImmediate {
        /// The message.
        from: Buf,
        /// Its immediate data.
        immediate: u32,
    },
    /// As `Write`, and completes a receive of the peer with immediate data (RDMA Write with
    /// Immediate).
    WriteImmediate {
        /// Source.
        from: Buf,
        /// Destination.
        to: Remote,
        /// The immediate data.
        immediate: u32,
    },
    /// Pushes the window to the peer's memory (RDMA Write). `to` is at least as long as the window.
    Write {
        /// Source.
        from: Buf,
        /// Destination.
        to: Remote,
    },
    /// Pulls the peer's memory into the window (RDMA Read). The window is as long as `from`.
    Read {
        /// Destination.
        into: Buf,
        /// Source.
        from: Remote,
    },
}

impl Work {
    /// Takes the buffer out of the work.
    pub fn into_buf(self) -> Buf {
        match self {
            Work::Recv(buf)
            | Work::Send { from: buf, .. }
            | Work::SendImmediate { from: buf, .. }
            | Work::Read { into: buf, .. }
            | Work::Write { from: buf, .. }
            | Work::WriteImmediate { from: buf, .. } => buf,
        }
    }

    /// The buffer.
    pub fn buf(&self) -> &Buf {
        match self {
            Work::Recv(buf)
            | Work::Send { from: buf, .. }
            | Work::SendImmediate { from: buf, .. }
            | Work::Read { into: buf, .. }
            | Work::Write { from: buf, .. }
            | Work::WriteImmediate { from: buf, .. } => buf,
        }
    }
}

/// What a completed receive has in addition to the bytes in its buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceivedWith {
    /// Nothing. Also of all work other than `Recv`, and of a receive that failed.
    Nothing,
    /// Send with Invalidate: the key of a remote region that the message has invalidated. Only for
    /// regions whose [`RemoteRegion::bears_invalidation`] is true: for others, such a message ends
    /// the connection.
    Invalidate(u32),
    /// Send with Immediate: the immediate data.
    Immediate(u32),
    /// RDMA Write with Immediate: the data are in remote regions, and nothing is in the buffer of the
    /// receive, so the outcome is 0.
    Write {
        /// The immediate data.
        immediate: u32,
        /// Bytes of the RDMA Write: 0 to 2 GiB.
        bytes: u32,
    },
}

/// Completed work.
#[derive(Debug)]
pub struct Completion {
    /// The queue pair it was posted on.
    pub qp: Qp,
    /// The poster's tag.
    pub tag: Tag,
    /// The work; the receiver of this completion owns its buffer again.
    pub work: Work,
    /// Bytes moved (for `Recv` those in its buffer, the length of the message), or the fault of the
    /// queue pair.
    pub outcome: Result<u32, Fault>,
    /// What the peer has sent with a message; an RDMA Write with Immediate also completes a `Recv`.
    pub with: ReceivedWith,
}

impl Completion {
    /// Of work to which the peer has added nothing.
    #[inline]
    pub fn new(qp: Qp, tag: Tag, work: Work, outcome: Result<u32, Fault>) -> Completion {
        Completion { qp, tag, work, outcome, with: ReceivedWith::Nothing }
    }
}

// Each command moves several: immediate data have taken the room of padding.
const _: () = assert!(size_of::<Work>() <= 56 && size_of::<Completion>() <= 88);

/// Error that ended a queue pair. There are no recoverable ones: a failed completion always ends
/// its connection; the host reconnects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The queue pair had failed or was disconnected before.
    #[error("flushed: the connection had ended")]
    Flushed,
    /// The peer refused access to its memory (bad key, range or right).
    #[error("the peer refused access to its memory")]
    RemoteAccess,
    /// The peer rejected the request as invalid, or failed to perform it.
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
    /// Desired number of outstanding RDMA Reads; granted are at most what the peer answers and the
    /// device issues, and at least one. For `connect`, the reads of the peer that we offer to
    /// answer concurrently, at most what the device supports; then 0 is possible, and means that
    /// the peer cannot read.
    pub reads: u8,
}

/// A failed call, as one sentence for the administrator: what was tried, what the system answered,
/// what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct FabricError(pub String);

/// What to do where a process may open no more descriptors: the limit in force, and how to raise it.
fn descriptor_remedy() -> String {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    format!(
        "too many open files; RLIMIT_NOFILE is {limit}: raise it (LimitNOFILE= in the systemd unit, \
         ulimit -n in a shell)"
    )
}

/// An error of the system in a sentence, with the remedy where descriptors are missing.
pub fn explained(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EMFILE) => descriptor_remedy(),
        _ => error.to_string(),
    }
}

/// Advice of a provider to its driver. Correctness never depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FabricHints {
    /// Maximum of queue pairs, those in use included: that of the smallest device. Changes when a
    /// device is added or removed. By default `u32::MAX`: no limit is known.
    pub queue_pairs_max: u32,
    /// Connection setup has used its share of the time, so none should be opened now; the caller
    /// tries again after a millisecond. Changes with each [`Fabric::open`], [`Fabric::accept`] and
    /// [`Fabric::reject`], and with each poll.
    pub connections_exhausted: bool,
    /// The last poll has moved data, although it may have reported no event. More are probably on
    /// their way, so polling again is better than sleeping.
    pub receiving: bool,
    /// Completion of a `Send` or a `Write` does not end a sleep prepared with [`Wake::Needed`], so
    /// its time is not known. Never changes.
    pub sends_deferred: bool,
}

impl Default for FabricHints {
    fn default() -> FabricHints {
        FabricHints {
            queue_pairs_max: u32::MAX,
            connections_exhausted: false,
            receiving: false,
            sends_deferred: false,
        }
    }
}

/// Counters of a provider. Names are lower case, with underscores.
#[derive(Clone, Debug, Default)]
pub struct FabricStats {
    /// Of the provider as a whole: name and count.
    pub counters: Vec<(&'static str, u64)>,
    /// Link errors of connections by local address: retransmissions, negative acknowledgements.
    /// Empty if a device does not report them. A provider bounds the number of addresses.
    pub link_errors: Vec<(IpAddr, &'static str, u64)>,
    /// Of the work that RDMA devices were given: name and count. Empty for a provider without a
    /// device.
    pub device: Vec<(&'static str, u64)>,
}

impl FabricStats {
    /// Removes all, and keeps the allocations.
    pub fn clear(&mut self) {
        self.counters.clear();
        self.link_errors.clear();
        self.device.clear();
    }
}

/// Events that end a sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// Every event.
    Any,
    /// Every event except completion of a `Send` or a `Write`, for which nothing waits. The next
    /// poll reports those. This saves a wake-up for each command. (A provider that cannot
    /// distinguish them in advance wakes for all.)
    Needed,
}

/// A provider of reliable connections, driven by one thread, in batches.
///
/// One iteration is: `poll`, process the events (`post` ..), `flush`. Before sleeping on `fd`:
/// `arm`, then `poll` once more, and sleep only if that returned nothing.
///
/// No method blocks. Only calls whose failure the caller can handle immediately return a
/// [`FabricError`]; later failures of a connection are reported by [`Event::Gone`]. A handle that
/// is unknown, or whose connection has ended, is not an error, because the driver learns of the end
/// later than the fabric: `post` returns the work, all other calls have no effect. Each method
/// names its equivalent in rdma-core, where there is one.
pub trait Fabric: Send {
    /// Starts to accept connections at `at` (an unspecified address means all). Requests arrive as
    /// [`Event::Incoming`], until [`Fabric::unlisten`] or [`Event::ListenerLost`].
    /// (`rdma_bind_addr`, `rdma_listen`.)
    ///
    /// # Errors
    /// The address is not local or in use, or has no device of this provider.
    fn listen(&mut self, at: SocketAddr) -> Result<(), FabricError>;

    /// Stops accepting at `at`. Requests that have been reported, and connections made there, stay.
    /// (`rdma_destroy_id` of the listener.)
    fn unlisten(&mut self, at: SocketAddr);

    /// Creates the queue pair that will serve `incoming`: receives may be posted immediately, and
    /// must be posted before [`Fabric::accept`], as the peer may send as soon as it has the reply.
    /// Consumes the request; on error it has been rejected without private data. (`rdma_migrate_id`
    /// if it arrived at another fabric, `rdma_create_qp`.)
    ///
    /// # Errors
    /// The device or the system has no room; the listener was removed; the request is another
    /// provider's.
    fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError>;

    /// Answers the request of an opened queue pair with a reply that carries `private_data`: at
    /// most 196 bytes, the size in a REP (IBTA volume 1, 12.6.8). Once for each `open`. Failure is
    /// reported as [`Event::Gone`]. (`rdma_accept`.)
    fn accept(&mut self, qp: Qp, private_data: &[u8]);

    /// Refuses a request that has not been opened; the peer sees a consumer-defined reject (reason
    /// 28) with `private_data`, at most the 148 bytes of a REJ (IBTA volume 1, 12.6.7).
    /// (`rdma_reject`.)
    fn reject(&mut self, incoming: Incoming, private_data: &[u8]);

    /// Ends a connection: all posted work completes, then [`Event::Gone`] follows. Idempotent.
    /// (`rdma_disconnect`, the queue pair to the state Error; when all is flushed,
    /// `rdma_destroy_qp` and `rdma_destroy_id`.)
    fn disconnect(&mut self, qp: Qp);

    /// Queues one work request, whose buffer is the fabric's until its [`Event::Done`]. Nothing
    /// reaches the peer before [`Fabric::flush`]. More receives or sends at once than the
    /// [`QpLimits`] of the queue pair allow may end the connection. Never fails: see the contract
    /// above. (A work request in the chain of its queue pair.)
    fn post(&mut self, qp: Qp, tag: Tag, work: Work);

    /// Hands everything queued to the device, one doorbell a queue pair. (`ibv_post_recv` and
    /// `ibv_post_send` of the chains.)
    fn flush(&mut self);

    /// Appends events to `batch`, in order, at most as many as `batch` has spare capacity for (and
    /// at least one event when there is any). `now` never runs backwards; calls without a time use
    /// that of the last poll. (`ibv_poll_cq`, `rdma_get_cm_event`.)
    fn poll(&mut self, now: Instant, batch: &mut Vec<Event>);

    /// Prepares for sleep: from now on any new event makes [`Fabric::fd`] readable. Returns
    /// [`Fabric::deadline`]. Holds for one sleep. (`ibv_req_notify_cq`, of the completion queue of sends
    /// only for [`Wake::Any`].)
    fn arm(&mut self, wake: Wake) -> Option<Instant>;

    /// When the provider is to be polled even without an event, if ever: its own next timer. A
    /// caller that polls or flushes after [`Fabric::arm`] reads it again: it may be earlier.
    fn deadline(&self) -> Option<Instant>;

    /// Becomes readable when there is something to poll (after `arm`). Never changes. (An epoll
    /// instance over the completion channels and the event channel.)
    fn fd(&self) -> RawFd;

    /// Current advice of the provider. Cheap: called between commands.
    fn hints(&self) -> FabricHints {
        FabricHints::default()
    }

    /// Whether the queued work fills one batch, so that a caller with much more to queue should
    /// flush first: the peer can start earlier, at no cost. Changes with each [`Fabric::post`] and
    /// [`Fabric::flush`]. Called for each command.
    fn is_batch_full(&self) -> bool {
        false
    }

    /// Appends the provider's counters to `stats`, always under the same names in the same order.
    /// Called a few times a second.
    fn stats(&self, stats: &mut FabricStats) {
        let _ = stats;
    }

    /// Tells the provider that the peer of an accepted connection was admitted: it has completed
    /// NVMe Connect and authentication. A provider may ignore connection requests from sources
    /// whose connections repeatedly end before that; if this is enabled (in the configuration of
    /// the provider `soft`), the driver calls this once for every connection, as soon as it is
    /// admitted.
    fn admit(&mut self, qp: Qp) {
        let _ = qp;
    }
}

/// Methods for the active side only: a host. A target never uses them.
pub trait Initiator: Fabric {
    /// Requests a connection from a listener at `to`, with at most 56 bytes of `private_data`:
    /// those of a REQ without the header of the IP service (IBTA volume 1, 12.6.5 and annex A11).
    /// Receives may be posted immediately, other work after [`Event::Established`]. If the peer
    /// rejects, [`Event::Gone`] has [`Reason::Rejected`]; any other failure is reported as `Gone`
    /// as well. (`rdma_resolve_addr`, `rdma_resolve_route`, `rdma_create_qp`, `rdma_connect`.)
    ///
    /// # Errors
    /// There is no route, no device for it, or the system has no room.
    fn connect(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError>;

    /// Lets peers read and write the window of `buf`, until [`Initiator::deregister_remote`]: used
    /// for the data buffers of commands. `qp`, which must be established, determines the device;
    /// every peer connected through it may use the key. (`ibv_reg_mr`.)
    ///
    /// # Errors
    /// The provider or the device does not support it; the buffer is returned.
    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)>;

    /// Ends the peers' access. The buffer is exclusively ours again. (`ibv_dereg_mr`.)
    fn deregister_remote(&mut self, region: RemoteRegion) -> Buf {
        region.into_buf()
    }

    /// Length up to which a message costs no more than its bytes. A longer one needs packets of its
    /// own: with many messages in flight, it is better to let the peer read the data than to send
    /// them in the message. Never changes once `qp` is established.
    fn short_message_bytes(&self, qp: Qp) -> u32 {
        let _ = qp;
        u32::MAX
    }
}
