//! One end of connections over real sockets, driven as a fabric is.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdma::soft::{Options, Soft};
use rdma::{
    Buf, Completion, Event, Fabric, FabricError, Fault, Incoming, Pool, PoolPlan, Qp, QpLimits,
    Reason, Region, Wake, Work,
};

pub(crate) const LIMITS: QpLimits = QpLimits { receives: 16, sends: 64, reads: 16 };
pub(crate) const PORT: u16 = 4420;
pub(crate) const MIB: u32 = 1 << 20;
/// A test that waits longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// An address of 127.192.0.0/10 that no other test, in this process or another, has: the tests of
/// daemons use those below.
pub(crate) fn address(test: u8) -> IpAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 192 | high & 63, low, test).into()
}

/// One end.
pub(crate) struct Side {
    pub(crate) fabric: Soft,
    pub(crate) pool: Pool,
    pub(crate) events: VecDeque<Event>,
}

impl Side {
    pub(crate) fn new(options: Options) -> Side {
        Side::of(|region| Soft::new(region, options))
    }

    /// With a fabric that is made from a region.
    pub(crate) fn of(make: impl FnOnce(Arc<Region>) -> Result<Soft, FabricError>) -> Side {
        let plan = PoolPlan {
            cells: 64,
            receives: 32,
            lead_bytes: 64,
            tail_bytes: 8192,
            data_bytes: 64 * u64::from(MIB),
            largest_bytes: MIB,
        };
        let pool = Pool::new(plan).unwrap();
        let fabric = make(pool.region().clone()).unwrap();
        Side { fabric, pool, events: VecDeque::new() }
    }

    pub(crate) fn target(at: SocketAddr) -> Side {
        let mut side = Side::new(Options::default());
        side.fabric.listen(at).unwrap();
        side
    }

    pub(crate) fn host(source: IpAddr) -> Side {
        Side::new(Options { source: Some(source), ..Options::default() })
    }

    pub(crate) fn poll(&mut self) {
        let mut batch = Vec::with_capacity(32);
        self.fabric.poll(Instant::now(), &mut batch);
        self.events.extend(batch);
    }

    pub(crate) fn turn(&mut self) {
        self.poll();
        self.fabric.flush();
    }

    pub(crate) fn data(&mut self, len: u32, seed: u8) -> Buf {
        let mut buf = self.pool.take_data(len).unwrap();
        for (at, byte) in self.pool.bytes_mut(&mut buf).iter_mut().enumerate() {
            *byte = pattern(at, seed);
        }
        buf
    }

    pub(crate) fn check(&self, buf: &Buf, seed: u8) {
        let wrong =
            self.pool.bytes(buf).iter().enumerate().find(|(at, b)| **b != pattern(*at, seed));
        assert_eq!(wrong, None, "pattern {seed}");
    }

    pub(crate) fn receive(&mut self, qp: Qp, tag: u64) {
        let buf = self.pool.take_data(MIB).unwrap();
        self.fabric.post(qp, tag, Work::Recv(buf));
    }

    /// Sleeps, as a driver should, until there is something to do.
    pub(crate) fn sleep(&mut self) {
        let deadline = self.fabric.arm(Wake::Any);
        self.poll();
        if self.events.is_empty() {
            let now = Instant::now();
            let wait = deadline.map_or(PATIENCE, |due| due.saturating_duration_since(now));
            let wait = wait.min(PATIENCE) + Duration::from_micros(999);
            let mut fds = [PollFd::new(self.fabric.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::try_from(wait).unwrap()).unwrap();
        }
    }

    /// The next event, asleep until there is one.
    pub(crate) fn next(&mut self) -> Event {
        let start = Instant::now();
        loop {
            self.turn();
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            assert!(start.elapsed() < PATIENCE, "nothing happens");
            self.sleep();
        }
    }

    pub(crate) fn done(&mut self) -> Completion {
        match self.next() {
            Event::Done(done) => done,
            other => panic!("{other:?}"),
        }
    }

    /// Accepts the next request, with a few receives.
    pub(crate) fn accept(&mut self, private_data: &[u8]) -> (Qp, Asked) {
        let incoming = self.incoming();
        let told = (incoming.local, incoming.remote, incoming.private_data.clone());
        let qp = self.fabric.open(incoming, LIMITS).unwrap();
        for tag in 0..4 {
            self.receive(qp, tag);
        }
        self.fabric.accept(qp, private_data);
        self.fabric.flush();
        (qp, told)
    }

    pub(crate) fn incoming(&mut self) -> Incoming {
        match self.next() {
            Event::Incoming(incoming) => incoming,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn established(&mut self, qp: Qp) {
        let event = self.next();
        assert!(matches!(event, Event::Established(up) if up == qp), "{event:?}");
    }

    /// Processes completions until the queue pair is removed.
    pub(crate) fn gone(&mut self, qp: Qp) -> Reason {
        loop {
            match self.next() {
                Event::Done(done) => {
                    assert_eq!((done.qp, done.outcome), (qp, Err(Fault::Flushed)));
                    self.pool.give(done.work.into_buf());
                }
                Event::Gone(gone, reason) if gone == qp => return reason,
                other => panic!("{other:?}"),
            }
        }
    }
}

pub(crate) type Asked = (SocketAddr, SocketAddr, Vec<u8>);

pub(crate) fn pattern(at: usize, seed: u8) -> u8 {
    (at as u32).wrapping_mul(0x9e37_79b9).to_be_bytes()[0] ^ seed
}
