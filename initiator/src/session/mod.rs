//! One association: a host, a controller, an admin queue and I/O queues, each on a queue pair of
//! its own.
//!
//! ```text
//! Idle ──start──► Starting ──► Ready ──close──► Closing ──► Ended
//!                     └───────────┴─── a fault, a timeout, a lie of the target ──────^
//! ```
//!
//! A session owns state and borrows the world ([`Io`]). Whoever drives it
//!
//! * hands it every [`Event`] of the fabric ([`Session::on_event`] returns those of others),
//! * calls [`Session::tick`] before each sleep, and again when the time it returned has come,
//! * flushes the fabric at the end of each turn,
//! * takes what is done ([`Session::next_done`]) and what the controller reports
//!   ([`Session::next_event`]).
//!
//! Each request comes home in exactly one [`Done`], with its data, also when the association has
//! died before an answer. A command is done when its response is there; the buffer of its capsule
//! comes home later. There is no reconnecting: an association that has ended stays so.
//!
//! Everything from the target is suspected. An answer to no command, a second answer, an answer of
//! a wrong length ends the association with an [`EndReason`] that says so.

mod auth;
mod bring_up;
mod end_reason;
mod keep_alive;
mod queue;
mod request;
mod shutdown;

use std::collections::VecDeque;
use std::time::Instant;

use nvme::feature::AsyncEvent;
use nvme::identify::IdentifyController;
use nvme::property::{Cap, Vs};
use rdma::{Buf, Completion, Event, Fault, Qp, Reason, Work};

pub use end_reason::{EndReason, Violation};
pub use request::{Data, Done, Io, Lost, Options, Phase, Refused, Request, Response};

use auth::Proof;
use bring_up::{Step, earlier};
use keep_alive::KeepAlive;
use queue::{CloseState, Finished, Owner, Queue, Sending};

/// Entries of the admin queue, as every NVMe/RDMA host has it.
const ADMIN_ENTRIES: u16 = 32;

/// Slots of the admin queue that are not the caller's: Keep Alive and the event request.
const ADMIN_RESERVED: u16 = 2;

/// Events that wait for the caller at most; the controller is asked for no more meanwhile.
const MOST_EVENTS: usize = 32;

/// One association with one controller.
#[derive(Debug)]
pub struct Session {
    options: Options,
    phase: Phase,
    ended: Option<EndReason>,
    /// The admin queue, then the I/O queues in the order of their ids.
    queues: Vec<Queue>,
    step: Step,
    /// Of the authentication that is under way.
    proof: Option<Box<Proof>>,
    /// Of the bring-up or of the shut-down.
    deadline: Option<Instant>,
    /// When to ask for the controller's status again.
    poll_at: Option<Instant>,
    done: VecDeque<Done>,
    /// How many of those may wait for the caller before it can submit no more.
    room: usize,
    events: VecDeque<AsyncEvent>,
    wants_events: bool,
    event_asked: bool,
    keep_alive: KeepAlive,
    /// When to look again for commands that hang.
    sweep_at: Option<Instant>,
    granted: u16,
    cntlid: u16,
    cap: Cap,
    ready_limit_500ms: u16,
    enabled_at: Option<Instant>,
    vs: Vs,
    controller: Box<IdentifyController>,
}

impl Session {
    /// An association that has not begun.
    #[must_use]
    pub fn new(options: Options) -> Session {
        Session {
            options,
            phase: Phase::Idle,
            ended: None,
            queues: Vec::new(),
            step: Step::Nothing,
            proof: None,
            deadline: None,
            poll_at: None,
            done: VecDeque::new(),
            room: 0,
            events: VecDeque::with_capacity(MOST_EVENTS),
            wants_events: false,
            event_asked: false,
            keep_alive: KeepAlive::default(),
            sweep_at: None,
            granted: 0,
            cntlid: 0,
            cap: Cap(0),
            ready_limit_500ms: 0,
            enabled_at: None,
            vs: Vs(0),
            controller: Box::default(),
        }
    }

    /// What the fabric reports. Events of queue pairs that are not this session's come back.
    pub fn on_event(&mut self, event: Event, io: &mut Io<'_>) -> Option<Event> {
        match event {
            Event::Done(completion) => match self.queue_of_tag(completion.tag, completion.qp) {
                Some(qid) => self.on_completion(qid, completion, io),
                None => return Some(Event::Done(completion)),
            },
            Event::Established(qp) => match self.queue_of(qp) {
                Some(qid) => self.on_established(qid, qp, io),
                None => return Some(Event::Established(qp)),
            },
            Event::Gone(qp, reason) => match self.queue_of(qp) {
                Some(qid) => self.on_gone(qid, reason, io),
                None => return Some(Event::Gone(qp, reason)),
            },
            Event::Incoming(_) | Event::ListenerLost(_) => return Some(event),
        }
        None
    }

