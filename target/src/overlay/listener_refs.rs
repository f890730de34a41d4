//! References of unsaved changes to listeners. Changes contain the number of a listener, which for a listener
//! without `id` is its position and changes when others are added or removed. Therefore a stored change
//! contains the addresses as well, and is applied again to the listeners with these.

use rdma::ZonedIp;
use toml_edit::{DocumentMut, Item, Table};

use super::EditError;
use crate::api::{Change, UnsavedChange};
use crate::config::ConfigFiles;

/// Returns the addresses of the listeners of a change: of the one that is changed itself, and of
/// those of a subsystem, in their order.
pub(super) fn meant(sources: &ConfigFiles, change: &Change) -> (Option<String>, Vec<String>) {
    let offered = offered(change);
    if listener_of(change).is_none() && offered.is_empty() {
        return Default::default();
    }
    let numbered = listeners(sources);
    let address = |id: u16| numbered.iter().find(|one| one.id == id).map(|one| one.address.clone());
    let offered: Option<Vec<String>> = offered.into_iter().map(&address).collect();
    (listener_of(change).and_then(address), offered.unwrap_or_default())
}

/// Listeners that were found while changes are applied again: their old and new numbers.
#[derive(Default)]
pub(super) struct ListenerMap(Vec<(u16, u16)>);

impl ListenerMap {
    /// Changes the numbers in a change to those of the listeners with the stored addresses.
    ///
    /// # Errors
    /// Such a listener does not exist, and another one has its number.
    pub(super) fn renumber(
        &mut self,
        sources: &ConfigFiles,
        kept: &mut UnsavedChange,
    ) -> Result<(), EditError> {
        let wanted = offered(&kept.change);
        if kept.listener.is_none() && kept.offered_at.is_empty() {
            return Ok(());
        }
        let there = listeners(sources);
        if let (Some(id), Some(meant)) = (listener_of(&kept.change), &kept.listener) {
            let now = self.find(&there, id, meant)?;
            self.0.push((id, now));
            set_listener(&mut kept.change, now);
        }
        if wanted.len() == kept.offered_at.len() {
            let pairs = wanted.iter().zip(&kept.offered_at);
            let now: Result<Vec<u16>, EditError> =
                pairs.map(|(id, meant)| self.find(&there, *id, meant)).collect();
            set_offered(&mut kept.change, now?);
        }
        Ok(())
    }

    fn find(&self, there: &[ConfiguredListener], id: u16, meant: &str) -> Result<u16, EditError> {
        // Of two with temporarily equal addresses, one has been matched before.
        let is_other = |now: u16| self.0.iter().any(|(then, is)| *then != id && *is == now);
        let with = || there.iter().filter(|one| one.address == meant && !is_other(one.id));
        if let Some(found) = with().find(|one| one.id == id).or_else(|| with().next()) {
            return Ok(found.id);
        }
        match there.iter().find(|one| one.id == id) {
            Some(ConfiguredListener { address: is, .. }) => {
                let what =
                    format!("listener {id} was {meant} when that was changed, and is {is} now");
                Err(EditError::Wrong(what))
            }
            None => Ok(id),
        }
    }
}

/// A listener in texts that may be invalid.
struct ConfiguredListener {
    id: u16,
    address: String,
}

fn listeners(sources: &ConfigFiles) -> Vec<ConfiguredListener> {
    let mut place = 0u16;
    let mut all = Vec::new();
    for source in sources.iter() {
        let Ok(document) = source.text.parse::<DocumentMut>() else { continue };
        let tables = document.get("listener").cloned().map(Item::into_array_of_tables);
        for table in tables.into_iter().filter_map(Result::ok).flatten() {
            // An unchecked text may have more listeners than numbers.
            place = place.saturating_add(1);
            all.extend(listener(&table, place));
        }
    }
    all
}

fn listener(table: &Table, place: u16) -> Option<ConfiguredListener> {
    let number = |key: &str, otherwise: u16| match table.get(key) {
        Some(value) => value.as_integer().and_then(|number| u16::try_from(number).ok()),
        None => Some(otherwise),
    };
    let ip: ZonedIp = table.get("address")?.as_str()?.parse().ok()?;
    let address = ip.with_port(number("port", nvme::PORT)?).to_string();
    Some(ConfiguredListener { id: number("id", place)?, address })
}

/// The number of the listener of a change.
fn listener_of(change: &Change) -> Option<u16> {
    match change {
        Change::SetListener { id, .. }
        | Change::RemoveListener { id }
        | Change::SetAna { listener: id, .. } => Some(*id),
        _ => None,
    }
}

fn set_listener(change: &mut Change, number: u16) {
    if let Change::SetListener { id, .. }
    | Change::RemoveListener { id }
    | Change::SetAna { listener: id, .. } = change
    {
        *id = number;
    }
}

/// The key of a subsystem that names listeners.
const OFFERED: &str = "listeners";

/// The numbers of the listeners of a subsystem in a change.
fn offered(change: &Change) -> Vec<u16> {
    let (Change::AddSubsystem { settings, .. } | Change::SetSubsystem { settings, .. }) = change
    else {
        return Vec::new();
    };
    let listed = settings.get(OFFERED).and_then(|value| value.as_array());
    let number = |value: &serde_json::Value| value.as_u64().and_then(|id| u16::try_from(id).ok());
    let all: Option<Vec<u16>> =
        listed.map_or(Some(Vec::new()), |all| all.iter().map(number).collect());
    all.unwrap_or_default()
}

fn set_offered(change: &mut Change, numbers: Vec<u16>) {
    if let Change::AddSubsystem { settings, .. } | Change::SetSubsystem { settings, .. } = change
        && settings.contains_key(OFFERED)
        && !numbers.is_empty()
    {
        settings.insert(OFFERED.to_owned(), numbers.into());
    }
}
