//! What the network between two ends says and does below the transport, each in a network namespace
//! of its own, where everybody is root (`unshare`, of util-linux, and `ip`, of iproute2).

#[path = "support/side/mod.rs"]
#[expect(dead_code, reason = "other tests need more of it")]
mod side;

use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use crate::side::{LIMITS, PORT, Side};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use nix::{getsockopt_impl, sockopt_impl};
use rdma::soft::Options;
use rdma::soft::cm::mad::MadHeader;
use rdma::soft::cm::message::{CmMessage, CmaHeader, DisconnectRequest, Request, service_id};
use rdma::soft::endpoint::ROCE_PORT;
use rdma::wire::header::{Bth, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES};
use rdma::wire::icrc::{Checker, Flow, Icrc, Verdict};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Psn, Qpn};
use rdma::{Completion, Event, Fabric, Initiator, Qp, Reason, Work};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// Bytes of a message that takes several packets of 4096 bytes: a train, and its short end.
const MESSAGE_BYTES: u32 = 20_000;

/// Runs an ignored test of this file in a namespace that these commands have prepared.
fn alone(prepare: &str, test: &str) {
    let script = format!("{prepare} && exec \"$0\" --exact {test} --ignored --nocapture");
    let ended = Command::new("unshare")
        .args(["--map-root-user", "--net", "sh", "-ec", &script])
        .arg(std::env::current_exe().unwrap())
        .output()
        .expect("unshare, of util-linux, is missing");
    let said = String::from_utf8_lossy(&ended.stdout) + String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{}: {said}", ended.status);
    assert!(said.contains("1 passed"), "{said}");
}

/// Two connected ends of one thread.
struct Ends {
    host: Side,
    target: Side,
    /// The listener.
    at: SocketAddr,
    qps: [Qp; 2],
}

impl Ends {
    fn new(host: IpAddr, target: IpAddr) -> Ends {
        Ends::with_target(host, target, Options::default())
    }

    fn with_target(host: IpAddr, target: IpAddr, options: Options) -> Ends {
        let at = SocketAddr::new(target, PORT);
        let (mut host, mut target) = (Side::host(host), Side::new(options));
        target.fabric.listen(at).unwrap();
        let at_host = host.fabric.connect(at, &[], LIMITS).unwrap();
        host.fabric.flush();
        let (at_target, _) = target.accept(&[]);
        host.established(at_host);
        host.fabric.flush();
        target.established(at_target);
        Ends { host, target, at, qps: [at_host, at_target] }
    }

    /// A message arrives complete, and the sender gets its acknowledgement.
    fn send(&mut self, seed: u8) {
        let from = self.host.data(MESSAGE_BYTES, seed);
        self.host.fabric.post(self.qps[0], 9, Work::Send { from, invalidate: None });
        let (mut sent, mut received) = (None, None);
        let start = std::time::Instant::now();
        while sent.is_none() || received.is_none() {
            self.host.turn();
            self.target.turn();
            assert!(start.elapsed() < side::PATIENCE, "nothing happens");
            sent = sent.or_else(|| done(&mut self.host));
            received = received.or_else(|| done(&mut self.target));
        }
        let (sent, received) = (sent.unwrap(), received.unwrap());
        assert_eq!((sent.outcome, received.outcome), (Ok(MESSAGE_BYTES), Ok(MESSAGE_BYTES)));
        self.host.pool.give(sent.work.into_buf());
        let mut buf = received.work.into_buf();
        let whole = buf.len();
        buf.select(0, MESSAGE_BYTES);
        self.target.check(&buf, seed);
        buf.select(0, whole);
        self.target.fabric.post(self.qps[1], received.tag, Work::Recv(buf));
    }
}

fn done(side: &mut Side) -> Option<Completion> {
    match side.events.pop_front()? {
        Event::Done(done) => Some(done),
        other => panic!("{other:?}"),
    }
}

sockopt_impl!(
    /// The MTU of the route of a connected socket, over IPv6.
    MtuV6,
    GetOnly,
    libc::IPPROTO_IPV6,
    libc::IPV6_MTU,
    libc::c_int
);

/// What the system takes for the MTU of the way.
fn route_mtu(from: IpAddr, to: IpAddr) -> i32 {
    let socket = std::net::UdpSocket::bind((from, 0)).unwrap();
    socket.connect((to, 1)).unwrap();
    match to {
        IpAddr::V4(_) => getsockopt(&socket, sockopt::IpMtu).unwrap(),
        IpAddr::V6(_) => getsockopt(&socket, MtuV6).unwrap(),
    }
}

