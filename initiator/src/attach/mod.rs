//! `nvmf attach`: a namespace as a block device for programs that speak NBD, over a Unix socket.
//! Neither the kernel nor a privilege is needed at either end.
//!
//! One thread drives all paths and all clients. Data of clients go from their socket to the
//! buffers that the target reads, and back, with at most one copy (none for long ones).

mod connection;
mod connection_table;
mod fabrics;
mod notice;
mod operation;
mod path_list;
mod server;

use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::stat::{Mode, umask};
use rdma::Pool;
use tracing::info;

use crate::Error;
use crate::interrupt::Stop;
use crate::multipath::{Multipath, MultipathOptions, PathOptions};
use crate::options::{OptionDefaults, TargetArgs};
use crate::session::Options;
use crate::size::size;

use fabrics::FabricSet;
use path_list::PathAddress;
use server::{ExportOptions, Server};

/// The longest piece of a request: also the largest buffer.
const PIECE_BYTES: u32 = 1 << 20;
/// Requests to the namespace at once: more than the pool has buffers for long ones.
const REQUESTS: u32 = 4096;

/// Options of `nvmf attach`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which target.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Namespace
    #[arg(long, value_name = "NSID", default_value_t = 1)]
    pub namespace_id: u32,
    /// Serve it to NBD clients at this Unix socket, which only this user may use
    #[arg(long, value_name = "SOCKET")]
    pub nbd: PathBuf,
    /// Further addresses of the target: ADDRESS, ADDRESS:PORT or ADDRESS:PORT@SOURCE (to connect from)
    #[arg(long, value_name = "PATH", value_delimiter = ',', value_parser = path_list::path)]
    pub paths: Vec<PathAddress>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Time between attempts to connect a path again, in seconds
    #[arg(short = 'c', long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub reconnect_delay: u32,
    /// Double that time after each failure, up to this [default: do not]
    #[arg(long, value_name = "SECONDS", default_value_t = 0, hide_default_value = true)]
    pub reconnect_delay_max: u32,
    /// Time until a path is given up, in seconds; -1: never
    #[arg(short = 'l', long, value_name = "SECONDS", default_value_t = 600,
        allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..))]
    pub ctrl_loss_tmo: i32,
    /// Time until requests fail rather than wait for a path, in seconds [default: as long as a path
    /// is not given up]
    #[arg(long, alias = "fast_io_fail_tmo", value_name = "SECONDS")]
    pub fast_io_fail_tmo: Option<u32>,
    /// Repeat writes that were under way on a lost path at once, as Linux does, rather than when
    /// the target must have ended the old association
    #[arg(long)]
    pub replay_at_once: bool,
    /// Have every write reach the medium before it is acknowledged
    #[arg(long)]
    pub write_through: bool,
    /// Memory for data
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = size)]
    pub memory: u64,
}

impl Args {
    fn machine(&self) -> MultipathOptions {
        let seconds = |s: u32| Duration::from_secs(s.into());
        let usual = MultipathOptions::new(self.namespace_id);
        MultipathOptions {
            reconnect_delay: seconds(self.reconnect_delay),
            reconnect_delay_max: seconds(self.reconnect_delay_max),
            ctrl_loss_tmo: u32::try_from(self.ctrl_loss_tmo).ok().map(seconds),
            fast_io_fail_tmo: self.fast_io_fail_tmo.map(seconds),
            replay_margin: usual.replay_margin.filter(|_| !self.replay_at_once),
            write_through: self.write_through,
            requests: REQUESTS,
            ..usual
        }
    }
}

/// Connects, serves until a signal, and disconnects.
///
/// # Errors
/// The reason of the failure.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let (options, setup) = args.target.resolve(OptionDefaults::default())?;
    // A write of the largest length has to fit, with room for others.
    let data_bytes = args.memory.max(2 * u64::from(crate::nbd::MOST_BYTES));
    let stop = Stop::new()?;
    let first = PathAddress { to: options.to, source: setup.source };
    let further = args.paths.iter();
    let further = further.map(|path| PathAddress { source: path.source.or(setup.source), ..*path });
    let paths: Vec<PathAddress> = std::iter::once(first).chain(further).collect();
    let name = options.subnqn.to_string();

    let mut plan = options.plan(data_bytes, PIECE_BYTES);
    let count = u32::try_from(paths.len()).unwrap_or(u32::MAX);
    plan.cells = plan.cells.saturating_mul(count);
    plan.receives = plan.receives.saturating_mul(count);
    let pool =
        Pool::new(plan).map_err(|e| Error::Local(format!("no memory for the buffers: {e}")))?;
    let (fabrics, numbers) = FabricSet::new(setup.provider, &paths, pool.region())
        .map_err(|error| Error::Local(error.to_string()))?;
    let provider = fabrics.provider();
    let session = |to| Options { to, ..options.clone() };
    let all = paths.iter().zip(numbers);
    let all = all.map(|(path, fabric)| PathOptions { session: session(path.to), fabric }).collect();
    let machine = Multipath::new(args.machine(), all);

    let export = ExportOptions {
        name: name.clone(),
        is_read_only: args.read_only,
        piece_bytes: PIECE_BYTES,
    };
    let mut server = Server::new(machine, pool, fabrics, stop, export);
    if !server.connect()? {
        return Ok(ExitCode::SUCCESS);
    }
    let listener = listen(&args.nbd)?;
    info!("{name} is served at nbd+unix:///?socket={} ({provider})", args.nbd.display());
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let outcome = server.serve(listener);
    // Nobody can use it any more; a failure to remove it does no harm.
    let _ = std::fs::remove_file(&args.nbd);
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Listens at a Unix socket that only this user may connect to. One that nobody listens at is replaced.
fn listen(path: &Path) -> Result<UnixListener, Error> {
    let failed = |error: std::io::Error| {
        Error::Local(format!("cannot listen at {}: {error}", path.display()))
    };
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_abandoned(path) => {
            std::fs::remove_file(path).and_then(|()| UnixListener::bind(path))
        }
        bound => bound,
    };
    umask(before);
    let listener = bound.map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

fn is_abandoned(path: &Path) -> bool {
    let refused = |error: std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
    UnixStream::connect(path).err().is_some_and(refused)
}
