//! Test of the layouts and values in `types` against the headers of rdma-core, by the C compiler, and
//! against rdma-sys where the feature `layout-test` is on.

use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

use crate::verbs::ffi::types;

/// C expressions, and their values.
type Claims = Vec<(String, u64)>;

/// Claims about a field. In rdma-sys some fields are in a union that has a name of its own.
macro_rules! field {
    ($claims:ident types $name:ident $field:ident $($union:ident)?) => {
        field!($claims, types::$name, $field, $field)
    };
    ($claims:ident rdma_sys $name:ident $field:ident) => {
        field!($claims, rdma_sys::$name, $field, $field)
    };
    ($claims:ident rdma_sys $name:ident $field:ident $union:ident) => {
        field!($claims, rdma_sys::$name, $field, $union)
    };
    ($claims:ident, $from:ident::$name:ident, $field:ident, $place:ident) => {
        let (name, field) = (stringify!($name), stringify!($field));
        let offset = offset_of!($from::$name, $place) as u64;
        $claims.push((format!("offsetof(struct {name}, {field})"), offset));
        // SAFETY: never called.
        let size = bytes(|at: *const $from::$name| unsafe { &raw const (*at).$place });
        $claims.push((format!("sizeof(((struct {name} *)0)->{field})"), size));
    };
}

/// Claims about structures; `..` ends one whose further fields are the library's own.
macro_rules! structures {
    ($claims:ident $from:ident:
        $($name:ident { $($field:ident $(in $union:ident)?),* $(; $open:tt)? })*) => {$(
        let name = stringify!($name);
        let alignment = align_of::<$from::$name>() as u64;
        $claims.push((format!("_Alignof(struct {name})"), alignment));
        let open: &[&str] = &[$(stringify!($open))?];
        if open.is_empty() {
            $claims.push((format!("sizeof(struct {name})"), size_of::<$from::$name>() as u64));
        }
        $(field!($claims $from $name $field $($union)?);)*
    )*};
}

macro_rules! values {
    ($claims:ident $from:ident: $($module:ident { $($name:ident),* })*) => {
        $($($claims.push((stringify!($name).into(), number($from::$module::$name)));)*)*
    };
}

macro_rules! claims {
    ($from:ident) => {{
        let mut claims = Claims::new();
        structures! { claims $from:
            ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
            ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors; .. }
            ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
            ibv_device_attr { vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr,
                device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr,
                max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
                max_qp_init_rd_atom, max_pkeys, local_ca_ack_delay, phys_port_cnt }
            ibv_pd { context, handle }
            ibv_mr { context, pd, addr, length, handle, lkey, rkey }
            ibv_comp_channel { context, fd, refcnt }
            ibv_cq { context, channel, cq_context, handle, cqe; .. }
            ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data in
                imm_data_invalidated_rkey_union, qp_num, src_qp, wc_flags,
                pkey_index, slid, sl, dlid_path_bits }
            ibv_qp { context, handle, qp_num; .. }
            ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
            ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
            ibv_qp_attr { qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn,
                dest_qp_num, min_rnr_timer, port_num, timeout,
                retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit }
            ibv_sge { addr, length, lkey }
            ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags,
                imm_data in imm_data_invalidated_rkey_union, wr }
            ibv_recv_wr { wr_id, next, sg_list, num_sge }
            ibv_async_event { element, event_type }
            rdma_event_channel { fd }
            rdma_addr { src_storage in src_addr_union, dst_storage in dst_addr_union }
            rdma_route { addr, path_rec, num_paths }
            rdma_cm_id { verbs, channel, context, qp, route; .. }
            rdma_conn_param { private_data, private_data_len, responder_resources,
                initiator_depth, flow_control, retry_count, rnr_retry_count, srq,
                qp_num }
            rdma_cm_event { id, listen_id, event, status, param }
        }
        values! { claims $from:
            ibv_access_flags { IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE,
                IBV_ACCESS_REMOTE_READ }
            ibv_device_cap_flags { IBV_DEVICE_MEM_MGT_EXTENSIONS }
            ibv_event_type { IBV_EVENT_CQ_ERR, IBV_EVENT_QP_FATAL,
                IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_COMM_EST,
                IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR,
                IBV_EVENT_GID_CHANGE }
            ibv_qp_attr_mask { IBV_QP_STATE, IBV_QP_MIN_RNR_TIMER }
            ibv_qp_state { IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR }
            ibv_qp_type { IBV_QPT_RC }
            ibv_send_flags { IBV_SEND_SIGNALED, IBV_SEND_INLINE }
            ibv_transport_type { IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP }
            ibv_wc_flags { IBV_WC_WITH_IMM }
            ibv_wc_opcode { IBV_WC_RECV_RDMA_WITH_IMM }
            ibv_wc_status { IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR,
                IBV_WC_WR_FLUSH_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
                IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
                IBV_WC_REM_INV_RD_REQ_ERR, IBV_WC_REM_ABORT_ERR,
                IBV_WC_RESP_TIMEOUT_ERR }
            ibv_wr_opcode { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
                IBV_WR_SEND_WITH_INV }
            rdma_cm_event_type { RDMA_CM_EVENT_ADDR_RESOLVED,
                RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ROUTE_RESOLVED,
                RDMA_CM_EVENT_ROUTE_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST,
                RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_UNREACHABLE,
                RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_ESTABLISHED,
                RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DEVICE_REMOVAL,
                RDMA_CM_EVENT_ADDR_CHANGE, RDMA_CM_EVENT_TIMEWAIT_EXIT }
            rdma_port_space { RDMA_PS_TCP }
        }
        claims
    }};
}

