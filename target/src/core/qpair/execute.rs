//! Carrying out a plan: the steps between a decided command and its answer.

use std::cmp::Ordering;

use nvme::Status;
use rdma::Buf;

use super::{Io, QueuePair, QueueRole, State, WaitReason};
use crate::blockdev::{DeviceId, IoRequest};
use crate::core::command::copy::Job;
use crate::core::command::{Plan, SQE_BYTES, Source, admin, io as rules};
use crate::core::stats::Stage;
use crate::core::subsystem::Extent;

impl QueuePair {
    pub(super) fn start(&mut self, slot: u16, plan: Result<Plan, Status>, io: &mut Io<'_>) {
        match plan {
            Ok(Plan::Reply(result)) => self.answer(slot, Ok(result), io),
            Ok(plan @ (Plan::Park | Plan::Disconnect | Plan::Abort { .. })) => {
                let entry = self.slot(slot);
                entry.enter(State::Waiting(WaitReason::Event));
                entry.plan = plan;
                match entry.plan {
                    Plan::Disconnect => self.disconnect(slot, io),
                    Plan::Abort { sqid, cid } => self.abort(slot, sqid, cid, io),
                    _ => {}
                }
            }
            Ok(plan) => {
                self.slot(slot).plan = plan;
                self.enter(slot, io);
            }
            Err(status) => self.answer(slot, Err(status), io),
        }
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
                self.submit(slot, backing, buf.map(|into| IoRequest::Read { into, at }), io);
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
                    entry.enter(State::Pulling);
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
                self.submit(slot, backing, buf.map(|from| IoRequest::Write { from, at, fua }), io);
            }
            Plan::Compare { backing, at, .. } => {
                let buf = entry.make_rare().second.take();
                self.submit(slot, backing, buf.map(|into| IoRequest::Read { into, at }), io);
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
                    QueueRole::Admin(controller) => {
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
                let len = from.len_bytes();
                self.compare(slot, len, io);
            }
            Plan::Flush { backing } => {
                let backing = *backing;
                self.flush(slot, backing, io);
            }
            Plan::Zero { backing, at, len, deallocate, fua } => {
                let (backing, fua) = (*backing, *fua);
                let op = IoRequest::Zero { at: *at, len: *len, deallocate: *deallocate };
                match step {
                    0 => self.submit(slot, backing, Some(op), io),
                    1 if fua => self.submit(slot, backing, Some(IoRequest::Flush), io),
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
            Plan::ShutDown { .. } => self.flush_for_shutdown(slot, io),
            Plan::Reserve { .. } | Plan::Keep { .. } | Plan::Mark { .. } => {
                self.answer(slot, Ok(0), io);
            }
            Plan::Order { made, .. } => {
                let made = made.nsid().into();
                self.answer(slot, Ok(made), io);
            }
            // The first step was the keeper's.
            Plan::Protect { backings, .. } => match backings.get((step as usize).wrapping_sub(1)) {
                Some(&backing) => self.submit(slot, backing, Some(IoRequest::Flush), io),
                None => self.answer(slot, Ok(0), io),
            },
            _ => {}
        }
    }

    /// Compare: the blocks are here beside the data of the host; the answer, or of a fused command
    /// the write.
    fn compare(&mut self, slot: u16, len_bytes: u32, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let same = match entry.rare().and_then(|rare| rare.second.as_ref()) {
            Some(second) => io.pool.bytes(second) == entry.bytes(io.pool),
            None => false,
        };
        let mate = entry.mate;
        let work = self.work(slot);
        work.reads += 1;
        work.units_read += u64::from(len_bytes >> 9);
        match (same, mate) {
            (true, None) => self.answer(slot, Ok(0), io),
            (true, Some(second)) => self.write_behind(slot, second, io),
            (false, _) => self.answer(slot, Err(Status::COMPARE_FAILURE.with_dnr()), io),
        }
    }

    /// Flush: of the device, unless the host has to hear first that earlier writes may be lost.
    fn flush(&mut self, slot: u16, backing: DeviceId, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        if entry.step > 0 {
            return self.answer(slot, Ok(0), io);
        }
        match self.begin_flush(entry.sqe.nsid) {
            Ok(()) => self.submit(slot, backing, Some(IoRequest::Flush), io),
            Err(status) => self.answer(slot, Err(status), io),
        }
    }

    /// Shutdown: the next device is flushed, or the controller has shut down.
    fn flush_for_shutdown(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.slots[usize::from(slot)];
        let Plan::ShutDown { backings, durable } = &entry.plan else { return };
        let Some(&backing) = backings.get(entry.step as usize) else {
            if let QueueRole::Admin(controller) = &mut self.serves {
                controller.shut_down_complete(*durable);
            }
            return self.answer(slot, Ok(0), io);
        };
        match self.begin_shutdown_flush(backing) {
            Ok(()) => self.submit(slot, backing, Some(IoRequest::Flush), io),
            Err(status) => {
                self.on_failed_shutdown_flush(slot, status, io);
                self.slot(slot).step += 1;
                self.after_disk(slot, io);
            }
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
            return self.submit(slot, extent.backing, Some(IoRequest::Flush), io);
        }
        self.answer(slot, Ok(0), io);
    }

    /// Verify: the next piece of the range, or the answer.
    fn verify_piece(
        &mut self,
        slot: u16,
        backing: DeviceId,
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
            IoRequest::Read { into, at: at + done }
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
                Some(IoRequest::Read { into, at })
            }),
            Ordering::Equal => job.store(data).map(|(at, len)| {
                let mut from = buf.take()?;
                from.select(0, len);
                Some(IoRequest::Write { from, at, fua: job.fua })
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
        if let Ok(Some(op @ IoRequest::Write { .. })) = &next {
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
        backing: DeviceId,
        op: Option<IoRequest>,
        io: &mut Io<'_>,
    ) {
        // `take_buffers` ran before, so there always is an operation.
        let Some(op) = op else { return self.answer(slot, Err(Status::INTERNAL_ERROR), io) };
        self.take_turn(slot, backing, op, None, io);
    }
}
