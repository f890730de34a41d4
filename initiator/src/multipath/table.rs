//! The requests that are not done. Nothing is allocated for a request.

use std::collections::VecDeque;
use std::time::Instant;

use rdma::Buf;

use super::request::{BlockDone, BlockRequest, Failure};
use crate::session::earlier;

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// In the queue for the next path that can be used.
    Queued,
    /// In an association, with its data.
    Sent,
    /// It enters the queue at a time.
    Delayed(Instant),
    /// It enters the queue when the last association of this path has ended at the target.
    Replay(usize),
}

#[derive(Debug)]
struct Slot {
    request: BlockRequest,
    state: State,
    repeats: u8,
}

/// All requests.
#[derive(Debug)]
pub(super) struct RequestTable {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    queued: VecDeque<u32>,
    /// In the states `Delayed` and `Replay`.
    waiting: Vec<u32>,
    done: VecDeque<BlockDone>,
}

impl RequestTable {
    pub(super) fn new(most: u32) -> RequestTable {
        let capacity = most as usize;
        RequestTable {
            slots: (0..most).map(|_| None).collect(),
            free: (0..most).rev().collect(),
            queued: VecDeque::with_capacity(capacity),
            waiting: Vec::with_capacity(capacity),
            done: VecDeque::with_capacity(capacity),
        }
    }

    /// Requests that the caller has not taken count as well, so that all lists are bounded.
    pub(super) fn is_full(&self) -> bool {
        self.free.len() <= self.done.len()
    }

    pub(super) fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether changes are sent, or were sent by an association that may not have ended at the target.
    pub(super) fn has_sent_changes(&self) -> bool {
        let is_sent = |slot: &Slot| matches!(slot.state, State::Sent | State::Replay(_));
        let mut slots = self.slots.iter().flatten();
        slots.any(|slot| is_sent(slot) && slot.request.operation.is_change())
    }

    pub(super) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    pub(super) fn insert(&mut self, request: BlockRequest) {
        let Some(n) = self.free.pop() else { return };
        self.slots[n as usize] = Some(Slot { request, state: State::Queued, repeats: 0 });
        self.queued.push_back(n);
    }

    pub(super) fn first_queued(&self) -> Option<u32> {
        self.queued.front().copied()
    }

    /// Returns a request, and how often it was repeated.
    pub(super) fn get(&mut self, n: u32) -> Option<(&mut BlockRequest, u8)> {
        let slot = self.slots.get_mut(n as usize)?.as_mut()?;
        Some((&mut slot.request, slot.repeats))
    }

    /// The first request of the queue has been sent.
    pub(super) fn sent(&mut self) {
        if let Some(slot) = self.queued.pop_front().and_then(|n| self.slots[n as usize].as_mut()) {
            slot.state = State::Sent;
        }
    }

    /// A request that was sent returns with its data, to be sent again.
    pub(super) fn repeat(&mut self, n: u32, data: Option<Buf>, state: State, counts: bool) {
        let Some(slot) = self.slots.get_mut(n as usize).and_then(Option::as_mut) else { return };
        debug_assert_eq!(slot.state, State::Sent, "a request is in one place");
        slot.request.data = data;
        slot.repeats += u8::from(counts);
        slot.state = state;
        match state {
            State::Queued => self.queued.push_back(n),
            _ => self.waiting.push(n),
        }
    }

    /// A request that was sent is done.
    pub(super) fn finish(&mut self, n: u32, data: Option<Buf>, outcome: Result<(), Failure>) {
        let Some(slot) = self.slots.get_mut(n as usize).and_then(Option::take) else { return };
        self.free.push(n);
        let BlockRequest { operation, tag, .. } = slot.request;
        self.done.push_back(BlockDone { tag, operation, outcome, data });
    }

    /// Queues what has waited long enough; returns when there will be more.
    pub(super) fn release(&mut self, now: Instant) -> Option<Instant> {
        let mut next = None;
        self.queue_those(|state| match state {
            State::Delayed(at) if at <= now => true,
            State::Delayed(at) => {
                next = earlier(next, Some(at));
                false
            }
            _ => false,
        });
        next
    }

    /// The last association of a path has ended at the target.
    pub(super) fn replay(&mut self, path: usize) {
        self.queue_those(|state| state == State::Replay(path));
    }

    /// Fails all that are not sent.
    pub(super) fn fail_all(&mut self, why: Failure) {
        self.queue_those(|_| true);
        self.fail_waiting(why);
    }

    /// Fails those that wait for a path. A target may still carry out the others: were they failed,
    /// the caller could write the blocks again before that.
    pub(super) fn fail_waiting(&mut self, why: Failure) {
        self.queue_those(|state| !matches!(state, State::Replay(_)));
        while let Some(n) = self.queued.pop_front() {
            let data = self.get(n).and_then(|(request, _)| request.data.take());
            self.finish(n, data, Err(why));
        }
    }

    pub(super) fn next_done(&mut self) -> Option<BlockDone> {
        self.done.pop_front()
    }

    fn queue_those(&mut self, mut which: impl FnMut(State) -> bool) {
        let RequestTable { slots, queued, waiting, .. } = self;
        waiting.retain(|&n| {
            let Some(slot) = slots[n as usize].as_mut() else { return false };
            let goes = which(slot.state);
            if goes {
                slot.state = State::Queued;
                queued.push_back(n);
            }
            !goes
        });
    }
}
