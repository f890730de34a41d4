//! Disconnect: a host deletes an I/O queue. What has not begun ends, what has is outwaited; the
//! answer to Disconnect is the last one, and then the connection goes ("Disconnect command").

use nvme::Status;

use super::{Io, Link, QueuePair, State, WaitReason};

impl QueuePair {
    /// A Disconnect command begins.
    pub(super) fn disconnect(&mut self, leaver: u16, io: &mut Io<'_>) {
        self.leaver = Some(leaver);
        for slot in 0..self.slots.len() as u16 {
            if self.slot(slot).state().has_not_begun() && slot != leaver {
                self.leave_line(slot, io);
                self.answer(slot, Err(Status::ABORTED_SQ_DELETION), io);
            }
            self.end_held_back(slot, Status::ABORTED_SQ_DELETION, io);
        }
        // Whatever came behind it is not looked at.
        self.drop_backlog(io);
        // It is answered with the events, when it is alone.
    }

    /// Answers a Disconnect command when every other command has been.
    pub(super) fn answer_disconnect(&mut self, io: &mut Io<'_>) {
        let Some(leaver) = self.leaver.filter(|_| self.link == Link::Open) else { return };
        let alone = (0u16..).zip(&self.slots).all(|(slot, entry)| match entry.state() {
            state if slot == leaver => state == State::Waiting(WaitReason::Event),
            State::Free => true,
            // Of data in several places, the response goes with the last piece.
            State::Replying => !self.has_more_pieces(slot),
            _ => false,
        });
        if alone {
            self.answer(leaver, Ok(0), io);
        }
    }
}
