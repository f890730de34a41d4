//! The whole system, simulated: seeds that must run, seeds that once failed, and planted faults
//! that must be found. `make sim` runs many more.

#[path = "sim/device.rs"]
mod device;

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

/// Looks for a planted fault; the number of seeds that it takes, and what was found.
fn find(plant: SeededBug, seeds: u64) -> (u64, String) {
    for seed in 0..seeds {
        let outcome = run(Setup { plant: Some(plant), ..setup(seed, 500) });
        if let Some(why) = outcome.failure {
            return (seed + 1, why);
        }
    }
    panic!("{seeds} seeds, and nobody has noticed: {}", plant.name())
}

#[test]
fn acknowledgements_that_are_never_repeated_are_found() {
    // Few acknowledgements are ever repeated, so it takes some seeds.
    let (_, why) = find(SeededBug::LostAck, 150);
    assert!(why.contains("nothing had happened that excuses it"), "{why}");
}

#[test]
fn a_second_completion_of_a_command_is_found() {
    let (_, why) = find(SeededBug::DoubleCompletion, 5);
    assert!(why.contains("which is not outstanding"), "{why}");
}

#[test]
fn a_flush_that_does_nothing_is_found() {
    let (_, why) = find(SeededBug::MissingFlush, 40);
    assert!(why.contains("which cannot be"), "{why}");
}

const LATENCY: Duration = Duration::from_millis(2);

#[test]
fn commands_that_outlive_a_preemption_are_found() {
    for seed in 0..80 {
        // Two hosts that fight for the same few blocks of a slow disk.
        let mut profile = Profile::new(seed, 500);
        (profile.hosts, profile.orders, profile.hot) = (profile.hosts.max(2), 60, 900);
        (profile.mix, profile.disk.latency) = ([200, 800, 0, 0, 0, 0, 0, 0], LATENCY);
        (profile.disk.slow, profile.disk.stall) = (300, 10 * LATENCY);
        (profile.twins, profile.proofs) = (false, Proofs::None);
        (profile.aborts, profile.protections) = (0, 0);
        (profile.spoils, profile.copies) = (0, 0);
        profile.mishaps.clear();
        let planted = Setup { plant: Some(SeededBug::MissingFence), ..setup(seed, 500) };
        if let Some(why) = run_profile(planted, profile).failure {
            assert!(why.contains("which cannot be"), "{why}");
            return;
        }
    }
    panic!("nobody has noticed");
}

#[test]
fn writes_that_outlive_a_protection_are_found() {
    for seed in 0..40 {
        let mut profile = Profile::new(seed, 500);
        (profile.orders, profile.protections, profile.hot) = (0, 20, 900);
        (profile.spoils, profile.copies) = (0, 0);
        (profile.mix, profile.disk.latency) = ([200, 800, 0, 0, 0, 0, 0, 0], LATENCY);
        let planted = Setup { plant: Some(SeededBug::LateShield), ..setup(seed, 500) };
        if let Some(why) = run_profile(planted, profile).failure {
            let is_known = |text: &&str| why.contains(text);
            let texts = ["which cannot be", "carried out on a protected namespace"];
            assert!(texts.iter().any(is_known), "{why}");
            return;
        }
    }
    panic!("nobody has noticed");
}

#[test]
fn an_ana_state_on_the_wrong_path_is_found() {
    let (_, why) = find(SeededBug::WrongPath, 40);
    assert!(why.to_lowercase().contains("path"), "{why}");
}

#[test]
fn a_change_that_is_not_published_to_reactors_is_found() {
    let (_, why) = find(SeededBug::StaleView, 40);
    let signs =
        ["it was carried out", "never told", "Invalid Namespace", "within the end", "possible was"];
    assert!(signs.iter().any(|sign| why.contains(sign)), "{why}");
}

#[test]
fn missing_authentication_is_found() {
    let (_, why) = find(SeededBug::OpenDoor, 40);
    assert!(why.contains("without its secret") || why.contains("nothing is protected"), "{why}");
}

#[test]
fn an_abort_that_gets_no_answer_is_found() {
    let (_, why) = find(SeededBug::LostAbort, 40);
    assert!(why.contains("Abort"), "{why}");
}

#[test]
fn an_abort_with_a_wrong_result_is_found() {
    let (_, why) = find(SeededBug::FalseAbort, 40);
    assert!(why.contains("says that it was aborted, and it was not"), "{why}");
}

#[test]
fn unreadable_marks_lost_at_a_restart_are_found() {
    let (_, why) = find(SeededBug::LostMarks, 60);
    assert!(why.contains("nothing that can be read"), "{why}");
}

#[test]
fn a_copy_of_stale_data_is_found() {
    let (_, why) = find(SeededBug::StaleCopy, 20);
    assert!(why.contains("which cannot be"), "{why}");
}

