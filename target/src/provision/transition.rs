//! A configuration that is opened, and not in force yet.

use std::collections::BTreeMap;
use std::path::Path;

use nvme::Nqn;
use tracing::warn;

use super::devices::{DeviceTable, Place};
use super::ns_catalog::{Catalog, Catalogs};
use super::ns_directory_probe::{self, DirectoryProbe, DirectoryState};
use super::pending::PendingDevice;
use crate::config::{Config, Missing, SubsystemConfig};
use crate::error::Fatal;

/// A prepared configuration to commit: opened, and not yet in use.
pub(crate) struct Transition {
    /// Configured subsystems, with host-created namespaces.
    pub(super) subsystems: Vec<SubsystemConfig>,
    pub(super) stores: DeviceTable,
    /// Catalogs that were opened.
    pub(super) catalogs: Vec<(Nqn, Catalog)>,
}

impl Transition {
    /// Opens the devices and catalogs that a configuration needs and that are not open.
    ///
    /// # Errors
    /// One sentence about what cannot be served.
    pub(crate) fn open(
        config: &Config,
        stores: &DeviceTable,
        catalogs: &Catalogs,
    ) -> Result<Transition, Fatal> {
        Transition::with_due(config, stores, catalogs, &[])
    }

    /// As [`Transition::open`], and probes these pending devices and directories as well.
    pub(super) fn with_due(
        config: &Config,
        stores: &DeviceTable,
        catalogs: &Catalogs,
        due: &[Place],
    ) -> Result<Transition, Fatal> {
        let probes = ns_directory_probe::probe(config, stores, catalogs, due, &|_| false);
        Transition::merge(config, stores, catalogs, probes, |subsystems| {
            stores.next_or_wait(subsystems, config.missing, due)
        })
    }

    /// Merges host-created namespaces into a configuration; `open` opens the devices of the result.
    pub(super) fn merge(
        config: &Config,
        stores: &DeviceTable,
        catalogs: &Catalogs,
        mut probes: BTreeMap<Nqn, DirectoryProbe>,
        open: impl FnOnce(&[SubsystemConfig]) -> Result<DeviceTable, String>,
    ) -> Result<Transition, Fatal> {
        let (mut opened, mut pending) = (Vec::new(), Vec::new());
        let mut subsystems = config.subsystems.clone();
        for subsystem in &mut subsystems {
            let (nqn, Some(managed)) = (subsystem.nqn, &subsystem.managed) else { continue };
            let directory = &managed.directory;
            let Some(DirectoryProbe { state, images }) = probes.remove(&nqn) else {
                pending.extend(stores.pending_directory(nqn).cloned());
                continue;
            };
            let open = catalogs.get(&nqn).filter(|open| open.directory() == directory);
            let catalog = match (open, state) {
                // An open catalog is served, also after its file system was unmounted.
                (Some(open), DirectoryState::AsBefore | DirectoryState::Missing(_)) => open,
                (Some(open), DirectoryState::Unusable(_)) if images.is_none() => open,
                (_, DirectoryState::Missing(why)) => {
                    pending.push(PendingDevice::directory(nqn, directory, why));
                    continue;
                }
                (None, DirectoryState::Unusable(why))
                    if config.missing == Missing::Wait
                        && (stores.is_starting() || stores.pending_directory(nqn).is_some()) =>
                {
                    pending.push(PendingDevice::directory(nqn, directory, why).held(true));
                    continue;
                }
                (_, DirectoryState::Unusable(why)) => return Err(Fatal(why)),
                (_, DirectoryState::Opened(catalog, lines)) => {
                    lines.iter().for_each(|line| warn!("{line}"));
                    opened.push((nqn, *catalog));
                    let Some((_, catalog)) = opened.last() else { continue };
                    catalog
                }
                (None, DirectoryState::AsBefore) => continue,
            };
            // Without an answer, files that are served or pending count as existing.
            let is_there = |nsid, image: &Path| {
                stores.serves((nqn, nsid), image)
                    || match &images {
                        Some(images) => images.contains(image),
                        None => stores.why_pending(nqn, nsid).is_some(),
                    }
            };
            if images.is_some() {
                catalog.eclipsed(subsystem, is_there).for_each(|line| warn!("{line}"));
            }
            catalog.merge_into(subsystem, is_there);
        }
        let stores = open(&subsystems).map_err(Fatal)?;
        let mut next = Transition { subsystems, stores, catalogs: opened };
        pending.into_iter().for_each(|directory| next.stores.add_pending_directory(directory));
        next.stores.limit(&config.quotas, &next.subsystems);
        Ok(next)
    }

    /// Opens the devices that a request of a host adds.
    pub(super) fn of_order(
        subsystems: Vec<SubsystemConfig>,
        stores: &DeviceTable,
        missing: Missing,
    ) -> Result<Transition, Fatal> {
        let mut next = stores.next_for_order(&subsystems, missing).map_err(Fatal)?;
        let directories =
            subsystems.iter().filter_map(|s| stores.pending_directory(s.nqn).cloned());
        directories.for_each(|directory| next.add_pending_directory(directory));
        let stores = next;
        Ok(Transition { subsystems, stores, catalogs: Vec::new() })
    }
}
