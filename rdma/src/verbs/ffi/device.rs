//! Devices, protection domains and registered memory.

use std::ffi::{CStr, c_int};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::errno::Errno;

use super::async_event::Failures;
use super::load::Api;
use super::types::{
    ibv_access_flags, ibv_context, ibv_device_attr, ibv_device_cap_flags, ibv_mr, ibv_pd, ibv_sge,
    ibv_transport_type,
};
use super::{borrow, check, check_new, set_nonblocking};
use crate::{Region, Remote};

/// Vendor id of siw. Its kernel part supports Send with Invalidate and reports so, but its library
/// refuses to post one.
const SIW_VENDOR: u32 = 0x62_6D74;

movable!(DeviceList, Context, Pd, Mr);

/// The devices as librdmacm has opened them: the contexts that its ids refer to.
pub(crate) struct DeviceList {
    pub(super) api: &'static Api,
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
    pub(super) raw: NonNull<ibv_context>,
    pub(super) list: Arc<DeviceList>,
    /// Its path and inode in sysfs. None if it cannot be determined.
    node: Option<(PathBuf, u64)>,
    /// Whether its asynchronous events can be read without waiting.
    pub(super) has_events: bool,
    pub(super) failures: Mutex<Failures>,
    /// Number of completion vectors that were given to fabrics.
    vectors: AtomicU32,
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
        // SAFETY: the context is live while the list is.
        let events = unsafe { &raw.as_ref().async_fd };
        let has_events = *events >= 0 && set_nonblocking(borrow(events)).is_ok();
        let (failures, vectors) = (Mutex::default(), AtomicU32::new(0));
        Context { raw, list: Arc::clone(list), node, has_events, failures, vectors }
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

    /// The completion vector of the next fabric: each has an interrupt, on a CPU of its own.
    pub(crate) fn next_vector(&self) -> c_int {
        // SAFETY: the context is live while the list is.
        let vectors = unsafe { self.raw.as_ref().num_comp_vectors };
        completion_vector(self.vectors.fetch_add(1, Ordering::Relaxed), vectors)
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
        let extensions = ibv_device_cap_flags::IBV_DEVICE_MEM_MGT_EXTENSIONS;
        let positive = |value: c_int| u32::try_from(value).unwrap_or(0);
        let reads = |value: c_int| u8::try_from(value.clamp(0, 254)).unwrap_or(0);
        Ok(Ability {
            name: name.to_string_lossy().into_owned(),
            iwarp: transport == ibv_transport_type::IBV_TRANSPORT_IWARP as c_int,
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

/// The completion vector of one fabric after others, in turn.
pub(super) fn completion_vector(before: u32, vectors: c_int) -> c_int {
    (before % vectors.max(1) as u32) as c_int
}

/// A protection domain.
pub(crate) struct Pd {
    pub(super) raw: NonNull<ibv_pd>,
    pub(super) context: Arc<Context>,
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
            Access::Local => a::IBV_ACCESS_LOCAL_WRITE,
            Access::ReadSink => a::IBV_ACCESS_LOCAL_WRITE | a::IBV_ACCESS_REMOTE_WRITE,
            Access::Exposed => {
                a::IBV_ACCESS_LOCAL_WRITE | a::IBV_ACCESS_REMOTE_WRITE | a::IBV_ACCESS_REMOTE_READ
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
    pub(super) fn segment(&self, offset: u64, len: u32) -> ibv_sge {
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
