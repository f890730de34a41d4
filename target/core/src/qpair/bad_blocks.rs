//! Unreadable blocks ([`crate::subsystem::bad_blocks`]): commands that make some, and commands
//! that make some readable again by what they write. The worker that keeps the list has the last word
//! in both.

use std::sync::Arc;

use nvme::{IoOpcode, Status};
use rdma::Pool;

use super::Io;
use super::request::Request;
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::copy::Job;
use crate::command::write_uncorrectable::UNREADABLE;
use crate::command::{Plan, io as rules};
use crate::sched::offload::{self, BadBlocksRequest};
use crate::subsystem::bad_blocks::{BadBlocks, Change};
use nvmfd_blockdev::IoRequest;

/// What becomes of unreadable blocks that a command changes.
#[derive(Debug, Default)]
pub(super) enum ClearBadBlocks {
    /// There are none.
    #[default]
    None,
    /// When it is done, those that it has changed can be read.
    Due {
        /// Of the namespace.
        of: Arc<BadBlocks>,
        /// How many orders to mark blocks were carried out when it began. What later ones mark
        /// stays so.
        until: u64,
        /// It keeps others from changing its blocks until it is completed.
        alone: bool,
    },
    /// It is done, and the worker notes it.
    UnderWay,
}

/// When a command is done, those of these blocks that it has changed can be read.
pub(super) fn note(entry: &mut Request, of: Arc<BadBlocks>) {
    let until = of.orders();
    entry.make_ext().clears = ClearBadBlocks::Due { of, until, alone: false };
}

/// What the worker is to clear now that a command has done all it should, as long as its host can
/// be told. From now on the command waits for that.
pub(super) fn begin_clearing(entry: &mut Request, pool: &Pool) -> Option<(Arc<BadBlocks>, Change)> {
    let ClearBadBlocks::Due { of, until, .. } = &entry.ext()?.clears else { return None };
    let (of, until) = (Arc::clone(of), *until);
    let mut ranges = changed(&entry.plan, entry.bytes(pool));
    ranges.retain(|(at, len)| of.first(*at, *len).is_some());
    if ranges.is_empty() {
        return None;
    }
    entry.make_ext().clears = ClearBadBlocks::UnderWay;
    Some((of, Change::Mend { ranges, until }))
}

/// The bytes that a command must have to itself before it changes any, until the worker has noted
/// that they can be read: from the first to the last that it changes, when some are marked. Other
/// changes under way may have begun before the marks and stay hidden by them. One that a disk
/// carried out behind this command's would come to light with the marks gone.
pub(super) fn exclusive_range(
    entry: &mut Request,
    op: &IoRequest,
    pool: &Pool,
) -> Option<(u64, u64)> {
    let ClearBadBlocks::Due { of, .. } = &entry.ext()?.clears else { return None };
    op.changes()?;
    let changed = changed(&entry.plan, entry.bytes(pool));
    changed.iter().find_map(|(at, len)| of.first(*at, *len))?;
    let written = || changed.iter().filter(|(_, len)| *len > 0);
    let at = written().map(|(at, _)| *at).min()?;
    let end = written().map(|(at, len)| at.saturating_add(*len)).max()?;
    if let ClearBadBlocks::Due { alone, .. } = &mut entry.make_ext().clears {
        *alone = true;
    }
    Some((at, end - at))
}

/// Whether a command keeps its blocks to itself between its operations.
pub(super) fn keeps_lock(entry: &Request) -> bool {
    entry.ext().is_some_and(|ext| matches!(ext.clears, ClearBadBlocks::Due { alone: true, .. }))
}

/// Whether a command waited for the worker alone; it is completed now.
pub(super) fn end_clearing(entry: &mut Request) -> bool {
    match entry.ext_mut().map(|ext| &mut ext.clears) {
        Some(clears @ ClearBadBlocks::UnderWay) => {
            *clears = ClearBadBlocks::None;
            true
        }
        _ => false,
    }
}

