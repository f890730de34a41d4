//! rdma-core behind safe handles: `types` has its structures, `load` its functions, `cm` connections,
//! `device` devices and memory, `async_event` what devices report of themselves, `queue_pair` queues,
//! `work_request` what is posted.
//!
//! # How the unsafe code is fenced
//!
//! * Types, constants and the inline functions that go through a context's table of operations are
//!   our own (`types`); every exported function is looked up by name in the two libraries when the
//!   first handle is made ([`Api`]). So a build needs no headers, and the binary has no link
//!   dependency on rdma-core and starts without it. A test compares layouts and values with the
//!   headers of C. With the feature `layout-test` they and each signature are compared with the
//!   package `rdma-sys`, which is made from the headers by libclang 14 or 15.
//! * One handle per object, with one constructor and one `Drop`. A handle holds its parents, so
//!   that the order of destruction is always queue pair, id, memory region, completion queue,
//!   completion channel, protection domain, device list, whatever order the owner drops them in.
//! * Work requests name memory only as (registered range, offset, length), checked here. The
//!   `Buf` behind it has been moved into the table of flights and comes out when the completion
//!   is there or the queue pair has been destroyed: nobody has a reference while a device writes.
//! * Numbers from outside (event types, completion codes, transports) are plain integers, never Rust
//!   enums, and every match on them has a default. The `ibv_*_ex` functions are not used.
//! * libibverbs and librdmacm lock internally, so handles may move between threads and be used
//!   from several. [`CmId::migrate`] alone changes what other calls read; it takes `&mut`.
#![expect(unsafe_code, reason = "calls into rdma-core")]

macro_rules! movable {
    ($($handle:ty),*) => {$(
        // SAFETY: an exclusive pointer to an object of a library that locks internally and ties
        // nothing to a thread.
        unsafe impl Send for $handle {}
        // SAFETY: as above; methods that take &self are safe to call at the same time.
        unsafe impl Sync for $handle {}
    )*};
}

mod async_event;
mod cm;
mod device;
mod load;
mod queue_pair;
mod types;
mod work_request;

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

pub(super) use async_event::{AsyncEvent, QueueKey};
pub(super) use cm::{CmEvent, CmId, CmKind, ConnectParam, EventChannel, IdKey, QueuePairSetup};
pub(super) use device::{Ability, Access, Context, DeviceKey, DeviceList, Mr, Pd};
pub(super) use load::Api;
pub(super) use queue_pair::{CompChannel, Cq, Depths, RcQueuePair, WorkCompletions};
pub(super) use work_request::{RecvChain, Refused, SendChain, Verb};

/// The errno of a call that returns -1 and sets `errno`, or returns an error number.
fn check(code: c_int) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        -1 => Err(Errno::last()),
        other => Err(Errno::from_raw(other.abs())),
    }
}

fn check_new<T>(raw: *mut T) -> Result<NonNull<T>, Errno> {
    NonNull::new(raw).ok_or_else(Errno::last)
}

fn borrow(fd: &RawFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor lies inside a live rdma-core object that closes it on destruction;
    // the borrow is tied to that object through the reference.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map(drop)
}

#[cfg(test)]
mod tests;