/// Somebody who sees nothing of a connection, and knows its addresses and the port of RoCE, tells
/// `from` that its packets to `to` are too long for the way.
fn forge_too_long(from: IpAddr, to: IpAddr) {
    let ports = [ROCE_PORT.to_be_bytes(), ROCE_PORT.to_be_bytes(), [16, 40], [0, 0]].concat();
    let (domain, protocol, message) = match (from, to) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let ip = [0x45, 0, 16, 60, 0, 0, 0x40, 0, 64, 17, 0, 0];
            let ip = [&ip[..], &a.octets(), &b.octets()].concat();
            let mut message = [&[3, 4, 0, 0, 0, 0, 2, 64], &ip[..], &ports].concat();
            let sum: u32 = message.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(c[1])).sum();
            let sum = (sum >> 16) + (sum & 0xffff);
            let sum = !((sum >> 16) + sum) as u16;
            message[2..4].copy_from_slice(&sum.to_be_bytes());
            (Domain::IPV4, Protocol::ICMPV4, message)
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let ip = [&[0x60, 0, 0, 0, 16, 40, 17, 64], &a.octets()[..], &b.octets()].concat();
            // The system fills in the checksum.
            let message = [&[2, 0, 0, 0, 0, 0, 5, 0], &ip[..], &ports].concat();
            (Domain::IPV6, Protocol::ICMPV6, message)
        }
        _ => unreachable!("addresses of one version"),
    };
    let socket = Socket::new(domain, Type::RAW, Some(protocol)).unwrap();
    socket.bind(&SockAddr::from(SocketAddr::new(to, 0))).unwrap();
    socket.send_to(&message, &SockAddr::from(SocketAddr::new(from, 0))).unwrap();
}

/// The system takes its time until new addresses can be reached.
fn wait_for_way(from: IpAddr, to: IpAddr) {
    let [here, there] = [from, to].map(|ip| std::net::UdpSocket::bind((ip, 4000)).unwrap());
    there.set_nonblocking(true).unwrap();
    let start = std::time::Instant::now();
    while here.send_to(&[1], (to, 4000)).is_err() || there.recv(&mut [0]).is_err() {
        assert!(start.elapsed() < side::PATIENCE, "no way from {from} to {to}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn outlive_forged_message(host: &str, target: &str) {
    let [host, target] = [host, target].map(|address| address.parse().unwrap());
    wait_for_way(host, target);
    let mut ends = Ends::new(host, target);
    ends.send(1);
    // Of the way to the host: that goes on, and comes back with packets as long as before.
    forge_too_long(target, host);
    assert_fooled(target, host);
    ends.send(2);
    drop(ends);
    assert!(route_mtu(host, target) >= 4096, "the host itself believes nothing");
    let mut ends = Ends::new(host, target);
    ends.send(3);
    forge_too_long(host, target);
    assert_fooled(host, target);
    ends.send(4);
    ends.send(5);
}

fn assert_fooled(from: IpAddr, to: IpAddr) {
    let believed = route_mtu(from, to);
    assert!(believed < 4096, "the system did not fall for it: {believed}");
}

#[test]
#[ignore = "needs a namespace of its own: see `forged_path_mtu_messages_do_not_affect_connections`"]
fn forged_message_v4() {
    outlive_forged_message("127.0.0.2", "127.0.0.1");
}

#[test]
#[ignore = "needs a namespace of its own: see `forged_path_mtu_messages_do_not_affect_connections`"]
fn forged_message_v6() {
    outlive_forged_message("fd00::2", "fd00::1");
}

/// A forged "fragmentation needed" lowers what the system takes for the MTU of the way, but the
/// packets of a connection keep the length that both ends have agreed on.
#[test]
fn forged_path_mtu_messages_do_not_affect_connections() {
    alone("ip link set lo up", "forged_message_v4");
    let addresses = "ip address add fd00::1 dev lo nodad && ip address add fd00::2 dev lo nodad";
    alone(&format!("{addresses} && ip link set lo up"), "forged_message_v6");
}

/// What our own link does not carry is refused, though.
#[test]
fn packets_longer_than_the_link_are_refused() {
    alone("ip link set lo up", "short_link_v4");
    let addresses = "ip address add fd00::1 dev lo nodad && ip address add fd00::2 dev lo nodad";
    alone(&format!("{addresses} && ip link set lo up"), "short_link_v6");
}

#[test]
#[ignore = "needs a namespace of its own: see `packets_longer_than_the_link_are_refused`"]
fn short_link_v4() {
    refuse_on_short_link("127.0.0.2", "127.0.0.1");
}

#[test]
#[ignore = "needs a namespace of its own: see `packets_longer_than_the_link_are_refused`"]
fn short_link_v6() {
    refuse_on_short_link("fd00::2", "fd00::1");
}

fn refuse_on_short_link(host: &str, target: &str) {
    let [host, target]: [IpAddr; 2] = [host, target].map(|address| address.parse().unwrap());
    wait_for_way(host, target);
    let at = SocketAddr::new(target, PORT);
    let (mut host, mut target) = (Side::host(host), Side::target(at));
    let qp = host.fabric.connect(at, &[], LIMITS).unwrap();
    host.fabric.flush();
    let incoming = target.incoming();
    let short = Command::new("ip").args(["link", "set", "lo", "mtu", "1500"]).status().unwrap();
    assert!(short.success());
    let refused = target.fabric.open(incoming, LIMITS).unwrap_err();
    assert!(refused.0.contains("carries only 1024"), "{refused}");
    target.fabric.flush();
    let reason = host.gone(qp);
    assert!(matches!(reason, Reason::Rejected { code: 26, .. }), "{reason:?}");
}

/// The system numbers single datagrams 0 and those of a train from 0 on, all with "don't fragment":
/// what the CRC counts on.
#[test]
fn ipv4_identifications_match_those_of_the_icrc() {
    // One datagram at a time: so the system has to cut trains.
    alone("ip link set lo up gso_max_segs 1", "numbered_datagrams");
}

#[test]
#[ignore = "needs a namespace of its own: see `ipv4_identifications_match_those_of_the_icrc`"]
fn numbered_datagrams() {
    let [host, target]: [IpAddr; 2] = ["127.0.0.2", "127.0.0.1"].map(|ip| ip.parse().unwrap());
    let wire = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::UDP)).unwrap();
    wire.bind(&SockAddr::from(SocketAddr::new(target, 0))).unwrap();
    wire.set_nonblocking(true).unwrap();
    let mut ends = Ends::new(host, target);
    ends.send(1);
    let (mut checker, mut numbers) = (Checker::new(), Vec::new());
    let mut bytes = vec![0; 8192];
    while let Ok(len) = std::io::Read::read(&mut &wire, &mut bytes) {
        let packet = &bytes[..len];
        let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        assert_eq!((packet[0], packet[12..16] == [127, 0, 0, 2]), (0x45, true));
        assert_eq!(packet[6..8], [0x40, 0], "don't fragment");
        let flow = Flow {
            source: SocketAddr::new(host, port(20)),
            destination: SocketAddr::new(target, port(22)),
        };
        let number = port(4);
        let verdict = checker.check(&flow, &packet[28..]);
        assert_eq!(verdict, Verdict::Solved(number), "packet {}", numbers.len());
        numbers.push(number);
    }
    assert!(numbers.starts_with(&[0]), "{numbers:?}");
    assert!(numbers.ends_with(&[0, 1, 2, 3, 4]), "the message is one train: {numbers:?}");
}

