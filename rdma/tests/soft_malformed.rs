//! An endpoint among enemies, in simulated air: mutated packets and messages of connection
//! management, floods of requests to connect, and access to memory that nobody may have.
//!
//! The tests are small; `make hostile` asks for the large numbers by two variables, `PACKETS` and
//! `SECONDS` (of the flood), and for the least share of its throughput, in percent, that must be
//! left to a bystander (`SHARE`). It prints what it finds. Everything comes from one seed, `SEED`.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdma::soft::cm::mad::MadHeader;
use rdma::soft::cm::message::{CmMessage, CmaHeader, Request, service_id};
use rdma::soft::endpoint::Config;
use rdma::soft::qp::memory_region::Rights;
use rdma::soft::sim::{EndpointNetwork, Faults, Rng};
use rdma::soft::stats::datagrams::{Counters, DatagramOutcome};
use rdma::soft::wire::header::{
    Bth, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES, Nak, Packet, Syndrome,
};
use rdma::soft::wire::icrc::{Flow, Icrc};
use rdma::soft::wire::opcode::Opcode;
use rdma::soft::wire::psn::{Psn, Qpn};
use rdma::{Buf, Event, Pool, PoolPlan, Qp, QpLimits, Remote, RemoteRegion, Work};

const LIMITS: QpLimits = QpLimits { receives: 16, sends: 32, reads: 4 };
const TARGET: usize = 0;
/// Talks to the target all the time. The enemy does not see its packets.
const BYSTANDER: usize = 1;
/// The enemy sees their packets and knows all about their connections.
const VICTIMS: std::ops::Range<usize> = 2..6;
const MESSAGE_BYTES: u32 = 1536;
/// Messages that the bystander sends in each round.
const ECHOES: u64 = 16;
/// Packets of the enemy in each round.
const ATTACKS: u64 = 100;
/// Samples that the enemy keeps: of packets, and of messages of connection management.
const SAMPLES: [usize; 2] = [512, 48];
/// The target's user ends connections that say nothing for so many rounds.
const SILENCE: u64 = 100;

fn wanted(name: &str, otherwise: u64) -> u64 {
    let text = std::env::var(name).unwrap_or_default();
    text.parse().unwrap_or(otherwise)
}

fn plan() -> PoolPlan {
    PoolPlan {
        cells: 16,
        receives: 256,
        lead_bytes: 0,
        tail_bytes: 4096,
        data_bytes: 2 << 20,
        largest_bytes: 64 << 10,
    }
}

fn host_config() -> Config {
    Config {
        answered_reads: 4,
        rights: Rights::ALL,
        exposed: 64,
        ack_timeout: Duration::from_millis(2),
        ..Config::default()
    }
}

fn address(node: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, node as u8 + 1])
}

fn target_address() -> SocketAddr {
    SocketAddr::new(address(TARGET), 4420)
}

/// Uses all memory of a pool once, so that it does not seem to grow later.
fn touch(pool: &mut Pool) {
    let mut held: Vec<Buf> = std::iter::from_fn(|| pool.take_data(4096)).collect();
    held.extend(std::iter::from_fn(|| pool.take_receive()));
    held.extend(std::iter::from_fn(|| pool.take_cell()));
    held.iter_mut().for_each(|buf| pool.bytes_mut(buf).fill(1));
    held.into_iter().for_each(|buf| pool.give(buf));
}

/// A datagram that somebody has seen.
#[derive(Clone)]
struct Sample {
    way: (SocketAddr, SocketAddr),
    bytes: Vec<u8>,
}

/// The latest that the enemy has seen: packets, and messages of connection management.
#[derive(Default)]
struct Seen {
    kinds: [Vec<Sample>; 2],
    next: [usize; 2],
}

impl Seen {
    fn note(&mut self, way: (SocketAddr, SocketAddr), bytes: &[u8]) {
        let kind = usize::from(is_message(bytes));
        let (samples, next) = (&mut self.kinds[kind], &mut self.next[kind]);
        if samples.len() < SAMPLES[kind] {
            return samples.push(Sample { way, bytes: bytes.to_vec() });
        }
        samples[*next].way = way;
        samples[*next].bytes.clear();
        samples[*next].bytes.extend_from_slice(bytes);
        *next = (*next + 1) % SAMPLES[kind];
    }
}

/// What a host knows of its connection.
#[derive(Default)]
struct Host {
    qp: Option<Qp>,
    up: bool,
    exposed: Option<RemoteRegion>,
    connects: u64,
    echoes: u64,
    sent: u64,
}

