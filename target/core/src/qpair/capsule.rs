//! Arrival of a capsule: it gets a slot, and the rules decide on its plan.

use nvme::sgl::LastSegment;
use nvme::sqe::Flags;
use nvme::{IoOpcode, Sqe, Status};
use rdma::{Buf, Remote, Work};

use super::fused::FusedState;
use super::request::{State, WaitReason};
use super::role::QueueRole;
use super::{Io, QueuePair, bad_blocks, buffers, event_log, fused, range_lock, role, sgl_transfer};
use crate::command::{CapsuleInfo, Plan, SQE_BYTES, Source, admin, fabrics, io as rules};
use crate::controller::{Controller, ControllerState, ControllerTimestamp, Limits};
use crate::diag::cause::Cause;
use nvmfd_blockdev::{DeviceId, IoRequest};

impl QueuePair {
    /// Handles a capsule of `len` bytes that arrived at `came_ns`.
    pub(super) fn on_capsule(&mut self, buf: Buf, len: u32, came_ns: u64, io: &mut Io<'_>) {
        let Some(tail_bytes) = len.checked_sub(SQE_BYTES) else {
            self.conn.record_end(Cause::ShortCapsule, format!("{len} bytes"), io);
            io.pool.give(buf);
            self.close(io);
            return;
        };
        if self.disconnect_slot.is_some() {
            // Disconnect was the last command.
            io.pool.give(buf);
            return;
        }
        if self.conn.role.is_stale() {
            // No response: a status would reach the host's file system, a lost path does not.
            io.pool.give(buf);
            self.close(io);
            return;
        }
        let Some(slot) = self.requests.take_free() else {
            // The host has received its responses and sends on; only their completions are not
            // reported here yet.
            self.backlog.push_back((buf, len, came_ns));
            io.waiters.behind_sent += 1;
            return;
        };
        let sqe = &mut self.requests[slot].sqe;
        match io.pool.bytes(&buf).first_chunk() {
            Some(bytes) => *sqe = Sqe::parse(bytes),
            None => *sqe = Sqe::default(),
        }
        let (cid, fuse) = (sqe.cid, sqe.flags.fuse());
        if self.auth.is_rejected(sqe, &self.conn.role) {
            io.pool.give(buf);
            self.requests.give_free(slot);
            self.close(io);
            return;
        }
        if !self.requests.claim_cid(cid) && !self.drop_parked(cid, io) {
            // The host would take a response to either for that to the other.
            self.conn.record_end(Cause::CommandIdInUse, format!("{cid:04X}h"), io);
            io.pool.give(buf);
            self.requests.give_free(slot);
            self.close(io);
            return;
        }
        self.requests[slot].begin(buf, came_ns, io.now_ns);
        self.head.advance();
        if fuse != 0 || self.fused != FusedState::None {
            return self.on_half(slot, tail_bytes, io);
        }
        if !self.start_plain(slot, tail_bytes, io) {
            self.decide_and_start(slot, tail_bytes, io);
        }
    }

    /// Starts a Read or a Write that the rules accept: the usual case of [`QueuePair::rule`].
    /// Returns whether it was one.
    #[inline(always)]
    fn start_plain(&mut self, slot: u16, tail_bytes: u32, io: &mut Io<'_>) -> bool {
        let QueueRole::Io { association, subsystem, .. } = &self.conn.role else { return false };
        if !self.auth.is_done() || !association.is_ready() {
            return false;
        }
        association.note_traffic();
        let (sqe, received) = (&self.requests[slot].sqe, self.received(tail_bytes));
        let Some((namespace, barred)) = role::reached(association, subsystem, sqe.nsid) else {
            return false;
        };
        match sqe.io_opcode() {
            IoOpcode::READ => match rules::plain_read(sqe, namespace, barred, received) {
                Some(load) => self.start_read(slot, load, io),
                None => return false,
            },
            IoOpcode::WRITE => match rules::plain_write(sqe, namespace, barred, received) {
                Some(store) => self.start_write(slot, store, io),
                None => return false,
            },
            _ => return false,
        }
        true
    }

