//! rdma-core: InfiniBand, RoCE and iWARP adapters, and the kernel's own `rdma_rxe` and `siw`.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use crate::{Event, Fabric, FabricError, Incoming, Qp, QpLimits, Region, Tag, Work};

/// Whether an RDMA device of this machine owns `addr` (for an unspecified address: whether there
/// is any). False also without rdma-core.
#[must_use]
pub fn owns(addr: IpAddr) -> bool {
    let _ = addr;
    false
}

/// The provider over rdma-core. One a reactor.
#[derive(Debug)]
pub struct Verbs {
    _region: Arc<Region>,
}

impl Verbs {
    /// Opens every RDMA device and registers `region` with each, for local access only.
    ///
    /// # Errors
    /// rdma-core is not installed, there is no device, or the memory cannot be locked.
    pub fn new(region: Arc<Region>) -> Result<Verbs, FabricError> {
        drop(region);
        Err(FabricError("the verbs provider is not written yet".into()))
    }
}

impl Fabric for Verbs {
    fn listen(&mut self, at: SocketAddr) -> Result<(), FabricError> {
        Err(FabricError(format!("cannot listen on {at}: the verbs provider is not written yet")))
    }
    fn unlisten(&mut self, _at: SocketAddr) {}
    fn open(&mut self, _incoming: Incoming, _limits: QpLimits) -> Result<Qp, FabricError> {
        Err(FabricError("the verbs provider is not written yet".into()))
    }
    fn accept(&mut self, _qp: Qp, _private_data: &[u8]) {}
    fn reject(&mut self, _incoming: Incoming, _private_data: &[u8]) {}
    fn disconnect(&mut self, _qp: Qp) {}
    fn post(&mut self, _qp: Qp, _tag: Tag, _work: Work) {}
    fn flush(&mut self) {}
    fn poll(&mut self, _now: Instant, _batch: &mut Vec<Event>) {}
    fn arm(&mut self) -> Option<Instant> {
        None
    }
    fn fd(&self) -> RawFd {
        -1
    }
}
