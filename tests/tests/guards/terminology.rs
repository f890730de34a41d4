//! Names have the words of the field.

use std::path::Path;

use tests::structure::exceptions::Exceptions;
use tests::structure::terminology;

#[test]
fn names_contain_no_forbidden_words() {
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
fn comments_contain_no_forbidden_words() {
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

/// The same for texts of users, beside those of comments.
const TEXTS: [(&str, &str); 8] = [
    ("are a beginning", "are starting points"),
    ("as it should be", "healthy, unhealthy"),
    ("is as it was", "is unchanged, nothing was changed"),
    ("mistake", "error"),
    ("of theirs", "the noun"),
    ("told", "reported"),
    ("what it must be", "matches"),
    ("as long as it pays", "adapts"),
];

/// Nouns that a placeholder counts: one of them is in the singular, which `count` chooses.
const COUNTED: [&str; 10] = [
    "changes",
    "commands",
    "connections",
    "controllers",
    "hosts",
    "listeners",
    "namespaces",
    "queues",
    "requests",
    "subsystems",
];

/// Files that users read, with their lines.
fn texts_of_users() -> Vec<(String, String)> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = vec!["README.md".to_owned(), "SECURITY.md".to_owned()];
    for directory in ["docs", "docs/src", "configs"] {
        for entry in std::fs::read_dir(checkout.join(directory)).expect(directory) {
            let name = entry.expect("an entry").file_name();
            found.push(format!("{directory}/{}", name.to_str().expect("text")));
        }
    }
    let read = |name: String| {
        let text = std::fs::read_to_string(checkout.join(&name)).ok()?;
        Some((name, text))
    };
    let texts: Vec<_> = found.into_iter().filter_map(read).collect();
    assert!(texts.len() > 40, "the documents are found");
    texts
}

/// A text without placeholders.
fn fixed(text: &str) -> String {
    let mut found = String::new();
    let mut depth = 0_u32;
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ if depth == 0 => found.push(c),
            _ => {}
        }
    }
    found
}

/// Messages and help texts of programs that users run, with their places.
fn texts_of_programs() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (name, _) in super::sources() {
        let parts = ["target/src", "target/core/src", "target/blockdev/src", "initiator/src"];
        let is_program = parts.iter().any(|part| name.starts_with(part));
        if !is_program || name.contains("tests") {
            continue;
        }
        let texts = tests::structure::texts(&super::text(&name)).into_iter();
        found.extend(texts.map(|(number, text)| (format!("{name}:{number}"), text)));
    }
    found
}

#[test]
fn texts_of_users_contain_no_forbidden_words() {
    let mut found = Vec::new();
    let mut check = |place: String, text: &str| {
        for (word, instead) in PROSE.iter().chain(&TEXTS) {
            if has_word(text, word) {
                found.push(format!("{place}: \"{word}\"; rather: {instead}"));
            }
        }
        // On a command line two dots are the parent directory.
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("..") {
            if before.ends_with(['=', ',', ':']) && !after.starts_with(['.', '/', '=']) {
                found.push(format!("{place}: \"..\"; rather: a name in capitals, or …"));
            }
            rest = after;
        }
    };
    for (name, text) in texts_of_users() {
        for (line, number) in text.lines().zip(1..) {
            check(format!("{name}:{number}"), &line.to_lowercase());
        }
    }
    for (place, text) in texts_of_programs() {
        check(place, &fixed(&text).to_lowercase());
    }
    assert!(found.is_empty(), "words that texts do not have:\n{}", found.join("\n"));
}

#[test]
fn texts_of_programs_count_nouns_with_singular_and_plural() {
    let mut found = Vec::new();
    for (place, text) in texts_of_programs() {
        for (at, _) in text.match_indices("} ") {
            let rest = &text[at + 2..];
            let noun = rest.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default();
            let name_of_constant = text[..at].rsplit('{').next().unwrap_or_default();
            let is_constant = name_of_constant.chars().any(char::is_uppercase);
            if COUNTED.contains(&noun) && !is_constant {
                found.push(format!("{place}: {text}"));
            }
        }
    }
    assert!(found.is_empty(), "\"1 hosts\": use count:\n{}", found.join("\n"));
}

/// Words with which no name of a test begins: it has a noun of the field as its subject.
const NO_SUBJECTS: [&str; 18] = [
    "everything",
    "how",
    "it",
    "neither",
    "nobody",
    "nothing",
    "somebody",
    "something",
    "there",
    "they",
    "what",
    "whatever",
    "when",
    "where",
    "who",
    "whoever",
    "whom",
    "whose",
];

/// Words that no name of a test has, beside those of comments.
const NOT_IN_NAMES: [&str; 21] = [
    "awaits", "comes", "disk", "door", "fares", "gone", "goes", "hears", "home", "honest",
    "keeper", "lies", "outlasts", "said", "says", "stranger", "tell", "told", "vain", "who",
    "whom",
];

/// The name of a test is a sentence that the runner prints and docs/support.md cites.
#[test]
fn test_names_state_a_behaviour_in_terms_of_the_field() {
    let mut found = Vec::new();
    for (name, lines) in super::sources() {
        let mut is_test = false;
        for (line, number) in lines.iter().zip(1..) {
            let line = line.trim();
            if line.starts_with("#[") {
                is_test |= line.starts_with("#[test]");
                continue;
            }
            let Some(test) = line.strip_prefix("fn ").filter(|_| is_test) else {
                is_test &= line.is_empty();
                continue;
            };
            is_test = false;
            let test = test.split('(').next().unwrap_or(test);
            let mut words = test.split('_');
            let begins = words.clone().next().is_some_and(|word| NO_SUBJECTS.contains(&word));
            let has = words.any(|word| {
                NOT_IN_NAMES.contains(&word.strip_suffix('s').unwrap_or(word))
                    || NOT_IN_NAMES.contains(&word)
            });
            let prose = test.replace('_', " ");
            let is_dropped = PROSE.iter().any(|(word, _)| has_word(&prose, word));
            if begins || has || is_dropped || test.len() > 75 {
                found.push(format!("{name}:{number}: {test}"));
            }
        }
    }
    assert!(found.is_empty(), "names of tests to be said otherwise:\n{}", found.join("\n"));
}

/// Whether a text has a word, in singular or plural.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let rest = &text[at + word.len()..];
        let rest = rest.strip_prefix('s').unwrap_or(rest);
        !text[..at].ends_with(char::is_alphanumeric) && !rest.starts_with(char::is_alphanumeric)
    })
}
