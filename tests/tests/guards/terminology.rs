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

/// Words that comments of production sources do not have, with what to say instead.
const PROSE: [(&str, &str); 6] = [
    ("folder", "directory"),
    ("shelf", "devices, provisioner"),
    ("steward", "worker"),
    ("keeper", "worker"),
    ("in vain", "without success; starved"),
    ("sense", "valid, invalid"),
];

#[test]
fn comments_have_the_words_of_the_field() {
    let mut found = Vec::new();
    for (name, _) in super::sources() {
        let production = [
            "nvme/src",
            "rdma/src",
            "target/blockdev",
            "target/core",
            "target/src",
            "initiator/src",
        ];
        if !production.iter().any(|part| name.starts_with(part)) {
            continue;
        }
        for (line, number) in super::text(&name).lines().zip(1..) {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            // Between backticks is code.
            let prose = comment.split('`').step_by(2).collect::<String>().to_lowercase();
            for (word, instead) in PROSE.iter().filter(|(word, _)| has_word(&prose, word)) {
                found.push(format!("{name}:{number}: \"{word}\"; rather: {instead}"));
            }
        }
    }
    assert!(found.is_empty(), "words that comments do not have:\n{}", found.join("\n"));
}

/// Whether a text has a word, in singular or plural.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let rest = &text[at + word.len()..];
        let rest = rest.strip_prefix('s').unwrap_or(rest);
        !text[..at].ends_with(char::is_alphanumeric) && !rest.starts_with(char::is_alphanumeric)
    })
}
