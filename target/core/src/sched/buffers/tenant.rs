//! Buffers held by one association on a reactor, and its queued requests.

use std::collections::VecDeque;

use super::hold_time::{HoldTimes, Promptness};
use super::{DeviceSlot, LANES, NsIndex, QueuedCommand};

/// An association may hold this many times the bytes that are free.
const TIMES_FREE: u64 = 4;

/// Buffers and queue of one association on this reactor.
#[derive(Debug)]
pub(super) struct Tenant {
    /// The association that owns it ([`crate::controller::association::Association::id`]), if any.
    pub(super) owner: Option<u64>,
    /// Its queues on this reactor.
    pub(super) queues: u32,
    /// Those of open connections.
    pub(super) open: u32,
    /// Number of their commands that can wait at once.
    pub(super) room: usize,
    /// Bytes of data buffers that its commands hold, wherever these are.
    pub(super) held_bytes: u64,
    /// The same by namespace.
    pub(super) by_lane: [u64; LANES],
    /// The same by device.
    pub(super) by_store: [u64; LANES],
    /// How soon its host returns them.
    pub(super) promptness: Promptness,
    pub(super) line: VecDeque<QueuedCommand>,
    /// Not all of them are for one namespace and device. May stay true after that has ended.
    pub(super) mixed: bool,
}

impl Default for Tenant {
    fn default() -> Tenant {
        let (owner, line) = (None, VecDeque::new());
        let (by_lane, by_store) = ([0; LANES], [0; LANES]);
        Tenant {
            owner,
            queues: 0,
            open: 0,
            room: 0,
            held_bytes: 0,
            promptness: Promptness::default(),
            by_lane,
            by_store,
            line,
            mixed: false,
        }
    }
}

impl Tenant {
    /// Queues one more command.
    pub(super) fn stand(&mut self, waiter: QueuedCommand, in_front: bool) {
        let unlike = |it: &QueuedCommand| (it.lane, it.store) != (waiter.lane, waiter.store);
        self.mixed = self.line.front().is_some_and(|it| self.mixed || unlike(it));
        match in_front {
            true => self.line.push_front(waiter),
            false => self.line.push_back(waiter),
        }
    }

    /// Whether it is not slow, and holds so little, with `wanted_bytes` more, that no limit can apply
    /// to it.
    #[inline(always)]
    pub(super) fn has_much_free(&self, wanted_bytes: u64, free_bytes: u64) -> bool {
        !self.promptness.is_slow() && self.held_bytes.saturating_add(wanted_bytes) <= free_bytes
    }

    /// Charges the bytes of a command to it, its namespace and its device.
    #[inline(always)]
    pub(super) fn charge(&mut self, lane: NsIndex, store: Option<DeviceSlot>, bytes: u32) {
        self.held_bytes += u64::from(bytes);
        self.by_lane[usize::from(lane.0)] += u64::from(bytes);
        if let Some(store) = store {
            self.by_store[store.index() % LANES] += u64::from(bytes);
        }
    }

    /// Discharges those of a command that has ended from it and its namespace.
    #[inline(always)]
    pub(super) fn discharge(&mut self, lane: NsIndex, bytes: u32) {
        for held in [&mut self.held_bytes, &mut self.by_lane[usize::from(lane.0)]] {
            *held = held.saturating_sub(bytes.into());
        }
    }

    /// Discharges those of a command that no longer needs its device from that.
    #[inline(always)]
    pub(super) fn discharge_store(&mut self, store: DeviceSlot, bytes: u32) {
        let held = &mut self.by_store[store.index() % LANES];
        *held = held.saturating_sub(bytes.into());
    }

    /// Whether it is slow, and slow ones hold too much for its first queued command.
    pub(super) fn is_limited(&self, hold_times: &HoldTimes, free_bytes: u64) -> bool {
        self.promptness.is_slow()
            && self
                .line
                .front()
                .is_some_and(|it| hold_times.limit_slow(it.wanted_bytes.into(), free_bytes))
    }

    /// Whether an association may hold `wanted_bytes` more. The bytes of one of several namespaces
    /// do not count: they have a limit of their own, and may be at a device that hangs.
    pub(super) fn allows(&self, lane: Option<NsIndex>, wanted_bytes: u64, free_bytes: u64) -> bool {
        let most = free_bytes.saturating_mul(TIMES_FREE);
        let fits = |held: u64| held == 0 || held.saturating_add(wanted_bytes) <= most;
        let held = self.held_bytes;
        // All namespaces are checked only if the command would wait otherwise.
        fits(held)
            || lane.is_some_and(|_| {
                fits(held.saturating_sub(self.by_lane.iter().copied().max().unwrap_or(0)))
            })
    }

    /// Returns the bytes that its commands hold for a device, or for several that share a count.
    pub(super) fn held_for(&self, store: DeviceSlot) -> u64 {
        self.by_store[store.index() % LANES]
    }

    /// Whether `wanted_bytes` more may be held for a namespace.
    pub(super) fn lets_pass(
        &self,
        lane: Option<NsIndex>,
        wanted_bytes: u64,
        free_bytes: u64,
    ) -> bool {
        let held = lane.map_or(0, |lane| self.by_lane[usize::from(lane.0)]);
        held == 0 || held.saturating_add(wanted_bytes) <= free_bytes
    }
}
