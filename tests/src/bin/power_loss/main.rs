//! Power loss: writes through a target whose backing store is on `dm-log-writes`, and checks every
//! state that the log can be replayed to. Run by `tests/vm/guest/flow-power`.
//!
//! Acknowledgements are recorded as marks in that log when the response has arrived; so the state
//! before a mark must contain what the mark records.
//!
//! `tests/vm/power-cuts` kills the target's machine instead: acknowledgements are recorded in a file of
//! the host, which reads everything back (`verify`) after the target has restarted.

mod acks;
mod load;
mod log;
mod oracle;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use initiator::Error;
use initiator::options::{OptionDefaults, TargetArgs};
use initiator::rng::Random;

use crate::acks::{Ack, Extent, Writer};
use crate::log::{Entry, Log};
use crate::oracle::{BLOCK_BYTES, Floors, Layout};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Seed of the random numbers
    #[arg(long, global = true, default_value_t = 1)]
    seed: u64,
    /// Run number in the stamps
    #[arg(long, global = true, default_value_t = 77)]
    run: u64,
}

#[derive(Subcommand)]
enum Command {
    /// Write to a namespace, and record acknowledgements as marks
    Load(LoadArgs),
    /// Replace files in a directory, and record durable ones as marks
    Files {
        /// The directory
        #[arg(long)]
        directory: PathBuf,
        /// Device of dm-log-writes for the marks
        #[arg(long)]
        marks: String,
        /// Number of files
        #[arg(long, default_value_t = 50)]
        count: u64,
    },
    /// Record an event with a number as a mark
    Note {
        /// Device of dm-log-writes for the marks
        #[arg(long)]
        marks: String,
        /// Number of the event
        number: u64,
    },
    /// Replay the log of a device that is the backing store, and compare after every entry
    Replay {
        /// The log
        #[arg(long)]
        log: PathBuf,
        /// Size of the device in bytes
        #[arg(long)]
        store_bytes: u64,
        /// Simulate a power failure before every n-th flush; 0: none
        #[arg(long, default_value_t = 1)]
        cut_every: u64,
    },
    /// Print the numbers of the entries that are a flush or a write with Force Unit Access
    Marks {
        /// The log
        #[arg(long)]
        log: PathBuf,
    },
    /// Apply entries of the log to an image, as after a power failure
    Restore(RestoreArgs),
    /// Read the blocks of a target after a power failure, and compare them with the acknowledgements
    Verify(VerifyArgs),
    /// Compare a backing store with the acknowledgements
    Compare {
        /// Acknowledgements, as written by `restore`
        #[arg(long)]
        acks: PathBuf,
        /// The backing store, or a directory of `files`
        #[arg(long)]
        store: PathBuf,
    },
}

#[derive(Args)]
struct LoadArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    range: RangeArgs,
    /// Number of the first write
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    first: u64,
    /// Total number of writes
    #[arg(long, default_value_t = 500)]
    writes: u64,
    /// Commands outstanding
    #[arg(long, default_value_t = 16)]
    iodepth: usize,
    /// Percentage of writes with Force Unit Access
    #[arg(long, default_value_t = 20)]
    fua: u8,
    /// Number of writes between flushes
    #[arg(long, default_value_t = 12)]
    flush_every: u64,
    /// Device of dm-log-writes for the marks
    #[arg(long, required_unless_present = "acks")]
    marks: Option<String>,
    /// Instead: file to which acknowledgements are appended
    #[arg(long, conflicts_with = "marks")]
    acks: Option<PathBuf>,
}

#[derive(Args)]
struct RangeArgs {
    /// Namespaces
    #[arg(long = "namespace-id", default_values_t = [1], value_delimiter = ',')]
    nsids: Vec<u32>,
    /// Number of blocks used in each of them
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(64..))]
    blocks: u64,
}

#[derive(Args)]
struct VerifyArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    range: RangeArgs,
    /// Acknowledgements, including those before earlier power failures
    #[arg(long)]
    acks: PathBuf,
    /// Number of the first write since the previous power failure
    #[arg(long, default_value_t = 1)]
    first: u64,
}

