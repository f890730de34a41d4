//! The soft transport's formats against packets that others made: vectors of Linux `rdma_rxe` and
//! of independent implementations, and whole captures (see `golden/README.md`). Every packet is
//! taken apart, put together again byte by byte, and its CRC computed and checked.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use rdma::soft::cm::mad::MAD_BYTES;
use rdma::soft::cm::message::{CmMessage, CmaHeader, RejectReason, service_port};
use rdma::wire::header::{Bth, GSI_QKEY, HeaderBytes, ICRC_BYTES, Nak, Packet, Syndrome, padding};
use rdma::wire::icrc::{Checker, Flow, Icrc, Verdict};
use rdma::wire::opcode::{Opcode, Operation};
use rdma::wire::psn::{Msn, Psn, Qpn};

/// An IP packet that carries a RoCEv2 datagram.
struct Ip<'a> {
    flow: Flow,
    identification: u16,
    datagram: &'a [u8],
}

/// Takes the IP and UDP headers of a packet apart. Panics on anything but IP with UDP.
fn ip(packet: &[u8]) -> Ip<'_> {
    let be16 = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    let (header, source, destination): (usize, IpAddr, IpAddr) = if packet[0] >> 4 == 4 {
        assert_eq!((packet[0], packet[9], be16(6)), (0x45, 17, 0x4000));
        let at = |from: usize| <[u8; 4]>::try_from(&packet[from..from + 4]).unwrap().into();
        (20, at(12), at(16))
    } else {
        assert_eq!((packet[0] >> 4, packet[6]), (6, 17));
        let at = |from: usize| <[u8; 16]>::try_from(&packet[from..from + 16]).unwrap().into();
        (40, at(8), at(24))
    };
    let udp_bytes = usize::from(be16(header + 4));
    Ip {
        flow: Flow {
            source: SocketAddr::new(source, be16(header)),
            destination: SocketAddr::new(destination, be16(header + 2)),
        },
        identification: if header == 20 { be16(4) } else { 0 },
        datagram: &packet[header + 8..header + udp_bytes],
    }
}

/// Takes one packet apart and puts it together again; all bytes and both ways to the CRC must
/// agree. Gives the parsed packet.
fn through<'a>(ip: &Ip<'a>, checker: &mut Checker) -> Packet<'a> {
    let packet = Packet::parse(ip.datagram).unwrap();
    let header = HeaderBytes::emit(&packet.bth, &packet.ext());
    let mut again = header.as_slice().to_vec();
    again.extend(packet.payload);
    assert_eq!(packet.bth.pad, padding(packet.payload.len()));
    again.resize(again.len() + usize::from(packet.bth.pad), 0);
    let bth: [u8; Bth::BYTES] = *again.first_chunk().unwrap();
    let mut icrc = Icrc::start(&ip.flow, ip.identification, again.len() + ICRC_BYTES, &bth);
    icrc.update(&again[Bth::BYTES..header.as_slice().len()]);
    icrc.update(packet.payload);
    icrc.update(&again[header.as_slice().len() + packet.payload.len()..]);
    again.extend(icrc.finish());
    assert_eq!(again, ip.datagram, "{packet:?}");
    let verdict = checker.check(&ip.flow, ip.datagram);
    match ip.flow.source {
        SocketAddr::V4(_) => assert_eq!(verdict, Verdict::Solved(ip.identification)),
        SocketAddr::V6(_) => assert_eq!(verdict, Verdict::Exact),
    }
    packet
}

/// The message of connection management in a packet, checked to survive emission.
fn cm(packet: &Packet<'_>) -> CmMessage {
    let deth = packet.deth().unwrap();
    assert_eq!((deth.qkey, deth.source, packet.bth.destination), (GSI_QKEY, Qpn::GSI, Qpn::GSI));
    let mad: [u8; MAD_BYTES] = packet.payload.try_into().unwrap();
    let (header, message) = CmMessage::parse(&mad).unwrap();
    assert_eq!(message.emit(header), mad);
    message
}

/// A vector: hexadecimal digits; ` xx*n ` stands for n bytes of xx.
fn vector(text: &str) -> Vec<u8> {
    let hex = |digits: &str| -> Vec<u8> {
        (0..digits.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap())
            .collect()
    };
    text.split_whitespace()
        .flat_map(|piece| match piece.split_once('*') {
            Some((byte, count)) => hex(byte).repeat(count.parse().unwrap()),
            None => hex(piece),
        })
        .collect()
}

