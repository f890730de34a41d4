//! `nvmf verify`: checks that a namespace returns what was written and flushed.
//!
//! Every written block is [stamped](block_stamp), and a [`Model`] records its possible contents: what
//! was acknowledged, what is outstanding, what is durable. Every read is checked. At the end of each
//! round everything is read once more.
//!
//! If the target fails, `--reconnect` waits for it and continues; `--state` saves the model, and
//! `--check` compares a namespace with it at any later time.

mod block_history;
pub mod block_stamp;
mod driver;
pub mod model;
pub mod model_file;
mod outcome;
mod violation;
mod workload;

pub use block_history::{CandidateState, Value};
pub use model::{Change, Model, Op, Shape};
pub use violation::{Difference, Expected, Kind, Violation};

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::bench::report::{Printing, Progress};
use crate::interrupt::Stop;
use crate::multipath::REPLAY_MARGIN;
use crate::namespace_host::{NamespaceHost, NamespaceProperties, Usage};
use crate::options::{NamespaceArgs, OptionDefaults, PathArgs};
use crate::rng::{Random, mix};
use crate::size::{seconds, size};
use crate::{Error, Session};

use driver::{Client, End, Limits, Namespace, Verifier};
use outcome::Outcome;
use workload::{Mix, Script};

/// Pause between two attempts to connect to an unreachable target.
const KNOCK_EVERY: Duration = Duration::from_millis(250);

/// Options of `nvmf verify`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which namespace: what is on it is overwritten.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
    /// Its paths: with several, operations wait and are repeated when one is lost.
    #[command(flatten)]
    pub paths: PathArgs,
    /// Where in the namespace to begin
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = size)]
    pub offset: u64,
    /// Bytes of the namespace to overwrite, from the offset on: there is no default, because what
    /// is there is lost
    #[arg(long, value_parser = size, required_unless_present = "check")]
    pub size: Option<u64>,
    /// Bytes of one operation at most; pieces of all sizes are used
    #[arg(long, value_name = "SIZE", default_value = "128k", value_parser = size)]
    pub bs: u64,
    /// Outstanding operations of one client, over all its queues
    #[arg(long, value_name = "COUNT", default_value_t = 32,
        value_parser = clap::value_parser!(u32).range(1..=4095))]
    pub iodepth: u32,
    /// Clients, each with an association of its own and a part of the range. With soft, each
    /// connects from an address of its own: the one of --host-traddr and those that follow it
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=64))]
    pub clients: u16,
    /// All clients work on the whole range, and meet
    #[arg(long)]
    pub shared: bool,
    /// How long a round takes, its final reading excluded
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub runtime: Duration,
    /// Operations of a round, if these are fewer
    #[arg(long, value_name = "COUNT")]
    pub ops: Option<u64>,
    /// Rounds: operations, then everything is read
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub rounds: u32,
    /// Percentage of operations that read
    #[arg(long, value_name = "PERCENT", default_value_t = 40,
        value_parser = clap::value_parser!(u8).range(0..=100))]
    pub reads: u8,
    /// Percentage of operations that write zeros
    #[arg(long, value_name = "PERCENT", default_value_t = 5,
        value_parser = clap::value_parser!(u8).range(0..=100))]
    pub zeroes: u8,
    /// Percentage of operations that deallocate
    #[arg(long, value_name = "PERCENT", default_value_t = 5,
        value_parser = clap::value_parser!(u8).range(0..=100))]
    pub trims: u8,
    /// Percentage of writes with Force Unit Access
    #[arg(long, value_name = "PERCENT", default_value_t = 5,
        value_parser = clap::value_parser!(u8).range(0..=100))]
    pub fua: u8,
    /// Flush after this many writes; 0: never
    #[arg(long, value_name = "COUNT", default_value_t = 200)]
    pub flush_every: u32,
    /// Require deallocated blocks to read as zeros, if the namespace reports that (DLFEAT); by
    /// default they may also be unchanged, because deallocation is advisory
    #[arg(long)]
    pub trims_certain: bool,
    /// Seed of the random numbers: the same seed, the same operations
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Keep what must be on the namespace in a file, for --check
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// Write nothing: check the namespace against a file of --state
    #[arg(long, value_name = "FILE", conflicts_with = "state")]
    pub check: Option<PathBuf>,
    /// What a target that has died must still have
    #[arg(long, value_enum, default_value_t = Expect::All)]
    pub expect: Expect,
    /// When the connection is lost, try for this time to reconnect, check, and continue
    #[arg(long, value_name = "SECONDS", default_value = "0", conflicts_with = "paths",
        value_parser = seconds)]
    pub reconnect: Duration,
    /// Do not stop at the first violation
    #[arg(long)]
    pub keep_going: bool,
    /// Output format and progress.
    #[command(flatten)]
    pub printing: Printing,
}

