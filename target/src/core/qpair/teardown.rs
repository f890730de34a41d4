//! How a queue ends: its connection closes, all work comes home, and what it holds is given back.

use std::sync::Arc;

use rdma::{Fault, Reason};
use tracing::info;

use super::{Io, Link, QueuePair, QueueRole, State};
use crate::core::diag::cause::Cause;
use crate::core::sched::buffers::NsIndex;

impl QueuePair {
    /// Ends the connection. Everything comes home, then the queue is finished.
    pub fn close(&mut self, io: &mut Io<'_>) {
        if self.link != Link::Open {
            return;
        }
        self.link = Link::Closing;
        io.fabric.disconnect(self.qp);
        self.leave(io);
        for slot in 0..self.slots.len() as u16 {
            if self.slot(slot).state().has_not_begun() {
                self.release(slot, io);
            }
        }
        self.leave_turns(io);
        self.recall_all(io);
    }

    /// The queue pair is gone, and all fabric work is home.
    pub fn on_gone(&mut self, reason: Reason, io: &mut Io<'_>) {
        self.explain_end(&reason, io);
        if self.link == Link::Open {
            self.link = Link::Closing;
            self.leave(io);
            self.leave_turns(io);
            self.recall_all(io);
        }
        self.link = Link::Gone;
        self.drop_backlog(io);
        self.receives = 0;
        for slot in 0..self.slots.len() as u16 {
            let entry = self.slot(slot);
            if !matches!(entry.state(), State::AtDevice | State::Offloaded) {
                self.release(slot, io);
                continue;
            }
            // The disk may keep its part for long, and its host comes again meanwhile, and again.
            let has_capsule = entry.capsule.is_some();
            entry.take_buffers().for_each(|buf| io.pool.give(buf));
            if !has_capsule && entry.gives_receive {
                self.receives += 1;
            }
        }
        self.give_cells(io);
    }

    /// Gives back what a finished queue still holds.
    pub fn finish(mut self, io: &mut Io<'_>) {
        self.give_cells(io);
        if let Some(share) = self.share {
            for slot in &self.slots {
                let lane = NsIndex::of(slot.sqe.nsid);
                io.waiters.discharge(share, lane, slot.store, slot.charged_bytes);
            }
            io.waiters.leave(share, self.depth());
        } else {
            io.waiters.close(self.depth());
        }
        if let Some(proof) = self.proof.as_ref().filter(|_| self.was_left_unfinished()) {
            io.shared.registry.note_failed_proof(self.remote.ip(), *proof.host(), io.now);
        }
        self.hand_in(io.now);
        let has_id = self.proof.as_ref().is_none_or(|proof| proof.was_admitted());
        if let QueueRole::Io { association, .. } = &self.serves
            && has_id
        {
            io.shared.registry.io_closed(association, self.request.qid);
        }
    }

    /// An administrator wants the controller to fail.
    pub(super) fn look_for_fatal_error(&mut self, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.serves else { return };
        if controller.association.take_fatal_error() && controller.fail_fatally() {
            // Its I/O queues close.
            io.shared.registry.wake_reactors();
            self.tell(Cause::FailedOnPurpose, "".into(), io);
        }
    }

    #[cold]
    pub(super) fn end_for(&mut self, fault: Fault, io: &mut Io<'_>) {
        match Cause::of_fault(fault) {
            Some(cause) => self.explain(cause, fault.to_string(), io),
            None => self.leaving = self.cause_of_leaving(),
        }
        self.close(io);
    }

    /// This queue is closing: nobody waits for its commands any more, and the association learns it.
    fn leave(&mut self, io: &mut Io<'_>) {
        self.drop_job(io);
        let now = io.now;
        io.waiters.forget(self.key, |slot, booking| self.give_back(slot, booking, now));
        if let Some(share) = self.share {
            io.waiters.abandon(share);
        }
        if let QueueRole::Admin(controller) = &mut self.serves {
            controller.fail();
            let association = Arc::clone(&controller.association);
            info!(host = %association.host, subsystem = %association.subsystem,
                  cntlid = association.cntlid, "host disconnected");
            io.shared.registry.admin_closed(&association);
        }
    }

    fn give_cells(&mut self, io: &mut Io<'_>) {
        self.slots.iter_mut().filter_map(|entry| entry.cell.take()).for_each(|c| io.pool.give(c));
    }
}
