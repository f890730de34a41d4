//! rdma-core behind safe handles. The only file that names `rdma_sys`.
//!
//! # How the unsafe code is fenced
//!
//! * Types, constants and the inline functions that go through a context's table of operations
//!   come from `rdma_sys`; every exported function is looked up by name in the two libraries when
//!   the first handle is made ([`Api`]). So the binary has no link dependency on rdma-core and
//!   starts without it. A generic function that is never instantiated makes the compiler compare
//!   each signature with `rdma_sys`; a test compares the layouts with C.
//! * One handle per object, with one constructor and one `Drop`. A handle holds its parents, so
//!   that the order of destruction is always queue pair, id, memory region, completion queue,
//!   completion channel, protection domain, device list, whatever order the owner drops them in.
//! * Work requests name memory only as (registered range, offset, length), checked here. The
//!   `Buf` behind it has been moved into the table of flights and comes out when the completion
//!   is there or the queue pair has been destroyed: nobody has a reference while a device writes.
//! * Numbers from outside (event types, completion codes, transports) are plain integers in
//!   `rdma_sys`, never Rust enums, and every match on them has a default. The `ibv_*_ex` wrappers,
//!   which are broken there, are not used.
//! * libibverbs and librdmacm lock internally, so handles may move between threads and be used
//!   from several. [`CmId::migrate`] alone changes what other calls read; it takes `&mut`.
#![expect(unsafe_code, reason = "calls into rdma-core")]

use std::ffi::{CStr, c_int, c_void};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use libloading::Library;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{SockaddrLike, SockaddrStorage};
use rdma_sys::{
    ibv_access_flags, ibv_comp_channel, ibv_context, ibv_cq, ibv_device_attr, ibv_device_cap_flags,
    ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state,
    ibv_qp_type, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_transport_type, ibv_wc,
    ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode, rdma_cm_event, rdma_cm_event_type, rdma_cm_id,
    rdma_conn_param, rdma_event_channel, rdma_port_space,
};

use crate::{Fault, Region, Remote};

/// `RDMA_OPTION_ID` and `RDMA_OPTION_ID_AFONLY` of `rdma_cma.h`, which bindgen leaves out.
const OPTION_ID: c_int = 0;
const OPTION_ID_AFONLY: c_int = 2;

/// Vendor id of siw. Its kernel half can do Send with Invalidate and says so, but its library
/// refuses to post one.
const SIW_VENDOR: u32 = 0x62_6D74;

macro_rules! api {
    ($($library:ident { $(fn $name:ident($($arg:ty),*) $(-> $ret:ty)?;)* })*) => {
        /// The entry points of rdma-core, found at run time, never unloaded.
        pub(super) struct Api {
            $($($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*)*
            $(#[expect(dead_code, reason = "keeps the pointers good")] $library: Library,)*
        }

        impl Api {
            fn load() -> Result<Api, String> {
                $(let $library = open_library(concat!("lib", stringify!($library), ".so.1"))?;)*
                // SAFETY: the names and types are rdma-core's stable interface (checked against
                // the headers below); the libraries stay loaded with the pointers.
                unsafe {
                    Ok(Api { $($($name: *$library
                        .get(concat!(stringify!($name), "\0").as_bytes())
                        .map_err(|e| format!("rdma-core is too old: {}", reason(&e)))?,)*)* $($library,)* })
                }
            }
        }

        /// Compares the signatures above with the headers. Generic and never instantiated: type
        /// checked, but no code, hence no link dependency.
        #[expect(dead_code, reason = "exists for the type checker")]
        #[expect(clippy::extra_unused_type_parameters, reason = "keeps it from being compiled")]
        fn signatures<Never>() {
            $($(let _: unsafe extern "C" fn($($arg),*) $(-> $ret)? = rdma_sys::$name;)*)*
        }
    };
}

api! {
    ibverbs {
        fn ibv_ack_cq_events(*mut ibv_cq, u32);
        fn ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        fn ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        fn ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        fn ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        fn ibv_dereg_mr(*mut ibv_mr) -> c_int;
        fn ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        fn ibv_destroy_cq(*mut ibv_cq) -> c_int;
        fn ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        fn ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        fn ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        fn ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    }
    rdmacm {
        fn rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        fn rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
        fn rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
        fn rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        fn rdma_create_event_channel() -> *mut rdma_event_channel;
        fn rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space::Type) -> c_int;
        fn rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        fn rdma_destroy_event_channel(*mut rdma_event_channel);
        fn rdma_destroy_id(*mut rdma_cm_id) -> c_int;
        fn rdma_destroy_qp(*mut rdma_cm_id);
        fn rdma_disconnect(*mut rdma_cm_id) -> c_int;
        fn rdma_free_devices(*mut *mut ibv_context);
        fn rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        fn rdma_get_devices(*mut c_int) -> *mut *mut ibv_context;
        fn rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
        fn rdma_migrate_id(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
        fn rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        fn rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        fn rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
        fn rdma_set_option(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
    }
}

fn open_library(name: &str) -> Result<Library, String> {
    // SAFETY: rdma-core's initialisers register its device drivers and nothing else.
    unsafe { Library::new(name) }.map_err(|e| {
        format!(
            "the verbs provider needs rdma-core ({name}: {}); on Debian and Ubuntu: apt install \
             libibverbs1 librdmacm1 ibverbs-providers; or use the soft provider, which needs none",
            reason(&e)
        )
    })
}

/// What the dynamic linker said.
fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

impl Api {
    /// The libraries, loaded on first use.
    pub(super) fn get() -> Result<&'static Api, String> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
    }
}

/// What a call that returns -1 and sets `errno`, or returns an error number, has said.
fn check(code: c_int) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        -1 => Err(Errno::last()),
        other => Err(Errno::from_raw(other.abs())),
    }
}