/// Guarantee to check after a crash of the target.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Everything that was acknowledged: the process of the target ended, its machine did not
    All,
    /// What was flushed, or written with FUA: the machine lost its power
    Durable,
}

/// Runs the verification.
///
/// # Errors
/// A sentence for the user.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let begin = Instant::now();
    let about = about(args)?;
    let mut saved = match &args.check {
        Some(path) => Some(load(path, &about)?),
        None => None,
    };
    let mut hosts = connect(args)?;
    let properties = hosts[0].properties()?;
    let namespace = namespace(args, &properties);
    let shape = match &saved {
        Some(model) => check_shape(model.shape(), namespace, properties.blocks)?,
        None => shape(args, namespace, properties.blocks)?,
    };
    if let (Some(model), Expect::Durable) = (&mut saved, args.expect) {
        model.crash();
    }
    let model = saved.unwrap_or_else(|| Model::new(shape));
    let mut run = Run {
        args,
        about,
        verifier: Verifier::new(model, namespace, Random::new(args.seed)),
        clients: Vec::new(),
        mix: mix_of(args, &properties),
        sweep_blocks: piece_blocks(args, &properties),
        stop: Stop::new()?,
        stopped: false,
        progress: Progress::new(args.printing.progress, args.runtime * args.rounds),
        begin,
        reconnects: 0,
        path_losses: 0,
        reads_everything: 0,
    };
    run.employ(hosts);
    let end = match args.check {
        Some(_) => run.sweep(),
        None => run.rounds(),
    };
    run.finish(end)
}

/// A run in progress.
struct Run<'a> {
    args: &'a Args,
    /// Description of the verified range.
    about: String,
    verifier: Verifier,
    clients: Vec<Client>,
    mix: Mix,
    sweep_blocks: u64,
    stop: Stop,
    stopped: bool,
    progress: Progress,
    begin: Instant,
    reconnects: u32,
    path_losses: u64,
    /// Number of times that the whole range was read.
    reads_everything: u32,
}

