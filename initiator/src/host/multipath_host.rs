//! One namespace over several paths, with pool and fabrics: polled like a [`Host`](super::Host).

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use rdma::{Pool, Wake};

use super::fabric_set::FabricSet;
use super::{Error, notice};
use crate::fabric::Provider;
use crate::multipath::{
    BlockDone, BlockRequest, Multipath, MultipathOptions, Notice, PathOptions, Resources,
    Unaccepted,
};
use crate::path_address::PathAddress;
use crate::session::Options;

/// How often the caller of [`MultipathHost::connect`] is asked whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// Time for closing the connections to the target.
pub(crate) const CLOSE_LIMIT: Duration = Duration::from_secs(8);

/// Paths, and resources for all of them.
#[derive(Clone, Debug)]
pub struct MultipathSetup {
    /// Host, subsystem, queues and authentication: those of each path.
    pub session: Options,
    /// The addresses, the best first.
    pub paths: Vec<PathAddress>,
    /// The fabric provider.
    pub provider: Provider,
    /// When paths are connected again, and requests repeated.
    pub multipath: MultipathOptions,
    /// Bytes for data in the pool.
    pub data_bytes: u64,
    /// The largest buffer of these, in bytes: 4096 times a power of two.
    pub largest_bytes: u32,
}

/// The namespace. What happens to paths is logged.
pub struct MultipathHost {
    multipath: Multipath,
    pool: Pool,
    fabrics: FabricSet,
    next_tick: Option<Instant>,
}

impl MultipathHost {
    /// Paths that are not connected yet.
    ///
    /// # Errors
    /// There is no memory, or no such fabric.
    pub fn new(setup: MultipathSetup) -> Result<MultipathHost, Error> {
        let MultipathSetup { session, paths, provider, multipath, .. } = setup;
        let mut plan = session.plan(setup.data_bytes, setup.largest_bytes);
        let count = u32::try_from(paths.len()).unwrap_or(u32::MAX);
        // Beside those of the paths, one for the range of each Discard.
        plan.cells = plan.cells.saturating_mul(count).saturating_add(multipath.requests);
        plan.receives = plan.receives.saturating_mul(count);
        let mut pool =
            Pool::new(plan).map_err(|e| Error::Local(format!("no memory for the buffers: {e}")))?;
        let (fabrics, numbers) = FabricSet::new(provider, &paths, pool.region())
            .map_err(|error| Error::Local(error.to_string()))?;
        let of_path = |(path, fabric): (&PathAddress, usize)| PathOptions {
            session: Options { to: path.to, ..session.clone() },
            fabric,
        };
        let paths = paths.iter().zip(numbers).map(of_path).collect();
        let multipath = Multipath::new(multipath, paths, &mut pool);
        Ok(MultipathHost { multipath, pool, fabrics, next_tick: None })
    }

    /// Connects the paths until one is live. Returns whether one is: otherwise `goes_on`, which is
    /// called now and then, has ended it.
    ///
    /// # Errors
    /// No path could be connected: why the first could not.
    pub fn connect(&mut self, mut goes_on: impl FnMut() -> bool) -> Result<bool, Error> {
        let mut failure = None;
        loop {
            self.wait(Instant::now() + ASK_EVERY);
            while let Some(notice) = self.next_notice() {
                if let Notice::Failed { why, .. } = notice {
                    failure.get_or_insert(why.to_string());
                }
            }
            if self.multipath.namespace().is_some() {
                return Ok(true);
            }
            if self.multipath.has_tried_all() {
                let no_namespace = "the target has no such namespace: see `nvmf list`".to_owned();
                return Err(Error::Local(failure.unwrap_or(no_namespace)));
            }
            if !goes_on() {
                self.disconnect();
                return Ok(false);
            }
        }
    }

    /// Keeps the paths alive until then. Returns whether to go on: otherwise `goes_on`, which is called
    /// now and then, has ended it.
    pub(crate) fn pass_time(&mut self, until: Instant, mut goes_on: impl FnMut() -> bool) -> bool {
        loop {
            let now = Instant::now();
            if now >= until {
                return true;
            }
            self.wait(until.min(now + ASK_EVERY));
            while self.next_notice().is_some() {}
            if !goes_on() {
                return false;
            }
        }
    }

