//! Threads are of few kinds.

use std::path::Path;

use tests::structure;
use tests::structure::exceptions::Exceptions;

/// Beside them there is the control thread, which is the one that `main` has, with tokio's own.
const KINDS_MAX: usize = 6;
const WORKERS_MAX: usize = 5;

#[test]
fn threads_are_of_the_kinds_that_are_listed() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let crates = structure::crates(&checkout).expect("the sources");
    let found = structure::threads(&crates);
    let file = checkout.join("tests/structure/threads");
    let listed = Exceptions::read(&file).expect("tests/structure/threads");
    if let Err(difference) = listed.check(&found) {
        panic!("threads, see tests/structure/threads:\n{difference}");
    }
    let count = |kind: &str| found.keys().filter(|line| line.starts_with(kind)).count();
    assert_eq!((count("thread "), count("worker ")), (KINDS_MAX, WORKERS_MAX));
}
