//! Notifications about an object.

use std::ffi::{CString, c_int, c_void};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::{Pool, c, check};

/// OSDs end a watch that was not confirmed for as long.
const WATCH_TIMEOUT_SECONDS: u32 = 10;

/// What the callbacks of a watch use.
struct Target {
    pool: Pool,
    object: CString,
    event: EventFd,
    is_lost: AtomicBool,
}

/// A watch on an object, until it is dropped, which blocks like a write.
pub(crate) struct Watch {
    /// Counted once more for the callbacks.
    target: Arc<Target>,
    cookie: u64,
}

impl Watch {
    /// Watches an object. Blocks as long as its OSD does not answer.
    ///
    /// # Errors
    /// ENOENT: there is no such object; else the errno.
    pub(crate) fn new(pool: Pool, object: &str) -> Result<Watch, Errno> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_value_and_flags(0, flags)?;
        let target = Target { pool, object: c(object)?, event, is_lost: AtomicBool::new(false) };
        let target = Arc::new(target);
        let (pool, mut cookie) = (&target.pool, 0);
        let arg = Arc::into_raw(Arc::clone(&target));
        // SAFETY: the argument is counted until the library has ended the watch.
        let outcome = check(unsafe {
            (pool.api().rados_watch3)(
                pool.raw,
                target.object.as_ptr(),
                &raw mut cookie,
                notified,
                Some(lost),
                WATCH_TIMEOUT_SECONDS,
                arg.cast_mut().cast(),
            )
        });
        match outcome {
            Ok(_) => Ok(Watch { target, cookie }),
            Err(errno) => {
                target.flush();
                // SAFETY: made above; there is no watch that could use it.
                drop(unsafe { Arc::from_raw(arg) });
                Err(errno)
            }
        }
    }

    /// Becomes readable after a notification, and when the watch is lost.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.target.event.as_fd()
    }

    /// Takes what has been notified: whether there was something.
    pub(crate) fn take(&self) -> bool {
        self.target.event.read().is_ok()
    }

    /// Time since an OSD has confirmed the watch.
    ///
    /// # Errors
    /// The watch is lost: ENOTCONN, or the errno.
    pub(crate) fn age(&self) -> Result<Duration, Errno> {
        if self.target.is_lost.load(Ordering::Relaxed) {
            return Err(Errno::ENOTCONN);
        }
        let pool = &self.target.pool;
        // SAFETY: the cookie names a watch until the drop.
        let ms = check(unsafe { (pool.api().rados_watch_check)(pool.raw, self.cookie) })?;
        Ok(Duration::from_millis(u64::from(ms.unsigned_abs())))
    }
}

impl Target {
    /// Waits for callbacks that run.
    fn flush(&self) {
        // SAFETY: the client is live.
        unsafe { (self.pool.api().rados_watch_flush)(self.pool.client.raw) };
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let pool = &self.target.pool;
        // SAFETY: the cookie is used for the last time. Even if the OSD does not answer, no callback
        // begins after it, and none runs after the flush: the argument, whose address is that of the
        // counted target, is not used any more.
        unsafe {
            (pool.api().rados_unwatch2)(pool.raw, self.cookie);
            self.target.flush();
            drop(Arc::from_raw(Arc::as_ptr(&self.target)));
        }
    }
}

impl Pool {
    /// Notifies all watchers of an object, and waits until they have acknowledged it, or for
    /// `timeout`. Blocks as long as its OSD does not answer.
    ///
    /// # Errors
    /// ETIMEDOUT: some did not acknowledge it; else the errno.
    pub(crate) fn notify(&self, object: &str, timeout: Duration) -> Result<(), Errno> {
        let object = c(object)?;
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the handle is live; there are no data, and nothing is returned but the code.
        let code = unsafe {
            (self.api().rados_notify2)(
                self.raw,
                object.as_ptr(),
                null(),
                0,
                timeout_ms,
                null_mut(),
                null_mut(),
            )
        };
        check(code).map(drop)
    }
}

/// Called by a thread of librados, which must not block.
unsafe extern "C" fn notified(
    arg: *mut c_void,
    notification: u64,
    cookie: u64,
    _from: u64,
    _data: *mut c_void,
    _length: usize,
) {
    // SAFETY: the target that `Watch::new` passed, which is counted.
    let target = unsafe { &*arg.cast::<Target>().cast_const() };
    let _ = target.event.write(1);
    // SAFETY: the names are those of this notification; it is sent without waiting.
    unsafe {
        (target.pool.api().rados_notify_ack)(
            target.pool.raw,
            target.object.as_ptr(),
            notification,
            cookie,
            null(),
            0,
        )
    };
}

/// Called by a thread of librados, which must not block.
unsafe extern "C" fn lost(arg: *mut c_void, _cookie: u64, _error: c_int) {
    // SAFETY: as in `notified`.
    let target = unsafe { &*arg.cast::<Target>().cast_const() };
    target.is_lost.store(true, Ordering::Relaxed);
    let _ = target.event.write(1);
}
