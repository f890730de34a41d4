//! Completion: data pushed, the response sent, failures logged, buffers freed; and commands that end before
//! they are done.

use std::sync::Arc;

use nvme::{Cqe, Status};
use rdma::{Buf, Fault, Remote, Work};
use tracing::debug;

use super::abort::Aborting;
use super::bad_blocks::ClearBadBlocks;
use super::fused::Partner;
use super::request::{State, WaitReason};
use super::role::QueueRole;
use super::{Io, QueuePair, abort, bad_blocks, buffers, fused, range_lock, sgl_transfer};
use crate::command::{Plan, error_location};
use crate::controller::association::ErrorRecord;
use crate::sched::DrainBarrier;
use crate::sched::abort::AbortToken;
use crate::stats::Stage;
use nvmfd_blockdev::IoCompletion;

impl QueuePair {
    /// Completes a command; a failure is recorded in the error log of the host, and its status has
    /// More set.
    #[inline]
    pub(super) fn complete(&mut self, slot: u16, outcome: Result<u64, Status>, io: &mut Io<'_>) {
        match outcome {
            Ok(_) if self.requests[slot].has_ext() && self.clears_bad_blocks(slot, io) => {}
            Ok(result) => self.send_response(slot, Status::SUCCESS, result, None, io),
            Err(status) => self.fail(slot, status, io),
        }
    }

    #[inline(never)]
    fn fail(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        let nsid = self.requests[slot].sqe.nsid;
        self.stats.count_failure(nsid, status);
        let status = self.log_error(slot, self.delayed(status));
        self.send_response(slot, status, 0, None, io);
    }

    /// Whether a command whose operations are done now waits for the worker that maintains the list
    /// of bad blocks.
    fn clears_bad_blocks(&mut self, slot: u16, io: &mut Io<'_>) -> bool {
        if !self.conn.is_open() {
            return false;
        }
        let what = bad_blocks::begin_clearing(&mut self.requests[slot], io.pool);
        let Some(what) = what else { return false };
        let job = bad_blocks::job(&mut self.requests, slot, what, &self.conn.role, io);
        self.offload(slot, Ok(job), io);
        true
    }

    /// Pushes the command's data to the host and posts the response directly behind: on a reliable
    /// connection it cannot overtake the data.
    #[inline]
    pub(super) fn push_and_complete(&mut self, slot: u16, to: Remote, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        if !entry.is_scattered() {
            return self.send_response(slot, Status::SUCCESS, 0, Some(to), io);
        }
        self.buffers.leave_device(entry, io);
        entry.make_ext().pieces.begin(to.len);
        self.push_piece(slot, io);
    }

    /// Pushes the next piece; with the last one the response.
    fn push_piece(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        let to = sgl_transfer::next_push(entry, io.pool);
        let has_more = self.conn.is_open() && entry.is_in_pieces();
        match to {
            Some(to) if has_more => {
                entry.enter(State::Replying);
                if let Some(from) = entry.data.take() {
                    entry.posted += 1;
                    io.waiters.behind_sent += 1;
                    io.fabric.post(self.conn.qp, slot.into(), Work::Write { from, to });
                }
            }
            to => self.send_response(slot, Status::SUCCESS, 0, to, io),
        }
    }

    /// Handles the completion of a pushed piece that is not the last one.
    pub(super) fn on_piece_pushed(
        &mut self,
        slot: u16,
        from: Buf,
        fault: Option<Fault>,
        io: &mut Io<'_>,
    ) {
        let entry = &mut self.requests[slot];
        entry.data = Some(from);
        entry.posted -= 1;
        io.waiters.behind_sent -= 1;
        match fault {
            None if self.conn.is_open() => self.push_piece(slot, io),
            fault => {
                self.release(slot, io);
                self.on_fault(fault, io);
            }
        }
    }

    /// Sends the response of a command, behind its data if it has any: its state is Replying from
    /// now on, and all else that it holds is released.
    pub(super) fn send_response(
        &mut self,
        slot: u16,
        status: Status,
        result: u64,
        push: Option<Remote>,
        io: &mut Io<'_>,
    ) {
        if !self.conn.is_open() {
            return self.release(slot, io);
        }
        let data = self.requests[slot].data.take();
        if self.answer(slot, status, result, (data, push), io) && self.requests[slot].has_ext() {
            self.end_ext(slot, status, io);
        }
    }

    /// Ends what few commands have, after their response was posted.
    #[inline(never)]
    fn end_ext(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        if let Some(ext) = self.requests[slot].ext_mut() {
            ext.end(status, io.pool);
        }
        self.end_partner(slot, status, io);
    }

