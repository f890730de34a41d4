//! Range locks: make fused Compare and Write atomic, and keep late writes of closed connections from
//! overwriting later ones.
//!
//! While no fused command is in progress, a command that changes blocks takes no lock and only reads a
//! flag. The first fused command sets that flag. From then on each change locks its blocks before it is
//! submitted to a device, and every reactor locks those of the changes that it has submitted without a
//! lock. When all reactors have, and no other lock covers its blocks, the fused command has them
//! exclusively. (It does not wait for changes of other blocks: their device may hang.) After many changes
//! without a fused command the flag is cleared.
//!
//! A command that changes blocks which cannot be read ([`crate::subsystem::bad_blocks`]) locks them like a
//! fused one until their marks are removed: otherwise an older write, which the marks hide, could be
//! executed after this one and become readable.
//!
//! # Late writes of closed connections
//!
//! A device may delay a write for long and then execute it. A host that has given up reconnects, repeats
//! the write that was not answered, receives its completion, and writes the next data: if the old write
//! were executed then, it would silently bring back overwritten data. So operations that a device still
//! has when their connection is closed keep their blocks locked until they complete: later changes of
//! these blocks wait, also those of other hosts; all other commands proceed. A flag for that backing
//! store alone is set.
//!
//! This begins when the target learns that the connection has ended. A write that arrives by another path
//! before that moment is unordered, as any two writes in progress at once. (The kernel's target waits for
//! its commands before it frees a queue, but admits the host, and its writes, at once.) Reads do not
//! wait. One may return the earlier data, and a later one those of the late write, as long as nothing was
//! written since; a host that needs certainty uses Preempt and Abort.
//!
//! # Whole devices
//!
//! A snapshot of a backing file locks all blocks of its device like a fused command
//! ([`RangeLocks::lock_device`]) while the file system copies it.
//!
//! # Order
//!
//! Locks are granted in the order of their requests, so every request is granted. A holder waits for its
//! device and its marks only, so there is no deadlock. A grant carries no message: the eventfd of the
//! reactor is signalled and the reactor looks, so no grant can be lost.

use std::array;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::interval_index::IntervalIndex;
use crate::sched::Waker;
use nvmfd_blockdev::{DeviceId, lock};

/// Number of changes without a fused command after which changes need no lock any more.
const CALM: u32 = 256;

/// All changes need a lock: there are fused commands.
const FUSED: u8 = 1;
/// Changes of some devices need one: closed connections have operations there.
const LEFT: u8 = 2;

/// Bit of the tickets of changes that began without a lock: they precede every request.
const BEGUN: u64 = 1 << 63;

/// The block range that a command changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RangeLock {
    /// The device.
    pub backing: DeviceId,
    /// Byte offset.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// No other command may change any of it meanwhile. Shared locks do not exclude each other.
    pub alone: bool,
    /// The reactor to wake when it is granted.
    pub reactor: usize,
}

/// The table of range locks, shared by all reactors.
#[derive(Debug)]
pub struct RangeLocks {
    /// [`FUSED`] and [`LEFT`].
    watching: AtomicU8,
    /// Devices with operations of closed connections: a bit each.
    left: [AtomicU64; (DeviceId::COUNT / u64::BITS) as usize],
    /// Number of times that the flag of fused commands was set.
    round: AtomicU32,
    reactors: Vec<Arc<dyn Waker>>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// By ticket, which is the order of the requests.
    entries: BTreeMap<u64, LockEntry>,
    /// By blocks: exclusive locks, shared ones, and those of closed connections.
    alone: IntervalIndex,
    shared: IntervalIndex,
    left: IntervalIndex,
    /// Those of the first two that are not granted.
    waiting: IntervalIndex,
    last: u64,
    watched: bool,
    /// Reactors that have not locked their changes in progress yet.
    awaited: usize,
    /// Changes since the last fused command.
    calm: u32,
}

#[derive(Clone, Copy, Debug)]
struct LockEntry {
    claim: RangeLock,
    granted: bool,
    left: bool,
}

impl RangeLocks {
    /// Returns an empty table for these reactors.
    #[must_use]
    pub fn new(reactors: Vec<Arc<dyn Waker>>) -> RangeLocks {
        RangeLocks {
            watching: AtomicU8::new(0),
            left: array::from_fn(|_| AtomicU64::new(0)),
            round: AtomicU32::new(0),
            reactors,
            table: Mutex::default(),
        }
    }

