//! Requests and messages that are not what they should be, and what their senders get.

use rdma::limits::DISPLACEMENT;

use super::*;

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
        (count, target.endpoint.half_open(), target.endpoint.counters()[DatagramOutcome::Crowded])
    };
    assert_eq!(ask(0, 6), (4, 4, 2), "what one source may have");
    assert_eq!(ask(2, 3), (3, 5, 2), "another takes the rest, and then its share of the first's");
    assert_eq!(ask(0, 1), (0, 5, 3), "of equals, the next one displaces later");
    // A request that is not admitted gets no answer: the peer repeats it after the others.
    let now = net.now();
    let waiting = net.node(0);
    assert!(waiting.events().is_empty());
    assert!(waiting.endpoint.poll_timeout().is_some_and(|at| at > now));
}

/// Else a busy target would displace connections before it reads that they were confirmed.
#[test]
fn sources_with_equal_shares_displace_at_a_bounded_rate() {
    let limits = Config { half_open: 4, half_open_per_source: 4, ..Config::default() };
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
        let asked = net.node(1).events();
        let count = asked.len();
        held.extend(asked);
        (count, net.now())
    };
    let (count, start) = ask(0, 4);
    assert_eq!(count, 4, "all that there are");
    assert_eq!(ask(2, 2).0, 2, "a source with fewer gets its share at once");
    let (count, end) = ask(2, 20);
    assert!(end - start < DISPLACEMENT, "{:?}", end - start);
    assert_eq!(count, 1, "then one after the other");
}

/// Else all that ask until the first has answered would be challenged for nothing.
#[test]
fn challenges_count_towards_the_displacement_rate() {
    let shares = Config { half_open: 4, half_open_per_source: 4, ..Config::default() };
    let limits = Config { unverified: 0, ..shares };
    let mut net = two(1, Faults::NONE, false, open_config(), limits);
    net.add(address(false, 3), open_config(), plan()).unwrap();
    let to = SocketAddr::new(address(false, 2), PORT);
    let mut held = Vec::new();
    let mut ask = |node: usize, times: usize, answers: usize| {
        let (before, start) = (net.node(1).endpoint.counters(), net.now());
        for _ in 0..times {
            let (now, from) = (net.now(), net.node(node).address);
            net.node(node).endpoint.connect(now, from, to, &[], LIMITS).unwrap();
        }
        // Of those that are challenged two datagrams more.
        for _ in 0..times + 2 * answers {
            net.step();
        }
        assert!(net.now() - start < DISPLACEMENT);
        let after = net.node(1).endpoint.counters();
        let asked = net.node(1).events();
        let count = asked.len();
        held.extend(asked);
        (after[DatagramOutcome::Doubted] - before[DatagramOutcome::Doubted], count)
    };
    assert_eq!(ask(0, 4, 4), (4, 4), "room for all");
    assert_eq!(ask(2, 2, 2), (2, 2), "its share");
    assert_eq!(ask(2, 8, 1), (1, 1), "one displaces another");
}

/// Each would cost a question, and room that others want.
#[test]
fn sources_with_too_many_open_challenges_are_not_challenged() {
    let limits = Config { unverified: 0, half_open_per_source: 4, ..Config::default() };
    let mut net = two(1, Faults::NONE, false, open_config(), limits);
    connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let request = ConnectRequest::of(&asked).unwrap().message;
    net.node(1).endpoint.reject(asked, &[]);
    drain(&mut net);
    let before = net.node(1).endpoint.counters();
    for number in 1..=10 {
        let (local_comm_id, qpn) = (request.local_comm_id ^ number, Qpn::new(1000 + number));
        inject(&mut net, CmMessage::Request(Request { local_comm_id, qpn, ..request }));
    }
    let after = net.node(1).endpoint.counters();
    let since = |outcome| after[outcome] - before[outcome];
    assert_eq!((since(DatagramOutcome::Doubted), since(DatagramOutcome::Crowded)), (4, 6));
    // It answers, and so is heard.
    for _ in 0..4 {
        incoming(&mut net);
    }
}

