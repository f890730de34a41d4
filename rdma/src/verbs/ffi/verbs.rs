//! Devices, registered memory, completion queues and queue pairs.

use std::ffi::{CStr, c_int};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::errno::Errno;
use rdma_sys::{
    ibv_access_flags, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_device_cap_flags,
    ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state,
    ibv_qp_type, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_transport_type, ibv_wc,
    ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode, rdma_conn_param,
};

use super::cm::CmId;
use super::load::Api;
use super::{borrow, check, check_new, set_nonblocking};
use crate::{Fault, Region, Remote};

/// Vendor id of siw. Its kernel part supports Send with Invalidate and reports so, but its library
/// refuses to post one.
const SIW_VENDOR: u32 = 0x62_6D74;

movable!(DeviceList, Context, Pd, Mr, CompChannel, Cq, RcQueuePair);
movable!(SendChain, RecvChain, WorkCompletions);

/// The devices as librdmacm has opened them: the contexts that its ids refer to.
pub(crate) struct DeviceList {
    api: &'static Api,
    raw: NonNull<*mut ibv_context>,
    len: usize,
}

impl DeviceList {
    pub(crate) fn new(api: &'static Api) -> Result<Arc<DeviceList>, Errno> {
        let mut len = 0;
        // SAFETY: `len` is a place for an int; the result is checked.
        let raw = check_new(unsafe { (api.rdma_get_devices)(&mut len) })?;
        Ok(Arc::new(DeviceList { api, raw, len: usize::try_from(len).unwrap_or(0) }))
    }

    pub(crate) fn contexts(self: &Arc<Self>) -> Vec<Arc<Context>> {
        // SAFETY: the array has `len` entries for as long as the list lives.
        let all = unsafe { std::slice::from_raw_parts(self.raw.as_ptr(), self.len) };
        let mut known = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|context| context.strong_count() > 0);
        let mut handle = |raw| {
            let mut live = known.iter().filter_map(Weak::upgrade);
            live.find(|context| context.raw == raw).unwrap_or_else(|| {
                let context = Arc::new(Context::new(raw, self));
                known.push(Arc::downgrade(&context));
                context
            })
        };
        all.iter().filter_map(|raw| NonNull::new(*raw)).map(&mut handle).collect()
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: every context holds the list, so none is in use; freed once.
        unsafe { (self.api.rdma_free_devices)(self.raw.as_ptr()) };
    }
}

/// Identifies a device while it is open; never dereferenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceKey(pub(super) usize);

/// Capabilities of a device.
#[derive(Clone, Debug)]
pub(crate) struct Ability {
    pub(crate) name: String,
    pub(crate) iwarp: bool,
    /// Send with Invalidate.
    pub(crate) invalidate: bool,
    pub(crate) queue_pairs: u32,
    pub(crate) queue_entries: u32,
    pub(crate) completion_entries: u32,
    /// Reads that one queue pair may have outstanding at the peer.
    pub(crate) reads: u8,
    /// Reads of the peer that one queue pair can answer concurrently.
    pub(crate) answers: u8,
    pub(crate) segments: u32,
}

/// The handles of open devices. There is one for each, which all fabrics share: when the last
/// reference is dropped, nothing of the device is in use any more.
static CONTEXTS: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());

/// An open device. librdmacm closes it.
pub(crate) struct Context {
    raw: NonNull<ibv_context>,
    list: Arc<DeviceList>,
    /// Its path and inode in sysfs. None if it cannot be determined.
    node: Option<(PathBuf, u64)>,
}

impl Drop for Context {
    /// Before it opens another device, librdmacm does not close removed ones, and a device that
    /// cannot be revoked waits until its files are closed. Nothing else of this one is left.
    fn drop(&mut self) {
        if !self.is_gone() {
            return;
        }
        let Ok(null) = std::fs::File::open("/dev/null") else { return };
        // SAFETY: the context is live while the list is.
        let descriptors = unsafe { [self.raw.as_ref().cmd_fd, self.raw.as_ref().async_fd] };
        for descriptor in descriptors {
            // SAFETY: it touches no memory. The numbers are the context's own and stay open, now as
            // /dev/null, so that librdmacm can close them as ever.
            unsafe { libc::dup3(null.as_raw_fd(), descriptor, libc::O_CLOEXEC) };
        }
    }
}

impl Context {
    fn new(raw: NonNull<ibv_context>, list: &Arc<DeviceList>) -> Context {
        // SAFETY: a context's device is live as long as it; its path ends in NUL.
        let path = unsafe { CStr::from_ptr((*raw.as_ref().device).dev_path.as_ptr()) };
        let path = PathBuf::from(path.to_string_lossy().into_owned());
        let node = std::fs::metadata(&path).ok().map(|found| (path, found.ino()));
        Context { raw, list: Arc::clone(list), node }
    }

