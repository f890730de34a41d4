//! A lossy UDP relay between two ends of the soft fabric on one machine: drops, duplicates and
//! reorders packets, without privilege.
//!
//! ```text
//! host ──► --listen ══ relay ══ --source ──► --target
//! ```
//!
//! The host connects to `--listen`. The addresses are part of every packet's CRC and of the
//! connection request, so the relay rewrites both; everything else is passed on unchanged.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::{setsockopt_impl, sockopt_impl};
use rdma::soft::cm::mad::MAD_BYTES;
use rdma::soft::cm::message::{CmMessage, CmaHeader};
use rdma::soft::endpoint::ROCE_PORT;
use rdma::soft::sim::Rng;
use rdma::wire::header::{Bth, Packet};
use rdma::wire::icrc::{Flow, Icrc};
use rdma::wire::psn::Qpn;

sockopt_impl!(
    /// How the "don't fragment" bit is set.
    MtuDiscover,
    SetOnly,
    libc::IPPROTO_IP,
    libc::IP_MTU_DISCOVER,
    libc::c_int
);

/// The invariant CRC at the end of every packet.
const ICRC_BYTES: usize = 4;
/// Maximum delay of a reordered packet.
const LATEST: Duration = Duration::from_millis(2);
/// Datagrams read from one side before the other side is read.
const TURN: usize = 64;

/// A bad network between two ends of the soft fabric.
#[derive(Parser)]
struct Arguments {
    /// Our address for the host
    #[arg(long, default_value = "127.0.0.3")]
    listen: IpAddr,
    /// Our address for the target
    #[arg(long, default_value = "127.0.0.4")]
    source: IpAddr,
    /// The target's address
    #[arg(long, default_value = "127.0.0.1")]
    target: IpAddr,
    /// Percentage of packets to drop, in each direction
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// Percentage of packets to duplicate
    #[arg(long, default_value_t = 0.0)]
    duplicate: f64,
    /// Percentage of packets to reorder
    #[arg(long, default_value_t = 0.0)]
    reorder: f64,
    /// Maximum number of packets that overtake a reordered one
    #[arg(long, default_value_t = 8)]
    depth: u64,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match Relay::new(&arguments).and_then(Relay::run) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("relay: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One direction.
struct Lane {
    /// Destination, and our source address; the destination of the first lane is known after the
    /// first packet.
    flow: Option<Flow>,
    held: VecDeque<Held>,
    passed: u64,
}

struct Held {
    bytes: Vec<u8>,
    /// Number of later packets after which it is sent.
    after: u64,
    until: Instant,
}

struct Relay {
    chances: [u64; 3],
    depth: u64,
    dice: Rng,
    /// For the host, and for the target.
    sockets: [UdpSocket; 2],
    target: SocketAddr,
    source: SocketAddr,
    listen: SocketAddr,
    /// To the target, and to the host.
    lanes: [Lane; 2],
}

enum Never {}

impl Relay {
    fn new(arguments: &Arguments) -> std::io::Result<Relay> {
        let per_million = |percent: f64| (percent.clamp(0.0, 100.0) * 10_000.0) as u64;
        let at = |ip| SocketAddr::new(ip, ROCE_PORT);
        let lane = || Lane { flow: None, held: VecDeque::new(), passed: 0 };
        Ok(Relay {
            chances: [arguments.loss, arguments.duplicate, arguments.reorder].map(per_million),
            depth: arguments.depth,
            dice: Rng::new(arguments.seed),
            sockets: [socket(at(arguments.listen))?, socket(at(arguments.source))?],
            target: at(arguments.target),
            source: at(arguments.source),
            listen: at(arguments.listen),
            lanes: [lane(), lane()],
        })
    }

    fn run(mut self) -> std::io::Result<Never> {
        let mut room = vec![0; 1 << 16];
        loop {
            let mut idle = true;
            for side in 0..2 {
                for _ in 0..TURN {
                    match self.sockets[side].recv_from(&mut room) {
                        Ok((len, from)) => {
                            idle = false;
                            self.pass(side, from, &room[..len]);
                        }
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                        Err(error) => return Err(error),
                    }
                }
                self.release(side, Instant::now());
            }
            if idle {
                self.wait();
            }
        }
    }

    fn wait(&self) {
        let held = self.lanes.iter().any(|lane| !lane.held.is_empty());
        let mut both = self.sockets.each_ref().map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN));
        let limit = if held { PollTimeout::from(1u8) } else { PollTimeout::NONE };
        // An interruption is handled like a timeout: the loop continues.
        let _ = poll(&mut both, limit);
    }

