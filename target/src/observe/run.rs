//! Commands that come home together are counted together.
//!
//! The marks of a command are the times of turns. So commands that a host has sent together and
//! that fared alike took the same time in every stage, to the nanosecond, and what is to be added
//! for each of them is the same. A run of such commands is counted at once when it ends: when
//! another command comes that fared otherwise, and in any case when all that has come from the fabric is dealt with.

use std::sync::Arc;

use super::rows::{Alike, Kind, Row};

/// Who a command is of: a queue, a namespace and an operation code.
pub type Whose = (u32, u32, u8);

/// A run of commands, of which one reactor has one at a time.
///
/// It keeps the row that it was counted in last, so that row is not folded when its host has gone.
#[derive(Debug, Default)]
pub struct Run {
    whose: Whose,
    alike: Alike,
    /// They are to be noted one by one.
    slow: bool,
    counted_in: Option<(Arc<Row>, Kind)>,
}

impl Run {
    /// Whether a command that took so long in each stage goes on with this run.
    #[inline]
    #[must_use]
    pub fn goes_on(&self, whose: Whose, stages_ns: &[u64; 6]) -> bool {
        // Without branches and calls: most commands that come home together are alike.
        let each = self.alike.stages_ns.iter().zip(stages_ns);
        let differ = each.fold(0, |differ, (own, other)| differ | (own ^ other));
        self.alike.commands > 0 && self.whose == whose && differ == 0
    }

    /// Counts the run, and begins another one, of commands that are `slow` or not.
    pub fn begin(
        &mut self,
        whose: Whose,
        (row, kind): (&Arc<Row>, Kind),
        stages_ns: &[u64; 6],
        (total_ns, slow): (u64, bool),
    ) {
        self.end();
        (self.whose, self.slow) = (whose, slow);
        self.alike = Alike { stages_ns: *stages_ns, total_ns, ..Alike::default() };
        match &mut self.counted_in {
            Some((own, of)) if Arc::ptr_eq(own, row) => *of = kind,
            other => *other = Some((Arc::clone(row), kind)),
        }
    }

    /// A command of the run that has begun, which has moved so many bytes; true when it is slow.
    #[inline]
    #[must_use]
    pub fn add(&mut self, bytes: u32) -> bool {
        let alike = &mut self.alike;
        alike.commands = alike.commands.wrapping_add(1);
        alike.bytes = alike.bytes.wrapping_add(bytes.into());
        self.slow
    }

    /// The same of one that has failed.
    #[cold]
    #[must_use]
    pub fn add_failure(&mut self) -> bool {
        self.alike.failures = self.alike.failures.wrapping_add(1);
        self.add(0)
    }

    /// Counts the run: what comes next begins another one.
    #[inline]
    pub fn end(&mut self) {
        if self.alike.commands > 0
            && let Some((row, kind)) = &self.counted_in
        {
            row.kinds[*kind as usize].count(&self.alike);
            self.alike.commands = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::super::observer::Observer;
    use super::*;

    const READ: Whose = (1, 1, 2);

    /// A command of the run, or the first of another one.
    fn observe(run: &mut Run, whose: Whose, row: &Arc<Row>, disk_ns: u64, bytes: u32) {
        let stages_ns = [0, 0, 0, disk_ns, 0, 7];
        if !run.goes_on(whose, &stages_ns) {
            run.begin(whose, (row, Kind::Read), &stages_ns, (disk_ns + 7, disk_ns > 80_000));
        }
        let slow = if bytes == 0 { run.add_failure() } else { run.add(bytes) };
        assert_eq!(slow, disk_ns > 80_000);
    }

    #[test]
    fn every_command_is_counted_once_as_if_it_were_alone() {
        let nqn = |name: &str| format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap();
        let observer = Arc::<Observer>::default();
        let rows = observer.rows(nqn("disk"), nqn("host"), [1, 2].into_iter());
        let (one, two) = (rows.of(1), rows.of(2));
        let commands = [
            (READ, one, 5_000, 512),
            (READ, one, 5_000, 1024),
            (READ, one, 5_000, 0),
            (READ, one, 90_000, 512),
            ((1, 2, 2), two, 90_000, 512),
            ((2, 1, 2), one, 90_000, 512),
            ((2, 1, 2), one, 90_000, 512),
            (READ, one, 5_000, 512),
        ];
        let mut run = Run::default();
        for (whose, row, disk_ns, bytes) in commands {
            observe(&mut run, whose, row, disk_ns, bytes);
        }
        run.end();
        run.end();
        assert!(!run.goes_on(READ, &[0, 0, 0, 5_000, 0, 7]), "it has ended");
        for row in [one, two] {
            let fresh = Arc::<Observer>::default();
            let alone = fresh.rows(nqn("disk"), nqn("host"), [1].into_iter());
            let of = |it: &&(Whose, &Arc<Row>, u64, u32)| Arc::ptr_eq(it.1, row);
            let mine: Vec<_> = commands.iter().filter(of).collect();
            let (tally, expected) = (&row.kinds[0], &alone.of(1).kinds[0]);
            for (_, _, disk_ns, bytes) in &mine {
                expected.count(&Alike {
                    commands: 1,
                    bytes: (*bytes).into(),
                    failures: u64::from(*bytes == 0),
                    stages_ns: [0, 0, 0, *disk_ns, 0, 7],
                    total_ns: *disk_ns + 7,
                });
            }
            let got = (tally.total.read(), tally.bytes.load(Ordering::Relaxed));
            assert_eq!(got, (expected.total.read(), expected.bytes.load(Ordering::Relaxed)));
            assert_eq!(got.0.iter().sum::<u64>(), mine.len() as u64);
            assert_eq!(format!("{tally:?}"), format!("{expected:?}"), "everything");
        }
    }

    #[test]
    fn nothing_goes_on_with_a_run_that_has_not_begun() {
        assert!(!Run::default().goes_on((0, 0, 0), &[0; 6]));
    }
}
