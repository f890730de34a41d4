//! Authentication: which commands a queue pair accepts before it, its messages, and the worker that
//! computes them.

use std::time::Instant;

use nvme::auth::{Kind, MESSAGE_MAX_BYTES};
use nvme::fabrics::FabricsType;
use nvme::{Sqe, Status};
use tracing::info;

use super::Io;
use super::connection::Connection;
use super::request::State;
use super::requests::Requests;
use super::role::QueueRole;
use crate::auth::exchange::Exchange;
use crate::auth::{DhComputation, DhResult};
use crate::command::{CapsuleInfo, Plan, fabrics};
use crate::controller::association::{Association, next_id};
use crate::diag::cause::Cause;
use crate::message::Message;
use crate::registry::Admitted;
use crate::sched::offload::{self, AuthJob, BoxedTask};

/// Authentication of the host of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Authentication {
    /// The exchange; none if authentication is not required.
    exchange: Option<Box<Exchange>>,
    /// The number of a computation in progress, and the slot that waits for it.
    task: Option<(u64, u16)>,
}

impl Authentication {
    /// Requires authentication from now on, if the host must authenticate.
    pub(super) fn require(&mut self, admission: &Admitted, now: Instant) {
        let association = &admission.association;
        self.exchange = admission
            .authenticate
            .then(|| Box::new(Exchange::new(association.host, admission.name, now)));
    }

    /// Whether its host must authenticate.
    pub(super) fn is_required(&self) -> bool {
        self.exchange.is_some()
    }

    /// Whether its host has authenticated, if it must.
    #[inline]
    pub(super) fn is_done(&self) -> bool {
        self.exchange.as_ref().is_none_or(|exchange| exchange.is_authenticated())
    }

    /// Whether its host has been admitted, even if it has to authenticate again.
    pub(super) fn was_admitted(&self) -> bool {
        self.exchange.as_ref().is_none_or(|exchange| exchange.was_admitted())
    }

