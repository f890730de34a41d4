//! The thread that does the arithmetic of authentication, and the line before it. It starts with
//! the first job, and ends with the target.
//!
//! The line has no end of its own: a queue has one job at most, and takes it back when it closes.
//! The sources of hosts take turns, so that nobody waits behind all the proofs of another one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use rdma::Source;
use tracing::warn;

use super::{Job, Worked};
use crate::mailbox::{Mail, Sender};

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

/// What waits, of each source in the order in which it came; the sources take turns.
#[derive(Debug)]
struct Turns<T> {
    waiting: BTreeMap<Source, VecDeque<T>>,
    /// Each source of which something waits, once.
    next: VecDeque<Source>,
}

impl<T> Default for Turns<T> {
    fn default() -> Turns<T> {
        Turns { waiting: BTreeMap::new(), next: VecDeque::new() }
    }
}

impl<T> Turns<T> {
    fn is_empty(&self) -> bool {
        self.next.is_empty()
    }

    fn push(&mut self, source: Source, item: T) {
        let of_source = self.waiting.entry(source).or_default();
        if of_source.is_empty() {
            self.next.push_back(source);
        }
        of_source.push_back(item);
    }

    fn pop(&mut self) -> Option<T> {
        let source = self.next.pop_front()?;
        let of_source = self.waiting.get_mut(&source)?;
        let item = of_source.pop_front();
        match of_source.is_empty() {
            true => drop(self.waiting.remove(&source)),
            false => self.next.push_back(source),
        }
        item
    }

    /// Takes out the one of which this is true.
    fn remove(&mut self, is_it: impl Fn(&T) -> bool) -> Option<T> {
        let find = |items: &VecDeque<T>| items.iter().position(&is_it);
        let mut all = self.waiting.iter_mut();
        let (source, at) = all.find_map(|(source, items)| Some((*source, find(items)?)))?;
        let of_source = self.waiting.get_mut(&source)?;
        let item = of_source.remove(at);
        if of_source.is_empty() {
            self.waiting.remove(&source);
            self.next.retain(|next| *next != source);
        }
        item
    }
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(last: u8) -> Source {
        Source::V4(Ipv4Addr::new(192, 0, 2, last))
    }

    #[test]
    fn one_proof_of_each_source_is_computed_in_turn() {
        let mut turns = Turns::default();
        (0..100).for_each(|n| turns.push(source(1), n));
        assert_eq!(turns.pop(), Some(0));
        turns.push(source(2), 200);
        turns.push(source(3), 300);
        turns.push(source(2), 201);
        let order: Vec<_> = (0..6).filter_map(|_| turns.pop()).collect();
        assert_eq!(order, [1, 200, 300, 2, 201, 3]);
        assert_eq!(std::iter::from_fn(|| turns.pop()).count(), 96);
        assert!(turns.is_empty() && turns.waiting.is_empty());
    }

    #[test]
    fn what_is_taken_back_has_no_turn() {
        let mut turns = Turns::default();
        [(1, 10), (2, 20), (1, 11)].iter().for_each(|(last, n)| turns.push(source(*last), *n));
        assert_eq!((turns.remove(|n| *n == 20), turns.remove(|n| *n == 20)), (Some(20), None));
        assert_eq!(turns.remove(|n| *n == 10), Some(10));
        assert_eq!((turns.pop(), turns.pop()), (Some(11), None));
        assert!(turns.is_empty() && turns.waiting.is_empty());
    }
}
