//! Penalty for sources whose connections were established and ended before the host was admitted.
//!
//! Creating and destroying a queue pair costs far more than requesting one. Peers that confirm
//! connections and never use them could delay all others from a few addresses. Each such connection
//! adds a fixed time to the penalty of its source, which decreases with time; requests of a source
//! whose penalty exceeds the credit are dropped. Only connections that the peer has confirmed or
//! declined count, so a forged address cannot be penalized.
//!
//! So does each challenge of a source, until it answers one: the owner of a forged address does.
//!
//! A penalty is stored as the time at which it expires.

use std::time::{Duration, Instant};

use super::{PerSourceTable, Source};

/// Penalty of one connection or challenge: sixteen expire per second.
const PENALTY: Duration = Duration::from_micros(62_500);
/// Maximum of penalized sources. Above that, the one whose penalty expires first is removed.
const MAX_SOURCES: usize = 1024;

/// Penalties of sources whose connections were established and never used: each may have a burst of
/// those, and sixteen a second.
#[derive(Debug)]
pub struct SourcePenalty {
    /// Penalty up to which a source is served; none when penalties are off.
    credit: Option<Duration>,
    /// Each entry ends when its penalty expires.
    penalized: PerSourceTable<Source, ()>,
}

impl SourcePenalty {
    /// Each source may have a burst of `connections` such connections.
    pub fn new(connections: Option<u32>) -> SourcePenalty {
        let credit = connections.map(|connections| PENALTY.saturating_mul(connections));
        SourcePenalty { credit, penalized: PerSourceTable::new(MAX_SOURCES + 1) }
    }

    /// Whether requests of a source are dropped.
    pub fn is_blocked(&self, now: Instant, source: Source) -> bool {
        let until = self.penalized.until(&source);
        until.zip(self.credit).is_some_and(|(until, credit)| until > now + credit)
    }

    /// Adds one connection that was never used to the penalty of its source, which is one and a half times
    /// the credit at most, so that the source is served again soon after a flood.
    pub fn penalize(&mut self, now: Instant, source: Source) {
        let Some(credit) = self.credit else { return };
        self.penalized.expire_all(now);
        let until = self.penalized.until(&source).unwrap_or(now).max(now) + PENALTY;
        self.penalized.insert(source, (), Some(until.min(now + credit + credit / 2)));
        if self.penalized.len() > MAX_SOURCES {
            self.penalized.remove_next();
        }
    }

    /// Removes the penalty of a source.
    pub fn forgive(&mut self, source: Source) {
        self.penalized.remove(&source);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(number: u32) -> Source {
        Source::V4(10 << 24 | number)
    }

    #[test]
    fn a_blocked_source_is_served_again_soon() {
        let (mut penalties, now) = (SourcePenalty::new(Some(64)), Instant::now());
        for count in 1..=64 {
            penalties.penalize(now, address(1));
            assert!(!penalties.is_blocked(now, address(1)), "{count}");
        }
        penalties.penalize(now, address(1));
        assert!(penalties.is_blocked(now, address(1)) && !penalties.is_blocked(now, address(2)));
        assert!(!penalties.is_blocked(now + PENALTY, address(1)), "one has expired");
        // However many there were, the source is served when its penalty is back at the credit.
        (0..10_000).for_each(|_| penalties.penalize(now, address(1)));
        let late = now + PENALTY * 32;
        assert!(
            penalties.is_blocked(late - PENALTY, address(1))
                && !penalties.is_blocked(late, address(1))
        );
        (0..100).for_each(|_| penalties.penalize(late, address(1)));
        penalties.forgive(address(1));
        assert!(!penalties.is_blocked(late, address(1)), "at once");
    }

    #[test]
    fn a_source_below_the_rate_is_never_blocked() {
        let (mut penalties, start) = (SourcePenalty::new(Some(1)), Instant::now());
        for count in 0..1000 {
            let now = start + PENALTY * count;
            assert!(!penalties.is_blocked(now, address(1)));
            penalties.penalize(now, address(1));
        }
    }

    #[test]
    fn without_a_credit_nothing_is_counted() {
        let (mut penalties, now) = (SourcePenalty::new(None), Instant::now());
        (0..10_000).for_each(|_| penalties.penalize(now, address(1)));
        assert!(!penalties.is_blocked(now, address(1)) && penalties.penalized.is_empty());
    }

    #[test]
    fn the_smallest_penalty_is_removed_beyond_the_limit() {
        let (mut penalties, now) = (SourcePenalty::new(Some(1)), Instant::now());
        (0..2).for_each(|_| penalties.penalize(now, address(0)));
        (1..10_000).for_each(|number| penalties.penalize(now, address(number)));
        assert_eq!(penalties.penalized.len(), MAX_SOURCES);
        assert!(penalties.is_blocked(now, address(0)));
        penalties.penalize(now + Duration::from_secs(60), address(1));
        assert_eq!(penalties.penalized.len(), 1, "the others have expired");
    }

    proptest! {
        /// The model: a penalty for each address, less the time that has passed.
        #[test]
        fn penalties_add_up_and_expire(
            steps in proptest::collection::vec((0u32..3, 0u32..400), 0..300),
        ) {
            let (mut penalties, mut now) = (SourcePenalty::new(Some(8)), Instant::now());
            let mut penalty = [Duration::ZERO; 3];
            for (number, millis) in steps {
                let passed = Duration::from_millis(millis.saturating_sub(300).into());
                now += passed;
                penalty.iter_mut().for_each(|penalty| *penalty = penalty.saturating_sub(passed));
                let own = &mut penalty[number as usize];
                *own = (*own + PENALTY).min(PENALTY * 12);
                penalties.penalize(now, address(number));
                for (number, penalty) in penalty.iter().enumerate() {
                    prop_assert_eq!(penalties.is_blocked(now, address(number as u32)), *penalty > PENALTY * 8);
                }
            }
        }
    }
}
