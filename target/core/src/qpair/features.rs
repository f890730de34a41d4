//! Set Features commands whose data were pulled.

use nvme::Status;

use super::request::Request;
use super::role::QueueRole;
use super::{Io, event_log};
use crate::command::admin;

/// Executes the command, and records the event of a change of the timestamp; returns dword 0 of the
/// completion.
pub(super) fn set(role: &mut QueueRole, entry: &Request, io: &Io<'_>) -> Result<u64, Status> {
    let QueueRole::Admin(controller) = role else {
        return Err(Status::INVALID_OPCODE.with_dnr());
    };
    let data = entry.bytes(io.pool);
    let change = admin::set_feature_with_data(&entry.sqe, data, controller, io.now)?;
    if let Some(change) = change {
        event_log::note_timestamp(role, change, io);
    }
    Ok(0)
}
