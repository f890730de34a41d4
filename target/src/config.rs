//! The configuration: TOML text to types that are known to be good.
//!
//! [`Config::parse`] finds every mistake of a text in one reading, each with its line, its column
//! and what to write instead. What it returns needs no further checks, except those that only the
//! running system can answer (does the file exist, is the address ours).
//!
//! Serial numbers and UUIDs that the text leaves out are derived from names that do not change, so
//! a host finds the same disk after a restart and after a move to another machine.

mod authentication;
mod identity;
mod limit;
mod listener;
mod managed;
mod management;
mod missing;
mod observe;
mod offer;
mod section;
mod size;
mod text;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nvme::Nqn;
use nvme::log::AnaState;
use uuid::Uuid;

use crate::ana::{ANA_GROUPS, ANATT_S};
use crate::disk::Fault;
use crate::qos::Limit;

pub use authentication::{AuthenticationConfig, HostConfig};
pub use limit::LimitConfig;
pub use listener::ListenerConfig;
pub(crate) use listener::overlap;
pub use managed::ManagedConfig;
pub use management::{DEFAULT_SOCKET, ManagementConfig};
pub use missing::Missing;
pub use observe::ObserveConfig;
pub use offer::{DiscoveryConfig, DuplicateHosts, Offer, Referral};
pub use section::{ConfigErrors, Mistake};
pub use size::Size;

/// The largest namespace id that can be configured.
pub const MAX_NSID: u32 = 1024;

/// What the daemon is to serve, and with what means.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Which fabric provider moves the data.
    pub provider: Provider,
    /// The threads that do the work.
    pub reactor: ReactorConfig,
    /// The registered memory of each reactor.
    pub memory: MemoryConfig,
    /// What one host may ask for.
    pub limits: Limits,
    /// Where connections are accepted; at least one, no two overlap or have one id.
    pub listeners: Vec<ListenerConfig>,
    /// What is served; at least one, in the order of the text.
    pub subsystems: Vec<SubsystemConfig>,
    /// What becomes of addresses, devices and files that are not there.
    pub missing: Missing,
    /// What discovery tells besides.
    pub discovery: DiscoveryConfig,
    /// Limits that hosts and namespaces share.
    pub quotas: Vec<LimitConfig>,
    /// Where packets are written to, if they are.
    pub capture: Option<CaptureConfig>,
    /// Folder of what the daemon itself must remember, such as reservations. Without one, nothing
    /// of that outlasts it.
    pub state_directory: Option<PathBuf>,
    /// Who must prove who it is.
    pub authentication: AuthenticationConfig,
    /// Where it can be asked and changed.
    pub management: ManagementConfig,
    /// What is remembered of what the target does.
    pub observe: ObserveConfig,
}

/// Which fabric provider moves the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Provider {
    /// Verbs where an RDMA device owns the listeners' addresses, else soft.
    #[default]
    Auto,
    /// An RDMA device, through rdma-core.
    Verbs,
    /// RoCEv2 over UDP sockets.
    Soft,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Provider::Auto => "auto",
            Provider::Verbs => "verbs",
            Provider::Soft => "soft",
        })
    }
}

/// The threads that do the work.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReactorConfig {
    /// How many.
    pub threads: Threads,
    /// The CPUs to pin them to, in order; empty: not pinned. Otherwise at least one a thread.
    pub cpus: Vec<u32>,
    /// How long an idle reactor looks for work before it sleeps.
    pub spin: Spin,
}

impl ReactorConfig {
    /// The number of reactors on this machine. `"auto"` means one for every CPU that is listed or,
    /// without a list, that the process may use.
    #[must_use]
    pub fn count(&self) -> usize {
        match self.threads {
            Threads::Count(count) => usize::from(count),
            Threads::Auto if !self.cpus.is_empty() => self.cpus.len(),
            Threads::Auto => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

impl Default for ReactorConfig {
    fn default() -> Self {
        Self { threads: Threads::Count(1), cpus: Vec::new(), spin: Spin::Auto }
    }
}

/// How many reactors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// One a CPU.
    Auto,
    /// This many, at least one.
    Count(u16),
}

impl fmt::Display for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Threads::Auto => f.write_str("auto"),
            Threads::Count(count) => write!(f, "{count}"),
        }
    }
}

/// How long an idle reactor looks for work before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spin {
    /// The reactor finds out what pays.
    Auto,
    /// This many microseconds; 0: it sleeps at once.
    Micros(u32),
}

impl fmt::Display for Spin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spin::Auto => f.write_str("auto"),
            Spin::Micros(micros) => write!(f, "{micros}"),
        }
    }
}

