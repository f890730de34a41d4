//! Clients of clusters: one for all images of a cluster, and the addresses of former ones.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use nix::errno::Errno;

use crate::ceph::{ClusterConfig, ImageName};
use crate::ceph_client::connection::{connect, failed};
use crate::ceph_client::ffi;
use crate::open_error::OpenError;
use crate::record::{Record, seal, unseal};
use crate::{durable, lock};

/// A year. The client of a killed process never returns, so the entry only has to outlive what the
/// network may still deliver; a longer one also covers a copied state directory.
const BLOCKLIST_SECONDS: u32 = 365 * 24 * 3600;
/// Maximum number of former addresses: those of processes that were killed.
const FORMER_MAX: usize = 256;

/// A connected client, and what it may break.
pub(crate) struct Client {
    pub(super) config: ClusterConfig,
    raw: Arc<ffi::Client>,
    /// Id of the cluster.
    pub(super) cluster: String,
    pub(super) address: String,
    /// Addresses of former clients of this daemon: their locks are leftovers.
    former: BTreeSet<String>,
    /// Addresses that it has excluded from the cluster.
    excluded: Mutex<BTreeSet<String>>,
    /// It was excluded from the cluster: the next image gets another client.
    is_fenced: AtomicBool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The client through which this process has images of a cluster open. It is connected as long as one
/// of these or an image exists.
#[derive(Clone, Debug)]
pub struct DataClient(Arc<Client>);

impl DataClient {
    /// Connects it, unless it is connected. Images that are opened later use it. Blocks for some
    /// seconds if the monitors do not answer.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub fn connect(config: &ClusterConfig) -> Result<DataClient, OpenError> {
        Client::of(config).map(DataClient)
    }

    pub(super) fn new(client: Arc<Client>) -> DataClient {
        DataClient(client)
    }

    pub(super) fn client(&self) -> &Client {
        &self.0
    }

    /// Id of the cluster.
    pub fn cluster(&self) -> &str {
        &self.0.cluster
    }

    /// Its address: what others exclude from the cluster.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// Excludes clients from the cluster for a year, and waits until this client has the map that
    /// says so: what it writes from then on is not followed by what they have written before.
    /// Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// The errno.
    pub fn exclude(&self, addresses: &[String]) -> Result<(), Errno> {
        addresses.iter().try_for_each(|address| self.0.exclude(address))
    }

    /// Whether it was excluded, has lost a lock, or is not to be used any more.
    pub fn is_fenced(&self) -> bool {
        self.0.is_fenced()
    }

    /// It is not to be used any more: its images refuse every operation, and images are opened
    /// with another client. Returns at once; what has started takes its time.
    pub fn abandon(&self) {
        self.0.note_fenced();
    }
}

static CLIENTS: Mutex<Vec<Weak<Client>>> = Mutex::new(Vec::new());

