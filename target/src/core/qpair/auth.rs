//! Authentication: what a queue lets through before it, its messages, and who does its work.

use std::time::Instant;

use nvme::auth::{Kind, MESSAGE_MAX_BYTES};
use nvme::fabrics::{ConnectData, FabricsType};
use nvme::{Sqe, Status};
use tracing::info;

use super::{Io, Link, QueuePair, QueueRole, State};
use crate::core::auth::exchange::Exchange;
use crate::core::auth::{DhComputation, DhResult};
use crate::core::command::{CapsuleInfo, Plan, fabrics};
use crate::core::controller::association::{Association, next_id};
use crate::core::diag::cause::Cause;
use crate::core::message::Message;
use crate::core::registry::Admitted;
use crate::core::sched::offload::{self, AuthJob};

impl QueuePair {
    /// A host that has failed too often may not even begin.
    pub(super) fn check_throttle(
        &self,
        data: &ConnectData,
        io: &Io<'_>,
    ) -> Result<(), fabrics::Refusal> {
        let Ok(host) = data.hostnqn() else { return Ok(()) };
        if !io.shared.registry.is_throttled(self.source(), &host, io.now) {
            return Ok(());
        }
        Err(fabrics::Refusal::busy(Cause::Throttled))
    }

    /// The queue is about to serve: does its host have to prove itself first?
    pub(super) fn demand(&mut self, admission: &Admitted, io: &Io<'_>) {
        let association = &admission.association;
        self.proof = admission
            .authenticate
            .then(|| Box::new(Exchange::new(association.host, admission.name, io.now)));
    }

