//! Sizes of functions and files.

use std::path::Path;

use tests::structure;

#[test]
fn functions_and_files_of_production_code_are_short() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let crates = structure::crates(&checkout).expect("the sources");
    let production = crates.iter().filter(|(name, _)| *name != "tests");
    let long: Vec<_> = production
        .flat_map(|(_, read)| [read.long_functions(), read.long_files()].concat())
        .collect();
    assert!(long.is_empty(), "too many lines, split them: {long:#?}");
}
