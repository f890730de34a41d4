//! `nvmf copy`: a namespace to a file, a file to a namespace, or a namespace to another.
//!
//! Parts that are holes or zeros in the source are not written to the target, but made zeros there:
//! as holes of a file, by Write Zeroes of a namespace. Namespaces are used over all their paths, so a
//! copy survives what `nvmf attach` does. With a state file it survives its own end as well.

mod endpoint;
mod engine;
mod state_file;
mod volume;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::bench::report::{How, Printing, print};
use crate::interrupt::Stop;
use crate::options::{HostArgs, OptionDefaults, ReconnectArgs};
use crate::path_address::PathAddress;
use crate::{Error, MultipathHost, MultipathSetup};

pub use endpoint::Endpoint;

use engine::{DEPTH, Engine, PART_BYTES};
use state_file::{CopyState, StateFile};
use volume::{FileVolume, NamespaceVolume, Volume};

/// Exit code of a copy that was interrupted.
const INTERRUPTED: u8 = 3;
/// How often progress is shown, and signals are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Options of `nvmf copy`.
///
/// Exit codes: 0 done, 1 failed, 2 usage, 3 interrupted.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// What to copy: a file, or a namespace: nvme://ADDRESS:PORT/NQN/NSID (see the manual page)
    #[arg(value_parser = endpoint::endpoint)]
    pub source: Endpoint,
    /// Where to: a file, which is created, or a namespace of at least that size
    #[arg(value_parser = endpoint::endpoint)]
    pub target: Endpoint,
    /// Keep in this file how far it is: the same command continues there after an interruption
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// Then read both and compare
    #[arg(long)]
    pub verify: bool,
    /// The host.
    #[command(flatten)]
    pub host: HostArgs,
    /// What happens when paths are lost.
    #[command(flatten)]
    pub reconnect: ReconnectArgs,
    /// Output format and progress.
    #[command(flatten)]
    pub printing: Printing,
}

/// Copies.
///
/// # Errors
/// The reason of the failure.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    if args.source == args.target {
        return Err(Error::Usage("source and target are the same".into()));
    }
    if let (Endpoint::File(_), Endpoint::File(_)) = (&args.source, &args.target) {
        return Err(Error::Usage(
            "neither is a namespace: nvme://ADDRESS[:PORT]/NQN[/NSID]".into(),
        ));
    }
    let begun = Instant::now();
    let mut stop = Stop::new()?;
    let Some(source) = open(&args.source, None, args, &mut stop)? else { return Ok(interrupted()) };
    let size_bytes = source.size_bytes();
    let target = open(&args.target, Some(size_bytes), args, &mut stop)?;
    let Some(target) = target else { return Ok(interrupted()) };
    check(&source, &target)?;

    let fresh = CopyState {
        source: source.identity(),
        target: target.identity(),
        size_bytes,
        done_bytes: 0,
    };
    let file = StateFile(args.state.clone());
    let done_bytes = file.load(&fresh)?;
    if done_bytes > 0 && !target.is_prepared() {
        let text = "the target was shortened since; remove the file of --state to begin anew";
        return Err(Error::Local(text.into()));
    }
    target.prepare()?;
    let state = CopyState { done_bytes, ..fresh };
    let mut engine = Engine::new(source, target, state, file);
    let mut progress = CopyProgress::new(args.printing.progress, size_bytes);
    let outcome = passes(&mut engine, args, &mut stop, &mut progress);
    progress.end();
    engine.close();
    let is_complete = outcome?;
    report(&engine, args, done_bytes, begun.elapsed(), is_complete)?;
    match is_complete {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(interrupted()),
    }
}

fn passes(
    engine: &mut Engine,
    args: &Args,
    stop: &mut Stop,
    progress: &mut CopyProgress,
) -> Result<bool, Error> {
    if !engine.copy(|done_bytes| progress.goes_on("copy", done_bytes, stop))? {
        return Ok(false);
    }
    if args.verify && !engine.compare(|done_bytes| progress.goes_on("verify", done_bytes, stop))? {
        return Ok(false);
    }
    engine.file.remove();
    Ok(true)
}

fn interrupted() -> ExitCode {
    ExitCode::from(INTERRUPTED)
}

/// Opens a source, or a target for so many bytes. `None`: the end was asked for meanwhile.
fn open(
    endpoint: &Endpoint,
    size_bytes: Option<u64>,
    args: &Args,
    stop: &mut Stop,
) -> Result<Option<Volume>, Error> {
    let (paths, subnqn, nsid) = match endpoint {
        Endpoint::File(path) => return Ok(Some(Volume::File(FileVolume::open(path, size_bytes)?))),
        Endpoint::Namespace { paths, subnqn, nsid } => (paths, **subnqn, *nsid),
    };
    let Some(first) = paths.first() else { return Ok(None) };
    let usual = OptionDefaults {
        data_bytes: u64::from(PART_BYTES) * DEPTH as u64 + (1 << 20),
        ..OptionDefaults::default()
    };
    let (session, host) = args.host.resolve(first.to, subnqn, usual)?;
    let with_source =
        |path: &PathAddress| PathAddress { source: path.source.or(host.source), ..*path };
    let mut host = MultipathHost::new(MultipathSetup {
        session,
        paths: paths.iter().map(with_source).collect(),
        provider: host.provider,
        multipath: args.reconnect.options(nsid),
        data_bytes: host.data_bytes,
        largest_bytes: PART_BYTES,
    })?;
    let is_live = host.connect(|| !stop.wait(Duration::ZERO))?;
    Ok(is_live.then(|| Volume::Namespace(Box::new(NamespaceVolume::new(host, DEPTH)))))
}

