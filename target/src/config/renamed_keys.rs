//! Keys of the configuration whose names have changed: earlier names are read, with a warning.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A key with an earlier name.
struct RenamedKey {
    /// The path of its section, such as `subsystem.namespace`; empty for the top of the file.
    section: &'static str,
    earlier: &'static str,
    name: &'static str,
}

const RENAMED: [RenamedKey; 1] = [RenamedKey { section: "", earlier: "limit", name: "qos" }];

/// The renamed keys of the section with this title: `[[subsystem]]`, or `the file`.
fn of_section(title: &str) -> impl Iterator<Item = &'static RenamedKey> {
    let section = if title.starts_with('[') { title.trim_matches(['[', ']']) } else { "" };
    RENAMED.iter().filter(move |key| key.section == section)
}

/// Renames the keys of a table. Where lists of sections have both names, they are merged; an
/// earlier name beside another value is left, and reported as an unknown key.
pub(super) fn rename(table: &mut DeTable<'_>, title: &str) {
    for RenamedKey { earlier, name, .. } in of_section(title) {
        let Some((key, value)) = table.remove_entry(*earlier) else { continue };
        let is_list = value.get_ref().is_array();
        match table.get_mut(*name).map(Spanned::get_mut) {
            None => {
                table.insert(Spanned::new(key.span(), Cow::Borrowed(*name)), value);
            }
            Some(DeValue::Array(all)) if is_list => {
                if let DeValue::Array(more) = value.into_inner() {
                    more.into_iter().for_each(|each| all.push(each));
                }
            }
            Some(_) => {
                table.insert(key, value);
            }
        }
    }
}

/// Warnings about earlier names in a text, once per section: where, and the new name.
pub(super) fn warnings(text: &str) -> Vec<String> {
    let (table, _) = DeTable::parse_recoverable(text);
    let mut found = Vec::new();
    find(table.get_ref(), "", &mut found);
    found.sort_unstable_by_key(|(at, _)| *at);
    found.dedup_by_key(|(_, key)| std::ptr::from_ref::<RenamedKey>(key));
    let sentence = |(at, key): (usize, &RenamedKey)| {
        let line = text.get(..at).unwrap_or_default().matches('\n').count() + 1;
        format!("line {line}: the key `{}` is named `{}` now", key.earlier, key.name)
    };
    found.into_iter().map(sentence).collect()
}

/// Finds earlier names in a table with this path and in those below.
fn find(table: &DeTable<'_>, section: &str, found: &mut Vec<(usize, &'static RenamedKey)>) {
    for (key, value) in table {
        let name: &str = key.get_ref().as_ref();
        let renamed = RENAMED.iter().find(|one| one.section == section && one.earlier == name);
        found.extend(renamed.map(|one| (key.span().start, one)));
        let path = if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") };
        match value.get_ref() {
            DeValue::Table(inner) => find(inner, &path, found),
            DeValue::Array(all) => all
                .iter()
                .filter_map(|each| each.get_ref().as_table())
                .for_each(|inner| find(inner, &path, found)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, ConfigFiles};

    const NOW: &str = "provider = \"soft\"\n[[qos]]\nname = \"gold\"\niops = 5\n\
                       [[qos]]\nname = \"silver\"\niops = 6\n";

    #[test]
    fn an_earlier_name_is_read_with_one_warning_and_means_the_same() {
        let earlier = NOW.replace("[[qos]]", "[[limit]]");
        let now = Config::parse(NOW).unwrap();
        assert_eq!(now.quotas.len(), 2);
        assert_eq!(Config::parse(&earlier).unwrap(), now);
        let warnings = ConfigFiles::from(&*earlier).warnings();
        assert_eq!(warnings, ["line 2: the key `limit` is named `qos` now"]);
        assert_eq!(ConfigFiles::from(NOW).warnings(), Vec::<String>::new());
        // Also if one is renamed and the other is not, as in files of several versions.
        let both = Config::parse(&NOW.replacen("[[qos]]", "[[limit]]", 1)).unwrap();
        assert_eq!(both.quotas.len(), 2);
        // A namespace has the key `limit` in earlier versions and in this one.
        let text = "[[subsystem]]\n[[subsystem.namespace]]\n[subsystem.namespace.limit]\n";
        assert_eq!(ConfigFiles::from(text).warnings(), Vec::<String>::new());
    }
}