/// A neighbour that nobody can find keeps datagrams in the system, and so a socket full, for as long
/// as it is looked for. Other sockets go on.
#[test]
fn an_unreachable_peer_does_not_delay_other_peers() {
    let prepare = "ip link set lo up && ip link add here type veth peer name there && \
        ip address add 192.0.2.1/24 dev here && ip link set there up && ip link set here up && \
        echo 1000 >/proc/sys/net/ipv4/neigh/here/mcast_solicit";
    alone(prepare, "unreachable_neighbour");
}

#[test]
#[ignore = "needs a namespace of its own: see `an_unreachable_peer_does_not_delay_other_peers`"]
fn unreachable_neighbour() {
    let mut target = Side::target("127.0.0.1:4420".parse().unwrap());
    // As small as the system allows: the requests to connect below fill it.
    let mut host = Side::new(Options { send_buffer_bytes: 1, ..Options::default() });
    let absent = "192.0.2.2:4420".parse().unwrap();
    for _ in 0..40 {
        host.fabric.connect(absent, &[], LIMITS).unwrap();
        host.fabric.flush();
    }
    let qp = host.fabric.connect("127.0.0.1:4420".parse().unwrap(), &[], LIMITS).unwrap();
    host.fabric.flush();
    target.accept(&[]);
    host.established(qp);
    // And not because there was room: what was said to the other fills its socket all the time.
    let queued = queued_bytes("010200C0:12B7");
    assert!(queued >= 4608, "the requests do not fill the socket: {queued} bytes");
}

/// Answers to forged messages of addresses that no neighbour has wait until the system gives these
/// up, in the send buffer that all connections share.
#[test]
fn unreachable_forged_sources_do_not_delay_connections() {
    let prepare = "ip link set lo up && ip link add here type veth peer name there && \
        ip address add 192.0.2.1/24 dev here && ip link set there up && ip link set here up && \
        echo 1000 >/proc/sys/net/ipv4/neigh/here/mcast_solicit";
    alone(prepare, "unreachable_strangers");
    alone(prepare, "unreachable_half_open");
}

#[test]
#[ignore = "needs a namespace of its own: see \
            `unreachable_forged_sources_do_not_delay_connections`"]
