//! Access to the target's memory: refused for every operation code and key.

use super::*;

/// Every operation code with guessed keys and addresses: the target's memory is neither changed nor
/// read, whatever rights its queue pairs have.
#[test]
fn no_opcode_and_no_key_opens_a_targets_memory() {
    let open = Config { rights: Rights::ALL, answered_reads: 8, exposed: 64, ..Config::default() };
    for target in [Config::default(), open] {
        let refused = try_all_accesses(target);
        for opcode in [Opcode::WriteFirst, Opcode::WriteOnly, Opcode::WriteOnlyImmediate] {
            assert!(refused.contains(&opcode), "{opcode:?}");
        }
        if target.answered_reads > 0 {
            for opcode in [Opcode::ReadRequest, Opcode::CompareSwap, Opcode::FetchAdd] {
                assert!(refused.contains(&opcode), "{opcode:?}");
            }
        }
    }
}

/// Tries every access, each on a connection of its own; returns the codes that were answered with
/// "remote access error".
fn try_all_accesses(config: Config) -> Vec<Opcode> {
    let mut net = EndpointNetwork::new(1, Faults::NONE);
    net.add(address(TARGET), config, plan()).unwrap();
    net.add(address(BYSTANDER), host_config(), plan()).unwrap();
    net.node(TARGET).endpoint.listen(target_address());
    let pool = &mut net.node(TARGET).pool;
    // For messages.
    let spare = pool.take_receive().unwrap();
    let mut held: Vec<Buf> = std::iter::from_fn(|| pool.take_data(4096)).collect();
    held.extend(std::iter::from_fn(|| pool.take_receive()));
    held.extend(std::iter::from_fn(|| pool.take_cell()));
    held.iter_mut().for_each(|buf| pool.bytes_mut(buf).fill(0xa5));
    pool.give(spare);
    let base = pool.region().addr() as u64;
    let mut refused = Vec::new();
    for opcode in Opcode::all() {
        for key in [0, 1, 0x100, u32::MAX] {
            for address in [0, 4096, base] {
                for payload in [0, 12, 64, 1024] {
                    let answer = try_access(&mut net, opcode, (key, address), payload);
                    if answer == Some(Syndrome::Nak(Nak::RemoteAccess)) {
                        refused.push(opcode);
                    }
                }
            }
        }
        let pool = &net.node(TARGET).pool;
        let touched = held.iter().any(|buf| pool.bytes(buf).iter().any(|byte| *byte != 0xa5));
        assert!(!touched, "{opcode:?}");
    }
    print("target", &net.node(TARGET).endpoint.counters());
    println!("  remote access error: {}", refused.len());
    refused
}

/// Connects, sends one packet, and returns the target's answer. No answer may carry data.
fn try_access(
    net: &mut EndpointNetwork,
    opcode: Opcode,
    place: (u32, u64),
    more: usize,
) -> Option<Syndrome> {
    let (now, from) = (net.now(), address(BYSTANDER));
    let host = net.node(BYSTANDER);
    let host_qp = host.endpoint.connect(now, from, target_address(), &[], LIMITS).unwrap();
    let (mut target_qp, mut psn, mut peer) = (None, Psn::default(), None);
    while peer.is_none() {
        assert!(net.step());
        let now = net.now();
        let node = net.node(TARGET);
        while let Some(event) = node.endpoint.poll_event() {
            if let Event::Incoming(incoming) = event {
                let qp = node.endpoint.open(incoming, LIMITS).unwrap();
                let receive = node.pool.take_receive().unwrap();
                node.post(qp, 0, Work::Recv(receive));
                node.endpoint.accept(now, qp, &[]);
                target_qp = Some(qp);
                let transmit = node.endpoint.poll_transmit(now, node.pool.region()).unwrap();
                let mut mad = Vec::new();
                node.endpoint.copy_payload(&transmit, node.pool.region(), &mut mad);
                let Some((_, CmMessage::Reply(reply))) =
                    CmMessage::parse(mad.first_chunk().unwrap())
                else {
                    panic!("no reply")
                };
                (peer, psn) = (Some(reply.qpn), reply.starting_psn);
            }
        }
    }
    let (Some(peer), Some(target_qp)) = (peer, target_qp) else { unreachable!() };
    let mut bytes = Bth { ack_request: true, ..Bth::new(opcode, peer, psn) }.emit().to_vec();
    bytes.extend(place.1.to_be_bytes());
    bytes.extend(place.0.to_be_bytes());
    let length = if opcode == Opcode::WriteFirst { 2 * more } else { more.max(8) };
    bytes.extend((length as u32).to_be_bytes());
    let immediate = if opcode == Opcode::WriteOnlyImmediate { 4 } else { 0 };
    bytes.resize(bytes.len() + immediate + more + ICRC_BYTES, 0x5a);
    let way = (SocketAddr::new(from, 4791), SocketAddr::new(address(TARGET), 4791));
    let mut packet = Sample { way, bytes };
    seal(&mut packet);
    let (now, node) = (net.now(), net.node(TARGET));
    let (endpoint, region) = (&mut node.endpoint, node.pool.region());
    endpoint.handle(now, way.0, way.1, 0, &packet.bytes, region);
    let mut answer = None;
    while let Some(transmit) = endpoint.poll_transmit(now, region) {
        let mut bytes = transmit.outgoing.header().to_vec();
        endpoint.copy_payload(&transmit, region, &mut bytes);
        let bare = bytes.len() == transmit.outgoing.header().len();
        assert!(bytes[0] == Opcode::UdSendOnly as u8 || bare, "{opcode:?}");
        bytes.extend([0; ICRC_BYTES]);
        let aeth = Packet::parse(&bytes).unwrap().aeth();
        answer = aeth.map(|aeth| aeth.syndrome).or(answer);
    }
    for (index, qp) in [(TARGET, target_qp), (BYSTANDER, host_qp)] {
        let node = net.node(index);
        node.endpoint.disconnect(now, qp, node.pool.region());
        while let Some(event) = node.endpoint.poll_event() {
            if let Event::Done(done) = event {
                let mut buf = done.work.into_buf();
                node.pool.rewind(&mut buf);
                node.pool.give(buf);
            }
        }
    }
    answer
}
