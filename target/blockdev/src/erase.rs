//! Erases a backing store and changes its block size: Format NVM. May block on the device, so the
//! callers are threads that nobody waits for.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nvme::status::Status;

use super::block_sizes::BlockSizes;
use super::crash_point::crash_point;
use super::device::BackingDevice;
use super::errno::OpKind;
use super::fault_injection::Verdict;
use super::request::Step;
use super::step::Space;

/// Progress is reported after each piece: about a hundredth of the store, within these bounds. The
/// larger one bounds the delay of a stop.
const PIECE_BYTES: (u64, u64) = (16 << 20, 128 << 20);
/// Bytes per write of zeros where the store supports neither mode of fallocate.
const ZEROS_BYTES: usize = 1 << 20;
/// Alignment of buffers for direct I/O.
const ALIGNMENT: usize = 4096;
/// Poll interval while an injected fault stalls the store, or while a failure is not persisted yet.
const STALL: Duration = Duration::from_millis(20);

impl BackingDevice {
    /// LBA formats that the store supports: its size is a multiple of the block, and direct I/O
    /// supports it.
    pub fn formats(&self) -> BlockSizes {
        let bytes = self.size_bytes();
        let can =
            |block: u32| block >= self.smallest_block_bytes && bytes.is_multiple_of(block.into());
        BlockSizes::those(|shift| 1 << shift == self.block_size_bytes() || can(1 << shift))
    }

    /// Changes the block size. No operation with the old block size is in flight.
    pub fn reformat(&self, block_size_bytes: u32) {
        self.block_size_bytes.store(block_size_bytes, Ordering::Relaxed);
    }

    /// Makes the whole store read as zeros, durably, and deallocates where that is supported.
    /// `progress` is called with the bytes done and the total. When `stop` returns true, no further
    /// step begins.
    ///
    /// # Errors
    /// The status for the host: Command Interrupted if it was stopped. A part may be erased.
    pub fn erase(
        &self,
        stop: impl Fn() -> bool,
        progress: impl FnMut(u64, u64),
    ) -> Result<(), Status> {
        let outcome = self.zero_all(&stop, progress).and_then(|()| self.sync(&stop));
        self.hold_unrecorded(outcome, &stop)
    }

