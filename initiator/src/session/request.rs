//! Requests and responses of a session.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nvme::auth::{GroupId, HashId, Secret};
use nvme::{Nqn, PAGE_BYTES, Sqe, Status};
use rdma::{Buf, Initiator, Pool, PoolPlan, RemoteRegion};

use super::ADMIN_ENTRIES;

/// Borrowed resources.
pub struct Io<'a> {
    /// Buffers: cells for responses and commands, receive buffers for commands with data in the capsule (lead
    /// 64 bytes), data buffers for reads of the initialization. Data of requests are supplied by the caller.
    /// [`Options::plan`] computes the numbers.
    pub pool: &'a mut Pool,
    /// The fabric.
    pub fabric: &'a mut dyn Initiator,
    /// The time of this iteration.
    pub now: Instant,
}

/// Options of a session: host, target and limits.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the target.
    pub to: SocketAddr,
    /// The subsystem; [`Nqn::DISCOVERY`] for the discovery service.
    pub subnqn: Nqn,
    /// NQN of this host.
    pub hostnqn: Nqn,
    /// Host identifier, as a UUID in the byte order in which it is written.
    pub hostid: [u8; 16],
    /// Requested I/O queues; the controller may grant fewer. Ignored for the discovery service, which has
    /// none.
    pub io_queues: u16,
    /// Entries of an I/O queue, 2 to 4096; one less can be outstanding. The controller may grant fewer.
    pub queue_entries: u16,
    /// Keep Alive Timeout in milliseconds; 0 for none.
    pub kato_ms: u32,
    /// Send the data of small writes in the capsule if the controller supports it.
    pub in_capsule: bool,
    /// Time limit of the whole initialization.
    pub connect_timeout: Duration,
    /// Time limit of a command; afterwards the association is ended.
    pub command_timeout: Duration,
    /// Secret of this host, for targets that require authentication.
    pub secret: Option<Secret>,
    /// Secret by which the target must authenticate itself; without it, it need not.
    pub controller_secret: Option<Secret>,
    /// Hashes offered for authentication, best first.
    pub hashes: Vec<HashId>,
    /// DH groups offered, best first.
    pub groups: Vec<GroupId>,
}

impl Options {
    /// The defaults: one I/O queue of 128 entries, 5 s keep alive, data in the capsule, 30 s limits.
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

    /// Returns the plan of a pool for one such session, with `data_bytes` for the caller in buffers of up to
    /// `largest_bytes` (4096 times a power of two), and a small amount for the session itself.
    pub fn plan(&self, data_bytes: u64, largest_bytes: u32) -> PoolPlan {
        let admin = u32::from(ADMIN_ENTRIES);
        let io = match self.subnqn.is_discovery() {
            true => 0,
            false => u32::from(self.io_queues) * u32::from(self.queue_entries),
        };
        PoolPlan {
            // For each entry a receive, a command, and a command whose Send has not completed yet.
            cells: (admin + io) * 3,
            receives: if self.in_capsule { io.min(MOST_CAPSULES) } else { 0 },
            lead_bytes: Sqe::BYTES as u32,
            tail_bytes: CAPSULE_DATA_BYTES,
            data_bytes: data_bytes + u64::from(largest_bytes.max(PAGE_BYTES as u32)),
            largest_bytes,
        }
    }
}

/// Maximum in-capsule data that is sent, in bytes.
const CAPSULE_DATA_BYTES: u32 = 4096;
/// Maximum number of capsules with data, of all queues together.
const MOST_CAPSULES: u32 = 2048;

/// Data of a request. The direction is in the opcode.
#[derive(Debug)]
pub enum Data {
    /// None.
    None,
    /// The window of a buffer. It is exposed for this one command under its own key, and the access is
    /// revoked before it is returned. The data of a small write may be copied to the capsule.
    Buf(Buf),
    /// A part of a window that the caller has exposed (`Initiator::register_remote`) and uses repeatedly: for
    /// performance-critical loops. Small writes are copied to the capsule. Until the caller revokes the
    /// access, the target can change it, also after the command is done.
    Exposed {
        /// The memory.
        memory: RemoteRegion,
        /// Offset of the data in the window, in bytes.
        at: u32,
        /// Their length in bytes.
        len: u32,
    },
}

/// One command.
#[derive(Debug)]
pub struct Request {
    /// The command. The session sets its id and its data descriptor.
    pub sqe: Sqe,
    /// Its data.
    pub data: Data,
    /// Identifies the request in the [`Done`].
    pub tag: u64,
}

/// Completion returned by the controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Response {
    /// Outcome.
    pub status: Status,
    /// Command specific result: dword 0 is the lower half.
    pub result: u64,
}

/// The association ended before the completion: it is unknown whether the command was executed.
/// `Session::ended` returns the reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the association ended before the answer")]
pub struct Lost;

/// A finished request.
#[derive(Debug)]
pub struct Done {
    /// The queue: 0 admin, from 1 I/O.
    pub queue: u16,
    /// The caller's tag.
    pub tag: u64,
    /// Result of the command.
    pub outcome: Result<Response, Lost>,
    /// Its data: the target has no access to a [`Data::Buf`] any more.
    pub data: Data,
}

/// Reason for a rejected request. The request is returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    /// The queue has no free slot, or too many requests are done and not taken.
    #[error("the queue is full")]
    Full,
    /// The pool has no buffer for the command at present.
    #[error("no buffer for the command")]
    NoBuffer,
    /// The association is not ready (yet, or any more), or has no such queue.
    #[error("the association is not ready, or has no such queue")]
    NotReady,
    /// The data cannot be exposed to the target, exceed their window, or are longer than the limit of a
    /// descriptor (16 MiB less one byte).
    #[error("the data cannot be exposed to the target")]
    Data,
}

/// Phase of an association.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Before `Session::start`.
    Idle,
    /// Connections and the controller are being initialized.
    Starting,
    /// Requests are accepted.
    Ready,
    /// The controller is being shut down, or the queue pairs are being closed.
    Closing,
    /// All queue pairs are closed, and every buffer of the session is returned to its pool.
    Ended,
}
