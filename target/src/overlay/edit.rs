//! Applies one change to the texts of a configuration. All other text is kept.
//!
//! Existing sections are changed in place. New ones go into the first text.

use std::collections::BTreeMap;

use serde_json::Value as Json;
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value};

use super::MOST_TEXT_BYTES;
use super::listener_refs::ListenerMap;
use crate::api::{Change, Settings, UnsavedChange};
use crate::config::{ConfigErrors, ConfigFiles, Source};
use crate::core::subsystem::ana::ANA_GROUPS;

/// Reason why a change does not apply.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EditError {
    /// A named object does not exist.
    #[error("{0}")]
    Missing(String),
    /// An object to add exists.
    #[error("{0}")]
    Exists(String),
    /// The result breaks a rule.
    #[error("{0}")]
    Wrong(String),
}

impl EditError {
    /// Combines all errors of a text into one sentence, with their places.
    pub(super) fn mistakes(errors: &ConfigErrors) -> EditError {
        let each = errors.mistakes.iter().map(|mistake| {
            let file = mistake.file.as_ref().or(errors.file.as_ref());
            let file = file.filter(|_| mistake.place.is_some());
            file.map_or_else(|| mistake.to_string(), |file| mistake.in_file(file))
        });
        EditError::Wrong(each.collect::<Vec<_>>().join("; "))
    }
}

/// Returns the texts after a change.
///
/// # Errors
/// An object that it names is missing, an object that it adds exists, or a value cannot be written.
pub fn edit(sources: &ConfigFiles, change: &Change) -> Result<ConfigFiles, EditError> {
    let mut edited = sources.clone();
    if let Change::Replace { text, files } = change {
        if let Some(text) = text {
            edited.main.text = bounded(text.clone())?;
        }
        if let Some(files) = files {
            edited.more = placed(&edited, files)?;
        }
        return Ok(edited);
    }
    if let Change::ReplaceShared { text, .. } = change {
        let Some(shared) = &mut edited.shared else {
            let what = "this daemon uses no shared configuration: set `shared` in [group]";
            return Err(EditError::Wrong(what.to_owned()));
        };
        shared.text = bounded(text.clone())?;
        return Ok(edited);
    }
    let mut documents = Vec::new();
    for source in sources.iter() {
        let document: Result<DocumentMut, _> = source.text.parse();
        documents.push(
            document.map_err(|error| EditError::Wrong(format!("this is not TOML: {error}")))?,
        );
    }
    make(&mut documents, change, sources.shared.is_some())?;
    for (source, document) in edited.iter_mut().zip(documents) {
        source.text = bounded(document.to_string())?;
    }
    Ok(edited)
}

/// As [`edit`], for a change that may have been made in the texts by hand: existing objects may be
/// added again, and missing ones removed. Its listeners are found by their addresses if their
/// numbers have changed.
pub(super) fn again(
    sources: &ConfigFiles,
    kept: &mut UnsavedChange,
    found: &mut ListenerMap,
) -> Result<ConfigFiles, EditError> {
    let Err(misfit) = found.renumber(sources, kept) else { return redo(sources, &kept.change) };
    // If the files contain the change, the listener has its new address already.
    match redo(sources, &kept.change) {
        Ok(same) if same == *sources => Ok(same),
        _ => Err(misfit),
    }
}

fn redo(sources: &ConfigFiles, change: &Change) -> Result<ConfigFiles, EditError> {
    let twice = match change {
        Change::AddSubsystem { nqn, settings } => {
            Some(Change::SetSubsystem { nqn: nqn.clone(), settings: settings.clone() })
        }
        Change::AddNamespace { subsystem, nsid, settings } => Some(Change::SetNamespace {
            subsystem: subsystem.clone(),
            nsid: *nsid,
            settings: settings.clone(),
        }),
        Change::AddListener { id, settings } => {
            Some(Change::SetListener { id: *id, settings: settings.clone() })
        }
        _ => None,
    };
    match edit(sources, change) {
        // Only if nothing changes: another device under the same number is another namespace.
        Err(EditError::Exists(what)) => match twice.and_then(|twice| edit(sources, &twice).ok()) {
            Some(same) if same == *sources => Ok(same),
            _ => Err(EditError::Exists(what)),
        },
        Err(EditError::Missing(_)) if takes_away(change) => Ok(sources.clone()),
        other => other,
    }
}

