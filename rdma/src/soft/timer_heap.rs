//! Timer heap: the queue pair whose timer expires first. An endpoint has as many as its peers have
//! brought it to make, and is asked this at every turn; so the answer may not cost a look at each.
//! A binary heap, in which every number knows its place: the earliest is on top, and to move one
//! costs a logarithm of how many there are.

use std::time::Instant;

/// The place of a number that has no deadline.
const NOWHERE: u32 = u32::MAX;

/// A binary heap of timers; see the module.
#[derive(Debug, Default)]
pub(super) struct TimerHeap {
    /// No entry is due before the one at half its index (less one, rounded down).
    heap: Vec<(Instant, u32)>,
    /// Of each number, where in the heap it is.
    places: Vec<u32>,
}

impl TimerHeap {
    /// Makes room for the numbers below `count`, so that nothing else here allocates.
    pub(super) fn fit(&mut self, count: usize) {
        if self.places.len() < count {
            self.places.resize(count, NOWHERE);
            self.heap.reserve(count - self.heap.len());
        }
    }

    /// The earliest, and whose it is; of several at one time that of the lowest number.
    pub(super) fn first(&self) -> Option<(Instant, u32)> {
        self.heap.first().copied()
    }

    /// Gives a number (that there is room for) a deadline in place of its last one, or none.
    pub(super) fn set(&mut self, number: u32, due: Option<Instant>) {
        let Some(place) = self.places.get(number as usize).copied() else { return };
        let at = place as usize;
        match due {
            None if place == NOWHERE => {}
            None => self.take(at),
            Some(due) if place == NOWHERE => {
                self.heap.push((due, number));
                self.rise(self.heap.len() - 1);
            }
            Some(due) if self.heap[at].0 == due => {}
            Some(due) => {
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
            // It comes from the end, which may be below another parent.
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
        /// Always the first of all, as if all were looked at; and each knows its place.
        #[test]
        fn the_first_is_the_first(
            steps in proptest::collection::vec((0u32..20, proptest::option::of(0u64..30)), 0..300),
        ) {
            let (mut deadlines, start) = (TimerHeap::default(), Instant::now());
            let mut plain = [None; 20];
            deadlines.fit(plain.len());
            let room = deadlines.heap.capacity();
            for (number, due) in steps {
                let due = due.map(|due| start + Duration::from_millis(due));
                deadlines.set(number, due);
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
    fn a_number_without_room_is_nobodys() {
        let mut deadlines = TimerHeap::default();
        deadlines.set(3, Some(Instant::now()));
        assert_eq!(deadlines.first(), None);
    }
}
