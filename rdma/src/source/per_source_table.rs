//! A bounded table whose slots are shared fairly among sources.
//!
//! When it is full, the oldest entry of the source with the most entries is evicted. So one source
//! cannot exclude others; and if very many sources have one entry each, the newest are kept: an
//! honest peer completes its next step within a round trip, before it is evicted.
//!
//! Peers choose keys and sources, and an operation must have no worst case for an attacker. So they
//! are found by hashes with a random key, and ordered by trees.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Instant;

use super::Source;

/// Key of an entry of a [`PerSourceTable`], which contains its source.
pub trait SourceKey: Copy + Eq + Hash {
    /// The source that the entry is counted for.
    fn source(&self) -> Source;
}

impl SourceKey for Source {
    fn source(&self) -> Source {
        *self
    }
}

/// Index of an entry.
type Place = u32;

#[derive(Debug)]
struct Entry<K, V> {
    key: K,
    /// Counts up with every insertion.
    age: u64,
    until: Option<Instant>,
    /// The next older and the next newer entry of its source.
    older: Option<Place>,
    newer: Option<Place>,
    value: V,
}

/// Entries of a source: their number, the oldest and its age, and the newest.
#[derive(Clone, Copy, Debug)]
struct Share {
    count: usize,
    oldest: Place,
    oldest_age: u64,
    newest: Place,
}

/// Share of a source: the source that is last in this order is evicted from.
type Rank = (usize, Reverse<u64>, Source);

impl Share {
    fn rank(self, source: Source) -> Rank {
        (self.count, Reverse(self.oldest_age), source)
    }
}

/// A bounded table whose slots are shared fairly among sources; see the module.
#[derive(Debug)]
pub struct PerSourceTable<K, V> {
    limit: usize,
    places: HashMap<K, Place>,
    /// The entries of each source are a list, oldest first.
    entries: Vec<Option<Entry<K, V>>>,
    /// Places without an entry.
    free: Vec<Place>,
    shares: HashMap<Source, Share>,
    ranks: BTreeSet<Rank>,
    expiry: BTreeSet<(Instant, Place)>,
    next_age: u64,
}

impl<K: SourceKey, V> PerSourceTable<K, V> {
    /// For at most `limit` entries, at least one.
    pub fn new(limit: usize) -> PerSourceTable<K, V> {
        PerSourceTable {
            limit: limit.max(1),
            places: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            shares: HashMap::new(),
            ranks: BTreeSet::new(),
            expiry: BTreeSet::new(),
            next_age: 0,
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether the next entry evicts one.
    pub fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// Number of entries of the source with the most.
    pub(crate) fn largest_share(&self) -> usize {
        self.ranks.last().map_or(0, |(count, ..)| *count)
    }

    /// Number of entries of `source`.
    pub fn count_of(&self, source: Source) -> usize {
        self.shares.get(&source).map_or(0, |share| share.count)
    }

    /// The oldest entry of `source`.
    pub fn oldest(&self, source: Source) -> Option<(K, &V)> {
        let entry = self.at(self.shares.get(&source)?.oldest)?;
        Some((entry.key, &entry.value))
    }

    /// The value of an entry.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.at(*self.places.get(key)?).map(|entry| &entry.value)
    }

    /// The value of an entry, mutable.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let place = *self.places.get(key)?;
        self.at_mut(place).map(|entry| &mut entry.value)
    }

