//! The configuration: TOML text to validated types.
//!
//! [`Config::parse`] finds every error of a text in one pass, each with its line, its column and a
//! remedy. Its result needs no further checks, except those that depend on the running system
//! (whether the file exists, whether the address is available).
//!
//! Serial numbers and UUIDs that are not configured are derived from names that do not change, so a
//! host finds the same namespace after a restart and after a move to another machine.

mod access;
mod authentication;
mod bearer_token;
mod ceph;
mod derived_ids;
mod display;
mod files;
mod group;
mod key_files;
mod key_tree;
mod known_keys;
mod line_origin;
mod lints;
mod listener;
mod management_api;
pub mod memory_estimate;
mod missing;
mod ns_management;
mod qos;
mod renamed_keys;
mod save;
mod schema;
mod shutdown;
mod size;
mod soft;
mod table_reader;
mod telemetry;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nvme::Nqn;
use serde::Serialize;
use uuid::Uuid;

use crate::blockdev::ceph::{ClusterConfig, CreatedImage, ImageName};
use crate::blockdev::{BackingConfig, BackingKind, InjectedFault, IoEngine};
use crate::core::subsystem::rate_limit::Limit;
use crate::core::subsystem::{AccessPolicy, DiscoveryConfig, ListenerConfig};

pub use authentication::{AuthenticationConfig, HostConfig};
pub(crate) use authentication::{group_name, hash_name};
pub(crate) use bearer_token::BearerToken;
pub use ceph::CephConfig;
pub use files::{ConfigFiles, Rewritten, Source};
pub use group::GroupConfig;
pub use key_files::KeyReader;
pub(crate) use key_tree::{all, text, tree};
pub use known_keys::known_keys;
pub(crate) use line_origin::Origins;
pub use listener::overlap;
pub use management_api::{DEFAULT_CONFIG, DEFAULT_SOCKET, ManagementConfig};
pub use missing::Missing;
pub(crate) use ns_management::CATALOG_RECORD;
pub use ns_management::ManagedConfig;
pub use qos::LimitConfig;
pub use save::Saving;
pub(crate) use save::digest;
pub use shutdown::StopConfig;
pub use size::Size;
pub use soft::SoftConfig;
pub use table_reader::{ConfigErrors, Diagnostic};
pub use telemetry::ObserveConfig;

/// The validated configuration.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Config {
    /// The directory of more files, if it is not the default.
    pub include: Option<PathBuf>,
    /// The fabric provider.
    #[serde(serialize_with = "key_tree::shown")]
    pub provider: Provider,
    /// The reactors.
    pub reactor: ReactorConfig,
    /// The registered memory of each reactor.
    pub memory: MemoryConfig,
    /// Limits of one host.
    pub limits: Limits,
    /// Listeners; at least one, no two overlap or have the same id.
    #[serde(skip)]
    pub listeners: Vec<ListenerConfig>,
    /// Subsystems; at least one, in the order of the text.
    #[serde(rename = "subsystem")]
    pub subsystems: Vec<SubsystemConfig>,
    /// Policy for addresses, devices and files that are unavailable.
    #[serde(serialize_with = "key_tree::shown")]
    pub missing: Missing,
    /// Additional data of discovery.
    #[serde(serialize_with = "key_tree::discovery")]
    pub discovery: DiscoveryConfig,
    /// Shared rate limits of hosts and namespaces.
    #[serde(rename = "qos")]
    pub quotas: Vec<LimitConfig>,
    /// Capture of packets, if enabled.
    pub capture: Option<CaptureConfig>,
    /// Directory of persistent state, such as reservations. Without one, no state survives a
    /// restart.
    pub state_directory: Option<PathBuf>,
    /// The cluster of RBD images.
    pub ceph: CephConfig,
    /// The gateway group of this daemon, if it is a member of one.
    pub group: Option<GroupConfig>,
    /// Authentication of hosts.
    pub authentication: AuthenticationConfig,
    /// The management interface.
    pub management: ManagementConfig,
    /// Recording of slow commands and disconnects.
    pub observe: ObserveConfig,
    /// Sending parameters of the provider `soft`.
    pub soft: SoftConfig,
    /// Draining of hosts at a stop.
    pub stop: StopConfig,
}

