//! What the configuration names and is not there yet.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvme::Nqn;

use super::Place;
use super::opening::Opening;
use crate::absent;
use crate::config::NamespaceConfig;

/// How long the look at one path may take. What needs longer is looked at again when it has
/// answered.
const PATIENCE: Duration = Duration::from_secs(2);

/// A namespace whose store is not there yet, or the folder of those that hosts make.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Awaited {
    /// What it is of, for people.
    pub place: String,
    /// What is awaited, as a sentence.
    pub why: String,
    key: Place,
    what: What,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum What {
    Store(Box<NamespaceConfig>),
    Folder(PathBuf),
}

/// No namespace has this id: it stands for the folder of those that hosts make.
const FOLDER: u32 = 0;

impl Awaited {
    /// The store of a namespace.
    pub(super) fn store(key: Place, namespace: &NamespaceConfig, why: String) -> Awaited {
        let place = format!("namespace {} of {}", key.1, key.0);
        Awaited { place, why, key, what: What::Store(Box::new(namespace.clone())) }
    }

    /// The folder of the namespaces that hosts make of a subsystem.
    pub(crate) fn folder(nqn: Nqn, folder: &Path, why: String) -> Awaited {
        let place = format!("namespaces that hosts make of {nqn}");
        Awaited { place, why, key: (nqn, FOLDER), what: What::Folder(folder.to_owned()) }
    }

    /// Which namespace; one of no namespace stands for the folder of a subsystem.
    pub(crate) fn key(&self) -> Place {
        self.key
    }

    pub(super) fn is_for(&self, key: Place, namespace: &NamespaceConfig) -> bool {
        self.key == key && matches!(&self.what, What::Store(config) if **config == *namespace)
    }

    pub(super) fn is_folder_of(&self, nqn: Nqn) -> bool {
        self.key == (nqn, FOLDER)
    }

    /// Whether it is this folder.
    pub(crate) fn is_folder(&self, folder: &Path) -> bool {
        matches!(&self.what, What::Folder(own) if own == folder)
    }

    /// Whether it is there by now, or at least no longer missing as it was. `served`: what
    /// [`Stores::served`](super::Stores::served) says.
    fn has_come(&self, served: &BTreeSet<PathBuf>, opening: &Opening) -> bool {
        let missing = match &self.what {
            What::Store(config) => opening.absent(PATIENCE, config, served),
            What::Folder(folder) => {
                let own = folder.clone();
                let look = move || Ok(absent::folder(&own));
                opening.within(PATIENCE, folder, look).unwrap_or_else(Some)
            }
        };
        missing.is_none()
    }
}

/// What is awaited, and how it is looked for.
#[derive(Debug)]
pub struct Awaiting {
    pub(super) all: Vec<Awaited>,
    pub(super) state_directory: Option<PathBuf>,
    pub(super) opening: Arc<Opening>,
}

impl Awaiting {
    /// Those that are there by now, or at least no longer missing as they were. May wait for each
    /// path that hangs, the first time.
    #[must_use]
    pub(crate) fn come(&self) -> Vec<Place> {
        if self.all.is_empty() {
            return Vec::new();
        }
        let served = absent::served(self.state_directory.as_deref());
        let come = self.all.iter().filter(|each| each.has_come(&served, &self.opening));
        come.map(Awaited::key).collect()
    }
}
