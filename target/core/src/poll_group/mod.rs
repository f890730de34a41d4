//! All queue pairs of one reactor, without its thread: dispatches completions, buffers and timers.
//!
//! The driver owns fabric, devices, pool and clock, and lends them for every step: a reactor lends real ones,
//! a simulator simulated ones.

mod half_open;
mod in_flight;
mod pending;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::vec::Drain;

use rdma::source::SourcePenalty;
use rdma::{Event, Fabric, Incoming, Pool, Qp, Reason};
use tracing::debug;

use crate::controller::Limits;
use crate::diag::cause::{Cause, DisconnectRecord};
use crate::diag::log_limiter::CauseLog;
use crate::message::{Message, PlacedRequest};
use crate::qpair::{Io, QueuePair, receives_of, room};
use crate::registry::OpenQueue;
use crate::sched::buffers::{BufferScheduler, Starved, TryAlloc};
use crate::sched::fair_queue::FairQueue;
use crate::shared::Shared;
use crate::stats::CompletionBatch;
use nvmfd_blockdev::{BlockDevice, IoCompletion};

use self::pending::DECISION_LIMIT;

/// Interval at which queues check their deadlines.
const TICK: Duration = Duration::from_millis(250);
/// Connections of one source that may end without an admitted host: more than a rejected host opens
/// for several controllers at a time, and far less than a flood.
pub const MOST_IN_VAIN: u32 = 64;

/// Resources lent by the driver for a step.
pub struct Resources<'a> {
    /// The reactor's buffers.
    pub pool: &'a mut Pool,
    /// Its connections.
    pub fabric: &'a mut dyn Fabric,
    /// Its devices.
    pub disk: &'a mut dyn BlockDevice,
    /// The registry of the target.
    pub shared: &'a Shared,
    /// The time of this turn.
    pub now: Instant,
}

/// The queues of one reactor.
#[derive(Debug)]
pub struct PollGroup {
    /// Index of this reactor.
    index: usize,
    limits: Limits,
    queues: Vec<Option<QueuePair>>,
    /// Key of the queue on each queue pair.
    by_qp: Vec<Option<u32>>,
    count: usize,
    waiters: BufferScheduler,
    run: CompletionBatch,
    refusals: CauseLog,
    /// Requests to connect that wait until connections closed for them are destroyed, and the time
    /// before which a search for room is useless, unless one is destroyed.
    deferred: FairQueue<PlacedRequest>,
    full_until: Option<Instant>,
    /// Requests through a listener that is not active yet, and how long they are held.
    pending: FairQueue<(PlacedRequest, Instant)>,
    /// Addresses at which the fabric no longer listens, for the reactor to take.
    pub lost_listeners: Vec<SocketAddr>,
    next_displacement: Instant,
    /// Beginning of the period in which opened connections are counted, and their number.
    opened: (Instant, u32),
    /// Penalties of sources for connections that were never used.
    penalties: SourcePenalty,
    next_tick: Instant,
    /// Origin of the clocks of commands.
    since: Instant,
    /// The time of this iteration, and its value on those clocks.
    time: (Instant, u64),
    /// The time until which completions of pushes and responses are dated: the reactor has slept
    /// since.
    nap_ns: Option<u64>,
    stopping: bool,
    /// The round of locking changes of blocks, see [`crate::sched::range_lock::RangeLocks::round`].
    round: u32,
}

impl PollGroup {
    /// Returns an empty group for the reactor of this index in the registry.
    pub fn new(index: usize, limits: Limits, now: Instant) -> PollGroup {
        PollGroup {
            index,
            limits,
            queues: Vec::new(),
            by_qp: Vec::new(),
            count: 0,
            waiters: BufferScheduler::default(),
            run: CompletionBatch::default(),
            refusals: CauseLog::default(),
            deferred: FairQueue::default(),
            full_until: None,
            pending: FairQueue::default(),
            lost_listeners: Vec::new(),
            next_displacement: now,
            opened: (now, 0),
            penalties: SourcePenalty::new(Some(MOST_IN_VAIN)),
            next_tick: now + TICK,
            since: now,
            time: (now, 0),
            nap_ns: None,
            stopping: false,
            round: 0,
        }
    }

