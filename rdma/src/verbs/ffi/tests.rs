//! Tests of foreign types and constants against C, and that rdma-core is not linked.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::net::SocketAddr;
use std::process::Command;
use std::ptr;

use nix::errno::Errno;
use nix::sys::socket::{SockaddrLike, SockaddrStorage};
use rdma_sys::ibv_wr_opcode::{self, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND};
use rdma_sys::{
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc_status, rdma_cm_event_type as event, rdma_t,
};

use crate::Fault;
use crate::verbs::ffi::async_event::RawEvent;
use crate::verbs::ffi::cm::{CmKind, OPTION_ID, OPTION_ID_AFONLY, address};
use crate::verbs::ffi::device::completion_vector;
use crate::verbs::ffi::load::open_library;
use crate::verbs::ffi::queue_pair::fault;
use crate::verbs::ffi::{Api, RecvChain, Refused, SendChain};

/// Values in Rust, and the C expressions that must be equal.
type Claims = Vec<(String, u64)>;

macro_rules! layout {
    ($claims:ident: $($kind:ident { $($field:ident $(as $c:literal)?),* })*) => {$(
        let name = concat!("struct ", stringify!($kind));
        $claims.push((format!("sizeof({name})"), size_of::<rdma_sys::$kind>() as u64));
        $(
            let field = [$($c,)? stringify!($field)][0];
            let offset = offset_of!(rdma_sys::$kind, $field) as u64;
            $claims.push((format!("offsetof({name}, {field})"), offset));
        )*
    )*};
}

macro_rules! values {
    ($claims:ident: $($module:ident { $($name:ident),* })*) => {
        $($($claims.push((stringify!($name).into(), rdma_sys::$module::$name as u64));)*)*
    };
}

macro_rules! flags {
    ($claims:ident: $($module:ident { $($name:ident),* })*) => {
        $($($claims.push((stringify!($name).into(), rdma_sys::$module::$name.0.into()));)*)*
    };
}

fn layouts(c: &mut Claims) {
    layout! { c:
        ibv_wc { wr_id, status, opcode, byte_len, imm_data_invalidated_rkey_union as "imm_data",
            qp_num, wc_flags }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags,
            imm_data_invalidated_rkey_union as "invalidate_rkey", wr, qp_type,
            bind_mw_tso_union as "bind_mw" }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_attr { qp_state, cap, ah_attr, alt_ah_attr, min_rnr_timer, rate_limit }
        ibv_qp { context, qp_num, state }
        ibv_cq { context, channel, cqe }
        ibv_mr { context, pd, addr, length, lkey, rkey }
        ibv_pd { context }
        ibv_comp_channel { context, fd }
        ibv_device { node_type, transport_type, name, dev_path }
        ibv_device_attr { max_qp, max_qp_wr, device_cap_flags, max_sge, max_cqe, max_qp_rd_atom,
            max_qp_init_rd_atom, phys_port_cnt }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, abi_compat }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        rdma_event_channel { fd }
        rdma_cm_id { verbs, channel, context, qp, route, ps, port_num, event }
        rdma_route { addr, path_rec, num_paths }
        rdma_addr { src_addr_union as "src_addr", dst_addr_union as "dst_addr", addr }
        rdma_cm_event { id, listen_id, event, status, param }
        rdma_conn_param { private_data, private_data_len, responder_resources, initiator_depth,
            flow_control, retry_count, rnr_retry_count, srq, qp_num }
    }
    let wr = offset_of!(ibv_send_wr, wr);
    for (field, offset) in
        [("remote_addr", offset_of!(rdma_t, remote_addr)), ("rkey", offset_of!(rdma_t, rkey))]
    {
        c.push((format!("offsetof(struct ibv_send_wr, wr.rdma.{field})"), (wr + offset) as u64));
    }
    c.push(("sizeof(struct sockaddr_storage)".into(), size_of::<libc::sockaddr_storage>() as u64));
    c.push(("sizeof(struct ibv_async_event)".into(), size_of::<RawEvent>() as u64));
    let event_type = offset_of!(RawEvent, event_type) as u64;
    c.push(("offsetof(struct ibv_async_event, event_type)".into(), event_type));
}

