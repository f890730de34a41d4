//! A network of endpoints in one process: it loses, repeats, delays, reorders and damages
//! datagrams, on a clock of its own, all from one seed. The same seed and the same calls give the
//! same run.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::endpoint::{Config, Endpoint, ROCE_PORT};
use crate::{Event, Pool, PoolPlan, Qp, Tag, Work};

/// A small generator of numbers that look random (xorshift64*, Marsaglia and Vigna). Not for
/// anything that somebody may not guess.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// From a seed; every seed is as good as another.
    #[must_use]
    pub fn new(seed: u64) -> Dice {
        // Zero is the one state that this generator never leaves.
        Dice((seed ^ 0x9e37_79b9_7f4a_7c15).max(1))
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.roll() >> 16) % end.max(1)
    }

    /// True `count` times in a thousand.
    pub fn per_mille(&mut self, count: u16) -> bool {
        self.below(1000) < u64::from(count)
    }
}

/// What the network does to datagrams. Chances are per thousand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    /// Lost.
    pub loss: u16,
    /// Delivered twice, at different times.
    pub duplicate: u16,
    /// One to four bytes changed. (IPv4 endpoints see all but one of 65536; use IPv6 where that
    /// matters.)
    pub damage: u16,
    /// Held back, so that later ones overtake.
    pub reorder: u16,
    /// How long every datagram takes.
    pub delay: Duration,
    /// How much longer one takes that is held back, at most.
    pub jitter: Duration,
}

impl Faults {
    /// A network without faults, 10 µs each way.
    pub const NONE: Faults = Faults {
        loss: 0,
        duplicate: 0,
        damage: 0,
        reorder: 0,
        delay: Duration::from_micros(10),
        jitter: Duration::from_micros(200),
    };
}

/// An endpoint in the network, and its memory.
#[derive(Debug)]
pub struct Node {
    /// Its address.
    pub address: IpAddr,
    /// The endpoint. Between steps it may be used freely.
    pub endpoint: Endpoint,
    /// Its memory.
    pub pool: Pool,
}

impl Node {
    /// Posts work on a queue pair of this node.
    pub fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        self.endpoint.post(qp, tag, work, self.pool.region());
    }

    /// Everything that has happened here.
    pub fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.endpoint.poll_event()).collect()
    }
}

/// A datagram under way, ordered by its arrival.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Flight {
    arrival: Instant,
    /// Keeps the order of those that arrive at one time.
    number: u64,
    node: usize,
    from: SocketAddr,
    to: SocketAddr,
    bytes: Vec<u8>,
}

/// The network.
#[derive(Debug)]
pub struct Network {
    /// What it does to datagrams from now on.
    pub faults: Faults,
    dice: Dice,
    now: Instant,
    nodes: Vec<Node>,
    flights: BinaryHeap<Reverse<Flight>>,
    number: u64,
}

impl Network {
    /// An empty network. Its clock begins at some time, which does not matter.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Network {
        Network {
            faults,
            dice: Dice::new(seed),
            now: Instant::now(),
            nodes: Vec::new(),
            flights: BinaryHeap::new(),
            number: 0,
        }
    }

    /// Adds an endpoint and gives its index.
    ///
    /// # Errors
    /// Its memory cannot be had.
    pub fn add(&mut self, address: IpAddr, config: Config, plan: PoolPlan) -> io::Result<usize> {
        let mut dice = Dice::new(self.dice.roll());
        let config = Config { guid: dice.roll(), ..config };
        let endpoint = Endpoint::new(config, Box::new(move || dice.roll()));
        self.nodes.push(Node { address, endpoint, pool: Pool::new(plan)? });
        Ok(self.nodes.len() - 1)
    }

    /// The network's own time.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// A node, by the index that [`Network::add`] gave.
    ///
    /// # Panics
    /// When there is none.
    pub fn node(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    /// Loses everything that is under way.
    pub fn lose_flights(&mut self) {
        self.flights.clear();
    }

    /// Does what is next: hands all that endpoints have to say to the network, then moves the
    /// clock to the next arrival or deadline and lets that happen. False when there is nothing to
    /// wait for.
    pub fn step(&mut self) -> bool {
        self.collect();
        let arrival = self.flights.peek().map(|Reverse(flight)| flight.arrival);
        let deadline = self.nodes.iter().filter_map(|node| node.endpoint.poll_timeout()).min();
        let Some(next) = arrival.into_iter().chain(deadline).min() else { return false };
        self.now = self.now.max(next);
        if arrival == Some(next)
            && let Some(Reverse(flight)) = self.flights.pop()
        {
            let Node { endpoint, pool, .. } = &mut self.nodes[flight.node];
            endpoint.handle(self.now, flight.from, flight.to, 0, &flight.bytes, pool.region());
        } else {
            for Node { endpoint, pool, .. } in &mut self.nodes {
                endpoint.handle_timeout(self.now, pool.region());
            }
        }
        self.collect();
        true
    }

    /// Takes what all endpoints have to send.
    fn collect(&mut self) {
        for index in 0..self.nodes.len() {
            loop {
                let Node { endpoint, pool, .. } = &mut self.nodes[index];
                let region = pool.region();
                let Some(transmit) = endpoint.poll_transmit(self.now, region) else { break };
                let payload = endpoint.payload(&transmit, region);
                // As from a kernel that numbers its datagrams.
                let identification = self.dice.roll() as u16;
                let trailer = transmit.outgoing.seal(&transmit.flow, identification, payload);
                let bytes = [transmit.outgoing.header(), payload, trailer.as_slice()].concat();
                self.carry(transmit.flow.source, transmit.flow.destination, bytes);
            }
        }
    }

    fn carry(&mut self, from: SocketAddr, to: SocketAddr, bytes: Vec<u8>) {
        let to_port = to.port() == ROCE_PORT;
        let Some(node) = self.nodes.iter().position(|n| n.address == to.ip() && to_port) else {
            return;
        };
        let copies = 1 + u8::from(self.dice.per_mille(self.faults.duplicate));
        for _ in 0..copies {
            if self.dice.per_mille(self.faults.loss) {
                continue;
            }
            let mut bytes = bytes.clone();
            if self.dice.per_mille(self.faults.damage) {
                for _ in 0..=self.dice.below(3) {
                    let at = self.dice.below(bytes.len() as u64) as usize;
                    bytes[at] ^= self.dice.below(255) as u8 + 1;
                }
            }
            let mut arrival = self.now + self.faults.delay;
            if self.dice.per_mille(self.faults.reorder) {
                let more = self.dice.below(self.faults.jitter.as_nanos() as u64);
                arrival += Duration::from_nanos(more);
            }
            self.number += 1;
            let flight = Flight { arrival, number: self.number, node, from, to, bytes };
            self.flights.push(Reverse(flight));
        }
    }
}
