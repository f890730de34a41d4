//! Fuzzes the parsers of the soft transport, one datagram at a time.

use std::net::SocketAddr;

use rdma::soft::cm::mad::MAD_BYTES;
use rdma::soft::cm::message::{CmMessage, CmaHeader};
use rdma::wire::header::{Bth, HeaderBytes, ICRC_BYTES, Packet};
use rdma::wire::icrc::{Checker, Flow, Icrc, Verdict};

use super::bytes::Bytes;

/// A datagram: parsed and emitted it is the same, and the check of its CRC accepts the correct one
/// and detects a change.
pub fn datagram(data: &[u8]) -> bool {
    let mut checker = Checker::new();
    let flows = [("10.0.0.1:4791", "10.0.0.2:4791"), ("[fd00::1]:4791", "[fd00::2]:4791")];
    for (source, destination) in flows {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let flow = Flow { source: address(source), destination: address(destination) };
        checker.check(&flow, data);
        let mut sealed = data.to_vec();
        let identification = data.len() as u16 ^ u16::from(data.last().copied().unwrap_or(0)) << 8;
        if !seal(&flow, identification, &mut sealed) {
            assert!(Packet::parse(data).is_err());
            assert_eq!(checker.check(&flow, data), Verdict::Wrong);
            continue;
        }
        match flow.source.is_ipv4() {
            true => assert_eq!(checker.check(&flow, &sealed), Verdict::Solved(identification)),
            false => {
                assert_eq!(checker.check(&flow, &sealed), Verdict::Exact);
                // The first byte and the last: both are covered to the last bit.
                sealed[0] ^= 1;
                assert_eq!(checker.check(&flow, &sealed), Verdict::Wrong);
            }
        }
    }
    let Ok(packet) = Packet::parse(data) else { return false };
    let head = HeaderBytes::emit(&packet.bth, &packet.ext());
    let mut again = head.as_slice().to_vec();
    again.extend(packet.payload);
    again.resize(again.len() + usize::from(packet.bth.pad) + ICRC_BYTES, 0);
    assert_eq!(again.len(), data.len());
    let parsed = Packet::parse(&again).expect("a packet");
    // Not their bytes: reserved bits are sent as 0.
    assert_eq!(
        (parsed.bth, parsed.ext(), parsed.payload),
        (packet.bth, packet.ext(), packet.payload)
    );
    assert_eq!(packet.row().opcode, packet.bth.opcode);
    true
}

/// A message of connection management: a parsed message survives emission.
pub fn message(data: &[u8]) -> bool {
    let mad: [u8; MAD_BYTES] = Bytes::new(data).array();
    let Some((header, message)) = CmMessage::parse(&mad) else { return false };
    let again = message.emit(header);
    assert_eq!(CmMessage::parse(&again), Some((header, message)));
    if let CmMessage::Request(request) = message
        && let Some((cma, user)) = CmaHeader::parse(&request.private_data)
    {
        assert_eq!(cma.source.is_ipv4(), cma.destination.is_ipv4());
        assert_eq!(CmaHeader::parse(&cma.emit(&user)), Some((cma, user)));
    }
    true
}

/// Adds the CRC to a datagram. Returns false if it is too short for one.
pub(super) fn seal(flow: &Flow, identification: u16, datagram: &mut [u8]) -> bool {
    let len = datagram.len();
    let Some((body, crc)) = datagram.split_last_chunk_mut::<ICRC_BYTES>() else { return false };
    let Some((bth, rest)) = body.split_first_chunk::<{ Bth::BYTES }>() else { return false };
    let mut icrc = Icrc::start(flow, identification, len, bth);
    icrc.update(rest);
    *crc = icrc.finish();
    true
}
