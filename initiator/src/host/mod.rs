//! A blocking host: a pool, a fabric and one session, polled until a call completes.
//!
//! One [`Host`] is one association; a [`MultipathHost`] is one namespace over several. It belongs to one thread; each thread needs its own.

mod command;
mod discover;
mod fabric_set;
mod multipath_host;
pub(crate) mod notice;
mod ns_management;
mod transfer;

pub use command::Page;
pub use discover::Discovery;
pub(crate) use multipath_host::CLOSE_LIMIT;
pub use multipath_host::{MultipathHost, MultipathSetup};
pub use transfer::Range;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use nvme::feature::AsyncEvent;
use rdma::{Buf, Event, Pool, RemoteRegion, Wake};

use crate::Error;
use crate::fabric::{Provider, Wire};
use crate::session::{Done, EndReason, Io, Options, Phase, Refused, Request, Session};

/// Maximum number of events taken from the fabric at once.
const BATCH: usize = 256;
/// Maximum sleep, which limits the effect of a missed wake-up.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// Time limit for closing the connections; afterwards the system closes them.
const GOODBYE: Duration = Duration::from_secs(5);

/// Resources of a host.
#[derive(Clone, Copy, Debug)]
pub struct HostOptions {
    /// The fabric provider.
    pub provider: Provider,
    /// The address to connect from; `None`: determined by the route.
    pub source: Option<IpAddr>,
    /// Bytes for data in the pool, in addition to those of the queues.
    pub data_bytes: u64,
    /// The largest buffer of these, in bytes: 4096 times a power of two.
    pub largest_bytes: u32,
}

impl Default for HostOptions {
    fn default() -> Self {
        HostOptions {
            provider: Provider::Auto,
            source: None,
            data_bytes: 32 << 20,
            largest_bytes: 1 << 20,
        }
    }
}

/// A connected host.
#[derive(Debug)]
pub struct Host {
    session: Session,
    pool: Pool,
    wire: Wire,
    batch: Vec<Event>,
    /// Submission time of the first command that has not been sent yet.
    submitting: Option<Instant>,
    /// Requests that were done while a call waited for something else.
    others: VecDeque<Done>,
    next_tag: u64,
    /// The largest buffer of the pool.
    largest_bytes: u32,
}

impl Host {
    /// Connects, and waits until requests can be sent.
    ///
    /// # Errors
    /// The reason of the failure.
    pub fn connect(options: Options, setup: HostOptions) -> Result<Host, Error> {
        let plan = options.plan(setup.data_bytes, setup.largest_bytes);
        let pool =
            Pool::new(plan).map_err(|e| Error::Local(format!("no memory for the buffers: {e}")))?;
        let wire = Wire::new(setup.provider, setup.source, options.to, pool.region())
            .map_err(|e| Error::Local(e.to_string()))?;
        let mut host = Host {
            session: Session::new(options),
            pool,
            wire,
            batch: Vec::with_capacity(BATCH),
            submitting: None,
            others: VecDeque::new(),
            next_tag: OWN_TAGS,
            largest_bytes: setup.largest_bytes,
        };
        host.with(Session::start);
        host.drive(None, |host| host.session.phase() != Phase::Starting);
        match host.session.phase() {
            Phase::Ready => Ok(host),
            _ => Err(host.why()),
        }
    }

    /// Returns the session, read-only.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the fabric in use: never [`Provider::Auto`].
    pub fn provider(&self) -> Provider {
        self.wire.provider()
    }

    /// Returns the pool: buffers for `Data::Buf`, and copies from and to exposed memory.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Shuts the controller down, closes the connections and waits for that. Buffers and exposed
    /// memory that the caller still has are lost with the host.
    pub fn disconnect(mut self) {
        self.with(Session::close);
        self.leave();
    }

    /// Returns the next event of the controller; waits for it until `until`.
    ///
    /// # Errors
    /// The association has ended.
    pub fn event(&mut self, until: Instant) -> Result<Option<AsyncEvent>, Error> {
        let mut event = None;
        self.drive(Some(until), |host| {
            event = host.session.next_event();
            event.is_some() || host.session.ended().is_some()
        });
        match self.session.ended() {
            Some(_) if event.is_none() => Err(self.why()),
            _ => Ok(event),
        }
    }

    /// Returns why the association ended; known when the last connection is closed.
    fn why(&mut self) -> Error {
        self.leave();
        Error::Ended(self.session.ended().cloned().unwrap_or(EndReason::Closed))
    }

    /// Waits until the connections are closed, or for [`GOODBYE`].
    fn leave(&mut self) {
        let until = Instant::now() + GOODBYE;
        self.drive(Some(until), |host| host.session.phase() == Phase::Ended);
    }
}

