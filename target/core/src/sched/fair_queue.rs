//! A fair queue: first in, first out per source, round robin over sources.

use std::collections::{BTreeMap, VecDeque};

use rdma::Source;

/// A queue in order of arrival per source, round robin over sources. A source may be another value
/// than an address.
#[derive(Debug)]
pub struct FairQueue<T, S = Source> {
    waiting: BTreeMap<S, VecDeque<T>>,
    /// Each source with queued items, once.
    next: VecDeque<S>,
    len: usize,
}

impl<T, S> Default for FairQueue<T, S> {
    fn default() -> FairQueue<T, S> {
        FairQueue { waiting: BTreeMap::new(), next: VecDeque::new(), len: 0 }
    }
}

impl<T, S: Ord + Copy> FairQueue<T, S> {
    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.next.is_empty()
    }

    /// Appends an item behind all others of its source.
    pub fn push(&mut self, source: S, item: T) {
        let of_source = self.waiting.entry(source).or_default();
        if of_source.is_empty() {
            self.next.push_back(source);
        }
        of_source.push_back(item);
        self.len += 1;
    }

    /// Puts back the item popped last: it is the next again.
    pub fn put_back(&mut self, source: S, item: T) {
        let of_source = self.waiting.entry(source).or_default();
        if !of_source.is_empty() {
            self.next.retain(|next| *next != source);
        }
        self.next.push_front(source);
        of_source.push_front(item);
        self.len += 1;
    }

    /// Returns the number of items of a source.
    pub(crate) fn count_of(&self, source: S) -> usize {
        self.waiting.get(&source).map_or(0, VecDeque::len)
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Removes and returns the next item, of the source whose turn it is.
    pub fn pop(&mut self) -> Option<T> {
        let source = self.next.pop_front()?;
        let of_source = self.waiting.get_mut(&source)?;
        let item = of_source.pop_front();
        self.len -= 1;
        match of_source.is_empty() {
            true => drop(self.waiting.remove(&source)),
            false => self.next.push_back(source),
        }
        item
    }

    /// Removes and returns the item for which `is_it` is true.
    pub fn remove(&mut self, is_it: impl Fn(&T) -> bool) -> Option<T> {
        let find = |items: &VecDeque<T>| items.iter().position(&is_it);
        let mut all = self.waiting.iter_mut();
        let (source, at) = all.find_map(|(source, items)| Some((*source, find(items)?)))?;
        let of_source = self.waiting.get_mut(&source)?;
        let item = of_source.remove(at);
        self.len -= 1;
        self.forget_empty(source);
        item
    }

    /// Removes the oldest of too many items: of the source for which the last one was pushed, if
    /// that has its share or more, otherwise of the one with the most. So a source that sends too
    /// many displaces its own, without a search through all sources.
    pub(crate) fn displace(&mut self, source: S) -> Option<T> {
        let source = match self.count_of(source) * self.next.len() >= self.len {
            true => source,
            false => *self.waiting.iter().max_by_key(|(_, items)| items.len())?.0,
        };
        let item = self.waiting.get_mut(&source)?.pop_front();
        self.len -= usize::from(item.is_some());
        self.forget_empty(source);
        item
    }

    fn forget_empty(&mut self, source: S) {
        if self.waiting.get(&source).is_some_and(VecDeque::is_empty) {
            self.waiting.remove(&source);
            self.next.retain(|next| *next != source);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sched::fair_queue::*;

    fn source(last: u8) -> Source {
        Source::V4(last.into())
    }

    #[test]
    fn sources_are_served_round_robin() {
        let mut turns = FairQueue::default();
        (0..100).for_each(|n| turns.push(source(1), n));
        assert_eq!(turns.pop(), Some(0));
        turns.push(source(2), 200);
        turns.push(source(3), 300);
        turns.push(source(2), 201);
        let order: Vec<_> = (0..6).filter_map(|_| turns.pop()).collect();
        assert_eq!(order, [1, 200, 300, 2, 201, 3]);
        assert_eq!(std::iter::from_fn(|| turns.pop()).count(), 96);
        assert!(turns.is_empty() && turns.waiting.is_empty());
    }

    #[test]
    fn removed_entries_are_not_served() {
        let mut turns = FairQueue::default();
        [(1, 10), (2, 20), (1, 11)].iter().for_each(|(last, n)| turns.push(source(*last), *n));
        assert_eq!((turns.remove(|n| *n == 20), turns.remove(|n| *n == 20)), (Some(20), None));
        assert_eq!(turns.remove(|n| *n == 10), Some(10));
        assert_eq!((turns.pop(), turns.pop()), (Some(11), None));
        assert!(turns.is_empty() && turns.waiting.is_empty());
    }

    #[test]
    fn returned_entries_are_next_and_the_largest_source_is_displaced() {
        let mut turns = FairQueue::default();
        [(1, 10), (1, 11), (2, 20), (1, 12)].iter().for_each(|(s, n)| turns.push(source(*s), *n));
        assert_eq!(turns.pop(), Some(10));
        turns.put_back(source(1), 10);
        assert_eq!((turns.len(), turns.displace(source(1))), (4, Some(10)));
        assert_eq!(turns.displace(source(2)), Some(11), "the other one has more");
        turns.push(source(2), 21);
        assert_eq!(turns.displace(source(2)), Some(20));
        let rest: Vec<_> = std::iter::from_fn(|| turns.pop()).collect();
        assert_eq!((rest, turns.len()), (vec![12, 21], 0));
        assert!(turns.waiting.is_empty() && turns.displace(source(1)).is_none());
    }
}