fn takes_away(change: &Change) -> bool {
    matches!(
        change,
        Change::RemoveSubsystem { .. }
            | Change::RemoveNamespace { .. }
            | Change::RemoveListener { .. }
            | Change::RemoveHost { .. }
            | Change::DenyHost { .. }
    )
}

fn bounded(text: String) -> Result<String, EditError> {
    match text.len() {
        0..=MOST_TEXT_BYTES => Ok(text),
        _ => Err(EditError::Wrong(format!("the text is longer than {MOST_TEXT_BYTES} bytes"))),
    }
}

/// Returns the files of the included directory, from their names and texts.
fn placed(
    sources: &ConfigFiles,
    files: &BTreeMap<String, String>,
) -> Result<Vec<Source>, EditError> {
    bounded(files.values().map(String::as_str).collect())?;
    let directory = sources.directory.clone().unwrap_or_default();
    let source = |(name, text): (&String, &String)| {
        if name.starts_with('.') || name.contains(['/', '\0']) || !name.ends_with(".toml") {
            let what = format!("{name:?} is no name of a file that would be read: end it in .toml");
            return Err(EditError::Wrong(what));
        }
        Ok(Source { file: Some(directory.join(name)), text: text.clone() })
    };
    files.iter().map(source).collect()
}

fn make(documents: &mut [DocumentMut], change: &Change, is_shared: bool) -> Result<(), EditError> {
    let mut roots: Vec<&mut Table> = documents.iter_mut().map(|each| &mut **each).collect();
    match change {
        Change::AddSubsystem { nqn, settings } => {
            // The shared text is the last one, and has all subsystems.
            if is_shared {
                roots.rotate_right(1);
            }
            add(roots, "subsystem", ("nqn", nqn.as_str().into()), settings)
        }
        Change::SetSubsystem { nqn, settings } => set(subsystem(roots, nqn)?, settings, &["nqn"]),
        Change::RemoveSubsystem { nqn } => {
            remove(roots, "subsystem", nqn, |t| text(t, "nqn") == Some(nqn))
        }
        Change::AddNamespace { subsystem: nqn, nsid, settings } => {
            let subsystem = subsystem(roots, nqn)?;
            add(vec![subsystem], "namespace", ("nsid", i64::from(*nsid).into()), settings)
        }
        Change::SetNamespace { subsystem: nqn, nsid, settings } => {
            let namespace =
                find(vec![subsystem(roots, nqn)?], "namespace", &nsid, |t| is(t, *nsid))?;
            set(namespace, settings, &["nsid"])
        }
        Change::RemoveNamespace { subsystem: nqn, nsid } => {
            remove(vec![subsystem(roots, nqn)?], "namespace", &nsid, |t| is(t, *nsid))
        }
        Change::AddListener { id, settings } => {
            add(number_listeners(roots)?, "listener", ("id", i64::from(*id).into()), settings)
        }
        Change::SetListener { id, settings } => set(listener(roots, *id)?, settings, &["id"]),
        Change::RemoveListener { id } => remove(number_listeners(roots)?, "listener", id, |t| {
            number(t, "id") == Some((*id).into())
        }),
        Change::SetAna { listener: id, group, state } => {
            set_ana(listener(roots, *id)?, *group, state)
        }
        Change::AllowHost { subsystem: nqn, host } => allow_host(subsystem(roots, nqn)?, host),
        Change::DenyHost { subsystem: nqn, host } => deny_host(subsystem(roots, nqn)?, nqn, host),
        Change::SetHost { nqn, settings } => set_host(roots, nqn, settings),
        Change::RemoveHost { nqn } => remove_host(roots, nqn),
        Change::Replace { .. } | Change::ReplaceShared { .. } => Ok(()),
    }
}

fn allow_host(subsystem: &mut Table, host: &str) -> Result<(), EditError> {
    let hosts = hosts(subsystem)?;
    if !hosts.iter().any(|each| each.as_str() == Some(host)) {
        hosts.push(host);
    }
    Ok(())
}

/// Refused where any host is admitted: it would only take the resources of its list from the host.
fn deny_host(subsystem: &mut Table, nqn: &str, host: &str) -> Result<(), EditError> {
    if subsystem.get("allow_any_host").and_then(Item::as_bool) == Some(true) {
        return Err(EditError::Wrong(format!(
            "{nqn} admits any host, and so {host} whether it is listed or not: first `nvmfctl \
             subsystem set {nqn} allow_any_host=false`, which admits only the listed ones"
        )));
    }
    let hosts = hosts(subsystem)?;
    let Some(at) = hosts.iter().position(|each| each.as_str() == Some(host)) else {
        return Err(EditError::Missing(format!("{host} is no host of {nqn}")));
    };
    hosts.remove(at);
    Ok(())
}

