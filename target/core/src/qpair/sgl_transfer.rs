//! Data in several places of host memory: one piece is transferred after another, each through its window of
//! the single buffer.

use nvme::sgl::LastSegment;
use nvme::{Sqe, Status};
use rdma::{Pool, Remote, Work};

use super::log_page;
use super::request::Request;
use crate::command::{Plan, SQE_BYTES, sgl};

/// Records where the pieces of a command's data are, by the `received_bytes` behind it in the
/// capsule. Returns the command for the rules, with one descriptor of the total length.
pub(super) fn gather(
    entry: &mut Request,
    sqe: &Sqe,
    segment: LastSegment,
    received_bytes: u32,
    pool: &Pool,
) -> Result<Sqe, Status> {
    let capsule = entry.capsule.as_ref().map_or(&[][..], |capsule| pool.bytes(capsule));
    let tail = capsule.get(SQE_BYTES as usize..).unwrap_or_default();
    let tail = &tail[..(received_bytes as usize).min(tail.len())];
    let (sqe, pieces, key) = sgl::gather(sqe, segment, tail)?;
    entry.invalidate = key;
    entry.make_ext().pieces = pieces;
    Ok(sqe)
}

/// Returns the RDMA Read of the next piece.
pub(super) fn next_pull(entry: &mut Request) -> Option<Work> {
    let (skip, from) = entry.ext_mut()?.pieces.advance()?;
    let mut into = entry.data.take()?;
    into.select(skip, from.len);
    Some(Work::Read { into, from })
}

/// Resets the window to the whole data after all pieces are pulled.
pub(super) fn join(entry: &mut Request) {
    let total_bytes = entry.ext().and_then(|ext| ext.pieces.total_bytes());
    if let (Some(total_bytes), Some(data)) = (total_bytes, &mut entry.data) {
        data.select(0, total_bytes);
    }
}

/// Prepares the next piece to be pushed; returns the destination.
pub(super) fn next_push(entry: &mut Request, pool: &mut Pool) -> Option<Remote> {
    let (skip, to) = entry.ext_mut()?.pieces.advance()?;
    if matches!(entry.plan, Plan::Give { .. }) {
        log_page::fill(entry, skip, to.len, pool);
    } else if let Some(data) = &mut entry.data {
        data.select(skip, to.len);
    }
    Some(to)
}