fn constants(c: &mut Claims) {
    values! { c:
        ibv_wc_status { IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_WR_FLUSH_ERR,
            IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR,
            IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_REM_INV_RD_REQ_ERR,
            IBV_WC_REM_ABORT_ERR, IBV_WC_RESP_TIMEOUT_ERR }
        ibv_wc_opcode { IBV_WC_RECV_RDMA_WITH_IMM }
        ibv_event_type { IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_DEVICE_FATAL,
            IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR }
        ibv_wr_opcode { IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, IBV_WR_RDMA_READ,
            IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM }
        ibv_qp_state { IBV_QPS_ERR }
        ibv_qp_type { IBV_QPT_RC }
        ibv_transport_type { IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP }
        rdma_port_space { RDMA_PS_TCP }
        rdma_cm_event_type { RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ADDR_ERROR,
            RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_ROUTE_ERROR,
            RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_ERROR,
            RDMA_CM_EVENT_UNREACHABLE, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_ESTABLISHED,
            RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DEVICE_REMOVAL, RDMA_CM_EVENT_ADDR_CHANGE }
    }
    flags! { c:
        ibv_access_flags { IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE,
            IBV_ACCESS_REMOTE_READ }
        ibv_device_cap_flags { IBV_DEVICE_MEM_MGT_EXTENSIONS }
        ibv_send_flags { IBV_SEND_INLINE, IBV_SEND_SIGNALED }
        ibv_wc_flags { IBV_WC_WITH_IMM }
        ibv_qp_attr_mask { IBV_QP_STATE, IBV_QP_MIN_RNR_TIMER }
    }
    c.push(("RDMA_OPTION_ID".into(), OPTION_ID as u64));
    c.push(("RDMA_OPTION_ID_AFONLY".into(), OPTION_ID_AFONLY as u64));
}

/// Makes the C compiler compare: a difference is a compile error that quotes it.
#[test]
fn layouts_and_constants_agree_with_c() {
    let mut claims = Claims::new();
    layouts(&mut claims);
    constants(&mut claims);
    assert!(claims.len() > 150);
    let mut source =
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n"
            .to_string();
    for (expression, value) in &claims {
        writeln!(source, "_Static_assert({expression} == {value}, \"Rust says {value}\");")
            .unwrap();
    }
    let path = std::env::temp_dir().join(format!("rdma-layout-{}.c", std::process::id()));
    std::fs::write(&path, source).unwrap();
    let output = Command::new("cc").arg("-fsyntax-only").arg(&path).output().expect("a C compiler");
    std::fs::remove_file(&path).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn fabrics_use_the_completion_vectors_of_a_device_in_turn() {
    assert_eq!([0, 1, 7, 8, 17].map(|before| completion_vector(before, 8)), [0, 1, 7, 0, 1]);
    assert_eq!([0, -1, 1].map(|vectors| completion_vector(u32::MAX, vectors)), [0; 3]);
}

/// The binary must start on a machine without rdma-core.
#[test]
fn rdma_core_is_not_linked() {
    let this = std::env::current_exe().unwrap();
    let output = Command::new("readelf").arg("-d").arg(this).output().expect("readelf");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("NEEDED"), "{text}");
    assert!(!text.contains("libibverbs") && !text.contains("librdmacm"), "{text}");
}

