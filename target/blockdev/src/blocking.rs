//! Bounded thread pool for calls that may block on a device or a server without limit.
//!
//! The caller of a task with a path ([`BlockingPool::begin`]) waits for it until a deadline. At
//! most one such task runs per path, so a path that does not answer occupies one thread, whatever
//! the number of callers. At most `RUNNING_MAX` tasks run whose callers still wait; further ones
//! are queued. Tasks without a caller that waits ([`BlockingPool::spawn`]) start immediately. All
//! tasks together use at most `THREADS_MAX` threads.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum of concurrent tasks with a path, not counting those that have timed out.
const RUNNING_MAX: usize = 32;
/// Maximum of threads, including those of tasks that have timed out.
const THREADS_MAX: usize = 1024;
/// Maximum of idle threads of a pool for tasks that are rare,
const IDLE_MAX: usize = 2;
/// and how long those of any pool stay.
const IDLE: Duration = Duration::from_secs(10);

/// The threads and the queued tasks.
#[derive(Debug)]
pub struct BlockingPool {
    shared: Arc<PoolShared>,
    /// Makes every task with a path wait at this barrier.
    #[cfg(any(test, feature = "testing"))]
    pub meet: Mutex<Option<Arc<std::sync::Barrier>>>,
}

#[derive(Debug)]
struct PoolShared {
    state: Mutex<PoolState>,
    wake: Condvar,
    threads_max: usize,
    idle_max: usize,
}

#[derive(Debug, Default)]
struct PoolState {
    /// Tasks that have not started, in order of arrival.
    queue: VecDeque<Job>,
    /// Running tasks whose callers wait: number and path.
    running: Vec<(u64, PathBuf)>,
    /// Running tasks that have timed out: number and path.
    hanging: Vec<(u64, PathBuf)>,
    next: u64,
    threads: usize,
    /// Idle threads without an assigned task.
    idle: usize,
    /// Tasks assigned to threads that have been woken and have not run yet.
    assigned: VecDeque<Job>,
    is_closed: bool,
}

struct Job {
    number: u64,
    /// For a task whose caller waits.
    path: Option<PathBuf>,
    act: Box<dyn FnOnce() + Send>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "job {}", self.number)
    }
}

/// A task that was begun. Its result is to be received with [`BlockingTask::by`] even if it is no
/// longer needed; otherwise what it opens stays open longer than expected.
#[must_use]
pub struct BlockingTask<'a, T> {
    pool: &'a BlockingPool,
    path: PathBuf,
    state: State<T>,
}

enum State<T> {
    Over(Result<T, String>),
    UnderWay(Receiver<Result<T, String>>, u64),
}

impl Default for BlockingPool {
    fn default() -> BlockingPool {
        BlockingPool::bounded(THREADS_MAX, IDLE_MAX)
    }
}

impl BlockingPool {
    /// A pool of at most `threads_max` threads, of which `idle_max` stay for the next tasks.
    pub(crate) fn bounded(threads_max: usize, idle_max: usize) -> BlockingPool {
        let state = Mutex::default();
        let shared = PoolShared { state, wake: Condvar::new(), threads_max, idle_max };
        BlockingPool {
            shared: Arc::new(shared),
            #[cfg(any(test, feature = "testing"))]
            meet: Mutex::default(),
        }
    }

