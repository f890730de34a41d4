//! The reactor: one pinned thread with a ring, a fabric, a pool and its queue pairs
//! (`poll_group/mod.rs` is the part without the thread).
//!
//! One iteration: reap the ring, poll the fabric, step the queues, serve commands that wait for
//! buffers, flush the fabric and submit to the ring. When idle it spins for a budget, then sleeps
//! in the ring: device completions, the fabric's descriptor, messages and the next deadline all end
//! that sleep.
//!
//! An iteration completes no more commands than the fabric sends at once. So the host can continue
//! while the rest is processed, and events that occur meanwhile fill the next transmission.

pub(crate) mod fabric;

use std::collections::VecDeque;
use std::io;
use std::mem::take;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rdma::{AdaptivePoller, Event, Fabric, FabricError, Pool, PoolPlan, Region, SpinBudget, Wake};
use tracing::warn;

use crate::blockdev::uring::{Ring, RingLimits};
use crate::blockdev::{DeviceId, IoCompletion, IoEngine};
use crate::core::controller::Limits;
use crate::core::message::{Mailbox, Message};
use crate::core::poll_group::{PollGroup, Resources};
use crate::core::shared::Shared;
use crate::core::stats::PollStats;
use crate::core::stats::histogram::bump;

/// Fabric events per iteration.
const BATCH: usize = 256;

const FABRIC: u32 = 0;
const MAIL: u32 = 1;

/// Parts of a reactor besides its thread.
pub(crate) struct Parts {
    /// Its index among the reactors.
    pub index: usize,
    /// Its buffers.
    pub pool: Pool,
    /// Its connections.
    pub fabric: Box<dyn Fabric>,
    /// Its messages.
    pub mailbox: Mailbox,
    /// State shared with the others.
    pub shared: Arc<Shared>,
    /// Receives addresses of lost listeners, whose device was removed.
    pub on_lost_address: Box<dyn Fn(SocketAddr) + Send>,
    /// Limits that are reported to hosts.
    pub limits: Limits,
    /// How long it spins before it sleeps.
    pub spin: SpinBudget,
    /// What executes device I/O.
    pub io_engine: IoEngine,
    /// Its counters.
    pub stats: Arc<PollStats>,
}

/// The reactor, on its own thread.
pub(crate) struct Reactor {
    parts: Parts,
    ring: Ring,
    queues: PollGroup,
    events: Vec<Event>,
    reaped: Vec<IoCompletion>,
    /// Completions that were reaped, and not yet handled.
    done: VecDeque<IoCompletion>,
    /// Completions are left from the last iteration.
    left: bool,
    woken: Vec<u32>,
}

/// Maps the pool of a reactor.
pub(crate) fn map_pool(plan: PoolPlan) -> Result<Pool, FabricError> {
    Pool::new(plan).map_err(|error| {
        let mib = plan.total_bytes() as f64 / f64::from(1 << 20);
        FabricError(format!(
            "no memory for the pool of a reactor, {mib:.1} MiB: {error}; lower `data` or \
             `receives` in [memory], or raise the limit of virtual memory (ulimit -v; systemd: \
             LimitAS=infinity)"
        ))
    })
}

/// Creates the ring of a reactor.
pub(crate) fn make_ring(
    region: Arc<Region>,
    limits: RingLimits,
    engine: IoEngine,
) -> io::Result<Ring> {
    let denied = [io::ErrorKind::PermissionDenied, io::ErrorKind::Unsupported];
    Ring::new(region, limits, engine).map_err(|error| match denied.contains(&error.kind()) {
        true => io::Error::new(
            error.kind(),
            format!("{error}, or write io_engine = \"auto\" in [reactor]"),
        ),
        false => error,
    })
}

