//! Tests of handles, events and work requests, and that rdma-core is not linked.

mod layout;

use std::net::SocketAddr;
use std::process::Command;
use std::ptr;

use nix::errno::Errno;
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

use crate::Fault;
use crate::verbs::ffi::cm::{CmKind, address};
use crate::verbs::ffi::device::completion_vector;
use crate::verbs::ffi::load::open_library;
use crate::verbs::ffi::queue_pair::fault;
use crate::verbs::ffi::types::ibv_wr_opcode::{IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND};
use crate::verbs::ffi::types::{
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc_status, rdma_cm_event_type as event,
};
use crate::verbs::ffi::{Api, RecvChain, Refused, SendChain};

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
    let signaled = |requests: &[(u32, u32)]| {
        let mut chain = SendChain::default();
        for (id, (opcode, length)) in requests.iter().enumerate() {
            let segment = ibv_sge { addr: 0, length: *length, lkey: 7 };
            chain.push_blank(id as u64, segment).opcode = *opcode;
        }
        chain.signal();
        let flag = ibv_send_flags::IBV_SEND_SIGNALED;
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
