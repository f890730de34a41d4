//! Data buffers of a command: how many bytes it needs, and which association they are charged to. The
//! allocation is in `admit.rs`.
//!
//! A queue pair without a share of the data buffers is an admin queue, or any queue before its Connect. Any
//! peer can open one, and its commands precede all I/O, so the bytes that it may hold are limited.

use std::collections::VecDeque;
use std::time::Instant;

use rdma::Pool;
use rdma::pool::capacity_for;

use super::Io;
use super::log_page;
use super::request::{Request, State, WaitReason};
use super::requests::Requests;
use super::role::QueueRole;
use crate::command::{Plan, Source};
use crate::sched::buffers::{DeviceSlot, NsIndex, PoolState, QueuedCommand, is_prompt};

/// Data bytes that only admin commands may take.
pub const DATA_FOR_ADMIN_BYTES: u64 = 256 << 10;

/// Bytes that the commands of a queue without a share may hold together. One alone may hold more.
const MOST_HELD_BYTES: u64 = log_page::AT_ONCE_BYTES as u64;

/// Buffers that a command needs from the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    /// Bytes of its first and second data buffer; 0: it needs none.
    pub(super) first: u32,
    pub(super) second: u32,
    /// Bytes that are allocated for them.
    pub(super) own_bytes: u32,
    /// The same, including the other half of a fused command.
    pub(super) all_bytes: u64,
    /// The device that it accesses.
    pub(super) device: Option<DeviceSlot>,
}

/// Share to which the buffers of a queue pair's commands are charged.
#[derive(Debug, Default)]
pub(super) struct BufferShare {
    /// Index of its association's share of the data buffers; only of an I/O queue.
    pub(super) tenant: Option<u32>,
    /// Slots of commands that wait for other commands of a queue without a share to end.
    deferred: VecDeque<u16>,
}

/// Returns the bytes of data buffers that are free for I/O commands.
#[inline]
pub fn free_for_io(pool: &Pool) -> u64 {
    pool.free_for_all_bytes().saturating_sub(DATA_FOR_ADMIN_BYTES)
}

/// Returns the state of the pool for the buffer scheduler.
pub fn room(pool: &Pool, now: Instant) -> PoolState {
    let (whole_bytes, aside_bytes) = pool.whole_bytes();
    let largest_bytes = pool.plan().largest_bytes.into();
    let all_free_bytes = pool.free().2.saturating_sub(DATA_FOR_ADMIN_BYTES);
    let free_bytes = free_for_io(pool);
    PoolState { free_bytes, all_free_bytes, whole_bytes, aside_bytes, largest_bytes, now }
}

impl BufferShare {
    /// Whether a queue without a share may hold `wanted_bytes` more.
    pub(super) fn may_hold(requests: &Requests, wanted_bytes: u64) -> bool {
        let held: u64 = requests.iter().map(|entry| u64::from(entry.charged_bytes)).sum();
        held == 0 || held.saturating_add(wanted_bytes) <= MOST_HELD_BYTES
    }

    /// Defers a command until others of its queue have ended. It is in no wait queue meanwhile, so
    /// that it delays no other host.
    pub(super) fn defer(&mut self, requests: &mut Requests, slot: u16, io: &mut Io<'_>) {
        io.waiters.behind_sent += 1;
        self.deferred.push_back(slot);
        requests[slot].enter(State::Waiting(WaitReason::AdminCap));
    }

    /// Whether a command waits for others of its queue.
    #[inline]
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Returns the command that has been deferred the longest; `over` has ended itself.
    pub(super) fn next_deferred(&mut self, over: Option<u16>, io: &mut Io<'_>) -> Option<u16> {
        let before = self.deferred.len();
        self.deferred.retain(|slot| Some(*slot) != over);
        io.waiters.behind_sent -= before - self.deferred.len();
        self.deferred.front().copied()
    }

    /// Removes the command that has been deferred the longest.
    pub(super) fn end_deferred(&mut self, io: &mut Io<'_>) {
        self.deferred.pop_front();
        io.waiters.behind_sent -= 1;
    }

    /// Assigns a share to the queue, to which its buffers are charged from now on. The deferred
    /// commands are other Connect commands, which fail.
    pub(super) fn begin(&mut self, tenant: u32, requests: &mut Requests, io: &mut Io<'_>) {
        self.tenant = Some(tenant);
        requests.iter_mut().for_each(|entry| entry.charged_bytes = 0);
        io.waiters.behind_sent -= self.deferred.len();
        self.deferred.clear();
    }

    /// Discharges a command from its device, which it no longer needs: a host that does not receive
    /// its data must not withhold buffers from other hosts of the device.
    #[inline(always)]
    pub(super) fn leave_device(&self, entry: &mut Request, io: &mut Io<'_>) {
        if let (Some(tenant), Some(device)) = (self.tenant, entry.device.take()) {
            io.waiters.discharge_store(tenant, device, entry.charged_bytes);
        }
    }

    /// Discharges a command that has ended and holds no buffers any more.
    #[inline(always)]
    pub(super) fn discharge(&self, entry: &mut Request, io: &mut Io<'_>) {
        let charged_bytes = std::mem::take(&mut entry.charged_bytes);
        if let (Some(tenant), 1..) = (self.tenant, charged_bytes) {
            let lane = NsIndex::of(entry.sqe.nsid);
            io.waiters.discharge(tenant, lane, entry.device, charged_bytes);
        }
    }

