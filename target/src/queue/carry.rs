//! Carrying out a plan: the steps between a decided command and its answer.

use std::cmp::Ordering;
use std::time::Instant;

use nvme::Status;
use rdma::pool::capacity_for;
use rdma::{Buf, Pool};

use super::{Io, Queue, Serves, Slot, State, page};
use crate::command::copy::Job;
use crate::command::{Plan, SQE_BYTES, Source, admin, io as rules};
use crate::disk::{BackingId, Op};
use crate::observe::Stage;
use crate::subsystem::Extent;
use crate::waiters::{Lane, Room, Store, Take, Waiter, Wish};

/// Data bytes that only admin commands may take.
pub const DATA_FOR_ADMIN_BYTES: u64 = 256 << 10;

/// Bytes of data buffers that are free for I/O commands.
#[must_use]
pub fn free_for_io(pool: &Pool) -> u64 {
    pool.free_for_all_bytes().saturating_sub(DATA_FOR_ADMIN_BYTES)
}

/// How things stand for those who wait for buffers of this pool.
#[must_use]
pub fn room(pool: &Pool, now: Instant) -> Room {
    let (whole_bytes, aside_bytes) = pool.whole_bytes();
    let largest_bytes = pool.plan().largest_bytes.into();
    let all_free_bytes = pool.free().2.saturating_sub(DATA_FOR_ADMIN_BYTES);
    let free_bytes = free_for_io(pool);
    Room { free_bytes, all_free_bytes, whole_bytes, aside_bytes, largest_bytes, now }
}

