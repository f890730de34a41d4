//! `IoEngine`: what executes the I/O of backing stores.

use std::fmt;

/// What executes the I/O of backing stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IoEngine {
    /// io_uring, or threads where it is denied.
    #[default]
    Auto,
    /// io_uring alone.
    IoUring,
    /// Threads, whether or not there is an io_uring.
    Threads,
}

impl IoEngine {
    /// All of them.
    pub const ALL: [IoEngine; 3] = [IoEngine::Auto, IoEngine::IoUring, IoEngine::Threads];
}

impl fmt::Display for IoEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoEngine::Auto => "auto",
            IoEngine::IoUring => "io_uring",
            IoEngine::Threads => "threads",
        })
    }
}
