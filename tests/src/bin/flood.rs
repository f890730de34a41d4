//! A flood generator against a target on the soft fabric: sends connection requests or mutated
//! packets from addresses of this machine at a steady rate, and checks that the target never
//! answers with more bytes than it received. It needs no privilege.
//!
//! Its datagrams and their order follow from one seed; the answers of the target do not.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use nvme::cm;
use rdma::soft::cm::mad::MadHeader;
use rdma::soft::cm::message::{
    CmMessage, CmaHeader, DisconnectReply, ReadyToUse, Reply, Request, service_id,
};
use rdma::soft::endpoint::ROCE_PORT;
use rdma::soft::sim::Rng;
use rdma::wire::header::{Bth, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES, Packet, padding};
use rdma::wire::icrc::{Flow, Icrc};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Psn, Qpn};

/// Sleep between bursts.
const PAUSE: Duration = Duration::from_millis(1);
/// Maximum of datagrams in a burst.
const BURST: u64 = 512;
/// Addresses whose answers are read after a burst.
const LOOKS: usize = 16;
/// Packets on one connection before another is requested, whatever its state.
const PACKETS: u32 = 256;
/// Time to wait for a connection.
const PATIENCE: Duration = Duration::from_millis(50);

/// An attacker of a target on the soft fabric.
#[derive(Parser)]
struct Arguments {
    /// The target's address
    #[arg(long)]
    target: Ipv4Addr,
    /// First source address
    #[arg(long, default_value = "127.66.0.1")]
    from: Ipv4Addr,
    /// Number of source addresses
    #[arg(long, default_value_t = 1)]
    sources: u32,
    /// Datagrams per second
    #[arg(long, default_value_t = 50_000)]
    rate: u64,
    /// Duration in seconds
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Kind of datagrams
    #[arg(long, value_enum, default_value_t = Kind::Requests)]
    kind: Kind,
    /// Send from any UDP ports: answers go to the hosts that have these addresses
    #[arg(long)]
    forged: bool,
    /// No target: occupy its address, and discard everything
    #[arg(long)]
    decoy: bool,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Connection requests; answers are ignored
    Requests,
    /// Connection requests that are completed to established connections without commands
    Connections,
    /// Random packets on connections
    Packets,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match Enemy::new(&arguments).and_then(|enemy| enemy.run(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("enemy: more is said to an address than was asked from there");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("enemy: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A source address.
struct Source {
    address: SocketAddr,
    socket: UdpSocket,
    /// Bytes sent less bytes received.
    balance: i64,
    /// The target's queue pair of its connection, and the next packet number.
    victim: Option<(Qpn, u32)>,
    /// Packets until the next request, and since when that waits for its answer.
    left: u32,
    asked: Option<Instant>,
}

struct Enemy {
    dice: Rng,
    kind: Kind,
    target: IpAddr,
    sources: Vec<Source>,
    next: usize,
    looked: usize,
    out: Vec<u8>,
    sent: u64,
    sent_bytes: u64,
    got_bytes: u64,
    connections: u64,
    least: i64,
    /// Occupies the address of the target.
    _sink: Option<UdpSocket>,
}

impl Enemy {
    fn new(arguments: &Arguments) -> io::Result<Enemy> {
        let target = IpAddr::V4(arguments.target);
        let port = |ip| SocketAddr::new(ip, ROCE_PORT);
        let source = |number| -> io::Result<Source> {
            let ip = IpAddr::V4(Ipv4Addr::from_bits(arguments.from.to_bits() + number));
            let any = arguments.forged.then_some(SocketAddr::new(ip, 0));
            let socket = UdpSocket::bind(any.unwrap_or(port(ip)))?;
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            Ok(Source { address, socket, balance: 0, victim: None, left: 0, asked: None })
        };
        Ok(Enemy {
            dice: Rng::new(arguments.seed),
            kind: arguments.kind,
            target,
            sources: (0..arguments.sources.max(1)).map(source).collect::<io::Result<_>>()?,
            next: 0,
            looked: 0,
            out: Vec::new(),
            sent: 0,
            sent_bytes: 0,
            got_bytes: 0,
            connections: 0,
            least: 0,
            _sink: arguments.decoy.then(|| UdpSocket::bind(port(target))).transpose()?,
        })
    }

    /// Runs for the configured time. Returns false if more bytes were answered than sent.
    fn run(mut self, arguments: &Arguments) -> io::Result<bool> {
        let start = Instant::now();
        let end = Duration::from_secs(arguments.seconds);
        while start.elapsed() < end {
            let due = (start.elapsed().as_secs_f64() * arguments.rate as f64) as u64;
            for _ in 0..due.saturating_sub(self.sent).min(BURST) {
                let index = self.next;
                self.next = (index + 1) % self.sources.len();
                self.make(index);
                self.send(index)?;
                self.sent += 1;
            }
            for _ in 0..self.sources.len().min(LOOKS) {
                self.look(self.looked)?;
                self.looked = (self.looked + 1) % self.sources.len();
            }
            thread::sleep(PAUSE);
        }
        let rate = self.sent as f64 / start.elapsed().as_secs_f64();
        (0..self.sources.len()).try_for_each(|index| self.look(index))?;
        println!(
            "{} datagrams from {} addresses, {rate:.0}/s; {} bytes sent, {} received; \
             {} connections",
            self.sent,
            self.sources.len(),
            self.sent_bytes,
            self.got_bytes,
            self.connections
        );
        Ok(self.least >= 0)
    }

    /// Creates the next datagram of an address.
    fn make(&mut self, index: usize) {
        let source = &mut self.sources[index];
        if self.kind == Kind::Packets {
            let waits = source.asked.is_some_and(|asked| asked.elapsed() < PATIENCE);
            if source.left > 0 || waits {
                source.left = source.left.saturating_sub(1);
                return self.make_packet(index);
            }
            (source.left, source.asked, source.victim) = (PACKETS, Some(Instant::now()), None);
        }
        self.make_request(index);
    }

    /// Creates a connection request for an admin queue, as of a new host.
    fn make_request(&mut self, index: usize) {
        let from = self.sources[index].address.ip();
        let private = CmaHeader { source_port: 4000, source: from, destination: self.target };
        let mut user = [0; CmaHeader::USER_BYTES];
        let admin = cm::Request { hrqsize: 32, hsqsize_z: 31, ..cm::Request::default() }.emit();
        user[..admin.len()].copy_from_slice(&admin);
        let request = Request {
            service_id: service_id(4420),
            ca_guid: self.dice.roll(),
            local_comm_id: self.dice.roll() as u32,
            qpn: Qpn::new(self.dice.roll() as u32 & 0xff_ffff | 2),
            responder_resources: 16,
            initiator_depth: 16,
            path_mtu: 3,
            retry_count: 7,
            rnr_retry_count: 7,
            private_data: private.emit(&user),
            ..Request::zeroed()
        };
        let transaction = self.dice.roll();
        self.message(index, CmMessage::Request(request), transaction);
    }

    fn message(&mut self, index: usize, message: CmMessage, transaction: u64) {
        let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
        let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
        let head = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
        self.out.clear();
        self.out.extend_from_slice(head.as_slice());
        self.out.extend(message.emit(MadHeader { transaction, ..MadHeader::default() }));
        self.seal(index);
    }

    /// Creates a packet, mostly for the queue pair of the address's connection, with an expected
    /// number.
    fn make_packet(&mut self, index: usize) {
        const CODES: [u8; 16] = [
            0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x0a, 0x0b, 0x0c, 0x0d, 0x10, 0x11, 0x12, 0x13,
            0x17, 0xc0,
        ];
        let roll = self.dice.roll();
        let code = if roll & 7 == 0 { (roll >> 8) as u8 } else { CODES[(roll >> 8) as usize % 16] };
        let stray = (Qpn::new((roll >> 16) as u32), 0);
        let (qpn, psn) = self.sources[index].victim.filter(|_| roll >> 60 > 0).unwrap_or(stray);
        let ahead = [0, 0, 0, 1, 2, 0xff_ffff, 300, 0x80_0000][(roll >> 52) as usize & 7];
        let len =
            [0, 4, 16, 28, 80, 1024, 1040, (roll >> 40) as usize & 0xff][roll as usize >> 5 & 7];
        let mut bth = Bth::new(Opcode::SendOnly, qpn, Psn::new(psn.wrapping_add(ahead)));
        (bth.ack_request, bth.pad) = (roll & 16 > 0, padding(len));
        if let Some((_, psn)) = &mut self.sources[index].victim {
            // Some will have been executed.
            *psn = psn.wrapping_add((roll >> 58) as u32 & 1);
        }
        self.out.clear();
        self.out.extend(bth.emit());
        self.out[0] = code;
        for _ in 0..len.div_ceil(8) {
            let word = if self.dice.below(4) == 0 { u64::MAX } else { self.dice.roll() };
            self.out.extend(word.to_be_bytes());
        }
        self.out.truncate(Bth::BYTES + len.next_multiple_of(4));
        match self.dice.below(20) {
            0 => self.out.truncate((roll >> 30) as usize & 15),
            1 => self.out.extend([0; ICRC_BYTES]),
            _ => self.seal(index),
        }
    }

    /// Adds the CRC to the datagram.
    fn seal(&mut self, index: usize) {
        let source = self.sources[index].address;
        let flow = Flow { source, destination: SocketAddr::new(self.target, ROCE_PORT) };
        let Some(bth) = self.out.first_chunk::<{ Bth::BYTES }>() else { return };
        let mut icrc = Icrc::start(&flow, 0, self.out.len() + ICRC_BYTES, bth);
        icrc.update(&self.out[Bth::BYTES..]);
        self.out.extend(icrc.finish());
    }

    fn send(&mut self, index: usize) -> io::Result<()> {
        let source = &mut self.sources[index];
        let to = SocketAddr::new(self.target, ROCE_PORT);
        match source.socket.send_to(&self.out, to) {
            Ok(len) => {
                source.balance += len as i64;
                self.sent_bytes += len as u64;
            }
            // No receiver at present, or no room.
            Err(e) if is_passing(&e) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Reads the answers to an address.
    fn look(&mut self, index: usize) -> io::Result<()> {
        let mut room = [0; 1 << 13];
        loop {
            let source = &mut self.sources[index];
            let len = match source.socket.recv_from(&mut room) {
                Ok((len, _)) => len,
                Err(e) if is_passing(&e) => return Ok(()),
                Err(e) => return Err(e),
            };
            source.balance -= len as i64;
            self.got_bytes += len as u64;
            // On an established connection, answers to packets are not limited by their bytes.
            if self.kind == Kind::Requests {
                self.least = self.least.min(source.balance);
                continue;
            }
            let answer = Packet::parse(&room[..len]).ok().and_then(|packet| {
                let mad = packet.payload.first_chunk()?;
                (packet.bth.destination == Qpn::GSI).then(|| CmMessage::parse(mad))?
            });
            if let Some((header, message)) = answer {
                self.answer(index, &message, header.transaction)?;
            }
        }
    }

    /// Continues with the next message of its kind.
    fn answer(&mut self, index: usize, message: &CmMessage, transaction: u64) -> io::Result<()> {
        match message {
            CmMessage::DisconnectRequest(asked) => {
                let reply = DisconnectReply {
                    local_comm_id: asked.remote_comm_id,
                    remote_comm_id: asked.local_comm_id,
                    ..DisconnectReply::zeroed()
                };
                self.message(index, CmMessage::DisconnectReply(reply), transaction);
            }
            CmMessage::Reply(Reply {
                local_comm_id, remote_comm_id, qpn, starting_psn, ..
            }) => {
                self.connections += 1;
                let source = &mut self.sources[index];
                (source.victim, source.asked) = (Some((*qpn, starting_psn.get())), None);
                let ready = ReadyToUse {
                    local_comm_id: *remote_comm_id,
                    remote_comm_id: *local_comm_id,
                    ..ReadyToUse::zeroed()
                };
                self.message(index, CmMessage::ReadyToUse(ready), transaction);
            }
            _ => return Ok(()),
        }
        self.send(index)
    }
}

/// Whether sending or receiving may succeed later.
fn is_passing(error: &io::Error) -> bool {
    let kinds = [ErrorKind::WouldBlock, ErrorKind::ConnectionRefused, ErrorKind::Interrupted];
    kinds.contains(&error.kind()) || error.raw_os_error() == Some(libc::ENOBUFS)
}
