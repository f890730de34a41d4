//! Execution of a plan: the steps between the decision on a command and its completion. This is the only
//! place where operations are submitted to a device, and jobs to a worker.
//!
//! State that few commands need ([`super::request::RequestExt`]) is checked once a step, and only for
//! commands that have any.

use std::cmp::Ordering;
use std::sync::Arc;

use nvme::Status;
use rdma::{Buf, Remote, Work};

use super::range_lock::RangeLockState;
use super::request::{State, WaitReason};
use super::role::QueueRole;
use super::unflushed;
use super::{
    Io, QueuePair, bad_blocks, features, fused, lba_status, log_page, offload, range_lock,
    sgl_transfer,
};
use crate::command::copy::Job;
use crate::command::{Plan, SQE_BYTES, Source, io as rules};
use crate::sched::offload::Job as OffloadJob;
use crate::stats::Stage;
use crate::subsystem::Extent;
use nvmfd_blockdev::{DeviceId, IoCompletion, IoRequest};

impl QueuePair {
    /// Starts the plan that was decided for a command.
    #[inline(always)]
    pub(super) fn start(&mut self, slot: u16, plan: Result<Plan, Status>, io: &mut Io<'_>) {
        match plan {
            Ok(plan) => {
                let entry = &mut self.requests[slot];
                entry.set_plan(plan);
                match entry.plan {
                    Plan::Reply(_) | Plan::Park | Plan::Disconnect | Plan::Abort { .. } => {
                        self.start_alone(slot, io);
                    }
                    _ => self.admit(slot, io),
                }
            }
            Err(status) => self.complete(slot, Err(status), io),
        }
    }

    /// Starts a command that needs neither buffers nor a device.
    #[inline(never)]
    fn start_alone(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        if let Plan::Reply(result) = entry.plan {
            return self.complete(slot, Ok(result), io);
        }
        entry.enter(State::Waiting(WaitReason::Event));
        match entry.plan {
            Plan::Disconnect => self.disconnect(slot, io),
            Plan::Abort { sqid, cid } => self.abort(slot, sqid, cid, io),
            _ => {}
        }
    }

    /// Executes the first step after the buffers are allocated; of a fused command, that of both
    /// halves.
    #[inline(always)]
    pub(super) fn execute(&mut self, slot: u16, io: &mut Io<'_>) {
        self.execute_alone(slot, io);
        // It may have ended by now.
        if let Some(other) = self.requests[slot].fused_with() {
            self.execute_alone(other, io);
        }
    }

