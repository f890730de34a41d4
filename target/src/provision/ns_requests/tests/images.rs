//! Namespaces in images of Ceph RBD. There is no cluster: the tests say what became of an image, and
//! none can be opened.

use super::*;
use crate::blockdev::OpenError;
use crate::blockdev::ceph::{ImageIdentity, ImageName, ImageOrigin};
use crate::blockdev::rbd::Removal;
use crate::state::ns_catalog::CatalogImage;
use crate::state::ns_catalog::tests::{being_made, sample_of_images};

fn nqn() -> Nqn {
    NQN.parse().unwrap()
}

/// As [`super::config`], with a pool of a cluster that cannot be reached.
fn config(directory: &Path) -> Config {
    let mut config = Config { missing: Missing::Wait, ..super::config(directory) };
    let managed = config.subsystems[0].managed.as_mut().unwrap();
    managed.pool = Some("rbd".to_owned());
    managed.cluster.conf = Some(directory.join("no-configuration"));
    config
}

/// As [`super::provisioner`], with a state directory, which images need.
fn provisioner(config: &Config) -> Provisioner {
    let state = config.subsystems[0].managed.as_ref().unwrap().directory.clone();
    provisioner_with(config, DeviceTable::new(Some(state), 0))
}

/// Creates a namespace of 1 MiB in an image, of which `made` is the outcome.
fn create_with(provisioner: &mut Provisioner, made: CreateOutcome) -> Result<u32, Status> {
    let order = order(host(1), create(1));
    let (managed, subsystem) = provisioner.granted(&order)?;
    let image = being_made("rbd");
    // The directory is full.
    let (plan, guards) = provisioner.plan(&order, &subsystem, &managed, (0, Some(&image)))?;
    let directory = Arc::clone(provisioner.catalogs[&nqn()].place());
    let task = RequestTask::new(nqn(), directory, plan, guards);
    let mut task = task.with_images_of(managed.cluster);
    let mut possible = true;
    loop {
        possible = match task.next(provisioner, possible) {
            RequestStep::Files(step) => step.execute(|config, size_bytes| {
                let NamespaceKind::Rbd { image, made: None, .. } = &config.kind else {
                    panic!("{config}")
                };
                assert_eq!(image.to_string(), format!("rbd/{}", config.uuid));
                assert!(size_bytes == MIB && !config.allow_format);
                made.clone()
            }),
            RequestStep::Await(barrier) => {
                wait_for_reactors(barrier);
                true
            }
            RequestStep::Answer(outcome) => return outcome,
        };
    }
}

/// The record as it was written; the open one is the same.
fn record(provisioner: &Provisioner) -> NamespaceCatalogRecord {
    let catalog = &provisioner.catalogs[&nqn()];
    let written = Catalog::record_in(catalog.directory(), nqn()).unwrap();
    assert_eq!(written, *catalog.record());
    written
}

/// Removes the images of unfinished requests, with this result of each.
fn remove(
    provisioner: &mut Provisioner,
    outcome: fn(&ClusterConfig, &ImageName, &ImageOrigin) -> Result<Removal, OpenError>,
) -> Option<Result<(), String>> {
    let unsettled = provisioner.unsettled_images().pop().expect("there is one");
    let empty = empty_provisioner(&provisioner.config, DeviceTable::default());
    let own = Mutex::new(mem::replace(provisioner, empty));
    let outcome = unsettled.remove(&own, &Arc::default(), outcome);
    *provisioner = own.into_inner().unwrap();
    outcome
}

fn only_unsettled(record: &NamespaceCatalogRecord) -> (Uuid, &CatalogImage) {
    assert_eq!((record.entries.len(), record.unsettled.len()), (0, 1), "{record:?}");
    record.unsettled_images().next().unwrap()
}

