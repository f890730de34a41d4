//! Events that a fabric reports to its driver.

use std::any::Any;
use std::net::SocketAddr;

use crate::{Completion, Qp};

/// An event.
#[derive(Debug)]
pub enum Event {
    /// Posted work has completed.
    Done(Completion),
    /// A peer requests a connection.
    Incoming(Incoming),
    /// A connection, accepted by us or by the peer, is established. Its first messages may arrive
    /// before this event.
    Established(Qp),
    /// The connection has ended and all its work has completed. The last event of its queue pair.
    Gone(Qp, Reason),
    /// An address is no longer listened at: its device was removed, or another device has the
    /// address now. `Fabric::listen` was undone, and is to be called again when there is a device;
    /// connections made there have events of their own.
    ListenerLost(SocketAddr),
}

impl Event {
    /// Its queue pair; a connection request has none yet, and a listener has none.
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
    /// `disconnect` was called.
    Local,
    /// The peer closed the connection.
    Peer,
    /// It was never established: the peer rejected or did not confirm our reply, or the reply could
    /// not be sent; or there is no route to the peer, or no answer from it.
    NotEstablished,
    /// The peer rejected our connection request.
    Rejected {
        /// Code of its connection manager: an InfiniBand reject reason (28: the application
        /// refused, 8: no listener), or for iWARP a negative errno.
        code: i32,
        /// The peer's private data; the transport may have added zeros.
        private_data: Vec<u8>,
    },
    /// The device failed or was removed.
    Device,
}

/// A connection request. May be sent to another thread; answer it by `Fabric::open` and `accept`,
/// or by `Fabric::reject`, on any fabric of the same provider. Dropping it rejects it.
#[derive(Debug)]
pub struct Incoming {
    /// The local address that the peer used, never unspecified.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    /// The peer's private data, without any header of the connection manager; trailing zeros may
    /// have been added by the transport.
    pub private_data: Vec<u8>,
    /// RDMA Reads of ours that the peer will answer concurrently.
    pub reads: u8,
    /// The provider's own handle.
    pub(crate) handle: Box<dyn Any + Send>,
}

impl Incoming {
    /// A request without a provider, for driving state machines without one: `handle` is whatever
    /// the fabric of the test needs.
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

    /// Takes the handle of the provider out of the request.
    #[must_use]
    pub(crate) fn take_handle(&mut self) -> Box<dyn Any + Send> {
        std::mem::replace(&mut self.handle, Box::new(()))
    }
}