impl Reactor {
    /// Creates the ring; must run on the reactor's thread.
    ///
    /// # Errors
    /// The ring cannot be created; the text contains a remedy.
    pub(crate) fn new(parts: Parts) -> io::Result<Reactor> {
        // A slot has at most one device operation in flight, and there is a cell for each slot.
        let ops = parts.pool.plan().cells;
        let limits = RingLimits { ops, backings: DeviceId::COUNT };
        let ring = make_ring(parts.pool.region().clone(), limits, parts.io_engine)?;
        Ok(Reactor {
            ring,
            queues: PollGroup::new(parts.index, parts.limits, Instant::now()),
            events: Vec::with_capacity(BATCH),
            reaped: Vec::with_capacity(ops as usize),
            done: VecDeque::with_capacity(ops as usize),
            left: false,
            woken: Vec::with_capacity(8),
            parts,
        })
    }

    /// Runs until it is stopped and all operations have completed.
    pub(crate) fn run(mut self) {
        let mut spinner = AdaptivePoller::new(self.parts.spin, Instant::now());
        // The last iteration, if it was busy: it ends where the next begins.
        let mut worked: Option<Instant> = None;
        while !(self.queues.is_stopping() && self.is_idle()) {
            let now = Instant::now();
            if let Some(began) = worked.take() {
                bump(&self.parts.stats.busy_ns, (now - began).as_nanos() as u64);
            }
            if self.turn(now) {
                spinner.worked(now);
                worked = Some(now);
            } else if spinner.goes_on(now, self.ring.in_flight() > 0) {
                bump(&self.parts.stats.idle_iterations, 1);
                std::hint::spin_loop();
            } else {
                self.sleep(now);
            }
        }
        if !self.parts.pool.is_full() {
            warn!(free = ?self.parts.pool.free(), "buffer leak at shutdown (bug)");
        }
    }

    /// One iteration; true if it was busy.
    fn turn(&mut self, now: Instant) -> bool {
        bump(&self.parts.stats.iterations, 1);
        self.ring.watch(self.parts.mailbox.fd(), MAIL);
        self.ring.reap(&mut self.reaped, &mut self.woken);
        if self.events.is_empty() {
            self.parts.fabric.poll(now, &mut self.events);
        }
        // A short batch waits once for requests that hosts have just sent.
        let wait = take(&mut self.left) && self.reaped.is_empty() && !self.events.is_empty();
        self.done.extend(self.reaped.drain(..));
        let nothing = self.done.is_empty() && self.woken.is_empty() && self.events.is_empty();
        let mut worked = !nothing || self.parts.fabric.hints().receiving;
        worked |= self.handle_fabric_events(now);
        if !wait {
            self.handle_completions(now);
        }
        // After the events: those of a queue pair precede its messages.
        if self.woken.contains(&MAIL) {
            self.read_mail(now);
        }
        self.woken.clear();
        if worked {
            let (queues, mut lent) = self.split(now);
            queues.serve_waiters(&mut lent);
        }
        self.queues.lost_listeners.drain(..).for_each(&self.parts.on_lost_address);
        self.parts.fabric.flush();
        self.ring.submit();
        self.parts.stats.queues.store(self.queues.count() as u64, Ordering::Relaxed);
        worked
    }

    /// Passes events of the fabric to the queues; true if a timer has expired.
    fn handle_fabric_events(&mut self, now: Instant) -> bool {
        let mut events = take(&mut self.events);
        let (queues, mut lent) = self.split(now);
        queues.on_events(&mut events, &mut lent);
        let begun = queues.tick(&mut lent);
        self.events = events;
        begun
    }

    /// Passes completions of devices to the queues, until the batch to send is full.
    fn handle_completions(&mut self, now: Instant) {
        let mut done = take(&mut self.done);
        let (queues, mut lent) = self.split(now);
        queues.on_disks(&mut done, &mut lent);
        (self.left, self.done) = (!done.is_empty(), done);
    }

    fn sleep(&mut self, now: Instant) {
        let Some(until) = self.prepare_sleep(now) else { return };
        self.ring.watch(self.parts.fabric.fd(), FABRIC);
        self.parts.stats.sleeps.fetch_add(1, Ordering::Relaxed);
        self.ring.sleep(Some(until), now);
    }

