//! One association: a host, a controller, an admin queue and I/O queues, each on a queue pair of
//! its own.
//!
//! ```text
//! Idle ──start──► Starting ──► Ready ──close──► Closing ──► Ended
//!                     └───────────┴─── a fault, a timeout, a lie of the target ──────^
//! ```
//!
//! A session owns state and borrows the world ([`Io`]). Whoever drives it
//!
//! * hands it every [`Event`] of the fabric ([`Session::on_event`] returns those of others),
//! * calls [`Session::tick`] when the time it returned has come, at the latest,
//! * flushes the fabric at the end of each turn,
//! * takes what is done ([`Session::next_done`]) and what the controller reports
//!   ([`Session::next_event`]).
//!
//! Each request comes home in exactly one [`Done`], with its data, also when the association has
//! died before an answer. There is no reconnecting: an association that has ended stays so.
//!
//! Everything from the target is suspected. An answer to no command, a second answer, an answer of
//! a wrong length ends the association with an [`Ended`] that says so.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nvme::feature::AsyncEvent;
use nvme::identify::IdentifyController;
use nvme::property::{Cap, Vs};
use nvme::{Nqn, Sqe, Status};
use rdma::{Buf, Event, Exposed, Fabric, Pool, Qp};

/// The lent world.
pub struct Io<'a> {
    /// Buffers: cells for responses and commands, receive buffers for commands with data in the
    /// capsule (lead 64 bytes), data buffers for what bring-up reads. Data of requests come from
    /// the caller.
    pub pool: &'a mut Pool,
    /// The fabric.
    pub fabric: &'a mut dyn Fabric,
    /// The time of this turn.
    pub now: Instant,
}

/// Who connects to what, and how.
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
    /// I/O queues wanted; the controller may grant fewer. 0 for the discovery service.
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
            io_queues: u16::from(!subnqn.is_discovery()),
            queue_entries: 128,
            kato_ms: 5000,
            in_capsule: true,
            connect_timeout: Duration::from_secs(30),
            command_timeout: Duration::from_secs(30),
        }
    }
}

/// Data of a request. The direction is in the opcode.
#[derive(Debug)]
pub enum Data {
    /// None.
    None,
    /// The window of a buffer. It is exposed for this one command under a key of its own, and
    /// concealed before it comes home. To write small data it may be copied to the capsule.
    Buf(Buf),
    /// A part of a window that the caller has exposed (`Session::expose` or `Fabric::expose`) and
    /// uses again and again: the way of hot loops. Small writes are copied to the capsule.
    Exposed {
        /// The memory.
        memory: Exposed,
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

/// What the controller answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Outcome.
    pub status: Status,
    /// Command specific result: dword 0 is the low half.
    pub result: u64,
}

/// The association ended before the answer: whether the command was executed, nobody knows.
/// [`Session::ended`] says why.
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
    pub outcome: Result<Answer, Lost>,
    /// Its data: nobody else has access to a [`Data::Buf`] any more.
    pub data: Data,
}

/// Why a request was not taken. The request comes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    /// As many commands are outstanding as the queue holds. Take what is done first.
    #[error("the queue is full")]
    Full,
    /// The pool has no buffer for the command just now.
    #[error("no buffer for the command")]
    NoBuffer,
    /// The association is not ready (yet, or any more), or has no such queue.
    #[error("the association is not ready, or has no such queue")]
    NotReady,
    /// The data cannot be exposed to the target, or are longer than a descriptor can say (16 MiB
    /// less one byte).
    #[error("the data cannot be exposed to the target")]
    Data,
}

/// Where in its life an association is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Before [`Session::start`].
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

/// Why an association ended, as a sentence for a person.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Ended {
    /// [`Session::close`] was called.
    #[error("the association was closed")]
    Closed,
}

/// One association with one controller.
#[derive(Debug)]
pub struct Session {
    options: Options,
    phase: Phase,
}

impl Session {
    /// An association that has not begun.
    #[must_use]
    pub fn new(options: Options) -> Session {
        Session { options, phase: Phase::Idle }
    }

    /// Begins: asks for the connection of the admin queue.
    pub fn start(&mut self, io: &mut Io<'_>) {
        let _ = io;
        todo!()
    }

    /// What the fabric reports. Events of queue pairs that are not this session's come back.
    pub fn on_event(&mut self, event: Event, io: &mut Io<'_>) -> Option<Event> {
        let _ = io;
        Some(event)
    }

    /// Keep alive and deadlines. Returns when to call again at the latest.
    pub fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        let _ = io;
        None
    }

    /// Sends a command on queue 0 (admin) or an I/O queue from 1 to [`Session::io_queues`].
    ///
    /// # Errors
    /// Why not; the request comes back.
    #[expect(clippy::result_large_err, reason = "the request comes back")]
    pub fn submit(
        &mut self,
        queue: u16,
        request: Request,
        io: &mut Io<'_>,
    ) -> Result<(), (Request, Refused)> {
        let _ = (queue, io);
        Err((request, Refused::NotReady))
    }

    /// The next request that came home.
    pub fn next_done(&mut self) -> Option<Done> {
        None
    }

    /// The next asynchronous event of the controller. Its log page acknowledges it: until that is
    /// read, no more of its kind come.
    pub fn next_event(&mut self) -> Option<AsyncEvent> {
        None
    }

    /// Shuts the controller down and ends all connections. Outstanding commands come home lost.
    pub fn close(&mut self, io: &mut Io<'_>) {
        let _ = io;
    }

    /// Ends all connections at once, without telling the controller.
    pub fn abort(&mut self, io: &mut Io<'_>) {
        let _ = io;
    }

    /// Where in its life the association is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Why the association ended, as soon as it is doomed.
    #[must_use]
    pub fn ended(&self) -> Option<&Ended> {
        None
    }

    /// Whether the queue pair is one of this session's.
    #[must_use]
    pub fn owns(&self, qp: Qp) -> bool {
        let _ = qp;
        false
    }

    /// The queue pair of a queue, while there is one: for `Fabric::expose`.
    #[must_use]
    pub fn qp(&self, queue: u16) -> Option<Qp> {
        let _ = queue;
        None
    }

    /// I/O queues that there are; known when ready.
    #[must_use]
    pub fn io_queues(&self) -> u16 {
        0
    }

    /// Commands that can be outstanding on a queue.
    #[must_use]
    pub fn capacity(&self, queue: u16) -> u16 {
        let _ = queue;
        0
    }

    /// Commands of the caller that are outstanding on a queue.
    #[must_use]
    pub fn outstanding(&self, queue: u16) -> u16 {
        let _ = queue;
        0
    }

    /// Controller id; known when ready, as are the following.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        0
    }

    /// Identify Controller.
    #[must_use]
    pub fn controller(&self) -> &IdentifyController {
        todo!()
    }

    /// Capabilities.
    #[must_use]
    pub fn cap(&self) -> Cap {
        Cap(0)
    }

    /// Version.
    #[must_use]
    pub fn vs(&self) -> Vs {
        Vs(0)
    }

    /// Bytes that one command may move: what the controller says, at most 16 MiB less a page.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u32 {
        0
    }

    /// What was asked for.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }
}
