//! Penalty for sources whose connections were established and ended before the host was admitted.
//!
//! To make a queue pair and to end it costs far more than to ask for one, so who has answered and
//! then says nothing, over and over, from a few addresses, could keep everybody else waiting. Each
//! such connection adds to the debt of its source, and time pays it off. Who owes more than a few may
//! gets no further ones for a while. Only what a source has confirmed is charged to it, so nobody
//! who forges it can run up its debt.
//!
//! A debt is the moment at which it will have been paid. Peers choose addresses, so everything is in
//! ordered trees.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::Source;

/// How long it takes to pay for one: sixteen a second.
const PRICE: Duration = Duration::from_micros(62_500);
/// Debtors that are remembered, at most. Of more, who owes the least is forgotten.
const MOST: usize = 1024;

/// Penalties of sources whose connections were established and never used: each may have a number
/// of those at once, and sixteen a second.
#[derive(Debug)]
pub struct SourcePenalty {
    /// How much a source may owe; none when nobody counts.
    credit: Option<Duration>,
    until: BTreeMap<Source, Instant>,
    order: BTreeSet<(Instant, Source)>,
}

impl SourcePenalty {
    /// Each source may have so many such connections at once.
    #[must_use]
    pub fn new(connections: Option<u32>) -> SourcePenalty {
        let credit = connections.map(|connections| PRICE.saturating_mul(connections));
        SourcePenalty { credit, until: BTreeMap::new(), order: BTreeSet::new() }
    }

    /// Whether a source owes too much to be heard.
    #[must_use]
    pub fn bars(&self, now: Instant, source: Source) -> bool {
        let until = self.until.get(&source);
        until.zip(self.credit).is_some_and(|(until, credit)| *until > now + credit)
    }

    /// Another connection of a source has come to nothing. What is owed stays below one and a half
    /// times the credit, so that soon after a flood it is heard again.
    pub fn charge(&mut self, now: Instant, source: Source) {
        let Some(credit) = self.credit else { return };
        self.forgive(now);
        let old = self.until.get(&source).copied();
        let until = old.unwrap_or(now).max(now) + PRICE;
        let until = until.min(now + credit + credit / 2);
        if let Some(old) = old {
            self.order.remove(&(old, source));
        }
        self.until.insert(source, until);
        self.order.insert((until, source));
        if self.until.len() > MOST {
            self.forget_least();
        }
    }

    /// Forgets what has been paid.
    fn forgive(&mut self, now: Instant) {
        while self.order.first().is_some_and(|(until, _)| *until <= now) {
            self.forget_least();
        }
    }

    fn forget_least(&mut self) {
        if let Some((_, source)) = self.order.pop_first() {
            self.until.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::soft::cm::source_penalty::*;

    fn address(number: u32) -> Source {
        Source::V4((10 << 24 | number).into())
    }

    #[test]
    fn an_address_that_owes_too_much_is_heard_again_soon() {
        let (mut penalties, now) = (SourcePenalty::new(Some(64)), Instant::now());
        for count in 1..=64 {
            penalties.charge(now, address(1));
            assert!(!penalties.bars(now, address(1)), "{count}");
        }
        penalties.charge(now, address(1));
        assert!(penalties.bars(now, address(1)) && !penalties.bars(now, address(2)));
        assert!(!penalties.bars(now + PRICE, address(1)), "one is paid");
        // However much there was, it is over soon: when the debt is back at the credit.
        (0..10_000).for_each(|_| penalties.charge(now, address(1)));
        let late = now + PRICE * 32;
        assert!(penalties.bars(late - PRICE, address(1)) && !penalties.bars(late, address(1)));
    }

    #[test]
    fn who_comes_to_nothing_now_and_then_is_never_barred() {
        let (mut penalties, start) = (SourcePenalty::new(Some(1)), Instant::now());
        for count in 0..1000 {
            let now = start + PRICE * count;
            assert!(!penalties.bars(now, address(1)));
            penalties.charge(now, address(1));
        }
    }

    #[test]
    fn nobody_counts_unless_asked_to() {
        let (mut penalties, now) = (SourcePenalty::new(None), Instant::now());
        (0..10_000).for_each(|_| penalties.charge(now, address(1)));
        assert!(!penalties.bars(now, address(1)) && penalties.until.is_empty());
    }

    #[test]
    fn of_too_many_debtors_the_least_is_forgotten() {
        let (mut penalties, now) = (SourcePenalty::new(Some(1)), Instant::now());
        (0..2).for_each(|_| penalties.charge(now, address(0)));
        (1..10_000).for_each(|number| penalties.charge(now, address(number)));
        assert_eq!(penalties.until.len(), MOST);
        assert!(penalties.bars(now, address(0)));
        penalties.charge(now + Duration::from_secs(60), address(1));
        assert_eq!(penalties.until.len(), 1, "the others have paid");
    }

    proptest! {
        /// Its two views agree, and it is what it says: a count for each address, less what time has
        /// paid.
        #[test]
        fn debts_are_counted_and_paid(
            steps in proptest::collection::vec((0u32..3, 0u32..400), 0..300),
        ) {
            let (mut penalties, mut now) = (SourcePenalty::new(Some(8)), Instant::now());
            let mut owed = [Duration::ZERO; 3];
            for (number, millis) in steps {
                let passed = Duration::from_millis(millis.saturating_sub(300).into());
                now += passed;
                owed.iter_mut().for_each(|owed| *owed = owed.saturating_sub(passed));
                let own = &mut owed[number as usize];
                *own = (*own + PRICE).min(PRICE * 12);
                penalties.charge(now, address(number));
                for (number, owed) in owed.iter().enumerate() {
                    prop_assert_eq!(penalties.bars(now, address(number as u32)), *owed > PRICE * 8);
                }
                let views = penalties.until.iter().map(|(address, until)| (*until, *address));
                prop_assert_eq!(&views.collect::<BTreeSet<_>>(), &penalties.order);
            }
        }
    }
}