    /// The same, and records whether the host of the command has returned them promptly: until the reactor
    /// fell asleep, if it did not wake for the acknowledgement, which so makes no prompt host slow.
    #[inline(always)]
    pub(super) fn end(&self, entry: &mut Request, io: &mut Io<'_>) {
        let charged_bytes = std::mem::take(&mut entry.charged_bytes);
        if let (Some(tenant), 1..) = (self.tenant, charged_bytes) {
            let lane = NsIndex::of(entry.sqe.nsid);
            // Most take less in total than a host may hold their buffers.
            let is_prompt = is_prompt(entry.clock.total_ns(io.sent_ns))
                || is_prompt(entry.clock.at_host_ns(io.sent_ns));
            io.waiters.end(tenant, (lane, entry.device), charged_bytes, is_prompt);
        }
    }

    /// Returns the wait queue entry of a command.
    pub(super) fn waiter(
        requests: &Requests,
        slot: u16,
        role: &QueueRole,
        pool: &Pool,
    ) -> QueuedCommand {
        let Want { all_bytes, device: store, .. } = want(requests, slot);
        let wanted_bytes = u32::try_from(all_bytes).unwrap_or(u32::MAX);
        let block_bytes = block_bytes(requests, slot, pool.plan().largest_bytes);
        let (key, lane) = (requests.key, lane(&requests[slot], role));
        QueuedCommand { key, slot, lane, store, wanted_bytes, block_bytes, claims: false }
    }
}

/// Returns the bytes of all buffers that these commands own, without those posted to the fabric or
/// submitted to a device.
pub(super) fn held_bytes(requests: &Requests) -> u64 {
    let in_slots = requests
        .iter()
        .flat_map(|entry| [&entry.capsule, &entry.data, &entry.cell].into_iter().flatten());
    let in_ext = requests.iter().filter_map(Request::ext).flat_map(|ext| {
        let waiting = ext.waiting_op.as_ref().and_then(|(_, op)| op.buf());
        ext.second.iter().chain(waiting)
    });
    in_slots.chain(in_ext).map(|buf| u64::from(buf.capacity())).sum()
}

/// Returns the buffers that a command needs, including those of the other half of a fused command.
#[inline(always)]
pub(super) fn want(requests: &Requests, slot: u16) -> Want {
    let entry = &requests[slot];
    let own = want_alone(entry);
    match entry.fused_with() {
        None => own,
        Some(other) => {
            Want { all_bytes: own.all_bytes + want_alone(&requests[other]).all_bytes, ..own }
        }
    }
}

#[inline(always)]
pub(super) fn want_alone(entry: &Request) -> Want {
    let (first, second) = needs(entry);
    let own_bytes = taken_bytes(first).saturating_add(taken_bytes(second));
    let device = entry.plan.backing().map(DeviceSlot::of);
    Want { first, second, own_bytes, all_bytes: own_bytes.into(), device }
}

/// Returns the namespace of a command if its host has several: only then is one protected from
/// others.
#[inline]
pub(super) fn lane(entry: &Request, role: &QueueRole) -> Option<NsIndex> {
    match role {
        QueueRole::Io { subsystem, .. } if subsystem.namespaces.len() > 1 => {
            Some(NsIndex::of(entry.sqe.nsid))
        }
        _ => None,
    }
}

/// Passes the receive of a command to the device, or has its data copied if the device already has
/// its limit of receives: a device that hangs keeps them, and other hosts must be able to connect.
/// It is counted from now on, because many commands may be admitted before the first one is
/// submitted.
#[inline]
pub(super) fn lend_receive(entry: &mut Request, io: &mut Io<'_>) {
    let Plan::Store { from: Source::Capsule { .. }, backing, .. } = entry.plan else { return };
    // Data that are not page-aligned are copied in any case.
    if needs(entry) == (0, 0) && !entry.lends_receive {
        let (device, receives) = (DeviceSlot::of(backing), io.pool.plan().receives);
        entry.lends_receive = io.waiters.keep_receive(device, receives);
        entry.bounces = !entry.lends_receive;
    }
}

/// Stops counting the receive of a command that the device has returned, or that is not passed to
/// it.
#[inline(always)]
pub(super) fn return_receive(entry: &mut Request, io: &mut Io<'_>) {
    if std::mem::take(&mut entry.lends_receive)
        && let Some(backing) = entry.plan.backing()
    {
        io.waiters.return_receive(DeviceSlot::of(backing));
    }
}

/// Returns the bytes of a free block that suffices for all buffers of a command, or of several of
/// the largest size: buffers are powers of two, so they fill it without gaps.
fn block_bytes(requests: &Requests, slot: u16, largest_bytes: u32) -> u32 {
    let entry = &requests[slot];
    let other = entry.fused_with().map(|other| needs(&requests[other]));
    let (first, second) = needs(entry);
    let (third, fourth) = other.unwrap_or_default();
    let wanted = [first, second, third, fourth].into_iter().filter(|len| *len > 0);
    let sum = wanted.map(capacity_for).fold(0, u32::saturating_add);
    match sum <= largest_bytes {
        true => sum.next_power_of_two(),
        false => sum.checked_next_multiple_of(largest_bytes).unwrap_or(u32::MAX),
    }
}

/// Returns the bytes that the pool allocates for `len` bytes; 0 for 0.
#[inline]
fn taken_bytes(len: u32) -> u32 {
    if len == 0 { 0 } else { capacity_for(len) }
}

/// Returns the bytes of the first and second data buffer that a command needs from the pool.
#[inline(always)]
fn needs(entry: &Request) -> (u32, u32) {
    let pulled = |from: &Source| match *from {
        Source::Host(remote) => remote.len,
        Source::Capsule { len, .. } if entry.bounces => len,
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
        | Plan::LbaStatus(_)
        | Plan::Disconnect => (0, 0),
    }
}
