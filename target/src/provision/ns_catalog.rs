//! Catalog of host-created namespaces: a layer over the configuration.
//!
//! A [`Catalog`] contains those of one subsystem. Its record is in the directory that the
//! configuration grants, beside the files of the namespaces, which are sparse and named by UUID. A
//! change is in the record before the host receives the completion, and the record is replaced as
//! `state/atomic_file.rs` replaces files, so a daemon that is killed leaves the state before a
//! request or the state after it:
//!
//! * a file is created after the record announces it, and is a namespace only once the record
//!   lists it;
//! * a deleted namespace ceases to exist once the record says that its file is being removed.
//!
//! Incomplete files are removed when the catalog is opened next. No other file in the directory is
//! ever touched.
//!
//! With a pool, namespaces are images of Ceph RBD instead of files, in the same order of steps. The
//! record has the id of each, so that no other image is opened or removed under its name; those of
//! unfinished requests and of deleted namespaces are removed while the rest is served
//! (`ns_images.rs`), because their cluster may not answer.
//!
//! A namespace is attached to hosts: Namespace Attachment names a controller, which exists only as
//! long as its association; the host of that controller has the namespace until it is detached, on
//! each of its controllers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nvme::Nqn;
use uuid::Uuid;

use crate::blockdev::InjectedFault;
use crate::blockdev::ceph::ClusterConfig;
use crate::config::{CATALOG_RECORD, NamespaceConfig, NamespaceKind, SubsystemConfig};
use crate::core::subsystem::ns_management::Entry;

use super::ns_directory::NamespaceDirectory;
use super::ns_request_plan::{RequestPlan, Step};
use crate::state::ns_catalog::NamespaceCatalogRecord;
use crate::state::record::StateDir;

/// Host-created namespaces of one subsystem.
#[derive(Debug)]
pub struct Catalog {
    directory: Arc<NamespaceDirectory>,
    record: NamespaceCatalogRecord,
}

impl Catalog {
    /// Opens the catalog in `directory`, which exists, and completes unfinished requests. Returns
    /// warnings for the administrator.
    ///
    /// # Errors
    /// One sentence: the directory cannot be used, or its record is invalid. Such a record is
    /// never ignored.
    pub fn open(directory: &Path, nqn: Nqn) -> Result<(Catalog, Vec<String>), String> {
        let shown = directory.display();
        let failed = |error: io::Error| {
            format!("the directory {shown} of managed namespaces cannot be used: {error}; make it")
        };
        let lock = File::open(directory).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(format!(
                    "{shown} is in use by another nvmfd: give each its own directory"
                ));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        StateDir(directory).sync_names().map_err(failed)?;
        let record = Catalog::record_in(directory, nqn)?;
        let own = Arc::new(NamespaceDirectory::new(directory, lock).map_err(failed)?);
        let mut catalog = Catalog { directory: own, record };
        let mut lines = Vec::new();
        if let Err(error) = catalog.settle() {
            lines.push(format!("unfinished requests in {shown} cannot be cleared: {error}"));
        }
        lines.extend(catalog.oddities().map_err(failed)?);
        Ok((catalog, lines))
    }

    /// Loads the record of a subsystem in its directory; a new one is empty.
    ///
    /// # Errors
    /// One sentence: it is damaged, or that of another subsystem.
    pub(crate) fn record_in(directory: &Path, nqn: Nqn) -> Result<NamespaceCatalogRecord, String> {
        let record: Option<NamespaceCatalogRecord> = StateDir(directory).load(CATALOG_RECORD)?;
        let record = record.unwrap_or_else(|| NamespaceCatalogRecord::new(nqn));
        let (shown, owner) = (directory.display(), record.subsystem);
        match owner == nqn {
            true => Ok(record),
            false => {
                Err(format!("{shown} has the namespaces of {owner}: give {nqn} its own directory"))
            }
        }
    }

    /// Path of the directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The directory.
    pub fn place(&self) -> &Arc<NamespaceDirectory> {
        &self.directory
    }

    /// The record.
    pub fn record(&self) -> &NamespaceCatalogRecord {
        &self.record
    }

    /// The file of the namespace with this UUID, or what stands for the path of its image
    /// ([`crate::blockdev::ceph::ImageName::path`]).
    pub fn image(&self, uuid: Uuid) -> PathBuf {
        let name = self.record.images.get(&uuid).and_then(|image| image.name(uuid));
        name.map_or_else(|| self.directory.image(uuid), |name| name.path())
    }

    /// Whether a namespace is an image. It is looked for when it is opened: its cluster may not
    /// answer.
    pub(crate) fn is_image(&self, uuid: Uuid) -> bool {
        self.record.images.contains_key(&uuid)
    }

    /// Replaces the record, so that it survives a power loss. May block.
    ///
    /// # Errors
    /// The I/O error; the record is unchanged then.
    pub fn keep(&mut self, new: NamespaceCatalogRecord) -> io::Result<()> {
        self.directory.keep(&new, &self.record)?;
        self.record = new;
        Ok(())
    }