    /// Whether the system has removed it, or waits for its last user. Another device may have its
    /// name by now.
    pub(crate) fn is_gone(&self) -> bool {
        let node = self.node.as_ref();
        node.is_some_and(|(path, number)| {
            !std::fs::metadata(path).is_ok_and(|f| f.ino() == *number)
        })
    }

    pub(crate) fn key(&self) -> DeviceKey {
        DeviceKey(self.raw.as_ptr() as usize)
    }

    pub(crate) fn ability(&self) -> Result<Ability, Errno> {
        // SAFETY: plain integers, for which zero is valid.
        let mut attr: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is live while the list is.
        check(unsafe { (self.list.api.ibv_query_device)(self.raw.as_ptr(), &mut attr) })?;
        // SAFETY: a context's device is live as long as it; its name ends in NUL.
        let (name, transport) = unsafe {
            let device = &*self.raw.as_ref().device;
            (CStr::from_ptr(device.name.as_ptr()), device.transport_type)
        };
        let extensions = ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS.0;
        let positive = |value: c_int| u32::try_from(value).unwrap_or(0);
        let reads = |value: c_int| u8::try_from(value.clamp(0, 254)).unwrap_or(0);
        Ok(Ability {
            name: name.to_string_lossy().into_owned(),
            iwarp: transport == ibv_transport_type::IBV_TRANSPORT_IWARP,
            invalidate: attr.device_cap_flags & extensions != 0 && attr.vendor_id != SIW_VENDOR,
            queue_pairs: positive(attr.max_qp),
            queue_entries: positive(attr.max_qp_wr),
            completion_entries: positive(attr.max_cqe),
            reads: reads(attr.max_qp_init_rd_atom),
            answers: reads(attr.max_qp_rd_atom),
            segments: positive(attr.max_sge),
        })
    }
}

