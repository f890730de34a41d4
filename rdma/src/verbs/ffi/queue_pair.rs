//! Completion queues and queue pairs.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;

use super::async_event::QueueKey;
use super::cm::CmId;
use super::device::{Context, Pd};
use super::types::{
    self, ibv_comp_channel, ibv_cq, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr,
    ibv_qp_state, ibv_qp_type, ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status, rdma_conn_param,
};
use super::work_request::{RecvChain, Refused, SendChain};
use super::{borrow, check, check_new, set_nonblocking};
use crate::{Fault, ReceivedWith};

movable!(CompChannel, Cq, RcQueuePair, WorkCompletions);

/// Notification channel of a completion queue. Never blocks.
pub(crate) struct CompChannel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

impl CompChannel {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<CompChannel>, Errno> {
        let api = context.list.api;
        // SAFETY: the context is live and held from now on.
        let raw = check_new(unsafe { (api.ibv_create_comp_channel)(context.raw.as_ptr()) })?;
        let channel = CompChannel { raw, context: Arc::clone(context) };
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live as long as `self`.
        borrow(unsafe { &self.raw.as_ref().fd })
    }
}

impl CompChannel {
    /// Takes one notification from the channel, if there is one.
    pub(crate) fn take(&self) -> Result<(), Errno> {
        let api = self.context.list.api;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live; the others are places for one pointer each.
        let code = unsafe { (api.ibv_get_cq_event)(self.raw.as_ptr(), &mut cq, &mut context) };
        match check(code) {
            // SAFETY: the queue announced itself, so it is live: destroying one waits until all
            // its announcements are acknowledged, which happens here at once.
            Ok(()) => unsafe { (api.ibv_ack_cq_events)(cq, 1) },
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }
}

impl Drop for CompChannel {
    fn drop(&mut self) {
        // SAFETY: its completion queue holds the channel, so that is gone; destroyed once.
        unsafe { (self.context.list.api.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

/// A completion queue with its channel.
pub(crate) struct Cq {
    raw: NonNull<ibv_cq>,
    channel: Arc<CompChannel>,
}

impl Cq {
    /// `vector` is the interrupt of its notifications, as by [`Context::next_vector`].
    pub(crate) fn new(
        channel: &Arc<CompChannel>,
        entries: u32,
        vector: c_int,
    ) -> Result<Arc<Cq>, Errno> {
        let entries = c_int::try_from(entries).map_err(|_| Errno::EINVAL)?;
        let (context, comp) = (channel.context.raw.as_ptr(), channel.raw.as_ptr());
        // SAFETY: context and channel are live and held from now on.
        let raw = check_new(unsafe {
            (channel.context.list.api.ibv_create_cq)(
                context,
                entries,
                ptr::null_mut(),
                comp,
                vector,
            )
        })?;
        Ok(Arc::new(Cq { raw, channel: Arc::clone(channel) }))
    }

    pub(crate) fn key(&self) -> QueueKey {
        QueueKey(self.raw.as_ptr() as usize)
    }

    /// The granted size.
    pub(crate) fn entries(&self) -> u32 {
        // SAFETY: `raw` is live as long as `self`.
        u32::try_from(unsafe { self.raw.as_ref().cqe }).unwrap_or(0)
    }

    /// Fetches at most `most` completions; no system call on real adapters.
    pub(crate) fn poll(&self, into: &mut WorkCompletions, most: usize) -> Result<usize, Errno> {
        let room = most.min(into.0.len()) as c_int;
        // SAFETY: the array has `room` entries; the context's operations are the device's own.
        let got = unsafe { types::ibv_poll_cq(self.raw.as_ptr(), room, into.0.as_mut_ptr()) };
        usize::try_from(got).map(|n| n.min(room as usize)).map_err(|_| Errno::EIO)
    }

    /// Requests a notification for the next completion.
    pub(crate) fn request_notify(&self) -> Result<(), Errno> {
        // SAFETY: the queue is live; the context's operations are the device's own.
        check(unsafe { types::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold the queue, so none is left; all announcements and events fetched
        // have been acknowledged, so this does not wait; destroyed once.
        unsafe { (self.channel.context.list.api.ibv_destroy_cq)(self.raw.as_ptr()) };
        self.channel.context.forget(self.key());
    }
}

/// Memory for one batch of completions.
pub(crate) struct WorkCompletions(Box<[ibv_wc]>);

impl WorkCompletions {
    pub(crate) fn new(entries: usize) -> WorkCompletions {
        // SAFETY: plain integers, for which zero is valid.
        WorkCompletions((0..entries).map(|_| unsafe { std::mem::zeroed() }).collect())
    }

    /// One completion: the id of its work request, and the outcome (for a receive the length of
    /// the message, otherwise meaningless).
    pub(crate) fn get(&self, index: usize) -> (u64, Result<u32, Fault>) {
        let wc = &self.0[index];
        // A Write with immediate data consumes a receive without writing to it.
        let empty = wc.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let bytes = if empty { 0 } else { wc.byte_len };
        (wc.wr_id, fault(wc.status).map_or(Ok(bytes), Err))
    }

    /// What the completion of a receive has in addition to its message.
    pub(crate) fn received_with(&self, index: usize) -> ReceivedWith {
        let wc = &self.0[index];
        if wc.status != ibv_wc_status::IBV_WC_SUCCESS
            || wc.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM == 0
        {
            return ReceivedWith::Nothing;
        }
        let immediate = u32::from_be(wc.imm_data);
        match wc.opcode {
            ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => {
                ReceivedWith::Write { immediate, bytes: wc.byte_len }
            }
            _ => ReceivedWith::Immediate(immediate),
        }
    }
}

/// The fault of a completion code. An unknown code is a local fault that contains it.
pub(super) fn fault(status: u32) -> Option<Fault> {
    use ibv_wc_status as s;
    Some(match status {
        s::IBV_WC_SUCCESS => return None,
        s::IBV_WC_WR_FLUSH_ERR => Fault::Flushed,
        s::IBV_WC_LOC_LEN_ERR => Fault::Length,
        s::IBV_WC_REM_ACCESS_ERR => Fault::RemoteAccess,
        s::IBV_WC_REM_INV_REQ_ERR
        | s::IBV_WC_REM_OP_ERR
        | s::IBV_WC_REM_INV_RD_REQ_ERR
        | s::IBV_WC_REM_ABORT_ERR => Fault::RemoteOperation,
        s::IBV_WC_RETRY_EXC_ERR | s::IBV_WC_RESP_TIMEOUT_ERR => Fault::Unreachable,
        s::IBV_WC_RNR_RETRY_EXC_ERR => Fault::NotReady,
        other => Fault::Local(other),
    })
}

/// Capacity of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depths {
    pub(crate) sends: u32,
    pub(crate) receives: u32,
    /// Bytes that a send may carry in its work request.
    pub(crate) inline: u32,
    /// Each work request has a completion, not only those that [`SendChain::signal`] selects.
    pub(crate) signal_all: bool,
}

/// A reliable queue pair on an id.
pub(crate) struct RcQueuePair {
    raw: NonNull<ibv_qp>,
    inline: u32,
    id: Arc<CmId>,
    pd: Arc<Pd>,
    _cqs: [Arc<Cq>; 2],
}

impl RcQueuePair {
    pub(crate) fn new(
        id: &Arc<CmId>,
        pd: &Arc<Pd>,
        sent: &Arc<Cq>,
        received: &Arc<Cq>,
        depths: Depths,
    ) -> Result<RcQueuePair, Errno> {
        // SAFETY: pointers and integers, for which zero is valid.
        let mut attr: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        attr.send_cq = sent.raw.as_ptr();
        attr.recv_cq = received.raw.as_ptr();
        attr.cap.max_send_wr = depths.sends;
        attr.cap.max_recv_wr = depths.receives;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        attr.cap.max_inline_data = depths.inline;
        attr.qp_type = ibv_qp_type::IBV_QPT_RC;
        attr.sq_sig_all = depths.signal_all.into();
        // SAFETY: id, domain and queues are live, of one device, and held from now on.
        check(unsafe { (id.api.rdma_create_qp)(id.raw.as_ptr(), pd.raw.as_ptr(), &mut attr) })?;
        // SAFETY: a successful call has set the id's queue pair.
        let raw = check_new(unsafe { id.raw.as_ref().qp })?;
        Ok(RcQueuePair {
            raw,
            inline: attr.cap.max_inline_data,
            id: Arc::clone(id),
            pd: Arc::clone(pd),
            _cqs: [Arc::clone(sent), Arc::clone(received)],
        })
    }

    pub(crate) fn key(&self) -> QueueKey {
        QueueKey(self.raw.as_ptr() as usize)
    }

    /// Its number.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: `raw` is live as long as `self`.
        unsafe { self.raw.as_ref().qp_num }
    }

    /// Bytes that a send may carry in its work request.
    pub(crate) fn inline(&self) -> u32 {
        self.inline
    }

    /// Readies the queue pair and answers the request. We have no remote regions, so the peer may
    /// have no reads outstanding; we may have `reads`.
    pub(crate) fn accept(&self, private_data: &[u8], reads: u8) -> Result<(), Errno> {
        // SAFETY: a pointer and integers, for which zero is valid.
        let mut param: rdma_conn_param = unsafe { std::mem::zeroed() };
        param.private_data = private_data.as_ptr().cast();
        param.private_data_len = u8::try_from(private_data.len()).map_err(|_| Errno::EINVAL)?;
        param.responder_resources = 0;
        param.initiator_depth = reads;
        param.flow_control = 1;
        param.rnr_retry_count = 7;
        // SAFETY: the id is live; parameters and private data are read during the call.
        check(unsafe { (self.id.api.rdma_accept)(self.id.raw.as_ptr(), &mut param) })
    }

    /// Requests the connection. We issue no reads; the peer may have `reads` outstanding.
    pub(crate) fn connect(&self, private_data: &[u8], reads: u8) -> Result<(), Errno> {
        // SAFETY: a pointer and integers, for which zero is valid.
        let mut param: rdma_conn_param = unsafe { std::mem::zeroed() };
        param.private_data = private_data.as_ptr().cast();
        param.private_data_len = u8::try_from(private_data.len()).map_err(|_| Errno::EINVAL)?;
        param.responder_resources = reads;
        param.initiator_depth = 0;
        param.flow_control = 1;
        param.retry_count = 7;
        param.rnr_retry_count = 7;
        // SAFETY: the id is live; parameters and private data are read during the call.
        check(unsafe { (self.id.api.rdma_connect)(self.id.raw.as_ptr(), &mut param) })
    }

    /// Sends a disconnect request; the connection manager also stops the queue pair.
    pub(crate) fn disconnect(&self) -> Result<(), Errno> {
        // SAFETY: the id is live.
        check(unsafe { (self.id.api.rdma_disconnect)(self.id.raw.as_ptr()) })
    }

    /// Stops the queue pair: everything posted completes as flushed.
    pub(crate) fn stop(&self) -> Result<(), Errno> {
        self.modify(ibv_qp_attr_mask::IBV_QP_STATE, |attr| {
            attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
        })
    }

    /// RNR timer: time after which the peer repeats a message without a posted receive (an
    /// InfiniBand code; 12 is 0.64 ms). The default of the connection manager is 0: 655 ms.
    pub(crate) fn set_rnr_timer(&self, code: u8) -> Result<(), Errno> {
        self.modify(ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER, |attr| attr.min_rnr_timer = code)
    }

    fn modify(&self, mask: u32, set: impl Fn(&mut ibv_qp_attr)) -> Result<(), Errno> {
        // SAFETY: integers, for which zero is valid.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        set(&mut attr);
        // SAFETY: the queue pair is live; the attributes are read during the call.
        check(unsafe { (self.id.api.ibv_modify_qp)(self.raw.as_ptr(), &mut attr, mask as c_int) })
    }

    /// Posts a chain with one doorbell.
    pub(crate) fn send(&self, chain: &mut SendChain) -> Result<(), Refused> {
        chain.signal();
        let (first, mut bad) = (chain.link(), ptr::null_mut());
        // SAFETY: the chain is linked, its segments are live during the call, its windows were
        // checked against their registration, and their buffers stay put until they complete.
        let code = unsafe { types::ibv_post_send(self.raw.as_ptr(), first, &mut bad) };
        check(code).map_err(|e| Refused::new(&chain.requests, bad, e))
    }

    /// As [`RcQueuePair::send`], for receives.
    pub(crate) fn receive(&self, chain: &mut RecvChain) -> Result<(), Refused> {
        let (first, mut bad) = (chain.link(), ptr::null_mut());
        // SAFETY: as in `send`.
        let code = unsafe { types::ibv_post_recv(self.raw.as_ptr(), first, &mut bad) };
        check(code).map_err(|e| Refused::new(&chain.requests, bad, e))
    }
}

impl Drop for RcQueuePair {
    fn drop(&mut self) {
        // SAFETY: made on this id and destroyed once, before the id, which `self` holds.
        unsafe { (self.id.api.rdma_destroy_qp)(self.id.raw.as_ptr()) };
        self.pd.context.forget(self.key());
    }
}
