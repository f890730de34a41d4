//! Operations that change blocks, and those who must not be disturbed meanwhile
//! ([`crate::core::sched::range_lock`]).

use nvme::Status;

use super::{Io, Link, QueuePair, QueueRole, State, WaitReason};
use crate::blockdev::{DeviceId, IoCompletion, IoRequest};
use crate::core::command::{Plan, io as rules};
use crate::core::sched::range_lock::RangeLock;
use crate::core::stats::Stage;

/// How an operation at a disk stands with the others that change blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum LockState {
    /// It changes none, or there is none.
    #[default]
    None,
    /// It changes blocks, by byte offset and length, and nobody wanted to know.
    Unclaimed(u64, u64),
    /// The same, and a fused command waits until it is home.
    Awaited(u64, u64),
    /// It has claimed them, by this ticket.
    Claimed(u64),
}

impl QueuePair {
    /// Submits an operation, as soon as nobody stands in its way.
    pub(super) fn take_turn(
        &mut self,
        slot: u16,
        backing: DeviceId,
        op: IoRequest,
        alone: Option<(u64, u64)>,
        io: &mut Io<'_>,
    ) {
        let alone = alone.or_else(|| self.mends_alone(slot, &op, io));
        let Some((at, len)) = alone.or(op.changes()) else {
            return self.pass_on(slot, backing, op, io);
        };
        let entry = self.slot(slot);
        let claimed = matches!(entry.turn, LockState::Claimed(_));
        if claimed || (alone.is_none() && !io.shared.range_locks.is_watching(backing)) {
            if !claimed {
                entry.turn = LockState::Unclaimed(at, len);
            }
            return self.pass_on(slot, backing, op, io);
        }
        let alone = alone.is_some();
        let claim = RangeLock { backing, at, len, alone, reactor: io.reactor };
        let (ticket, granted) = io.shared.range_locks.claim(claim);
        let entry = self.slot(slot);
        entry.turn = LockState::Claimed(ticket);
        match granted {
            true => self.pass_on(slot, backing, op, io),
            false => {
                entry.clock.enter(Stage::Wait, io.now_ns);
                entry.enter(State::Waiting(WaitReason::RangeLock));
                entry.make_rare().held_back = Some((backing, op));
                self.held_back += 1;
            }
        }
    }

    fn pass_on(&mut self, slot: u16, backing: DeviceId, op: IoRequest, io: &mut Io<'_>) {
        if let Err(status) = self.may_begin(slot, &op) {
            self.put_back(slot, op.into_buf());
            return self.answer(slot, Err(status), io);
        }
        let entry = self.slot(slot);
        entry.enter(State::AtDevice);
        entry.clock.enter(Stage::Disk, io.now_ns);
        self.at_disk += 1;
        io.disk.submit(backing, self.tag(slot), op);
    }

    /// Submits what was held back and has its turn now.
    pub(super) fn serve_turns(&mut self, io: &mut Io<'_>) {
        if self.held_back == 0 || self.link != Link::Open {
            return;
        }
        for slot in 0..self.slots.len() as u16 {
            let entry = &self.slots[usize::from(slot)];
            let held_back = entry.rare().and_then(|rare| rare.held_back.as_ref());
            let (LockState::Claimed(ticket), Some((_, op))) = (entry.turn, held_back) else {
                continue;
            };
            if !io.shared.range_locks.is_granted(ticket) {
                continue;
            }
            let refused = self.may_begin(slot, op).err().map(|status| (slot, status));
            match refused.or_else(|| self.mate_refused(slot)) {
                Some((half, status)) => self.refuse_held_back(slot, half, status, io),
                None => self.submit_held_back(slot, io),
            }
        }
    }

    fn submit_held_back(&mut self, slot: u16, io: &mut Io<'_>) {
        let tag = self.tag(slot);
        let entry = self.slot(slot);
        let held_back = entry.rare_mut().and_then(|rare| rare.held_back.take());
        if let Some((backing, op)) = held_back {
            entry.enter(State::AtDevice);
            entry.clock.enter(Stage::Disk, io.now_ns);
            self.held_back -= 1;
            self.at_disk += 1;
            io.disk.submit(backing, tag, op);
        }
    }

    /// A command whose turn has come may not begin any more, because of this half of it.
    fn refuse_held_back(&mut self, slot: u16, half: u16, status: Status, io: &mut Io<'_>) {
        if half == slot {
            self.end_held_back(slot, status, io);
            return;
        }
        (self.slot(slot).mate, self.slot(half).mate) = (None, None);
        self.end_held_back(slot, Status::ABORTED_FAILED_FUSED.with_dnr(), io);
        self.answer(half, Err(status), io);
    }