    /// Returns the number of queues.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes of all buffers that they own: neither in the pool, nor at the fabric, nor
    /// at a device.
    pub fn held_bytes(&self) -> u64 {
        self.queues.iter().flatten().map(QueuePair::held_bytes).sum()
    }

    /// Whether a shutdown has been requested.
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Whether nothing waits for completion of a push or a response: for its buffer or its slot, or
    /// to continue after it.
    pub fn nobody_waits(&self) -> bool {
        self.waiters.is_empty() && self.waiters.behind_sent == 0
    }

    /// Returns when [`PollGroup::tick`] has something to do.
    pub fn next_tick(&self) -> Instant {
        self.waiters.rate_limits.due().map_or(self.next_tick, |due| due.min(self.next_tick))
    }

    /// Called before the reactor sleeps: completions of pushes and responses do not wake it. The
    /// next iteration cannot know when these completed, and counts them as completed now.
    pub fn before_sleep(&mut self, now: Instant) {
        self.nap_ns = Some(self.since_ns(now));
    }

    /// Handles all events of the fabric.
    #[inline]
    pub fn on_events(&mut self, events: &mut Vec<Event>, lent: &mut Resources<'_>) {
        if !events.is_empty() {
            self.handle_events(events, lent);
        }
    }

    #[inline(never)]
    fn handle_events(&mut self, events: &mut Vec<Event>, lent: &mut Resources<'_>) {
        if lent.now >= self.next_tick {
            self.end_expired(lent);
        }
        let mut events = events.drain(..);
        while let Some(event) = self.on_completions(&mut events, lent) {
            self.on_event(event, lent);
        }
        self.run.end();
    }

    /// Handles an event of the fabric.
    pub fn on_event(&mut self, event: Event, lent: &mut Resources<'_>) {
        match event {
            Event::Done(done) => match self.key(done.qp) {
                Some(key) => {
                    if let Some((queue, mut io)) = self.queue(key, lent) {
                        queue.on_completion(done, &mut io);
                    }
                }
                None => lent.pool.give(done.work.into_buf()),
            },
            Event::Incoming(incoming) => self.place(incoming, lent),
            Event::Established(qp) => {
                debug!(qp = qp.0, "connection established");
                if let Some((queue, _)) = self.key(qp).and_then(|key| self.queue(key, lent)) {
                    queue.confirm();
                    self.full_until = None;
                }
            }
            Event::Gone(qp, reason) => self.on_gone(qp, reason, lent),
            Event::ListenerLost(at) => self.lost_listeners.push(at),
        }
        self.run.end();
    }

    /// Handles the completion of a device operation.
    pub fn on_disk(&mut self, done: IoCompletion, lent: &mut Resources<'_>) {
        let key = key_of(&done);
        let (_, queues, mut io) = self.split(lent);
        if step(queues, done, &mut io) {
            self.reap(key, lent);
        }
    }

    /// Handles completions of devices, until a batch to send is full.
    #[inline]
    pub fn on_disks(&mut self, done: &mut VecDeque<IoCompletion>, lent: &mut Resources<'_>) {
        if !done.is_empty() {
            self.handle_disks(done, lent);
        }
    }

    #[inline(never)]
    fn handle_disks(&mut self, done: &mut VecDeque<IoCompletion>, lent: &mut Resources<'_>) {
        while !done.is_empty() {
            let (_, queues, mut io) = self.split(lent);
            let finished = loop {
                if io.fabric.is_batch_full() {
                    return;
                }
                let Some(done) = done.pop_front() else { return };
                let key = key_of(&done);
                if step(queues, done, &mut io) {
                    break key;
                }
            };
            self.reap(finished, lent);
        }
    }

