//! One path: its association, its back-off, its ANA state.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use nvme::Status;
use nvme::log::AnaState;
use rdma::{Buf, Event};

use super::disposition::{Disposition, dispose};
use super::scan::Scan;
use super::{
    Failure, MultipathOptions, Namespace, Notice, PathOptions, RequestTable, Resources, State,
};
use crate::session::{Data, Done, EndReason, Io, Lost, Phase, Request, Response, Session, earlier};

/// Tag of the commands of a scan; requests have the number of their slot.
pub(super) const SCAN_TAG: u64 = u64::MAX;

/// A path that has failed a command with a path related status is avoided for this long.
const AVOIDED_FOR: Duration = Duration::from_secs(1);

/// Delay of a command that failed with such a status, if no other path is known to be better.
const PATH_ERROR_DELAY: Duration = Duration::from_millis(100);

/// State of a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathState {
    /// The association is being established, the namespace identified.
    Connecting,
    /// Commands can be sent, as far as the ANA state permits.
    Live,
    /// The association has ended; the next attempt is then.
    Resetting {
        /// The time of the next attempt.
        until: Instant,
    },
    /// It is given up.
    Lost,
}

/// What a path has done since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PathCounters {
    /// How often it became live.
    pub connects: u64,
    /// How often its association ended, or could not be established.
    pub losses: u64,
    /// Commands for the namespace that were sent.
    pub commands: u64,
}

/// Why a path has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PathLoss {
    /// The association has ended.
    Ended(EndReason),
    /// A command that identifies the namespace has failed.
    Scan {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// Its namespace cannot stand in for that of the other paths.
    Namespace(String),
    /// It was in the ANA state change for longer than the controller says it takes.
    AnaChange {
        /// The time.
        after: Duration,
    },
    /// The controller demands that this host authenticates again.
    Reauthentication,
    /// It was away for `ctrl_loss_tmo`.
    Expired,
}

impl PathLoss {
    /// Whether another attempt would fail in the same way.
    pub(super) fn is_final(&self) -> bool {
        match self {
            PathLoss::Ended(EndReason::Authentication | EndReason::Unsupported(_)) => true,
            PathLoss::Ended(EndReason::ConnectRefused { status, .. }) => status.dnr(),
            PathLoss::Expired => true,
            _ => false,
        }
    }
}

impl fmt::Display for PathLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PathLoss::Ended(why) => why.fmt(f),
            PathLoss::Scan { what, status } => write!(f, "{what} failed: {status}"),
            PathLoss::Namespace(why) => f.write_str(why),
            PathLoss::AnaChange { after } => {
                write!(f, "its ANA state has been \"change\" for {} s", after.as_secs())
            }
            PathLoss::Reauthentication => f.write_str("the target demands authentication again"),
            PathLoss::Expired => f.write_str("it was away for longer than ctrl-loss-tmo"),
        }
    }
}

/// What the paths share.
pub(super) struct Shared<'a> {
    /// The number of the path.
    pub(super) number: usize,
    pub(super) table: &'a mut RequestTable,
    pub(super) namespace: &'a mut Option<Namespace>,
    pub(super) notices: &'a mut VecDeque<Notice>,
    pub(super) is_closing: bool,
}

/// A path.
#[derive(Debug)]
pub(super) struct Path {
    options: PathOptions,
    pub(super) common: MultipathOptions,
    state: PathState,
    pub(super) session: Option<Box<Session>>,
    /// The end of the association has been handled.
    has_ended: bool,
    /// Why this end has ended it, if it has.
    loss: Option<PathLoss>,
    /// Since when the path is not live; `None`: it is, or has not started.
    away_since: Option<Instant>,
    delay: Duration,
    has_failed: bool,
    /// Why it is not live, or was not before the attempt that is under way.
    last_loss: Option<PathLoss>,
    counters: PathCounters,
    /// When changes of blocks of associations that have ended are repeated.
    replay_at: Option<Instant>,
    /// Changes of the last association are among them.
    has_lost_changes: bool,
    /// And so are changes of earlier ones.
    has_older_changes: bool,
    /// The Keep Alive Timeout that the last controller has granted.
    kato_ms: u32,
    next_queue: u16,
    avoided_until: Option<Instant>,
    pub(super) scan: Scan,
    pub(super) view: Option<Namespace>,
    /// `None`: not reported.
    pub(super) ana: Option<AnaState>,
    /// A status has said that the log has changed: not used until it is read.
    pub(super) is_ana_pending: bool,
    pub(super) change_since: Option<Instant>,
}