struct World {
    net: EndpointNetwork,
    dice: Rng,
    samples: Arc<Mutex<Seen>>,
    hosts: Vec<Host>,
    /// Connections of the target.
    accepted: u64,
    /// The round in which each of its queue pairs was heard last.
    heard: Vec<Option<u64>>,
    round: u64,
    /// What the target and the victims took for the enemy's datagrams.
    spent: Duration,
}

impl World {
    fn new(seed: u64, target: Config) -> World {
        let faults = Faults { delay: Duration::from_micros(20), ..Faults::NONE };
        let mut net = EndpointNetwork::new(seed, faults);
        let samples = Arc::new(Mutex::new(Seen::default()));
        net.add(address(TARGET), target, plan()).unwrap();
        let mut hosts = vec![Host::default()];
        for node in BYSTANDER..VICTIMS.end {
            net.add(address(node), host_config(), plan()).unwrap();
            hosts.push(Host::default());
        }
        (0..VICTIMS.end).for_each(|node| touch(&mut net.node(node).pool));
        net.node(TARGET).endpoint.listen(target_address());
        let seen = Arc::clone(&samples);
        net.air.tap = Some(Box::new(move |datagram| {
            let way = datagram.way.filter(|w| ![w.0.ip(), w.1.ip()].contains(&address(BYSTANDER)));
            if let Some(way) = way {
                seen.lock().unwrap().note(way, &datagram.bytes);
            }
            true
        }));
        let (dice, heard) = (Rng::new(seed ^ 2), Vec::new());
        World { net, dice, samples, hosts, accepted: 0, heard, round: 0, spent: Duration::ZERO }
    }

    /// The target's user hears of a queue pair, or (`None`) will hear no more.
    fn hear(heard: &mut Vec<Option<u64>>, qp: Qp, at: Option<u64>) {
        let index = qp.0 as usize;
        heard.resize(heard.len().max(index + 1), None);
        heard[index] = at;
    }

    /// The target's user ends what has been silent for too long.
    fn end_silent(&mut self) {
        let (now, node) = (self.net.now(), self.net.node(TARGET));
        for (index, heard) in self.heard.iter().enumerate() {
            if heard.is_some_and(|at| at + SILENCE < self.round) {
                node.endpoint.disconnect(now, Qp(index as u32), node.pool.region());
            }
        }
        self.serve_target();
    }

    /// What the users of all endpoints do.
    fn serve(&mut self) {
        self.serve_target();
        for node in BYSTANDER..VICTIMS.end {
            self.serve_host(node);
        }
    }

    /// Accepts whoever comes, and sends every message back; those of a victim also by way of its
    /// memory.
    fn serve_target(&mut self) {
        let now = self.net.now();
        let node = self.net.node(TARGET);
        while let Some(event) = node.endpoint.poll_event() {
            match event {
                Event::Incoming(incoming) => {
                    let Ok(qp) = node.endpoint.open(incoming, LIMITS) else { continue };
                    for _ in 0..4 {
                        let Some(buf) = node.pool.take_receive() else { break };
                        node.post(qp, 0, Work::Recv(buf));
                    }
                    node.endpoint.accept(now, qp, &[]);
                    self.accepted += 1;
                    World::hear(&mut self.heard, qp, Some(self.round));
                }
                Event::Done(done) => {
                    let (qp, recv) = (done.qp, matches!(done.work, Work::Recv(_)));
                    let mut buf = done.work.into_buf();
                    let Ok(len) = done.outcome else {
                        node.pool.give(buf);
                        node.endpoint.disconnect(now, qp, node.pool.region());
                        continue;
                    };
                    if !recv {
                        node.pool.rewind(&mut buf);
                        node.post(qp, 0, Work::Recv(buf));
                        continue;
                    }
                    World::hear(&mut self.heard, qp, Some(self.round));
                    buf.select(buf.start(), len);
                    if let Some(to) = named(node.pool.bytes(&buf)) {
                        let half = to.len / 2;
                        if let Some(mut into) = node.pool.take_data(half) {
                            into.select(0, half);
                            node.post(qp, 0, Work::Read { into, from: Remote { len: half, ..to } });
                        }
                        if let Some(mut from) = node.pool.take_data(half) {
                            from.select(0, half);
                            node.post(qp, 0, Work::Write { from, to });
                        }
                    }
                    node.post(qp, 0, Work::Send { from: buf, invalidate: None });
                }
                Event::Established(_) | Event::ListenerLost(_) => {}
                Event::Gone(qp, _) => World::hear(&mut self.heard, qp, None),
            }
        }
    }

