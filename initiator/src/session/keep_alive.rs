//! Timers: keep alive and command timeouts; and asynchronous events of the controller.

use std::time::{Duration, Instant};

use nvme::feature::AsyncEvent;
use nvme::{AdminOpcode, Sqe};

use super::bring_up::earlier;
use super::queue::{Owner, Queue, Sending};
use super::{Data, EndReason, Io, MOST_EVENTS, Phase, Response, Session};

/// Maximum interval between checks for commands that hang, while there are any.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Keep alive, as negotiated.
#[derive(Debug, Default)]
pub(super) struct KeepAlive {
    /// Interval between two; `None` without keep alive.
    interval: Option<Duration>,
    next: Option<Instant>,
    /// Any command of this host counts as a sign of life.
    traffic_based: bool,
    /// A command was sent since the last check.
    pub(super) traffic: bool,
    outstanding: bool,
}

impl Session {
    /// Handles keep alive and deadlines. Returns the latest time of the next call, unless a
    /// request is submitted before.
    pub fn tick(&mut self, io: &mut Io<'_>) -> Option<Instant> {
        let now = io.now;
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if due(self.deadline) {
            self.deadline = None;
            match self.phase {
                Phase::Starting => self.die(self.overdue(), io),
                _ => self.end(io),
            }
        }
        if due(self.poll_at) {
            self.poll_at = None;
            self.look_again(io);
        }
        if due(self.keep_alive.next) {
            self.send_keep_alive(io);
        }
        self.sweep(io);
        if self.phase == Phase::Ready {
            self.ask_for_event(io);
        }
        let alive = earlier(self.keep_alive.next, self.sweep_at);
        earlier(alive, earlier(self.deadline, self.poll_at))
    }

    pub(super) fn begin_keep_alive(&mut self, now: Instant) {
        let kato = Duration::from_millis(self.options.kato_ms.into());
        self.keep_alive.traffic_based = self.controller.ctratt.tbkas();
        // If traffic counts, a command can delay the next Keep Alive by two intervals.
        let parts = if self.keep_alive.traffic_based { 4 } else { 2 };
        self.keep_alive.interval = (!kato.is_zero()).then(|| kato / parts);
        self.keep_alive.next = self.keep_alive.interval.and_then(|i| now.checked_add(i));
    }

    pub(super) fn stop_clocks(&mut self) {
        self.keep_alive.next = None;
        self.sweep_at = None;
        self.poll_at = None;
    }

    pub(super) fn on_kept_alive(&mut self, answer: Response, io: &mut Io<'_>) {
        self.keep_alive.outstanding = false;
        if let (Err(status), None) = (answer.status.ok(), &self.ended) {
            self.die(EndReason::Refused { what: "Keep Alive", status }, io);
        }
    }

    pub(super) fn on_event_answer(&mut self, answer: Response) {
        self.event_asked = false;
        match answer.status.is_success() {
            true => self.events.push_back(AsyncEvent(answer.result as u32)),
            // After an error status the request is not sent again.
            false => self.wants_events = false,
        }
    }

    /// Keeps one Asynchronous Event Request outstanding, as long as the caller takes the
    /// events.
    pub(super) fn ask_for_event(&mut self, io: &mut Io<'_>) {
        if !self.wants_events || self.event_asked || self.events.len() >= MOST_EVENTS {
            return;
        }
        let sqe = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST);
        self.event_asked = self.own(Owner::Event, sqe, None, io);
    }

    fn send_keep_alive(&mut self, io: &mut Io<'_>) {
        let traffic = std::mem::take(&mut self.keep_alive.traffic);
        let spared = traffic && self.keep_alive.traffic_based;
        self.keep_alive.next = self.keep_alive.interval.and_then(|i| io.now.checked_add(i));
        if self.keep_alive.outstanding || spared {
            return;
        }
        let kato = Duration::from_millis(self.options.kato_ms.into());
        let sqe = Sqe::admin(AdminOpcode::KEEP_ALIVE);
        self.keep_alive.outstanding = self.own(Owner::KeepAlive, sqe, io.now.checked_add(kato), io);
    }

    /// Sends a command of the session itself on the admin queue, which has slots reserved for it.
    fn own(&mut self, owner: Owner, sqe: Sqe, deadline: Option<Instant>, io: &mut Io<'_>) -> bool {
        let sending = Sending { owner, sqe, data: Data::None, deadline };
        self.queues.first_mut().is_some_and(|admin| admin.send(sending, io).is_ok())
    }

    /// Ends the association if a command has exceeded its timeout.
    fn sweep(&mut self, io: &mut Io<'_>) {
        if self.ended.is_some() || self.queues.iter().all(Queue::is_idle) {
            self.sweep_at = None;
            return;
        }
        if self.sweep_at.is_some_and(|at| at > io.now) {
            return;
        }
        let mut next = io.now.checked_add(SWEEP_INTERVAL);
        let mut ended = None;
        for queue in &self.queues {
            let (late, deadline) = queue.late(io.now);
            next = earlier(next, deadline);
            ended = ended.or(late.map(|late| EndReason::Timeout {
                queue: queue.qid(),
                what: late.what,
                after: io.now.saturating_duration_since(late.sent),
            }));
        }
        self.sweep_at = next;
        if let Some(ended) = ended {
            self.die(ended, io);
        }
    }
}