    /// Sends a command on queue 0 (admin) or an I/O queue from 1 to [`Session::io_queues`].
    ///
    /// # Errors
    /// Why not; the request comes back.
    pub fn submit(
        &mut self,
        queue: u16,
        request: Request,
        io: &mut Io<'_>,
    ) -> Result<(), (Request, Refused)> {
        let open = self.is_open(queue);
        let Some(target) = self.queues.get_mut(usize::from(queue)).filter(|_| open) else {
            return Err((request, Refused::NotReady));
        };
        let reserved = if queue == 0 { ADMIN_RESERVED } else { 0 };
        if target.callers() >= target.slots() - reserved || self.done.len() >= self.room {
            return Err((request, Refused::Full));
        }
        let Request { sqe, data, tag } = request;
        let deadline = io.now.checked_add(self.options.command_timeout);
        let sending = Sending { owner: Owner::Caller(tag), sqe, data, deadline };
        self.keep_alive.traffic = true;
        self.sweep_at = earlier(self.sweep_at, deadline);
        target.send(sending, io).map_err(|(data, why)| (Request { sqe, data, tag }, why))
    }

    /// The next request that came home.
    pub fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// Whether something came home.
    #[must_use]
    pub fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// The next asynchronous event of the controller. Its log page acknowledges it: until that is
    /// read, no more of its kind come.
    pub fn next_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop_front()
    }

    fn queue_of(&self, qp: Qp) -> Option<u16> {
        self.queues.iter().find(|queue| queue.qp() == Some(qp)).map(Queue::qid)
    }

    fn queue_of_tag(&self, tag: u64, qp: Qp) -> Option<u16> {
        let queue = self.queues.get(usize::try_from(tag).ok()?)?;
        (queue.qp() == Some(qp)).then(|| queue.qid())
    }

    fn on_completion(&mut self, qid: u16, completion: Completion, io: &mut Io<'_>) {
        match (completion.work, completion.outcome) {
            (Work::Recv(buf), Ok(len)) if self.hears(qid) => {
                self.on_response(qid, buf, len, completion.invalidated, io);
            }
            (work, outcome) => {
                if let (Work::Send { .. }, Some(queue)) =
                    (&work, self.queues.get_mut(usize::from(qid)))
                {
                    queue.sent();
                }
                io.pool.give(work.into_buf());
                if let Err(fault) = outcome {
                    self.on_fault(qid, fault, io);
                }
            }
        }
    }

    /// Whether answers on a queue still count.
    fn hears(&self, qid: u16) -> bool {
        let there = self.ended.is_none() && !self.has_left(qid);
        there || (qid == 0 && self.step.is_shutdown())
    }

    fn on_response(
        &mut self,
        qid: u16,
        buf: Buf,
        len: u32,
        invalidated: Option<u32>,
        io: &mut Io<'_>,
    ) {
        let Some(queue) = self.queues.get_mut(usize::from(qid)) else { return };
        let response = queue.response(&buf, len, invalidated, io);
        // Before anything new is sent, so that there is a receive for every answer.
        queue.receive(buf, io);
        match response {
            Ok((finished, answer)) => self.on_answer(qid, finished, answer, io),
            // Commands that were given up when the shut-down began may still be answered.
            Err(_) if self.ended.is_some() => {}
            Err(what) => self.die(EndReason::Violation { queue: qid, what }, io),
        }
    }

    fn on_answer(&mut self, qid: u16, finished: Finished, answer: Response, io: &mut Io<'_>) {
        let Finished { owner, data } = finished;
        match owner {
            Owner::Caller(tag) => {
                self.done.push_back(Done { queue: qid, tag, outcome: Ok(answer), data });
            }
            Owner::Leave(tag) => self.on_left(qid, tag, answer, io),
            Owner::Step => {
                let page = data.into_buf();
                self.on_step(answer, page.as_ref(), io);
                page.into_iter().for_each(|page| io.pool.give(page));
            }
            Owner::KeepAlive => self.on_kept_alive(answer, io),
            Owner::Event => self.on_event_answer(answer),
        }
    }

    /// Whether the caller has deleted a queue.
    fn has_left(&self, qid: u16) -> bool {
        self.queues.get(usize::from(qid)).is_some_and(|queue| queue.leave() == CloseState::Done)
    }

    fn on_fault(&mut self, qid: u16, fault: Fault, io: &mut Io<'_>) {
        match self.ended {
            None if self.has_left(qid) => {}
            None => self.die(EndReason::Fault { queue: qid, fault }, io),
            // The admin queue broke while the controller was being shut down: that is all, then.
            Some(_) if qid == 0 && self.step.is_shutdown() => self.end(io),
            Some(_) => {}
        }
    }

    fn on_gone(&mut self, qid: u16, reason: Reason, io: &mut Io<'_>) {
        let Some(queue) = self.queues.get_mut(usize::from(qid)) else { return };
        let up = queue.is_up();
        queue.gone();
        let left = queue.leave() == CloseState::Done;
        let flushed = EndReason::Fault { queue: qid, fault: Fault::Flushed };
        match &self.ended {
            None if left => {}
            None => self.die(EndReason::from_reason(qid, self.options.to, reason, up), io),
            // Now we know what ended the work that came home first, or kept us from sending.
            Some(ended)
                if reason != Reason::Local
                    && (*ended == flushed || matches!(ended, EndReason::Fabric(_))) =>
            {
                self.ended = Some(EndReason::from_reason(qid, self.options.to, reason, up));
            }
            Some(_) => {}
        }
        if qid == 0 && self.step.is_shutdown() {
            self.end(io);
        }
        self.conclude();
    }
}

