//! Interval index: locks by block range, for lookups without a scan.
//!
//! The locks of a device are in classes by the power of two that their length is below, ordered by offset in
//! each. So a lock that overlaps a range begins at most that power before it, and the search takes a few
//! steps for each class in use, however many other locks there are.

use std::collections::BTreeMap;
use std::iter::successors;

use super::range_lock::RangeLock;
use nvmfd_blockdev::DeviceId;

/// Locks, by their tickets.
#[derive(Debug, Default)]
pub(super) struct IntervalIndex {
    /// Their lengths in bytes.
    by_place: BTreeMap<Place, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Place {
    backing: DeviceId,
    /// The length is below this power of two.
    class: u32,
    at: u64,
    ticket: u64,
}

impl IntervalIndex {
    pub(super) fn insert(&mut self, ticket: u64, claim: &RangeLock) {
        self.by_place.insert(Place::of(ticket, claim), claim.len);
    }

    pub(super) fn remove(&mut self, ticket: u64, claim: &RangeLock) {
        self.by_place.remove(&Place::of(ticket, claim));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_place.is_empty()
    }

    /// Whether there are any for this device.
    pub(super) fn has(&self, backing: DeviceId) -> bool {
        self.class_from(backing, 0).is_some()
    }

    /// Returns the tickets of all locks.
    pub(super) fn tickets(&self) -> impl Iterator<Item = u64> {
        self.by_place.keys().map(|place| place.ticket)
    }

    /// Returns the tickets of the locks that overlap this one.
    pub(super) fn meeting(&self, claim: &RangeLock) -> impl Iterator<Item = u64> {
        let RangeLock { backing, at, .. } = *claim;
        let end = claim.end();
        let next = move |class: &u32| self.class_from(backing, class.saturating_add(1));
        successors(self.class_from(backing, 0), next)
            .flat_map(move |class| {
                let most_bytes = 1u64.checked_shl(class).unwrap_or(u64::MAX);
                let from = Place { backing, class, at: at.saturating_sub(most_bytes), ticket: 0 };
                self.by_place.range(from..Place { at: end, ..from })
            })
            .filter(move |(place, len)| at < place.at.saturating_add(**len))
            .map(|(place, _)| place.ticket)
    }

    /// Returns the next class with locks of a device.
    fn class_from(&self, backing: DeviceId, class: u32) -> Option<u32> {
        let from = Place { backing, class, at: 0, ticket: 0 };
        let (place, _) = self.by_place.range(from..).next()?;
        (place.backing == backing).then_some(place.class)
    }
}

impl Place {
    fn of(ticket: u64, claim: &RangeLock) -> Place {
        let class = u64::BITS - claim.len.leading_zeros();
        Place { backing: claim.backing, class, at: claim.at, ticket }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{Strategy, any, prop_assert_eq, prop_oneof, proptest};

    use crate::sched::interval_index::*;

    fn claim() -> impl Strategy<Value = RangeLock> {
        let number = || prop_oneof![0..40u64, 0..5000u64, any::<u64>(), u64::MAX - 40..=u64::MAX];
        (0..3u32, number(), number()).prop_map(|(store, at, len)| RangeLock {
            backing: DeviceId(store),
            at,
            len,
            alone: false,
            reactor: 0,
        })
    }

    proptest! {
        #[test]
        fn exactly_the_overlapping_intervals_are_found(
            claims in vec(claim(), 0..40),
            gone in vec(any::<bool>(), 40),
            asked in claim(),
        ) {
            let mut spans = IntervalIndex::default();
            let numbered = || (0u64..).zip(&claims);
            numbered().for_each(|(ticket, claim)| spans.insert(ticket, claim));
            let left = || numbered().filter(|(ticket, _)| !gone[*ticket as usize]);
            let leave = numbered().filter(|(ticket, _)| gone[*ticket as usize]);
            leave.for_each(|(ticket, claim)| spans.remove(ticket, claim));
            let mut found: Vec<u64> = spans.meeting(&asked).collect();
            found.sort_unstable();
            let meet = |other: &RangeLock| {
                asked.backing == other.backing
                    && asked.at < other.at.saturating_add(other.len)
                    && other.at < asked.at.saturating_add(asked.len)
            };
            let expected = left().filter(|(_, claim)| meet(claim)).map(|(ticket, _)| ticket);
            prop_assert_eq!(found, expected.collect::<Vec<_>>());
            prop_assert_eq!(spans.has(asked.backing), left().any(|it| it.1.backing == asked.backing));
            prop_assert_eq!(spans.tickets().count(), left().count());
            prop_assert_eq!(spans.is_empty(), left().count() == 0);
        }
    }
}
