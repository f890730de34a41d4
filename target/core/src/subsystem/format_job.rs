//! State machine of Format NVM, from request to completion: checks, persistence, notifications, and
//! their order. It owns no backing store, waits for nothing and erases nothing itself. Its driver
//! does that: `provision/format_task.rs` with a thread of its own.
//!
//! ```text
//! begin ─► published, fenced, drained ─► hold ─► erased ─► finish ─► published, known to all
//! ```

use std::sync::Arc;

use nvme::Status;

use super::lba_format::{Format, Progress};
use crate::subsystem::Namespace;
use crate::subsystem::bad_blocks::{BadBlocks, Change};
use crate::subsystem::ns_request::FormatRequest;
use crate::subsystem::reservation::{self, Barred, HostId, Reservation};
use crate::subsystem::write_protect::{self, Protection};

/// A format that has begun: hosts are refused I/O from the next publication on, until the one after
/// its end.
#[derive(Debug)]
pub struct FormatJob {
    block_size_bytes: u32,
    old_block_size_bytes: u32,
    /// Served size of the backing store, which is erased: the rest of it keeps its data and bad
    /// blocks.
    bytes: u64,
    format: Arc<Format>,
    protection: Arc<Protection>,
    marks: Arc<BadBlocks>,
    progress: Arc<Progress>,
    reservation: Arc<Reservation>,
    host: HostId,
    held: Option<(write_protect::WriteProtectGuard, reservation::ReservationGuard)>,
}

impl FormatJob {
    /// Begins to format a namespace, as it is served now.
    ///
    /// # Errors
    /// Why it cannot be formatted, or not with these parameters: that may have changed since the
    /// request. Format in Progress if another one has begun.
    pub fn begin(
        request: FormatRequest,
        namespace: &Namespace,
        format: &Arc<Format>,
    ) -> Result<FormatJob, Status> {
        if !namespace.allow_format {
            return Err(Status::OPERATION_DENIED.with_dnr());
        }
        if !namespace.formats.shifts().any(|shift| 1 << shift == request.block_size_bytes) {
            return Err(Status::INVALID_FORMAT.with_dnr());
        }
        if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        namespace.reservation.barred(&request.host_id).check(Barred::WRITE)?;
        Ok(FormatJob {
            block_size_bytes: request.block_size_bytes,
            old_block_size_bytes: namespace.block_bytes(),
            bytes: namespace.blocks << namespace.block_shift,
            progress: format.begin()?,
            format: Arc::clone(format),
            protection: Arc::clone(&namespace.protection),
            marks: Arc::clone(&namespace.marks),
            reservation: Arc::clone(&namespace.reservation),
            host: request.host_id,
            held: None,
        })
    }

    /// Its progress.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// All earlier commands have ended, and erasing may begin. A change of write protection or
    /// reservation happens before this or after the end, so no host gets success for protecting or
    /// reserving a namespace that is being erased.
    ///
    /// # Errors
    /// Namespace is Write Protected, Reservation Conflict: nothing may be erased.
    /// [`FormatJob::finish`] must be called with that.
    pub fn hold(&mut self) -> Result<(), Status> {
        self.held = Some((self.protection.hold()?, self.reservation.hold(&self.host)?));
        Ok(())
    }

    /// Ends the format. `erased`: whether everything reads as zeros, durably; `reshape` sets the
    /// block size of the store.
    ///
    /// # Errors
    /// The status for the host: the block size is as before. Those of `erased` and `reshape`;
    /// Internal Error if the result cannot be persisted.
    pub fn finish(
        self,
        erased: Result<(), Status>,
        reshape: impl FnMut(u32) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let outcome = erased.and_then(|()| self.settle(reshape));
        self.format.end();
        outcome
    }

    fn settle(&self, mut reshape: impl FnMut(u32) -> Result<(), Status>) -> Result<(), Status> {
        debug_assert!(self.held.is_some(), "erased while anybody could protect or reserve it");
        let (old, new) = (self.old_block_size_bytes, self.block_size_bytes);
        reshape(new)?;
        let mut back = |_: &Status| {
            let _ = reshape(old);
        };
        // Not before: old data of blocks that were not erased would become visible.
        if !self.marks.is_empty() {
            let ranges = vec![(0, self.bytes)];
            let mended = self.marks.change(&Change::Mend { ranges, until: u64::MAX });
            mended.inspect_err(&mut back)?;
        }
        match old == new {
            true => Ok(()),
            false => self.format.choose(new).inspect_err(back),
        }
    }
}