    fn serve_host(&mut self, index: usize) {
        let (now, host) = (self.net.now(), &mut self.hosts[index]);
        let node = self.net.node(index);
        while let Some(event) = node.endpoint.poll_event() {
            match event {
                Event::Established(_) => host.up = true,
                Event::Gone(qp, _) if host.qp == Some(qp) => {
                    (host.qp, host.up) = (None, false);
                    if let Some(exposed) = host.exposed.take() {
                        let buf = node.endpoint.memory().revoke(exposed);
                        node.pool.give(buf);
                    }
                }
                Event::Done(done) => {
                    let recv = matches!(done.work, Work::Recv(_));
                    let mut buf = done.work.into_buf();
                    if done.outcome.is_err() {
                        node.endpoint.disconnect(now, done.qp, node.pool.region());
                    } else if recv {
                        if index == BYSTANDER {
                            let len = done.outcome.unwrap_or(0);
                            buf.select(buf.start(), len);
                            assert_eq!(len, MESSAGE_BYTES);
                            let number = host.echoes;
                            let right = node.pool.bytes(&buf).iter().enumerate();
                            let mut right = right.skip(16).map(|(at, b)| (pattern(number, at), *b));
                            assert!(right.all(|(wanted, found)| wanted == found), "{number}");
                        }
                        host.echoes += 1;
                    }
                    node.pool.give(buf);
                }
                _ => {}
            }
        }
        if host.qp.is_none() {
            let qp = node.endpoint.connect(now, address(index), target_address(), &[], LIMITS);
            host.qp = qp.ok();
            host.connects += 1;
        }
    }

    /// A host sends a message, which comes back.
    fn ask(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        let Some(qp) = host.qp.filter(|_| host.up) else { return };
        let node = self.net.node(index);
        if index != BYSTANDER && host.exposed.is_none() {
            let Some(buf) = node.pool.take_data(8192) else { return };
            host.exposed = node.endpoint.memory().expose(buf, Rights::ALL).ok();
        }
        let (Some(receive), Some(mut from)) = (node.pool.take_receive(), node.pool.take_receive())
        else {
            return;
        };
        from.select(from.start(), MESSAGE_BYTES);
        let bytes = node.pool.bytes_mut(&mut from);
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = pattern(host.sent, at);
        }
        bytes[..16].fill(0);
        if let Some(exposed) = &host.exposed {
            let Remote { addr, key, len } = exposed.remote();
            bytes[..8].copy_from_slice(&addr.to_be_bytes());
            bytes[8..12].copy_from_slice(&key.to_be_bytes());
            bytes[12..16].copy_from_slice(&len.to_be_bytes());
        }
        host.sent += 1;
        node.post(qp, 1, Work::Recv(receive));
        node.post(qp, 2, Work::Send { from, invalidate: None });
    }

    /// Lets `time` pass.
    fn run(&mut self, time: Duration) {
        let end = self.net.now() + time;
        for _ in 0..20_000 {
            if !self.net.step() {
                return;
            }
            self.serve();
            if self.net.now() >= end {
                return;
            }
        }
        panic!("never quiet")
    }

    /// The enemy's turn: `count` datagrams to the target or to a victim, each made from one that
    /// was seen.
    fn attack(&mut self, count: u64, mutate: Mutate) {
        let mut datagram = Sample { way: (target_address(), target_address()), bytes: Vec::new() };
        for _ in 0..count {
            {
                let samples = self.samples.lock().unwrap();
                mutate(&mut self.dice, &samples, &mut datagram);
            }
            let (from, to) = datagram.way;
            let now = self.net.now();
            let index = (0..VICTIMS.end).find(|node| address(*node) == to.ip()).unwrap_or(TARGET);
            let node = self.net.node(index);
            let start = Instant::now();
            node.endpoint.handle(now, from, to, 0, &datagram.bytes, node.pool.region());
            self.spent += start.elapsed();
        }
    }

    /// The bystander's turn, and how long it took.
    fn echo(&mut self) -> Duration {
        let (start, before) = (Instant::now(), self.hosts[BYSTANDER].echoes);
        for _ in 0..ECHOES / 4 {
            for _ in 0..4 {
                self.ask(BYSTANDER);
            }
            let wanted = self.hosts[BYSTANDER].sent;
            for _ in 0..10_000 {
                if self.hosts[BYSTANDER].echoes == wanted || !self.net.step() {
                    break;
                }
                self.serve_target();
                self.serve_host(BYSTANDER);
            }
        }
        let time = start.elapsed();
        assert_eq!(self.hosts[BYSTANDER].echoes - before, ECHOES, "the bystander is cut off");
        time
    }

    /// Rounds of all of them; the median of the bystander's times.
    fn rounds(&mut self, count: u64, attacks: u64, mutate: Mutate) -> Duration {
        let mut times = Vec::new();
        for _ in 0..count {
            VICTIMS.for_each(|node| self.ask(node));
            if self.dice.below(2) == 0 {
                let index = VICTIMS.start + self.dice.below(VICTIMS.len() as u64) as usize;
                let (now, node) = (self.net.now(), self.net.node(index));
                if let Some(qp) = self.hosts[index].qp {
                    node.endpoint.disconnect(now, qp, node.pool.region());
                }
                self.serve_host(index);
            }
            self.run(Duration::from_micros(30));
            self.attack(attacks, mutate);
            self.run(Duration::from_millis(5));
            self.round += 1;
            self.end_silent();
            times.push(self.echo());
        }
        for node in 0..VICTIMS.end {
            let counters = self.counters(node);
            assert_eq!(counters.received, counters.accounted());
        }
        times.sort_unstable();
        times[times.len() / 2]
    }

    fn counters(&mut self, node: usize) -> Counters {
        self.net.node(node).endpoint.counters()
    }
}

