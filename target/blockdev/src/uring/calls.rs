//! System calls on memory of the pool, made by the thread of the ring or for it.

use std::io;
use std::time::Duration;

use io_uring::IoUring;
use nvme::status::Status;
use rdma::{Buf, Region};

use super::sqe::{CHUNK_SHIFT, Call, CallOp, Memory, Place, call_for};
use crate::BackingDevice;
use crate::copy_locks::is_part_of_page;
use crate::request::{PendingIo, Step};

/// A page of zeros, to compare with.
const ZEROS: [u8; 4096] = [0; 4096];

/// Makes a buffer's window zeros. Pages that are zeros already, as after a read of a null namespace,
/// are compared and not written, which costs less. Who has had the buffer before does not matter.
pub(super) fn clear(memory: &Memory, buf: &Buf) {
    let Some(place) = memory.locate(buf, 0, buf.len()) else { return };
    // SAFETY: `locate` proved that the window lies in the mapping, which `memory` keeps; the
    // caller owns the Buf that alone may touch these bytes, and no kernel operation has it.
    let window = unsafe { std::slice::from_raw_parts_mut(place.addr, buf.len() as usize) };
    for part in window.chunks_mut(ZEROS.len()) {
        if *part != ZEROS[..part.len()] {
            part.fill(0);
        }
    }
}

/// Executes a read, a write or the deallocation of part of a page in memory in this thread, as far
/// as the limit of this round allows: the outcome, or none if the ring has to go on. (A file in
/// memory has no device to wait for, also not with FUA.)
///
/// The kernel does not execute io_uring transfers of tmpfs inline but passes each to a worker:
/// measured, less than half the rate on twice the processors.
pub(super) fn copy_now(
    flight: &mut PendingIo,
    backing: &BackingDevice,
    memory: &Memory,
    quota: &mut CopyQuota,
) -> Option<Result<(), Status>> {
    loop {
        let step = flight.step(backing);
        if !quota.allows(step) {
            return None;
        }
        let answer = copy_step(step, flight.buf(), backing, memory, quota)?;
        if let Some(outcome) = flight.advance(answer, backing) {
            return Some(outcome);
        }
    }
}

/// Executes the beginning of a step in memory, at most what has one lock and the limit of a round:
/// the kernel's result, or none for another operation.
pub(super) fn copy_step(
    mut step: Step,
    buf: Option<&Buf>,
    backing: &BackingDevice,
    memory: &Memory,
    quota: &mut CopyQuota,
) -> Option<i32> {
    let (fd, locks) = (backing.fd()?, backing.copy_locks()?);
    let is_write = !matches!(step, Step::Read { .. });
    let _guard;
    match &mut step {
        Step::Read { at, len, .. } | Step::Write { at, len, .. } => {
            (_guard, *len) = locks.lock(*at, (*len).min(CopyQuota::LIMIT_BYTES), is_write);
            quota.copied_bytes = quota.copied_bytes.saturating_add(*len);
        }
        Step::Space { at, len, .. } if is_part_of_page(*len) => {
            (_guard, _) = locks.lock(*at, 0, is_write);
        }
        _ => return None,
    }
    let call = call_for(step, buf, (fd, None), memory)?;
    // SAFETY: `locate` proved that the bytes lie in the mapping, which `memory` keeps; the flight
    // owns the Buf that alone may touch them, and the kernel is done with them on return.
    Some(unsafe { execute(&call) })
}

/// What is copied in memory before the next submission. A reactor that copied all that one host asks
/// for at once would keep others waiting: 1 MiB takes as long as 30 reads of 4 KiB.
#[derive(Debug, Default)]
pub(super) struct CopyQuota {
    copied_bytes: u32,
}

impl CopyQuota {
    /// Bytes after which the rest waits for the next round. Of 16, 32, 64 and 128 KiB the most with
    /// which large writes raise the 99 % latency of small reads to less than 3 times
    /// (`tests/bench/mixed`).
    const LIMIT_BYTES: u32 = 32 << 10;
    /// Most of a transfer that does not wait.
    const SMALL_BYTES: u32 = 16 << 10;

    /// Whether a step may be executed in this round.
    pub(super) fn allows(&self, step: Step) -> bool {
        let is_large = matches!(step, Step::Read { len, .. } | Step::Write { len, .. }
            if len > CopyQuota::SMALL_BYTES);
        self.copied_bytes < CopyQuota::LIMIT_BYTES || !is_large
    }
}

// SAFETY: its address is of memory that the operation alone may touch, by whichever thread.
unsafe impl Send for Call {}

/// Executes a call in this thread: what it returned, or the negative errno.
///
/// # Safety
/// The memory that the call names is mapped, and untouched by others, until it returns.
pub(super) unsafe fn execute(call: &Call) -> i32 {
    let Call { fd, op } = call;
    let vector = |place: &Place, len: &u32| libc::iovec {
        iov_base: place.addr.cast(),
        iov_len: *len as usize,
    };
    let signed = |offset: u64| libc::off_t::try_from(offset).unwrap_or(libc::off_t::MAX);
    // SAFETY: guaranteed by the caller; the kernel checks descriptors and ranges.
    let returned = unsafe {
        match op {
            CallOp::Read { into, len, at } => {
                libc::preadv2(*fd, &vector(into, len), 1, signed(*at), 0)
            }
            CallOp::Write { from, len, at, flags } => {
                libc::pwritev2(*fd, &vector(from, len), 1, signed(*at), *flags)
            }
            CallOp::Allocate { mode, at, len } => {
                libc::fallocate(*fd, *mode, signed(*at), signed(*len)) as isize
            }
            CallOp::Sync => libc::fdatasync(*fd) as isize,
        }
    };
    match i32::try_from(returned) {
        Ok(returned) if returned >= 0 => returned,
        Ok(_) => -nix::errno::Errno::last_raw(),
        Err(_) => i32::MAX,
    }
}

/// Waits until a descriptor is ready, or for `patience`; returns whether one is.
pub(super) fn ready(fds: &mut [libc::pollfd], patience: Option<Duration>) -> bool {
    let timeout = patience.map(|patience| libc::timespec {
        tv_sec: libc::time_t::try_from(patience.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: patience.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: `fds` has `count` elements; `timeout` is null or lives until the call returns.
    unsafe { libc::ppoll(fds.as_mut_ptr(), count, timeout, std::ptr::null()) > 0 }
}

/// Registers the region in pieces; false when the limit of locked memory forbids it.
pub(super) fn register_region(io: &IoUring, region: &Region) -> io::Result<bool> {
    let chunk = 1usize << CHUNK_SHIFT;
    let pieces: Vec<libc::iovec> = (0..region.len())
        .step_by(chunk)
        .map(|start| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(region.addr() + start),
            iov_len: chunk.min(region.len() - start),
        })
        .collect();
    // SAFETY: the pieces tile the region's mapping, which `Memory` keeps until the ring is closed;
    // bytes in it are touched only through Bufs, which move to whoever may write them.
    match unsafe { io.submitter().register_buffers(&pieces) } {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) => {
            tracing::warn!(
                "cannot register the pool of {} bytes with io_uring: {error}; device I/O is \
                 slightly slower until the limit of locked memory is raised (ulimit -l, \
                 systemd: LimitMEMLOCK=infinity)",
                region.len()
            );
            Ok(false)
        }
        Err(error) => Err(io::Error::new(
            error.kind(),
            format!("cannot register the pool with the ring: {error}; see the kernel log"),
        )),
    }
}