    fn zero_all(
        &self,
        stop: &impl Fn() -> bool,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(), Status> {
        if self.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        let total = self.size_bytes();
        let (least, most) = PIECE_BYTES;
        let piece = (total / 128 / least * least).clamp(least, most);
        let mut zeros = Vec::new();
        let mut at = 0;
        while at < total {
            crash_point();
            let len = piece.min(total - at);
            self.zero(at, len, stop, &mut zeros)?;
            at += len;
            progress(at, total);
        }
        crash_point();
        Ok(())
    }

    fn zero(
        &self,
        at: u64,
        len: u64,
        stop: &impl Fn() -> bool,
        zeros: &mut Vec<u8>,
    ) -> Result<(), Status> {
        for how in [Space::Punch, Space::ZeroRange] {
            if !self.allows(how) {
                continue;
            }
            let step = Step::Space { how, at, len };
            match self.attempt(step, stop, || self.act_on_space(how, at, len))? {
                Ok(()) => {
                    self.health.note_write();
                    return Ok(());
                }
                Err(Errno::EOPNOTSUPP) => self.refuse(how),
                Err(errno) => return Err(self.fail(OpKind::Zero, errno as i32, at)),
            }
        }
        let mut done = 0;
        while done < len {
            let bytes = (ZEROS_BYTES as u64).min(len - done);
            let step = Step::Zeros { at: at + done, len: bytes as u32 };
            let wrote = self.attempt(step, stop, || self.write_zeros(at + done, bytes, zeros))?;
            wrote.map_err(|errno| self.fail(OpKind::Zero, errno as i32, at + done))?;
            self.health.note_write();
            done += bytes;
        }
        Ok(())
    }

    /// Makes what was written durable; a failure is recorded as for a flush of a host. May block on
    /// the device.
    pub fn make_durable(&self, stop: &impl Fn() -> bool) -> Result<(), Status> {
        self.hold_unrecorded(self.sync(stop), stop)
    }

    /// Delays the report of a failed fsync until the failure is persisted, as rings do. A caller
    /// that stops gets no report.
    fn hold_unrecorded(
        &self,
        outcome: Result<(), Status>,
        stop: &impl Fn() -> bool,
    ) -> Result<(), Status> {
        while outcome.is_err() && self.health.is_unrecorded() {
            if stop() {
                return Err(Status::COMMAND_INTERRUPTED);
            }
            std::thread::sleep(STALL);
        }
        outcome
    }

    fn sync(&self, stop: &impl Fn() -> bool) -> Result<(), Status> {
        if !self.kind.is_external() {
            return Ok(());
        }
        self.health.begin_sync();
        let synced =
            self.attempt(Step::Sync, stop, || self.synchronise().map_err(|e| of_system(&e)));
        if synced != Ok(Ok(())) {
            // The store was replaced: what should become durable is not in it.
            self.health.note_write();
        }
        self.health.end_sync();
        if let Err(errno) = synced? {
            let status = self.fail(OpKind::Flush, errno as i32, 0);
            self.fail_sync(status);
            return Err(status);
        }
        // A reactor may have received the report of the failed writeback instead of this fsync.
        self.sync_failure().map_or(Ok(()), Err)
    }

    /// Does one step, unless stopped or prevented by an injected fault; retries what was
    /// interrupted.
    fn attempt(
        &self,
        step: Step,
        stop: &impl Fn() -> bool,
        mut act: impl FnMut() -> Result<(), Errno>,
    ) -> Result<Result<(), Errno>, Status> {
        let mut waited = 0u8;
        loop {
            if stop() {
                return Err(Status::COMMAND_INTERRUPTED);
            }
            if let Some(status) = self.health.rejects(true) {
                return Err(status);
            }
            match self.health.fault().verdict(step, waited) {
                Verdict::Wait => {
                    waited = waited.saturating_add(1);
                    std::thread::sleep(STALL);
                }
                Verdict::Fail(errno) => return Ok(Err(Errno::from_raw(errno))),
                Verdict::Go => match act() {
                    Err(Errno::EINTR) => {}
                    outcome => return Ok(outcome),
                },
            }
        }
    }

    fn act_on_space(&self, how: Space, at: u64, len: u64) -> Result<(), Errno> {
        let Some(file) = &self.file else { return Ok(()) };
        let mode = match how {
            Space::Punch => FallocateFlags::FALLOC_FL_PUNCH_HOLE,
            Space::ZeroRange => FallocateFlags::FALLOC_FL_ZERO_RANGE,
        };
        let offset = |bytes| libc::off_t::try_from(bytes).map_err(|_| Errno::EFBIG);
        fallocate(
            file.as_fd(),
            mode | FallocateFlags::FALLOC_FL_KEEP_SIZE,
            offset(at)?,
            offset(len)?,
        )
    }

    fn write_zeros(&self, at: u64, len: u64, zeros: &mut Vec<u8>) -> Result<(), Errno> {
        let Some(file) = &self.file else { return Ok(()) };
        zeros.resize(ZEROS_BYTES + ALIGNMENT, 0);
        let start = zeros.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        file.write_all_at(&zeros[start..start + len as usize], at).map_err(|e| of_system(&e))
    }
}

fn of_system(error: &std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::sync::Arc;

    use super::super::backing::{BackingConfig, BackingKind};
    use super::super::fault_injection::InjectedFault;
    use crate::erase::*;

    fn open(kind: BackingKind, block_size_bytes: u32) -> BackingDevice {
        BackingDevice::open(&BackingConfig {
            kind,
            block_size_bytes,
            read_only: false,
            shared: false,
        })
        .unwrap()
    }

    #[test]
    fn erase_zeroes_all_bytes_with_every_supported_method() {
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        let bytes = (40 << 20) + 512;
        for refused in [&[][..], &[Space::Punch], &[Space::Punch, Space::ZeroRange]] {
            fs::write(&path, vec![0xA5; bytes]).unwrap();
            let kind = BackingKind::File { path: path.clone(), size: Some(bytes as u64) };
            let backing = open(kind, 512);
            refused.iter().for_each(|how| backing.refuse(*how));
            let mut told = Vec::new();
            backing.erase(|| false, |done, of| told.push((done, of))).unwrap();
            assert!(fs::read(&path).unwrap() == vec![0; bytes], "{refused:?}");
            let (pieces, total) = ([16 << 20, 32 << 20, bytes as u64], bytes as u64);
            assert_eq!(told, pieces.map(|done| (done, total)));
        }
        let memory = open(BackingKind::Ram { size: 8192 }, 4096);
        memory.file.as_ref().unwrap().write_all_at(&[1; 8192], 0).unwrap();
        memory.erase(|| false, |_, _| ()).unwrap();
        let mut found = [1; 8192];
        memory.file.as_ref().unwrap().read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, [0; 8192]);
    }