/// The registered memory of each reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryConfig {
    /// Bytes for data on their way between hosts and disks.
    pub data_bytes: u64,
    /// Receive buffers. A queue holds as many as it is deep for as long as it lives.
    pub receives: u32,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self { data_bytes: 32 << 20, receives: 4096 }
    }
}

/// A file of all packets, which the provider `soft` writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureConfig {
    /// Absolute path of the file; replaced at the start.
    pub path: PathBuf,
    /// Also what hosts read and write, not only headers.
    pub payload: bool,
    /// The capture ends when the file is about this long, in bytes.
    pub limit_bytes: u64,
}

/// What one host may ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Entries of an I/O queue.
    pub queue_depth: u16,
    /// I/O queues of one controller.
    pub io_queues: u16,
    /// Data that a command capsule may carry, in bytes; a multiple of 4096, may be 0.
    pub in_capsule_bytes: u32,
    /// Data that one command may move, in bytes; 8192 times a power of two.
    pub mdts_bytes: u32,
    /// Controllers at once, of all subsystems together.
    pub controllers: u16,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queue_depth: 128,
            io_queues: 16,
            in_capsule_bytes: 4096,
            mdts_bytes: 1 << 20,
            controllers: 64,
        }
    }
}

/// One NVM subsystem.
#[derive(Clone, PartialEq, Debug)]
pub struct SubsystemConfig {
    /// Its name; no other subsystem has it, and it is not the discovery name.
    pub nqn: Nqn,
    /// Every host may connect, and `hosts` says nothing.
    pub allow_any_host: bool,
    /// The hosts that may connect.
    pub hosts: BTreeSet<Nqn>,
    /// Where and how it is offered.
    pub offer: Offer,
    /// Serial number: 1 to 20 printable ASCII characters.
    pub serial: String,
    /// Model number: 1 to 40 printable ASCII characters.
    pub model: String,
    /// Its namespaces, in the order of the text; no nsid twice. May be empty.
    pub namespaces: Vec<NamespaceConfig>,
    /// What hosts may do that make and delete namespaces; none: nothing.
    pub managed: Option<ManagedConfig>,
}

impl SubsystemConfig {
    /// May this host connect? (A host's name is a claim; only a host with a key
    /// proves it.)
    #[must_use]
    pub fn admits(&self, host: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(host)
    }
}

/// One namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceConfig {
    /// Its id, from 1 to [`MAX_NSID`].
    pub nsid: u32,
    /// Where its blocks are.
    pub kind: NamespaceKind,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size_bytes: u32,
    /// Its identity for hosts; the same after every restart.
    pub uuid: Uuid,
    /// NGUID, as the wire has it; without one in the text, the bytes of the UUID.
    pub nguid: [u8; 16],
    /// EUI-64, as the wire has it, if it has one.
    pub eui64: Option<[u8; 8]>,
    /// Hosts may not write.
    pub read_only: bool,
    /// Its ANA group: 1 to [`crate::ana::ANA_GROUPS`].
    pub ana_group: u32,
    /// Hosts may erase all of it (Format NVM).
    pub allow_format: bool,
    /// Hosts may make blocks unreadable (Write Uncorrectable).
    pub write_uncorrectable: bool,
    /// What all hosts together may do with it.
    pub limit: Limit,
    /// The name of a `[[limit]]` that it shares with others.
    pub shared_limit: Option<String>,
    /// What its store is told to do wrong; for tests.
    pub fault: Fault,
}

/// Where the blocks of a namespace are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NamespaceKind {
    /// In a file or on a block device.
    File {
        /// Absolute path, used by no other namespace.
        path: PathBuf,
        /// Size in bytes, whole blocks. Absent: the size that the file has.
        size: Option<u64>,
    },
    /// In memory, and gone with the daemon.
    Ram {
        /// Size in bytes, whole blocks.
        size: u64,
    },
    /// Nowhere: reads return zeros, writes are dropped. For measuring everything else.
    Null {
        /// Size in bytes, whole blocks.
        size: u64,
    },
}

impl Config {
    /// Reads a configuration from its text.
    ///
    /// # Errors
    /// Every mistake in the text.
    pub fn parse(text: &str) -> Result<Self, ConfigErrors> {
        text::read(text)
    }

    /// Reads a configuration from a file.
    ///
    /// # Errors
    /// The file cannot be read, or every mistake in its text.
    pub fn load(path: &Path) -> Result<Self, ConfigErrors> {
        let named = |mut errors: ConfigErrors| {
            errors.file = Some(path.to_owned());
            errors
        };
        match std::fs::read_to_string(path) {
            Ok(text) => {
                let config = Self::parse(&text).map_err(named)?;
                Ok(config.or_state_directory(std::env::var_os("STATE_DIRECTORY")))
            }
            Err(error) => {
                let mistake = Mistake {
                    place: None,
                    what: format!("the configuration cannot be read: {error}"),
                    remedy: "name a TOML file that this user may read".to_owned(),
                };
                Err(named(ConfigErrors { file: None, mistakes: vec![mistake] }))
            }
        }
    }