/// Whether the target has room for the source, and can take it in whole blocks.
fn check(source: &Volume, target: &Volume) -> Result<(), Error> {
    if source.identity() == target.identity() {
        return Err(Error::Usage("source and target are the same namespace".into()));
    }
    let (size_bytes, room_bytes) = (source.size_bytes(), target.size_bytes());
    if size_bytes > room_bytes {
        return Err(Error::Usage(format!(
            "the source has {size_bytes} bytes, and the target only {room_bytes}"
        )));
    }
    let block_bytes = target.block_bytes();
    if source.is_namespace() && !size_bytes.is_multiple_of(block_bytes) {
        return Err(Error::Usage(format!(
            "the source has {size_bytes} bytes: no whole blocks of {block_bytes} bytes, as the \
             target has"
        )));
    }
    Ok(())
}

/// Prints what was done.
fn report(
    engine: &Engine,
    args: &Args,
    resumed_at: u64,
    elapsed: Duration,
    is_complete: bool,
) -> Result<(), Error> {
    let (counts, state) = (engine.counts, &engine.state);
    let text = match args.printing.output.is_json() {
        true => {
            let json = json!({
                "size_bytes": state.size_bytes,
                "resumed_at_bytes": resumed_at,
                "done_bytes": state.done_bytes,
                "data_bytes": counts.data_bytes,
                "zero_bytes": counts.zero_bytes,
                "compared_bytes": counts.compared_bytes,
                "elapsed_ms": elapsed.as_millis() as u64,
                "complete": is_complete,
            });
            format!("{json:#}\n")
        }
        false => text(engine, args, resumed_at, elapsed, is_complete),
    };
    print(text)
}

fn text(
    engine: &Engine,
    args: &Args,
    resumed_at: u64,
    elapsed: Duration,
    is_complete: bool,
) -> String {
    let (counts, state) = (engine.counts, &engine.state);
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let moved = counts.data_bytes + counts.zero_bytes;
    let mut text = format!(
        "{:.1} MB of {:.1} MB copied in {:.1} s: {:.1} MB of data, {:.1} MB of zeros",
        megabytes(moved),
        megabytes(state.size_bytes),
        elapsed.as_secs_f64(),
        megabytes(counts.data_bytes),
        megabytes(counts.zero_bytes),
    );
    if resumed_at > 0 {
        text += &format!("; continued at {:.1} MB", megabytes(resumed_at));
    }
    text += match (is_complete, args.verify, &args.state) {
        (true, true, _) => "; flushed, and verified",
        (true, false, _) => "; flushed",
        (false, _, Some(_)) => "; interrupted: the same command continues there",
        (false, _, None) => "; interrupted: with --state it could be continued",
    };
    text + "\n"
}

/// The progress: a bar on a terminal, or lines of JSON.
struct CopyProgress {
    bar: Option<ProgressBar>,
    is_json: bool,
    total_bytes: u64,
    looked: Instant,
    has_stopped: bool,
}

impl CopyProgress {
    fn new(how: How, total_bytes: u64) -> CopyProgress {
        let bar = (how == How::Auto && std::io::stderr().is_terminal()).then(|| {
            let target = ProgressDrawTarget::stderr_with_hz(5);
            let bar = ProgressBar::with_draw_target(Some(total_bytes), target);
            let template = "{bar:24} {msg} {bytes}/{total_bytes} {bytes_per_sec}, {eta} left";
            let style = ProgressStyle::with_template(template);
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        let is_json = how == How::Json;
        CopyProgress { bar, is_json, total_bytes, looked: Instant::now(), has_stopped: false }
    }

    /// Shows it now and then. Returns false when the end was asked for.
    fn goes_on(&mut self, pass: &'static str, done_bytes: u64, stop: &mut Stop) -> bool {
        if self.looked.elapsed() < LOOK_EVERY {
            return !self.has_stopped;
        }
        self.looked = Instant::now();
        self.has_stopped |= stop.wait(Duration::ZERO);
        if let Some(bar) = &self.bar {
            bar.set_message(pass);
            bar.set_position(done_bytes);
        }
        if self.is_json {
            let line = json!({
                "pass": pass, "done_bytes": done_bytes, "total_bytes": self.total_bytes,
            });
            // A closed stderr is no reason to stop.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
        !self.has_stopped
    }

    fn end(&self) {
        self.bar.iter().for_each(ProgressBar::finish_and_clear);
    }
}