    /// Whether its host has exceeded the time to authenticate.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| exchange.is_overdue(now))
    }

    /// Whether its host has not authenticated with its new key in time.
    pub(super) fn has_outlived_key(&mut self, association: &Association, now: Instant) -> bool {
        let key = association.key_changes();
        self.exchange.as_mut().is_some_and(|exchange| exchange.has_outlived_key(key, now))
    }

    /// Checks a command against authentication: its own commands are handled here, all others are
    /// rejected until it is done. None if the command may proceed.
    #[inline]
    pub(super) fn check(
        &mut self,
        sqe: &Sqe,
        received: CapsuleInfo,
        requests: &Requests,
        conn: &mut Connection,
        io: &mut Io<'_>,
    ) -> Option<Result<Plan, Status>> {
        match self.exchange {
            None => None,
            Some(_) => self.check_required(sqe, received, requests, conn, io),
        }
    }

    #[inline(never)]
    fn check_required(
        &mut self,
        sqe: &Sqe,
        received: CapsuleInfo,
        requests: &Requests,
        conn: &mut Connection,
        io: &mut Io<'_>,
    ) -> Option<Result<Plan, Status>> {
        let exchange = self.exchange.as_ref()?;
        match &conn.role {
            QueueRole::Admin(controller) => controller.association.note_traffic(),
            // Any peer can claim a queue of a controller whose host no longer exists.
            QueueRole::Io { association, .. } if exchange.is_authenticated() => {
                association.note_traffic();
            }
            QueueRole::Io { .. } | QueueRole::Nothing { .. } => {}
        }
        if let Err(status) = sqe.check_flags() {
            return Some(Err(status));
        }
        match sqe.is_fabrics().then(|| sqe.fabrics_type()) {
            Some(FabricsType::AUTHENTICATION_SEND) if hears_a_message(requests) => {
                Some(Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()))
            }
            Some(FabricsType::AUTHENTICATION_SEND) => {
                Some(fabrics::authentication_send(sqe, received))
            }
            Some(FabricsType::AUTHENTICATION_RECEIVE) => Some(self.due(sqe, received, conn, io)),
            _ if exchange.is_authenticated() => None,
            _ => Some(Err(Status::AUTHENTICATION_REQUIRED.with_dnr())),
        }
    }

    /// Whether a command arrives on an I/O queue whose host was admitted and is no longer
    /// authenticated. It gets no response: a status would reach the host's file system, a lost path
    /// does not.
    #[inline]
    pub(super) fn is_rejected(&self, sqe: &Sqe, role: &QueueRole) -> bool {
        let lost = |exchange: &Exchange| exchange.was_admitted() && !exchange.is_authenticated();
        let is_lost = self.exchange.as_ref().is_some_and(|exchange| lost(exchange));
        is_lost && role.is_io() && !is_authentication(sqe)
    }

    /// Returns the plan to send the pending message to the host, for an Authentication Receive.
    fn due(
        &mut self,
        sqe: &Sqe,
        received: CapsuleInfo,
        conn: &mut Connection,
        io: &mut Io<'_>,
    ) -> Result<Plan, Status> {
        let to = fabrics::authentication_receive(sqe, received)?;
        let invalid = Status::INVALID_OPCODE.with_dnr();
        let Some(exchange) = &mut self.exchange else { return Err(invalid) };
        let before = exchange.is_authenticated();
        let mut message = [0; MESSAGE_MAX_BYTES];
        let fetched = exchange.fetch(to.len, &mut message, io.now);
        // Also if the exchange has just failed and not even that message fits the host's buffer.
        self.note_outcome(before, false, conn, io);
        let page = message[..fetched?].to_vec();
        Ok(Plan::Give { page, to })
    }

    /// Handles the message of an Authentication Send. Returns whether that is done; otherwise the
    /// command waits until a worker has done the computation.
    ///
    /// # Errors
    /// There is no authentication on this queue.
    pub(super) fn on_message(
        &mut self,
        slot: u16,
        requests: &mut Requests,
        conn: &mut Connection,
        io: &mut Io<'_>,
    ) -> Result<bool, Status> {
        let invalid = Status::INVALID_OPCODE.with_dnr();
        let Some(exchange) = &mut self.exchange else { return Err(invalid) };
        let before = exchange.is_authenticated();
        let host = *exchange.host();
        let message = requests[slot].bytes(io.pool).to_vec();
        let by_host = matches!(Kind::parse(&message), Ok((Kind::Failure2, _)));
        let start = || io.shared.registry.start_exchange(&host);
        let Some(job) = exchange.on_message(&message, start, io.now) else {
            self.note_outcome(before, by_host, conn, io);
            return Ok(true);
        };
        if job.is_light() {
            exchange.on_worked(job.run(), io.now);
            self.note_outcome(before, false, conn, io);
            return Ok(true);
        }
        self.compute(slot, job, requests, conn, io);
        Ok(false)
    }

    /// Submits a computation to a worker; the command waits until it is done.
    fn compute(
        &mut self,
        slot: u16,
        job: DhComputation,
        requests: &mut Requests,
        conn: &Connection,
        io: &mut Io<'_>,
    ) {
        let ticket = next_id();
        let (to, key) = (io.shared.registry.reactor(io.reactor).clone(), requests.key);
        let run = Box::new(move || {
            let worked = job.run();
            // It fails only if the reactor has ended.
            let _ = to.send(Message::Authenticated { key, ticket, worked });
        });
        self.task = Some((ticket, slot));
        requests[slot].enter(State::Offloaded);
        let source = conn.remote.ip().into();
        let job = offload::Job::Authenticate(AuthJob { source, ticket, run: BoxedTask(run) });
        let given = io.shared.offload.submit(job);
        if let (false, Some(exchange)) = (given, &mut self.exchange) {
            exchange.reject(io.now);
        }
    }

    /// Cancels the computation of a queue that closes. If it had not begun, that is no failure of
    /// the host, which may have waited for long. Returns the slot that waited.
    pub(super) fn cancel(&mut self, io: &Io<'_>) -> Option<u16> {
        let (ticket, slot) = self.task.take()?;
        if io.shared.offload.cancel(ticket)
            && let Some(exchange) = &mut self.exchange
        {
            exchange.excuse();
        }
        Some(slot)
    }

    /// Handles the result of a computation; returns the slot that waited, if the connection is
    /// still open.
    pub(super) fn on_computed(
        &mut self,
        ticket: u64,
        worked: DhResult,
        conn: &mut Connection,
        io: &mut Io<'_>,
    ) -> Option<u16> {
        let (_, slot) = self.task.take_if(|(ours, _)| *ours == ticket)?;
        if !conn.is_open() {
            return None;
        }
        if let Some(exchange) = &mut self.exchange {
            let before = exchange.is_authenticated();
            exchange.on_worked(worked, io.now);
            self.note_outcome(before, false, conn, io);
        }
        Some(slot)
    }

    /// Records a failure at the end of the queue pair, if the host began to authenticate and did
    /// not complete it.
    pub(super) fn on_finish(&self, conn: &Connection, io: &Io<'_>) {
        if let Some(exchange) = self.exchange.as_ref().filter(|_| !was_ended(&conn.role))
            && exchange.is_unfinished()
        {
            io.shared.registry.note_failed_proof(conn.remote.ip(), *exchange.host(), io.now);
        }
    }

    /// Notifies the fabric once the host is admitted.
    pub(super) fn mark_admitted(&self, conn: &Connection, io: &mut Io<'_>) {
        if conn.is_connected() && self.is_done() {
            io.fabric.admit(conn.qp);
        }
    }

    /// Records a success or a failure; `by_host`: one that the host reports.
    fn note_outcome(
        &mut self,
        before: bool,
        by_host: bool,
        conn: &mut Connection,
        io: &mut Io<'_>,
    ) {
        let Some(exchange) = &mut self.exchange else { return };
        let (host, remote) = (*exchange.host(), conn.remote);
        let succeeded = exchange.take_success();
        if let Some(why) = exchange.take_failure() {
            io.shared.registry.note_failed_proof(remote.ip(), host, io.now);
            let cause = exchange.cause().unwrap_or(Cause::of_exchange(why, by_host));
            let detail = match exchange.take_detail() {
                Some(detail) => format!("{why}: {detail}"),
                None => why.to_string(),
            };
            conn.record_end(cause, detail, io);
            return;
        }
        let association = conn.role.association();
        if let (true, Some(association), Some(keys)) = (succeeded, association, exchange.keys()) {
            // The key may have been replaced since the exchange began.
            let number = io.shared.registry.key_number(association, keys);
            exchange.set_proved(number);
        }
        if before || !exchange.is_authenticated() {
            return;
        }
        match &mut conn.role {
            QueueRole::Admin(controller) => {
                let association = &controller.association;
                if let Some(io_queues) = io.shared.registry.grant_again(association, io.now) {
                    controller.limits.io_queues = io_queues;
                    conn.limits.io_queues = io_queues;
                }
                io.shared.registry.proved(association);
                if let Some((hash, group)) = exchange.agreed() {
                    info!(%remote, %host, %hash, %group, "host authenticated");
                }
                conn.record_duplicate_host_id(io);
            }
            QueueRole::Io { association, epoch, .. } => {
                let (qid, held) = (conn.qid, conn.unadmitted);
                match io.shared.registry.io_proved(association, qid, *epoch, held) {
                    Ok(()) => {
                        conn.unadmitted = None;
                        exchange.admit();
                    }
                    Err(fabrics::ConnectError { status, cause, .. }) => {
                        // Closes with the next tick: a response may be in flight.
                        exchange.reject(io.now);
                        conn.record_end(cause, status.to_string(), io);
                    }
                }
            }
            QueueRole::Nothing { .. } => {}
        }
        self.mark_admitted(conn, io);
    }
}

/// Whether a message of the host is being transferred or not answered yet. Hosts send the next one
/// later; an attacker could hold buffers in the host's name with more.
fn hears_a_message(requests: &Requests) -> bool {
    requests.iter().any(|entry| {
        matches!(entry.plan, Plan::Authenticate { .. })
            && !matches!(entry.state(), State::Free | State::Replying)
    })
}

/// Whether the target has ended the queue for another reason than a disconnect by the host.
fn was_ended(role: &QueueRole) -> bool {
    match role {
        QueueRole::Nothing { .. } => false,
        // A host displaced by its own next Connect has failed all the same.
        QueueRole::Admin(controller) => {
            let association = &controller.association;
            association.ended_for().is_some() && !association.is_blamed()
        }
        QueueRole::Io { association, epoch, .. } => {
            association.is_closed() || association.epoch() != *epoch
        }
    }
}

fn is_authentication(sqe: &Sqe) -> bool {
    let kinds = [FabricsType::AUTHENTICATION_SEND, FabricsType::AUTHENTICATION_RECEIVE];
    sqe.is_fabrics() && kinds.contains(&sqe.fabrics_type())
}
