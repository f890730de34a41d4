//! Generates the next operation: pure, from a seed.

use std::ops::Range;

use crate::rng::Random;

/// A part of the operations uses this number of blocks at the start of the range, so that
/// operations often overlap.
const HOT_BLOCKS: u64 = 32;
/// Percentage of these operations.
const HOT_PERCENT: u8 = 20;
/// Maximum number of ranges of one Deallocate.
const MOST_RANGES: u64 = 4;

/// One operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Read(Range<u64>),
    Write { lbas: Range<u64>, fua: bool },
    Zeros { lbas: Range<u64>, deallocate: bool },
    Deallocate(Vec<Range<u64>>),
    Flush,
}

/// Mix of operations, in percent; the rest are writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mix {
    pub(super) reads: u8,
    pub(super) zeros: u8,
    pub(super) trims: u8,
    /// Percentage of the writes.
    pub(super) fua: u8,
    /// Blocks of one operation.
    pub(super) blocks: (u64, u64),
}

/// A sequence of operations.
#[derive(Debug)]
pub(super) enum Script {
    /// Random operations, without end.
    Mixed(Mix, Random),
    /// Reads everything from `next` on, this number of blocks at once.
    Sweep { next: u64, end: u64, blocks: u64 },
}

impl Script {
    /// Returns the next operation in the blocks of `range`.
    pub(super) fn next(&mut self, range: &Range<u64>) -> Option<Action> {
        match self {
            Script::Mixed(mix, random) => Some(mix.next(range, random)),
            Script::Sweep { next, end, blocks } => {
                let to = next.saturating_add(*blocks).min(*end);
                let lbas = std::mem::replace(next, to)..to;
                (!lbas.is_empty()).then_some(Action::Read(lbas))
            }
        }
    }
}

impl Mix {
    fn next(&self, range: &Range<u64>, random: &mut Random) -> Action {
        let draw = random.below(100) as u8;
        let lbas = self.lbas(range, random);
        let (reads, zeros) = (self.reads, self.reads.saturating_add(self.zeros));
        match draw {
            _ if draw < reads => Action::Read(lbas),
            _ if draw < zeros => Action::Zeros { lbas, deallocate: random.percent(50) },
            _ if draw < zeros.saturating_add(self.trims) => {
                let more = random.below(MOST_RANGES);
                let mut all = vec![lbas];
                all.extend((0..more).map(|_| self.lbas(range, random)));
                Action::Deallocate(all)
            }
            _ => Action::Write { lbas, fua: random.percent(self.fua) },
        }
    }

    /// Short ranges are as frequent as long ones: the number of digits is chosen randomly.
    fn lbas(&self, range: &Range<u64>, random: &mut Random) -> Range<u64> {
        let (least, most) = self.blocks;
        let room = range.end - range.start;
        let digits = u64::from(most.max(1).ilog2()) + 1;
        let limit = 1 << random.below(digits + 1);
        let blocks = (1 + random.below(limit)).clamp(least, most.max(least)).clamp(1, room);
        let places = match random.percent(HOT_PERCENT) {
            true => room.min(HOT_BLOCKS.max(blocks)),
            false => room,
        };
        let first = range.start + random.below(places - blocks + 1);
        first..first + blocks
    }
}

#[cfg(test)]
mod tests {
    use crate::verify::workload::*;

    const MIX: Mix = Mix { reads: 40, zeros: 5, trims: 5, fua: 10, blocks: (1, 32) };

    fn lbas_of(action: &Action) -> Vec<Range<u64>> {
        match action {
            Action::Read(lbas) | Action::Write { lbas, .. } | Action::Zeros { lbas, .. } => {
                vec![lbas.clone()]
            }
            Action::Deallocate(all) => all.clone(),
            Action::Flush => Vec::new(),
        }
    }

    #[test]
    fn operations_stay_in_their_range_and_reach_all_of_it() {
        for (range, blocks) in
            [(100..400, (1, 32)), (7..8, (1, 32)), (0..40, (8, 8)), (5..9, (1, 1))]
        {
            let mut script = Script::Mixed(Mix { blocks, ..MIX }, Random::new(3));
            let mut seen = vec![false; (range.end - range.start) as usize];
            let mut sizes = [u64::MAX, 0];
            for _ in 0..20_000 {
                let action = script.next(&range).expect("it never ends");
                for lbas in lbas_of(&action) {
                    assert!(!lbas.is_empty() && lbas.start >= range.start && lbas.end <= range.end);
                    let blocks = lbas.end - lbas.start;
                    sizes = [sizes[0].min(blocks), sizes[1].max(blocks)];
                    for lba in lbas {
                        seen[(lba - range.start) as usize] = true;
                    }
                }
            }
            assert!(seen.iter().all(|it| *it), "{range:?}");
            let room = range.end - range.start;
            assert_eq!(sizes, [blocks.0.min(room), blocks.1.min(room)], "{range:?}");
        }
    }

    #[test]
    fn operations_follow_the_configured_mix() {
        let mut script = Script::Mixed(MIX, Random::new(1));
        let mut counts = [0; 5];
        for _ in 0..10_000 {
            let at = match script.next(&(0..1000)).expect("it never ends") {
                Action::Read(_) => 0,
                Action::Write { .. } => 1,
                Action::Zeros { .. } => 2,
                Action::Deallocate(_) => 3,
                Action::Flush => 4,
            };
            counts[at] += 1;
        }
        for (count, wanted) in counts.into_iter().zip([4000, 5000, 500, 500, 0i32]) {
            assert!((count - wanted).abs() <= wanted / 5, "{counts:?}");
        }
    }

    #[test]
    fn a_sweep_reads_everything_once() {
        let mut script = Script::Sweep { next: 10, end: 25, blocks: 8 };
        let mut all = Vec::new();
        while let Some(Action::Read(lbas)) = script.next(&(0..1)) {
            all.extend(lbas);
        }
        assert_eq!(all, (10..25).collect::<Vec<_>>());
    }
}