    /// Handles a message. Those for the driver, which has the ring and the listeners, are returned.
    pub fn on_message(&mut self, message: Message, lent: &mut Resources<'_>) -> Option<Message> {
        match message {
            Message::Incoming(request) => self.on_connect_request(request, lent),
            Message::Subsystem(new, adoption) => {
                let (now, queues) = (lent.now, &self.queues);
                self.waiters.rate_limits.change(now, |key, slot, booking| {
                    if let Some(Some(queue)) = queues.get(key as usize) {
                        queue.give_back(slot, booking, now);
                    }
                });
                self.each(lent, |queue, io| {
                    queue.await_adoption(&adoption);
                    queue.on_subsystem(&new, io);
                });
            }
            Message::DiscoveryChanged => self.each(lent, QueuePair::on_discovery_changed),
            Message::Answer(done) => self.on_disk(done, lent),
            Message::Fence(fence) => self.each(lent, |queue, io| queue.on_fence(&fence, io)),
            Message::InFlight(answer) => drop(answer.try_send(self.in_flight(lent.now))),
            Message::Errand(token) => self.each(lent, |queue, io| queue.on_abort(&token, io)),
            Message::Authenticated { key, ticket, worked } => {
                if let Some((queue, mut io)) = self.queue(key, lent) {
                    queue.on_worked(ticket, worked, &mut io);
                }
            }
            Message::Stop => {
                self.stopping = true;
                while let Some(request) = self.deferred.pop() {
                    self.reject(request.incoming, lent);
                }
                while let Some((request, _)) = self.pending.pop() {
                    self.reject(request.incoming, lent);
                }
                self.each(lent, QueuePair::close);
            }
            message => return Some(message),
        }
        None
    }

    /// Checks deadlines, if it is time. True if [`PollGroup::serve_waiters`] has something to do:
    /// it is time to check deferred connections, commands wait for buffers (no hold is endless), or
    /// commands that limits had delayed have begun. Their operations may have completed already,
    /// which must be checked before any sleep.
    #[inline]
    pub fn tick(&mut self, lent: &mut Resources<'_>) -> bool {
        self.nap_ns = None;
        lent.now >= self.next_tick() && self.tick_due(lent)
    }

    #[inline(never)]
    fn tick_due(&mut self, lent: &mut Resources<'_>) -> bool {
        if lent.now >= self.next_tick {
            self.end_expired(lent);
        }
        let mut worked = self.serve_rate_limits(lent);
        if lent.now >= self.next_tick {
            worked |= !self.deferred.is_empty() || !self.waiters.is_empty();
            self.next_tick = lent.now + TICK;
            self.look(lent);
            self.publish(lent);
            self.refusals.log_overdue(lent.now);
        }
        worked
    }

    /// After a time in which the reactor did not run (its machine was suspended, or it had no CPU
    /// time): ends the associations whose keep alive timeout has expired in it, before it executes
    /// what their hosts had sent. They may have repeated that by another path, and have written the
    /// same blocks once more.
    #[cold]
    fn end_expired(&mut self, lent: &mut Resources<'_>) {
        if lent.now >= self.next_tick + TICK {
            // The last iteration was before that.
            let received = std::mem::replace(&mut self.next_tick, lent.now);
            self.each(lent, |queue, io| queue.end_expired(received, io));
            self.each(lent, QueuePair::tick);
        }
    }

    /// Checks deadlines and the state that is shared with other reactors: the eventfd was
    /// signalled.
    pub fn look(&mut self, lent: &mut Resources<'_>) {
        let round = lent.shared.range_locks.round();
        if round != self.round {
            self.round = round;
            self.each(lent, |queue, io| queue.claim_begun(io));
            lent.shared.range_locks.settle();
        }
        self.each(lent, QueuePair::tick);
        self.release_pending(lent);
    }

