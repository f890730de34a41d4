//! Uncorrectable blocks: marked by Write Uncorrectable and not written since.
//!
//! All controllers of a subsystem share the list of a namespace. I/O reads one number first:
//! whether there are any. The state worker changes the list, one request after another, and
//! persists it before it answers, so marks survive a power loss as written data do. A write removes
//! marks only after its data are durable, and only those that existed when it began: other hosts
//! may have written and marked the blocks meanwhile. No other write of these blocks is in progress
//! from before its own until the marks are removed ([`crate::sched::range_lock`]): one that is
//! older than the marks could replace its data and become readable. So no old data become visible.
//!
//! Marks are byte ranges of the backing store, so they are independent of the block size.
//!
//! Source: NVM Command Set Specification 1.0, "Write Uncorrectable command".

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nvme::Status;
use nvmfd_blockdev::lock;

use crate::subsystem::persistence::{Persist, Section};

/// Maximum of marked blocks in a namespace: as many as one command can name. This bounds the memory
/// and the file, however the blocks are scattered.
pub(crate) const MOST_MARKED_BLOCKS: u64 = 1 << 16;

/// The bad-block list of a namespace, shared by all its users. Compared by identity.
#[derive(Debug)]
pub struct BadBlocks {
    /// Number of marked bytes.
    bytes: AtomicU64,
    ranges: Mutex<Ranges>,
    file: Option<Box<dyn Persist>>,
    /// Held while they change; true when they may not any more.
    ended: Mutex<bool>,
}

/// A change of the marks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Blocks cannot be read from now on: byte offset, bytes, and the most bytes that may be marked
    /// afterwards.
    Mark {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
        /// Bytes that may be marked in all.
        most_bytes: u64,
    },
    /// They were written, durably.
    Mend {
        /// Written ranges, each by byte offset and length.
        ranges: Vec<(u64, u64)>,
        /// Number of mark requests executed before the write began ([`BadBlocks::orders`]): ranges
        /// marked later stay marked.
        until: u64,
    },
}

/// Marked ranges by their first byte, disjoint.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Ranges {
    marked: BTreeMap<u64, Marked>,
    /// Number of mark requests executed since the start.
    orders: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Marked {
    /// The byte behind the last.
    end: u64,
    /// Which order has marked it, counted from 1; 0 before the daemon has begun.
    order: u64,
}

impl BadBlocks {
    /// Marks that end with the daemon, as the blocks of a store in memory do.
    pub fn volatile() -> Arc<BadBlocks> {
        Arc::new(BadBlocks::of(Ranges::default(), None))
    }

    /// A list persisted in `file`, with its present contents.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or is invalid. Such a file is never ignored:
    /// unreadable blocks would become readable.
    pub fn kept(file: impl Persist + 'static) -> Result<Arc<BadBlocks>, String> {
        let file: Box<dyn Persist> = Box::new(file);
        let ranges = file.load()?.unwrap_or_default();
        Ok(Arc::new(BadBlocks::of(ranges, Some(file))))
    }

    fn of(ranges: Ranges, file: Option<Box<dyn Persist>>) -> BadBlocks {
        let bytes = AtomicU64::new(ranges.bytes());
        BadBlocks { bytes, ranges: Mutex::new(ranges), file, ended: Mutex::new(false) }
    }

    /// Its file belongs to another namespace from now on, or to none: the list does not change any
    /// more. Waits for a change in progress.
    pub fn end(&self) {
        *lock(&self.ended) = true;
    }

