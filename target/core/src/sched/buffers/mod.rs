//! The buffer scheduler: queues of requests for data buffers on a reactor, and buffers held by each
//! host.
//!
//! Admin commands have a queue of their own and come first: a slow device must not lock a host out.
//! I/O commands wait in a queue for each association (a *share*). The queues take turns, one command each:
//! an association with many requests delays its own only.
//!
//! A host that does not receive data, or sends none, keeps the buffers of its commands until its connection
//! is closed; a slow one keeps them longer than others (`hold_time`). So an association may hold `TIMES_FREE` times of what is free: a single one gets four fifths
//! of the pool, and a later one finds the rest.
//!
//! A device that hangs keeps the buffers of its commands as well. So in an association with several
//! namespaces the commands of one may hold as much as is free; in the queue of the association, commands of
//! other namespaces pass those that wait for that. The namespace that holds the most is not counted in what
//! the association may hold, so that other busy hosts do not make it wait.
//!
//! Several hosts may use one device, and one that has given up reconnects while the device still has its
//! earlier commands. So what is held for a device is counted over all associations, closed ones included
//! (`stores`): what others hold for it leaves as much free again.
//!
//! A command that lacks buffers is not overtaken, so that large commands are served among small ones; but
//! not for ever, because a device that hangs may hold too much, or pieces of every large block. A starved
//! command (`claims`) is overtaken by all others, and is served when there is enough.

mod hold_time;
mod per_device;
mod round_robin;
mod starvation;
mod tenant;

use std::collections::VecDeque;
use std::iter::once;
use std::time::Instant;

use crate::sched::rate_queue::RateLimitQueue;
use crate::subsystem::rate_limit::Grant;
use hold_time::HoldTimes;
pub use hold_time::is_prompt;
use per_device::DeviceShares;
pub use per_device::DeviceSlot;
use round_robin::{RoundRobin, Unchecked};
pub use starvation::Starved;
use starvation::{StarvationGuard, StarvedCommand};
use tenant::Tenant;

/// Namespaces of an association that are counted separately, by their ids, and devices likewise; of
/// more, some share a count.
const LANES: usize = u64::BITS as usize;

/// A queued command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuedCommand {
    /// Its queue.
    pub key: u32,
    /// Its slot.
    pub slot: u16,
    /// Its namespace, where its association has several.
    pub lane: Option<NsIndex>,
    /// The device that it accesses, if any.
    pub store: Option<DeviceSlot>,
    /// Bytes of buffers that it needs.
    pub wanted_bytes: u32,
    /// Bytes of a free block, or of several of the largest size, that surely suffice for them.
    pub block_bytes: u32,
    /// Whether it is starved: others have waited behind it for the whole hold, and overtake it now.
    pub claims: bool,
}

/// State of the pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolState {
    /// Bytes that are free for I/O commands.
    pub free_bytes: u64,
    /// Free bytes including those set aside.
    pub all_free_bytes: u64,
    /// Bytes of the largest free block, or of several of the largest size.
    pub whole_bytes: u64,
    /// The same of the part set aside for the command that [`BufferScheduler::claim`] selects.
    pub aside_bytes: u64,
    /// Bytes of the largest buffer that there is.
    pub largest_bytes: u64,
    /// The time of this turn.
    pub now: Instant,
}

impl PoolState {
    /// Whether buffers for a command are certainly free.
    fn has(&self, waiter: &QueuedCommand, is_admin: bool) -> bool {
        let whole_bytes =
            if is_admin { self.whole_bytes.max(self.aside_bytes) } else { self.whole_bytes };
        u64::from(waiter.block_bytes) <= whole_bytes
            && (is_admin || u64::from(waiter.wanted_bytes) <= self.free_bytes)
    }
}

/// Index of a namespace among those of an association.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NsIndex(u8);

impl NsIndex {
    /// Returns the index of the namespace with this id.
    pub fn of(nsid: u32) -> NsIndex {
        NsIndex((nsid % LANES as u32) as u8)
    }
}

/// Buffers that a command needs.
#[derive(Clone, Copy, Debug)]
pub struct BufferDemand {
    /// Its namespace, where its association has several.
    pub lane: Option<NsIndex>,
    /// The device that it accesses, if any.
    pub store: Option<DeviceSlot>,
    /// Bytes of buffers that it needs.
    pub wanted_bytes: u64,
    /// Bytes that are free for it.
    pub free_bytes: u64,
    /// Bytes of the largest buffer that there is.
    pub largest_bytes: u64,
}

/// A command whose turn it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PickedCommand {
    /// Its queue.
    pub key: u32,
    /// Its slot.
    pub slot: u16,
    /// It may allocate from the part set aside.
    pub aside: bool,
    /// The share in whose queue it waits; none: an admin command.
    share: Option<u32>,
    /// Its queue entry.
    waiter: QueuedCommand,
}

/// Result of an attempt to allocate buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TryAlloc {
    /// It has them, or needs none any more.
    Done,
    /// There are too few.
    Short,
    /// Its association holds too many, or its namespace or its device does.
    Over,
}

/// The wait queues. Bounded by the slots of all queue pairs: the entries of one that closes are
/// removed.
#[derive(Debug, Default)]
pub struct BufferScheduler {
    admin: VecDeque<QueuedCommand>,
    /// Number of commands of queues without a share that can wait at once.
    admin_room: usize,
    shares: Vec<Tenant>,
    /// The shares with queued commands, the next one first.
    turns: RoundRobin,
    /// Consecutive shares that got nothing in their turn, because they hold too much.
    passed: usize,
    /// The command whose turn it is waits for buffers: no other may overtake it.
    short: bool,
    claims: StarvationGuard,
    stores: DeviceShares,
    hold_times: HoldTimes,
    /// Number of starved commands in all wait queues.
    claiming: usize,
    /// Commands that wait for limits, before they wait for buffers.
    pub rate_limits: RateLimitQueue,
    /// Entries in all queue pairs that wait for a push or a response to complete, other than for
    /// its buffer: capsules for a slot, pieces of data for the previous one, and deferred commands.
    pub behind_sent: usize,
}

