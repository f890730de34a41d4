//! The fabric of a host: choice of provider, and sleeping on its descriptors.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use rdma::soft::{self, Soft};
#[cfg(feature = "verbs")]
use rdma::verbs::{self, Load, Verbs};
use rdma::{FabricError, Initiator, Region, ZonedIp};

rdma::named_enum! {
    /// The fabric provider.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
    pub enum Provider {
        /// `verbs` where an RDMA device owns the address that leads to the target, else `soft`
        #[default]
        Auto = "auto",
        /// RoCEv2 over an ordinary UDP socket: any machine
        Soft = "soft",
        /// An RDMA device, through rdma-core
        Verbs = "verbs",
    }
}

/// The fabric of one host.
#[derive(Debug)]
pub(crate) enum Wire {
    Soft(Box<Soft>),
    #[cfg(feature = "verbs")]
    Verbs(Box<Verbs>),
}

impl Wire {
    /// Creates the fabric for a target. `source` is the address to connect from, where it can be
    /// chosen.
    pub(crate) fn new(
        provider: Provider,
        source: Option<IpAddr>,
        to: SocketAddr,
        region: &Arc<Region>,
    ) -> Result<Wire, FabricError> {
        let provider = match provider {
            Provider::Auto if has_device(local(source, to)) => Provider::Verbs,
            Provider::Auto => Provider::Soft,
            given => given,
        };
        match provider {
            Provider::Verbs => with_device(source, to, region),
            _ => {
                let options = soft::Options { source, ..soft::Options::default() };
                Ok(Wire::Soft(Box::new(Soft::new(Arc::clone(region), options)?)))
            }
        }
    }

    /// Returns the provider in use.
    pub(crate) fn provider(&self) -> Provider {
        match self {
            Wire::Soft(_) => Provider::Soft,
            #[cfg(feature = "verbs")]
            Wire::Verbs(_) => Provider::Verbs,
        }
    }

    pub(crate) fn fabric(&mut self) -> &mut dyn Initiator {
        match self {
            Wire::Soft(soft) => soft.as_mut(),
            #[cfg(feature = "verbs")]
            Wire::Verbs(verbs) => verbs.as_mut(),
        }
    }

    /// Sleeps until there is an event to poll, at most for `limit`.
    pub(crate) fn sleep(&self, limit: Duration) {
        // Signals and failures also end the sleep; then there is nothing to poll.
        let mut fds = [PollFd::new(self.fd(), PollFlags::POLLIN)];
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(limit)), None);
    }

    /// Returns the descriptor that is readable when there is something to poll.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Wire::Soft(soft) => soft.as_fd(),
            #[cfg(feature = "verbs")]
            Wire::Verbs(verbs) => verbs.as_fd(),
        }
    }
}

/// Returns the local address from which is sent there: the given one, or that of the route.
fn local(source: Option<IpAddr>, to: SocketAddr) -> Option<SocketAddr> {
    match source {
        Some(source) => Some(ZonedIp::beside(source, to).with_port(0)),
        None => route(to),
    }
}

fn route(to: SocketAddr) -> Option<SocketAddr> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok()
}

#[cfg(feature = "verbs")]
fn has_device(address: Option<SocketAddr>) -> bool {
    address.is_some_and(verbs::owns)
}

#[cfg(not(feature = "verbs"))]
fn has_device(_: Option<SocketAddr>) -> bool {
    false
}

#[cfg(feature = "verbs")]
fn with_device(
    source: Option<IpAddr>,
    to: SocketAddr,
    region: &Arc<Region>,
) -> Result<Wire, FabricError> {
    let from = source.map(|source| ZonedIp::beside(source, to).with_port(0));
    if let Some(source) = source
        && !has_device(from)
    {
        return Err(FabricError(format!(
            "no RDMA device has the address {source}: leave out --host-traddr, or use --provider \
             soft"
        )));
    }
    let verbs = Verbs::new(Arc::clone(region), Load::default())?;
    Ok(Wire::Verbs(Box::new(verbs.with_source(from))))
}

#[cfg(not(feature = "verbs"))]
fn with_device(_: Option<IpAddr>, _: SocketAddr, _: &Arc<Region>) -> Result<Wire, FabricError> {
    Err(FabricError("this build has no verbs: build it with that feature, or use soft".into()))
}
