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

/// Words and phrases that comments do not have, with what to say instead.
const PROSE: [(&str, &str); 31] = [
    ("amiss", "damaged, detached, wrong"),
    ("at home", "on, integrated"),
    ("awaited", "pending"),
    ("bears", "supports, contains"),
    ("by half", "partially"),
    ("came home", "completed, was returned"),
    ("come home", "complete, are returned"),
    ("comes home", "completes, is returned"),
    ("enemy", "attacker"),
    ("errand", "request, token"),
    ("fares", "state, health"),
    ("farewell", "disconnect, drain"),
    ("folder", "directory"),
    ("given back", "returned, cancelled, released"),
    ("gives back", "returns, cancels, releases"),
    ("goodbye", "disconnect, shutdown"),
    ("heard", "received, was notified"),
    ("hears", "receives, is notified"),
    ("in vain", "without success; starved"),
    ("keeper", "worker"),
    ("ledger", "counters, usage"),
    ("let in", "admitted"),
    ("mend", "repair, restore, clear"),
    ("mishap", "fault"),
    ("outlast", "survive"),
    ("passed over", "ignored, skipped"),
    ("sense", "valid, invalid"),
    ("shelf", "devices, provisioner"),
    ("steward", "worker"),
    ("stranger", "unidentified host, unverified source"),
    ("wish", "request, cancellation"),
];

#[test]
fn comments_have_the_words_of_the_field() {
    let mut found = Vec::new();
    for (name, _) in super::sources() {
        let checked = [
            "nvme/src",
            "rdma/src",
            "target/blockdev",
            "target/core",
            "target/gateway",
            "target/src",
            "initiator/src",
            "tests/src",
            "fuzz",
        ];
        if !checked.iter().any(|part| name.starts_with(part)) {
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
