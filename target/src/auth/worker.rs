//! The thread that does the arithmetic of authentication. It starts with the first job, and ends
//! with the target.

use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use tracing::warn;

use super::{Job, Worked};
use crate::mailbox::{Mail, Sender};

/// Jobs that may wait. A queue has at most one, each takes some tens of milliseconds at most.
const CAPACITY: usize = 64;

/// A job of a queue, and who wants to know.
#[derive(Debug)]
pub struct Task {
    /// The job.
    pub job: Job,
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
    tasks: OnceLock<Option<SyncSender<Box<Task>>>>,
}

impl Worker {
    /// Hands a task over; never waits.
    ///
    /// # Errors
    /// The task, when there is no room just now, or no thread to be had.
    pub fn give(&self, task: Box<Task>) -> Result<(), Box<Task>> {
        match self.tasks.get_or_init(start) {
            None => Err(task),
            Some(tasks) => tasks.try_send(task).map_err(|error| match error {
                TrySendError::Full(task) | TrySendError::Disconnected(task) => task,
            }),
        }
    }
}

fn start() -> Option<SyncSender<Box<Task>>> {
    let (tasks, inbox) = sync_channel(CAPACITY);
    let thread = std::thread::Builder::new().name("authentication".to_owned());
    match thread.spawn(move || work(&inbox)) {
        Ok(_) => Some(tasks),
        Err(error) => {
            warn!(%error, "no thread for authentication: hosts that need one are refused");
            None
        }
    }
}

fn work(inbox: &Receiver<Box<Task>>) {
    while let Ok(task) = inbox.recv() {
        let Task { job, to, key, ticket } = *task;
        let worked: Worked = job.run();
        // A reactor that has ended wants nothing any more.
        let _ = to.send(Mail::Authenticated { key, ticket, worked });
    }
}