fn check_new<T>(raw: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(raw).ok_or_else(Errno::last)
}

fn borrow(fd: &RawFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor lies inside a live rdma-core object that closes it on destruction;
    // the borrow is tied to that object through the reference.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map(drop)
}

macro_rules! movable {
    ($($handle:ty),*) => {$(
        // SAFETY: an exclusive pointer to an object of a library that locks internally and ties
        // nothing to a thread.
        unsafe impl Send for $handle {}
        // SAFETY: as above; methods that take &self are safe to call at the same time.
        unsafe impl Sync for $handle {}
    )*};
}
movable!(EventChannel, CmId, DeviceList, Context, Pd, Mr, CompChannel, Cq, QueuePair);
movable!(SendChain, RecvChain, Harvest);

/// Channel for connection events of one fabric. Never blocks.
pub(super) struct EventChannel {
    api: &'static Api,
    raw: NonNull<rdma_event_channel>,
}

impl EventChannel {
    pub(super) fn new(api: &'static Api) -> Result<Arc<EventChannel>, Errno> {
        // SAFETY: no argument; the result is checked.
        let raw = check_new(unsafe { (api.rdma_create_event_channel)() })?;
        let channel = EventChannel { api, raw };
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live as long as `self`.
        borrow(unsafe { &self.raw.as_ref().fd })
    }