    /// What authentication has to say to a command: its own are taken here, all others are
    /// refused until it is done. None where the command may go on.
    pub(super) fn prove(
        &mut self,
        sqe: &Sqe,
        received: CapsuleInfo,
        io: &mut Io<'_>,
    ) -> Option<Result<Plan, Status>> {
        let proof = self.proof.as_ref()?;
        match &self.serves {
            QueueRole::Admin(controller) => controller.association.note_traffic(),
            // Anybody can claim a queue of a controller; its host may be long dead.
            QueueRole::Io { association, .. } if proof.is_authenticated() => {
                association.note_traffic();
            }
            QueueRole::Io { .. } | QueueRole::Nothing { .. } => {}
        }
        if let Err(status) = sqe.check_flags() {
            return Some(Err(status));
        }
        match sqe.is_fabrics().then(|| sqe.fabrics_type()) {
            Some(FabricsType::AUTHENTICATION_SEND) if self.hears_a_message() => {
                Some(Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()))
            }
            Some(FabricsType::AUTHENTICATION_SEND) => {
                Some(fabrics::authentication_send(sqe, received))
            }
            Some(FabricsType::AUTHENTICATION_RECEIVE) => Some(self.due(sqe, received, io)),
            _ if proof.is_authenticated() => None,
            _ => Some(Err(Status::AUTHENTICATION_REQUIRED.with_dnr())),
        }
    }

    /// Whether a message of the host is on its way or not answered yet. Hosts send the next one
    /// later; somebody else would hold buffers in the host's name.
    fn hears_a_message(&self) -> bool {
        self.slots.iter().any(|entry| {
            matches!(entry.plan, Plan::Authenticate { .. })
                && !matches!(entry.state(), State::Free | State::Replying)
        })
    }

    /// The message that is due to the host, for an Authentication Receive.
    fn due(&mut self, sqe: &Sqe, received: CapsuleInfo, io: &mut Io<'_>) -> Result<Plan, Status> {
        let to = fabrics::authentication_receive(sqe, received)?;
        let Some(proof) = &mut self.proof else { return Err(Status::INVALID_OPCODE.with_dnr()) };
        let before = proof.is_authenticated();
        let mut message = [0; MESSAGE_MAX_BYTES];
        let fetched = proof.fetch(to.len, &mut message, io.now);
        // Also where it failed just now, and even that does not fit where the host wants it.
        self.note_proof(before, false, io);
        let page = message[..fetched?].to_vec();
        Ok(Plan::Give { page, to })
    }

    /// An Authentication Send's message is here.
    pub(super) fn authenticate(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let Some(proof) = &mut self.proof else {
            return self.answer(slot, Err(Status::INVALID_OPCODE.with_dnr()), io);
        };
        let before = proof.is_authenticated();
        let host = *proof.host();
        let message = entry.bytes(io.pool).to_vec();
        let by_host = matches!(Kind::parse(&message), Ok((Kind::Failure2, _)));
        let job = proof.on_message(&message, || io.shared.registry.start_exchange(&host), io.now);
        let Some(job) = job else {
            self.note_proof(before, by_host, io);
            return self.answer(slot, Ok(0), io);
        };
        if job.is_light() {
            proof.on_worked(job.run(), io.now);
            self.note_proof(before, false, io);
            return self.answer(slot, Ok(0), io);
        }
        self.hand_over(slot, job, io);
    }

    /// The command waits until somebody else has done the job.
    fn hand_over(&mut self, slot: u16, job: DhComputation, io: &mut Io<'_>) {
        let ticket = next_id();
        let (to, key) = (io.shared.registry.reactor(io.reactor).clone(), self.key);
        let run = Box::new(move || {
            let worked = job.run();
            // A reactor that has ended wants nothing any more.
            let _ = to.send(Message::Authenticated { key, ticket, worked });
        });
        self.task = Some((ticket, slot));
        self.slot(slot).enter(State::Offloaded);
        let source = self.source().into();
        let job = offload::Job::Authenticate(AuthJob { source, ticket, run });
        let given = io.shared.offload.submit(job);
        if let (false, Some(proof)) = (given, &mut self.proof) {
            proof.turn_away(io.now);
        }
    }

    /// The queue closes: nobody waits for its job any more. What has cost us nothing by then is no
    /// failure of its host, who may have waited for long.
    pub(super) fn drop_job(&mut self, io: &mut Io<'_>) {
        let Some((ticket, slot)) = self.task.take() else { return };
        if io.shared.offload.cancel(ticket)
            && let Some(proof) = &mut self.proof
        {
            proof.excuse();
        }
        self.release(slot, io);
    }

    /// Whether its host has begun to prove itself and has left it at that: not where we have ended
    /// the queue for something else.
    pub(super) fn was_left_unfinished(&self) -> bool {
        let is_ended = match &self.serves {
            QueueRole::Nothing { .. } => false,
            // Who makes room for its own next claim has all the same.
            QueueRole::Admin(controller) => {
                let association = &controller.association;
                association.ended_for().is_some() && !association.is_blamed()
            }
            QueueRole::Io { association, epoch, .. } => {
                association.is_closed() || association.epoch() != *epoch
            }
        };
        !is_ended && self.proof.as_ref().is_some_and(|proof| proof.is_unfinished())
    }

    /// Whether a command comes on an I/O queue whose host had proved itself and then has not. It gets
    /// no answer: a status would end in the host's file system, a lost path does not.
    pub(super) fn is_disowned(&self, sqe: &Sqe) -> bool {
        let lost = |proof: &Exchange| proof.was_admitted() && !proof.is_authenticated();
        let is_io = matches!(self.serves, QueueRole::Io { .. });
        is_io && self.proof.as_ref().is_some_and(|proof| lost(proof)) && !is_authentication(sqe)
    }

    /// The job with this number is done.
    pub fn on_worked(&mut self, ticket: u64, worked: DhResult, io: &mut Io<'_>) {
        let Some((_, slot)) = self.task.take_if(|(ours, _)| *ours == ticket) else { return };
        if self.link != Link::Open {
            return;
        }
        if let Some(proof) = &mut self.proof {
            let before = proof.is_authenticated();
            proof.on_worked(worked, io.now);
            self.note_proof(before, false, io);
        }
        self.answer(slot, Ok(0), io);
    }

    /// Tells of a success or a failure; `by_host`: of one that the host tells of.
    fn note_proof(&mut self, before: bool, by_host: bool, io: &mut Io<'_>) {
        let remote = self.remote;
        let Some(proof) = &mut self.proof else { return };
        let host = *proof.host();
        let succeeded = proof.take_success();
        if let Some(why) = proof.take_failure() {
            io.shared.registry.note_failed_proof(remote.ip(), host, io.now);
            let cause = proof.cause().unwrap_or(Cause::of_exchange(why, by_host));
            let detail = match proof.take_detail() {
                Some(detail) => format!("{why}: {detail}"),
                None => why.to_string(),
            };
            self.explain(cause, detail, io);
            return;
        }
        let association = match &self.serves {
            QueueRole::Admin(controller) => Some(&controller.association),
            QueueRole::Io { association, .. } => Some(association),
            QueueRole::Nothing { .. } => None,
        };
        if let (true, Some(association), Some(keys)) = (succeeded, association, proof.keys()) {
            // The key may have been replaced since the exchange began.
            let number = io.shared.registry.key_number(association, keys);
            proof.set_proved(number);
        }
        if before || !proof.is_authenticated() {
            return;
        }
        match &mut self.serves {
            QueueRole::Admin(controller) => {
                let association = &controller.association;
                if let Some(io_queues) = io.shared.registry.promise_again(association, io.now) {
                    controller.limits.io_queues = io_queues;
                    self.limits.io_queues = io_queues;
                }
                io.shared.registry.proved(association);
                if let Some((hash, group)) = proof.agreed() {
                    info!(%remote, %host, %hash, %group, "host authenticated");
                }
                self.tell_twin(io);
            }
            QueueRole::Io { association, epoch, .. } => {
                let (qid, held) = (self.request.qid, self.unadmitted);
                match io.shared.registry.io_proved(association, qid, *epoch, held) {
                    Ok(()) => {
                        self.unadmitted = None;
                        proof.admit();
                    }
                    Err(fabrics::Refusal { status, cause, .. }) => {
                        // With the next tick: there may be an answer under way.
                        proof.turn_away(io.now);
                        self.explain(cause, status.to_string(), io);
                    }
                }
            }
            QueueRole::Nothing { .. } => {}
        }
        self.welcome(io);
    }
}

/// Whether the host of a queue has had time to prove itself on it with its new key, and has not.
pub(super) fn has_outlived_key(
    proof: &mut Option<Box<Exchange>>,
    association: &Association,
    now: Instant,
) -> bool {
    let key = association.key_changes();
    proof.as_mut().is_some_and(|proof| proof.has_outlived_key(key, now))
}

fn is_authentication(sqe: &Sqe) -> bool {
    let kinds = [FabricsType::AUTHENTICATION_SEND, FabricsType::AUTHENTICATION_RECEIVE];
    sqe.is_fabrics() && kinds.contains(&sqe.fabrics_type())
}