    /// Adds an entry, and replaces an older one of the same key; it is removed at `until`, if
    /// given. Returns the entry that was evicted.
    pub fn insert(&mut self, key: K, value: V, until: Option<Instant>) -> Option<(K, V)> {
        self.remove(&key);
        let displaced = if self.is_full() { self.displace() } else { None };
        let age = self.next_age;
        self.next_age += 1;
        let place = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as Place - 1
        });
        let source = key.source();
        let mut older = None;
        let share = match self.shares.get_mut(&source) {
            Some(share) => {
                self.ranks.remove(&share.rank(source));
                older = Some(std::mem::replace(&mut share.newest, place));
                share.count += 1;
                *share
            }
            None => {
                let share = Share { count: 1, oldest: place, oldest_age: age, newest: place };
                self.shares.insert(source, share);
                share
            }
        };
        self.ranks.insert(share.rank(source));
        if let Some(entry) = older.and_then(|older| self.at_mut(older)) {
            entry.newer = Some(place);
        }
        self.expiry.extend(until.map(|until| (until, place)));
        self.places.insert(key, place);
        self.entries[place as usize] = Some(Entry { key, age, until, older, newer: None, value });
        displaced
    }

    /// Removes an entry.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let place = self.places.remove(key)?;
        let entry = self.entries[place as usize].take()?;
        self.free.push(place);
        if let Some(until) = entry.until {
            self.expiry.remove(&(until, place));
        }
        let source = key.source();
        let newer_age = entry.newer.and_then(|newer| {
            let newer = self.at_mut(newer)?;
            newer.older = entry.older;
            Some(newer.age)
        });
        if let Some(older) = entry.older.and_then(|older| self.at_mut(older)) {
            older.newer = entry.newer;
        }
        let Some(share) = self.shares.get_mut(&source) else { return Some(entry.value) };
        self.ranks.remove(&share.rank(source));
        share.count = share.count.saturating_sub(1);
        match (entry.older, entry.newer) {
            (None, None) => {
                self.shares.remove(&source);
                return Some(entry.value);
            }
            (None, Some(newer)) => {
                (share.oldest, share.oldest_age) = (newer, newer_age.unwrap_or(entry.age));
            }
            (Some(older), None) => share.newest = older,
            (Some(_), Some(_)) => {}
        }
        self.ranks.insert(share.rank(source));
        Some(entry.value)
    }

    /// Whether there are entries with a time of expiry.
    pub(crate) fn has_expiring(&self) -> bool {
        !self.expiry.is_empty()
    }

    /// The entries with a time of expiry.
    pub(crate) fn expiring(&self) -> impl Iterator<Item = (K, &V)> {
        let at = |(_, place): &(Instant, Place)| self.at(*place);
        self.expiry.iter().filter_map(at).map(|entry| (entry.key, &entry.value))
    }

    /// Clears the time of expiry of an entry.
    pub fn keep(&mut self, key: &K) {
        let Some(place) = self.places.get(key).copied() else { return };
        if let Some(until) = self.at_mut(place).and_then(|entry| entry.until.take()) {
            self.expiry.remove(&(until, place));
        }
    }

    /// The time of expiry of an entry.
    pub fn until(&self, key: &K) -> Option<Instant> {
        self.at(*self.places.get(key)?)?.until
    }

    /// The earliest time of expiry.
    #[inline]
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        // Read in every iteration. A set that is empty again has a node, which `first` searches.
        if self.expiry.is_empty() { None } else { self.expiry.first().map(|(until, _)| *until) }
    }

    /// Removes one expired entry.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<(K, V)> {
        if self.next()? > now {
            return None;
        }
        self.remove_next()
    }

    /// Removes all expired entries.
    pub fn expire_all(&mut self, now: Instant) {
        while self.expire(now).is_some() {}
    }

    /// Removes the entry that expires first.
    pub(crate) fn remove_next(&mut self) -> Option<(K, V)> {
        let (_, place) = *self.expiry.first()?;
        self.remove_at(place)
    }

    fn displace(&mut self) -> Option<(K, V)> {
        let (_, _, source) = *self.ranks.last()?;
        self.remove_oldest(source)
    }

    /// Removes the oldest entry of `source`.
    pub(crate) fn remove_oldest(&mut self, source: Source) -> Option<(K, V)> {
        self.remove_at(self.shares.get(&source)?.oldest)
    }

    fn remove_at(&mut self, place: Place) -> Option<(K, V)> {
        let key = self.at(place)?.key;
        self.remove(&key).map(|value| (key, value))
    }

    fn at(&self, place: Place) -> Option<&Entry<K, V>> {
        self.entries.get(place as usize)?.as_ref()
    }

    fn at_mut(&mut self, place: Place) -> Option<&mut Entry<K, V>> {
        self.entries.get_mut(place as usize)?.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    struct Key {
        comm: u32,
        remote: IpAddr,
    }

    impl SourceKey for Key {
        fn source(&self) -> Source {
            self.remote.into()
        }
    }

    fn key(source: u8, comm: u32) -> Key {
        Key { remote: [10, 0, 0, source].into(), comm }
    }

    #[test]
    fn the_oldest_entry_of_the_largest_source_is_evicted() {
        let mut table = PerSourceTable::new(4);
        for (source, comm) in [(2, 1), (3, 2), (3, 3), (3, 4)] {
            assert_eq!(table.insert(key(source, comm), comm, None), None);
        }
        assert_eq!(table.insert(key(4, 5), 5, None), Some((key(3, 2), 2)));
        assert_eq!(table.insert(key(3, 6), 6, None), Some((key(3, 3), 3)), "its own");
        assert_eq!(table.insert(key(5, 7), 7, None), Some((key(3, 4), 4)));
        // Now each source has one: the oldest of all is evicted.
        assert_eq!(table.insert(key(6, 8), 8, None), Some((key(2, 1), 1)));
        assert_eq!(table.insert(key(2, 9), 9, None), Some((key(4, 5), 5)));
        assert_eq!((table.len(), table.count_of(key(3, 0).source())), (4, 1));
    }

    #[test]
    fn addresses_of_one_ipv6_subnet_are_one_source() {
        let mut table = PerSourceTable::new(3);
        let key = |remote: &str, comm| Key { remote: remote.parse().unwrap(), comm };
        table.insert(key("2001:db8::1", 1), 1, None);
        table.insert(key("2001:db8:0:1::1", 2), 2, None);
        table.insert(key("2001:db8:0:1::2", 3), 3, None);
        assert_eq!(table.count_of(key("2001:db8:0:1::9", 0).source()), 2);
        let displaced = table.insert(key("2001:db8::2", 4), 4, None);
        assert_eq!(displaced.map(|(_, comm)| comm), Some(2));
    }

    #[test]
    fn expired_entries_are_removed_unless_expiry_was_cleared() {
        let (mut table, now) = (PerSourceTable::new(4), Instant::now());
        let later = now + Duration::from_secs(1);
        table.insert(key(2, 1), 'a', Some(later));
        table.insert(key(2, 2), 'b', Some(now));
        table.insert(key(2, 3), 'c', Some(now));
        table.keep(&key(2, 2));
        assert_eq!(table.expire(now), Some((key(2, 3), 'c')));
        assert_eq!(table.expire(now), None);
        table.insert(key(2, 1), 'd', Some(now));
        assert_eq!(table.expire(later), Some((key(2, 1), 'd')));
        assert_eq!((table.expire(later), table.get(&key(2, 2))), (None, Some(&'b')));
    }

    proptest! {
        /// After any operations it is bounded, and its indexes agree.
        #[test]
        fn table_indexes_are_consistent_and_bounded(
            steps in proptest::collection::vec((0u8..4, 0u8..6, 0u32..8, 0u64..40), 0..200),
        ) {
            let (mut table, start) = (PerSourceTable::new(9), Instant::now());
            for (step, source, comm, time) in steps {
                let (key, time) = (key(source, comm), start + Duration::from_secs(time));
                match step {
                    0 => { table.remove(&key); }
                    1 => { table.expire(time); }
                    _ => { table.insert(key, (), (step == 2).then_some(time)); }
                }
                prop_assert!(table.len() <= 9);
                prop_assert_eq!(table.entries.iter().flatten().count(), table.len());
                prop_assert_eq!(table.free.len() + table.len(), table.entries.len());
                prop_assert!(table.places.iter().all(|(key, at)| table.at(*at).unwrap().key == *key));
                let counts = table.shares.values().map(|share| share.count);
                prop_assert_eq!(counts.sum::<usize>(), table.len());
                prop_assert_eq!(table.ranks.len(), table.shares.len());
                for rank in &table.ranks {
                    let share = table.shares[&rank.2];
                    prop_assert_eq!(share.rank(rank.2), *rank);
                    let (mut ages, mut next, mut last) = (Vec::new(), Some(share.oldest), None);
                    while let Some(place) = next {
                        let entry = table.at(place).unwrap();
                        prop_assert_eq!((entry.key.source(), entry.older), (rank.2, last));
                        ages.push(entry.age);
                        (last, next) = (next, entry.newer);
                    }
                    prop_assert!(ages.is_sorted() && last == Some(share.newest));
                    prop_assert_eq!((ages.len(), ages[0]), (rank.0, rank.1.0));
                }
                let entries = table.entries.iter().flatten();
                let expiring = entries.filter(|entry| entry.until.is_some());
                prop_assert_eq!(table.expiry.len(), expiring.count());
            }
        }
    }
}
