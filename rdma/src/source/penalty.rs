//! Penalty for sources whose connections were established and ended before the host was admitted.
//!
//! To create and destroy a queue pair costs far more than to request one. Peers that confirm connections
//! and never use them could keep everybody else waiting from a few addresses. Each such connection adds a
//! fixed time to the penalty of its source, which passes with time; a source whose penalty exceeds the
//! credit is not served for a while. Only confirmed connections count, so a forged address cannot be
//! penalized.
//!
//! A penalty is stored as the moment at which it will have passed.

use std::time::{Duration, Instant};

use super::{PerSourceTable, Source};

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
    /// An entry ends when its debt is paid.
    debtors: PerSourceTable<Source, ()>,
}

impl SourcePenalty {
    /// Each source may have so many such connections at once.
    #[must_use]
    pub fn new(connections: Option<u32>) -> SourcePenalty {
        let credit = connections.map(|connections| PRICE.saturating_mul(connections));
        SourcePenalty { credit, debtors: PerSourceTable::new(MOST + 1) }
    }

    /// Whether a source owes too much to be heard.
    #[must_use]
    pub fn is_blocked(&self, now: Instant, source: Source) -> bool {
        let until = self.debtors.until(&source);
        until.zip(self.credit).is_some_and(|(until, credit)| until > now + credit)
    }

    /// Another connection of a source has come to nothing. What is owed stays below one and a half
    /// times the credit, so that soon after a flood it is heard again.
    pub fn penalize(&mut self, now: Instant, source: Source) {
        let Some(credit) = self.credit else { return };
        self.debtors.expire_all(now);
        let until = self.debtors.until(&source).unwrap_or(now).max(now) + PRICE;
        self.debtors.insert(source, (), Some(until.min(now + credit + credit / 2)));
        if self.debtors.len() > MOST {
            self.debtors.remove_next();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(number: u32) -> Source {
        Source::V4((10 << 24 | number).into())
    }

    #[test]
    fn an_address_that_owes_too_much_is_heard_again_soon() {
        let (mut penalties, now) = (SourcePenalty::new(Some(64)), Instant::now());
        for count in 1..=64 {
            penalties.penalize(now, address(1));
            assert!(!penalties.is_blocked(now, address(1)), "{count}");
        }
        penalties.penalize(now, address(1));
        assert!(penalties.is_blocked(now, address(1)) && !penalties.is_blocked(now, address(2)));
        assert!(!penalties.is_blocked(now + PRICE, address(1)), "one is paid");
        // However much there was, it is over soon: when the debt is back at the credit.
        (0..10_000).for_each(|_| penalties.penalize(now, address(1)));
        let late = now + PRICE * 32;
        assert!(
            penalties.is_blocked(late - PRICE, address(1))
                && !penalties.is_blocked(late, address(1))
        );
    }

    #[test]
    fn who_comes_to_nothing_now_and_then_is_never_barred() {
        let (mut penalties, start) = (SourcePenalty::new(Some(1)), Instant::now());
        for count in 0..1000 {
            let now = start + PRICE * count;
            assert!(!penalties.is_blocked(now, address(1)));
            penalties.penalize(now, address(1));
        }
    }

    #[test]
    fn nobody_counts_unless_asked_to() {
        let (mut penalties, now) = (SourcePenalty::new(None), Instant::now());
        (0..10_000).for_each(|_| penalties.penalize(now, address(1)));
        assert!(!penalties.is_blocked(now, address(1)) && penalties.debtors.is_empty());
    }

    #[test]
    fn of_too_many_debtors_the_least_is_forgotten() {
        let (mut penalties, now) = (SourcePenalty::new(Some(1)), Instant::now());
        (0..2).for_each(|_| penalties.penalize(now, address(0)));
        (1..10_000).for_each(|number| penalties.penalize(now, address(number)));
        assert_eq!(penalties.debtors.len(), MOST);
        assert!(penalties.is_blocked(now, address(0)));
        penalties.penalize(now + Duration::from_secs(60), address(1));
        assert_eq!(penalties.debtors.len(), 1, "the others have paid");
    }

    proptest! {
        /// It is what it says: a count for each address, less what time has paid.
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
                penalties.penalize(now, address(number));
                for (number, owed) in owed.iter().enumerate() {
                    prop_assert_eq!(penalties.is_blocked(now, address(number as u32)), *owed > PRICE * 8);
                }
            }
        }
    }
}