    /// Starts a Read that was decided in this step, at this byte of this device.
    #[inline(always)]
    fn start_read(
        &mut self,
        slot: u16,
        (backing, at, to): (DeviceId, u64, Remote),
        io: &mut Io<'_>,
    ) {
        self.requests[slot].set_plan(Plan::Load { backing, at, to });
        if self.is_delayed(slot, to.len, io) {
            return;
        }
        match self.allocate_at_once(slot, (backing, to.len), io) {
            Some(into) => {
                self.submit_to_device(slot, backing, IoRequest::Read { into, at }, io);
            }
            None => self.admit_transfer(slot, io),
        }
    }

    /// The same of a Write.
    #[inline(always)]
    fn start_write(
        &mut self,
        slot: u16,
        (backing, at, from): (DeviceId, u64, Source),
        io: &mut Io<'_>,
    ) {
        let entry = &mut self.requests[slot];
        let fua = entry.sqe.fua();
        entry.set_plan(Plan::Store { backing, at, from, fua });
        if self.is_delayed(slot, from.len_bytes(), io) {
            return;
        }
        match from {
            Source::Host(from) => {
                if let Some(into) = self.allocate_at_once(slot, (backing, from.len), io) {
                    return self.post_pull(slot, Work::Read { into, from }, io);
                }
            }
            Source::Capsule { offset, len } => {
                if let Some(from) = self.lend_at_once(slot, (offset, len), io) {
                    let entry = &mut self.requests[slot];
                    let begins = range_lock::begin_unlocked(entry, backing, (at, len.into()), io);
                    return self.store(slot, (backing, at, fua), from, begins, io);
                }
            }
        }
        self.admit_transfer(slot, io);
    }

    /// Takes the receive of a command to pass the data in it to a device, if they are page-aligned
    /// and the limit permits it.
    #[inline(always)]
    fn lend_at_once(
        &mut self,
        slot: u16,
        (offset, len): (u32, u32),
        io: &mut Io<'_>,
    ) -> Option<Buf> {
        let entry = &mut self.requests[slot];
        buffers::lend_receive(entry, io);
        let mut buf = entry.capsule.take_if(|_| entry.lends_receive)?;
        let start = buf.start() + SQE_BYTES + offset;
        buf.select(start, len);
        Some(buf)
    }

    /// Decides on the plan of a command, and starts it.
    #[inline(never)]
    fn decide_and_start(&mut self, slot: u16, tail_bytes: u32, io: &mut Io<'_>) {
        let sqe = self.requests[slot].sqe;
        let plan = self.decide(slot, &sqe, tail_bytes, io);
        self.start(slot, plan, io);
    }

    /// Returns the transport properties of a command.
    #[inline]
    fn received(&self, tail_bytes: u32) -> CapsuleInfo {
        let Limits { in_capsule_bytes, mdts_bytes, .. } = self.conn.limits;
        CapsuleInfo { tail_bytes, in_capsule_bytes, mdts_bytes }
    }

    /// Assigns free slots to capsules that wait for one, the oldest first. None is removed before a
    /// slot is free: it would be queued last again, and the halves of a fused command would be
    /// reordered.
    #[inline(never)]
    pub(super) fn resume_backlog(&mut self, io: &mut Io<'_>) {
        while self.conn.is_open()
            && !self.requests.is_full()
            && let Some((buf, len, came_ns)) = self.backlog.pop_front()
        {
            io.waiters.behind_sent -= 1;
            self.on_capsule(buf, len, came_ns, io);
        }
    }

    /// Drops the capsules that wait for a slot.
    pub(super) fn drop_backlog(&mut self, io: &mut Io<'_>) {
        io.waiters.behind_sent -= self.backlog.len();
        self.backlog.drain(..).for_each(|(buf, ..)| io.pool.give(buf));
    }

