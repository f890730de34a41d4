//! Data in several places of the host's memory: they are moved one piece after another, each
//! through its window of the one buffer.

use nvme::sgl::LastSegment;
use nvme::{Sqe, Status};

use super::{Io, Link, QueuePair, State};
use crate::core::command::{Plan, SQE_BYTES, sgl};

impl QueuePair {
    /// Takes note of where the pieces of a command's data are. Gives the command as the rules see
    /// it, with one descriptor of the whole length.
    pub(super) fn gather(
        &mut self,
        slot: u16,
        sqe: &Sqe,
        segment: LastSegment,
        tail_bytes: u32,
        io: &Io<'_>,
    ) -> Result<Sqe, Status> {
        let received = tail_bytes.min(self.limits.in_capsule_bytes) as usize;
        let entry = &mut self.slots[usize::from(slot)];
        let capsule = entry.capsule.as_ref().map_or(&[][..], |capsule| io.pool.bytes(capsule));
        let tail = capsule.get(SQE_BYTES as usize..).unwrap_or_default();
        let tail = &tail[..received.min(tail.len())];
        let (sqe, pieces, key) = sgl::gather(sqe, segment, tail)?;
        entry.invalidate = key;
        entry.make_rare().pieces = pieces;
        Ok(sqe)
    }

    /// Whether some piece of a command's data is still to be moved.
    #[inline]
    pub(super) fn has_more_pieces(&self, slot: u16) -> bool {
        self.link == Link::Open && self.slots[usize::from(slot)].is_in_pieces()
    }

    /// Pulls the next piece.
    pub(super) fn pull_piece(&mut self, slot: u16, io: &mut Io<'_>) {
        let qp = self.qp;
        let entry = self.slot(slot);
        let piece = entry.rare_mut().and_then(|rare| rare.pieces.advance());
        let Some((skip, from)) = piece else { return };
        if let Some(mut into) = entry.data.take() {
            into.select(skip, from.len);
            entry.posted += 1;
            io.fabric.post(qp, slot.into(), rdma::Work::Read { into, from });
        }
    }

    /// All pieces are pulled: the window is the whole again.
    #[inline]
    pub(super) fn join_pieces(&mut self, slot: u16) {
        let entry = self.slot(slot);
        let total_bytes = entry.rare().and_then(|rare| rare.pieces.total_bytes());
        if let (Some(total_bytes), Some(data)) = (total_bytes, &mut entry.data) {
            data.select(0, total_bytes);
        }
    }

    /// Pushes the next piece; with the last one the response.
    pub(super) fn push_piece(&mut self, slot: u16, io: &mut Io<'_>) {
        let qp = self.qp;
        let entry = self.slot(slot);
        let piece = entry.rare_mut().and_then(|rare| rare.pieces.advance());
        let is_page = matches!(entry.plan, Plan::Give { .. });
        match (piece, &mut entry.data) {
            (Some((skip, to)), Some(_)) if is_page => self.fill_page(slot, skip, to.len, io),
            (Some((skip, to)), Some(data)) => data.select(skip, to.len),
            _ => {}
        }
        match piece {
            Some((_, to)) if self.has_more_pieces(slot) => {
                let entry = self.slot(slot);
                entry.enter(State::Replying);
                if let Some(from) = entry.data.take() {
                    entry.posted += 1;
                    io.waiters.behind_sent += 1;
                    io.fabric.post(qp, slot.into(), rdma::Work::Write { from, to });
                }
            }
            Some((_, to)) => self.respond(slot, Status::SUCCESS, 0, Some(to), io),
            None => self.respond(slot, Status::SUCCESS, 0, None, io),
        }
    }
}
