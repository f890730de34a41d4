//! Connections that come up and end before their peers have been let in, and what becomes of the next
//! requests from there.

use rdma::soft::cm::message::Reply;

use super::half_open::inject;
use super::*;

/// Number of connections of an address that may end before admission without a penalty.
const VAIN: u32 = 8;

/// A host (node 0), a target (node 1) that counts them, and another host (node 2).
fn three() -> EndpointNetwork {
    let config = Config { vain_per_source: Some(VAIN), ..Config::default() };
    let mut net = two(1, Faults::NONE, false, open_config(), config);
    net.add(address(false, 3), open_config(), plan()).unwrap();
    net
}

fn ask(net: &mut EndpointNetwork, host: usize) -> Qp {
    let (now, from) = (net.now(), net.node(host).address);
    let to = SocketAddr::new(net.node(1).address, PORT);
    net.node(host).endpoint.connect(now, from, to, &[], LIMITS).unwrap()
}

/// A connection of a host that comes up and is ended by either side, perhaps after the target has let
/// the host in.
fn come_and_go(net: &mut EndpointNetwork, host: usize, admitted: bool, by_target: bool) {
    let at_host = ask(net, host);
    let asked = incoming(net);
    let now = net.now();
    let at_target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, at_target, &[]);
    assert!(matches!(wait(net, host)[..], [Event::Established(_)]));
    assert!(matches!(wait(net, 1)[..], [Event::Established(_)]));
    if admitted {
        net.node(1).endpoint.admit(at_target);
    }
    let (now, (index, qp)) = (net.now(), if by_target { (1, at_target) } else { (host, at_host) });
    let node = net.node(index);
    node.endpoint.disconnect(now, qp, node.pool.region());
    for node in [host, 1] {
        assert!(matches!(wait(net, node)[..], [Event::Gone(..)]));
    }
}

fn barred(net: &mut EndpointNetwork) -> u64 {
    net.node(1).endpoint.counters()[DatagramOutcome::Barred]
}

#[test]
fn sources_with_repeated_failed_connections_are_blocked_briefly() {
    let mut net = three();
    for count in 0..=VAIN {
        come_and_go(&mut net, 0, false, count % 2 == 0);
    }
    assert_eq!(barred(&mut net), 0);
    let start = net.now();
    ask(&mut net, 0);
    ask(&mut net, 2);
    assert_eq!(incoming(&mut net).remote.ip(), address(false, 3), "another gets in");
    assert!(net.now() - start < Duration::from_millis(1));
    assert_eq!(barred(&mut net), 1);
    // It was not rejected: it repeats the request, and one is allowed by now.
    assert_eq!(incoming(&mut net).remote.ip(), address(false, 1));
    assert_eq!((net.now() - start).as_millis(), 200);
}

#[test]
fn admitted_hosts_may_reconnect_without_limit() {
    let mut net = three();
    for count in 0..10 * VAIN {
        come_and_go(&mut net, 0, true, count % 2 == 0);
    }
    assert_eq!(barred(&mut net), 0);
}

/// The reply to another request of the address and adapter of a request.
fn reply_to(net: &mut EndpointNetwork, request: Request, number: u32) -> Reply {
    let (local_comm_id, qpn) = (request.local_comm_id ^ number, Qpn::new(1000 + number));
    inject(net, CmMessage::Request(Request { local_comm_id, qpn, ..request }));
    let Some(Event::Incoming(asked)) = net.node(1).events().pop() else { panic!("{number}") };
    let now = net.now();
    let qp = net.node(1).endpoint.open(asked, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, qp, &[]);
    match message(net, 1) {
        Some(CmMessage::Reply(reply)) => reply,
        other => panic!("{other:?}"),
    }
}

/// A request of the host that is rejected.
fn rejected(net: &mut EndpointNetwork) -> Request {
    connect(net, &[]);
    let asked = incoming(net);
    let request = ConnectRequest::of(&asked).unwrap().message;
    net.node(1).endpoint.reject(asked, &[]);
    drain(net);
    net.node(0).events();
    request
}

/// Each costs a queue pair, as one does that is confirmed.
#[test]
fn sources_that_decline_replies_are_blocked_briefly() {
    for disconnects in [false, true] {
        let mut net = three();
        let request = rejected(&mut net);
        for number in 1..=VAIN + 1 {
            let Reply { local_comm_id: ours, remote_comm_id: theirs, qpn, .. } =
                reply_to(&mut net, request, number);
            let (local_comm_id, remote_comm_id, remote_qpn) = (theirs, ours, qpn);
            let reason = RejectReason::CONSUMER;
            inject(
                &mut net,
                match disconnects {
                    false => CmMessage::Reject(Reject {
                        local_comm_id,
                        remote_comm_id,
                        reason,
                        ..Reject::zeroed()
                    }),
                    true => CmMessage::DisconnectRequest(DisconnectRequest {
                        local_comm_id,
                        remote_comm_id,
                        remote_qpn,
                        ..DisconnectRequest::zeroed()
                    }),
                },
            );
            while message(&mut net, 1).is_some() {}
            assert!(matches!(net.node(1).events()[..], [Event::Gone(..)]));
        }
        assert_eq!(barred(&mut net), 0);
        let (local_comm_id, qpn) = (request.local_comm_id ^ 99, Qpn::new(99));
        inject(&mut net, CmMessage::Request(Request { local_comm_id, qpn, ..request }));
        assert_eq!((barred(&mut net), net.node(1).events().len()), (1, 0));
        ask(&mut net, 2);
        assert_eq!(incoming(&mut net).remote.ip(), address(false, 3), "another gets in");
    }
}

/// Whoever forges requests of an address would have its owner blocked, or get as many queue pairs as
/// the owner rejects.
#[test]
fn the_owner_of_a_forged_address_may_reject_replies() {
    for reason in [6, 7].map(RejectReason) {
        let mut net = three();
        let request = rejected(&mut net);
        for number in 1..=VAIN + 2 {
            let reply = reply_to(&mut net, request, number);
            let (local_comm_id, remote_comm_id) = (reply.remote_comm_id, reply.local_comm_id);
            let reject = Reject { local_comm_id, remote_comm_id, reason, ..Reject::zeroed() };
            inject(&mut net, CmMessage::Reject(reject));
            assert!(net.node(1).events().is_empty());
        }
        assert_eq!(net.node(1).endpoint.half_open() as u32, VAIN + 2);
        come_and_go(&mut net, 0, true, false);
        assert_eq!(barred(&mut net), 0);
    }
}

/// The forger's victim answers the questions that everybody answers, and ignores our replies.
#[test]
fn forged_requests_block_no_source() {
    let mut net = three();
    connect(&mut net, &[]);
    let request = ConnectRequest::of(&incoming(&mut net)).unwrap().message;
    let mut opened = 0;
    for number in 1..=10 * VAIN {
        let (local_comm_id, qpn) = (request.local_comm_id ^ number, Qpn::new(1000 + number));
        inject(&mut net, CmMessage::Request(Request { local_comm_id, qpn, ..request }));
    }
    while net.step() {
        let now = net.now();
        let node = net.node(1);
        for event in node.events() {
            if let Event::Incoming(asked) = event {
                let qp = node.endpoint.open(asked, LIMITS).unwrap();
                node.endpoint.accept(now, qp, &[]);
                opened += 1;
            }
        }
        net.node(0).events();
    }
    assert!(opened > 2 * VAIN, "{opened}");
    come_and_go(&mut net, 0, true, false);
    assert_eq!(barred(&mut net), 0);
}
