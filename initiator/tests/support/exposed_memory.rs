//! Memory of a host that a simulated target gets at by the keys of its commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use nvme::{Sgl, Sqe};
use rdma::{Buf, Pool, PoolPlan, Region, Remote, RemoteRegion};

/// The address of the first byte of the region, for the target.
const BASE: u64 = 0x1_0000_0000;

pub(crate) struct ExposedMemory {
    region: Arc<Region>,
    /// Source of the handles of remote regions; the buffers themselves are in `open`.
    handles: Pool,
    open: BTreeMap<u32, Buf>,
    next_key: u32,
}

impl ExposedMemory {
    pub(crate) fn new(region: &Arc<Region>) -> ExposedMemory {
        let handles = PoolPlan::without_receives(8192, 0, 4096);
        ExposedMemory {
            region: region.clone(),
            handles: Pool::new(handles).expect("memory"),
            open: BTreeMap::new(),
            next_key: 0x1234,
        }
    }

    pub(crate) fn register(&mut self, buf: Buf) -> RemoteRegion {
        let key = self.next_key;
        self.next_key += 0x101;
        let remote = Remote { addr: buf.offset() + BASE, key, len: buf.len() };
        self.open.insert(key, buf);
        RemoteRegion::new(self.handles.take_cell().expect("a handle"), remote, Box::new(()))
    }

    pub(crate) fn deregister(&mut self, region: &RemoteRegion) -> Buf {
        self.open.remove(&region.remote().key).expect("deregistered once")
    }

    /// The memory of a command, if its key is still registered.
    pub(crate) fn get(&mut self, sqe: &Sqe) -> Option<&mut [u8]> {
        let Ok(Sgl::Keyed { addr, len, key, .. }) = sqe.sgl() else { return None };
        let buf = self.open.get_mut(&key)?;
        let at = (addr - BASE - buf.offset()) as usize;
        Some(&mut self.region.bytes_mut(buf)[at..at + len.get() as usize])
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}