fn pattern(number: u64, at: usize) -> u8 {
    (number.wrapping_mul(31) as u8).wrapping_add((at as u8).wrapping_mul(7))
}

/// The memory that a message names.
fn named(message: &[u8]) -> Option<Remote> {
    let addr = u64::from_be_bytes(*message.first_chunk()?);
    let key = u32::from_be_bytes(*message.get(8..)?.first_chunk()?);
    let len = u32::from_be_bytes(*message.get(12..)?.first_chunk()?);
    (key != 0 && (2..=8192).contains(&len)).then_some(Remote { addr, key, len })
}

type Mutate = fn(&mut Rng, &Seen, &mut Sample);

/// Puts the right CRC under a datagram.
fn seal(datagram: &mut Sample) {
    let bytes = &mut datagram.bytes;
    let flow = Flow { source: datagram.way.0, destination: datagram.way.1 };
    let Some(end) = bytes.len().checked_sub(ICRC_BYTES) else { return };
    let Some(bth) = bytes[..end].first_chunk::<{ Bth::BYTES }>() else { return };
    let mut icrc = Icrc::start(&flow, 0, end + ICRC_BYTES, bth);
    icrc.update(&bytes[Bth::BYTES..end]);
    let crc = icrc.finish();
    bytes[end..].copy_from_slice(&crc);
}

/// A packet, changed where it hurts.
fn mutate_packet(dice: &mut Rng, seen: &Seen, out: &mut Sample) {
    let samples = &seen.kinds[0];
    let sample = &samples[dice.below(samples.len() as u64) as usize];
    out.way = sample.way;
    out.bytes.clone_from(&sample.bytes);
    for _ in 0..=dice.below(3) {
        mutate_once(dice, samples, &mut out.bytes);
    }
    if dice.below(50) == 0 {
        out.way.0.set_ip(IpAddr::from([10, 9, dice.roll() as u8, dice.roll() as u8]));
    }
    if dice.below(5) > 0 {
        seal(out);
    }
}

fn mutate_once(dice: &mut Rng, samples: &[Sample], bytes: &mut Vec<u8>) {
    let len = bytes.len() as u64;
    match dice.below(12) {
        0 => {
            for _ in 0..=dice.below(8) {
                let at = dice.below(len.max(1)) as usize;
                bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << dice.below(8));
            }
        }
        1 => bytes.truncate(dice.below(len.max(1)) as usize),
        2 => {
            let more = if dice.below(100) == 0 { 9000 } else { dice.below(64) as usize };
            bytes.resize(bytes.len() + more, dice.roll() as u8);
        }
        3 => put(bytes, 0, &[KNOWN[dice.below(KNOWN.len() as u64) as usize] as u8]),
        4 => put(bytes, 0, &[dice.roll() as u8]),
        5 => {
            // The number of the packet: a little or very far away, and an acknowledgement or not.
            let far = dice.below(3) == 0;
            let step = if far { dice.roll() as u32 } else { dice.below(300) as u32 };
            let Some(at) = bytes.get(8..12).and_then(|b| b.first_chunk::<4>()) else { return };
            let psn = u32::from_be_bytes(*at);
            let psn =
                if dice.below(2) == 0 { psn.wrapping_add(step) } else { psn.wrapping_sub(step) };
            put(bytes, 9, &psn.to_be_bytes()[1..]);
            put(bytes, 8, &[dice.roll() as u8 & 0x80]);
        }
        6 => {
            let other = &samples[dice.below(samples.len() as u64) as usize].bytes;
            put(bytes, 4, other.get(4..8).unwrap_or(&[]));
        }
        7 => {
            // A field behind the base header: keys, addresses, lengths, syndromes.
            let at = 12 + 4 * dice.below(8) as usize;
            let word = [0, u32::MAX, 1 << 31, dice.roll() as u32, dice.below(9000) as u32];
            put(bytes, at, &word[dice.below(5) as usize].to_be_bytes());
        }
        8 => put(bytes, 1, &[dice.roll() as u8 & 0xf0]),
        9 => {
            let other = &samples[dice.below(samples.len() as u64) as usize].bytes;
            let at = dice.below(len.min(other.len() as u64).max(1)) as usize;
            bytes.truncate(at);
            bytes.extend_from_slice(&other[at.min(other.len())..]);
        }
        10 => {
            let odd = dice.below(bytes.len().max(1) as u64) as usize & !3;
            bytes.truncate(odd.max(16));
        }
        _ => {}
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes.iter_mut().skip(at).zip(value).for_each(|(byte, new)| *byte = *new);
}