    /// Whether changes of a device need a lock: one relaxed load, as a rule. That suffices also
    /// after a connection was closed: network messages lie between its end and the next command of
    /// its host on another one.
    #[inline]
    pub fn is_watching(&self, backing: DeviceId) -> bool {
        match self.watching.load(Ordering::Relaxed) {
            0 => false,
            what => self.watches(what, backing),
        }
    }

    /// Returns a number that changes each time locking for fused commands begins. A reactor that
    /// finds a new one calls [`RangeLocks::settle`].
    pub fn round(&self) -> u32 {
        self.round.load(Ordering::Acquire)
    }

    /// Requests a lock: returns a ticket, to be given up at the end in any case, and whether the
    /// lock is granted at once.
    #[must_use]
    pub fn claim(&self, claim: RangeLock) -> (u64, bool) {
        let mut table = lock(&self.table);
        if claim.alone {
            self.watch(&mut table);
        } else {
            self.relax(&mut table);
        }
        let ticket = table.next_ticket();
        let granted = table.is_free(ticket, &claim);
        let spans = if claim.alone { &mut table.alone } else { &mut table.shared };
        spans.insert(ticket, &claim);
        if !granted {
            table.waiting.insert(ticket, &claim);
        }
        table.entries.insert(ticket, LockEntry { claim, granted, left: false });
        (ticket, granted)
    }

    /// Requests a lock of all blocks of a device. No reactor is woken when it is granted: whoever
    /// requests it is none, and looks.
    #[must_use]
    pub fn lock_device(&self, backing: DeviceId) -> DeviceLock<'_> {
        let all = RangeLock { backing, at: 0, len: u64::MAX, alone: true, reactor: usize::MAX };
        let (ticket, _) = self.claim(all);
        DeviceLock { locks: self, ticket }
    }

    /// Whether a lock is granted by now.
    pub fn is_granted(&self, ticket: u64) -> bool {
        lock(&self.table).entries.get(&ticket).is_some_and(|entry| entry.granted)
    }

    /// Locks the blocks of a change without a lock that a device still has when its connection is
    /// closed; returns the ticket, to be given up when the change has completed.
    #[must_use]
    pub fn leave(&self, claim: RangeLock) -> u64 {
        let mut table = lock(&self.table);
        let ticket = table.next_ticket();
        table.entries.insert(ticket, LockEntry { claim, granted: true, left: true });
        table.left.insert(ticket, &claim);
        self.note_left(claim.backing, &table);
        ticket
    }

    /// The same for a change with a granted lock.
    pub fn leave_claimed(&self, ticket: u64) {
        let mut table = lock(&self.table);
        let Some(entry) = table.entries.get_mut(&ticket) else { return };
        // An exclusive lock holds its blocks in any case.
        if entry.claim.alone || entry.left || !entry.granted {
            return;
        }
        entry.left = true;
        let claim = entry.claim;
        table.shared.remove(ticket, &claim);
        table.left.insert(ticket, &claim);
        self.note_left(claim.backing, &table);
    }

    /// Releases a lock, granted or not.
    pub fn give_up(&self, ticket: u64) {
        let mut table = lock(&self.table);
        let Some(LockEntry { claim, granted, left }) = table.entries.remove(&ticket) else {
            return;
        };
        let spans = match (left, claim.alone) {
            (true, _) => &mut table.left,
            (false, true) => &mut table.alone,
            (false, false) => &mut table.shared,
        };
        spans.remove(ticket, &claim);
        if !granted {
            table.waiting.remove(ticket, &claim);
        }
        if left {
            self.note_left(claim.backing, &table);
        }
        // No other request has waited for it.
        let met: Vec<u64> = table.waiting.meeting(&claim).collect();
        self.grant(met, &mut table);
    }

    /// Locks the blocks of a change that a device has, and that began without a lock; returns the
    /// ticket. Only fused commands wait for it.
    #[must_use]
    pub fn claim_begun(&self, claim: RangeLock) -> u64 {
        let mut table = lock(&self.table);
        let ticket = table.next_ticket() | BEGUN;
        table.entries.insert(ticket, LockEntry { claim, granted: true, left: false });
        table.shared.insert(ticket, &claim);
        ticket
    }

    /// Records the report of a reactor: it locks all changes from now on, and has locked those in
    /// progress.
    pub fn settle(&self) {
        let mut table = lock(&self.table);
        table.awaited = table.awaited.saturating_sub(1);
        if table.awaited == 0 && !table.alone.is_empty() {
            let all = table.waiting.tickets().collect();
            self.grant(all, &mut table);
        }
    }

    #[cold]
    fn watches(&self, what: u8, backing: DeviceId) -> bool {
        let (word, bit) = place_of(backing);
        what & FUSED != 0 || self.left[word].load(Ordering::Relaxed) & bit != 0
    }

    /// Sets the flag, unless it is set.
    fn watch(&self, table: &mut Table) {
        table.calm = 0;
        if !table.watched {
            table.watched = true;
            table.awaited = self.reactors.len();
            self.watching.fetch_or(FUSED, Ordering::Relaxed);
            self.round.fetch_add(1, Ordering::Release);
            self.reactors.iter().for_each(|reactor| reactor.wake());
        }
    }

    /// Clears it after many changes without a fused command.
    fn relax(&self, table: &mut Table) {
        table.calm = table.calm.saturating_add(1);
        if table.calm > CALM && table.watched && table.awaited == 0 && table.alone.is_empty() {
            table.watched = false;
            self.watching.fetch_and(!FUSED, Ordering::Relaxed);
        }
    }

    /// Records whether closed connections have operations at a device.
    fn note_left(&self, backing: DeviceId, table: &Table) {
        let (word, bit) = place_of(backing);
        match table.left.has(backing) {
            true => self.left[word].fetch_or(bit, Ordering::Relaxed),
            false => self.left[word].fetch_and(!bit, Ordering::Relaxed),
        };
        match table.left.is_empty() {
            true => self.watching.fetch_and(!LEFT, Ordering::Relaxed),
            false => self.watching.fetch_or(LEFT, Ordering::Relaxed),
        };
    }

    /// Grants those of these locks with which nothing conflicts any more.
    fn grant(&self, waiting: Vec<u64>, table: &mut Table) {
        for ticket in waiting {
            let Some(&LockEntry { claim, .. }) = table.entries.get(&ticket) else { continue };
            if !table.is_free(ticket, &claim) {
                continue;
            }
            table.waiting.remove(ticket, &claim);
            table.entries.insert(ticket, LockEntry { claim, granted: true, left: false });
            if let Some(reactor) = self.reactors.get(claim.reactor) {
                reactor.wake();
            }
        }
    }
}

