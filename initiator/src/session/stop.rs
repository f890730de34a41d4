//! The end: an orderly shut-down, or a death with a reason. Either way every request comes home.

use std::time::Duration;

use nvme::fabrics::PropertySet;
use nvme::property::{Csts, Property, Shutdown, ShutdownStatus};

use super::queue::{Finished, Owner};
use super::start::Step;
use super::{Done, Ended, Io, Lost, Phase, Session};

/// How long a controller may take to shut down, unless it says that it needs longer.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// And then at most this.
const SHUTDOWN_MOST: Duration = Duration::from_secs(60);

impl Session {
    /// Shuts the controller down and ends all connections. Outstanding commands come home lost.
    pub fn close(&mut self, io: &mut Io<'_>) {
        match self.phase {
            Phase::Idle | Phase::Starting => self.die(Ended::Closed, io),
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
            _ => self.die(Ended::Closed, io),
        }
    }

    /// The association is over, for this reason if there was none before.
    pub(super) fn die(&mut self, why: Ended, io: &mut Io<'_>) {
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
            _ if csts.shst() == ShutdownStatus::Complete || csts.cfs() => self.end(io),
            _ => self.poll_later(io),
        }
    }

    fn shut_down(&mut self, io: &mut Io<'_>) {
        self.ended = Some(Ended::Closed);
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
            while let Some(Finished { owner, data }) = queue.lose(io) {
                match owner {
                    Owner::Caller(tag) => {
                        let queue = queue.qid();
                        self.done.push_back(Done { queue, tag, outcome: Err(Lost), data });
                    }
                    _ => data.into_buf().into_iter().for_each(|buf| io.pool.give(buf)),
                }
            }
        }
    }
}