    /// Runs `act`, which may wait for the device behind a path, unless a task of that path has
    /// timed out and still runs.
    ///
    /// # Errors
    /// The error of `act`, or that it did not answer within the time.
    #[cfg(any(test, feature = "testing"))]
    pub fn within<T: Send + 'static>(
        &self,
        patience: Duration,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        self.begin(path, act).by(Instant::now() + patience)
    }

    /// Makes a task at this path block until the sender is dropped.
    #[cfg(any(test, feature = "testing"))]
    pub fn hang_at(&self, path: &Path) -> std::sync::mpsc::Sender<()> {
        loop {
            let (go_on, hangs) = std::sync::mpsc::channel();
            let (begins, begun) = sync_channel(1);
            let task = self.begin(path, move || {
                let _ = begins.send(());
                hangs.recv().map_err(|_| "too late".to_owned())
            });
            // A task that is cancelled before it has started does not count as blocked. A task
            // whose result has just been received may still occupy the path.
            if begun.recv().is_ok() {
                assert!(task.by(Instant::now()).is_err());
                return go_on;
            }
        }
    }

    /// As `BlockingPool::within`, without waiting: the paths of one server block together, so all
    /// their tasks time out within one period.
    pub fn begin<T: Send + 'static>(
        &self,
        path: &Path,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> BlockingTask<'_, T> {
        let begun = |state| BlockingTask { pool: self, path: path.to_owned(), state };
        let (say, said) = sync_channel(1);
        #[cfg(any(test, feature = "testing"))]
        let meet = self.meet.lock().unwrap().clone();
        let act = Box::new(move || {
            #[cfg(any(test, feature = "testing"))]
            if let Some(meet) = meet {
                meet.wait();
            }
            // The caller may have timed out: the result is dropped, which closes what was opened.
            let _ = say.send(act());
        });
        let mut state = self.shared.lock();
        if state.hangs_at(path) {
            drop(state);
            return begun(State::Over(Err(silent(path))));
        }
        let number = state.push(Some(path.to_owned()), act);
        drop(state);
        begun(match self.shared.add_thread() {
            Ok(()) => State::UnderWay(said, number),
            Err(error) => match self.shared.withdraw(number) {
                Some(_) => State::Over(Err(format!("no thread to open it: {error}"))),
                None => State::UnderWay(said, number),
            },
        })
    }

    /// Starts a task that has no path or no time limit. Its result can be received; that is
    /// optional.
    ///
    /// # Errors
    /// The thread could not be created; the task does not run.
    pub fn spawn<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Receiver<T>> {
        let (say, said) = sync_channel(1);
        let act = Box::new(move || drop(say.send(act())));
        let mut state = self.shared.lock();
        if state.idle == 0 && state.threads >= self.shared.threads_max {
            drop(state);
            return Err(io::Error::other("too many of them wait for devices that do not answer"));
        }
        let number = state.push(None, act);
        drop(state);
        match self.shared.add_thread() {
            Err(error) if self.shared.withdraw(number).is_some() => Err(error),
            _ => Ok(said),
        }
    }

    /// Drops a value whose drop may block, such as a file of a server that does not answer: on one of
    /// the threads, and waits for that time at most. Without a thread it is dropped here.
    pub fn drop_within<T: Send + 'static>(&self, patience: Duration, value: T) {
        if let Ok(dropped) = self.spawn(move || drop(value)) {
            let _ = dropped.recv_timeout(patience);
        }
    }

    /// Queues a task without a path: it starts when there is a thread for it. Returns its number.
    ///
    /// # Errors
    /// There is no thread, and none could be created; the task does not run.
    pub(crate) fn queue(&self, act: impl FnOnce() + Send + 'static) -> io::Result<u64> {
        let number = self.shared.lock().push(None, Box::new(act));
        loop {
            let Err(error) = self.shared.add_thread() else { return Ok(number) };
            let (threads, idle) = {
                let state = self.shared.lock();
                (state.threads, state.idle)
            };
            match (threads, idle) {
                (0, _) if self.withdraw(number) => return Err(error),
                // A thread that is busy takes it next.
                (_, 0) => return Ok(number),
                _ => {}
            }
        }
    }

    /// Removes a task that has not started; returns false if it has.
    pub(crate) fn withdraw(&self, number: u64) -> bool {
        self.shared.withdraw(number).is_some()
    }

    /// Whether a task of this path has timed out and still runs.
    pub fn hangs_at(&self, path: &Path) -> bool {
        self.shared.lock().hangs_at(path)
    }

    /// A task that is already complete, where the caller handles tasks.
    pub fn over<T>(&self, path: &Path, outcome: Result<T, String>) -> BlockingTask<'_, T> {
        BlockingTask { pool: self, path: path.to_owned(), state: State::Over(outcome) }
    }
}

impl Drop for BlockingPool {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.wake.notify_all();
    }
}