const KNOWN: [Opcode; 27] = [
    Opcode::SendFirst,
    Opcode::SendMiddle,
    Opcode::SendLast,
    Opcode::SendLastImmediate,
    Opcode::SendOnly,
    Opcode::SendOnlyImmediate,
    Opcode::WriteFirst,
    Opcode::WriteMiddle,
    Opcode::WriteLast,
    Opcode::WriteLastImmediate,
    Opcode::WriteOnly,
    Opcode::WriteOnlyImmediate,
    Opcode::ReadRequest,
    Opcode::ReadResponseFirst,
    Opcode::ReadResponseMiddle,
    Opcode::ReadResponseLast,
    Opcode::ReadResponseOnly,
    Opcode::Acknowledge,
    Opcode::AtomicAcknowledge,
    Opcode::CompareSwap,
    Opcode::FetchAdd,
    Opcode::SendLastInvalidate,
    Opcode::SendOnlyInvalidate,
    Opcode::UdSendOnly,
    Opcode::UdSendOnlyImmediate,
    Opcode::CongestionNotification,
    Opcode::SelectiveAcknowledge,
];

/// Where the message of connection management begins in its datagram.
const MAD_AT: usize = 20;

fn is_message(bytes: &[u8]) -> bool {
    bytes.len() == MAD_AT + 256 + ICRC_BYTES && bytes[0] == Opcode::UdSendOnly as u8
}

/// A message of connection management, changed where it hurts.
fn mutate_message(dice: &mut Rng, seen: &Seen, out: &mut Sample) {
    let samples = &seen.kinds[1];
    let pick = |dice: &mut Rng| &samples[dice.below(samples.len() as u64) as usize];
    let sample = pick(dice);
    out.way = sample.way;
    out.bytes.clone_from(&sample.bytes);
    let bytes = &mut out.bytes;
    for _ in 0..dice.below(4) {
        let at = MAD_AT + dice.below(256) as usize;
        match dice.below(8) {
            // Which message it is.
            0 => put(bytes, MAD_AT + 16, &[0, 0x10 + dice.below(16) as u8]),
            // The names of the connection.
            1 => put(bytes, MAD_AT + 24, &(dice.roll() as u32).to_be_bytes()),
            2 => {
                let other = pick(dice);
                put(bytes, MAD_AT + 24, &other.bytes[MAD_AT + 24..][..8]);
            }
            3 => bytes.swap(MAD_AT + 24, MAD_AT + 28),
            4 => put(bytes, at, &[dice.roll() as u8]),
            5 => put(bytes, at & !3, &[[0; 4], [0xff; 4]][dice.below(2) as usize]),
            6 => bytes[at] ^= 1 << dice.below(8),
            _ => {
                let at = dice.below(60) as usize * 4;
                put(bytes, MAD_AT + at, &dice.roll().to_be_bytes());
            }
        }
    }
    match dice.below(20) {
        0 => put(bytes, 0, &dice.roll().to_be_bytes()),
        1 => bytes.truncate(dice.below(280) as usize),
        2 => bytes.resize(280 + dice.below(32) as usize * 4, 0),
        3 => {
            // Somebody else asks, and says so.
            let ip = [10, 7, dice.roll() as u8, dice.roll() as u8];
            out.way.0.set_ip(IpAddr::from(ip));
            put(bytes, MAD_AT + 140 + 16, &ip);
            put(bytes, MAD_AT + 24, &(dice.roll() as u32).to_be_bytes());
        }
        _ => {}
    }
    if dice.below(10) > 0 {
        seal(out);
    }
}

/// Memory of this process in use, in KiB.
fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4
}

fn print(name: &str, counters: &Counters) {
    let outcomes = DatagramOutcome::ALL.iter().filter(|outcome| counters[**outcome] > 0);
    let outcomes: Vec<_> = outcomes.map(|f| format!("{} {}", f.name(), counters[*f])).collect();
    println!("  {name}: received {}: {}", counters.received, outcomes.join(", "));
}

