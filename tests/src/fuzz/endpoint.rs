//! Fuzzes two connected endpoints with an attacker between them that delays, loses, repeats and
//! forges packets.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rdma::soft::cm::mad::MadHeader;
use rdma::soft::cm::message::{CmMessage, CmaHeader, Request, service_id};
use rdma::soft::endpoint::{Config, Endpoint, ROCE_PORT};
use rdma::soft::qp::memory_region::Rights;
use rdma::soft::sim::Rng;
use rdma::wire::header::{Bth, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES, Packet};
use rdma::wire::icrc::Flow;
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Psn, Qpn};
use rdma::{Event, Pool, PoolPlan, Qp, QpLimits, Remote, RemoteRegion, Work};

use super::bytes::Bytes;
use super::wire::seal;

const LIMITS: QpLimits = QpLimits { receives: 16, sends: 16, reads: 4 };
const PLAN: PoolPlan = PoolPlan {
    cells: 8,
    receives: 24,
    lead_bytes: 0,
    tail_bytes: 4096,
    data_bytes: 64 << 10,
    largest_bytes: 16 << 10,
};
/// Part of the buffer that peers may access, without its edges.
const WINDOW: (u32, u32) = (1024, 2048);
const EDGE: u8 = 0xEE;
/// Messages that an unknown address may get in addition to the bytes it has sent: a repeated reply,
/// and the end of the unconfirmed connection.
const REPEATS: usize = 4;

/// After any datagrams: no panic, each work request and each buffer is returned once, no byte
/// around a remote region changes, and no address gets much more than it has sent.
pub fn endpoint(data: &[u8]) -> bool {
    let mut bytes = Bytes::new(data);
    let mut world = World::new(bytes.u8());
    let connected = world.connect();
    for _ in 0..96 {
        if bytes.is_empty() {
            break;
        }
        world.act(&mut bytes);
        world.serve();
    }
    world.end();
    connected
}

type Way = (SocketAddr, SocketAddr);

struct Node {
    address: IpAddr,
    endpoint: Endpoint,
    pool: Pool,
    qps: Vec<Qp>,
    exposed: Option<RemoteRegion>,
    /// Tags of outstanding work.
    posted: BTreeSet<u64>,
    next: u64,
}

impl Node {
    fn new(address: IpAddr, config: Config) -> Node {
        let mut dice = Rng::new(u64::from(address == TARGET));
        let config = Config { guid: dice.roll(), ..config };
        let endpoint = Endpoint::new(config, Box::new(move || dice.roll()));
        let pool = Pool::new(PLAN).expect("memory");
        let (qps, posted) = (Vec::new(), BTreeSet::new());
        Node { address, endpoint, pool, qps, exposed: None, posted, next: 0 }
    }

    fn post(&mut self, qp: Qp, work: Work) {
        self.next += 1;
        self.posted.insert(self.next);
        self.endpoint.post(qp, self.next, work, self.pool.region());
    }
}

const TARGET: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

struct World {
    now: Instant,
    nodes: [Node; 2],
    /// Datagrams in flight.
    flights: VecDeque<(Way, Vec<u8>)>,
    /// Some earlier datagrams.
    seen: Vec<(Way, Vec<u8>)>,
    /// Bytes from and to forged addresses.
    strangers: HashMap<IpAddr, (usize, usize)>,
    /// Whether the user of the target accepts connections.
    accepts: bool,
}

impl World {
    fn new(kind: u8) -> World {
        let host = Config {
            answered_reads: 4,
            rights: if kind & 1 == 1 { Rights::ALL } else { Rights::READ },
            exposed: 4,
            selective: kind & 2 == 2,
            ..Config::default()
        };
        let target = Config {
            window: if kind & 4 == 4 { 4 } else { 128 },
            early: if kind & 8 == 8 { 2 } else { 64 },
            ..Config::default()
        };
        let mut world = World {
            now: Instant::now(),
            nodes: [Node::new(TARGET, target), Node::new(HOST, host)],
            flights: VecDeque::new(),
            seen: Vec::new(),
            strangers: HashMap::new(),
            accepts: true,
        };
        world.nodes[0].endpoint.listen(SocketAddr::new(TARGET, 4420));
        world
    }

