//! Endpoints of the soft transport in a simulated network: connections start and end, and data
//! survive whatever the network does. Every failure names the seed that repeats it.

mod half_open;
mod injection;
mod ipv4_id;
mod random;
mod source_penalty;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use rdma::soft::cm::connection::{ConnectRequest, code_time};
use rdma::soft::cm::mad::MadHeader;
use rdma::soft::cm::message::{
    CmMessage, DisconnectRequest, ReadyToUse, Reject, RejectReason, Request,
};
use rdma::soft::endpoint::{Config, Endpoint, Transmit};
use rdma::soft::qp::memory_region::Rights;
use rdma::soft::sim::{EndpointNetwork, Faults, Rng};
use rdma::soft::stats::datagrams::DatagramOutcome;
use rdma::wire::header::{Aeth, Bth, Deth, Extended, GSI_QKEY, HeaderBytes, Reth, Syndrome};
use rdma::wire::icrc::{Flow, Icrc};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Msn, Psn, Qpn};
use rdma::{
    Buf, Event, Fault, Incoming, Pool, PoolPlan, Qp, QpLimits, Reason, Remote, RemoteRegion, Work,
};

const LIMITS: QpLimits = QpLimits { receives: 16, sends: 16, reads: 4 };
const PORT: u16 = 4420;

fn plan() -> PoolPlan {
    PoolPlan::without_receives(16, 8 << 20, 1 << 20)
}

fn open_config() -> Config {
    Config {
        answered_reads: 4,
        rights: Rights::ALL,
        exposed: 64,
        window: 24,
        read_bytes: 8 << 10,
        ack_timeout: Duration::from_millis(2),
        ..Config::default()
    }
}

fn address(v6: bool, number: u8) -> IpAddr {
    let text = if v6 { format!("fd00::{number}") } else { format!("10.0.0.{number}") };
    text.parse().unwrap()
}

/// A host (node 0) and a target (node 1), which listens.
fn two(seed: u64, faults: Faults, v6: bool, host: Config, target: Config) -> EndpointNetwork {
    two_in(EndpointNetwork::new(seed, faults), v6, host, target)
}

/// The same, in a network without endpoints.
fn two_in(mut net: EndpointNetwork, v6: bool, host: Config, target: Config) -> EndpointNetwork {
    net.add(address(v6, 1), host, plan()).unwrap();
    net.add(address(v6, 2), target, plan()).unwrap();
    net.node(1).endpoint.listen(SocketAddr::new(address(v6, 2), PORT));
    net
}

fn connect(net: &mut EndpointNetwork, private: &[u8]) -> Qp {
    let (now, from) = (net.now(), net.node(0).address);
    let to = SocketAddr::new(net.node(1).address, PORT);
    net.node(0).endpoint.connect(now, from, to, private, LIMITS).unwrap()
}

/// Runs until something has happened at a node, or nothing can happen any more.
fn wait(net: &mut EndpointNetwork, node: usize) -> Vec<Event> {
    for _ in 0..10_000 {
        let events = net.node(node).events();
        if !events.is_empty() || !net.step() {
            return events;
        }
    }
    panic!("nothing happens")
}

fn incoming(net: &mut EndpointNetwork) -> Incoming {
    let mut events = wait(net, 1);
    match events.pop() {
        Some(Event::Incoming(incoming)) if events.is_empty() => incoming,
        other => panic!("{other:?} and {events:?}"),
    }
}

/// A connection, established at both ends.
fn established(net: &mut EndpointNetwork) -> (Qp, Qp) {
    let host = connect(net, b"hello");
    let incoming = incoming(net);
    let now = net.now();
    let target = net.node(1).endpoint.open(incoming, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, b"welcome");
    let (at_host, at_target) = (wait(net, 0), wait(net, 1));
    assert!(matches!(at_host[..], [Event::Established(qp)] if qp == host), "{at_host:?}");
    assert!(matches!(at_target[..], [Event::Established(qp)] if qp == target), "{at_target:?}");
    (host, target)
}

fn drain(net: &mut EndpointNetwork) {
    for _ in 0..100_000 {
        if !net.step() {
            return;
        }
    }
    panic!("never quiet")
}

fn buf(pool: &mut Pool, len: u32, seed: u8) -> Buf {
    let mut buf = pool.take_data(len.max(1)).unwrap();
    buf.select(0, len);
    for (at, byte) in pool.bytes_mut(&mut buf).iter_mut().enumerate() {
        *byte = pattern(at, seed);
    }
    buf
}

fn pattern(at: usize, seed: u8) -> u8 {
    (at as u8).wrapping_mul(13).wrapping_add((at >> 8) as u8).wrapping_add(seed)
}

fn is_pattern(bytes: &[u8], seed: u8) -> bool {
    bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(at, seed))
}

