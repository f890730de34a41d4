//! Events that a fabric reports to its driver.

use std::any::Any;
use std::net::SocketAddr;

use crate::{Completion, Qp};

/// One thing that happened.
#[derive(Debug)]
pub enum Event {
    /// Posted work came home.
    Done(Completion),
    /// Somebody asks to connect.
    Incoming(Incoming),
    /// A connection that was accepted, by us or by the peer, is up. The first messages may arrive
    /// before this does.
    Established(Qp),
    /// The connection has ended and all its work is home. The last event of its queue pair.
    Gone(Qp, Reason),
    /// Nothing arrives any more at an address that is listened at: its device was taken away, or another
    /// device has the address now. `Fabric::listen` has been undone, and is to be called again when
    /// there is a device; connections made there have events of their own.
    ListenerLost(SocketAddr),
}

impl Event {
    /// The queue pair that it is about; a request to connect has none yet, and a listener none at all.
    #[must_use]
    pub fn qp(&self) -> Option<Qp> {
        match self {
            Event::Done(done) => Some(done.qp),
            Event::Incoming(_) | Event::ListenerLost(_) => None,
            Event::Established(qp) | Event::Gone(qp, _) => Some(*qp),
        }
    }
}

/// Reason for the end of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// We called `disconnect`.
    Local,
    /// The peer closed the connection.
    Peer,
    /// It never came up: the peer rejected or did not confirm our reply, or the reply could not
    /// be sent; or there is no way to the peer, or no answer from it.
    NotEstablished,
    /// The peer refused our request to connect.
    Rejected {
        /// What its connection manager says: an InfiniBand reject reason (28: the application
        /// refused, 8: nobody listens), or for iWARP a negative error number.
        code: i32,
        /// The peer's private data; the transport may have added zeros.
        private_data: Vec<u8>,
    },
    /// The device failed or was removed.
    Device,
}

/// A request to connect. Moves freely between threads; answer it by `Fabric::open` and `accept`,
/// or by `Fabric::reject`, on any fabric of the same provider. Dropping it rejects it.
#[derive(Debug)]
pub struct Incoming {
    /// The address that the peer used to reach us, never unspecified.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// The peer's private data, without any header of the connection manager; trailing zeros may
    /// have been added by the transport.
    pub private_data: Vec<u8>,
    /// How many RDMA Reads of ours the peer will answer at once.
    pub reads: u8,
    /// The provider's own handle.
    pub(crate) handle: Box<dyn Any + Send>,
}

impl Incoming {
    /// A request that belongs to no provider, for driving state machines without one: `handle`
    /// is whatever the test's own fabric wants to find again.
    #[must_use]
    pub fn detached(
        local: SocketAddr,
        remote: SocketAddr,
        private_data: Vec<u8>,
        reads: u8,
        handle: Box<dyn Any + Send>,
    ) -> Incoming {
        Incoming { local, remote, private_data, reads, handle }
    }

    /// Gives up the request and returns the provider's handle.
    #[must_use]
    pub fn into_handle(self) -> Box<dyn Any + Send> {
        self.handle
    }
}