#[test]
fn a_missing_library_names_its_packages() {
    let text = open_library("librdma-is-not-here.so.1").err().unwrap();
    for part in ["librdma-is-not-here.so.1", "libibverbs1", "librdmacm1", "ibverbs-providers"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn every_symbol_is_found() {
    assert!(Api::get().is_ok());
}

#[test]
fn unknown_completion_statuses_map_to_local_faults() {
    assert_eq!(fault(ibv_wc_status::IBV_WC_SUCCESS), None);
    assert_eq!(fault(ibv_wc_status::IBV_WC_WR_FLUSH_ERR), Some(Fault::Flushed));
    assert_eq!(fault(ibv_wc_status::IBV_WC_REM_ACCESS_ERR), Some(Fault::RemoteAccess));
    assert_eq!(fault(ibv_wc_status::IBV_WC_LOC_PROT_ERR), Some(Fault::Local(4)));
    for status in [24, 1000, u32::MAX] {
        assert_eq!(fault(status), Some(Fault::Local(status)));
    }
}

#[test]
fn a_bond_that_changes_its_port_is_an_event_of_connections_and_listeners() {
    assert!(matches!(CmKind::of(event::RDMA_CM_EVENT_ADDR_CHANGE), CmKind::AddressChanged));
    assert!(matches!(CmKind::of(event::RDMA_CM_EVENT_DEVICE_REMOVAL), CmKind::DeviceRemoval));
    for number in [event::RDMA_CM_EVENT_TIMEWAIT_EXIT, u32::MAX] {
        assert!(matches!(CmKind::of(number), CmKind::Other(other) if other == number));
    }
    assert_eq!(event::RDMA_CM_EVENT_TIMEWAIT_EXIT, 15);
}

#[test]
fn a_chain_links_in_order_and_reports_the_refused_request() {
    let mut chain = RecvChain::default();
    for id in 0..3 {
        chain.push_blank(id, ibv_sge { addr: id, length: 64 * (id > 0) as u32, lkey: 7 });
    }
    let first = chain.link();
    assert_eq!(first, chain.requests.as_mut_ptr());
    assert!(chain.requests[2].next.is_null());
    let second = chain.requests[0].next;
    let taken = |bad| Refused::new(&chain.requests, bad, Errno::ENOMEM).taken;
    assert_eq!(taken(second), Some(1));
    assert_eq!(taken(ptr::null_mut()), None);
    assert_eq!(chain.requests.iter().map(|r| r.num_sge).collect::<Vec<_>>(), [0, 1, 1]);
    assert_eq!(chain.ids(1).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn periodic_and_last_sends_and_every_read_are_signaled() {
    let signaled = |requests: &[(ibv_wr_opcode::Type, u32)]| {
        let mut chain = SendChain::default();
        for (id, (opcode, length)) in requests.iter().enumerate() {
            let segment = ibv_sge { addr: 0, length: *length, lkey: 7 };
            chain.push_blank(id as u64, segment).opcode = *opcode;
        }
        chain.signal();
        let flag = ibv_send_flags::IBV_SEND_SIGNALED.0;
        let of = |request: &&ibv_send_wr| request.send_flags & flag != 0;
        let ids = chain.requests.iter().filter(of).map(|request| request.wr_id);
        (ids.collect::<Vec<_>>(), chain.ordered_ids(requests.len()).count())
    };
    let (write, send) = ((IBV_WR_RDMA_WRITE, 4096), (IBV_WR_SEND, 16));
    let (read, large) = ((IBV_WR_RDMA_READ, 4096), (IBV_WR_RDMA_WRITE, 1 << 20));
    assert_eq!(signaled(&[]), (vec![], 0));
    assert_eq!(signaled(&[write, send]), (vec![1], 2));
    assert_eq!(signaled(&[write, send, read, read]), (vec![1, 2, 3], 2));
    assert_eq!(signaled(&[read, send, send]), (vec![0, 2], 2));
    assert_eq!(signaled(&[large, send, large, large]), (vec![0, 2, 3], 4));
    assert_eq!(signaled(&[send; 40]), (vec![15, 31, 39], 40));
    assert_eq!(signaled(&[write; 17]), (vec![15, 16], 17));
}

#[test]
fn addresses_survive_the_way_through_c() {
    for text in ["192.0.2.7:4420", "[2001:db8::5]:4420", "[fe80::1%3]:1"] {
        let at: SocketAddr = text.parse().unwrap();
        let storage = SockaddrStorage::from(at);
        // SAFETY: SockaddrStorage is a union over sockaddr_storage.
        let raw = unsafe { *storage.as_ptr().cast::<libc::sockaddr_storage>() };
        assert_eq!(address(&raw), Some(at));
    }
    // SAFETY: integers, for which zero is valid.
    assert_eq!(address(&unsafe { std::mem::zeroed() }), None);
}

/// What librdmacm has on an InfiniBand link for a listener at a GID: AF_IB of the kernel, `struct
/// sockaddr_ib` with partition, flow, GID, service id and mask.
#[test]
fn addresses_of_other_families_than_ip_are_none() {
    const AF_IB: libc::sa_family_t = 27;
    let ip: SocketAddr = "192.0.2.7:4420".parse().unwrap();
    let storage = SockaddrStorage::from(ip);
    // SAFETY: SockaddrStorage is a union over sockaddr_storage.
    let mut raw = unsafe { *storage.as_ptr().cast::<libc::sockaddr_storage>() };
    for family in [AF_IB, libc::AF_UNIX as libc::sa_family_t, libc::sa_family_t::MAX] {
        raw.ss_family = family;
        assert_eq!(address(&raw), None, "{family}");
    }
    // A GID of RoCE with an IPv4 address is mapped like this; as a socket address it stays IPv6.
    let mapped: SocketAddr = "[::ffff:192.0.2.7]:4420".parse().unwrap();
    let storage = SockaddrStorage::from(mapped);
    // SAFETY: as above.
    let raw = unsafe { *storage.as_ptr().cast::<libc::sockaddr_storage>() };
    assert_eq!(address(&raw), Some(mapped));
}