/// What there is to know.
impl Session {
    /// Where in its life the association is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Why the association ended, as soon as it is doomed.
    #[must_use]
    pub fn ended(&self) -> Option<&EndReason> {
        self.ended.as_ref()
    }

    /// Whether the queue pair is one of this session's.
    #[must_use]
    pub fn owns(&self, qp: Qp) -> bool {
        self.queue_of(qp).is_some()
    }

    /// The queue pair of a queue, while there is one: for `Initiator::register_remote`.
    #[must_use]
    pub fn qp(&self, queue: u16) -> Option<Qp> {
        self.queues.get(usize::from(queue))?.qp()
    }

    /// I/O queues that there are; known when ready.
    #[must_use]
    pub fn io_queues(&self) -> u16 {
        self.granted
    }

    /// Commands of the caller that can be outstanding on a queue.
    #[must_use]
    pub fn capacity(&self, queue: u16) -> u16 {
        let reserved = if queue == 0 { ADMIN_RESERVED } else { 0 };
        self.queues.get(usize::from(queue)).map_or(0, |queue| queue.slots() - reserved)
    }

    /// Commands of the caller that are outstanding on a queue.
    #[must_use]
    pub fn outstanding(&self, queue: u16) -> u16 {
        self.queues.get(usize::from(queue)).map_or(0, Queue::callers)
    }

    /// The id of an outstanding command of the caller: by which Abort names it.
    #[must_use]
    pub fn command_id(&self, queue: u16, tag: u64) -> Option<u16> {
        self.queues.get(usize::from(queue))?.command_id(tag)
    }

    /// Whether a queue has room again only when Sends have come home: then a sleep must end also
    /// for those (`Wake::Any`).
    #[must_use]
    pub fn waits_for_sends(&self) -> bool {
        self.queues.iter().any(Queue::is_waiting_for_sends)
    }

    /// Controller id; known when ready, as are the following.
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Identify Controller, as it was when the association began.
    #[must_use]
    pub fn controller(&self) -> &IdentifyController {
        &self.controller
    }

    /// Capabilities.
    #[must_use]
    pub fn cap(&self) -> Cap {
        self.cap
    }

    /// Version.
    #[must_use]
    pub fn vs(&self) -> Vs {
        self.vs
    }

    /// Bytes that one command may move: what the controller says, at most 16 MiB less a page.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u32 {
        let shift = 12 + u32::from(self.cap.mpsmin()) + u32::from(self.controller.mdts);
        match self.controller.mdts {
            0 => MOST_TRANSFER_BYTES,
            _ if shift >= 24 => MOST_TRANSFER_BYTES,
            _ => 1 << shift,
        }
    }

    /// Bytes that a write may carry in its capsule; 0 when it may not.
    #[must_use]
    pub fn in_capsule_bytes(&self) -> u32 {
        let sizes = &self.controller;
        match self.options.in_capsule && sizes.sgls.offset() {
            true => sizes.ioccsz_16.saturating_mul(16).saturating_sub(nvme::Sqe::BYTES as u32),
            false => 0,
        }
    }

    /// What was asked for.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }
}

/// The longest that a descriptor can say, in whole pages.
const MOST_TRANSFER_BYTES: u32 = (1 << 24) - nvme::PAGE_BYTES as u32;