    /// Handles half of a fused command, or a command behind a first half.
    #[inline(never)]
    fn on_half(&mut self, slot: u16, tail_bytes: u32, io: &mut Io<'_>) {
        let sqe = &{ self.requests[slot].sqe };
        let before = std::mem::take(&mut self.fused);
        let may_be_fused = self.conn.role.is_io() && !sqe.is_fabrics();
        let fuse = if may_be_fused { sqe.flags.fuse() } else { 0 };
        let missing = Status::ABORTED_MISSING_FUSED.with_dnr();
        if let FusedState::Held(first) = before
            && fuse != Flags::FUSED_SECOND
        {
            self.complete(first, Err(missing), io);
        }
        let alone = sqe.with_flags(sqe.flags.with_fuse(0));
        match (fuse, before) {
            (Flags::FUSED_FIRST, _) => {
                let plan = self.decide(slot, &alone, tail_bytes, io);
                match plan.and_then(|plan| fused::check_first(sqe, plan, &self.conn.role)) {
                    Ok(plan) => {
                        let entry = &mut self.requests[slot];
                        entry.enter(State::Waiting(WaitReason::FusedPartner));
                        entry.set_plan(plan);
                        // So that its completion updates `fused`.
                        entry.make_ext();
                        self.fused = FusedState::Held(slot);
                    }
                    Err(status) => {
                        self.complete(slot, Err(status), io);
                        self.fused = FusedState::Failed;
                    }
                }
            }
            (Flags::FUSED_SECOND, FusedState::Held(first)) => {
                let plan = self.decide(slot, &alone, tail_bytes, io);
                match fused::join(&mut self.requests, first, slot, plan) {
                    // The first half waits for resources for both.
                    Ok(()) => self.admit(first, io),
                    Err((of_first, of_second)) => {
                        self.complete(first, Err(of_first), io);
                        self.complete(slot, Err(of_second), io);
                    }
                }
            }
            (Flags::FUSED_SECOND, FusedState::Failed) => {
                self.complete(slot, Err(fused::FAILED), io);
            }
            (Flags::FUSED_SECOND, FusedState::None) => self.complete(slot, Err(missing), io),
            _ => {
                let plan = self.decide(slot, sqe, tail_bytes, io);
                self.start(slot, plan, io);
            }
        }
    }

    /// Decides on the plan of a command.
    #[inline(never)]
    fn decide(
        &mut self,
        slot: u16,
        sqe: &Sqe,
        tail_bytes: u32,
        io: &mut Io<'_>,
    ) -> Result<Plan, Status> {
        let gathered;
        let sqe = match LastSegment::parse(&sqe.dptr) {
            None => sqe,
            Some(segment) => {
                let received_bytes = tail_bytes.min(self.conn.limits.in_capsule_bytes);
                let entry = &mut self.requests[slot];
                gathered = sgl_transfer::gather(entry, sqe, segment, received_bytes, io.pool)?;
                &gathered
            }
        };
        match self.rule(slot, sqe, tail_bytes, io) {
            Ok(Plan::Mend { plan, of }) => {
                bad_blocks::note(&mut self.requests[slot], of);
                Ok(*plan)
            }
            Ok(plan @ Plan::Load { .. }) if sqe.fua() => {
                // It has a second step, which only requests with this are checked for.
                self.requests[slot].make_ext();
                Ok(plan)
            }
            plan => plan,
        }
    }

    /// Applies the rules to a command.
    #[inline]
    fn rule(
        &mut self,
        slot: u16,
        sqe: &Sqe,
        tail_bytes: u32,
        io: &mut Io<'_>,
    ) -> Result<Plan, Status> {
        let received = self.received(tail_bytes);
        let conn = &mut self.conn;
        if let Some(plan) = self.auth.check(sqe, received, &self.requests, conn, io) {
            return plan;
        }
        match &mut conn.role {
            QueueRole::Io { association, subsystem, .. } => {
                association.note_traffic();
                if sqe.is_fabrics() {
                    return fabrics::io(sqe);
                }
                if !association.is_ready() {
                    return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
                }
                let (namespace, barred) = role::access(association, subsystem, sqe.nsid)?;
                rules::plan(sqe, namespace, barred, received)
            }
            QueueRole::Admin(_) | QueueRole::Nothing { .. } => {
                self.rule_without_io(slot, sqe, received, io)
            }
        }
    }

