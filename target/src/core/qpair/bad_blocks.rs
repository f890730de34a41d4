//! Unreadable blocks ([`crate::core::subsystem::bad_blocks`]): commands that make some, and commands that make
//! some readable again by what they write. The keeper has the last word in both.

use std::sync::Arc;

use nvme::{IoOpcode, Status};

use super::{Io, Link, QueuePair, QueueRole};
use crate::blockdev::IoRequest;
use crate::core::command::copy::Job;
use crate::core::command::write_uncorrectable::UNREADABLE;
use crate::core::command::{Plan, io as rules};
use crate::core::sched::offload::{self, BadBlocksRequest};
use crate::core::subsystem::bad_blocks::{BadBlocks, Change};

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
        /// It keeps others from changing its blocks until it is answered.
        alone: bool,
    },
    /// It is done, and the keeper notes it.
    UnderWay,
}

impl QueuePair {
    /// Hands a Write Uncorrectable command to the keeper.
    pub(super) fn mark(&mut self, slot: u16, io: &mut Io<'_>) {
        if let Err(status) = self.may_begin_at(slot, None) {
            return self.answer(slot, Err(status), io);
        }
        if let Plan::Mark { of, change } = &self.slots[usize::from(slot)].plan {
            let (of, change) = (Arc::clone(of), change.clone());
            self.ask_mark(slot, of, change, io);
        }
    }

    /// Whether a command that has done all it should waits for the keeper from now on.
    #[inline]
    pub(super) fn mends(&mut self, slot: u16, io: &mut Io<'_>) -> bool {
        let entry = &self.slots[usize::from(slot)];
        let Some(ClearBadBlocks::Due { of, until, .. }) = entry.rare().map(|rare| &rare.mend)
        else {
            return false;
        };
        if self.link != Link::Open {
            return false;
        }
        let (of, until) = (Arc::clone(of), *until);
        let mut changed = changed(&entry.plan, entry.bytes(io.pool));
        changed.retain(|(at, len)| of.first(*at, *len).is_some());
        if changed.is_empty() {
            return false;
        }
        self.slot(slot).make_rare().mend = ClearBadBlocks::UnderWay;
        self.ask_mark(slot, of, Change::Mend { ranges: changed, until }, io);
        true
    }

    /// The bytes that a command must have to itself before it changes any, until the keeper has noted
    /// that they can be read: from the first to the last that it changes, when some are marked. Other
    /// changes under way may have begun before the marks and stay hidden by them. One that a disk
    /// carried out behind this command's would come to light with the marks gone.
    #[inline]
    pub(super) fn mends_alone(
        &mut self,
        slot: u16,
        op: &IoRequest,
        io: &Io<'_>,
    ) -> Option<(u64, u64)> {
        let entry = &self.slots[usize::from(slot)];
        let ClearBadBlocks::Due { of, .. } = &entry.rare()?.mend else { return None };
        op.changes()?;
        let changed = changed(&entry.plan, entry.bytes(io.pool));
        changed.iter().find_map(|(at, len)| of.first(*at, *len))?;
        let written = || changed.iter().filter(|(_, len)| *len > 0);
        let at = written().map(|(at, _)| *at).min()?;
        let end = written().map(|(at, len)| at.saturating_add(*len)).max()?;
        if let ClearBadBlocks::Due { alone, .. } = &mut self.slot(slot).make_rare().mend {
            *alone = true;
        }
        Some((at, end - at))
    }

    /// Whether a command keeps its blocks to itself between its operations.
    #[inline]
    pub(super) fn keeps_turn(&self, slot: u16) -> bool {
        let rare = self.slots[usize::from(slot)].rare();
        rare.is_some_and(|rare| matches!(rare.mend, ClearBadBlocks::Due { alone: true, .. }))
    }

    /// Whether a command waited for the keeper alone; it is answered now.
    #[inline]
    pub(super) fn end_mending(
        &mut self,
        slot: u16,
        outcome: Result<(), Status>,
        io: &mut Io<'_>,
    ) -> bool {
        let rare = self.slot(slot).rare_mut();
        let Some(mend @ ClearBadBlocks::UnderWay) = rare.map(|rare| &mut rare.mend) else {
            return false;
        };
        *mend = ClearBadBlocks::None;
        self.answer(slot, outcome.map(|()| 0), io);
        self.raise_events(io);
        true
    }

    /// Whether a deallocation of `nr` ranges has to be made durable before it mends anything.
    pub(super) fn mends_first(&self, slot: u16, nr: u32) -> bool {
        let entry = &self.slots[usize::from(slot)];
        entry.step == nr
            && matches!(entry.rare().map(|rare| &rare.mend), Some(ClearBadBlocks::Due { .. }))
    }

    /// What deallocates a range. A store may do nothing when it is asked to; then what was there
    /// before blocks were made unreadable would be read again, so a range with such is zeroed.
    pub(super) fn discard(&self, slot: u16, at: u64, len: u64) -> IoRequest {
        match self.slots[usize::from(slot)].rare().map(|rare| &rare.mend) {
            Some(ClearBadBlocks::Due { of, .. }) if of.first(at, len).is_some() => {
                IoRequest::Zero { at, len, deallocate: true }
            }
            _ => IoRequest::Discard { at, len },
        }
    }

    /// Checks that all blocks that are to be copied can be read.
    pub(super) fn check_copied(
        &mut self,
        slot: u16,
        job: Job,
        io: &mut Io<'_>,
    ) -> Result<(), Status> {
        let entry = &mut self.slots[usize::from(slot)];
        let Some(ClearBadBlocks::Due { of, .. }) = entry.rare().map(|rare| &rare.mend) else {
            return Ok(());
        };
        match job.first_marked(entry.bytes(io.pool), of) {
            None => Ok(()),
            culprit => {
                entry.make_rare().culprit = culprit;
                Err(UNREADABLE)
            }
        }
    }

    /// The block that a command has failed for, as far as that is known; else its first.
    pub(super) fn culprit(&mut self, slot: u16, status: Status) -> u64 {
        let entry = &mut self.slots[usize::from(slot)];
        let (sqe, culprit) = (entry.sqe, entry.rare_mut().and_then(|rare| rare.culprit.take()));
        let reads = [IoOpcode::READ, IoOpcode::COMPARE, IoOpcode::VERIFY];
        let marked = || {
            let QueueRole::Io { subsystem, .. } = &self.serves else { return None };
            let namespace = subsystem.namespace(sqe.nsid).ok()?;
            let (at, len) = namespace.range(sqe.slba(), sqe.blocks().into()).ok()?;
            let first = namespace.marks.first(at, len)?;
            Some(first >> namespace.block_shift)
        };
        let unread = status.is(Status::UNRECOVERED_READ_ERROR);
        let found =
            culprit.or_else(|| marked().filter(|_| unread && reads.contains(&sqe.io_opcode())));
        found.unwrap_or(sqe.slba())
    }

    fn ask_mark(&mut self, slot: u16, of: Arc<BadBlocks>, change: Change, io: &mut Io<'_>) {
        let orders = matches!(change, Change::Mark { .. });
        let by = self.association().filter(|_| orders).map(|by| (by.subsystem, by.host_id));
        let nsid = self.slots[usize::from(slot)].sqe.nsid;
        let (reactor, tag) = (io.reactor, self.tag(slot));
        let request = BadBlocksRequest { of, change, by, nsid, reactor, tag };
        self.offload(slot, offload::Job::MarkBlocks(Box::new(request)), io);
    }
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