impl Path {
    pub(super) fn new(options: PathOptions, common: MultipathOptions) -> Path {
        Path {
            kato_ms: options.session.kato_ms,
            options,
            common,
            state: PathState::Connecting,
            session: None,
            has_ended: false,
            loss: None,
            away_since: None,
            delay: common.reconnect_delay,
            has_failed: false,
            last_loss: None,
            counters: PathCounters::default(),
            replay_at: None,
            has_lost_changes: false,
            has_older_changes: false,
            next_queue: 0,
            avoided_until: None,
            scan: Scan::default(),
            view: None,
            ana: None,
            is_ana_pending: false,
            change_since: None,
        }
    }

    pub(super) fn fabric(&self) -> usize {
        self.options.fabric
    }

    pub(super) fn options(&self) -> &PathOptions {
        &self.options
    }

    pub(super) fn state(&self) -> PathState {
        self.state
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    pub(super) fn last_loss(&self) -> Option<&PathLoss> {
        self.last_loss.as_ref()
    }

    pub(super) fn counters(&self) -> PathCounters {
        self.counters
    }

    pub(super) fn ana(&self) -> Option<AnaState> {
        self.ana.filter(|_| self.state == PathState::Live)
    }

    pub(super) fn session(&self) -> Option<&Session> {
        self.session.as_deref()
    }

    pub(super) fn on_event(&mut self, event: Event, r: &mut Resources<'_>) -> Option<Event> {
        let fabric = r.fabrics.fabric(self.options.fabric);
        match &mut self.session {
            Some(session) => session.on_event(event, &mut Io { pool: r.pool, fabric, now: r.now }),
            None => Some(event),
        }
    }

    /// How well it can be used, 0 best; `None`: not now.
    pub(super) fn rank(&self, now: Instant) -> Option<u8> {
        let is_known = self.view.is_some() && !self.scan.is_open();
        if self.state != PathState::Live || !is_known || self.is_ana_pending {
            return None;
        }
        let state = match self.ana {
            None | Some(AnaState::OPTIMIZED) => 0,
            Some(AnaState::NON_OPTIMIZED) => 1,
            Some(_) => return None,
        };
        let avoided = self.avoided_until.is_some_and(|until| now < until);
        Some(state + if avoided { 2 } else { 0 })
    }

    /// Whether requests wait for it: until a time, or (`None`) as long as it is so.
    pub(super) fn is_waited_for(&self, now: Instant) -> Result<Option<Instant>, ()> {
        match self.state {
            PathState::Live if self.view.is_some() => Ok(None),
            PathState::Live | PathState::Lost => Err(()),
            PathState::Connecting | PathState::Resetting { .. } => {
                let limit = self.common.fast_io_fail_tmo;
                let until =
                    limit.and_then(|limit| self.away_since.unwrap_or(now).checked_add(limit));
                match until {
                    Some(until) if until <= now => Err(()),
                    until => Ok(until),
                }
            }
        }
    }

    /// Handles timers and whatever the session has to tell. Returns the time of the next call.
    pub(super) fn tick(&mut self, s: &mut Shared<'_>, r: &mut Resources<'_>) -> Option<Instant> {
        let due = |at: Instant| at <= r.now;
        if self.replay_at.is_some_and(due) {
            self.replay_at = None;
            s.table.replay(s.number);
        }
        self.reconnect(s, r);
        let next = self.drive(s, r);
        let until = match self.state {
            PathState::Resetting { until } if self.session.is_none() && !s.is_closing => {
                earlier(Some(until), self.expiry())
            }
            _ => None,
        };
        let change = self.change_limit().filter(|_| self.state == PathState::Live);
        earlier(earlier(next, until), earlier(self.replay_at, change))
    }

    /// Ends the association: the path is connected again later.
    pub(super) fn reset(&mut self, why: PathLoss, r: &mut Resources<'_>) {
        let Some(session) = &mut self.session else { return };
        if session.ended().is_none() {
            self.loss = Some(why);
            let fabric = r.fabrics.fabric(self.options.fabric);
            session.abort(&mut Io { pool: r.pool, fabric, now: r.now });
        }
    }

    /// Shuts the controller down.
    pub(super) fn close(&mut self, r: &mut Resources<'_>) {
        let Some(session) = &mut self.session else { return };
        let fabric = r.fabrics.fabric(self.options.fabric);
        session.close(&mut Io { pool: r.pool, fabric, now: r.now });
    }

    /// Sends the first request of the queue. Returns whether that was possible.
    pub(super) fn send(
        &mut self,
        slot: u32,
        table: &mut RequestTable,
        r: &mut Resources<'_>,
    ) -> bool {
        let (Some(session), Some((request, _))) = (&mut self.session, table.get(slot)) else {
            return false;
        };
        let MultipathOptions { nsid, write_through, .. } = self.common;
        let operation = request.operation;
        let ranges = request.data.as_ref().map_or(1, |data| operation.ranges(data));
        let sqe = operation.command(nsid, request.slba, request.blocks, ranges, write_through);
        let mut data = request.data.take().map_or(Data::None, Data::Buf);
        let fabric = r.fabrics.fabric(self.options.fabric);
        let mut io = Io { pool: r.pool, fabric, now: r.now };
        let (first, next, last) = match operation.is_admin() {
            true => (0, 0, 0),
            false => {
                let last = session.io_queues().max(1);
                self.next_queue = self.next_queue % last + 1;
                (1, self.next_queue, last)
            }
        };
        for queue in (next..=last).chain(first..next) {
            let request = Request { sqe, data, tag: slot.into() };
            match session.submit(queue, request, &mut io) {
                Ok(()) => {
                    table.sent();
                    self.counters.commands += 1;
                    return true;
                }
                Err((request, _)) => data = request.data,
            }
        }
        request.data = buf_of(data);
        false
    }

    /// Starts the next attempt when it is time, or gives the path up.
    fn reconnect(&mut self, s: &mut Shared<'_>, r: &mut Resources<'_>) {
        if self.session.is_some() || s.is_closing {
            return;
        }
        match self.state {
            PathState::Resetting { .. } if self.expiry().is_some_and(|at| at <= r.now) => {
                self.state = PathState::Lost;
                let why = PathLoss::Expired;
                s.notices.push_back(Notice::Failed { path: s.number, why, next: None });
            }
            PathState::Resetting { until } if until > r.now => {}
            PathState::Lost | PathState::Live => {}
            PathState::Connecting | PathState::Resetting { .. } => {
                self.away_since.get_or_insert(r.now);
                self.state = PathState::Connecting;
                self.has_ended = false;
                self.scan = Scan::default();
                let mut session = Box::new(Session::new(self.options.session.clone()));
                let fabric = r.fabrics.fabric(self.options.fabric);
                session.start(&mut Io { pool: r.pool, fabric, now: r.now });
                self.session = Some(session);
            }
        }
    }

    fn drive(&mut self, s: &mut Shared<'_>, r: &mut Resources<'_>) -> Option<Instant> {
        let fabric = r.fabrics.fabric(self.options.fabric);
        let session = self.session.as_mut()?;
        let next = session.tick(&mut Io { pool: r.pool, fabric, now: r.now });
        if session.phase() == Phase::Ready {
            while let Some(event) = self.session.as_mut().and_then(|session| session.next_event()) {
                self.on_async_event(event, r);
            }
            if self.change_limit().is_some_and(|at| at <= r.now) {
                let after = self.change_since.map_or(Duration::ZERO, |since| r.now - since);
                self.reset(PathLoss::AnaChange { after }, r);
            }
            self.continue_scan(s, r);
        }
        // What is done may end the association, and its end returns the requests.
        while let Some(done) = self.session.as_mut().and_then(|session| session.next_done()) {
            self.on_done(done, s, r);
        }
        let session = self.session.as_ref()?;
        if session.ended().is_some() && !self.has_ended {
            self.on_end(r.now);
        }
        if self.session.as_ref().is_some_and(|session| session.phase() == Phase::Ended) {
            self.conclude(s, r);
            return None;
        }
        let retry = self.scan.retry_at().filter(|_| !self.has_ended);
        earlier(next, retry)
    }

    fn on_done(&mut self, done: Done, s: &mut Shared<'_>, r: &mut Resources<'_>) {
        let Done { tag, outcome, data, .. } = done;
        if tag == SCAN_TAG {
            self.on_scan_done(outcome, buf_of(data), s, r);
            // The next command of the scan, or the first requests, follow in the same iteration.
            return self.continue_scan(s, r);
        }
        let (slot, data) = (tag as u32, buf_of(data));
        let Some((request, repeats)) = s.table.get(slot) else { return };
        match outcome {
            Ok(Response { status, .. }) => {
                match dispose(status, repeats, self.retry_delays_100ms()) {
                    Disposition::Done => {
                        s.table.finish(slot, data, status.ok().map_err(Failure::Status));
                    }
                    Disposition::Repeat(delay) => {
                        let state = match delay.is_zero() {
                            true => State::Queued,
                            false => State::Delayed(r.now + delay),
                        };
                        s.table.repeat(slot, data, state, true);
                    }
                    Disposition::Failover { ana } => {
                        let state = self.on_path_error(ana, r.now);
                        s.table.repeat(slot, data, state, false);
                    }
                    Disposition::Reset => {
                        s.table.repeat(slot, data, State::Queued, false);
                        self.reset(PathLoss::Reauthentication, r);
                    }
                }
            }
            Err(Lost) if s.is_closing => s.table.finish(slot, data, Err(Failure::Closed)),
            Err(Lost) => {
                let waits = request.operation.is_change() && self.replay_wait().is_some();
                self.has_lost_changes |= waits;
                let state = if waits { State::Replay(s.number) } else { State::Queued };
                s.table.repeat(slot, data, state, false);
            }
        }
    }

    /// A path related status. Returns where the request goes.
    fn on_path_error(&mut self, ana: bool, now: Instant) -> State {
        if ana && self.ana.is_some() {
            self.is_ana_pending = true;
            self.scan.read_ana();
            return State::Queued;
        }
        self.avoided_until = now.checked_add(AVOIDED_FOR);
        State::Delayed(now + PATH_ERROR_DELAY)
    }

    /// The association has ended, or will for certain.
    fn on_end(&mut self, now: Instant) {
        self.has_ended = true;
        self.delay = match self.state {
            PathState::Live => self.common.reconnect_delay,
            _ if !self.has_failed => self.common.reconnect_delay,
            _ => (self.delay * 2)
                .min(self.common.reconnect_delay_max)
                .max(self.common.reconnect_delay),
        };
        self.away_since.get_or_insert(now);
        self.state = PathState::Resetting { until: now + self.delay };
        (self.view, self.ana, self.change_since) = (None, None, None);
        self.is_ana_pending = false;
        // An attempt to connect that fails has sent nothing, and postpones nothing.
        if self.has_lost_changes {
            self.has_older_changes = self.replay_at.is_some();
            self.replay_at = self.replay_wait().map(|wait| now + wait);
        }
    }

    /// All connections of the association are closed.
    fn conclude(&mut self, s: &mut Shared<'_>, r: &mut Resources<'_>) {
        let Some(session) = self.session.take() else { return };
        let ended = session.ended().cloned().unwrap_or(EndReason::Closed);
        let has_own = std::mem::take(&mut self.has_lost_changes) && !self.has_older_changes;
        if session.is_ended_by_target() && has_own {
            self.replay_at = None;
            s.table.replay(s.number);
        }
        if s.is_closing {
            return;
        }
        self.has_failed = true;
        self.counters.losses += 1;
        let why = self.loss.take().unwrap_or(PathLoss::Ended(ended));
        if why.is_final() {
            self.state = PathState::Lost;
        }
        let next = match self.state {
            PathState::Resetting { until } => Some(until.saturating_duration_since(r.now)),
            _ => None,
        };
        self.last_loss = Some(why.clone());
        s.notices.push_back(Notice::Failed { path: s.number, why, next });
    }

    /// The namespace is identified: the path can be used.
    pub(super) fn become_live(&mut self, s: &mut Shared<'_>) {
        if self.state != PathState::Connecting {
            return;
        }
        self.state = PathState::Live;
        self.away_since = None;
        self.has_failed = false;
        self.last_loss = None;
        self.counters.connects += 1;
        self.avoided_until = None;
        s.notices.push_back(Notice::Live { path: s.number, ana: self.ana });
    }

    /// The controller has this Keep Alive Timeout.
    pub(super) fn on_keep_alive_timer(&mut self, kato_ms: u32) {
        self.kato_ms = kato_ms.max(self.options.session.kato_ms);
    }

    /// Whether a target may still carry out changes of blocks of an association that has ended.
    pub(super) fn has_replay(&self) -> bool {
        self.replay_at.is_some()
    }

    /// How long changes of blocks wait after the end of an association, if they do.
    pub(super) fn replay_wait(&self) -> Option<Duration> {
        let has_keep_alive = self.options.session.kato_ms > 0;
        let margin = self.common.replay_margin.filter(|_| has_keep_alive)?;
        Some(Duration::from_millis(self.kato_ms.into()) + margin)
    }

    /// When the path is given up.
    fn expiry(&self) -> Option<Instant> {
        self.away_since?.checked_add(self.common.ctrl_loss_tmo?)
    }

    /// When the ANA state change has taken too long: after twice ANATT, as in Linux.
    fn change_limit(&self) -> Option<Instant> {
        let anatt_s = self.session.as_ref()?.controller().anatt_s.max(1);
        self.change_since?.checked_add(Duration::from_secs(2 * u64::from(anatt_s)))
    }

    fn retry_delays_100ms(&self) -> [u16; 3] {
        self.session.as_ref().map_or([0; 3], |session| {
            let page = session.controller();
            [page.crdt1_100ms, page.crdt2_100ms, page.crdt3_100ms]
        })
    }
}

/// Returns the buffer of a request, which uses no other data.
pub(super) fn buf_of(data: Data) -> Option<Buf> {
    match data {
        Data::Buf(buf) => Some(buf),
        Data::None | Data::Exposed { .. } => None,
    }
}