/// Returns the state directory of the daemon with this configuration file, as far as another
/// process can determine it: the package's unit has its own directories.
pub(crate) fn given_state_directory(file: &Path) -> Option<OsString> {
    let own = std::env::var_os("STATE_DIRECTORY");
    own.or_else(|| unit_state_directory(file, Path::new("/etc/nvmfd"), "/var/lib/nvmfd"))
}

fn unit_state_directory(file: &Path, configuration: &Path, state: &str) -> Option<OsString> {
    let file = std::path::absolute(file).ok()?;
    let is_of_unit = file.parent() == Some(configuration) && Path::new(state).is_dir();
    is_of_unit.then(|| state.into())
}

rdma::named_enum! {
    /// The fabric provider.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Provider {
        /// Verbs where an RDMA device owns the listeners' addresses, else soft.
        #[default]
        Auto = "auto",
        /// An RDMA device, through rdma-core.
        Verbs = "verbs",
        /// RoCEv2 over UDP sockets.
        Soft = "soft",
    }
}

/// The reactors.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ReactorConfig {
    /// Number of reactors, 1 to 256; `auto`: one for each CPU.
    #[serde(serialize_with = "key_tree::shown")]
    pub threads: Auto,
    /// CPUs of the reactors, in order; empty: not pinned. Otherwise at least one for each.
    pub cpus: Vec<u32>,
    /// Time that an idle reactor polls before it sleeps, in microseconds, 0 to 1,000,000; `auto`: the
    /// reactor adapts it.
    #[serde(rename = "spin_us", serialize_with = "key_tree::shown")]
    pub spin: Auto,
    /// What executes the I/O of backing stores.
    #[serde(serialize_with = "key_tree::shown")]
    pub io_engine: IoEngine,
}

impl ReactorConfig {
    /// The number of reactors on this machine. `"auto"` means one for every CPU that is listed or,
    /// without a list, that the process may use.
    pub fn count(&self) -> usize {
        match self.threads {
            Auto::Number(count) => count as usize,
            Auto::Auto if !self.cpus.is_empty() => self.cpus.len(),
            Auto::Auto => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

impl Default for ReactorConfig {
    fn default() -> Self {
        Self {
            threads: Auto::Number(1),
            cpus: Vec::new(),
            spin: Auto::Auto,
            io_engine: IoEngine::Auto,
        }
    }
}

/// A number, or the word `auto`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Auto {
    /// What is best on this machine.
    Auto,
    /// This number.
    Number(u32),
}

impl fmt::Display for Auto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Auto::Auto => f.write_str("auto"),
            Auto::Number(number) => write!(f, "{number}"),
        }
    }
}

/// The registered memory of each reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct MemoryConfig {
    /// Bytes for data between hosts and devices.
    #[serde(rename = "data", serialize_with = "key_tree::size")]
    pub data_bytes: u64,
    /// Receive buffers. A queue holds as many as its depth for as long as it exists.
    pub receives: u32,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self { data_bytes: 32 << 20, receives: 4096 }
    }
}

/// Capture of all packets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CaptureConfig {
    /// Absolute path of the file; replaced at the start.
    pub path: PathBuf,
    /// With data of hosts, not only headers.
    pub payload: bool,
    /// The capture ends when the file is about this long, in bytes.
    #[serde(rename = "limit", serialize_with = "key_tree::size")]
    pub limit_bytes: u64,
}

/// Limits of one host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Limits {
    /// Entries of an I/O queue.
    pub queue_depth: u16,
    /// I/O queues of one controller.
    pub io_queues: u16,
    /// Largest in-capsule data, in bytes; a multiple of 4096, may be 0.
    #[serde(rename = "in_capsule", serialize_with = "key_tree::size")]
    pub in_capsule_bytes: u32,
    /// Largest transfer of a command, in bytes; 8192 times a power of two.
    #[serde(rename = "mdts", serialize_with = "key_tree::size")]
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
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SubsystemConfig {
    /// Its NQN, unique, and not the discovery NQN.
    #[serde(serialize_with = "key_tree::shown")]
    pub nqn: Nqn,
    /// Every host may connect; `hosts` is ignored.
    pub allow_any_host: bool,
    /// The hosts that may connect.
    #[serde(serialize_with = "key_tree::each")]
    pub hosts: BTreeSet<Nqn>,
    /// Access by listener.
    #[serde(flatten, serialize_with = "key_tree::offer")]
    pub offer: AccessPolicy,
    /// Serial number: 1 to 20 printable ASCII characters.
    pub serial: String,
    /// Model number: 1 to 40 printable ASCII characters.
    pub model: String,
    /// Its namespaces, in the order of the text; no nsid twice. May be empty.
    #[serde(rename = "namespace")]
    pub namespaces: Vec<NamespaceConfig>,
    /// Permission of hosts to create and delete namespaces, if any.
    pub managed: Option<ManagedConfig>,
}

