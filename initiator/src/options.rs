//! Options of `nvmf` that select the target and the connection, named as in nvme-cli. Their short
//! forms are those of `nvme connect`; so options that have other short forms in nvme-cli (`-n` for
//! the namespace, `-s` for the first block) have none here.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use clap::Args;
use nvme::Nqn;
use nvme::auth::Secret;

use crate::fabric::Provider;
use crate::host::{Host, MultipathSetup};
use crate::multipath::MultipathOptions;
use crate::path_address::{PathAddress, path};
use crate::{Error, HostOptions, Options, host_identity};

/// Heading of these options in the help text.
const TARGET: &str = "Target";

/// Options that select the target.
#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// Transport; rdma is the only one
    #[arg(help_heading = TARGET, short = 't', long, default_value = "rdma",
        value_parser = ["rdma"])]
    pub transport: String,
    /// Address of the target
    #[arg(help_heading = TARGET, short = 'a', long, value_name = "ADDRESS")]
    pub traddr: String,
    /// Port of the target
    #[arg(help_heading = TARGET, short = 's', long, value_name = "PORT",
        default_value_t = nvme::PORT)]
    pub trsvcid: u16,
    /// Name of the subsystem
    #[arg(help_heading = TARGET, short = 'n', long)]
    pub nqn: Option<String>,
    /// The host.
    #[command(flatten)]
    pub host: HostArgs,
}

/// Options of the host and its connections.
#[derive(Args, Clone, Debug)]
pub struct HostArgs {
    /// Source address [default: chosen by the route]
    #[arg(help_heading = TARGET, short = 'w', long, value_name = "ADDRESS")]
    pub host_traddr: Option<IpAddr>,
    /// NQN of this host [default: from /etc/nvme/hostnqn]
    #[arg(help_heading = TARGET, short = 'q', long, value_name = "NQN")]
    pub hostnqn: Option<String>,
    /// Identifier of this host [default: from /etc/nvme/hostid]
    #[arg(help_heading = TARGET, short = 'I', long, value_name = "UUID")]
    pub hostid: Option<String>,
    /// I/O queues [default: 1; to verify 2]
    #[arg(help_heading = TARGET, short = 'i', long, value_name = "COUNT",
        value_parser = clap::value_parser!(u16).range(1..=128))]
    pub nr_io_queues: Option<u16>,
    /// Entries of an I/O queue [default: 128; to verify and bench, what --iodepth needs]
    #[arg(help_heading = TARGET, short = 'Q', long, value_name = "ENTRIES",
        value_parser = clap::value_parser!(u16).range(2..=4096))]
    pub queue_size: Option<u16>,
    /// Keep alive timeout in seconds, 0 for none [default: 5; to discover 0]
    #[arg(help_heading = TARGET, short = 'k', long, value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(..=4_294_967))]
    pub keep_alive_tmo: Option<u32>,
    /// Secret of this host for authentication (DHHC-1:…), or @FILE that holds it
    #[arg(help_heading = TARGET, long, value_name = "SECRET")]
    pub dhchap_secret: Option<String>,
    /// Secret by which the target must prove itself, or @FILE that holds it
    #[arg(help_heading = TARGET, long, value_name = "SECRET",
        requires = "dhchap_secret")]
    pub dhchap_ctrl_secret: Option<String>,
    /// Fabric to use
    #[arg(help_heading = TARGET, long, value_enum, default_value_t = Provider::Auto)]
    pub provider: Provider,
    /// How long connecting and each command may take, in seconds
    #[arg(help_heading = TARGET, long, value_name = "SECONDS", default_value_t = 30,
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
}

/// Options that select a namespace.
#[derive(Args, Clone, Debug)]
pub struct NamespaceArgs {
    /// Which target.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Namespace
    #[arg(long, value_name = "NSID", default_value_t = 1)]
    pub namespace_id: u32,
}

/// Heading of options of paths in the help text.
const PATHS: &str = "Paths";

