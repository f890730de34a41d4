//! Every crate that takes part has a licence that `deny.toml` allows; what `cargo deny check licenses`
//! would say, without that tool.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Is an expression of SPDX satisfied by the licences that are allowed? `OR` is a choice, `AND`
/// binds tighter, `WITH` belongs to the licence before it, and old manifests write `/` for `OR`.
fn satisfied(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let whole = any_of(&tokens, &mut at, allowed);
    whole && at == tokens.len()
}

fn any_of(tokens: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut good = all_of(tokens, at, allowed);
    while tokens.get(*at) == Some(&"OR") {
        *at += 1;
        good |= all_of(tokens, at, allowed);
    }
    good
}

fn all_of(tokens: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let mut good = one(tokens, at, allowed);
    while tokens.get(*at) == Some(&"AND") {
        *at += 1;
        good &= one(tokens, at, allowed);
    }
    good
}

fn one(tokens: &[&str], at: &mut usize, allowed: &BTreeSet<String>) -> bool {
    let Some(first) = tokens.get(*at) else { return false };
    *at += 1;
    if *first == "(" {
        let good = any_of(tokens, at, allowed);
        *at += 1;
        return good && tokens.get(*at - 1) == Some(&")");
    }
    let mut name = (*first).to_owned();
    if let (Some(&"WITH"), Some(exception)) = (tokens.get(*at), tokens.get(*at + 1)) {
        name = format!("{name} WITH {exception}");
        *at += 2;
    }
    allowed.contains(&name)
}

/// What `deny.toml` allows, and the crates that it explains itself.
fn policy() -> (BTreeSet<String>, BTreeSet<String>) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deny.toml");
    let text = std::fs::read_to_string(file).expect("deny.toml");
    let policy: toml::Table = text.parse().expect("TOML");
    let list = |value: &toml::Value| value.as_array().cloned().unwrap_or_default();
    let allowed = list(&policy["licenses"]["allow"]);
    let clarified = list(&policy["licenses"]["clarify"]);
    (
        allowed.iter().map(|name| name.as_str().expect("a name").to_owned()).collect(),
        clarified.iter().map(|each| each["crate"].as_str().expect("a name").to_owned()).collect(),
    )
}

#[test]
fn every_crate_has_a_licence_that_is_allowed() {
    let (allowed, clarified) = policy();
    // Where crates are that no build on this machine needs, Cargo would have to fetch them.
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .output()
        .expect("cargo metadata");
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: Value = serde_json::from_slice(&metadata.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 100, "{} packages", packages.len());
    let mut strange = Vec::new();
    for package in packages {
        let (name, licence) = (package["name"].as_str(), package["license"].as_str());
        let name = name.expect("a name");
        if !clarified.contains(name) && !licence.is_some_and(|text| satisfied(text, &allowed)) {
            strange.push(format!("{name}: {licence:?}"));
        }
        let source = package["source"].as_str();
        let from = ["registry+https://github.com/rust-lang/crates.io-index"];
        assert!(source.is_none_or(|source| from.contains(&source)), "{name} is from {source:?}");
    }
    assert!(strange.is_empty(), "deny.toml does not allow: {strange:#?}");
}

#[test]
fn licence_expressions_are_evaluated_according_to_spdx() {
    let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(String::from).into();
    for good in [
        "MIT",
        "MIT/GPL-3.0",
        "GPL-3.0 OR MIT",
        "MIT AND Apache-2.0",
        "(MIT OR GPL-3.0) AND Apache-2.0",
        "GPL-3.0 AND Zlib OR MIT",
        "Apache-2.0 WITH LLVM-exception",
    ] {
        assert!(satisfied(good, &allowed), "{good}");
    }
    for bad in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "MIT AND (GPL-3.0 OR Zlib)",
        "MIT WITH LLVM-exception",
        "MIT GPL-3.0",
        "(MIT",
        "MIT)",
        "Apache-2.0 AND",
    ] {
        assert!(!satisfied(bad, &allowed), "{bad}");
    }
}
