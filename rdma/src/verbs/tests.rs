//! Tests with an RDMA device of this machine, which has two addresses: `RDMA_ADDRESS=10.77.0.1
//! RDMA_SOURCE=10.77.0.9 cargo test -p rdma --lib verbs::tests -- --ignored`. The flow `ground` runs
//! them in a guest.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::pool::{Pool, PoolPlan};
use crate::verbs::ffi::{
    Access, AsyncEvent, CmId, CompChannel, Cq, Depths, DeviceList, EventChannel, Mr, Pd, QueueKey,
    RcQueuePair,
};
use crate::verbs::*;

const LIMIT: Duration = Duration::from_secs(20);
const LIMITS: QpLimits = QpLimits { receives: 8, sends: 8, reads: 1 };

/// An address of a device.
fn named(variable: &str) -> IpAddr {
    std::env::var(variable).unwrap_or_else(|e| panic!("{variable}: {e}")).parse().unwrap()
}

fn address() -> SocketAddr {
    SocketAddr::new(named("RDMA_ADDRESS"), 4429)
}

fn pool() -> Pool {
    Pool::new(PoolPlan {
        cells: 128,
        receives: 0,
        lead_bytes: 0,
        tail_bytes: 0,
        data_bytes: 0,
        largest_bytes: 4096,
    })
    .unwrap()
}

/// One end of connections, with a receive for each.
struct End {
    pool: Pool,
    verbs: Verbs,
    /// Addresses from which connections were requested.
    remotes: Vec<IpAddr>,
    established: Vec<Qp>,
    gone: Vec<Reason>,
}

impl End {
    fn new() -> End {
        let pool = pool();
        let load = Load { receives: 64, sends: 64 };
        let verbs = Verbs::new(Arc::clone(pool.region()), load).unwrap();
        End { pool, verbs, remotes: Vec::new(), established: Vec::new(), gone: Vec::new() }
    }

    fn post(&mut self, qp: Qp) {
        let buf = self.pool.take_cell().unwrap();
        self.verbs.post(qp, 0, Work::Recv(buf));
    }

    fn turn(&mut self) {
        let mut batch = Vec::with_capacity(64);
        self.verbs.poll(Instant::now(), &mut batch);
        for event in batch {
            match event {
                Event::Incoming(incoming) => {
                    self.remotes.push(incoming.remote.ip());
                    let qp = self.verbs.open(incoming, LIMITS).unwrap();
                    self.post(qp);
                    self.verbs.accept(qp, &[]);
                }
                Event::Established(qp) => self.established.push(qp),
                Event::Done(done) => self.pool.give(done.work.into_buf()),
                Event::Gone(_, reason) => self.gone.push(reason),
                Event::ListenerLost(at) => panic!("{at} has no device any more"),
            }
        }
        self.verbs.flush();
    }

    fn received(&self) -> QueueKey {
        self.verbs.devices[0].device.received.key()
    }
}

/// A target and a host.
struct Pair {
    target: End,
    host: End,
}

impl Pair {
    fn run(&mut self, what: &str, until: impl Fn(&Pair) -> bool) {
        let end = Instant::now() + LIMIT;
        while !until(self) {
            assert!(Instant::now() < end, "{what}: {:?} {:?}", self.target.gone, self.host.gone);
            [&mut self.target, &mut self.host].into_iter().for_each(End::turn);
            sleep(Duration::from_millis(1));
        }
    }

    fn connect(&mut self) -> Qp {
        [&mut self.target, &mut self.host].into_iter().for_each(|end| end.established.clear());
        let qp = self.host.verbs.connect(address(), &[], LIMITS).unwrap();
        self.host.post(qp);
        self.run("connect", |pair| !pair.target.established.is_empty());
        self.run("connect", |pair| !pair.host.established.is_empty());
        self.target.established[0]
    }