    /// With the folder that the service manager has made for us, where the text names none. It may
    /// name several, with colons between them; the first is meant.
    pub(crate) fn or_state_directory(mut self, given: Option<OsString>) -> Self {
        let first = |given: OsString| {
            let given = given.into_string().ok()?;
            given.split(':').next().map(PathBuf::from).filter(|path| path.is_absolute())
        };
        self.state_directory = self.state_directory.or_else(|| given.and_then(first));
        self
    }

    /// The addresses of the listeners, in the order of the text.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().map(|listener| listener.address).collect()
    }

    /// The plan of each reactor's pool.
    #[must_use]
    pub fn pool_plan(&self) -> rdma::PoolPlan {
        rdma::PoolPlan {
            // A queue has twice as many slots as receives: commands whose response is under way.
            cells: self.memory.receives.saturating_mul(2),
            receives: self.memory.receives,
            lead_bytes: 64,
            tail_bytes: self.limits.in_capsule_bytes,
            data_bytes: self.memory.data_bytes,
            largest_bytes: self.limits.mdts_bytes,
        }
    }

    /// What is allowed but probably not meant, one sentence each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(CaptureConfig { path, payload: true, .. }) = &self.capture {
            warnings.push(format!(
                "{} will hold what hosts read and write: see who may read it",
                path.display()
            ));
        }
        let AuthenticationConfig { required, discovery, hosts, .. } = &self.authentication;
        if (*required || *discovery) && hosts.is_empty() {
            warnings.push(
                "authentication is required and no host can: add [[host]] with a \
                 `dhchap_key_file`"
                    .to_owned(),
            );
        }
        for listener in &self.listeners {
            if (1..=ANA_GROUPS).any(|group| listener.ana.state(group) == AnaState::CHANGE) {
                warnings.push(format!(
                    "{} has groups in the state \"change\": hosts reset their controllers when that \
                     lasts, so name another state within {ANATT_S} s",
                    listener.address
                ));
            }
        }
        for subsystem in &self.subsystems {
            let nqn = &subsystem.nqn;
            for NamespaceConfig { nsid, fault, .. } in &subsystem.namespaces {
                if *fault != Fault::None {
                    warnings.push(format!(
                        "namespace {nsid} of {nqn} shows the fault \"{fault}\": that is for tests"
                    ));
                }
            }
            if !subsystem.allow_any_host && subsystem.hosts.is_empty() {
                warnings.push(format!(
                    "no host can connect to {nqn}: list `hosts`, or set `allow_any_host = true`"
                ));
            }
            if subsystem.allow_any_host && !subsystem.hosts.is_empty() {
                warnings.push(format!(
                    "every host can connect to {nqn}: with `allow_any_host = true` the list of \
                     hosts says nothing"
                ));
            }
            if let Some(managed) = &subsystem.managed
                && !managed.any_host
                && managed.hosts.is_empty()
            {
                warnings.push(format!(
                    "no host may manage the namespaces of {nqn}: list `hosts` in \
                     [subsystem.managed]"
                ));
            }
            if subsystem.namespaces.is_empty() && subsystem.managed.is_none() {
                warnings.push(format!("{nqn} has no namespace: hosts will find no disk there"));
            }
            for (nsid, hosts) in &subsystem.offer.masks {
                for host in hosts.iter().filter(|host| !subsystem.admits(host)) {
                    warnings.push(format!(
                        "namespace {nsid} of {nqn} is shown to {host}, which may not connect: add \
                         it to `hosts` of the subsystem"
                    ));
                }
            }
            for namespace in &subsystem.namespaces {
                if matches!(namespace.kind, NamespaceKind::Ram { .. }) {
                    warnings.push(format!(
                        "namespace {} of {nqn} is in memory: its data end with the daemon",
                        namespace.nsid
                    ));
                }
            }
        }
        warnings
    }

    /// The sections in which `next` differs and which only a restart can change.
    #[must_use]
    pub fn needs_restart(&self, next: &Config) -> Vec<&'static str> {
        let differs = [
            (self.provider != next.provider, "provider"),
            (self.reactor != next.reactor, "[reactor]"),
            (self.memory != next.memory, "[memory]"),
            (self.limits != next.limits, "[limits]"),
            (self.capture != next.capture, "[capture]"),
            (self.state_directory != next.state_directory, "state_directory"),
            (self.management != next.management, "[management]"),
        ];
        differs.into_iter().filter_map(|(differs, name)| differs.then_some(name)).collect()
    }

    /// Takes over from `running` what only a restart can change.
    pub fn keep_fixed(&mut self, running: &Config) {
        self.provider = running.provider;
        self.reactor = running.reactor.clone();
        self.memory = running.memory;
        self.limits = running.limits;
        self.capture = running.capture.clone();
        self.state_directory = running.state_directory.clone();
        self.management = running.management.clone();
    }
}

