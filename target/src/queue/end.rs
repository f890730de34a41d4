//! How a queue ends: its connection closes, all work comes home, and what it holds is given back.

use std::sync::Arc;

use rdma::{Fault, Reason};
use tracing::info;

use super::{Io, Link, Queue, Serves, State};
use crate::command::{Plan, Source};
use crate::waiters::Lane;
use crate::why::Cause;

impl Queue {
    /// Ends the connection. Everything comes home, then the queue is finished.
    pub fn close(&mut self, io: &mut Io<'_>) {
        if self.link != Link::Open {
            return;
        }
        self.link = Link::Closing;
        io.fabric.disconnect(self.qp);
        io.waiters.forget(self.key);
        self.leave(io);
        for slot in 0..self.slots.len() as u16 {
            if self.slot(slot).state == State::Waiting {
                self.release(slot, io);
            }
        }
        self.forget_turns(io);
    }

    /// The queue pair is gone, and all fabric work is home.
    pub fn on_gone(&mut self, reason: Reason, io: &mut Io<'_>) {
        self.explain_end(&reason, io);
        if self.link == Link::Open {
            self.link = Link::Closing;
            io.waiters.forget(self.key);
            self.leave(io);
            self.forget_turns(io);
        }
        self.link = Link::Gone;
        self.drop_backlog(io);
        self.receives = 0;
        for slot in 0..self.slots.len() as u16 {
            let entry = self.slot(slot);
            if entry.state != State::AtDisk {
                self.release(slot, io);
                continue;
            }
            // The disk may keep its part for long, and its host comes again meanwhile, and again.
            let from_capsule =
                matches!(entry.plan, Plan::Store { from: Source::Capsule { .. }, .. });
            let at_disk = from_capsule && entry.capsule.is_none();
            entry.take_buffers().for_each(|buf| io.pool.give(buf));
            self.receives += u16::from(at_disk);
        }
        self.give_cells(io);
    }

    /// Gives back what a finished queue still holds.
    pub fn finish(mut self, io: &mut Io<'_>) {
        self.give_cells(io);
        if let Some(share) = self.share {
            for slot in &self.slots {
                io.waiters.discharge(share, Lane::of(slot.sqe.nsid), slot.charged_bytes);
            }
            io.waiters.leave(share, self.depth());
        } else {
            io.waiters.close(self.depth());
        }
        if let Some(proof) = self.proof.as_ref().filter(|proof| proof.is_unfinished()) {
            io.registry.note_failed_proof(self.remote.ip(), *proof.host(), io.now);
        }
        self.hand_in(io.now);
        if let Serves::Io { association, .. } = &self.serves {
            io.registry.io_closed(association, self.request.qid);
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

    /// The association learns that this queue is closing.
    fn leave(&mut self, io: &mut Io<'_>) {
        if let Serves::Admin(controller) = &mut self.serves {
            controller.fail();
            let association = Arc::clone(&controller.association);
            info!(host = %association.host, subsystem = %association.subsystem,
                  cntlid = association.cntlid, "host disconnected");
            io.registry.admin_closed(&association);
        }
    }

    fn give_cells(&mut self, io: &mut Io<'_>) {
        self.slots.iter_mut().filter_map(|entry| entry.cell.take()).for_each(|c| io.pool.give(c));
    }
}
