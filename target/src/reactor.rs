//! The reactor: one pinned thread that owns a ring, a fabric, a pool and the queues placed on it.
//!
//! One turn: reap the ring, poll the fabric, step the queues, serve who waits for buffers, flush
//! the fabric and submit to the ring. When nothing happened it spins for a budget, then sleeps in
//! the ring: disk completions, the fabric's descriptor, the mailbox and the next deadline all end
//! that sleep.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nvme::cm;
use rdma::{Event, Fabric, Pool, Qp, Reason, Wake};
use tracing::{debug, warn};

use crate::controller::Limits;
use crate::disk::Done;
use crate::mailbox::{Mail, Mailbox};
use crate::queue::{Io, Queue};
use crate::registry::Registry;
use crate::ring::{Ring, RingLimits};
use crate::spin::Spinner;
use crate::waiters::Waiters;

/// How often queues look at the clock.
const TICK: Duration = Duration::from_millis(250);

/// Fabric events taken in one turn.
const BATCH: usize = 256;

/// Backing stores that a ring can name: 1,024 subsystems, or one with 1,024 namespaces, and as
/// many again while a reload replaces them.
pub const BACKINGS: u32 = 4096;

const FABRIC: u32 = 0;
const MAIL: u32 = 1;

/// What a reactor counts, for everyone to read.
#[derive(Debug, Default)]
pub struct Stats {
    /// Turns of the loop: it lives as long as this grows.
    pub turns: AtomicU64,
    /// Its thread has ended.
    pub ended: AtomicBool,
    /// Times it slept.
    pub sleeps: AtomicU64,
    /// Queue pairs it serves.
    pub queues: AtomicU64,
}

/// What a reactor is made of besides its thread.
pub struct Parts {
    /// Its index among the reactors.
    pub index: usize,
    /// Its buffers.
    pub pool: Pool,
    /// Its connections.
    pub fabric: Box<dyn Fabric>,
    /// Its letters.
    pub mailbox: Mailbox,
    /// The shared book.
    pub registry: Arc<Registry>,
    /// What it promises to hosts.
    pub limits: Limits,
    /// How long it spins before it sleeps.
    pub spin: Duration,
    /// What it counts.
    pub stats: Arc<Stats>,
}

/// The reactor, on its own thread.
pub struct Reactor {
    parts: Parts,
    ring: Ring,
    queues: Vec<Option<Queue>>,
    /// Key of the queue on each queue pair.
    by_qp: Vec<Option<u32>>,
    waiters: Waiters,
    events: Vec<Event>,
    done: Vec<Done>,
    woken: Vec<u32>,
    next_tick: Instant,
    stopping: bool,
}

impl Reactor {
    /// Makes the ring; must run on the reactor's thread.
    ///
    /// # Errors
    /// No ring to be had; the text says what to do.
    pub fn new(parts: Parts) -> io::Result<Reactor> {
        // A slot has at most one disk operation under way, and there is a cell for each slot.
        let ops = parts.pool.plan().cells;
        let ring = Ring::new(parts.pool.region().clone(), RingLimits { ops, backings: BACKINGS })?;
        Ok(Reactor {
            ring,
            queues: Vec::new(),
            by_qp: Vec::new(),
            waiters: Waiters::default(),
            events: Vec::with_capacity(BATCH),
            done: Vec::with_capacity(ops as usize),
            woken: Vec::with_capacity(8),
            next_tick: Instant::now() + TICK,
            stopping: false,
            parts,
        })
    }

    /// Turns until told to stop and everything is home.
    pub fn run(mut self) {
        let mut spinner = Spinner::new(self.parts.spin, Instant::now());
        while !(self.stopping && self.is_idle()) {
            let now = Instant::now();
            if self.turn(now) {
                spinner.worked(now);
            } else if spinner.goes_on(now) {
                std::hint::spin_loop();
            } else {
                self.sleep(now);
            }
        }
        if !self.parts.pool.is_full() {
            warn!(free = ?self.parts.pool.free(), "buffers are missing at the end: please report");
        }
    }

