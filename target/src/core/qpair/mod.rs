//! One NVMe queue on one queue pair: its slots, and the states of a command (`State` in `qpair/request.rs`).
//!
//! ```text
//!         capsule          buffers there        data there            done
//! Free ──────────► Waiting ───────────► Pulling ───────────► AtDevice ─────► Replying ──► Free
//!          └── each step that a command does not need is skipped ──┘              sent
//! ```
//!
//! * *Waiting* has a reason (`WaitReason`); a command that needs nothing of what one waits
//!   for does not stop there.
//! * A command that a device cannot carry out alone is *Offloaded* instead of, before or after
//!   *AtDevice*.
//! * In-capsule data skip *Pulling*: the receive buffer itself goes to the disk.
//! * The receive buffer is posted again before the response is sent, so a host that keeps to its
//!   queue size always finds one.
//!
//! This is the only file that acts: rules decide (`command/`), the queue pulls, loads, stores,
//! pushes and answers.

mod abort;
mod admin_buffers;
mod admit;
mod auth;
mod bad_blocks;
mod buffers;
mod capsule;
mod complete;
mod connect;
mod diag;
mod disconnect;
mod event_log;
mod execute;
mod fused;
mod log_page;
mod ns_management;
mod offload;
mod range_lock;
mod request;
mod sgl_transfer;
mod smart_counters;
mod stats;
mod subsystem_change;
mod teardown;
mod unflushed;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::cm;

use rdma::{Buf, Completion, Fabric, Fault, Incoming, Pool, Qp, QpLimits};
use tracing::debug;

use crate::blockdev::{BlockDevice, IoCompletion};
use crate::core::auth::exchange::Exchange;
use crate::core::command::{Plan, Source};
use crate::core::controller::association::Association;
use crate::core::controller::{Controller, Limits};
use crate::core::diag::cause::{Cause, DisconnectRecord};
use crate::core::diag::log_limiter::CauseLog;
use crate::core::registry::OpenQueue;
use crate::core::sched::buffers::{BufferScheduler, NsIndex, TryAlloc};
use crate::core::shared::Shared;
use crate::core::stats::{CompletionBatch, Rows, Stage};
use crate::core::subsystem::Subsystem;
use crate::core::subsystem::usage::IoCounters;
use admit::Quota;
use bad_blocks::ClearBadBlocks;
pub use buffers::{DATA_FOR_ADMIN_BYTES, free_for_io, room};
pub use connect::RECEIVES_FOR_ADMIN;
use fused::FusedState;
pub(crate) use request::SENDS_PER_RECEIVE;
use request::{Head, Request, SLOTS_PER_RECEIVE, State, WaitReason};

/// How long a connection may take from its reply to its Connect command. Hosts bring up all
/// connections of a controller before the first Connect, each round trip may take seconds.
const CONNECT_DEADLINE: Duration = Duration::from_secs(30);

/// RDMA Reads that we would like to have outstanding on a queue pair.
const READS: u8 = 64;

/// The lent world.
pub struct Io<'a> {
    /// Buffers.
    pub pool: &'a mut Pool,
    /// The fabric.
    pub fabric: &'a mut dyn Fabric,
    /// The backing stores.
    pub disk: &'a mut dyn BlockDevice,
    /// Who may connect.
    pub shared: &'a Shared,
    /// Who waits for buffers.
    pub waiters: &'a mut BufferScheduler,
    /// Tells who is refused or dropped.
    pub refusals: &'a mut CauseLog,
    /// Which of the reactors this is.
    pub reactor: usize,
    /// The time of this turn.
    pub now: Instant,
    /// The same in nanoseconds since some moment, for the clocks of commands.
    pub now_ns: u64,
    /// When pushes and responses that come home now have done so, likewise.
    pub sent_ns: u64,
    /// Commands that are over and not counted yet.
    pub run: &'a mut CompletionBatch,
}