impl BufferScheduler {
    /// Whether no command waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.admin.is_empty() && self.turns.is_empty()
    }

    /// Whether no command waits, and none is held back.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.is_empty() && !self.short
    }

    /// Whether, in addition, no part of the pool is set aside: [`BufferScheduler::claim`] would
    /// change nothing.
    #[inline]
    pub fn is_at_rest(&self) -> bool {
        self.is_idle() && self.claims.is_at_rest()
    }

    /// Returns the number of waiting commands.
    pub fn len(&self) -> usize {
        self.admin.len() + self.shares.iter().map(|share| share.line.len()).sum::<usize>()
    }

    /// Adds a queue that belongs to no association yet, or stays an admin queue. `commands` of it
    /// can wait at once: as many as it has receives, because each that waits keeps its own. Memory
    /// for all of them is reserved here, so that nothing is allocated when they wait.
    pub fn open(&mut self, commands: u16) {
        self.admin_room += usize::from(commands);
        self.admin.reserve_exact(self.admin_room.saturating_sub(self.admin.len()));
    }

    /// Removes such a queue, which ends or joins an association.
    pub fn close(&mut self, commands: u16) {
        self.admin_room = self.admin_room.saturating_sub(commands.into());
    }

    /// Adds a queue of an association, of which `commands` can wait at once
    /// ([`BufferScheduler::open`]); returns the share of the association.
    pub fn join(&mut self, owner: u64, commands: u16) -> u32 {
        let own = self.shares.iter().position(|share| share.owner == Some(owner));
        let vacant = || self.shares.iter().position(|share| share.owner.is_none());
        let at = own.or_else(vacant).unwrap_or(self.shares.len());
        if at == self.shares.len() {
            self.shares.push(Tenant::default());
            self.turns.reserve(self.shares.len());
        }
        let share = &mut self.shares[at];
        share.owner = Some(owner);
        share.queues += 1;
        share.open += 1;
        share.room += usize::from(commands);
        share.line.reserve_exact(share.room.saturating_sub(share.line.len()));
        self.rate_limits.join(at as u32, share.room);
        at as u32
    }

    /// Records that the connection of a queue is closed. Its commands hold only buffers that are at
    /// devices, which may return them late.
    pub fn abandon(&mut self, share: u32) {
        if let Some(share) = self.shares.get_mut(share as usize) {
            share.open = share.open.saturating_sub(1);
        }
    }

    /// Removes a queue of which `commands` could wait; none of them waits or holds buffers.
    pub fn leave(&mut self, share: u32, commands: u16) {
        let Some(left) = self.shares.get_mut(share as usize) else { return };
        left.queues = left.queues.saturating_sub(1);
        left.room = left.room.saturating_sub(commands.into());
        if left.queues == 0 {
            self.hold_times.leave(left.promptness, left.held_bytes);
            *left = Tenant::default();
            self.rate_limits.leave(share);
        }
    }

    /// Whether a new command may try to allocate buffers at once.
    #[must_use]
    #[inline(always)]
    pub fn may_try(&self, share: Option<u32>, store: Option<DeviceSlot>) -> bool {
        // With no command waiting, none is overtaken: the usual case.
        self.is_idle() || self.may_overtake(share, store)
    }

    /// The same where commands wait.
    #[inline(never)]
    fn may_overtake(&self, share: Option<u32>, store: Option<DeviceSlot>) -> bool {
        let Some(share) = share else { return true };
        let nobody = || self.shares.get(share as usize).is_none_or(|share| share.line.is_empty());
        let is_open = || store.is_none_or(|store| !self.stores.is_closed(store));
        let admin = || self.admin.is_empty() || self.admin.iter().all(|waiter| waiter.claims);
        // Else small commands of slow hosts would starve a large one of another.
        let may_pass = || {
            let share = self.shares.get(share as usize);
            !self.turns.has_slow() || share.is_none_or(|share| !share.promptness.is_slow())
        };
        !self.short && may_pass() && nobody() && is_open() && admin()
    }

    /// Whether a share permits the buffers that a command needs.
    #[inline(always)]
    pub fn allows(&self, share: u32, demand: &BufferDemand) -> bool {
        self.has_much_free(share, demand) || self.allows_little(share, demand)
    }

    /// Whether a share is slow, and slow ones hold as much as they may.
    fn is_limited(&self, share: u32, wanted_bytes: u64, free_bytes: u64) -> bool {
        let share = self.shares.get(share as usize);
        share.is_some_and(|share| share.promptness.is_slow())
            && self.hold_times.limit_slow(wanted_bytes, free_bytes)
    }

    /// As [`BufferScheduler::discharge`], and records whether the host of the command has returned its
    /// buffers promptly ([`is_prompt`]).
    #[inline(always)]
    pub fn end(
        &mut self,
        number: u32,
        (lane, store): (NsIndex, Option<DeviceSlot>),
        bytes: u32,
        is_prompt: bool,
    ) {
        let Some(share) = self.shares.get_mut(number as usize) else { return };
        discharge(share, &mut self.hold_times, lane, bytes);
        if let Some(store) = store {
            discharge_store(share, &mut self.stores, store, bytes);
        }
        let (of, held_bytes) = (share.promptness, share.held_bytes);
        let Some(changed) = self.hold_times.note(of, held_bytes, is_prompt) else { return };
        share.promptness = changed;
        if of.is_slow() && !changed.is_slow() {
            self.turns.promote(number);
        }
    }

    /// Whether the share is not slow, and so much is free, compared with its bytes and those of the
    /// device, that no limit can apply: the usual case.
    #[inline]
    fn has_much_free(&self, share: u32, demand: &BufferDemand) -> bool {
        let BufferDemand { store, wanted_bytes, free_bytes, .. } = *demand;
        let Some(share) = self.shares.get(share as usize) else { return true };
        share.has_much_free(wanted_bytes, free_bytes)
            && store.is_none_or(|store| self.stores.holds_little(store, free_bytes))
    }

    /// Charges the bytes of a command to a share, a namespace and a device, if no command waits and
    /// no limit can apply: the usual case. False, and nothing is charged, if one may.
    #[inline(always)]
    #[must_use]
    pub fn charge_at_once(
        &mut self,
        share: u32,
        (lane, store): (NsIndex, DeviceSlot),
        bytes: u32,
        free_bytes: u64,
    ) -> bool {
        let is_idle = self.is_idle();
        let Some(share) = self.shares.get_mut(share as usize) else { return false };
        let may = is_idle
            && share.has_much_free(bytes.into(), free_bytes)
            && self.stores.holds_little(store, free_bytes);
        if may {
            share.charge(lane, Some(store), bytes);
            self.stores.charge(store, bytes);
        }
        may
    }

    #[inline(never)]
    fn allows_little(&self, share: u32, demand: &BufferDemand) -> bool {
        let BufferDemand { lane, store, wanted_bytes, free_bytes, largest_bytes } = *demand;
        if self.is_limited(share, wanted_bytes, free_bytes) {
            return false;
        }
        let Some(share) = self.shares.get(share as usize) else { return true };
        let stock = (free_bytes, largest_bytes);
        share.allows(lane, wanted_bytes, free_bytes)
            && share.lets_pass(lane, wanted_bytes, free_bytes)
            && store.is_none_or(|store| {
                let most = || most_bytes(&self.shares, store);
                self.stores.allows(store, share.held_for(store), stock, most)
            })
    }

    /// Passes the receive of a command to its device, if the limit for `receives` permits it.
    #[must_use]
    pub fn keep_receive(&mut self, store: DeviceSlot, receives: u32) -> bool {
        self.stores.keep_receive(store, receives)
    }

    /// Stops counting a receive that was returned, whether its connection still exists or not, or
    /// that was not submitted.
    pub fn return_receive(&mut self, store: DeviceSlot) {
        self.stores.return_receive(store);
    }

    /// Charges the bytes of a command to its share, namespace and device.
    #[inline(always)]
    pub fn charge(&mut self, share: u32, lane: NsIndex, store: Option<DeviceSlot>, bytes: u32) {
        let Some(share) = self.shares.get_mut(share as usize) else { return };
        share.charge(lane, store, bytes);
        self.hold_times.charge(share.promptness, bytes.into());
        if let Some(store) = store {
            self.stores.charge(store, bytes);
        }
    }

    /// Discharges the bytes of a command from its device, which it no longer needs: it is sending
    /// its data to the host.
    #[inline(always)]
    pub fn discharge_store(&mut self, share: u32, store: DeviceSlot, bytes: u32) {
        let Some(share) = self.shares.get_mut(share as usize) else { return };
        discharge_store(share, &mut self.stores, store, bytes);
    }

    /// Discharges the bytes of a command that has ended; `store`: the device, if it needed that
    /// until now.
    #[inline(always)]
    pub fn discharge(&mut self, share: u32, lane: NsIndex, store: Option<DeviceSlot>, bytes: u32) {
        let Some(share) = self.shares.get_mut(share as usize) else { return };
        discharge(share, &mut self.hold_times, lane, bytes);
        if let Some(store) = store {
            discharge_store(share, &mut self.stores, store, bytes);
        }
    }

    /// Appends a command to its wait queue; `tried`: the result of its attempt, if it has made one.
    pub fn push(&mut self, share: Option<u32>, waiter: QueuedCommand, tried: Option<TryAlloc>) {
        self.claiming += usize::from(waiter.claims);
        let Some(number) = share else {
            return self.admin.push_back(waiter);
        };
        let Some(share) = self.shares.get_mut(number as usize) else { return };
        if share.line.is_empty() {
            self.turns.push_back(number, share.promptness.is_slow());
        }
        share.stand(waiter, false);
        self.short |= tried == Some(TryAlloc::Short);
    }

    /// Removes the commands of a queue pair that closes. Their bookings at limits are refunded by
    /// `refund`.
    pub fn forget(&mut self, key: u32, refund: impl FnMut(u16, &Grant)) {
        self.retain(|waiter| waiter.0 != key);
        self.rate_limits.forget(key, refund);
    }

    /// Removes a command that ends before its turn. Returns its booking at limits, which is to be
    /// refunded.
    pub fn remove(&mut self, key: u32, slot: u16) -> Option<Grant> {
        self.retain(|waiter| waiter != (key, slot));
        self.rate_limits.remove(key, slot)
    }

    /// Returns what is to be set aside for a starved command. A command whose host or device is
    /// over its limit gets nothing: a device that hangs would withhold that part from others as
    /// well.
    pub fn claim(&mut self, now: Instant, room: impl Fn() -> PoolState) -> Starved {
        if let Some((Some(share), waiter)) = self.claims.unserved(now)
            && !self.would_allow(share, &waiter, &room())
        {
            self.claims.give_up();
        }
        let is_wanted = self.claiming > 0 && self.claims.is_vacant();
        let next = if is_wanted { self.next_claimant(&room()) } else { None };
        self.claims.look(now, next)
    }

    /// Returns a starved admin command, or a starved command of the next share after the last one
    /// that would be permitted buffers.
    fn next_claimant(&self, room: &PoolState) -> Option<StarvedCommand> {
        if let Some(waiter) = self.admin.iter().find(|it| it.claims) {
            return Some((None, *waiter));
        }
        let last = self.claims.last_share();
        let count = self.shares.len();
        let from = last.map_or(0, |last| last as usize + 1);
        let mut numbers = (from..from + count).map(|number| number % count);
        numbers.find_map(|number| {
            let (share, number) = (&self.shares[number], number as u32);
            if share.is_limited(&self.hold_times, room.all_free_bytes) {
                return None;
            }
            let mut claiming = share.line.iter().filter(|it| it.claims);
            let first = claiming.next()?;
            // If all are for one device, the others are not permitted either.
            let others = claiming.take_while(|_| share.mixed);
            let mut all = once(first).chain(others);
            let waiter = all.find(|waiter| self.would_allow(number, waiter, room))?;
            Some((Some(number), *waiter))
        })
    }

    /// Whether a command would be permitted buffers, of all that are free.
    fn would_allow(&self, share: u32, waiter: &QueuedCommand, room: &PoolState) -> bool {
        let QueuedCommand { lane, store, wanted_bytes, .. } = *waiter;
        let (free_bytes, largest_bytes) = (room.all_free_bytes, room.largest_bytes);
        let wanted_bytes = wanted_bytes.into();
        self.allows(share, &BufferDemand { lane, store, wanted_bytes, free_bytes, largest_bytes })
    }

    /// Removes and returns the command whose turn it is, of those whose namespaces and devices do
    /// not hold too much. The result goes to [`BufferScheduler::settle`].
    pub fn next_turn(&mut self, room: &PoolState) -> Option<PickedCommand> {
        let turn = self.take_turn(room);
        match &turn {
            Some(turn) => self.claiming -= usize::from(turn.waiter.claims),
            None => {
                (self.short, self.passed) = (false, 0);
                self.claims.rest();
            }
        }
        turn
    }

    fn take_turn(&mut self, room: &PoolState) -> Option<PickedCommand> {
        let turn = |share, waiter: QueuedCommand, aside| {
            let QueuedCommand { key, slot, .. } = waiter;
            PickedCommand { key, slot, aside, share, waiter }
        };
        if let Some((share, QueuedCommand { key, slot, .. })) = self.claims.ready(room) {
            let line = match share {
                None => Some(&mut self.admin),
                Some(number) => self.shares.get_mut(number as usize).map(|share| &mut share.line),
            };
            let is_it = |it: &QueuedCommand| (it.key, it.slot) == (key, slot);
            let taken = line.and_then(|line| line.remove(line.iter().position(is_it)?));
            if let Some(waiter) = taken {
                return Some(turn(share, waiter, true));
            }
        }
        let at = self.admin.iter().position(|it| !it.claims || room.has(it, true));
        if let Some(waiter) = at.and_then(|at| self.admin.remove(at)) {
            return Some(turn(None, waiter, false));
        }
        let mut most = None;
        let mut round = self.turns.round();
        while let Some(number) = self.next_share(&mut round, room) {
            let first = self.first(number, room, &mut most);
            let Some(share) = self.shares.get_mut(number as usize) else { continue };
            if let Some(waiter) = first.and_then(|at| share.line.remove(at)) {
                return Some(turn(Some(number), waiter, false));
            }
            if !share.line.is_empty() {
                self.turns.push_back(number, share.promptness.is_slow());
            }
        }
        None
    }

    /// Removes the next share with queued commands from its list.
    fn next_share(&mut self, round: &mut Unchecked, room: &PoolState) -> Option<u32> {
        let BufferScheduler { turns, shares, hold_times, .. } = self;
        turns.next(round, |number| {
            let share = shares.get(number as usize);
            share.is_some_and(|share| share.is_limited(hold_times, room.free_bytes))
        })
    }

    /// Returns the position of the first queued command that its namespace and its device permit.
    /// No command overtakes one of its own namespace, however little it needs, unless that one is
    /// starved: otherwise a large one would wait for ever. `most` is the most that a connected
    /// share holds for the last device that was checked.
    fn first(
        &mut self,
        number: u32,
        room: &PoolState,
        most: &mut Option<(DeviceSlot, u64)>,
    ) -> Option<usize> {
        let BufferScheduler { shares, stores, .. } = self;
        let share = shares.get(number as usize)?;
        let stock = (room.free_bytes, room.largest_bytes);
        let (mut closed, mut last) = (0u64, None);
        for (at, it) in share.line.iter().enumerate() {
            #[cfg(test)]
            tests::LOOKED.set(tests::LOOKED.get() + 1);
            let bit = it.lane.map_or(0, |lane| 1u64 << lane.0);
            let wanted_bytes = it.wanted_bytes.into();
            let mut is_let =
                closed & bit == 0 && share.lets_pass(it.lane, wanted_bytes, room.free_bytes);
            if let Some(store) = it.store.filter(|_| is_let) {
                is_let = match last {
                    Some((of, is_let)) if of == store => is_let,
                    _ => stores.allows(store, share.held_for(store), stock, || match *most {
                        Some((of, bytes)) if of == store => bytes,
                        _ => most.insert((store, most_bytes(shares, store))).1,
                    }),
                };
                stores.note(store, is_let);
                last = Some((store, is_let));
            }
            match is_let {
                true if !it.claims || room.has(it, false) => return Some(at),
                true => {}
                // All are for this namespace and this device, which may hang for long.
                false if !share.mixed => return None,
                false => closed |= bit,
            }
        }
        None
    }

    /// Puts a command back that has got nothing. Returns whether another may get something now.
    pub fn settle(&mut self, turn: PickedCommand, take: TryAlloc, now: Instant) -> bool {
        let PickedCommand { aside, share, mut waiter, .. } = turn;
        let (mut held_up, mut goes_on) = (false, take == TryAlloc::Done);
        match take {
            TryAlloc::Done => self.claims.served(&waiter),
            // It was tried with the part set aside; the next starved command gets that.
            _ if aside => self.claims.give_up(),
            TryAlloc::Short if !waiter.claims => {
                held_up = self.claims.holds_up(now);
                (waiter.claims, goes_on) = (!held_up, !held_up);
            }
            TryAlloc::Short | TryAlloc::Over => {}
        }
        self.claiming += usize::from(take != TryAlloc::Done && waiter.claims);
        let Some(number) = share else {
            if take != TryAlloc::Done {
                self.admin.push_front(waiter);
            }
            // Admin commands first: I/O gets nothing while one of them waits.
            return goes_on || aside;
        };
        let share = &mut self.shares[number as usize];
        let is_slow = share.promptness.is_slow();
        if take != TryAlloc::Done {
            share.stand(waiter, !aside);
        }
        if aside {
            // Its share has kept its place in `turns`.
            match share.line.is_empty() {
                true => self.turns.retain(|turn| turn != number),
                false if self.turns.contains(number) => {}
                false => self.turns.push_back(number, is_slow),
            }
            return true;
        }
        self.short = held_up;
        match held_up {
            true => self.turns.push_front(number),
            false if share.line.is_empty() => {}
            false => self.turns.push_back(number, is_slow),
        }
        // A command starved from now on lets others of its queue pass.
        self.passed = if goes_on || held_up { 0 } else { self.passed + 1 };
        let all_passed = self.passed > 0 && self.passed >= self.turns.len();
        if all_passed {
            self.passed = 0;
        }
        !self.short && !all_passed
    }

    /// Records that every part of the pool was set aside once, and none became free.
    pub fn round_over(&mut self) {
        self.claims.round_over();
    }

    fn retain(&mut self, keep: impl Fn((u32, u16)) -> bool) {
        self.admin.retain(|waiter| keep((waiter.key, waiter.slot)));
        for share in &mut self.shares {
            share.line.retain(|waiter| keep((waiter.key, waiter.slot)));
        }
        self.turns.retain(|share| !self.shares[share as usize].line.is_empty());
        self.claims.retain(keep);
        if self.claiming > 0 {
            let lines = self.shares.iter().flat_map(|share| &share.line);
            self.claiming = self.admin.iter().chain(lines).filter(|it| it.claims).count();
        }
    }
}