    /// The next event, copied and acknowledged: `rdma_destroy_id` and `rdma_migrate_id` on any
    /// thread wait for acknowledgements, so none is ever held back.
    pub(super) fn next(self: &Arc<Self>) -> Result<Option<CmEvent>, Errno> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is live and `raw` is a place for one pointer.
        match check(unsafe { (self.api.rdma_get_cm_event)(self.raw.as_ptr(), &mut raw) }) {
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            other => other?,
        }
        // SAFETY: a successful call left a valid event, ours until the acknowledgement.
        let event = self.copy(unsafe { &*raw });
        // SAFETY: acknowledged once, not used afterwards.
        unsafe { (self.api.rdma_ack_cm_event)(raw) };
        Ok(Some(event))
    }

    fn copy(self: &Arc<Self>, event: &rdma_cm_event) -> CmEvent {
        use rdma_cm_event_type as t;
        let kind = match event.event {
            t::RDMA_CM_EVENT_CONNECT_REQUEST => match NonNull::new(event.id) {
                Some(raw) => {
                    let id = CmId { api: self.api, raw, channel: Arc::clone(self) };
                    // SAFETY: a connect request of a reliable port space carries `conn`.
                    CmKind::Request(id, ConnectParam::copy(unsafe { &event.param.conn }))
                }
                None => CmKind::Other(event.event),
            },
            t::RDMA_CM_EVENT_ADDR_RESOLVED => CmKind::AddressResolved,
            t::RDMA_CM_EVENT_ROUTE_RESOLVED => CmKind::RouteResolved,
            t::RDMA_CM_EVENT_ESTABLISHED => CmKind::Established,
            t::RDMA_CM_EVENT_ADDR_ERROR
            | t::RDMA_CM_EVENT_ROUTE_ERROR
            | t::RDMA_CM_EVENT_CONNECT_ERROR
            | t::RDMA_CM_EVENT_UNREACHABLE => CmKind::Failed,
            t::RDMA_CM_EVENT_REJECTED => {
                // SAFETY: a reject of a reliable port space carries `conn`.
                CmKind::Rejected(private_data(unsafe { &event.param.conn }))
            }
            t::RDMA_CM_EVENT_DISCONNECTED => CmKind::Disconnected,
            t::RDMA_CM_EVENT_DEVICE_REMOVAL => CmKind::DeviceRemoval,
            other => CmKind::Other(other),
        };
        CmEvent { id: IdKey(event.id as usize), status: event.status, kind }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: every id on the channel holds it, so none is left; destroyed once.
        unsafe { (self.api.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// Names an id as long as it lives; never dereferenced.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct IdKey(usize);

/// One event of the connection manager.
pub(super) struct CmEvent {
    /// Whom it concerns (for a request: the new id).
    pub(super) id: IdKey,
    pub(super) status: i32,
    pub(super) kind: CmKind,
}

pub(super) enum CmKind {
    Request(CmId, ConnectParam),
    AddressResolved,
    RouteResolved,
    Established,
    Failed,
    /// With the peer's private data.
    Rejected(Vec<u8>),
    Disconnected,
    DeviceRemoval,
    Other(u32),
}

/// Parameters of a connection request.
pub(super) struct ConnectParam {
    pub(super) private_data: Vec<u8>,
    pub(super) reads: u8,
}

impl ConnectParam {
    fn copy(conn: &rdma_conn_param) -> ConnectParam {
        ConnectParam { private_data: private_data(conn), reads: conn.initiator_depth }
    }
}

/// The private data of an event that is not acknowledged yet.
fn private_data(conn: &rdma_conn_param) -> Vec<u8> {
    let data: *const u8 = conn.private_data.cast();
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: the library keeps `private_data_len` bytes there until the acknowledgement.
    unsafe { std::slice::from_raw_parts(data, conn.private_data_len.into()) }.to_vec()
}

/// A connection identifier: a listener, or one end of a connection. Dropping one that was never
/// answered rejects its peer.
pub(super) struct CmId {
    api: &'static Api,
    raw: NonNull<rdma_cm_id>,
    channel: Arc<EventChannel>,
}

impl CmId {
    pub(super) fn new(channel: &Arc<EventChannel>) -> Result<CmId, Errno> {
        let (api, mut raw) = (channel.api, ptr::null_mut());
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is live and outlives the id, which holds it.
        check(unsafe {
            (api.rdma_create_id)(channel.raw.as_ptr(), &mut raw, ptr::null_mut(), space)
        })?;
        Ok(CmId { api, raw: check_new(raw)?, channel: Arc::clone(channel) })
    }

    pub(super) fn key(&self) -> IdKey {
        IdKey(self.raw.as_ptr() as usize)
    }

    /// Binds to an address; an IPv6 wildcard leaves IPv4 alone.
    pub(super) fn bind(&self, at: SocketAddr) -> Result<(), Errno> {
        let mut only: c_int = 1;
        let (value, len) = (ptr::from_mut(&mut only).cast(), size_of::<c_int>());
        if at.is_ipv6() {
            // SAFETY: the id is live; the option is an int.
            check(unsafe {
                (self.api.rdma_set_option)(
                    self.raw.as_ptr(),
                    OPTION_ID,
                    OPTION_ID_AFONLY,
                    value,
                    len,
                )
            })?;
        }
        let address = SockaddrStorage::from(at);
        // SAFETY: the address is valid for the call, which only reads it.
        check(unsafe {
            (self.api.rdma_bind_addr)(self.raw.as_ptr(), address.as_ptr().cast_mut().cast())
        })
    }

    pub(super) fn listen(&self, backlog: i32) -> Result<(), Errno> {
        // SAFETY: the id is live.
        check(unsafe { (self.api.rdma_listen)(self.raw.as_ptr(), backlog) })
    }

    /// Starts to find the device on the way to `to`, which binds the id to it.
    pub(super) fn resolve_address(&self, to: SocketAddr, limit_ms: i32) -> Result<(), Errno> {
        let (address, id) = (SockaddrStorage::from(to), self.raw.as_ptr());
        let target = address.as_ptr().cast_mut().cast();
        // SAFETY: the id is live; the address is valid for the call, which only reads it.
        check(unsafe { (self.api.rdma_resolve_addr)(id, ptr::null_mut(), target, limit_ms) })
    }

    /// Starts to find the path to the peer, once the address is resolved.
    pub(super) fn resolve_route(&self, limit_ms: i32) -> Result<(), Errno> {
        // SAFETY: the id is live.
        check(unsafe { (self.api.rdma_resolve_route)(self.raw.as_ptr(), limit_ms) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let len = u8::try_from(private_data.len()).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the id is live; the bytes are only read, during the call.
        check(unsafe {
            (self.api.rdma_reject)(self.raw.as_ptr(), private_data.as_ptr().cast(), len)
        })
    }

    /// Whether events of this id arrive at `channel`.
    pub(super) fn is_on(&self, channel: &Arc<EventChannel>) -> bool {
        Arc::ptr_eq(&self.channel, channel)
    }

    /// Moves the id and its future events to another channel.
    pub(super) fn migrate(&mut self, to: &Arc<EventChannel>) -> Result<(), Errno> {
        // SAFETY: both are live; the old channel stays alive during the call through `self`.
        check(unsafe { (self.api.rdma_migrate_id)(self.raw.as_ptr(), to.raw.as_ptr()) })?;
        self.channel = Arc::clone(to);
        Ok(())
    }

    /// The device that the id is bound to, if any.
    pub(super) fn device(&self) -> Option<DeviceKey> {
        // SAFETY: the id is live; `verbs` is set before the id is handed out.
        NonNull::new(unsafe { self.raw.as_ref().verbs }).map(|raw| DeviceKey(raw.as_ptr() as usize))
    }

    /// Our and the peer's address.
    pub(super) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        // SAFETY: the id is live; both unions are storage that the library has filled or zeroed.
        let (local, remote) = unsafe {
            let addr = &self.raw.as_ref().route.addr;
            (addr.src_addr_union.src_storage, addr.dst_addr_union.dst_storage)
        };
        Some((address(&local)?, address(&remote)?))
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: its queue pair holds the id, so that is gone; every event read has been
        // acknowledged, so this does not wait for long; destroyed once.
        unsafe { (self.api.rdma_destroy_id)(self.raw.as_ptr()) };
    }
}

fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at = ptr::from_ref(storage);
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says which member it is; storage is large and aligned enough.
            let sin = unsafe { *at.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(sin.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let sin = unsafe { *at.cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(sin.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(sin.sin6_port), 0, sin.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// The devices as librdmacm has opened them: the contexts that its ids refer to.
pub(super) struct DeviceList {
    api: &'static Api,
    raw: NonNull<*mut ibv_context>,
    len: usize,
}

impl DeviceList {
    pub(super) fn new(api: &'static Api) -> Result<Arc<DeviceList>, Errno> {
        let mut len = 0;
        // SAFETY: `len` is a place for an int; the result is checked.
        let raw = check_new(unsafe { (api.rdma_get_devices)(&mut len) })?;
        Ok(Arc::new(DeviceList { api, raw, len: usize::try_from(len).unwrap_or(0) }))
    }

    pub(super) fn contexts(self: &Arc<Self>) -> Vec<Arc<Context>> {
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

/// Names a device as long as it is open; never dereferenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DeviceKey(usize);

/// Capabilities of a device.
#[derive(Clone, Debug)]
pub(super) struct Ability {
    pub(super) name: String,
    pub(super) iwarp: bool,
    /// Send with Invalidate.
    pub(super) invalidate: bool,
    pub(super) queue_pairs: u32,
    pub(super) queue_entries: u32,
    pub(super) completion_entries: u32,
    /// Reads that one queue pair may have outstanding at the peer.
    pub(super) reads: u8,
    /// Reads of the peer that one queue pair can answer at once.
    pub(super) answers: u8,
    pub(super) segments: u32,
}

/// The handles of open devices. There is one for each, which all fabrics share: the last one to drop
/// it knows that nobody has anything of the device any more.
static CONTEXTS: Mutex<Vec<Weak<Context>>> = Mutex::new(Vec::new());

/// An open device. librdmacm closes it.
pub(super) struct Context {
    raw: NonNull<ibv_context>,
    list: Arc<DeviceList>,
    /// Its place in sysfs, and which of all that were ever there it is. None where nobody can see it.
    node: Option<(PathBuf, u64)>,
}

impl Drop for Context {
    /// Before it opens another device, librdmacm closes none that has gone, and a device that cannot be
    /// taken from its users waits until its files are closed. Of this one nothing else is left.
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

    /// Whether the system has taken it away, or waits until nobody uses it. Another one may have its
    /// name by now.
    pub(super) fn is_gone(&self) -> bool {
        let node = self.node.as_ref();
        node.is_some_and(|(path, number)| {
            !std::fs::metadata(path).is_ok_and(|f| f.ino() == *number)
        })
    }

    pub(super) fn key(&self) -> DeviceKey {
        DeviceKey(self.raw.as_ptr() as usize)
    }

    pub(super) fn ability(&self) -> Result<Ability, Errno> {
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
pub(super) struct Pd {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

impl Pd {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Pd>, Errno> {
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
pub(super) enum Access {
    /// The adapter on our behalf only.
    Local,
    /// Also the peer by writing: what iWARP demands of the sink of a Read.
    ReadSink,
    /// Also the peer, by reading and writing: what a host exposes.
    Exposed,
}

/// A registered range of the region.
pub(super) struct Mr {
    raw: NonNull<ibv_mr>,
    pd: Arc<Pd>,
    region: Arc<Region>,
    offset: u64,
    len: u64,
}

impl Mr {
    pub(super) fn new(
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

    /// The range as peers must name it, if they may access it at all.
    pub(super) fn remote(&self) -> Remote {
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
pub(super) struct CompChannel {
    raw: NonNull<ibv_comp_channel>,
    context: Arc<Context>,
}

impl CompChannel {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<CompChannel>, Errno> {
        let api = context.list.api;
        // SAFETY: the context is live and held from now on.
        let raw = check_new(unsafe { (api.ibv_create_comp_channel)(context.raw.as_ptr()) })?;
        let channel = CompChannel { raw, context: Arc::clone(context) };
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live as long as `self`.
        borrow(unsafe { &self.raw.as_ref().fd })
    }
}

impl CompChannel {
    /// Takes one announcement off the channel, if there is one.
    pub(super) fn take(&self) -> Result<(), Errno> {
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
pub(super) struct Cq {
    raw: NonNull<ibv_cq>,
    channel: Arc<CompChannel>,
}

impl Cq {
    pub(super) fn new(channel: &Arc<CompChannel>, entries: u32) -> Result<Arc<Cq>, Errno> {
        let entries = c_int::try_from(entries).map_err(|_| Errno::EINVAL)?;
        let (context, comp) = (channel.context.raw.as_ptr(), channel.raw.as_ptr());
        // SAFETY: context and channel are live and held from now on.
        let raw = check_new(unsafe {
            (channel.context.list.api.ibv_create_cq)(context, entries, ptr::null_mut(), comp, 0)
        })?;
        Ok(Arc::new(Cq { raw, channel: Arc::clone(channel) }))
    }

    /// What the device made of the size.
    pub(super) fn entries(&self) -> u32 {
        // SAFETY: `raw` is live as long as `self`.
        u32::try_from(unsafe { self.raw.as_ref().cqe }).unwrap_or(0)
    }

    /// Fetches at most `most` completions; no system call on real adapters.
    pub(super) fn poll(&self, into: &mut Harvest, most: usize) -> Result<usize, Errno> {
        let room = most.min(into.0.len()) as c_int;
        // SAFETY: the array has `room` entries; the context's operations are the device's own.
        let got = unsafe { rdma_sys::ibv_poll_cq(self.raw.as_ptr(), room, into.0.as_mut_ptr()) };
        usize::try_from(got).map(|n| n.min(room as usize)).map_err(|_| Errno::EIO)
    }

    /// Asks for an announcement of the next completion.
    pub(super) fn request_notify(&self) -> Result<(), Errno> {
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

/// Room for one batch of completions.
pub(super) struct Harvest(Box<[ibv_wc]>);

impl Harvest {
    pub(super) fn new(entries: usize) -> Harvest {
        // SAFETY: plain integers, for which zero is valid.
        Harvest((0..entries).map(|_| unsafe { std::mem::zeroed() }).collect())
    }

    /// One completion: the id of its work request, and the outcome (for a receive the length of
    /// the message, otherwise meaningless).
    pub(super) fn get(&self, index: usize) -> (u64, Result<u32, Fault>) {
        let wc = &self.0[index];
        // A Write with immediate data uses up a receive without putting anything into it.
        let empty = wc.opcode == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let bytes = if empty { 0 } else { wc.byte_len };
        (wc.wr_id, fault(wc.status).map_or(Ok(bytes), Err))
    }
}

/// Completion codes to faults. An unknown code is a local fault that shows its number.
fn fault(status: u32) -> Option<Fault> {
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
pub(super) struct Depths {
    pub(super) sends: u32,
    pub(super) receives: u32,
    /// Bytes that a send may carry in its work request.
    pub(super) inline: u32,
}

/// A reliable queue pair on an id.
pub(super) struct QueuePair {
    raw: NonNull<ibv_qp>,
    inline: u32,
    id: Arc<CmId>,
    _pd: Arc<Pd>,
    _cqs: [Arc<Cq>; 2],
}

impl QueuePair {
    pub(super) fn new(
        id: &Arc<CmId>,
        pd: &Arc<Pd>,
        sent: &Arc<Cq>,
        received: &Arc<Cq>,
        depths: Depths,
    ) -> Result<QueuePair, Errno> {
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
        attr.sq_sig_all = 1;
        // SAFETY: id, domain and queues are live, of one device, and held from now on.
        check(unsafe { (id.api.rdma_create_qp)(id.raw.as_ptr(), pd.raw.as_ptr(), &mut attr) })?;
        // SAFETY: a successful call has set the id's queue pair.
        let raw = check_new(unsafe { id.raw.as_ref().qp })?;
        Ok(QueuePair {
            raw,
            inline: attr.cap.max_inline_data,
            id: Arc::clone(id),
            _pd: Arc::clone(pd),
            _cqs: [Arc::clone(sent), Arc::clone(received)],
        })
    }

    /// Bytes that a send may carry in its work request.
    pub(super) fn inline(&self) -> u32 {
        self.inline
    }

    /// Readies the queue pair and answers the request. We offer no memory, so the peer may have
    /// no reads outstanding at us; we may have `reads` at it.
    pub(super) fn accept(&self, private_data: &[u8], reads: u8) -> Result<(), Errno> {
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

    /// Asks the peer for the connection. We issue no reads; the peer may have `reads` at us.
    pub(super) fn connect(&self, private_data: &[u8], reads: u8) -> Result<(), Errno> {
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

    /// Says goodbye to the peer; the connection manager also stops the queue pair.
    pub(super) fn disconnect(&self) -> Result<(), Errno> {
        // SAFETY: the id is live.
        check(unsafe { (self.id.api.rdma_disconnect)(self.id.raw.as_ptr()) })
    }

    /// Stops the queue pair: everything posted completes as flushed.
    pub(super) fn stop(&self) -> Result<(), Errno> {
        self.modify(ibv_qp_attr_mask::IBV_QP_STATE, |attr| {
            attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
        })
    }

    /// How long the peer shall wait before it repeats a message for which no receive was posted
    /// (an InfiniBand code; 12 is 0.64 ms). The connection manager's choice is 0: 655 ms.
    pub(super) fn set_rnr_timer(&self, code: u8) -> Result<(), Errno> {
        self.modify(ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER, |attr| attr.min_rnr_timer = code)
    }

    fn modify(&self, mask: ibv_qp_attr_mask, set: impl Fn(&mut ibv_qp_attr)) -> Result<(), Errno> {
        // SAFETY: integers, for which zero is valid.
        let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
        set(&mut attr);
        // SAFETY: the queue pair is live; the attributes are read during the call.
        check(unsafe { (self.id.api.ibv_modify_qp)(self.raw.as_ptr(), &mut attr, mask.0 as c_int) })
    }

    /// Hands over a chain with one doorbell.
    pub(super) fn send(&self, chain: &mut SendChain) -> Result<(), Refused> {
        let (first, mut bad) = (chain.link(), ptr::null_mut());
        // SAFETY: the chain is linked, its segments are live during the call, its windows were
        // checked against their registration, and their buffers stay put until they complete.
        let code = unsafe { rdma_sys::ibv_post_send(self.raw.as_ptr(), first, &mut bad) };
        check(code).map_err(|e| Refused::new(&chain.requests, bad, e))
    }

    /// As [`QueuePair::send`], for receives.
    pub(super) fn receive(&self, chain: &mut RecvChain) -> Result<(), Refused> {
        let (first, mut bad) = (chain.link(), ptr::null_mut());
        // SAFETY: as in `send`.
        let code = unsafe { rdma_sys::ibv_post_recv(self.raw.as_ptr(), first, &mut bad) };
        check(code).map_err(|e| Refused::new(&chain.requests, bad, e))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made on this id and destroyed once, before the id, which `self` holds.
        unsafe { (self.id.api.rdma_destroy_qp)(self.id.raw.as_ptr()) };
    }
}

/// A chain that was not taken whole.
#[derive(Debug)]
pub(super) struct Refused {
    /// How many requests were taken before the first that was not; none when the device does not
    /// say (siw, for one), in which case any of them may have been.
    pub(super) taken: Option<usize>,
    pub(super) why: Errno,
}

impl Refused {
    fn new<T>(requests: &[T], bad: *mut T, why: Errno) -> Refused {
        let distance = (bad as usize).wrapping_sub(requests.as_ptr() as usize) / size_of::<T>();
        Refused { taken: Some(distance).filter(|at| *at < requests.len()), why }
    }
}

/// Operation of a send work request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verb {
    Send { invalidate: Option<u32> },
    Read { addr: u64, key: u32 },
    Write { addr: u64, key: u32 },
}

macro_rules! chain {
    ($(#[$doc:meta])* $name:ident of $request:ty) => {
        $(#[$doc])*
        #[derive(Default)]
        pub(super) struct $name {
            requests: Vec<$request>,
            segments: Vec<ibv_sge>,
        }

        impl $name {
            pub(super) fn reserve(&mut self, entries: usize) {
                self.requests.reserve(entries.saturating_sub(self.requests.len()));
                self.segments.reserve(entries.saturating_sub(self.segments.len()));
            }

            pub(super) fn is_empty(&self) -> bool {
                self.requests.is_empty()
            }

            pub(super) fn clear(&mut self) {
                self.requests.clear();
                self.segments.clear();
            }

            /// The ids of the requests from `first` on.
            pub(super) fn ids(&self, first: usize) -> impl Iterator<Item = u64> + '_ {
                self.requests.iter().skip(first).map(|request| request.wr_id)
            }

            /// Points each request to its segment and to the next request. Both arrays stay where
            /// they are until the call that follows has read them.
            fn link(&mut self) -> *mut $request {
                let (mut next, segments) = (ptr::null_mut(), self.segments.as_mut_ptr());
                for (index, request) in self.requests.iter_mut().enumerate().rev() {
                    request.sg_list = segments.wrapping_add(index);
                    request.next = next;
                    next = ptr::from_mut(request);
                }
                next
            }

            fn push_blank(&mut self, id: u64, segment: ibv_sge) -> &mut $request {
                // An empty message has no segment: length 0 means 2 GiB to some devices.
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

impl SendChain {
    /// Appends one request over `len` bytes at `offset` of the region. With `inline` the bytes
    /// travel in the request itself.
    pub(super) fn push(&mut self, id: u64, verb: Verb, mr: &Mr, at: (u64, u32), inline: bool) {
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

impl RecvChain {
    /// Appends one receive into `len` bytes at `offset` of the region.
    pub(super) fn push(&mut self, id: u64, mr: &Mr, at: (u64, u32)) {
        self.push_blank(id, mr.segment(at.0, at.1));
    }
}

#[cfg(test)]
mod tests;
