//! SIGINT and SIGTERM as a descriptor to poll: long-running commands end early and in order.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::Error;

/// Receives SIGINT and SIGTERM of the thread that created it, while it exists. The second of them
/// ends the process at once, as without this.
#[derive(Debug)]
pub(crate) struct Stop {
    signals: SignalFd,
    set: SigSet,
    asked: bool,
}

impl Stop {
    /// Must be created before any thread.
    ///
    /// # Errors
    /// The system call failed, which it never should.
    pub(crate) fn new() -> Result<Stop, Error> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGINT);
        set.add(Signal::SIGTERM);
        let failed = |errno| Error::Local(format!("cannot wait for signals: {errno}"));
        set.thread_block().map_err(failed)?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let signals = SignalFd::with_flags(&set, flags).map_err(failed)?;
        Ok(Stop { signals, set, asked: false })
    }

    /// Returns the descriptor that is readable when a signal has arrived.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// Executes an operation that cannot be interrupted: meanwhile a signal ends the process at once.
    pub(crate) fn aside<T>(&self, act: impl FnOnce() -> T) -> T {
        let _ = self.set.thread_unblock();
        let result = act();
        if !self.asked {
            let _ = self.set.thread_block();
        }
        result
    }

    /// Waits for `limit`, or until a signal arrives. Returns whether there was one at any time.
    pub(crate) fn wait(&mut self, limit: Duration) -> bool {
        let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut fds, limit);
        if let Ok(Some(_)) = self.signals.read_signal() {
            self.asked = true;
            let _ = self.set.thread_unblock();
        }
        self.asked
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = self.set.thread_unblock();
    }
}