#[derive(Args)]
struct RestoreArgs {
    /// The log
    #[arg(long)]
    log: PathBuf,
    /// The image
    #[arg(long)]
    image: PathBuf,
    /// Entries already applied
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Entries to apply
    #[arg(long)]
    to: u64,
    /// Output of the acknowledgements up to there, one per line
    #[arg(long)]
    acks: PathBuf,
    /// Drop each block without Force Unit Access after the last flush at random
    #[arg(long)]
    lose: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("power_loss: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<bool, Error> {
    let mut random = Random::new(cli.seed);
    match &cli.command {
        Command::Load(args) => load(args, cli.run, &mut random),
        Command::Files { directory, marks, count } => {
            let marks = Writer::Device(marks.clone());
            let written = load::files(directory, *count, cli.run, &marks, &mut random);
            local(directory, written)?;
            println!("{count} files are durable");
            Ok(true)
        }
        Command::Note { marks, number } => {
            local(Path::new(marks), Writer::Device(marks.clone()).note(*number))?;
            Ok(true)
        }
        Command::Replay { log, store_bytes, cut_every } => {
            let layout = Layout { store_bytes: *store_bytes, run: cli.run };
            let found = Log::open(log)
                .and_then(|mut from| oracle::replay(&mut from, layout, *cut_every, &mut random));
            let found = local(log, found)?;
            found.told.iter().for_each(|told| println!("{told}"));
            println!(
                "{} entries: {} flushes and {} FUA writes replayed; {} acknowledgements of {} writes; {} \
                 power cuts that dropped {} volatile blocks: {} lost",
                found.entries,
                found.flushes,
                found.fua_writes,
                found.acks,
                found.acknowledged_writes,
                found.cuts,
                found.dropped,
                found.lost
            );
            // A log without acknowledgements proves nothing.
            Ok(found.lost == 0 && found.acknowledged_writes > 0)
        }
        Command::Marks { log } => {
            let mut from = local(log, Log::open(log))?;
            let mut number = 0u64;
            while let Some(entry) = local(log, from.next_entry())? {
                number += 1;
                if entry.is_barrier() {
                    println!("{number}");
                }
            }
            Ok(true)
        }
        Command::Verify(args) => verify(args, cli.run),
        Command::Restore(args) => local(&args.image, restore(args, cli.run, &mut random)),
        Command::Compare { acks, store } => {
            let mut floors = Floors::default();
            for ack in acknowledged(acks)? {
                drop(floors.raise(&ack));
            }
            local(store, compare(store, &floors, cli.run))
        }
    }
}

fn local<T>(path: &Path, result: io::Result<T>) -> Result<T, Error> {
    result.map_err(|error| Error::Local(format!("{}: {error}", path.display())))
}

fn acknowledged(path: &Path) -> Result<Vec<Ack>, Error> {
    let text = local(path, std::fs::read_to_string(path))?;
    Ok(text.lines().filter_map(acks::decode).collect())
}

fn load(args: &LoadArgs, run: u64, random: &mut Random) -> Result<bool, Error> {
    let acks = match (&args.acks, &args.marks) {
        (Some(path), _) => local(path, Writer::file(path))?,
        (None, marks) => Writer::Device(marks.clone().unwrap_or_default()),
    };
    let mut host = args.target.connect(OptionDefaults::default())?;
    let plan = load::Plan {
        nsids: args.range.nsids.clone(),
        blocks: args.range.blocks,
        first: args.first,
        writes: args.writes,
        depth: args.iodepth,
        fua: args.fua,
        flush_every: args.flush_every,
        run,
    };
    let flushes = load::run(plan, &mut host, &acks, random)?;
    host.disconnect();
    println!("{} writes and {flushes} flushes were answered", args.writes);
    Ok(true)
}

/// A block is lost if it is older than what was acknowledged as durable, and dropped if it is only older
/// than what was completed: then the cache below the target was volatile.
fn verify(args: &VerifyArgs, run: u64) -> Result<bool, Error> {
    let (mut floors, mut volatile) = (Floors::default(), BTreeMap::new());
    for ack in acknowledged(&args.acks)? {
        drop(floors.raise(&ack));
        let Ack::Completed(extents) = ack else { continue };
        for Extent { lba, blocks, sequence } in extents {
            volatile.extend((lba..lba + u64::from(blocks)).map(|lba| (lba, sequence)));
        }
    }
    volatile.retain(|lba, sequence| *sequence >= args.first && !floors.reach(*lba, *sequence));
    let RangeArgs { nsids, blocks } = &args.range;
    let mut host = args.target.connect(OptionDefaults::default())?;
    let (mut looked, mut lost, mut dropped) = (0, 0, 0);
    load::read(&mut host, nsids, *blocks, |lba, block| {
        if let Some(wrong) = floors.wrong(lba, block, run) {
            lost += 1;
            println!("{wrong}");
        }
        looked += u64::from(floors.reach(lba, 0));
        let is_older =
            |sequence: &u64| oracle::stamp(block, run).is_none_or(|now| now.sequence < *sequence);
        dropped += u64::from(volatile.get(&lba).is_some_and(is_older));
    })?;
    host.disconnect();
    println!(
        "{looked} compared, {lost} lost; {dropped} of {} volatile blocks dropped",
        volatile.len()
    );
    Ok(lost == 0 && looked > 0)
}

fn restore(args: &RestoreArgs, run: u64, random: &mut Random) -> io::Result<bool> {
    let image = OpenOptions::new().read(true).write(true).open(&args.image)?;
    let mut log = Log::open(&args.log)?;
    let (mut number, mut volatile) = (0, Vec::<Entry>::new());
    let mut acks = String::new();
    while number < args.to
        && let Some(entry) = log.next_entry()?
    {
        number += 1;
        if let Some(mark) = &entry.mark {
            acks.push_str(mark);
            acks.push('\n');
        }
        if number <= args.from {
            continue;
        }
        let flush = entry.flush;
        volatile.push(entry);
        if flush || !args.lose {
            volatile.drain(..).try_for_each(|entry| put(&image, &entry, run, |_| true))?;
        }
    }
    for entry in &volatile {
        put(&image, entry, run, |_| entry.fua || random.percent(50))?;
    }
    std::fs::write(&args.acks, acks)?;
    Ok(true)
}

/// As [`oracle::apply`], on a file.
fn put(image: &File, entry: &Entry, run: u64, keeps: impl FnMut(usize) -> bool) -> io::Result<()> {
    let len = entry.data.len().max(entry.discarded_bytes as usize);
    if len == 0 {
        return Ok(());
    }
    let start = entry.at_bytes - entry.at_bytes % BLOCK_BYTES as u64;
    let end = (entry.at_bytes + len as u64).min(image.metadata()?.len());
    if end <= start {
        return Ok(());
    }
    let mut window = vec![0; (end - start) as usize];
    image.read_exact_at(&mut window, start)?;
    let entry = Entry { at_bytes: entry.at_bytes - start, ..entry.clone() };
    oracle::apply(&mut window, &entry, run, keeps);
    image.write_all_at(&window, start)
}

fn compare(store: &Path, floors: &Floors, run: u64) -> io::Result<bool> {
    let (mut looked, mut lost) = (0, 0);
    let is_directory = store.is_dir();
    let whole = if is_directory { None } else { Some(File::open(store)?) };
    for number in floors.blocks() {
        looked += 1;
        let mut blocks = vec![0; BLOCK_BYTES];
        let read = match &whole {
            Some(file) => file.read_exact_at(&mut blocks, number * BLOCK_BYTES as u64),
            None => std::fs::read(store.join(format!("file{number}"))).map(|bytes| blocks = bytes),
        };
        let wrong = match read {
            Ok(()) if !blocks.is_empty() && blocks.len().is_multiple_of(BLOCK_BYTES) => {
                blocks.chunks_exact(BLOCK_BYTES).find_map(|block| floors.wrong(number, block, run))
            }
            Ok(()) => Some(format!("{number} has {} bytes", blocks.len())),
            Err(error) => Some(format!("{number} cannot be read: {error}")),
        };
        if let Some(wrong) = wrong {
            lost += 1;
            println!("{wrong}");
        }
    }
    println!("{looked} compared, {lost} lost");
    Ok(lost == 0)
}