impl Queue {
    /// Bytes of all buffers that it has in hand: neither at the fabric nor at the disk.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let in_slots = self
            .slots
            .iter()
            .flat_map(|slot| [&slot.capsule, &slot.data, &slot.cell].into_iter().flatten());
        let rare = self.slots.iter().filter_map(Slot::rare).flat_map(|rare| {
            let held_back = rare.held_back.as_ref().and_then(|(_, op)| op.buf());
            rare.second.iter().chain(held_back)
        });
        let held = in_slots.chain(rare).chain(self.backlog.iter().map(|(buf, ..)| buf));
        held.map(|buf| u64::from(buf.capacity())).sum()
    }

    pub(super) fn start(&mut self, slot: u16, plan: Result<Plan, Status>, io: &mut Io<'_>) {
        match plan {
            Ok(Plan::Reply(result)) => self.answer(slot, Ok(result), io),
            Ok(Plan::Park) => self.slot(slot).plan = Plan::Park,
            Ok(Plan::Disconnect) => {
                self.slot(slot).plan = Plan::Disconnect;
                self.disconnect(slot, io);
            }
            Ok(Plan::Abort { sqid, cid }) => {
                self.slot(slot).plan = Plan::Abort { sqid, cid };
                self.abort(slot, sqid, cid, io);
            }
            Ok(plan) => {
                self.slot(slot).plan = plan;
                self.enter(slot, io);
            }
            Err(status) => self.answer(slot, Err(status), io),
        }
    }

    /// Takes the buffers that the plan needs, with those of the other half of a fused command: all
    /// or none. `aside`: also of what is set aside.
    pub(super) fn take_buffers(&mut self, slot: u16, aside: bool, io: &mut Io<'_>) -> Take {
        let share = self.share;
        let mate = self.slot(slot).mate;
        let wanted = self.wanted_bytes(slot);
        if share.is_none() && wanted > 0 && !self.may_hold(wanted) {
            return Take::Over;
        }
        if let Some(share) = share.filter(|_| wanted > 0) {
            // What is set aside is there for this one alone, what is for admin commands for none.
            let free = match aside {
                true => io.pool.free().2.saturating_sub(DATA_FOR_ADMIN_BYTES),
                false => free_for_io(io.pool),
            };
            if free < wanted {
                return Take::Short;
            }
            let wish = Wish {
                lane: self.lane(slot),
                store: self.store(slot),
                wanted_bytes: wanted,
                free_bytes: free,
                largest_bytes: io.pool.plan().largest_bytes.into(),
            };
            if !io.waiters.allows(share, &wish) {
                return Take::Over;
            }
        }
        if !self.take_own_buffers(slot, aside, io) {
            return Take::Short;
        }
        let Some(mate) = mate else { return Take::Done };
        if self.take_own_buffers(mate, aside, io) {
            return Take::Done;
        }
        let entry = self.slot(slot);
        let second = entry.rare_mut().and_then(|rare| rare.second.take());
        [entry.data.take(), second].into_iter().flatten().for_each(|buf| io.pool.give(buf));
        let charged_bytes = std::mem::take(&mut entry.charged_bytes);
        let (lane, store) = (Lane::of(entry.sqe.nsid), entry.store);
        if let Some(share) = share {
            io.waiters.discharge(share, lane, store, charged_bytes);
        }
        Take::Short
    }

    /// How a command stands in line.
    pub(super) fn waiter(&self, slot: u16, pool: &Pool) -> Waiter {
        let wanted_bytes = u32::try_from(self.wanted_bytes(slot)).unwrap_or(u32::MAX);
        let block_bytes = self.block_bytes(slot, pool.plan().largest_bytes);
        let (key, lane, store) = (self.key, self.lane(slot), self.store(slot));
        Waiter { key, slot, lane, store, wanted_bytes, block_bytes, claims: false }
    }

    /// Bytes of a free block that suffices for all buffers of a command, or of several of the
    /// largest size: buffers are powers of two, so they fill it without gaps.
    fn block_bytes(&self, slot: u16, largest_bytes: u32) -> u32 {
        let entry = &self.slots[usize::from(slot)];
        let mate = entry.mate.map(|mate| needs(&self.slots[usize::from(mate)]));
        let (first, second) = needs(entry);
        let (third, fourth) = mate.unwrap_or_default();
        let wanted = [first, second, third, fourth].into_iter().filter(|len| *len > 0);
        let sum = wanted.map(capacity_for).fold(0, u32::saturating_add);
        match sum <= largest_bytes {
            true => sum.next_power_of_two(),
            false => sum.checked_next_multiple_of(largest_bytes).unwrap_or(u32::MAX),
        }
    }

    /// Bytes of buffers that a command needs, with the other half of a fused one.
    pub(super) fn wanted_bytes(&self, slot: u16) -> u64 {
        let entry = &self.slots[usize::from(slot)];
        let mate = entry.mate.map_or(0, |mate| total(&self.slots[usize::from(mate)]));
        total(entry) + mate
    }

    /// The namespace of a command, when its host has several: only then is there one to protect.
    fn lane(&self, slot: u16) -> Option<Lane> {
        match &self.serves {
            Serves::Io { subsystem, .. } if subsystem.namespaces.len() > 1 => {
                Some(Lane::of(self.slots[usize::from(slot)].sqe.nsid))
            }
            _ => None,
        }
    }

    /// Decides about the receive of a command that stands in line, and of the other half that it
    /// stands there for.
    #[inline]
    pub(super) fn spare_receives(&mut self, slot: u16, io: &mut Io<'_>) {
        self.spare_receive(slot, io);
        if let Some(mate) = self.slot(slot).mate {
            self.spare_receive(mate, io);
        }
    }

    /// Lets the receive of a command go to the disk, or has its data copied when its store has enough
    /// receives: a disk that hangs keeps what it has, and others shall be able to connect. It counts
    /// from now on: many may be let pass before the first of them is at the disk.
    fn spare_receive(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        // What does not begin on a page is copied in any case.
        let Plan::Store { from: Source::Capsule { .. }, backing, .. } = entry.plan else { return };
        if total(entry) == 0 && !entry.gives_receive {
            let (store, receives) = (Store::of(backing), io.pool.plan().receives);
            entry.gives_receive = io.waiters.keep_receive(store, receives);
            entry.copies = !entry.gives_receive;
        }
    }

    /// The receive of a command, if it was let go to the disk, is home or never goes.
    #[inline]
    pub(super) fn return_receive(&mut self, slot: u16, io: &mut Io<'_>) {
        if std::mem::take(&mut self.slot(slot).gives_receive)
            && let Some(store) = self.store(slot)
        {
            io.waiters.return_receive(store);
        }
    }

    /// A command is done with its store: a host that takes no data keeps nothing from those that use
    /// it as well.
    #[inline]
    pub(super) fn leave_store(&mut self, slot: u16, io: &mut Io<'_>) {
        let share = self.share;
        let entry = self.slot(slot);
        if let (Some(share), Some(store)) = (share, entry.store.take()) {
            io.waiters.discharge_store(share, store, entry.charged_bytes);
        }
    }

    /// The store that a command is for.
    pub(super) fn store(&self, slot: u16) -> Option<Store> {
        self.slots[usize::from(slot)].plan.backing().map(Store::of)
    }

    fn take_own_buffers(&mut self, slot: u16, aside: bool, io: &mut Io<'_>) -> bool {
        let share = self.share;
        let take = match share {
            _ if aside => Pool::take_aside,
            Some(_) => Pool::take_data,
            // A few small ones, for which no host shall wait.
            None => Pool::take_any,
        };
        let entry = self.slot(slot);
        let (first, second) = needs(entry);
        if first > 0 && entry.data.is_none() {
            entry.data = take(io.pool, first);
            if entry.data.is_none() {
                return false;
            }
        }
        if second > 0 && entry.rare().is_none_or(|rare| rare.second.is_none()) {
            let taken = take(io.pool, second);
            let is_short = taken.is_none();
            entry.make_rare().second = taken;
            if is_short {
                if let Some(buf) = entry.data.take() {
                    io.pool.give(buf);
                }
                return false;
            }
        }
        let charged_bytes = taken_bytes(first).saturating_add(taken_bytes(second));
        entry.charged_bytes = charged_bytes;
        if let Some(share) = share {
            let (lane, store) = (Lane::of(entry.sqe.nsid), entry.plan.backing().map(Store::of));
            entry.store = store;
            io.waiters.charge(share, lane, store, charged_bytes);
        }
        true
    }

    /// The buffers are there: the first step; of a fused command, that of both halves.
    pub(super) fn proceed(&mut self, slot: u16, io: &mut Io<'_>) {
        self.proceed_alone(slot, io);
        // Unless it has ended by now.
        if let Some(mate) = self.slot(slot).mate {
            self.proceed_alone(mate, io);
        }
    }

    fn proceed_alone(&mut self, slot: u16, io: &mut Io<'_>) {
        let qp = self.qp;
        let entry = self.slot(slot);
        match &mut entry.plan {
            Plan::Give { .. } => self.give_page(slot, io),
            Plan::Load { backing, at, .. } => {
                let (backing, at) = (*backing, *at);
                let buf = entry.data.take();
                self.submit(slot, backing, buf.map(|into| Op::Read { into, at }), io);
            }
            Plan::Store { from, .. }
            | Plan::Compare { from, .. }
            | Plan::Deallocate { from, .. }
            | Plan::Copy { from, .. }
            | Plan::Connect { from }
            | Plan::Reserve { from, .. }
            | Plan::Authenticate { from }
            | Plan::Manage { from }
            | Plan::SetFeature { from } => match *from {
                Source::Host(remote) => {
                    entry.state = State::Pulling;
                    entry.clock.enter(Stage::Pull, io.now_ns);
                    if entry.is_scattered() {
                        entry.make_rare().pieces.begin(remote.len);
                        self.pull_piece(slot, io);
                    } else if let Some(into) = entry.data.take() {
                        entry.posted += 1;
                        let work = rdma::Work::Read { into, from: remote };
                        io.fabric.post(qp, slot.into(), work);
                    }
                }
                Source::Capsule { offset, len } => {
                    if let Some(buf) = &mut entry.capsule {
                        let start = buf.start() + SQE_BYTES + offset;
                        buf.select(start, len);
                    }
                    self.copy_if_unaligned(slot, io);
                    self.on_pulled(slot, io);
                }
            },
            Plan::Flush { .. }
            | Plan::Zero { .. }
            | Plan::Verify { .. }
            | Plan::ShutDown { .. } => {
                self.after_disk(slot, io);
            }
            Plan::Keep { of, order } => {
                let (of, order) = (std::mem::take(of), *order);
                self.ask_keeper(slot, of, order, io);
            }
            Plan::Protect { of, state, .. } => {
                let (of, state) = (std::mem::take(of), *state);
                self.protect(slot, of, state, io);
            }
            Plan::Mark { .. } => self.mark(slot, io),
            // Of these, the queue has taken the plan inside.
            Plan::Mend { .. } => {}
            Plan::Order { what, made } => {
                let (what, made) = (what.clone(), made.clone());
                self.ask_steward(slot, what, made, io);
            }
            Plan::Reply(_) | Plan::Park | Plan::Abort { .. } | Plan::Disconnect => {}
        }
    }

    /// In-capsule data that do not begin on a page cannot go to the disk as they lie; others may not.
    pub(super) fn copy_if_unaligned(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        if let (Some(capsule), Some(data)) = (&entry.capsule, &mut entry.data) {
            let bytes = io.pool.bytes(capsule);
            io.pool.bytes_mut(data).copy_from_slice(bytes);
        }
    }

    /// The command's data are here.
    pub(super) fn on_pulled(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        if let Some(mate) = entry.mate {
            return self.on_half_pulled(slot, mate, io);
        }
        if entry.doomed {
            let status = Status::ABORTED_FAILED_FUSED.with_dnr();
            return self.answer(slot, Err(status), io);
        }
        if let Some(status) = self.ends_early(slot) {
            return self.answer(slot, Err(status), io);
        }
        let entry = self.slot(slot);
        match entry.plan {
            Plan::Store { backing, at, fua, .. } => {
                let buf = entry.data.take().or_else(|| entry.capsule.take());
                self.submit(slot, backing, buf.map(|from| Op::Write { from, at, fua }), io);
            }
            Plan::Compare { backing, at, .. } => {
                let buf = entry.make_rare().second.take();
                self.submit(slot, backing, buf.map(|into| Op::Read { into, at }), io);
            }
            Plan::Deallocate { extent, .. } => {
                let entry = &self.slots[usize::from(slot)];
                match rules::check_ranges(entry.bytes(io.pool), extent) {
                    Ok(()) => self.after_disk(slot, io),
                    Err(status) => self.answer(slot, Err(status), io),
                }
            }
            Plan::Copy { job, .. } => {
                let entry = &self.slots[usize::from(slot)];
                let checked = job.check(entry.bytes(io.pool));
                match checked.and_then(|()| self.check_copied(slot, job, io)) {
                    Ok(()) => self.after_disk(slot, io),
                    Err(status) => self.answer(slot, Err(status), io),
                }
            }
            Plan::Connect { .. } => self.connect(slot, io),
            Plan::Reserve { .. } => self.reserve(slot, io),
            Plan::Authenticate { .. } => self.authenticate(slot, io),
            Plan::Manage { .. } => self.manage(slot, io),
            Plan::SetFeature { .. } => {
                let entry = &self.slots[usize::from(slot)];
                let result = match &mut self.serves {
                    Serves::Admin(controller) => {
                        let data = entry.bytes(io.pool);
                        admin::set_feature_with_data(&entry.sqe, data, controller)
                    }
                    _ => Err(Status::INVALID_OPCODE.with_dnr()),
                };
                self.answer(slot, result, io);
            }
            _ => {}
        }
    }

    /// The next disk operation of the plan, or the answer when all are done. `step` counts those
    /// that are done.
    pub(super) fn after_disk(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let step = entry.step;
        if let Some(status) = self.ends_early(slot) {
            return self.answer(slot, Err(status), io);
        }
        match &entry.plan {
            Plan::Load { to, .. } => {
                let to = *to;
                let work = self.work(slot);
                work.reads += 1;
                work.units_read += u64::from(to.len >> 9);
                self.push_and_answer(slot, to, io);
            }
            Plan::Store { from, .. } => {
                let units = u64::from(from.len_bytes() >> 9);
                let work = self.work(slot);
                work.writes += 1;
                work.units_written += units;
                self.answer(slot, Ok(0), io);
            }
            Plan::Compare { from, .. } => {
                let units = u64::from(from.len_bytes() >> 9);
                let same = match entry.rare().and_then(|rare| rare.second.as_ref()) {
                    Some(second) => io.pool.bytes(second) == entry.bytes(io.pool),
                    None => false,
                };
                let mate = entry.mate;
                let work = self.work(slot);
                work.reads += 1;
                work.units_read += units;
                match (same, mate) {
                    (true, None) => self.answer(slot, Ok(0), io),
                    (true, Some(second)) => self.write_behind(slot, second, io),
                    (false, _) => self.answer(slot, Err(Status::COMPARE_FAILURE.with_dnr()), io),
                }
            }
            Plan::Flush { backing } => {
                let backing = *backing;
                match step {
                    0 => self.submit(slot, backing, Some(Op::Flush), io),
                    _ => self.answer(slot, Ok(0), io),
                }
            }
            Plan::Zero { backing, at, len, deallocate, fua } => {
                let (backing, fua) = (*backing, *fua);
                let op = Op::Zero { at: *at, len: *len, deallocate: *deallocate };
                match step {
                    0 => self.submit(slot, backing, Some(op), io),
                    1 if fua => self.submit(slot, backing, Some(Op::Flush), io),
                    _ => self.answer(slot, Ok(0), io),
                }
            }
            Plan::Deallocate { extent, nr, .. } => {
                let (extent, nr) = (*extent, *nr);
                self.next_range(slot, extent, nr, io);
            }
            Plan::Verify { backing, at, len, piece_bytes } => {
                let (backing, at, len, piece_bytes) = (*backing, *at, *len, *piece_bytes);
                self.verify_piece(slot, backing, (at, len), piece_bytes, io);
            }
            Plan::Copy { job, .. } => {
                let job = *job;
                self.copy_range(slot, job, io);
            }
            Plan::ShutDown { backings } => match backings.get(step as usize) {
                Some(&backing) => self.submit(slot, backing, Some(Op::Flush), io),
                None => {
                    if let Serves::Admin(controller) = &mut self.serves {
                        controller.shut_down_complete();
                    }
                    self.answer(slot, Ok(0), io);
                }
            },
            Plan::Reserve { .. } | Plan::Keep { .. } | Plan::Mark { .. } => {
                self.answer(slot, Ok(0), io);
            }
            Plan::Order { made, .. } => {
                let made = made.nsid().into();
                self.answer(slot, Ok(made), io);
            }
            // The first step was the keeper's.
            Plan::Protect { backings, .. } => match backings.get((step as usize).wrapping_sub(1)) {
                Some(&backing) => self.submit(slot, backing, Some(Op::Flush), io),
                None => self.answer(slot, Ok(0), io),
            },
            _ => {}
        }
    }

    pub(super) fn next_range(&mut self, slot: u16, extent: Extent, nr: u32, io: &mut Io<'_>) {
        while self.slot(slot).step < nr {
            let entry = &self.slots[usize::from(slot)];
            match rules::range_at(entry.bytes(io.pool), entry.step, extent) {
                Ok((_, 0)) => self.slot(slot).step += 1,
                Ok((at, len)) => {
                    let op = self.discard(slot, at, len);
                    return self.submit(slot, extent.backing, Some(op), io);
                }
                Err(status) => return self.answer(slot, Err(status), io),
            }
        }
        if self.mends_first(slot, nr) {
            return self.submit(slot, extent.backing, Some(Op::Flush), io);
        }
        self.answer(slot, Ok(0), io);
    }

    /// Verify: the next piece of the range, or the answer.
    fn verify_piece(
        &mut self,
        slot: u16,
        backing: BackingId,
        (at, len): (u64, u64),
        piece_bytes: u32,
        io: &mut Io<'_>,
    ) {
        let entry = self.slot(slot);
        let done = u64::from(entry.step) * u64::from(piece_bytes);
        let left = len.saturating_sub(done).min(piece_bytes.into()) as u32;
        if left == 0 {
            let work = self.work(slot);
            work.reads += 1;
            work.units_read += len >> 9;
            return self.answer(slot, Ok(0), io);
        }
        let into = entry.data.take().map(|mut into| {
            into.select(0, left);
            Op::Read { into, at: at + done }
        });
        self.submit(slot, backing, into, io);
    }

    /// Copy: loads the next range behind the others, stores them all, or answers.
    fn copy_range(&mut self, slot: u16, job: Job, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        let (step, mut buf) = (entry.step, entry.make_rare().second.take());
        let data = self.slots[usize::from(slot)].bytes(io.pool);
        let next = match step.cmp(&job.nr) {
            Ordering::Less => job.load(data, step).map(|range| {
                let (at, len, skip) = range?;
                let mut into = buf.take()?;
                into.select(skip, len);
                Some(Op::Read { into, at })
            }),
            Ordering::Equal => job.store(data).map(|(at, len)| {
                let mut from = buf.take()?;
                from.select(0, len);
                Some(Op::Write { from, at, fua: job.fua })
            }),
            Ordering::Greater => {
                let units = u64::from(buf.as_ref().map_or(0, Buf::len)) >> 9;
                let work = self.work(slot);
                work.reads += 1;
                work.units_read += units;
                work.writes += 1;
                work.units_written += units;
                self.slot(slot).make_rare().second = buf;
                return self.answer(slot, Ok(0), io);
            }
        };
        self.slot(slot).make_rare().second = buf;
        if let Ok(Some(op @ Op::Write { .. })) = &next {
            self.charge(slot, op.changes().map_or(0, |(_, len)| len), io.now);
        }
        match next {
            Ok(op) => self.submit(slot, job.extent.backing, op, io),
            Err(status) => self.answer(slot, Err(status), io),
        }
    }

    pub(super) fn submit(
        &mut self,
        slot: u16,
        backing: BackingId,
        op: Option<Op>,
        io: &mut Io<'_>,
    ) {
        // `take_buffers` ran before, so there always is an operation.
        let Some(op) = op else { return self.answer(slot, Err(Status::INTERNAL_ERROR), io) };
        self.take_turn(slot, backing, op, None, io);
    }
}

