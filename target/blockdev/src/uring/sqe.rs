//! Builds system calls and submission queue entries: the only place that computes addresses for the
//! kernel.
//!
//! Building one is safe; the ring that submits it ensures its conditions.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::types::{Fd, Fixed, FsyncFlags, Timespec};
use io_uring::{opcode, squeue};
use rdma::{Buf, Pool, PoolPlan, Region};

use super::sync_group::Syncs;
use crate::request::{PendingIo, Step, ZEROS_BYTES};
use crate::{BackingDevice, Space};

/// The kernel accepts no fixed buffer above 1 GiB: larger regions are registered in pieces.
pub(crate) const CHUNK_SHIFT: u32 = 30;

/// A store at this ring, from `attach` until its last operation has completed.
pub(crate) struct Attachment {
    pub(crate) backing: Arc<BackingDevice>,
    pub(crate) id: u32,
    /// It has the slot `id` of the kernel's table of files.
    pub(crate) fixed: bool,
    pub(crate) flights: u32,
    /// Its operations that the kernel has, or is about to get.
    pub(crate) active: u32,
    /// Its operations that wait until others have completed.
    pub(crate) parked: VecDeque<PendingIo>,
    /// Descriptor for fsync: an open file that only this ring syncs.
    pub(crate) sync_fd: Option<RawFd>,
    pub(crate) syncs: Syncs,
    /// Detached: takes no new operations.
    pub(crate) leaving: bool,
}

/// Memory that entries refer to.
pub(crate) struct Memory {
    pub(crate) region: Arc<Region>,
    /// Zeros to write where a store cannot zero a range. A private mapping.
    pub(crate) zeros: Arc<Region>,
    /// Whether the region is registered.
    pub(crate) registered: bool,
}

/// A range of memory for the kernel: its address, and the registered chunk that contains it.
pub(crate) struct Place {
    pub(crate) addr: *mut u8,
    pub(crate) chunk: Option<u16>,
}

impl Memory {
    /// # Errors
    /// There is no memory for the zeros.
    pub(crate) fn new(region: Arc<Region>, registered: bool) -> io::Result<Memory> {
        let zeros = Pool::new(PoolPlan::without_receives(0, u64::from(ZEROS_BYTES), ZEROS_BYTES))?
            .region()
            .clone();
        Ok(Memory { region, zeros, registered })
    }

    /// `len` bytes of a buffer, `skip` bytes into its window; none if that is outside the region.
    pub(crate) fn locate(&self, buf: &Buf, skip: u32, len: u32) -> Option<Place> {
        if skip.checked_add(len)? > buf.len() {
            return None;
        }
        if !buf.is_of(&self.region) {
            return None;
        }
        let start = buf.offset().checked_add(u64::from(skip))?;
        let end = start.checked_add(u64::from(len))?;
        let size = u64::try_from(self.region.len()).ok()?;
        if end > size || len == 0 {
            return None;
        }
        let addr = self.region.addr().checked_add(usize::try_from(start).ok()?)?;
        let (first, last) = (start >> CHUNK_SHIFT, (end - 1) >> CHUNK_SHIFT);
        let chunk = if self.registered && first == last { u16::try_from(first).ok() } else { None };
        Some(Place { addr: std::ptr::with_exposed_provenance_mut(addr), chunk })
    }
}

/// A timeout entry.
pub(crate) fn pause_entry() -> squeue::Entry {
    static TIMEOUT: Timespec = Timespec::new().nsec(super::PAUSE.subsec_nanos());
    opcode::Timeout::new(&TIMEOUT).build()
}

/// A system call for a step: its descriptor, and what it does.
pub(crate) struct Call {
    pub(crate) fd: RawFd,
    pub(crate) op: CallOp,
}

/// What a [`Call`] does.
pub(crate) enum CallOp {
    /// `preadv2`.
    Read { into: Place, len: u32, at: u64 },
    /// `pwritev2`, with `RWF_DSYNC` if the data have to be durable.
    Write { from: Place, len: u32, at: u64, flags: i32 },
    /// `fallocate`.
    Allocate { mode: i32, at: u64, len: u64 },
    /// `fdatasync`.
    Sync,
}

/// The call for a step; none if the buffer is too small for the step. `sync_fd`: the descriptor for
/// fsync.
pub(crate) fn call_for(
    step: Step,
    buf: Option<&Buf>,
    (fd, sync_fd): (RawFd, Option<RawFd>),
    memory: &Memory,
) -> Option<Call> {
    let op = match step {
        Step::Read { at, skip, len } => {
            CallOp::Read { into: memory.locate(buf?, skip, len)?, len, at }
        }
        Step::Write { at, skip, len, durable } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            CallOp::Write { from: memory.locate(buf?, skip, len)?, len, at, flags }
        }
        Step::Zeros { at, len } => {
            let addr = std::ptr::with_exposed_provenance_mut(memory.zeros.addr());
            let from = Place { addr, chunk: None };
            CallOp::Write { from, len: len.min(ZEROS_BYTES), at, flags: 0 }
        }
        Step::Space { how, at, len } => {
            let mode = match how {
                Space::Punch => libc::FALLOC_FL_PUNCH_HOLE,
                Space::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
            };
            CallOp::Allocate { mode: mode | libc::FALLOC_FL_KEEP_SIZE, at, len }
        }
        Step::Sync => return Some(Call { fd: sync_fd?, op: CallOp::Sync }),
    };
    Some(Call { fd, op })
}

/// The entry for a call. `slot`: of its descriptor in the kernel's table of files.
pub(crate) fn entry_for(call: &Call, slot: Option<Fixed>) -> squeue::Entry {
    let fd = Fd(call.fd);
    match call.op {
        CallOp::Read { into: Place { addr, chunk }, len, at } => match (slot, chunk) {
            (Some(slot), Some(chunk)) => {
                opcode::ReadFixed::new(slot, addr, len, chunk).offset(at).build()
            }
            (None, Some(chunk)) => opcode::ReadFixed::new(fd, addr, len, chunk).offset(at).build(),
            (Some(slot), None) => opcode::Read::new(slot, addr, len).offset(at).build(),
            (None, None) => opcode::Read::new(fd, addr, len).offset(at).build(),
        },
        CallOp::Write { from: Place { addr, chunk }, len, at, flags } => match (slot, chunk) {
            (Some(slot), Some(chunk)) => {
                opcode::WriteFixed::new(slot, addr, len, chunk).offset(at).rw_flags(flags).build()
            }
            (None, Some(chunk)) => {
                opcode::WriteFixed::new(fd, addr, len, chunk).offset(at).rw_flags(flags).build()
            }
            (Some(slot), None) => {
                opcode::Write::new(slot, addr, len).offset(at).rw_flags(flags).build()
            }
            (None, None) => opcode::Write::new(fd, addr, len).offset(at).rw_flags(flags).build(),
        },
        CallOp::Allocate { mode, at, len } => {
            opcode::Fallocate::new(fd, len).offset(at).mode(mode).build()
        }
        CallOp::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
    }
}
