//! Admission: a command waits until its rate limits let it begin, and then for buffers. This is the
//! only place where data buffers are allocated.

use std::time::Instant;

use rdma::pool::capacity_for;
use rdma::{Buf, Pool};

use super::buffers::{self, BufferShare, DATA_FOR_ADMIN_BYTES, Want, free_for_io};
use super::rate_limits::bytes_moved;
use super::request::{State, WaitReason};
use super::{Io, QueuePair, lba_status};
use crate::sched::buffers::{BufferDemand, DeviceSlot, NsIndex, TryAlloc};
use crate::subsystem::rate_limit::Grant;
use nvmfd_blockdev::DeviceId;

impl QueuePair {
    /// Admits a command: it waits for its rate limits, then for buffers.
    #[inline]
    pub(super) fn admit(&mut self, slot: u16, io: &mut Io<'_>) {
        let is_delayed = self.rate_limits.are_there()
            && bytes_moved(&self.requests, slot)
                .is_some_and(|bytes| self.waits_for_limits(slot, bytes, io));
        if !is_delayed {
            self.admit_to_buffers(slot, io);
        }
    }

    /// Allocates a buffer of `len` bytes for a Read or a Write, if that need not wait: the buffer
    /// scheduler has no reason to look closer. None: it is admitted like all others.
    #[inline(always)]
    pub(super) fn allocate_at_once(
        &mut self,
        slot: u16,
        (backing, len): (DeviceId, u32),
        io: &mut Io<'_>,
    ) -> Option<Buf> {
        let tenant = self.buffers.tenant?;
        let (device, bytes) = (DeviceSlot::of(backing), capacity_for(len));
        let entry = &mut self.requests[slot];
        let lane = NsIndex::of(entry.sqe.nsid);
        if !io.waiters.charge_at_once(tenant, (lane, device), bytes, free_for_io(io.pool)) {
            return None;
        }
        (entry.charged_bytes, entry.device) = (bytes, Some(device));
        let buf = io.pool.take_data(len);
        if buf.is_none() {
            self.buffers.discharge(entry, io);
            entry.device = None;
        }
        buf
    }

    /// Admits the response to a Get LBA Status whose search has ended.
    pub(super) fn admit_lba_status(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        match lba_status::response(entry, &self.conn.role, io) {
            Ok(plan) => {
                entry.plan = plan;
                entry.enter(State::Waiting(WaitReason::Buffers));
                self.admit(slot, io);
            }
            Err(status) => self.complete(slot, Err(status), io),
        }
    }

    /// As [`QueuePair::admit`], for a Read or a Write that limits let begin and that cannot start at
    /// once.
    #[inline(never)]
    pub(super) fn admit_transfer(&mut self, slot: u16, io: &mut Io<'_>) {
        self.admit_to_buffers(slot, io);
    }

    /// Whether a Read or a Write of `bytes` has to wait for its rate limits. It is in their queue
    /// then.
    #[inline(always)]
    pub(super) fn is_delayed(&mut self, slot: u16, bytes: u32, io: &mut Io<'_>) -> bool {
        self.rate_limits.are_there() && self.waits_for_limits(slot, bytes, io)
    }

    /// Continues a command whose rate limits let it begin now.
    pub fn on_rate_limit(&mut self, slot: u16, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        if self.conn.is_open() && entry.state() == State::Waiting(WaitReason::RateLimit) {
            entry.enter(State::Waiting(WaitReason::Buffers));
            self.admit_to_buffers(slot, io);
        }
    }

    /// Retries the allocation of buffers for a waiting command; `aside`: also from the part set
    /// aside.
    pub fn on_buffers(&mut self, slot: u16, aside: bool, io: &mut Io<'_>) -> TryAlloc {
        let state = self.requests[slot].state();
        if !self.conn.is_open() || state != State::Waiting(WaitReason::Buffers) {
            return TryAlloc::Done;
        }
        let want = buffers::want(&self.requests, slot);
        match self.allocate(slot, &want, aside, io) {
            TryAlloc::Done => self.execute(slot, io),
            // It is removed from the wait queue, and waits for other commands of its queue pair.
            TryAlloc::Over if self.buffers.tenant.is_none() => {
                self.buffers.defer(&mut self.requests, slot, io);
            }
            tried => return tried,
        }
        TryAlloc::Done
    }

