//! Gateways of a group on a simulated cluster and network, with clocks of their own: kills, cuts,
//! suspensions, restarts, moves, cuts from hosts, hung monitors and OSDs, lost results, late writes. Every host
//! writes ascending numbers: a write that lands after a later one is seen at once.

mod node;
mod rados;
mod random;
mod simulation;

use std::panic::catch_unwind;
use std::time::Duration;

use nvmfd_gateway::Event;

use simulation::{Simulation, Summary};

/// Defects that the simulation has to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SeededBug {
    /// A former owner is not excluded from the cluster.
    SkipExclusion,
    /// Records of groups are not compared before they are replaced.
    StaleEpoch,
    /// Member records are not compared before an update.
    StaleMember,
    /// A gateway doubts itself later than others suspect it.
    LateDoubt,
    /// Locks are released while writes are under way.
    EarlyRelease,
}

fn run(seed: u64, bug: Option<SeededBug>) -> Summary {
    let mut simulation = Simulation::new(seed, 2 + (seed % 2) as usize, true, bug);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| simulation.run()));
    result.unwrap_or_else(|cause| {
        if bug.is_none() {
            let trace = simulation.trace();
            trace.iter().skip(trace.len().saturating_sub(80)).for_each(|line| eprintln!("{line}"));
        }
        std::panic::resume_unwind(cause)
    })
}

/// `SEEDS=100000` for more, `SEED=7` for one.
#[test]
fn only_a_single_gateway_writes_and_each_group_is_served_again() {
    let number = |name: &str| std::env::var_os(name)?.to_str()?.parse::<u64>().ok();
    if let Some(seed) = number("SEED") {
        println!("{:?}", run(seed, None));
        return;
    }
    let mut all = Summary::default();
    let seeds = number("SEEDS").unwrap_or(60);
    for seed in 0..seeds {
        let result = catch_unwind(|| run(seed, None));
        let summary = result.unwrap_or_else(|_| panic!("seed {seed}: see above"));
        all.writes += summary.writes;
        all.epochs += summary.epochs;
    }
    println!("{seeds} seeds: {} writes, {} changes of owners", all.writes, all.epochs);
    assert!(all.epochs > 5 * seeds, "owners have changed");
}

/// Each with the first seed that finds it, so that none before is run, and what the simulation says
/// of it: another panic would be a defect of the simulation itself.
#[test]
fn seeded_bugs_are_found() {
    for (bug, first, sentence) in [
        (SeededBug::SkipExclusion, 1, "has writers"),
        (SeededBug::StaleEpoch, 25, "is not served since"),
        (SeededBug::StaleMember, 1, "is served by 2 gateways"),
        (SeededBug::LateDoubt, 1, "is served by 2 gateways"),
        (SeededBug::EarlyRelease, 425, "has writers"),
    ] {
        let found = (first..first + 300).find_map(|seed| {
            let cause = catch_unwind(|| run(seed, Some(bug))).err()?;
            Some((seed, *cause.downcast::<String>().expect("a sentence")))
        });
        println!("{bug:?} is found by {found:?}");
        assert!(found.is_some_and(|(_, said)| said.contains(sentence)), "{bug:?}");
    }
}

/// The time until another gateway serves group 1 after `disturb`.
fn interruption(
    gateways: usize,
    seed: u64,
    disturb: impl FnOnce(&mut Simulation, usize),
) -> Duration {
    let mut simulation = Simulation::new(seed, gateways, false, None);
    let begin = Duration::from_secs(10) + Duration::from_millis(37 * seed);
    simulation.run_until(begin);
    let owner = simulation.owner_of(1).expect("it is served");
    disturb(&mut simulation, owner);
    let mut now = begin;
    while simulation.owner_of(1).is_none_or(|other| other == owner) {
        now += Duration::from_millis(5);
        simulation.run_until(now);
        assert!(now < Duration::from_secs(60), "nobody serves it");
    }
    now - begin
}

#[test]
fn a_killed_gateway_is_replaced_within_eight_seconds() {
    let times = (0..20).map(|seed| {
        interruption(2 + (seed % 2) as usize, seed, |simulation, owner| simulation.kill(owner))
    });
    let longest = times.max();
    println!("{longest:?}");
    assert!(longest < Some(Duration::from_secs(8)), "{longest:?}");
}

#[test]
fn a_gateway_that_no_host_reaches_gives_its_groups_once() {
    for (is_closed, within) in [(true, 5), (false, 39)] {
        for seed in 0..8 {
            let gateways = 2 + (seed % 2) as usize;
            let mut simulation = Simulation::new(seed, gateways, false, None);
            simulation.run_until(Duration::from_secs(20));
            let owner = simulation.owner_of(1).expect("it is served");
            simulation.cut_front(owner, is_closed);
            simulation.run_until(Duration::from_secs(20 + within));
            let given = simulation.epochs();
            let next = simulation.owner_of(1);
            assert!(next.is_some_and(|next| next != owner), "seed {seed}: gw{owner} {next:?}");
            simulation.run_until(Duration::from_secs(100));
            simulation.heal_front(owner);
            simulation.run_until(Duration::from_secs(150));
            assert_eq!((simulation.owner_of(1), simulation.epochs()), (next, given), "seed {seed}");
        }
    }
}

#[test]
fn a_group_stays_where_it_is_if_no_host_reaches_any_gateway() {
    for seed in 0..8 {
        let mut simulation = Simulation::new(seed, 2, false, None);
        simulation.run_until(Duration::from_secs(20));
        let epochs = simulation.epochs();
        for (node, is_closed) in [(0, seed % 2 == 0), (1, seed % 2 == 0)] {
            simulation.cut_front(node, is_closed);
        }
        simulation.run_until(Duration::from_secs(100));
        assert_eq!(simulation.epochs(), epochs, "seed {seed}");
    }
}

#[test]
fn a_move_and_a_leave_interrupt_for_less_than_a_second() {
    let mut longest = Duration::ZERO;
    for seed in 0..20 {
        let to = |owner: usize| ((owner + 1) % 2) as u8;
        let moved = interruption(2, seed, |simulation, owner| {
            simulation.event(owner, Event::Move(1, to(owner)));
        });
        let left = interruption(2, seed, |simulation, owner| simulation.event(owner, Event::Leave));
        longest = longest.max(moved).max(left);
    }
    println!("{longest:?}");
    assert!(longest < Duration::from_secs(1), "{longest:?}");
}