    /// Gives buffers to waiting commands, admin commands first, then a command of each host in
    /// turn; and room to deferred connections.
    #[inline]
    pub fn serve_waiters(&mut self, lent: &mut Resources<'_>) {
        if !self.deferred.is_empty() || !self.waiters.is_at_rest() {
            self.serve_all_waiters(lent);
        }
    }

    #[inline(never)]
    fn serve_all_waiters(&mut self, lent: &mut Resources<'_>) {
        self.admit_deferred(lent);
        clear(&mut self.waiters, lent.pool, lent.now);
        if self.waiters.is_idle() {
            return;
        }
        while let Some(turn) = self.waiters.next_turn(&room(lent.pool, lent.now)) {
            let take = match self.queue(turn.key, lent) {
                Some((queue, mut io)) => queue.on_buffers(turn.slot, turn.aside, &mut io),
                None => TryAlloc::Done,
            };
            if !self.waiters.settle(turn, take, lent.now) {
                return;
            }
        }
    }

    /// Begins the commands that limits permit by now; returns whether there were any.
    fn serve_rate_limits(&mut self, lent: &mut Resources<'_>) -> bool {
        let (now, mut begun) = (lent.now, false);
        loop {
            let queues = &mut self.queues;
            let book = |key: u32, slot| queues.get_mut(key as usize)?.as_mut()?.book(slot, now);
            let Some((key, slot)) = self.waiters.rate_limits.next(now, book) else { return begun };
            begun = true;
            if let Some((queue, mut io)) = self.queue(key, lent) {
                queue.on_rate_limit(slot, &mut io);
            }
        }
    }

    /// Serves a connection request here or hands it to the reactor with the fewest queues.
    fn place(&mut self, incoming: Incoming, lent: &mut Resources<'_>) {
        let receives = receives_of(&incoming.private_data, self.limits);
        let place = lent.shared.registry.place(receives);
        let (remote, local, reactor) = (incoming.remote, incoming.local, place.reactor());
        let request = PlacedRequest { incoming, place };
        if reactor == self.index || self.stopping {
            self.on_connect_request(request, lent);
        } else if let Err(message) =
            lent.shared.registry.reactor(reactor).try_send(Message::Incoming(request))
        {
            drop(message);
            self.record_refusal(DisconnectRecord::nameless(Cause::Overloaded, remote, local), lent);
        }
    }

    /// Handles consecutive completions, for all of which queues borrow the same resources. Returns
    /// the event behind.
    fn on_completions(
        &mut self,
        events: &mut Drain<'_, Event>,
        lent: &mut Resources<'_>,
    ) -> Option<Event> {
        let (by_qp, queues, mut io) = self.split(lent);
        // Those of a queue pair come in a row.
        while let Some(qp) = qp_of_next(events) {
            let key = by_qp.get(qp.0 as usize).copied().flatten();
            let queue = key.and_then(|key| queues.get_mut(key as usize)?.as_mut());
            let Some(queue) = queue else {
                if let Some(Event::Done(done)) = events.next() {
                    io.pool.give(done.work.into_buf());
                }
                continue;
            };
            while qp_of_next(events) == Some(qp)
                && let Some(Event::Done(done)) = events.next()
            {
                queue.on_next_completion(done, &mut io);
            }
            queue.raise_events(&mut io);
        }
        events.next()
    }

    fn record_refusal(&mut self, why: DisconnectRecord, lent: &Resources<'_>) {
        self.refusals.record(why, &lent.shared.disconnects, lent.now);
    }

    /// Rejects a request because the target is stopping.
    fn reject(&mut self, incoming: Incoming, lent: &mut Resources<'_>) {
        self.record_refusal(
            DisconnectRecord::nameless(Cause::Stopping, incoming.remote, incoming.local),
            lent,
        );
        lent.fabric.reject(incoming, &[]);
    }

