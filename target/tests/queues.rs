//! The queues of a reactor in a flood of connections that never send a Connect.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvme::{Text, cm};
use nvmfd::controller::Limits;
use nvmfd::disk::{BackingId, Disk, Op};
use nvmfd::mailbox::{Mail, mailbox};
use nvmfd::queues::{Lent, Queues};
use nvmfd::registry::{Registry, Visit};
use nvmfd::subsystem::Subsystem;
use rdma::{
    Completion, Event, Fabric, FabricError, Fault, Incoming, Pool, PoolPlan, Qp, QpLimits, Reason,
    Tag, Wake, Work,
};

const LIMITS: Limits =
    Limits { queue_depth: 16, io_queues: 4, in_capsule_bytes: 4096, mdts_bytes: 1 << 16 };
/// Receives of the reactor; a queue takes 32.
const RECEIVES: u32 = 256;

/// Keeps what is posted until its queue pair has been disconnected.
#[derive(Default)]
struct Recorder {
    posted: BTreeMap<u32, Vec<(Tag, Work)>>,
    next: u32,
    rejected: u32,
    ending: Vec<Qp>,
}

impl Fabric for Recorder {
    fn listen(&mut self, _: SocketAddr) -> Result<(), FabricError> {
        Ok(())
    }
    fn unlisten(&mut self, _: SocketAddr) {}
    fn open(&mut self, _: Incoming, _: QpLimits) -> Result<Qp, FabricError> {
        self.next += 1;
        Ok(Qp(self.next - 1))
    }
    fn accept(&mut self, _: Qp, _: &[u8]) {}
    fn reject(&mut self, _: Incoming, _: &[u8]) {
        self.rejected += 1;
    }
    fn disconnect(&mut self, qp: Qp) {
        self.ending.push(qp);
    }
    fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        self.posted.entry(qp.0).or_default().push((tag, work));
    }
    fn flush(&mut self) {}
    fn poll(&mut self, _: Instant, _: &mut Vec<Event>) {}
    fn arm(&mut self, _: Wake) -> Option<Instant> {
        None
    }
    fn deadline(&self) -> Option<Instant> {
        None
    }
    fn fd(&self) -> i32 {
        -1
    }
}

/// Nobody gets as far as to a disk.
struct NoDisk;

impl Disk for NoDisk {
    fn submit(&mut self, _: BackingId, _: Tag, _: Op) {
        panic!("a disk operation without a Connect")
    }

    fn recall(&mut self, _: Tag, _: Tag) {
        panic!("a disk operation without a Connect")
    }
}

struct World {
    pool: Pool,
    fabric: Recorder,
    registry: Registry,
    queues: Queues,
    now: Instant,
}

impl World {
    fn new() -> World {
        let now = Instant::now();
        let plan = PoolPlan {
            cells: 1024,
            receives: RECEIVES,
            lead_bytes: 64,
            tail_bytes: 4096,
            data_bytes: 1 << 16,
            largest_bytes: 1 << 16,
        };
        World {
            pool: Pool::new(plan).unwrap(),
            fabric: Recorder::default(),
            registry: Registry::new(vec![mailbox().unwrap().0], 8, 70),
            queues: Queues::new(0, LIMITS, now),
            now,
        }
    }

