//! `Threads`: executes the steps of a ring where io_uring is denied, as container engines do by their
//! seccomp profile.
//!
//! It is handed the same steps and returns the same results as the kernel, so everything above it
//! is that of io_uring: order, fsync, cancellation, retries, quotas. An operation costs two changes
//! of threads more. Polls of descriptors and timeouts are done by the thread of the ring.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::PAUSE;
use super::calls::ready;
use super::poll_fd::PollRequest;
use crate::blocking::BlockingPool;
use crate::lock;

/// Maximum of threads of one ring.
const THREADS_MAX: usize = 64;
/// Maximum of operations of a store at threads: when it is alone, and when there are others. As for
/// io_uring, a store that hangs leaves threads to others.
pub(crate) const SHARES: [u32; 2] = [52, 12];

/// The threads of one ring, and what they have completed.
pub(crate) struct Threads {
    pool: BlockingPool,
    results: Arc<Results>,
    /// Operations that threads have, by slot: the numbers of their tasks.
    tasks: HashMap<u32, u64>,
    /// Armed polls, by their user data.
    polls: Vec<(u64, RawFd)>,
    /// Slots whose timeout has not expired.
    pauses: Vec<(Instant, u32)>,
    /// Completed without a thread: user data and result.
    completed: Vec<(u64, i32)>,
}

/// Results of threads, by slot, and the event that ends a sleep.
struct Results {
    list: Mutex<Vec<(u32, i32)>>,
    event: EventFd,
}

impl Threads {
    /// # Errors
    /// The limit of open files is reached.
    pub(crate) fn new() -> io::Result<Threads> {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(Threads {
            pool: BlockingPool::bounded(THREADS_MAX, THREADS_MAX),
            results: Arc::new(Results { list: Mutex::default(), event }),
            tasks: HashMap::new(),
            polls: Vec::new(),
            pauses: Vec::new(),
            completed: Vec::new(),
        })
    }

    /// Hands the operation in `slot` to a thread. `call` returns the result as the kernel does: a
    /// number of bytes, or a negative errno.
    pub(crate) fn start(&mut self, slot: u32, call: impl FnOnce() -> i32 + Send + 'static) {
        let results = Arc::clone(&self.results);
        match self.pool.queue(move || results.push(slot, call())) {
            Ok(number) => drop(self.tasks.insert(slot, number)),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
                self.completed.push((slot.into(), -errno));
            }
        }
    }

    /// Completes `slot` after a timeout.
    pub(crate) fn pause(&mut self, slot: u32) {
        self.pauses.push((Instant::now() + PAUSE, slot));
    }

    /// Cancels the operation in `slot`, if no thread has begun it. The result is reported as
    /// `user_data`, as by the kernel.
    pub(crate) fn cancel(&mut self, slot: u32, user_data: u64) {
        let paused = self.pauses.iter().position(|(_, other)| *other == slot);
        let is_cancelled = match paused {
            Some(at) => self.pauses.swap_remove(at).1 == slot,
            None => {
                let is_withdrawn = |number: &u64| self.pool.withdraw(*number);
                self.tasks.get(&slot).is_some_and(is_withdrawn)
            }
        };
        if is_cancelled {
            self.tasks.remove(&slot);
            self.completed.push((slot.into(), -libc::ECANCELED));
        }
        let answer = if is_cancelled { 0 } else { -libc::EALREADY };
        self.completed.push((user_data, answer));
    }

    /// Arms or cancels the poll of a descriptor.
    pub(crate) fn poll(&mut self, user_data: u64, request: PollRequest) {
        match request {
            PollRequest::Arm(fd) => self.polls.push((user_data, fd)),
            PollRequest::Cancel => {
                self.polls.retain(|(other, _)| *other != user_data);
                self.completed.push((user_data, -libc::ECANCELED));
            }
        }
    }

    /// Waits until something has completed, or for `patience`. Does not wait if something has
    /// already.
    pub(crate) fn wait(&mut self, patience: Option<Duration>) {
        let until_pause = |now| {
            let first = self.pauses.iter().map(|(until, _)| *until).min();
            first.map(|until| until.saturating_duration_since(now))
        };
        let patience = match self.completed.is_empty() {
            true => patience.into_iter().chain(until_pause(Instant::now())).min(),
            false => Some(Duration::ZERO),
        };
        let event = (u64::MAX, self.results.event.as_fd().as_raw_fd());
        let mut fds: Vec<libc::pollfd> = std::iter::once(&event)
            .chain(&self.polls)
            .map(|(_, fd)| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 })
            .collect();
        if !ready(&mut fds, patience) {
            return;
        }
        if fds[0].revents != 0 {
            let _ = self.results.event.read();
        }
        let mut revents = fds[1..].iter().map(|fd| fd.revents);
        let completed = &mut self.completed;
        self.polls.retain(|(user_data, _)| {
            let revents = revents.next().unwrap_or(0);
            if revents != 0 {
                completed.push((*user_data, revents.into()));
            }
            revents == 0
        });
    }

    /// Appends what has completed: user data and result.
    pub(crate) fn take(&mut self, completed: &mut Vec<(u64, i32)>) {
        completed.append(&mut self.completed);
        for (slot, answer) in self.results.lock().drain(..) {
            self.tasks.remove(&slot);
            completed.push((slot.into(), answer));
        }
        if self.pauses.is_empty() {
            return;
        }
        let now = Instant::now();
        let is_over = |(until, _): &mut (Instant, u32)| *until <= now;
        let over = self.pauses.extract_if(.., is_over);
        completed.extend(over.map(|(_, slot)| (slot.into(), -libc::ETIME)));
    }
}