/// Gives a packet without data from the host to the target.
fn give(net: &mut EndpointNetwork, bth: Bth) {
    let reth = Some(Reth { address: 0, key: 0, length: 0 });
    let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: Msn::default() });
    let ext = Extended { reth, aeth, ..Extended::default() };
    deliver(net, &bth, HeaderBytes::emit(&bth, &ext).as_slice().to_vec());
}

/// Gives a message of connection management from the host to the target.
pub(super) fn inject(net: &mut EndpointNetwork, message: CmMessage) {
    let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
    let header = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
    let mut bytes = header.as_slice().to_vec();
    bytes.extend(message.emit(MadHeader { transaction: 9, ..MadHeader::default() }));
    deliver(net, &bth, bytes);
}

/// The same, of a datagram that lacks its CRC.
fn deliver(net: &mut EndpointNetwork, bth: &Bth, mut bytes: Vec<u8>) {
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
fn requested(net: &mut EndpointNetwork) -> (Qp, Qp, Request) {
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
fn a_restarted_peer_reconnects_with_a_single_request() {
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
    // The request whose connection has ended is not repeated.
    inject(&mut net, CmMessage::Request(request));
    assert!(net.node(1).events().is_empty());
}

/// An attacker who knows everything about a connection but its numbers cannot end it by a forged request,
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
            let before = net.node(1).endpoint.counters()[DatagramOutcome::Doubted];
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

#[test]
fn a_repeated_request_gets_the_same_reply_and_the_peers_tos() {
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
    // A peer of this implementation obeys congestion marks, but messages of connection management do not.
    assert_eq!(transmit.tos, 0x6a);
    node.endpoint.disconnect(now, target, node.pool.region());
    let transmits = std::iter::from_fn(|| node.endpoint.poll_transmit(now, node.pool.region()));
    let disconnect =
        transmits.filter(|t| t.outgoing.header()[0] == Opcode::UdSendOnly.to_wire()).last();
    assert_eq!(disconnect.unwrap().tos, 0x68);
}

/// A connection request and its message, where another endpoint may open it.
fn asked_of_two() -> (EndpointNetwork, Incoming, Request) {
    let mut net = plain(false);
    net.add(address(false, 3), open_config(), plan()).unwrap();
    connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let request = ConnectRequest::of(&asked).unwrap().message;
    (net, asked, request)
}

/// A Linux host waits for the time that an MRA asks for before it repeats the request once more.
#[test]
fn a_repeated_request_gets_the_reply_of_another_endpoint() {
    let (mut net, asked, request) = asked_of_two();
    let now = net.now();
    let opened = net.node(2).endpoint.open(asked, LIMITS).unwrap();
    inject(&mut net, CmMessage::Request(request));
    assert!(matches!(message(&mut net, 1), Some(CmMessage::MessageReceipt(_))));
    net.node(2).endpoint.accept(now, opened, b"yes");
    let Some(CmMessage::Reply(lost)) = message(&mut net, 2) else { panic!("no reply") };
    inject(&mut net, CmMessage::Request(request));
    assert_eq!(message(&mut net, 1), Some(CmMessage::Reply(lost)));
}

/// In a flood a reply is sent once, and given up before a Linux host repeats its request.
#[test]
fn a_request_repeated_after_a_lost_reply_is_served_anew() {
    for opens in [1, 2] {
        let (mut net, asked, request) = asked_of_two();
        let now = net.now();
        let qp = net.node(opens).endpoint.open(asked, LIMITS).unwrap();
        net.node(opens).endpoint.accept(now, qp, &[]);
        // It receives nothing.
        net.node(0).endpoint = Endpoint::new(open_config(), Box::new(|| 5));
        drain(&mut net);
        let given_up = net.node(opens).events();
        assert!(matches!(given_up[..], [Event::Gone(_, Reason::NotEstablished)]), "{given_up:?}");
        inject(&mut net, CmMessage::Request(request));
        let again = net.node(1).events();
        assert!(matches!(again[..], [Event::Incoming(_)]), "opened by {opens}: {again:?}");
    }
}

/// While a path fails for seconds all replies are lost, and a rejection behind them would not be.
#[test]
fn a_reply_is_given_up_after_a_linux_host_has_repeated_its_request() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let (start, qp) = (net.now(), net.node(1).endpoint.open(asked, LIMITS).unwrap());
    net.node(1).endpoint.accept(start, qp, &[]);
    net.node(0).endpoint = Endpoint::new(open_config(), Box::new(|| 5));
    let next = |net: &mut EndpointNetwork| net.node(1).endpoint.poll_timeout().unwrap() - start;
    while next(&mut net) < Duration::from_secs(2) {
        assert!(net.step());
    }
    assert!(next(&mut net) > Duration::from_millis(6144), "{:?}", next(&mut net));
}

/// A target without room keeps requests for longer than a host waits before it repeats them.
#[test]
fn a_request_held_by_the_user_is_delivered_once() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let held = incoming(&mut net);
    let request = ConnectRequest::of(&held).unwrap().message;
    let start = net.now();
    drain(&mut net);
    assert!(net.now() - start >= Config::default().patience);
    inject(&mut net, CmMessage::Request(request));
    let again = net.node(1).events();
    assert!(again.is_empty(), "{again:?}");
    assert_eq!(net.node(1).endpoint.half_open(), 1);

    // Afterwards there is nothing left of it.
    drop(held);
    inject(&mut net, CmMessage::Request(request));
    drop(incoming(&mut net));
    drain(&mut net);
    inject(&mut net, CmMessage::Request(request));
    assert!(ConnectRequest::of(&incoming(&mut net)).is_some());
}