fn set_host(roots: Vec<&mut Table>, nqn: &str, settings: &Settings) -> Result<(), EditError> {
    let is = |t: &Table| text(t, "nqn") == Some(nqn);
    if roots.iter().all(|root| place(root, "host", is).is_none()) {
        return add(roots, "host", ("nqn", nqn.into()), settings);
    }
    let host = find(roots, "host", &nqn, is)?;
    if settings.contains_key("dhchap_key_file") {
        host.remove("authenticate");
    }
    set(host, settings, &["nqn"])
}

/// Exempts the host: without an entry, a host that has had a key would be rejected.
fn remove_host(roots: Vec<&mut Table>, nqn: &str) -> Result<(), EditError> {
    let is = |t: &Table| text(t, "nqn") == Some(nqn);
    let exempt = Settings::from_iter([("authenticate".to_owned(), false.into())]);
    if roots.iter().all(|root| place(root, "host", is).is_none()) {
        return add(roots, "host", ("nqn", nqn.into()), &exempt);
    }
    let host = find(roots, "host", &nqn, is)?;
    for key in ["dhchap_key_file", "dhchap_ctrl_key_file"] {
        host.remove(key);
    }
    set(host, &exempt, &["nqn"])
}

fn subsystem<'t>(roots: Vec<&'t mut Table>, nqn: &str) -> Result<&'t mut Table, EditError> {
    find(roots, "subsystem", &nqn, |t| text(t, "nqn") == Some(nqn))
}

fn listener(roots: Vec<&mut Table>, id: u16) -> Result<&mut Table, EditError> {
    // Without an `id`, its place is its number.
    let mut at: u16 = 0;
    find(roots, "listener", &id, |t| {
        at = at.saturating_add(1);
        number(t, "id").unwrap_or(at.into()) == i64::from(id)
    })
}

/// Writes the number of each listener into its table: it must not change if others are added or removed.
fn number_listeners(mut roots: Vec<&mut Table>) -> Result<Vec<&mut Table>, EditError> {
    let mut at = 0i64;
    for root in roots.iter_mut().filter(|root| root.contains_key("listener")) {
        for table in tables(root, "listener")?.iter_mut() {
            at += 1;
            if !table.contains_key("id") {
                table.insert("id", toml_edit::value(at));
            }
        }
    }
    Ok(roots)
}

fn text<'t>(table: &'t Table, key: &str) -> Option<&'t str> {
    table.get(key).and_then(Item::as_str)
}

fn number(table: &Table, key: &str) -> Option<i64> {
    table.get(key).and_then(Item::as_integer)
}

fn is(table: &Table, nsid: u32) -> bool {
    number(table, "nsid") == Some(nsid.into())
}

/// The tables of one name, also inline ones.
fn tables<'t>(parent: &'t mut Table, key: &str) -> Result<&'t mut ArrayOfTables, EditError> {
    let item = parent.entry(key).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    if item.is_value() {
        let tables = std::mem::take(item).into_array_of_tables();
        *item = Item::ArrayOfTables(tables.unwrap_or_default());
    }
    let wrong = || EditError::Wrong(format!("`{key}` is no list of sections"));
    item.as_array_of_tables_mut().ok_or_else(wrong)
}

/// Returns the index of a table among those of one name, whose formatting is kept.
fn place(parent: &Table, key: &str, is: impl FnMut(&Table) -> bool) -> Option<usize> {
    let item = parent.get(key)?;
    match item.as_array_of_tables() {
        Some(tables) => tables.iter().position(is),
        None => item.clone().into_array_of_tables().ok()?.iter().position(is),
    }
}

/// The table of that name, in any text.
fn find<'t>(
    parents: Vec<&'t mut Table>,
    key: &str,
    name: &dyn std::fmt::Display,
    mut is: impl FnMut(&Table) -> bool,
) -> Result<&'t mut Table, EditError> {
    let missing = || EditError::Missing(format!("there is no {key} {name}"));
    for parent in parents {
        if let Some(at) = place(parent, key, &mut is) {
            return tables(parent, key)?.get_mut(at).ok_or_else(missing);
        }
    }
    Err(missing())
}

