//! File descriptors that the kernel polls for the ring, as a state machine without I/O.

use std::os::fd::RawFd;

/// Polled descriptors. There are few, so they are searched linearly.
#[derive(Debug, Default)]
pub(crate) struct PolledFds(Vec<Watch>);

#[derive(Debug)]
struct Watch {
    fd: RawFd,
    token: u32,
    state: PollState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PollState {
    /// The entry is free.
    Free,
    /// The poll has completed, or was never armed.
    Idle,
    /// To be armed with the next submission.
    Wanted,
    /// The kernel polls.
    Armed,
    /// To be cancelled with the next submission.
    Unwanted,
    /// Cancellation was submitted; the poll has not completed yet.
    Cancelled,
}

/// What to submit for a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PollRequest {
    /// Poll once for reading.
    Arm(RawFd),
    /// Cancel the poll.
    Cancel,
}

impl PolledFds {
    pub(crate) fn watch(&mut self, fd: RawFd, token: u32) {
        let known = self.0.iter_mut().find(|watch| {
            watch.fd == fd
                && watch.token == token
                && matches!(watch.state, PollState::Idle | PollState::Wanted | PollState::Armed)
        });
        if let Some(watch) = known {
            if watch.state == PollState::Idle {
                watch.state = PollState::Wanted;
            }
            return;
        }
        let watch = Watch { fd, token, state: PollState::Wanted };
        match self.0.iter_mut().find(|watch| watch.state == PollState::Free) {
            Some(free) => *free = watch,
            None => self.0.push(watch),
        }
    }

    pub(crate) fn unwatch_all(&mut self) {
        self.0.iter_mut().for_each(Watch::stop);
    }

    /// Whether the kernel polls none of them.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|watch| {
            matches!(watch.state, PollState::Free | PollState::Idle | PollState::Wanted)
        })
    }

    /// The next entry to submit; [`PolledFds::granted`] confirms that it was submitted.
    pub(crate) fn next_request(&self) -> Option<(usize, PollRequest)> {
        self.0.iter().enumerate().find_map(|(index, watch)| match watch.state {
            PollState::Wanted => Some((index, PollRequest::Arm(watch.fd))),
            PollState::Unwanted => Some((index, PollRequest::Cancel)),
            _ => None,
        })
    }

    pub(crate) fn granted(&mut self, index: usize) {
        if let Some(watch) = self.0.get_mut(index) {
            watch.state = match watch.state {
                PollState::Wanted => PollState::Armed,
                PollState::Unwanted => PollState::Cancelled,
                other => other,
            };
        }
    }

    /// Handles the completion of a poll. A failed poll is reported as well: the owner of the
    /// descriptor will meet the error.
    pub(crate) fn on_completion(&mut self, index: usize) -> Option<u32> {
        let watch = self.0.get_mut(index)?;
        match watch.state {
            PollState::Armed => {
                watch.state = PollState::Idle;
                Some(watch.token)
            }
            PollState::Unwanted | PollState::Cancelled => {
                watch.state = PollState::Free;
                None
            }
            PollState::Free | PollState::Idle | PollState::Wanted => None,
        }
    }
}

impl Watch {
    fn stop(&mut self) {
        self.state = match self.state {
            PollState::Free | PollState::Idle | PollState::Wanted => PollState::Free,
            PollState::Armed | PollState::Unwanted => PollState::Unwanted,
            PollState::Cancelled => PollState::Cancelled,
        };
    }
}