    /// The same on an admin queue, or before the Connect.
    #[inline(never)]
    fn rule_without_io(
        &mut self,
        slot: u16,
        sqe: &Sqe,
        received: CapsuleInfo,
        io: &mut Io<'_>,
    ) -> Result<Plan, Status> {
        if let QueueRole::Admin(controller) = &mut self.conn.role {
            controller.association.note_traffic();
            let (epoch, life) = (controller.association.epoch(), controller.life());
            let plan = rule_admin(controller, slot, sqe, received, io);
            self.follow_controller((epoch, life), io);
            if plan.is_ok() {
                event_log::note_start(&self.conn.role, sqe, io);
            }
            return plan;
        }
        let plan = fabrics::first(sqe, received);
        if let Err(status) = plan {
            // The first command is not a valid Connect.
            self.conn.record_end(Cause::BadConnect, status.to_string(), io);
        }
        plan
    }

    /// Handles a reset or failure of the controller by an admin command; the epoch and state are
    /// those from before the command.
    fn follow_controller(&mut self, (epoch, life): (u16, ControllerState), io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.conn.role else { return };
        let is_reset = controller.association.epoch() != epoch;
        let cause = match controller.life() {
            ControllerState::Failed if life != ControllerState::Failed => Some(Cause::BadSettings),
            _ if is_reset && !controller.is_discovery() => Some(Cause::HostReset),
            _ => None,
        };
        if is_reset {
            // A reset: the I/O queues close, Asynchronous Event Requests end, the timestamp counts
            // from 0.
            controller.timestamp = ControllerTimestamp::new(io.now);
            // Any peer can reset a controller of discovery again and again.
            if controller.association.io_queues() > 0 {
                io.shared.registry.wake_reactors();
            }
            let parked: Vec<u16> = controller.events.take_parked().collect();
            event_log::note_reset(&self.conn.role, io);
            for slot in parked {
                self.complete(slot, Err(Status::ABORT_REQUESTED), io);
            }
        }
        if let Some(cause) = cause {
            self.conn.record(cause, "".into(), io);
        }
    }

    /// Drops the pending Asynchronous Event Request whose id a new command has: its host has
    /// abandoned it without an Abort, as SPDK's does before it detaches. It gets no response; its
    /// id stays in use, for the new command. False if there is none.
    fn drop_parked(&mut self, cid: u16, io: &mut Io<'_>) -> bool {
        let QueueRole::Admin(controller) = &mut self.conn.role else { return false };
        let parked = self.requests.find(|entry| {
            entry.state() == State::Waiting(WaitReason::Event)
                && entry.plan == Plan::Park
                && entry.sqe.cid == cid
        });
        let Some(slot) = parked else { return false };
        controller.events.unpark(slot);
        if let Some(mut buf) = self.requests[slot].capsule.take() {
            io.pool.rewind(&mut buf);
            io.fabric.post(self.conn.qp, 0, Work::Recv(buf));
        }
        self.release(slot, io);
        true
    }
}

/// Applies the rules to a command for a controller.
fn rule_admin(
    controller: &mut Controller,
    slot: u16,
    sqe: &Sqe,
    received: CapsuleInfo,
    io: &Io<'_>,
) -> Result<Plan, Status> {
    if sqe.is_fabrics() {
        return fabrics::admin(sqe, controller);
    }
    let (host, local) = (controller.association.host, controller.local);
    let discovery = &|known| io.shared.registry.discovery_after(known, &host, local);
    let (now, power) = (io.now, io.shared.power.at(io.now));
    let nqn = controller.association.subsystem;
    let controllers = &|| io.shared.registry.controllers_of(&nqn);
    let env = admin::AdminContext { slot, received, now, power, discovery, controllers };
    admin::plan(sqe, controller, &env)
}