impl Run<'_> {
    /// Assigns each host its part of the range.
    fn employ(&mut self, hosts: Vec<NamespaceHost>) {
        let Shape { first_lba, blocks, .. } = self.verifier.model.shape();
        let (count, depth) = (hosts.len() as u64, self.args.iodepth);
        let part = |n: u64| match self.args.shared {
            true => first_lba..first_lba + blocks,
            false => first_lba + blocks * n / count..first_lba + blocks * (n + 1) / count,
        };
        let clients = hosts.into_iter().zip(0..);
        self.clients = clients.map(|(host, n)| Client::new(host, part(n), depth)).collect();
    }

    fn rounds(&mut self) -> End {
        for n in 0..self.args.rounds {
            let random = Random::new(mix(self.args.seed ^ u64::from(n) << 32));
            let mut script = Script::Mixed(self.mix, random);
            let limits = Limits {
                until: Some(Instant::now() + self.args.runtime),
                ops: self.args.ops,
                flush_every: self.args.flush_every,
                keep_going: self.args.keep_going,
            };
            let mut end = self.leg(&mut script, limits);
            if end == End::Done {
                end = self.sweep();
            }
            if end != End::Done || self.stopped {
                return end;
            }
        }
        End::Done
    }

    /// Reads the whole range.
    fn sweep(&mut self) -> End {
        let Shape { first_lba, blocks, .. } = self.verifier.model.shape();
        let end = first_lba + blocks;
        let mut script = Script::Sweep { next: first_lba, end, blocks: self.sweep_blocks };
        let limits = Limits { keep_going: self.args.keep_going, ..Limits::default() };
        let end = self.leg(&mut script, limits);
        self.reads_everything += u32::from(end == End::Done && !self.stopped);
        end
    }

    /// Runs one leg, with as many reconnections as necessary.
    fn leg(&mut self, script: &mut Script, limits: Limits) -> End {
        if self.stopped {
            return End::Done;
        }
        loop {
            let end = self.one_leg(script, limits);
            let End::Lost(why) = &end else { return end };
            if self.stopped || self.args.reconnect.is_zero() {
                return end;
            }
            self.clients.clear();
            // If the user interrupts the run now, the state is available later.
            if let Err(error) = self.save() {
                return End::Refused(error);
            }
            match self.knock(Instant::now() + self.args.reconnect) {
                Some(hosts) => self.employ(hosts),
                None => return End::Lost(why.clone()),
            }
            if let Some(why) = self.formatted() {
                return End::Refused(why);
            }
            self.reconnects += 1;
            // Commands that were outstanding at the target are executed before it detects the keep
            // alive timeout of the failed association, at the latest; after a loss of power, none is.
            match self.args.expect {
                Expect::Durable => self.verifier.model.crash(),
                Expect::All => {
                    let kato_ms = self.clients[0].host.session().map(Session::options);
                    let kato_ms = kato_ms.map_or(0, |options| options.kato_ms);
                    let grace = Duration::from_millis(kato_ms.into()) + REPLAY_MARGIN;
                    self.verifier.settle_at = Some(Instant::now() + grace);
                }
            }
            let Script::Mixed(..) = script else {
                // Reading the whole range starts again.
                let Shape { first_lba, .. } = self.verifier.model.shape();
                if let Script::Sweep { next, .. } = script {
                    *next = first_lba;
                }
                continue;
            };
            let end = self.sweep();
            if end != End::Done {
                return end;
            }
        }
    }

    fn one_leg(&mut self, script: &mut Script, limits: Limits) -> End {
        let Run { verifier, clients, stop, stopped, progress, begin, .. } = self;
        verifier.leg(clients, script, limits, |verifier| {
            let elapsed = begin.elapsed();
            let counts = verifier.model.counts();
            progress.say(
                elapsed,
                format!(
                    "operations: {}, checked blocks: {}, violations: {}",
                    verifier.ops, counts.blocks_checked, counts.violations
                ),
            );
            *stopped |= stop.wait(Duration::ZERO);
            !*stopped
        })
    }

    /// Returns why the verification cannot continue: another host has formatted the namespace.
    fn formatted(&mut self) -> Option<Error> {
        let Namespace { block_bytes, .. } = self.verifier.namespace;
        let host = &mut self.clients.first_mut()?.host;
        host.was_formatted(block_bytes, self.verifier.formatting)
    }

    /// Tries to connect again.
    fn knock(&mut self, until: Instant) -> Option<Vec<NamespaceHost>> {
        loop {
            if let Ok(hosts) = self.stop.aside(|| connect(self.args)) {
                return Some(hosts);
            }
            self.stopped |= self.stop.wait(KNOCK_EVERY);
            if self.stopped || Instant::now() >= until {
                return None;
            }
        }
    }

    /// Writes the model to the file of --state.
    fn save(&mut self) -> Result<(), Error> {
        let Some(path) = &self.args.state else { return Ok(()) };
        let bytes = model_file::encode(&mut self.verifier.model, &self.about);
        model_file::write_file(path, &bytes)
            .map_err(|error| Error::Local(format!("{}: {error}", path.display())))
    }

    /// Disconnects, saves the state, prints the results, and returns the exit code.
    fn finish(mut self, end: End) -> Result<ExitCode, Error> {
        self.progress.end();
        // After a format, differences are no corruption, and the state describes blocks that no longer exist.
        let is_bad = matches!(end, End::Refused(_)) || self.verifier.model.counts().violations > 0;
        if let Some(why) = is_bad.then(|| self.formatted()).flatten() {
            self.clients.drain(..).for_each(|client| client.host.disconnect());
            return Err(why);
        }
        for client in self.clients.drain(..) {
            self.path_losses += client.host.path_losses();
            client.host.disconnect();
        }
        let outcome = Outcome {
            shape: self.verifier.model.shape(),
            counts: self.verifier.model.counts(),
            model_bytes: self.verifier.model.memory_bytes(),
            ops: self.verifier.ops,
            listed: std::mem::take(&mut self.verifier.listed),
            seed: self.args.seed,
            reconnects: self.reconnects,
            path_losses: self.path_losses,
            reads_everything: self.reads_everything,
            elapsed: self.begin.elapsed(),
        };
        let text = match self.args.printing.output.is_json() {
            true => outcome.json(),
            false => outcome.text(),
        };
        crate::bench::report::print(text)?;
        self.save()?;
        match end {
            End::Refused(why) => Err(why),
            End::Lost(why) => Err(Error::Local(lost(&why, self.args))),
            _ if outcome.counts.violations > 0 => Ok(ExitCode::FAILURE),
            _ => Ok(ExitCode::SUCCESS),
        }
    }
}