    /// The same on an open connection for a command without [`super::request::RequestExt`], with its
    /// data buffer. It is compiled for its caller: a Read or a Write that was successful. Returns
    /// false if the command was completed before.
    #[inline(always)]
    pub(super) fn answer(
        &mut self,
        slot: u16,
        status: Status,
        result: u64,
        (data, push): (Option<Buf>, Option<Remote>),
        io: &mut Io<'_>,
    ) -> bool {
        let Some((reply, entry)) = self.requests.take_reply(slot) else {
            debug_assert!(false, "a command was completed twice");
            data.into_iter().for_each(|buf| io.pool.give(buf));
            return false;
        };
        let qp = self.conn.qp;
        let stage = if push.is_some() { Stage::Push } else { Stage::Reply };
        entry.enter(State::Replying);
        entry.status = status;
        entry.clock.enter(stage, io.now_ns);
        range_lock::unlock(entry, io);
        buffers::return_receive(entry, io);
        self.buffers.leave_device(entry, io);
        if let Some(buf) = &mut entry.capsule {
            io.pool.rewind(buf);
        }
        if let Some(buf) = entry.capsule.take() {
            io.fabric.post(qp, 0, Work::Recv(buf));
        }
        match (data, push) {
            (Some(from), Some(to)) => {
                entry.posted += 1;
                io.fabric.post(qp, slot.into(), Work::Write { from, to });
            }
            (Some(buf), None) => io.pool.give(buf),
            (None, _) => {}
        }
        if let Some(cell) = &mut entry.cell {
            let queue = (self.head.field(), self.conn.qid);
            let cqe = reply.cqe(&entry.sqe, (status, result), queue);
            cell.select(0, Cqe::BYTES as u32);
            io.pool.bytes_mut(cell).copy_from_slice(&cqe.emit());
        }
        if let Some(from) = entry.cell.take() {
            entry.posted += 1;
            let invalidate = entry.invalidate;
            io.fabric.post(qp, slot.into(), Work::Send { from, invalidate });
        }
        true
    }

    /// Handles the other half of a fused command after one was completed.
    fn end_partner(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        match self.fused.part(&mut self.requests, slot, status) {
            Partner::GoesOn => {}
            Partner::Fails(other) => self.complete(other, Err(fused::FAILED), io),
            Partner::FailsWaiting(other) => {
                self.leave_line(other, io);
                self.complete(other, Err(fused::FAILED), io);
            }
        }
    }

    /// Handles the completion of posted data or of a posted response. `has_ended`: it was the
    /// last one of its command.
    #[inline(always)]
    pub(super) fn on_posted(
        &mut self,
        slot: u16,
        has_ended: bool,
        fault: Option<Fault>,
        io: &mut Io<'_>,
    ) {
        if has_ended {
            self.end(slot, io);
            if self.disconnect_slot == Some(slot) {
                // The host has received the response.
                return self.close(io);
            }
        }
        self.on_fault(fault, io);
        if !self.backlog.is_empty() {
            self.resume_backlog(io);
        }
    }

    /// Records that the host is alive if it has received a response. While commands complete, a host
    /// may send no Keep Alive, whenever it has sent them (Linux 5.13 to 6.4): a slow device must not
    /// cost it the connection.
    pub(super) fn note_acknowledgement(&mut self) {
        let free = self.requests.free_count();
        // Where further commands have arrived in that time, these count.
        let has_ended = free > std::mem::replace(&mut self.free_at_tick, free);
        // Any peer can claim a queue, and receive its responses.
        if has_ended && self.conn.is_open() && self.is_admitted() {
            self.conn.role.association().iter().for_each(|association| association.note_traffic());
        }
    }

    /// Handles the end of a command: the host has received its data and its response.
    #[inline(always)]
    fn end(&mut self, slot: u16, io: &mut Io<'_>) {
        let key = self.requests.key;
        let entry = &mut self.requests[slot];
        self.stats.observe(entry, key, &self.conn, io);
        // If the command was aborted, its Abort commands are completed only now: on another queue,
        // and so on another connection, nothing else keeps their responses from overtaking this one.
        if let Some(ext) = entry.ext_mut() {
            ext.aborts.drain(..).for_each(AbortToken::succeed);
        }
        self.set_free(slot, io);
    }

    #[inline]
    pub(super) fn on_fault(&mut self, fault: Option<Fault>, io: &mut Io<'_>) {
        if let (Some(fault), true) = (fault, self.conn.is_open()) {
            self.end_for(fault, io);
        }
    }

    /// Releases all that a command holds, without a response.
    pub(super) fn release(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        range_lock::unlock(entry, io);
        buffers::return_receive(entry, io);
        if let Some(ext) = entry.ext_mut() {
            (ext.fused_with, ext.fused_failed) = (None, false);
            ext.barriers.clear();
            ext.aborts.clear();
            ext.clears = ClearBadBlocks::None;
        }
        entry.forget_reply();
        entry.take_buffers().for_each(|buf| io.pool.give(buf));
        if entry.state() != State::Free && entry.posted == 0 {
            self.set_free(slot, io);
        }
    }