/// Size of the field that a projection leads to.
fn bytes<S, F>(_: fn(*const S) -> *const F) -> u64 {
    size_of::<F>() as u64
}

/// A value of an enumeration: rdma-sys has integers, structures of one, and Rust enumerations.
fn number<T: Copy>(value: T) -> u64 {
    assert_eq!(size_of::<T>(), size_of::<u32>());
    // SAFETY: of the size of the integer, which each of them is.
    unsafe { std::mem::transmute_copy::<T, u32>(&value) }.into()
}

/// Claims of the types of the provider, also about what rdma-sys does not have.
fn ours() -> Claims {
    let mut claims = claims!(types);
    let wr = offset_of!(types::ibv_send_wr, wr);
    for (field, offset) in [
        ("remote_addr", offset_of!(types::Rdma, remote_addr)),
        ("rkey", offset_of!(types::Rdma, rkey)),
    ] {
        let name = format!("offsetof(struct ibv_send_wr, wr.rdma.{field})");
        claims.push((name, (wr + offset) as u64));
    }
    claims.push(("RDMA_OPTION_ID".into(), types::RDMA_OPTION_ID as u64));
    claims.push(("RDMA_OPTION_ID_AFONLY".into(), types::RDMA_OPTION_ID_AFONLY as u64));
    claims
}

/// Makes the C compiler compare: a difference is a compile error that quotes it.
#[test]
fn layouts_and_values_agree_with_c() {
    let mut source =
        "#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n"
            .to_string();
    for (expression, value) in ours() {
        writeln!(source, "_Static_assert({expression} == {value}, \"Rust says {value}\");")
            .unwrap();
    }
    let path = std::env::temp_dir().join(format!("rdma-layout-{}.c", std::process::id()));
    std::fs::write(&path, source).unwrap();
    let output = Command::new("cc").arg("-fsyntax-only").arg(&path).output().expect("a C compiler");
    std::fs::remove_file(&path).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "headers: `make test-packages` installs them\n{said}");
}

/// A claim about each structure of C, each of its fields that is used, and each constant.
#[test]
fn each_type_and_constant_is_compared() {
    let claims = ours();
    let is_claimed = |end: &str| claims.iter().any(|(name, _)| name.ends_with(end));
    let (mut structure, mut count) = (None, 0);
    for line in include_str!("../types.rs").lines() {
        let words: Vec<&str> = line.split([' ', ':', '(', ')']).filter(|w| !w.is_empty()).collect();
        let claim = match words[..] {
            ["pub", "super", "struct", name, ..] => {
                structure = Some(name).filter(|name| !name.starts_with(char::is_uppercase));
                structure.map(|name| format!("Alignof(struct {name})"))
            }
            ["}"] => {
                structure = None;
                None
            }
            ["pub", "super", "const", name, ..] => Some(name.to_owned()),
            ["pub", "super", field, ..] => {
                structure.map(|name| format!("offsetof(struct {name}, {field})"))
            }
            [name, "=", ..] if name.starts_with("IBV_") || name.starts_with("RDMA_") => {
                Some(name.to_owned())
            }
            _ => None,
        };
        if let Some(claim) = claim {
            assert!(is_claimed(&claim), "{claim} is not compared");
            count += 1;
        }
    }
    assert!(count > 150, "{count} are found");
}

/// Functions of a driver have the same signatures in `types` and in rdma-sys.
#[cfg(feature = "layout-test")]
macro_rules! operations {
    ($check:ident of $($from:tt)+) => {
        mod $check {
            use std::ffi::c_int;

            use $($from)+::*;

            type Post<Q, W> = Option<unsafe extern "C" fn(*mut Q, *mut W, *mut *mut W) -> c_int>;

            #[expect(dead_code, reason = "exists for the type checker")]
            fn signatures(ops: &ibv_context_ops) {
                let _: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int> =
                    ops.poll_cq;
                let _: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int> =
                    ops.req_notify_cq;
                let _: Post<ibv_qp, ibv_send_wr> = ops.post_send;
                let _: Post<ibv_qp, ibv_recv_wr> = ops.post_recv;
            }
        }
    };
}

#[cfg(feature = "layout-test")]
operations!(ours of crate::verbs::ffi::types);
#[cfg(feature = "layout-test")]
operations!(theirs of rdma_sys);

#[cfg(feature = "layout-test")]
#[test]
fn layouts_and_values_agree_with_rdma_sys() {
    let (ours, theirs) = (claims!(types), claims!(rdma_sys));
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(ours, theirs, "types, and rdma-sys");
    }
}