/// Exclusive lock of all blocks of a device, released when it is dropped: for a copy of its backing
/// file at one moment. Reads do not wait for it.
#[derive(Debug)]
pub struct DeviceLock<'a> {
    locks: &'a RangeLocks,
    ticket: u64,
}

impl DeviceLock<'_> {
    /// Whether all earlier changes have completed. Later ones wait from the request on.
    pub fn is_granted(&self) -> bool {
        self.locks.is_granted(self.ticket)
    }
}

impl Drop for DeviceLock<'_> {
    fn drop(&mut self) {
        self.locks.give_up(self.ticket);
    }
}

impl Table {
    fn next_ticket(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Whether no earlier request, granted or not, conflicts with this one, nor a lock of a closed
    /// connection.
    fn is_free(&self, ticket: u64, claim: &RangeLock) -> bool {
        let precedes = |other: u64| other < ticket || other & BEGUN != 0;
        let meets = |spans: &IntervalIndex| spans.meeting(claim).any(precedes);
        if self.left.meeting(claim).next().is_some() {
            return false;
        }
        match claim.alone {
            true => self.awaited == 0 && !meets(&self.alone) && !meets(&self.shared),
            false => !meets(&self.alone),
        }
    }
}

impl RangeLock {
    /// Returns the byte offset behind it.
    pub(super) fn end(&self) -> u64 {
        self.at.saturating_add(self.len)
    }
}

/// Returns the position of a device's bit.
fn place_of(backing: DeviceId) -> (usize, u64) {
    let number = backing.0 % DeviceId::COUNT;
    ((number / u64::BITS) as usize, 1 << (number % u64::BITS))
}

#[cfg(test)]
mod tests {
    use crate::message::{Mailbox, mailbox};
    use crate::sched::range_lock::*;

    fn shared(at: u64) -> RangeLock {
        RangeLock { backing: DeviceId(0), at, len: 4096, alone: false, reactor: 0 }
    }

    fn alone(at: u64, reactor: usize) -> RangeLock {
        RangeLock { alone: true, reactor, ..shared(at) }
    }

