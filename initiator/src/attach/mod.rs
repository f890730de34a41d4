//! `nvmf attach`: a namespace as a block device for programs that speak NBD, over a Unix socket.
//! Neither the kernel nor a privilege is needed at either end.
//!
//! One thread drives all paths and all clients. Data of clients go from their socket to the
//! buffers that the target reads, and back, with at most one copy (none for long ones).

mod connection;
mod connection_table;
mod operation;
mod server;

use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::stat::{Mode, umask};
use tracing::info;

use crate::interrupt::Stop;
use crate::multipath::MultipathOptions;
use crate::options::{NamespaceArgs, OptionDefaults, PathArgs};
use crate::size::size;
use crate::{Error, MultipathHost, MultipathSetup};

use server::{ExportOptions, Server};

/// The longest piece of a request: also the largest buffer.
const PIECE_BYTES: u32 = 1 << 20;
/// Requests to the namespace at once: more than the pool has buffers for long ones.
const REQUESTS: u32 = 4096;

/// Options of `nvmf attach`.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which namespace.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
    /// Its paths.
    #[command(flatten)]
    pub paths: PathArgs,
    /// Serve it to NBD clients at this Unix socket, which only this user may use
    #[arg(long, value_name = "SOCKET")]
    pub nbd: PathBuf,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Have every write reach the medium before it is acknowledged
    #[arg(long)]
    pub write_through: bool,
    /// Memory for data
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = size)]
    pub memory: u64,
}

impl Args {
    fn setup(&self) -> Result<MultipathSetup, Error> {
        // A write of the largest length has to fit, with room for others.
        let data_bytes = self.memory.max(2 * u64::from(crate::nbd::MOST_BYTES));
        let usual = OptionDefaults { data_bytes, ..OptionDefaults::default() };
        let setup = self.namespace.resolve(&self.paths, usual)?;
        let multipath = MultipathOptions {
            write_through: self.write_through,
            requests: REQUESTS,
            ..setup.multipath
        };
        Ok(MultipathSetup { multipath, largest_bytes: PIECE_BYTES, ..setup })
    }
}

/// Connects, serves until a signal, and disconnects.
///
/// # Errors
/// The reason of the failure.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let setup = args.setup()?;
    let name = setup.session.subnqn.to_string();
    let mut stop = Stop::new()?;
    let mut host = MultipathHost::new(setup)?;
    if !host.connect(|| !stop.wait(Duration::ZERO))? {
        return Ok(ExitCode::SUCCESS);
    }
    let listener = listen(&args.nbd)?;
    info!("{name} is served at nbd+unix:///?socket={} ({})", args.nbd.display(), host.provider());
    let export = ExportOptions { name, is_read_only: args.read_only, piece_bytes: PIECE_BYTES };
    let mut server = Server::new(host, stop, export);
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