impl<T> BlockingTask<'_, T> {
    /// Waits until it has completed, or until then.
    pub fn wait_until(mut self, time: Instant) -> Self {
        if let State::UnderWay(said, _) = &self.state {
            let patience = time.saturating_duration_since(Instant::now());
            if let Ok(outcome) = said.recv_timeout(patience) {
                self.state = State::Over(outcome);
            }
        }
        self
    }

    /// Its result, if it completes before the deadline.
    ///
    /// # Errors
    /// The error of the task, or that it timed out.
    pub fn by(self, deadline: Instant) -> Result<T, String> {
        let (said, number) = match self.state {
            State::Over(outcome) => return outcome,
            State::UnderWay(said, number) => (said, number),
        };
        let patience = deadline.saturating_duration_since(Instant::now());
        said.recv_timeout(patience).unwrap_or_else(|error| {
            // The task panicked or was dropped.
            let hangs = error == RecvTimeoutError::Timeout;
            self.pool.shared.give_up(number, hangs);
            Err(silent(&self.path))
        })
    }
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a thread if a task may start and the limits allow it. The task counts as running from
    /// now on, before its thread is scheduled.
    fn add_thread(self: &Arc<PoolShared>) -> io::Result<()> {
        let mut state = self.lock();
        if state.idle == 0 && state.threads >= self.threads_max {
            return Ok(());
        }
        let Some(job) = state.start() else { return Ok(()) };
        if state.idle > 0 {
            state.idle -= 1;
            state.assigned.push_back(job);
            self.wake.notify_one();
            return Ok(());
        }
        state.threads += 1;
        drop(state);
        let first = Arc::new(Mutex::new(Some(job)));
        let (own, own_first) = (Arc::clone(self), Arc::clone(&first));
        let take =
            |job: &Mutex<Option<Job>>| job.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = std::thread::Builder::new().name("blocking".to_owned());
        let spawned = thread.spawn(move || own.work(take(&own_first)));
        spawned.map(drop).inspect_err(|_| {
            let mut state = self.lock();
            state.threads -= 1;
            if let Some(job) = take(&first) {
                state.end(job.number);
                state.queue.push_front(job);
            }
        })
    }

    /// Main function of a thread: runs its first task, then queued ones, and stays idle for a
    /// while.
    fn work(&self, mut job: Option<Job>) {
        let mut state = self.lock();
        loop {
            while let Some(Job { number, act, .. }) = job.take().or_else(|| state.start()) {
                drop(state);
                act();
                state = self.lock();
                state.end(number);
            }
            if state.is_closed || state.idle >= self.idle_max {
                break;
            }
            state.idle += 1;
            while state.assigned.is_empty() {
                let waited = self.wake.wait_timeout(state, IDLE);
                let (again, waited) = waited.unwrap_or_else(PoisonError::into_inner);
                state = again;
                if state.assigned.is_empty() && (waited.timed_out() || state.is_closed) {
                    state.idle -= 1;
                    state.threads -= 1;
                    return;
                }
            }
            job = state.assigned.pop_front();
        }
        state.threads -= 1;
    }

    /// Removes a task that has not started.
    fn withdraw(&self, number: u64) -> Option<Job> {
        let mut state = self.lock();
        let at = state.queue.iter().position(|job| job.number == number)?;
        state.queue.remove(at)
    }

    /// Called when the caller of a task stops waiting: a task that has not started is removed, and
    /// so are the tasks that wait for the same path if this one still runs.
    fn give_up(self: &Arc<PoolShared>, number: u64, hangs: bool) {
        let mut state = self.lock();
        let mut refused = Vec::from_iter(state.remove_from_queue(|job| job.number == number));
        if let Some(at) = state.running.iter().position(|(other, _)| *other == number) {
            let (number, path) = state.running.swap_remove(at);
            if hangs {
                refused.extend(state.remove_from_queue(|job| job.path.as_ref() == Some(&path)));
                state.hanging.push((number, path));
            }
        }
        drop(state);
        // Dropping their captures may take long.
        drop(refused);
        // Their callers need not wait for the timeout.
        let _ = self.add_thread();
    }
}

impl PoolState {
    fn push(&mut self, path: Option<PathBuf>, act: Box<dyn FnOnce() + Send>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.queue.push_back(Job { number, path, act });
        number
    }

    fn hangs_at(&self, path: &Path) -> bool {
        self.hanging.iter().any(|(_, at)| at == path)
    }

    fn first_to_start(&self) -> Option<usize> {
        let is_free = |path: &PathBuf| {
            let is_another = |(_, other): &(u64, PathBuf)| other != path;
            self.running.len() < RUNNING_MAX && self.running.iter().all(is_another)
        };
        self.queue.iter().position(|job| job.path.as_ref().is_none_or(is_free))
    }

    /// The next task to start; it counts as running from now on.
    fn start(&mut self) -> Option<Job> {
        let at = self.first_to_start()?;
        let job = self.queue.remove(at)?;
        if let Some(path) = &job.path {
            self.running.push((job.number, path.clone()));
        }
        Some(job)
    }

    fn end(&mut self, number: u64) {
        let is_another = |(other, _): &(u64, PathBuf)| *other != number;
        self.running.retain(is_another);
        self.hanging.retain(is_another);
    }