impl SubsystemConfig {
    /// Whether this host may connect. (A host's NQN is a claim; only a host with a key proves it.)
    pub fn admits(&self, host: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(host)
    }
}

/// One namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NamespaceConfig {
    /// Its id, from 1 to [`MAX_NSID`](crate::core::subsystem::MAX_NSID).
    pub nsid: u32,
    /// Its backing store.
    #[serde(flatten)]
    pub kind: NamespaceKind,
    /// Bytes of a logical block: 512 or 4096.
    #[serde(rename = "block_size")]
    pub block_size_bytes: u32,
    /// UUID; the same after every restart.
    #[serde(serialize_with = "key_tree::shown")]
    pub uuid: Uuid,
    /// NGUID, as on the wire; by default the bytes of the UUID.
    #[serde(serialize_with = "key_tree::hex")]
    pub nguid: [u8; 16],
    /// EUI-64, as on the wire, if it has one.
    #[serde(serialize_with = "key_tree::some_hex")]
    pub eui64: Option<[u8; 8]>,
    /// Read-only for hosts.
    pub read_only: bool,
    /// Other daemons serve its file or device as well: features with state per target are disabled.
    pub shared: bool,
    /// Its ANA group: 1 to [`crate::core::subsystem::ana::ANA_GROUPS`].
    pub ana_group: u32,
    /// Hosts may format it (Format NVM).
    pub allow_format: bool,
    /// Hosts may make blocks unreadable (Write Uncorrectable).
    pub write_uncorrectable: bool,
    /// Rate limit of all hosts together.
    #[serde(serialize_with = "key_tree::limit")]
    pub limit: Limit,
    /// The name of the `[[qos]]` that it shares with others.
    #[serde(rename = "shared limit")]
    pub shared_limit: Option<String>,
    /// Injected fault; for tests.
    #[serde(serialize_with = "key_tree::shown")]
    pub fault: InjectedFault,
}

impl NamespaceConfig {
    /// Whether its state must survive a restart: it is served with a `state_directory` only.
    pub(crate) fn needs_state(&self) -> bool {
        self.write_uncorrectable && matches!(self.kind, NamespaceKind::File { .. })
    }

    /// The store that is opened for it.
    pub(crate) fn backing(&self) -> BackingConfig {
        let kind = match &self.kind {
            NamespaceKind::File { path, size } => {
                BackingKind::File { path: path.clone(), size: *size }
            }
            NamespaceKind::Ram { size } => BackingKind::Ram { size: *size },
            NamespaceKind::Null { size } => BackingKind::Null { size: *size },
            NamespaceKind::Rbd { image, cluster, made } => {
                let (image, cluster) = (image.clone(), cluster.clone());
                BackingKind::Rbd { image, cluster, made: made.clone() }
            }
        };
        BackingConfig {
            kind,
            block_size_bytes: self.block_size_bytes,
            read_only: self.read_only,
            shared: self.shared,
        }
    }
}

impl NamespaceKind {
    /// The path of its file, or the name of its image: what opening and probing may wait for.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        match self {
            NamespaceKind::File { path, .. } => Some(path.clone()),
            NamespaceKind::Rbd { image, .. } => Some(image.path()),
            NamespaceKind::Ram { .. } | NamespaceKind::Null { .. } => None,
        }
    }
}

