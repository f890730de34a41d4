//! Words that names must not contain, because the field has other terms.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use super::exceptions::lines;
use super::layers::Layers;
use super::{Crate, code};

/// Words that are not allowed, with replacements.
pub struct Terminology {
    instead: BTreeMap<String, String>,
    /// Allowed terms that contain such words.
    terms: Vec<Vec<String>>,
}

impl Terminology {
    /// The list of the checkout, `tests/structure/words`.
    ///
    /// # Errors
    /// It cannot be read, or a line has no second column.
    pub fn read(checkout: &Path) -> io::Result<Terminology> {
        Terminology::from(&fs::read_to_string(checkout.join("tests/structure/words"))?)
    }

    /// As [`Terminology::read`], from a text: words, replacements, and allowed terms, separated by
    /// `|`.
    ///
    /// # Errors
    /// A line has no second column.
    pub fn from(text: &str) -> io::Result<Terminology> {
        let mut list = Terminology { instead: BTreeMap::new(), terms: Vec::new() };
        for line in lines(text) {
            let columns: Vec<&str> = line.split('|').map(str::trim).collect();
            let [listed, instead, terms @ ..] = &columns[..] else {
                return Err(io::Error::other(format!("without a second column: {line}")));
            };
            let listed = listed.split_whitespace();
            list.instead.extend(listed.map(|word| (word.to_owned(), (*instead).to_owned())));
            let terms = terms.iter().flat_map(|terms| terms.split_whitespace());
            list.terms.extend(terms.map(split));
        }
        Ok(list)
    }

    /// The first listed word of a name, and its replacement.
    fn first_in(&self, name: &str) -> Option<(&str, &str)> {
        let parts = split(name);
        let mut at = 0;
        while at < parts.len() {
            let term = self.terms.iter().find(|term| parts[at..].starts_with(term));
            if let Some((word, instead)) =
                self.instead.get_key_value(&parts[at]).filter(|_| term.is_none())
            {
                return Some((word, instead));
            }
            at += term.map_or(1, Vec::len);
        }
        None
    }

    /// Names with a listed word: as in the list of exceptions, and the message.
    fn found(&self, names: Vec<Name>) -> BTreeMap<String, String> {
        let found = names.into_iter().filter_map(|name| {
            let (word, instead) = self.first_in(&name.name)?;
            let line = format!("{} {} {}", name.kind, name.place, name.name);
            Some((line, format!("{} in {}: \"{word}\"; rather: {instead}", name.name, name.place)))
        });
        found.collect()
    }
}

/// Findings in the checkout: modules, types, subcommands, and keys of the configuration.
///
/// # Errors
/// A file cannot be read.
pub fn found_in_all(checkout: &Path) -> io::Result<BTreeMap<String, String>> {
    let layers = Layers::read(checkout)?;
    let mut names = modules(checkout, &["nvme", "rdma", "target", "initiator", "tests"])?;
    for (_, read) in super::crates(checkout)? {
        names.extend(types(&read, &layers));
        names.extend(subcommands(&read, &layers));
    }
    for (section, keys) in nvmfd::config::known_keys() {
        names.extend(keys.into_iter().map(|key| Name::key(section, key)));
    }
    Ok(Terminology::read(checkout)?.found(names))
}

/// A name in the sources.
struct Name {
    kind: &'static str,
    place: String,
    name: String,
}

impl Name {
    fn key(section: &str, key: &str) -> Name {
        Name { kind: "key", place: section.to_owned(), name: key.to_owned() }
    }
}

