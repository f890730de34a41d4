//! The set of valid keys, derived from the parser itself.

use std::collections::{BTreeMap, BTreeSet};

use super::ConfigFiles;
use super::files::merged;
use super::schema::root;
use super::table_reader::{Diagnostics, TableReader};

/// A text with one of every section that the parser reads only if present. The values are
/// irrelevant.
const EVERY_SECTION: &str = r#"
[[listener]]
[capture]
[ceph]
[group]
[observe]
[soft]
[stop]
[[discovery.referral]]
[[host]]
[[subsystem]]
[subsystem.managed]
[[subsystem.namespace]]
[subsystem.namespace.limit]
[[qos]]
"#;

/// Keys by title of a section (`[limits]`, `[[subsystem]]`; `the file` for those before all
/// sections). Sections inside are keys as well.
pub fn known_keys() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let sources = ConfigFiles::from(EVERY_SECTION);
    let report = Diagnostics::new(&sources);
    let table = merged(&sources, &report);
    let span = table.span();
    root(TableReader::new(table.into_inner(), span, "the file", &report));
    report.known.into_inner()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::known_keys::*;

    /// Of each section of the page, the keys of its table.
    fn page() -> BTreeMap<String, BTreeSet<String>> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/configuration.md");
        let text = std::fs::read_to_string(file).expect("the page");
        let mut sections: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut title = None;
        for line in text.lines() {
            if let Some(heading) = line.strip_prefix("## ") {
                title = Some(heading.replace('`', ""));
            }
            let row = line.strip_prefix("| `").and_then(|row| row.split_once('`'));
            if let (Some(title), Some((key, rest))) = (&title, row) {
                assert!(rest.matches('|').count() == 3, "a key, its default, its meaning: {line}");
                let new = sections.entry(title.clone()).or_default().insert(key.to_owned());
                assert!(new, "{title} has {key} twice");
            }
        }
        sections
    }

    #[test]
    fn configuration_page_documents_exactly_the_known_keys() {
        let page = page();
        let known: BTreeMap<String, BTreeSet<String>> = known_keys()
            .into_iter()
            .map(|(title, keys)| (title.to_owned(), keys.into_iter().map(str::to_owned).collect()))
            .collect();
        assert!(known.len() >= 12 && known["[[subsystem.namespace]]"].contains("block_size"));
        for (title, keys) in &known {
            let written = page.get(title).cloned().unwrap_or_default();
            let missing: Vec<_> = keys.difference(&written).collect();
            assert!(missing.is_empty(), "docs/src/configuration.md, {title}: describe {missing:?}");
            let strange: Vec<_> = written.difference(keys).collect();
            assert!(
                strange.is_empty(),
                "docs/src/configuration.md, {title}: {strange:?} is unknown"
            );
        }
        let strange: Vec<_> = page.keys().filter(|title| !known.contains_key(*title)).collect();
        assert!(strange.is_empty(), "docs/src/configuration.md: {strange:?} is no section");
    }
}
