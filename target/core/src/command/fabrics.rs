//! Fabrics commands: Connect, Property Get, Property Set: the format of the commands. The registry decides
//! about admission.
//!
//! Source: NVMe Base Specification 2.0, "Fabrics Command Set".

use nvme::fabrics::{
    Authentication, Connect, ConnectData, Disconnect, FabricsType, InvalidParameter, PropertyGet,
    PropertySet, SECP_NVME,
};
use nvme::{Sqe, Status};
use rdma::Remote;

use super::{CapsuleInfo, Plan, Source, destination, no_data, source};
use crate::controller::{CcEffect, Controller};
use crate::diag::cause::Cause;

/// Bytes of Connect data.
pub const CONNECT_DATA_BYTES: u32 = ConnectData::BYTES as u32;

/// A rejected Connect: the status, and dword 0 of the completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectError {
    /// The status.
    pub status: Status,
    /// The invalid field, for Connect Invalid Parameters; otherwise 0.
    pub dw0: u32,
    /// The cause for the administrator; the host is given less detail.
    pub cause: Cause,
    /// The host is permitted, and only requests a controller from before a restart: this is not
    /// counted against its address.
    pub is_late: bool,
}

impl ConnectError {
    /// Returns a status that names no field.
    pub fn new(cause: Cause, status: Status) -> ConnectError {
        ConnectError { status, dw0: 0, cause, is_late: false }
    }

    /// Returns Connect Invalid Parameters with the field.
    pub fn parameter(cause: Cause, field: InvalidParameter) -> ConnectError {
        let status = Status::CONNECT_INVALID_PARAMETERS.with_dnr();
        ConnectError { status, dw0: field.dw0(), cause, is_late: false }
    }

    /// Returns Connect Invalid Host.
    pub fn host(cause: Cause) -> ConnectError {
        let status = Status::CONNECT_INVALID_HOST.with_dnr();
        ConnectError { status, dw0: InvalidParameter::HOSTNQN.dw0(), cause, is_late: false }
    }

    /// The same without Do Not Retry: the controller that the host names has ended, or is about to. A
    /// Linux host that reads Do Not Retry, also for one I/O queue, removes the path for good.
    #[must_use]
    pub fn without_dnr(self) -> ConnectError {
        ConnectError { status: self.status.without_dnr(), ..self }
    }

    /// Returns Connect Controller Busy. It is temporary: disconnected hosts make room after some
    /// time.
    pub fn busy(cause: Cause) -> ConnectError {
        ConnectError::new(cause, Status::CONNECT_CONTROLLER_BUSY)
    }
}

/// Decides on a command on a queue that is not connected yet: only Connect is permitted.
///
/// # Errors
/// Command Sequence Error, or the error of the Connect command.
pub fn first(sqe: &Sqe, received: CapsuleInfo) -> Result<Plan, Status> {
    sqe.check_flags()?;
    if !sqe.is_fabrics() || sqe.fabrics_type() != FabricsType::CONNECT {
        return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    if Connect::parse(sqe).recfmt != 0 {
        return Err(Status::CONNECT_INCOMPATIBLE_FORMAT.with_dnr());
    }
    // The data may be in the capsule on the admin queue as well, if they were received there.
    let from: Source = source(sqe, received, CONNECT_DATA_BYTES, false)?;
    Ok(Plan::Connect { from })
}

/// Decides on a fabrics command on a connected admin queue.
///
/// # Errors
/// The status to answer with.
pub fn admin(sqe: &Sqe, controller: &mut Controller) -> Result<Plan, Status> {
    sqe.check_flags()?;
    match sqe.fabrics_type() {
        FabricsType::PROPERTY_GET => {
            let get = PropertyGet::parse(sqe);
            controller.property(get.property, get.size_bytes()).map(Plan::Reply)
        }
        FabricsType::PROPERTY_SET => {
            let set = PropertySet::parse(sqe);
            let effect = controller.set_property(set.property, set.size_bytes(), set.value)?;
            Ok(match effect {
                CcEffect::Done => Plan::Reply(0),
                CcEffect::ShutDown { number, backings } => {
                    Plan::ShutDown { number, backings, durable: true, covers: 0 }
                }
            })
        }
        FabricsType::CONNECT => Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
        FabricsType::DISCONNECT => Err(Status::INVALID_QUEUE_TYPE.with_dnr()),
        _ => Err(Status::INVALID_OPCODE.with_dnr()),
    }
}

/// Decides on a fabrics command on a connected I/O queue.
///
/// # Errors
/// The status to answer with.
pub fn io(sqe: &Sqe) -> Result<Plan, Status> {
    sqe.check_flags()?;
    match sqe.fabrics_type() {
        FabricsType::DISCONNECT if Disconnect::parse(sqe).recfmt != 0 => {
            Err(Status::CONNECT_INCOMPATIBLE_FORMAT.with_dnr())
        }
        FabricsType::DISCONNECT => no_data(sqe).map(|()| Plan::Disconnect),
        FabricsType::CONNECT => Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr()),
        _ => Err(Status::INVALID_OPCODE.with_dnr()),
    }
}

/// Bytes that an authentication command may transfer at most: hosts request a page.
pub const AUTHENTICATION_MOST_BYTES: u32 = 4096;

