//! Mutated packets and messages: they harm no other host.

use super::*;

/// Hosts whose packets the attacker sees.
const VICTIMS: std::ops::Range<usize> = 2..6;
const MESSAGE_BYTES: u32 = 1536;
/// Messages that the bystander sends in each round.
const ECHOES: u64 = 16;
/// Packets of the attacker in each round.
const ATTACKS: u64 = 100;
/// Samples that the attacker has: packets, and messages of connection management.
const SAMPLES: [usize; 2] = [512, 48];
/// The target's user ends connections that are silent for so many rounds.
const SILENCE: u64 = 100;

/// Uses all memory of a pool once, so that it does not seem to grow later.
fn touch(pool: &mut Pool) {
    let mut held: Vec<Buf> = std::iter::from_fn(|| pool.take_data(4096)).collect();
    held.extend(std::iter::from_fn(|| pool.take_receive()));
    held.extend(std::iter::from_fn(|| pool.take_cell()));
    held.iter_mut().for_each(|buf| pool.bytes_mut(buf).fill(1));
    held.into_iter().for_each(|buf| pool.give(buf));
}

/// The latest samples: packets, and messages of connection management.
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

/// State of a host.
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
    /// Time that the target and the victims spent on the attacker's datagrams.
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

    /// Records the round of the last message of a queue pair; `None`: it has ended.
    fn note_message(heard: &mut Vec<Option<u64>>, qp: Qp, at: Option<u64>) {
        let index = qp.0 as usize;
        heard.resize(heard.len().max(index + 1), None);
        heard[index] = at;
    }

    /// Ends connections that have been silent for too long.
    fn end_silent(&mut self) {
        let (now, node) = (self.net.now(), self.net.node(TARGET));
        for (index, heard) in self.heard.iter().enumerate() {
            if heard.is_some_and(|at| at + SILENCE < self.round) {
                node.endpoint.disconnect(now, Qp(index as u32), node.pool.region());
            }
        }
        self.serve_target();
    }

    /// Lets the users of all endpoints work.
    fn serve(&mut self) {
        self.serve_target();
        for node in BYSTANDER..VICTIMS.end {
            self.serve_host(node);
        }
    }

    /// Accepts all connections and echoes each message; those of a victim also through its memory.
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
                    World::note_message(&mut self.heard, qp, Some(self.round));
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
                    World::note_message(&mut self.heard, qp, Some(self.round));
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
                Event::Gone(qp, _) => World::note_message(&mut self.heard, qp, None),
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

    /// Sends a message of a host, which the target echoes.
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

    /// Injects `count` datagrams to the target or to a victim, each mutated from a sample.
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

    /// Exchanges the bystander's messages of a round; returns the time taken.
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

    /// Runs rounds of all hosts; returns the median of the bystander's times.
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

/// The memory descriptor in a message.
fn named(message: &[u8]) -> Option<Remote> {
    let addr = u64::from_be_bytes(*message.first_chunk()?);
    let key = u32::from_be_bytes(*message.get(8..)?.first_chunk()?);
    let len = u32::from_be_bytes(*message.get(12..)?.first_chunk()?);
    (key != 0 && (2..=8192).contains(&len)).then_some(Remote { addr, key, len })
}

type Mutate = fn(&mut Rng, &Seen, &mut Sample);

/// Mutates fields of a sampled packet.
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
        3 => {
            let known: Vec<u8> = Opcode::all().map(Opcode::to_wire).collect();
            put(bytes, 0, &[known[dice.below(known.len() as u64) as usize]]);
        }
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

fn is_message(bytes: &[u8]) -> bool {
    bytes.len() == MAD_OFFSET + 256 + ICRC_BYTES && bytes[0] == Opcode::UdSendOnly as u8
}

/// Mutates fields of a sampled message of connection management.
fn mutate_message(dice: &mut Rng, seen: &Seen, out: &mut Sample) {
    let samples = &seen.kinds[1];
    let pick = |dice: &mut Rng| &samples[dice.below(samples.len() as u64) as usize];
    let sample = pick(dice);
    out.way = sample.way;
    out.bytes.clone_from(&sample.bytes);
    let bytes = &mut out.bytes;
    for _ in 0..dice.below(4) {
        let at = MAD_OFFSET + dice.below(256) as usize;
        match dice.below(8) {
            // Which message it is.
            0 => put(bytes, MAD_OFFSET + 16, &[0, 0x10 + dice.below(16) as u8]),
            // The names of the connection.
            1 => put(bytes, MAD_OFFSET + 24, &(dice.roll() as u32).to_be_bytes()),
            2 => {
                let other = pick(dice);
                put(bytes, MAD_OFFSET + 24, &other.bytes[MAD_OFFSET + 24..][..8]);
            }
            3 => bytes.swap(MAD_OFFSET + 24, MAD_OFFSET + 28),
            4 => put(bytes, at, &[dice.roll() as u8]),
            5 => put(bytes, at & !3, &[[0; 4], [0xff; 4]][dice.below(2) as usize]),
            6 => bytes[at] ^= 1 << dice.below(8),
            _ => {
                let at = dice.below(60) as usize * 4;
                put(bytes, MAD_OFFSET + at, &dice.roll().to_be_bytes());
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
            put(bytes, MAD_OFFSET + 140 + 16, &ip);
            put(bytes, MAD_OFFSET + 24, &(dice.roll() as u32).to_be_bytes());
        }
        _ => {}
    }
    if dice.below(10) > 0 {
        seal(out);
    }
}

/// No panic; each datagram is counted once; memory does not grow; the bystander's data are right, and
/// its work takes about as long as without the attacker.
///
/// The bystander's share compares the time of its own messages with that in a second world without an
/// attacker: dead connections and full tables may not slow down its packets. The time that the
/// attacker's packets take is printed separately.
fn attack_and_measure(name: &str, packets: u64, mutate: Mutate) {
    let world = || {
        let mut world = World::new(wanted("SEED", 1), Config { mtu: 1024, ..Config::default() });
        world.serve();
        world.run(Duration::from_millis(50));
        assert!(world.hosts[BYSTANDER].up);
        world
    };
    let (mut world, mut calm_world) = (world(), world());
    let parts = 20;
    let rounds = packets.div_ceil(ATTACKS * parts);
    let (start, mut memory, mut turns) = (Instant::now(), Vec::new(), Vec::new());
    for _ in 0..parts {
        let calm = calm_world.rounds(rounds.min(200), 0, mutate);
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
    println!(
        "  bystander: {calm:.1?} a turn without, {stormy:.1?} with the attacker: {share:.0} %"
    );
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
fn mutated_packets_do_not_affect_other_connections() {
    attack_and_measure("mutated packets", wanted("PACKETS", 40_000), mutate_packet);
}

#[test]
fn mutated_cm_messages_do_not_affect_other_connections() {
    attack_and_measure("mutated messages", wanted("PACKETS", 160_000) / 4, mutate_message);
}
