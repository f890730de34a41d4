//! The association of one host with one controller: state shared by all its queues, on whichever
//! reactor they are. Written rarely, read by relaxed loads.

use std::collections::{BTreeSet, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvme::{Nqn, Status};
use nvmfd_blockdev::lock;

use crate::auth::exchange;
use crate::controller::ReservationView;
use crate::diag::cause::Cause;
use crate::subsystem::ana::{AnaStateTable, AnaStates};
use crate::subsystem::unflushed::Unflushed;
use crate::subsystem::usage::Usage;

/// Entries of the Error Information log (ELPE + 1).
pub(crate) const ERROR_LOG_ENTRIES: usize = 64;

/// The association of a host with a controller.
#[derive(Debug)]
pub struct Association {
    /// Unique in the process for its whole life; what reactors name the association by.
    pub id: u64,
    /// Controller id, unique in the subsystem among live controllers.
    pub cntlid: u16,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host, as it calls itself.
    pub host: Nqn,
    /// The host identifier of its Connect command.
    pub host_id: [u8; 16],
    /// The shortest keep alive timeout that its listener grants, in milliseconds.
    pub keep_alive_min_ms: u32,
    /// Its host is not identified: no configuration names it, and it need not authenticate.
    pub anonymous: bool,
    /// The address by which the host reached us.
    pub local: SocketAddr,
    /// I/O queues that Set Features 07h granted.
    granted: AtomicU16,
    /// I/O queues that are connected and not yet wholly closed.
    io_queues: AtomicU16,
    /// Enabled, ready and not shutting down: I/O commands are served.
    ready: AtomicBool,
    /// Over: every queue of it must close.
    closed: AtomicBool,
    /// Why others have ended it, as the place in [`Cause::ALL`] plus one; 0: they have not.
    ended_for: AtomicU8,
    /// It was ended by its own host.
    blamed: AtomicBool,
    /// A fatal error was ordered, which its admin queue has not reported yet.
    fatal: AtomicBool,
    /// Counts controller resets; an I/O queue of an earlier count must close.
    epoch: AtomicU16,
    /// The host has proved itself on the admin queue, where it must.
    proved: AtomicBool,
    /// The key by which its host has proved itself is no longer valid.
    /// How often the key of its host was replaced since it is there.
    key_changes: AtomicU32,
    /// Some of its commands are counted together with those of others.
    shared_stats: AtomicBool,
    /// The host supports the retry delays of statuses (ACRE).
    retry_delays: AtomicBool,
    /// An admitted queue has received a command since the last check.
    traffic: AtomicBool,
    /// The host has authenticated on a queue since the last check.
    proof: AtomicBool,
    /// Started by its admin queue.
    keep_alive: Mutex<Option<KeepAliveTimer>>,
    errors: Mutex<ErrorLog>,
    /// Counters of its subsystem.
    pub subsystem_usage: Arc<Usage>,
    /// Restrictions by reservations, and reservation notifications.
    pub reservations: ReservationView,
    /// Unflushed writes of its host, by any controller.
    pub unflushed: Arc<Unflushed>,
    /// Namespaces that are not what they were.
    pub changes: Changes,
    /// ANA states of its path.
    pub reach: AnaStateTable,
}

impl Association {
    /// A new association; not ready, and by no address.
    pub fn new(id: u64, cntlid: u16, subsystem: Nqn, host: Nqn, host_id: [u8; 16]) -> Association {
        let reservations = match subsystem == Nqn::DISCOVERY {
            true => ReservationView::default(),
            false => ReservationView::new(),
        };
        Association {
            id,
            cntlid,
            subsystem,
            host,
            host_id,
            keep_alive_min_ms: 0,
            anonymous: false,
            local: (Ipv4Addr::UNSPECIFIED, 0).into(),
            granted: AtomicU16::new(0),
            io_queues: AtomicU16::new(0),
            ready: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            ended_for: AtomicU8::new(0),
            blamed: AtomicBool::new(false),
            fatal: AtomicBool::new(false),
            epoch: AtomicU16::new(0),
            proved: AtomicBool::new(false),
            key_changes: AtomicU32::new(0),
            retry_delays: AtomicBool::new(false),
            traffic: AtomicBool::new(false),
            proof: AtomicBool::new(false),
            keep_alive: Mutex::default(),
            errors: Mutex::default(),
            subsystem_usage: Arc::default(),
            reservations,
            unflushed: Arc::new(Unflushed::none()),
            shared_stats: AtomicBool::new(false),
            changes: Changes::default(),
            reach: AnaStateTable::default(),
        }
    }

    /// Sets the path of the host, which reached us at `local`, and its ANA states.
    #[must_use]
    pub(crate) fn via(self, local: SocketAddr, states: &AnaStates) -> Association {
        self.reach.set(states);
        Association { local, ..self }
    }

    /// Whether I/O commands are served. A reader that sees false also sees the reason: an end or a
    /// reset is stored before.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Opens or closes the I/O queues to commands.
    pub fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }

    /// The key with which the host has authenticated is no longer valid.
    pub(crate) fn note_key_change(&self) {
        self.key_changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of key changes of its host: a queue that authenticated before the last change must
    /// authenticate with the new key.
    pub(crate) fn key_changes(&self) -> u32 {
        self.key_changes.load(Ordering::Relaxed)
    }

    /// Whether the host has authenticated; false if it need not.
    pub fn is_proved(&self) -> bool {
        self.proved.load(Ordering::Relaxed)
    }

    /// The host has authenticated.
    pub fn set_proved(&self) {
        self.proved.store(true, Ordering::Relaxed);
    }

    /// Some of its commands are counted together with those of other controllers.
    pub(crate) fn note_shared_stats(&self) {
        self.shared_stats.store(true, Ordering::Relaxed);
    }

    /// Whether all of its commands are counted apart from those of other controllers.
    pub fn has_own_stats(&self) -> bool {
        !self.shared_stats.load(Ordering::Relaxed)
    }

    /// Whether the host supports retry delays.
    pub(crate) fn heeds_retry_delays(&self) -> bool {
        self.retry_delays.load(Ordering::Relaxed)
    }

    /// Sets whether the host supports retry delays.
    pub(crate) fn allow_retry_delays(&self, heeded: bool) {
        self.retry_delays.store(heeded, Ordering::Relaxed);
    }

    /// Whether it has ended.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes it: each queue closes at the next check of its reactor.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.set_ready(false);
    }

    /// Closes it for a cause that its queues do not know; the first cause is kept.
    pub fn end(&self, cause: Cause) {
        let (none, number) = (0, cause as u8 + 1);
        // It stays 0 or becomes this; a reader that finds it closed sees the cause.
        let _ = self.ended_for.compare_exchange(none, number, Ordering::Relaxed, Ordering::Relaxed);
        self.close();
    }

    /// Why others have ended it, if they have.
    pub fn ended_for(&self) -> Option<Cause> {
        let number = self.ended_for.load(Ordering::Relaxed).checked_sub(1)?;
        Cause::ALL.get(usize::from(number)).copied()
    }

    /// Marks that its own host ends it; before the end.
    pub(crate) fn blame(&self) {
        self.blamed.store(true, Ordering::Relaxed);
    }

    /// Whether its own host has caused its end.
    pub(crate) fn is_blamed(&self) -> bool {
        self.blamed.load(Ordering::Relaxed)
    }

    /// Orders a fatal error (CSTS.CFS), to be reported at the next check of its admin queue.
    pub(crate) fn order_fatal_error(&self) {
        self.fatal.store(true, Ordering::Relaxed);
    }

    /// Takes an ordered fatal error that was not reported yet.
    pub(crate) fn take_fatal_error(&self) -> bool {
        self.fatal.load(Ordering::Relaxed) && self.fatal.swap(false, Ordering::Relaxed)
    }

    /// Number of controller resets.
    pub fn epoch(&self) -> u16 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// A controller reset: the I/O queues of before must close.
    pub(crate) fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// I/O queues the host may connect.
    pub fn granted_queues(&self) -> u16 {
        self.granted.load(Ordering::Relaxed)
    }

    /// Sets how many I/O queues the host may connect.
    pub fn grant_queues(&self, queues: u16) {
        self.granted.store(queues, Ordering::Relaxed);
    }

    /// I/O queues that are connected and not yet wholly closed.
    pub fn io_queues(&self) -> u16 {
        self.io_queues.load(Ordering::Relaxed)
    }

    /// Counts an I/O queue in (+1) or out (-1).
    pub(crate) fn count_io_queue(&self, opened: bool) {
        match opened {
            true => self.io_queues.fetch_add(1, Ordering::Relaxed),
            false => self.io_queues.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Records that the host is alive. Loads first: the line stays shared while I/O flows.
    #[inline]
    pub(crate) fn note_traffic(&self) {
        if !self.traffic.load(Ordering::Relaxed) {
            self.traffic.store(true, Ordering::Relaxed);
        }
    }

    /// Records an authentication of the host on a queue.
    pub(crate) fn note_proof(&self) {
        self.proof.store(true, Ordering::Relaxed);
    }

    /// Starts the keep alive timer with this timeout (NVMe base specification, 3.9).
    pub(crate) fn start_keep_alive(&self, timeout: Duration, now: Instant) {
        let timer = KeepAliveTimer { deadline: now + timeout, timeout };
        *lock(&self.keep_alive) = Some(timer);
    }

    /// Restarts the timer if anything was received since the last call, as of this time.
    pub(crate) fn restart_keep_alive(&self, received: Instant) {
        let traffic = self.traffic.swap(false, Ordering::Relaxed);
        let proof = self.proof.swap(false, Ordering::Relaxed);
        let mut timer = lock(&self.keep_alive);
        if let Some(timer) = &mut *timer {
            timer.deadline = timer.after(received, traffic, proof);
        }
    }

    /// Whether the timer has expired, if what has arrived since the last
    /// [`Association::restart_keep_alive`] was received at `received`.
    pub(crate) fn is_keep_alive_expired(&self, received: Instant, now: Instant) -> bool {
        let traffic = self.traffic.load(Ordering::Relaxed);
        let proof = self.proof.load(Ordering::Relaxed);
        let timer = lock(&self.keep_alive);
        timer.is_some_and(|timer| now >= timer.after(received, traffic, proof))
    }

    /// Records a failed command. Locks: failures are not the hot path.
    pub(crate) fn log_error(&self, entry: ErrorRecord) {
        let mut log = lock(&self.errors);
        // Numbers are unique in the subsystem, also across restarts.
        log.push(self.subsystem_usage.count_error(), entry);
    }

    /// Number of errors of this controller, and the latest ones with their numbers, newest first.
    pub fn errors(&self) -> (u64, Vec<(u64, ErrorRecord)>) {
        let log = lock(&self.errors);
        (log.count, log.entries.iter().rev().copied().collect())
    }
}

/// The keep alive timeout of the host, and when it expires.
#[derive(Clone, Copy, Debug)]
struct KeepAliveTimer {
    deadline: Instant,
    timeout: Duration,
}

impl KeepAliveTimer {
    /// When it expires, if the host has sent a command at `received`, or has authenticated on a
    /// queue.
    fn after(self, received: Instant, traffic: bool, proof: bool) -> Instant {
        let of_traffic = traffic.then(|| received + self.timeout);
        // Its next queue may have to authenticate first, and commands on it do not count before
        // that.
        let of_proof = proof.then(|| received + self.timeout.max(exchange::DEADLINE));
        [of_traffic, of_proof].into_iter().flatten().fold(self.deadline, Instant::max)
    }
}

/// Namespaces that have changed without a new snapshot, until the controller takes note.
#[derive(Debug, Default)]
pub struct Changes {
    news: AtomicBool,
    nsids: Mutex<BTreeSet<u32>>,
}

impl Changes {
    /// Adds a namespace.
    pub fn insert(&self, nsid: u32) {
        lock(&self.nsids).insert(nsid);
        self.news.store(true, Ordering::Release);
    }

    /// What was recorded since the last call, in ascending order; none if there is nothing.
    pub fn take(&self) -> Option<BTreeSet<u32>> {
        // A load first: usually there are none, and the line stays shared.
        let news = self.news.load(Ordering::Relaxed) && self.news.swap(false, Ordering::Acquire);
        let take = || std::mem::take(&mut *lock(&self.nsids));
        news.then(take)
    }
}

/// One failed command, for the Error Information log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorRecord {
    /// Queue id.
    pub sqid: u16,
    /// Command id.
    pub cid: u16,
    /// Its status.
    pub status: Status,
    /// Namespace id of the command.
    pub nsid: u32,
    /// First LBA of the command, or 0.
    pub slba: u64,
    /// Its opcode.
    pub opcode: u8,
    /// Location of the wrong parameter, as in the log.
    pub parameter: u16,
}

#[derive(Debug, Default)]
struct ErrorLog {
    count: u64,
    entries: VecDeque<(u64, ErrorRecord)>,
}

impl ErrorLog {
    fn push(&mut self, number: u64, entry: ErrorRecord) {
        self.count += 1;
        if self.entries.len() == ERROR_LOG_ENTRIES {
            self.entries.pop_front();
        }
        self.entries.push_back((number, entry));
    }
}

/// Numbers for [`Association::id`].
pub fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use crate::controller::association::*;

    #[test]
    fn the_error_log_keeps_the_latest_and_counts_all() {
        let nqn: Nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
        let association = Association::new(1, 1, nqn, nqn, [0; 16]);
        for cid in 0..100 {
            let status = Status::INVALID_FIELD;
            let (opcode, parameter) = (2, 0xFFFF);
            let entry = ErrorRecord { sqid: 0, cid, status, nsid: 0, slba: 0, opcode, parameter };
            association.log_error(entry);
        }
        let (count, entries) = association.errors();
        assert_eq!((count, entries.len()), (100, ERROR_LOG_ENTRIES));
        assert_eq!(association.subsystem_usage.errors(), 100);
        assert_eq!((entries[0].0, entries[0].1.cid), (100, 99));
        assert_eq!((entries[63].0, entries[63].1.cid), (37, 36));
    }
}
