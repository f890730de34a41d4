//! `nvmf bench`: measures a namespace, with the options and the report of `fio`.
//!
//! One thread drives one association with all its queues: it takes all completions, submits the
//! same number of commands, and rings once. When there are no events it polls for a while, then
//! sleeps. The clock is read once per iteration. So a latency is exact if an iteration has one
//! completion, and otherwise too long by at most the iteration.
//!
//! Buffers are exposed once, before the measurement, and reused: no registration and no
//! invalidation is part of the measurement. In steady state nothing is allocated.

mod pattern;
mod plan;
pub mod report;
mod runner;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::Error;
use crate::interrupt::Stop;
use crate::namespace_host::{NamespaceHost, Usage};
use crate::options::{NamespaceArgs, PathArgs};
use crate::size::{seconds, size};
use report::{Cpu, Depths, Printing, Progress, Rate, Report, Side, print};

use pattern::Access;
use plan::Plan;
use runner::{Job, Live, Outcome};

/// Update interval of the live line.
const PRINT_INTERVAL: Duration = Duration::from_millis(500);

/// Interval of checks whether the jobs have ended, when they should have.
const SOON: Duration = Duration::from_millis(5);

/// Options of `nvmf bench`: fio's names, where it has them.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which namespace.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
    /// Its paths: with several, commands wait and are repeated when one is lost; data are then
    /// exposed to the target anew for each command.
    #[command(flatten)]
    pub paths: PathArgs,
    /// What to do. Everything but read and randread overwrites data
    #[arg(long, value_enum, default_value_t = Access::Randread)]
    pub rw: Access,
    /// Percentage of reads in rw and randrw
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
        value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Bytes of one command
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = size)]
    pub bs: u64,
    /// Outstanding commands of one job, over all its queues
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub iodepth: u32,
    /// How long to measure
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub runtime: Duration,
    /// How long to run before that
    #[arg(long, value_name = "SECONDS", alias = "ramp_time", default_value = "0",
        value_parser = seconds)]
    pub ramp_time: Duration,
    /// Bytes of the namespace to use [default: all from the offset on]
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,
    /// Where in the namespace to begin
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    pub offset: u64,
    /// Threads, each with an association of its own. With soft, each connects from an address of
    /// its own: the one of --host-traddr and those that follow it
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=64))]
    pub numjobs: u32,
    /// Seed of the random numbers: the same seed, the same order
    #[arg(long, alias = "randseed", default_value_t = 1)]
    pub seed: u64,
    /// Have every write reach the medium before it is answered
    #[arg(long)]
    pub fua: bool,
    /// Have the target fetch the data of small writes as well, rather than send them along
    #[arg(long)]
    pub no_in_capsule: bool,
    /// Poll for completions for this time before sleeping, in microseconds [default: 400, as long
    /// as they take no longer, else 100; 0 on a machine with one CPU]
    #[arg(long, value_name = "MICROSECONDS")]
    pub spin_us: Option<u32>,
    /// Name of the run in the results
    #[arg(long, default_value = "bench")]
    pub name: String,
    /// Output format and progress.
    #[command(flatten)]
    pub printing: Printing,
}

/// Runs the benchmark.
///
/// # Errors
/// A sentence for the user.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let (report, failure) = measure(args)?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let text = match args.printing.output.is_json() {
        true => report.json(since.as_millis() as u64) + "\n",
        false => report.text(),
    };
    print(text)?;
    match failure {
        Some(failure) => Err(failure),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Runs the benchmark and prints only progress. An error that ended it early is returned with the
/// results up to then. Handles SIGINT and SIGTERM.
///
/// # Errors
/// It did not start: a sentence for the user.
pub fn measure(args: &Args) -> Result<(Report, Option<Error>), Error> {
    let begin = Instant::now();
    let mut stop = Stop::new()?;
    let halt = AtomicBool::new(false);
    let progress = Progress::new(args.printing.progress, args.ramp_time + args.runtime);
    let (plan, outcomes) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.numjobs)
            .map(|n| {
                // Exposed memory belongs to a thread, so each thread connects its own host.
                let (ready, is_ready) = mpsc::channel();
                let (go, begins) = mpsc::channel();
                let halt = &halt;
                (scope.spawn(move || work(args, n, &ready, &begins, halt)), is_ready, go)
            })
            .collect();
        let mut live = Vec::new();
        let mut plan = None;
        for (_, is_ready, _) in &threads {
            let (its_live, its_plan) = heard(is_ready, &mut stop)?;
            live.push(its_live);
            plan = Some(its_plan);
        }
        let start = Instant::now();
        for (_, _, go) in &threads {
            let _ = go.send(start);
        }
        let mut live_line = LiveLine::default();
        while !threads.iter().all(|(thread, ..)| thread.is_finished()) {
            let left = (args.ramp_time + args.runtime).saturating_sub(start.elapsed());
            if stop.wait(left.clamp(SOON, PRINT_INTERVAL)) {
                halt.store(true, Ordering::Relaxed);
            }
            live_line.print(&progress, &live, start, args.ramp_time);
        }
        let outcomes: Result<Vec<_>, _> =
            threads.into_iter().map(|(thread, ..)| thread.join()).collect();
        let outcomes = outcomes.map_err(|_| panicked())?;
        Ok((plan, outcomes.into_iter().flatten().collect::<Vec<Outcome>>()))
    })?;
    progress.end();
    let options = plan.map(|plan| plan.options.clone()).unwrap_or_default();
    Ok(sum_up(args, options, outcomes, begin.elapsed()))
}

