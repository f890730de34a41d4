//! A host that blocks: a pool, a fabric and one session, driven until things are done.

use std::net::IpAddr;
use std::time::Instant;

use nvme::log::DiscoveryEntry;
use nvme::{Sqe, Status};
use rdma::{Exposed, Pool};

use crate::session::{Data, Done, Ended, Options, Refused, Request, Session};

/// Which fabric provider moves the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Provider {
    /// `Verbs` where an RDMA device owns the address that leads to the target, else `Soft`.
    #[default]
    Auto,
    /// RoCEv2 over an ordinary UDP socket.
    Soft,
    /// An RDMA device, through rdma-core.
    Verbs,
}

/// The means of a host.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Which fabric.
    pub provider: Provider,
    /// The address to connect from; without one the route decides.
    pub source: Option<IpAddr>,
    /// Bytes for data in the pool, beside what the queues need.
    pub data_bytes: u64,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { provider: Provider::Auto, source: None, data_bytes: 32 << 20 }
    }
}

/// Why something did not work, as a sentence for a person.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The association has ended.
    #[error("{0}")]
    Ended(Ended),
    /// The controller refused the command.
    #[error("{what}: {status}")]
    Status {
        /// What was tried.
        what: &'static str,
        /// The answer.
        status: Status,
    },
    /// Anything on this side.
    #[error("{0}")]
    Local(String),
}

/// A connected host.
pub struct Host {
    session: Session,
    pool: Pool,
}

impl Host {
    /// Connects, and waits until requests can be sent.
    ///
    /// # Errors
    /// Why that failed.
    pub fn connect(options: Options, setup: Setup) -> Result<Host, Error> {
        let _ = (options, setup);
        todo!()
    }

    /// Asks the discovery service at `options.to` what it offers.
    ///
    /// # Errors
    /// Why that failed.
    pub fn discover(options: Options, setup: Setup) -> Result<Vec<DiscoveryEntry>, Error> {
        let _ = (options, setup);
        todo!()
    }

    /// The session, to look at.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The pool: buffers for [`Data::Buf`], and copies from and to exposed memory.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// Shuts the controller down, ends the connections and waits for that.
    pub fn disconnect(self) {
        todo!()
    }
}

/// Loops of one's own.
impl Host {
    /// As [`Session::submit`]. It leaves with the next [`turn`](Host::turn) or
    /// [`wait`](Host::wait).
    ///
    /// # Errors
    /// Why not; the request comes back.
    pub fn submit(&mut self, queue: u16, request: Request) -> Result<(), (Request, Refused)> {
        let _ = queue;
        Err((request, Refused::NotReady))
    }

    /// One turn: polls the fabric, lets the session act, flushes. Returns whether anything
    /// happened. Does not block.
    pub fn turn(&mut self) -> bool {
        todo!()
    }

    /// Turns until something is done, the association has ended or `until` has come; sleeps
    /// between turns.
    pub fn wait(&mut self, until: Instant) {
        let _ = until;
        todo!()
    }

    /// The next request that came home.
    pub fn next_done(&mut self) -> Option<Done> {
        self.session.next_done()
    }

    /// Memory that the target may access until [`Host::conceal`], for [`Data::Exposed`].
    ///
    /// # Errors
    /// The pool has no such piece, or the fabric cannot expose it.
    pub fn expose(&mut self, len: u32) -> Result<Exposed, Error> {
        let _ = len;
        todo!()
    }

    /// Takes the access away and the memory back.
    pub fn conceal(&mut self, memory: Exposed) {
        let _ = memory;
        todo!()
    }
}

/// Commands.
impl Host {
    /// Sends one command and waits for its answer; an answer that is no success is an error.
    ///
    /// # Errors
    /// The status, or the end of the association.
    pub fn command(
        &mut self,
        queue: u16,
        what: &'static str,
        sqe: Sqe,
        data: Data,
    ) -> Result<(u64, Data), Error> {
        let _ = (queue, what, sqe, data);
        todo!()
    }
}
