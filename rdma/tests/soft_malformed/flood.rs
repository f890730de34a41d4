//! Floods of connection requests: other hosts still connect.

use super::*;

/// A connection request, as of a host that has just started.
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

/// A target under a flood, and one honest host half a millisecond away.
struct Flood {
    net: EndpointNetwork,
    now: Instant,
    /// Bytes that came from each address less bytes that went there.
    balance: HashMap<IpAddr, i64>,
    /// Messages to addresses beyond what came from them; none in a constant flood.
    unsolicited: u64,
    flooded: bool,
    /// Whether the host is there.
    started: bool,
    /// Datagrams in flight, with their receivers.
    flights: Vec<(usize, Sample)>,
    /// When the host began to connect.
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
        let (unsolicited, flooded, started, since, qp) = (0, true, true, None, None);
        let waits = Vec::new();
        Flood { net, now, balance, unsolicited, flooded, started, flights, since, qp, waits }
    }

    /// A request of the flood arrives.
    fn request(&mut self, request: &Sample) {
        *self.balance.entry(request.way.0.ip()).or_default() += request.bytes.len() as i64;
        self.deliver(TARGET, request);
    }

    fn deliver(&mut self, index: usize, datagram: &Sample) {
        if index == BYSTANDER && !self.started {
            return;
        }
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

    /// Lets the host connect, disconnect and connect again.
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

    /// Advances by 500 microseconds: delivers datagrams and handles timeouts.
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
        if self.started {
            self.serve_host();
        }
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
                            self.unsolicited += 1;
                            *balance = 0;
                        }
                        let allowed = if self.flooded { 0 } else { 32 };
                        assert!(
                            self.unsolicited <= allowed,
                            "more is said to {} than asked",
                            way.1
                        );
                    }
                }
            }
        }
    }
}

/// 50,000 requests a second, from one address, from 250 or (`sources` 0) from any, none of which
/// answers: half-open connections stay bounded, no address is sent more than came from it, and an
/// honest host connects within two seconds of virtual time.
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

/// Requests with the host's own address, and with others, at a rate, until the host's share has been
/// used more than once. The host answers the challenges that the forger caused.
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

/// Challenges of a host that is not there yet are not answered.
#[test]
fn a_host_that_starts_amid_a_flood_with_its_own_address_connects() {
    let mut world = Flood::new(wanted("SEED", 1));
    (world.flooded, world.started) = (false, false);
    let mut dice = Rng::new(wanted("SEED", 1) ^ 3);
    for tick in 0..1600 {
        // 300 a second.
        if tick % 20 < 3 {
            world.request(&request_of(address(BYSTANDER), &mut dice));
        }
        world.started |= tick >= 600;
        world.tick();
    }
    let first = world.waits.first().copied();
    assert!(first.is_some_and(|first| first < Duration::from_millis(250)), "{first:?}");
}

#[test]
fn a_host_connects_despite_a_flood_with_its_own_address() {
    for sources in [1, 16, 250] {
        flood_with_the_hosts_own_address(sources, 15);
        flood_with_the_hosts_own_address(sources, 300);
    }
    flood_with_the_hosts_own_address(1, 3000);
}

#[test]
fn other_hosts_connect_despite_a_flood_from_one_address() {
    flood(1, wanted("SECONDS", 1));
}

#[test]
fn other_hosts_connect_despite_a_flood_from_many_addresses() {
    flood(250, wanted("SECONDS", 1));
}

#[test]
fn other_hosts_connect_despite_a_flood_from_any_address() {
    flood(0, wanted("SECONDS", 1));
}
