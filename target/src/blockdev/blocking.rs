//! What may wait for a disk or a server for ever: done on threads of their own, and awaited no longer
//! than a person would. There is one such thread a path that hangs, whoever asks for it, and
//! [`MOST_AT_WORK`] for all that has not been given up: the others wait for their turn.

use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Threads that are at work for somebody who still waits.
const MOST_AT_WORK: usize = 32;

/// What is to be done, what is done, and what hangs.
#[derive(Debug, Default)]
pub(crate) struct BlockingPool {
    book: Arc<Mutex<Book>>,
    /// Whatever is done waits for as many others as this says.
    #[cfg(test)]
    pub(crate) meet: Mutex<Option<Arc<std::sync::Barrier>>>,
}

#[derive(Debug, Default)]
struct Book {
    /// In order; none of them is begun.
    queue: VecDeque<Job>,
    /// By number of their job, those that somebody waits for.
    at_work: BTreeSet<u64>,
    /// Those that did not come back in time, by number, and at what they hang.
    hanging: Vec<(u64, PathBuf)>,
    next: u64,
}

struct Job {
    number: u64,
    act: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "job {}", self.number)
    }
}

/// Something that was begun and is to be awaited with [`BlockingTask::by`], also when its outcome does not
/// matter any more: what it opens would stay open a moment longer than anybody expects.
#[must_use]
pub(crate) struct BlockingTask<'a, T> {
    opening: &'a BlockingPool,
    path: PathBuf,
    state: State<T>,
}

enum State<T> {
    Over(Result<T, String>),
    UnderWay(Receiver<Result<T, String>>, u64),
}

impl BlockingPool {
    /// Does what may wait for the disk behind a path, unless something hangs there already.
    ///
    /// # Errors
    /// What `act` says, or that it does not answer.
    #[cfg(test)]
    pub(crate) fn within<T: Send + 'static>(
        &self,
        patience: std::time::Duration,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        self.begin(path, act).by(Instant::now() + patience)
    }

    /// The same, without waiting for it yet: paths of one server hang together, and so they cost no
    /// more time than one.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> BlockingTask<'_, T> {
        let begun = |state| BlockingTask { opening: self, path: path.to_owned(), state };
        if self.hangs_at(path) {
            return begun(State::Over(Err(silent(path))));
        }
        let (say, said) = sync_channel(1);
        #[cfg(test)]
        let meet = self.meet.lock().unwrap().clone();
        let act = Box::new(move || {
            #[cfg(test)]
            if let Some(meet) = meet {
                meet.wait();
            }
            // Nobody may be listening any more: then what was opened is closed again.
            let _ = say.send(act());
        });
        let mut book = lock(&self.book);
        let number = book.next;
        book.next += 1;
        book.queue.push_back(Job { number, act });
        drop(book);
        begun(match hire(&self.book) {
            Ok(()) => State::UnderWay(said, number),
            Err(error) => {
                lock(&self.book).queue.retain(|job| job.number != number);
                State::Over(Err(format!("no thread to open it: {error}")))
            }
        })
    }

    /// Whether something hangs at a path.
    pub(crate) fn hangs_at(&self, path: &Path) -> bool {
        lock(&self.book).hanging.iter().any(|(_, at)| at == path)
    }

    /// What is known at once, where others have to be awaited.
    pub(crate) fn over<T>(&self, path: &Path, outcome: Result<T, String>) -> BlockingTask<'_, T> {
        BlockingTask { opening: self, path: path.to_owned(), state: State::Over(outcome) }
    }
}

impl<T> BlockingTask<'_, T> {
    /// Its outcome, if there is one by then.
    ///
    /// # Errors
    /// What it says, or that it does not answer.
    pub(crate) fn by(self, deadline: Instant) -> Result<T, String> {
        let (said, number) = match self.state {
            State::Over(outcome) => return outcome,
            State::UnderWay(said, number) => (said, number),
        };
        let patience = deadline.saturating_duration_since(Instant::now());
        said.recv_timeout(patience).unwrap_or_else(|error| {
            let mut book = lock(&self.opening.book);
            // Otherwise it has ended without an answer.
            let hangs = error == RecvTimeoutError::Timeout;
            if book.at_work.remove(&number) && hangs {
                book.hanging.push((number, self.path.clone()));
            }
            // What was not begun never is.
            book.queue.retain(|job| job.number != number);
            drop(book);
            // Whoever waits behind it need not.
            let _ = hire(&self.opening.book);
            Err(silent(&self.path))
        })
    }
}