#[test]
fn an_image_that_cannot_be_served_is_in_the_record_until_it_is_removed() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    let made = Ok(Some("id-1".to_owned()));
    assert_eq!(create_with(&mut provisioner, made), Err(FAILED), "it cannot be opened");
    let before = record(&provisioner);
    let id = ImageIdentity::Id("id-1".to_owned());
    assert_eq!(only_unsettled(&before).1.origin.identity, id);
    assert_eq!(before.used_bytes(), MIB, "it counts against the quota");
    let refused = remove(&mut provisioner, |_, _, _| {
        let sentence = "it has snapshots".to_owned();
        Err(OpenError { sentence, may_pass: true })
    });
    assert_eq!(refused, Some(Err("it has snapshots".to_owned())));
    assert_eq!(record(&provisioner), before);
    let removed = remove(&mut provisioner, |cluster, name, origin| {
        assert_eq!((cluster.entity().as_str(), &*name.pool), ("client.nvmfd", "rbd"));
        assert_eq!(origin.identity, ImageIdentity::Id("id-1".to_owned()));
        Ok(Removal::Removed)
    });
    assert_eq!(removed, Some(Ok(())));
    assert_eq!(record(&provisioner), NamespaceCatalogRecord::new(nqn()));
    assert!(provisioner.unsettled_images().is_empty());
}

#[test]
fn an_image_that_somebody_else_has_made_is_not_in_the_record() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    let exists = Err(MakeError::Exists("there is one".to_owned()));
    assert_eq!(create_with(&mut provisioner, exists), Err(FAILED));
    assert_eq!(record(&provisioner), NamespaceCatalogRecord::new(nqn()));
}

#[test]
fn a_create_without_space_in_the_pool_or_without_an_answer_has_its_status() {
    let directory = tempdir().unwrap();
    let full = Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr();
    let outcomes = [
        (MakeError::NoSpace as fn(String) -> MakeError, full),
        (MakeError::Failed as fn(String) -> MakeError, FAILED),
    ];
    for (error, status) in outcomes {
        let mut provisioner = provisioner(&config(directory.path()));
        let made = Err(error("why".to_owned()));
        assert_eq!(create_with(&mut provisioner, made), Err(status));
        // A part of it may exist, or will.
        assert_eq!(only_unsettled(&record(&provisioner)).1, &being_made("rbd"));
        assert_eq!(remove(&mut provisioner, |_, _, _| Ok(Removal::NotOwn)), Some(Ok(())));
        assert_eq!(record(&provisioner), NamespaceCatalogRecord::new(nqn()));
        provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    }
}

#[test]
fn a_create_without_a_cluster_changes_nothing() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    assert_eq!(execute(&mut provisioner, &order(host(1), create(1))), Err(FAILED));
    assert_eq!(record(&provisioner), NamespaceCatalogRecord::new(nqn()));
    assert_eq!(images(directory.path()).len(), 0, "and no file instead");
}

#[test]
fn no_image_is_removed_during_a_request_or_after_its_catalog_was_closed() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    let failed = Err(MakeError::Failed("why".to_owned()));
    assert_eq!(create_with(&mut provisioner, failed), Err(FAILED));
    let before = record(&provisioner);
    let place = Arc::clone(provisioner.catalogs[&nqn()].place());
    let request = place.turn();
    assert_eq!(remove(&mut provisioner, |_, _, _| panic!("not now")), None);
    drop(request);
    let unsettled = provisioner.unsettled_images().pop().unwrap();
    let closed = provisioner.catalogs.remove(&nqn()).unwrap();
    let own = Mutex::new(provisioner);
    assert_eq!(unsettled.remove(&own, &Arc::default(), |_, _, _| panic!("not now")), None);
    assert_eq!(*closed.record(), before);
}

