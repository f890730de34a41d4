//! A simulated network of endpoints in one process: a [`Network`] that drops, duplicates, delays,
//! reorders and corrupts datagrams, with a virtual clock, all from one seed. The same seed and the
//! same calls give the same run.

mod network;
pub(super) mod wire;

use std::io;
use std::net::IpAddr;
use std::time::Instant;

use super::endpoint::{Config, Endpoint};
pub use super::sim::network::{Datagram, Faults, Hook, Link, Network, NetworkPort, Rng};
use crate::{Event, Pool, PoolPlan, Qp, Tag, Work};

/// An endpoint in the network, and its memory.
#[derive(Debug)]
pub struct Node {
    /// Its address.
    pub address: IpAddr,
    /// The endpoint. May be used directly between steps.
    pub endpoint: Endpoint,
    /// Its memory.
    pub pool: Pool,
}

impl Node {
    /// Posts work on a queue pair of this node.
    pub fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        self.endpoint.post(qp, tag, work, self.pool.region());
    }

    /// Takes its events.
    pub fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.endpoint.poll_event()).collect()
    }
}

/// The network.
#[derive(Debug)]
pub struct EndpointNetwork {
    /// The network between the endpoints.
    pub air: Network,
    /// Endpoints added from now on choose packet numbers among the 256 highest of 24 bits, which
    /// wrap soon.
    pub wraps: bool,
    now: Instant,
    nodes: Vec<Node>,
}

impl EndpointNetwork {
    /// An empty network. Its clock begins at an arbitrary time.
    pub fn new(seed: u64, faults: Faults) -> EndpointNetwork {
        let air = Network::new(seed, faults);
        EndpointNetwork { air, wraps: false, now: Instant::now(), nodes: Vec::new() }
    }

    /// Adds an endpoint and returns its index.
    ///
    /// # Errors
    /// Its memory cannot be allocated.
    pub fn add(&mut self, address: IpAddr, config: Config, plan: PoolPlan) -> io::Result<usize> {
        let mut dice = Rng::new(self.air.dice().roll());
        let config = Config { guid: dice.roll(), ..config };
        let high = if self.wraps { 0xff_ff00 } else { 0 };
        let endpoint = Endpoint::new(config, Box::new(move || dice.roll() | high));
        self.nodes.push(Node { address, endpoint, pool: Pool::new(plan)? });
        Ok(self.air.add(address, (1, 0)))
    }

    /// The time of the network.
    pub fn now(&self) -> Instant {
        self.now
    }

    /// A node, by the index that [`EndpointNetwork::add`] returned.
    ///
    /// # Panics
    /// There is none with this index.
    pub fn node(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    /// Passes all packets of the endpoints to the network, then advances the clock to the next
    /// arrival or deadline and handles that. Returns false if there is none.
    pub fn step(&mut self) -> bool {
        self.collect();
        let arrival = self.air.next_arrival();
        let deadline = self.nodes.iter().filter_map(|node| node.endpoint.poll_timeout()).min();
        let Some(next) = arrival.into_iter().chain(deadline).min() else { return false };
        self.now = self.now.max(next);
        if arrival == Some(next)
            && let Some(index) = self.air.arrive(next)
        {
            let Node { endpoint, pool, .. } = &mut self.nodes[index];
            while let Some(datagram) = self.air.take(index) {
                if let Some((from, to)) = datagram.way {
                    let (tos, bytes) = (datagram.tos, &datagram.bytes);
                    endpoint.handle(self.now, from, to, tos, bytes, pool.region());
                }
                self.air.give(datagram);
            }
        } else {
            for Node { endpoint, pool, .. } in &mut self.nodes {
                endpoint.handle_timeout(self.now, pool.region());
            }
        }
        self.collect();
        true
    }

    /// Takes the packets of all endpoints.
    fn collect(&mut self) {
        for Node { endpoint, pool, .. } in &mut self.nodes {
            self.air.transmit(self.now, endpoint, pool.region());
        }
    }
}