fn lost(why: &Error, args: &Args) -> String {
    match &args.state {
        Some(path) => {
            let path = path.display();
            format!("{why}; what must be there is in {path}: use --check with it")
        }
        None => format!("{why}; with --state what must be there would be kept"),
    }
}

/// Connects one host for each client.
fn connect(args: &Args) -> Result<Vec<NamespaceHost>, Error> {
    let piece = u32::try_from(args.bs.max(4096)).ok().and_then(u32::checked_next_power_of_two);
    let piece_bytes = piece.filter(|_| args.bs < 16 << 20).ok_or_else(|| {
        Error::Usage(format!("--bs {}: one command moves less than 16 MiB", args.bs))
    })?;
    let usual = OptionDefaults {
        io_queues: args.namespace.target.host.nr_io_queues.unwrap_or(2).max(1),
        // A command may use any queue, so each is deep enough for all commands.
        queue_entries: (args.iodepth + 1).max(32) as u16,
        data_bytes: u64::from(piece_bytes) * u64::from(args.iodepth) + (1 << 20),
    };
    let usage = Usage { usual, piece_bytes, depth: args.iodepth, in_capsule: true };
    let host = |n: u16| NamespaceHost::connect(&args.namespace, &args.paths, n.into(), usage);
    (0..args.clients).map(host).collect()
}

/// Describes the verified range: a saved state is valid only for this.
fn about(args: &Args) -> Result<String, Error> {
    let (options, _) = args.namespace.target.resolve(OptionDefaults::default())?;
    Ok(format!("namespace {} of {}", args.namespace.namespace_id, options.subnqn))
}

fn load(path: &std::path::Path, about: &str) -> Result<Model, Error> {
    let failed = |why: String| Error::Local(format!("{}: {why}", path.display()));
    let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let (model, is_about) =
        model_file::decode(&bytes).map_err(|error| failed(error.to_string()))?;
    match is_about == about {
        true => Ok(model),
        false => Err(failed(format!("it is about {is_about:?}, and not about {about}"))),
    }
}

fn namespace(args: &Args, properties: &NamespaceProperties) -> Namespace {
    Namespace {
        block_bytes: properties.block_bytes,
        durable: !properties.has_volatile_cache,
        // DLFEAT applies to blocks that are deallocated: a target may report success and leave them
        // unchanged.
        trims_to_zeros: args.trims_certain && properties.deallocated_are_zeros,
    }
}