/// A protection domain.
pub(crate) struct Pd {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

impl Pd {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Pd>, Errno> {
        // SAFETY: the context is live and held from now on.
        let raw = check_new(unsafe { (context.list.api.ibv_alloc_pd)(context.raw.as_ptr()) })?;
        Ok(Arc::new(Pd { raw, context: Arc::clone(context) }))
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs hold the domain, so none is left; freed once.
        unsafe { (self.context.list.api.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Access rights of a registered range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// The adapter on our behalf only.
    Local,
    /// Also writing by the peer: required by iWARP for the sink of a Read.
    ReadSink,
    /// Also reading and writing by the peer: for remote regions of a host.
    Exposed,
}

/// A registered range of the region.
pub(crate) struct Mr {
    raw: NonNull<ibv_mr>,
    pd: Arc<Pd>,
    region: Arc<Region>,
    offset: u64,
    len: u64,
}

impl Mr {
    pub(crate) fn new(
        pd: &Arc<Pd>,
        region: &Arc<Region>,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<Mr, Errno> {
        let end = offset.checked_add(len).ok_or(Errno::EINVAL)?;
        if end > region.len() as u64 {
            return Err(Errno::EINVAL);
        }
        use ibv_access_flags as a;
        let flags = match access {
            Access::Local => a::IBV_ACCESS_LOCAL_WRITE.0,
            Access::ReadSink => a::IBV_ACCESS_LOCAL_WRITE.0 | a::IBV_ACCESS_REMOTE_WRITE.0,
            Access::Exposed => {
                a::IBV_ACCESS_LOCAL_WRITE.0
                    | a::IBV_ACCESS_REMOTE_WRITE.0
                    | a::IBV_ACCESS_REMOTE_READ.0
            }
        };
        let at = ptr::with_exposed_provenance_mut(region.addr() + offset as usize);
        // SAFETY: the range lies in the mapping, which the handle keeps alive; the device gets
        // work requests for it only as `Chain`s, whose buffers are owned by the table of flights.
        // Where peers have access, the range is the window of a buffer that a flight or an
        // `RemoteRegion` owns, into which there is no reference.
        let raw = check_new(unsafe {
            (pd.context.list.api.ibv_reg_mr)(pd.raw.as_ptr(), at, len as usize, flags as c_int)
        })?;
        Ok(Mr { raw, pd: Arc::clone(pd), region: Arc::clone(region), offset, len })
    }

    /// The range as a remote region.
    pub(crate) fn remote(&self) -> Remote {
        let addr = self.region.addr() as u64 + self.offset;
        // SAFETY: `raw` is live as long as `self`.
        Remote { addr, key: unsafe { self.raw.as_ref().rkey }, len: self.len as u32 }
    }

    /// A scatter/gather element for a part of the range, given in offsets of the region.
    fn segment(&self, offset: u64, len: u32) -> ibv_sge {
        let inside = offset >= self.offset && offset + u64::from(len) <= self.offset + self.len;
        assert!(inside, "a window outside its registered range");
        // SAFETY: `raw` is live as long as `self`.
        let lkey = unsafe { self.raw.as_ref().lkey };
        ibv_sge { addr: self.region.addr() as u64 + offset, length: len, lkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: deregistered once; work that names it has completed or its queue pair is gone.
        unsafe { (self.pd.context.list.api.ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}

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
    pub(crate) fn new(channel: &Arc<CompChannel>, entries: u32) -> Result<Arc<Cq>, Errno> {
        let entries = c_int::try_from(entries).map_err(|_| Errno::EINVAL)?;
        let (context, comp) = (channel.context.raw.as_ptr(), channel.raw.as_ptr());
        // SAFETY: context and channel are live and held from now on.
        let raw = check_new(unsafe {
            (channel.context.list.api.ibv_create_cq)(context, entries, ptr::null_mut(), comp, 0)
        })?;
        Ok(Arc::new(Cq { raw, channel: Arc::clone(channel) }))
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
        let got = unsafe { rdma_sys::ibv_poll_cq(self.raw.as_ptr(), room, into.0.as_mut_ptr()) };
        usize::try_from(got).map(|n| n.min(room as usize)).map_err(|_| Errno::EIO)
    }

    /// Requests a notification for the next completion.
    pub(crate) fn request_notify(&self) -> Result<(), Errno> {
        // SAFETY: the queue is live; the context's operations are the device's own.
        check(unsafe { rdma_sys::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold the queue, so none is left; all announcements fetched have
        // been acknowledged, so this does not wait; destroyed once.
        unsafe { (self.channel.context.list.api.ibv_destroy_cq)(self.raw.as_ptr()) };
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
    _pd: Arc<Pd>,
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
            _pd: Arc::clone(pd),
            _cqs: [Arc::clone(sent), Arc::clone(received)],
        })
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

    fn modify(&self, mask: ibv_qp_attr_mask, set: impl Fn(&mut ibv_qp_attr)) -> Result<(), Errno> {
        // SAFETY: integers, for which zero is valid.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        set(&mut attr);
        // SAFETY: the queue pair is live; the attributes are read during the call.
        check(unsafe { (self.id.api.ibv_modify_qp)(self.raw.as_ptr(), &mut attr, mask.0 as c_int) })
    }

    /// Posts a chain with one doorbell.
    pub(crate) fn send(&self, chain: &mut SendChain) -> Result<(), Refused> {
        chain.signal();
        let (first, mut bad) = (chain.link(), ptr::null_mut());
        // SAFETY: the chain is linked, its segments are live during the call, its windows were
        // checked against their registration, and their buffers stay put until they complete.
        let code = unsafe { rdma_sys::ibv_post_send(self.raw.as_ptr(), first, &mut bad) };
        check(code).map_err(|e| Refused::new(&chain.requests, bad, e))
    }

    /// As [`RcQueuePair::send`], for receives.
    pub(crate) fn receive(&self, chain: &mut RecvChain) -> Result<(), Refused> {
        let (first, mut bad) = (chain.link(), ptr::null_mut());
        // SAFETY: as in `send`.
        let code = unsafe { rdma_sys::ibv_post_recv(self.raw.as_ptr(), first, &mut bad) };
        check(code).map_err(|e| Refused::new(&chain.requests, bad, e))
    }
}

impl Drop for RcQueuePair {
    fn drop(&mut self) {
        // SAFETY: made on this id and destroyed once, before the id, which `self` holds.
        unsafe { (self.id.api.rdma_destroy_qp)(self.id.raw.as_ptr()) };
    }
}

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
    Read { addr: u64, key: u32 },
    Write { addr: u64, key: u32 },
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
            request.send_flags = ibv_send_flags::IBV_SEND_INLINE.0;
        }
        match verb {
            Verb::Send { invalidate: None } => request.opcode = ibv_wr_opcode::IBV_WR_SEND,
            Verb::Send { invalidate: Some(key) } => {
                request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
                request.imm_data_invalidated_rkey_union.invalidated_rkey = key;
            }
            Verb::Read { addr, key } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
                request.wr.rdma = rdma_sys::rdma_t { remote_addr: addr, rkey: key };
            }
            Verb::Write { addr, key } => {
                request.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                request.wr.rdma = rdma_sys::rdma_t { remote_addr: addr, rkey: key };
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
                request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
                continue;
            }
            (count, bytes) = (count + 1, bytes.saturating_add(segment.length));
            last = Some(&mut request.send_flags);
            if (count >= SIGNAL_INTERVAL || bytes >= SIGNAL_BYTES)
                && let Some(signaled) = last.take()
            {
                *signaled |= ibv_send_flags::IBV_SEND_SIGNALED.0;
                (count, bytes) = (0, 0);
            }
        }
        if let Some(signaled) = last {
            *signaled |= ibv_send_flags::IBV_SEND_SIGNALED.0;
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
