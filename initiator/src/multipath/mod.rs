//! One namespace over one or more paths: reconnects, queues meanwhile, fails over.
//!
//! A path is an address of the target, and an association ([`Session`]) with a controller there:
//!
//! ```text
//! Connecting ──connected, identified──► Live
//!     ^   └──failed──┐                   │ the association ended
//!     └── back-off ── Resetting ◄────────┘
//!                        └── ctrl_loss_tmo, or a refusal for good ──► Lost
//! ```
//!
//! [`Multipath`] owns state and borrows pool, fabrics and time ([`Resources`]), as a session does.
//! Its driver passes it all events of the fabrics, calls [`Multipath::tick`] in each iteration and
//! at the time that it returns, and flushes the fabrics afterwards. A request belongs to it, with
//! its data, until it is in [`Multipath::next_done`]: exactly once, whatever happens to paths.
//!
//! # Which path
//!
//! That of the best ANA state: optimized before non-optimized; none in the states inaccessible,
//! persistent loss and change. Among equals the one in use stays in use, as by the policy `numa` of
//! Linux. While no path can be used, requests are queued, as long as a path may come back:
//!
//! | option | Linux | meaning |
//! |---|---|---|
//! | `reconnect_delay` | 10 s | between attempts of a path; doubles up to `reconnect_delay_max` |
//! | `ctrl_loss_tmo` | 600 s | then a path is given up |
//! | `fast_io_fail_tmo` | off | then a path that is away no longer makes requests wait |
//!
//! A live path in the state inaccessible makes them wait without limit, as in Linux; in the state
//! change for twice ANATT, it is reset.
//!
//! # What is repeated
//!
//! | outcome of a command | Linux 6.12 | here |
//! |---|---|---|
//! | status with Do Not Retry | fails, tested first | the same |
//! | path related status (3xxh) | another path, without limit; 301h to 303h: not this path until its ANA log is read | the same; 100 ms later if there is no other path |
//! | Authentication Required | authenticates again | resets the path, which authenticates |
//! | other status | repeated at most 5 times, after the Command Retry Delay | the same |
//! | the association ended | repeated at once on another path | reads and flushes at once; changes of blocks when the target has closed all connections, else when it must have ended the association: see below |
//!
//! Commands are idempotent (Read, Write, Flush, Write Zeroes, Deallocate), so carrying one out twice
//! in a row changes nothing. Carrying out the first of two later than the second does: the caller
//! has been told that the block is written, has written it anew, and the old write, still in a
//! queue of the target, is carried out last. Linux accepts that. Here, a change of blocks that was
//! under way on a path is repeated, there or elsewhere,
//!
//! * at once, if the target has closed the connections of all queues: so it has ended the association
//!   (one that has closed a single one, because it got no answer there, may carry out commands of the
//!   others, and need not hear that this host has ended it);
//! * otherwise a Keep Alive Timeout, as the controller has granted it, and two seconds
//!   (`replay_margin`) after the association ended here. The target has not seen this host for
//!   that long, and must have ended it: targets round the timeout up and look at it now and then.
//!
//! Its data are out of reach of the old association in any case: their keys are deregistered before
//! anything is repeated. What remains, as in Linux, is a device that takes longer than that for
//! a command which it has begun; that the target has to order (nvmfd does, for all controllers of a
//! namespace). Of two targets over the same blocks neither orders the commands of the other one: what
//! one has begun has to be over when it is killed, or the other one excludes it before it serves (as
//! gateways of a group of nvmfd do). Without Keep Alive there is no bound, and no waiting.
//!
//! Such a change does not fail for lack of a path before that either: its caller could write the
//! blocks again, by a path that has come back.
//!
//! # Flush
//!
//! A Flush covers all writes that were acknowledged before it was submitted, by any path, because it
//! is a command of the namespace; so is what is required of a target: a Flush by one controller
//! covers writes completed by another (NVMe leaves that open; Linux requires it too). What no host
//! can see is a target whose volatile cache is lost while the host lives on (a power failure of the
//! target only): writes that were acknowledged and not flushed are gone, and the next Flush succeeds.
//! `write_through` avoids that: all changes carry Force Unit Access.
//!
//! # One namespace
//!
//! A path is used if its namespace has the identifiers (UUID, NGUID, EUI-64) and the block size of
//! the first one, and commands may be as long; otherwise it is reset, for the reason that is
//! reported. The size may change: [`Notice::Resized`]. Limits of Write Zeroes and Discard (WZSL, DMRSL)
//! are the smallest that any path has had.