#[test]
fn an_unsynced_namespace_record_is_found() {
    let (_, why) = find(SeededBug::LostRecord, 60);
    let signs =
        ["possible was", "belongs to no namespace", "is gone", "no record that nvmfd has written"];
    assert!(signs.iter().any(|sign| why.contains(sign)), "{why}");
}

#[test]
fn an_outdated_backing_store_of_a_namespace_is_found() {
    let (_, why) = find(SeededBug::OldStore, 60);
    assert!(why.contains("which cannot be"), "{why}");
}

#[test]
fn commands_that_go_on_while_their_namespace_is_formatted_are_found() {
    let (_, why) = find(SeededBug::LateFormat, 60);
    assert!(why.contains("erased"), "{why}");
}

#[test]
fn a_format_that_leaves_old_data_is_found() {
    let (_, why) = find(SeededBug::HalfFormat, 60);
    assert!(why.contains("which cannot be"), "{why}");
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

#[test]
fn removed_and_returned_devices_lose_no_flushed_data() {
    for seed in 0..20 {
        let outcome = run_profile(setup(seed, 500), much_removed(seed));
        assert_eq!(outcome.failure, None, "seed {seed}");
    }
}

#[test]
fn a_flush_that_succeeds_after_its_device_returned_without_data_is_found() {
    let planted = |seed| Setup { plant: Some(SeededBug::ForgivenRemoval), ..setup(seed, 500) };
    let found = (0..40).find_map(|seed| run_profile(planted(seed), much_removed(seed)).failure);
    assert!(found.is_some_and(|why| why.contains("which cannot be")));
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

#[test]
fn copies_under_rate_limits_and_aborts_cause_no_violation() {
    for seed in 0..20 {
        let outcome = run_profile(setup(seed, 500), much_copied(seed));
        assert_eq!(outcome.failure, None, "seed {seed}");
    }
}

#[test]
fn a_copy_of_a_backing_store_that_changes_is_found() {
    let planted = |seed| Setup { plant: Some(SeededBug::EarlySnapshot), ..setup(seed, 500) };
    let found = (0..20).find_map(|seed| run_profile(planted(seed), much_copied(seed)).failure);
    assert!(found.is_some_and(|why| why.contains("it changes")));
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

#[test]
fn formats_and_crashes_cause_no_violation() {
    for seed in 0..12 {
        let outcome = run_profile(setup(seed, 500), much_formatted(seed));
        assert_eq!(outcome.failure, None, "seed {seed}");
    }
}

/// What is found of a planted fault of formats, and after how many seeds.
fn find_formatted(plant: SeededBug, seeds: u64) -> String {
    for seed in 0..seeds {
        let planted = Setup { plant: Some(plant), ..setup(seed, 500) };
        if let Some(why) = run_profile(planted, much_formatted(seed)).failure {
            return why;
        }
    }
    panic!("{seeds} seeds, and nobody has noticed: {}", plant.name())
}

/// Signs of blocks of another size than hosts have been told.
const OF_SIZE: [&str; 6] =
    ["of another size", "not of", "which is right", "torn", "within the end", "Length Invalid"];

#[test]
fn a_block_size_lost_at_a_restart_is_found() {
    let why = find_formatted(SeededBug::LostFormat, 40);
    assert!(OF_SIZE.iter().any(|sign| why.contains(sign)), "{why}");
}

#[test]
fn a_block_size_published_before_it_is_persisted_is_found() {
    let why = find_formatted(SeededBug::EarlyFormat, 60);
    assert!(OF_SIZE.iter().any(|sign| why.contains(sign)), "{why}");
}

#[test]
fn a_format_that_is_answered_before_its_record_is_durable_is_found() {
    let why = find_formatted(SeededBug::UnsyncedFormat, 40);
    let signs = OF_SIZE.iter().chain(&["is no record that nvmfd has written"]);
    assert!({ signs }.any(|sign| why.contains(sign)), "{why}");
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

#[test]
fn reservations_and_write_protection_survive_crashes() {
    for seed in 0..12 {
        let outcome = run_profile(setup(seed, 500), much_reserved(seed));
        assert_eq!(outcome.failure, None, "seed {seed}");
    }
}

#[test]
fn reservations_and_protection_lost_at_a_restart_are_found() {
    for plant in [SeededBug::LostReservation, SeededBug::LostProtection] {
        let found = (0..40).find_map(|seed| {
            let planted = Setup { plant: Some(plant), ..setup(seed, 500) };
            run_profile(planted, much_reserved(seed)).failure
        });
        let why = found.unwrap_or_else(|| panic!("nobody has noticed: {}", plant.name()));
        let signs = ["carried out", "answered with", "must not be"];
        assert!(signs.iter().any(|sign| why.contains(sign)), "{why}");
    }
}

#[test]
fn a_packet_number_that_is_one_too_high_is_found() {
    find(SeededBug::PsnOffByOne, 20);
}
