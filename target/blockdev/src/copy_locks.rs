//! `CopyLocks`: makes a block of a store in memory atomic.
//!
//! Reactors copy to and from such a store themselves. The kernel excludes writes from each other, but
//! not a read from a write, so that a read would return the beginning of one write and the end of
//! another. A device does this in its hardware. The same holds for what deallocates: the kernel
//! removes whole pages, which a read sees or not, but clears part of a page in place.

use std::ops::Range;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Number of locks. Two reactors with random addresses rarely meet at one.
const COUNT: usize = 64;
/// Bytes that share a lock: a multiple of every block size, so that a block has one lock.
const UNIT_BYTES: u64 = 128 << 10;
/// The largest page of a store in memory, where huge pages are enabled for tmpfs.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// The locks of one store.
#[derive(Debug)]
pub(crate) struct CopyLocks([CopyLock; COUNT]);

/// In a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct CopyLock(RwLock<()>);

/// Held during one copy.
#[expect(dead_code, reason = "held until it is dropped")]
pub(crate) enum CopyGuard<'a> {
    Read(RwLockReadGuard<'a, ()>),
    Write(RwLockWriteGuard<'a, ()>),
}

impl Default for CopyLocks {
    fn default() -> CopyLocks {
        CopyLocks(std::array::from_fn(|_| CopyLock::default()))
    }
}

impl CopyLocks {
    /// Locks what begins at byte `at`, for a write or a read. Returns how many of `len` bytes that
    /// is: at least one block.
    pub(crate) fn lock(&self, at: u64, len: u32, is_write: bool) -> (CopyGuard<'_>, u32) {
        let CopyLock(lock) = &self.0[(at / UNIT_BYTES) as usize % COUNT];
        let guard = match is_write {
            true => CopyGuard::Write(lock.write().unwrap_or_else(PoisonError::into_inner)),
            false => CopyGuard::Read(lock.read().unwrap_or_else(PoisonError::into_inner)),
        };
        let left = UNIT_BYTES - at % UNIT_BYTES;
        (guard, len.min(u32::try_from(left).unwrap_or(u32::MAX)))
    }
}

/// The part of a range to deallocate next: first what is no whole huge page, in parts that have one
/// lock, then the rest at once.
pub(crate) fn next_deallocation(range: &Range<u64>) -> Range<u64> {
    let Range { start, end } = *range;
    let first = start.next_multiple_of(HUGE_PAGE_BYTES).min(end);
    let last = end - end % HUGE_PAGE_BYTES;
    if start < first {
        start..first.min((start + 1).next_multiple_of(UNIT_BYTES))
    } else if start < end && last < end {
        (end - 1) / UNIT_BYTES * UNIT_BYTES..end
    } else {
        start..end
    }
}

/// Whether part of a huge page is deallocated, so that it needs its lock.
pub(crate) fn is_part_of_page(len: u64) -> bool {
    len < HUGE_PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use crate::copy_locks::*;

    #[test]
    fn parts_of_huge_pages_are_deallocated_first_in_units() {
        let parts = |mut range: Range<u64>| {
            let mut parts = Vec::new();
            while !range.is_empty() {
                let part = next_deallocation(&range);
                assert!(part.start == range.start || part.end == range.end);
                if is_part_of_page(part.end - part.start) {
                    assert_eq!(part.start / UNIT_BYTES, (part.end - 1) / UNIT_BYTES);
                }
                range = if part.start == range.start {
                    part.end..range.end
                } else {
                    range.start..part.start
                };
                parts.push(part);
            }
            parts
        };
        let (huge, unit) = (HUGE_PAGE_BYTES, UNIT_BYTES);
        for whole in [512..1024, 0..huge, 0..9 * huge] {
            assert_eq!(parts(whole.clone()), std::slice::from_ref(&whole));
        }
        let ends = [huge - 512..huge, 3 * huge..3 * huge + 512, huge..3 * huge];
        assert_eq!(parts(huge - 512..3 * huge + 512), ends);
        assert_eq!(parts(unit - 512..unit + 512), [unit - 512..unit, unit..unit + 512]);
        assert_eq!(parts(512..2 * huge - 512).len(), 32);
    }

    #[test]
    fn a_copy_ends_at_the_boundary_of_its_lock_unit() {
        let locks = CopyLocks::default();
        let lens = [(0, 4096), (512, 1 << 20), (UNIT_BYTES - 512, 4096), (5 * UNIT_BYTES, 1 << 20)];
        let lens = lens.map(|(at, len)| locks.lock(at, len, true).1);
        assert_eq!(lens, [4096, (128 << 10) - 512, 512, 128 << 10]);
    }
}
