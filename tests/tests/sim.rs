//! The whole system, simulated: seeds that must run, seeds that once failed, and planted faults
//! that must be found. `make sim` runs many more.

use std::time::Duration;

use tests::sim::auth_keys::Proofs;
use tests::sim::mutants::SeededBug;
use tests::sim::scenario::{LIMITS, Mishap, Profile};
use tests::sim::trace::Telling;
use tests::sim::{Outcome, Setup, run, run_profile};

fn setup(seed: u64, commands: u32) -> Setup {
    Setup { seed, commands, telling: Telling::Nothing, plant: None }
}

fn good(setup: Setup) -> Outcome {
    let outcome = run(setup);
    if let Some(why) = &outcome.failure {
        let Setup { seed, commands, .. } = setup;
        panic!(
            "seed {seed}: {why}\n  replay: cargo run --release -p tests --no-default-features \
             --bin sim -- --seed {seed} --commands {commands} --trace"
        );
    }
    outcome
}

#[test]
fn simulations_of_fixed_seeds_find_no_violation() {
    for seed in 0..24 {
        good(setup(seed, 300));
    }
}

/// Seed, commands, and what it has found.
fn regressions() -> impl Iterator<Item = (u64, u32, &'static str)> {
    let lines = include_str!("../seeds").lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().expect("seed, commands, why");
        let number = "a number";
        (word().parse().expect(number), word().parse().expect(number), word())
    })
}

#[test]
fn regression_seeds_find_no_violation() {
    assert!(regressions().count() > 0 && regressions().all(|(_, _, why)| why.len() > 10));
    for (seed, commands, _) in regressions() {
        good(setup(seed, commands));
    }
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in [6, 7] {
        let (one, other) = (good(setup(seed, 300)), good(setup(seed, 300)));
        assert_eq!((one.sum, one.elapsed), (other.sum, other.elapsed), "seed {seed}");
        assert_eq!(one.counts, other.counts);
        assert_ne!(one.sum, good(setup(seed + 2, 300)).sum);
    }
}

/// Tests that a planted fault is found in these worlds, within so many seeds, by one of its signs.
macro_rules! found {
    ($(fn $test:ident($plant:ident, $world:ident, $seeds:literal): $signs:expr;)*) => {$(
        #[test]
        fn $test() {
            let plant = Some(SeededBug::$plant);
            let planted = |seed| Setup { plant, ..setup(seed, 500) };
            let mut whys =
                (0..$seeds).filter_map(|seed| run_profile(planted(seed), $world(seed)).failure);
            let why = whys.next().expect("nobody has noticed");
            assert!($signs.iter().any(|sign| why.contains(sign)), "{why}");
        }
    )*};
}

/// Tests that these worlds show no violation with a number of seeds.
macro_rules! sound {
    ($(fn $test:ident($world:ident, $seeds:literal);)*) => {$(
        #[test]
        fn $test() {
            for seed in 0..$seeds {
                let outcome = run_profile(setup(seed, 500), $world(seed));
                assert_eq!(outcome.failure, None, "seed {seed}");
            }
        }
    )*};
}

#[path = "sim/device.rs"]
mod device;

const LATENCY: Duration = Duration::from_millis(2);

fn any(seed: u64) -> Profile {
    Profile::new(seed, 500)
}

/// Queue pairs of each host on 16 reactors.
fn of_16_reactors(seed: u64) -> Profile {
    any(seed).with_reactors(16)
}

/// Two hosts that fight for the same few blocks of a slow disk.
fn much_preempted(seed: u64) -> Profile {
    let mut profile = any(seed);
    (profile.hosts, profile.orders, profile.hot) = (profile.hosts.max(2), 60, 900);
    (profile.mix, profile.disk.latency) = ([200, 800, 0, 0, 0, 0, 0, 0], LATENCY);
    (profile.disk.slow, profile.disk.stall) = (300, 10 * LATENCY);
    (profile.twins, profile.proofs) = (false, Proofs::None);
    (profile.aborts, profile.protections) = (0, 0);
    (profile.spoils, profile.copies) = (0, 0);
    profile.mishaps.clear();
    profile
}

