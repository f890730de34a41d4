//! Requests and responses of a session.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nvme::auth::{GroupId, HashId, Secret};
use nvme::{Nqn, PAGE_BYTES, Sqe, Status};
use rdma::{Buf, Initiator, Pool, PoolPlan, RemoteRegion};

use super::ADMIN_ENTRIES;

/// The lent world.
pub struct Io<'a> {
    /// Buffers: cells for responses and commands, receive buffers for commands with data in the
    /// capsule (lead 64 bytes), data buffers for what bring-up reads. Data of requests come from
    /// the caller. [`Options::plan`] says how many.
    pub pool: &'a mut Pool,
    /// The fabric.
    pub fabric: &'a mut dyn Initiator,
    /// The time of this turn.
    pub now: Instant,
}

/// Options of a session: host, target and limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the target listens.
    pub to: SocketAddr,
    /// The subsystem; [`Nqn::DISCOVERY`] for the discovery service.
    pub subnqn: Nqn,
    /// Who we are.
    pub hostnqn: Nqn,
    /// Who we are, as a UUID in the byte order in which it is written.
    pub hostid: [u8; 16],
    /// I/O queues wanted; the controller may grant fewer. Of no meaning for the discovery
    /// service, which has none.
    pub io_queues: u16,
    /// Entries of an I/O queue, 2 to 4096; one less can be outstanding. The controller may grant
    /// fewer.
    pub queue_entries: u16,
    /// Keep Alive Timeout in milliseconds; 0 for none.
    pub kato_ms: u32,
    /// Send the data of small writes in the capsule when the controller takes them so.
    pub in_capsule: bool,
    /// How long the whole bring-up may take.
    pub connect_timeout: Duration,
    /// How long a command may take before the association is given up.
    pub command_timeout: Duration,
    /// By which we prove who we are, to a target that demands it.
    pub secret: Option<Secret>,
    /// By which the target must prove who it is; without it, it need not.
    pub controller_secret: Option<Secret>,
    /// Hashes that we offer to authenticate with, best first.
    pub hashes: Vec<HashId>,
    /// DH groups that we offer, best first.
    pub groups: Vec<GroupId>,
}

impl Options {
    /// The usual: one I/O queue of 128 entries, 5 s keep alive, data in the capsule, 30 s limits.
    #[must_use]
    pub fn new(to: SocketAddr, subnqn: Nqn, hostnqn: Nqn, hostid: [u8; 16]) -> Options {
        Options {
            to,
            subnqn,
            hostnqn,
            hostid,
            io_queues: 1,
            queue_entries: 128,
            kato_ms: 5000,
            in_capsule: true,
            connect_timeout: Duration::from_secs(30),
            command_timeout: Duration::from_secs(30),
            secret: None,
            controller_secret: None,
            hashes: HashId::ALL.to_vec(),
            groups: GroupId::ALL.to_vec(),
        }
    }

    /// A pool for one session of this kind, with `data_bytes` for the caller in pieces of up to
    /// `largest_bytes` (4096 times a power of two), beside a little for the session itself.
    #[must_use]
    pub fn plan(&self, data_bytes: u64, largest_bytes: u32) -> PoolPlan {
        let admin = u32::from(ADMIN_ENTRIES);
        let io = match self.subnqn.is_discovery() {
            true => 0,
            false => u32::from(self.io_queues) * u32::from(self.queue_entries),
        };
        PoolPlan {
            // A receive, a command, and a command whose Send has not come home yet, of each entry.
            cells: (admin + io) * 3,
            receives: if self.in_capsule { io.min(MOST_CAPSULES) } else { 0 },
            lead_bytes: Sqe::BYTES as u32,
            tail_bytes: CAPSULE_DATA_BYTES,
            data_bytes: data_bytes + u64::from(largest_bytes.max(PAGE_BYTES as u32)),
            largest_bytes,
        }
    }
}

/// Data that a capsule of ours carries at most, in bytes.
const CAPSULE_DATA_BYTES: u32 = 4096;
/// Capsules with data at once, of all queues together.
const MOST_CAPSULES: u32 = 2048;

/// Data of a request. The direction is in the opcode.
#[derive(Debug)]
pub enum Data {
    /// None.
    None,
    /// The window of a buffer. It is exposed for this one command under a key of its own, and
    /// concealed before it comes home. To write small data it may be copied to the capsule.
    Buf(Buf),
    /// A part of a window that the caller has exposed (`Initiator::register_remote`) and uses again and again:
    /// the way of hot loops. Small writes are copied to the capsule. Until the caller conceals it,
    /// the target can change it, also after the command is done.
    Exposed {
        /// The memory.
        memory: RemoteRegion,
        /// Where in the window the data begin, in bytes.
        at: u32,
        /// Their length in bytes.
        len: u32,
    },
}

/// One command.
#[derive(Debug)]
pub struct Request {
    /// The command. Its id and its data descriptor are the session's to fill in.
    pub sqe: Sqe,
    /// Its data.
    pub data: Data,
    /// What the caller wants to find again in the [`Done`].
    pub tag: u64,
}

/// Completion returned by the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    /// Outcome.
    pub status: Status,
    /// Command specific result: dword 0 is the low half.
    pub result: u64,
}

/// The association ended before the answer: whether the command was executed, nobody knows.
/// `Session::ended` says why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the association ended before the answer")]
pub struct Lost;

/// A request, come home.
#[derive(Debug)]
pub struct Done {
    /// The queue: 0 admin, from 1 I/O.
    pub queue: u16,
    /// The caller's tag.
    pub tag: u64,
    /// What became of the command.
    pub outcome: Result<Response, Lost>,
    /// Its data: nobody else has access to a [`Data::Buf`] any more.
    pub data: Data,
}

/// Reason for a rejected request. The request comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    /// As many commands are outstanding as the queue holds, or too many are done and not taken.
    #[error("the queue is full")]
    Full,
    /// The pool has no buffer for the command just now.
    #[error("no buffer for the command")]
    NoBuffer,
    /// The association is not ready (yet, or any more), or has no such queue.
    #[error("the association is not ready, or has no such queue")]
    NotReady,
    /// The data cannot be exposed to the target, leave their window, or are longer than a
    /// descriptor can say (16 MiB less one byte).
    #[error("the data cannot be exposed to the target")]
    Data,
}

/// Phase of an association.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Before `Session::start`.
    Idle,
    /// Connections and the controller are being brought up.
    Starting,
    /// Requests are taken.
    Ready,
    /// The controller is being shut down, or the queue pairs are ending.
    Closing,
    /// All queue pairs are gone, every buffer of the session is back in its pool.
    Ended,
}