    fn remove_from_queue(&mut self, is_it: impl Fn(&Job) -> bool) -> Vec<Job> {
        let (removed, queue): (VecDeque<Job>, _) =
            std::mem::take(&mut self.queue).into_iter().partition(is_it);
        self.queue = queue;
        Vec::from(removed)
    }
}

fn silent(path: &Path) -> String {
    format!("{} does not answer: check its device or server", path.display())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use crate::blocking::*;

    const LONG: Duration = Duration::from_secs(600);

    /// A value whose drop waits until the sender is gone.
    struct Hangs(std::sync::mpsc::Receiver<()>);

    impl Drop for Hangs {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn drops_of_values_that_hang_are_abandoned_at_their_time_limit() {
        let pool = BlockingPool::default();
        let (go_on, hangs) = channel();
        pool.drop_within(Duration::ZERO, Hangs(hangs));
        let (dropped, is_dropped) = channel::<()>();
        pool.drop_within(LONG, dropped);
        assert!(is_dropped.try_recv().is_err_and(|error| error.to_string().contains("closed")));
        drop(go_on);
    }

    #[test]
    fn a_path_with_a_hanging_task_is_refused_until_the_task_ends() {
        let (opening, path) = (BlockingPool::default(), Path::new("/disk"));
        let go_on = opening.hang_at(path);
        for _ in 0..3 {
            let again = opening.within(LONG, path, || Err::<(), _>("tried again".to_owned()));
            assert_eq!(again, Err(silent(path)));
            assert!(silent(path).contains("/disk does not answer"));
        }
        assert_eq!(opening.shared.lock().hanging.len(), 1, "one thread, whoever asks");
        assert_eq!(opening.within(LONG, Path::new("/other"), || Ok(5)), Ok(5));
        drop(go_on);
        while opening.hangs_at(path) {
            std::thread::yield_now();
        }
        assert_eq!(opening.within(LONG, path, || Ok(6)), Ok(6));
        assert_eq!(opening.within(LONG, path, || Ok(7)), Ok(7));
    }

    /// A start with a thousand namespaces probes a thousand paths.
    #[test]
    fn running_tasks_are_bounded_and_timed_out_ones_do_not_count() {
        let opening = BlockingPool::default();
        let (go_on, hangs) = channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let (begins, begun) = channel();
        let begin = |at: usize| {
            let (hangs, begins) = (Arc::clone(&hangs), begins.clone());
            opening.begin(Path::new(&format!("/hangs/{at}")), move || {
                begins.send(at).unwrap();
                // The first task waits with the lock held, and the others wait for the lock.
                hangs.lock().unwrap().recv().map_err(|_| "too late".to_owned())
            })
        };
        let mut all: Vec<_> = (0..RUNNING_MAX + 5).map(begin).collect();
        let mut first: Vec<usize> = (0..RUNNING_MAX).map(|_| begun.recv().unwrap()).collect();
        first.sort_unstable();
        assert!(first.iter().copied().eq(0..RUNNING_MAX), "{first:?}");
        {
            let state = opening.shared.lock();
            assert_eq!((state.running.len(), state.queue.len()), (RUNNING_MAX, 5));
        }
        // One times out, so one more starts. One that never started is not counted as blocked.
        assert!(all.remove(0).by(Instant::now()).is_err());
        assert_eq!(begun.recv().unwrap(), RUNNING_MAX);
        assert!(all.pop().unwrap().by(Instant::now()).is_err());
        assert!(!opening.hangs_at(Path::new(&format!("/hangs/{}", RUNNING_MAX + 4))));
        let good = opening.begin(Path::new("/good"), || Ok(1));
        drop(go_on);
        assert_eq!(good.by(Instant::now() + LONG), Ok(1));
        for each in all {
            assert_eq!(each.by(Instant::now() + LONG), Err("too late".to_owned()));
        }
        while !opening.shared.lock().hanging.is_empty() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn tasks_of_a_path_run_one_at_a_time_and_fail_behind_a_timed_out_task() {
        let (pool, path) = (BlockingPool::default(), Path::new("/disk"));
        let (go_on, hangs) = channel::<()>();
        let (begins, begun) = channel();
        let first = pool.begin(path, {
            let begins = begins.clone();
            move || {
                begins.send(1).unwrap();
                hangs.recv().map_err(|_| "came back".to_owned())
            }
        });
        assert_eq!(begun.recv(), Ok(1));
        let say = |what: usize| {
            let begins = begins.clone();
            move || begins.send(what).map_err(|error| error.to_string())
        };
        let second = pool.begin(path, say(2));
        pool.within(LONG, Path::new("/other"), say(3)).unwrap();
        assert_eq!(begun.try_recv(), Ok(3), "another path waits for none");
        assert_eq!(pool.shared.lock().queue.len(), 1);
        let said = first.by(Instant::now()).unwrap_err();
        // Immediately, because the other one has timed out.
        assert_eq!(second.by(Instant::now() + LONG), Err(said));
        drop(go_on);
        while pool.hangs_at(path) {
            std::thread::yield_now();
        }
        pool.within(LONG, path, say(4)).unwrap();
        drop((begins, pool));
        assert_eq!(Vec::from_iter(begun), [4], "what was refused is never done");
    }

    #[test]
    fn spawned_tasks_start_beyond_the_limit_of_running_tasks() {
        let pool = BlockingPool::default();
        let (go_on, hangs) = channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let hang = || {
            let hangs = Arc::clone(&hangs);
            move || hangs.lock().unwrap().recv().unwrap_or_default()
        };
        let all: Vec<_> = (0..RUNNING_MAX)
            .map(|at| {
                let hang = hang();
                pool.begin(Path::new(&format!("/hangs/{at}")), move || {
                    hang();
                    Ok(())
                })
            })
            .collect();
        let hanging: Vec<_> = (0..RUNNING_MAX).map(|_| pool.spawn(hang()).unwrap()).collect();
        assert_eq!(pool.spawn(|| 5).unwrap().recv(), Ok(5));
        drop(go_on);
        all.into_iter().for_each(|task| task.by(Instant::now() + LONG).unwrap());
        hanging.into_iter().for_each(|task| task.recv().unwrap());
    }

    #[test]
    fn threads_are_bounded_and_a_finished_thread_serves_the_queue() {
        let pool = BlockingPool::bounded(2, IDLE_MAX);
        let (go_on, hangs) = channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let hang = || {
            let hangs = Arc::clone(&hangs);
            move || hangs.lock().unwrap().recv().unwrap_or_default()
        };
        let both = [pool.spawn(hang()).unwrap(), pool.spawn(hang()).unwrap()];
        let refused = pool.spawn(|| unreachable!("a third thread")).unwrap_err();
        assert!(refused.to_string().contains("do not answer"), "{refused}");
        let late = pool.begin(Path::new("/disk"), || Ok(7));
        let given_up = pool.begin(Path::new("/other"), || -> Result<(), _> { unreachable!() });
        assert!(given_up.by(Instant::now()).is_err());
        assert!(!pool.hangs_at(Path::new("/other")), "it has never started");
        drop(go_on);
        assert_eq!(late.by(Instant::now() + LONG), Ok(7));
        both.into_iter().for_each(|task| task.recv().unwrap());
        assert!(pool.shared.lock().threads <= 2);
        let shared = Arc::clone(&pool.shared);
        drop(pool);
        while shared.lock().threads > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_that_is_idle_serves_the_next_task() {
        let pool = BlockingPool::default();
        let who = || std::thread::current().id();
        let first = pool.spawn(who).unwrap().recv().unwrap();
        // The result is received before the thread is idle.
        while pool.shared.lock().idle == 0 {
            std::thread::yield_now();
        }
        assert_eq!(pool.within(LONG, Path::new("/disk"), move || Ok(who())), Ok(first));
        assert_eq!(pool.shared.lock().threads, 1);
    }

    #[test]
    fn queued_tasks_wait_for_a_thread_or_are_withdrawn() {
        let pool = BlockingPool::bounded(2, 2);
        let (go_on, hangs) = channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let (say, said) = channel();
        let numbers: Vec<u64> = (0..6u64)
            .map(|task| {
                let (hangs, say) = (Arc::clone(&hangs), say.clone());
                pool.queue(move || {
                    say.send(task).unwrap();
                    let _ = hangs.lock().unwrap().recv();
                })
                .unwrap()
            })
            .collect();
        let begun: Vec<u64> = said.iter().take(2).collect();
        assert_eq!(begun.iter().sum::<u64>(), 1, "the first two: {begun:?}");
        assert!(!pool.withdraw(numbers[0]) && !pool.withdraw(numbers[1]));
        assert!(pool.withdraw(numbers[3]) && !pool.withdraw(numbers[3]));
        drop(go_on);
        drop(say);
        let rest: Vec<u64> = said.iter().collect();
        assert_eq!(rest.len(), 3);
        assert!(!rest.contains(&3), "{rest:?}");
    }
}
