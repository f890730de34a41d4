//! Work of one namespace, for the SMART log.

use std::sync::atomic::{AtomicU64, Ordering};

/// Work done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Work {
    /// Read commands (Compare and Verify included) completed.
    pub reads: u64,
    /// Write commands completed.
    pub writes: u64,
    /// 512-byte units read.
    pub units_read: u64,
    /// 512-byte units written.
    pub units_written: u64,
    /// Commands that ended with a media or data integrity error.
    pub media_errors: u64,
}

impl Work {
    /// The sum of both.
    #[must_use]
    pub fn plus(&self, other: &Work) -> Work {
        Work {
            reads: self.reads.wrapping_add(other.reads),
            writes: self.writes.wrapping_add(other.writes),
            units_read: self.units_read.wrapping_add(other.units_read),
            units_written: self.units_written.wrapping_add(other.units_written),
            media_errors: self.media_errors.wrapping_add(other.media_errors),
        }
    }
}

/// The work of one namespace that one reactor has counted. It alone writes, any thread reads.
#[derive(Debug, Default)]
pub struct WorkCounters([AtomicU64; 5]);

impl WorkCounters {
    /// Adds work.
    #[inline(always)]
    pub fn add(&self, work: &Work) {
        let Work { reads, writes, units_read, units_written, media_errors } = *work;
        let values = [reads, writes, units_read, units_written, media_errors];
        for (sum, value) in self.0.iter().zip(values) {
            if value != 0 {
                let before = sum.load(Ordering::Relaxed);
                sum.store(before.wrapping_add(value), Ordering::Relaxed);
            }
        }
    }

    /// The work counted so far.
    pub fn total(&self) -> Work {
        let [reads, writes, units_read, units_written, media_errors] =
            std::array::from_fn(|i| self.0[i].load(Ordering::Relaxed));
        Work { reads, writes, units_read, units_written, media_errors }
    }
}
