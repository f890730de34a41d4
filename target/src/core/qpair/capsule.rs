//! A capsule arrives: it gets a slot, and the rules decide what is to be done about it.

use nvme::sgl::LastSegment;
use nvme::{Sqe, Status};
use rdma::Buf;

use super::bad_blocks::ClearBadBlocks;
use super::fused::FusedState;
use super::{Io, Link, QueuePair, QueueRole, State, WaitReason};
use crate::core::command::{CapsuleInfo, Plan, SQE_BYTES, admin, fabrics, io as rules};
use crate::core::controller::{Controller, ControllerState};
use crate::core::diag::cause::Cause;

impl QueuePair {
    /// A capsule of `len` bytes has arrived, at `came_ns`.
    pub(super) fn on_capsule(&mut self, buf: Buf, len: u32, came_ns: u64, io: &mut Io<'_>) {
        let Some(tail_bytes) = len.checked_sub(SQE_BYTES) else {
            self.explain(Cause::ShortCapsule, format!("{len} bytes"), io);
            io.pool.give(buf);
            self.close(io);
            return;
        };
        if self.leaver.is_some() {
            // It was told to be the last command.
            io.pool.give(buf);
            return;
        }
        if self.is_orphaned() {
            // No answer: a status would end in the host's file system, a lost path does not.
            io.pool.give(buf);
            self.close(io);
            return;
        }
        let Some(slot) = self.free.pop() else {
            // The host has its answers and asks on; only our notice that they arrived is late.
            self.backlog.push_back((buf, len, came_ns));
            io.waiters.behind_sent += 1;
            return;
        };
        let sqe = match io.pool.bytes(&buf).first_chunk() {
            Some(bytes) => Sqe::parse(bytes),
            None => Sqe::default(),
        };
        if self.is_disowned(&sqe) {
            io.pool.give(buf);
            self.free.push(slot);
            self.close(io);
            return;
        }
        if !self.claim(sqe.cid) && !self.drop_parked(sqe.cid, io) {
            // An answer to either would be taken for the other's.
            self.explain(Cause::CommandIdInUse, format!("{:04X}h", sqe.cid), io);
            io.pool.give(buf);
            self.free.push(slot);
            self.close(io);
            return;
        }
        self.slot(slot).begin(sqe, buf, came_ns, io.now_ns);
        self.head.advance();
        if sqe.flags.fuse() != 0 || self.half != FusedState::None {
            return self.on_half(slot, &sqe, tail_bytes, io);
        }
        let plan = self.decide(slot, &sqe, tail_bytes, io);
        self.start(slot, plan, io);
    }

    /// Capsules that have waited for a slot get those that are free, the oldest first. None is
    /// taken out before there is one for it: it would stand last again, and the halves of a fused
    /// command would change places.
    #[inline]
    pub(super) fn resume_backlog(&mut self, io: &mut Io<'_>) {
        while self.link == Link::Open
            && !self.free.is_empty()
            && let Some((buf, len, came_ns)) = self.backlog.pop_front()
        {
            io.waiters.behind_sent -= 1;
            self.on_capsule(buf, len, came_ns, io);
        }
    }

    /// What waits for a slot is not looked at any more.
    pub(super) fn drop_backlog(&mut self, io: &mut Io<'_>) {
        io.waiters.behind_sent -= self.backlog.len();
        self.backlog.drain(..).for_each(|(buf, ..)| io.pool.give(buf));
    }

