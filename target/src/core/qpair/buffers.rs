//! The buffers of a command: what it wants of the pool, how it gets that, and for whom it is held.

use std::time::Instant;

use rdma::Pool;
use rdma::pool::capacity_for;

use super::{Io, QueuePair, QueueRole, Request, log_page};
use crate::core::command::{Plan, Source};
use crate::core::sched::buffers::{BufferDemand, DeviceSlot, NsIndex, PoolState, TryAlloc, Waiter};

/// Data bytes that only admin commands may take.
pub const DATA_FOR_ADMIN_BYTES: u64 = 256 << 10;

/// What a command wants of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    /// Bytes of its first and second data buffer; 0: it needs none.
    first: u32,
    second: u32,
    /// Bytes that are taken for them.
    own_bytes: u32,
    /// The same, with the other half of a fused command.
    pub(super) all_bytes: u64,
    /// The store that it is for.
    pub(super) store: Option<DeviceSlot>,
}

/// Bytes of data buffers that are free for I/O commands.
#[must_use]
pub fn free_for_io(pool: &Pool) -> u64 {
    pool.free_for_all_bytes().saturating_sub(DATA_FOR_ADMIN_BYTES)
}

/// How things stand for those who wait for buffers of this pool.
#[must_use]
pub fn room(pool: &Pool, now: Instant) -> PoolState {
    let (whole_bytes, aside_bytes) = pool.whole_bytes();
    let largest_bytes = pool.plan().largest_bytes.into();
    let all_free_bytes = pool.free().2.saturating_sub(DATA_FOR_ADMIN_BYTES);
    let free_bytes = free_for_io(pool);
    PoolState { free_bytes, all_free_bytes, whole_bytes, aside_bytes, largest_bytes, now }
}

