//! What carries the datagrams of a fabric in tests: sockets, or a simulated network.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::sys::epoll::{Epoll, EpollCreateFlags};

use super::network::NetworkPort;
use crate::capture::Capture;
use crate::soft::config::{Config, Path};
use crate::soft::endpoint::Endpoint;
use crate::soft::provider::Soft;
use crate::soft::udp::{SocketBuffers, Taken, Udp};
use crate::{FabricError, Region};

/// As [`Udp`], whose methods these are.
#[derive(Debug)]
pub(in crate::soft) enum Wire {
    Udp(Box<Udp>),
    /// The descriptor is never readable: nothing sleeps.
    Simulated(NetworkPort, Epoll),
}

impl From<Udp> for Wire {
    fn from(udp: Udp) -> Wire {
        Wire::Udp(Box::new(udp))
    }
}

impl Wire {
    pub(in crate::soft) fn listen(
        &mut self,
        at: SocketAddr,
        endpoint: &mut Endpoint,
    ) -> Result<(), FabricError> {
        match self {
            Wire::Udp(udp) => udp.listen(at, endpoint)?,
            Wire::Simulated(..) => endpoint.listen(at),
        }
        Ok(())
    }

    pub(in crate::soft) fn unlisten(&mut self, at: SocketAddr, endpoint: &mut Endpoint) {
        match self {
            Wire::Udp(udp) => udp.unlisten(at, endpoint),
            Wire::Simulated(..) => endpoint.unlisten(at),
        }
    }

    pub(in crate::soft) fn apply_shared_state(&mut self, endpoint: &mut Endpoint) {
        if let Wire::Udp(udp) = self {
            udp.apply_shared_state(endpoint);
        }
    }

    pub(in crate::soft) fn path(
        &mut self,
        to: SocketAddr,
        endpoint: &mut Endpoint,
    ) -> Result<Path, FabricError> {
        match self {
            Wire::Udp(udp) => udp.path(to, endpoint),
            Wire::Simulated(port, _) => Ok(Path::from(port.address())),
        }
    }

    pub(in crate::soft) fn has(&self, address: IpAddr) -> bool {
        match self {
            Wire::Udp(udp) => udp.has(address),
            Wire::Simulated(..) => true,
        }
    }

    pub(in crate::soft) fn path_mtu(
        &mut self,
        from: IpAddr,
        to: IpAddr,
        asked: u32,
    ) -> Option<u32> {
        match self {
            Wire::Udp(udp) => udp.path_mtu(from, to, asked),
            Wire::Simulated(..) => None,
        }
    }

    pub(in crate::soft) fn receive(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        region: &Region,
        events: usize,
    ) -> Taken {
        match self {
            Wire::Udp(udp) => udp.receive(now, endpoint, region, events),
            Wire::Simulated(port, _) => {
                port.receive(now, endpoint, region, events);
                // Simulated time does not advance until all are read.
                Taken { bytes: 0, all: true }
            }
        }
    }

    pub(in crate::soft) fn transmit(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        region: &Region,
    ) {
        match self {
            Wire::Udp(udp) => udp.transmit(now, endpoint, region),
            Wire::Simulated(port, _) => port.transmit(now, endpoint, region),
        }
    }

    pub(in crate::soft) fn arm(&mut self) {
        if let Wire::Udp(udp) = self {
            udp.arm();
        }
    }

    pub(in crate::soft) fn is_blocked(&self) -> bool {
        match self {
            Wire::Udp(udp) => udp.is_blocked(),
            Wire::Simulated(..) => false,
        }
    }

    /// A simulated network is not captured.
    pub(in crate::soft) fn capture_to(&mut self, capture: Capture) {
        if let Wire::Udp(udp) = self {
            udp.capture_to(capture);
        }
    }

    pub(in crate::soft) fn buffers(&self) -> impl Iterator<Item = SocketBuffers> {
        let udp = match self {
            Wire::Udp(udp) => Some(udp),
            Wire::Simulated(..) => None,
        };
        udp.into_iter().flat_map(|udp| udp.buffers())
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Wire::Udp(udp) => udp.as_fd(),
            Wire::Simulated(_, epoll) => epoll.0.as_fd(),
        }
    }
}

impl Soft {
    /// Creates a fabric in a simulated network; time comes from its calls, and unpredictable
    /// numbers from `entropy`.
    ///
    /// # Errors
    /// The system provides no epoll instance.
    pub fn simulated(
        port: NetworkPort,
        config: Config,
        entropy: Box<dyn FnMut() -> u64 + Send>,
        now: Instant,
        region: Arc<Region>,
    ) -> Result<Soft, FabricError> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
            .map_err(|e| FabricError(format!("cannot make an epoll instance: {}", e.desc())))?;
        let endpoint = Endpoint::new(config, entropy);
        Ok(Soft::over(Wire::Simulated(port, epoll), endpoint, region, now))
    }
}
