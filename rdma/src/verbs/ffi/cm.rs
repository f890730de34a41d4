//! The connection manager: event channels and ids.

use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

use super::device::DeviceKey;
use super::load::Api;
use super::types::{
    RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, ibv_qp_attr, ibv_qp_state, rdma_cm_event,
    rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_port_space,
};
use super::{borrow, check, check_new, set_nonblocking};

movable!(EventChannel, CmId);

/// Channel for connection events of one fabric. Never blocks.
pub(crate) struct EventChannel {
    api: &'static Api,
    raw: NonNull<rdma_event_channel>,
}

impl EventChannel {
    pub(crate) fn new(api: &'static Api) -> Result<Arc<EventChannel>, Errno> {
        // SAFETY: no argument; the result is checked.
        let raw = check_new(unsafe { (api.rdma_create_event_channel)() })?;
        let channel = EventChannel { api, raw };
        set_nonblocking(channel.fd())?;
        Ok(Arc::new(channel))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is live as long as `self`.
        borrow(unsafe { &self.raw.as_ref().fd })
    }

    /// The next event, copied and acknowledged: `rdma_destroy_id` and `rdma_migrate_id` on any
    /// thread wait for acknowledgements, so none is delayed.
    pub(crate) fn next(self: &Arc<Self>) -> Result<Option<CmEvent>, Errno> {
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
            t::RDMA_CM_EVENT_REJECTED => {
                // SAFETY: a reject of a reliable port space carries `conn`.
                CmKind::Rejected(private_data(unsafe { &event.param.conn }))
            }
            other => CmKind::of(other),
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

/// Identifies an id while it exists; never dereferenced.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct IdKey(usize);

/// One event of the connection manager.
pub(crate) struct CmEvent {
    /// Its id (for a request: the new one).
    pub(crate) id: IdKey,
    pub(crate) status: i32,
    pub(crate) kind: CmKind,
}

pub(crate) enum CmKind {
    Request(CmId, ConnectParam),
    AddressResolved,
    RouteResolved,
    Established,
    Failed,
    /// With the peer's private data.
    Rejected(Vec<u8>),
    Disconnected,
    DeviceRemoval,
    /// The interface of a listener or of a connection has another hardware address: a bond has
    /// changed to another port, which may be of another device.
    AddressChanged,
    Other(u32),
}

impl CmKind {
    /// Of an event without parameters.
    pub(super) fn of(number: u32) -> CmKind {
        use rdma_cm_event_type as t;
        match number {
            t::RDMA_CM_EVENT_ADDR_RESOLVED => CmKind::AddressResolved,
            t::RDMA_CM_EVENT_ROUTE_RESOLVED => CmKind::RouteResolved,
            t::RDMA_CM_EVENT_ESTABLISHED => CmKind::Established,
            t::RDMA_CM_EVENT_ADDR_ERROR
            | t::RDMA_CM_EVENT_ROUTE_ERROR
            | t::RDMA_CM_EVENT_CONNECT_ERROR
            | t::RDMA_CM_EVENT_UNREACHABLE => CmKind::Failed,
            t::RDMA_CM_EVENT_DISCONNECTED => CmKind::Disconnected,
            t::RDMA_CM_EVENT_DEVICE_REMOVAL => CmKind::DeviceRemoval,
            t::RDMA_CM_EVENT_ADDR_CHANGE => CmKind::AddressChanged,
            other => CmKind::Other(other),
        }
    }
}

/// Parameters of a connection request.
pub(crate) struct ConnectParam {
    pub(crate) private_data: Vec<u8>,
    pub(crate) reads: u8,
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

/// What the connection manager sets up a queue pair with. All 0 on iWARP, which has none of these.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct QueuePairSetup {
    /// Path MTU as an InfiniBand code: 1 = 256 bytes to 5 = 4096.
    pub(crate) path_mtu: u32,
    /// Number of the peer's queue pair.
    pub(crate) peer: u32,
    /// Packet sequence numbers with which the peer begins, and we do.
    pub(crate) receive_psn: u32,
    pub(crate) send_psn: u32,
}

/// A connection identifier: a listener, or one end of a connection. Dropping one that was never
/// answered rejects its peer.
pub(crate) struct CmId {
    pub(super) api: &'static Api,
    pub(super) raw: NonNull<rdma_cm_id>,
    channel: Arc<EventChannel>,
}

impl CmId {
    pub(crate) fn new(channel: &Arc<EventChannel>) -> Result<CmId, Errno> {
        let (api, mut raw) = (channel.api, ptr::null_mut());
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is live and outlives the id, which holds it.
        check(unsafe {
            (api.rdma_create_id)(channel.raw.as_ptr(), &mut raw, ptr::null_mut(), space)
        })?;
        Ok(CmId { api, raw: check_new(raw)?, channel: Arc::clone(channel) })
    }

    pub(crate) fn key(&self) -> IdKey {
        IdKey(self.raw.as_ptr() as usize)
    }

    /// Binds to an address; an IPv6 wildcard does not include IPv4.
    pub(crate) fn bind(&self, at: SocketAddr) -> Result<(), Errno> {
        let mut only: c_int = 1;
        let (value, len) = (ptr::from_mut(&mut only).cast(), size_of::<c_int>());
        if at.is_ipv6() {
            // SAFETY: the id is live; the option is an int.
            check(unsafe {
                (self.api.rdma_set_option)(
                    self.raw.as_ptr(),
                    RDMA_OPTION_ID,
                    RDMA_OPTION_ID_AFONLY,
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

    pub(crate) fn listen(&self, backlog: i32) -> Result<(), Errno> {
        // SAFETY: the id is live.
        check(unsafe { (self.api.rdma_listen)(self.raw.as_ptr(), backlog) })
    }

    /// Starts to resolve the address `to`, which binds the id to a device: that of `from`, or that
    /// of the route.
    pub(crate) fn resolve_address(
        &self,
        from: Option<SocketAddr>,
        to: SocketAddr,
        limit_ms: i32,
    ) -> Result<(), Errno> {
        let ends = [from, Some(to)].map(|at| at.map(SockaddrStorage::from));
        let raw = |at: &Option<SockaddrStorage>| at.as_ref().map_or(ptr::null(), |at| at.as_ptr());
        let [from, to] = ends.each_ref().map(|at| raw(at).cast_mut().cast());
        // SAFETY: the id is live; the addresses are valid for the call, which only reads them.
        check(unsafe { (self.api.rdma_resolve_addr)(self.raw.as_ptr(), from, to, limit_ms) })
    }

    /// Starts to resolve the route to the peer, after the address.
    pub(crate) fn resolve_route(&self, limit_ms: i32) -> Result<(), Errno> {
        // SAFETY: the id is live.
        check(unsafe { (self.api.rdma_resolve_route)(self.raw.as_ptr(), limit_ms) })
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let len = u8::try_from(private_data.len()).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the id is live; the bytes are only read, during the call.
        check(unsafe {
            (self.api.rdma_reject)(self.raw.as_ptr(), private_data.as_ptr().cast(), len)
        })
    }

    /// Whether events of this id arrive at `channel`.
    pub(crate) fn is_on(&self, channel: &Arc<EventChannel>) -> bool {
        Arc::ptr_eq(&self.channel, channel)
    }

    /// Moves the id and its future events to another channel.
    pub(crate) fn migrate(&mut self, to: &Arc<EventChannel>) -> Result<(), Errno> {
        // SAFETY: both are live; the old channel stays alive during the call through `self`.
        check(unsafe { (self.api.rdma_migrate_id)(self.raw.as_ptr(), to.raw.as_ptr()) })?;
        self.channel = Arc::clone(to);
        Ok(())
    }

    /// The device that the id is bound to, if any.
    pub(crate) fn device(&self) -> Option<DeviceKey> {
        // SAFETY: the id is live; `verbs` is set before the id is handed out.
        NonNull::new(unsafe { self.raw.as_ref().verbs }).map(|raw| DeviceKey(raw.as_ptr() as usize))
    }

    /// What the connection manager will set up, or has set up, the queue pair of a requested
    /// connection with.
    pub(crate) fn setup(&self) -> Result<QueuePairSetup, Errno> {
        let attributes = |state| {
            // SAFETY: integers, for which zero is valid.
            let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
            let mut mask: c_int = 0;
            attr.qp_state = state;
            // SAFETY: the id is live; the library writes one structure and one mask.
            check(unsafe {
                (self.api.rdma_init_qp_attr)(self.raw.as_ptr(), &mut attr, &mut mask)
            })?;
            Ok::<_, Errno>(attr)
        };
        let ready = attributes(ibv_qp_state::IBV_QPS_RTR)?;
        let sending = attributes(ibv_qp_state::IBV_QPS_RTS)?;
        Ok(QueuePairSetup {
            path_mtu: ready.path_mtu,
            peer: ready.dest_qp_num,
            receive_psn: ready.rq_psn,
            send_psn: sending.sq_psn,
        })
    }

    /// Our and the peer's address.
    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        // SAFETY: the id is live; both are storage that the library has filled or zeroed.
        let (local, remote) = unsafe {
            let addr = &self.raw.as_ref().route.addr;
            (addr.src_storage, addr.dst_storage)
        };
        Some((address(&local)?, address(&remote)?))
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: its queue pair holds the id, so that was destroyed; every event read has been
        // acknowledged, so this does not wait for long; destroyed once.
        unsafe { (self.api.rdma_destroy_id)(self.raw.as_ptr()) };
    }
}

pub(super) fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at = ptr::from_ref(storage);
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family determines the member; storage is large and aligned enough.
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
