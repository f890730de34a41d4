//! The two ends in simulated air, on a clock of its own.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdma::soft::endpoint::Config;
use rdma::soft::sim::{Faults, Link, Network, NetworkPort, Rng};
use rdma::soft::{Options, Soft};
use rdma::{Fabric, Region, Wake};

use super::{Host, Job, Role, Target};

/// A microsecond for every datagram, and a queue of a thousand.
pub(crate) const LINK: Link =
    Link { each: Duration::from_micros(1), waiting: 1024, marking: u32::MAX };

/// A network without faults, 10 µs each way. What is held back lets eight others overtake.
pub(crate) const CLEAN: Faults = Faults { jitter: Duration::from_micros(8), ..Faults::NONE };

/// Both ends.
pub(crate) struct Pair {
    pub(crate) air: Arc<Mutex<Network>>,
    now: Instant,
    host: (Soft, Host),
    target: (Soft, Target),
}

impl Pair {
    /// A connection between two endpoints of this configuration, with packets of `mtu` bytes.
    pub(crate) fn new(seed: u64, job: Job, config: Config) -> Pair {
        let (mut dice, now) = (Rng::new(seed), Instant::now());
        let mut air = Network::new(dice.roll(), Faults::NONE);
        air.link = LINK;
        let air = Arc::new(Mutex::new(air));
        let addresses = [1, 2].map(|number| IpAddr::from([10, 0, 0, number]));
        let mut fabric = |address, region: &Arc<Region>| {
            let port = NetworkPort::new(&air, address, (1, 0));
            let mut dice = Rng::new(dice.roll());
            let config = Config { guid: dice.roll(), ..config };
            // So that the numbers of packets wrap soon.
            let entropy = Box::new(move || dice.roll() | 0xff_ff00);
            Soft::simulated(port, config, entropy, now, Arc::clone(region)).unwrap()
        };
        let (host, target) = (Host::new(job), Target::new(job));
        let mut host = (fabric(addresses[0], host.region()), host);
        let mut target = (fabric(addresses[1], target.region()), target);
        let at = SocketAddr::new(addresses[1], 4420);
        target.0.listen(at).unwrap();
        host.1.connect(&mut host.0, at);
        let mut pair = Pair { air, now, host, target };
        pair.run(|pair| pair.host.1.up);
        pair
    }

    /// A configuration with packets of `mtu` bytes.
    pub(crate) fn config(mtu: u32) -> Config {
        Config { mtu, ..Options::default().config }
    }

    fn run(&mut self, done: impl Fn(&Pair) -> bool) {
        while !done(self) {
            turn(self.now, &mut self.target);
            turn(self.now, &mut self.host);
            let due = [self.host.0.arm(Wake::Any), self.target.0.arm(Wake::Any)];
            let mut air = self.air.lock().unwrap();
            let next = due.into_iter().flatten().chain(air.next_arrival()).min();
            self.now = self.now.max(next.expect("nothing happens any more"));
            while air.arrive(self.now).is_some() {}
        }
    }

    /// How long `count` blocks take.
    pub(crate) fn exchange(&mut self, faults: Faults, count: u64) -> Duration {
        self.air.lock().unwrap().faults = faults;
        let (start, end) = (self.now, self.host.1.done + count);
        let (fabric, host) = &mut self.host;
        host.start(fabric, count);
        self.run(|pair| pair.host.1.done == end);
        self.now - start
    }

    /// The host's end and the target's.
    pub(crate) fn ends(&self) -> [&Soft; 2] {
        [&self.host.0, &self.target.0]
    }
}

fn turn(now: Instant, (fabric, role): &mut (Soft, impl Role)) {
    let mut batch = Vec::with_capacity(64);
    loop {
        fabric.poll(now, &mut batch);
        let quiet = batch.is_empty();
        batch.drain(..).for_each(|event| role.event(fabric, event));
        fabric.flush();
        if quiet {
            return;
        }
    }
}