    /// One turn; true when anything happened.
    fn turn(&mut self, now: Instant) -> bool {
        let turns = &self.parts.stats.turns;
        turns.store(turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.ring.watch(self.parts.mailbox.fd(), MAIL);
        self.ring.reap(&mut self.done, &mut self.woken);
        if self.events.is_empty() {
            self.parts.fabric.poll(now, &mut self.events);
        }
        let mut worked = !(self.done.is_empty() && self.woken.is_empty());
        worked |= !self.events.is_empty();
        if self.woken.contains(&MAIL) {
            self.read_mail(now);
        }
        self.woken.clear();
        self.on_fabric(now);
        self.on_disk(now);
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            self.for_each_queue(now, |queue, io| queue.tick(io));
        }
        if worked {
            self.serve_waiters(now);
        }
        self.parts.fabric.flush();
        self.ring.submit();
        worked
    }

    fn sleep(&mut self, now: Instant) {
        // Somebody may wait for the buffers of a push; otherwise what was sent is reaped later.
        let needed = self.waiters.is_empty() && !self.stopping;
        let wake = if needed { Wake::Needed } else { Wake::Any };
        let deadline = self.parts.fabric.arm(wake);
        // What came in between arming and here would not wake us.
        self.parts.fabric.poll(now, &mut self.events);
        if !self.events.is_empty() {
            return;
        }
        self.ring.watch(self.parts.fabric.fd(), FABRIC);
        let until = deadline.map_or(self.next_tick, |d| d.min(self.next_tick));
        self.parts.stats.sleeps.fetch_add(1, Ordering::Relaxed);
        self.ring.sleep(Some(until), now);
    }

    fn on_disk(&mut self, now: Instant) {
        let mut batch = std::mem::take(&mut self.done);
        for done in batch.drain(..) {
            let (key, slot) = ((done.tag >> 32) as u32, done.tag as u16);
            let Some((queue, mut io)) = self.queue(key, now) else { continue };
            queue.on_disk(slot, done, &mut io);
            self.reap_queue(key, now);
        }
        self.done = batch;
    }

    fn on_fabric(&mut self, now: Instant) {
        let mut batch = std::mem::take(&mut self.events);
        for event in batch.drain(..) {
            match event {
                Event::Done(done) => match self.key(done.qp) {
                    Some(key) => {
                        if let Some((queue, mut io)) = self.queue(key, now) {
                            queue.on_completion(done, &mut io);
                        }
                    }
                    None => self.parts.pool.give(done.work.into_buf()),
                },
                Event::Incoming(incoming) => self.place(incoming, now),
                Event::Established(qp) => debug!(qp = qp.0, "connection established"),
                Event::Gone(qp, reason) => self.on_gone(qp, reason, now),
            }
        }
        self.events = batch;
    }

    /// Serves a connection request here or hands it to the reactor with the fewest queues.
    fn place(&mut self, incoming: rdma::Incoming, now: Instant) {
        let index = self.parts.registry.place();
        if index == self.parts.index {
            self.open(incoming, now);
        } else if let Err(mail) =
            self.parts.registry.reactor(index).try_send(Mail::Incoming(incoming))
        {
            warn!("a reactor's mailbox is full: connection request rejected");
            drop(mail);
        }
    }

    fn open(&mut self, incoming: rdma::Incoming, now: Instant) {
        if self.stopping {
            return self.parts.fabric.reject(incoming, &[]);
        }
        if self.is_flooded_by(incoming.remote.ip()) {
            warn!(remote = %incoming.remote, "too many connections without a Connect: rejected");
            let reject = cm::Reject::new(cm::RejectStatus::NO_RESOURCES);
            return self.parts.fabric.reject(incoming, &reject.emit());
        }
        let vacant = self.queues.iter().position(Option::is_none);
        let at = vacant.unwrap_or(self.queues.len());
        let limits = self.parts.limits;
        let (_, mut io) = self.split(now);
        let Some(queue) = Queue::open(at as u32, incoming, limits, &mut io) else { return };
        let (qp, depth) = (queue.qp().0 as usize, queue.depth());
        if self.by_qp.len() <= qp {
            self.by_qp.resize(qp + 1, None);
        }
        self.by_qp[qp] = Some(at as u32);
        match vacant {
            Some(at) => self.queues[at] = Some(queue),
            None => self.queues.push(Some(queue)),
        }
        self.parts.registry.count_queue(self.parts.index, depth, true);
        self.parts.stats.queues.fetch_add(1, Ordering::Relaxed);
    }