mod allocation;
mod disposition;
mod namespace;
mod path;
mod request;
mod scan;
mod table;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use nvme::log::AnaState;
use nvme::sqe::DsmRange;
use rdma::{Event, Initiator, Pool};

use crate::session::{Options, Session, earlier};

pub use allocation::Allocation;
pub use namespace::Namespace;
pub use path::{PathCounters, PathLoss, PathState};
pub use request::{BlockDone, BlockRequest, Failure, Operation, RequestOutcome};

use path::Path;
use request::LBA_STATUS_BYTES;
use table::{RequestTable, State};

/// Maximum number of notices that wait for the caller; the oldest are dropped.
const MOST_NOTICES: usize = 64;
/// By how much a target may detect a keep alive timeout too late.
pub(crate) const REPLAY_MARGIN: Duration = Duration::from_secs(2);

/// The fabrics of the paths.
pub trait Fabrics {
    /// Returns a fabric by its number.
    fn fabric(&mut self, number: usize) -> &mut dyn Initiator;
}

/// Borrowed resources.
pub struct Resources<'a> {
    /// One pool for all paths: for each what [`Options::plan`] computes, and a cell for each request.
    pub pool: &'a mut Pool,
    /// The fabrics, by the numbers in [`PathOptions`].
    pub fabrics: &'a mut dyn Fabrics,
    /// The time of this iteration.
    pub now: Instant,
}

/// A path.
#[derive(Clone, Debug)]
pub struct PathOptions {
    /// Target, host, queues, authentication.
    pub session: Options,
    /// The number of its fabric.
    pub fabric: usize,
}

/// Options of all paths.
#[derive(Clone, Copy, Debug)]
pub struct MultipathOptions {
    /// The namespace.
    pub nsid: u32,
    /// Time between the loss of a path and the next attempt to connect it.
    pub reconnect_delay: Duration,
    /// The delay doubles with each failure up to this; less than the delay: it does not.
    pub reconnect_delay_max: Duration,
    /// Time after which a path is given up; `None`: never.
    pub ctrl_loss_tmo: Option<Duration>,
    /// Time after which requests no longer wait for a path; `None`: as long as it is not given up.
    pub fast_io_fail_tmo: Option<Duration>,
    /// What is added to the Keep Alive Timeout before changes of blocks are repeated; `None`:
    /// they are repeated at once, as by Linux.
    pub replay_margin: Option<Duration>,
    /// All changes carry Force Unit Access.
    pub write_through: bool,
    /// Maximum number of requests at once.
    pub requests: u32,
}

impl MultipathOptions {
    /// The defaults of Linux, and a margin of two seconds.
    pub fn new(nsid: u32) -> MultipathOptions {
        MultipathOptions {
            nsid,
            reconnect_delay: Duration::from_secs(10),
            reconnect_delay_max: Duration::ZERO,
            ctrl_loss_tmo: Some(Duration::from_secs(600)),
            fast_io_fail_tmo: None,
            replay_margin: Some(REPLAY_MARGIN),
            write_through: false,
            requests: 1024,
        }
    }
}

/// Why [`Multipath::submit`] returned a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unaccepted {
    /// So many requests as agreed are there, or the pool has no cell for its range.
    #[error("too many requests at once")]
    Full,
    /// No path has been live yet, or all is being closed.
    #[error("there is no namespace to send it to")]
    NotReady,
}

/// What has happened, for a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    /// A path can be used, or has the namespace again.
    Live {
        /// Its number.
        path: usize,
        /// Its ANA state; `None`: the controller reports none.
        ana: Option<AnaState>,
    },
    /// A path has failed, or could not be connected.
    Failed {
        /// Its number.
        path: usize,
        /// The reason.
        why: PathLoss,
        /// When it is connected again; `None`: not any more.
        next: Option<Duration>,
    },
    /// The ANA state of a live path has changed.
    Ana {
        /// Its number.
        path: usize,
        /// The new state.
        state: AnaState,
    },
    /// The namespace has another size.
    Resized {
        /// In blocks.
        blocks: u64,
    },
    /// The write protection of the namespace has changed.
    WriteProtection {
        /// Writes are refused.
        is_on: bool,
    },
    /// A live path does not have the namespace (any more).
    Removed {
        /// Its number.
        path: usize,
    },
}

/// One namespace over its paths.
#[derive(Debug)]
pub struct Multipath {
    nsid: u32,
    paths: Vec<Path>,
    current: Option<usize>,
    namespace: Option<Namespace>,
    table: RequestTable,
    notices: VecDeque<Notice>,
    is_closing: bool,
}

