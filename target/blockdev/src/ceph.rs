//! Names of images of Ceph RBD, and how a cluster is reached.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The name of an image: `pool/image`, or `pool/namespace/image`; with `@snapshot`, of a snapshot of it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ImageName {
    /// Its pool.
    pub pool: String,
    /// Its namespace in the pool; empty: the default one.
    pub namespace: String,
    /// Its name.
    pub image: String,
    /// The snapshot; none: the image itself.
    pub snapshot: Option<String>,
}

impl ImageName {
    /// What stands for its path where stores are told apart, and waited for, by their paths.
    pub fn path(&self) -> PathBuf {
        Path::new("rbd:").join(self.to_string())
    }
}

impl FromStr for ImageName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ImageName, &'static str> {
        let (path, snapshot) = match text.split_once('@') {
            Some((path, snapshot)) => (path, Some(snapshot)),
            None => (text, None),
        };
        let parts: Vec<&str> = path.split('/').collect();
        let is_good = |part: &&str| {
            !part.is_empty() && !part.contains(|c: char| c.is_control() || "@/".contains(c))
        };
        let (pool, namespace, image) = match *parts {
            _ if !parts.iter().chain(&snapshot).all(is_good) => {
                return Err("a part of it is empty or no name");
            }
            [pool, image] => (pool, "", image),
            [pool, namespace, image] => (pool, namespace, image),
            _ => return Err("it has not two or three parts"),
        };
        let [pool, namespace, image] = [pool, namespace, image].map(str::to_owned);
        Ok(ImageName { pool, namespace, image, snapshot: snapshot.map(str::to_owned) })
    }
}

/// As the tools of Ceph write it.
impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ImageName { pool, namespace, image, snapshot } = self;
        match namespace.is_empty() {
            true => write!(f, "{pool}/{image}")?,
            false => write!(f, "{pool}/{namespace}/{image}")?,
        }
        snapshot.as_ref().map_or(Ok(()), |snapshot| write!(f, "@{snapshot}"))
    }
}

/// Where an image is that hosts have made, and what it is recognised by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageOrigin {
    /// Id of the cluster.
    pub cluster: String,
    /// The size of the image.
    pub size_bytes: u64,
    /// What it is recognised by.
    pub identity: ImageIdentity,
}

/// What an image is recognised by that hosts have made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ImageIdentity {
    /// Its id in the pool, which no other image gets.
    Id(String),
    /// The address of the client that makes it, or did when it ended.
    Client(String),
}

/// An image that a host has made: what is opened under its name is this one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CreatedImage {
    /// Id of its cluster.
    pub cluster: String,
    /// Its id.
    pub id: String,
    /// Its size, which it has at least.
    pub size_bytes: u64,
}

/// How a cluster is reached.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClusterConfig {
    /// Its configuration file; none: where Ceph looks for it.
    pub conf: Option<PathBuf>,
    /// Name of the client without its type: `nvmfd` for `client.nvmfd`.
    pub client: String,
    /// File with the key of the client; none: as the configuration says.
    pub keyring: Option<PathBuf>,
    /// File that lists the addresses of the clients of this daemon, also of its former processes.
    /// A process that was killed leaves its locks: they are broken if their owner is listed. Only
    /// one process at a time uses the file. None: the locks end with a timeout of the cluster.
    pub addresses: Option<PathBuf>,
    /// Images are opened in standby: without their lock, and no operation reaches them until they
    /// are acquired. For a gateway group, which decides that.
    pub standby: bool,
}

impl ClusterConfig {
    /// The full name of the client.
    pub fn entity(&self) -> String {
        format!("client.{}", self.client)
    }
}

/// The command that gives an existing client the rights that it needs.
pub fn rights_command(entity: &str) -> String {
    format!("ceph auth caps {entity} mon 'profile rbd' osd 'profile rbd'")
}