    fn on_gone(&mut self, qp: Qp, reason: Reason, now: Instant) {
        let Some(key) = self.by_qp.get_mut(qp.0 as usize).and_then(Option::take) else { return };
        if let Some((queue, mut io)) = self.queue(key, now) {
            queue.on_gone(reason, &mut io);
        }
        self.reap_queue(key, now);
    }

    /// Removes a queue of which nothing is left.
    fn reap_queue(&mut self, key: u32, now: Instant) {
        let Some(entry) = self.queues.get_mut(key as usize) else { return };
        if let Some(queue) = entry.take_if(|queue| queue.is_finished()) {
            let depth = queue.depth();
            let (_, mut io) = self.split(now);
            queue.finish(&mut io);
            self.parts.registry.count_queue(self.parts.index, depth, false);
            self.parts.stats.queues.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Gives buffers to those who wait, admin commands first, each line in order.
    fn serve_waiters(&mut self, now: Instant) {
        for admin in [true, false] {
            while let Some((key, slot)) = self.waiters.first(admin) {
                if let Some((queue, mut io)) = self.queue(key, now)
                    && !queue.resume(slot, &mut io)
                {
                    // Admin commands first: I/O takes nothing while one of them waits.
                    return;
                }
                self.waiters.pop(admin);
            }
        }
    }

    fn read_mail(&mut self, now: Instant) {
        self.parts.mailbox.hush();
        while let Some(mail) = self.parts.mailbox.take() {
            match mail {
                Mail::Incoming(incoming) => self.open(incoming, now),
                Mail::Attach(id, backing, answer) => {
                    let _ = answer.send(self.ring.attach(id, backing));
                }
                Mail::Detach(id) => self.ring.detach(id),
                Mail::Subsystem(new) => {
                    self.for_each_queue(now, |queue, io| queue.on_subsystem(&new, io));
                }
                Mail::DiscoveryChanged => {
                    self.for_each_queue(now, |queue, io| queue.on_discovery_changed(io));
                }
                Mail::Listen(at, answer) => {
                    let _ = answer.send(self.parts.fabric.listen(at));
                }
                Mail::Unlisten(at) => self.parts.fabric.unlisten(at),
                Mail::Stop => {
                    self.stopping = true;
                    self.for_each_queue(now, |queue, io| queue.close(io));
                }
            }
        }
        // Somebody may have rung without a letter: look at what is shared.
        self.for_each_queue(now, |queue, io| queue.tick(io));
    }

    /// Anybody can hold receives until the Connect deadline without a name. So connections that
    /// have not sent their Connect may hold half of them for one address, three quarters for all.
    fn is_flooded_by(&self, source: IpAddr) -> bool {
        let half_open = self.queues.iter().flatten().filter(|queue| !queue.is_connected());
        let (mut all, mut own) = (0, 0);
        for queue in half_open {
            all += u32::from(queue.depth());
            own += if queue.source() == source { u32::from(queue.depth()) } else { 0 };
        }
        let receives = self.parts.pool.plan().receives;
        own >= receives / 2 || all >= receives / 4 * 3
    }

    fn is_idle(&self) -> bool {
        self.queues.iter().all(Option::is_none) && self.ring.in_flight() == 0
    }

    fn key(&self, qp: Qp) -> Option<u32> {
        self.by_qp.get(qp.0 as usize).copied().flatten()
    }

    fn for_each_queue(&mut self, now: Instant, mut act: impl FnMut(&mut Queue, &mut Io<'_>)) {
        let (queues, mut io) = self.split(now);
        for queue in queues.iter_mut().flatten() {
            act(queue, &mut io);
        }
    }

    fn queue(&mut self, key: u32, now: Instant) -> Option<(&mut Queue, Io<'_>)> {
        let (queues, io) = self.split(now);
        queues.get_mut(key as usize)?.as_mut().map(|queue| (queue, io))
    }

    fn split(&mut self, now: Instant) -> (&mut Vec<Option<Queue>>, Io<'_>) {
        let io = Io {
            pool: &mut self.parts.pool,
            fabric: &mut *self.parts.fabric,
            disk: &mut self.ring,
            registry: &self.parts.registry,
            waiters: &mut self.waiters,
            now,
        };
        (&mut self.queues, io)
    }
}