/// Adds a new table to the first text.
fn add(
    parents: Vec<&mut Table>,
    key: &str,
    (name, value): (&str, Value),
    settings: &Settings,
) -> Result<(), EditError> {
    let plain = |value: &Value| (value.as_str().map(str::to_owned), value.as_integer());
    let same = |table: &Table| {
        let old = table.get(name).and_then(Item::as_value);
        old.is_some_and(|old| plain(old) == plain(&value))
    };
    if parents.iter().any(|parent| place(parent, key, same).is_some()) {
        let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        return Err(EditError::Exists(format!("{key} {shown} exists already")));
    }
    let Some(first) = parents.into_iter().next() else { return Ok(()) };
    let mut table = Table::new();
    table.decor_mut().set_prefix("\n");
    table.insert(name, Item::Value(value));
    set(&mut table, settings, &[name])?;
    tables(first, key)?.push(table);
    Ok(())
}

fn remove(
    parents: Vec<&mut Table>,
    key: &str,
    name: &dyn std::fmt::Display,
    mut is: impl FnMut(&Table) -> bool,
) -> Result<(), EditError> {
    for parent in parents {
        if let Some(at) = place(parent, key, &mut is) {
            let tables = tables(parent, key)?;
            tables.remove(at);
            if tables.is_empty() {
                parent.remove(key);
            }
            return Ok(());
        }
    }
    Err(EditError::Missing(format!("there is no {key} {name}")))
}

fn set(table: &mut Table, settings: &Settings, fixed: &[&str]) -> Result<(), EditError> {
    for (key, value) in settings {
        if fixed.contains(&key.as_str()) {
            return Err(EditError::Wrong(format!("`{key}` is its identity: add another")));
        }
        match value {
            Json::Null => drop(table.remove(key)),
            value => {
                let mut new = written(value)?;
                if let Some(old) = table.get(key).and_then(Item::as_value) {
                    // Equal values are kept as written, and the comment behind others.
                    let bare = |value: &Value| value.clone().decorated("", "").to_string();
                    if bare(old) == bare(&new) {
                        continue;
                    }
                    *new.decor_mut() = old.decor().clone();
                }
                table[key.as_str()] = Item::Value(new);
            }
        }
    }
    Ok(())
}

fn hosts(subsystem: &mut Table) -> Result<&mut Array, EditError> {
    let item = subsystem.entry("hosts").or_insert_with(|| toml_edit::value(Array::new()));
    item.as_array_mut().ok_or_else(|| EditError::Wrong("`hosts` is no list".to_owned()))
}

fn set_ana(listener: &mut Table, group: Option<u32>, state: &str) -> Result<(), EditError> {
    let Some(group) = group else {
        listener.insert("ana", toml_edit::value(state));
        return Ok(());
    };
    // One state for all groups becomes a state for each.
    if let Some(all) = text(listener, "ana").map(str::to_owned) {
        let mut groups = InlineTable::new();
        if all != "optimized" {
            (1..=ANA_GROUPS)
                .for_each(|group| drop(groups.insert(group.to_string(), (&all).into())));
        }
        listener.insert("ana", toml_edit::value(groups));
    }
    let item = listener.entry("ana").or_insert_with(|| toml_edit::value(InlineTable::new()));
    let wrong = || EditError::Wrong("`ana` is neither a word nor a table".to_owned());
    let groups = item.as_table_like_mut().ok_or_else(wrong)?;
    groups.insert(&group.to_string(), toml_edit::value(state));
    Ok(())
}

/// A value of JSON as one of TOML.
fn written(value: &Json) -> Result<Value, EditError> {
    Ok(match value {
        Json::Null => return Err(EditError::Wrong("null is no value of a list".to_owned())),
        Json::Bool(flag) => (*flag).into(),
        Json::String(text) => text.as_str().into(),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(whole), _) => whole.into(),
            (None, Some(number)) => number.into(),
            (None, None) => return Err(EditError::Wrong(format!("{number} is too large"))),
        },
        Json::Array(all) => {
            Value::Array(all.iter().map(written).collect::<Result<Array, EditError>>()?)
        }
        Json::Object(all) => {
            let pairs = all.iter().map(|(key, value)| Ok((key.as_str(), written(value)?)));
            Value::InlineTable(pairs.collect::<Result<InlineTable, EditError>>()?)
        }
    })
}
