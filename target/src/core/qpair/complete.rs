//! The answer: data pushed, response sent, failures logged, buffers given back.

use nvme::{Cqe, Status};
use rdma::Remote;
use tracing::debug;

use super::bad_blocks::ClearBadBlocks;
use super::fused::FusedState;
use super::{Io, Link, QueuePair, QueueRole, State};
use crate::core::command::error_location;
use crate::core::controller::association::ErrorRecord;
use crate::core::stats::Stage;

impl QueuePair {
    /// Answers a command; a failure is logged for the host and says so (More).
    pub(super) fn answer(&mut self, slot: u16, outcome: Result<u64, Status>, io: &mut Io<'_>) {
        match outcome {
            Ok(_) if self.mends(slot, io) => {}
            Ok(result) => self.respond(slot, Status::SUCCESS, result, None, io),
            Err(status) => {
                self.count_failure(slot, status);
                let status = self.log_error(slot, self.delayed(status));
                self.respond(slot, status, 0, None, io);
            }
        }
    }

    /// Pushes the slot's data to the host and answers right behind: on a reliable connection the
    /// response cannot overtake the data.
    pub(super) fn push_and_answer(&mut self, slot: u16, to: Remote, io: &mut Io<'_>) {
        if !self.slot(slot).is_scattered() {
            return self.respond(slot, Status::SUCCESS, 0, Some(to), io);
        }
        self.leave_store(slot, io);
        self.slot(slot).make_rare().pieces.begin(to.len);
        self.push_piece(slot, io);
    }

    pub(super) fn respond(
        &mut self,
        slot: u16,
        status: Status,
        result: u64,
        push: Option<Remote>,
        io: &mut Io<'_>,
    ) {
        if self.link != Link::Open {
            self.release(slot, io);
            return;
        }
        let (qp, qid, head) = (self.qp, self.request.qid, self.head);
        self.unclaim(self.slots[usize::from(slot)].sqe.cid);
        self.drop_turn(slot, io);
        self.return_receive(slot, io);
        self.leave_store(slot, io);
        let entry = self.slot(slot);
        entry.enter(State::Replying);
        entry.status = status;
        match push {
            Some(_) => entry.clock.enter(Stage::Push, io.now_ns),
            None => entry.clock.enter(Stage::Reply, io.now_ns),
        }
        entry.doomed = false;
        if let Some(rare) = entry.rare_mut() {
            rare.mend = ClearBadBlocks::None;
            rare.fences.clear();
            if !status.is(Status::ABORT_REQUESTED) {
                rare.errands.clear();
            }
            if let Some(buf) = rare.second.take() {
                io.pool.give(buf);
            }
        }
        if let Some(mut buf) = entry.capsule.take() {
            io.pool.rewind(&mut buf);
            io.fabric.post(qp, 0, rdma::Work::Recv(buf));
        }
        match (entry.data.take(), push) {
            (Some(from), Some(to)) => {
                entry.posted += 1;
                io.fabric.post(qp, slot.into(), rdma::Work::Write { from, to });
            }
            (Some(buf), None) => io.pool.give(buf),
            (None, _) => {}
        }
        if let Some(mut from) = entry.cell.take() {
            let cqe =
                Cqe { result, sqhd: head.field(), sqid: qid, ..Cqe::new(entry.sqe.cid, status) };
            from.select(0, Cqe::BYTES as u32);
            io.pool.bytes_mut(&mut from).copy_from_slice(&cqe.emit());
            entry.posted += 1;
            let invalidate = entry.invalidate;
            io.fabric.post(qp, slot.into(), rdma::Work::Send { from, invalidate });
        }
        if self.slot(slot).mate.is_some() || self.half != FusedState::None {
            self.part(slot, status, io);
        }
    }

    /// A status with the delay after which the command is worth a retry, for a host that heeds it
    /// ("Host Behavior Support", ACRE); for any other without.
    fn delayed(&self, status: Status) -> Status {
        const SOON: u8 = 1;
        let passing =
            [Status::NAMESPACE_NOT_READY, Status::COMMAND_INTERRUPTED, Status::FORMAT_IN_PROGRESS];
        match self.association().is_some_and(|association| association.heeds_retry_delays()) {
            false => status.with_crd(0),
            true if status.dnr() || status.crd() != 0 => status,
            true if passing.iter().any(|other| status.is(*other)) => status.with_crd(SOON),
            true => status,
        }
    }

    pub(super) fn log_error(&mut self, slot: u16, status: Status) -> Status {
        let sqe = self.slots[usize::from(slot)].sqe;
        if !self.is_admitted() {
            // The log is of a host that somebody else only claims to be.
            return status;
        }
        if sqe.is_fabrics() {
            // Asking for properties that are not there is no error worth a place in the log, and
            // a status with More set is not what `nvme show-regs` takes for "not there".
            return status;
        }
        let sqid = self.request.qid;
        let slba = if sqid == 0 { 0 } else { self.culprit(slot, status) };
        let Some(association) = self.association() else { return status };
        let (cid, nsid) = (sqe.cid, sqe.nsid);
        debug!(host = %association.host, sqid, cid, opcode = sqe.opcode, nsid, %status, "refused");
        let (opcode, parameter) = (sqe.opcode, error_location::of(&sqe, status));
        let record = ErrorRecord { sqid, cid, status, nsid, slba, opcode, parameter };
        association.log_error(record);
        status.with_more(true)
    }

    /// Answers what waits for something to happen, as far as that has.
    #[inline]
    pub(super) fn raise_events(&mut self, io: &mut Io<'_>) {
        // An I/O queue has a Disconnect command at most.
        if self.leaver.is_some() || !matches!(self.serves, QueueRole::Io { .. }) {
            self.answer_waiting(io);
        }
    }

    #[inline(never)]
    fn answer_waiting(&mut self, io: &mut Io<'_>) {
        if let QueueRole::Admin(controller) = &mut self.serves
            && controller.association.reservations.take_news()
        {
            controller.events.reservation_noticed();
        }
        if let QueueRole::Admin(controller) = &mut self.serves
            && let Some(changed) = controller.association.changes.take()
        {
            controller.events.namespaces_changed(changed);
        }
        while let QueueRole::Admin(controller) = &mut self.serves
            && let Some((slot, dw0)) =
                controller.events.next(controller.features.async_event_config())
        {
            self.answer(slot, Ok(dw0.into()), io);
        }
        self.answer_aborts(io);
        self.answer_disconnect(io);
    }
}