impl Multipath {
    /// Paths that have not started: the first [`Multipath::tick`] connects them. One of the largest
    /// buffers of the pool is set aside for that: requests that wait for a path may hold all others.
    #[must_use]
    pub fn new(options: MultipathOptions, paths: Vec<PathOptions>, pool: &mut Pool) -> Multipath {
        pool.set_aside(1);
        Multipath {
            nsid: options.nsid,
            table: RequestTable::new(options.requests),
            paths: paths.into_iter().map(|path| Path::new(path, options)).collect(),
            current: None,
            namespace: None,
            notices: VecDeque::with_capacity(MOST_NOTICES),
            is_closing: false,
        }
    }

    /// Handles an event of a fabric. What belongs to no path is returned.
    pub fn on_event(
        &mut self,
        fabric: usize,
        event: Event,
        r: &mut Resources<'_>,
    ) -> Option<Event> {
        let mut event = Some(event);
        for path in self.paths.iter_mut().filter(|path| path.fabric() == fabric) {
            match event.take() {
                Some(inner) => event = path.on_event(inner, r),
                None => break,
            }
        }
        event
    }

    /// Accepts a request. It is sent by a following [`Multipath::tick`].
    ///
    /// # Errors
    /// The reason; the request is returned.
    pub fn submit(
        &mut self,
        mut request: BlockRequest,
        pool: &mut Pool,
    ) -> Result<(), (BlockRequest, Unaccepted)> {
        if self.is_closing || self.namespace.is_none() {
            return Err((request, Unaccepted::NotReady));
        }
        if self.table.is_full() {
            return Err((request, Unaccepted::Full));
        }
        if request.operation == Operation::LbaStatus {
            let Some(list) = pool.take_data(LBA_STATUS_BYTES) else {
                return Err((request, Unaccepted::Full));
            };
            request.data = Some(list);
        }
        if request.operation == Operation::Discard && request.data.is_none() {
            // No data buffer: requests that can only be submitted after this one may hold all of them.
            let Some(mut buf) = pool.take_cell() else {
                return Err((request, Unaccepted::Full));
            };
            buf.select(0, DsmRange::BYTES as u32);
            let range = DsmRange { attributes: 0, blocks: request.blocks, slba: request.slba };
            pool.bytes_mut(&mut buf).copy_from_slice(&range.emit());
            request.data = Some(buf);
        }
        self.table.insert(request);
        Ok(())
    }

    /// Handles timers, completions and queued requests. Returns the latest time of the next call,
    /// unless a request is submitted or an event arrives before.
    pub fn tick(&mut self, r: &mut Resources<'_>) -> Option<Instant> {
        let mut next = None;
        for (n, path) in self.paths.iter_mut().enumerate() {
            let mut shared = path::Shared {
                number: n,
                table: &mut self.table,
                namespace: &mut self.namespace,
                notices: &mut self.notices,
                is_closing: self.is_closing,
            };
            next = earlier(next, path.tick(&mut shared, r));
        }
        while self.notices.len() > MOST_NOTICES {
            self.notices.pop_front();
        }
        next = earlier(next, self.table.release(r.now));
        if self.is_closing {
            self.table.fail_all(Failure::Closed);
        } else if self.namespace.is_some() {
            next = earlier(next, self.fail_without_path(r.now));
        }
        self.dispatch(r);
        next
    }

    /// Returns the next request that is done, with its data.
    pub fn next_done(&mut self, pool: &mut Pool) -> Option<BlockDone> {
        let mut done = self.table.next_done()?;
        if done.operation == Operation::Discard {
            done.data.take().into_iter().for_each(|buf| pool.give(buf));
        }
        Some(done)
    }

