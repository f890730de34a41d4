//! The queues of one reactor, and connections of many hosts that start and end.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nvme::fabrics::{Connect, ConnectData};
use nvme::{Sgl, cm};
use nvmfd::blockdev::{BlockDevice, DeviceId, IoRequest};
use nvmfd::core::controller::Limits;
use nvmfd::core::message::{Message, mailbox};
use nvmfd::core::poll_group::{PollGroup, Resources};
use nvmfd::core::registry::Registry;
use nvmfd::core::shared::Shared;
use nvmfd::worker::Workers;
use rdma::{
    Completion, Event, Fabric, FabricError, FabricHints, Fault, Incoming, Pool, PoolPlan, Qp,
    QpLimits, Reason, Tag, Wake, Work,
};

pub(crate) const LIMITS: Limits =
    Limits { queue_depth: 16, io_queues: 4, in_capsule_bytes: 4096, mdts_bytes: 1 << 16 };
/// Receives of the reactor; a queue takes 32.
const RECEIVES: u32 = 256;

/// Keeps what is posted until its queue pair has been disconnected.
#[derive(Default)]
pub(crate) struct Recorder {
    posted: BTreeMap<u32, Vec<(Tag, Work)>>,
    pub(crate) next: u32,
    pub(crate) rejected: u32,
    /// It has no queue pairs, and says so.
    pub(crate) is_full: bool,
    /// Connections have had their share of its time.
    pub(crate) is_busy: bool,
    /// It has so many queue pairs.
    pub(crate) queue_pairs: Option<u32>,
    /// How often it was asked for its hints: once whenever all connections are counted.
    pub(crate) counted: Cell<u32>,
    /// Owner of each queue pair.
    pub(crate) hosts: Vec<IpAddr>,
    ending: Vec<Qp>,
}

impl Fabric for Recorder {
    fn listen(&mut self, _: SocketAddr) -> Result<(), FabricError> {
        Ok(())
    }
    fn unlisten(&mut self, _: SocketAddr) {}
    fn open(&mut self, incoming: Incoming, _: QpLimits) -> Result<Qp, FabricError> {
        let all_used = self.queue_pairs.is_some_and(|most| self.posted.len() >= most as usize);
        if self.is_full || all_used {
            return Err(FabricError("the device has no queue pairs left".to_owned()));
        }
        self.hosts.push(incoming.remote.ip());
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
    fn hints(&self) -> FabricHints {
        self.counted.set(self.counted.get() + 1);
        FabricHints {
            queue_pairs_max: self.queue_pairs.unwrap_or(u32::MAX),
            connections_exhausted: self.is_busy,
            ..FabricHints::default()
        }
    }
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

impl BlockDevice for NoDisk {
    fn submit(&mut self, _: DeviceId, _: Tag, _: IoRequest) {
        panic!("a disk operation without a Connect")
    }

    fn recall(&mut self, _: Tag, _: Tag) {
        panic!("a disk operation without a Connect")
    }
}

pub(crate) struct World {
    pub(crate) pool: Pool,
    pub(crate) fabric: Recorder,
    pub(crate) registry: Arc<Registry>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) queues: PollGroup,
    pub(crate) now: Instant,
    /// Hosts confirm their connections at once.
    pub(crate) confirms: bool,
}

impl World {
    pub(crate) fn new() -> World {
        World::with(RECEIVES)
    }

    /// With so many receives.
    pub(crate) fn with(receives: u32) -> World {
        World::sized(receives, 8, 70, LIMITS)
    }

    /// With so many receives, for so many controllers, whose I/O queues may have that many receives.
    pub(crate) fn sized(receives: u32, controllers: u16, for_io: u32, limits: Limits) -> World {
        let now = Instant::now();
        let plan = PoolPlan {
            cells: 4 * receives,
            receives,
            lead_bytes: 64,
            tail_bytes: 4096,
            data_bytes: 1 << 16,
            largest_bytes: 1 << 16,
        };
        let registry = Arc::new(Registry::new(vec![mailbox().unwrap().0], controllers, for_io));
        let shared = Arc::new(Shared::new(registry, Workers::default(), SystemTime::now));
        World {
            pool: Pool::new(plan).unwrap(),
            fabric: Recorder::default(),
            registry: Arc::clone(&shared.registry),
            shared,
            queues: PollGroup::new(0, limits, now),
            now,
            confirms: true,
        }
    }

