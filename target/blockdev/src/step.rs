//! The next step of an operation of a backing store.

use super::backing::Space;

/// What the kernel shall do next. Bounds have been checked against the backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Fill `len` bytes of the buffer, `skip` bytes into its window, from `at`.
    Read {
        /// Byte offset.
        at: u64,
        /// Bytes of the window that are filled already.
        skip: u32,
        /// Bytes.
        len: u32,
    },
    /// Store `len` bytes of the buffer, `skip` bytes into its window, at `at`.
    Write {
        /// Byte offset.
        at: u64,
        /// Bytes of the window that are stored already.
        skip: u32,
        /// Bytes.
        len: u32,
        /// Answer only when they are on stable storage.
        durable: bool,
    },
    /// Store `len` zeros (at most [`super::request::ZEROS_BYTES`]) at `at`.
    Zeros {
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u32,
    },
    /// Act on space.
    Space {
        /// In which way.
        how: Space,
        /// Byte offset.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Make everything durable.
    Sync,
}