    #[test]
    fn a_stopped_erase_leaves_later_bytes_unchanged() {
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        let bytes = 40 << 20;
        for refused in [&[][..], &[Space::Punch, Space::ZeroRange]] {
            fs::write(&path, vec![0xA5; bytes]).unwrap();
            let kind = BackingKind::File { path: path.clone(), size: Some(bytes as u64) };
            let backing = open(kind, 512);
            refused.iter().for_each(|how| backing.refuse(*how));
            let done = Cell::new(0);
            let outcome = backing.erase(|| done.get() > 0, |at, _| done.set(at));
            assert_eq!(outcome, Err(Status::COMMAND_INTERRUPTED));
            let found = fs::read(&path).unwrap();
            let (erased, left) = found.split_at(16 << 20);
            assert_eq!(done.get(), erased.len() as u64);
            assert!(erased.iter().all(|byte| *byte == 0), "{refused:?}");
            assert!(left.iter().all(|byte| *byte == 0xA5), "{refused:?}");
        }
        // A stalled store does not delay a stop.
        let memory = open(BackingKind::Ram { size: 8192 }, 4096);
        memory.health().set_fault(InjectedFault::Stall);
        let looks = Cell::new(0);
        let stop = || looks.replace(looks.get() + 1) > 2;
        assert_eq!(memory.erase(stop, |_, _| ()), Err(Status::COMMAND_INTERRUPTED));
    }

    #[test]
    fn erase_reports_each_device_error_and_a_failed_sync_is_sticky() {
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        let backing = open(BackingKind::File { path, size: Some(1 << 20) }, 4096);
        let erase = |fault| {
            backing.health().set_fault(fault);
            backing.erase(|| false, |_, _| ())
        };
        assert_eq!(erase(InjectedFault::Error), Err(Status::WRITE_FAULT));
        assert_eq!(erase(InjectedFault::Full), Err(Status::CAPACITY_EXCEEDED.with_dnr()));
        assert_eq!(erase(InjectedFault::Slow), Ok(()));
        assert_eq!(erase(InjectedFault::Sync), Err(Status::WRITE_FAULT));
        assert_eq!(
            erase(InjectedFault::None),
            Err(Status::WRITE_FAULT),
            "until it is opened again"
        );
        assert_eq!(backing.sync_failure(), Some(Status::WRITE_FAULT));
    }

    /// Counts calls of `stop` as observations of a caller that waits.
    #[test]
    fn erase_reports_a_failed_sync_only_after_recording() {
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        let backing = open(BackingKind::File { path, size: Some(1 << 20) }, 4096);
        let health = backing.health();
        health.record_by(Some(Arc::default()));
        let looks = Cell::new(0);
        let keep_late = || {
            if health.is_unrecorded() {
                looks.set(looks.get() + 1);
                if looks.get() == 3 {
                    health.note_recorded();
                }
            }
            false
        };
        let erase = || backing.erase(keep_late, |_, _| ());
        let told = |act: &dyn Fn() -> Result<(), Status>| {
            looks.set(0);
            let outcome = act();
            health.set_fault(InjectedFault::None);
            (outcome, looks.get())
        };
        let late = (Err(Status::WRITE_FAULT), 3);
        health.set_fault(InjectedFault::Sync);
        assert_eq!(told(&erase), late);
        health.trust();
        health.set_fault(InjectedFault::Sync);
        assert_eq!(told(&|| backing.make_durable(&keep_late)), late);
        // The fault of another store, which prevents the start.
        health.trust();
        health.fail_sync(Status::WRITE_FAULT);
        assert_eq!(told(&erase), late);
        // A caller that stops does not wait, and gets no report.
        health.trust();
        health.set_fault(InjectedFault::Sync);
        let stopped = backing.erase(|| health.is_unrecorded(), |_, _| ());
        assert_eq!(stopped, Err(Status::COMMAND_INTERRUPTED));
        assert_eq!(health.sync_failure(), Some(Status::WRITE_FAULT));
    }

    #[test]
    fn formats_are_limited_by_device_size_and_smallest_block() {
        let of = |size, block| open(BackingKind::Null { size }, block).formats();
        assert_eq!(of(4096 * 3, 4096), BlockSizes::those(|_| true));
        assert_eq!(of(4096 * 3, 512), BlockSizes::those(|_| true));
        assert_eq!(of(4096 * 3 + 512, 512), BlockSizes::only(9));
        let mut coarse = open(BackingKind::Null { size: 8192 }, 4096);
        coarse.smallest_block_bytes = 4096;
        assert_eq!(coarse.formats(), BlockSizes::only(12));
        coarse.reformat(512);
        assert_eq!(coarse.formats(), BlockSizes::those(|_| true), "what it has it can have");
    }
}