/// Options of several paths: named as in `nvme connect`.
#[derive(Args, Clone, Debug)]
pub struct PathArgs {
    /// Further addresses of the target: ADDRESS, ADDRESS:PORT or ADDRESS:PORT@SOURCE (to connect from)
    #[arg(help_heading = PATHS, long, value_name = "PATH", value_delimiter = ',', value_parser = path)]
    pub paths: Vec<PathAddress>,
    /// What happens when they are lost.
    #[command(flatten)]
    pub reconnect: ReconnectArgs,
}

/// Options of connecting paths again.
#[derive(Args, Clone, Debug)]
pub struct ReconnectArgs {
    /// Time between attempts to connect a path again, in seconds
    #[arg(help_heading = PATHS, short = 'c', long, value_name = "SECONDS", default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub reconnect_delay: u32,
    /// Double that time after each failure, up to this [default: do not]
    #[arg(help_heading = PATHS, long, value_name = "SECONDS", default_value_t = 0,
        hide_default_value = true)]
    pub reconnect_delay_max: u32,
    /// Time until a path is given up, in seconds; -1: never
    #[arg(help_heading = PATHS, short = 'l', long, value_name = "SECONDS", default_value_t = 600,
        allow_negative_numbers = true, value_parser = clap::value_parser!(i32).range(-1..))]
    pub ctrl_loss_tmo: i32,
    /// Time until requests fail rather than wait for a path, in seconds [default: as long as a path
    /// is not given up]
    #[arg(help_heading = PATHS, long, alias = "fast_io_fail_tmo", value_name = "SECONDS")]
    pub fast_io_fail_tmo: Option<u32>,
    /// Repeat writes that were under way on a lost path at once, as Linux does, rather than when
    /// the target must have ended the old association
    #[arg(help_heading = PATHS, long)]
    pub replay_at_once: bool,
}

impl ReconnectArgs {
    /// Returns the options of all paths.
    pub fn options(&self, nsid: u32) -> MultipathOptions {
        let seconds = |s: u32| Duration::from_secs(s.into());
        let usual = MultipathOptions::new(nsid);
        MultipathOptions {
            reconnect_delay: seconds(self.reconnect_delay),
            reconnect_delay_max: seconds(self.reconnect_delay_max),
            ctrl_loss_tmo: u32::try_from(self.ctrl_loss_tmo).ok().map(seconds),
            fast_io_fail_tmo: self.fast_io_fail_tmo.map(seconds),
            replay_margin: usual.replay_margin.filter(|_| !self.replay_at_once),
            ..usual
        }
    }
}

impl NamespaceArgs {
    /// Returns the namespace over the path of the target and those of `paths`; options that are not
    /// given default to `usual`.
    ///
    /// # Errors
    /// An invalid option.
    pub fn resolve(
        &self,
        paths: &PathArgs,
        usual: OptionDefaults,
    ) -> Result<MultipathSetup, Error> {
        let (session, host) = self.target.resolve(usual)?;
        let first = PathAddress { to: session.to, source: host.source };
        let further = paths.paths.iter();
        let further = further.map(|p| PathAddress { source: p.source.or(host.source), ..*p });
        Ok(MultipathSetup {
            session,
            paths: std::iter::once(first).chain(further).collect(),
            provider: host.provider,
            multipath: paths.reconnect.options(self.namespace_id),
            data_bytes: host.data_bytes,
            largest_bytes: host.largest_bytes,
        })
    }
}

/// Defaults of the command line.
#[derive(Clone, Copy, Debug)]
pub struct OptionDefaults {
    /// I/O queues.
    pub io_queues: u16,
    /// Entries of an I/O queue.
    pub queue_entries: u16,
    /// Bytes for data in the pool.
    pub data_bytes: u64,
}

impl Default for OptionDefaults {
    /// One queue of 128 entries, 32 MiB.
    fn default() -> OptionDefaults {
        OptionDefaults { io_queues: 1, queue_entries: 128, data_bytes: 32 << 20 }
    }
}

