//! The connecting end of one measurement: a state machine over a pool and a fabric that it borrows.
//!
//! It keeps `depth` operations outstanding for a given time. Operations are answered in order, so
//! an answer has no more than a number. The clock is read once for each batch of events; a time is
//! from the submission of an operation to the event of its answer.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rdma::pool::PoolPlan;
use rdma::{Buf, Completion, Event, Fault, Qp, QpLimits, Reason, ReceivedWith, RemoteRegion, Work};

use super::Io;
use super::message::{
    LinkReject, MAX_BYTES, MAX_DEPTH, MAX_OUTSTANDING_BYTES, MESSAGE_BYTES, Operation, Test,
    emit_request, immediate_of, parse_answer, sequence,
};
use crate::session::EndReason;
use crate::{Error, bench::report::LONGEST_NS};

/// Work requests of the connecting end for each outstanding operation: the request, and that of
/// the previous operation, whose completion may arrive later than its answer.
const SENDS_PER_OPERATION: u32 = 2;
/// RDMA Reads to answer concurrently: what most adapters support.
const READS: u8 = 16;
/// Reject reason of the InfiniBand CM: invalid service ID.
const INVALID_SERVICE_ID: i32 = 8;

/// The pool of a connecting end: data of one measurement (`send` has twice as many), and messages.
pub(super) const PLAN: PoolPlan = PoolPlan::without_receives(
    MAX_DEPTH * (SENDS_PER_OPERATION + 1),
    SENDS_PER_OPERATION as u64 * MAX_OUTSTANDING_BYTES as u64,
    MAX_BYTES,
);

/// Results of one measurement.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) test: Test,
    /// Times of round trips in nanoseconds.
    pub(super) round_trips: Histogram<u64>,
    /// Duration of the measurement.
    pub(super) elapsed: Duration,
}

/// Time limits of the stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// How long to submit operations.
    pub(super) runtime: Duration,
    /// How long connecting and each answer may take.
    pub(super) timeout: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Connecting,
    /// Operations are submitted until then.
    Running {
        until: Instant,
    },
    /// The outstanding ones are pending.
    Draining,
    /// `disconnect` was called.
    Closing,
    Ended,
}

/// The connecting end of one measurement.
pub(super) struct Client {
    qp: Qp,
    to: SocketAddr,
    limits: Limits,
    stage: Stage,
    /// End of the stage or of the wait for the next answer.
    deadline: Instant,
    /// Free buffers of requests.
    requests: Vec<Buf>,
    /// Memory for `read` and `write`: that of operation `n` is at `n` modulo the depth.
    memory: Vec<RemoteRegion>,
    /// Submission times of outstanding operations.
    outstanding: VecDeque<Instant>,
    started: Instant,
    submitted: u64,
    answered: u64,
    measured: Measured,
    failure: Option<Error>,
}