/// No panic; every datagram has a fate; memory does not grow; the bystander's data are right, and
/// its work takes about as long as without the enemy.
///
/// The bystander's share is measured on the time that goes to its own turn, beside that of a twin
/// in a world without an enemy: what the enemy leaves behind (dead connections, full tables) may
/// not make its packets dearer. What the enemy's packets take besides is printed by itself.
fn besiege(name: &str, packets: u64, mutate: Mutate) {
    let world = || {
        let mut world = World::new(wanted("SEED", 1), Config { mtu: 1024, ..Config::default() });
        world.serve();
        world.run(Duration::from_millis(50));
        assert!(world.hosts[BYSTANDER].up);
        world
    };
    let (mut world, mut twin) = (world(), world());
    let parts = 20;
    let rounds = packets.div_ceil(ATTACKS * parts);
    let (start, mut memory, mut turns) = (Instant::now(), Vec::new(), Vec::new());
    for _ in 0..parts {
        let calm = twin.rounds(rounds.min(200), 0, mutate);
        turns.push((calm, world.rounds(rounds, ATTACKS, mutate)));
        memory.push(resident_kib());
    }
    let time = start.elapsed();
    turns.sort_by_key(|(calm, stormy)| stormy.as_nanos() * 1000 / calm.as_nanos().max(1));
    let (calm, stormy) = turns[turns.len() / 2];
    let share = calm.as_secs_f64() / stormy.as_secs_f64() * 100.0;
    let (half, last) = (memory[parts as usize / 2 - 1], memory[memory.len() - 1]);
    let outcomes = world.counters(TARGET);
    let count = rounds * parts * ATTACKS;
    println!("{name}: {count} in {time:.1?}, with all that the others did");
    println!("  each took its receiver {:.0?}", world.spent / count as u32);
    println!("  bystander: {calm:.1?} a turn without, {stormy:.1?} with the enemy: {share:.0} %");
    println!("  memory: {half} KiB after half of it, {last} KiB at the end");
    println!("  {} connections accepted", world.accepted);
    print("target", &outcomes);
    let host = world.counters(VICTIMS.start);
    print("one victim", &host);
    assert_eq!(world.hosts[BYSTANDER].connects, 1, "the bystander lost its connection");
    assert!(world.accepted > 5, "victims come back");
    assert!(last <= half + 1024, "{memory:?}");
    let wanted = wanted("SHARE", 0) as f64;
    assert!(share >= wanted, "the bystander keeps {share:.0} %, not {wanted:.0} %");
}

#[test]
fn mutated_packets_harm_nobody_else() {
    besiege("mutated packets", wanted("PACKETS", 40_000), mutate_packet);
}

#[test]
fn mutated_messages_harm_nobody_else() {
    besiege("mutated messages", wanted("PACKETS", 160_000) / 4, mutate_message);
}

/// How a request to connect is made, as from a host that has just begun.
fn request_of(from: IpAddr, dice: &mut Rng) -> Sample {
    let private = CmaHeader { source_port: 4000, source: from, destination: address(TARGET) };
    let request = Request {
        service_id: service_id(4420),
        ca_guid: dice.roll(),
        local_comm_id: dice.roll() as u32,
        qpn: Qpn::new(dice.roll() as u32 & 0xff_ffff | 2),
        path_mtu: 3,
        retry_count: 7,
        rnr_retry_count: 7,
        private_data: private.emit(&[0; CmaHeader::USER_BYTES]),
        ..Request::zeroed()
    };
    let header = MadHeader { transaction: dice.roll(), ..MadHeader::default() };
    let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
    let head = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
    let mut bytes = head.as_slice().to_vec();
    bytes.extend(CmMessage::Request(request).emit(header));
    bytes.extend([0; ICRC_BYTES]);
    let way = (SocketAddr::new(from, 4791), SocketAddr::new(address(TARGET), 4791));
    let mut sample = Sample { way, bytes };
    seal(&mut sample);
    sample
}

/// A target under a flood, and one host half a millisecond away that means it.
struct Flood {
    net: EndpointNetwork,
    now: Instant,
    /// Bytes that came from each address less bytes that went there.
    balance: HashMap<IpAddr, i64>,
    /// Messages that went to an address which had not asked for as much; none where there is a flood
    /// all the time.
    unasked: u64,
    flooded: bool,
    /// What arrives next: at whom, and what.
    flights: Vec<(usize, Sample)>,
    /// Since when the host wants to connect.
    since: Option<Instant>,
    qp: Option<Qp>,
    /// How long each of its connects took.
    waits: Vec<Duration>,
}

impl Flood {
    const TICK: Duration = Duration::from_micros(500);

