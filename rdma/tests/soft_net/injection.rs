//! Packets forged by an attacker who knows both addresses, and by luck a queue pair and about where its
//! numbers are.

use super::*;

/// A forged message of 64 bytes (all 0xee) from another port of the host, with that number.
fn forge(net: &mut EndpointNetwork, target: Qpn, psn: Psn, port: u16) -> DatagramOutcome {
    let flow = Flow {
        source: SocketAddr::new(address(false, 1), port),
        destination: SocketAddr::new(address(false, 2), 4791),
    };
    let bth = Bth::new(Opcode::SendOnly, target, psn);
    let mut bytes = HeaderBytes::emit(&bth, &Extended::default()).as_slice().to_vec();
    bytes.extend([0xee; 64]);
    let head: [u8; Bth::BYTES] = *bytes.first_chunk().unwrap();
    let mut icrc = Icrc::start(&flow, 0, bytes.len() + 4, &head);
    icrc.update(&bytes[Bth::BYTES..]);
    bytes.extend(icrc.finish());
    let (now, node) = (net.now(), net.node(1));
    let before = node.endpoint.counters();
    node.endpoint.handle(now, flow.source, flow.destination, 0, &bytes, node.pool.region());
    let after = node.endpoint.counters();
    *DatagramOutcome::ALL.iter().find(|outcome| after[**outcome] > before[**outcome]).unwrap()
}

/// The host's message of 64 bytes, and what the target got for it; from which queue pair and number
/// the next one comes.
fn message(net: &mut EndpointNetwork, ends: (Qp, Qp), seed: u8) -> (Qpn, Psn) {
    let into = net.node(1).pool.take_data(64).unwrap();
    net.node(1).post(ends.1, 1, Work::Recv(into));
    let from = buf(&mut net.node(0).pool, 64, seed);
    net.node(0).post(ends.0, 2, Work::Send { from, invalidate: None });
    let (transmit, payload) = next_transmit(net, 0).unwrap();
    let now = net.now();
    let trailer = transmit.outgoing.seal(&transmit.flow, 0, &payload);
    let bytes = [transmit.outgoing.header(), &payload, trailer.as_slice()].concat();
    let bth = rdma::wire::header::Packet::parse(&bytes).unwrap().bth;
    let Transmit { flow, .. } = transmit;
    let target = net.node(1);
    let region = target.pool.region();
    target.endpoint.handle(now, flow.source, flow.destination, 0, &bytes, region);
    let mut arrived = 0;
    while arrived < 2 {
        for index in 0..2 {
            for event in net.node(index).events() {
                let Event::Done(done) = event else { panic!("{event:?}") };
                let mut buf = done.work.into_buf();
                if done.tag == 1 {
                    buf.select(0, 64);
                    assert!(is_pattern(net.node(1).pool.bytes(&buf), seed), "message {seed}");
                }
                net.node(index).pool.give(buf);
                arrived += 1;
            }
        }
        assert!(arrived == 2 || net.step());
    }
    (bth.destination, bth.psn.add(1))
}

#[test]
fn forged_packets_from_another_port_are_never_executed() {
    for selective in [false, true] {
        let host = Config { selective, ..open_config() };
        let mut net = two(1, Faults::NONE, false, host, open_config());
        let ends = established(&mut net);
        let (target, mut next) = message(&mut net, ends, 0);
        for nth in 1..50 {
            for ahead in 1..40 {
                assert_eq!(forge(&mut net, target, next.add(ahead), 50_000), DatagramOutcome::Port);
            }
            (_, next) = message(&mut net, ends, nth);
        }
    }
}

/// Before it is known where its packets come from, nothing is kept.
#[test]
fn early_packets_are_dropped_before_the_first_packet() {
    let mut net = two(1, Faults::NONE, false, open_config(), open_config());
    connect(&mut net, b"hello");
    let incoming = incoming(&mut net);
    let now = net.now();
    let target = net.node(1).endpoint.open(incoming, LIMITS).unwrap();
    net.node(1).endpoint.accept(now, target, &[]);
    let reply = super::message(&mut net, 1);
    let Some(CmMessage::Reply(reply)) = reply else { panic!("{reply:?}") };
    for ahead in 1..40 {
        let psn = reply.starting_psn;
        let outcome = forge(&mut net, reply.qpn, psn.add(ahead), 50_000);
        assert_eq!(outcome, DatagramOutcome::Early);
    }
}

#[test]
fn the_reorder_window_of_other_peers_is_sixteen_packets() {
    for (selective, kept) in [(false, 15), (true, 47)] {
        let host = Config { selective, ..open_config() };
        let mut net = two(1, Faults::NONE, false, host, open_config());
        let ends = established(&mut net);
        let (target, next) = message(&mut net, ends, 0);
        let outcomes: Vec<_> =
            (1..100).map(|ahead| forge(&mut net, target, next.add(ahead), 4791)).collect();
        let (early, late) = outcomes.split_at(kept);
        assert!(early.iter().all(|outcome| *outcome == DatagramOutcome::Kept), "{outcomes:?}");
        assert!(late.iter().all(|outcome| *outcome == DatagramOutcome::Early), "{outcomes:?}");
    }
}

/// Some senders can be given another port while they are connected.
#[test]
fn a_new_source_port_is_accepted_after_four_retransmissions() {
    let mut net = two(1, Faults::NONE, false, open_config(), open_config());
    let ends = established(&mut net);
    let (target, next) = message(&mut net, ends, 0);
    for _ in 0..3 {
        assert_eq!(forge(&mut net, target, next, 50_000), DatagramOutcome::Port);
    }
    assert_eq!(
        forge(&mut net, target, next, 50_000),
        DatagramOutcome::NotReady,
        "there is no receive"
    );
    assert_eq!(forge(&mut net, target, next, 4791), DatagramOutcome::Port);
}
