//! A bounded table whose slots are shared fairly among sources.
//!
//! When it is full, the oldest entry of the source with the most entries is evicted. So one source
//! cannot exclude others; and if very many sources have one entry each, the newest are kept: an
//! honest peer completes its next step within a round trip, before it is evicted. Peers choose keys
//! and sources, so all indexes are ordered trees, which have no worst case for an attacker; each
//! operation takes logarithmic time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::Source;

/// Key of an entry of a [`PerSourceTable`], which contains its source.
pub trait SourceKey: Copy + Ord {
    /// The source that the entry is counted for.
    fn source(&self) -> Source;
}

impl SourceKey for Source {
    fn source(&self) -> Source {
        *self
    }
}

#[derive(Debug)]
struct Entry<V> {
    /// Counts up with every insertion.
    age: u64,
    until: Option<Instant>,
    value: V,
}

/// Entries of a source: their number, and the age of the oldest.
#[derive(Clone, Copy, Debug)]
struct Share {
    count: usize,
    oldest: u64,
}

/// Share of a source: the source that is last in this order is evicted from.
type Rank = (usize, Reverse<u64>, Source);

impl Share {
    fn rank(self, source: Source) -> Rank {
        (self.count, Reverse(self.oldest), source)
    }
}

/// A bounded table whose slots are shared fairly among sources; see the module.
#[derive(Debug)]
pub struct PerSourceTable<K, V> {
    limit: usize,
    /// (Boxed, because a tree moves its values.)
    entries: BTreeMap<K, Box<Entry<V>>>,
    /// The entries of each source, oldest first.
    by_source: BTreeMap<(Source, u64), K>,
    shares: BTreeMap<Source, Share>,
    ranks: BTreeSet<Rank>,
    expiry: BTreeSet<(Instant, K)>,
    next_age: u64,
}

impl<K: SourceKey, V> PerSourceTable<K, V> {
    /// For at most `limit` entries, at least one.
    pub fn new(limit: usize) -> PerSourceTable<K, V> {
        PerSourceTable {
            limit: limit.max(1),
            entries: BTreeMap::new(),
            by_source: BTreeMap::new(),
            shares: BTreeMap::new(),
            ranks: BTreeSet::new(),
            expiry: BTreeSet::new(),
            next_age: 0,
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the next entry evicts one.
    pub fn is_full(&self) -> bool {
        self.entries.len() >= self.limit
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
        let key = self.by_source.get(&(source, self.shares.get(&source)?.oldest))?;
        Some((*key, self.get(key)?))
    }

    /// The value of an entry.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// The value of an entry, mutable.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    /// Adds an entry, and replaces an older one of the same key; it is removed at `until`, if
    /// given. Returns the entry that was evicted.
    pub fn insert(&mut self, key: K, value: V, until: Option<Instant>) -> Option<(K, V)> {
        self.remove(&key);
        let displaced = if self.entries.len() >= self.limit { self.displace() } else { None };
        let age = self.next_age;
        self.next_age += 1;
        let source = key.source();
        let share = self.shares.entry(source).or_insert(Share { count: 0, oldest: age });
        self.ranks.remove(&share.rank(source));
        share.count += 1;
        self.ranks.insert(share.rank(source));
        self.by_source.insert((source, age), key);
        self.expiry.extend(until.map(|until| (until, key)));
        self.entries.insert(key, Box::new(Entry { age, until, value }));
        displaced
    }

    /// Removes an entry.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.remove_from_share(key.source(), entry.age);
        if let Some(until) = entry.until {
            self.expiry.remove(&(until, *key));
        }
        Some(entry.value)
    }

    /// Whether there are entries with a time of expiry.
    pub(crate) fn has_expiring(&self) -> bool {
        !self.expiry.is_empty()
    }

    /// The entries with a time of expiry.
    pub(crate) fn expiring(&self) -> impl Iterator<Item = (K, &V)> {
        self.expiry.iter().filter_map(|(_, key)| Some((*key, self.get(key)?)))
    }

    /// Clears the time of expiry of an entry.
    pub fn keep(&mut self, key: &K) {
        let until = self.entries.get_mut(key).and_then(|entry| entry.until.take());
        if let Some(until) = until {
            self.expiry.remove(&(until, *key));
        }
    }

    /// The time of expiry of an entry.
    pub fn until(&self, key: &K) -> Option<Instant> {
        self.entries.get(key)?.until
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
        let (_, key) = *self.expiry.first()?;
        self.remove(&key).map(|value| (key, value))
    }

    fn displace(&mut self) -> Option<(K, V)> {
        let (_, Reverse(oldest), source) = *self.ranks.last()?;
        let key = *self.by_source.get(&(source, oldest))?;
        self.remove(&key).map(|value| (key, value))
    }

    fn remove_from_share(&mut self, source: Source, age: u64) {
        self.by_source.remove(&(source, age));
        let Some(share) = self.shares.get_mut(&source) else { return };
        self.ranks.remove(&share.rank(source));
        share.count = share.count.saturating_sub(1);
        if share.count == 0 {
            self.shares.remove(&source);
            return;
        }
        if share.oldest == age {
            let mut own = self.by_source.range((source, age)..=(source, u64::MAX));
            share.oldest = own.next().map_or(age, |((_, oldest), _)| *oldest);
        }
        self.ranks.insert(share.rank(source));
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
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
        /// After any operations it is bounded, and its five indexes agree.
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
                prop_assert_eq!(table.by_source.len(), table.len());
                let counts = table.shares.values().map(|share| share.count);
                prop_assert_eq!(counts.sum::<usize>(), table.len());
                prop_assert_eq!(table.ranks.len(), table.shares.len());
                for rank in &table.ranks {
                    let source = rank.2;
                    prop_assert_eq!(table.shares[&source].rank(source), *rank);
                    let mut ages = table.by_source.keys().filter(|own| own.0 == source);
                    prop_assert_eq!(ages.clone().count(), rank.0);
                    prop_assert_eq!(ages.next(), Some(&(source, rank.1.0)));
                }
                let expiring = table.entries.values().filter(|entry| entry.until.is_some());
                prop_assert_eq!(table.expiry.len(), expiring.count());
            }
        }
    }
}