/// What a queue serves.
#[derive(Debug)]
enum QueueRole {
    /// Nothing before Connect.
    Nothing { deadline: Instant },
    /// An admin queue owns its controller.
    Admin(Box<Controller>),
    /// An I/O queue.
    Io { association: Arc<Association>, subsystem: Arc<Subsystem>, epoch: u16 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Link {
    Open,
    /// Disconnecting: work is coming home.
    Closing,
    /// The queue pair is gone; only the disk still has work.
    Gone,
}

/// One NVMe queue.
#[derive(Debug)]
pub struct QueuePair {
    key: u32,
    qp: Qp,
    request: cm::Request,
    limits: Limits,
    local: SocketAddr,
    remote: SocketAddr,
    serves: QueueRole,
    opened: Instant,
    /// Its host has confirmed the connection, so its address is not forged.
    confirmed: bool,
    /// Where the host must prove itself.
    proof: Option<Box<Exchange>>,
    /// The number of an authentication task that is under way, and the slot that waits for it.
    task: Option<(u64, u16)>,
    link: Link,
    /// Why it was refused or ends has been told.
    explained: bool,
    /// What it was when its work came back although nobody here had ended it.
    leaving: Option<Cause>,
    /// The slot of a Disconnect command: nothing more is taken.
    leaver: Option<u16>,
    /// Of an I/O queue, what its association holds of the data buffers.
    share: Option<u32>,
    head: Head,
    slots: Vec<Request>,
    receives: u16,
    /// What the registry counts as held by a connection that is not admitted.
    pub(crate) unadmitted: Option<OpenQueue>,
    free: Vec<u16>,
    at_disk: u16,
    /// Slots that hold an operation back.
    held_back: u16,
    /// The first half of a fused command, when it was the last command.
    half: FusedState,
    tally: IoCounters,
    /// What limits its commands.
    quota: Quota,
    /// Where its commands are counted, once it is an I/O queue.
    rows: Option<Rows>,
    /// Capsules that wait for a slot, with the time at which they came; each holds a receive, so
    /// there are at most as many.
    backlog: VecDeque<(Buf, u32, u64)>,
    /// Of a queue without a share, slots of commands that wait until others of its own are over.
    put_off: VecDeque<u16>,
    /// Command ids that are outstanding, a bit each.
    cids: Box<[u64; 1024]>,
}

impl QueuePair {
    /// Takes a connection request: checks its private data, opens a queue pair, posts all receives
    /// and accepts. `key` is this queue's name in disk tags.
    ///
    /// # Errors
    /// The request was not acceptable, and has been rejected: why.
    pub fn open(
        key: u32,
        incoming: Incoming,
        limits: Limits,
        io: &mut Io<'_>,
    ) -> Result<QueuePair, Box<DisconnectRecord>> {
        let (local, remote, reads) = (incoming.local, incoming.remote, incoming.reads);
        let checked = connect::check_request(&incoming.private_data, reads, limits, io.pool);
        let (request, depth) = match checked {
            Ok(checked) => checked,
            Err(status) => {
                io.fabric.reject(incoming, &cm::Reject::new(status).emit());
                let why = DisconnectRecord::nameless(Cause::of_request(status), remote, local);
                return Err(Box::new(DisconnectRecord {
                    detail: status.to_string().into(),
                    ..why
                }));
            }
        };
        let qp_limits = QpLimits {
            receives: u32::from(depth),
            sends: u32::from(depth) * SENDS_PER_RECEIVE,
            reads: READS.min(reads),
        };
        let qp = io.fabric.open(incoming, qp_limits).map_err(|error| {
            let why = DisconnectRecord::nameless(Cause::NoQueuePair, remote, local);
            Box::new(DisconnectRecord { detail: error.0.into(), ..why })
        })?;
        let mut queue = QueuePair::new(key, qp, request, depth, limits, (local, remote), io.now);
        for _ in 0..depth * SLOTS_PER_RECEIVE {
            let cell = io.pool.take_cell();
            queue.slots.push(Request::new(cell));
        }
        for _ in 0..depth {
            if let Some(buf) = io.pool.take_receive() {
                io.fabric.post(qp, 0, rdma::Work::Recv(buf));
            }
        }
        io.waiters.open(depth);
        let accept = cm::Accept { recfmt: 0, crqsize: depth };
        io.fabric.accept(qp, &accept.emit());
        debug!(%remote, qid = request.qid, depth, "connection accepted");
        Ok(queue)
    }

    /// A queue without slots, before its Connect.
    fn new(
        key: u32,
        qp: Qp,
        request: cm::Request,
        depth: u16,
        limits: Limits,
        (local, remote): (SocketAddr, SocketAddr),
        now: Instant,
    ) -> QueuePair {
        let slots = depth * SLOTS_PER_RECEIVE;
        QueuePair {
            key,
            qp,
            request,
            limits,
            local,
            remote,
            serves: QueueRole::Nothing { deadline: now + CONNECT_DEADLINE },
            opened: now,
            confirmed: false,
            proof: None,
            task: None,
            link: Link::Open,
            explained: false,
            leaving: None,
            leaver: None,
            share: None,
            head: Head::default(),
            slots: Vec::with_capacity(slots.into()),
            receives: depth,
            unadmitted: None,
            free: (0..slots).rev().collect(),
            at_disk: 0,
            held_back: 0,
            half: FusedState::None,
            tally: IoCounters::default(),
            quota: Quota::default(),
            rows: None,
            backlog: VecDeque::with_capacity(depth.into()),
            put_off: VecDeque::new(),
            cids: Box::new([0; 1024]),
        }
    }

    /// The queue pair.
    #[must_use]
    pub fn qp(&self) -> Qp {
        self.qp
    }

    /// Where its host is.
    #[must_use]
    pub fn source(&self) -> IpAddr {
        self.remote.ip()
    }

    /// Whose it is; nobody's before its Connect.
    #[must_use]
    pub fn association(&self) -> Option<&Arc<Association>> {
        match &self.serves {
            QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => Some(&controller.association),
            QueueRole::Io { association, .. } => Some(association),
        }
    }

    /// Receives that were posted for it.
    #[must_use]
    pub fn depth(&self) -> u16 {
        (self.slots.len() / 2) as u16
    }

    /// Receives that it keeps from others: all of them, and when its queue pair is gone, those that
    /// are still on their way to a disk.
    #[must_use]
    pub fn receives(&self) -> u16 {
        self.receives
    }

    /// Whether its Connect has succeeded.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        !matches!(self.serves, QueueRole::Nothing { .. })
    }

    /// Whether it is connected, and its host has proved itself where it must.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.is_connected() && self.proof.as_ref().is_none_or(|proof| proof.is_authenticated())
    }

