//! Shutdown: orderly, or after an error with its reason; and deletion of a single queue. Either way
//! every request comes home.

use std::collections::VecDeque;
use std::time::Duration;

use nvme::fabrics::{Disconnect, PropertySet};
use nvme::property::{Csts, Property, Shutdown, ShutdownStatus};

use super::bring_up::{Step, earlier};
use super::queue::{CloseState, Finished, Owner, Queue, Sending};
use super::{Data, Done, EndReason, Io, Lost, Phase, Refused, Response, Session};

/// How long a controller may take to shut down, unless it says that it needs longer.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// And then at most this.
const SHUTDOWN_MOST: Duration = Duration::from_secs(60);

impl Session {
    /// Shuts the controller down and ends all connections. Outstanding commands come home lost.
    pub fn close(&mut self, io: &mut Io<'_>) {
        match self.phase {
            Phase::Idle | Phase::Starting => self.die(EndReason::Closed, io),
            Phase::Ready => self.shut_down(io),
            Phase::Closing | Phase::Ended => {}
        }
    }

    /// Ends all connections at once, without telling the controller. Outstanding commands come
    /// home lost.
    pub fn abort(&mut self, io: &mut Io<'_>) {
        match self.phase {
            Phase::Closing => self.end(io),
            Phase::Ended => {}
            _ => self.die(EndReason::Closed, io),
        }
    }

    /// Deletes an I/O queue alone (Disconnect): no more requests are taken there. The target answers
    /// what is under way before; the Disconnect comes home as a request does, under this tag. When it
    /// was refused, the queue is there as before. Whatever the target has not answered by then comes
    /// home lost.
    ///
    /// # Errors
    /// Not Ready where there is no such I/O queue (any more); otherwise as of [`Session::submit`].
    pub fn disconnect(&mut self, queue: u16, tag: u64, io: &mut Io<'_>) -> Result<(), Refused> {
        if queue == 0 || !self.is_open(queue) {
            return Err(Refused::NotReady);
        }
        let Some(leaving) = self.queues.get_mut(usize::from(queue)) else {
            return Err(Refused::NotReady);
        };
        if leaving.callers() >= leaving.slots() || self.done.len() >= self.room {
            return Err(Refused::Full);
        }
        let deadline = io.now.checked_add(self.options.command_timeout);
        let sqe = Disconnect { recfmt: 0 }.emit();
        let sending = Sending { owner: Owner::Leave(tag), sqe, data: Data::None, deadline };
        leaving.send(sending, io).map_err(|(_, why)| why)?;
        leaving.set_leave(CloseState::Asked);
        self.sweep_at = earlier(self.sweep_at, deadline);
        Ok(())
    }

    /// Whether a queue takes requests, as far as it is not full.
    #[must_use]
    pub fn is_open(&self, queue: u16) -> bool {
        let queue = self.queues.get(usize::from(queue)).filter(|_| self.phase == Phase::Ready);
        queue.is_some_and(|queue| queue.is_up() && queue.leave() == CloseState::Not)
    }

    /// A Disconnect was answered.
    pub(super) fn on_left(&mut self, queue: u16, tag: u64, answer: Response, io: &mut Io<'_>) {
        self.done.push_back(Done { queue, tag, outcome: Ok(answer), data: Data::None });
        let Some(left) = self.queues.get_mut(usize::from(queue)) else { return };
        if !answer.status.is_success() {
            return left.set_leave(CloseState::Not);
        }
        left.set_leave(CloseState::Done);
        left.qp().into_iter().for_each(|qp| io.fabric.disconnect(qp));
        lose(left, &mut self.done, io);
    }

    /// The association is over, for this reason if there was none before.
    pub(super) fn die(&mut self, why: EndReason, io: &mut Io<'_>) {
        self.ended.get_or_insert(why);
        self.end(io);
    }

    /// Ends all connections.
    pub(super) fn end(&mut self, io: &mut Io<'_>) {
        self.phase = Phase::Closing;
        self.step = Step::Nothing;
        self.deadline = None;
        self.stop_clocks();
        self.lose_all(io);
        for queue in &self.queues {
            queue.qp().into_iter().for_each(|qp| io.fabric.disconnect(qp));
        }
        self.conclude();
    }

    /// With the last queue pair the association is gone.
    pub(super) fn conclude(&mut self) {
        if self.ended.is_some() && self.queues.iter().all(|queue| queue.qp().is_none()) {
            self.phase = Phase::Ended;
            self.stop_clocks();
            self.deadline = None;
        }
    }

    pub(super) fn on_shutdown(&mut self, csts: Csts, io: &mut Io<'_>) {
        match self.step {
            Step::Shutdown => self.get(Step::ShutdownStatus, Property::CSTS, io),
            // What was written may not be durable.
            _ if csts.cfs() => {
                self.ended = Some(EndReason::Fatal);
                self.end(io);
            }
            _ if csts.shst() == ShutdownStatus::Complete => self.end(io),
            _ => self.poll_later(io),
        }
    }

    fn shut_down(&mut self, io: &mut Io<'_>) {
        self.ended = Some(EndReason::Closed);
        self.phase = Phase::Closing;
        self.stop_clocks();
        self.lose_all(io);
        for queue in self.queues.iter().skip(1) {
            queue.qp().into_iter().for_each(|qp| io.fabric.disconnect(qp));
        }
        let needs = Duration::from_micros(self.controller.rtd3e_us.into());
        let limit = needs.clamp(SHUTDOWN_LIMIT, SHUTDOWN_MOST);
        self.deadline = io.now.checked_add(limit);
        let cc = self.configuration().with_en(true).with_shn(Shutdown::Normal);
        let sqe = PropertySet::new(Property::CC, cc.0.into()).emit();
        self.command(Step::Shutdown, 0, sqe, None, io);
    }

    fn lose_all(&mut self, io: &mut Io<'_>) {
        for queue in &mut self.queues {
            lose(queue, &mut self.done, io);
        }
    }
}

/// Everything that is outstanding on a queue comes home without an answer.
fn lose(queue: &mut Queue, done: &mut VecDeque<Done>, io: &mut Io<'_>) {
    while let Some(Finished { owner, data }) = queue.lose(io) {
        match owner.tag() {
            Some(tag) => {
                done.push_back(Done { queue: queue.qid(), tag, outcome: Err(Lost), data });
            }
            None => data.into_buf().into_iter().for_each(|buf| io.pool.give(buf)),
        }
    }
}
