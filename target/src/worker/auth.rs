//! The thread for the arithmetic of authentication, and its queue. It starts with the first job,
//! and ends with the target.
//!
//! The queue is bounded by the connections: a queue pair has at most one job, and cancels it when
//! it closes. Jobs are taken in turn from the sources of hosts, so that no host waits for all the
//! proofs of another.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::warn;

use crate::core::sched::fair_queue::FairQueue;
use crate::core::sched::offload::AuthJob;
use crate::worker_thread::WorkerThread;

/// Sender of jobs to the thread.
#[derive(Debug, Default)]
pub(super) struct AuthWorker {
    line: Arc<JobQueue>,
    has_thread: OnceLock<bool>,
}

/// Queued jobs.
#[derive(Debug, Default)]
struct JobQueue {
    waiting: Mutex<Waiting>,
    eventfd: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: FairQueue<AuthJob>,
    /// The target stops.
    over: bool,
}

impl AuthWorker {
    /// Queues a job; false if no thread could be started.
    pub(super) fn submit(&self, job: AuthJob) -> bool {
        let has_thread = *self.has_thread.get_or_init(|| start(&self.line));
        if has_thread {
            self.line.lock().jobs.push(job.source, job);
            self.line.eventfd.notify_one();
        }
        has_thread
    }

    /// Cancels a job; false if it has started.
    pub(super) fn cancel(&self, ticket: u64) -> bool {
        let mut waiting = self.line.lock();
        waiting.jobs.remove(|job| job.ticket == ticket).is_some()
    }
}

impl Drop for AuthWorker {
    fn drop(&mut self) {
        self.line.lock().over = true;
        self.line.eventfd.notify_one();
    }
}

impl JobQueue {
    /// Waits for the next job; `None` when the target stops.
    fn next(&self) -> Option<AuthJob> {
        let idle = |waiting: &mut Waiting| waiting.jobs.is_empty() && !waiting.over;
        let waiting = self.eventfd.wait_while(self.lock(), idle);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        if waiting.over { None } else { waiting.jobs.pop() }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the thread; false if that fails.
fn start(line: &Arc<JobQueue>) -> bool {
    let line = Arc::clone(line);
    let started = WorkerThread::start("auth", move || work(&line));
    if let Err(error) = &started {
        warn!(%error, "no thread for authentication: hosts that need one are refused");
    }
    started.is_ok()
}

fn work(line: &JobQueue) {
    while let Some(job) = line.next() {
        (job.run.0)();
    }
}
