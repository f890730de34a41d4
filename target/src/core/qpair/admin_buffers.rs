//! How much of the data buffers one queue may hold that has no share of them: an admin queue, and
//! any queue before its Connect. Anybody may have one, and its commands come before all I/O.

use super::{Io, Link, QueuePair, State, WaitReason, log_page};
use crate::core::sched::buffers::TryAlloc;

/// Bytes that the commands of such a queue may hold together. One alone may hold more.
const MOST_HELD_BYTES: u64 = log_page::AT_ONCE_BYTES as u64;

impl QueuePair {
    /// Whether a queue without a share may take so many bytes more.
    pub(super) fn may_hold(&self, wanted_bytes: u64) -> bool {
        let held: u64 = self.slots.iter().map(|entry| u64::from(entry.charged_bytes)).sum();
        held == 0 || held.saturating_add(wanted_bytes) <= MOST_HELD_BYTES
    }

    /// A command waits until others of its queue are over, and stands in no line meanwhile: it
    /// keeps nobody else waiting.
    pub(super) fn put_off(&mut self, slot: u16, io: &mut Io<'_>) {
        io.waiters.behind_sent += 1;
        self.put_off.push_back(slot);
        self.slot(slot).enter(State::Waiting(WaitReason::AdminCap));
    }

    /// A command is over: those that were put off try again, in their order.
    #[cold]
    pub(super) fn serve_put_off(&mut self, over: u16, io: &mut Io<'_>) {
        let before = self.put_off.len();
        self.put_off.retain(|slot| *slot != over);
        io.waiters.behind_sent -= before - self.put_off.len();
        while self.link == Link::Open
            && let Some(&slot) = self.put_off.front()
        {
            // Unless it was aborted meanwhile.
            let take = match self.slot(slot).state() {
                State::Waiting(WaitReason::AdminCap) => {
                    Some(self.take_buffers(slot, self.want(slot), false, io))
                }
                _ => None,
            };
            if take == Some(TryAlloc::Over) {
                return;
            }
            self.put_off.pop_front();
            io.waiters.behind_sent -= 1;
            match take {
                Some(TryAlloc::Done) => self.proceed(slot, io),
                Some(_) => {
                    self.slot(slot).enter(State::Waiting(WaitReason::Buffers));
                    io.waiters.push(self.share, self.waiter(slot, io.pool), take);
                }
                None => {}
            }
        }
    }

    /// The queue has a share from now on, and what its commands take is charged to that. What was
    /// put off are other Connect commands, which have lost.
    pub(super) fn begin_share(&mut self, share: u32, io: &mut Io<'_>) {
        self.share = Some(share);
        self.slots.iter_mut().for_each(|entry| entry.charged_bytes = 0);
        io.waiters.behind_sent -= self.put_off.len();
        self.put_off.clear();
    }
}