    /// A valid start: a connection, receives at both ends, memory of the host.
    fn connect(&mut self) -> bool {
        let host = &mut self.nodes[1];
        let to = SocketAddr::new(TARGET, 4420);
        let qp = host.endpoint.connect(self.now, HOST, to, &[7; 16], LIMITS);
        host.qps.push(qp.expect("there is room"));
        self.serve();
        for _ in 0..8 {
            self.deliver(0, 1);
            self.serve();
        }
        for node in &mut self.nodes {
            let qp = node.qps[0];
            for _ in 0..4 {
                let buf = node.pool.take_receive().expect("there is room");
                node.post(qp, Work::Recv(buf));
            }
        }
        let host = &mut self.nodes[1];
        let mut buf = host.pool.take_data(4096).expect("there is room");
        host.pool.bytes_mut(&mut buf).fill(EDGE);
        buf.select(WINDOW.0, WINDOW.1);
        let memory = host.endpoint.memory().expose(buf, Rights::READ.and(Rights::WRITE));
        host.exposed = memory.ok();
        self.nodes.iter().all(|node| node.qps.len() == 1)
    }

    fn act(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 12 {
            0 | 1 => self.deliver(bytes.u8().into(), 1 + usize::from(bytes.u8() % 8)),
            2 => {
                let at = usize::from(bytes.u8()) % self.flights.len().max(1);
                self.flights.remove(at);
            }
            3 => self.pass(Duration::from_micros(u64::from(bytes.u16()) * 100)),
            4 | 5 => self.post(bytes),
            6 => self.replay(bytes),
            7 | 8 => self.forge(bytes),
            9 => self.manage(bytes),
            10 => {
                self.accepts = !bytes.u8().is_multiple_of(4);
                let node = &mut self.nodes[usize::from(bytes.bool())];
                if bytes.u8() > 240 {
                    for qp in std::mem::take(&mut node.qps) {
                        node.endpoint.disconnect(self.now, qp, node.pool.region());
                    }
                }
            }
            _ => {
                if bytes.u8() > 200 {
                    self.revoke();
                }
            }
        }
    }

    /// Actions of the users of both endpoints, and their packets.
    fn serve(&mut self) {
        for _ in 0..64 {
            let mut quiet = true;
            for node in &mut self.nodes {
                while let Some(event) = node.endpoint.poll_event() {
                    quiet = false;
                    hear(node, event, self.now, self.accepts);
                }
            }
            quiet &= !self.listen();
            if quiet {
                return;
            }
        }
        panic!("never quiet");
    }

    /// Takes the packets of both; returns whether there were any.
    fn listen(&mut self) -> bool {
        let before = self.flights.len();
        for node in &mut self.nodes {
            let region = node.pool.region();
            while let Some(transmit) = node.endpoint.poll_transmit(self.now, region) {
                let mut datagram = transmit.outgoing.header().to_vec();
                node.endpoint.copy_payload(&transmit, region, &mut datagram);
                let payload = &datagram[transmit.outgoing.header().len()..];
                let trailer = transmit.outgoing.seal(&transmit.flow, 0, payload);
                datagram.extend(trailer.as_slice());
                assert_eq!(datagram.len(), transmit.outgoing.datagram_bytes());
                assert!(Packet::parse(&datagram).is_ok(), "we send what we understand");
                let way = (transmit.flow.source, transmit.flow.destination);
                if way.1.ip() != TARGET && way.1.ip() != HOST {
                    let (asked, told) = self.strangers.entry(way.1.ip()).or_default();
                    *told += datagram.len();
                    assert!(*told <= *asked * REPEATS, "{told} bytes to {}, {asked} from", way.1);
                }
                assert!(self.flights.len() < 10_000, "they never stop talking");
                self.flights.push_back((way, datagram));
            }
        }
        self.flights.len() > before
    }

    /// Delivers some datagrams, from the one at `at` on.
    fn deliver(&mut self, at: usize, count: usize) {
        for _ in 0..count {
            let at = at % self.flights.len().max(1);
            let Some((way, datagram)) = self.flights.remove(at) else { return };
            self.arrive(way, &datagram);
            if self.seen.len() < 32 {
                self.seen.push((way, datagram));
            }
            self.listen();
        }
    }

