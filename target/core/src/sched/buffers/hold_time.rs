//! Hold times: how long hosts keep data buffers after a device is done with them, or before it gets
//! them.
//!
//! Buffers of a push are free when the host has acknowledged it, those of a pull when the host has
//! sent the data. A thousand hosts that take a second for either would hold the whole pool, one
//! buffer each, and leave others one at a time. So an association that returns buffers late is
//! *slow*. All slow ones together leave an eighth of the pool to new associations, and two thirds
//! as soon as there is one that returns its buffers promptly.

/// A longer hold time is late, in nanoseconds: several round trips, losses, and turns of a busy reactor.
const PROMPT_NS: u64 = 10_000_000;
/// Prompt returns that count, at most.
const MAX_RETURNS: u16 = 1000;
/// Number of prompt buffers that compensate for a late one: a busy moment delays all commands of a
/// queue.
const FOR_LATE: u16 = 5;
/// Divisor of the free bytes that slow associations together may hold, beside prompt ones.
const FREE_FOR_SLOW: u64 = 2;
/// Without prompt associations, slow ones may hold this many times the bytes that are free.
const SLOW_TIMES_FREE: u64 = 7;

/// Whether a host that has held a buffer for so long has returned it promptly.
#[inline]
pub fn is_prompt(hold_ns: u64) -> bool {
    hold_ns <= PROMPT_NS
}

/// How soon the host of an association returns buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Promptness {
    /// It has returned none yet.
    #[default]
    New,
    /// Late.
    Slow,
    /// Promptly, as a rule: its prompt returns, less late ones.
    Prompt(u16),
}

impl Promptness {
    #[inline]
    pub(super) fn is_slow(self) -> bool {
        self == Promptness::Slow
    }

    fn is_prompt(self) -> bool {
        matches!(self, Promptness::Prompt(_))
    }
}

/// Hold times of a reactor.
#[derive(Debug, Default)]
pub(super) struct HoldTimes {
    /// Bytes that slow associations hold.
    slow_bytes: u64,
    /// Associations that are not slow.
    prompt: usize,
}

impl HoldTimes {
    /// Whether a slow association has to wait, because slow ones together hold too much in relation
    /// to `free_bytes`.
    #[inline]
    pub(super) fn limit_slow(&self, wanted_bytes: u64, free_bytes: u64) -> bool {
        let most_bytes = match self.prompt {
            0 => free_bytes.saturating_mul(SLOW_TIMES_FREE),
            _ => free_bytes / FREE_FOR_SLOW,
        };
        // One may be larger than that.
        self.slow_bytes > 0 && self.slow_bytes.saturating_add(wanted_bytes) > most_bytes
    }

    /// An association has taken bytes.
    #[inline]
    pub(super) fn charge(&mut self, of: Promptness, bytes: u64) {
        if of.is_slow() {
            self.slow_bytes += bytes;
        }
    }

    /// It has returned them.
    #[inline]
    pub(super) fn discharge(&mut self, of: Promptness, bytes: u64) {
        if of.is_slow() {
            self.slow_bytes = self.slow_bytes.saturating_sub(bytes);
        }
    }

    /// Records that a host has returned a buffer, promptly or late. Returns the promptness of its
    /// association, which holds `held_bytes`, if that has changed.
    #[inline]
    pub(super) fn note(
        &mut self,
        of: Promptness,
        held_bytes: u64,
        is_prompt: bool,
    ) -> Option<Promptness> {
        if is_prompt && of == Promptness::Prompt(MAX_RETURNS) {
            return None;
        }
        Some(self.change(of, held_bytes, is_prompt))
    }

    fn change(&mut self, of: Promptness, held_bytes: u64, is_prompt: bool) -> Promptness {
        let new = match (of, is_prompt) {
            (Promptness::Prompt(count), true) => Promptness::Prompt(count + 1),
            (_, true) => Promptness::Prompt(1),
            (Promptness::Prompt(count @ FOR_LATE..), false) => Promptness::Prompt(count - FOR_LATE),
            (_, false) => Promptness::Slow,
        };
        if new.is_slow() != of.is_slow() || new.is_prompt() != of.is_prompt() {
            self.leave(of, held_bytes);
            self.charge(new, held_bytes);
            self.prompt += usize::from(new.is_prompt());
        }
        new
    }

    /// An association ends, which holds `held_bytes` still.
    pub(super) fn leave(&mut self, of: Promptness, held_bytes: u64) {
        self.discharge(of, held_bytes);
        self.prompt -= usize::from(of.is_prompt());
    }
}

#[cfg(test)]
mod tests {
    use crate::sched::buffers::hold_time::*;

    const MS: u64 = 1_000_000;

    /// Records this number of hold times.
    fn note(times: &mut HoldTimes, of: Promptness, count: u64, hold_ns: u64) -> Promptness {
        (0..count).fold(of, |of, _| times.note(of, 0, is_prompt(hold_ns)).unwrap_or(of))
    }

    #[test]
    fn a_one_second_hold_is_slow_and_a_short_burst_is_not() {
        let mut times = HoldTimes::default();
        assert_eq!(note(&mut times, Promptness::New, 1, 1000 * MS), Promptness::Slow);
        let prompt = note(&mut times, Promptness::New, 2000, PROMPT_NS);
        assert_eq!(prompt, Promptness::Prompt(MAX_RETURNS));
        let after = note(&mut times, prompt, 128, 15 * MS);
        assert!(matches!(after, Promptness::Prompt(_)), "a busy moment of a whole queue");
        assert_eq!(note(&mut times, after, 128, 15 * MS), Promptness::Slow);
        assert_eq!(note(&mut times, Promptness::Slow, 1, MS), Promptness::Prompt(1));
    }

    #[test]
    fn slow_associations_leave_buffers_to_new_and_prompt_associations() {
        let mut times = HoldTimes::default();
        let hold = |times: &mut HoldTimes| {
            let (mut free, mut held) = (960_u64, 0);
            while free > 0 && !times.limit_slow(1, free) {
                times.charge(Promptness::Slow, 1);
                (free, held) = (free - 1, held + 1);
            }
            times.discharge(Promptness::Slow, held);
            held
        };
        assert_eq!(hold(&mut times), 840);
        let prompt = note(&mut times, Promptness::New, 1, MS);
        assert_eq!(hold(&mut times), 320);
        times.leave(prompt, 0);
        assert_eq!(hold(&mut times), 840);
        assert!(!times.limit_slow(1 << 20, 960), "the only one may be larger than that");
    }

    #[test]
    fn held_bytes_follow_the_current_class_of_an_association() {
        let mut times = HoldTimes::default();
        times.charge(Promptness::New, 7);
        let slow = times.note(Promptness::New, 7, false).unwrap();
        assert_eq!(times.slow_bytes, 7);
        let prompt = times.note(slow, 7, true).unwrap();
        assert_eq!((times.slow_bytes, times.prompt), (0, 1));
        times.leave(prompt, 7);
        assert_eq!((times.slow_bytes, times.prompt), (0, 0));
    }
}