/// Files and directories of Rust code below `directories`, once each.
///
/// # Errors
/// A directory cannot be read.
fn modules(checkout: &Path, directories: &[&str]) -> io::Result<Vec<Name>> {
    let mut left: Vec<_> = directories.iter().map(|name| checkout.join(name)).collect();
    let mut found = Vec::new();
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let is_directory = path.is_dir();
            let is_module = is_directory || path.extension().is_some_and(|rest| rest == "rs");
            if let Some(name) =
                path.file_stem().and_then(|name| name.to_str()).filter(|_| is_module)
            {
                let place = path.parent().and_then(|path| path.strip_prefix(checkout).ok());
                let place = place.map_or_else(String::new, |path| path.display().to_string());
                found.push(Name { kind: "module", place, name: name.to_owned() });
            }
            if is_directory {
                left.push(path);
            }
        }
    }
    Ok(found)
}

/// Types that other modules see, with the places that their files move to.
fn types(read: &Crate, layers: &Layers) -> Vec<Name> {
    names_of(read, layers, "type", |lines| {
        let types = code::type_names(lines).into_iter();
        types.filter(|(_, is_visible)| *is_visible).map(|(name, _)| name).collect()
    })
}

/// Subcommands of the programs.
fn subcommands(read: &Crate, layers: &Layers) -> Vec<Name> {
    names_of(read, layers, "command", code::subcommands)
}

fn names_of(
    read: &Crate,
    layers: &Layers,
    kind: &'static str,
    names: impl Fn(&[String]) -> Vec<String>,
) -> Vec<Name> {
    let mut all = Vec::new();
    for module in &read.modules {
        let file = module.file.display().to_string();
        let place = layers.moved(&file);
        let names = names(&module.code).into_iter();
        all.extend(names.map(|name| Name { kind, place: place.to_owned(), name }));
    }
    all
}

/// `NsDirectory`, `ns_directory` and `ns-directory` are "ns", "directory".
fn split(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut is_start = true;
    let mut was_lower = false;
    for c in name.chars() {
        if !c.is_alphanumeric() {
            is_start = true;
            continue;
        }
        if is_start || (c.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        (is_start, was_lower) = (false, !c.is_uppercase());
        words.last_mut().expect("one was pushed").extend(c.to_lowercase());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::super::tests::written;
    use crate::structure::terminology::*;

    const LIST: &str = "# comment\nstore stores | device | backing_store\ntake | -\n";

    #[test]
    fn complete_words_are_found_in_every_case() {
        let list = Terminology::from(LIST).unwrap();
        let first = |name| list.first_in(name).map(|(word, _)| word);
        for name in ["Store", "ServedStore", "served_store", "store-all", "the store"] {
            assert_eq!(first(name), Some("store"), "{name}");
        }
        for name in ["Restore", "Stored", "storeroom", "BackingStore", "backing_store_id"] {
            assert_eq!(first(name), None, "{name}");
        }
        assert_eq!(first("BackingStoreStore"), Some("store"));
        assert_eq!(first("StoreBacking"), Some("store"));
        assert_eq!(list.first_in("take"), Some(("take", "-")));
        assert!(Terminology::from("store\n").is_err());
    }

    #[test]
    fn names_are_found_in_modules_types_and_commands() {
        let (directory, read) = written(&[
            ("lib.rs", "mod stores;\n"),
            (
                "stores.rs",
                "pub(crate) struct Store;\nstruct OwnStore;\n#[derive(Subcommand)]\nenum A {\n    Take,\n}\n#[cfg(test)]\nmod tests {\n    pub struct TakeIt;\n}\n",
            ),
            ("take/mod.rs", ""),
        ]);
        let layers = Layers::from("", "stores.rs\tdevices.rs\n").unwrap();
        let mut names = modules(directory.path(), &[""]).unwrap();
        names.extend(types(&read, &layers));
        names.extend(subcommands(&read, &layers));
        names.push(Name::key("[stop]", "take"));
        let found = Terminology::from(LIST).unwrap().found(names);
        let expected = [
            "command devices.rs Take",
            "key [stop] take",
            "module  stores",
            "module  take",
            "type devices.rs Store",
        ];
        assert_eq!(found.into_keys().collect::<Vec<_>>(), expected);
    }
}