    /// Returns what has happened next.
    pub fn next_notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }

    /// Shuts all controllers down. Requests that are not done fail; the caller, which wants them to
    /// succeed, waits for them first.
    pub fn close(&mut self, r: &mut Resources<'_>) {
        self.is_closing = true;
        self.table.fail_all(Failure::Closed);
        for path in &mut self.paths {
            path.close(r);
        }
    }

    /// Whether all is closed after [`Multipath::close`].
    pub fn is_closed(&self) -> bool {
        self.is_closing && self.paths.iter().all(|path| path.session().is_none())
    }

    /// Fails queued requests if no path is there to wait for. Returns when that may become so.
    fn fail_without_path(&mut self, now: Instant) -> Option<Instant> {
        let mut until = None;
        for path in &self.paths {
            match path.is_waited_for(now) {
                Ok(None) => return None,
                Ok(Some(at)) => until = Some(until.map_or(at, |until: Instant| until.max(at))),
                Err(()) => {}
            }
        }
        if until.is_none() {
            self.table.fail_waiting(Failure::NoPath);
        }
        until
    }

    /// Sends queued requests by the best path.
    fn dispatch(&mut self, r: &mut Resources<'_>) {
        if self.table.first_queued().is_none() {
            return;
        }
        let rank =
            |n: usize, path: &Path| path.rank(r.now).map(|rank| (rank, self.current != Some(n), n));
        let ranks = self.paths.iter().enumerate().filter_map(|(n, path)| rank(n, path));
        let Some((.., best)) = ranks.min() else { return };
        self.current = Some(best);
        let Some(path) = self.paths.get_mut(best) else { return };
        while let Some(slot) = self.table.first_queued() {
            if !path.send(slot, &mut self.table, r) {
                return;
            }
        }
    }
}

/// State, for those who report it.
impl Multipath {
    /// Returns the namespace, as soon as a path has been live.
    pub fn namespace(&self) -> Option<&Namespace> {
        self.namespace.as_ref()
    }

    /// Returns the number of the namespace.
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// Returns the number of paths.
    pub fn paths(&self) -> usize {
        self.paths.len()
    }

    /// Returns the state of a path; `Lost` for one that does not exist.
    pub fn state(&self, path: usize) -> PathState {
        self.paths.get(path).map_or(PathState::Lost, Path::state)
    }

    /// Returns the ANA state of a live path whose controller reports one.
    pub fn ana(&self, path: usize) -> Option<AnaState> {
        self.paths.get(path).and_then(Path::ana)
    }

    /// Returns why a path is not live, or was not before the attempt that is under way.
    pub fn last_loss(&self, path: usize) -> Option<&PathLoss> {
        self.paths.get(path).and_then(Path::last_loss)
    }

    /// Returns what a path has done since the start.
    pub fn counters(&self, path: usize) -> PathCounters {
        self.paths.get(path).map(Path::counters).unwrap_or_default()
    }

    /// Returns the path that has carried the last request.
    pub fn current(&self) -> Option<usize> {
        self.current
    }

    /// Returns the options of a path.
    pub fn path_options(&self, path: usize) -> Option<&PathOptions> {
        self.paths.get(path).map(Path::options)
    }

    /// Returns the association of a path, while there is one.
    pub fn session(&self, path: usize) -> Option<&Session> {
        self.paths.get(path).and_then(Path::session)
    }

    /// Returns for how long a target may have changes of blocks that an association of before has
    /// sent: see [What is repeated](self#what-is-repeated).
    pub fn replay_wait(&self) -> Option<Duration> {
        self.paths.iter().filter_map(Path::replay_wait).max()
    }

    /// Returns what happens to requests now.
    #[must_use]
    pub fn request_outcome(&self, now: Instant) -> RequestOutcome {
        if self.paths.iter().any(|path| path.rank(now).is_some()) {
            return RequestOutcome::CarriedOut;
        }
        match self.paths.iter().any(|path| path.is_waited_for(now).is_ok()) {
            true => RequestOutcome::Wait,
            false => RequestOutcome::Fail,
        }
    }

    /// Whether each path has failed at least once or is live.
    pub fn has_tried_all(&self) -> bool {
        self.paths.iter().all(|path| path.state() == PathState::Live || path.has_failed())
    }

    /// Whether all paths are given up, and no target may carry out a change any more.
    pub fn is_lost(&self) -> bool {
        self.paths.iter().all(|path| path.state() == PathState::Lost && !path.has_replay())
    }

    /// Requests that are not done.
    pub fn outstanding(&self) -> usize {
        self.table.outstanding()
    }

    /// Whether a target may carry out changes that are not done.
    pub fn has_sent_changes(&self) -> bool {
        self.table.has_sent_changes()
    }

    /// Whether a request is done.
    pub fn has_done(&self) -> bool {
        self.table.has_done()
    }

    /// Whether there is a notice.
    pub fn has_notice(&self) -> bool {
        !self.notices.is_empty()
    }

    /// Whether completed Sends must end a sleep as well.
    #[must_use]
    pub fn waits_for_sends(&self) -> bool {
        self.paths.iter().filter_map(Path::session).any(Session::waits_for_sends)
    }
}
