//! Configured devices that are not available yet.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::Nqn;

use super::devices::Place;
use super::probe;
use crate::blockdev::blocking::{BlockingPool, BlockingTask};
use crate::config::{NamespaceConfig, NamespaceKind};
use crate::platform::availability;
use crate::state::served::Served;

/// Time limit for the probes of all paths. A slower probe is repeated when it has finished.
const PATIENCE: Duration = Duration::from_secs(2);

/// A namespace whose device is missing, or a missing directory of host-created namespaces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PendingDevice {
    /// Name in messages.
    pub place: String,
    /// What is missing, as a sentence.
    pub why: String,
    key: Place,
    what: PendingKind,
    /// Its file existed, and could not be opened: it is never created anew.
    was_there: bool,
    /// The device exists and cannot be served: an administrator has to repair it and reload. A
    /// half-repaired device must not be served to its hosts.
    pub(crate) is_held: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum PendingKind {
    Store(Box<NamespaceConfig>),
    Directory(PathBuf),
}

/// An invalid NSID, for the directory of host-created namespaces.
const DIRECTORY_NSID: u32 = 0;

impl PendingDevice {
    /// The device of a namespace.
    pub(super) fn store(key: Place, namespace: &NamespaceConfig, why: String) -> PendingDevice {
        let place = format!("namespace {} of {}", key.1, key.0);
        PendingDevice {
            place,
            why,
            key,
            what: PendingKind::Store(Box::new(namespace.clone())),
            was_there: false,
            is_held: false,
        }
    }

    /// Sets whether the file exists, or could not be created.
    pub(super) fn there(self, was_there: bool) -> PendingDevice {
        PendingDevice { was_there, ..self }
    }

    /// Sets whether only a reload retries it.
    pub(crate) fn held(self, is_held: bool) -> PendingDevice {
        PendingDevice { is_held, ..self }
    }

    /// Its file, if that existed.
    pub(super) fn seen(&self) -> Option<&Path> {
        match &self.what {
            PendingKind::Store(config) if self.was_there => match &config.kind {
                NamespaceKind::File { path, .. } => Some(path),
                _ => None,
            },
            _ => None,
        }
    }

    /// The directory of host-created namespaces of a subsystem.
    pub(crate) fn directory(nqn: Nqn, directory: &Path, why: String) -> PendingDevice {
        let place = format!("namespaces that hosts make of {nqn}");
        PendingDevice {
            place,
            why,
            key: (nqn, DIRECTORY_NSID),
            what: PendingKind::Directory(directory.to_owned()),
            was_there: false,
            is_held: false,
        }
    }

    /// The namespace; an invalid NSID stands for the directory of a subsystem.
    pub(crate) fn key(&self) -> Place {
        self.key
    }

    pub(super) fn is_for(&self, key: Place, namespace: &NamespaceConfig) -> bool {
        self.key == key
            && matches!(&self.what, PendingKind::Store(config) if **config == *namespace)
    }

    pub(super) fn is_directory_of(&self, nqn: Nqn) -> bool {
        self.key == (nqn, DIRECTORY_NSID)
    }

    pub(crate) fn is_directory(&self, directory: &Path) -> bool {
        matches!(&self.what, PendingKind::Directory(own) if own == directory)
    }

    /// Begins to probe the reason, if it is still missing. `served`: see
    /// [`Stores::served`](super::Stores::served).
    fn look<'a>(
        &self,
        served: &Served,
        opening: &'a BlockingPool,
    ) -> BlockingTask<'a, Option<String>> {
        match &self.what {
            PendingKind::Store(config) => probe::begin(opening, config, served, Result::err),
            PendingKind::Directory(directory) => {
                let own = directory.clone();
                opening.begin(directory, move || Ok(availability::directory(&own)))
            }
        }
    }
}

/// Pending devices, and their probes.
#[derive(Debug)]
pub struct PendingProbe {
    pub(super) all: Vec<PendingDevice>,
    pub(super) state_directory: Option<PathBuf>,
    pub(super) opening: Arc<BlockingPool>,
}

impl PendingProbe {
    /// Pending devices that are available now, or missing for another reason. May block for paths
    /// that hang, the first time.
    pub(crate) fn available(&self) -> Vec<Place> {
        let all: Vec<_> = self.all.iter().filter(|each| !each.is_held).collect();
        if all.is_empty() {
            return Vec::new();
        }
        let served = Served::load(self.state_directory.as_deref());
        let served = served.with(self.all.iter().filter_map(PendingDevice::seen));
        let deadline = Instant::now() + PATIENCE;
        let probes: Vec<_> = all.iter().map(|each| each.look(&served, &self.opening)).collect();
        let missing = probes.into_iter().map(|look| look.by(deadline).unwrap_or_else(Some));
        let available = all.iter().zip(missing).filter(|(_, missing)| missing.is_none());
        available.map(|(each, _)| each.key()).collect()
    }
}
