//! `nvmf attach`: a namespace as a block device for programs that speak NBD, and for virtual
//! machines (vhost-user-blk), over Unix sockets. Neither the kernel nor a privilege is needed at
//! either end. For root, as a block device of the kernel (ublk).
//!
//! One thread drives all paths and all clients. Data of clients go from their socket to the
//! buffers that the target reads, and back, with at most one copy (none for long ones).

mod connection;
mod connection_table;
mod counters;
mod management;
mod metrics_file;
mod operation;
mod server;
mod snapshot;
mod status;
mod ublk;
mod vhost_user;

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::stat::{Mode, umask};
use tracing::{info, warn};

use crate::bench::report::print;
use crate::interrupt::Stop;
use crate::multipath::MultipathOptions;
use crate::options::{NamespaceArgs, OptionDefaults, PathArgs};
use crate::size::size;
use crate::{Error, MultipathHost, MultipathSetup};

use metrics_file::MetricsFile;
use server::{ExportOptions, Listeners, Server};
use snapshot::Snapshot;
use ublk::Ublk;

/// The longest piece of a request: also the largest buffer.
const PIECE_BYTES: u32 = 1 << 20;
/// Requests to the namespace at once: more than the pool has buffers for long ones.
const REQUESTS: u32 = 4096;
/// For what a start or an end does after it has waited.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(10);

/// Options of `nvmf attach`: with `--status`, none of the others is required.
#[derive(Clone, Debug)]
pub enum Args {
    /// Show a state.
    Status(StatusArgs),
    /// Remove a device.
    Detach(DetachArgs),
    /// Serve a namespace.
    Serve(Box<ServeArgs>),
}

impl clap::FromArgMatches for Args {
    fn from_arg_matches(matches: &clap::ArgMatches) -> Result<Args, clap::Error> {
        if matches.contains_id("status") {
            return StatusArgs::from_arg_matches(matches).map(Args::Status);
        }
        match matches.contains_id("detach") {
            true => DetachArgs::from_arg_matches(matches).map(Args::Detach),
            false => ServeArgs::from_arg_matches(matches).map(Box::new).map(Args::Serve),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &clap::ArgMatches) -> Result<(), clap::Error> {
        *self = Args::from_arg_matches(matches)?;
        Ok(())
    }
}

impl clap::Args for Args {
    fn augment_args(command: clap::Command) -> clap::Command {
        let command = DetachArgs::augment_args(ServeArgs::augment_args(command));
        StatusArgs::augment_args(command)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        let command = ServeArgs::augment_args_for_update(command);
        StatusArgs::augment_args_for_update(DetachArgs::augment_args_for_update(command))
    }
}

/// Options of showing a state.
#[derive(clap::Args, Clone, Debug)]
pub struct StatusArgs {
    /// Show the state of what another nvmf attach serves at this socket, and of its paths
    #[arg(long, value_name = "SOCKET", required = false,
        conflicts_with_all = ["traddr", "nbd", "vhost_user", "ublk"])]
    pub status: PathBuf,
    /// How to show it
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT", default_value_t = Format::Normal,
        conflicts_with_all = ["traddr", "nbd", "vhost_user", "ublk"])]
    pub output_format: Format,
}

/// Options of removing a device.
#[derive(clap::Args, Clone, Debug)]
pub struct DetachArgs {
    /// Write what is cached and remove the device /dev/ublkbN that another nvmf attach serves
    #[arg(long, value_name = "DEVICE", required = false,
        conflicts_with_all = ["traddr", "nbd", "vhost_user", "ublk", "status"])]
    pub detach: PathBuf,
    /// Remove it even if it is mounted, or if its nvmf attach has ended: what is not written is lost
    #[arg(long, requires = "detach", conflicts_with = "traddr")]
    pub force: bool,
}

/// Format of the state.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Text for people
    Normal,
    /// JSON for programs
    Json,
    /// Metrics for Prometheus
    Prometheus,
}