/// Returns the plan to pull the message of an Authentication Send.
///
/// # Errors
/// Invalid Field for another protocol, no bytes or too many; errors of the SGL.
pub fn authentication_send(sqe: &Sqe, received: CapsuleInfo) -> Result<Plan, Status> {
    let len = authentication(sqe)?;
    if len > AUTHENTICATION_MOST_BYTES {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok(Plan::Authenticate { from: source(sqe, received, len, true)? })
}

/// Returns the destination of the message of an Authentication Receive, with its size.
///
/// # Errors
/// As of [`authentication_send`].
pub fn authentication_receive(sqe: &Sqe, received: CapsuleInfo) -> Result<Remote, Status> {
    let len = authentication(sqe)?;
    destination(sqe, received, len.min(AUTHENTICATION_MOST_BYTES), false)
}

fn authentication(sqe: &Sqe) -> Result<u32, Status> {
    let Authentication { spsp0, spsp1, secp, len_bytes } = Authentication::parse(sqe);
    match (secp, spsp0, spsp1, len_bytes) {
        (SECP_NVME, 1, 1, 1..) => Ok(len_bytes),
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

/// Limits negotiated for a queue pair, checked at Connect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Queue id in the connection request.
    pub qid: u16,
    /// HSQSIZE of the connection request.
    pub hsqsize_z: u16,
    /// MQES of the controllers.
    pub mqes_z: u16,
}

/// Largest admin queue that the specification allows, zero-based.
const ADMIN_SQSIZE_MAX_Z: u16 = 4095;

/// Checks a Connect command against its connection request.
///
/// # Errors
/// Connect Invalid Parameters with the field.
pub fn check_connect(connect: &Connect, promise: QueueLimits) -> Result<(), ConnectError> {
    if connect.qid != promise.qid {
        return Err(ConnectError::parameter(Cause::BadQueueId, InvalidParameter::QID));
    }
    let most = match connect.qid {
        0 => ADMIN_SQSIZE_MAX_Z,
        _ => promise.mqes_z,
    };
    if connect.sqsize_z == 0 || connect.sqsize_z > most.min(promise.hsqsize_z) {
        return Err(ConnectError::parameter(Cause::BadQueueSize, InvalidParameter::SQSIZE));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::command::fabrics::*;
    use nvme::{AdminOpcode, IoOpcode, Sgl};

    const RECEIVED: CapsuleInfo =
        CapsuleInfo { tail_bytes: 0, in_capsule_bytes: 4096, mdts_bytes: 1 << 20 };

    fn connect(len: u32) -> Sqe {
        Connect { sqsize_z: 31, ..Connect::default() }.emit(Sgl::keyed(0x10, len, 3, true).unwrap())
    }

    #[test]
    fn only_connect_may_come_first() {
        let plan = first(&connect(1024), RECEIVED).unwrap();
        assert!(matches!(plan, Plan::Connect { from } if from.len_bytes() == 1024));
        for sqe in [
            Sqe::io(IoOpcode::READ, 1),
            Sqe::admin(AdminOpcode::IDENTIFY),
            Sqe::fabrics(FabricsType::PROPERTY_GET),
        ] {
            let status = first(&sqe, RECEIVED).unwrap_err();
            assert!(status.is(Status::COMMAND_SEQUENCE_ERROR) && status.dnr());
        }
    }

    #[test]
    fn connect_data_are_1024_bytes_of_format_0() {
        let short = first(&connect(1023), RECEIVED).unwrap_err();
        assert!(short.is(Status::DATA_SGL_LENGTH_INVALID) && short.dnr());
        let format = Connect { recfmt: 1, ..Connect::default() }
            .emit(Sgl::keyed(0, 1024, 0, false).unwrap());
        let status = first(&format, RECEIVED).unwrap_err();
        assert!(status.is(Status::CONNECT_INCOMPATIBLE_FORMAT) && status.dnr());
        // In the capsule, but not received: stale bytes of the buffer must never be used.
        let inline = Connect::default().emit(Sgl::in_capsule(0, 1024));
        let status = first(&inline, RECEIVED).unwrap_err();
        assert!(status.is(Status::DATA_SGL_LENGTH_INVALID));
    }

    #[test]
    fn connect_queue_id_and_size_are_checked_against_the_cm_request() {
        let promise = QueueLimits { qid: 1, hsqsize_z: 63, mqes_z: 127 };
        let ask = |qid, sqsize_z| {
            let connect = Connect { qid, sqsize_z, ..Connect::default() };
            check_connect(&connect, promise).map_err(|r| (r.status.code(), r.dw0))
        };
        assert_eq!(ask(1, 63), Ok(()));
        assert_eq!(ask(1, 15), Ok(()));
        assert_eq!(ask(1, 64), Err((0x182, 44)));
        assert_eq!(ask(1, 0), Err((0x182, 44)));
        assert_eq!(ask(2, 15), Err((0x182, 42)));
        let wide = QueueLimits { hsqsize_z: 9999, ..promise };
        let connect = Connect { qid: 1, sqsize_z: 128, ..Connect::default() };
        assert_eq!(check_connect(&connect, wide).unwrap_err().dw0, 44);
    }
}