    /// What to do about a command.
    pub(super) fn decide(
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
                gathered = self.gather(slot, sqe, segment, tail_bytes, io)?;
                &gathered
            }
        };
        match self.rule(slot, sqe, tail_bytes, io) {
            Ok(Plan::Mend { plan, of }) => {
                let until = of.orders();
                self.slot(slot).make_rare().mend = ClearBadBlocks::Due { of, until, alone: false };
                Ok(*plan)
            }
            plan => plan,
        }
    }

    /// What the rules say of it.
    fn rule(
        &mut self,
        slot: u16,
        sqe: &Sqe,
        tail_bytes: u32,
        io: &mut Io<'_>,
    ) -> Result<Plan, Status> {
        let received = CapsuleInfo {
            tail_bytes,
            in_capsule_bytes: self.limits.in_capsule_bytes,
            mdts_bytes: self.limits.mdts_bytes,
        };
        if let Some(plan) = self.prove(sqe, received, io) {
            return plan;
        }
        match &mut self.serves {
            QueueRole::Io { association, subsystem, .. } => {
                association.note_traffic();
                if sqe.is_fabrics() {
                    return fabrics::io(sqe);
                }
                if !association.is_ready() {
                    return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
                }
                association.reach.check_io(sqe, subsystem)?;
                let barred = association.reservations.barred(sqe.nsid);
                rules::plan(sqe, subsystem, barred, received)
            }
            QueueRole::Admin(controller) => {
                controller.association.note_traffic();
                let (epoch, life) = (controller.association.epoch(), controller.life());
                let plan = rule_admin(controller, slot, sqe, received, io);
                self.follow_controller((epoch, life), io);
                if plan.is_ok() {
                    self.note_start(sqe, io);
                }
                plan
            }
            QueueRole::Nothing { .. } => {
                let plan = fabrics::first(sqe, received);
                if let Err(status) = plan {
                    self.explain_first(status, io);
                }
                plan
            }
        }
    }

    /// An admin command has been ruled on, before which the controller had this epoch and state: it
    /// may have reset the controller, or made it fail.
    fn follow_controller(&mut self, (epoch, life): (u16, ControllerState), io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.serves else { return };
        let is_reset = controller.association.epoch() != epoch;
        let tells = match controller.life() {
            ControllerState::Failed if life != ControllerState::Failed => Some(Cause::BadSettings),
            _ if is_reset && !controller.is_discovery() => Some(Cause::HostReset),
            _ => None,
        };
        if is_reset {
            // A reset: the I/O queues close, the held requests end.
            io.shared.registry.wake_reactors();
            let parked: Vec<u16> = controller.events.take_parked().collect();
            self.note_reset(io);
            for slot in parked {
                self.answer(slot, Err(Status::ABORT_REQUESTED), io);
            }
        }
        if let Some(cause) = tells {
            self.tell(cause, "".into(), io);
        }
    }

    /// A new command has the id of an Asynchronous Event Request that waits for an event: its host
    /// has given that up without a word, as SPDK's does before it detaches. The request is dropped
    /// without an answer; its id stays taken, for the new command. False when there is none.
    fn drop_parked(&mut self, cid: u16, io: &mut Io<'_>) -> bool {
        let qp = self.qp;
        let QueueRole::Admin(controller) = &mut self.serves else { return false };
        let parked = self.slots.iter().position(|entry| {
            entry.state() == State::Waiting(WaitReason::Event)
                && entry.plan == Plan::Park
                && entry.sqe.cid == cid
        });
        let Some(slot) = parked.map(|slot| slot as u16) else { return false };
        controller.events.unpark(slot);
        if let Some(mut buf) = self.slot(slot).capsule.take() {
            io.pool.rewind(&mut buf);
            io.fabric.post(qp, 0, rdma::Work::Recv(buf));
        }
        self.release(slot, io);
        true
    }

    /// Notes that a command id is outstanding; false when it already was.
    fn claim(&mut self, cid: u16) -> bool {
        let (word, bit) = (&mut self.cids[usize::from(cid >> 6)], 1 << (cid & 63));
        let free = *word & bit == 0;
        *word |= bit;
        free
    }

    /// The command is answered: the host may use its id again.
    pub(super) fn unclaim(&mut self, cid: u16) {
        self.cids[usize::from(cid >> 6)] &= !(1 << (cid & 63));
    }
}

/// What the rules say of a command for a controller.
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
    let discovery = &|| io.shared.registry.discovery(&host, local);
    let (now, power) = (io.now, io.shared.power.at(io.now));
    let nqn = controller.association.subsystem;
    let controllers = &|| io.shared.registry.controllers_of(&nqn);
    let env = admin::AdminContext { slot, received, now, power, discovery, controllers };
    admin::plan(sqe, controller, &env)
}
