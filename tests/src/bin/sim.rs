//! Runs seeds of the simulation (see `tests::sim`) and reports failures.
//!
//! ```text
//! sim --seeds 10000                all seeds from 0 on, 1,000 commands each
//! sim --seed 17 --trace            one seed, a line for every change of state
//! sim --plant missing-flush        seeds from 0 on until the seeded bug is found
//! ```

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use tests::sim::mutants::SeededBug;
use tests::sim::scenario::Profile;
use tests::sim::trace::Telling;
use tests::sim::{Outcome, Setup, run_profile};

/// Number of trace lines printed for a failing seed.
const LINES: usize = 60;

/// Simulate hosts, network, target and devices from seeds.
#[derive(Parser, Debug)]
struct Arguments {
    /// Number of seeds, from --first on
    #[arg(long, default_value_t = 100, conflicts_with = "seed")]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Run only this seed
    #[arg(long)]
    seed: Option<u64>,
    /// Commands of each run
    #[arg(long, default_value_t = 1000)]
    commands: u32,
    /// Print the trace
    #[arg(long)]
    trace: bool,
    /// Number of reactors, instead of those that the seed draws
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    reactors: Option<u16>,
    /// Enable a seeded bug, which must be found
    #[arg(long, value_parser = plant)]
    plant: Option<SeededBug>,
    /// Continue after a failure
    #[arg(long)]
    keep_going: bool,
}

fn plant(name: &str) -> Result<SeededBug, String> {
    let names = || SeededBug::ALL.map(SeededBug::name).join(", ");
    let found = SeededBug::ALL.into_iter().find(|plant| plant.name() == name);
    found.ok_or_else(|| format!("there are {}", names()))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let (first, count) = match arguments.seed {
        Some(seed) => (seed, 1),
        None => (arguments.first, arguments.seeds),
    };
    let (start, mut failed, mut sum) = (Instant::now(), 0u64, 0u64);
    let mut totals = [0u64; 4];
    for seed in first..first.saturating_add(count) {
        let telling = if arguments.trace { Telling::All } else { Telling::Nothing };
        let setup = Setup { seed, commands: arguments.commands, telling, plant: arguments.plant };
        on_panic(&arguments, seed);
        let outcome = simulate(&arguments, setup);
        sum = sum.rotate_left(7) ^ outcome.sum;
        let counts = outcome.counts;
        for (total, count) in
            totals.iter_mut().zip([counts.done, counts.refused, counts.lost, counts.ended])
        {
            *total += count;
        }
        if let Some(why) = &outcome.failure {
            failed += 1;
            tell(&arguments, setup, &outcome, why);
            if arguments.plant.is_some() {
                println!("found after {} seeds", seed - first + 1);
                return ExitCode::SUCCESS;
            }
            if !arguments.keep_going {
                break;
            }
        }
    }
    let [done, refused, lost, ended] = totals;
    println!(
        "{count} seeds from {first}, {} commands each: {failed} failed, {done} commands answered, \
         {refused} refused, {lost} lost, {ended} associations ended, sum {sum:016x}, {:.1} s",
        arguments.commands,
        start.elapsed().as_secs_f64()
    );
    // A seeded bug that was not found is a failure of the oracles.
    let good = failed == 0 && arguments.plant.is_none();
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn simulate(arguments: &Arguments, setup: Setup) -> Outcome {
    let profile = Profile::new(setup.seed, setup.commands);
    let profile = match arguments.reactors {
        Some(reactors) => profile.with_reactors(reactors.into()),
        None => profile,
    };
    run_profile(setup, profile)
}

fn replay(arguments: &Arguments, seed: u64) -> String {
    let plant = arguments.plant.map(|plant| format!(" --plant {}", plant.name()));
    let reactors = arguments.reactors.map(|count| format!(" --reactors {count}"));
    format!(
        "cargo run --release -p tests --no-default-features --bin sim -- --seed {seed} --commands \
         {}{}{} --trace",
        arguments.commands,
        plant.unwrap_or_default(),
        reactors.unwrap_or_default()
    )
}

/// A panic prints the seed as well.
fn on_panic(arguments: &Arguments, seed: u64) {
    let command = replay(arguments, seed);
    std::panic::set_hook(Box::new(move |info| {
        eprintln!("seed {seed} panics: {info}\n  replay: {command}");
    }));
}

fn tell(arguments: &Arguments, setup: Setup, outcome: &Outcome, why: &str) {
    println!("seed {} FAILED after {:?}: {why}", setup.seed, outcome.elapsed);
    println!("  replay: {}", replay(arguments, setup.seed));
    if !arguments.trace && !arguments.keep_going {
        let again = simulate(arguments, Setup { telling: Telling::Last(LINES), ..setup });
        again.lines.iter().for_each(|line| println!("    {line}"));
        if again.sum != outcome.sum {
            println!("  and the second run was another: the world is not deterministic");
        }
    }
}
