//! `CopyLocks`: makes a block of a store in memory atomic.
//!
//! Reactors copy to and from such a store themselves. The kernel excludes writes from each other, but
//! not a read from a write, so that a read would return the beginning of one write and the end of
//! another. A device does this in its hardware.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Number of locks. Two reactors with random addresses rarely meet at one.
const COUNT: usize = 64;
/// Bytes that share a lock: a multiple of every block size, so that a block has one lock.
const UNIT_BYTES: u64 = 256 << 10;

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

#[cfg(test)]
mod tests {
    use crate::copy_locks::*;

    #[test]
    fn a_copy_ends_with_its_unit() {
        let locks = CopyLocks::default();
        let lens = [(0, 4096), (512, 1 << 20), (UNIT_BYTES - 512, 4096), (5 * UNIT_BYTES, 1 << 20)];
        let lens = lens.map(|(at, len)| locks.lock(at, len, true).1);
        assert_eq!(lens, [4096, (256 << 10) - 512, 512, 256 << 10]);
    }
}
