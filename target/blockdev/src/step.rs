//! The next step of an operation of a backing store.

/// The next step for the kernel. Bounds have been checked against the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Reads `len` bytes at `at` into the buffer, `skip` bytes into its window.
    Read {
        /// Byte offset.
        at: u64,
        /// Bytes of the window that are already filled.
        skip: u32,
        /// Bytes.
        len: u32,
    },
    /// Writes `len` bytes of the buffer, `skip` bytes into its window, at `at`.
    Write {
        /// Byte offset.
        at: u64,
        /// Bytes of the window that are already stored.
        skip: u32,
        /// Bytes.
        len: u32,
        /// Completes only when the data are on stable storage.
        durable: bool,
    },
    /// Writes `len` zeros (at most `ZEROS_BYTES`) at `at`.
    Zeros {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u32,
    },
    /// fallocate, or discard of a device.
    Space {
        /// Its mode.
        how: Space,
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// fsync.
    Sync,
}

/// Modes of fallocate that nvmfd uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// `FALLOC_FL_PUNCH_HOLE`: deallocates; the range reads as zeros.
    Punch = 1,
    /// `FALLOC_FL_ZERO_RANGE`: zeros without deallocation.
    ZeroRange = 2,
}