impl Results {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(u32, i32)>> {
        lock(&self.list)
    }

    /// Called by a thread. The event is read before the list, so it is signalled for the first
    /// result only.
    fn push(&self, slot: u32, answer: i32) {
        let mut list = self.lock();
        list.push((slot, answer));
        if list.len() == 1 {
            let _ = self.event.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use crate::uring::threads::*;

    const CANCEL: u64 = 1 << 62;
    const WATCH: u64 = 1 << 63;

    impl Threads {
        /// Waits for this number of completions.
        fn collect(&mut self, count: usize) -> Vec<(u64, i32)> {
            let mut completed = Vec::new();
            while completed.len() < count {
                self.wait(None);
                self.take(&mut completed);
            }
            completed
        }
    }

    /// Only the threads themselves know whether they have begun with the memory of an operation.
    #[test]
    fn an_operation_is_cancelled_only_before_a_thread_has_begun_it() {
        let mut threads = Threads::new().unwrap();
        let (begin, begun) = channel();
        let release: Vec<_> = (0..THREADS_MAX as u32 + 1)
            .map(|slot| {
                let (go_on, hangs): (_, Receiver<()>) = channel();
                let begin = begin.clone();
                threads.start(slot, move || {
                    begin.send(slot).unwrap();
                    hangs.recv().map_or(100 + slot as i32, |()| 0)
                });
                go_on
            })
            .collect();
        assert_eq!(begun.iter().take(THREADS_MAX).max(), Some(THREADS_MAX as u32 - 1));
        let last = THREADS_MAX as u32;
        threads.cancel(3, CANCEL | 3);
        threads.cancel(last, CANCEL | 4);
        let cancelled = threads.collect(3);
        let expected =
            [(CANCEL | 3, -libc::EALREADY), (last.into(), -libc::ECANCELED), (CANCEL | 4, 0)];
        assert_eq!(cancelled, expected);
        drop(release);
        let mut completed = threads.collect(THREADS_MAX);
        completed.sort_unstable();
        let all = (0..last).map(|slot| (slot.into(), 100 + slot as i32));
        assert_eq!(completed, Vec::from_iter(all));
        threads.cancel(3, CANCEL | 5);
        assert_eq!(threads.collect(1), [(CANCEL | 5, -libc::EALREADY)], "it has completed");
    }

    #[test]
    fn polls_and_timeouts_complete_once_or_are_cancelled() {
        let mut threads = Threads::new().unwrap();
        let event = EventFd::from_value(1).unwrap();
        let quiet = EventFd::new().unwrap();
        threads.poll(WATCH, PollRequest::Arm(event.as_fd().as_raw_fd()));
        threads.poll(WATCH | 1, PollRequest::Arm(quiet.as_fd().as_raw_fd()));
        assert_eq!(threads.collect(1), [(WATCH, libc::POLLIN.into())]);
        threads.poll(WATCH | 1, PollRequest::Cancel);
        assert_eq!(threads.collect(1), [(WATCH | 1, -libc::ECANCELED)]);
        assert!(threads.polls.is_empty());
        threads.pause(7);
        threads.pause(8);
        threads.cancel(7, CANCEL);
        assert_eq!(threads.collect(2), [(7, -libc::ECANCELED), (CANCEL, 0)]);
        assert_eq!(threads.collect(1), [(8, -libc::ETIME)]);
        assert!(threads.pauses.is_empty());
    }
}