/// Whether a deallocation of `nr` ranges has to be made durable before it clears anything.
pub(super) fn must_flush_first(entry: &Request, nr: u32) -> bool {
    let is_due =
        |ext: &super::request::RequestExt| matches!(ext.clears, ClearBadBlocks::Due { .. });
    entry.step == nr && entry.ext().is_some_and(is_due)
}

/// What deallocates a range. A store may do nothing when it is asked to; then what was there
/// before blocks were made unreadable would be read again, so a range with such is zeroed.
pub(super) fn discard(entry: &Request, at: u64, len: u64) -> IoRequest {
    match entry.ext().map(|ext| &ext.clears) {
        Some(ClearBadBlocks::Due { of, .. }) if of.first(at, len).is_some() => {
            IoRequest::Zero { at, len, deallocate: true }
        }
        _ => IoRequest::Discard { at, len },
    }
}

/// Checks that all blocks that are to be copied can be read.
pub(super) fn check_copied(entry: &mut Request, job: Job, pool: &Pool) -> Result<(), Status> {
    let clears = entry.ext().map(|ext| &ext.clears);
    let Some(ClearBadBlocks::Due { of, .. }) = clears else { return Ok(()) };
    match job.first_marked(entry.bytes(pool), of) {
        None => Ok(()),
        failing_lba => {
            entry.make_ext().failing_lba = failing_lba;
            Err(UNREADABLE)
        }
    }
}

/// The block that a command has failed for, as far as that is known; else its first.
pub(super) fn failing_lba(entry: &mut Request, status: Status, role: &QueueRole) -> u64 {
    let known = entry.ext_mut().and_then(|ext| ext.failing_lba.take());
    let sqe = &entry.sqe;
    let reads = [IoOpcode::READ, IoOpcode::COMPARE, IoOpcode::VERIFY];
    let marked = || {
        let QueueRole::Io { subsystem, .. } = role else { return None };
        let namespace = subsystem.namespace(sqe.nsid).ok()?;
        let (at, len) = namespace.range(sqe.slba(), sqe.blocks().into()).ok()?;
        let first = namespace.marks.first(at, len)?;
        Some(first >> namespace.block_shift)
    };
    let unread = status.is(Status::UNRECOVERED_READ_ERROR);
    let found = known.or_else(|| marked().filter(|_| unread && reads.contains(&sqe.io_opcode())));
    found.unwrap_or(sqe.slba())
}

/// What is asked of the worker for a command.
pub(super) fn job(
    requests: &Requests,
    slot: u16,
    (of, change): (Arc<BadBlocks>, Change),
    role: &QueueRole,
    io: &Io<'_>,
) -> offload::Job {
    let orders = matches!(change, Change::Mark { .. });
    let by = role.association().filter(|_| orders).map(|by| (by.subsystem, by.host_id));
    let (reactor, tag, nsid) = (io.reactor, requests.tag(slot), requests[slot].sqe.nsid);
    let request = BadBlocksRequest { of, change, by, nsid, reactor, tag };
    offload::Job::MarkBlocks(Box::new(request))
}

/// Byte offsets and lengths of what a plan has changed; `data` are those that the host has sent.
fn changed(plan: &Plan, data: &[u8]) -> Vec<(u64, u64)> {
    match plan {
        Plan::Store { at, from, .. } => vec![(*at, from.len_bytes().into())],
        Plan::Zero { at, len, .. } => vec![(*at, *len)],
        Plan::Copy { job, .. } => {
            job.store(data).map(|(at, len)| (at, len.into())).into_iter().collect()
        }
        // Whatever was marked when it began was zeroed, not given up.
        Plan::Deallocate { extent, nr, .. } => {
            (0..*nr).filter_map(|range| rules::range_at(data, range, *extent).ok()).collect()
        }
        _ => Vec::new(),
    }
}
