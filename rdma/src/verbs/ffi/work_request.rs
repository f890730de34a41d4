//! Chains of work requests, for one doorbell each.

use std::ffi::c_int;
use std::ptr;

use nix::errno::Errno;

use super::device::Mr;
use super::types::{Rdma, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};

movable!(SendChain, RecvChain);

/// A chain that was not posted completely.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Number of requests posted before the first failed one; none if the device does not report it
    /// (siw, for one), in which case any of them may have been posted.
    pub(crate) taken: Option<usize>,
    pub(crate) why: Errno,
}

impl Refused {
    pub(super) fn new<T>(requests: &[T], bad: *mut T, why: Errno) -> Refused {
        let distance = (bad as usize).wrapping_sub(requests.as_ptr() as usize) / size_of::<T>();
        Refused { taken: Some(distance).filter(|at| *at < requests.len()), why }
    }
}

/// Operation of a send work request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Send { invalidate: Option<u32> },
    SendImmediate { immediate: u32 },
    Read { addr: u64, key: u32 },
    Write { addr: u64, key: u32 },
    WriteImmediate { addr: u64, key: u32, immediate: u32 },
}

macro_rules! chain {
    ($(#[$doc:meta])* $name:ident of $request:ty) => {
        $(#[$doc])*
        #[derive(Default)]
        pub(crate) struct $name {
            pub(super) requests: Vec<$request>,
            segments: Vec<ibv_sge>,
        }

        impl $name {
            pub(crate) fn reserve(&mut self, entries: usize) {
                self.requests.reserve(entries.saturating_sub(self.requests.len()));
                self.segments.reserve(entries.saturating_sub(self.segments.len()));
            }

            pub(crate) fn is_empty(&self) -> bool {
                self.requests.is_empty()
            }

            pub(crate) fn len(&self) -> usize {
                self.requests.len()
            }

            pub(crate) fn clear(&mut self) {
                self.requests.clear();
                self.segments.clear();
            }

            /// The ids of the requests from `first` on.
            pub(crate) fn ids(&self, first: usize) -> impl Iterator<Item = u64> + '_ {
                self.requests.iter().skip(first).map(|request| request.wr_id)
            }

            /// Links each request to its segment and to the next request. Both arrays are not moved
            /// before the following call has read them.
            pub(super) fn link(&mut self) -> *mut $request {
                let (mut next, segments) = (ptr::null_mut(), self.segments.as_mut_ptr());
                for (index, request) in self.requests.iter_mut().enumerate().rev() {
                    request.sg_list = segments.wrapping_add(index);
                    request.next = next;
                    next = ptr::from_mut(request);
                }
                next
            }

            pub(super) fn push_blank(&mut self, id: u64, segment: ibv_sge) -> &mut $request {
                // An empty message has no segment: length 0 means 2 GiB for some devices.
                let count = c_int::from(segment.length > 0);
                self.segments.push(segment);
                // SAFETY: pointers and integers, for which zero is valid.
                self.requests.push(unsafe { std::mem::zeroed() });
                let last = self.requests.len() - 1;
                let request = &mut self.requests[last];
                request.wr_id = id;
                request.num_sge = count;
                request
            }
        }
    };
}

chain! {
    /// Work requests for a send queue, in order.
    SendChain of ibv_send_wr
}
chain! {
    /// Work requests for a receive queue, in order.
    RecvChain of ibv_recv_wr
}

/// Maximum of Sends and Writes that one completion reports; bytes after which there is one, so that
/// buffers return soon.
const SIGNAL_INTERVAL: u32 = 16;
const SIGNAL_BYTES: u32 = 64 << 10;

impl SendChain {
    /// Appends one request over `len` bytes at `offset` of the region. With `inline` the bytes are
    /// copied into the request.
    pub(crate) fn push(&mut self, id: u64, verb: Verb, mr: &Mr, at: (u64, u32), inline: bool) {
        let request = self.push_blank(id, mr.segment(at.0, at.1));
        if inline {
            request.send_flags = ibv_send_flags::IBV_SEND_INLINE;
        }
        match verb {
            Verb::Send { invalidate: None } => request.opcode = ibv_wr_opcode::IBV_WR_SEND,
            Verb::Send { invalidate: Some(key) } => {
                request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
                request.imm_data = key;
            }
            Verb::SendImmediate { immediate } => {
                request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_IMM;
                request.imm_data = immediate.to_be();
            }
            Verb::Read { addr, key } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                request.wr.rdma = Rdma { remote_addr: addr, rkey: key };
            }
            Verb::Write { addr, key } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                request.wr.rdma = Rdma { remote_addr: addr, rkey: key };
            }
            Verb::WriteImmediate { addr, key, immediate } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                request.imm_data = immediate.to_be();
                request.wr.rdma = Rdma { remote_addr: addr, rkey: key };
            }
        }
    }
}

impl SendChain {
    /// The ids of the first `count` requests that complete in order: Sends and Writes.
    pub(crate) fn ordered_ids(&self, count: usize) -> impl Iterator<Item = u64> + '_ {
        let requests = self.requests.iter().take(count);
        requests.filter(|request| is_ordered(request)).map(|request| request.wr_id)
    }

    /// Requests completions: of each Read, and of the others for some together, the last one
    /// included. A completion of one of these reports those before it.
    pub(super) fn signal(&mut self) {
        let (mut count, mut bytes, mut last) = (0, 0u32, None);
        for (request, segment) in self.requests.iter_mut().zip(&self.segments) {
            if !is_ordered(request) {
                request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED;
                continue;
            }
            (count, bytes) = (count + 1, bytes.saturating_add(segment.length));
            last = Some(&mut request.send_flags);
            if (count >= SIGNAL_INTERVAL || bytes >= SIGNAL_BYTES)
                && let Some(signaled) = last.take()
            {
                *signaled |= ibv_send_flags::IBV_SEND_SIGNALED;
                (count, bytes) = (0, 0);
            }
        }
        if let Some(signaled) = last {
            *signaled |= ibv_send_flags::IBV_SEND_SIGNALED;
        }
    }
}

fn is_ordered(request: &ibv_send_wr) -> bool {
    request.opcode != ibv_wr_opcode::IBV_WR_RDMA_READ
}

impl RecvChain {
    /// Appends one receive into `len` bytes at `offset` of the region.
    pub(crate) fn push(&mut self, id: u64, mr: &Mr, at: (u64, u32)) {
        self.push_blank(id, mr.segment(at.0, at.1));
    }
}