    fn new(seed: u64) -> Flood {
        let mut net = EndpointNetwork::new(seed, Faults::NONE);
        net.add(address(TARGET), Config::default(), plan()).unwrap();
        net.add(address(BYSTANDER), host_config(), plan()).unwrap();
        net.node(TARGET).endpoint.listen(target_address());
        let (now, balance, flights) = (net.now(), HashMap::new(), Vec::new());
        let (unasked, flooded, since, qp, waits) = (0, true, None, None, Vec::new());
        Flood { net, now, balance, unasked, flooded, flights, since, qp, waits }
    }

    /// A request of the flood arrives.
    fn request(&mut self, request: &Sample) {
        *self.balance.entry(request.way.0.ip()).or_default() += request.bytes.len() as i64;
        self.deliver(TARGET, request);
    }

    fn deliver(&mut self, index: usize, datagram: &Sample) {
        let ((from, to), node) = (datagram.way, self.net.node(index));
        node.endpoint.handle(self.now, from, to, 0, &datagram.bytes, node.pool.region());
        match index {
            TARGET => self.serve_target(),
            _ => self.serve_host(),
        }
    }

    fn serve_target(&mut self) {
        let node = self.net.node(TARGET);
        while let Some(event) = node.endpoint.poll_event() {
            if let Event::Incoming(incoming) = event
                && let Ok(qp) = node.endpoint.open(incoming, LIMITS)
            {
                node.endpoint.accept(self.now, qp, &[]);
            }
        }
    }

    /// The host connects, leaves, and connects again.
    fn serve_host(&mut self) {
        let (now, node) = (self.now, self.net.node(BYSTANDER));
        while let Some(event) = node.endpoint.poll_event() {
            match event {
                Event::Established(qp) => {
                    self.waits.extend(self.since.take().map(|since| now - since));
                    node.endpoint.disconnect(now, qp, node.pool.region());
                }
                Event::Gone(..) => self.qp = None,
                _ => {}
            }
        }
        if self.qp.is_none() {
            let to = target_address();
            let qp = node.endpoint.connect(now, address(BYSTANDER), to, &[], LIMITS);
            (self.qp, self.since) = (Some(qp.unwrap()), self.since.or(Some(now)));
        }
    }

    /// Half a millisecond: what was sent arrives, what is due is done.
    fn tick(&mut self) {
        self.now += Flood::TICK;
        for (index, datagram) in std::mem::take(&mut self.flights) {
            self.deliver(index, &datagram);
        }
        for index in [TARGET, BYSTANDER] {
            let node = self.net.node(index);
            node.endpoint.handle_timeout(self.now, node.pool.region());
        }
        self.serve_target();
        self.serve_host();
        for index in [TARGET, BYSTANDER] {
            let node = self.net.node(index);
            let region = node.pool.region();
            while let Some(transmit) = node.endpoint.poll_transmit(self.now, region) {
                let mut bytes = transmit.outgoing.header().to_vec();
                node.endpoint.copy_payload(&transmit, region, &mut bytes);
                let payload = &bytes[transmit.outgoing.header().len()..];
                let trailer = transmit.outgoing.seal(&transmit.flow, 0, payload);
                bytes.extend_from_slice(trailer.as_slice());
                let way = (transmit.flow.source, transmit.flow.destination);
                match [TARGET, BYSTANDER].into_iter().find(|at| address(*at) == way.1.ip()) {
                    Some(to) => self.flights.push((to, Sample { way, bytes })),
                    None => {
                        let balance = self.balance.entry(way.1.ip()).or_default();
                        *balance -= bytes.len() as i64;
                        if *balance < 0 {
                            self.unasked += 1;
                            *balance = 0;
                        }
                        let allowed = if self.flooded { 0 } else { 32 };
                        assert!(self.unasked <= allowed, "more is said to {} than asked", way.1);
                    }
                }
            }
        }
    }
}