impl Client {
    /// The client of a cluster; connects if there is none. Blocks.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub(super) fn of(config: &ClusterConfig) -> Result<Arc<Client>, OpenError> {
        // Held while one connects: others of the same cluster need its result.
        let mut clients = lock(&CLIENTS);
        clients.retain(|client| client.strong_count() > 0);
        let is_usable = |it: &Arc<Client>| it.config == *config && !it.is_fenced();
        if let Some(client) = clients.iter().filter_map(Weak::upgrade).find(is_usable) {
            return Ok(client);
        }
        let client = Arc::new(Client::connect(config)?);
        clients.push(Arc::downgrade(&client));
        Ok(client)
    }

    fn connect(config: &ClusterConfig) -> Result<Client, OpenError> {
        // While librbd takes a snapshot it suspends writes until the monitors have answered.
        let own = [("rados_mon_op_timeout", "10".to_owned())];
        let raw = connect(config, &own)?;
        let said = |errno: Errno| failed(config, "ask the cluster for its id", errno);
        let (cluster, address) = (raw.cluster_id().map_err(said)?, raw.address().map_err(said)?);
        let former = match &config.addresses {
            Some(path) => note_address(path, &cluster, &address).map_err(|why| OpenError {
                sentence: format!("cannot note the address of the RADOS client: {why}"),
                may_pass: true,
            })?,
            None => BTreeSet::new(),
        };
        Ok(Client {
            config: config.clone(),
            raw: Arc::new(raw),
            cluster,
            address,
            former,
            excluded: Mutex::default(),
            is_fenced: AtomicBool::new(false),
        })
    }

    /// Refuses an image that a host has made in another cluster.
    ///
    /// # Errors
    /// One sentence: where it is, and what to do.
    pub(super) fn has_made(&self, name: &ImageName, cluster: &str) -> Result<(), OpenError> {
        if self.cluster == cluster {
            return Ok(());
        }
        let sentence = format!(
            "{name} was made in the cluster {cluster}, and the configuration leads to {}: correct \
             `conf` in [ceph]",
            self.cluster
        );
        Err(OpenError { sentence, may_pass: true })
    }

    /// Waits for an answer of the monitors. Blocks.
    pub(super) fn wait_for_monitors(&self) -> Result<(), Errno> {
        self.raw.wait_for_latest_map()
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Relaxed)
    }

    /// It was excluded from the cluster, or has lost a lock: no image is opened with it any more.
    pub(super) fn note_fenced(&self) {
        self.is_fenced.store(true, Ordering::Relaxed);
    }

    /// A pool of its cluster.
    pub(super) fn pool(&self, name: &str, namespace: &str) -> Result<ffi::Pool, Errno> {
        ffi::Pool::new(&self.raw, name, namespace)
    }

    /// Whether this is the address of a former client of this daemon. One that this process still
    /// uses, with another configuration, is none.
    pub(super) fn was(&self, address: &str) -> bool {
        let clients = lock(&CLIENTS);
        let live = clients.iter().filter_map(Weak::upgrade).filter(|it| !it.is_fenced());
        self.former.contains(address) && !{ live }.any(|it| it.address == address)
    }

    /// Excludes a client from the cluster, unless this one has done it already: what it has sent and
    /// the network still delivers is refused. Blocks.
    pub(super) fn exclude(&self, address: &str) -> Result<(), Errno> {
        let mut excluded = lock(&self.excluded);
        if !excluded.contains(address) {
            self.raw.blocklist(address, BLOCKLIST_SECONDS)?;
            excluded.insert(address.to_owned());
        }
        Ok(())
    }
}

/// The addresses of the clients of a daemon, by cluster.
#[derive(PartialEq, Eq, Debug, Default)]
struct Addresses(Vec<(String, String)>);

impl Record for Addresses {
    const KIND: &'static str = "ceph-clients";
    const REMEDY: &'static str = "when no other process serves these images";

    fn emit(&self) -> String {
        self.0.iter().map(|(cluster, address)| format!("{cluster} {address}\n")).collect()
    }

    fn parse(body: &str) -> Option<Addresses> {
        let pair = |line: &str| {
            let (cluster, address) = line.split_once(' ')?;
            Some((cluster.to_owned(), address.to_owned()))
        };
        body.lines().map(pair).collect::<Option<_>>().map(Addresses)
    }
}

/// Adds an address to the file, durably, and returns the former ones of this cluster. It is there
/// before the client takes a lock.
fn note_address(path: &Path, cluster: &str, address: &str) -> Result<BTreeSet<String>, String> {
    let mut all: Addresses = match fs::read(path) {
        Ok(text) => unseal(&text).map_err(|damage| {
            format!("{} is damaged ({damage}): remove it {}", path.display(), Addresses::REMEDY)
        })?,
        Err(error) if error.kind() == ErrorKind::NotFound => Addresses::default(),
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    let here = |(of, _): &&(String, String)| of == cluster;
    let former = all.0.iter().filter(here).map(|(_, address)| address.clone()).collect();
    all.0.push((cluster.to_owned(), address.to_owned()));
    let surplus = all.0.len().saturating_sub(FORMER_MAX);
    all.0.drain(..surplus);
    replace(path, &seal(&all)).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(former)
}

/// Replaces a file as a whole, so that a power loss leaves the old or the new one.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = fs::File::create(&fresh)?;
    durable::write(&mut file, &fresh, text.as_bytes())?;
    durable::sync(&file, &fresh)?;
    durable::rename(&fresh, path)?;
    durable::sync_directory(path.parent().unwrap_or(Path::new(".")))
}
