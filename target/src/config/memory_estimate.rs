//! Memory estimate of connected hosts besides the pools: the formula that `nvmfd check` and the
//! start print, verified by a test with a counting allocator.
//!
//! It counts allocations with the provider `soft`. Some pages are touched only when they are
//! needed, so less is resident while hosts are idle. With `verbs` the adapter's library needs more
//! memory, which is not included.

use crate::plural::count;

use super::Config;

/// Entries of an admin queue, as hosts request them.
const ADMIN_ENTRIES: u16 = 32;

/// Bytes of a queue, independent of its depth; half of them are a bit for each command id.
const QUEUE_BYTES: u64 = 16_850;

/// Bytes for each entry of a queue: two slots for commands (half of it), entries in wait queues, and
/// space for operations of the fabric.
const ENTRY_BYTES: u64 = 1_515;

/// Bytes of a controller, without its queues.
const CONTROLLER_BYTES: u64 = 27_000;

/// Bytes of a queue with this number of entries.
pub fn queue_bytes(entries: u16) -> u64 {
    QUEUE_BYTES + ENTRY_BYTES * u64::from(entries)
}

/// Bytes of a host with this number of I/O queues, each with this number of entries.
pub fn host_bytes(io_queues: u16, entries: u16) -> u64 {
    let queues = u64::from(io_queues) * queue_bytes(entries);
    CONTROLLER_BYTES + queue_bytes(ADMIN_ENTRIES) + queues
}

/// Memory of a host with all granted queues, as a sentence.
pub(crate) fn sentence(config: &Config) -> String {
    let (queues, entries) = (config.limits.io_queues, config.limits.queue_depth);
    let kib = |bytes: u64| bytes.div_ceil(1 << 10);
    format!(
        "beside the pools, a host with {} of {entries} entries takes {:.1} MiB: {} KiB for each of \
         them, and {} KiB",
        count(queues, "I/O queue"),
        host_bytes(queues, entries) as f64 / f64::from(1 << 20),
        kib(queue_bytes(entries)),
        kib(host_bytes(0, entries)),
    )
}

#[cfg(test)]
mod tests {
    use crate::config::memory_estimate::*;

    #[test]
    fn printed_estimate_of_host_memory_matches_the_formula() {
        let config = Config::parse(
            "[[listener]]\naddress = '127.0.0.1'\n[limits]\nio_queues = 16\nqueue_depth = 32\n\
             [[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:test'\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nkind = 'null'\nsize = '1GiB'\n",
        );
        assert_eq!(
            sentence(&config.unwrap()),
            "beside the pools, a host with 16 I/O queues of 32 entries takes 1.1 MiB: 64 KiB for \
             each of them, and 91 KiB"
        );
    }
}