/// 50,000 requests a second, from one address, from 250 or (`sources` 0) from any, none of which
/// ever answers: half-open connections stay bounded, never is more said to an address than came
/// from it, and whoever means it gets in within two seconds of virtual time.
fn flood(sources: u64, seconds: u64) {
    let mut world = Flood::new(wanted("SEED", 1));
    let mut dice = Rng::new(wanted("SEED", 1) ^ 3);
    let (mut spent, mut most, mut number) = (Duration::ZERO, 0, 0);
    for _ in 0..seconds * 2000 {
        let requests: Vec<_> = (number..number + 25)
            .map(|number| {
                let of = if sources == 0 { dice.roll() } else { number % sources };
                let ip = [10, 100 | (of >> 16) as u8 & 3, (of >> 8) as u8, of as u8];
                request_of(IpAddr::from(ip), &mut dice)
            })
            .collect();
        number += 25;
        let start = Instant::now();
        requests.iter().for_each(|request| world.request(request));
        spent += start.elapsed();
        world.tick();
        most = most.max(world.net.node(TARGET).endpoint.half_open());
    }
    let longest = world.waits.iter().max().copied().unwrap_or(Duration::MAX);
    let each = spent / number as u32;
    println!("{number} requests from {sources} (0: any) in {seconds} s: {each:?} each");
    println!("  half open: {most} at most; {} connects, {longest:?} at most", world.waits.len());
    println!("  {} KiB in use", resident_kib());
    print("target", &world.net.node(TARGET).endpoint.counters());
    assert!(most <= Config::default().half_open);
    assert!(longest < Duration::from_secs(2));
    assert!(world.since.is_none_or(|since| world.now - since < Duration::from_secs(2)));
}

/// Requests with the host's own address, and with others, so many a second, for so long that it has
/// had its share more than once. The host lives, so it answers the questions that are meant for the forger.
fn flood_with_the_hosts_own_address(sources: u64, a_second: u64) {
    let mut world = Flood::new(wanted("SEED", 1));
    world.flooded = false;
    let mut dice = Rng::new(wanted("SEED", 1) ^ 3);
    let mut number = 0;
    let seconds = if a_second < 100 { 8 } else { 3 };
    for tick in 1..=seconds * 2000 {
        while number < tick * a_second / 2000 {
            let of = number % sources;
            let other = IpAddr::from([10, 100, (of >> 8) as u8, of as u8]);
            let from = if of == 0 { address(BYSTANDER) } else { other };
            world.request(&request_of(from, &mut dice));
            number += 1;
        }
        world.tick();
    }
    let longest = world.waits.iter().max().copied().unwrap_or(Duration::MAX);
    let said = format!("{a_second} a second from {sources}: {longest:?}");
    assert!(longest < Duration::from_secs(2), "{said}");
    let pending = world.since.is_none_or(|since| world.now - since < Duration::from_secs(2));
    assert!(pending, "{said}");
}

#[test]
fn a_flood_with_a_hosts_own_address_does_not_keep_that_host_out() {
    for sources in [1, 16, 250] {
        flood_with_the_hosts_own_address(sources, 15);
        flood_with_the_hosts_own_address(sources, 300);
    }
    flood_with_the_hosts_own_address(1, 3000);
}

#[test]
fn a_flood_from_one_address_keeps_nobody_else_out() {
    flood(1, wanted("SECONDS", 1));
}

#[test]
fn a_flood_from_many_addresses_keeps_nobody_else_out() {
    flood(250, wanted("SECONDS", 1));
}

#[test]
fn a_flood_from_any_address_keeps_nobody_else_out() {
    flood(0, wanted("SECONDS", 1));
}

/// Every operation code, with keys and addresses that somebody might try: nothing of a target's
/// memory is ever changed or shown, whatever rights its queue pairs are given.
#[test]
fn no_opcode_and_no_key_opens_a_targets_memory() {
    let open = Config { rights: Rights::ALL, answered_reads: 8, exposed: 64, ..Config::default() };
    for target in [Config::default(), open] {
        let refused = knock_everywhere(target);
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

/// Tries every access on connections of its own, and gives the codes that were answered by
/// "remote access error".
fn knock_everywhere(config: Config) -> Vec<Opcode> {
    let mut net = EndpointNetwork::new(1, Faults::NONE);
    net.add(address(TARGET), config, plan()).unwrap();
    net.add(address(BYSTANDER), host_config(), plan()).unwrap();
    net.node(TARGET).endpoint.listen(target_address());
    let pool = &mut net.node(TARGET).pool;
    // For messages; nobody else's.
    let spare = pool.take_receive().unwrap();
    let mut held: Vec<Buf> = std::iter::from_fn(|| pool.take_data(4096)).collect();
    held.extend(std::iter::from_fn(|| pool.take_receive()));
    held.extend(std::iter::from_fn(|| pool.take_cell()));
    held.iter_mut().for_each(|buf| pool.bytes_mut(buf).fill(0xa5));
    pool.give(spare);
    let base = pool.region().addr() as u64;
    let mut refused = Vec::new();
    for opcode in KNOWN {
        for key in [0, 1, 0x100, u32::MAX] {
            for address in [0, 4096, base] {
                for payload in [0, 12, 64, 1024] {
                    let answer = knock(&mut net, opcode, (key, address), payload);
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

/// Makes a connection, sends one packet on it, and gives the target's answer. No answer may carry
/// data.
fn knock(
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
        let aeth = Packet::parse(&bytes).unwrap().ext.aeth;
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
