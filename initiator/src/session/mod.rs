//! One association: a host, a controller, an admin queue and I/O queues, each on its own queue
//! pair.
//!
//! ```text
//! Idle ──start──► Starting ──► Ready ──close──► Closing ──► Ended
//!                     └───────────┴─── a fault, a timeout, a protocol violation ─────^
//! ```
//!
//! A session owns its state and borrows its resources ([`Io`]). Its driver
//!
//! * passes it every [`Event`] of the fabric ([`Session::on_event`] returns those of others),
//! * calls [`Session::tick`] before each sleep, and again at the time that it returned,
//! * flushes the fabric at the end of each iteration,
//! * takes finished requests ([`Session::next_done`]) and events of the controller
//!   ([`Session::next_event`]).
//!
//! Each request results in exactly one [`Done`], with its data, also if the association has ended
//! before a completion. A command is done when its response is received; the buffer of its capsule
//! is returned later. There is no reconnection: an association that has ended is final.
//!
//! The target is not trusted. A completion for no command, a second completion, or one of a wrong
//! length ends the association with a corresponding [`EndReason`].

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
use rdma::{Buf, Completion, Event, Fault, Qp, Reason, ReceivedWith, Work};

pub use end_reason::{EndReason, Violation};
pub use request::{Data, Done, Io, Lost, Options, Phase, Refused, Request, Response};

use auth::Proof;
use bring_up::Step;
pub(crate) use bring_up::earlier;
use keep_alive::KeepAlive;
use queue::{CloseState, Finished, Owner, Queue, Sending};

/// Entries of the admin queue, as used by every NVMe/RDMA host.
const ADMIN_ENTRIES: u16 = 32;

/// Slots of the admin queue reserved for Keep Alive and Asynchronous Event Request.
const ADMIN_RESERVED: u16 = 2;

