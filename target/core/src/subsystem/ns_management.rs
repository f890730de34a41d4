//! Host-created namespaces, as seen by hosts with the grant.

use std::collections::{BTreeMap, BTreeSet};

use nvme::Nqn;
use uuid::Uuid;

use crate::subsystem::Namespace;

/// Hosts that a namespace is attached to, at most.
pub const HOSTS_MAX: usize = 256;

/// Additional view of hosts with the grant to manage namespaces: an immutable part of its snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Management {
    /// The grant for hosts.
    pub grant: Grant,
    /// The namespaces created by hosts, including those that are not attached, by ascending NSID.
    pub allocated: Vec<Allocated>,
    /// Those that are not served, by ascending NSID: no host sees them.
    pub absent: Vec<UnavailableNamespace>,
    /// The sizes of all that hosts made together, in bytes.
    pub used_bytes: u64,
    /// Names of the images of those that are images of a cluster, for the administrator.
    pub images: BTreeMap<u32, String>,
}

/// A namespace created by a host whose file is missing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UnavailableNamespace {
    /// Namespace id.
    pub nsid: u32,
    /// Its properties.
    pub entry: Entry,
    /// It is served as soon as its file is available; otherwise after a reload.
    pub is_pending: bool,
}

/// A namespace that a host made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Allocated {
    /// The namespace.
    pub namespace: Namespace,
    /// The hosts that have it.
    pub hosts: BTreeSet<Nqn>,
}

/// Hosts that may manage namespaces, and their quota.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Grant {
    /// The sizes of all namespaces that hosts create, in bytes, at most.
    pub quota_bytes: u64,
    /// Every host that may connect may.
    pub any_host: bool,
    /// The hosts that may.
    pub hosts: BTreeSet<Nqn>,
}

impl Grant {
    /// Whether a host may manage namespaces. (Its NQN is a claim, unless it has a key.)
    pub fn admits(&self, host: &Nqn) -> bool {
        self.any_host || self.hosts.contains(host)
    }
}

impl Management {
    /// Remaining quota, in bytes.
    pub fn left_bytes(&self) -> u64 {
        self.grant.quota_bytes.saturating_sub(self.used_bytes)
    }

    /// The namespace of this id, if hosts made it.
    pub fn allocated(&self, nsid: u32) -> Option<&Allocated> {
        let at = self.allocated.binary_search_by_key(&nsid, |a| a.namespace.nsid).ok()?;
        self.allocated.get(at)
    }
}

/// Parameters of a created namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its identity, which names its file.
    pub uuid: Uuid,
    /// Its size in bytes: whole blocks.
    pub bytes: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size_bytes: u32,
    /// Its ANA group.
    pub ana_group: u32,
    /// Attached to one host at a time.
    pub private: bool,
    /// The hosts that it is attached to, at most [`HOSTS_MAX`].
    pub hosts: BTreeSet<Nqn>,
}
