//! Worker threads: each executes one kind of job, one after another, until it is stopped.
//! Operations that may hang are tasks of the blocking pool.

use std::io;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A named thread. If dropped, it is detached.
#[derive(Debug)]
pub(crate) struct WorkerThread {
    /// Receives the end of the thread; a `Mutex` makes the type `Sync`.
    ended: Mutex<Receiver<()>>,
}

impl WorkerThread {
    /// Starts a thread. The kernel shows fifteen bytes of its name: `worker-`, and eight of `name`.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn start(
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> io::Result<WorkerThread> {
        let (ends, ended) = sync_channel(1);
        let thread = std::thread::Builder::new().name(format!("worker-{name}"));
        thread.spawn(move || {
            work();
            let _ = ends.send(());
        })?;
        Ok(WorkerThread { ended: Mutex::new(ended) })
    }

    /// Waits for its end until the deadline at most; a thread that hangs is abandoned.
    pub(crate) fn join_by(self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let ended = self.ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use crate::worker_thread::*;

    #[test]
    fn a_join_waits_for_the_thread_at_most_until_the_deadline() {
        let (stop, stopped) = channel::<()>();
        let (say, said) = channel();
        let hangs = WorkerThread::start("test", move || {
            let _ = stopped.recv();
            say.send(std::thread::current().name().map(str::to_owned)).unwrap();
        });
        hangs.unwrap().join_by(Instant::now());
        drop(stop);
        assert_eq!(said.recv().unwrap().as_deref(), Some("worker-test"));
        let (say, said) = channel();
        let ends = WorkerThread::start("test", move || say.send(()).unwrap());
        ends.unwrap().join_by(Instant::now() + Duration::from_secs(600));
        assert_eq!(said.try_recv(), Ok(()), "it has done its work");
    }
}