    /// Whether nobody vouches for who holds it: it is not admitted, or it is the admin queue of an
    /// anonymous host that has no I/O queues.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        match &self.serves {
            QueueRole::Admin(controller) if self.is_admitted() => {
                let association = &controller.association;
                association.anonymous && association.io_queues() == 0
            }
            _ => !self.is_admitted(),
        }
    }

    /// Whether it is being closed, or its queue pair is gone.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.link != Link::Open
    }

    /// Its host has confirmed the connection.
    pub fn confirm(&mut self) {
        self.confirmed = true;
    }

    /// Whether its host has confirmed the connection.
    #[must_use]
    pub fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    /// Whether its host has neither confirmed the connection nor said anything on it.
    #[must_use]
    pub fn is_half_open(&self) -> bool {
        !self.confirmed && !self.is_admitted()
    }

    /// Whether its host has confirmed the connection and was not let in: it came to nothing, if it
    /// ends now.
    #[must_use]
    pub fn is_in_vain(&self) -> bool {
        self.confirmed && !self.is_admitted()
    }

    /// When it was opened.
    #[must_use]
    pub fn opened(&self) -> Instant {
        self.opened
    }

    /// Whether nothing is left: the queue pair is gone and all disk work is home.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.link == Link::Gone && self.at_disk == 0
    }

    /// A piece of fabric work has come home.
    pub fn on_completion(&mut self, done: Completion, io: &mut Io<'_>) {
        let slot = done.tag as u16;
        match (done.work, done.outcome) {
            (rdma::Work::Recv(buf), Ok(len)) if self.link == Link::Open => {
                self.on_capsule(buf, len, io.now_ns, io);
            }
            (rdma::Work::Recv(buf), outcome) => {
                io.pool.give(buf);
                self.on_fault(outcome.err(), io);
            }
            (rdma::Work::Send { from, .. }, outcome) => {
                self.slot(slot).cell = Some(from);
                self.on_posted(slot, outcome.err(), io);
            }
            (rdma::Work::Write { from, .. }, outcome) if self.slot(slot).is_in_pieces() => {
                self.slot(slot).data = Some(from);
                self.slot(slot).posted -= 1;
                io.waiters.behind_sent -= 1;
                match outcome {
                    Ok(_) if self.link == Link::Open => self.push_piece(slot, io),
                    outcome => {
                        self.release(slot, io);
                        self.on_fault(outcome.err(), io);
                    }
                }
            }
            (rdma::Work::Write { from, .. }, outcome) => {
                io.pool.give(from);
                self.slot(slot).clock.enter(Stage::Reply, io.sent_ns);
                self.on_posted(slot, outcome.err(), io);
            }
            (rdma::Work::Read { into, .. }, outcome) => {
                self.slot(slot).data = Some(into);
                self.slot(slot).posted -= 1;
                match outcome {
                    Ok(_) if self.has_more_pieces(slot) => self.pull_piece(slot, io),
                    Ok(_) if self.link == Link::Open => {
                        self.join_pieces(slot);
                        self.on_pulled(slot, io);
                    }
                    Ok(_) => self.release(slot, io),
                    Err(fault) => {
                        self.release(slot, io);
                        self.on_fault(Some(fault), io);
                    }
                }
            }
        }
        self.raise_events(io);
    }

    /// A disk operation has come home.
    pub fn on_disk(&mut self, slot: u16, done: IoCompletion, io: &mut Io<'_>) {
        self.at_disk -= 1;
        self.end_turn(slot, io);
        let open = self.link == Link::Open;
        let step = self.slot(slot).step;
        self.put_back(slot, done.buf);
        self.note_unflushed(slot, done.outcome);
        if !open {
            return self.release(slot, io);
        }
        self.end_pair(slot, io);
        if self.end_mending(slot, done.outcome, io) {
            return;
        }
        if let Err(status) = done.outcome {
            if !matches!(self.slot(slot).plan, Plan::ShutDown { .. }) {
                return self.answer(slot, Err(status), io);
            }
            self.on_failed_shutdown_flush(slot, status, io);
        }
        self.slot(slot).step = step + 1;
        self.after_disk(slot, io);
        self.raise_events(io);
    }

    /// The buffer of a disk operation is the command's again.
    fn put_back(&mut self, slot: u16, buf: Option<Buf>) {
        let entry = self.slot(slot);
        match (&entry.plan, buf) {
            (_, None) => {}
            (Plan::Store { from: Source::Capsule { .. }, .. }, Some(buf))
                if entry.capsule.is_none() =>
            {
                entry.capsule = Some(buf);
            }
            (Plan::Compare { .. } | Plan::Copy { .. }, Some(buf)) => {
                entry.make_rare().second = Some(buf);
            }
            (_, Some(buf)) => entry.data = Some(buf),
        }
    }

    /// A buffer may be there for a waiting command; `aside`: also of what is set aside.
    pub fn resume(&mut self, slot: u16, aside: bool, io: &mut Io<'_>) -> TryAlloc {
        if self.link != Link::Open || self.slot(slot).state() != State::Waiting(WaitReason::Buffers)
        {
            return TryAlloc::Done;
        }
        match self.take_buffers(slot, self.want(slot), aside, io) {
            TryAlloc::Done => self.proceed(slot, io),
            // It leaves the line: it waits for its own queue.
            TryAlloc::Over if self.share.is_none() => self.put_off(slot, io),
            take => return take,
        }
        TryAlloc::Done
    }

    /// Looks at the clock and at what is shared with other reactors.
    pub fn tick(&mut self, io: &mut Io<'_>) {
        self.hand_in(io.now);
        self.serve_turns(io);
        self.look_for_fatal_error(io);
        let admitted = self.is_admitted();
        // What only follows from something else has no cause.
        let end = match &mut self.serves {
            QueueRole::Nothing { deadline } => {
                (io.now >= *deadline).then_some(Some(Cause::NoConnect))
            }
            QueueRole::Admin(controller) => {
                if controller.association.is_closed() {
                    Some(controller.association.ended_for())
                } else if admitted && controller.expired(io.now) {
                    // A host that computes its proof keeps nothing alive; that has its own limit.
                    Some(Some(Cause::KeepAlive))
                } else if auth::has_outlived_key(&mut self.proof, &controller.association, io.now) {
                    Some(Some(Cause::KeyChanged))
                } else {
                    controller.look_at_paths();
                    controller.look_at_stores();
                    None
                }
            }
            QueueRole::Io { association, epoch, .. } => {
                let over = association.is_closed() || association.epoch() != *epoch;
                match over {
                    true => Some(None),
                    false => auth::has_outlived_key(&mut self.proof, association, io.now)
                        .then_some(Some(Cause::KeyChanged)),
                }
            }
        };
        let late = || {
            let proof = self.proof.as_ref()?;
            proof.is_overdue(io.now).then_some(Some(Cause::LateAuthentication))
        };
        // Reservations may have brought news that nothing here has led to.
        let Some(cause) = end.or_else(late) else { return self.raise_events(io) };
        if self.link == Link::Open {
            match cause {
                Some(cause) => self.explain(cause, "", io),
                None => {
                    debug!(remote = %self.remote, qid = self.request.qid, "its controller went")
                }
            }
            self.close(io);
        }
    }

    // ---- coming home

    fn on_posted(&mut self, slot: u16, fault: Option<Fault>, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        entry.posted -= 1;
        if entry.posted == 0 && entry.state() == State::Replying {
            self.observe(slot, io);
            self.settle_errands(slot);
            self.set_free(slot, io);
            if self.leaver == Some(slot) {
                // The host has its answer.
                return self.close(io);
            }
        }
        self.on_fault(fault, io);
        self.resume_backlog(io);
    }

    #[inline]
    fn on_fault(&mut self, fault: Option<Fault>, io: &mut Io<'_>) {
        if let (Some(fault), Link::Open) = (fault, self.link) {
            self.end_for(fault, io);
        }
    }

    /// Gives back all that a command holds, without an answer.
    fn release(&mut self, slot: u16, io: &mut Io<'_>) {
        self.drop_turn(slot, io);
        self.return_receive(slot, io);
        let entry = self.slot(slot);
        (entry.mate, entry.doomed) = (None, false);
        if let Some(rare) = entry.rare_mut() {
            rare.fences.clear();
            rare.errands.clear();
            rare.mend = ClearBadBlocks::None;
        }
        entry.take_buffers().for_each(|buf| io.pool.give(buf));
        if entry.state() != State::Free && entry.posted == 0 {
            self.set_free(slot, io);
        }
    }

    /// A command is over, and holds nothing any more.
    fn set_free(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        entry.enter(State::Free);
        let charged_bytes = std::mem::take(&mut entry.charged_bytes);
        let (lane, store) = (NsIndex::of(entry.sqe.nsid), entry.store);
        self.free.push(slot);
        match self.share {
            Some(share) => io.waiters.discharge(share, lane, store, charged_bytes),
            None if self.put_off.is_empty() => {}
            None => self.serve_put_off(slot, io),
        }
    }

    /// Whether this is an I/O queue whose controller was reset or is gone.
    fn is_orphaned(&self) -> bool {
        match &self.serves {
            QueueRole::Io { association, epoch, .. } => {
                !association.is_ready()
                    && (association.is_closed() || association.epoch() != *epoch)
            }
            _ => false,
        }
    }

    /// What a disk knows a command's operation by.
    fn tag(&self, slot: u16) -> u64 {
        u64::from(self.key) << 32 | u64::from(slot)
    }

    fn slot(&mut self, slot: u16) -> &mut Request {
        &mut self.slots[usize::from(slot)]
    }
}
