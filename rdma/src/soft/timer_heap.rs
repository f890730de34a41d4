//! Timer heap: finds the queue pair whose timer expires first. It is read in every iteration, and
//! peers decide how many queue pairs there are, so reading must not visit each. A binary heap with
//! the position of every number: the earliest is on top, and a change costs the logarithm of the
//! size.

use super::clock::Time;

/// Position of a number without a deadline.
const NOWHERE: u32 = u32::MAX;

/// A binary heap of timers; see the module.
#[derive(Debug, Default)]
pub(super) struct TimerHeap {
    /// No entry is due before its parent, at half its index (less one, rounded down).
    heap: Vec<(Time, u32)>,
    /// Position of each number in the heap.
    places: Vec<u32>,
}

impl TimerHeap {
    /// Allocates for numbers below `count`; nothing else here allocates.
    pub(super) fn fit(&mut self, count: usize) {
        if self.places.len() < count {
            self.places.resize(count, NOWHERE);
            self.heap.reserve(count - self.heap.len());
        }
    }

    /// The earliest deadline and its number; of equal ones that with the lowest number.
    #[inline]
    pub(super) fn first(&self) -> Option<(Time, u32)> {
        self.heap.first().copied()
    }

    /// The earliest deadline.
    #[inline]
    pub(super) fn earliest(&self) -> Time {
        self.heap.first().map_or(Time::NEVER, |(due, _)| *due)
    }

    /// Sets the deadline of a number (below the allocated count), or clears it with
    /// [`Time::NEVER`].
    pub(super) fn set(&mut self, number: u32, due: Time) {
        let Some(place) = self.places.get(number as usize).copied() else { return };
        let at = place as usize;
        match due {
            Time::NEVER if place == NOWHERE => {}
            Time::NEVER => self.take(at),
            due if place == NOWHERE => {
                self.heap.push((due, number));
                self.rise(self.heap.len() - 1);
            }
            due if self.heap[at].0 == due => {}
            due => {
                let later = due > self.heap[at].0;
                self.heap[at].0 = due;
                if later { self.sink(at) } else { self.rise(at) }
            }
        }
    }

    fn take(&mut self, at: usize) {
        let (_, number) = self.heap.swap_remove(at);
        self.places[number as usize] = NOWHERE;
        if at < self.heap.len() {
            // The entry from the end may belong below another parent.
            self.rise(at);
            self.sink(at);
        }
    }

    /// Moves an entry up to where its parent is not later.
    fn rise(&mut self, mut at: usize) {
        while at > 0 && self.heap[at] < self.heap[(at - 1) / 2] {
            self.swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        self.settle(at);
    }

    /// Moves an entry down to where no child is earlier.
    fn sink(&mut self, mut at: usize) {
        while let Some(child) = self.earlier_child(at).filter(|c| self.heap[*c] < self.heap[at]) {
            self.swap(at, child);
            at = child;
        }
        self.settle(at);
    }

    fn earlier_child(&self, at: usize) -> Option<usize> {
        let (left, right) = (2 * at + 1, 2 * at + 2);
        let first = self.heap.get(left)?;
        Some(if self.heap.get(right).is_some_and(|second| second < first) { right } else { left })
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.heap.swap(one, other);
        self.settle(one);
        self.settle(other);
    }

    fn settle(&mut self, at: usize) {
        self.places[self.heap[at].1 as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use crate::soft::timer_heap::*;

    proptest! {
        /// The first one is the minimum, and the positions are correct.
        #[test]
        fn timer_heap_returns_the_earliest_deadline(
            steps in proptest::collection::vec((0u32..20, proptest::option::of(0u64..30)), 0..300),
        ) {
            let (mut deadlines, start) = (TimerHeap::default(), Time::default());
            let mut plain = [None; 20];
            deadlines.fit(plain.len());
            let room = deadlines.heap.capacity();
            for (number, due) in steps {
                let due = due.map(|due| start + Duration::from_millis(due));
                deadlines.set(number, due.unwrap_or(Time::NEVER));
                plain[number as usize] = due;
                let all = plain.iter().zip(0..).filter_map(|(due, number)| Some(((*due)?, number)));
                prop_assert_eq!(deadlines.first(), all.min());
                for (place, (due, number)) in deadlines.heap.iter().enumerate() {
                    prop_assert_eq!(deadlines.places[*number as usize], place as u32);
                    prop_assert_eq!(plain[*number as usize], Some(*due));
                }
                let waiting = plain.iter().flatten().count();
                prop_assert_eq!(deadlines.heap.len(), waiting);
            }
            prop_assert_eq!(deadlines.heap.capacity(), room);
        }
    }

    #[test]
    fn deadline_beyond_the_capacity_is_ignored() {
        let mut deadlines = TimerHeap::default();
        deadlines.set(3, Time::default());
        assert_eq!(deadlines.first(), None);
    }
}