    /// Handles a connection request.
    fn on_connect_request(&mut self, request: PlacedRequest, lent: &mut Resources<'_>) {
        match self.stopping {
            true => self.reject(request.incoming, lent),
            false => self.ask_listener(request, lent.now + DECISION_LIMIT, lent),
        }
    }

    /// Opens a connection requested through an active listener, or defers it. If others wait
    /// already, there is no search for room.
    fn admit(&mut self, request: PlacedRequest, lent: &mut Resources<'_>) {
        let incoming = &request.incoming;
        if self.penalties.is_blocked(lent.now, incoming.remote.ip().into()) {
            return self.refuse(request, lent);
        }
        if !self.deferred.is_empty() {
            return self.defer(request, lent);
        }
        match self.look_for_room(incoming, lent) {
            Ok(()) => self.open(request, lent),
            Err(until) => {
                self.wait_for_room(until);
                self.defer(request, lent);
            }
        }
    }

    /// Opens a connection, which counts as such instead of its request from now on.
    fn open(&mut self, PlacedRequest { incoming, .. }: PlacedRequest, lent: &mut Resources<'_>) {
        self.opened.1 += 1;
        let vacant = self.queues.iter().position(Option::is_none);
        let at = vacant.unwrap_or(self.queues.len());
        let limits = self.limits;
        let (.., mut io) = self.split(lent);
        let mut queue = match QueuePair::open(at as u32, incoming, limits, &mut io) {
            Ok(queue) => queue,
            Err(why) => return self.record_refusal(*why, lent),
        };
        let qp = queue.qp().0 as usize;
        if self.by_qp.len() <= qp {
            self.by_qp.resize(qp + 1, None);
        }
        self.by_qp[qp] = Some(at as u32);
        let held = OpenQueue { reactor: self.index, receives: queue.depth() };
        lent.shared.registry.queue_opened(held);
        *queue.unadmitted_mut() = Some(held);
        match vacant {
            Some(at) => self.queues[at] = Some(queue),
            None => self.queues.push(Some(queue)),
        }
        self.count += 1;
    }

    fn on_gone(&mut self, qp: Qp, reason: Reason, lent: &mut Resources<'_>) {
        let Some(key) = self.by_qp.get_mut(qp.0 as usize).and_then(Option::take) else { return };
        if let Some((queue, mut io)) = self.queue(key, lent) {
            let before = queue.receives();
            let (in_vain, source) = (queue.is_in_vain(), queue.source().into());
            queue.on_gone(reason, &mut io);
            // The others are free for the next queue, however long a device keeps the rest.
            let receives = before.saturating_sub(queue.receives());
            let unadmitted = queue.unadmitted_mut().take();
            unadmitted.iter().for_each(|held| lent.shared.registry.queue_admitted(*held));
            lent.shared.registry.receives_returned(OpenQueue { reactor: self.index, receives });
            if in_vain {
                self.penalties.penalize(lent.now, source);
            }
        }
        self.reap(key, lent);
    }

    /// Removes a queue that is finished.
    fn reap(&mut self, key: u32, lent: &mut Resources<'_>) {
        let Some(entry) = self.queues.get_mut(key as usize) else { return };
        if let Some(queue) = entry.take_if(|queue| queue.is_finished()) {
            let receives = queue.receives();
            let (.., mut io) = self.split(lent);
            queue.finish(&mut io);
            lent.shared.registry.receives_returned(OpenQueue { reactor: self.index, receives });
            self.count -= 1;
            self.full_until = None;
        }
    }