/// The whole configuration with every default filled in, for a person to read.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.pool_plan();
        let count = self.reactor.count();
        let total = plan.total_bytes();
        writeln!(f, "provider    {}", self.provider)?;
        write!(f, "reactors    {count} (threads = {}), ", self.reactor.threads)?;
        match self.reactor.spin {
            Spin::Auto => write!(f, "each spins as long as it pays")?,
            Spin::Micros(0) => write!(f, "each sleeps as soon as it is idle")?,
            Spin::Micros(micros) => write!(f, "each spins for {micros} us before it sleeps")?,
        }
        match self.reactor.cpus.as_slice() {
            [] => writeln!(f)?,
            cpus => writeln!(f, ", on CPUs {cpus:?}")?,
        }
        writeln!(
            f,
            "limits      queue_depth {}, io_queues {} a controller, in_capsule {}, mdts {}, \
             controllers {}",
            self.limits.queue_depth,
            self.limits.io_queues,
            Size(self.limits.in_capsule_bytes.into()),
            Size(self.limits.mdts_bytes.into()),
            self.limits.controllers
        )?;
        writeln!(
            f,
            "memory      {} x ({} cells x 64 + {} receives x {} + {} data) = {:.1} MiB",
            count,
            plan.cells,
            plan.receives,
            plan.receive_bytes(),
            Size(plan.data_bytes),
            mib(total.saturating_mul(count as u64))
        )?;
        match &self.state_directory {
            Some(path) => writeln!(f, "state       in {}", path.display())?,
            None => writeln!(f, "state       kept nowhere: no reservation outlasts the daemon")?,
        }
        writeln!(f, "missing     {}", self.missing)?;
        for listener in &self.listeners {
            writeln!(f, "listener    {listener}")?;
        }
        for subsystem in &self.subsystems {
            write!(f, "{subsystem}")?;
        }
        let Config { discovery, authentication, management, observe, .. } = self;
        write!(f, "{discovery}{authentication}{management}{observe}")?;
        if let Some(CaptureConfig { path, payload, limit_bytes }) = &self.capture {
            let what = if *payload { "all packets" } else { "all headers" };
            writeln!(
                f,
                "capture     {what} to {}, at most {}",
                path.display(),
                Size(*limit_bytes)
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for SubsystemConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "subsystem   {}", self.nqn)?;
        writeln!(f, "            serial {:?}, model {:?}", self.serial, self.model)?;
        if self.allow_any_host {
            writeln!(f, "            any host may connect")?;
        }
        for host in self.hosts.iter().filter(|_| !self.allow_any_host) {
            writeln!(f, "            host {host}")?;
        }
        write!(f, "{}", self.offer)?;
        if let Some(managed) = &self.managed {
            write!(f, "{managed}")?;
        }
        for namespace in &self.namespaces {
            writeln!(f, "  namespace {namespace}")?;
        }
        Ok(())
    }
}

impl fmt::Display for NamespaceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, blocks of {}, ", self.nsid, self.kind, self.block_size_bytes)?;
        if self.allow_format {
            f.write_str("hosts may format it, ")?;
        }
        if self.write_uncorrectable {
            f.write_str("hosts may make blocks unreadable, ")?;
        }
        if !self.limit.is_none() {
            write!(f, "{}, ", self.limit)?;
        }
        if let Some(name) = &self.shared_limit {
            write!(f, "under the limit {name:?}, ")?;
        }
        if self.fault != Fault::None {
            write!(f, "fault {}, ", self.fault)?;
        }
        if self.ana_group != 1 {
            write!(f, "group {}, ", self.ana_group)?;
        }
        write!(f, "{}, uuid {}", if self.read_only { "read only" } else { "writable" }, self.uuid)
    }
}

impl fmt::Display for NamespaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NamespaceKind::File { path, size: Some(size) } => {
                write!(f, "file {} of {}", path.display(), Size(*size))
            }
            NamespaceKind::File { path, size: None } => {
                write!(f, "file {} as large as it is", path.display())
            }
            NamespaceKind::Ram { size } => write!(f, "ram of {}", Size(*size)),
            NamespaceKind::Null { size } => write!(f, "null of {}", Size(*size)),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "printed with one decimal")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests;