/// Has one more thread at work, if there may be one and something is to be done.
fn hire(book: &Arc<Mutex<Book>>) -> std::io::Result<()> {
    let mut locked = lock(book);
    if locked.at_work.len() >= MOST_AT_WORK {
        return Ok(());
    }
    let Some(job) = locked.queue.pop_front() else { return Ok(()) };
    locked.at_work.insert(job.number);
    drop(locked);
    let (own, number) = (Arc::clone(book), job.number);
    let spawned = std::thread::Builder::new().name("opening".to_owned()).spawn(move || {
        let mut next = Some(job);
        while let Some(Job { number, act }) = next {
            act();
            next = following(&own, number);
        }
    });
    spawned.map(drop).inspect_err(|_| {
        lock(book).at_work.remove(&number);
    })
}

/// A job is done: the next one for the same thread, unless it was given up meanwhile.
fn following(book: &Mutex<Book>, done: u64) -> Option<Job> {
    let mut book = lock(book);
    book.hanging.retain(|(number, _)| *number != done);
    if !book.at_work.remove(&done) {
        return None;
    }
    let next = book.queue.pop_front()?;
    book.at_work.insert(next.number);
    Some(next)
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

fn silent(path: &Path) -> String {
    format!("{} does not answer: check the disk or server that it is on", path.display())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use crate::blockdev::blocking::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn what_hangs_is_not_tried_again_before_it_has_come_back() {
        let (opening, path) = (BlockingPool::default(), Path::new("/disk"));
        let (go_on, hangs) = channel::<()>();
        let (begins, begun) = channel();
        let hang = move || {
            begins.send(()).unwrap();
            hangs.recv().map_err(|_| "too late".to_owned())
        };
        let first = opening.begin(path, hang);
        begun.recv().unwrap();
        let said = first.by(Instant::now()).unwrap_err();
        assert!(said.contains("/disk does not answer"), "{said}");
        for _ in 0..3 {
            let again = opening.within(LONG, path, || Err::<(), _>("tried again".to_owned()));
            assert_eq!(again, Err(said.clone()));
        }
        assert_eq!(lock(&opening.book).hanging.len(), 1, "one thread, whoever asks");
        assert_eq!(opening.within(LONG, Path::new("/other"), || Ok(5)), Ok(5));
        drop(go_on);
        while opening.hangs_at(path) {
            std::thread::yield_now();
        }
        assert_eq!(opening.within(LONG, path, || Ok(6)), Ok(6));
        assert_eq!(opening.within(LONG, path, || Ok(7)), Ok(7));
    }

    /// A start with a thousand namespaces looks at a thousand paths.
    #[test]
    fn so_many_threads_are_at_work_and_who_is_given_up_keeps_nobody_from_it() {
        let opening = BlockingPool::default();
        let (go_on, hangs) = channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let (begins, begun) = channel();
        let begin = |at: usize| {
            let (hangs, begins) = (Arc::clone(&hangs), begins.clone());
            opening.begin(Path::new(&format!("/hangs/{at}")), move || {
                begins.send(at).unwrap();
                // The first one has the lock, and the others wait for that.
                hangs.lock().unwrap().recv().map_err(|_| "too late".to_owned())
            })
        };
        let mut all: Vec<_> = (0..MOST_AT_WORK + 5).map(begin).collect();
        let mut first: Vec<usize> = (0..MOST_AT_WORK).map(|_| begun.recv().unwrap()).collect();
        first.sort_unstable();
        assert!(first.iter().copied().eq(0..MOST_AT_WORK), "{first:?}");
        {
            let book = lock(&opening.book);
            assert_eq!((book.at_work.len(), book.queue.len()), (MOST_AT_WORK, 5));
        }
        // One is given up: one more begins. One that was never begun hangs nowhere.
        assert!(all.remove(0).by(Instant::now()).is_err());
        assert_eq!(begun.recv().unwrap(), MOST_AT_WORK);
        assert!(all.pop().unwrap().by(Instant::now()).is_err());
        assert!(!opening.hangs_at(Path::new(&format!("/hangs/{}", MOST_AT_WORK + 4))));
        let good = opening.begin(Path::new("/good"), || Ok(1));
        drop(go_on);
        assert_eq!(good.by(Instant::now() + LONG), Ok(1));
        for each in all {
            assert_eq!(each.by(Instant::now() + LONG), Err("too late".to_owned()));
        }
        while !lock(&opening.book).hanging.is_empty() {
            std::thread::yield_now();
        }
    }
}
