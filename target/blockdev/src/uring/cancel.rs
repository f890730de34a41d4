//! Cancellation of operations that the kernel has, as a state machine without I/O.

use std::collections::{HashMap, VecDeque};

use rdma::Tag;

/// All cancellations of a ring. There may be one for each operation in flight, because all queues
/// of a store that blocks close at about the same time. So no method visits all of them when there
/// is nothing to do.
#[derive(Debug, Default)]
pub(crate) struct Cancellations {
    /// By the index in the user data of the kernel's entries; empty when there are none.
    entries: Vec<Option<Cancellation>>,
    /// Indexes of those cancellations that have no result yet, by operation.
    by_operation: HashMap<Tag, usize>,
    /// Indexes of vacant entries.
    vacant: Vec<usize>,
    /// Indexes of those to be submitted.
    unasked: VecDeque<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cancellation {
    /// Its own tag.
    pub tag: Tag,
    /// Tag of the operation.
    pub of: Tag,
    /// Slot of the operation while it is in flight.
    pub slot: u32,
    /// The operation has completed, aborted.
    pub aborted: bool,
}

impl Cancellations {
    /// Submits a cancellation with the next submission.
    pub(crate) fn push(&mut self, tag: Tag, of: Tag, slot: u32) {
        let recall = Some(Cancellation { tag, of, slot, aborted: false });
        let index = self.vacant.pop().unwrap_or(self.entries.len());
        match self.entries.get_mut(index) {
            Some(entry) => *entry = recall,
            None => self.entries.push(recall),
        }
        self.by_operation.insert(of, index);
        self.unasked.push_back(index);
    }

    /// The next one to submit, and its index.
    pub(crate) fn next_request(&self) -> Option<(usize, Cancellation)> {
        let index = *self.unasked.front()?;
        Some((index, self.entries.get(index).copied().flatten()?))
    }

    /// The one that [`Cancellations::next_request`] returned was submitted.
    pub(crate) fn submitted(&mut self) {
        self.unasked.pop_front();
    }

    /// An operation has completed, aborted: its cancellation succeeds, whatever the kernel reports
    /// later.
    pub(crate) fn on_aborted(&mut self, of: Tag) {
        let Some(index) = self.by_operation.get(&of) else { return };
        if let Some(Some(recall)) = self.entries.get_mut(*index) {
            recall.aborted = true;
        }
    }

    /// The kernel has reported the result of a submitted one.
    pub(crate) fn answered(&mut self, index: usize) -> Option<Cancellation> {
        let recall = self.entries.get_mut(index)?.take()?;
        self.by_operation.remove(&recall.of);
        self.vacant.push(index);
        if self.len() == 0 {
            self.entries.clear();
            self.vacant.clear();
        }
        Some(recall)
    }

    /// Number of those without a result.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// Allocated entries.
    #[cfg(test)]
    pub(crate) fn places(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use crate::uring::cancel::*;

    fn recall(tag: Tag, of: Tag) -> Cancellation {
        Cancellation { tag, of, slot: of as u32 + 5, aborted: false }
    }

    fn push(recalls: &mut Cancellations, tag: Tag, of: Tag) {
        recalls.push(tag, of, of as u32 + 5);
    }

    #[test]
    fn each_cancellation_is_reported_once_and_its_slot_is_reused() {
        let mut recalls = Cancellations::default();
        push(&mut recalls, 10, 1);
        push(&mut recalls, 20, 2);
        assert_eq!(recalls.next_request(), Some((0, recall(10, 1))));
        recalls.submitted();
        assert_eq!(recalls.next_request(), Some((1, recall(20, 2))));
        assert_eq!((recalls.answered(0), recalls.answered(0)), (Some(recall(10, 1)), None));
        recalls.submitted();
        push(&mut recalls, 30, 3);
        assert_eq!((recalls.len(), recalls.next_request()), (2, Some((0, recall(30, 3)))));
        recalls.on_aborted(2);
        let aborted = Cancellation { aborted: true, ..recall(20, 2) };
        assert_eq!((recalls.answered(1), recalls.answered(7)), (Some(aborted), None));
    }

    /// All hosts of a store that blocks time out at about the same time.
    #[test]
    fn completed_cancellations_leave_no_state() {
        let mut recalls = Cancellations::default();
        for order in [false, true] {
            (0..1000).for_each(|of| push(&mut recalls, 10_000 + of, of));
            for n in 0..1000 {
                assert_eq!(recalls.next_request(), Some((n, recall(10_000 + n as u64, n as u64))));
                recalls.submitted();
            }
            assert_eq!((recalls.next_request(), recalls.len()), (None, 1000));
            for n in 0..1000 {
                let index = if order { n } else { 999 - n };
                assert_eq!(recalls.answered(index).map(|it| it.of), Some(index as u64));
            }
            assert_eq!((recalls.len(), recalls.places()), (0, 0));
            assert_eq!((recalls.next_request(), recalls.answered(0)), (None, None));
        }
    }
}