fn plain(v6: bool) -> EndpointNetwork {
    two(1, Faults::NONE, v6, open_config(), Config::default())
}

#[test]
fn a_connection_is_established_and_closed_by_the_peer() {
    for v6 in [false, true] {
        let mut net = plain(v6);
        let host = connect(&mut net, b"hello");
        let asked = incoming(&mut net);
        assert_eq!(asked.local, SocketAddr::new(address(v6, 2), PORT));
        assert_eq!(asked.remote.ip(), address(v6, 1));
        assert_eq!((asked.private_data.len(), asked.reads), (56, 4));
        assert_eq!(asked.private_data[..6], *b"hello\0");
        let now = net.now();
        let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
        net.node(1).endpoint.accept(now, target, &[]);
        assert!(matches!(wait(&mut net, 0)[..], [Event::Established(qp)] if qp == host));
        assert!(matches!(wait(&mut net, 1)[..], [Event::Established(qp)] if qp == target));

        let receive = net.node(1).pool.take_cell().unwrap();
        net.node(1).post(target, 7, Work::Recv(receive));
        let now = net.now();
        let node = net.node(0);
        node.endpoint.disconnect(now, host, node.pool.region());
        node.endpoint.disconnect(now, host, node.pool.region());
        assert!(matches!(node.events()[..], [Event::Gone(qp, Reason::Local)] if qp == host));
        let mut events = wait(&mut net, 1);
        assert!(matches!(events[1], Event::Gone(qp, Reason::Peer) if qp == target));
        let Event::Done(done) = events.swap_remove(0) else { panic!() };
        assert_eq!((done.tag, done.outcome), (7, Err(Fault::Flushed)));
        net.node(1).pool.give(done.work.into_buf());
        drain(&mut net);
        assert!(net.now() - now < Duration::from_millis(1), "the answer ends the asking");
        assert!(net.node(0).pool.is_full() && net.node(1).pool.is_full());
        assert!(net.node(0).events().is_empty() && net.node(1).events().is_empty());
    }
}

/// Source ports by destination queue pair and source address.
type Ports = BTreeMap<(Qpn, IpAddr), BTreeSet<u16>>;

/// Those of connection management leave from the port that they go to.
#[test]
fn packets_of_a_queue_pair_leave_from_a_source_port_of_their_own() {
    let config = Config { source_ports: 8, ..open_config() };
    let mut net = two(1, Faults::NONE, false, config, config);
    let ports: Arc<Mutex<Ports>> = Arc::default();
    let seen = Arc::clone(&ports);
    net.air.tap = Some(Box::new(move |datagram| {
        let destination = Qpn::from_wire(*datagram.bytes[5..].first_chunk().unwrap());
        let (from, _) = datagram.way.unwrap();
        seen.lock().unwrap().entry((destination, from.ip())).or_default().insert(from.port());
        true
    }));
    for seed in 0..20 {
        let (host, target) = established(&mut net);
        let into = buf(&mut net.node(1).pool, 100, 0);
        net.node(1).post(target, 1, Work::Recv(into));
        let from = buf(&mut net.node(0).pool, 100, seed);
        net.node(0).post(host, 2, Work::Send { from, invalidate: None });
        for node in [0, 1] {
            let mut done = wait(&mut net, node);
            let Some(Event::Done(done)) = done.pop() else { panic!("{done:?}") };
            assert_eq!(done.outcome, Ok(100));
            net.node(node).pool.give(done.work.into_buf());
        }
    }
    let ports = ports.lock().unwrap();
    let (management, data): (Vec<_>, Vec<_>) = ports.iter().partition(|(to, _)| to.0 == Qpn::GSI);
    assert!(management.iter().all(|(_, ports)| **ports == BTreeSet::from([4791])));
    assert!(data.len() == 40 && data.iter().all(|(_, ports)| ports.len() == 1));
    let used: BTreeSet<u16> = data.iter().flat_map(|(_, ports)| ports.iter().copied()).collect();
    assert!(used.len() > 4 && used.iter().all(|port| (49152..49160).contains(port)), "{used:?}");
}

#[test]
fn requests_without_a_listener_or_refused_are_rejected() {
    let mut net = plain(false);
    net.node(1).endpoint.unlisten(SocketAddr::new(address(false, 2), PORT));
    let first = connect(&mut net, &[]);
    let events = wait(&mut net, 0);
    let [Event::Gone(qp, Reason::Rejected { code: 8, .. })] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(qp, first);
    net.node(1).endpoint.listen("0.0.0.0:4420".parse().unwrap());
    let (start, second) = (net.now(), connect(&mut net, &[]));
    let asked = incoming(&mut net);
    net.node(1).endpoint.reject(asked, &[0, 0, 5, 0]);
    let events = wait(&mut net, 0);
    let [Event::Gone(qp, Reason::Rejected { code: 28, private_data })] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((*qp, &private_data[..5]), (second, &[0, 0, 5, 0, 0][..]));
    assert!(net.now() - start < Duration::from_millis(1), "told, not timed out");
    drain(&mut net);
}

