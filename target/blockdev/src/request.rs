//! `PendingIo`: the state machine of one operation between submission and completion, without I/O.
//!
//! [`PendingIo::step`] returns the next step for the kernel. [`PendingIo::advance`] takes its
//! result: done, failed, or followed by another step (the rest of a short transfer, a retry,
//! another way to write zeros).

use std::ops::Range;

use nvme::status::Status;
use rdma::{Buf, Tag};

use super::backing::Kind;
use super::copy_locks;
use super::device::BackingDevice;
use super::errno::OpKind;
use super::fault_injection::Verdict;
use super::health::Health;
use super::step::Space;
pub use super::step::Step;
use super::{IoCompletion, IoRequest};

/// Maximum of one write of zeros: the size of the zeroed buffer of the ring.
pub(crate) const ZEROS_BYTES: u32 = 256 * 1024;
/// Maximum of consecutive EAGAIN and EINTR before the operation fails.
const TRIES: u8 = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Task {
    Read,
    Write { fua: bool },
    Flush,
    Discard,
    Zero { deallocate: bool, by: Option<Space> },
}

/// One operation in progress.
#[derive(Debug)]
pub struct PendingIo {
    tag: Tag,
    buf: Option<Buf>,
    /// Index of its store in the driver; opaque here.
    pub attachment: u32,
    task: Task,
    at: u64,
    len: u64,
    moved: u64,
    tries: u8,
    insists: bool,
    /// Number of waits caused by an injected fault.
    waited: u8,
    /// It waits for a timer only.
    waits: bool,
    /// The kernel runs an fsync for it.
    pub syncs: bool,
    /// It waits for an fsync that runs for others.
    pub idle: bool,
}

impl PendingIo {
    /// An operation that has not started.
    pub fn new(attachment: u32, tag: Tag, op: IoRequest) -> PendingIo {
        let (task, buf, at, len) = match op {
            IoRequest::Read { into, at } => {
                let len = u64::from(into.len());
                (Task::Read, Some(into), at, len)
            }
            IoRequest::Write { from, at, fua } => {
                let len = u64::from(from.len());
                (Task::Write { fua }, Some(from), at, len)
            }
            IoRequest::Flush => (Task::Flush, None, 0, 0),
            IoRequest::Discard { at, len } => (Task::Discard, None, at, len),
            IoRequest::Zero { at, len, deallocate } => {
                (Task::Zero { deallocate, by: None }, None, at, len)
            }
        };
        PendingIo {
            tag,
            buf,
            attachment,
            task,
            at,
            len,
            moved: 0,
            tries: 0,
            insists: false,
            waited: 0,
            waits: false,
            syncs: false,
            idle: false,
        }
    }

    /// The submitter's tag.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// The host has been told that cancellation failed: if the kernel reports it as cancelled all
    /// the same, it is submitted again.
    pub(crate) fn not_cancelled(&mut self) {
        self.insists = true;
    }

    /// How an injected fault changes a step.
    pub fn verdict(&mut self, step: Step, backing: &BackingDevice) -> Verdict {
        let verdict = backing.health().fault().verdict(step, self.waited);
        self.waits = verdict == Verdict::Wait;
        self.waited = if self.waits { self.waited.saturating_add(1) } else { self.waited };
        verdict
    }

    /// Whether it was waiting for a timer only; clears that.
    pub(crate) fn take_wait(&mut self) -> bool {
        std::mem::take(&mut self.waits)
    }

    /// The buffer of a read or write.
    pub fn buf(&self) -> Option<&Buf> {
        self.buf.as_ref()
    }

    /// The buffer, for a driver that moves the data itself (not the kernel).
    pub fn buf_mut(&mut self) -> Option<&mut Buf> {
        self.buf.as_mut()
    }

    /// Completes it.
    #[must_use]
    pub fn done(self, outcome: Result<(), Status>) -> IoCompletion {
        IoCompletion { tag: self.tag, buf: self.buf, outcome }
    }

    /// Whether it is a read.
    pub fn is_read(&self) -> bool {
        self.task == Task::Read
    }

