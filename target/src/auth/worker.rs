//! The thread that does the arithmetic of authentication, and the line before it. It starts with
//! the first job, and ends with the target.
//!
//! The line has no end of its own: a queue has one job at most, and takes it back when it closes.
//! The sources of hosts take turns, so that nobody waits behind all the proofs of another one.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use rdma::Source;
use tracing::warn;

use super::{Job, Worked};
use crate::mailbox::{Mail, Sender};
use crate::turns::Turns;

/// A job of a queue, and who wants to know.
#[derive(Debug)]
pub struct Task {
    /// The job.
    pub job: Job,
    /// Where its host is.
    pub source: Source,
    /// The reactor of the queue.
    pub to: Sender,
    /// The queue.
    pub key: u32,
    /// No other task ever had this number.
    pub ticket: u64,
}

/// The way to the thread.
#[derive(Debug, Default)]
pub struct Worker {
    line: Arc<Line>,
    has_thread: OnceLock<bool>,
}

/// Tasks that wait.
#[derive(Debug, Default)]
struct Line {
    waiting: Mutex<Waiting>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    tasks: Turns<Task>,
    /// The target ends.
    over: bool,
}

impl Worker {
    /// Hands a task over; false when there is no thread to be had.
    #[must_use]
    pub fn give(&self, task: Task) -> bool {
        let has_thread = *self.has_thread.get_or_init(|| start(&self.line));
        if has_thread {
            self.line.lock().tasks.push(task.source, task);
            self.line.bell.notify_one();
        }
        has_thread
    }

    /// Takes a task back; false when it has begun, or is done.
    pub fn take_back(&self, ticket: u64) -> bool {
        let mut waiting = self.line.lock();
        waiting.tasks.remove(|task| task.ticket == ticket).is_some()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.line.lock().over = true;
        self.line.bell.notify_one();
    }
}

impl Line {
    /// The next task, when there is one; none at the end of the target.
    fn next(&self) -> Option<Task> {
        let idle = |waiting: &mut Waiting| waiting.tasks.is_empty() && !waiting.over;
        let waiting = self.bell.wait_while(self.lock(), idle);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        if waiting.over { None } else { waiting.tasks.pop() }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether there is a thread now.
fn start(line: &Arc<Line>) -> bool {
    let line = Arc::clone(line);
    let thread = std::thread::Builder::new().name("authentication".to_owned());
    let started = thread.spawn(move || work(&line));
    if let Err(error) = &started {
        warn!(%error, "no thread for authentication: hosts that need one are refused");
    }
    started.is_ok()
}

fn work(line: &Line) {
    while let Some(Task { job, to, key, ticket, .. }) = line.next() {
        let worked: Worked = job.run();
        // A reactor that has ended wants nothing any more.
        let _ = to.send(Mail::Authenticated { key, ticket, worked });
    }
}