    /// Stores the record that was written to the directory.
    pub(crate) fn hold(&mut self, record: NamespaceCatalogRecord) {
        self.record = record;
    }

    /// Removes files of unfinished requests; images are left to [`super::ns_images`].
    fn settle(&mut self) -> io::Result<()> {
        let mut settling = RequestPlan::settling(&self.record);
        let mut last = Ok(());
        loop {
            let next = match settling.next(last.is_ok()) {
                Step::Remove(uuids) => self.directory.remove(&uuids),
                Step::Keep(record) => self.keep(*record),
                _ => return last,
            };
            last = last.and(next);
        }
    }

    /// Adds its namespaces to the configured ones of a subsystem; configured ones take precedence.
    /// Adds only images, and those whose file `is_there`.
    pub(crate) fn merge_into(
        &self,
        config: &mut SubsystemConfig,
        is_there: impl Fn(u32, &Path) -> bool,
    ) {
        let managed = config.managed.as_ref();
        let cluster = managed.map(|managed| managed.cluster.clone()).unwrap_or_default();
        for (&nsid, entry) in &self.record.entries {
            let declared = config.namespaces.iter().any(|n| n.nsid == nsid);
            if declared || nsid > config.offer.max_nsid {
                continue;
            }
            let image = self.image(entry.uuid);
            if !self.is_image(entry.uuid) && !is_there(nsid, &image) {
                continue;
            }
            config.namespaces.push(self.namespace(nsid, entry, &cluster));
            config.offer.masks.insert(nsid, entry.hosts.clone());
        }
    }

    /// Returns the configuration of a namespace. `cluster`: of its image, if it is one.
    pub fn namespace(&self, nsid: u32, entry: &Entry, cluster: &ClusterConfig) -> NamespaceConfig {
        NamespaceConfig {
            nsid,
            kind: self.kind(entry, cluster),
            block_size_bytes: entry.block_size_bytes,
            uuid: entry.uuid,
            nguid: entry.uuid.into_bytes(),
            eui64: None,
            read_only: false,
            ana_group: entry.ana_group,
            allow_format: !self.is_image(entry.uuid),
            write_uncorrectable: false,
            limit: Default::default(),
            shared_limit: None,
            fault: InjectedFault::None,
            shared: false,
        }
    }

    fn kind(&self, entry: &Entry, cluster: &ClusterConfig) -> NamespaceKind {
        let image = self.record.images.get(&entry.uuid);
        match image.and_then(|it| Some((it.name(entry.uuid)?, it.made(entry.bytes).map(Box::new))))
        {
            Some((image, made)) => NamespaceKind::Rbd { image, cluster: cluster.clone(), made },
            None => NamespaceKind::File { path: self.image(entry.uuid), size: Some(entry.bytes) },
        }
    }

    /// Sentences about its namespaces that are not served because of `config`.
    pub(crate) fn eclipsed<'a>(
        &'a self,
        config: &'a SubsystemConfig,
        is_there: impl Fn(u32, &Path) -> bool + 'a,
    ) -> impl Iterator<Item = String> + 'a {
        let nqn = config.nqn;
        self.record.entries.iter().filter_map(move |(&nsid, entry)| {
            let image = self.image(entry.uuid);
            let shown = image.display();
            if config.namespaces.iter().any(|n| n.nsid == nsid) {
                Some(format!(
                    "namespace {nsid} of {nqn} was created by a host, in {shown}, and is \
                     configured as well: the configured one is served; give that another nsid"
                ))
            } else if nsid > config.offer.max_nsid {
                Some(format!(
                    "namespace {nsid} of {nqn} was created by a host, in {shown}, and is beyond \
                     `max_nsid`: it is not served"
                ))
            } else {
                (!self.is_image(entry.uuid) && !is_there(nsid, &image)).then(|| {
                    format!(
                        "namespace {nsid} of {nqn} was created by a host and its file {shown} is \
                         missing: it is not served; restore the file and reload, or have a host \
                         delete the namespace"
                    )
                })
            }
        })
    }

    /// Files of the directory that belong to no namespace.
    fn oddities(&self) -> io::Result<Vec<String>> {
        let known: BTreeSet<PathBuf> =
            self.record.entries.values().map(|entry| self.image(entry.uuid)).collect();
        let mut lines = Vec::new();
        for file in fs::read_dir(self.directory())? {
            let path = file?.path();
            if path.extension().is_some_and(|e| e == "img") && !known.contains(&path) {
                lines.push(format!(
                    "{} belongs to no namespace of a host: it is ignored",
                    path.display()
                ));
            }
        }
        Ok(lines)
    }
}

/// Catalogs by subsystem.
pub type Catalogs = BTreeMap<Nqn, Catalog>;

#[cfg(test)]
mod tests;