    fn execute_alone(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        match &mut entry.plan {
            Plan::Give { .. } => {
                if let Some(to) = log_page::begin(entry, io.pool) {
                    self.push_and_complete(slot, to, io);
                }
            }
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
                Source::Host(remote) => self.pull(slot, remote, io),
                Source::Capsule { offset, len } => {
                    if let Some(buf) = &mut entry.capsule {
                        let start = buf.start() + SQE_BYTES + offset;
                        buf.select(start, len);
                    }
                    // Data that are not page-aligned cannot be submitted where they are; others may
                    // not be, by a limit.
                    if let (Some(capsule), Some(data)) = (&entry.capsule, &mut entry.data) {
                        let bytes = io.pool.bytes(capsule);
                        io.pool.bytes_mut(data).copy_from_slice(bytes);
                    }
                    self.on_pulled(slot, io);
                }
            },
            Plan::Flush { .. }
            | Plan::Zero { .. }
            | Plan::Verify { .. }
            | Plan::ShutDown { .. } => self.next_step(slot, io),
            _ => self.execute_job(slot, io),
        }
    }

    /// Executes the first step of a command, if a worker does that.
    fn execute_job(&mut self, slot: u16, io: &mut Io<'_>) {
        let role = &self.conn.role;
        let job = match &mut self.requests[slot].plan {
            Plan::Keep { of, order } => {
                let (of, order) = (std::mem::take(of), *order);
                offload::reservation(&self.requests, slot, (of, order), role, io)
            }
            Plan::Protect { of, state, .. } => {
                let (of, state) = (std::mem::take(of), *state);
                Ok(offload::write_protect(&self.requests, slot, of, state, io))
            }
            Plan::Mark { of, change } => {
                let what = (Arc::clone(of), change.clone());
                let may_begin = role.may_begin_at(&self.requests[slot], None);
                may_begin.map(|()| bad_blocks::job(&mut self.requests, slot, what, role, io))
            }
            Plan::Order { what, made } => {
                let order = (what.clone(), made.clone());
                offload::namespace(&mut self.requests, slot, order, role, io)
            }
            Plan::LbaStatus(_) => {
                match lba_status::search_job(&mut self.requests, slot, role, io) {
                    Some(job) => job,
                    None => return self.admit_lba_status(slot, io),
                }
            }
            // `Plan::Mend` was replaced by its inner plan when the command was decided.
            _ => return,
        };
        self.offload(slot, job, io);
    }

    /// Pulls the data of a command.
    fn pull(&mut self, slot: u16, from: Remote, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        let work = match entry.ext_mut().map(|ext| &mut ext.pieces) {
            Some(pieces) if !pieces.is_empty() => {
                pieces.begin(from.len);
                sgl_transfer::next_pull(entry)
            }
            _ => entry.data.take().map(|into| Work::Read { into, from }),
        };
        // Its buffers were allocated before, so there always is work.
        if let Some(work) = work {
            self.post_pull(slot, work, io);
        }
    }

    /// Posts the first work that pulls the data of a command.
    #[inline(always)]
    pub(super) fn post_pull(&mut self, slot: u16, work: Work, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        entry.enter(State::Pulling);
        entry.clock.enter(Stage::Pull, io.now_ns);
        entry.posted += 1;
        io.fabric.post(self.conn.qp, slot.into(), work);
    }

    /// Handles pulled data of a command; returns whether these were all.
    pub(super) fn on_piece_pulled(&mut self, slot: u16, io: &mut Io<'_>) -> bool {
        let entry = &mut self.requests[slot];
        if !entry.has_ext() {
            return true;
        }
        if entry.is_in_pieces() {
            if let Some(work) = sgl_transfer::next_pull(entry) {
                entry.posted += 1;
                io.fabric.post(self.conn.qp, slot.into(), work);
            }
            return false;
        }
        sgl_transfer::join(entry);
        true
    }

    /// Executes the next step of a command whose data have arrived.
    pub(super) fn on_pulled(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        if let Some(ext) = entry.ext() {
            if let Some(other) = ext.fused_with {
                return self.on_half_pulled(slot, other, io);
            }
            if ext.fused_failed {
                return self.complete(slot, Err(fused::FAILED), io);
            }
            if let Some(status) = entry.pending_end() {
                return self.complete(slot, Err(status), io);
            }
        }
        match entry.plan {
            Plan::Store { backing, at, fua, .. } => {
                let buf = entry.data.take().or_else(|| entry.capsule.take());
                let op = buf.map(|from| IoRequest::Write { from, at, fua });
                self.submit(slot, backing, op, io);
            }
            Plan::Compare { backing, at, .. } => {
                let buf = entry.make_ext().second.take();
                self.submit(slot, backing, buf.map(|into| IoRequest::Read { into, at }), io);
            }
            Plan::Deallocate { extent, .. } => {
                match rules::check_ranges(entry.bytes(io.pool), extent) {
                    Ok(()) => self.next_step(slot, io),
                    Err(status) => self.complete(slot, Err(status), io),
                }
            }
            Plan::Copy { job, .. } => {
                let checked = job.check(entry.bytes(io.pool));
                match checked.and_then(|()| bad_blocks::check_copied(entry, job, io.pool)) {
                    Ok(()) => self.next_step(slot, io),
                    Err(status) => self.complete(slot, Err(status), io),
                }
            }
            _ => self.on_admin_pulled(slot, io),
        }
    }

    /// The same for a command that moves no blocks.
    fn on_admin_pulled(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        match &entry.plan {
            Plan::Connect { .. } => self.connect(slot, io),
            Plan::Reserve { .. } => {
                entry.clock.enter(Stage::Wait, io.now_ns);
                let job = offload::reserve(&self.requests, slot, &self.conn.role, io);
                self.offload(slot, job, io);
            }
            Plan::Authenticate { .. } => {
                match self.auth.on_message(slot, &mut self.requests, &mut self.conn, io) {
                    Ok(true) => self.complete(slot, Ok(0), io),
                    Ok(false) => {}
                    Err(status) => self.complete(slot, Err(status), io),
                }
            }
            Plan::Manage { .. } => {
                let job = offload::manage(&mut self.requests, slot, &self.conn.role, io);
                self.offload(slot, job, io);
            }
            Plan::SetFeature { .. } => {
                let result = features::set(&mut self.conn.role, entry, io);
                self.complete(slot, result, io);
            }
            _ => {}
        }
    }

    /// Handles the completion of a device operation or of a worker's job.
    pub fn on_disk(&mut self, slot: u16, done: IoCompletion, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        if done.outcome.is_err() || entry.has_ext() || !self.conn.is_open() {
            return self.on_step_done(slot, done, io);
        }
        // A Read or a Write has one step, and here nothing of RequestExt.
        let data = match entry.plan {
            Plan::Load { to, .. } => (done.buf, Some(to)),
            Plan::Store { from, fua, .. } => {
                if !fua {
                    unflushed::note_write(&self.conn.role, entry.sqe.nsid);
                }
                match from {
                    Source::Capsule { .. } if entry.capsule.is_none() => {
                        entry.capsule = done.buf;
                        (None, None)
                    }
                    _ => (done.buf, None),
                }
            }
            _ => return self.on_step_done(slot, done, io),
        };
        self.requests.outstanding -= 1;
        self.answer(slot, Status::SUCCESS, 0, data, io);
        self.raise_events(io);
    }

    /// The same for a command with further steps, state that few need, or a failure.
    #[inline(never)]
    fn on_step_done(&mut self, slot: u16, done: IoCompletion, io: &mut Io<'_>) {
        self.requests.outstanding -= 1;
        let is_open = self.conn.is_open();
        let entry = &mut self.requests[slot];
        range_lock::end_op(entry, io);
        entry.put_back(done.buf);
        unflushed::note(&self.conn.role, entry, done.outcome, is_open);
        if !is_open {
            return self.release(slot, io);
        }
        if entry.has_ext() && self.on_ext_done(slot, done.outcome, io) {
            return;
        }
        let entry = &mut self.requests[slot];
        if let Err(status) = done.outcome {
            if !matches!(entry.plan, Plan::ShutDown { .. }) {
                return self.complete(slot, Err(status), io);
            }
            self.note_failed_shutdown_flush(slot, status, io);
        }
        self.requests[slot].step += 1;
        self.next_step(slot, io);
        self.raise_events(io);
    }

    /// Executes further steps of rare commands after an operation; returns whether the command has
    /// ended.
    fn on_ext_done(&mut self, slot: u16, outcome: Result<(), Status>, io: &mut Io<'_>) -> bool {
        if let Some(first) = fused::end_write(&mut self.requests, slot) {
            self.complete(first, Ok(0), io);
        }
        if !bad_blocks::end_clearing(&mut self.requests[slot]) {
            return false;
        }
        self.complete(slot, outcome.map(|()| 0), io);
        self.raise_events(io);
        true
    }

    /// Submits the next operation of the plan, or completes the command when all are done. `step`
    /// is the number of those that are done.
    fn next_step(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &self.requests[slot];
        let step = entry.step;
        if let Some(status) = entry.pending_end() {
            return self.complete(slot, Err(status), io);
        }
        if let Some(backing) = entry.flush_due() {
            return self.submit(slot, backing, Some(IoRequest::Flush), io);
        }
        match &entry.plan {
            Plan::Load { to, .. } => {
                let to = *to;
                self.push_and_complete(slot, to, io);
            }
            Plan::Compare { from, .. } => {
                let len = from.len_bytes();
                self.compare(slot, len, io);
            }
            Plan::Flush { backing, .. } => {
                let backing = *backing;
                self.flush(slot, backing, io);
            }
            Plan::Zero { backing, at, len, deallocate, .. } if step == 0 => {
                let backing = *backing;
                let op = IoRequest::Zero { at: *at, len: *len, deallocate: *deallocate };
                self.submit(slot, backing, Some(op), io);
            }
            Plan::Store { .. } | Plan::Zero { .. } => self.complete(slot, Ok(0), io),
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
                self.complete(slot, Ok(0), io);
            }
            Plan::Order { made, .. } => {
                let made = made.nsid().into();
                self.complete(slot, Ok(made), io);
            }
            Plan::LbaStatus(_) => self.admit_lba_status(slot, io),
            // The worker has executed the first step.
            Plan::Protect { backings, .. } => match backings.get((step as usize).wrapping_sub(1)) {
                Some(&backing) => self.submit(slot, backing, Some(IoRequest::Flush), io),
                None => self.complete(slot, Ok(0), io),
            },
            _ => {}
        }
    }

    /// Compares the loaded blocks with the data of the host, and completes the command or begins
    /// the write of a fused command.
    fn compare(&mut self, slot: u16, len_bytes: u32, io: &mut Io<'_>) {
        let entry = &self.requests[slot];
        let same = match entry.ext().and_then(|ext| ext.second.as_ref()) {
            Some(second) => io.pool.bytes(second) == entry.bytes(io.pool),
            None => false,
        };
        let other = entry.fused_with();
        self.stats.count_read(entry, len_bytes.into());
        match (same, other) {
            (true, None) => self.complete(slot, Ok(0), io),
            (true, Some(second)) => self.write_fused(slot, second, io),
            (false, _) => self.complete(slot, Err(Status::COMPARE_FAILURE.with_dnr()), io),
        }
    }

    /// Handles the data of one half: the fused command begins when those of both have arrived.
    fn on_half_pulled(&mut self, slot: u16, other: u16, io: &mut Io<'_>) {
        let both = fused::on_pulled(&mut self.requests, slot, other);
        self.requests[slot].clock.enter(Stage::Wait, io.now_ns);
        let Some((first, second)) = both else { return };
        for half in [first, second] {
            let entry = &self.requests[half];
            let refused = || self.conn.role.may_begin_at(entry, None).err();
            if let Some(status) = entry.pending_end().or_else(refused) {
                return self.complete(half, Err(status), io);
            }
        }
        let entry = &mut self.requests[first];
        let into = entry.make_ext().second.take();
        let (Plan::Compare { backing, at, from }, Some(into)) = (&entry.plan, into) else {
            return self.complete(first, Err(Status::INTERNAL_ERROR), io);
        };
        let (backing, at, len) = (*backing, *at, from.len_bytes());
        let op = IoRequest::Read { into, at };
        let blocks = Some((at, len.into()));
        self.submit_locked(first, backing, op, blocks, io);
    }

    /// Begins the write of a fused command, after the comparison has succeeded.
    fn write_fused(&mut self, first: u16, second: u16, io: &mut Io<'_>) {
        fused::pass_lock(&mut self.requests, first, second);
        let entry = &mut self.requests[second];
        if let Plan::Store { backing, at, fua, .. } = entry.plan {
            let buf = entry.data.take().or_else(|| entry.capsule.take());
            let op = buf.map(|from| IoRequest::Write { from, at, fua });
            self.submit(second, backing, op, io);
        }
    }

    /// Flushes the device, unless a possible loss of earlier writes must first be reported to the
    /// host.
    fn flush(&mut self, slot: u16, backing: DeviceId, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        if entry.step > 0 {
            return self.complete(slot, Ok(0), io);
        }
        match unflushed::begin_flush(&self.conn.role, entry) {
            Ok(()) => self.submit(slot, backing, Some(IoRequest::Flush), io),
            Err(status) => self.complete(slot, Err(status), io),
        }
    }

    /// Flushes the next device for a shutdown, or completes the shutdown.
    fn flush_for_shutdown(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        let Plan::ShutDown { number, backings, durable, .. } = &entry.plan else { return };
        let Some(&backing) = backings.get(entry.step as usize) else {
            if let QueueRole::Admin(controller) = &mut self.conn.role {
                controller.shut_down_complete(*number, *durable);
            }
            return self.complete(slot, Ok(0), io);
        };
        match unflushed::begin_shutdown_flush(&self.conn.role, entry, backing) {
            Ok(()) => self.submit(slot, backing, Some(IoRequest::Flush), io),
            Err(status) => {
                self.note_failed_shutdown_flush(slot, status, io);
                self.requests[slot].step += 1;
                self.next_step(slot, io);
            }
        }
    }

    fn note_failed_shutdown_flush(&mut self, slot: u16, status: Status, io: &mut Io<'_>) {
        if let Some(backing) = unflushed::fail_shutdown(&mut self.requests[slot]) {
            self.conn.record_failed_flush(backing, status, io);
        }
    }

    /// Deallocates the next range, or completes the command.
    fn next_range(&mut self, slot: u16, extent: Extent, nr: u32, io: &mut Io<'_>) {
        while self.requests[slot].step < nr {
            let entry = &mut self.requests[slot];
            match rules::range_at(entry.bytes(io.pool), entry.step, extent) {
                Ok((_, 0)) => entry.step += 1,
                Ok((at, len)) => {
                    let op = bad_blocks::discard(entry, at, len);
                    return self.submit(slot, extent.backing, Some(op), io);
                }
                Err(status) => return self.complete(slot, Err(status), io),
            }
        }
        if bad_blocks::must_flush_first(&self.requests[slot], nr) {
            return self.submit(slot, extent.backing, Some(IoRequest::Flush), io);
        }
        self.complete(slot, Ok(0), io);
    }

    /// Verifies the next piece of the range, or completes the command.
    fn verify_piece(
        &mut self,
        slot: u16,
        backing: DeviceId,
        (at, len): (u64, u64),
        piece_bytes: u32,
        io: &mut Io<'_>,
    ) {
        let entry = &mut self.requests[slot];
        let done = u64::from(entry.step) * u64::from(piece_bytes);
        let left = len.saturating_sub(done).min(piece_bytes.into()) as u32;
        if left == 0 {
            self.stats.count_read(entry, len);
            return self.complete(slot, Ok(0), io);
        }
        let into = entry.data.take().map(|mut into| {
            into.select(0, left);
            IoRequest::Read { into, at: at + done }
        });
        self.submit(slot, backing, into, io);
    }

    /// Copies: loads the next range behind the others, stores them all, or completes the command.
    fn copy_range(&mut self, slot: u16, job: Job, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        let (step, mut buf) = (entry.step, entry.make_ext().second.take());
        let data = entry.bytes(io.pool);
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
                let len = u64::from(buf.as_ref().map_or(0, Buf::len));
                entry.make_ext().second = buf;
                self.stats.count_read(entry, len);
                self.stats.count_write(entry, len);
                return self.complete(slot, Ok(0), io);
            }
        };
        entry.make_ext().second = buf;
        if let Ok(Some(op @ IoRequest::Write { .. })) = &next {
            let bytes = op.changes().map_or(0, |(_, len)| len);
            self.rate_limits.charge(entry, &self.conn.role, bytes, io.now);
        }
        match next {
            Ok(op) => self.submit(slot, job.extent.backing, op, io),
            Err(status) => self.complete(slot, Err(status), io),
        }
    }

    /// Submits an operation to the device, as soon as no other command prevents it. The checks made
    /// on arrival are repeated.
    #[inline(never)]
    fn submit(&mut self, slot: u16, backing: DeviceId, op: Option<IoRequest>, io: &mut Io<'_>) {
        match op {
            Some(op) => self.submit_locked(slot, backing, op, None, io),
            // Its buffers were allocated before, so there always is an operation.
            None => self.complete(slot, Err(Status::INTERNAL_ERROR), io),
        }
    }

    /// Submits the data of a Write without state that few commands need. `begins`: the rules permit
    /// it in this step, and it has begun without a lock ([`range_lock::begin_unlocked`]).
    #[inline(always)]
    pub(super) fn store(
        &mut self,
        slot: u16,
        (backing, at, fua): (DeviceId, u64, bool),
        from: Buf,
        begins: bool,
        io: &mut Io<'_>,
    ) {
        let op = IoRequest::Write { from, at, fua };
        match begins {
            true => self.submit_to_device(slot, backing, op, io),
            false => self.submit(slot, backing, Some(op), io),
        }
    }

    /// As [`QueuePair::submit`]. `exclusive`: no other command may change these bytes meanwhile.
    #[inline]
    fn submit_locked(
        &mut self,
        slot: u16,
        backing: DeviceId,
        op: IoRequest,
        exclusive: Option<(u64, u64)>,
        io: &mut Io<'_>,
    ) {
        let entry = &mut self.requests[slot];
        let exclusive = match entry.has_ext() && exclusive.is_none() {
            true => bad_blocks::exclusive_range(entry, &op, io.pool),
            false => exclusive,
        };
        if !RangeLockState::lock(entry, backing, op.changes(), exclusive, io) {
            return self.locks.wait(entry, (backing, op), io.now_ns);
        }
        if let Err(status) = self.conn.role.may_begin(entry, &op) {
            entry.put_back(op.into_buf());
            return self.complete(slot, Err(status), io);
        }
        self.submit_to_device(slot, backing, op, io);
    }

    #[inline(always)]
    pub(super) fn submit_to_device(
        &mut self,
        slot: u16,
        backing: DeviceId,
        op: IoRequest,
        io: &mut Io<'_>,
    ) {
        let entry = &mut self.requests[slot];
        entry.enter(State::AtDevice);
        entry.clock.enter(Stage::Disk, io.now_ns);
        self.requests.outstanding += 1;
        io.disk.submit(backing, self.requests.tag(slot), op);
    }

    /// Submits operations whose range locks are granted by now.
    pub(super) fn submit_granted(&mut self, io: &mut Io<'_>) {
        if !self.locks.has_waiting() || !self.conn.is_open() {
            return;
        }
        for slot in 0..self.requests.count() {
            let entry = &self.requests[slot];
            let Some(op) = range_lock::granted(entry, io) else { continue };
            let role = &self.conn.role;
            let refused = role.may_begin(entry, op).err().map(|status| (slot, status));
            match refused.or_else(|| fused::refused(&self.requests, entry, role)) {
                Some((half, status)) => self.refuse_waiting(slot, half, status, io),
                None => {
                    let op = self.locks.take_waiting(&mut self.requests[slot]);
                    if let Some((backing, op)) = op {
                        self.submit_to_device(slot, backing, op, io);
                    }
                }
            }
        }
    }

    /// Rejects a command whose lock was granted and that may not begin any more, because of `half`.
    fn refuse_waiting(&mut self, slot: u16, half: u16, status: Status, io: &mut Io<'_>) {
        if half == slot {
            self.end_waiting(slot, status, io);
            return;
        }
        fused::separate(&mut self.requests, [slot, half]);
        self.end_waiting(slot, fused::FAILED, io);
        self.complete(half, Err(status), io);
    }

    /// Submits a job to a worker. Its outcome is reported like that of a device: until then the
    /// slot is in use, and the queue is not finished.
    pub(super) fn offload(&mut self, slot: u16, job: Result<OffloadJob, Status>, io: &mut Io<'_>) {
        let job = match job {
            Ok(job) => job,
            Err(status) => return self.complete(slot, Err(status), io),
        };
        match io.shared.offload.submit(job) {
            true => {
                self.requests[slot].enter(State::Offloaded);
                self.requests.outstanding += 1;
            }
            false => self.complete(slot, Err(Status::INTERNAL_ERROR), io),
        }
    }
}
