//! Shutdown: orderly, or after an error with its reason; and deletion of a single queue. In both
//! cases every request is returned.

use std::collections::VecDeque;
use std::time::Duration;

use nvme::fabrics::{Disconnect, PropertySet};
use nvme::property::{Csts, Property, Shutdown, ShutdownStatus};
use rdma::Fault;

use super::bring_up::{Step, earlier};
use super::queue::{CloseState, Finished, Owner, Queue, Sending};
use super::{Data, Done, EndReason, Io, Lost, Phase, Refused, Response, Session};

/// Time for a target that has closed the connection of a queue to close those of the others.
const TARGET_CLOSE_LIMIT: Duration = Duration::from_millis(100);
/// Time limit of a controller shutdown, unless the controller reports a longer one.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Upper bound of the reported limit.
const SHUTDOWN_MOST: Duration = Duration::from_secs(60);

impl Session {
    /// Shuts the controller down and closes all connections. Outstanding commands are returned as lost.
    pub fn close(&mut self, io: &mut Io<'_>) {
        match self.phase {
            Phase::Idle | Phase::Starting => self.die(EndReason::Closed, io),
            Phase::Ready => self.shut_down(io),
            Phase::Closing | Phase::Ended => {}
        }
    }

    /// Closes all connections at once, without a shutdown of the controller. Outstanding commands are
    /// returned as lost.
    pub fn abort(&mut self, io: &mut Io<'_>) {
        match self.phase {
            Phase::Closing => self.end(io),
            Phase::Ended => {}
            _ => self.die(EndReason::Closed, io),
        }
    }

    /// Deletes a single I/O queue (Disconnect): it accepts no more requests. The target completes
    /// outstanding commands first; the Disconnect is returned like a request, with this tag. If it
    /// failed, the queue is unchanged. Commands that the target has not completed by then are
    /// returned as lost.
    ///
    /// # Errors
    /// Not Ready if there is no such I/O queue (any more); otherwise as for [`Session::submit`].
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

    /// Whether a queue accepts requests, unless it is full.
    pub fn is_open(&self, queue: u16) -> bool {
        let queue = self.queues.get(usize::from(queue)).filter(|_| self.phase == Phase::Ready);
        queue.is_some_and(|queue| queue.is_up() && queue.leave() == CloseState::Not)
    }

    /// A Disconnect was completed.
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

    /// Ends the association, for this reason if there was none before. If the target has closed a
    /// connection, the others are not closed at once: only the target can say that it closes them too.
    pub(super) fn die(&mut self, why: EndReason, io: &mut Io<'_>) {
        let is_of_target = match why {
            EndReason::Peer { .. } => true,
            // Work is flushed before the reason is known.
            EndReason::Fault { fault, .. } => fault == Fault::Flushed,
            _ => false,
        };
        let may_wait = is_of_target && self.phase == Phase::Ready;
        self.ended.get_or_insert(why);
        if !may_wait {
            return self.end(io);
        }
        self.begin_end(io);
        self.deadline = io.now.checked_add(TARGET_CLOSE_LIMIT);
        self.conclude();
    }

    /// Closes all connections.
    pub(super) fn end(&mut self, io: &mut Io<'_>) {
        self.begin_end(io);
        for queue in &self.queues {
            queue.qp().into_iter().for_each(|qp| io.fabric.disconnect(qp));
        }
        self.conclude();
    }

    fn begin_end(&mut self, io: &mut Io<'_>) {
        self.phase = Phase::Closing;
        self.step = Step::Nothing;
        self.deadline = None;
        self.stop_clocks();
        self.lose_all(io);
    }

    /// The association ends with its last queue pair.
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
            // Written data may not be durable.
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

/// Returns all outstanding commands of a queue as lost.
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
