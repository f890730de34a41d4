//! Damage that the CRC of IPv4 packets cannot see: it looks like another identification.

use super::*;

/// Counts as Linux does, for each pair of addresses.
struct Counting {
    next: u16,
    passed: u32,
    /// Of packets to `victim` that are long enough, every so manieth is damaged.
    each: u32,
    mask: u8,
    victim: IpAddr,
    /// What the counter skips at some packet of these.
    jumps: Vec<u32>,
    /// "Don't fragment" is not set, but in every so manieth packet.
    fragmentable: Option<u32>,
}

impl Counting {
    /// Gives a packet of `flow` the next identification, and damages it when it is its turn.
    fn see(&mut self, flow: Flow, bytes: &mut [u8]) {
        self.passed += 1;
        let skipped = if self.jumps.contains(&self.passed) { 20_000 } else { 0 };
        self.next = self.next.wrapping_add(1 + skipped);
        let end = bytes.len() - 4;
        let bth: [u8; Bth::BYTES] = *bytes.first_chunk().unwrap();
        let mut icrc = Icrc::start(&flow, self.next, bytes.len(), &bth);
        icrc.update(&bytes[Bth::BYTES..end]);
        bytes[end..].copy_from_slice(&icrc.finish());
        if self.fragmentable.is_some_and(|each| !self.passed.is_multiple_of(each)) {
            for (byte, by) in bytes[end..].iter_mut().zip(contribution_of_df(end)) {
                *byte ^= by;
            }
        }
        if self.each > 0 && self.passed.is_multiple_of(self.each) && end > 93 {
            bytes[93] ^= self.mask;
        }
    }
}

/// What "don't fragment" contributes to the CRC of a datagram of which `covered` bytes are covered.
/// Behind it are the rest of the IP header, that of UDP, and the datagram.
fn contribution_of_df(covered: usize) -> [u8; 4] {
    let mut bytes = vec![0; 14 + 8 + covered];
    let without = crc32fast::hash(&bytes);
    bytes[0] = 0x40;
    (crc32fast::hash(&bytes) ^ without).to_le_bytes()
}

/// Sends 600 messages of 1500 bytes from node 0 to 1, and gives how many packets were implausible
/// there. Each must arrive as it was sent.
fn send(net: &mut EndpointNetwork, (host, target): (Qp, Qp)) -> u64 {
    let before = net.node(1).endpoint.counters()[DatagramOutcome::Implausible];
    for nth in 0..600u32 {
        let into = net.node(1).pool.take_data(2048).unwrap();
        net.node(1).post(target, 1, Work::Recv(into));
        let from = buf(&mut net.node(0).pool, 1500, nth as u8);
        net.node(0).post(host, 2, Work::Send { from, invalidate: None });
        let mut open = 2;
        while open > 0 {
            assert!(net.step(), "message {nth} never ends");
            for index in 0..2 {
                for event in net.node(index).events() {
                    let Event::Done(done) = event else { panic!("{event:?}") };
                    assert_eq!(done.outcome, Ok(1500), "message {nth}");
                    let mut buf = done.work.into_buf();
                    if done.tag == 1 {
                        buf.select(0, 1500);
                        let arrived = net.node(1).pool.bytes(&buf);
                        assert!(is_pattern(arrived, nth as u8), "message {nth} is damaged");
                    }
                    net.node(index).pool.give(buf);
                    open -= 1;
                }
            }
        }
    }
    net.node(1).endpoint.counters()[DatagramOutcome::Implausible] - before
}

/// A host and a target that are up; from now on the host counts identifications as this does.
fn counting(host: Config, counting: Counting) -> (EndpointNetwork, (Qp, Qp)) {
    let mut net = two(1, Faults::NONE, false, host, open_config());
    let ends = established(&mut net);
    let counting = Mutex::new(counting);
    net.air.tap = Some(Box::new(move |datagram| {
        let (source, destination) = datagram.way.unwrap();
        let mut counting = counting.lock().unwrap();
        if destination.ip() == counting.victim {
            counting.see(Flow { source, destination }, &mut datagram.bytes);
        }
        true
    }));
    (net, ends)
}

fn plain_counting() -> Counting {
    let victim = address(false, 2);
    Counting {
        next: 65_000,
        passed: 0,
        each: 0,
        mask: 0x11,
        victim,
        jumps: Vec::new(),
        fragmentable: None,
    }
}

/// A host that is not of our kind.
fn linux() -> Config {
    Config { selective: false, ..open_config() }
}

#[test]
fn a_host_that_counts_identifications_loses_no_packet() {
    let (mut net, ends) = counting(linux(), plain_counting());
    assert_eq!(send(&mut net, ends), 0);
}

#[test]
fn damage_that_looks_like_another_identification_reaches_no_buffer() {
    let masks =
        [0x11, 0x1e, 0x22, 0x2d, 0x33, 0x3c, 0x44, 0x4b, 0x55, 0x5a, 0x66, 0x69, 0x77, 0x78, 0x0f];
    for mask in masks {
        let (mut net, ends) = counting(linux(), plain_counting());
        send(&mut net, ends);
        let victim = address(false, 2);
        let damaging =
            Mutex::new(Counting { next: 2600, each: 37, mask, victim, ..plain_counting() });
        net.air.tap = Some(Box::new(move |datagram| {
            let (source, destination) = datagram.way.unwrap();
            if destination.ip() == victim {
                let flow = Flow { source, destination };
                damaging.lock().unwrap().see(flow, &mut datagram.bytes);
            }
            true
        }));
        assert!(send(&mut net, ends) > 20, "{mask:02x}");
    }
}

#[test]
fn damaged_packets_of_nvmfd_peers_reach_no_buffer() {
    let mut net = two(1, Faults::NONE, false, open_config(), open_config());
    let (ends, victim, mut passed) = (established(&mut net), address(false, 2), 0);
    net.air.tap = Some(Box::new(move |datagram| {
        if datagram.way.unwrap().1.ip() == victim {
            passed += 1;
            if passed % 37 == 0 && datagram.bytes.len() > 97 {
                datagram.bytes[93] ^= 0x11;
            }
        }
        true
    }));
    assert!(send(&mut net, ends) > 20);
}

#[test]
fn a_host_whose_counter_jumps_loses_only_a_few_packets() {
    let jumps = vec![100, 300, 301, 700, 1001];
    let (mut net, ends) = counting(linux(), Counting { jumps, ..plain_counting() });
    let start = net.now();
    let implausible = send(&mut net, ends);
    assert!((1..=15).contains(&implausible), "{implausible}");
    assert!(net.now() - start < Duration::from_secs(2));
}

#[test]
fn a_host_whose_packets_may_be_fragmented_loses_none() {
    let fragmentable = Some(u32::MAX);
    let (mut net, ends) = counting(linux(), Counting { fragmentable, ..plain_counting() });
    assert_eq!(send(&mut net, ends), 0);
}

#[test]
fn a_packet_with_a_contradicting_df_bit_is_implausible() {
    let fragmentable = Some(100);
    let (mut net, ends) = counting(linux(), Counting { fragmentable, ..plain_counting() });
    assert!(send(&mut net, ends) > 10);
}
