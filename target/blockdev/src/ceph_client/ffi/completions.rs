//! Completions on their way from the threads of librbd to one reactor, without a lock.
//!
//! A cell for each slot of the reactor's ring. A thread of librbd writes the result into the cell
//! and pushes it to a list; the reactor takes the whole list. So there is no ABA problem, no
//! allocation and no waiting. The reactor is woken, through an eventfd, only while it sleeps.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering, fence};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{Api, Handle, check};

/// End of the list.
const END: u32 = u32::MAX;

struct Cell {
    /// The slot whose completion is after this one in the list.
    next: AtomicU32,
    /// Result of the operation when librbd reports 0: the bytes of a write.
    moved: AtomicI32,
    result: AtomicI32,
    slot: u32,
    /// The queue, counted, while an operation is pending.
    queue: AtomicPtr<CompletionQueue>,
}

/// Completed operations of one reactor.
pub(crate) struct CompletionQueue {
    api: &'static Api,
    head: AtomicU32,
    is_asleep: AtomicBool,
    event: EventFd,
    cells: Box<[Cell]>,
}

impl std::fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompletionQueue").field("slots", &self.cells.len()).finish_non_exhaustive()
    }
}

impl CompletionQueue {
    /// For a ring with this number of slots.
    ///
    /// # Errors
    /// librbd is missing, or no more descriptors are available.
    pub(crate) fn new(slots: u32) -> io::Result<Arc<CompletionQueue>> {
        let api = Api::get().map_err(io::Error::other)?;
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let cell = |slot| Cell {
            next: AtomicU32::new(END),
            moved: AtomicI32::new(0),
            result: AtomicI32::new(0),
            slot,
            queue: AtomicPtr::new(null_mut()),
        };
        Ok(Arc::new(CompletionQueue {
            api,
            head: AtomicU32::new(END),
            is_asleep: AtomicBool::new(false),
            event: EventFd::from_value_and_flags(0, flags)?,
            cells: (0..slots).map(cell).collect(),
        }))
    }

    /// A completion of librbd for the operation in a slot, which moves `moved` bytes if it is a
    /// write. None: there is no memory, and the operation has failed.
    pub(super) fn begin(self: &Arc<Self>, slot: u32, moved: i32) -> Option<Handle> {
        let cell = self.cells.get(slot as usize)?;
        cell.moved.store(moved, Ordering::Relaxed);
        cell.queue.store(Arc::into_raw(Arc::clone(self)).cast_mut(), Ordering::Relaxed);
        let mut completion = null_mut();
        let arg = (&raw const *cell).cast_mut().cast();
        // SAFETY: the cell stays where it is while its queue is counted, which is until `completed`.
        let code = unsafe {
            (self.api.rbd_aio_create_completion)(arg, Some(completed), &raw mut completion)
        };
        if check(code).is_err() {
            drop(cell.take_queue());
            self.push(cell, -libc::ENOMEM);
            return None;
        }
        Some(completion)
    }

    /// The operation of a completion was refused: no callback comes.
    pub(super) fn refuse(&self, slot: u32, completion: Handle, code: i32) {
        // SAFETY: librbd did not take the completion.
        unsafe { (self.api.rbd_aio_release)(completion) };
        if let Some(cell) = self.cells.get(slot as usize) {
            drop(cell.take_queue());
            self.push(cell, code);
        }
    }

    /// The operation in a slot is not started: it completes with this errno.
    pub(crate) fn fail(&self, slot: u32, errno: i32) {
        if let Some(cell) = self.cells.get(slot as usize) {
            self.push(cell, -errno);
        }
    }

    /// Stores the result of an operation, and wakes the reactor if it sleeps.
    fn push(&self, cell: &Cell, result: i32) {
        cell.result.store(result, Ordering::Relaxed);
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            cell.next.store(head, Ordering::Relaxed);
            let (success, failure) = (Ordering::Release, Ordering::Relaxed);
            match self.head.compare_exchange_weak(head, cell.slot, success, failure) {
                // From here the reactor may use the cell for its next operation.
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        // With that of `begin_sleep`: a reactor that goes to sleep sees the completion or is woken.
        fence(Ordering::SeqCst);
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            // The counter cannot overflow: each sleep adds one at most.
            let _ = self.event.write(1);
        }
    }

    /// Takes all completed operations: slot, and result as of the kernel.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, i32)) {
        if self.head.load(Ordering::Relaxed) == END {
            return;
        }
        let mut slot = self.head.swap(END, Ordering::Acquire);
        while let Some(cell) = self.cells.get(slot as usize) {
            let next = cell.next.load(Ordering::Relaxed);
            each(slot, cell.result.load(Ordering::Relaxed));
            slot = next;
        }
    }

    /// The reactor is about to sleep until the descriptor is readable; returns false if it may not,
    /// because there are completions.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.is_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.head.load(Ordering::Relaxed) == END
    }

    /// The reactor is awake.
    pub(crate) fn end_sleep(&self) {
        self.is_asleep.store(false, Ordering::Relaxed);
    }

    /// Resets the descriptor, which was readable.
    pub(crate) fn reset(&self) {
        let _ = self.event.read();
    }

    /// The descriptor that becomes readable.
    pub(crate) fn fd(&self) -> RawFd {
        self.event.as_fd().as_raw_fd()
    }
}

impl Cell {
    /// The count of its queue that the pending operation holds.
    fn take_queue(&self) -> Option<Arc<CompletionQueue>> {
        let queue = self.queue.swap(null_mut(), Ordering::Relaxed);
        // SAFETY: `begin` made it of an Arc, and the swap gives it out once.
        (!queue.is_null()).then(|| unsafe { Arc::from_raw(queue.cast_const()) })
    }
}

/// Called by a thread of librbd when an operation has completed: its memory is not used any more.
unsafe extern "C" fn completed(completion: Handle, arg: *mut c_void) {
    // SAFETY: `arg` is the cell that `begin` passed; its queue is counted, and with it the cell.
    let cell = unsafe { &*arg.cast::<Cell>().cast_const() };
    let Some(queue) = cell.take_queue() else { return };
    // SAFETY: the operation is complete; librbd has a reference of its own during the callback.
    let answer = unsafe {
        let answer = (queue.api.rbd_aio_get_return_value)(completion);
        (queue.api.rbd_aio_release)(completion);
        answer
    };
    let answer = i32::try_from(answer).unwrap_or(-libc::EIO);
    let result = if answer == 0 { cell.moved.load(Ordering::Relaxed) } else { answer };
    queue.push(cell, result);
}