/// Hosts that protect the blocks that others write.
fn much_protected(seed: u64) -> Profile {
    let mut profile = any(seed);
    (profile.orders, profile.protections, profile.hot) = (0, 20, 900);
    (profile.spoils, profile.copies) = (0, 0);
    (profile.mix, profile.disk.latency) = ([200, 800, 0, 0, 0, 0, 0, 0], LATENCY);
    profile
}

/// A world in which nobody orders anything: hosts read, write and flush, on a disk that does not fail.
fn quiet(seed: u64, commands: u32) -> Profile {
    let mut profile = Profile::new(seed, commands);
    (profile.orders, profile.aborts, profile.protections, profile.departures) = (0, 0, 0, 0);
    (profile.spoils, profile.managing, profile.copies, profile.formats) = (0, 0, 0, 0);
    (profile.twins, profile.proofs, profile.reshapes) = (false, Proofs::None, false);
    (profile.disk.error, profile.disk.sync_error) = (0, 0);
    profile.mishaps.clear();
    profile
}

/// Devices that are removed and return while hosts write and flush.
fn much_removed(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.mix, profile.hot) = ([200, 600, 200, 0, 0, 0, 0, 0], 900);
    (profile.disk.slow, profile.disk.stall, profile.atom_bytes) = (300, 10 * LATENCY, 4096);
    let removal = |part: u32| Mishap::Unplug((part % 2) as usize, LATENCY * (1 + part % 3));
    profile.mishaps = (1..6).map(|part| (part * 80, removal(part))).collect();
    // While every write is durable no flush fails, so that a lost one matters.
    profile.fua = if seed.is_multiple_of(2) { 950 } else { profile.fua };
    profile
}

/// Backing stores that are copied while hosts write, compare and abort under rate limits.
fn much_copied(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.mix, profile.hot) = ([100, 600, 50, 50, 50, 150, 0, 0], 900);
    (profile.disk.slow, profile.disk.stall) = (300, 10 * LATENCY);
    (profile.limits, profile.aborts) = (&LIMITS, 100);
    let copy = |part: u32| match (part + seed as u32) % 4 {
        0 => Mishap::Close(0),
        1 => Mishap::Resize(0, 40, LATENCY),
        _ => Mishap::Snapshot((part % 2) as usize, 10 * LATENCY),
    };
    profile.mishaps = (1..16).map(|part| (part * 30, copy(part))).collect();
    profile
}

/// Hosts that format again and again, and a target that is killed meanwhile.
fn much_formatted(seed: u64) -> Profile {
    let mut profile = Profile::new(seed, 500);
    (profile.formats, profile.reshapes, profile.protections) = (20, true, 0);
    let short = Duration::from_millis(50);
    let crash = |at| match (seed + u64::from(at) / 60) % 4 {
        0 => Mishap::Kill(short),
        1 => Mishap::Remove((seed % 2) as usize, short),
        _ => Mishap::PowerFailure(short),
    };
    profile.mishaps = (1..8).map(|part| part * 60).map(|at| (at, crash(at))).collect();
    profile
}

/// Hosts that reserve or protect the same few blocks, and a target that is killed meanwhile.
fn much_reserved(seed: u64) -> Profile {
    let mut profile = quiet(seed, 500);
    (profile.hosts, profile.persistent, profile.hot) = (2, true, 900);
    (profile.orders, profile.protections) = if seed.is_multiple_of(2) { (60, 0) } else { (0, 12) };
    profile.mix = [200, 800, 0, 0, 0, 0, 0, 0];
    let short = Duration::from_millis(50);
    let crash = |part: u32| match part % 3 {
        0 => Mishap::Kill(short),
        _ => Mishap::PowerFailure(short),
    };
    profile.mishaps = (1..12).map(|part| (part * 40, crash(part))).collect();
    profile
}

