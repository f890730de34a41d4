//! The reactor: one pinned thread that owns a ring, a fabric, a pool and the queues placed on it
//! (`queues.rs`, which does without the thread).
//!
//! One turn: reap the ring, poll the fabric, step the queues, serve who waits for buffers, flush
//! the fabric and submit to the ring. When nothing happened it spins for a budget, then sleeps in
//! the ring: disk completions, the fabric's descriptor, the mailbox and the next deadline all end
//! that sleep.

use std::io;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdma::{Event, Fabric, Pool, Spinner, Wake};
use tracing::warn;

use crate::controller::Limits;
use crate::disk::Done;
use crate::mailbox::{Mail, Mailbox};
use crate::queues::{Lent, Queues};
use crate::registry::Registry;
use crate::ring::{Ring, RingLimits};

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
    queues: Queues,
    events: Vec<Event>,
    done: Vec<Done>,
    woken: Vec<u32>,
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
            queues: Queues::new(parts.index, parts.limits, Instant::now()),
            events: Vec::with_capacity(BATCH),
            done: Vec::with_capacity(ops as usize),
            woken: Vec::with_capacity(8),
            parts,
        })
    }

    /// Turns until told to stop and everything is home.
    pub fn run(mut self) {
        let mut spinner = Spinner::new(self.parts.spin, Instant::now());
        while !(self.queues.is_stopping() && self.is_idle()) {
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
        worked |= !self.events.is_empty() || self.parts.fabric.is_lively();
        self.step(now);
        // After the events: what they tell of a queue pair comes before what letters do with it.
        if self.woken.contains(&MAIL) {
            self.read_mail(now);
        }
        self.woken.clear();
        if worked {
            let (queues, mut lent) = self.split(now);
            queues.serve_waiters(&mut lent);
        }
        self.parts.fabric.flush();
        self.ring.submit();
        self.parts.stats.queues.store(self.queues.count() as u64, Ordering::Relaxed);
        worked
    }

    /// Steps the queues with what has come.
    fn step(&mut self, now: Instant) {
        let (mut events, mut done) = (take(&mut self.events), take(&mut self.done));
        let (queues, mut lent) = self.split(now);
        events.drain(..).for_each(|event| queues.on_event(event, &mut lent));
        done.drain(..).for_each(|done| queues.on_disk(done, &mut lent));
        queues.tick(&mut lent);
        (self.events, self.done) = (events, done);
    }

    fn sleep(&mut self, now: Instant) {
        // Somebody may wait for the buffers of a push; otherwise what was sent is reaped later.
        let needed = self.queues.nobody_waits() && !self.queues.is_stopping();
        let wake = if needed { Wake::Needed } else { Wake::Any };
        self.parts.fabric.arm(wake);
        // What came in between arming and here would not wake us.
        self.parts.fabric.poll(now, &mut self.events);
        if !self.events.is_empty() {
            return;
        }
        self.ring.watch(self.parts.fabric.fd(), FABRIC);
        let tick = self.queues.next_tick();
        // Asked for only now: the poll may have brought an earlier one.
        let until = self.parts.fabric.deadline().map_or(tick, |deadline| deadline.min(tick));
        self.parts.stats.sleeps.fetch_add(1, Ordering::Relaxed);
        self.ring.sleep(Some(until), now);
    }

    fn read_mail(&mut self, now: Instant) {
        self.parts.mailbox.hush();
        while let Some(mail) = self.parts.mailbox.take() {
            let (queues, mut lent) = self.split(now);
            let Some(mail) = queues.on_mail(mail, &mut lent) else { continue };
            match mail {
                Mail::Attach(id, backing, answer) => {
                    let _ = answer.send(self.ring.attach(id, backing));
                }
                Mail::Detach(id) => self.ring.detach(id),
                Mail::Listen(at, answer) => {
                    let _ = answer.send(self.parts.fabric.listen(at));
                }
                Mail::Unlisten(at) => self.parts.fabric.unlisten(at),
                // Those were for the queues.
                Mail::Incoming(_)
                | Mail::Subsystem(_)
                | Mail::DiscoveryChanged
                | Mail::Answer(_)
                | Mail::Fence(_)
                | Mail::Stop => {}
            }
        }
        // Somebody may have rung without a letter: look at what is shared.
        let (queues, mut lent) = self.split(now);
        queues.look(&mut lent);
    }

    fn is_idle(&self) -> bool {
        self.queues.count() == 0 && self.ring.in_flight() == 0
    }

    fn split(&mut self, now: Instant) -> (&mut Queues, Lent<'_>) {
        let lent = Lent {
            pool: &mut self.parts.pool,
            fabric: &mut *self.parts.fabric,
            disk: &mut self.ring,
            registry: &self.parts.registry,
            now,
        };
        (&mut self.queues, lent)
    }
}