/// A host that is dropped without [`Host::disconnect`] shuts down as well, without waiting.
impl Drop for Host {
    fn drop(&mut self) {
        if self.session.phase() != Phase::Ended {
            self.with(Session::abort);
            self.wire.fabric().flush();
        }
    }
}

/// Interface for polling loops.
impl Host {
    /// As [`Session::submit`]. The command is sent by the next [`ring`](Host::ring),
    /// [`turn`](Host::turn) or [`wait`](Host::wait). Tags of the caller are below 2^63.
    ///
    /// # Errors
    /// The reason; the request is returned.
    pub fn submit(&mut self, queue: u16, request: Request) -> Result<(), (Request, Refused)> {
        // The clock is read once for all requests that are submitted together.
        let now = *self.submitting.get_or_insert_with(Instant::now);
        let fabric = self.wire.fabric();
        self.session.submit(queue, request, &mut Io { pool: &mut self.pool, fabric, now })
    }

    /// Executes one iteration: [`poll`](Host::poll), then [`ring`](Host::ring).
    pub fn turn(&mut self) -> bool {
        let any = self.poll();
        self.ring();
        any
    }

    /// Polls the fabric and lets the session act. Returns whether anything happened. Does not
    /// block. A loop that polls, takes finished requests, submits more and then rings sends its
    /// acknowledgements and its new commands together.
    pub fn poll(&mut self) -> bool {
        let now = Instant::now();
        let Host { session, pool, wire, batch, .. } = self;
        let fabric = wire.fabric();
        fabric.poll(now, batch);
        let any = !batch.is_empty() || fabric.hints().receiving;
        let mut io = Io { pool, fabric, now };
        for event in batch.drain(..) {
            // No other user of this fabric exists, and a host accepts no connections.
            drop(session.on_event(event, &mut io));
        }
        session.tick(&mut io);
        any
    }

    /// Rings the doorbells: sends everything that was posted.
    pub fn ring(&mut self) {
        self.submitting = None;
        self.wire.fabric().flush();
    }

    /// Iterates until a request is done, the association has ended or `until` is reached; sleeps
    /// between iterations.
    pub fn wait(&mut self, until: Instant) {
        self.drive(Some(until), |host| {
            host.session.has_done() || host.session.ended().is_some() || !host.others.is_empty()
        });
    }

    /// Returns the next request that is done.
    pub fn next_done(&mut self) -> Option<Done> {
        self.others.pop_front().or_else(|| self.session.next_done())
    }

    /// Exposes memory to the target until [`Host::revoke`], for `Data::Exposed`.
    ///
    /// # Errors
    /// The pool has no such buffer, or the fabric cannot expose it.
    pub fn expose(&mut self, len: u32) -> Result<RemoteRegion, Error> {
        let buf = self.take(len)?;
        let Some(qp) = self.session.qp(0) else {
            self.pool.give(buf);
            return Err(self.why());
        };
        self.wire.fabric().register_remote(qp, buf).map_err(|(buf, error)| {
            self.pool.give(buf);
            Error::Local(error.to_string())
        })
    }

    /// Revokes the access, and frees the memory.
    pub fn revoke(&mut self, memory: RemoteRegion) {
        let buf = self.wire.fabric().deregister_remote(memory);
        self.pool.give(buf);
    }

    fn take(&mut self, len: u32) -> Result<Buf, Error> {
        self.pool.take_data(len).ok_or_else(|| {
            Error::Local(format!("the pool has no piece of {len} bytes left for data"))
        })
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Session, &mut Io<'_>) -> T) -> T {
        let fabric = self.wire.fabric();
        act(&mut self.session, &mut Io { pool: &mut self.pool, fabric, now: Instant::now() })
    }

    /// Iterates and sleeps until `done` returns true, or until `until`.
    fn drive(&mut self, until: Option<Instant>, mut done: impl FnMut(&mut Host) -> bool) {
        self.ring();
        loop {
            let any = self.turn();
            if done(self) || until.is_some_and(|until| Instant::now() >= until) {
                return;
            }
            if any {
                continue;
            }
            let wake = if self.session.waits_for_sends() { Wake::Any } else { Wake::Needed };
            self.wire.fabric().arm(wake);
            if self.turn() {
                if done(self) {
                    return;
                }
                continue;
            }
            let tick = self.with(Session::tick);
            self.ring();
            let now = Instant::now();
            // Evaluated only now: operations since the arming may have set an earlier deadline.
            let due = self.wire.fabric().deadline();
            let next = [due, tick, until, Some(now + LONGEST_SLEEP)].into_iter().flatten().min();
            let limit = next.map_or(LONGEST_SLEEP, |next| next.saturating_duration_since(now));
            self.wire.sleep(limit);
        }
    }
}

/// Tags of the host's own requests start here.
const OWN_TAGS: u64 = 1 << 63;