impl Client {
    /// Requests the connection.
    ///
    /// # Errors
    /// There is no route or no device.
    pub(super) fn connect(
        now: Instant,
        to: SocketAddr,
        test: Test,
        limits: Limits,
        io: &mut Io<'_>,
    ) -> Result<Client, Error> {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3);
        let round_trips = histogram.map_err(|error| Error::Local(error.to_string()))?;
        let (receives, sends) = (test.depth, test.depth * SENDS_PER_OPERATION);
        let wanted = QpLimits { receives, sends, reads: READS };
        let connected = io.fabric.connect(to, &test.emit(), wanted);
        let qp = connected.map_err(|error| Error::Local(error.to_string()))?;
        let mut client = Client {
            qp,
            to,
            limits,
            stage: Stage::Connecting,
            deadline: now + limits.timeout,
            requests: Vec::with_capacity(sends as usize),
            memory: Vec::new(),
            outstanding: VecDeque::with_capacity(test.depth as usize),
            started: now,
            submitted: 0,
            answered: 0,
            measured: Measured { test, round_trips, elapsed: Duration::ZERO },
            failure: None,
        };
        for _ in 0..receives {
            match io.pool.take_cell() {
                Some(buf) => io.fabric.post(qp, 0, Work::Recv(buf)),
                None => client.fail(no_memory(), io),
            }
        }
        for _ in 0..sends {
            let buf = match test.operation.is_send() {
                true => io.pool.take_data(test.size_bytes),
                false => io.pool.take_cell(),
            };
            match buf {
                Some(buf) => client.requests.push(buf),
                None => client.fail(no_memory(), io),
            }
        }
        Ok(client)
    }

    /// Handles an event.
    pub(super) fn event(&mut self, now: Instant, event: Event, io: &mut Io<'_>) {
        match event {
            Event::Established(qp) if qp == self.qp => self.established(now, io),
            Event::Done(done) => self.done(now, done, io),
            Event::Gone(qp, reason) if qp == self.qp => self.gone(reason, io),
            _ => {}
        }
    }

    /// Submits operations as far as the depth allows, and ends stages whose time is over.
    pub(super) fn advance(&mut self, now: Instant, io: &mut Io<'_>) {
        if let Stage::Running { until } = self.stage {
            if now >= until {
                self.measured.elapsed = now - self.started;
                self.stage = Stage::Draining;
            } else {
                while self.outstanding.len() < self.measured.test.depth as usize
                    && let Some(buf) = self.requests.pop()
                {
                    self.submit(now, buf, io);
                }
            }
        }
        if self.stage == Stage::Draining && self.outstanding.is_empty() {
            self.stage = Stage::Closing;
            io.fabric.disconnect(self.qp);
        }
        if now >= self.deadline && !matches!(self.stage, Stage::Closing | Stage::Ended) {
            self.fail(self.timed_out(), io);
        }
    }

    /// Ends the measurement early, without results.
    pub(super) fn interrupt(&mut self, io: &mut Io<'_>) {
        self.fail(Error::Local("interrupted".into()), io);
    }

    /// Whether all has ended and every buffer is in the pool again.
    pub(super) fn has_ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// When to call [`Client::advance`] at the latest. None while the connection closes: the provider
    /// ends that within its own time limits.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Running { until } => Some(until.min(self.deadline)),
            Stage::Connecting | Stage::Draining => Some(self.deadline),
            Stage::Closing | Stage::Ended => None,
        }
    }

    /// The results.
    ///
    /// # Errors
    /// The measurement failed.
    pub(super) fn into_measured(self) -> Result<Measured, Error> {
        match self.failure {
            Some(failure) => Err(failure),
            None if self.measured.round_trips.is_empty() => Err(Error::Local(format!(
                "no operation was answered within {:?}: give more time with --runtime",
                self.limits.runtime
            ))),
            None => Ok(self.measured),
        }
    }

    fn established(&mut self, now: Instant, io: &mut Io<'_>) {
        if self.stage != Stage::Connecting {
            return;
        }
        let Test { operation, size_bytes, depth } = self.measured.test;
        let count = if operation.is_send() { 0 } else { depth };
        for _ in 0..count {
            let Some(buf) = io.pool.take_data(size_bytes) else {
                return self.fail(no_memory(), io);
            };
            match io.fabric.register_remote(self.qp, buf) {
                Ok(region) => self.memory.push(region),
                Err((buf, error)) => {
                    io.pool.give(buf);
                    return self.fail(Error::Local(error.to_string()), io);
                }
            }
        }
        self.started = now;
        self.stage = Stage::Running { until: now + self.limits.runtime };
        self.deadline = now + self.limits.timeout;
    }

    fn submit(&mut self, now: Instant, mut buf: Buf, io: &mut Io<'_>) {
        let number = self.submitted.to_le_bytes();
        let depth = u64::from(self.measured.test.depth);
        if self.memory.is_empty() {
            io.pool.bytes_mut(&mut buf)[..8].copy_from_slice(&number);
        } else {
            let region = &mut self.memory[(self.submitted % depth) as usize];
            if self.measured.test.operation == Operation::Read {
                io.pool.copy_in(region, 0, &number);
            }
            buf.select(0, MESSAGE_BYTES);
            io.pool.bytes_mut(&mut buf).copy_from_slice(&emit_request(region.remote()));
        }
        let immediate = immediate_of(self.submitted);
        self.submitted += 1;
        if self.outstanding.is_empty() {
            self.deadline = now + self.limits.timeout;
        }
        self.outstanding.push_back(now);
        let work = match self.measured.test.operation {
            Operation::SendImmediate => Work::SendImmediate { from: buf, immediate },
            _ => Work::Send { from: buf, invalidate: None },
        };
        io.fabric.post(self.qp, 0, work);
    }

    fn done(&mut self, now: Instant, done: Completion, io: &mut Io<'_>) {
        let Completion { qp, work, outcome, with, .. } = done;
        let is_open = qp == self.qp && !matches!(self.stage, Stage::Closing | Stage::Ended);
        let bytes = match outcome {
            Ok(bytes) if is_open => bytes,
            outcome => {
                io.pool.give(work.into_buf());
                // The reason of a flushed one follows: `Gone`.
                if let Err(fault) = outcome
                    && is_open
                    && fault != Fault::Flushed
                {
                    self.fail(Error::Local(format!("the connection failed: {fault}")), io);
                }
                return;
            }
        };
        match work {
            Work::Recv(buf) => {
                let answer = self.answer(&io.pool.bytes(&buf)[..bytes as usize], with);
                io.fabric.post(qp, 0, Work::Recv(buf));
                if let Err(violation) = self.answered(now, answer, io) {
                    self.fail(Error::Local(violation), io);
                }
            }
            other => self.requests.push(other.into_buf()),
        }
    }

    /// The number of an answer, and whether the data were intact. None if it is no answer to this
    /// operation.
    fn answer(&self, message: &[u8], with: ReceivedWith) -> Option<(u64, bool)> {
        let Test { operation, size_bytes, .. } = self.measured.test;
        let expected = immediate_of(self.answered);
        match (operation, with) {
            (Operation::WriteImmediate, ReceivedWith::Write { immediate, bytes }) => {
                let is_expected = immediate == expected && bytes == size_bytes;
                is_expected.then_some((self.answered, true))
            }
            (Operation::WriteImmediate, _) => None,
            (Operation::SendImmediate, with) => {
                let is_expected = with == ReceivedWith::Immediate(expected);
                parse_answer(message).filter(|_| is_expected)
            }
            _ => parse_answer(message),
        }
    }

    /// An answer has arrived.
    fn answered(
        &mut self,
        now: Instant,
        answer: Option<(u64, bool)>,
        io: &mut Io<'_>,
    ) -> Result<(), String> {
        let violates = |what: &str| format!("the listening end violates the protocol: {what}");
        let (number, is_intact) = answer.ok_or_else(|| violates("no answer to this operation"))?;
        if number != self.answered {
            return Err(violates("an answer out of order"));
        }
        let since = self.outstanding.pop_front();
        let since = since.ok_or_else(|| violates("an answer to no request"))?;
        let Test { operation, depth, .. } = self.measured.test;
        let mut written = number.to_le_bytes();
        if operation.is_write() {
            let region = &self.memory[(number % u64::from(depth)) as usize];
            io.pool.copy_out(region, 0, &mut written);
        }
        if !is_intact || sequence(&written) != Some(number) {
            return Err(format!(
                "the data of operation {number} differ from what was sent: the network or an \
                 adapter corrupts data"
            ));
        }
        self.answered += 1;
        self.deadline = now + self.limits.timeout;
        if matches!(self.stage, Stage::Running { .. }) {
            let took = now.saturating_duration_since(since).as_nanos();
            let took_ns = u64::try_from(took).unwrap_or(u64::MAX).clamp(1, LONGEST_NS);
            self.measured.round_trips.saturating_record(took_ns);
        }
        Ok(())
    }

    fn gone(&mut self, reason: Reason, io: &mut Io<'_>) {
        if self.stage != Stage::Closing {
            let why = self.ended_by(reason);
            self.failure.get_or_insert(why);
        }
        for region in std::mem::take(&mut self.memory) {
            let buf = io.fabric.deregister_remote(region);
            io.pool.give(buf);
        }
        self.requests.drain(..).for_each(|buf| io.pool.give(buf));
        self.stage = Stage::Ended;
    }

    /// The reason why the connection ended that was not closed by this end.
    fn ended_by(&self, reason: Reason) -> Error {
        let to = self.to;
        let is_up = self.stage != Stage::Connecting;
        let refused_port = -(nix::errno::Errno::ECONNREFUSED as i32);
        match reason {
            Reason::Rejected { code, .. } if code == INVALID_SERVICE_ID || code == refused_port => {
                Error::Ended(EndReason::NobodyListens { to })
            }
            Reason::Rejected { code, private_data } => {
                Error::Local(match LinkReject::parse(&private_data) {
                    Some(refusal) => {
                        format!("the listening end refused the test: {}", refusal.sentence())
                    }
                    None => format!(
                        "{to} refused the connection with code {code}: what listens there is no \
                         `nvmf link --listen`"
                    ),
                })
            }
            Reason::Device => Error::Ended(EndReason::Device),
            _ if is_up => Error::Local("the listening end closed the connection".into()),
            _ => Error::Ended(EndReason::Unreachable { to }),
        }
    }

    fn timed_out(&self) -> Error {
        let after = self.limits.timeout;
        Error::Local(match self.stage {
            Stage::Connecting => format!("no connection to {} within {after:?}", self.to),
            _ => format!("no answer from {} within {after:?}", self.to),
        })
    }

    fn fail(&mut self, why: Error, io: &mut Io<'_>) {
        if !matches!(self.stage, Stage::Closing | Stage::Ended) {
            self.failure.get_or_insert(why);
            self.stage = Stage::Closing;
            io.fabric.disconnect(self.qp);
        }
    }
}

fn no_memory() -> Error {
    Error::Local("too little memory for this --bs and --iodepth".into())
}