fn total(entry: &Slot) -> u64 {
    let (first, second) = needs(entry);
    u64::from(taken_bytes(first)) + u64::from(taken_bytes(second))
}

/// Bytes that are taken of the pool for so many; for none, none.
fn taken_bytes(len: u32) -> u32 {
    if len == 0 { 0 } else { capacity_for(len) }
}

/// Bytes of the first and second data buffer that a command needs from the pool.
fn needs(entry: &Slot) -> (u32, u32) {
    let pulled = |from: &Source| match *from {
        Source::Host(remote) => remote.len,
        Source::Capsule { len, .. } if entry.copies => len,
        Source::Capsule { offset, len } if !offset.is_multiple_of(rdma::pool::PAGE_BYTES) => len,
        Source::Capsule { .. } => 0,
    };
    match &entry.plan {
        Plan::Give { to, .. } => (to.len.min(page::AT_ONCE_BYTES), 0),
        Plan::Load { to, .. } => (to.len, 0),
        Plan::Store { from, .. } => (pulled(from), 0),
        Plan::Compare { from, .. } => (pulled(from), from.len_bytes()),
        Plan::Copy { job, from } => (pulled(from), job.room_bytes()),
        Plan::Verify { len, piece_bytes, .. } => ((*len).min(u64::from(*piece_bytes)) as u32, 0),
        Plan::Deallocate { from, .. }
        | Plan::Connect { from }
        | Plan::Reserve { from, .. }
        | Plan::Authenticate { from }
        | Plan::Manage { from }
        | Plan::SetFeature { from } => (pulled(from), 0),
        Plan::Reply(_)
        | Plan::Flush { .. }
        | Plan::Zero { .. }
        | Plan::ShutDown { .. }
        | Plan::Keep { .. }
        | Plan::Protect { .. }
        | Plan::Mark { .. }
        | Plan::Mend { .. }
        | Plan::Order { .. }
        | Plan::Park
        | Plan::Abort { .. }
        | Plan::Disconnect => (0, 0),
    }
}
