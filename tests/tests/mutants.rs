//! The list of lines that `make mutants` breaks fits the sources as they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the checkout").canonicalize().expect("the checkout")
}

/// A mutant of the list: the file, its text, the replacement, and the tests that must fail.
#[derive(Default)]
struct Mutant {
    file: String,
    old: String,
    new: String,
    tests: String,
}

/// Reads it as `tests/mutants/run` does.
fn list() -> Vec<Mutant> {
    let text = fs::read_to_string(root().join("tests/mutants/list")).expect("the list");
    let (mut all, mut next) = (Vec::new(), Mutant::default());
    for line in text.lines() {
        let in_new = !next.new.is_empty();
        if let Some(tests) = line.strip_prefix("= ") {
            tests.clone_into(&mut next.tests);
            all.push(std::mem::take(&mut next));
        } else if let Some(old) = line.strip_prefix("- ") {
            old.clone_into(&mut next.old);
        } else if let Some(new) = line.strip_prefix("+ ") {
            new.clone_into(&mut next.new);
        } else if in_new {
            next.new = format!("{}\n{line}", next.new);
        } else if !next.old.is_empty() {
            next.old = format!("{}\n{line}", next.old);
        } else if !line.is_empty() && !line.starts_with('#') {
            line.clone_into(&mut next.file);
        }
    }
    all
}

#[test]
fn every_mutant_still_fits_its_file() {
    let all = list();
    assert!(all.len() >= 60, "{} mutants", all.len());
    let mut seen = BTreeSet::new();
    for Mutant { file, old, new, tests } in &all {
        let source = fs::read_to_string(root().join(file)).expect(file);
        // What the tests themselves say is not broken.
        let code = source.split("#[cfg(test)]\nmod tests {").next().expect("code");
        assert_eq!(code.matches(old).count(), 1, "{file}: this is not there once: {old}");
        assert_eq!(source.matches(old).count(), 1, "{file}: this is not there once: {old}");
        assert_ne!(old, new, "{file}");
        assert!(seen.insert((file, old, new)), "{file}: twice: {old}");
        let package = tests.split(' ').next().expect("a package");
        let packages =
            ["nvme", "rdma", "nvmfd-blockdev", "nvmfd-core", "nvmfd-gateway", "nvmfd", "initiator"];
        assert!(packages.contains(&package), "{tests}");
        assert!(tests.contains(" --lib ") || tests.contains(" --test "), "{tests}");
    }
}