    /// Whether no block is marked.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) == 0
    }

    /// The first marked byte of a range.
    pub fn first(&self, at: u64, len: u64) -> Option<u64> {
        lock(&self.ranges).first(at, len)
    }

    /// Number of mark requests executed so far: a write that begins now is newer than their marks.
    #[must_use]
    pub fn orders(&self) -> u64 {
        lock(&self.ranges).orders
    }

    /// Executes a change: persists it, and then makes it effective. For the state worker alone.
    ///
    /// # Errors
    /// Capacity Exceeded for too many marks; Internal Error if it cannot be persisted, or the list
    /// has ended. Nothing has changed then.
    pub fn change(&self, change: &Change) -> Result<(), Status> {
        let ended = lock(&self.ended);
        if *ended {
            return Err(Status::INTERNAL_ERROR);
        }
        let old = lock(&self.ranges).clone();
        let mut new = old.clone();
        match change {
            Change::Mark { at, len, most_bytes } => {
                new.add(*at, *len);
                if new.bytes() > *most_bytes {
                    return Err(Status::CAPACITY_EXCEEDED.with_dnr());
                }
            }
            Change::Mend { ranges, until } => {
                ranges.iter().for_each(|(at, len)| new.remove(*at, *len, *until));
            }
        }
        if let Some(file) = &self.file
            && !new.joined().eq(old.joined())
        {
            let section = |ranges| Some(ranges).filter(|ranges: &&Ranges| !ranges.is_empty());
            file.replace(section(&new), section(&old)).map_err(|_| Status::INTERNAL_ERROR)?;
        }
        let bytes = new.bytes();
        *lock(&self.ranges) = new;
        self.bytes.store(bytes, Ordering::Release);
        Ok(())
    }
}

impl PartialEq for BadBlocks {
    fn eq(&self, other: &BadBlocks) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for BadBlocks {}

impl Ranges {
    fn is_empty(&self) -> bool {
        self.marked.is_empty()
    }

    fn bytes(&self) -> u64 {
        self.marked.iter().map(|(start, marked)| marked.end - start).sum()
    }

    fn first(&self, at: u64, len: u64) -> Option<u64> {
        let end = at.saturating_add(len);
        match self.marked.range(..=at).next_back() {
            _ if len == 0 => None,
            Some((_, marked)) if marked.end > at => Some(at),
            _ => self.marked.range(at..end).next().map(|(start, _)| *start),
        }
    }

    /// Carries out the next order.
    fn add(&mut self, at: u64, len: u64) {
        self.remove(at, len, u64::MAX);
        self.orders += 1;
        let end = at.saturating_add(len);
        if at < end {
            self.marked.insert(at, Marked { end, order: self.orders });
        }
    }

    /// Takes away what orders up to `until` have marked.
    fn remove(&mut self, at: u64, len: u64, until: u64) {
        let end = at.saturating_add(len);
        let before = self.marked.range(..end).rev();
        let meets = before.take_while(|(_, marked)| marked.end > at);
        let old: Vec<(u64, Marked)> = meets
            .filter(|(_, marked)| marked.order <= until)
            .map(|(from, marked)| (*from, *marked))
            .collect();
        for (from, marked) in old {
            self.marked.remove(&from);
            if marked.end > end {
                self.marked.insert(end, marked);
            }
            if from < at {
                self.marked.insert(from, Marked { end: at, ..marked });
            }
        }
    }

    /// Start and end of each range, after merging of adjacent ones.
    fn joined(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut rest = self.marked.iter().map(|(start, marked)| (*start, marked.end)).peekable();
        std::iter::from_fn(move || {
            let (start, mut end) = rest.next()?;
            while let Some((_, next)) = rest.next_if(|(start, _)| *start == end) {
                end = next;
            }
            Some((start, end))
        })
    }
}

impl Section for Ranges {
    const NAME: &'static str = "uncorrectable";

