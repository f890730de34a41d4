//! Connect: from a connection request to a queue that serves.

use nvme::fabrics::{Connect, ConnectData, ConnectResult};
use nvme::{Nqn, Status, cm};
use rdma::Pool;
use tracing::{debug, info};

use super::{Head, Io, QueuePair, QueueRole};
use crate::core::command::{Plan, fabrics};
use crate::core::controller::discovery::DiscoveryLog;
use crate::core::controller::{
    Controller, ControllerKind, KEEP_ALIVE_DISCOVERY_MAX_MS, KEEP_ALIVE_MAX_MS, Limits,
};
use crate::core::diag::cause::Cause;
use crate::core::registry::ConnectContext;

/// Most receives of an admin queue: what hosts ask for. Anybody may have one, and who asks for more
/// is told how many there are.
const ADMIN_DEPTH_MAX: u16 = 32;

/// Receive buffers that only admin queues may take, so that I/O queues never lock a host out.
pub const RECEIVES_FOR_ADMIN: u32 = 64;

/// Reads a connection request: what it asks, and how many receives to post.
pub(super) fn check_request(
    private_data: &[u8],
    reads: u8,
    limits: Limits,
    pool: &Pool,
) -> Result<(cm::Request, u16), cm::RejectStatus> {
    let request = cm::Request::from_private_data(private_data)?;
    if request.recfmt != 0 {
        return Err(cm::RejectStatus::INVALID_RECFMT);
    }
    if request.hsqsize_z == 0 {
        return Err(cm::RejectStatus::INVALID_HSQSIZE);
    }
    if request.hrqsize == 0 {
        return Err(cm::RejectStatus::INVALID_HRQSIZE);
    }
    if reads == 0 {
        // Without RDMA Read not even Connect's data can be had.
        return Err(cm::RejectStatus::INVALID_IRD);
    }
    if request.qid > limits.io_queues {
        return Err(cm::RejectStatus::INVALID_QID);
    }
    let (most, reserve) = match request.qid {
        0 => (ADMIN_DEPTH_MAX, 0),
        _ => (limits.queue_depth, RECEIVES_FOR_ADMIN),
    };
    let depth = request.hsqsize_z.saturating_add(1).min(most);
    let (cells, receives, _) = pool.free();
    if receives < u32::from(depth) + reserve || cells < u32::from(depth) * 2 {
        return Err(cm::RejectStatus::NO_RESOURCES);
    }
    Ok((request, depth))
}

/// What a Connect command is told when another one was first.
const LOST: Status = Status::COMMAND_SEQUENCE_ERROR.with_dnr();

/// Whether a keep alive timeout is one that we bear.
fn check_keep_alive(kato_ms: u32, data: &ConnectData, io: &Io<'_>) -> Result<(), fabrics::Refusal> {
    let asks = |name: Nqn| name == Nqn::DISCOVERY || name == io.shared.registry.discovery_nqn();
    let most = match data.subnqn().is_ok_and(asks) {
        true => KEEP_ALIVE_DISCOVERY_MAX_MS,
        false => KEEP_ALIVE_MAX_MS,
    };
    if kato_ms <= most {
        return Ok(());
    }
    let status = Status::KEEP_ALIVE_INVALID.with_dnr();
    Err(fabrics::Refusal::new(Cause::KeepAliveTooLong, status))
}

impl QueuePair {
    pub(super) fn connect(&mut self, slot: u16, io: &mut Io<'_>) {
        if self.is_connected() {
            // Another Connect was under way when this one was let in, and has won.
            return self.respond(slot, LOST, 0, None, io);
        }
        let entry = &self.slots[usize::from(slot)];
        let connect = Connect::parse(&entry.sqe);
        let data = entry.bytes(io.pool).first_chunk().map(ConnectData::parse);
        let outcome = match data {
            Some(ref data) => self.admit(&connect, data, io),
            None => {
                let status = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
                Err(fabrics::Refusal::new(Cause::BadConnect, status))
            }
        };
        match outcome {
            Ok(cntlid) => {
                self.explained = false;
                self.welcome(io);
                let atr = self.proof.is_some();
                let off = connect.cattr.disable_sq_flow_control();
                // The Connect command itself was the first entry.
                self.head = Head { at: 1, size: connect.sqsize_z.saturating_add(1), off };
                let result = ConnectResult(0).with_cntlid(cntlid).with_atr(atr).0;
                self.answer(slot, Ok(result.into()), io);
                self.end_other_connects(io);
            }
            Err(refusal) => {
                let fabrics::Refusal { status, dw0, is_late, .. } = refusal;
                if is_late {
                    // After a restart of the target a host may ask so many times over, and shall
                    // not be kept out for that when it asks for a new controller.
                    io.fabric.admit(self.qp);
                }
                debug!(remote = %self.remote, qid = connect.qid, %status, dw0, "Connect refused");
                self.explain_connect(&refusal, data.as_ref(), io);
                self.respond(slot, status, dw0.into(), None, io);
            }
        }
    }