#[test]
fn connecting_times_out_on_a_silent_network() {
    let mut net = plain(false);
    net.air.faults.loss = 1000;
    let (start, host) = (net.now(), connect(&mut net, &[]));
    let events = wait(&mut net, 0);
    assert!(matches!(events[..], [Event::Gone(qp, Reason::NotEstablished)] if qp == host));
    assert_eq!(net.now() - start, Duration::from_millis(5800));

    // The same for the side that has accepted: it is not left with half a connection.
    net.air.faults.loss = 0;
    let host = connect(&mut net, &[]);
    let asked = incoming(&mut net);
    net.air.faults.loss = 1000;
    let now = net.now();
    let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, &[]);
    let events = wait(&mut net, 1);
    assert!(matches!(events[..], [Event::Gone(qp, Reason::NotEstablished)] if qp == target));
    let events = wait(&mut net, 0);
    assert!(matches!(events[..], [Event::Gone(qp, Reason::NotEstablished)] if qp == host));
    drain(&mut net);
}

/// A target that stalls during a flood loses the packets that arrive meanwhile.
#[test]
fn a_request_survives_two_seconds_without_a_peer() {
    let mut net = plain(false);
    let (start, host, target) = (net.now(), net.node(0).address, net.node(1).address);
    net.air.cut(host, target, start + Duration::from_secs(2));
    connect(&mut net, &[]);
    incoming(&mut net);
    assert_eq!((net.now() - start).as_millis(), 2600);
}

/// The queue pair of the peer waits as long.
#[test]
fn a_connection_survives_the_silence_that_its_request_permits() {
    // As Linux 6.1: an ack timeout of 2.1 s, and seven retries.
    let host = Config { ack_timeout: code_time(19), ..open_config() };
    let mut net = two(1, Faults::NONE, false, host, Config::default());
    let (at_host, at_target) = established(&mut net);
    let into = buf(&mut net.node(0).pool, 100, 0);
    net.node(0).post(at_host, 1, Work::Recv(into));
    let (now, host, target) = (net.now(), net.node(0).address, net.node(1).address);
    net.air.cut(host, target, now + Duration::from_secs(15));
    let from = buf(&mut net.node(1).pool, 100, 5);
    net.node(1).post(at_target, 2, Work::Send { from, invalidate: None });
    for node in [1, 0] {
        let mut done = wait(&mut net, node);
        let Some(Event::Done(done)) = done.pop() else { panic!("{done:?}") };
        assert_eq!(done.outcome, Ok(100));
        net.node(node).pool.give(done.work.into_buf());
    }
}

#[test]
fn the_first_message_replaces_a_lost_ready_to_use() {
    let mut net = plain(false);
    let host = connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let now = net.now();
    let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    let receive = net.node(1).pool.take_cell().unwrap();
    net.node(1).post(target, 1, Work::Recv(receive));
    net.node(1).endpoint.accept(now, target, &[]);
    // The reply arrives; the confirmation that leaves at once gets lost.
    assert!(matches!(wait(&mut net, 0)[..], [Event::Established(_)]));
    net.air.lose_flights();
    let message = net.node(0).pool.take_cell().unwrap();
    net.node(0).post(host, 2, Work::Send { from: message, invalidate: None });
    let events = wait(&mut net, 1);
    assert!(matches!(events[..], [Event::Done(_), Event::Established(qp)] if qp == target));
    assert!(net.now() - now < Duration::from_millis(1));
}

#[test]
fn a_lost_ready_to_use_is_requested_again() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let now = net.now();
    let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, &[]);
    assert!(matches!(wait(&mut net, 0)[..], [Event::Established(_)]));
    net.air.lose_flights();
    assert!(matches!(wait(&mut net, 1)[..], [Event::Established(qp)] if qp == target));
    assert_eq!((net.now() - now).as_millis(), 200);
    assert!(net.node(0).events().is_empty());
}

/// The next datagram of a node, and its payload.
fn next_transmit(net: &mut EndpointNetwork, node: usize) -> Option<(Transmit, Vec<u8>)> {
    let (now, node) = (net.now(), net.node(node));
    let transmit = node.endpoint.poll_transmit(now, node.pool.region())?;
    let mut payload = Vec::new();
    node.endpoint.copy_payload(&transmit, node.pool.region(), &mut payload);
    Some((transmit, payload))
}

/// The next message of connection management that a node sends.
fn message(net: &mut EndpointNetwork, node: usize) -> Option<CmMessage> {
    let (_, mad) = next_transmit(net, node)?;
    Some(CmMessage::parse(mad.first_chunk()?)?.1)
}