/// Signs of blocks of another size than hosts have been told.
const OF_SIZE: [&str; 6] =
    ["of another size", "not of", "which is right", "torn", "within the end", "Length Invalid"];

const OF_A_CHANGE: [&str; 5] =
    ["it was carried out", "never told", "Invalid Namespace", "within the end", "possible was"];

const OF_A_NAMESPACE: [&str; 4] =
    ["possible was", "belongs to no namespace", "is gone", "no record that nvmfd has written"];

const OF_A_RESERVATION: [&str; 3] = ["carried out", "answered with", "must not be"];

found! {
    // Few acknowledgements are ever repeated, so it takes some seeds.
    fn acknowledgements_that_are_never_repeated_are_found(LostAck, any, 150):
        ["nothing had happened that excuses it"];
    fn a_second_completion_of_a_command_is_found(DoubleCompletion, any, 5):
        ["which is not outstanding"];
    fn a_flush_that_does_nothing_is_found(MissingFlush, any, 40): ["which cannot be"];
    fn commands_that_outlive_a_preemption_are_found(MissingFence, much_preempted, 80):
        ["which cannot be"];
    fn writes_that_outlive_a_protection_are_found(LateShield, much_protected, 40):
        ["which cannot be", "carried out on a protected namespace"];
    fn an_ana_state_on_the_wrong_path_is_found(WrongPath, any, 40): ["path", "Path"];
    fn a_change_that_is_not_published_to_reactors_is_found(StaleView, any, 40): OF_A_CHANGE;
    fn missing_authentication_is_found(OpenDoor, any, 40):
        ["without its secret", "nothing is protected"];
    fn an_abort_that_gets_no_answer_is_found(LostAbort, any, 40): ["Abort"];
    fn an_abort_with_a_wrong_result_is_found(FalseAbort, any, 40):
        ["says that it was aborted, and it was not"];
    fn unreadable_marks_lost_at_a_restart_are_found(LostMarks, any, 60):
        ["nothing that can be read"];
    fn a_copy_of_stale_data_is_found(StaleCopy, any, 20): ["which cannot be"];
    fn an_unsynced_namespace_record_is_found(LostRecord, any, 60): OF_A_NAMESPACE;
    fn an_outdated_backing_store_of_a_namespace_is_found(OldStore, any, 60): ["which cannot be"];
    fn commands_that_go_on_while_their_namespace_is_formatted_are_found(LateFormat, any, 60):
        ["erased"];
    fn a_format_that_leaves_old_data_is_found(HalfFormat, any, 60): ["which cannot be"];
    fn a_flush_that_succeeds_after_its_device_returned_without_data_is_found(
        ForgivenRemoval, much_removed, 40): ["which cannot be"];
    fn a_copy_of_a_backing_store_that_changes_is_found(EarlySnapshot, much_copied, 20):
        ["it changes"];
    fn a_block_size_lost_at_a_restart_is_found(LostFormat, much_formatted, 40): OF_SIZE;
    fn a_block_size_published_before_it_is_persisted_is_found(EarlyFormat, much_formatted, 60):
        OF_SIZE;
    fn a_format_that_is_answered_before_its_record_is_durable_is_found(
        UnsyncedFormat, much_formatted, 40):
        [&OF_SIZE[..], &["is no record that nvmfd has written"]].concat();
    fn reservations_lost_at_a_restart_are_found(LostReservation, much_reserved, 40):
        OF_A_RESERVATION;
    fn write_protection_lost_at_a_restart_is_found(LostProtection, much_reserved, 40):
        OF_A_RESERVATION;
    fn a_packet_number_that_is_one_too_high_is_found(PsnOffByOne, any, 20): [""];
}

sound! {
    fn sixteen_reactors_cause_no_violation(of_16_reactors, 12);
    fn removed_and_returned_devices_lose_no_flushed_data(much_removed, 20);
    fn copies_under_rate_limits_and_aborts_cause_no_violation(much_copied, 20);
    fn formats_and_crashes_cause_no_violation(much_formatted, 12);
    fn reservations_and_write_protection_survive_crashes(much_reserved, 12);
}