/// Options of serving a namespace.
#[derive(clap::Args, Clone, Debug)]
pub struct ServeArgs {
    /// Which namespace.
    #[command(flatten)]
    pub namespace: NamespaceArgs,
    /// Its paths.
    #[command(flatten)]
    pub paths: PathArgs,
    /// Serve it to NBD clients at this Unix socket, which only this user may use
    #[arg(long, value_name = "SOCKET", required_unless_present_any = ["vhost_user", "ublk", "status", "detach"])]
    pub nbd: Option<PathBuf>,
    /// Serve it to a virtual machine at this Unix socket: as a vhost-user-blk device of QEMU or
    /// cloud-hypervisor
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Option<PathBuf>,
    /// Serve it to the kernel as the block device /dev/ublkbN (ublk; needs root): one without a number,
    /// or the one of the same namespace that an earlier nvmf attach has left
    #[arg(long, value_name = "DEVICE", num_args = 0..=1, default_missing_value = "auto")]
    pub ublk: Option<String>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Serve a snapshot of the namespace, read-only, which is taken now and removed at the end: by the
    /// management interface of a daemon on this machine, for namespaces in files on XFS or btrfs
    #[arg(long)]
    pub snapshot: bool,
    /// Use this socket of the management interface for the snapshot
    #[arg(
        long,
        value_name = "SOCKET",
        env = "NVMFD_SOCKET",
        default_value = "/run/nvmfd/nvmfd.sock"
    )]
    pub management: PathBuf,
    /// Have every write reach the medium before it is acknowledged
    #[arg(long)]
    pub write_through: bool,
    /// Memory for data, at least 64m
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = size)]
    pub memory: u64,
    /// Write metrics to this file every 5 seconds: FILE.prom, for node_exporter
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
}