    pub(crate) fn step(&mut self, step: impl FnOnce(&mut PollGroup, &mut Resources<'_>)) {
        let mut lent = Resources {
            pool: &mut self.pool,
            fabric: &mut self.fabric,
            disk: &mut NoDisk,
            shared: &self.shared,
            now: self.now,
        };
        step(&mut self.queues, &mut lent);
    }

    /// An address asks for a connection: the queue pair that it gets.
    pub(crate) fn ask(&mut self, source: u8) -> Option<Qp> {
        let request = cm::Request { hrqsize: 32, hsqsize_z: 31, ..cm::Request::default() };
        self.ask_for(source, request, 16)
    }

    /// The host of a connection sends Connect for an admin queue, its data in the capsule. Whether
    /// the target has let it in.
    pub(crate) fn connect(&mut self, qp: Qp, data: &ConnectData, kato_ms: u32) -> bool {
        let before = self.registry.associations();
        self.send(qp, Connect { sqsize_z: 1, kato_ms, ..Connect::default() }, data);
        self.registry.associations() > before
    }

    /// The host of a connection sends Connect for an I/O queue.
    pub(crate) fn connect_io(&mut self, qp: Qp, qid: u16, data: &ConnectData) {
        self.send(qp, Connect { qid, sqsize_z: 1, ..Connect::default() }, data);
    }

    fn send(&mut self, qp: Qp, connect: Connect, data: &ConnectData) {
        let mut capsule =
            connect.emit(Sgl::in_capsule(0, ConnectData::BYTES as u32)).emit().to_vec();
        capsule.extend_from_slice(&data.emit());
        self.deliver(qp, &capsule);
    }

    /// A capsule of a host arrives, with the events of an iteration; number of responses to it.
    pub(crate) fn deliver(&mut self, qp: Qp, capsule: &[u8]) -> usize {
        let responses = |world: &World| {
            let posted = world.fabric.posted.get(&qp.0).map_or(&[][..], Vec::as_slice);
            posted.iter().filter(|(_, work)| matches!(work, Work::Send { .. })).count()
        };
        let before = responses(self);
        let posted = self.fabric.posted.get_mut(&qp.0).unwrap();
        let at = posted.iter().position(|(_, work)| matches!(work, Work::Recv(_))).unwrap();
        let (tag, work) = posted.remove(at);
        let mut buf = work.into_buf();
        self.pool.bytes_mut(&mut buf)[..capsule.len()].copy_from_slice(capsule);
        let (work, outcome) = (Work::Recv(buf), Ok(capsule.len() as u32));
        let mut events = vec![Event::Done(Completion::new(qp, tag, work, outcome))];
        self.step(|queues, lent| queues.on_events(&mut events, lent));
        responses(self) - before
    }

    /// The same, with any request, of a host that answers so many reads.
    pub(crate) fn ask_for(&mut self, source: u8, request: cm::Request, reads: u8) -> Option<Qp> {
        self.ask_from([192, 0, 2, source].into(), request, reads)
    }

    /// The same, of any address.
    pub(crate) fn ask_from(
        &mut self,
        source: IpAddr,
        request: cm::Request,
        reads: u8,
    ) -> Option<Qp> {
        self.now += Duration::from_millis(1);
        let before = self.fabric.next;
        let local = SocketAddr::from(([192, 0, 2, 250], 4420));
        let (remote, private) = (SocketAddr::new(source, 4420), request.emit().to_vec());
        let incoming = Incoming::detached(local, remote, private, reads, Box::new(()));
        self.step(|queues, lent| queues.on_event(Event::Incoming(incoming), lent));
        let qp = (self.fabric.next > before).then_some(Qp(before))?;
        if self.confirms {
            self.confirm(qp);
        }
        Some(qp)
    }

    /// The host of a connection confirms it.
    pub(crate) fn confirm(&mut self, qp: Qp) {
        self.step(|queues, lent| queues.on_event(Event::Established(qp), lent));
    }

    /// The host of a connection leaves.
    pub(crate) fn leave(&mut self, qp: Qp) {
        self.fabric.ending.push(qp);
        self.settle();
    }

    /// Completes all work of the disconnected queue pairs; returns these.
    pub(crate) fn settle(&mut self) -> Vec<u32> {
        let ending = std::mem::take(&mut self.fabric.ending);
        for qp in ending.clone() {
            for (tag, work) in self.fabric.posted.remove(&qp.0).unwrap_or_default() {
                let outcome = Err(Fault::Flushed);
                let done = Completion::new(qp, tag, work, outcome);
                self.step(|queues, lent| queues.on_event(Event::Done(done), lent));
            }
            let gone = Event::Gone(qp, Reason::Local);
            self.step(|queues, lent| queues.on_event(gone, lent));
        }
        ending.iter().map(|qp| qp.0).collect()
    }

    pub(crate) fn end(mut self) {
        self.step(|queues, lent| drop(queues.on_message(Message::Stop, lent)));
        self.settle();
        assert_eq!(self.queues.count(), 0);
        assert!(self.pool.is_full(), "{:?}", self.pool.free());
    }
}