    /// Publishes the gauges.
    fn publish(&self, lent: &Resources<'_>) {
        let Some(observer) = lent.shared.observer(self.index) else { return };
        let (cells, receives, data_bytes) = lent.pool.free();
        let gauges = &observer.gauges;
        gauges.cells_free.store(cells.into(), Ordering::Relaxed);
        gauges.receives_free.store(receives.into(), Ordering::Relaxed);
        gauges.data_free_bytes.store(data_bytes, Ordering::Relaxed);
        gauges.data_bytes.store(lent.pool.plan().data_bytes, Ordering::Relaxed);
        gauges.waiting_for_buffer.store(self.waiters.len() as u64, Ordering::Relaxed);
        let totals = self.refusals.totals();
        (&gauges.refusals)
            .into_iter()
            .zip(totals)
            .for_each(|(to, n)| to.store(n, Ordering::Relaxed));
        observer.set_fabric(|stats| lent.fabric.stats(stats));
    }

    fn since_ns(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.since);
        since.as_secs().saturating_mul(1_000_000_000).saturating_add(since.subsec_nanos().into())
    }

    fn key(&self, qp: Qp) -> Option<u32> {
        self.by_qp.get(qp.0 as usize).copied().flatten()
    }

    fn each(&mut self, lent: &mut Resources<'_>, mut act: impl FnMut(&mut QueuePair, &mut Io<'_>)) {
        let (_, queues, mut io) = self.split(lent);
        for queue in queues.iter_mut().flatten() {
            act(queue, &mut io);
        }
    }

    fn queue<'a>(
        &'a mut self,
        key: u32,
        lent: &'a mut Resources<'_>,
    ) -> Option<(&'a mut QueuePair, Io<'a>)> {
        let (_, queues, io) = self.split(lent);
        queues.get_mut(key as usize)?.as_mut().map(|queue| (queue, io))
    }

    /// Returns keys by queue pair, queues by key, and the resources that they borrow.
    fn split<'a>(
        &'a mut self,
        lent: &'a mut Resources<'_>,
    ) -> (&'a [Option<u32>], &'a mut Vec<Option<QueuePair>>, Io<'a>) {
        if self.time.0 != lent.now {
            self.time = (lent.now, self.since_ns(lent.now));
        }
        let now_ns = self.time.1;
        let io = Io {
            pool: lent.pool,
            fabric: lent.fabric,
            disk: lent.disk,
            shared: lent.shared,
            waiters: &mut self.waiters,
            refusals: &mut self.refusals,
            reactor: self.index,
            now: lent.now,
            now_ns,
            sent_ns: self.nap_ns.unwrap_or(now_ns),
            run: &mut self.run,
        };
        (&self.by_qp, &mut self.queues, io)
    }
}

/// Sets a part of the pool aside for a starved command, so that buffers that are freed in that part
/// become one block.
pub fn clear(waiters: &mut BufferScheduler, pool: &mut Pool, now: Instant) {
    match waiters.claim(now, || room(pool, now)) {
        Starved::None => pool.put_back(),
        Starved::Stay => {}
        Starved::First(bytes) => {
            pool.put_back();
            pool.set_aside(bytes);
        }
        Starved::Next(bytes) => {
            if pool.set_aside(bytes) {
                waiters.round_over();
            }
        }
    }
}

/// Returns the queue pair of the next event, if that is a completion.
fn qp_of_next(events: &Drain<'_, Event>) -> Option<Qp> {
    match events.as_slice().first()? {
        Event::Done(done) => Some(done.qp),
        _ => None,
    }
}

/// Returns the key of the queue of a device operation.
fn key_of(done: &IoCompletion) -> u32 {
    (done.tag >> 32) as u32
}

/// Passes the completion of a device to its queue. Returns whether the queue is finished.
fn step(queues: &mut [Option<QueuePair>], done: IoCompletion, io: &mut Io<'_>) -> bool {
    let queue = queues.get_mut(key_of(&done) as usize).and_then(Option::as_mut);
    let Some(queue) = queue else { return false };
    let slot = done.tag as u16;
    match QueuePair::is_about_recall(done.tag) {
        true => queue.on_recalled(slot, done.outcome, io),
        false => queue.on_disk(slot, done, io),
    }
    queue.is_finished()
}
