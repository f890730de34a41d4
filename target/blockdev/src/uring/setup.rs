//! Setup of a ring with the best features of the running kernel, or an error sentence; its sizes and
//! counters.

use std::io;

use io_uring::{Builder, IoUring};
use nix::sys::resource::{Resource, getrlimit};

/// Submission entries: a larger batch takes another system call.
const MAX_BATCH: u32 = 256;
/// io-wq workers of one ring: each is a thread while it waits.
pub(crate) const MOST_WORKERS: u32 = 1024;
/// Room for completions of polls and cancellations.
const SPARE_COMPLETIONS: u32 = 64;

/// Sizes of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingLimits {
    /// Operations that the kernel has at once, and as many that may be queued behind them: the
    /// command slots of the reactor, all queues together. 1 to 32768.
    pub ops: u32,
    /// Number of ids: every [`DeviceId`](crate::DeviceId) is below this.
    pub backings: u32,
}

/// Counters of a ring since its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingStats {
    /// Reads and writes on registered memory: no copy, no pinning.
    pub fixed: u64,
    /// Reads and writes with addresses instead: the region is not registered (see the log), a
    /// window crosses a 1 GiB boundary, or zeros are written.
    pub plain: u64,
    /// Reads and writes in memory, copied by this thread.
    pub copied: u64,
    /// fsync operations.
    pub syncs: u64,
    /// fallocate operations.
    pub spaces: u64,
    /// Steps after the first one of an operation: the rest of short transfers, retries, fallbacks.
    pub again: u64,
    /// System calls.
    pub enters: u64,
}

/// Configurations of a ring, best first: for Linux 6.1 and later; for 5.19; for any.
pub(crate) const LADDER: [fn(&mut Builder); 3] = [
    |builder| {
        builder.setup_single_issuer().setup_defer_taskrun();
        builder.setup_taskrun_flag().setup_submit_all();
    },
    |builder| {
        builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    },
    |_| (),
];

/// Sets up a ring with the first configuration of `ladder` that this kernel supports.
pub(crate) fn set_up(ops: u32, ladder: &[fn(&mut Builder)]) -> io::Result<IoUring> {
    let batch = ops.min(MAX_BATCH).next_power_of_two();
    let completions = (ops + SPARE_COMPLETIONS).max(2 * batch).next_power_of_two();
    // EINVAL: the kernel does not know a flag.
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for rung in ladder {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(completions);
        rung(&mut builder);
        match builder.build(batch) {
            Ok(io) => return Ok(io),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(explained(&error)),
        }
    }
    Err(explained(&last))
}

/// An io_uring_setup error, with what to do about it.
fn explained(error: &io::Error) -> io::Error {
    let remedy = match error.raw_os_error().unwrap_or(0) {
        libc::EPERM => {
            "io_uring is forbidden here: set sysctl kernel.io_uring_disabled=0, or allow \
             io_uring_setup in the seccomp profile of the container or service"
        }
        libc::ENOSYS => {
            "this kernel, or the seccomp profile of the container, has no io_uring: use Linux 6.1 \
             or later with CONFIG_IO_URING, and allow io_uring_setup"
        }
        libc::ENOMEM => "raise the limit of locked memory (systemd: LimitMEMLOCK=infinity)",
        libc::EMFILE | libc::ENFILE => "raise the limit of open files (systemd: LimitNOFILE=)",
        _ => "use Linux 6.1 or later",
    };
    io::Error::new(error.kind(), format!("cannot create an io_uring: {error}; {remedy}"))
}

/// Allows more io-wq workers than CPUs: each operation on a device that hangs occupies one, and
/// other stores need some as well.
pub(crate) fn allow_workers(io: &IoUring) {
    if let Err(error) = io.submitter().register_iowq_max_workers(&mut [MOST_WORKERS, 0]) {
        tracing::info!("io_uring runs with few workers: {error}");
    }
}

/// Registers a table of files; returns its size, or 0 if there is none (then descriptors are used).
/// The kernel grants no more than the process may have open.
pub(crate) fn register_files(io: &IoUring, backings: u32) -> u32 {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let files = backings.min(u32::try_from(limit).unwrap_or(u32::MAX));
    if files == 0 {
        return 0;
    }
    match io.submitter().register_files_sparse(files) {
        Ok(()) => files,
        Err(error) => {
            tracing::info!("io_uring runs without registered files: {error}");
            0
        }
    }
}

/// Whether [`set_up`] failed because the kernel or a seccomp filter denies io_uring.
pub(crate) fn is_denied(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}