impl ServeArgs {
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

/// Connects, serves until a signal, and disconnects; or shows the state of one that does.
///
/// # Errors
/// The reason of the failure.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    match args {
        Args::Serve(args) => serve(args),
        Args::Detach(args) => ublk::detach(&args.detach, args.force).map(|()| ExitCode::SUCCESS),
        Args::Status(args) => {
            let status = status::ask(&args.status)?;
            print(match args.output_format {
                Format::Normal => status.text(),
                Format::Json => status.json(),
                Format::Prometheus => status.prometheus(),
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn serve(args: &ServeArgs) -> Result<ExitCode, Error> {
    let mut setup = args.setup()?;
    // A signal from now on ends it in order.
    let stop = Stop::new()?;
    if !args.snapshot {
        return serve_namespace(args, setup, stop);
    }
    let (subsystem, host) = (setup.session.subnqn.to_string(), setup.session.hostnqn.to_string());
    let snapshot = Snapshot::take(&args.management, &subsystem, setup.multipath.nsid, &host)?;
    setup.multipath.nsid = snapshot.nsid();
    let outcome = serve_namespace(args, setup, stop);
    let removed = snapshot.remove();
    match (outcome, removed) {
        (Err(failed), Err(left)) => Err(Error::Local(format!("{failed}; {left}"))),
        (outcome, removed) => removed.and(outcome),
    }
}

fn serve_namespace(
    args: &ServeArgs,
    setup: MultipathSetup,
    mut stop: Stop,
) -> Result<ExitCode, Error> {
    let name = setup.session.subnqn.to_string();
    let mut host = MultipathHost::new(setup)?;
    if !host.connect(|| !stop.wait(Duration::ZERO))? {
        return Ok(ExitCode::SUCCESS);
    }
    let most_bytes = host.multipath().namespace().map_or(PIECE_BYTES, |n| n.max_transfer_bytes);
    let mut export = ExportOptions {
        name: name.clone(),
        socket: PathBuf::new(),
        is_read_only: args.read_only || args.snapshot,
        is_temporary: args.snapshot,
        piece_bytes: PIECE_BYTES.min(most_bytes),
    };
    let ControlFlow::Continue(device) = device(args, &export, &mut host, &mut stop)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let path = device.as_ref().map(|device| PathBuf::from(device.path()));
    let Some(socket) = args.nbd.as_ref().or(args.vhost_user.as_ref()).or(path.as_ref()) else {
        return Err(Error::Usage("none of --nbd, --vhost-user and --ublk is given".into()));
    };
    let state = status::socket(socket);
    export.socket.clone_from(socket);
    let clients = args.nbd.as_deref().map(listen).transpose()?;
    let vhost_user = args.vhost_user.as_deref().map(listen).transpose()?;
    let left = [&clients, &vhost_user].into_iter().flatten().any(|(_, is_left)| *is_left);
    if left && !export.is_read_only && !outlast_killed(&mut host, &mut stop) {
        // The sockets stay: the next one has to wait as well.
        return Ok(ExitCode::SUCCESS);
    }
    let (clients, vhost_user) = (clients.map(|it| it.0), vhost_user.map(|it| it.0));
    let listeners = Listeners { clients, vhost_user, ublk: device, status: listen(&state)?.0 };
    let provider = host.provider();
    if let Some(socket) = &args.nbd {
        info!("{name} is served at nbd+unix:///?socket={} ({provider})", socket.display());
    }
    if let Some(socket) = &args.vhost_user {
        info!("{name} is served as vhost-user-blk at {} ({provider})", socket.display());
    }
    let metrics = args.metrics.clone();
    let metrics = metrics.map(|path| MetricsFile::new(path, Instant::now())).transpose()?;
    let mut server = Server::new(host, stop, export, metrics);
    let outcome = server.serve(listeners);
    let is_pending = server.leaves_changes();
    for socket in args.nbd.iter().chain(&args.vhost_user) {
        if is_pending {
            warn!(
                "the target may still have writes that are not done: the next nvmf attach at {} \
                 waits for them, as after a kill",
                socket.display()
            );
            continue;
        }
        // Nobody can use it any more; a failure to remove it does no harm.
        let _ = std::fs::remove_file(socket);
    }
    let _ = std::fs::remove_file(&state);
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Returns the device of the kernel, if one is wanted; a break: the end is asked for.
fn device(
    args: &ServeArgs,
    export: &ExportOptions,
    host: &mut MultipathHost,
    stop: &mut Stop,
) -> Result<ControlFlow<(), Option<Ublk>>, Error> {
    let number = match args.ublk.as_deref() {
        None => return Ok(ControlFlow::Continue(None)),
        Some("auto") => None,
        Some(path) => Some(ublk::number(Path::new(path))?),
    };
    let properties = server::current_properties(host, export, None);
    Ok(match Ublk::new(number, &properties, host, stop)? {
        Some(device) => ControlFlow::Continue(Some(device)),
        None => ControlFlow::Break(()),
    })
}

/// Waits until the target has ended the associations of a process that was killed: it may still carry
/// out writes of that, which must not come after what clients write now. Clients wait meanwhile. Returns
/// whether to go on.
fn outlast_killed(host: &mut MultipathHost, stop: &mut Stop) -> bool {
    let Some(wait) = host.multipath().replay_wait() else { return true };
    info!(
        "an nvmf attach that was killed has left the socket: clients wait for {} s, so long may the \
         target have its writes",
        wait.as_secs()
    );
    outlast(wait, host, stop)
}

/// Lets that time pass, and has the service manager wait as much longer for the start, whatever the limit
/// of the unit is. Returns whether to go on.
fn outlast(wait: Duration, host: &mut MultipathHost, stop: &mut Stop) -> bool {
    extend_timeout(wait);
    host.pass_time(Instant::now() + wait, || !stop.wait(Duration::ZERO))
}

/// Has the service manager wait as long for the start or the end.
fn extend_timeout(wait: Duration) {
    let extended = u32::try_from((wait + TIMEOUT_MARGIN).as_micros()).unwrap_or(u32::MAX);
    let _ = sd_notify::notify(&[sd_notify::NotifyState::ExtendTimeoutUsec(extended)]);
}

/// Listens at a Unix socket that only this user may connect to. One that nobody listens at is replaced, and
/// nothing else. Returns also whether there was one: its process has not ended in order.
fn listen(path: &Path) -> Result<(UnixListener, bool), Error> {
    let failed = |error: std::io::Error| {
        Error::Local(format!("cannot listen at {}: {error}", path.display()))
    };
    if std::fs::metadata(path).is_ok_and(|there| !there.file_type().is_socket()) {
        return Err(failed(std::io::Error::other("it is no socket; remove it, or name another")));
    }
    let before = umask(Mode::from_bits_truncate(0o177));
    let mut bound = UnixListener::bind(path);
    let is_in_use = bound.as_ref().is_err_and(|error| error.kind() == ErrorKind::AddrInUse);
    let is_left = is_in_use && is_abandoned(path);
    if is_left {
        bound = std::fs::remove_file(path).and_then(|()| UnixListener::bind(path));
    }
    umask(before);
    let listener = bound.map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((listener, is_left))
}

fn is_abandoned(path: &Path) -> bool {
    let refused = |error: std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
    UnixStream::connect(path).err().is_some_and(refused)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let command = Args::augment_args(clap::Command::new("attach"));
        let matches = command.try_get_matches_from(line.split_whitespace())?;
        Args::from_arg_matches(&matches)
    }

    /// A connection to a file is refused (ECONNREFUSED) as one to a socket without listener is.
    #[test]
    fn a_file_in_the_place_of_a_socket_is_not_replaced() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk1.img");
        std::fs::write(&path, "data").expect("a file");
        let error = listen(&path).expect_err("a file");
        assert!(error.to_string().contains("disk1.img: it is no socket"), "{error}");
        assert_eq!(std::fs::read(&path).expect("the file"), b"data");
        std::fs::remove_file(&path).expect("removed");
        drop(listen(&path).expect("free"));
        assert!(listen(&path).expect("abandoned").1);
    }

    #[test]
    fn options_of_status_serve_and_detach_do_not_mix() {
        let status = parse("attach --status /s -o json");
        assert!(matches!(status, Ok(Args::Status(args)) if args.output_format == Format::Json));
        let serve = parse("attach -a 192.0.2.1 -n nqn.2026-11.x:d --nbd /s --read-only");
        assert!(matches!(serve, Ok(Args::Serve(args)) if args.read_only));
        let serve = parse("attach -a 192.0.2.1 -n nqn.2026-11.x:d --vhost-user /s");
        assert!(matches!(serve, Ok(Args::Serve(args)) if args.nbd.is_none()));
        let serve = parse("attach -a 192.0.2.1 -n nqn.2026-11.x:d --ublk");
        assert!(matches!(serve, Ok(Args::Serve(args)) if args.ublk.as_deref() == Some("auto")));
        let serve = parse("attach -a 192.0.2.1 -n nqn.2026-11.x:d --nbd /s --snapshot");
        assert!(matches!(serve, Ok(Args::Serve(args)) if args.snapshot && !args.read_only));
        let detach = parse("attach --detach /dev/ublkb0 --force");
        assert!(matches!(detach, Ok(Args::Detach(args)) if args.force));
        for wrong in [
            "attach",
            "attach --nbd /s",
            "attach -a 192.0.2.1",
            "attach --status /s --nbd /s",
            "attach --status /s --vhost-user /s",
            "attach --status /s --ublk",
            "attach --detach /dev/ublkb0 --ublk",
            "attach --detach /dev/ublkb0 -a 192.0.2.1",
            "attach -a 192.0.2.1 --ublk --force",
            "attach --status /s -a 192.0.2.1",
            "attach -a 192.0.2.1 --nbd /s -o json",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
