//! Probes the directories of host-created namespaces, all at once and with a timeout. Their server
//! may be unreachable.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nvme::Nqn;

use crate::config::{Config, Missing, SubsystemConfig};
use crate::platform::availability;
use crate::provision::DirectoryIdentity;
use crate::provision::devices::{DeviceTable, Place};
use crate::provision::ns_catalog::{Catalog, Catalogs};

/// How long the probes of all directories may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Result of a probe of a directory.
pub(super) struct DirectoryProbe {
    pub(super) state: DirectoryState,
    /// Existing files of namespaces; `None` where the directory was not probed, or does not answer.
    pub(super) images: Option<BTreeSet<PathBuf>>,
}

pub(super) enum DirectoryState {
    /// The open directory.
    AsBefore,
    /// Missing, and why.
    Missing(String),
    /// Just opened, and warnings for the administrator.
    Opened(Box<Catalog>, Vec<String>),
    /// Unusable, and why.
    Unusable(String),
}

/// Probes the directory of each subsystem of a configuration, of pending ones those that are due,
/// and opens those that are not open. An open one is not probed if the subsystem `is_same`.
pub(super) fn probe(
    config: &Config,
    stores: &DeviceTable,
    catalogs: &Catalogs,
    due: &[Place],
    is_same: &dyn Fn(&SubsystemConfig) -> bool,
) -> BTreeMap<Nqn, DirectoryProbe> {
    let (mut probes, mut begun) = (BTreeMap::new(), Vec::new());
    for subsystem in &config.subsystems {
        let (nqn, Some(managed)) = (subsystem.nqn, &subsystem.managed) else { continue };
        let directory = managed.directory.clone();
        let is_pending = stores.pending_directory(nqn).is_some_and(|each| {
            let is_due = due.contains(&each.key());
            config.missing == Missing::Wait && each.is_directory(&directory) && !is_due
        });
        let open = catalogs.get(&nqn).filter(|open| open.directory() == directory);
        if open.is_some() && is_same(subsystem) {
            probes.insert(nqn, DirectoryProbe { state: DirectoryState::AsBefore, images: None });
        } else if !is_pending {
            let open = open.map(|catalog| (catalog.place().identity(), images(catalog)));
            let missing = config.missing;
            let path = directory.clone();
            let act =
                move || Ok(probed(&path, (nqn, missing), open, availability::directory(&path)));
            begun.push((nqn, stores.begin(&directory, act)));
        }
    }
    let deadline = Instant::now() + PATIENCE;
    let unanswered = |why| DirectoryProbe {
        state: match config.missing {
            Missing::Wait => DirectoryState::Missing(why),
            Missing::Fail => DirectoryState::Unusable(why),
        },
        images: None,
    };
    let answers =
        begun.into_iter().map(|(nqn, task)| (nqn, task.by(deadline).unwrap_or_else(unanswered)));
    probes.extend(answers);
    probes
}

/// `open`: identity and files of the open catalog. `missing`: why the directory is missing.
fn probed(
    directory: &Path,
    (nqn, policy): (Nqn, Missing),
    open: Option<(DirectoryIdentity, BTreeSet<PathBuf>)>,
    missing: Option<String>,
) -> DirectoryProbe {
    let may_wait = policy == Missing::Wait;
    let with = |state, images: BTreeSet<PathBuf>| DirectoryProbe {
        state,
        images: Some(images.into_iter().filter(|image| image.exists()).collect()),
    };
    let none = |state| with(state, BTreeSet::new());
    match (open, missing) {
        (Some((_, images)), Some(why)) if may_wait => with(DirectoryState::Missing(why), images),
        (Some((identity, images)), _) if identity.is_at(directory).is_ok() => {
            with(DirectoryState::AsBefore, images)
        }
        (_, Some(why)) if may_wait => none(DirectoryState::Missing(why)),
        // The directory below the mount point is another one.
        (_, Some(why)) => none(DirectoryState::Unusable(why)),
        (_, None) => match Catalog::open(directory, nqn) {
            Ok((catalog, lines)) => {
                let images = images(&catalog);
                with(DirectoryState::Opened(Box::new(catalog), lines), images)
            }
            Err(why) => none(DirectoryState::Unusable(why)),
        },
    }
}

