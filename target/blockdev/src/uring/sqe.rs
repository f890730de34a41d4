//! Builds submission queue entries: the only place that passes addresses to the kernel.
//!
//! Building an entry is safe; the ring that submits it ensures its conditions.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use io_uring::types::{Fd, Fixed, FsyncFlags, Timespec};
use io_uring::{opcode, squeue};
use rdma::{Buf, Region};

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
    static PAUSE: Timespec = Timespec::new().nsec(100_000_000);
    opcode::Timeout::new(&PAUSE).build()
}

/// The entry for a step; none if the buffer is too small for the step.
pub(crate) fn entry_for(
    step: Step,
    buf: Option<&Buf>,
    attachment: &Attachment,
    memory: &Memory,
) -> Option<squeue::Entry> {
    let fd = Fd(attachment.backing.fd()?);
    let slot = attachment.fixed.then_some(Fixed(attachment.id));
    Some(match step {
        Step::Read { at, skip, len } => {
            let Place { addr, chunk } = memory.locate(buf?, skip, len)?;
            match (slot, chunk) {
                (Some(slot), Some(chunk)) => {
                    opcode::ReadFixed::new(slot, addr, len, chunk).offset(at).build()
                }
                (None, Some(chunk)) => {
                    opcode::ReadFixed::new(fd, addr, len, chunk).offset(at).build()
                }
                (Some(slot), None) => opcode::Read::new(slot, addr, len).offset(at).build(),
                (None, None) => opcode::Read::new(fd, addr, len).offset(at).build(),
            }
        }
        Step::Write { at, skip, len, durable } => {
            let Place { addr, chunk } = memory.locate(buf?, skip, len)?;
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            match (slot, chunk) {
                (Some(slot), Some(chunk)) => opcode::WriteFixed::new(slot, addr, len, chunk)
                    .offset(at)
                    .rw_flags(flags)
                    .build(),
                (None, Some(chunk)) => {
                    opcode::WriteFixed::new(fd, addr, len, chunk).offset(at).rw_flags(flags).build()
                }
                (Some(slot), None) => {
                    opcode::Write::new(slot, addr, len).offset(at).rw_flags(flags).build()
                }
                (None, None) => {
                    opcode::Write::new(fd, addr, len).offset(at).rw_flags(flags).build()
                }
            }
        }
        Step::Zeros { at, len } => {
            let addr = std::ptr::with_exposed_provenance(memory.zeros.addr());
            opcode::Write::new(fd, addr, len.min(ZEROS_BYTES)).offset(at).build()
        }
        Step::Space { how, at, len } => {
            let mode = match how {
                Space::Punch => libc::FALLOC_FL_PUNCH_HOLE,
                Space::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
            };
            let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(fd, len).offset(at).mode(mode).build()
        }
        Step::Sync => {
            opcode::Fsync::new(Fd(attachment.sync_fd?)).flags(FsyncFlags::DATASYNC).build()
        }
    })
}
