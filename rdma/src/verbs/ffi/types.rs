//! Structures, constants and inline functions of rdma-core that the provider uses, under the names
//! that `infiniband/verbs.h` and `rdma/rdma_cma.h` give them.
//!
//! The libraries are `libibverbs.so.1` and `librdmacm.so.1`: while a library keeps this number, no
//! field of a structure moves, and an enumeration only gets further values. The headers of versions
//! 44 (Debian 12), 56 (Debian 13) and 65 have the same layouts and values, which a test compares with
//! those installed. What the provider makes itself (work requests, completions, attributes,
//! parameters) is complete, because the libraries read or write all of it. `ibv_context`, `ibv_qp`,
//! `ibv_cq` and `rdma_cm_id` are made by the libraries and end here after the last field used.
//!
//! An enumeration is a module of integers, because a library of a newer version may have a value
//! that is not listed.
#![cfg_attr(not(test), expect(dead_code, reason = "what only the libraries or tests use"))]

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{EOPNOTSUPP, sockaddr_storage};

macro_rules! enumerations {
    ($($(#[$doc:meta])* $name:ident { $($value:ident = $number:expr,)* })*) => {$(
        $(#[$doc])*
        pub(super) mod $name {
            $(pub(in crate::verbs::ffi) const $value: u32 = $number;)*
        }
    )*};
}

enumerations! {
    /// Rights of a memory region.
    ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2,
    }
    /// Capabilities of a device.
    ibv_device_cap_flags {
        IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21,
    }
    /// Types of asynchronous events.
    ibv_event_type {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_GID_CHANGE = 18,
    }
    /// Attributes of a queue pair that a call modifies.
    ibv_qp_attr_mask {
        IBV_QP_STATE = 1,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
    }
    /// States of a queue pair.
    ibv_qp_state {
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_ERR = 6,
    }
    /// Transport services of a queue pair.
    ibv_qp_type {
        IBV_QPT_RC = 2,
    }
    /// Options of a send work request.
    ibv_send_flags {
        IBV_SEND_SIGNALED = 1 << 1,
        IBV_SEND_INLINE = 1 << 3,
    }
    /// Transports of a device.
    ibv_transport_type {
        IBV_TRANSPORT_IB = 0,
        IBV_TRANSPORT_IWARP = 1,
    }
    /// What a work completion has in addition.
    ibv_wc_flags {
        IBV_WC_WITH_IMM = 1 << 1,
    }
    /// Operations that a work completion reports.
    ibv_wc_opcode {
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    /// Outcomes of a work request.
    ibv_wc_status {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
    }
    /// Operations of a send work request.
    ibv_wr_opcode {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_SEND_WITH_INV = 9,
    }
    /// Types of events of the connection manager.
    rdma_cm_event_type {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0,
        RDMA_CM_EVENT_ADDR_ERROR = 1,
        RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3,
        RDMA_CM_EVENT_CONNECT_REQUEST = 4,
        RDMA_CM_EVENT_CONNECT_ERROR = 6,
        RDMA_CM_EVENT_UNREACHABLE = 7,
        RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9,
        RDMA_CM_EVENT_DISCONNECTED = 10,
        RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
    }
    /// Port spaces of the connection manager.
    rdma_port_space {
        RDMA_PS_TCP = 0x106,
    }
}

/// Level of options that concern an id (`rdma_set_option`).
pub(super) const RDMA_OPTION_ID: c_int = 0;
/// An IPv6 wildcard does not include IPv4.
pub(super) const RDMA_OPTION_ID_AFONLY: c_int = 2;

/// A device, open or not.
#[repr(C)]
pub(super) struct ibv_device {
    _ops: [Unused; 2],
    pub(super) node_type: c_int,
    pub(super) transport_type: c_int,
    pub(super) name: [c_char; 64],
    pub(super) dev_name: [c_char; 64],
    pub(super) dev_path: [c_char; 256],
    pub(super) ibdev_path: [c_char; 256],
}

/// An open device. The mutex of the library follows.
#[repr(C)]
pub(super) struct ibv_context {
    pub(super) device: *mut ibv_device,
    pub(super) ops: ibv_context_ops,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

/// A function that the provider does not call.
type Unused = Option<unsafe extern "C" fn()>;

/// Functions of the driver of a device.
#[repr(C)]
pub(super) struct ibv_context_ops {
    _before_poll: [Unused; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    _before_post: [Unused; 12],
    pub(super) post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    pub(super) post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    _last: [Unused; 5],
}

/// Attributes of a device.
#[repr(C)]
pub(super) struct ibv_device_attr {
    /// Version of the firmware, GUIDs, sizes of regions and pages.
    _region: [u64; 12],
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    /// Limits of what the provider does not create.
    _other: [u32; 16],
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// A protection domain.
#[repr(C)]
pub(super) struct ibv_pd {
    pub(super) context: *mut ibv_context,
    pub(super) handle: u32,
}

/// A memory region.
#[repr(C)]
pub(super) struct ibv_mr {
    pub(super) context: *mut ibv_context,
    pub(super) pd: *mut ibv_pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// A channel for notifications of completion queues.
#[repr(C)]
pub(super) struct ibv_comp_channel {
    pub(super) context: *mut ibv_context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

/// A completion queue. Mutex and counters of the library follow.
#[repr(C)]
pub(super) struct ibv_cq {
    pub(super) context: *mut ibv_context,
    pub(super) channel: *mut ibv_comp_channel,
    pub(super) cq_context: *mut c_void,
    pub(super) handle: u32,
    pub(super) cqe: c_int,
}

/// A work completion.
#[repr(C)]
pub(super) struct ibv_wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    /// In network byte order. Or the R_Key that was invalidated.
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

/// A queue pair. Its state follows.
#[repr(C)]
pub(super) struct ibv_qp {
    pub(super) context: *mut ibv_context,
    _objects: [*mut c_void; 5],
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

/// Capacity of a queue pair.
#[repr(C)]
pub(super) struct ibv_qp_cap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// What a queue pair is created with.
#[repr(C)]
pub(super) struct ibv_qp_init_attr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) recv_cq: *mut ibv_cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: ibv_qp_cap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

/// Attributes of a queue pair that can be modified.
#[repr(C)]
pub(super) struct ibv_qp_attr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    /// The path, which librdmacm sets.
    _path: [u64; 12],
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// A scatter/gather element.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ibv_sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// Operands of RDMA Read and Write.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Rdma {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
}

/// Operands of a send work request, by its operation.
#[repr(C)]
pub(super) union Operands {
    pub(super) rdma: Rdma,
    atomic: [u64; 4],
}

/// A work request of a send queue.
#[repr(C)]
pub(super) struct ibv_send_wr {
    pub(super) wr_id: u64,
    pub(super) next: *mut ibv_send_wr,
    pub(super) sg_list: *mut ibv_sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    /// In network byte order. Or the R_Key to invalidate.
    pub(super) imm_data: u32,
    pub(super) wr: Operands,
    _qp_type: u32,
    _bind_mw: [u64; 6],
}

/// A work request of a receive queue.
#[repr(C)]
pub(super) struct ibv_recv_wr {
    pub(super) wr_id: u64,
    pub(super) next: *mut ibv_recv_wr,
    pub(super) sg_list: *mut ibv_sge,
    pub(super) num_sge: c_int,
}

/// What an asynchronous event is about: a queue, or a port.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Element {
    pub(super) object: *mut c_void,
    pub(super) port_num: c_int,
}

/// An asynchronous event.
#[repr(C)]
pub(super) struct ibv_async_event {
    pub(super) element: Element,
    pub(super) event_type: c_uint,
}

/// A channel for events of the connection manager.
#[repr(C)]
pub(super) struct rdma_event_channel {
    pub(super) fd: c_int,
}

/// Addresses of an id: source, destination, and the same as GIDs.
#[repr(C)]
pub(super) struct rdma_addr {
    pub(super) src_storage: sockaddr_storage,
    pub(super) dst_storage: sockaddr_storage,
    _gids: [u64; 5],
}

/// Addresses of an id, and path records between them.
#[repr(C)]
pub(super) struct rdma_route {
    pub(super) addr: rdma_addr,
    pub(super) path_rec: *mut c_void,
    pub(super) num_paths: c_int,
}

/// An id of the connection manager. Its port space, event and queues follow.
#[repr(C)]
pub(super) struct rdma_cm_id {
    pub(super) verbs: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) context: *mut c_void,
    pub(super) qp: *mut ibv_qp,
    pub(super) route: rdma_route,
}

/// Parameters of a connection.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct rdma_conn_param {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// Parameters of an event of the connection manager, by its port space.
#[repr(C)]
pub(super) union Param {
    pub(super) conn: rdma_conn_param,
    ud: [u64; 7],
}

/// An event of the connection manager.
#[repr(C)]
pub(super) struct rdma_cm_event {
    pub(super) id: *mut rdma_cm_id,
    pub(super) listen_id: *mut rdma_cm_id,
    pub(super) event: c_uint,
    pub(super) status: c_int,
    pub(super) param: Param,
}

/// Fetches completions from a queue into the array `wc`.
///
/// # Safety
/// The queue is live; the array has `num_entries` entries.
pub(super) unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a live queue has a live context; its function has what the caller promises.
    unsafe { (*(*cq).context).ops.poll_cq.map_or(-EOPNOTSUPP, |poll| poll(cq, num_entries, wc)) }
}

/// Requests a notification for the next completion of a queue.
///
/// # Safety
/// The queue is live.
pub(super) unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: a live queue has a live context.
    unsafe { (*(*cq).context).ops.req_notify_cq.map_or(EOPNOTSUPP, |arm| arm(cq, solicited_only)) }
}

/// Posts a list of work requests to a send queue. `bad_wr` becomes the first that was not posted.
///
/// # Safety
/// The queue pair is live; the list is linked and ends; each memory region stays registered until
/// its request has completed.
pub(super) unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a live queue pair has a live context; its function has what the caller promises.
    unsafe { (*(*qp).context).ops.post_send.map_or(EOPNOTSUPP, |post| post(qp, wr, bad_wr)) }
}

/// As [`ibv_post_send`], to a receive queue.
///
/// # Safety
/// As for [`ibv_post_send`].
pub(super) unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as in `ibv_post_send`.
    unsafe { (*(*qp).context).ops.post_recv.map_or(EOPNOTSUPP, |post| post(qp, wr, bad_wr)) }
}
