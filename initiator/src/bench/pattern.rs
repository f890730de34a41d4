//! Generates the next command: pure, from a seed.

use crate::rng::Random;

rdma::named_enum! {
    /// Access patterns, by fio's names.
    #[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Access {
        /// Read one block after another
        Read = "read",
        /// Write one block after another
        Write = "write",
        /// Read anywhere
        Randread = "randread",
        /// Write anywhere
        Randwrite = "randwrite",
        /// Read and write, one block after another
        #[value(alias = "readwrite")]
        Rw = "rw",
        /// Read and write anywhere
        Randrw = "randrw",
    }
}

impl Access {
    fn is_random(self) -> bool {
        matches!(self, Access::Randread | Access::Randwrite | Access::Randrw)
    }

    /// Returns the percentage of reads.
    pub fn reads(self, mix: u8) -> u8 {
        match self {
            Access::Read | Access::Randread => 100,
            Access::Write | Access::Randwrite => 0,
            Access::Rw | Access::Randrw => mix,
        }
    }
}

/// One command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Next {
    pub(super) is_read: bool,
    /// Position in the range, in commands.
    pub(super) place: u64,
}

/// An endless sequence of commands over a range of `places`. Random places are drawn
/// independently, so some are repeated before others are used at all (fio's `norandommap`).
#[derive(Debug)]
pub(super) struct Pattern {
    random: Random,
    is_random: bool,
    read_percent: u8,
    places: u64,
    /// The next place in sequential order; reads and writes share it, as in fio. See
    /// [`Pattern::next`].
    next: u64,
}

impl Pattern {
    /// Creates a pattern. Sequential jobs begin at different places: job `n` of `jobs`.
    pub(super) fn new(rw: Access, mix: u8, places: u64, seed: u64, n: u32, jobs: u32) -> Pattern {
        let next = (u128::from(places) * u128::from(n) / u128::from(jobs.max(1))) as u64;
        Pattern {
            random: Random::new(seed.wrapping_add(u64::from(n) << 32)),
            is_random: rw.is_random(),
            read_percent: rw.reads(mix),
            places: places.max(1),
            next,
        }
    }

    pub(super) fn next(&mut self) -> Next {
        let is_read = match self.read_percent {
            100 => true,
            0 => false,
            percent => self.random.percent(percent),
        };
        if self.is_random {
            return Next { is_read, place: self.random.below(self.places) };
        }
        let place = self.next;
        self.next = if place + 1 >= self.places { 0 } else { place + 1 };
        Next { is_read, place }
    }
}

#[cfg(test)]
mod tests {
    use crate::bench::pattern::*;

    #[test]
    fn sequential_access_wraps_and_jobs_start_apart() {
        let mut pattern = Pattern::new(Access::Write, 50, 3, 1, 0, 1);
        let places: Vec<u64> = (0..7).map(|_| pattern.next().place).collect();
        assert_eq!(places, [0, 1, 2, 0, 1, 2, 0]);
        assert!(!pattern.next().is_read);
        let mut second = Pattern::new(Access::Read, 50, 100, 1, 1, 4);
        assert_eq!(second.next(), Next { is_read: true, place: 25 });
    }

    #[test]
    fn random_access_is_uniform_and_reproducible_by_seed() {
        let all = |seed, n| {
            let mut pattern = Pattern::new(Access::Randrw, 70, 50, seed, n, 2);
            (0..5000).map(|_| pattern.next()).collect::<Vec<_>>()
        };
        assert_eq!(all(7, 0), all(7, 0));
        assert_ne!(all(7, 0), all(8, 0));
        assert_ne!(all(7, 0), all(7, 1), "jobs do not follow each other");
        let commands = all(7, 0);
        let reads = commands.iter().filter(|next| next.is_read).count();
        assert!((3350..3650).contains(&reads), "{reads} of 5000 are reads");
        for place in 0..50 {
            let count = commands.iter().filter(|next| next.place == place).count();
            assert!((50..150).contains(&count), "place {place}: {count} times");
        }
    }
}