    fn emit(&self) -> String {
        self.joined().fold(String::new(), |mut text, (start, end)| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "bytes {start} {end}");
            text
        })
    }

    fn parse(body: &str) -> Option<Ranges> {
        let range = |line: &str| {
            let (start, end) = line.strip_prefix("bytes ")?.split_once(' ')?;
            let (start, end) = (start.parse().ok()?, end.parse().ok()?);
            (start < end).then_some((start, Marked { end, order: 0 }))
        };
        let marked = body.lines().map(range).collect::<Option<_>>()?;
        Some(Ranges { marked, orders: 0 })
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::bad_blocks::*;
    use crate::subsystem::persistence::tests::MemorySections;
    use proptest::prelude::*;

    fn made(store: &MemorySections) -> Arc<BadBlocks> {
        BadBlocks::kept(store.clone()).unwrap()
    }

    fn mark(at: u64, len: u64) -> Change {
        Change::Mark { at, len, most_bytes: 1 << 20 }
    }

    fn mend(ranges: &[(u64, u64)], until: u64) -> Change {
        Change::Mend { ranges: ranges.to_vec(), until }
    }

    #[test]
    fn marks_survive_restarts_until_cleared() {
        let store = MemorySections::default();
        let marks = made(&store);
        assert!(marks.is_empty());
        marks.change(&mark(4096, 8192)).unwrap();
        marks.change(&mark(1 << 16, 512)).unwrap();
        drop(marks);
        let marks = made(&store);
        assert!(!marks.is_empty());
        assert_eq!(marks.first(0, 1 << 20), Some(4096));
        assert_eq!((marks.first(0, 4096), marks.first(12288, 4096)), (None, None));
        assert_eq!(
            (marks.first(8192, 1), marks.first(12288, 1 << 20)),
            (Some(8192), Some(1 << 16))
        );
        marks.change(&mend(&[(0, 8192), (1 << 16, 512)], marks.orders())).unwrap();
        assert_eq!(made(&store).first(0, 1 << 20), Some(8192));
        marks.change(&mend(&[(0, u64::MAX)], marks.orders())).unwrap();
        assert!(marks.is_empty() && store.is_empty());
    }

    #[test]
    fn blocks_marked_after_the_start_of_a_write_stay_marked() {
        let store = MemorySections::default();
        let marks = made(&store);
        marks.change(&mark(0, 16384)).unwrap();
        let until = marks.orders();
        marks.change(&mark(4096, 4096)).unwrap();
        marks.change(&mend(&[(0, 12288)], until)).unwrap();
        for marks in [&marks, &made(&store)] {
            let first = |at| marks.first(at, 4096);
            assert_eq!([0, 4096, 8192].map(first), [None, Some(4096), None]);
            assert_eq!(first(12288), Some(12288));
        }
        marks.change(&mend(&[(0, 12288)], marks.orders())).unwrap();
        assert_eq!(marks.first(0, 1 << 20), Some(12288));
    }

    #[test]
    fn marks_are_bounded_and_refused_changes_have_no_effect() {
        let store = MemorySections::default();
        let marks = made(&store);
        let most_bytes = 8192;
        let mark = |at| marks.change(&Change::Mark { at, len: 4096, most_bytes });
        assert_eq!((mark(0), mark(1 << 20)), (Ok(()), Ok(())));
        assert_eq!(mark(4096), Err(Status::CAPACITY_EXCEEDED.with_dnr()));
        assert_eq!(mark(0), Ok(()), "marked already");
        assert_eq!(marks.first(4096, 4096), None);
        store.fail(true);
        let mended = marks.change(&mend(&[(0, 4096)], marks.orders()));
        assert_eq!(mended, Err(Status::INTERNAL_ERROR));
        assert_eq!(marks.first(0, 4096), Some(0), "what is not kept is not so");
    }

    proptest! {
        #[test]
        fn ranges_match_a_per_byte_model(
            steps in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..24, 0u64..8), 0..40),
            at in 0u64..80, len in 0u64..80
        ) {
            // For each byte the request that has marked it.
            let (mut ranges, mut plain) = (Ranges::default(), [None; 200]);
            for (marks, at, len, ago) in steps {
                let bytes = &mut plain[at as usize..(at + len) as usize];
                if marks {
                    ranges.add(at, len);
                    bytes.fill(Some(ranges.orders));
                } else {
                    let until = ranges.orders.saturating_sub(ago);
                    ranges.remove(at, len, until);
                    let meant = bytes.iter_mut().filter(|byte| **byte <= Some(until));
                    meant.for_each(|byte| *byte = None);
                }
                let marked = plain.iter().filter(|byte| byte.is_some()).count();
                prop_assert_eq!(ranges.bytes(), marked as u64);
                let ends = ranges.joined().zip(ranges.joined().skip(1));
                prop_assert!(ends.into_iter().all(|((_, end), (next, _))| end < next));
            }
            let expected = (at..at + len).find(|&byte| plain[byte as usize].is_some());
            prop_assert_eq!(ranges.first(at, len), expected);
            let parsed = Ranges::parse(&ranges.emit()).unwrap();
            prop_assert!(parsed.joined().eq(ranges.joined()));
        }
    }
}
