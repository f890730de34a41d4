//! Endpoints of the soft transport in a simulated network: connections come up and go, and data
//! survive whatever the network does. Every failure names the seed that repeats it.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use rdma::soft::cm_message::{
    CmMessage, DisconnectRequest, ReadyToUse, Reject, RejectReason, Request,
};
use rdma::soft::connection::{ConnectRequest, code_time};
use rdma::soft::counters::Fate;
use rdma::soft::endpoint::{Config, Endpoint, Transmit};
use rdma::soft::header::{Bth, Deth, Extended, GSI_QKEY, HeaderBytes};
use rdma::soft::icrc::{Flow, Icrc};
use rdma::soft::mad::MadHeader;
use rdma::soft::memory::Rights;
use rdma::soft::opcode::Opcode;
use rdma::soft::psn::{Psn, Qpn};
use rdma::soft::sim::{Dice, Faults, Network, Node};
use rdma::{
    Buf, Event, Exposed, Fault, Incoming, Pool, PoolPlan, Qp, QpLimits, Reason, Remote, Work,
};

const LIMITS: QpLimits = QpLimits { receives: 16, sends: 16, reads: 4 };
const PORT: u16 = 4420;

fn plan() -> PoolPlan {
    PoolPlan {
        cells: 16,
        receives: 0,
        lead_bytes: 0,
        tail_bytes: 0,
        data_bytes: 8 << 20,
        largest_bytes: 1 << 20,
    }
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
fn two(seed: u64, faults: Faults, v6: bool, host: Config, target: Config) -> Network {
    let mut net = Network::new(seed, faults);
    net.add(address(v6, 1), host, plan()).unwrap();
    net.add(address(v6, 2), target, plan()).unwrap();
    net.node(1).endpoint.listen(SocketAddr::new(address(v6, 2), PORT));
    net
}

fn connect(net: &mut Network, private: &[u8]) -> Qp {
    let (now, from) = (net.now(), net.node(0).address);
    let to = SocketAddr::new(net.node(1).address, PORT);
    net.node(0).endpoint.connect(now, from, to, private, LIMITS).unwrap()
}

/// Runs until something has happened at a node, or nothing can happen any more.
fn wait(net: &mut Network, node: usize) -> Vec<Event> {
    for _ in 0..10_000 {
        let events = net.node(node).events();
        if !events.is_empty() || !net.step() {
            return events;
        }
    }
    panic!("nothing happens")
}

fn incoming(net: &mut Network) -> Incoming {
    let mut events = wait(net, 1);
    match events.pop() {
        Some(Event::Incoming(incoming)) if events.is_empty() => incoming,
        other => panic!("{other:?} and {events:?}"),
    }
}

/// A connection, established at both ends.
fn established(net: &mut Network) -> (Qp, Qp) {
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

fn drain(net: &mut Network) {
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

fn plain(v6: bool) -> Network {
    two(1, Faults::NONE, v6, open_config(), Config::default())
}

#[test]
fn a_connection_comes_up_and_the_peer_leaves() {
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

#[test]
fn nobody_listens_and_somebody_refuses() {
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
fn a_silent_network_ends_in_not_established() {
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

#[test]
fn a_first_message_stands_for_a_lost_confirmation() {
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
fn a_lost_confirmation_is_asked_for_again() {
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

#[test]
fn half_open_connections_are_bounded_and_shared_fairly() {
    let limits = Config { half_open: 5, half_open_per_source: 4, ..Config::default() };
    let mut net = two(1, Faults::NONE, false, open_config(), limits);
    net.add(address(false, 3), open_config(), plan()).unwrap();
    let to = SocketAddr::new(address(false, 2), PORT);
    let mut held = Vec::new();
    let mut ask = |node: usize, times: usize| {
        for _ in 0..times {
            let (now, from) = (net.now(), net.node(node).address);
            net.node(node).endpoint.connect(now, from, to, &[], LIMITS).unwrap();
        }
        for _ in 0..times {
            net.step();
        }
        let target = net.node(1);
        let asked = target.events();
        for event in &asked {
            assert!(matches!(event, Event::Incoming(_)), "{event:?}");
        }
        let count = asked.len();
        held.extend(asked);
        (count, target.endpoint.half_open(), target.endpoint.counters()[Fate::Crowded])
    };
    assert_eq!(ask(0, 6), (4, 4, 2), "what one source may have");
    assert_eq!(ask(2, 3), (3, 5, 2), "another takes the rest, and then its share of the first's");
    assert_eq!(ask(0, 1), (1, 5, 2));
    // Nothing is answered to who does not get in: it asks again, when the others are through.
    let now = net.now();
    let waiting = net.node(0);
    assert!(waiting.events().is_empty());
    assert!(waiting.endpoint.poll_timeout().is_some_and(|at| at > now));
}

/// Gives a message of connection management from the host to the target.
fn inject(net: &mut Network, message: CmMessage) {
    let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
    let header = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
    let mut bytes = header.as_slice().to_vec();
    bytes.extend(message.emit(MadHeader { transaction: 9, ..MadHeader::default() }));
    let flow = Flow {
        source: SocketAddr::new(net.node(0).address, 4791),
        destination: SocketAddr::new(net.node(1).address, 4791),
    };
    let mut icrc = Icrc::start(&flow, 0, bytes.len() + 4, &bth.emit());
    icrc.update(&bytes[Bth::BYTES..]);
    bytes.extend(icrc.finish());
    let (now, node) = (net.now(), net.node(1));
    node.endpoint.handle(now, flow.source, flow.destination, 0, &bytes, node.pool.region());
}

/// A connection, and the request that it came from.
fn requested(net: &mut Network) -> (Qp, Qp, Request) {
    let (now, host) = (net.now(), connect(net, &[]));
    let asked = incoming(net);
    let request = ConnectRequest::of(&asked).unwrap().message;
    let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, &[]);
    assert!(matches!(wait(net, 0)[..], [Event::Established(qp)] if qp == host));
    assert!(matches!(wait(net, 1)[..], [Event::Established(qp)] if qp == target));
    (host, target, request)
}

/// Its machine has started anew, and its first queue pair has the number of its first one before.
#[test]
fn a_peer_that_forgot_its_connection_gets_in_with_one_request() {
    let mut net = plain(false);
    let (_, target, request) = requested(&mut net);
    inject(&mut net, CmMessage::Request(request));
    assert!(net.node(1).events().is_empty(), "a late repetition");
    let other = Request { local_comm_id: request.local_comm_id ^ 1, ..request };
    let other = Request { qpn: Qpn::new(0x7777), ..other };
    inject(&mut net, CmMessage::Request(other));
    assert!(matches!(net.node(1).events()[..], [Event::Incoming(_)]), "another queue pair");

    net.node(0).endpoint = Endpoint::new(open_config(), Box::new(|| 5));
    let again = Request { local_comm_id: request.local_comm_id ^ 2, ..request };
    let asked_at = net.now();
    inject(&mut net, CmMessage::Request(again));
    assert!(net.node(1).events().is_empty(), "the old connection may live");
    let events = wait(&mut net, 1);
    let [Event::Incoming(_), Event::Gone(gone, Reason::Peer)] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(gone, target);
    assert!(net.now() - asked_at < Duration::from_secs(1));
    // And the request whose connection has ended does not come back.
    inject(&mut net, CmMessage::Request(request));
    assert!(net.node(1).events().is_empty());
}

/// Who knows everything about a connection but its numbers cannot end it by a forged request,
/// whether it is busy or idle, however often that is tried.
#[test]
fn a_forged_restart_does_not_end_a_connection_that_lives() {
    for (busy, lossy) in [(true, false), (false, false), (false, true)] {
        let mut net = plain(false);
        let (host, target, request) = requested(&mut net);
        if lossy {
            net.air.faults = Faults { loss: 50, ..Faults::NONE };
        }
        for number in 1..10 {
            let forged = Request { local_comm_id: request.local_comm_id ^ number, ..request };
            inject(&mut net, CmMessage::Request(forged));
            let sent_at = net.now();
            if busy {
                let receive = buf(&mut net.node(1).pool, 64, 0);
                net.node(1).post(target, 1, Work::Recv(receive));
                let from = buf(&mut net.node(0).pool, 64, 0);
                net.node(0).post(host, 2, Work::Send { from, invalidate: None });
            }
            let before = net.node(1).endpoint.counters()[Fate::Doubted];
            while net.now() - sent_at < Duration::from_secs(2) && net.step() {}
            for node in 0..2 {
                let events = net.node(node).events();
                let done =
                    |event: &Event| matches!(event, Event::Done(done) if done.outcome.is_ok());
                assert_eq!((events.len(), events.iter().all(done)), (usize::from(busy), true));
                for event in events {
                    let Event::Done(done) = event else { unreachable!() };
                    net.node(node).pool.give(done.work.into_buf());
                }
            }
            assert_eq!(before, u64::from(number), "it was a claim");
        }
    }
}

fn payload(node: &Node, transmit: &Transmit) -> Vec<u8> {
    let mut payload = Vec::new();
    node.endpoint.copy_payload(transmit, node.pool.region(), &mut payload);
    payload
}

/// The next message of connection management that a node sends.
fn message(net: &mut Network, node: usize) -> Option<CmMessage> {
    let (now, node) = (net.now(), net.node(node));
    let transmit = node.endpoint.poll_transmit(now, node.pool.region())?;
    let mad = payload(node, &transmit);
    Some(CmMessage::parse(mad.first_chunk()?)?.1)
}

#[test]
fn a_repeated_request_gets_the_same_reply_and_the_type_of_service_is_the_peers() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let first = incoming(&mut net);
    let request = *ConnectRequest::of(&first).unwrap();
    let (key, to) = (request.message.local_comm_id ^ 1, net.node(1).address);
    let request = Request { local_comm_id: key, primary_traffic_class: 0x6b, ..request.message };
    inject(&mut net, CmMessage::Request(request));
    let asked = wait(&mut net, 1).pop();
    let Some(Event::Incoming(asked)) = asked else { panic!("{asked:?}") };
    assert_eq!(asked.local.ip(), to);
    let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    inject(&mut net, CmMessage::Request(request));
    let thinking = message(&mut net, 1);
    let Some(CmMessage::MessageReceipt(thinking)) = thinking else { panic!("{thinking:?}") };
    assert_eq!((thinking.remote_comm_id, thinking.message), (key, 0));
    assert!(code_time(thinking.service_timeout) >= Config::default().patience);
    let now = net.now();
    net.node(1).endpoint.accept(now, target, b"yes");
    let Some(CmMessage::Reply(reply)) = message(&mut net, 1) else { panic!() };
    assert_eq!((reply.remote_comm_id, &reply.private_data[..4]), (key, &b"yes\0"[..]));
    assert_eq!((reply.responder_resources, reply.initiator_depth), (0, 4));
    inject(&mut net, CmMessage::Request(request));
    assert_eq!(message(&mut net, 1), Some(CmMessage::Reply(reply)));
    let (local_comm_id, remote_comm_id) = (key, reply.local_comm_id);
    let ready = ReadyToUse { local_comm_id, remote_comm_id, ..ReadyToUse::zeroed() };
    inject(&mut net, CmMessage::ReadyToUse(ready));
    let from = buf(&mut net.node(1).pool, 16, 0);
    net.node(1).post(target, 1, Work::Send { from, invalidate: None });
    let now = net.now();
    let node = net.node(1);
    let transmit = node.endpoint.poll_transmit(now, node.pool.region()).unwrap();
    assert_eq!(transmit.tos, 0x68);
}

/// Who does not know both names of a connection, and its queue pair, cannot end it.
#[test]
fn forged_endings_end_nothing() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let now = net.now();
    let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, &[]);
    let Some(CmMessage::Reply(reply)) = message(&mut net, 1) else { panic!() };
    let (theirs, ours) = (reply.remote_comm_id, reply.local_comm_id);
    let ready = |local_comm_id, remote_comm_id| {
        CmMessage::ReadyToUse(ReadyToUse { local_comm_id, remote_comm_id, ..ReadyToUse::zeroed() })
    };
    for (theirs, ours) in [(theirs ^ 1, ours), (theirs, ours ^ 1)] {
        inject(&mut net, ready(theirs, ours));
        assert!(net.node(1).events().is_empty());
    }
    // Who confirms what there is not is told so; by names that are of nobody.
    let Some(CmMessage::Reject(none)) = message(&mut net, 1) else { panic!() };
    assert_eq!((none.local_comm_id, none.remote_comm_id), (ours ^ 1, theirs));
    assert_eq!((none.reason, message(&mut net, 1)), (RejectReason::INVALID_COMM_ID, None));
    inject(&mut net, ready(theirs, ours));
    assert!(matches!(net.node(1).events()[..], [Event::Established(_)]));

    let reject = Reject { local_comm_id: theirs ^ 1, remote_comm_id: ours, ..Reject::zeroed() };
    inject(&mut net, CmMessage::Reject(reject));
    let leave = |theirs, ours, remote_qpn| {
        CmMessage::DisconnectRequest(DisconnectRequest {
            local_comm_id: theirs,
            remote_comm_id: ours,
            remote_qpn,
            ..DisconnectRequest::zeroed()
        })
    };
    inject(&mut net, leave(theirs, ours, Qpn::new(reply.qpn.get() ^ 1)));
    assert_eq!(message(&mut net, 1), None, "a forgery is not even answered");
    inject(&mut net, leave(theirs ^ 1, ours, reply.qpn));
    assert!(matches!(message(&mut net, 1), Some(CmMessage::DisconnectReply(_))));
    assert!(net.node(1).events().is_empty());
    for _ in 0..2 {
        inject(&mut net, leave(theirs, ours, reply.qpn));
        let Some(CmMessage::DisconnectReply(left)) = message(&mut net, 1) else { panic!() };
        assert_eq!((left.local_comm_id, left.remote_comm_id), (ours, theirs));
    }
    assert!(matches!(net.node(1).events()[..], [Event::Gone(qp, Reason::Peer)] if qp == target));
}

#[test]
fn what_is_given_up_is_no_longer_half_open() {
    let limits = Config { half_open: 1, ..Config::default() };
    let mut net = two(1, Faults::NONE, false, open_config(), limits);
    for round in 0..3 {
        connect(&mut net, &[]);
        let asked = incoming(&mut net);
        match round {
            0 => net.node(1).endpoint.reject(asked, &[]),
            _ => {
                let qp = net.node(1).endpoint.open(asked, LIMITS).unwrap();
                let (now, node) = (net.now(), net.node(1));
                if round == 2 {
                    node.endpoint.accept(now, qp, &[]);
                }
                node.endpoint.disconnect(now, qp, node.pool.region());
                assert!(matches!(node.events()[..], [Event::Gone(_, Reason::Local)]));
            }
        }
        let events = wait(&mut net, 0);
        assert!(matches!(events.last(), Some(Event::Gone(..) | Event::Established(_))));
    }
}

#[test]
fn bad_requests_reach_nobody() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let request = *ConnectRequest::of(&incoming(&mut net)).unwrap();
    let good = request.message;
    let bad = [
        Request { service_id: good.service_id + 1, ..good },
        Request { service_id: 0x0111_1144, ..good },
        Request { transport: 1, ..good },
        Request { extended_transport: 1, ..good },
        Request { path_mtu: 0, ..good },
        Request { path_mtu: 4, ..good },
        Request { qpn: Qpn::GSI, ..good },
        Request { private_data: [0; 92], ..good },
        Request {
            private_data: {
                let mut p = good.private_data;
                p[19] ^= 1;
                p
            },
            ..good
        },
    ];
    for (number, message) in bad.into_iter().enumerate() {
        let local_comm_id = good.local_comm_id ^ (number as u32 + 1);
        inject(&mut net, CmMessage::Request(Request { local_comm_id, ..message }));
        assert!(net.node(1).events().is_empty(), "{number}");
    }
    inject(&mut net, CmMessage::Request(Request { local_comm_id: 77, ..good }));
    assert!(matches!(net.node(1).events()[..], [Event::Incoming(_)]));
}

/// Whoever asks under the address of another makes us send no more to that than replies.
#[test]
fn what_is_posted_on_an_unconfirmed_connection_waits() {
    let mut net = plain(false);
    let host = connect(&mut net, &[]);
    let request = incoming(&mut net);
    let now = net.now();
    let target = net.node(1).endpoint.open(request, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, &[]);
    let (from, into) = (buf(&mut net.node(1).pool, 64, 3), buf(&mut net.node(1).pool, 64, 0));
    net.node(1).post(target, 1, Work::Send { from, invalidate: None });
    net.node(1).post(target, 2, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    let recv = buf(&mut net.node(0).pool, 64, 0);
    net.node(0).post(host, 3, Work::Recv(recv));
    let codes = Arc::new(Mutex::new(Vec::new()));
    let (seen, from) = (Arc::clone(&codes), net.node(1).address);
    net.air.tap = Some(Box::new(move |datagram| {
        if datagram.way.is_some_and(|(source, _)| source.ip() == from) {
            seen.lock().unwrap().push(datagram.bytes[0]);
        }
        true
    }));
    // The reply is on its way, and everything else waits for the answer to it.
    assert!(net.step());
    assert_eq!(*codes.lock().unwrap(), [Opcode::UdSendOnly as u8]);
    let at_target = wait(&mut net, 1);
    assert!(matches!(at_target[0], Event::Established(qp) if qp == target), "{at_target:?}");
    let at_host = wait(&mut net, 0);
    assert!(
        matches!(&at_host[..], [Event::Established(_), Event::Done(done)] if done.tag == 3)
            || matches!(&at_host[..], [Event::Established(_)])
                && matches!(&wait(&mut net, 0)[..], [Event::Done(done)] if done.tag == 3),
        "{at_host:?}"
    );
}

#[test]
fn every_disconnect_request_is_answered() {
    let mut net = plain(false);
    let request = DisconnectRequest { local_comm_id: 5, ..DisconnectRequest::zeroed() };
    inject(&mut net, CmMessage::DisconnectRequest(request));
    let now = net.now();
    let node = net.node(1);
    let transmit = node.endpoint.poll_transmit(now, node.pool.region()).unwrap();
    let mad = payload(node, &transmit);
    let (header, CmMessage::DisconnectReply(reply)) =
        CmMessage::parse(mad.first_chunk().unwrap()).unwrap()
    else {
        panic!()
    };
    assert_eq!((header.transaction, reply.remote_comm_id), (9, 5));
}

#[test]
fn a_target_answers_no_access_to_memory() {
    let mut net = plain(false);
    let (host, target) = established(&mut net);
    let from = buf(&mut net.node(0).pool, 64, 0);
    let to = Remote { addr: 0, key: 0x100, len: 64 };
    net.node(0).post(host, 1, Work::Write { from, to });
    let events = wait(&mut net, 0);
    let [Event::Done(done)] = &events[..] else { panic!("{events:?}") };
    assert_eq!(done.outcome, Err(Fault::RemoteAccess));
    let now = net.now();
    for (index, qp) in [(0, host), (1, target)] {
        let node = net.node(index);
        node.endpoint.disconnect(now, qp, node.pool.region());
        assert!(matches!(node.events().last(), Some(Event::Gone(..))));
    }
    drain(&mut net);
}

#[test]
fn strangers_and_damage_are_counted_and_ignored() {
    let mut net = plain(false);
    let (host, _) = established(&mut net);
    let from = buf(&mut net.node(0).pool, 64, 0);
    net.node(0).post(host, 1, Work::Send { from, invalidate: None });
    let now = net.now();
    let node = net.node(0);
    let transmit = node.endpoint.poll_transmit(now, node.pool.region()).unwrap();
    let payload = payload(node, &transmit);
    let trailer = transmit.outgoing.seal(&transmit.flow, 0, &payload);
    let datagram = [transmit.outgoing.header(), &payload, trailer.as_slice()].concat();
    let mut damaged = datagram.clone();
    damaged[30] ^= 0x55;
    let flow = transmit.flow;
    let target = net.node(1);
    let before = target.endpoint.counters();
    let mut give = |from: SocketAddr, bytes: &[u8]| {
        target.endpoint.handle(now, from, flow.destination, 3, bytes, target.pool.region());
    };
    give(flow.source, &damaged);
    give("10.0.0.9:4791".parse().unwrap(), &datagram);
    give(flow.source, &datagram[..15]);
    give(flow.source, &[]);
    let after = target.endpoint.counters();
    assert_eq!((after[Fate::Damaged], after[Fate::Foreign], after[Fate::Malformed]), (1, 1, 2));
    assert_eq!((after.dropped() - before.dropped(), after.accounted()), (4, after.received));
    assert_eq!((after.received - before.received, after.marked), (4, 4));
    assert!(
        target.events().is_empty()
            && target.endpoint.poll_transmit(now, target.pool.region()).is_none()
    );
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Any bytes, with a right CRC or not, in any state: nothing breaks.
    #[test]
    fn any_datagram_is_handled_politely(
        seed: u64, datagrams in proptest::collection::vec(
            (0..5u8, proptest::collection::vec(any::<u8>(), 0..300)), 1..60),
    ) {
        let mut net = two(seed, Faults::NONE, true, open_config(), Config::default());
        let (host, _) = established(&mut net);
        let from = buf(&mut net.node(0).pool, 256, 0);
        net.node(0).post(host, 1, Work::Send { from, invalidate: None });
        let (now, mut dice) = (net.now(), Dice::new(seed));
        let (source, here) = (address(true, 1), address(true, 2));
        let mut seen = Vec::new();
        while let Some(transmit) = {
            let node = net.node(0);
            node.endpoint.poll_transmit(now, node.pool.region())
        } {
            seen.push(transmit.outgoing.header().to_vec());
        }
        for (kind, mut bytes) in datagrams {
            // Half of them are damaged versions of a true header, sealed again.
            if kind > 1 && let Some(header) = seen.first() {
                bytes.splice(..0, header.iter().copied());
                if kind == 2 { bytes[0] = dice.roll() as u8 }
                if kind == 3 { bytes[9..12].copy_from_slice(&dice.roll().to_be_bytes()[..3]) }
            } else if bytes.len() >= 20 {
                bytes[..8].copy_from_slice(&[0x64, 0, 0xff, 0xff, 0, 0, 0, 1]);
                bytes[12..16].copy_from_slice(&0x8001_0000u32.to_be_bytes());
                bytes.resize(20 + 256, kind);
                bytes[20..24].copy_from_slice(&[1, 7, 2, 3]);
                bytes[36] = 0;
                bytes[37] = 0x10 + dice.below(9) as u8;
            }
            let flow = Flow {
                source: SocketAddr::new(source, 4791),
                destination: SocketAddr::new(here, 4791),
            };
            if let Some(bth) = bytes.first_chunk::<12>().copied() {
                let mut icrc = Icrc::start(&flow, 0, bytes.len() + 4, &bth);
                icrc.update(&bytes[12..]);
                bytes.extend(icrc.finish());
            }
            let node = net.node(1);
            node.endpoint.handle(now, flow.source, flow.destination, 0, &bytes, node.pool.region());
            while node.endpoint.poll_transmit(now, node.pool.region()).is_some() {}
        }
        let counters = net.node(1).endpoint.counters();
        prop_assert_eq!((counters[Fate::Damaged], counters.accounted()), (0, counters.received));
    }

    /// Two ends, random verbs both ways, under all faults at once: the data are right, each piece
    /// of work comes home exactly once, and the memory is whole at the end.
    #[test]
    fn data_survive_the_network(seed: u64) {
        run(seed)?;
    }
}

/// Work that one node has to do.
struct Job {
    node: usize,
    verb: u64,
    len: u32,
    seed: u8,
    exposed: Option<Exposed>,
}

fn run(seed: u64) -> Result<(), TestCaseError> {
    let mut dice = Dice::new(seed);
    let chance = |dice: &mut Dice| dice.below(60) as u16;
    let faults = Faults {
        loss: chance(&mut dice),
        duplicate: chance(&mut dice),
        damage: chance(&mut dice),
        reorder: chance(&mut dice),
        ..Faults::NONE
    };
    // Damage that IPv4 cannot see, one packet in 65536, would be a false alarm here.
    let v6 = faults.damage > 0;
    let config = Config { mtu: [256, 1024, 4096][dice.below(3) as usize], ..open_config() };
    let mut net = two(seed, Faults::NONE, v6, config, config);
    let (host, target) = established(&mut net);
    let qps = [host, target];
    net.air.faults = faults;
    let (mut jobs, mut posted) = (Vec::new(), [0usize; 2]);
    for number in 0..1 + dice.below(24) {
        let job = Job {
            node: dice.below(2) as usize,
            verb: dice.below(3),
            len: dice.below(40_000) as u32,
            seed: number as u8,
            exposed: None,
        };
        jobs.push(post(&mut net, qps, job, number, &mut posted));
        for _ in 0..dice.below(30) {
            net.step();
        }
    }
    let mut home = [0usize; 2];
    for _ in 0..200_000 {
        for (node, home) in home.iter_mut().enumerate() {
            for event in net.node(node).events() {
                let Event::Done(done) = event else {
                    return Err(TestCaseError::fail(format!("{event:?}")));
                };
                let Ok(len) = done.outcome else {
                    return Err(TestCaseError::fail(format!("{done:?} {faults:?}")));
                };
                let buf = done.work.into_buf();
                let pool = &mut net.node(node).pool;
                let right = is_pattern(&pool.bytes(&buf)[..len as usize], done.tag as u8);
                prop_assert!(right, "work {} at node {}", done.tag, node);
                pool.give(buf);
                *home += 1;
            }
        }
        if home == posted || !net.step() {
            break;
        }
    }
    prop_assert_eq!(home, posted);
    for job in jobs {
        let Some(exposed) = job.exposed else { continue };
        let node = net.node(1 - job.node);
        let buf = node.endpoint.memory().conceal(exposed);
        prop_assert!(is_pattern(node.pool.bytes(&buf), job.seed), "memory of {}", job.seed);
        node.pool.give(buf);
    }
    leave(&mut net, qps)
}

/// Posts a job at its node, and what it needs at the other.
fn post(net: &mut Network, qps: [Qp; 2], job: Job, tag: u64, posted: &mut [usize; 2]) -> Job {
    let Job { node, verb, len, seed, .. } = job;
    let other = 1 - node;
    let mut exposed = None;
    let mut expose = |net: &mut Network, seed| {
        let peer = net.node(other);
        let buf = buf(&mut peer.pool, len, seed);
        exposed.insert(peer.endpoint.memory().expose(buf, Rights::ALL).unwrap()).remote()
    };
    let work = match verb {
        0 => {
            let peer = net.node(other);
            let receive = buf(&mut peer.pool, len, 0xee);
            peer.post(qps[other], tag, Work::Recv(receive));
            posted[other] += 1;
            Work::Send { from: buf(&mut net.node(node).pool, len, seed), invalidate: None }
        }
        1 => {
            let from = expose(net, seed);
            Work::Read { into: buf(&mut net.node(node).pool, len, 0xee), from }
        }
        _ => {
            let to = expose(net, 0xee);
            Work::Write { from: buf(&mut net.node(node).pool, len, seed), to }
        }
    };
    net.node(node).post(qps[node], tag, work);
    posted[node] += 1;
    Job { exposed, ..job }
}

/// Disconnects; both ends must see it, and have all their memory.
fn leave(net: &mut Network, qps: [Qp; 2]) -> Result<(), TestCaseError> {
    let now = net.now();
    let node = net.node(0);
    node.endpoint.disconnect(now, qps[0], node.pool.region());
    net.air.faults = Faults::NONE;
    drain(net);
    let ends = [net.node(0).events(), net.node(1).events()];
    prop_assert!(matches!(ends[0][..], [Event::Gone(_, Reason::Local)]), "{:?}", ends[0]);
    prop_assert!(matches!(ends[1][..], [Event::Gone(_, Reason::Peer)]), "{:?}", ends[1]);
    prop_assert!(net.node(0).pool.is_full() && net.node(1).pool.is_full());
    Ok(())
}

/// The same seed gives the same run, to the nanosecond.
#[test]
fn a_seed_repeats_its_run() {
    let once = |seed: u64| {
        let faults = Faults { loss: 50, duplicate: 50, damage: 50, reorder: 50, ..Faults::NONE };
        let mut net = two(seed, faults, true, open_config(), open_config());
        let start = net.now();
        let host = connect(&mut net, b"again");
        let mut trace = Vec::new();
        for _ in 0..200 {
            let more = net.step();
            for node in 0..2 {
                for event in net.node(node).events() {
                    trace.push((net.now() - start, node, format!("{event:?}")));
                    if let Event::Incoming(asked) = event {
                        let now = net.now();
                        let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
                        net.node(1).endpoint.accept(now, target, &[]);
                        let from = buf(&mut net.node(0).pool, 20_000, 1);
                        net.node(0).post(host, 1, Work::Send { from, invalidate: None });
                        let receive = buf(&mut net.node(1).pool, 20_000, 1);
                        net.node(1).post(target, 1, Work::Recv(receive));
                    }
                }
            }
            if !more {
                break;
            }
        }
        let counters = [net.node(0).endpoint.counters(), net.node(1).endpoint.counters()];
        (trace.iter().map(|(at, node, _)| (*at, *node)).collect::<Vec<_>>(), counters)
    };
    assert_eq!(once(5), once(5));
    assert_ne!(once(5), once(6));
    assert!(once(5).0.len() >= 5);
}
