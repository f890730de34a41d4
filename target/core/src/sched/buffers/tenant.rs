//! Buffers held by one association on a reactor, and its queued requests.

use std::collections::VecDeque;

use super::{DeviceSlot, LANES, NsIndex, QueuedCommand};

/// An association may hold this many times the bytes that are free.
const TIMES_FREE: u64 = 4;

/// Buffers and queue of one association on this reactor.
#[derive(Debug)]
pub(super) struct Tenant {
    /// Whose it is ([`crate::controller::association::Association::id`]); none: nobody's.
    pub(super) owner: Option<u64>,
    /// Its queues here.
    pub(super) queues: u32,
    /// Those whose connections have not been closed.
    pub(super) open: u32,
    /// How many of their commands can wait at once.
    pub(super) room: usize,
    /// Bytes of data buffers that its commands hold, wherever these are.
    pub(super) held_bytes: u64,
    /// The same by namespace.
    pub(super) by_lane: [u64; LANES],
    /// The same by store.
    pub(super) by_store: [u64; LANES],
    pub(super) line: VecDeque<QueuedCommand>,
    /// Not all of them wait for one store. May be true for longer than it is so.
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
            by_lane,
            by_store,
            line,
            mixed: false,
        }
    }
}

impl Tenant {
    /// One more stands in line.
    pub(super) fn stand(&mut self, waiter: QueuedCommand, in_front: bool) {
        let unlike = |it: &QueuedCommand| (it.lane, it.store) != (waiter.lane, waiter.store);
        self.mixed = self.line.front().is_some_and(|it| self.mixed || unlike(it));
        match in_front {
            true => self.line.push_front(waiter),
            false => self.line.push_back(waiter),
        }
    }

    /// Whether an association may take so many bytes more. What one of several namespaces holds
    /// does not count: it is bounded by itself, and may be at a disk that hangs.
    pub(super) fn allows(&self, lane: Option<NsIndex>, wanted_bytes: u64, free_bytes: u64) -> bool {
        let most = free_bytes.saturating_mul(TIMES_FREE);
        let fits = |held: u64| held == 0 || held.saturating_add(wanted_bytes) <= most;
        let held = self.held_bytes;
        // Only who would wait looks at all its namespaces.
        fits(held)
            || lane.is_some_and(|_| {
                fits(held.saturating_sub(self.by_lane.iter().copied().max().unwrap_or(0)))
            })
    }

    /// Bytes that its commands hold for a store, or for several that share a count.
    pub(super) fn held_for(&self, store: DeviceSlot) -> u64 {
        self.by_store[store.index() % LANES]
    }

    /// Whether so many bytes more may be taken for a namespace.
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