    /// Returns the provider in use: never [`Provider::Auto`].
    pub fn provider(&self) -> Provider {
        self.fabrics.provider()
    }

    /// Returns the paths, read-only.
    pub fn multipath(&self) -> &Multipath {
        &self.multipath
    }

    /// Returns the pool, for the data of requests.
    pub fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// As [`Multipath::submit`]. It is sent by a following [`MultipathHost::poll`].
    ///
    /// # Errors
    /// The reason; the request is returned.
    pub fn submit(&mut self, request: BlockRequest) -> Result<(), (BlockRequest, Unaccepted)> {
        self.multipath.submit(request, &mut self.pool)
    }

    /// Polls the fabrics and lets the paths act. Returns whether anything happened. Does not block.
    /// What is to be sent is sent by [`MultipathHost::flush`].
    pub fn poll(&mut self) -> bool {
        let now = Instant::now();
        let MultipathHost { multipath, pool, fabrics, .. } = self;
        let mut any = false;
        for number in 0..fabrics.len() {
            let (mut batch, receiving) = fabrics.poll(number, now);
            any |= receiving || !batch.is_empty();
            for event in batch.drain(..) {
                let mut r = Resources { pool, fabrics, now };
                // No other user of this fabric exists, and a host accepts no connections.
                drop(multipath.on_event(number, event, &mut r));
            }
            fabrics.recycle(batch);
        }
        self.next_tick = multipath.tick(&mut Resources { pool, fabrics, now });
        any
    }

    /// Sends everything that was posted.
    pub fn flush(&mut self) {
        self.fabrics.flush();
    }

    /// Returns the next request that is done.
    pub fn next_done(&mut self) -> Option<BlockDone> {
        self.multipath.next_done(&mut self.pool)
    }

    /// Returns what has happened next, and logs it.
    pub fn next_notice(&mut self) -> Option<Notice> {
        let notice = self.multipath.next_notice()?;
        notice::report(&self.multipath, &notice);
        Some(notice)
    }

    /// Has the fabrics end a sleep. What happened before ends none: the caller polls once more.
    pub fn arm(&mut self) {
        let sends = self.multipath.waits_for_sends();
        self.fabrics.arm(if sends { Wake::Any } else { Wake::Needed });
    }

    /// Returns the end of the sleep, if nothing happens.
    pub fn deadline(&mut self) -> Option<Instant> {
        self.fabrics.deadline().into_iter().chain(self.next_tick).min()
    }

    /// Returns the descriptors that are readable when there is something to poll.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.fabrics.descriptors()
    }

    /// Iterates until anything happens, or until `until`; sleeps meanwhile.
    pub fn wait(&mut self, until: Instant) {
        loop {
            let any = self.turn();
            if any || self.multipath.has_done() || self.multipath.has_notice() {
                return;
            }
            self.arm();
            if self.turn() {
                return;
            }
            let now = Instant::now();
            if now >= until {
                return;
            }
            let next = self.deadline().map_or(until, |at| at.min(until));
            let limit = next.saturating_duration_since(now);
            let mut fds: Vec<PollFd<'_>> =
                self.descriptors().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            // Signals and failures also end the sleep; then there is nothing to poll.
            let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(limit)), None);
        }
    }

    /// One iteration: polls, then flushes.
    pub fn turn(&mut self) -> bool {
        let any = self.poll();
        self.flush();
        any
    }

    /// Begins to shut all controllers down.
    pub fn close(&mut self) {
        let MultipathHost { multipath, pool, fabrics, .. } = self;
        multipath.close(&mut Resources { pool, fabrics, now: Instant::now() });
        self.flush();
    }

    /// Shuts all controllers down, and waits for that.
    pub fn disconnect(&mut self) {
        self.close();
        let until = Instant::now() + CLOSE_LIMIT;
        while !self.multipath.is_closed() && Instant::now() < until {
            self.wait(until);
            while self.next_done().is_some() || self.next_notice().is_some() {}
        }
    }
}
