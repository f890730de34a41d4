//! Unreadable blocks ([`crate::subsystem::bad_blocks`]): commands that mark some, and commands whose writes
//! make some readable again. In both cases the worker that maintains the list executes the last step.

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
use crate::sched::offload::{self, BadBlocksRequest, MarkingHost};
use crate::subsystem::bad_blocks::{BadBlocks, Change};
use nvmfd_blockdev::IoRequest;

/// Unreadable blocks that a command changes.
#[derive(Debug, Default)]
pub(super) enum ClearBadBlocks {
    /// There are none.
    #[default]
    None,
    /// When it is done, the blocks that it has changed become readable.
    Due {
        /// Those of the namespace.
        of: Arc<BadBlocks>,
        /// Number of requests to mark blocks that were executed when it began. Blocks marked by
        /// later ones stay so.
        until: u64,
        /// It has its blocks locked exclusively until it is completed.
        alone: bool,
    },
    /// It is done, and the worker updates the list.
    UnderWay,
}

/// Records that the blocks among these that a command changes become readable when it is done.
pub(super) fn note(entry: &mut Request, of: Arc<BadBlocks>) {
    let until = of.orders();
    entry.make_ext().clears = ClearBadBlocks::Due { of, until, alone: false };
}

/// Returns the marks that the worker is to clear after the operations of a command; the command
/// waits for that from now on. Called only while its connection is open.
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

/// Returns the bytes that a command must lock before it changes any, until the worker has recorded
/// that they are readable: from the first to the last that it changes, if any are marked. Other
/// changes in progress may have begun before the marks and stay hidden by them. One that a device
/// executed after this command's would become visible when the marks are removed.
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

/// Whether a command keeps its range lock between its operations.
pub(super) fn keeps_lock(entry: &Request) -> bool {
    entry.ext().is_some_and(|ext| matches!(ext.clears, ClearBadBlocks::Due { alone: true, .. }))
}

/// Whether a command waited only for the worker; it is completed now.
pub(super) fn end_clearing(entry: &mut Request) -> bool {
    match entry.ext_mut().map(|ext| &mut ext.clears) {
        Some(clears @ ClearBadBlocks::UnderWay) => {
            *clears = ClearBadBlocks::None;
            true
        }
        _ => false,
    }
}

/// Whether a deallocation of `nr` ranges has to be made durable before it clears any marks.
pub(super) fn must_flush_first(entry: &Request, nr: u32) -> bool {
    let is_due =
        |ext: &super::request::RequestExt| matches!(ext.clears, ClearBadBlocks::Due { .. });
    entry.step == nr && entry.ext().is_some_and(is_due)
}

/// Returns the operation that deallocates a range. A device may ignore a deallocation; the data
/// from before blocks were marked would then be readable again, so a range with marked blocks is
/// zeroed.
pub(super) fn discard(entry: &Request, at: u64, len: u64) -> IoRequest {
    match entry.ext().map(|ext| &ext.clears) {
        Some(ClearBadBlocks::Due { of, .. }) if of.first(at, len).is_some() => {
            IoRequest::Zero { at, len, deallocate: true }
        }
        _ => IoRequest::Discard { at, len },
    }
}

/// Checks that all blocks to be copied can be read.
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

/// Returns the block at which a command has failed, if known; otherwise its first.
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

/// Returns the job of the worker for a command.
pub(super) fn job(
    requests: &mut Requests,
    slot: u16,
    (of, change): (Arc<BadBlocks>, Change),
    role: &QueueRole,
    io: &Io<'_>,
) -> offload::Job {
    let orders = matches!(change, Change::Mark { .. });
    let by = role.association().filter(|_| orders).map(|by| {
        let connection = requests[slot].watch_connection();
        MarkingHost { subsystem: by.subsystem, host_id: by.host_id, connection }
    });
    let (reactor, tag, nsid) = (io.reactor, requests.tag(slot), requests[slot].sqe.nsid);
    let request = BadBlocksRequest { of, change, by, nsid, reactor, tag };
    offload::Job::MarkBlocks(Box::new(request))
}

/// Returns the byte offsets and lengths that a plan has changed; `data` are those from the host.
fn changed(plan: &Plan, data: &[u8]) -> Vec<(u64, u64)> {
    match plan {
        Plan::Store { at, from, .. } => vec![(*at, from.len_bytes().into())],
        Plan::Zero { at, len, .. } => vec![(*at, *len)],
        Plan::Copy { job, .. } => {
            job.store(data).map(|(at, len)| (at, len.into())).into_iter().collect()
        }
        // Ranges with marks at its beginning were zeroed rather than deallocated.
        Plan::Deallocate { extent, nr, .. } => {
            (0..*nr).filter_map(|range| rules::range_at(data, range, *extent).ok()).collect()
        }
        _ => Vec::new(),
    }
}