    /// For two reactors, watched or not.
    fn exclusion(watched: bool) -> (RangeLocks, [Mailbox; 2]) {
        let [(a, to_a), (b, to_b)] = [mailbox().unwrap(), mailbox().unwrap()];
        let exclusion = RangeLocks::new(vec![a.waker(), b.waker()]);
        if watched {
            let (ticket, _) = exclusion.claim(alone(1 << 40, 0));
            exclusion.settle();
            exclusion.settle();
            exclusion.give_up(ticket);
            to_a.hush();
            to_b.hush();
        }
        (exclusion, [to_a, to_b])
    }

    #[test]
    fn the_first_fused_command_waits_for_unlocked_writes_of_its_blocks() {
        let (exclusion, message) = exclusion(false);
        assert!(!exclusion.is_watching(DeviceId(0)));
        let (ticket, granted) = exclusion.claim(alone(0, 1));
        assert!(!granted && exclusion.is_watching(DeviceId(0)) && exclusion.round() == 1);
        assert!(message.iter().all(Mailbox::hush), "all reactors are asked to look");
        let elsewhere = [shared(4096), RangeLock { backing: DeviceId(1), ..shared(0) }];
        let elsewhere = elsewhere.map(|claim| exclusion.claim_begun(claim));
        let here = [0, 0].map(|at| exclusion.claim_begun(shared(at)));
        assert!(may_write(&exclusion, 4096) && !may_write(&exclusion, 0));
        exclusion.settle();
        exclusion.give_up(here[0]);
        exclusion.settle();
        assert!(!exclusion.is_granted(ticket), "one is still under way");
        assert!(!message[1].hush());
        exclusion.give_up(here[1]);
        assert!(exclusion.is_granted(ticket) && message[1].hush() && !message[0].hush());
        exclusion.give_up(ticket);
        let lock = exclusion.lock_device(DeviceId(0));
        assert!(!lock.is_granted() && exclusion.round() == 1, "changes are watched already");
        exclusion.leave_claimed(elsewhere[0]);
        assert!(!lock.is_granted() && !may_write(&exclusion, 4096));
        exclusion.give_up(elsewhere[0]);
        assert!(lock.is_granted(), "the rest is at another device");
        drop(lock);
        exclusion.give_up(elsewhere[1]);
    }

    #[test]
    fn writes_exclude_fused_commands_and_not_each_other() {
        let (exclusion, message) = exclusion(true);
        let (first, granted) = exclusion.claim(shared(0));
        assert!(granted);
        let (second, granted) = exclusion.claim(shared(0));
        assert!(granted, "two writes of one block are the hosts' affair");
        let (fused, granted) = exclusion.claim(alone(0, 1));
        assert!(!granted);
        let (third, granted) = exclusion.claim(shared(0));
        assert!(!granted, "nobody overtakes");
        let elsewhere = [shared(4096), RangeLock { backing: DeviceId(1), ..shared(0) }];
        for claim in elsewhere {
            let (ticket, granted) = exclusion.claim(claim);
            assert!(granted, "{claim:?}");
            exclusion.give_up(ticket);
        }
        exclusion.give_up(first);
        assert!(!exclusion.is_granted(fused));
        exclusion.give_up(second);
        assert!(exclusion.is_granted(fused) && message[1].hush());
        assert!(!exclusion.is_granted(third));
        exclusion.give_up(fused);
        assert!(exclusion.is_granted(third) && message[0].hush());
        exclusion.give_up(third);
    }

    #[test]
    fn fused_commands_lock_the_same_blocks_in_turn() {
        let (exclusion, _mail) = exclusion(true);
        let tickets: Vec<u64> = (0..4).map(|_| exclusion.claim(alone(0, 0)).0).collect();
        let granted = || tickets.iter().map(|t| exclusion.is_granted(*t)).collect::<Vec<_>>();
        assert_eq!(granted(), [true, false, false, false]);
        // A waiting request is given up: the others are not affected.
        exclusion.give_up(tickets[1]);
        assert_eq!(granted(), [true, false, false, false]);
        exclusion.give_up(tickets[0]);
        assert_eq!(granted(), [false, false, true, false]);
        exclusion.give_up(tickets[2]);
        assert_eq!(granted(), [false, false, false, true]);
    }

    #[test]
    fn write_tracking_ends_after_many_writes_and_restarts_on_demand() {
        let (exclusion, _mail) = exclusion(true);
        let mut changes = 0;
        while exclusion.is_watching(DeviceId(0)) {
            let (ticket, granted) = exclusion.claim(shared(0));
            assert!(granted);
            exclusion.give_up(ticket);
            changes += 1;
        }
        assert_eq!(changes, CALM + 1);
        let (ticket, granted) = exclusion.claim(alone(0, 0));
        assert!(!granted && exclusion.round() == 2);
        exclusion.settle();
        exclusion.settle();
        assert!(exclusion.is_granted(ticket));
    }