impl QueuePair {
    /// Bytes of all buffers that it has in hand: neither at the fabric nor at the disk.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let in_slots = self
            .slots
            .iter()
            .flat_map(|slot| [&slot.capsule, &slot.data, &slot.cell].into_iter().flatten());
        let rare = self.slots.iter().filter_map(Request::rare).flat_map(|rare| {
            let held_back = rare.held_back.as_ref().and_then(|(_, op)| op.buf());
            rare.second.iter().chain(held_back)
        });
        let held = in_slots.chain(rare).chain(self.backlog.iter().map(|(buf, ..)| buf));
        held.map(|buf| u64::from(buf.capacity())).sum()
    }

    /// Takes the buffers that the plan needs, with those of the other half of a fused command: all
    /// or none. `aside`: also of what is set aside.
    pub(super) fn take_buffers(
        &mut self,
        slot: u16,
        want: Want,
        aside: bool,
        io: &mut Io<'_>,
    ) -> TryAlloc {
        let wanted_bytes = want.all_bytes;
        if wanted_bytes == 0 {
            return TryAlloc::Done;
        }
        if let Some(share) = self.share {
            // What is set aside is there for this one alone, what is for admin commands for none.
            let free_bytes = match aside {
                true => io.pool.free().2.saturating_sub(DATA_FOR_ADMIN_BYTES),
                false => free_for_io(io.pool),
            };
            if free_bytes < wanted_bytes {
                return TryAlloc::Short;
            }
            let largest_bytes = io.pool.plan().largest_bytes.into();
            let (lane, store) = (self.lane(slot), want.store);
            let wish = BufferDemand { lane, store, wanted_bytes, free_bytes, largest_bytes };
            if !io.waiters.allows(share, &wish) {
                return TryAlloc::Over;
            }
        } else if !self.may_hold(wanted_bytes) {
            return TryAlloc::Over;
        }
        if !self.take_own_buffers(slot, want, aside, io) {
            return TryAlloc::Short;
        }
        let Some(mate) = self.slot(slot).mate else { return TryAlloc::Done };
        if self.take_own_buffers(mate, self.want_alone(mate), aside, io) {
            return TryAlloc::Done;
        }
        let share = self.share;
        let entry = self.slot(slot);
        let second = entry.rare_mut().and_then(|rare| rare.second.take());
        [entry.data.take(), second].into_iter().flatten().for_each(|buf| io.pool.give(buf));
        let charged_bytes = std::mem::take(&mut entry.charged_bytes);
        let (lane, store) = (NsIndex::of(entry.sqe.nsid), entry.store);
        if let Some(share) = share {
            io.waiters.discharge(share, lane, store, charged_bytes);
        }
        TryAlloc::Short
    }

    /// How a command stands in line.
    pub(super) fn waiter(&self, slot: u16, pool: &Pool) -> Waiter {
        let Want { all_bytes, store, .. } = self.want(slot);
        let wanted_bytes = u32::try_from(all_bytes).unwrap_or(u32::MAX);
        let block_bytes = self.block_bytes(slot, pool.plan().largest_bytes);
        let (key, lane) = (self.key, self.lane(slot));
        Waiter { key, slot, lane, store, wanted_bytes, block_bytes, claims: false }
    }

    /// Bytes of a free block that suffices for all buffers of a command, or of several of the
    /// largest size: buffers are powers of two, so they fill it without gaps.
    fn block_bytes(&self, slot: u16, largest_bytes: u32) -> u32 {
        let entry = &self.slots[usize::from(slot)];
        let mate = entry.mate.map(|mate| needs(&self.slots[usize::from(mate)]));
        let (first, second) = needs(entry);
        let (third, fourth) = mate.unwrap_or_default();
        let wanted = [first, second, third, fourth].into_iter().filter(|len| *len > 0);
        let sum = wanted.map(capacity_for).fold(0, u32::saturating_add);
        match sum <= largest_bytes {
            true => sum.next_power_of_two(),
            false => sum.checked_next_multiple_of(largest_bytes).unwrap_or(u32::MAX),
        }
    }

    /// What a command wants of the pool, with the other half of a fused one.
    #[inline]
    pub(super) fn want(&self, slot: u16) -> Want {
        let want = self.want_alone(slot);
        match self.slots[usize::from(slot)].mate {
            None => want,
            Some(mate) => {
                let all_bytes = want.all_bytes + self.want_alone(mate).all_bytes;
                Want { all_bytes, ..want }
            }
        }
    }

    #[inline]
    fn want_alone(&self, slot: u16) -> Want {
        let entry = &self.slots[usize::from(slot)];
        let (first, second) = needs(entry);
        let own_bytes = taken_bytes(first).saturating_add(taken_bytes(second));
        let store = entry.plan.backing().map(DeviceSlot::of);
        Want { first, second, own_bytes, all_bytes: own_bytes.into(), store }
    }

    /// The namespace of a command, when its host has several: only then is there one to protect.
    fn lane(&self, slot: u16) -> Option<NsIndex> {
        match &self.serves {
            QueueRole::Io { subsystem, .. } if subsystem.namespaces.len() > 1 => {
                Some(NsIndex::of(self.slots[usize::from(slot)].sqe.nsid))
            }
            _ => None,
        }
    }

    /// Decides about the receive of a command that stands in line, and of the other half that it
    /// stands there for.
    #[inline]
    pub(super) fn spare_receives(&mut self, slot: u16, io: &mut Io<'_>) {
        self.spare_receive(slot, io);
        if let Some(mate) = self.slot(slot).mate {
            self.spare_receive(mate, io);
        }
    }

    /// Lets the receive of a command go to the disk, or has its data copied when its store has enough
    /// receives: a disk that hangs keeps what it has, and others shall be able to connect. It counts
    /// from now on: many may be let pass before the first of them is at the disk.
    fn spare_receive(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        // What does not begin on a page is copied in any case.
        let Plan::Store { from: Source::Capsule { .. }, backing, .. } = entry.plan else { return };
        if needs(entry) == (0, 0) && !entry.gives_receive {
            let (store, receives) = (DeviceSlot::of(backing), io.pool.plan().receives);
            entry.gives_receive = io.waiters.keep_receive(store, receives);
            entry.copies = !entry.gives_receive;
        }
    }

    /// The receive of a command, if it was let go to the disk, is home or never goes.
    #[inline]
    pub(super) fn return_receive(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = self.slot(slot);
        if std::mem::take(&mut entry.gives_receive)
            && let Some(backing) = entry.plan.backing()
        {
            io.waiters.return_receive(DeviceSlot::of(backing));
        }
    }

    /// A command is done with its store: a host that takes no data keeps nothing from those that use
    /// it as well.
    #[inline]
    pub(super) fn leave_store(&mut self, slot: u16, io: &mut Io<'_>) {
        let share = self.share;
        let entry = self.slot(slot);
        if let (Some(share), Some(store)) = (share, entry.store.take()) {
            io.waiters.discharge_store(share, store, entry.charged_bytes);
        }
    }

    #[inline]
    fn take_own_buffers(&mut self, slot: u16, want: Want, aside: bool, io: &mut Io<'_>) -> bool {
        let share = self.share;
        let take = match share {
            _ if aside => Pool::take_aside,
            Some(_) => Pool::take_data,
            // A few small ones, for which no host shall wait.
            None => Pool::take_any,
        };
        let Want { first, second, own_bytes, store, .. } = want;
        let entry = self.slot(slot);
        if first > 0 && entry.data.is_none() {
            entry.data = take(io.pool, first);
            if entry.data.is_none() {
                return false;
            }
        }
        if second > 0 && entry.rare().is_none_or(|rare| rare.second.is_none()) {
            let taken = take(io.pool, second);
            let is_short = taken.is_none();
            entry.make_rare().second = taken;
            if is_short {
                if let Some(buf) = entry.data.take() {
                    io.pool.give(buf);
                }
                return false;
            }
        }
        entry.charged_bytes = own_bytes;
        if let Some(share) = share {
            let lane = NsIndex::of(entry.sqe.nsid);
            entry.store = store;
            io.waiters.charge(share, lane, store, own_bytes);
        }
        true
    }
}