/// Returns the configured range.
fn shape(args: &Args, namespace: Namespace, blocks: u64) -> Result<Shape, Error> {
    let block = u64::from(namespace.block_bytes);
    let wrong = |name: &str, value: u64| {
        Err(Error::Usage(format!(
            "--{name} {value}: the namespace has {blocks} blocks of {block} bytes; use a multiple \
             of that inside it"
        )))
    };
    let first_lba = args.offset / block;
    if !args.offset.is_multiple_of(block) || first_lba >= blocks {
        return wrong("offset", args.offset);
    }
    let left = blocks - first_lba;
    let size = args.size.unwrap_or_default();
    let most = left.min(model::BLOCKS_LIMIT).min(block_stamp::LBA_LIMIT - first_lba);
    if !size.is_multiple_of(block) || size / block > most || size / block < args.clients.into() {
        return wrong("size", size);
    }
    if args.bs < block {
        return wrong("bs", args.bs);
    }
    Ok(Shape {
        first_lba,
        blocks: size / block,
        block_bytes: namespace.block_bytes,
        run: fresh_run(),
    })
}

/// Returns a number that is unique to this run: from the clock and the process.
fn fresh_run() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    mix(since.as_nanos() as u64 ^ u64::from(std::process::id()) << 40)
}

/// Checks that the blocks of a saved model exist.
fn check_shape(shape: Shape, namespace: Namespace, blocks: u64) -> Result<Shape, Error> {
    if shape.block_bytes == namespace.block_bytes && shape.first_lba + shape.blocks <= blocks {
        return Ok(shape);
    }
    Err(Error::Local(format!(
        "the saved state is of blocks of {} bytes up to {}; the namespace has {} blocks of {}",
        shape.block_bytes,
        shape.first_lba + shape.blocks,
        blocks,
        namespace.block_bytes
    )))
}

/// Returns the maximum number of blocks of one command.
fn piece_blocks(args: &Args, properties: &NamespaceProperties) -> u64 {
    let bytes = args.bs.min(properties.max_transfer_bytes.into());
    (bytes / u64::from(properties.block_bytes)).clamp(1, 1 << 16)
}

/// Returns the configured mix, without operations that the controller does not support.
fn mix_of(args: &Args, properties: &NamespaceProperties) -> Mix {
    Mix {
        reads: args.reads,
        zeros: if properties.can_write_zeroes { args.zeroes } else { 0 },
        trims: if properties.can_discard { args.trims } else { 0 },
        fua: args.fua,
        blocks: (1, piece_blocks(args, properties)),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::verify::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// `nvme verify` of nvme-cli, which has the same options for the target, only reads.
    #[test]
    fn no_range_is_overwritten_that_the_command_line_does_not_name() {
        let own = ["verify", "-a", "192.0.2.1", "-n", "nqn.2026-11.io.nvmfd:a"];
        let is_good = |more: &[&str]| Line::try_parse_from(own.iter().chain(more)).is_ok();
        assert!(!is_good(&[]) && !is_good(&["--offset", "1m"]));
        assert!(is_good(&["--size", "1g"]) && is_good(&["--check", "state.bin"]));
    }

    #[test]
    fn trims_guarantee_zeros_only_if_requested_and_supported() {
        let own = ["verify", "-a", "192.0.2.1", "-n", "nqn.2026-11.io.nvmfd:a", "--size", "4k"];
        let certain = |more: &[&str], deallocated_are_zeros| {
            let line = Line::try_parse_from(own.iter().chain(more)).unwrap();
            let properties = NamespaceProperties {
                block_bytes: 4096,
                blocks: 1,
                max_transfer_bytes: 4096,
                has_volatile_cache: true,
                can_write_zeroes: true,
                can_discard: true,
                deallocated_are_zeros,
            };
            namespace(&line.args, &properties).trims_to_zeros
        };
        assert!(!certain(&[], true), "a hint");
        assert!(certain(&["--trims-certain"], true));
        assert!(!certain(&["--trims-certain"], false));
    }
}