/// Returns the bytes held for a device by the connected share that holds the most for it.
fn most_bytes(shares: &[Tenant], store: DeviceSlot) -> u64 {
    let connected = shares.iter().filter(|share| share.open > 0);
    connected.map(|share| share.held_for(store)).max().unwrap_or(0)
}

#[inline(always)]
fn discharge(share: &mut Tenant, hold_times: &mut HoldTimes, lane: NsIndex, bytes: u32) {
    hold_times.discharge(share.promptness, share.held_bytes.min(bytes.into()));
    share.discharge(lane, bytes);
}

#[inline(always)]
fn discharge_store(share: &mut Tenant, stores: &mut DeviceShares, store: DeviceSlot, bytes: u32) {
    share.discharge_store(store, bytes);
    stores.discharge(store, bytes);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::LazyLock;
    use std::time::Duration;

    use proptest::prelude::{prop_assert, proptest};

    use crate::sched::buffers::*;
    use nvmfd_blockdev::DeviceId;

    thread_local! {
        /// Number of queued commands that were checked.
        pub(super) static LOOKED: Cell<usize> = const { Cell::new(0) };
    }

    /// Two associations, of two queues and of one.
    fn waiters() -> (BufferScheduler, u32, u32) {
        let mut waiters = BufferScheduler::default();
        let (a, b) = (waiters.join(100, 8), waiters.join(200, 8));
        assert_eq!(waiters.join(100, 8), a);
        assert_ne!(a, b);
        (waiters, a, b)
    }

    /// A command of an association with one namespace.
    fn waiter(key: u32, slot: u16) -> QueuedCommand {
        QueuedCommand {
            key,
            slot,
            lane: None,
            store: None,
            wanted_bytes: 1,
            block_bytes: 1,
            claims: false,
        }
    }

    /// Demand of a command for no device, with `free_bytes` free.
    fn demand(lane: Option<NsIndex>, wanted_bytes: u64, free_bytes: u64) -> BufferDemand {
        BufferDemand { lane, store: None, wanted_bytes, free_bytes, largest_bytes: 1 }
    }

    /// A pool with `free_bytes` free, in one piece.
    fn room(free_bytes: u64) -> PoolState {
        PoolState {
            free_bytes,
            all_free_bytes: free_bytes,
            whole_bytes: free_bytes,
            aside_bytes: 0,
            largest_bytes: 1,
            now: now(),
        }
    }

    /// Always the same.
    fn now() -> Instant {
        static NOW: LazyLock<Instant> = LazyLock::new(Instant::now);
        *NOW
    }

    /// The order in which all are served.
    fn order(waiters: &mut BufferScheduler) -> Vec<(u32, u16)> {
        let mut order = Vec::new();
        while let Some(turn) = waiters.next_turn(&room(100)) {
            order.push((turn.key, turn.slot));
            assert!(waiters.settle(turn, TryAlloc::Done, now()));
        }
        order
    }

    #[test]
    fn a_closed_queue_is_removed_from_both_wait_queues() {
        let (mut waiters, a, b) = waiters();
        for (share, key, slot) in
            [(Some(a), 1, 0), (Some(b), 2, 0), (Some(a), 1, 1), (None, 1, 2), (Some(b), 2, 1)]
        {
            waiters.push(share, waiter(key, slot), None);
        }
        waiters.forget(1, |_, _| {});
        waiters.remove(2, 0);
        assert_eq!((waiters.len(), order(&mut waiters)), (1, vec![(2, 1)]));
        waiters.push(None, waiter(3, 0), None);
        waiters.push(Some(a), waiter(1, 5), None);
        assert!(!waiters.may_try(Some(b), None), "an admin command that waits comes first");
        assert_eq!(order(&mut waiters), [(3, 0), (1, 5)]);
        assert!(waiters.is_empty() && waiters.may_try(Some(b), None));
    }

    /// All commands of all queues wait, for limits and for buffers, and no wait queue allocates
    /// memory.
    #[test]
    fn waiting_commands_allocate_no_memory() {
        let mut waiters = BufferScheduler::default();
        let (hosts, queues, commands) = (9u32, 5u32, 33u16);
        for host in 0..hosts {
            waiters.open(commands);
            for _ in 0..queues {
                waiters.open(commands);
                waiters.close(commands);
                assert_eq!(waiters.join(host.into(), commands), host);
            }
        }
        let taken = |waiters: &BufferScheduler| {
            let lines = waiters.shares.iter().map(|share| share.line.capacity());
            let lines: Vec<_> = lines.chain(waiters.rate_limits.capacities()).collect();
            (waiters.admin.capacity(), waiters.turns.capacity(), waiters.shares.capacity(), lines)
        };
        let before = taken(&waiters);
        for (host, queue, slot) in (0..hosts)
            .flat_map(|host| (0..queues).map(move |queue| (host, queue)))
            .flat_map(|(host, queue)| (0..commands).map(move |slot| (host, queue, slot)))
        {
            let key = host * queues + queue;
            if queue == 0 {
                waiters.push(None, waiter(key, slot), None);
            }
            waiters.rate_limits.push(host, (key, slot), 1, None);
            waiters.push(Some(host), waiter(key, slot), Some(TryAlloc::Short));
        }
        assert_eq!(waiters.len(), usize::from(commands) * (hosts * (queues + 1)) as usize);
        assert_eq!(taken(&waiters), before);
        // A queue that reconnects uses the memory of the one that closed.
        for _ in 0..100 {
            waiters.forget(0, |_, _| {});
            waiters.leave(0, commands);
            waiters.join(0, commands);
        }
        assert_eq!(taken(&waiters), before);
    }

    #[test]
    fn slow_hosts_do_not_overtake_each_other() {
        let (mut waiters, slow, other) = waiters();
        let prompt = waiters.join(300, 8);
        [slow, other]
            .into_iter()
            .for_each(|share| waiters.end(share, (NsIndex::of(1), None), 0, false));
        waiters.end(prompt, (NsIndex::of(1), None), 0, true);
        waiters.charge(other, NsIndex::of(1), None, 1);
        assert!(waiters.may_try(Some(other), None) && !waiters.allows(slow, &demand(None, 50, 99)));
        waiters.push(Some(slow), QueuedCommand { wanted_bytes: 50, ..waiter(1, 0) }, None);
        assert!(!waiters.may_try(Some(other), None) && waiters.may_try(Some(prompt), None));
        assert!(waiters.next_turn(&room(99)).is_none());
        waiters.discharge(other, NsIndex::of(1), None, 1);
        assert_eq!(order(&mut waiters), [(1, 0)]);
    }

    #[test]
    fn hosts_take_turns() {
        let (mut waiters, a, b) = waiters();
        (0..4).for_each(|slot| waiters.push(Some(a), waiter(1, slot), Some(TryAlloc::Short)));
        waiters.push(Some(b), waiter(2, 0), None);
        waiters.push(Some(b), waiter(2, 1), None);
        assert_eq!(order(&mut waiters), [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (1, 3)]);
    }

    #[test]
    fn only_commands_of_hosts_over_their_share_are_overtaken() {
        let (mut waiters, a, b) = waiters();
        waiters.push(Some(a), waiter(1, 0), Some(TryAlloc::Short));
        waiters.push(Some(b), waiter(2, 0), None);
        let turn = waiters.next_turn(&room(100)).unwrap();
        assert_eq!((turn.key, waiters.settle(turn, TryAlloc::Short, now())), (1, false));
        assert!(!waiters.may_try(Some(b), None), "nor by somebody new");
        let turn = waiters.next_turn(&room(100)).unwrap();
        assert_eq!((turn.key, waiters.settle(turn, TryAlloc::Over, now())), (1, true));
        let turn = waiters.next_turn(&room(100)).unwrap();
        assert_eq!((turn.key, waiters.settle(turn, TryAlloc::Done, now())), (2, true));
        // No other is left, so the round ends; and other associations need not wait for it.
        let turn = waiters.next_turn(&room(100)).unwrap();
        assert_eq!((turn.key, waiters.settle(turn, TryAlloc::Over, now())), (1, false));
        assert!(waiters.may_try(Some(b), None) && !waiters.may_try(Some(a), None));
        assert_eq!(waiters.len(), 1);
    }

    #[test]
    fn a_host_holds_at_most_four_times_the_free_bytes() {
        let (mut waiters, a, b) = waiters();
        let (mut free, mut held) = (100, 0);
        while waiters.allows(a, &demand(None, 1, free)) && free > 0 {
            waiters.charge(a, NsIndex::of(1), None, 1);
            (free, held) = (free - 1, held + 1);
        }
        assert_eq!((free, held), (20, 80));
        assert!(waiters.allows(b, &demand(None, 20, free)), "the first of another");
        waiters.discharge(a, NsIndex::of(1), None, 80);
        assert!(waiters.allows(a, &demand(None, 1, 0)), "nothing is held: the pool alone decides");
        waiters.leave(a, 8);
        waiters.leave(a, 8);
        assert_eq!(waiters.join(300, 1), a, "its place is free again");
    }

    #[test]
    fn a_namespace_of_several_holds_at_most_as_much_as_is_free() {
        let (mut waiters, a, _) = waiters();
        let (hung, other) = (NsIndex::of(1), NsIndex::of(2));
        let mut free = 100;
        while waiters.allows(a, &demand(Some(hung), 1, free)) && free > 0 {
            waiters.charge(a, hung, None, 1);
            free -= 1;
        }
        assert_eq!(free, 50);
        while waiters.allows(a, &demand(Some(other), 1, free)) {
            waiters.charge(a, other, None, 1);
            free -= 1;
        }
        assert_eq!(free, 25, "of the rest the same");
        waiters.discharge(a, hung, None, 50);
        waiters.discharge(a, other, None, 25);
        assert!(
            waiters.allows(a, &demand(Some(hung), 1, 0)) && waiters.allows(a, &demand(None, 1, 0))
        );
    }

    #[test]
    fn commands_overtake_those_of_namespaces_over_their_share() {
        let (mut waiters, a, b) = waiters();
        let of = |nsid, slot| QueuedCommand { lane: Some(NsIndex::of(nsid)), ..waiter(1, slot) };
        waiters.charge(a, NsIndex::of(1), None, 50);
        (0..3).for_each(|slot| waiters.push(Some(a), of(1, slot), Some(TryAlloc::Over)));
        waiters.push(Some(a), of(2, 3), None);
        waiters.push(Some(b), waiter(2, 0), None);
        let mut served = Vec::new();
        while let Some(turn) = waiters.next_turn(&room(50)) {
            served.push((turn.key, turn.slot));
            assert!(waiters.settle(turn, TryAlloc::Done, now()));
        }
        assert_eq!(served, [(1, 3), (2, 0)]);
        assert_eq!(waiters.len(), 3, "the others wait, and in their order");
        waiters.discharge(a, NsIndex::of(1), None, 50);
        assert_eq!(order(&mut waiters), [(1, 0), (1, 1), (1, 2)]);
        assert!(waiters.is_empty());
    }

    #[test]
    fn a_refused_overtaking_command_ends_the_round() {
        let (mut waiters, a, b) = waiters();
        waiters.charge(a, NsIndex::of(1), None, 50);
        let hung = QueuedCommand { lane: Some(NsIndex::of(1)), ..waiter(1, 0) };
        waiters.push(Some(a), hung, Some(TryAlloc::Over));
        waiters.push(Some(b), waiter(2, 0), Some(TryAlloc::Over));
        let mut asked = 0;
        while let Some(turn) = waiters.next_turn(&room(50)) {
            asked += 1;
            assert_eq!((turn.key, asked < 3), (2, true));
            if !waiters.settle(turn, TryAlloc::Over, now()) {
                break;
            }
        }
        assert_eq!(waiters.len(), 2);
    }

    #[test]
    fn a_device_holds_a_quarter_of_the_receives_and_all_devices_half() {
        let mut waiters = BufferScheduler::default();
        let stores: Vec<DeviceSlot> = (0..4).map(|id| DeviceSlot::of(DeviceId(id))).collect();
        let mut held = Vec::new();
        for store in &stores {
            let mut own = 0;
            while waiters.keep_receive(*store, 100) {
                own += 1;
            }
            held.push(own);
        }
        assert_eq!(held, [25, 25, 0, 0]);
        for at in [0, 2, 3] {
            waiters.return_receive(stores[0]);
            assert!(!waiters.keep_receive(stores[1], 100));
            assert!(waiters.keep_receive(stores[at], 100), "one more of all");
            assert!(!waiters.keep_receive(stores[0], 100));
        }
    }

    /// No large buffer is free, and the bytes held for the device endanger no host.
    #[test]
    fn hosts_of_a_shared_device_hold_little_when_buffers_are_scarce() {
        let (mut waiters, a, b) = waiters();
        let store = Some(DeviceSlot::of(DeviceId(3)));
        let page = |free_bytes| BufferDemand {
            store,
            largest_bytes: 1 << 20,
            ..demand(None, 4096, free_bytes)
        };
        waiters.charge(a, NsIndex::of(1), store, 4096);
        waiters.charge(b, NsIndex::of(1), store, 4096);
        assert!(waiters.allows(a, &page(900 << 10)) && waiters.allows(b, &page(900 << 10)));
        assert!(waiters.allows(a, &page(5 * 4096)) && !waiters.allows(a, &page(5 * 4096 - 1)));
        // If much is held, a large buffer stays free.
        waiters.charge(a, NsIndex::of(1), store, 1 << 20);
        waiters.charge(b, NsIndex::of(1), store, 1 << 20);
        let enough = 4096 + (2 << 20);
        assert!(waiters.allows(a, &page(enough)) && !waiters.allows(a, &page(enough - 1)));
    }

    proptest! {
        #[test]
        fn no_limit_applies_while_many_buffers_are_free(
            held in proptest::array::uniform8(0u32..50),
            (wanted, free, largest) in (1u64..50, 0u64..400, 1u64..50),
            (lane, store) in (0u32..3, 3u32..5),
        ) {
            let (mut waiters, a, b) = waiters();
            for (at, bytes) in (0u32..).zip(held) {
                let (share, lane) = (if at & 1 == 0 { a } else { b }, NsIndex::of(1 + (at >> 1 & 1)));
                waiters.charge(share, lane, Some(DeviceSlot::of(DeviceId(3 + (at >> 2)))), bytes);
            }
            waiters.abandon(b);
            let lane = (lane > 0).then(|| NsIndex::of(lane));
            let store = Some(DeviceSlot::of(DeviceId(store)));
            let demand = BufferDemand { store, largest_bytes: largest, ..demand(lane, wanted, free) };
            prop_assert!(!waiters.has_much_free(a, &demand) || waiters.allows_little(a, &demand));
        }
    }

    /// There may be thousands, and there is a turn every few microseconds.
    #[test]
    fn only_the_first_waiter_of_a_blocked_device_is_examined() {
        looked_at(None);
        // The same if the host has other namespaces, for which no command waits.
        looked_at(Some(NsIndex::of(1)));
    }

    fn looked_at(lane: Option<NsIndex>) {
        let (mut waiters, a, b) = waiters();
        let hung = Some(DeviceSlot::of(DeviceId(3)));
        let well = Some(DeviceSlot::of(DeviceId(4)));
        waiters.charge(b, NsIndex::of(1), hung, 60);
        waiters.abandon(b);
        for slot in 0..1000 {
            waiters.push(Some(a), QueuedCommand { lane, store: hung, ..waiter(1, slot) }, None);
        }
        waiters.charge(a, NsIndex::of(1), hung, 1);
        let look = |waiters: &mut BufferScheduler| {
            LOOKED.set(0);
            let turn = waiters.next_turn(&room(40));
            let looked = LOOKED.get();
            (
                turn.inspect(|turn| assert!(waiters.settle(*turn, TryAlloc::Done, now())))
                    .map(|it| it.slot),
                looked,
            )
        };
        assert_eq!(look(&mut waiters), (None, 1));
        // Its namespace has another device by now: commands for that do not wait.
        waiters.push(Some(a), QueuedCommand { store: well, ..waiter(1, 1000) }, None);
        assert_eq!(look(&mut waiters), (Some(1000), 1001));
        // Nor does a command that needs none, wherever it is queued.
        waiters.push(Some(a), QueuedCommand { store: None, ..waiter(1, 1001) }, None);
        waiters.push(Some(a), QueuedCommand { store: hung, ..waiter(1, 1002) }, None);
        assert_eq!(look(&mut waiters).0, Some(1001));
        assert_eq!(look(&mut waiters).0, None);
    }

    #[test]
    fn a_small_command_does_not_pass_a_large_one_of_its_namespace() {
        let (mut waiters, a, _) = waiters();
        let of = |nsid, slot, wanted_bytes| QueuedCommand {
            lane: Some(NsIndex::of(nsid)),
            wanted_bytes,
            ..waiter(1, slot)
        };
        waiters.charge(a, NsIndex::of(1), None, 60);
        waiters.push(Some(a), of(1, 0, 20), Some(TryAlloc::Over));
        assert!(!waiters.may_try(Some(a), None), "nor does one that has not waited");
        waiters.push(Some(a), of(1, 1, 1), None);
        assert_eq!(waiters.next_turn(&room(70)), None);
        waiters.push(Some(a), of(2, 2, 1), None);
        let turn = waiters.next_turn(&room(70)).unwrap();
        assert_eq!(
            (turn.slot, waiters.settle(turn, TryAlloc::Done, now())),
            (2, true),
            "of another it may"
        );
        assert_eq!(waiters.next_turn(&room(70)), None);
        // A little is returned: the large one is next, however many have arrived since.
        waiters.discharge(a, NsIndex::of(1), None, 10);
        assert_eq!(order(&mut waiters), [(1, 0), (1, 1)]);
    }

    #[test]
    fn buffers_held_by_a_hanging_device_do_not_reduce_the_host_share() {
        let (mut waiters, a, b) = waiters();
        let (hung, other) = (NsIndex::of(1), NsIndex::of(2));
        waiters.charge(a, hung, None, 50);
        waiters.charge(b, NsIndex::of(1), None, 40);
        let mut free = 10;
        assert!(
            !waiters.allows(a, &demand(Some(hung), 1, free))
                && !waiters.allows(a, &demand(None, 1, free))
        );
        while waiters.allows(a, &demand(Some(other), 1, free)) {
            waiters.charge(a, other, None, 1);
            free -= 1;
        }
        assert_eq!(free, 5, "of what is free as much as stays");
        waiters.charge(a, NsIndex::of(3), None, 15);
        assert!(
            !waiters.allows(a, &demand(Some(NsIndex::of(4)), 1, free)),
            "four times that of all others"
        );
    }

    #[test]
    fn a_starved_command_is_overtaken_and_served_from_a_reserve() {
        let (mut waiters, a, b) = waiters();
        let mut room = PoolState { whole_bytes: 4, ..room(100) };
        let large = QueuedCommand { wanted_bytes: 8, block_bytes: 8, ..waiter(1, 0) };
        waiters.push(Some(a), large, Some(TryAlloc::Short));
        waiters.push(Some(a), waiter(1, 1), None);
        waiters.push(Some(b), waiter(2, 0), None);
        let turn = waiters.next_turn(&room).unwrap();
        assert!(!waiters.settle(turn, TryAlloc::Short, room.now), "others wait for it");
        assert!(
            !waiters.may_try(Some(b), None) && waiters.claim(room.now, || room) == Starved::None
        );
        room.now += Duration::from_secs(1);
        let turn = waiters.next_turn(&room).unwrap();
        assert_eq!((turn.slot, waiters.settle(turn, TryAlloc::Short, room.now)), (0, true));
        for expected in [(2, 0), (1, 1)] {
            let turn = waiters.next_turn(&room).unwrap();
            assert_eq!((turn.key, turn.slot, turn.aside), (expected.0, expected.1, false));
            waiters.settle(turn, TryAlloc::Done, room.now);
        }
        assert_eq!((waiters.next_turn(&room), waiters.len()), (None, 1));
        assert!(waiters.may_try(Some(b), None), "and nobody waits for it any more");
        // Others do not wait for another one that lacks the same: the outcome is known.
        waiters.push(Some(b), QueuedCommand { key: 2, ..large }, Some(TryAlloc::Short));
        let turn = waiters.next_turn(&room).unwrap();
        assert_eq!((turn.key, waiters.settle(turn, TryAlloc::Short, room.now)), (2, true));
        assert_eq!(waiters.next_turn(&room), None);
        // From the part set aside, first the one and then the other.
        for (key, aside_bytes) in [(1, 8), (2, 16)] {
            assert_eq!(waiters.claim(room.now, || room), Starved::First(8));
            assert_eq!(waiters.claim(room.now, || room), Starved::Stay);
            assert_eq!(waiters.next_turn(&PoolState { aside_bytes: 7, ..room }), None);
            let turn = waiters.next_turn(&PoolState { aside_bytes, ..room }).unwrap();
            assert_eq!((turn.key, turn.aside), (key, true));
            assert!(waiters.settle(turn, TryAlloc::Done, room.now));
        }
        assert!(waiters.is_idle() && !waiters.is_at_rest(), "the part is still set aside");
        assert_eq!(waiters.claim(room.now, || room), Starved::None);
        assert!(waiters.is_at_rest() && waiters.next_turn(&room).is_none());
        assert!(waiters.turns.is_empty());
    }

    /// It would get the part again and again, and could not use it.
    #[test]
    fn no_buffers_are_reserved_for_a_device_over_its_share() {
        let (mut waiters, a, b) = waiters();
        let (hung, well) = (Some(DeviceSlot::of(DeviceId(3))), Some(DeviceSlot::of(DeviceId(4))));
        let room = PoolState { whole_bytes: 4, ..room(40) };
        let large = QueuedCommand { wanted_bytes: 8, block_bytes: 8, claims: true, ..waiter(1, 0) };
        waiters.charge(b, NsIndex::of(1), hung, 60);
        waiters.abandon(b);
        waiters.charge(a, NsIndex::of(1), hung, 1);
        let claimant = |waiters: &mut BufferScheduler, after_ms| {
            let later = room.now + Duration::from_millis(after_ms);
            let claim = waiters.claim(later, || room);
            (claim, waiters.claims.unserved(later + Duration::from_secs(60)).map(|it| it.1.slot))
        };
        for slot in 0..3 {
            waiters.push(Some(a), QueuedCommand { slot, store: hung, ..large }, None);
        }
        assert_eq!(claimant(&mut waiters, 0), (Starved::None, None));
        waiters.push(Some(a), QueuedCommand { slot: 3, store: well, ..large }, None);
        assert_eq!(claimant(&mut waiters, 0), (Starved::First(8), Some(3)));
        // Its own device hangs as well, meanwhile: it keeps the part until its turn is over.
        waiters.charge(a, NsIndex::of(1), well, 1);
        waiters.charge(b, NsIndex::of(1), well, 60);
        assert_eq!(claimant(&mut waiters, 100), (Starved::Stay, Some(3)));
        assert_eq!(claimant(&mut waiters, 1000), (Starved::None, None));
        // The first device works again.
        waiters.discharge(b, NsIndex::of(1), hung, 60);
        assert_eq!(claimant(&mut waiters, 1000), (Starved::First(8), Some(0)));
        // An admin command is for no device.
        waiters.remove(1, 0);
        waiters.push(None, QueuedCommand { slot: 4, ..large }, None);
        assert_eq!(claimant(&mut waiters, 1000), (Starved::First(8), Some(4)));
    }

    #[test]
    fn a_claimant_served_from_free_buffers_leaves_no_claim() {
        let (mut waiters, a, _) = waiters();
        let room = PoolState { whole_bytes: 4, ..room(100) };
        let large = QueuedCommand { wanted_bytes: 8, block_bytes: 8, ..waiter(1, 0) };
        for (share, slot) in [(Some(a), 0), (Some(a), 1), (None, 2)] {
            waiters.push(share, QueuedCommand { slot, claims: true, ..large }, None);
        }
        assert_eq!(waiters.claim(room.now, || room), Starved::First(8));
        let later = room.now + Duration::from_secs(1);
        assert_eq!(waiters.claim(later, || room), Starved::Next(8), "a turn each");
        assert_eq!(waiters.next_turn(&room), None);
        waiters.remove(1, 2);
        assert_eq!(waiters.claim(room.now, || room), Starved::First(8), "for another one");
        let roomy = PoolState { whole_bytes: 8, ..room };
        for slot in [0, 1] {
            let turn = waiters.next_turn(&roomy).unwrap();
            assert_eq!((turn.slot, turn.aside), (slot, false));
            assert!(waiters.settle(turn, TryAlloc::Done, room.now));
        }
        assert_eq!(waiters.claim(room.now, || room), Starved::None);
        assert!(waiters.is_empty());
    }
}