/// Looks at a packet of `golden/vectors.txt`.
fn of_vector<T>(name: &str, look: impl FnOnce(&Packet<'_>) -> T) -> T {
    let lines = include_str!("golden/vectors.txt").lines();
    let text = lines.filter_map(|line| line.split_once(": ")).find(|(n, _)| *n == name).unwrap().1;
    let bytes = vector(text);
    look(&through(&ip(&bytes), &mut Checker::new()))
}

#[test]
fn reliable_connection_vectors_round_trip() {
    // Composed, and confirmed by an independent implementation of the CRC.
    of_vector("send-only", |p| {
        assert_eq!(
            (p.bth.opcode, p.bth.psn, p.bth.ack_request),
            (Opcode::SendOnly, Psn::new(100), true)
        );
        assert_eq!((p.payload, p.bth.pad), (&b"hello"[..], 3));
    });
    of_vector("write-only", |p| {
        let reth = p.reth().unwrap();
        assert_eq!((reth.address, reth.key, reth.length), (0x1000, 0x2345, 8));
        assert_eq!(p.payload, b"ABCDEFGH");
    });
    of_vector("acknowledge", |p| {
        let aeth = p.aeth().unwrap();
        assert_eq!((aeth.syndrome, aeth.msn), (Syndrome::ACK, Msn::new(5)));
    });
    of_vector("send-invalidate-ipv6", |p| {
        assert_eq!((p.bth.opcode, p.invalidate()), (Opcode::SendOnlyInvalidate, Some(0x2345)));
    });
    // Captured from rdma_rxe of Linux 6.1.
    of_vector("read-request-of-rxe", |p| {
        assert_eq!(p.reth().map(|r| r.length), Some(1024));
        assert_eq!(p.bth.psn, Psn::new(0x4e_2dc0));
    });
    of_vector("completion-of-rxe", |p| {
        assert_eq!((p.invalidate(), p.payload.len()), (Some(0x3f8), 16));
    });
    of_vector("acknowledge-of-rxe", |p| {
        assert_eq!(p.aeth().map(|a| a.msn), Some(Msn::new(1)));
    });
    of_vector("connect-capsule-of-rxe", |p| {
        assert_eq!(p.payload.len(), 64);
    });
}

/// Captured on a ConnectX-4 Lx: the one vector of an adapter made of silicon.
#[test]
fn congestion_notification_vector_round_trips() {
    let flow = Flow {
        source: "10.0.17.1:0".parse().unwrap(),
        destination: "10.0.18.1:4791".parse().unwrap(),
    };
    let datagram = vector("8100ffff4000011800000000 00*16 82fd002a");
    let packet =
        through(&Ip { flow, identification: 0x718c, datagram: &datagram }, &mut Checker::new());
    assert!(packet.bth.becn && !packet.bth.fecn);
    assert_eq!(
        (packet.bth.destination, packet.row().operation),
        (Qpn::new(0x118), Operation::Congestion)
    );
}

#[test]
fn cm_message_vectors_of_linux_round_trip() {
    let request = of_vector("cm-request", cm);
    let CmMessage::Request(request) = request else { panic!("{request:?}") };
    assert_eq!(service_port(request.service_id), Some(4420));
    assert_eq!((request.local_comm_id, request.ca_guid), (0x2206_b19d, 0x5054_00ff_fe00_7702));
    assert_eq!((request.qpn, request.starting_psn), (Qpn::new(0x11), Psn::new(0x4e_2dc0)));
    assert_eq!((request.responder_resources, request.initiator_depth), (128, 0));
    assert_eq!((request.remote_response_timeout, request.local_response_timeout), (20, 20));
    assert_eq!((request.retry_count, request.rnr_retry_count, request.max_cm_retries), (7, 7, 15));
    assert_eq!((request.transport, request.path_mtu, request.pkey), (0, 3, 0xffff));
    assert!(request.flow_control && !request.srq && !request.rdc_exists);
    assert_eq!((request.primary_hop_limit, request.primary_ack_timeout), (64, 19));
    assert_eq!(request.primary_flow_label, 0x60b0a);
    let (header, user) = CmaHeader::parse(&request.private_data).unwrap();
    assert_eq!(header.source, "192.168.77.2".parse::<IpAddr>().unwrap());
    assert_eq!(header.destination, "192.168.77.1".parse::<IpAddr>().unwrap());
    assert_eq!(user[..8], [0, 0, 0, 0, 0x20, 0, 0x1f, 0]);
    assert_eq!(header.emit(&user), request.private_data);

    let reply = of_vector("cm-reply", cm);
    let CmMessage::Reply(reply) = reply else { panic!("{reply:?}") };
    assert_eq!((reply.local_comm_id, reply.remote_comm_id), (0x2106_b19d, 0x2206_b19d));
    assert_eq!((reply.qpn, reply.starting_psn), (Qpn::new(0x11), Psn::new(0x2c_5f6f)));
    assert_eq!((reply.responder_resources, reply.initiator_depth), (0, 128));
    assert_eq!((reply.target_ack_delay, reply.rnr_retry_count, reply.srq), (15, 7, false));
    assert!(reply.flow_control);

    let ready = of_vector("cm-ready", cm);
    assert!(matches!(ready, CmMessage::ReadyToUse(m) if m.remote_comm_id == 0x2106_b19d));
    let leave = of_vector("cm-disconnect-request", cm);
    assert!(matches!(leave, CmMessage::DisconnectRequest(m) if m.remote_qpn == Qpn::new(0x11)));
    let left = of_vector("cm-disconnect-reply", cm);
    assert!(matches!(left, CmMessage::DisconnectReply(m) if m.local_comm_id == 0x2106_b19d));
}

#[test]
fn cm_reject_vectors_round_trip() {
    let nobody = of_vector("cm-reject-service", cm);
    let CmMessage::Reject(nobody) = nobody else { panic!("{nobody:?}") };
    assert_eq!((nobody.local_comm_id, nobody.remote_comm_id), (0, 0x2a06_b19d));
    assert_eq!((nobody.message, nobody.reason), (0, RejectReason::INVALID_SERVICE));

    let io = of_vector("cm-request-io", cm);
    assert!(matches!(io, CmMessage::Request(m) if m.primary_ack_timeout == 17));
    let refused = of_vector("cm-reject-consumer", cm);
    let CmMessage::Reject(refused) = refused else { panic!("{refused:?}") };
    assert_eq!(refused.reason, RejectReason::CONSUMER);
    // NVMe's reject: record format, then status, both little-endian.
    assert_eq!(refused.private_data[..4], [0, 0, 5, 0]);
}

/// The frames of a capture: classic pcap of this machine's byte order, Ethernet.
fn frames(capture: &[u8]) -> Vec<&[u8]> {
    let u32_at = |at: usize| u32::from_le_bytes(capture[at..at + 4].try_into().unwrap());
    assert!(matches!(u32_at(0), 0xa1b2_c3d4 | 0xa1b2_3c4d), "little-endian pcap");
    assert_eq!(u32_at(20), 1, "Ethernet");
    let (mut at, mut frames) = (24, Vec::new());
    while at < capture.len() {
        let (kept, original) = (u32_at(at + 8) as usize, u32_at(at + 12) as usize);
        assert_eq!(kept, original, "whole frames");
        frames.push(&capture[at + 16..at + 16 + kept]);
        at += 16 + kept;
    }
    frames
}

/// What a capture holds: packets by operation code, and messages by attribute.
#[derive(Default)]
struct Census {
    frames: usize,
    codes: BTreeMap<u8, usize>,
    messages: BTreeMap<u16, usize>,
    sequence_naks: usize,
}

fn census(capture: &[u8]) -> Census {
    let (mut found, mut checker) = (Census::default(), Checker::new());
    for frame in frames(capture) {
        found.frames += 1;
        if frame[12..14] != [8, 0] {
            continue;
        }
        let packet = through(&ip(&frame[14..]), &mut checker);
        *found.codes.entry(packet.bth.opcode.to_wire()).or_default() += 1;
        assert!(packet.bth.is_default_partition() && packet.bth.destination != Qpn::new(0));
        match packet.row().operation {
            Operation::Datagram => *found.messages.entry(cm(&packet).attribute()).or_default() += 1,
            Operation::Acknowledge => {
                let syndrome = packet.aeth().unwrap().syndrome;
                found.sequence_naks += usize::from(syndrome == Syndrome::Nak(Nak::Sequence));
            }
            _ => {}
        }
    }
    found
}

#[test]
fn captured_session_of_linux_6_12_round_trips() {
    let found = census(include_bytes!("golden/linux-6.12-session.pcap"));
    assert_eq!(found.frames, 628);
    let codes: Vec<u8> = found.codes.keys().copied().collect();
    assert_eq!(codes, [0, 1, 2, 4, 6, 7, 8, 10, 12, 13, 14, 15, 16, 17, 23, 100]);
    assert_eq!(
        found.messages.keys().copied().collect::<Vec<_>>(),
        [0x10, 0x12, 0x13, 0x14, 0x15, 0x16]
    );
}

#[test]
fn captured_session_of_linux_6_1_at_mtu_4096_round_trips() {
    let found = census(include_bytes!("golden/linux-6.1-session-mtu4096.pcap"));
    assert_eq!(found.frames, 396);
    assert!(found.codes[&Opcode::ReadResponseFirst.to_wire()] > 0);
}

#[test]
fn captured_events_of_linux_6_12_round_trip() {
    let found = census(include_bytes!("golden/linux-6.12-events.pcap"));
    assert_eq!(found.frames, 611);
    assert!(found.messages[&0x12] >= 2 && found.messages[&0x15] >= 1);
}

#[test]
fn captured_losses_of_linux_6_12_round_trip() {
    let found = census(include_bytes!("golden/linux-6.12-loss.pcap"));
    assert_eq!(found.frames, 808);
    assert!(found.sequence_naks > 0);
}

#[test]
fn captured_unanswered_connection_request_round_trips() {
    let found = census(include_bytes!("golden/connect-req-unanswered.pcap"));
    assert_eq!((found.frames, found.messages[&0x10]), (4, 2));
}

#[test]
fn captured_session_of_a_userspace_target_round_trips() {
    let found = census(include_bytes!("golden/userspace-target.pcap"));
    assert_eq!(found.frames, 235);
}
