use crate::blockdev::durable::testing::calls;
use crate::provision::ns_catalog::*;
use crate::state::ns_catalog::tests::sample;

fn opened(directory: &Path) -> (Catalog, Vec<String>) {
    Catalog::open(directory, "nqn.2026-11.io.nvmfd:a".parse().unwrap()).unwrap()
}

#[test]
fn a_reopened_catalog_removes_images_of_unfinished_requests() {
    let directory = tempfile::tempdir().unwrap();
    let (mut catalog, lines) = opened(directory.path());
    assert!(lines.is_empty() && catalog.record().entries.is_empty());
    let unsettled = catalog.image(*sample().unsettled.first().unwrap());
    let left = crate::blockdev::rollback_copy(&unsettled);
    let foreign = directory.path().join("other.img");
    let made: Vec<PathBuf> = sample().entries.values().map(|e| catalog.image(e.uuid)).collect();
    for path in made.iter().chain([&unsettled, &left, &foreign]) {
        fs::write(path, [0; 512]).unwrap();
    }
    catalog.keep(sample()).unwrap();
    drop(catalog);
    let (catalog, lines) = opened(directory.path());
    assert_eq!(catalog.record().entries, sample().entries);
    assert!(catalog.record().unsettled.is_empty() && !unsettled.exists() && !left.exists());
    assert!(made.iter().all(|path| path.exists()) && foreign.exists());
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("other.img belongs to no namespace"), "{}", lines[0]);
}

/// Namespaces that exist at a start are served, so a power loss must not revert them.
#[test]
fn opening_a_catalog_syncs_its_directory() {
    let directory = tempfile::tempdir().unwrap();
    let name = directory.path().file_name().unwrap().to_str().unwrap();
    opened(directory.path()).0.keep(sample()).unwrap();
    // No request is unfinished after this.
    drop(opened(directory.path()));
    let (_, did) = calls(|| opened(directory.path()));
    assert_eq!(did, [format!("sync directory {name}")]);
}

#[test]
fn a_directory_has_one_daemon_and_one_subsystem() {
    let directory = tempfile::tempdir().unwrap();
    let (mut catalog, _) = opened(directory.path());
    let open = |nqn: &str| Catalog::open(directory.path(), nqn.parse().unwrap()).unwrap_err();
    assert!(open("nqn.2026-11.io.nvmfd:a").contains("in use by another nvmfd"));
    catalog.keep(sample()).unwrap();
    drop(catalog);
    assert!(open("nqn.2026-11.io.nvmfd:b").contains("has the namespaces of"));
    fs::write(directory.path().join(CATALOG_RECORD), "nonsense").unwrap();
    assert!(open("nqn.2026-11.io.nvmfd:a").contains("restore it"));
    let gone = directory.path().join("gone");
    let said = Catalog::open(&gone, "nqn.2026-11.io.nvmfd:a".parse().unwrap()).unwrap_err();
    assert!(said.contains("make it"), "{said}");
}

#[test]
fn a_catalog_write_failure_leaves_the_record_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let (mut catalog, _) = opened(directory.path());
    let before = catalog.record().clone();
    fs::remove_dir_all(directory.path()).unwrap();
    assert!(catalog.keep(sample()).is_err());
    assert_eq!(*catalog.record(), before);
}

/// A file system that is mounted late: the directory below its mount point was opened.
#[test]
fn the_record_of_a_later_mounted_directory_is_not_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let (path, aside) = (directory.path().join("managed"), directory.path().join("aside"));
    fs::create_dir(&path).unwrap();
    let (mut real, _) = opened(&path);
    real.keep(sample()).unwrap();
    drop(real);
    fs::rename(&path, &aside).unwrap();
    fs::create_dir(&path).unwrap();
    let (mut empty, _) = opened(&path);
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    let error = empty.keep(empty.record().clone()).unwrap_err().to_string();
    assert!(error.contains("another directory than when it was opened"), "{error}");
    assert!(empty.settle().is_ok(), "nothing to do");
    assert_eq!(opened(&path).0.record().entries, sample().entries);
}

#[test]
fn configured_namespaces_take_precedence_over_host_created_ones() {
    let directory = tempfile::tempdir().unwrap();
    let (mut catalog, _) = opened(directory.path());
    catalog.keep(sample()).unwrap();
    let text = "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\n\
                nqn = \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n\
                [[subsystem.namespace]]\nnsid = 3\nkind = \"ram\"\nsize = \"1MiB\"\n";
    let declared = crate::config::Config::parse(text).unwrap().subsystems.remove(0);
    let told = |config: &SubsystemConfig| {
        catalog.eclipsed(config, |_, image| image.exists()).collect::<Vec<_>>()
    };
    let lines = told(&declared);
    assert!(lines[0].contains("is configured as well"), "{}", lines[0]);
    assert!(lines[1].contains("is missing"), "{}", lines[1]);
    let mut merged = declared.clone();
    catalog.merge_into(&mut merged, |_, image| image.exists());
    assert_eq!(merged, declared);
    // An open namespace is served, whatever the file system reports about its file.
    let mut open = declared.clone();
    catalog.merge_into(&mut open, |nsid, image| nsid == 7 && image.starts_with(directory.path()));
    assert_eq!(open.namespaces.iter().map(|n| n.nsid).collect::<Vec<_>>(), [3, 7]);
    for entry in sample().entries.values() {
        fs::write(catalog.image(entry.uuid), [0; 512]).unwrap();
    }
    catalog.merge_into(&mut merged, |_, image| image.exists());
    let nsids: Vec<u32> = merged.namespaces.iter().map(|n| n.nsid).collect();
    assert_eq!((nsids, told(&declared).len()), (vec![3, 7], 1));
    assert_eq!(merged.namespaces[0].kind, NamespaceKind::Ram { size: 1 << 20 });
    assert_eq!(merged.offer.masks, [(7, sample().entries[&7].hosts.clone())].into());
    let mut small = declared;
    small.namespaces.clear();
    small.offer.max_nsid = 5;
    catalog.merge_into(&mut small, |_, image| image.exists());
    assert_eq!(small.namespaces.len(), 1);
    assert!(told(&small).iter().any(|line| line.contains("beyond `max_nsid`")));
}