    /// All connections end, each buffer is returned; returns the reasons of the target.
    fn ended(&mut self) -> Vec<Reason> {
        self.run("end", |pair| {
            let host = pair.host.verbs.connections.iter().flatten().count();
            host + pair.target.verbs.connections.iter().flatten().count() == 0
        });
        self.run("events", |pair| !pair.target.gone.is_empty() && !pair.host.gone.is_empty());
        assert!(self.target.pool.is_full() && self.host.pool.is_full());
        self.host.gone.clear();
        std::mem::take(&mut self.target.gone)
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn failed_queues_end_their_connections_and_completion_queues_are_replaced() {
    let mut pair = Pair { target: End::new(), host: End::new() };
    pair.target.verbs.listen(address()).unwrap();
    let qp = pair.connect();
    let context = Arc::clone(&pair.target.verbs.devices[0].device.context);
    let failed = |target: &mut End, qp| {
        let queue = target.verbs.connection(qp).unwrap().pair.as_ref().unwrap().key();
        context.note(AsyncEvent::QueueFailed(queue));
    };
    failed(&mut pair.target, qp);
    assert_eq!(pair.ended(), [Reason::Device]);
    assert_eq!(context.failures(), (vec![], 0), "its object is destroyed");

    let first = pair.target.received();
    pair.connect();
    assert_eq!(pair.target.received(), first, "a queue pair fails alone");
    context.note(AsyncEvent::QueueFailed(first));
    assert_eq!(pair.ended(), [Reason::Device]);
    assert_eq!(context.failures(), (vec![], 0));
    assert!(pair.target.verbs.devices.is_empty());

    pair.connect();
    context.note(AsyncEvent::DeviceFailed);
    assert_eq!(pair.ended(), [Reason::Device]);
    pair.connect();
    let check = pair.target.verbs.next_device_check;
    pair.run("stays", |pair| pair.target.verbs.next_device_check > check);
    assert_eq!((pair.target.gone.len(), pair.target.verbs.devices.len()), (0, 1));
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_connection_is_requested_from_the_source_address() {
    let mut pair = Pair { target: End::new(), host: End::new() };
    pair.target.verbs.listen(address()).unwrap();
    pair.connect();
    let source = named("RDMA_SOURCE");
    pair.host.verbs = pair.host.verbs.with_source(Some(SocketAddr::new(source, 0)));
    pair.connect();
    assert_eq!(pair.target.remotes, [address().ip(), source]);
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_completion_queue_that_overruns_is_reported_and_can_be_destroyed() {
    let mut pool = pool();
    let api = Api::get().unwrap();
    let channel = EventChannel::new(api).unwrap();
    let id = Arc::new(CmId::new(&channel).unwrap());
    id.bind(address()).unwrap();
    let list = DeviceList::new(api).unwrap();
    let contexts = list.contexts();
    let context = contexts.iter().find(|context| Some(context.key()) == id.device()).unwrap();
    let pd = Pd::new(context).unwrap();
    let mr = Mr::new(&pd, pool.region(), 0, pool.region().len() as u64, Access::Local).unwrap();
    let announcements = CompChannel::new(context).unwrap();
    let [sent, received] = [1, 1].map(|entries| Cq::new(&announcements, entries, 0).unwrap());
    let depths = Depths { sends: 1, receives: 64, inline: 0, signal_all: false };
    let pair = RcQueuePair::new(&id, &pd, &sent, &received, depths).unwrap();
    let mut chain = RecvChain::default();
    let buf = pool.take_cell().unwrap();
    (0..64).for_each(|id| chain.push(id, &mr, (buf.offset(), buf.len())));
    pair.receive(&mut chain).unwrap();
    // All of them complete, in a queue that has no room for them.
    pair.stop().unwrap();
    let end = Instant::now() + LIMIT;
    while !context.failures().0.contains(&received.key()) {
        assert!(Instant::now() < end, "no event");
        context.read_events(|event| println!("{event:?}"));
        sleep(Duration::from_millis(1));
    }
    drop((pair, sent, received));
    assert_eq!(context.failures(), (vec![], 0));
    pool.give(buf);
}