    /// Ends a command that waits for its range lock, and has done nothing yet. The wait may take as
    /// long as a device hangs.
    pub(super) fn end_waiting(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        let Some((_, op)) = self.locks.take_waiting(entry) else { return };
        // As if the device had returned it.
        entry.enter(State::AtDevice);
        self.requests.outstanding += 1;
        let tag = self.requests.tag(slot);
        let done = IoCompletion { tag, buf: op.into_buf(), outcome: Err(status) };
        self.on_disk(slot, done, io);
    }

    /// Frees the slot of a command that has ended and holds no buffers any more.
    #[inline(always)]
    fn set_free(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        entry.enter(State::Free);
        self.buffers.end(entry, io);
        self.requests.give_free(slot);
        if self.buffers.has_deferred() {
            self.retry_deferred(slot, io);
        }
    }

    /// Returns a status with the delay before a retry, for a host that supports it ("Host Behavior
    /// Support", ACRE); without it for any other.
    fn delayed(&self, status: Status) -> Status {
        const SOON: u8 = 1;
        let passing =
            [Status::NAMESPACE_NOT_READY, Status::COMMAND_INTERRUPTED, Status::FORMAT_IN_PROGRESS];
        let association = self.conn.role.association();
        match association.is_some_and(|association| association.heeds_retry_delays()) {
            false => status.with_crd(0),
            true if status.dnr() || status.crd() != 0 => status,
            true if passing.iter().any(|other| status.is(*other)) => status.with_crd(SOON),
            true => status,
        }
    }

    fn log_error(&mut self, slot: u16, status: Status) -> Status {
        if !self.is_admitted() {
            // The host name is not authenticated: the log belongs to the host that is.
            return status;
        }
        let entry = &mut self.requests[slot];
        let sqe = entry.sqe;
        if sqe.is_fabrics() {
            // A Property Get of an unsupported property is not worth an entry in the log, and `nvme
            // show-regs` does not take a status with More set for "not supported".
            return status;
        }
        let (sqid, role) = (self.conn.qid, &self.conn.role);
        let slba = if sqid == 0 { 0 } else { bad_blocks::failing_lba(entry, status, role) };
        let Some(association) = role.association() else { return status };
        let (cid, nsid) = (sqe.cid, sqe.nsid);
        debug!(host = %association.host, sqid, cid, opcode = sqe.opcode, nsid, %status, "refused");
        let (opcode, parameter) = (sqe.opcode, error_location::of(&sqe, status));
        let record = ErrorRecord { sqid, cid, status, nsid, slba, opcode, parameter };
        association.log_error(record);
        status.with_more(true)
    }

    // ---- events

    /// Completes commands that wait for an event, if it has occurred.
    #[inline]
    pub(crate) fn raise_events(&mut self, io: &mut Io<'_>) {
        // On an I/O queue only a Disconnect command can wait for an event.
        if self.disconnect_slot.is_some() || !self.conn.role.is_io() {
            self.complete_waiting(io);
        }
    }

    #[inline(never)]
    fn complete_waiting(&mut self, io: &mut Io<'_>) {
        if let QueueRole::Admin(controller) = &mut self.conn.role {
            if controller.association.reservations.take_news() {
                controller.events.reservation_noticed();
            }
            if let Some(changed) = controller.association.changes.take() {
                controller.events.namespaces_changed(changed);
            }
        }
        while let QueueRole::Admin(controller) = &mut self.conn.role
            && let Some((slot, dw0)) = controller.next_event()
        {
            self.complete(slot, Ok(dw0.into()), io);
        }
        self.complete_aborts(io);
        self.complete_disconnect(io);
    }

    // ---- commands that end before they are done

    /// Begins an Abort command. It waits until the command to abort has ended or is known to
    /// continue.
    pub(super) fn abort(&mut self, slot: u16, sqid: u16, cid: u16, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.conn.role else {
            return self.complete(slot, Err(Status::INVALID_OPCODE.with_dnr()), io);
        };
        let (request, token) =
            io.shared.registry.recall(controller.association.id, sqid, cid, io.reactor);
        controller.aborts.push((slot, request));
        match sqid == self.conn.qid {
            true => self.on_abort(&token, io),
            false => io.shared.registry.send_abort(token),
        }
        // If the outcome is known already, it is completed with the events.
    }