    #[test]
    fn a_locked_device_is_not_changed_until_the_lock_is_dropped() {
        let (exclusion, message) = exclusion(true);
        let (earlier, granted) = exclusion.claim(shared(1 << 30));
        assert!(granted);
        let late = exclusion.leave(shared(1 << 40));
        let lock = exclusion.lock_device(DeviceId(0));
        let (later, granted) = exclusion.claim(RangeLock { reactor: 1, ..shared(0) });
        assert!(!granted && !lock.is_granted());
        exclusion.give_up(earlier);
        assert!(!lock.is_granted(), "a closed connection has left a change");
        exclusion.give_up(late);
        assert!(lock.is_granted() && !exclusion.is_granted(later));
        let elsewhere = RangeLock { backing: DeviceId(1), ..shared(0) };
        assert!(exclusion.claim(elsewhere).1, "other devices are not locked");
        drop(lock);
        assert!(exclusion.is_granted(later) && message[1].hush());
    }

    /// Whether a write of these blocks may begin.
    fn may_write(exclusion: &RangeLocks, at: u64) -> bool {
        let (ticket, granted) = exclusion.claim(shared(at));
        exclusion.give_up(ticket);
        granted
    }

    #[test]
    fn writes_left_by_a_closed_connection_delay_overlapping_writes() {
        let (exclusion, message) = exclusion(false);
        let (here, there) = (DeviceId(0), DeviceId(64));
        let old = exclusion.leave(RangeLock { len: 8192, ..shared(4096) });
        assert!(exclusion.is_watching(here) && !exclusion.is_watching(there));
        let granted = [0, 4096, 8192, 12288].map(|at| may_write(&exclusion, at));
        assert_eq!((granted, exclusion.round()), ([true, false, false, true], 0));
        let other = exclusion.leave(RangeLock { backing: there, ..shared(4096) });
        assert!(exclusion.is_watching(there));
        let (waiting, granted) = exclusion.claim(RangeLock { reactor: 1, ..shared(8192) });
        assert!(!granted);
        exclusion.give_up(other);
        assert!(!exclusion.is_granted(waiting) && !exclusion.is_watching(there));
        assert!(!message[1].hush());
        exclusion.give_up(old);
        assert!(exclusion.is_granted(waiting) && message[1].hush() && !message[0].hush());
        assert!(!exclusion.is_watching(here), "the next ask nobody");
        exclusion.give_up(waiting);
    }

    /// It is older than all waiting requests, whenever its connection is closed.
    #[test]
    fn waiting_locks_also_wait_for_writes_of_closed_connections() {
        let (exclusion, _mail) = exclusion(true);
        let (old, granted) = exclusion.claim(shared(0));
        assert!(granted);
        let (fused, granted) = exclusion.claim(alone(0, 0));
        assert!(!granted);
        let (new, granted) = exclusion.claim(shared(0));
        assert!(!granted);
        exclusion.leave_claimed(old);
        let unclaimed = exclusion.leave(shared(0));
        exclusion.give_up(fused);
        assert!(!exclusion.is_granted(new));
        exclusion.give_up(old);
        assert!(!exclusion.is_granted(new), "there are two");
        exclusion.give_up(unclaimed);
        assert!(exclusion.is_granted(new));
        // An exclusive lock, or one that is not granted, is not changed.
        let (fused, granted) = exclusion.claim(alone(0, 0));
        assert!(!granted);
        exclusion.leave_claimed(fused);
        exclusion.give_up(new);
        assert!(exclusion.is_granted(fused));
        exclusion.leave_claimed(fused);
        assert!(!may_write(&exclusion, 0) && may_write(&exclusion, 4096));
        exclusion.give_up(fused);
        assert!(may_write(&exclusion, 0));
    }

    /// Such an operation may stay for as long as a device hangs, and does not count among fused
    /// commands.
    #[test]
    fn writes_left_by_closed_connections_do_not_track_other_devices() {
        let (exclusion, _mail) = exclusion(true);
        let old = exclusion.leave(shared(0));
        let mut changes = 0;
        while exclusion.is_watching(DeviceId(1)) {
            assert!(may_write(&exclusion, 4096));
            changes += 1;
        }
        assert_eq!(changes, CALM + 1);
        assert!(exclusion.is_watching(DeviceId(0)));
        exclusion.give_up(old);
        assert!(!exclusion.is_watching(DeviceId(0)));
    }
}
