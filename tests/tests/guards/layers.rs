//! Modules use modules of lower layers only.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use tests::structure::exceptions::Exceptions;
use tests::structure::layers::Layers;
use tests::structure::{self, Crate};

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn imports_point_to_lower_layers() {
    let layers = Layers::read(&checkout()).expect("tests/structure/layers");
    let file = checkout().join("tests/structure/upward");
    let exceptions = Exceptions::read(&file).expect("tests/structure/upward");
    let upward = layers.upward_of_all(&checkout()).expect("the sources");
    if let Err(difference) = exceptions.check(&upward) {
        panic!("imports up or sideways, see tests/structure/upward:\n{difference}");
    }
}

#[test]
fn every_module_has_a_layer() {
    let layers = Layers::read(&checkout()).expect("tests/structure/layers");
    let crates = structure::crates(&checkout()).expect("the sources");
    let lost: Vec<_> = crates.iter().flat_map(|(_, read)| layers.without_layer(read)).collect();
    assert!(lost.is_empty(), "give them a place in tests/structure/layers: {lost:#?}");
}

/// What no crate declares where the guards look for it would escape them.
#[test]
fn every_source_file_is_covered_by_the_guards() {
    let crates = structure::crates(&checkout()).expect("the sources");
    let modules = crates.iter().flat_map(|(_, read)| &read.modules);
    let read: BTreeSet<PathBuf> = modules.map(|module| module.file.clone()).collect();
    let packages =
        ["nvme", "rdma", "target", "target/blockdev", "target/core", "target/gateway", "initiator"];
    let mut left: Vec<_> = packages.map(|it| checkout().join(it).join("src")).into();
    let mut files = 0;
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            let file = path.strip_prefix(checkout()).expect("inside");
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|it| it == "rs") && !is_for_tests(file) {
                assert!(read.contains(file), "no crate of the guards declares {}", file.display());
                files += 1;
            }
        }
    }
    assert!(files > 300, "{files} files");
}

/// By name; what is declared for tests only is in files like these.
fn is_for_tests(file: &Path) -> bool {
    let named =
        |name: &str| ["tests", "tests.rs", "examples.rs", "testing.rs", "sim"].contains(&name);
    file.iter().filter_map(|part| part.to_str()).any(named)
}

/// An import that the tree must not have, added to a copy of a crate of it.
#[test]
fn an_import_upward_is_noticed() {
    let copy = tempfile::tempdir().expect("a directory");
    let source = copy.path().join("nvme/src");
    copy_all(&checkout().join("nvme/src"), &source);
    let layers = Layers::read(&checkout()).expect("tests/structure/layers");
    let upward = || {
        let read = Crate::read(copy.path(), Path::new("nvme/src/lib.rs")).expect("the copy");
        layers.upward(&read).into_keys().collect::<BTreeSet<_>>()
    };
    let before = upward();
    let file = source.join("status.rs");
    let text = fs::read_to_string(&file).expect("a module");
    fs::write(&file, format!("use crate::Sqe;\n{text}")).expect("written");
    let added = upward();
    let new: Vec<_> = added.difference(&before).collect();
    assert_eq!(new, ["nvme/src/status.rs -> nvme/src/sqe"]);
}

fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let path = entry.expect("an entry").path();
        let copy = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            copy_all(&path, &copy);
        } else {
            fs::copy(&path, &copy).expect("a copy");
        }
    }
}