    /// Passes a datagram from one side to the other.
    fn pass(&mut self, side: usize, from: SocketAddr, datagram: &[u8]) {
        if side == 0 {
            self.lanes[0].flow = Some(Flow { source: self.source, destination: self.target });
            self.lanes[1].flow = Some(Flow { source: self.listen, destination: from });
        }
        let Some(flow) = self.lanes[side].flow else { return };
        let Some(bytes) = readdressed(datagram, &flow) else { return };
        let [loss, duplicate, reorder] = self.chances;
        let mut strikes = |chance: u64| self.dice.below(1_000_000) < chance;
        if strikes(loss) {
            return;
        }
        let (twice, late) = (strikes(duplicate), strikes(reorder));
        if late {
            let lane = &mut self.lanes[side];
            let after = lane.passed + 1 + self.dice.below(self.depth);
            let until = Instant::now() + LATEST;
            lane.held.push_back(Held { bytes, after, until });
            return;
        }
        for _ in 0..=u8::from(twice) {
            self.send(side, &bytes);
        }
    }

    /// Sends reordered packets that are due.
    fn release(&mut self, side: usize, now: Instant) {
        let mut index = 0;
        while let Some(held) = self.lanes[side].held.get(index) {
            if held.after <= self.lanes[side].passed || held.until <= now {
                if let Some(held) = self.lanes[side].held.remove(index) {
                    self.send(side, &held.bytes);
                }
            } else {
                index += 1;
            }
        }
    }

    fn send(&mut self, side: usize, bytes: &[u8]) {
        let lane = &mut self.lanes[side];
        lane.passed += 1;
        if let Some(flow) = lane.flow {
            // A full socket buffer drops packets as any network does.
            let _ = self.sockets[1 - side].send_to(bytes, flow.destination);
        }
        let due = lane.held.iter().any(|held| held.after <= lane.passed);
        if due {
            self.release(side, Instant::now());
        }
    }
}

fn socket(at: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = UdpSocket::bind(at)?;
    socket.set_nonblocking(true)?;
    // So the kernel gives every datagram the identification 0, and the CRC can be computed.
    setsockopt(&socket, MtuDiscover, &libc::IP_PMTUDISC_PROBE)?;
    let most = 16 << 20;
    // With privilege as much as requested, otherwise as much as the system's limit allows.
    setsockopt(&socket, sockopt::RcvBufForce, &most)
        .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &most))?;
    Ok(socket)
}

/// The packet with other addresses; none if it is not a valid packet.
fn readdressed(datagram: &[u8], flow: &Flow) -> Option<Vec<u8>> {
    let packet = Packet::parse(datagram).ok()?;
    let mut bytes = datagram.to_vec();
    if packet.bth.destination == Qpn::GSI {
        let at = bytes.len() - ICRC_BYTES - MAD_BYTES;
        let mad: &mut [u8; MAD_BYTES] = bytes[at..].first_chunk_mut()?;
        if let Some((header, CmMessage::Request(mut request))) = CmMessage::parse(mad) {
            let (old, user) = CmaHeader::parse(&request.private_data)?;
            let (source, destination) = (flow.source.ip(), flow.destination.ip());
            request.private_data = CmaHeader { source, destination, ..old }.emit(&user);
            *mad = CmMessage::Request(request).emit(header);
        }
    }
    let (body, icrc) = bytes.split_last_chunk_mut::<ICRC_BYTES>()?;
    let (bth, rest) = body.split_first_chunk::<{ Bth::BYTES }>()?;
    let mut crc = Icrc::start(flow, 0, datagram.len(), bth);
    crc.update(rest);
    *icrc = crc.finish();
    Some(bytes)
}