/// Waits for a job to be ready. A second signal ends the process without delay.
fn heard(
    is_ready: &mpsc::Receiver<Ready>,
    stop: &mut Stop,
) -> Result<(Arc<Live>, Arc<Plan>), Error> {
    loop {
        match is_ready.recv_timeout(SOON) {
            Ok(ready) => return ready,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(panicked()),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let _ = stop.wait(Duration::ZERO);
            }
        }
    }
}

fn panicked() -> Error {
    Error::Local("a job has panicked".into())
}

/// Result of the preparation of a job.
type Ready = Result<(Arc<Live>, Arc<Plan>), Error>;

/// The thread of job `n`: connects, waits for all others, runs.
fn work(
    args: &Args,
    n: u32,
    ready: &mpsc::Sender<Ready>,
    begins: &mpsc::Receiver<Instant>,
    halt: &AtomicBool,
) -> Option<Outcome> {
    let prepare = || {
        let mut host = connect(args, n)?;
        let plan = Arc::new(Plan::new(args, &mut host)?);
        Ok((Job::new(host, Arc::clone(&plan), n)?, plan))
    };
    match prepare() {
        Ok((job, plan)) => {
            let _ = ready.send(Ok((job.live(), plan)));
            // No start time: another job has failed.
            match begins.recv() {
                Ok(start) => Some(job.run(start, halt)),
                Err(_) => {
                    job.leave();
                    None
                }
            }
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            None
        }
    }
}

/// Connects the host of job `n`.
fn connect(args: &Args, n: u32) -> Result<NamespaceHost, Error> {
    let queues = args.namespace.target.host.nr_io_queues.unwrap_or(1).max(1);
    let per_queue = args.iodepth.div_ceil(queues.into());
    let usage = Usage {
        usual: plan::usual(args, queues, per_queue)?,
        piece_bytes: plan::piece(args.bs)?,
        depth: args.iodepth,
        in_capsule: !args.no_in_capsule,
    };
    NamespaceHost::connect(&args.namespace, &args.paths, n, usage)
}

/// Counters at the last update of the live line.
#[derive(Default)]
struct LiveLine {
    at: Duration,
    read: (u64, u64),
    write: (u64, u64),
}

impl LiveLine {
    fn print(&mut self, progress: &Progress, live: &[Arc<Live>], start: Instant, ramp: Duration) {
        if !progress.is_seen() {
            return;
        }
        let elapsed = start.elapsed();
        let seconds = elapsed.saturating_sub(self.at).as_secs_f64();
        if seconds < PRINT_INTERVAL.as_secs_f64() / 2.0 {
            return;
        }
        let (read, write) = Live::sum(live);
        let rate = |now: (u64, u64), before: (u64, u64)| Rate {
            iops: now.0.saturating_sub(before.0) as f64 / seconds,
            bw_bytes: now.1.saturating_sub(before.1) as f64 / seconds,
        };
        let phase = if elapsed < ramp { "ramp" } else { "run" };
        progress.print(phase, elapsed, rate(read, self.read), rate(write, self.write));
        *self = LiveLine { at: elapsed, read, write };
    }
}

/// Sums the results of the jobs.
fn sum_up(
    args: &Args,
    options: Vec<(&'static str, String)>,
    outcomes: Vec<Outcome>,
    elapsed: Duration,
) -> (Report, Option<Error>) {
    let (mut read, mut write) = (Side::new(0), Side::new(0));
    let mut depths = Depths::default();
    let (mut runtime, mut cpu) = (Duration::ZERO, Cpu::default());
    let mut failures = Vec::new();
    for outcome in outcomes {
        read.merge(&outcome.read);
        write.merge(&outcome.write);
        depths.merge(&outcome.depths);
        runtime = runtime.max(outcome.measured);
        cpu.add(&outcome.cpu);
        failures.extend(outcome.failure);
    }
    let report = Report {
        name: args.name.clone(),
        options,
        threads: args.numjobs,
        runtime,
        elapsed,
        read,
        write,
        cpu,
        depths,
        failed: !failures.is_empty(),
    };
    (report, failures.into_iter().next())
}