/// The number of a queue pair may be guessed, with patience; that of its first packet as well cannot.
#[test]
fn only_the_receiver_of_the_reply_can_confirm_a_connection() {
    for first in [Opcode::SendOnly, Opcode::WriteOnly] {
        let mut net = plain(false);
        connect(&mut net, &[]);
        let asked = incoming(&mut net);
        let now = net.now();
        let target = net.node(1).endpoint.open(asked, LIMITS).unwrap();
        net.node(1).endpoint.accept(now, target, &[]);
        let Some(CmMessage::Reply(reply)) = message(&mut net, 1) else { panic!() };
        let guess = |opcode, ahead| Bth::new(opcode, reply.qpn, reply.starting_psn.add(ahead));
        let behind = 0u32.wrapping_sub(1000);
        for guess in [guess(Opcode::Acknowledge, 0), guess(Opcode::SendOnly, behind)] {
            give(&mut net, guess);
            assert!(net.node(1).events().is_empty(), "{guess:?}");
        }
        give(&mut net, guess(first, 0));
        let events = net.node(1).events();
        let up = |event: &Event| matches!(event, Event::Established(qp) if *qp == target);
        assert!(events.iter().any(up), "{events:?}");
    }
}

/// An attacker who does not know both ids of a connection, and its queue pair, cannot end it.
#[test]
fn forged_rejects_and_disconnects_do_not_end_a_connection() {
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
    // A confirmation of an unknown connection is rejected, with ids of no connection.
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
fn abandoned_connections_release_their_half_open_slot() {
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
fn invalid_connection_requests_are_not_delivered() {
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

/// Requests with a forged address cause no more bytes to that address than replies.
#[test]
fn work_posted_on_an_unconfirmed_connection_is_deferred() {
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
    let (_, mad) = next_transmit(&mut net, 1).unwrap();
    let (header, CmMessage::DisconnectReply(reply)) =
        CmMessage::parse(mad.first_chunk().unwrap()).unwrap()
    else {
        panic!()
    };
    assert_eq!((header.transaction, reply.remote_comm_id), (9, 5));
}

/// The services other than the reliable connection: unreliable connected, reliable datagram, extended
/// reliable connected (IBTA volume 1, 12.6.5 "REQ - Request for Communication").
#[test]
fn a_request_for_another_transport_service_is_rejected_as_such() {
    let mut net = plain(false);
    connect(&mut net, &[]);
    let asked = incoming(&mut net);
    let request = ConnectRequest::of(&asked).unwrap().message;
    net.node(1).endpoint.reject(asked, &[]);
    drain(&mut net);
    net.node(0).events();
    for (number, transport, extended_transport) in [(1, 1, 0), (2, 2, 0), (3, 3, 1), (4, 0, 1)] {
        let local_comm_id = request.local_comm_id ^ number;
        let asks = Request { local_comm_id, transport, extended_transport, ..request };
        let before = net.node(1).endpoint.counters();
        inject(&mut net, CmMessage::Request(asks));
        let Some(CmMessage::Reject(reject)) = message(&mut net, 1) else { panic!("{transport}") };
        assert_eq!(reject.reason, RejectReason::INVALID_TRANSPORT);
        assert_eq!((reject.remote_comm_id, reject.message), (local_comm_id, 0));
        let after = net.node(1).endpoint.counters();
        assert_eq!(after[DatagramOutcome::Rejected] - before[DatagramOutcome::Rejected], 1);
        assert!(net.node(1).events().is_empty() && net.node(1).endpoint.half_open() == 0);
    }
}

/// Operation codes of the unreliable connection are 20h to 2Bh (IBTA volume 1, 9.2 "Base Transport
/// Header", table 38): those of Send and Write of the reliable one, and 20h.
#[test]
fn packets_of_an_unreliable_connection_are_dropped_and_counted() {
    let mut net = plain(false);
    let (host, target) = established(&mut net);
    let into = net.node(1).pool.take_data(64).unwrap();
    net.node(1).post(target, 1, Work::Recv(into));
    let from = buf(&mut net.node(0).pool, 64, 0);
    net.node(0).post(host, 1, Work::Send { from, invalidate: None });
    let (transmit, payload) = next_transmit(&mut net, 0).unwrap();
    let now = net.now();
    let (flow, header) = (transmit.flow, transmit.outgoing.header());
    let mut give = |opcode: u8| {
        let mut bytes = [header, &payload].concat();
        bytes[0] = opcode;
        let head: [u8; Bth::BYTES] = *bytes.first_chunk().unwrap();
        let mut icrc = Icrc::start(&flow, 0, bytes.len() + 4, &head);
        icrc.update(&bytes[Bth::BYTES..]);
        bytes.extend(icrc.finish());
        let target = net.node(1);
        let before = target.endpoint.counters();
        target.endpoint.handle(now, flow.source, flow.destination, 0, &bytes, target.pool.region());
        let after = target.endpoint.counters();
        let is_new = |outcome: &&DatagramOutcome| after[**outcome] > before[**outcome];
        (*DatagramOutcome::ALL.iter().find(is_new).unwrap(), target.events().len())
    };
    for opcode in 0x20..=0x2b {
        assert_eq!(give(opcode), (DatagramOutcome::Malformed, 0), "{opcode:#x}");
    }
    // The same packet of the reliable connection is executed: nothing has changed meanwhile.
    assert_eq!(give(Opcode::SendOnly.to_wire()), (DatagramOutcome::Executed, 1));
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
fn foreign_and_damaged_packets_are_counted_and_ignored() {
    let mut net = plain(false);
    let (host, _) = established(&mut net);
    let from = buf(&mut net.node(0).pool, 64, 0);
    net.node(0).post(host, 1, Work::Send { from, invalidate: None });
    let (transmit, payload) = next_transmit(&mut net, 0).unwrap();
    let now = net.now();
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
    assert_eq!(
        (
            after[DatagramOutcome::Damaged],
            after[DatagramOutcome::Foreign],
            after[DatagramOutcome::Malformed]
        ),
        (1, 1, 2)
    );
    assert_eq!((after.dropped() - before.dropped(), after.accounted()), (4, after.received));
    assert_eq!((after.received - before.received, after.marked), (4, 4));
    assert!(
        target.events().is_empty()
            && target.endpoint.poll_transmit(now, target.pool.region()).is_none()
    );
}