/// Bytes that are taken of the pool for so many; for none, none.
#[inline]
fn taken_bytes(len: u32) -> u32 {
    if len == 0 { 0 } else { capacity_for(len) }
}

/// Bytes of the first and second data buffer that a command needs from the pool.
#[inline]
fn needs(entry: &Request) -> (u32, u32) {
    let pulled = |from: &Source| match *from {
        Source::Host(remote) => remote.len,
        Source::Capsule { len, .. } if entry.copies => len,
        Source::Capsule { offset, len } if !offset.is_multiple_of(rdma::pool::PAGE_BYTES) => len,
        Source::Capsule { .. } => 0,
    };
    match &entry.plan {
        Plan::Give { to, .. } => (to.len.min(log_page::AT_ONCE_BYTES), 0),
        Plan::Load { to, .. } => (to.len, 0),
        Plan::Store { from, .. } => (pulled(from), 0),
        Plan::Compare { from, .. } => (pulled(from), from.len_bytes()),
        Plan::Copy { job, from } => (pulled(from), job.room_bytes()),
        Plan::Verify { len, piece_bytes, .. } => ((*len).min(u64::from(*piece_bytes)) as u32, 0),
        Plan::Deallocate { from, .. }
        | Plan::Connect { from }
        | Plan::Reserve { from, .. }
        | Plan::Authenticate { from }
        | Plan::Manage { from }
        | Plan::SetFeature { from } => (pulled(from), 0),
        Plan::Reply(_)
        | Plan::Flush { .. }
        | Plan::Zero { .. }
        | Plan::ShutDown { .. }
        | Plan::Keep { .. }
        | Plan::Protect { .. }
        | Plan::Mark { .. }
        | Plan::Mend { .. }
        | Plan::Order { .. }
        | Plan::Park
        | Plan::Abort { .. }
        | Plan::Disconnect => (0, 0),
    }
}
