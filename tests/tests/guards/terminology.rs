//! Names have the words of the field.

use std::path::Path;

use tests::structure::exceptions::Exceptions;
use tests::structure::terminology;

#[test]
fn names_have_the_words_of_the_field() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let found = terminology::found_in_all(&checkout).expect("the sources");
    let file = checkout.join("tests/structure/names");
    let exceptions = Exceptions::read(&file).expect("tests/structure/names");
    if let Err(difference) = exceptions.check(&found) {
        panic!(
            "names with words of tests/structure/words, see tests/structure/names:\n{difference}"
        );
    }
}