    fn step(&mut self, step: impl FnOnce(&mut Queues, &mut Lent<'_>)) {
        let mut lent = Lent {
            pool: &mut self.pool,
            fabric: &mut self.fabric,
            disk: &mut NoDisk,
            registry: &self.registry,
            now: self.now,
        };
        step(&mut self.queues, &mut lent);
    }

    /// An address asks for a connection: the queue pair that it gets.
    fn ask(&mut self, source: u8) -> Option<Qp> {
        self.now += Duration::from_millis(1);
        let before = self.fabric.next;
        let at = |last| SocketAddr::new(IpAddr::from([192, 0, 2, last]), 4420);
        let request = cm::Request { hrqsize: 32, hsqsize_z: 31, ..cm::Request::default() };
        let private = request.emit().to_vec();
        let incoming = Incoming::detached(at(250), at(source), private, 16, Box::new(()));
        self.step(|queues, lent| queues.on_event(Event::Incoming(incoming), lent));
        (self.fabric.next > before).then_some(Qp(before))
    }

    /// Everything of the queue pairs that were disconnected comes home; which they are.
    fn settle(&mut self) -> Vec<u32> {
        let ending = std::mem::take(&mut self.fabric.ending);
        for qp in ending.clone() {
            for (tag, work) in self.fabric.posted.remove(&qp.0).unwrap_or_default() {
                let outcome = Err(Fault::Flushed);
                let done = Completion { qp, tag, work, outcome, invalidated: None };
                self.step(|queues, lent| queues.on_event(Event::Done(done), lent));
            }
            let gone = Event::Gone(qp, Reason::Local);
            self.step(|queues, lent| queues.on_event(gone, lent));
        }
        ending.iter().map(|qp| qp.0).collect()
    }

    fn end(mut self) {
        self.step(|queues, lent| drop(queues.on_mail(Mail::Stop, lent)));
        self.settle();
        assert_eq!(self.queues.count(), 0);
        assert!(self.pool.is_full(), "{:?}", self.pool.free());
    }
}

#[test]
fn who_floods_makes_room_for_its_own_next() {
    let mut world = World::new();
    // Half of the receives, and then one in place of the oldest each time.
    for number in 0..20 {
        assert_eq!(world.ask(1), Some(Qp(number)));
        let displaced: Vec<u32> = number.checked_sub(4).into_iter().collect();
        assert_eq!(world.settle(), displaced);
    }
    assert_eq!((world.queues.count(), world.fabric.rejected), (4, 0));
    world.end();
}

#[test]
fn of_all_that_nobody_has_named_the_largest_share_makes_room() {
    let mut world = World::new();
    let sources = [1, 2, 1, 1, 2, 1];
    for (number, source) in (0..).zip(sources) {
        assert_eq!(world.ask(source), Some(Qp(number)));
    }
    assert_eq!(world.settle(), [0; 0]);
    assert_eq!(world.ask(3), Some(Qp(6)), "a third gets in");
    // What was closed has not come home: nobody may take more than is there.
    assert_eq!((world.ask(4), world.fabric.rejected), (None, 0));
    world.step(Queues::serve_waiters);
    assert_eq!(world.settle(), [0], "the first has the most, and this is its oldest");
    // The next one makes room a millisecond after the last.
    let before = world.now;
    world.now = before - Duration::from_micros(500);
    world.step(Queues::serve_waiters);
    assert_eq!(world.fabric.next, 7);
    world.now = before;
    world.step(Queues::serve_waiters);
    assert_eq!((world.fabric.next, world.settle()), (8, vec![2]));
    assert_eq!(world.ask(5), Some(Qp(8)));
    // The first two have two each, the second has the older.
    assert_eq!(world.settle(), [1]);
    world.end();
}

#[test]
fn who_waits_for_room_is_not_pushed_out_by_who_asks_most() {
    let mut world = World::new();
    for (number, source) in (0..).zip([1, 1, 1, 1, 2, 2, 1]) {
        assert_eq!(world.ask(source), Some(Qp(number)));
    }
    assert_eq!(world.ask(9), None);
    for _ in 0..70 {
        assert_eq!(world.ask(1), None);
    }
    assert_eq!(world.fabric.rejected, 71 - 64);
    world.settle();
    world.step(Queues::serve_waiters);
    // The first in line has been let in, and the next found no room again.
    assert_eq!(world.fabric.next, 8);
    assert_eq!(world.ask(9), None);
    world.end();
}

#[test]
fn controllers_of_one_host_that_come_together_do_not_push_each_other_out() {
    let mut world = World::new();
    let name = |text: &str| text.parse::<nvme::Nqn>().unwrap();
    let nqn = name("nqn.2026-11.io.nvmfd:queues");
    world.registry.publish(Arc::new(Subsystem {
        nqn,
        serial: Text::lossy("S"),
        model: Text::lossy("M"),
        allow_any_host: true,
        hosts: Default::default(),
        offer: Arc::default(),
        namespaces: Vec::new(),
        usage: Arc::default(),
    }));
    let data = ConnectData::new([1; 16], CNTLID_DYNAMIC, &nqn, &name("nqn.2026-11.host:h"));
    let at = |last| IpAddr::from([192, 0, 2, last]);
    let visit = Visit {
        local: SocketAddr::new(at(250), 4420),
        source: at(1),
        limits: LIMITS,
        now: world.now,
    };
    for _ in 0..2 {
        let admission = world.registry.connect_admin(&data, &visit).unwrap();
        admission.association.grant_queues(4);
    }
    // More than half of the receives, before the first Connect: a flood would have to make room.
    for number in 0..6 {
        assert_eq!(world.ask(1), Some(Qp(number)));
    }
    assert_eq!(world.settle(), [0; 0]);
    assert_eq!(world.ask(1), Some(Qp(6)), "and three quarters are the end");
    assert_eq!(world.settle(), [0]);
    world.end();
}