/// Maximum number of events that wait for the caller; no more are requested meanwhile.
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
    /// State of the authentication in progress.
    proof: Option<Box<Proof>>,
    /// Deadline of the initialization or of the shutdown.
    deadline: Option<Instant>,
    /// Time of the next poll of the controller's status.
    poll_at: Option<Instant>,
    done: VecDeque<Done>,
    /// Maximum number of finished requests that wait for the caller before it can submit more.
    room: usize,
    events: VecDeque<AsyncEvent>,
    wants_events: bool,
    event_asked: bool,
    keep_alive: KeepAlive,
    /// Time of the next check for commands that hang.
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
    /// An association that has not started.
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

    /// Handles an event of the fabric. Events of queue pairs of other sessions are returned.
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
    /// The reason; the request is returned.
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

    /// Returns the next request that is done.
    pub fn next_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// Whether a request is done.
    pub(crate) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Returns the next asynchronous event of the controller. Its log page acknowledges it: until
    /// that is read, no more events of its type are reported.
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
                self.on_response(qid, buf, len, completion.with, io);
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

    /// Whether completions on a queue are still processed.
    fn hears(&self, qid: u16) -> bool {
        let there = self.ended.is_none() && !self.has_left(qid);
        there || (qid == 0 && self.step.is_shutdown())
    }

    fn on_response(&mut self, qid: u16, buf: Buf, len: u32, with: ReceivedWith, io: &mut Io<'_>) {
        let Some(queue) = self.queues.get_mut(usize::from(qid)) else { return };
        let response = queue.response(&buf, len, with, io);
        // Before anything new is sent, so that there is a receive for every completion.
        queue.receive(buf, io);
        match response {
            Ok((finished, answer)) => self.on_answer(qid, finished, answer, io),
            // Commands that were aborted when the shutdown began may still be completed.
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
            // The admin queue failed during the shutdown of the controller: end now.
            Some(_) if qid == 0 && self.step.is_shutdown() => self.end(io),
            Some(_) => {}
        }
    }

    fn on_gone(&mut self, qid: u16, reason: Reason, io: &mut Io<'_>) {
        let Some(queue) = self.queues.get_mut(usize::from(qid)) else { return };
        let up = queue.is_up();
        queue.gone(&reason);
        let left = queue.leave() == CloseState::Done;
        let flushed = EndReason::Fault { queue: qid, fault: Fault::Flushed };
        match &self.ended {
            None if left => {}
            None => self.die(EndReason::from_reason(qid, self.options.to, reason, up), io),
            // Now the reason is known for work that was flushed before, or for a failed send.
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

/// State of the association.
impl Session {
    /// Returns the phase of the association.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns why the association ended, as soon as its end is certain.
    pub fn ended(&self) -> Option<&EndReason> {
        self.ended.as_ref()
    }

    /// Whether the target has ended the association: it has closed the connections of all queues. One
    /// that has closed a single one may still carry out commands of the others.
    pub fn is_ended_by_target(&self) -> bool {
        self.ended.is_some() && self.queues.iter().all(Queue::is_closed_by_target)
    }

    /// Whether the queue pair belongs to this session.
    pub fn owns(&self, qp: Qp) -> bool {
        self.queue_of(qp).is_some()
    }

    /// Returns the queue pair of a queue, while it exists: for `Initiator::register_remote`.
    pub fn qp(&self, queue: u16) -> Option<Qp> {
        self.queues.get(usize::from(queue))?.qp()
    }

    /// Returns the number of I/O queues; known when ready.
    pub fn io_queues(&self) -> u16 {
        self.granted
    }

    /// Commands of the caller that can be outstanding on a queue.
    pub fn capacity(&self, queue: u16) -> u16 {
        let reserved = if queue == 0 { ADMIN_RESERVED } else { 0 };
        self.queues.get(usize::from(queue)).map_or(0, |queue| queue.slots() - reserved)
    }

    /// Commands of the caller that are outstanding on a queue.
    pub fn outstanding(&self, queue: u16) -> u16 {
        self.queues.get(usize::from(queue)).map_or(0, Queue::callers)
    }

    /// Returns the id of an outstanding command of the caller, as used by Abort.
    pub fn command_id(&self, queue: u16, tag: u64) -> Option<u16> {
        self.queues.get(usize::from(queue))?.command_id(tag)
    }

    /// Whether a queue has free slots only after Sends have completed: then they must also end a
    /// sleep (`Wake::Any`).
    #[must_use]
    pub fn waits_for_sends(&self) -> bool {
        self.queues.iter().any(Queue::is_waiting_for_sends)
    }

    /// Controller id; known when ready, as are the following.
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Identify Controller, as read at the start of the association.
    pub fn controller(&self) -> &IdentifyController {
        &self.controller
    }

    /// Capabilities.
    pub fn cap(&self) -> Cap {
        self.cap
    }

    /// Version.
    pub fn vs(&self) -> Vs {
        self.vs
    }

    /// Maximum number of bytes of one command: the limit of the controller, at most 16 MiB less a page.
    pub fn max_transfer_bytes(&self) -> u32 {
        let shift = 12 + u32::from(self.cap.mpsmin()) + u32::from(self.controller.mdts);
        match self.controller.mdts {
            0 => MOST_TRANSFER_BYTES,
            _ if shift >= 24 => MOST_TRANSFER_BYTES,
            _ => 1 << shift,
        }
    }

    /// Maximum number of bytes of in-capsule data of a write; 0: not supported.
    pub fn in_capsule_bytes(&self) -> u32 {
        let sizes = &self.controller;
        match self.options.in_capsule && sizes.sgls.offset() {
            true => sizes.ioccsz_16.saturating_mul(16).saturating_sub(nvme::Sqe::BYTES as u32),
            false => 0,
        }
    }

    /// Returns the options of the session.
    pub fn options(&self) -> &Options {
        &self.options
    }
}

/// Maximum length in a descriptor, in whole pages.
const MOST_TRANSFER_BYTES: u32 = (1 << 24) - nvme::PAGE_BYTES as u32;