impl TargetArgs {
    /// Returns the arguments of [`Host::connect`]; options that are not given default to `usual`.
    ///
    /// # Errors
    /// An invalid option, or the name of the subsystem is missing.
    pub fn resolve(&self, usual: OptionDefaults) -> Result<(Options, HostOptions), Error> {
        let Some(nqn) = &self.nqn else {
            return Err(Error::Usage(
                "which subsystem? Name it with --nqn; `nvmf discover` lists them".into(),
            ));
        };
        let subnqn = Nqn::new(nqn).map_err(|e| Error::Usage(format!("--nqn {nqn:?}: {e}")))?;
        self.resolve_for(subnqn, usual)
    }

    /// As [`TargetArgs::resolve`], for a subsystem that the command line did not name.
    ///
    /// # Errors
    /// An invalid option.
    pub fn resolve_for(
        &self,
        subnqn: Nqn,
        usual: OptionDefaults,
    ) -> Result<(Options, HostOptions), Error> {
        self.host.resolve(self.address()?, subnqn, usual)
    }

    /// Connects.
    ///
    /// # Errors
    /// The reason of the failure.
    pub fn connect(&self, usual: OptionDefaults) -> Result<Host, Error> {
        let (options, setup) = self.resolve(usual)?;
        Host::connect(options, setup)
    }

    /// Returns the address of the target.
    ///
    /// # Errors
    /// The address is neither an address nor a name that the system can resolve.
    pub fn address(&self) -> Result<SocketAddr, Error> {
        let failed = |why: String| Error::Usage(format!("--traddr {}: {why}", self.traddr));
        let found = (self.traddr.as_str(), self.trsvcid).to_socket_addrs();
        let mut all = found.map_err(|e| failed(e.to_string()))?;
        let to = all.next().ok_or_else(|| failed("no address has that name".into()))?;
        if to.ip().is_unspecified() || to.ip().is_multicast() || to.port() == 0 {
            return Err(failed(format!("{to} is no address to connect to")));
        }
        Ok(to)
    }
}

impl HostArgs {
    /// Returns the arguments of [`Host::connect`] for a target; options that are not given default
    /// to `usual`.
    ///
    /// # Errors
    /// An invalid option.
    pub fn resolve(
        &self,
        to: SocketAddr,
        subnqn: Nqn,
        usual: OptionDefaults,
    ) -> Result<(Options, HostOptions), Error> {
        let (hostnqn, hostid) =
            host_identity::host(self.hostnqn.as_deref(), self.hostid.as_deref())?;
        let kato_s = if subnqn.is_discovery() { 0 } else { 5 };
        let limit = Duration::from_secs(self.timeout.into());
        let options = Options {
            io_queues: self.nr_io_queues.unwrap_or(usual.io_queues),
            queue_entries: self.queue_size.unwrap_or(usual.queue_entries),
            kato_ms: self.keep_alive_tmo.unwrap_or(kato_s).saturating_mul(1000),
            connect_timeout: limit,
            command_timeout: limit,
            secret: secret("--dhchap-secret", self.dhchap_secret.as_deref())?,
            controller_secret: secret("--dhchap-ctrl-secret", self.dhchap_ctrl_secret.as_deref())?,
            ..Options::new(to, subnqn, hostnqn, hostid)
        };
        let setup = HostOptions {
            provider: self.provider,
            source: self.host_traddr,
            data_bytes: usual.data_bytes,
            ..HostOptions::default()
        };
        Ok((options, setup))
    }
}

/// Parses a secret from the command line, which other users can see, or from a file.
fn secret(option: &str, text: Option<&str>) -> Result<Option<Secret>, Error> {
    let Some(text) = text else { return Ok(None) };
    let read = match text.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| Error::Usage(format!("{option} {text}: {error}")))?,
        None => text.to_owned(),
    };
    // The error does not repeat the text: it might be almost correct.
    let secret = Secret::parse(read.trim());
    secret.map(Some).map_err(|error| Error::Usage(format!("{option} is no secret: {error}")))
}