    fn arrive(&mut self, (from, to): Way, datagram: &[u8]) {
        if from.ip() != TARGET && from.ip() != HOST {
            self.strangers.entry(from.ip()).or_default().0 += datagram.len();
        }
        if let Some(node) = self.nodes.iter_mut().find(|node| node.address == to.ip()) {
            node.endpoint.handle(self.now, from, to, 0, datagram, node.pool.region());
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        for node in &mut self.nodes {
            if node.endpoint.poll_timeout().is_some_and(|due| due <= self.now) {
                node.endpoint.handle_timeout(self.now, node.pool.region());
            }
        }
    }

    /// Posts work of either user.
    fn post(&mut self, bytes: &mut Bytes<'_>) {
        let open = self.nodes[1].exposed.as_ref().map(RemoteRegion::remote);
        let node = &mut self.nodes[usize::from(bytes.bool())];
        let Some(qp) = node.qps.first().copied() else { return };
        if node.posted.len() >= 16 {
            return;
        }
        let len = bytes.of(&[64, 1, 0, 1024, 1025, 2048, 2049, 4096, 16384]);
        let kind = bytes.u8() % 4;
        let buf = match kind {
            0 => node.pool.take_receive(),
            _ => node.pool.take_data(len.max(1)),
        };
        let Some(mut buf) = buf else { return };
        let remote = open.unwrap_or(Remote { addr: 0, key: 9, len: 0 });
        let (skip, key) = (u64::from(bytes.u8()), bytes.of(&[0, 0, 0, 1, 0x100]));
        let remote = Remote { addr: remote.addr + skip, key: remote.key ^ key, len };
        let work = match kind {
            0 => Work::Recv(buf),
            1 => {
                buf.select(0, len);
                Work::Send { from: buf, invalidate: bytes.bool().then_some(remote.key) }
            }
            2 => Work::Read { into: buf, from: Remote { len: len.max(1), ..remote } },
            _ => Work::Write { from: buf, to: Remote { len: len.max(1), ..remote } },
        };
        node.post(qp, work);
    }

    /// Repeats an earlier datagram, modified, possibly to its sender.
    fn replay(&mut self, bytes: &mut Bytes<'_>) {
        let at = usize::from(bytes.u8()) % self.seen.len().max(1);
        let Some((mut way, mut datagram)) = self.seen.get(at).cloned() else { return };
        if bytes.u8() % 8 == 7 {
            way = (way.1, way.0);
        }
        bytes.patch(&mut datagram);
        if bytes.u8() % 8 == 7 {
            datagram.truncate(usize::from(bytes.u16()) % (datagram.len() + 1));
        }
        self.inject(way, datagram, bytes);
    }

    /// A packet for a queue pair, made from the headers of an earlier one.
    fn forge(&mut self, bytes: &mut Bytes<'_>) {
        let at = usize::from(bytes.u8()) % self.seen.len().max(1);
        let Some((way, like)) = self.seen.get(at) else { return };
        let Ok(like) = Packet::parse(like) else { return };
        let codes: Vec<Opcode> = Opcode::all().collect();
        let mut bth = Bth { opcode: bytes.of(&codes), ..like.bth };
        bth.ack_request = bytes.bool();
        bth.pad = if bytes.u8() % 8 == 7 { bytes.u8() & 3 } else { 0 };
        bth.psn = like.bth.psn.add(i32::from(bytes.u8() as i8) as u32);
        // All required headers, with fields near valid ones.
        let mut ext: [u8; 28] = bytes.array();
        if let Some(exposed) = self.nodes[1].exposed.as_ref().filter(|_| bytes.bool()) {
            let Remote { addr, key, .. } = exposed.remote();
            ext[..8].copy_from_slice(&(addr + u64::from(bytes.u8())).to_be_bytes());
            ext[8..12].copy_from_slice(&key.to_be_bytes());
            ext[12..14].fill(0);
        }
        let mut datagram = bth.emit().to_vec();
        datagram.extend(&ext[..bth.opcode.row().header_bytes.min(ext.len())]);
        let payload = bytes.of(&[0, 0, 4, 64, 1024, 1028, 2048, 4096, 256]);
        datagram.resize(datagram.len() + payload + ICRC_BYTES, 0x5A);
        self.inject(*way, datagram, bytes);
    }

    /// A message of connection management, of the host or of a forged address.
    fn manage(&mut self, bytes: &mut Bytes<'_>) {
        let stranger = IpAddr::from([192, 0, 2, bytes.u8() % 24]);
        let from = if bytes.u8() % 4 == 3 { HOST } else { stranger };
        let private = CmaHeader { source_port: 4000, source: from, destination: TARGET };
        let request = Request {
            service_id: service_id(if bytes.u8() % 8 == 7 { 4421 } else { 4420 }),
            ca_guid: bytes.u8().into(),
            local_comm_id: bytes.u8().into(),
            qpn: Qpn::new(u32::from(bytes.u8()) + 2),
            path_mtu: bytes.of(&[3, 3, 5, 0, 1, 7]),
            retry_count: 7,
            rnr_retry_count: 7,
            private_data: private.emit(&[0; CmaHeader::USER_BYTES]),
            ..Request::zeroed()
        };
        let header = MadHeader { transaction: bytes.u8().into(), ..MadHeader::default() };
        let mut mad = CmMessage::Request(request).emit(header);
        if bytes.u8() % 4 == 3 {
            // Another message: its attribute and its contents.
            mad[17] = bytes.of(&[0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17]);
        }
        bytes.patch(&mut mad[24..]);
        let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
        let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
        let head = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
        let mut datagram = head.as_slice().to_vec();
        datagram.extend(mad);
        datagram.extend([0; ICRC_BYTES]);
        let way = (SocketAddr::new(from, ROCE_PORT), SocketAddr::new(TARGET, ROCE_PORT));
        self.inject(way, datagram, bytes);
    }

    fn inject(&mut self, way: Way, mut datagram: Vec<u8>, bytes: &mut Bytes<'_>) {
        if bytes.u8() % 16 != 15 {
            seal(&Flow { source: way.0, destination: way.1 }, bytes.u8().into(), &mut datagram);
        }
        self.arrive(way, &datagram);
    }

    /// The host's memory is revoked: only the window may have changed.
    fn revoke(&mut self) {
        let host = &mut self.nodes[1];
        let Some(exposed) = host.exposed.take() else { return };
        let mut buf = host.endpoint.memory().revoke(exposed);
        buf.select(0, 4096);
        let (start, end) = (WINDOW.0 as usize, (WINDOW.0 + WINDOW.1) as usize);
        let all = host.pool.bytes(&buf);
        assert!(all[..start].iter().chain(&all[end..]).all(|byte| *byte == EDGE));
        host.pool.give(buf);
    }

    /// Both disconnect, and neither answers any more.
    fn end(&mut self) {
        self.accepts = false;
        self.serve();
        self.revoke();
        for node in &mut self.nodes {
            for qp in std::mem::take(&mut node.qps) {
                node.endpoint.disconnect(self.now, qp, node.pool.region());
            }
        }
        for _ in 0..60 {
            self.serve();
            self.flights.clear();
            self.pass(Duration::from_secs(2));
        }
        self.serve();
        for node in &self.nodes {
            assert!(node.posted.is_empty(), "work never came home: {:?}", node.posted);
            assert!(node.pool.is_full(), "a buffer is lost: {:?}", node.pool.free());
            assert_eq!((node.endpoint.half_open(), node.endpoint.challenges()), (0, 0));
        }
    }
}

/// Actions of the user of an endpoint.
fn hear(node: &mut Node, event: Event, now: Instant, accepts: bool) {
    match event {
        Event::Incoming(incoming) if !accepts => node.endpoint.reject(incoming, &[1, 2]),
        Event::Incoming(incoming) => {
            if let Ok(qp) = node.endpoint.open(incoming, LIMITS) {
                node.endpoint.accept(now, qp, &[3; 8]);
                node.qps.push(qp);
            }
        }
        Event::Established(_) | Event::ListenerLost(_) => {}
        Event::Done(done) => {
            assert!(node.posted.remove(&done.tag), "{} came home twice", done.tag);
            if done.outcome.is_err() {
                node.endpoint.disconnect(now, done.qp, node.pool.region());
            }
            node.pool.give(done.work.into_buf());
        }
        Event::Gone(qp, _) => node.qps.retain(|of| *of != qp),
    }
}