/// Kind of the backing store of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum NamespaceKind {
    /// In a file or on a block device.
    File {
        /// Absolute path, used by no other namespace.
        path: PathBuf,
        /// Size in bytes, whole blocks. Absent: the size that the file has.
        #[serde(serialize_with = "key_tree::some_size")]
        size: Option<u64>,
    },
    /// In memory, lost with the daemon.
    Ram {
        /// Size in bytes, whole blocks.
        #[serde(serialize_with = "key_tree::size")]
        size: u64,
    },
    /// No store: reads return zeros, writes are dropped. For measurements.
    Null {
        /// Size in bytes, whole blocks.
        #[serde(serialize_with = "key_tree::size")]
        size: u64,
    },
    /// An image of Ceph RBD, as large as it is.
    Rbd {
        /// Its name, used by no other namespace.
        #[serde(rename = "path", serialize_with = "key_tree::shown")]
        image: ImageName,
        /// How its cluster is reached.
        #[serde(skip)]
        cluster: ClusterConfig,
        /// For one that a host has made.
        #[serde(skip)]
        made: Option<Box<CreatedImage>>,
    },
}

impl Config {
    /// Reads a configuration from one text.
    ///
    /// # Errors
    /// Every error in the text.
    pub fn parse(text: &str) -> Result<Self, ConfigErrors> {
        Self::of(&ConfigFiles::from(text))
    }

    /// Reads a configuration from its texts.
    ///
    /// # Errors
    /// Every error in the texts.
    pub fn of(sources: &ConfigFiles) -> Result<Self, ConfigErrors> {
        schema::read(sources)
    }

    /// As [`Config::of`], for edited texts: errors name the origins of their lines.
    ///
    /// # Errors
    /// Every error in the texts.
    pub(crate) fn of_edited(
        sources: &ConfigFiles,
        origins: &Origins,
    ) -> Result<Self, ConfigErrors> {
        schema::read_edited(sources, origins)
    }

    /// Reads a configuration from a file, and from those that it includes.
    ///
    /// # Errors
    /// A file cannot be read, or every error in the texts.
    pub fn load(path: &Path) -> Result<Self, ConfigErrors> {
        let config = Self::of(&ConfigFiles::read(path)?)?;
        Ok(config.or_state_directory(given_state_directory(path)))
    }

    /// Uses the state directory of the service manager if none is configured. It may name several,
    /// with colons between them; the first is used.
    pub(crate) fn or_state_directory(mut self, given: Option<OsString>) -> Self {
        let first = |given: OsString| {
            let given = given.into_string().ok()?;
            given.split(':').next().map(PathBuf::from).filter(|path| path.is_absolute())
        };
        self.state_directory = self.state_directory.or_else(|| given.and_then(first));
        self.set_client_addresses();
        self
    }

    /// The addresses of the listeners, in the order of the text.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().map(|listener| listener.address).collect()
    }

    /// The plan of each reactor's pool.
    pub fn pool_plan(&self) -> rdma::PoolPlan {
        rdma::PoolPlan {
            // A queue has twice as many slots as receives, for commands whose response is in flight.
            cells: self.memory.receives.saturating_mul(2),
            receives: self.memory.receives,
            lead_bytes: 64,
            tail_bytes: self.limits.in_capsule_bytes,
            data_bytes: self.memory.data_bytes,
            largest_bytes: self.limits.mdts_bytes,
        }
    }

    /// The sections in which `next` differs and which only a restart can change.
    pub fn needs_restart(&self, next: &Config) -> Vec<&'static str> {
        let differs = [
            (self.provider != next.provider, "provider"),
            (self.reactor != next.reactor, "[reactor]"),
            (self.memory != next.memory, "[memory]"),
            (self.limits != next.limits, "[limits]"),
            (self.capture != next.capture, "[capture]"),
            (self.soft != next.soft, "[soft]"),
            (self.state_directory != next.state_directory, "state_directory"),
            (self.management != next.management, "[management]"),
            (self.group != next.group, "[group]"),
        ];
        differs.into_iter().filter_map(|(differs, name)| differs.then_some(name)).collect()
    }

    /// Copies the values from `running` that only a restart can change.
    pub fn keep_fixed(&mut self, running: &Config) {
        self.provider = running.provider;
        self.reactor = running.reactor.clone();
        self.memory = running.memory;
        self.limits = running.limits;
        self.capture = running.capture.clone();
        self.soft = running.soft;
        self.state_directory = running.state_directory.clone();
        self.set_client_addresses();
        self.management = running.management.clone();
        self.group.clone_from(&running.group);
        self.set_group();
    }
}

#[cfg(test)]
mod tests;
