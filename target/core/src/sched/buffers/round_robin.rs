//! Round robin of the associations with queued commands. Slow ones have a list of their own: while they
//! wait for each other, only the first is checked.

use std::collections::VecDeque;

/// Two lists, which alternate.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    prompt: VecDeque<u32>,
    slow: VecDeque<u32>,
    is_slow_next: bool,
}

/// Associations of each list that have not been checked yet.
#[derive(Clone, Copy)]
pub(super) struct Unchecked {
    prompt: usize,
    slow: usize,
}

impl RoundRobin {
    pub(super) fn len(&self) -> usize {
        self.prompt.len() + self.slow.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.prompt.is_empty() && self.slow.is_empty()
    }

    /// Whether a slow one waits.
    pub(super) fn has_slow(&self) -> bool {
        !self.slow.is_empty()
    }

    /// Reserves memory for `count` associations.
    pub(super) fn reserve(&mut self, count: usize) {
        for list in [&mut self.prompt, &mut self.slow] {
            list.reserve(count.saturating_sub(list.len()));
        }
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.prompt.capacity() + self.slow.capacity()
    }

    pub(super) fn push_back(&mut self, number: u32, is_slow: bool) {
        if is_slow { self.slow.push_back(number) } else { self.prompt.push_back(number) }
    }

    /// Puts one back that stays the next.
    pub(super) fn push_front(&mut self, number: u32) {
        self.prompt.push_front(number);
        self.is_slow_next = false;
    }

    /// Moves an association that is no longer slow.
    #[cold]
    pub(super) fn promote(&mut self, number: u32) {
        if let Some(at) = self.slow.iter().position(|it| *it == number) {
            self.slow.remove(at);
            self.prompt.push_back(number);
        }
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.prompt.contains(&number) || self.slow.contains(&number)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(u32) -> bool) {
        self.prompt.retain(|number| keep(*number));
        self.slow.retain(|number| keep(*number));
    }

    /// Begins a round, in which each is checked once.
    pub(super) fn round(&self) -> Unchecked {
        Unchecked { prompt: self.prompt.len(), slow: self.slow.len() }
    }

    /// Removes the next one of a round. `is_limited`: whether the first slow one has to wait, and with it all
    /// others.
    pub(super) fn next(
        &mut self,
        round: &mut Unchecked,
        is_limited: impl FnOnce(u32) -> bool,
    ) -> Option<u32> {
        let slow = self.slow.front().filter(|number| round.slow > 0 && !is_limited(**number));
        let takes_slow = slow.is_some() && (self.is_slow_next || round.prompt == 0);
        self.is_slow_next = !takes_slow;
        if takes_slow {
            round.slow -= 1;
            return self.slow.pop_front();
        }
        round.prompt = round.prompt.checked_sub(1)?;
        self.prompt.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use crate::sched::buffers::round_robin::*;

    /// The shares of one round, in order; all are put back.
    fn round(turns: &mut RoundRobin, is_limited: bool) -> Vec<u32> {
        let (mut round, mut order) = (turns.round(), Vec::new());
        while let Some(number) = turns.next(&mut round, |_| is_limited) {
            order.push(number);
        }
        order.iter().for_each(|number| turns.push_back(*number, *number > 10));
        order
    }

    #[test]
    fn slow_entries_alternate_with_others_and_can_be_skipped() {
        let mut turns = RoundRobin::default();
        [1, 2, 3, 11, 12].into_iter().for_each(|number| turns.push_back(number, number > 10));
        assert_eq!(round(&mut turns, false), [1, 11, 2, 12, 3]);
        assert_eq!(round(&mut turns, true), [1, 2, 3]);
        turns.promote(12);
        assert_eq!(round(&mut turns, true), [1, 2, 3, 12]);
        turns.retain(|number| number > 10);
        assert_eq!((turns.len(), turns.contains(11), turns.contains(1)), (2, true, false));
    }
}