    /// Whether the other half of a fused command may not begin any more, and why.
    pub(super) fn mate_refused(&self, slot: u16) -> Option<(u16, Status)> {
        let mate = self.slots[usize::from(slot)].mate?;
        let status = self.may_begin_at(mate, None).err()?;
        Some((mate, status))
    }

    /// Whether a step of a command may begin now. What was checked when it came is checked again:
    /// it may have waited for limits, buffers, its data or other commands, and a host that was told
    /// of a reservation meanwhile must not find it carried out afterwards.
    fn may_begin(&self, slot: u16, op: &IoRequest) -> Result<(), Status> {
        // To make durable what was done changes nothing.
        match op {
            IoRequest::Flush if self.slots[usize::from(slot)].step > 0 => Ok(()),
            op => self.may_begin_at(slot, op.range()),
        }
    }

    /// The same of a step that touches this range of bytes.
    pub(super) fn may_begin_at(&self, slot: u16, range: Option<(u64, u64)>) -> Result<(), Status> {
        // An admin queue has orders for its whole subsystem.
        let QueueRole::Io { association, subsystem, .. } = &self.serves else { return Ok(()) };
        let entry = &self.slots[usize::from(slot)];
        association.reach.check_io(&entry.sqe, subsystem)?;
        let barred = association.reservations.barred(entry.sqe.nsid);
        rules::may_begin(&entry.sqe, &entry.plan, range, subsystem, barred)
    }

    /// Ends a command that is held back, and has done nothing yet; whether it was. What it waits for
    /// may take as long as a disk hangs.
    pub(super) fn end_held_back(&mut self, slot: u16, status: Status, io: &mut Io<'_>) -> bool {
        let rare = self.slot(slot).rare_mut();
        let Some((_, op)) = rare.and_then(|rare| rare.held_back.take()) else { return false };
        self.held_back -= 1;
        // As if the disk gave it back.
        self.slot(slot).enter(State::AtDevice);
        self.at_disk += 1;
        let done = IoCompletion { tag: self.tag(slot), buf: op.into_buf(), outcome: Err(status) };
        self.on_disk(slot, done, io);
        true
    }

    /// The connection is over: what was held back never begins, and what a disk has keeps its blocks
    /// from later changes until it is home.
    pub(super) fn leave_turns(&mut self, io: &mut Io<'_>) {
        for slot in 0..self.slots.len() as u16 {
            if self.held_back > 0
                && let Some(rare) = self.slot(slot).rare_mut()
                && let Some((_, op)) = rare.held_back.take()
            {
                self.held_back -= 1;
                if let Some(buf) = op.into_buf() {
                    io.pool.give(buf);
                }
                self.release(slot, io);
            } else {
                self.leave_turn(slot, io);
            }
        }
    }

    fn leave_turn(&mut self, slot: u16, io: &mut Io<'_>) {
        let exclusion = &io.shared.range_locks;
        let entry = self.slot(slot);
        let (at, len) = match entry.turn {
            LockState::None => return,
            LockState::Claimed(ticket) => return exclusion.leave_claimed(ticket),
            LockState::Unclaimed(at, len) | LockState::Awaited(at, len) => (at, len),
        };
        let Some(backing) = entry.plan.backing() else { return };
        let claim = RangeLock { backing, at, len, alone: false, reactor: io.reactor };
        let ticket = exclusion.leave(claim);
        if let LockState::Awaited(..) =
            std::mem::replace(&mut entry.turn, LockState::Claimed(ticket))
        {
            // The fused command waits for its blocks from now on, where they are the same.
            exclusion.settled();
        }
    }

    /// An operation is home: others may have its blocks. A fused command keeps them between its
    /// halves, and one that makes blocks readable until the marks are gone.
    pub(super) fn end_turn(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let between = entry.mate.is_some() && matches!(entry.plan, Plan::Compare { .. });
        if !between && !self.keeps_turn(slot) {
            self.drop_turn(slot, io);
        }
    }

    /// Gives up whatever claim a command has.
    #[inline]
    pub(super) fn drop_turn(&mut self, slot: u16, io: &mut Io<'_>) {
        match std::mem::take(&mut self.slot(slot).turn) {
            LockState::None | LockState::Unclaimed(..) => {}
            LockState::Awaited(..) => io.shared.range_locks.settled(),
            LockState::Claimed(ticket) => io.shared.range_locks.give_up(ticket),
        }
    }

    /// A fused command waits for all changes under way: how many there are here.
    pub fn note_unclaimed(&mut self) -> u32 {
        let mut count = 0;
        for entry in &mut self.slots {
            if let LockState::Unclaimed(at, len) = entry.turn {
                entry.turn = LockState::Awaited(at, len);
                count += 1;
            }
        }
        count
    }
}