    /// The result of an operation that the kernel does not need to, or must not, execute.
    #[must_use]
    pub(crate) fn immediate_result(&self, backing: &BackingDevice) -> Option<Result<(), Status>> {
        if !backing.contains(self.at, self.len) {
            return Some(Err(Status::LBA_OUT_OF_RANGE.with_dnr()));
        }
        let changes = !matches!(self.task, Task::Read | Task::Flush);
        if changes && backing.is_read_only() {
            return Some(Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr()));
        }
        if let Some(status) = backing.health().rejects(self.is_durable()) {
            return Some(Err(status));
        }
        let nothing = match self.task {
            Task::Flush => backing.is_read_only() || !self.is_file(backing),
            Task::Discard => self.len == 0 || !backing.allows(Space::Punch),
            Task::Read | Task::Write { .. } | Task::Zero { .. } => self.len == 0,
        };
        (nothing || backing.kind() == Kind::Null).then_some(Ok(()))
    }

    /// The next step.
    pub fn step(&mut self, backing: &BackingDevice) -> Step {
        let at = self.at.saturating_add(self.moved);
        let left = self.len.saturating_sub(self.moved);
        // Windows are at most u32 long, so both are exact for reads and writes.
        let skip = u32::try_from(self.moved).unwrap_or(u32::MAX);
        let len = u32::try_from(left).unwrap_or(u32::MAX);
        let whole = self.at..self.at.saturating_add(self.len);
        let space = |how| {
            let part = next_deallocation(&whole, backing);
            Step::Space { how, at: part.start, len: part.end - part.start }
        };
        match &mut self.task {
            Task::Read => Step::Read { at, skip, len },
            Task::Write { fua } => {
                // A volatile store needs no fsync.
                let durable = *fua && backing.kind() != Kind::Ram;
                Step::Write { at, skip, len, durable }
            }
            Task::Flush => Step::Sync,
            Task::Discard => space(Space::Punch),
            Task::Zero { deallocate, by } => {
                *by = way_to_zero(*deallocate, backing);
                match *by {
                    Some(how) => space(how),
                    None => Step::Zeros { at, len: len.min(ZEROS_BYTES) },
                }
            }
        }
    }

    /// Takes the kernel's result of the last step: returns the outcome, or none if there is another
    /// step.
    #[must_use]
    pub fn advance(&mut self, answer: i32, backing: &BackingDevice) -> Option<Result<(), Status>> {
        if answer >= 0 {
            self.tries = 0;
            return self.progress(u64::from(answer.unsigned_abs()), backing);
        }
        let errno = answer.wrapping_neg();
        if self.task == Task::Flush {
            // The store was replaced: what should become durable is not in it.
            backing.health().note_write();
        }
        if errno == libc::ECANCELED && self.insists {
            return None;
        }
        if errno == libc::ECANCELED {
            // Only the host of this operation can have asked for that.
            return Some(Err(Status::ABORT_REQUESTED));
        }
        if matches!(errno, libc::EINTR | libc::EAGAIN) && self.tries < TRIES {
            self.tries += 1;
            return None;
        }
        if errno == libc::EOPNOTSUPP {
            match self.task {
                Task::Discard => {
                    backing.refuse(Space::Punch);
                    return Some(Ok(()));
                }
                Task::Zero { by: Some(how), .. } => {
                    backing.refuse(how);
                    return None;
                }
                _ => {}
            }
        }
        if backing.is_lost() {
            // A fault of a store that was replaced does not affect the new one.
            return Some(Err(Health::NOT_READY));
        }
        let status = backing.fail(self.doing(), errno, self.at.saturating_add(self.moved));
        if self.breaks_durability(errno) {
            backing.fail_sync(status);
        }
        Some(Err(status))
    }

    fn progress(&mut self, bytes: u64, backing: &BackingDevice) -> Option<Result<(), Status>> {
        match self.task {
            Task::Flush => return Some(self.succeed(backing)),
            Task::Discard | Task::Zero { by: Some(_), .. } => {
                let whole = self.at..self.at.saturating_add(self.len);
                let part = next_deallocation(&whole, backing);
                self.len -= part.end - part.start;
                self.at = if part.start == self.at { part.end } else { self.at };
                return (self.len == 0).then(|| self.succeed(backing));
            }
            Task::Read | Task::Write { .. } | Task::Zero { by: None, .. } => {}
        }
        let left = self.len.saturating_sub(self.moved);
        let at = self.at.saturating_add(self.moved);
        if bytes == 0 || bytes > left {
            // End of the file inside the namespace; or a result that cannot occur.
            return Some(Err(match self.task {
                _ if backing.is_lost() => Health::NOT_READY,
                // The namespace was made smaller meanwhile.
                _ if !backing.contains(self.at, self.len) => Status::LBA_OUT_OF_RANGE.with_dnr(),
                Task::Read if bytes == 0 => backing.fail_shortened(at),
                _ => backing.fail(self.doing(), 0, at),
            }));
        }
        self.moved += bytes;
        (bytes == left).then(|| self.succeed(backing))
    }

    /// An fsync of another reactor may have failed while this one succeeded: the kernel reports a
    /// lost writeback to one of them only, so neither may confirm the data.
    fn succeed(&self, backing: &BackingDevice) -> Result<(), Status> {
        if self.task != Task::Read && backing.is_lost() {
            // It was executed on a store that has been replaced.
            return Err(Health::NOT_READY);
        }
        if !matches!(self.task, Task::Read | Task::Flush | Task::Write { fua: true }) {
            backing.health().note_write();
        }
        match backing.sync_failure() {
            Some(status) if self.is_durable() => Err(status),
            _ => Ok(()),
        }
    }

    /// Whether its success promises stable storage.
    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.task, Task::Flush | Task::Write { fua: true })
    }

    fn is_file(&self, backing: &BackingDevice) -> bool {
        backing.kind().is_external()
    }

    /// Whether this failure may be the only report of a lost writeback. A write with FUA includes
    /// an fsync, so its EIO may be; its ENOSPC is not.
    fn breaks_durability(&self, errno: i32) -> bool {
        match self.task {
            Task::Flush => !matches!(errno, libc::EINTR | libc::EAGAIN),
            Task::Write { fua: true } => errno == libc::EIO,
            _ => false,
        }
    }

    fn doing(&self) -> OpKind {
        match self.task {
            Task::Read => OpKind::Read,
            Task::Write { .. } => OpKind::Write,
            Task::Flush => OpKind::Flush,
            Task::Discard => OpKind::Discard,
            Task::Zero { .. } => OpKind::Zero,
        }
    }
}

/// The requested mode first, then the other; zeros are written if the store supports neither.
fn way_to_zero(deallocate: bool, backing: &BackingDevice) -> Option<Space> {
    let order = match deallocate {
        true => [Space::Punch, Space::ZeroRange],
        false => [Space::ZeroRange, Space::Punch],
    };
    order.into_iter().find(|how| backing.allows(*how))
}

/// What the next call deallocates of a range.
fn next_deallocation(whole: &Range<u64>, backing: &BackingDevice) -> Range<u64> {
    match backing.is_in_memory() {
        true => copy_locks::next_deallocation(whole),
        false => whole.clone(),
    }
}
