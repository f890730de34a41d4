//! An endpoint with attackers on a simulated network: mutated packets and messages of connection
//! management, floods of connection requests, and access to memory that no peer may have.
//!
//! The tests are small; `make hostile` asks for the large numbers by two variables, `PACKETS` and
//! `SECONDS` (of the flood), and for the least share of its throughput, in percent, that must be
//! left to a bystander (`SHARE`). It prints what it finds. Everything comes from one seed, `SEED`.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdma::soft::cm::mad::MadHeader;
use rdma::soft::cm::message::{CmMessage, CmaHeader, Request, service_id};
use rdma::soft::endpoint::Config;
use rdma::soft::qp::memory_region::Rights;
use rdma::soft::sim::{EndpointNetwork, Faults, Rng};
use rdma::soft::stats::datagrams::{Counters, DatagramOutcome};
use rdma::wire::header::{
    Bth, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES, Nak, Packet, Syndrome,
};
use rdma::wire::icrc::{Flow, Icrc};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Psn, Qpn};
use rdma::{Buf, Event, Pool, PoolPlan, Qp, QpLimits, Remote, RemoteRegion, Work};

mod flood;
mod memory_access;
mod mutated;

const LIMITS: QpLimits = QpLimits { receives: 16, sends: 32, reads: 4 };
const TARGET: usize = 0;
/// A host with constant load. The attacker does not see its packets.
const BYSTANDER: usize = 1;

fn wanted(name: &str, otherwise: u64) -> u64 {
    let text = std::env::var(name).unwrap_or_default();
    text.parse().unwrap_or(otherwise)
}

fn plan() -> PoolPlan {
    PoolPlan {
        cells: 16,
        receives: 256,
        lead_bytes: 0,
        tail_bytes: 4096,
        data_bytes: 2 << 20,
        largest_bytes: 64 << 10,
    }
}

fn host_config() -> Config {
    Config {
        answered_reads: 4,
        rights: Rights::ALL,
        exposed: 64,
        ack_timeout: Duration::from_millis(2),
        ..Config::default()
    }
}

fn address(node: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, node as u8 + 1])
}

fn target_address() -> SocketAddr {
    SocketAddr::new(address(TARGET), 4420)
}

/// A datagram that was captured, or is to be injected.
#[derive(Clone)]
struct Sample {
    way: (SocketAddr, SocketAddr),
    bytes: Vec<u8>,
}

/// Puts the right CRC under a datagram.
fn seal(datagram: &mut Sample) {
    let bytes = &mut datagram.bytes;
    let flow = Flow { source: datagram.way.0, destination: datagram.way.1 };
    let Some(end) = bytes.len().checked_sub(ICRC_BYTES) else { return };
    let Some(bth) = bytes[..end].first_chunk::<{ Bth::BYTES }>() else { return };
    let mut icrc = Icrc::start(&flow, 0, end + ICRC_BYTES, bth);
    icrc.update(&bytes[Bth::BYTES..end]);
    let crc = icrc.finish();
    bytes[end..].copy_from_slice(&crc);
}

/// Where the message of connection management begins in its datagram.
const MAD_OFFSET: usize = 20;

/// Memory of this process in use, in KiB.
fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4
}

fn print(name: &str, counters: &Counters) {
    let outcomes = DatagramOutcome::ALL.iter().filter(|outcome| counters[**outcome] > 0);
    let outcomes: Vec<_> = outcomes.map(|f| format!("{} {}", f.name(), counters[*f])).collect();
    println!("  {name}: received {}: {}", counters.received, outcomes.join(", "));
}