    /// Books a command at its rate limits; none if it is no longer limited.
    #[must_use]
    pub fn book(&mut self, slot: u16, now: Instant) -> Option<Grant> {
        let (nsid, role) = (self.requests[slot].sqe.nsid, &self.conn.role);
        let bytes = bytes_moved(&self.requests, slot)?;
        if !self.rate_limits.apply_to(nsid, role) {
            return None;
        }
        let waits_ns = self.rate_limits.book(nsid, bytes, role, now);
        Some(self.rate_limits.grant(nsid, bytes, role, (now, waits_ns)))
    }

    /// Refunds the booking of a command that will not begin as booked.
    pub fn give_back(&self, slot: u16, grant: &Grant, now: Instant) {
        self.rate_limits.give_back(&self.requests[slot], &self.conn.role, grant, now);
    }

    /// Removes a command that ends before it has begun from the queues for limits and buffers.
    pub(super) fn leave_line(&self, slot: u16, io: &mut Io<'_>) {
        if let Some(grant) = io.waiters.remove(self.requests.key, slot) {
            self.give_back(slot, &grant, io.now);
        }
    }

    /// Retries deferred commands of a queue without a share, in their order, after a command has
    /// ended.
    #[cold]
    pub(super) fn retry_deferred(&mut self, over: u16, io: &mut Io<'_>) {
        let mut over = Some(over);
        while let Some(slot) = self.buffers.next_deferred(over.take(), io)
            && self.conn.is_open()
        {
            // It may have been aborted meanwhile.
            let tried = match self.requests[slot].state() {
                State::Waiting(WaitReason::AdminCap) => {
                    let want = buffers::want(&self.requests, slot);
                    Some(self.allocate(slot, &want, false, io))
                }
                _ => None,
            };
            if tried == Some(TryAlloc::Over) {
                return;
            }
            self.buffers.end_deferred(io);
            match tried {
                Some(TryAlloc::Done) => self.execute(slot, io),
                Some(_) => {
                    self.requests[slot].enter(State::Waiting(WaitReason::Buffers));
                    self.wait_for_buffers(slot, tried, io);
                }
                None => {}
            }
        }
    }

    #[inline(never)]
    fn waits_for_limits(&mut self, slot: u16, bytes: u32, io: &mut Io<'_>) -> bool {
        let Some(tenant) = self.buffers.tenant else { return false };
        let nsid = self.requests[slot].sqe.nsid;
        let may_book = io.waiters.rate_limits.may_book(tenant, nsid);
        let waits_ns =
            may_book.then(|| self.rate_limits.book(nsid, bytes, &self.conn.role, io.now));
        // It begins now, or no limit applies to it.
        waits_ns != Some(0) && self.queue_for_limits(slot, tenant, (bytes, waits_ns), io)
    }

    /// Appends a command to the queue for limits, if it is under any: what it waits for is booked, or
    /// will be after those for its namespace that are queued ahead of it.
    #[cold]
    fn queue_for_limits(
        &mut self,
        slot: u16,
        tenant: u32,
        (bytes, waits_ns): (u32, Option<u64>),
        io: &mut Io<'_>,
    ) -> bool {
        let (nsid, role) = (self.requests[slot].sqe.nsid, &self.conn.role);
        if waits_ns.is_none() && !self.rate_limits.apply_to(nsid, role) {
            return false;
        }
        let granted = |waits_ns| self.rate_limits.grant(nsid, bytes, role, (io.now, waits_ns));
        let booked = waits_ns.map(granted);
        io.waiters.rate_limits.push(tenant, (self.requests.key, slot), nsid, booked);
        self.requests[slot].enter(State::Waiting(WaitReason::RateLimit));
        true
    }

    /// Allocates the buffers of a command and begins it, or queues it for them.
    #[inline(always)]
    fn admit_to_buffers(&mut self, slot: u16, io: &mut Io<'_>) {
        buffers::lend_receive(&mut self.requests[slot], io);
        if let Some(other) = self.requests[slot].fused_with() {
            buffers::lend_receive(&mut self.requests[other], io);
        }
        // A command without data overtakes those that wait for buffers.
        let want = buffers::want(&self.requests, slot);
        let may_try = want.all_bytes == 0 || io.waiters.may_try(self.buffers.tenant, want.device);
        let tried = may_try.then(|| self.allocate(slot, &want, false, io));
        match tried {
            Some(TryAlloc::Done) => self.execute(slot, io),
            Some(TryAlloc::Over) if self.buffers.tenant.is_none() => {
                self.buffers.defer(&mut self.requests, slot, io);
            }
            _ => self.wait_for_buffers(slot, tried, io),
        }
    }