fn unreachable_strangers() {
    let mut ends = ends_with_small_buffer();
    let target = ends.at.ip();
    let forged: Vec<_> = (100..120).map(|last| forger([192, 0, 2, last].into())).collect();
    for number in 0..100 {
        for (from, socket) in &forged {
            let datagram = datagram(*from, target, disconnect_request(number));
            socket.send_to(&datagram, (target, ROCE_PORT)).unwrap();
            ends.target.turn();
        }
    }
    assert_answers_queued();
    ends.send(2);
    // Other peers without a connection are answered as well, a few at a time.
    let other = std::net::UdpSocket::bind(("127.0.0.3", ROCE_PORT)).unwrap();
    other.set_nonblocking(true).unwrap();
    let datagram = datagram(other.local_addr().unwrap(), target, disconnect_request(1));
    let start = std::time::Instant::now();
    while other.recv(&mut [0; 512]).is_err() {
        assert!(start.elapsed() < side::PATIENCE, "no answer");
        other.send_to(&datagram, (target, ROCE_PORT)).unwrap();
        ends.target.turn();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs a namespace of its own: see \
            `unreachable_forged_sources_do_not_delay_connections`"]
fn unreachable_half_open() {
    let mut ends = ends_with_small_buffer();
    let target = ends.at.ip();
    let forged: Vec<_> = (100..110).map(|last| forger([192, 0, 2, last].into())).collect();
    // Each repetition of a request is answered by the reply.
    for number in 0..200 {
        for (from, socket) in &forged {
            let datagram = datagram(*from, target, request(from.ip(), target));
            socket.send_to(&datagram, (target, ROCE_PORT)).unwrap();
            match number {
                0 => drop(ends.target.accept(&[])),
                _ => ends.target.turn(),
            }
        }
    }
    assert_answers_queued();
    ends.send(2);
}

/// A connection to a target whose send buffer has 512 KiB, twice what is requested.
fn ends_with_small_buffer() -> Ends {
    let [host, target] = ["127.0.0.2", "192.0.2.1"].map(|ip| ip.parse().unwrap());
    let options = Options { send_buffer_bytes: 256 << 10, ..Options::default() };
    let mut ends = Ends::with_target(host, target, options);
    ends.send(1);
    ends
}

fn assert_answers_queued() {
    let queued = queued_bytes("010200C0:12B7");
    assert!(queued > 250 << 10, "the answers do not fill their part: {queued} bytes");
}

/// A socket that sends from an address that this machine does not have, from a port that it chooses.
fn forger(from: IpAddr) -> (SocketAddr, std::net::UdpSocket) {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
    setsockopt(&socket, sockopt::IpTransparent, &true).unwrap();
    socket.bind(&SockAddr::from(SocketAddr::new(from, 0))).unwrap();
    let socket = std::net::UdpSocket::from(socket);
    (socket.local_addr().unwrap(), socket)
}

/// A request to disconnect a connection that does not exist.
fn disconnect_request(number: u32) -> CmMessage {
    CmMessage::DisconnectRequest(DisconnectRequest {
        local_comm_id: number,
        remote_comm_id: !number,
        ..DisconnectRequest::zeroed()
    })
}

/// A request to connect.
fn request(from: IpAddr, to: IpAddr) -> CmMessage {
    let header = CmaHeader { source_port: 1, source: from, destination: to };
    CmMessage::Request(Request {
        local_comm_id: 1,
        service_id: service_id(PORT),
        ca_guid: 1,
        qpn: Qpn::new(17),
        responder_resources: 1,
        path_mtu: 3,
        private_data: header.emit(&[0; CmaHeader::USER_BYTES]),
        ..Request::zeroed()
    })
}

/// The datagram of a message of connection management.
fn datagram(from: SocketAddr, to: IpAddr, message: CmMessage) -> Vec<u8> {
    let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::default());
    let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
    let header = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
    let mut bytes = [header.as_slice(), &message.emit(MadHeader::default())].concat();
    let flow = Flow { source: from, destination: SocketAddr::new(to, ROCE_PORT) };
    let first: [u8; Bth::BYTES] = *bytes.first_chunk().unwrap();
    let mut icrc = Icrc::start(&flow, 0, bytes.len() + ICRC_BYTES, &first);
    icrc.update(&bytes[Bth::BYTES..]);
    bytes.extend(icrc.finish());
    bytes
}

/// Bytes in the send queue of a socket, as the system counts them, by its address as the system
/// writes it.
fn queued_bytes(local: &str) -> u32 {
    let sockets = std::fs::read_to_string("/proc/self/net/udp").unwrap();
    let row = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let bytes = row
        .filter(|fields| fields[1] == local)
        .map(|fields| u32::from_str_radix(fields[4].split(':').next().unwrap(), 16).unwrap());
    bytes.max().unwrap()
}