/// Files of the namespaces of a catalog.
fn images(catalog: &Catalog) -> BTreeSet<PathBuf> {
    catalog.record().entries.values().map(|entry| catalog.image(entry.uuid)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Transition;
    use crate::provision::ns_directory_probe::*;
    use crate::state::ns_catalog::tests::sample;

    const NQN: &str = "nqn.2026-11.io.nvmfd:a";

    /// A subsystem with namespace 2 in a file, whose hosts may create more in a directory.
    fn config(directory: &Path) -> Config {
        let text = format!(
            "[[listener]]\naddress = \"192.0.2.1\"\n[[subsystem]]\nnqn = \"{NQN}\"\n\
             allow_any_host = true\n[[subsystem.namespace]]\nnsid = 2\npath = {:?}\n\
             size = \"1MiB\"\n[subsystem.managed]\ndirectory = {:?}\nquota = \"4MiB\"\n\
             namespaces = 3\nhosts = [\"nqn.2026-11.io.nvmfd:host\"]\n",
            directory.join("disk"),
            directory.join("managed"),
        );
        Config::parse(&text).unwrap()
    }

    #[test]
    fn no_catalog_is_opened_below_an_unmounted_file_system() {
        let directory = crate::blockdev::testing::directory();
        let path = directory.path();
        let nqn: Nqn = NQN.parse().unwrap();
        let why = Some("not mounted".to_owned());
        let find = |policy, open: &Option<_>, why: &Option<_>| {
            probed(path, (nqn, policy), open.clone(), why.clone()).state
        };
        assert!(matches!(find(Missing::Wait, &None, &why), DirectoryState::Missing(_)));
        assert!(matches!(find(Missing::Fail, &None, &why), DirectoryState::Unusable(_)));
        let DirectoryState::Opened(catalog, _) = find(Missing::Fail, &None, &None) else {
            panic!("opened")
        };
        let open = Some((catalog.place().identity(), BTreeSet::new()));
        assert!(matches!(find(Missing::Fail, &open, &None), DirectoryState::AsBefore));
        assert!(matches!(find(Missing::Wait, &open, &why), DirectoryState::Missing(_)));
    }

    #[test]
    fn a_hung_managed_directory_is_pending_and_the_rest_is_served() {
        let directory = crate::blockdev::testing::directory();
        let managed = directory.path().join("managed");
        fs::create_dir(&managed).unwrap();
        let (stores, mut config) = (DeviceTable::default(), config(directory.path()));
        let _go_on = stores.opening().hang_at(&managed);
        let next = Transition::open(&config, &stores, &Catalogs::new()).unwrap();
        let pending = next.stores.pending();
        assert_eq!((pending.len(), next.catalogs.len()), (1, 0));
        assert!(pending[0].why.contains("does not answer"), "{}", pending[0].why);
        assert!(next.stores.store(NQN.parse().unwrap(), 2).is_some());
        drop(next);
        config.missing = Missing::Fail;
        let refused = Transition::open(&config, &stores, &Catalogs::new()).map(drop).unwrap_err();
        assert!(refused.0.contains("does not answer"), "{refused}");
    }

    #[test]
    fn namespaces_of_an_open_directory_are_served_while_it_hangs() {
        let directory = crate::blockdev::testing::directory();
        let managed = directory.path().join("managed");
        fs::create_dir(&managed).unwrap();
        let nqn: Nqn = NQN.parse().unwrap();
        let (mut catalog, _) = Catalog::open(&managed, nqn).unwrap();
        catalog.keep(sample()).unwrap();
        for image in images(&catalog) {
            fs::write(image, vec![0; 1 << 20]).unwrap();
        }
        drop(catalog);
        let (config, stores) = (config(directory.path()), DeviceTable::default());
        let first = Transition::open(&config, &stores, &Catalogs::new()).unwrap();
        let made = |next: &Transition| next.subsystems[0].namespaces.len();
        assert_eq!((made(&first), first.catalogs.len()), (1 + sample().entries.len(), 1));
        let catalogs: Catalogs = first.catalogs.into_iter().collect();
        for missing in [Missing::Wait, Missing::Fail] {
            let _go_on = first.stores.opening().hang_at(&managed);
            let config = Config { missing, ..config.clone() };
            let next = Transition::open(&config, &first.stores, &catalogs).unwrap();
            assert_eq!((made(&next), next.catalogs.len()), (1 + sample().entries.len(), 0));
            assert_eq!(next.stores.pending().len(), 0);
            assert_eq!(next.stores.without(&first.stores).count(), 0);
        }
    }
}