    /// Says to the fabric that the host is in, once it is.
    pub(super) fn welcome(&self, io: &mut Io<'_>) {
        if self.is_admitted() {
            io.fabric.admit(self.qp);
        }
    }

    /// Connect commands that wait for buffers have lost. None stays in a line in which its queue
    /// stands no more.
    fn end_other_connects(&mut self, io: &mut Io<'_>) {
        for slot in 0..self.slots.len() as u16 {
            let entry = self.slot(slot);
            if entry.state().has_not_begun() && matches!(entry.plan, Plan::Connect { .. }) {
                io.waiters.remove(self.key, slot);
                self.respond(slot, LOST, 0, None, io);
            }
        }
    }

    /// Tells of another host that cannot be told from this one. It is let in: who is in doubt may be
    /// the host of before under another name.
    pub(super) fn tell_twin(&self, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &self.serves else { return };
        if controller.is_discovery() {
            return;
        }
        if let Some(other) = io.shared.registry.twin(&controller.association) {
            self.tell(Cause::SharedHostId, format!("the other one is {other}").into(), io);
        }
    }

    pub(super) fn admit(
        &mut self,
        connect: &Connect,
        data: &ConnectData,
        io: &mut Io<'_>,
    ) -> Result<u16, fabrics::Refusal> {
        let promise = fabrics::QueueLimits {
            qid: self.request.qid,
            hsqsize_z: self.request.hsqsize_z,
            mqes_z: self.limits.queue_depth - 1,
        };
        fabrics::check_connect(connect, promise)?;
        let (source, limits, held) = (self.source(), self.limits, self.unadmitted);
        let visit = ConnectContext { local: self.local, source, limits, held, now: io.now };
        self.check_throttle(data, io)?;
        if connect.qid == 0 {
            check_keep_alive(connect.kato_ms, data, io)?;
            let admission = io.shared.registry.connect_admin(data, &visit)?;
            self.unadmitted = None;
            self.demand(&admission, io);
            let association = admission.association;
            info!(
                remote = %self.remote, host = %association.host, subsystem = %association.subsystem,
                cntlid = association.cntlid, kato_ms = connect.kato_ms, "host connected"
            );
            let role = match admission.subsystem {
                Some(subsystem) => ControllerKind::Nvm(subsystem),
                None => {
                    let (_, records) = io.shared.registry.discovery(&association.host, self.local);
                    let service = DiscoveryLog::new(io.shared.registry.discovery_nqn(), &records);
                    ControllerKind::Discovery(Box::new(service))
                }
            };
            let cntlid = association.cntlid;
            let (limits, local, kato) = (admission.limits, self.local, connect.kato_ms);
            self.limits = limits;
            let controller = Controller::new(association, role, limits, local, kato, io.now);
            self.serves = QueueRole::Admin(Box::new(controller));
            if self.proof.is_none() {
                self.tell_twin(io);
            }
            return Ok(cntlid);
        }
        let admission = io.shared.registry.connect_io(connect, data, &visit)?;
        if !admission.authenticate {
            self.unadmitted = None;
        }
        self.demand(&admission, io);
        self.limits = admission.limits;
        let (cntlid, epoch) = (admission.association.cntlid, admission.epoch);
        match admission.subsystem {
            Some(subsystem) => {
                let association = admission.association;
                io.waiters.close(self.depth());
                let share = io.waiters.join(association.id, self.depth());
                self.begin_share(share, io);
                self.serves = QueueRole::Io { association, subsystem, epoch };
                self.find_rows(io);
                self.find_limits();
                Ok(cntlid)
            }
            // The registry has refused that already.
            None => Err(fabrics::Refusal::new(Cause::BadQueueId, Status::INTERNAL_ERROR)),
        }
    }
}
