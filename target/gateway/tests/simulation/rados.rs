//! A simulated cluster: an omap with comparisons, a blocklist, locks of images, and one block for
//! each group.

use std::collections::{BTreeMap, BTreeSet};

use nvmfd_gateway::Outcome;
use nvmfd_gateway::record::{GroupObject, Key, Update};

use crate::SeededBug;

#[derive(Default)]
pub(crate) struct Rados {
    omap: BTreeMap<Key, String>,
    blocklist: BTreeSet<String>,
    locks: BTreeMap<u32, String>,
    /// The last write of each group: hosts write ascending numbers.
    blocks: BTreeMap<u32, u64>,
}

impl Rados {
    pub(crate) fn read(&self) -> GroupObject {
        let entries: Vec<(String, &str)> =
            self.omap.iter().map(|(key, text)| (key.to_string(), text.as_str())).collect();
        GroupObject::parse(entries.iter().map(|(key, text)| (key.as_str(), *text))).unwrap()
    }

    pub(crate) fn update(&mut self, update: &Update, bug: Option<SeededBug>) -> Outcome {
        let holds = |(key, text): &(Key, Option<String>)| {
            let is_ignored = match key {
                Key::Group(_) => bug == Some(SeededBug::StaleEpoch),
                Key::Member(_) => bug == Some(SeededBug::StaleMember),
                Key::Heartbeat(_)
                | Key::Move(_)
                | Key::Version
                | Key::Applied(_)
                | Key::Front(_)
                | Key::Keyed(_) => false,
            };
            is_ignored || self.omap.get(key) == text.as_ref()
        };
        if !update.compares.iter().all(holds) {
            return Outcome::Conflict;
        }
        self.omap.extend(update.sets.iter().cloned());
        Outcome::Done
    }

    pub(crate) fn exclude(&mut self, addresses: &[String]) {
        self.blocklist.extend(addresses.iter().cloned());
    }

    pub(crate) fn is_excluded(&self, address: &str) -> bool {
        self.blocklist.contains(address)
    }

    /// Takes the lock of the images of a group, from nobody or from a former owner.
    pub(crate) fn lock(&mut self, group: u32, address: &str, former: &[String]) -> bool {
        let is_free = match self.locks.get(&group) {
            None => true,
            Some(owner) => owner == address || former.contains(owner),
        };
        if is_free {
            self.locks.insert(group, address.to_owned());
        }
        is_free
    }

    pub(crate) fn unlock(&mut self, group: u32, address: &str) {
        if self.locks.get(&group).is_some_and(|owner| owner == address) {
            self.locks.remove(&group);
        }
    }

    /// The lock does not exclude anybody: a write is refused by the blocklist only.
    pub(crate) fn write(&mut self, group: u32, value: u64) {
        let block = self.blocks.entry(group).or_default();
        assert!(*block <= value, "group {group}: {value} was written over {block}");
        *block = value;
    }

    pub(crate) fn block(&self, group: u32) -> u64 {
        self.blocks.get(&group).copied().unwrap_or_default()
    }
}
