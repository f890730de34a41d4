//! Some seeds of the simulated world, and whether its judge would notice a defect.
//! `make sim SEEDS=10000` runs as many as wanted.

use tests::world::plant::Plant;
use tests::world::trace::Telling;
use tests::world::{Outcome, Setup, run};

fn simulate(seed: u64, commands: u32, plant: Option<Plant>) -> Outcome {
    run(Setup { seed, commands, telling: Telling::Nothing, plant })
}

#[test]
fn no_seed_fails() {
    for seed in 0..40 {
        let outcome = simulate(seed, 300, None);
        assert_eq!(outcome.failure, None, "seed {seed}: `make sim` says how to see more");
    }
}

#[test]
fn a_seed_runs_the_same_every_time() {
    for seed in [3, 17, 75] {
        let [one, two] = [(), ()].map(|()| simulate(seed, 300, None));
        assert_eq!(one.sum, two.sum, "seed {seed}");
        assert!(one.counts.done > 0);
    }
    assert_ne!(simulate(1, 300, None).sum, simulate(2, 300, None).sum);
}

/// A judge that finds nothing is worth nothing: each kind of planted fault is found.
#[test]
fn planted_faults_are_found() {
    for plant in Plant::ALL {
        let found = (0..100).find(|seed| simulate(*seed, 1000, Some(plant)).failure.is_some());
        assert!(found.is_some(), "{} is not found within 100 seeds", plant.name());
    }
}