    /// Looks for the command that an Abort command of the association names.
    pub fn on_abort(&mut self, token: &AbortToken, io: &mut Io<'_>) {
        let Some(association) = self.conn.role.association() else { return };
        // Any peer can claim a queue with this id, and would answer in place of the host's own.
        let is_its_own = self.conn.is_open() && self.is_admitted();
        if !is_its_own || !token.is_for(association.id, self.conn.qid) {
            return;
        }
        let named = self.requests.find(|entry| {
            entry.sqe.cid == token.cid() && !matches!(entry.state(), State::Free | State::Replying)
        });
        let Some(slot) = named else { return };
        match abort::begin(&mut self.requests[slot], token) {
            Aborting::Nothing => {}
            Aborting::EndWaiting => {
                if let QueueRole::Admin(controller) = &mut self.conn.role
                    && self.requests[slot].plan == Plan::Park
                {
                    controller.events.unpark(slot);
                }
                self.leave_line(slot, io);
                self.complete(slot, Err(Status::ABORT_REQUESTED), io);
            }
            Aborting::EndLocked => self.end_waiting(slot, Status::ABORT_REQUESTED, io),
            Aborting::Cancel => {
                let request = abort::cancel(&mut self.requests, slot);
                io.disk.recall(request.tag, request.of);
            }
        }
    }

    /// Handles the answer of a device to the request to cancel an operation.
    pub fn on_recalled(&mut self, slot: u16, outcome: Result<(), Status>, io: &mut Io<'_>) {
        self.requests.outstanding -= 1;
        abort::on_cancelled(&mut self.requests[slot], outcome.is_ok());
        self.raise_events(io);
    }

    /// Whether a tag of this queue identifies a request to cancel rather than an operation.
    pub fn is_about_recall(tag: u64) -> bool {
        abort::is_about_cancel(tag)
    }

    /// Completes the Abort commands whose outcome is known.
    fn complete_aborts(&mut self, io: &mut Io<'_>) {
        while let QueueRole::Admin(controller) = &mut self.conn.role
            && let Some(at) =
                controller.aborts.iter().position(|(_, request)| request.outcome().is_some())
        {
            let (slot, request) = controller.aborts.remove(at);
            self.complete(slot, Ok(u64::from(request.outcome() != Some(true))), io);
        }
    }

    /// Applies a drain barrier, after hosts were preempted or namespaces write protected: commands
    /// that have not begun end here, those in progress hold the barrier until they complete.
    /// Nothing is recalled from a device.
    pub fn on_fence(&mut self, barrier: &Arc<DrainBarrier>, io: &mut Io<'_>) {
        let is_admin = matches!(self.conn.role, QueueRole::Admin(_));
        let Some(association) = self.conn.role.association() else { return };
        if association.subsystem != barrier.subsystem
            || !barrier.concerns(&association.host_id, is_admin)
        {
            return;
        }
        for slot in 0..self.requests.count() {
            let entry = &mut self.requests[slot];
            if matches!(entry.state(), State::Free | State::Replying) {
                continue;
            }
            // A fabrics command has no namespace: its type is in the bytes of the NSID.
            if entry.sqe.is_fabrics() || !barrier.ends(entry.plan.io_class(), entry.sqe.nsid) {
                continue;
            }
            match entry.state().has_not_begun() && self.conn.is_open() {
                true => {
                    self.leave_line(slot, io);
                    self.complete(slot, Err(barrier.status()), io);
                }
                false => entry.make_ext().barriers.push(Arc::clone(barrier)),
            }
        }
    }

    /// Begins a Disconnect command: the host deletes the queue. Commands that have not begun are
    /// aborted, the others are waited for; the response to Disconnect is the last one, and then the
    /// connection is closed ("Disconnect command").
    pub(super) fn disconnect(&mut self, disconnect: u16, io: &mut Io<'_>) {
        self.disconnect_slot = Some(disconnect);
        for slot in 0..self.requests.count() {
            match self.requests[slot].state() {
                State::Free | State::Replying => {}
                _ if slot == disconnect => {}
                State::Waiting(WaitReason::RangeLock) => {
                    self.end_waiting(slot, Status::ABORTED_SQ_DELETION, io);
                }
                state if state.has_not_begun() => {
                    self.leave_line(slot, io);
                    self.complete(slot, Err(Status::ABORTED_SQ_DELETION), io);
                }
                _ => self.requests[slot].make_ext().is_deleted = true,
            }
        }
        // Capsules behind it are dropped.
        self.drop_backlog(io);
        // It is completed with the events, when no other command is left.
    }

    /// Completes a Disconnect command when every other command is completed.
    fn complete_disconnect(&mut self, io: &mut Io<'_>) {
        let Some(disconnect) = self.disconnect_slot.filter(|_| self.conn.is_open()) else { return };
        let alone = self.requests.numbered().all(|(slot, entry)| match entry.state() {
            state if slot == disconnect => state == State::Waiting(WaitReason::Event),
            State::Free => true,
            // Of data in several pieces, the response is sent with the last one.
            State::Replying => !entry.is_in_pieces(),
            _ => false,
        });
        if alone {
            self.complete(disconnect, Ok(0), io);
        }
    }
}
