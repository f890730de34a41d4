//! What a kernel and its disks may do to a target: answer late, in any order, or not at all, give
//! operations back, lose what is not durable, tear what is larger than they promise to write whole.

use std::time::Duration;

use rdma::soft::sim::Faults;
use tests::sim::mutants::SeededBug;
use tests::sim::scenario::{Mishap, Profile};
use tests::sim::{Setup, run_profile};

use super::{quiet, setup};

const SHORT: Duration = Duration::from_millis(50);

/// Hosts that write the same few blocks, synchronise them again and again, and lose the power.
fn much_flushed(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.hosts, profile.reactors, profile.io_queues, profile.entries) = (2, 1, 3, 4);
    (profile.mix, profile.hot, profile.fua) = ([200, 550, 250, 0, 0, 0, 0, 0], 900, 0);
    (profile.pause, profile.net) = (0, Faults { delay: profile.net.delay, ..Faults::NONE });
    // Some synchronisations take longer than many writes, and what is under way is soon answered.
    profile.disk.latency = Duration::from_millis(2);
    (profile.disk.slow, profile.disk.stall) = (150, Duration::from_millis(60));
    let failure = |part: u32| (part * 45, Mishap::PowerFailure(SHORT));
    profile.mishaps = (1..11).map(failure).collect();
    profile
}

/// The same, where the device writes whole blocks.
fn much_flushed_whole(seed: u64) -> Profile {
    Profile { atom_bytes: 4096, ..much_flushed(seed) }
}

/// Hosts that give up operations of a slow device, reconnect, and write the same few blocks.
fn much_given_up(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.hosts, profile.hot, profile.kato_ms) = (2, 950, 1000);
    profile.mix = [400, 600, 0, 0, 0, 0, 0, 0];
    (profile.pause, profile.pause_for) = (200, Duration::from_secs(1));
    (profile.disk.slow, profile.disk.stall) = (50, Duration::from_secs(15));
    let abort = |part: u32| (part * 40, Mishap::Abort((part % 2) as usize));
    profile.mishaps = (1..12).map(abort).collect();
    profile
}

/// Hosts that have writes of the same few blocks aborted, which a slow disk still has.
fn much_aborted(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.aborts, profile.hot, profile.mix) = (60, 950, [300, 700, 0, 0, 0, 0, 0, 0]);
    (profile.disk.slow, profile.disk.stall) = (50, SHORT);
    profile
}

/// Hosts that read two devices, whose operations fail now and then.
fn much_failing(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.mix, profile.disk.error) = ([800, 200, 0, 0, 0, 0, 0, 0], 50);
    profile
}

/// Namespaces that are hidden and shown again and again, and a process that is killed meanwhile.
fn much_changed(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    profile.hosts = 2;
    let hide = |part: u32| (part * 20, Mishap::Hide((part % 2) as usize, 0, SHORT));
    profile.mishaps = (1..24).map(hide).collect();
    profile
}

sound! {
    fn concurrent_flushes_cover_all_earlier_writes(much_flushed, 4);
    fn late_writes_of_closed_connections_overwrite_no_newer_data(much_given_up, 4);
    fn acknowledged_configuration_changes_survive_crashes(much_changed, 12);
}

found! {
    fn a_flush_that_completes_with_an_earlier_fsync_is_found(SharedFlush, much_flushed, 8):
        ["which cannot be"];
    fn missing_block_locks_of_closed_connections_are_found(OpenBlocks, much_given_up, 20):
        ["which cannot be"];
    fn a_cancelled_write_that_is_executed_later_is_found(LateWrite, much_aborted, 40):
        ["which cannot be"];
    fn a_torn_block_within_the_power_fail_write_unit_is_found(TornBlock, much_flushed_whole, 20):
        ["a block is torn"];
    fn a_change_whose_file_is_not_synced_is_found(UnsyncedChange, much_changed, 20):
        ["cannot be read any more", "a change is lost"];
    fn a_change_published_before_it_is_persisted_is_found(EarlyCommit, much_changed, 20):
        ["a change is lost"];
    fn a_command_that_fails_without_an_error_of_its_device_is_found(ConfusedDevices, much_failing, 8):
        ["it was refused"];
}