    /// Deadline of the sleep; `None` if there are new events.
    fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        // A command may wait for a push or a response to complete; otherwise completions of sends
        // are reaped later.
        let needed = self.queues.nobody_waits() && !self.queues.is_stopping();
        let wake = if needed { Wake::Needed } else { Wake::Any };
        if needed && self.parts.fabric.hints().sends_deferred {
            self.queues.before_sleep(now);
        }
        self.parts.fabric.arm(wake);
        // Events that occurred since `arm` would not wake the reactor.
        self.parts.fabric.poll(now, &mut self.events);
        if !self.events.is_empty() {
            return None;
        }
        let tick = self.queues.next_tick();
        // Computed after the poll, which may have set an earlier deadline.
        Some(self.parts.fabric.deadline().map_or(tick, |deadline| deadline.min(tick)))
    }

    fn read_mail(&mut self, now: Instant) {
        self.parts.mailbox.hush();
        while let Some(message) = self.parts.mailbox.take() {
            let (queues, mut lent) = self.split(now);
            let Some(message) = queues.on_message(message, &mut lent) else { continue };
            match message {
                Message::Attach(id, backing, answer) => {
                    let _ = answer.send(self.ring.attach(id, backing));
                }
                Message::Detach(id) => self.ring.detach(id),
                Message::Caught(answer) => drop(answer.send(())),
                Message::Listen(at, answer) => {
                    let _ = answer.send(self.parts.fabric.listen(at));
                }
                Message::Unlisten(at) => self.parts.fabric.unlisten(at),
                // These messages are for the queues.
                Message::Incoming(_)
                | Message::Subsystem(..)
                | Message::DiscoveryChanged
                | Message::Answer(_)
                | Message::Fence(_)
                | Message::Errand(_)
                | Message::InFlight(_)
                | Message::Authenticated { .. }
                | Message::Stop => {}
            }
        }
        // A notification may come without a message: check shared state.
        let (queues, mut lent) = self.split(now);
        queues.look(&mut lent);
    }

    fn is_idle(&self) -> bool {
        self.queues.count() == 0 && self.ring.in_flight() == 0
    }

    fn split(&mut self, now: Instant) -> (&mut PollGroup, Resources<'_>) {
        let lent = Resources {
            pool: &mut self.parts.pool,
            fabric: &mut *self.parts.fabric,
            disk: &mut self.ring,
            shared: &self.parts.shared,
            now,
        };
        (&mut self.queues, lent)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::net::SocketAddr;
    use std::sync::Mutex;
    use std::time::{Duration, SystemTime};

    use nvme::cm;
    use rdma::{
        Completion, FabricError, Fault, Incoming, PoolPlan, Qp, QpLimits, Reason, Tag, Work,
    };

    use crate::core::message::{PlacedRequest, Sender, mailbox};
    use crate::core::registry::Registry;
    use crate::core::sched::ReactorLoads;
    use crate::reactor::*;
    use crate::worker::Workers;

    /// Events that a fabric reports, and requests that it received. All its queue pairs have the
    /// same handle, one after the other, which the contract permits.
    #[derive(Default)]
    struct Script {
        posted: VecDeque<(Tag, Work)>,
        opened: u32,
        /// The deadline that the next poll sets.
        next_deadline: Option<Instant>,
        deadline: Option<Instant>,
        /// Wake condition of the last sleep.
        wake: Option<Wake>,
        /// Whether the batch is full, for each call; afterwards: no.
        batch_full: VecDeque<bool>,
    }

    struct Scripted(Arc<Mutex<Script>>);

    impl Fabric for Scripted {
        fn listen(&mut self, _: SocketAddr) -> Result<(), FabricError> {
            Ok(())
        }
        fn unlisten(&mut self, _: SocketAddr) {}
        fn open(&mut self, _: Incoming, _: QpLimits) -> Result<Qp, FabricError> {
            self.0.lock().unwrap().opened += 1;
            Ok(Qp(0))
        }
        fn accept(&mut self, _: Qp, _: &[u8]) {}
        fn reject(&mut self, _: Incoming, _: &[u8]) {}
        fn disconnect(&mut self, _: Qp) {}
        fn post(&mut self, _: Qp, tag: Tag, work: Work) {
            self.0.lock().unwrap().posted.push_back((tag, work));
        }
        fn flush(&mut self) {}
        fn is_batch_full(&self) -> bool {
            self.0.lock().unwrap().batch_full.pop_front().unwrap_or(false)
        }
        fn poll(&mut self, _: Instant, _: &mut Vec<Event>) {
            let mut script = self.0.lock().unwrap();
            script.deadline = script.next_deadline;
        }
        fn arm(&mut self, wake: Wake) -> Option<Instant> {
            self.0.lock().unwrap().wake = Some(wake);
            self.deadline()
        }
        fn deadline(&self) -> Option<Instant> {
            self.0.lock().unwrap().deadline
        }
        fn fd(&self) -> i32 {
            -1
        }
    }

    fn reactor() -> (Reactor, Sender, Arc<Mutex<Script>>) {
        let (sender, mailbox) = mailbox().unwrap();
        let script = Arc::new(Mutex::new(Script::default()));
        let plan = PoolPlan {
            cells: 512,
            receives: 256,
            lead_bytes: 64,
            tail_bytes: 4096,
            data_bytes: 1 << 19,
            largest_bytes: 1 << 16,
        };
        let limits =
            Limits { queue_depth: 16, io_queues: 4, in_capsule_bytes: 4096, mdts_bytes: 1 << 16 };
        let registry = Arc::new(Registry::new(vec![sender.clone()], 8, 70));
        let parts = Parts {
            index: 0,
            pool: Pool::new(plan).unwrap(),
            fabric: Box::new(Scripted(Arc::clone(&script))),
            mailbox,
            shared: Arc::new(Shared::new(registry, Workers::default(), SystemTime::now)),
            on_lost_address: Box::new(drop),
            limits,
            spin: SpinBudget::default(),
            io_engine: IoEngine::IoUring,
            stats: Arc::default(),
        };
        (Reactor::new(parts).unwrap(), sender, script)
    }

    fn incoming() -> Incoming {
        let request = cm::Request { qid: 0, hrqsize: 32, hsqsize_z: 31, ..cm::Request::default() };
        let at: SocketAddr = "192.0.2.1:4420".parse().unwrap();
        Incoming::detached(at, at, request.emit().to_vec(), 16, Box::new(()))
    }

    /// The events of a queue pair that ends.
    fn end(script: &Mutex<Script>) -> Vec<Event> {
        let home = |(tag, work)| {
            let (qp, outcome) = (Qp(0), Err(Fault::Flushed));
            Event::Done(Completion::new(qp, tag, work, outcome))
        };
        let done = script.lock().unwrap().posted.drain(..).map(home).collect::<Vec<_>>();
        done.into_iter().chain([Event::Gone(Qp(0), Reason::Peer)]).collect()
    }

    #[test]
    fn a_reactor_sleeps_until_the_earliest_deadline() {
        let (mut reactor, _sender, script) = reactor();
        let now = Instant::now();
        let tick = reactor.queues.next_tick();
        assert_eq!(reactor.prepare_sleep(now), Some(tick), "no deadline");
        let due = now + Duration::from_millis(3);
        script.lock().unwrap().next_deadline = Some(due);
        assert_eq!(reactor.prepare_sleep(now), Some(due), "not there yet when it was armed");
        script.lock().unwrap().next_deadline = Some(tick + Duration::from_secs(1));
        assert_eq!(reactor.prepare_sleep(now), Some(tick), "the queues have one as well");
    }

    /// The handle of a removed queue pair is reused for a request in a message. Events of the old
    /// queue pair must not be applied to the new one.
    #[test]
    fn fabric_events_are_handled_before_messages() {
        let (mut reactor, sender, script) = reactor();
        let now = Instant::now();
        reactor.events.push(Event::Incoming(incoming()));
        reactor.turn(now);
        assert_eq!((reactor.queues.count(), script.lock().unwrap().opened), (1, 1));

        let place = ReactorLoads::new(1).place(32);
        assert!(sender.send(Message::Incoming(PlacedRequest { incoming: incoming(), place })));
        reactor.events = end(&script);
        reactor.woken.push(MAIL);
        reactor.turn(now);
        assert_eq!((reactor.queues.count(), script.lock().unwrap().opened), (1, 2));

        reactor.events = end(&script);
        reactor.turn(now);
        assert_eq!((reactor.queues.count(), reactor.parts.pool.is_full()), (0, true));
    }

    #[test]
    fn a_lost_listener_is_reported_once() {
        let (mut reactor, ..) = reactor();
        let (lost, reported) = std::sync::mpsc::channel();
        reactor.parts.on_lost_address = Box::new(move |at| lost.send(at).unwrap());
        let (now, at) = (Instant::now(), incoming().local);
        reactor.events.push(Event::ListenerLost(at));
        reactor.turn(now);
        reactor.turn(now);
        assert_eq!(reported.try_iter().collect::<Vec<_>>(), [at]);
    }

    /// A slot is free again when its response has completed. A command that waits for a slot must
    /// not wait for the next timer check.
    #[test]
    fn a_capsule_that_waits_for_a_slot_is_woken_by_responses() {
        let (mut reactor, _sender, script) = reactor();
        let now = Instant::now();
        let wake = |reactor: &mut Reactor| {
            reactor.prepare_sleep(now);
            script.lock().unwrap().wake.take().unwrap()
        };
        reactor.events.push(Event::Incoming(incoming()));
        reactor.turn(now);
        let take = |receives: bool| {
            let mut script = script.lock().unwrap();
            let is_wanted = |(_, work): &(Tag, Work)| matches!(work, Work::Recv(_)) == receives;
            let at = script.posted.iter().position(is_wanted)?;
            script.posted.remove(at)
        };
        // Without a Connect each capsule is rejected; the responses have not completed.
        let mut cid = 0u16;
        while wake(&mut reactor) == Wake::Needed {
            let (tag, work) = take(true).expect("a receive is posted again with each response");
            let mut buf = work.into_buf();
            let sqe = nvme::Sqe::admin(nvme::AdminOpcode::IDENTIFY).with_cid(cid);
            reactor.parts.pool.bytes_mut(&mut buf)[..64].copy_from_slice(&sqe.emit());
            let (work, outcome) = (Work::Recv(buf), Ok(64));
            let done = Completion::new(Qp(0), tag, work, outcome);
            reactor.events.push(Event::Done(done));
            reactor.turn(now);
            cid += 1;
        }
        assert_eq!(cid, 32 * 2 + 1, "there are two slots for each receive");
        let (tag, work) = take(false).unwrap();
        let done = Completion::new(Qp(0), tag, work, Ok(16));
        reactor.events.push(Event::Done(done));
        reactor.turn(now);
        assert_eq!(wake(&mut reactor), Wake::Needed, "nobody waits any more");
        reactor.events = end(&script);
        reactor.turn(now);
        assert!(reactor.parts.pool.is_full());
    }

    /// Completions that exceed one iteration are first in the next one, or in the one after that if
    /// there were events of hosts: never later.
    #[test]
    fn an_iteration_completes_commands_until_the_send_batch_is_full() {
        let (mut reactor, _sender, script) = reactor();
        let now = Instant::now();
        let left = |reactor: &Reactor| reactor.done.iter().map(|done| done.tag).collect::<Vec<_>>();
        // Of no queue, like those of a removed queue pair.
        let done = |tag| IoCompletion { tag, buf: None, outcome: Ok(()) };
        reactor.reaped.extend([1, 2, 3, 4].map(done));
        script.lock().unwrap().batch_full.extend([false, false, true]);
        assert!(reactor.turn(now));
        assert_eq!(left(&reactor), [3, 4]);

        script.lock().unwrap().batch_full.extend([false, true]);
        assert!(reactor.turn(now));
        assert_eq!(left(&reactor), [4], "nobody has said anything: no reason to wait");

        for waits in [vec![4], vec![]] {
            reactor.events.push(Event::Established(Qp(9)));
            assert!(reactor.turn(now));
            assert_eq!(left(&reactor), waits);
        }
        assert!(!reactor.turn(now));
    }
}