    #[inline(never)]
    fn wait_for_buffers(&self, slot: u16, tried: Option<TryAlloc>, io: &mut Io<'_>) {
        let waiter = BufferShare::waiter(&self.requests, slot, &self.conn.role, io.pool);
        io.waiters.push(self.buffers.tenant, waiter, tried);
    }

    /// Allocates the buffers that the plan needs, with those of the other half of a fused command:
    /// all or none. `aside`: also from the part set aside.
    fn allocate(&mut self, slot: u16, want: &Want, aside: bool, io: &mut Io<'_>) -> TryAlloc {
        let wanted_bytes = want.all_bytes;
        if wanted_bytes == 0 {
            return TryAlloc::Done;
        }
        if let Some(tenant) = self.buffers.tenant {
            // The part set aside is for this command alone; no I/O command gets the part for admin
            // commands.
            let free_bytes = match aside {
                true => io.pool.free().2.saturating_sub(DATA_FOR_ADMIN_BYTES),
                false => free_for_io(io.pool),
            };
            if free_bytes < wanted_bytes {
                return TryAlloc::Short;
            }
            let largest_bytes = io.pool.plan().largest_bytes.into();
            let lane = buffers::lane(&self.requests[slot], &self.conn.role);
            let store = want.device;
            let demand = BufferDemand { lane, store, wanted_bytes, free_bytes, largest_bytes };
            if !io.waiters.allows(tenant, &demand) {
                return TryAlloc::Over;
            }
        } else if !BufferShare::may_hold(&self.requests, wanted_bytes) {
            return TryAlloc::Over;
        }
        if !self.allocate_own(slot, want, aside, io) {
            return TryAlloc::Short;
        }
        match self.requests[slot].fused_with() {
            None => TryAlloc::Done,
            Some(other) => self.allocate_for_other(slot, other, aside, io),
        }
    }

    /// Allocates the buffers of the other half of a fused command; if that fails, frees those of
    /// this one.
    fn allocate_for_other(
        &mut self,
        slot: u16,
        other: u16,
        aside: bool,
        io: &mut Io<'_>,
    ) -> TryAlloc {
        let want = buffers::want_alone(&self.requests[other]);
        if self.allocate_own(other, &want, aside, io) {
            return TryAlloc::Done;
        }
        let entry = &mut self.requests[slot];
        let second = entry.ext_mut().and_then(|ext| ext.second.take());
        [entry.data.take(), second].into_iter().flatten().for_each(|buf| io.pool.give(buf));
        self.buffers.discharge(entry, io);
        TryAlloc::Short
    }

    #[inline(always)]
    fn allocate_own(&mut self, slot: u16, want: &Want, aside: bool, io: &mut Io<'_>) -> bool {
        let tenant = self.buffers.tenant;
        let take = |pool: &mut Pool, bytes: u32| match tenant {
            _ if aside => pool.take_aside(bytes),
            Some(_) => pool.take_data(bytes),
            // Few and small buffers, for which no host must wait.
            None => pool.take_any(bytes),
        };
        let Want { first, second, own_bytes, device, .. } = *want;
        let entry = &mut self.requests[slot];
        if first > 0 && entry.data.is_none() {
            entry.data = take(io.pool, first);
            if entry.data.is_none() {
                return false;
            }
        }
        if second > 0 && entry.ext().is_none_or(|ext| ext.second.is_none()) {
            let taken = take(io.pool, second);
            let is_short = taken.is_none();
            entry.make_ext().second = taken;
            if is_short {
                if let Some(buf) = entry.data.take() {
                    io.pool.give(buf);
                }
                return false;
            }
        }
        entry.charged_bytes = own_bytes;
        if let Some(tenant) = tenant {
            entry.device = device;
            io.waiters.charge(tenant, NsIndex::of(entry.sqe.nsid), device, own_bytes);
        }
        true
    }
}