/// The image of a namespace was removed by hand, or its cluster is away: a host can give it up.
#[test]
fn a_namespace_whose_image_cannot_be_opened_is_pending_and_can_be_deleted() {
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let (mut catalog, _) = Catalog::open(directory.path(), nqn()).unwrap();
    let mut kept = sample_of_images();
    kept.entries.retain(|nsid, _| *nsid == 7);
    kept.unsettled.clear();
    kept.images.retain(|uuid, _| kept.entries.values().any(|entry| entry.uuid == *uuid));
    catalog.keep(kept.clone()).unwrap();
    drop(catalog);
    let mut provisioner = provisioner(&config);
    assert_eq!(provisioner.stores.pending().len(), 1);
    let uuid = kept.entries[&7].uuid;
    let NamespaceKind::Rbd { image, made, .. } = &provisioner.merged(None)[0].namespaces[1].kind
    else {
        panic!("an image")
    };
    assert_eq!(image.to_string(), format!("rbd/{uuid}"));
    let made = made.as_ref().unwrap();
    assert_eq!((&*made.id, made.size_bytes), ("85d6e1e2b1a3", 1 << 20));
    assert_eq!(ask(&mut provisioner, NamespaceRequest::Delete { nsid: 7 }), Ok(0));
    assert_eq!(provisioner.stores.pending().len(), 0);
    assert_eq!(only_unsettled(&record(&provisioner)), (uuid, &kept.images[&uuid]));
    // A restart finds it.
    provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    drop(provisioner);
    let mut provisioner = self::provisioner(&config);
    assert_eq!(only_unsettled(&record(&provisioner)).0, uuid);
    assert_eq!(remove(&mut provisioner, |_, _, _| Ok(Removal::Removed)), Some(Ok(())));
    assert_eq!(record(&provisioner), NamespaceCatalogRecord::new(nqn()));
}

#[test]
fn a_lost_image_is_pending_even_if_a_missing_device_is_to_fail() {
    let directory = tempdir().unwrap();
    let (mut catalog, _) = Catalog::open(directory.path(), nqn()).unwrap();
    let mut kept = sample_of_images();
    kept.entries.retain(|nsid, _| *nsid == 7);
    kept.unsettled.clear();
    kept.images.retain(|uuid, _| kept.entries.values().any(|entry| entry.uuid == *uuid));
    catalog.keep(kept).unwrap();
    drop(catalog);
    let config = Config { missing: Missing::Fail, ..config(directory.path()) };
    let mut provisioner = self::provisioner(&config);
    assert_eq!(provisioner.stores.pending().len(), 1);
    assert_eq!(
        ask(&mut provisioner, NamespaceRequest::Detach { nsid: 7, cntlids: vec![1] }),
        Ok(0)
    );
    assert_eq!(provisioner.stores.pending().len(), 1, "it prevents no request");
}

#[test]
fn a_pool_needs_a_state_directory() {
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let stores = DeviceTable::default();
    let refused = Transition::open(&config, &stores, &Catalogs::new()).err().unwrap();
    assert!(refused.0.contains("`pool` needs a `state_directory`"), "{refused}");
}

/// Removals that wait until the test has ended them.
#[test]
fn few_removals_are_in_progress_whatever_their_number() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static BEGUN: AtomicUsize = AtomicUsize::new(0);
    static GATE: Mutex<()> = Mutex::new(());
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let (mut catalog, _) = Catalog::open(directory.path(), nqn()).unwrap();
    let mut kept = NamespaceCatalogRecord::new(nqn());
    kept.unsettled = (1..=20).map(|n| Uuid::from_bytes([n; 16])).collect();
    kept.images = kept.unsettled.iter().map(|uuid| (*uuid, being_made("rbd"))).collect();
    catalog.keep(kept).unwrap();
    drop(catalog);
    let own = Mutex::new(provisioner(&config));
    let running = Arc::new(());
    let remove = || {
        let unsettled = lock(&own).unsettled_images().pop().expect("there are some");
        unsettled.remove(&own, &running, |_, _, _| {
            BEGUN.fetch_add(1, Ordering::Relaxed);
            let _open = GATE.lock();
            Ok(Removal::Removed)
        })
    };
    let gate = GATE.lock().unwrap();
    for _ in 0..3 {
        assert!(remove().unwrap().is_err());
        assert_eq!(BEGUN.load(Ordering::Relaxed), 4, "those that hang count");
    }
    drop(gate);
    while !lock(&own).unsettled_images().is_empty() {
        remove();
    }
    assert_eq!(record(&lock(&own)), NamespaceCatalogRecord::new(nqn()));
}

#[test]
fn namespaces_in_files_are_served_after_a_pool_was_configured() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&super::config(directory.path()));
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    drop(provisioner);
    let mut provisioner = self::provisioner(&config(directory.path()));
    assert!(provisioner.stores.store(nqn(), 1).is_some());
    assert_eq!(ask(&mut provisioner, NamespaceRequest::Delete { nsid: 1 }), Ok(0));
    assert_eq!(images(directory.path()).len(), 0);
}
