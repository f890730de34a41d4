//! The opened backing stores and the subsystems made of them: what a configuration becomes.

use std::collections::BTreeMap;
use std::sync::Arc;

use nvme::{Nqn, Text};

use crate::config::{NamespaceConfig, NamespaceKind, SubsystemConfig};
use crate::disk::BackingId;
use crate::disk::{Backing, BackingConfig, BackingKind};
use crate::reactor::BACKINGS;
use crate::subsystem::{Namespace, Subsystem, Usage};

/// An opened store and what it was opened for.
#[derive(Clone, Debug)]
pub struct Store {
    /// Its number on every ring.
    pub id: BackingId,
    /// The store.
    pub backing: Arc<Backing>,
    config: BackingConfig,
}

/// The stores of a configuration, by subsystem and namespace id.
#[derive(Clone, Debug, Default)]
pub struct Stores {
    by_namespace: BTreeMap<(Nqn, u32), Store>,
}

impl Stores {
    /// Opens what `subsystems` need and keeps from `self` what stays the same. Nothing that is
    /// open now is closed: whoever drops the old `Stores` does that.
    ///
    /// # Errors
    /// One sentence about the first store that cannot be served.
    pub fn next(&self, subsystems: &[SubsystemConfig]) -> Result<Stores, String> {
        let mut next = Stores::default();
        for (subsystem, namespace) in namespaces(subsystems) {
            let key = (subsystem.nqn, namespace.nsid);
            let config = backing_config(namespace);
            let store = match self.by_namespace.get(&key).filter(|s| s.config == config) {
                Some(store) => store.clone(),
                None => {
                    let backing = Backing::open(&config).map_err(|error| {
                        format!("namespace {} of {}: {error}", namespace.nsid, subsystem.nqn)
                    })?;
                    let id = self.free_id(&next).ok_or("too many namespaces")?;
                    Store { id, backing: Arc::new(backing), config }
                }
            };
            next.by_namespace.insert(key, store);
        }
        Ok(next)
    }

    /// What is here and not in `other`.
    pub fn without<'a>(&'a self, other: &'a Stores) -> impl Iterator<Item = &'a Store> {
        let ids = |stores: &Stores, id| stores.by_namespace.values().any(|s| s.id == id);
        self.by_namespace.values().filter(move |store| !ids(other, store.id))
    }

    /// The snapshot of a subsystem, counting on with `usage`.
    #[must_use]
    pub fn subsystem(&self, config: &SubsystemConfig, usage: Arc<Usage>) -> Subsystem {
        let namespace = |namespace: &NamespaceConfig| {
            let store = self.by_namespace.get(&(config.nqn, namespace.nsid))?;
            Some(Namespace {
                nsid: namespace.nsid,
                backing: store.id,
                blocks: store.backing.blocks(),
                block_shift: namespace.block_size_bytes.trailing_zeros() as u8,
                read_only: namespace.read_only,
                volatile_cache: store.backing.has_volatile_cache(),
                uuid: namespace.uuid.into_bytes(),
            })
        };
        let mut namespaces: Vec<Namespace> =
            config.namespaces.iter().filter_map(namespace).collect();
        namespaces.sort_by_key(|n| n.nsid);
        Subsystem {
            nqn: config.nqn,
            serial: Text::lossy(&config.serial),
            model: Text::lossy(&config.model),
            allow_any_host: config.allow_any_host,
            hosts: config.hosts.clone(),
            namespaces,
            usage,
        }
    }

    /// A number that neither the present nor the coming stores have, past the present ones as long
    /// as possible: a ring may still have work under an old number.
    fn free_id(&self, next: &Stores) -> Option<BackingId> {
        let used = |id| {
            [self, next].iter().any(|stores| stores.by_namespace.values().any(|s| s.id.0 == id))
        };
        let ids = self.by_namespace.values().chain(next.by_namespace.values()).map(|s| s.id.0);
        let from = ids.max().map_or(0, |id| id + 1);
        (0..BACKINGS).map(|step| (from + step) % BACKINGS).find(|&id| !used(id)).map(BackingId)
    }
}

fn namespaces(
    subsystems: &[SubsystemConfig],
) -> impl Iterator<Item = (&SubsystemConfig, &NamespaceConfig)> {
    subsystems.iter().flat_map(|s| s.namespaces.iter().map(move |n| (s, n)))
}

fn backing_config(namespace: &NamespaceConfig) -> BackingConfig {
    let kind = match &namespace.kind {
        NamespaceKind::File { path, size } => BackingKind::File { path: path.clone(), size: *size },
        NamespaceKind::Ram { size } => BackingKind::Ram { size: *size },
        NamespaceKind::Null { size } => BackingKind::Null { size: *size },
    };
    BackingConfig {
        kind,
        block_size_bytes: namespace.block_size_bytes,
        read_only: namespace.read_only,
    }
}
