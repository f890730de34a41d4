//! Connect: from a connection request to a connected queue.

use std::sync::Arc;

use nvme::fabrics::{Connect, ConnectData};
use nvme::{Nqn, Status, cm};
use rdma::Pool;
use tracing::{debug, info};

use super::Io;
use super::auth::Authentication;
use super::connection::Connection;
use super::role::QueueRole;
use crate::command::fabrics;
use crate::controller::association::Association;
use crate::controller::discovery::DiscoveryLog;
use crate::controller::{
    Controller, ControllerKind, KEEP_ALIVE_DISCOVERY_MAX_MS, KEEP_ALIVE_MAX_MS, Limits,
};
use crate::diag::cause::Cause;
use crate::registry::{Admitted, ConnectContext};

/// Most receives of an admin queue: as many as hosts request. Any peer can open one; a host that
/// requests more is informed of the actual number.
const ADMIN_DEPTH_MAX: u16 = 32;

/// Receive buffers that only admin queues may take, so that I/O queues never keep a host from
/// connecting.
pub const RECEIVES_FOR_ADMIN: u32 = 64;

/// Returns the receives that a connection request asks for; none if it is invalid.
pub(crate) fn receives_of(private_data: &[u8], limits: Limits) -> u16 {
    let request = cm::Request::from_private_data(private_data);
    request.map_or(0, |request| depth_of(&request, limits))
}

fn depth_of(request: &cm::Request, limits: Limits) -> u16 {
    let most = if request.qid == 0 { ADMIN_DEPTH_MAX } else { limits.queue_depth };
    request.hsqsize_z.saturating_add(1).min(most)
}

/// Checks a connection request; returns it with the number of receives to post.
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
        // Without RDMA Read not even the data of Connect can be transferred.
        return Err(cm::RejectStatus::INVALID_IRD);
    }
    if request.qid > limits.io_queues {
        return Err(cm::RejectStatus::INVALID_QID);
    }
    let reserve = if request.qid == 0 { 0 } else { RECEIVES_FOR_ADMIN };
    let depth = depth_of(&request, limits);
    let (cells, receives, _) = pool.free();
    if receives < u32::from(depth) + reserve || cells < u32::from(depth) * 2 {
        return Err(cm::RejectStatus::NO_RESOURCES);
    }
    Ok((request, depth))
}

/// Status of a Connect command when another one was first.
pub(super) const LOST: Status = Status::COMMAND_SEQUENCE_ERROR.with_dnr();

/// Checks that a keep alive timeout is not longer than supported.
fn check_keep_alive(
    kato_ms: u32,
    data: &ConnectData,
    io: &Io<'_>,
) -> Result<(), fabrics::ConnectError> {
    let asks = |name: Nqn| name == Nqn::DISCOVERY || name == io.shared.registry.discovery_nqn();
    let most = match data.subnqn().is_ok_and(asks) {
        true => KEEP_ALIVE_DISCOVERY_MAX_MS,
        false => KEEP_ALIVE_MAX_MS,
    };
    if kato_ms <= most {
        return Ok(());
    }
    let status = Status::KEEP_ALIVE_INVALID.with_dnr();
    Err(fabrics::ConnectError::new(Cause::KeepAliveTooLong, status))
}

/// Rejects a host that has failed to authenticate too often.
fn check_throttle(
    data: &ConnectData,
    conn: &Connection,
    io: &Io<'_>,
) -> Result<(), fabrics::ConnectError> {
    let Ok(host) = data.hostnqn() else { return Ok(()) };
    if !io.shared.registry.is_throttled(conn.remote.ip(), &host, io.now) {
        return Ok(());
    }
    Err(fabrics::ConnectError::busy(Cause::Throttled))
}

/// Admits or rejects a host; returns the association to which the queue belongs from now on.
///
/// # Errors
/// The reason for the rejection.
pub(super) fn admit(
    connect: &Connect,
    data: &ConnectData,
    conn: &mut Connection,
    auth: &mut Authentication,
    io: &mut Io<'_>,
) -> Result<Arc<Association>, fabrics::ConnectError> {
    let promise = fabrics::QueueLimits {
        qid: conn.qid,
        hsqsize_z: conn.hsqsize_z,
        mqes_z: conn.limits.queue_depth - 1,
    };
    fabrics::check_connect(connect, promise)?;
    let (local, source, limits, held) =
        (conn.local, conn.remote.ip(), conn.limits, conn.unadmitted);
    let visit = ConnectContext { local, source, limits, held, now: io.now };
    check_throttle(data, conn, io)?;
    if connect.qid == 0 {
        check_keep_alive(connect.kato_ms, data, io)?;
        let admission = io.shared.registry.connect_admin(data, &visit)?;
        conn.unadmitted = None;
        auth.require(&admission, io.now);
        return Ok(begin_controller(connect, admission, conn, auth, io));
    }
    let admission = io.shared.registry.connect_io(connect, data, &visit)?;
    if !admission.authenticate {
        conn.unadmitted = None;
    }
    auth.require(&admission, io.now);
    conn.limits = admission.limits;
    let epoch = admission.epoch;
    match admission.subsystem {
        Some(subsystem) => {
            let association = admission.association;
            conn.role = QueueRole::Io { association: Arc::clone(&association), subsystem, epoch };
            Ok(association)
        }
        // The registry has already rejected that.
        None => Err(fabrics::ConnectError::new(Cause::BadQueueId, Status::INTERNAL_ERROR)),
    }
}

/// Creates the controller of a new admin queue.
fn begin_controller(
    connect: &Connect,
    admission: Admitted,
    conn: &mut Connection,
    auth: &Authentication,
    io: &mut Io<'_>,
) -> Arc<Association> {
    let association = admission.association;
    let (remote, host, cntlid) = (conn.remote, &association.host, association.cntlid);
    let kind = match admission.subsystem {
        Some(subsystem) => {
            info!(
                %remote, %host, subsystem = %association.subsystem, cntlid,
                kato_ms = connect.kato_ms, "host connected"
            );
            ControllerKind::Nvm(subsystem)
        }
        None => {
            // Any peer can connect there, as often as it likes.
            debug!(%remote, %host, cntlid, "host connected for discovery");
            let (_, records) = io.shared.registry.discovery(host, conn.local);
            let service = DiscoveryLog::new(io.shared.registry.discovery_nqn(), &records);
            ControllerKind::Discovery(Box::new(service))
        }
    };
    conn.limits = admission.limits;
    let (limits, local, kato) = (conn.limits, conn.local, connect.kato_ms);
    let of = Arc::clone(&association);
    let controller = Controller::new(of, kind, limits, local, kato, io.now);
    conn.role = QueueRole::Admin(Box::new(controller));
    if !auth.is_required() {
        conn.record_duplicate_host_id(io);
    }
    association
}
