//! Recent records of refused and disconnected hosts, bounded per source.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use nvme::Nqn;
use nvmfd_blockdev::lock;

use super::cause::{Cause, DisconnectRecord};

/// Maximum of records.
const LATEST: usize = 256;

/// Maximum of hosts whose last record is kept in addition.
const HOSTS: usize = 256;

/// A cause, its count, and its times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The last occurrence.
    pub why: DisconnectRecord,
    /// Number of occurrences while it is recorded.
    pub count: u64,
    /// The first of these times.
    pub first: SystemTime,
    /// The last of them.
    pub last: SystemTime,
    /// Ascends with every note: the order in which things last happened.
    pub number: u64,
}

/// Recent causes of refusals and disconnects.
#[derive(Debug)]
pub struct RecentDisconnects {
    recent: Mutex<Recent>,
    clock: fn() -> SystemTime,
    /// Total count by cause.
    counts: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
struct Recent {
    number: u64,
    latest: Vec<Record>,
    /// The last one of each host.
    of_hosts: Vec<Record>,
}

impl RecentDisconnects {
    /// No records yet. `clock` is the machine's clock for the records.
    pub fn new(clock: fn() -> SystemTime) -> RecentDisconnects {
        let counts = Cause::ALL.iter().map(|_| AtomicU64::new(0)).collect();
        RecentDisconnects { recent: Mutex::default(), clock, counts }
    }

    /// Records a disconnect. If it differs from an earlier one only in the port and queue of the
    /// host, it is counted there. Takes a lock: not used for I/O.
    pub fn note(&self, why: DisconnectRecord) {
        self.note_at(why, (self.clock)());
    }

    fn note_at(&self, why: DisconnectRecord, at: SystemTime) {
        self.counts[why.cause as usize].fetch_add(1, Ordering::Relaxed);
        let mut recent = lock(&self.recent);
        recent.number += 1;
        let number = recent.number;
        let record = Record { why, count: 1, first: at, last: at, number };
        if record.why.host.is_some() {
            let same_host =
                |a: &DisconnectRecord, b: &DisconnectRecord| a.host == b.host && is_same(a, b);
            let of_hosts = &mut recent.of_hosts;
            match of_hosts.iter_mut().find(|other| other.why.host == record.why.host) {
                Some(other) if same_host(&other.why, &record.why) => other.again(record.clone()),
                Some(other) => *other = record.clone(),
                None => put(of_hosts, record.clone(), HOSTS),
            }
        }
        match recent.latest.iter_mut().find(|other| is_same(&other.why, &record.why)) {
            Some(other) => other.again(record),
            None => put(&mut recent.latest, record, LATEST),
        }
    }

    /// The records, the latest first; of one host, or of all.
    pub fn list(&self, host: Option<&Nqn>) -> Vec<Record> {
        let recent = lock(&self.recent);
        let mut records = recent.latest.clone();
        let forgotten =
            |record: &&Record| !recent.latest.iter().any(|other| is_same(&other.why, &record.why));
        records.extend(recent.of_hosts.iter().filter(forgotten).cloned());
        drop(recent);
        records.retain(|record| host.is_none() || record.why.host.as_ref() == host);
        records.sort_by_key(|record| std::cmp::Reverse(record.number));
        records
    }

    /// Number of occurrences of a cause since the start.
    pub fn count(&self, cause: Cause) -> u64 {
        self.counts[cause as usize].load(Ordering::Relaxed)
    }
}

impl Record {
    /// Another occurrence.
    fn again(&mut self, latest: Record) {
        *self = Record { count: self.count + 1, first: self.first, ..latest };
    }
}

/// Whether two records are of the same event, repeated. A host that retries has another port.
fn is_same(a: &DisconnectRecord, b: &DisconnectRecord) -> bool {
    let place = |why: &DisconnectRecord| (why.cause, why.remote.ip(), why.local);
    place(a) == place(b) && a.host == b.host && a.subsystem == b.subsystem && a.detail == b.detail
}

/// Adds a record. If there are too many, the oldest of the address with the most is removed, so a
/// flood evicts its own records.
fn put(records: &mut Vec<Record>, record: Record, most: usize) {
    if records.len() >= most {
        let of = |records: &[Record], at: usize| {
            let ip = records[at].why.remote.ip();
            records.iter().filter(|other| other.why.remote.ip() == ip).count()
        };
        let victim = (0..records.len())
            .max_by_key(|&at| (of(records, at), std::cmp::Reverse(records[at].number)));
        if let Some(victim) = victim {
            records.swap_remove(victim);
        }
    }
    records.push(record);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::diag::recent::*;

    fn why(cause: Cause, last: u8, host: Option<&str>) -> DisconnectRecord {
        let remote = ([192, 0, 2, last], 4000).into();
        let local = ([192, 0, 2, 250], 4420).into();
        let host = host.map(|name| name.parse().unwrap());
        DisconnectRecord { host, ..DisconnectRecord::nameless(cause, remote, local) }
    }

    #[test]
    fn repeated_disconnects_are_counted_in_one_record() {
        let disconnects = RecentDisconnects::new(|| SystemTime::UNIX_EPOCH);
        let at = |s| SystemTime::UNIX_EPOCH + Duration::from_secs(s);
        for second in 0..5 {
            let mut why = why(Cause::WrongSecret, 1, Some("nqn.2026-11.host:a"));
            why.remote.set_port(1000 + second as u16);
            disconnects.note_at(why, at(second));
        }
        disconnects.note_at(why(Cause::KeepAlive, 1, Some("nqn.2026-11.host:a")), at(7));
        disconnects.note_at(why(Cause::NoRoom, 2, None), at(8));
        let all = disconnects.list(None);
        assert_eq!(all.len(), 3);
        assert_eq!(all[0].why.cause, Cause::NoRoom, "the latest first");
        let (count, first, last) = (all[2].count, all[2].first, all[2].last);
        assert_eq!((count, first, last), (5, at(0), at(4)));
        assert_eq!(all[2].why.remote.port(), 1004, "as it was the last time");
        let host = "nqn.2026-11.host:a".parse().unwrap();
        assert_eq!(disconnects.list(Some(&host)).len(), 2);
        let other = "nqn.2026-11.host:b".parse().unwrap();
        assert_eq!(disconnects.list(Some(&other)), []);
        assert_eq!(
            (disconnects.count(Cause::WrongSecret), disconnects.count(Cause::KeepAlive)),
            (5, 1)
        );
    }

    /// Floods from one address with thousands of names, and from thousands without a name.
    #[test]
    fn floods_do_not_evict_disconnect_records_of_other_hosts() {
        let disconnects = RecentDisconnects::new(|| SystemTime::UNIX_EPOCH);
        let now = SystemTime::UNIX_EPOCH;
        disconnects.note_at(why(Cause::KeepAlive, 1, Some("nqn.2026-11.host:quiet")), now);
        for number in 0..2000 {
            let name = format!("nqn.2026-11.host:stranger{number}");
            disconnects.note_at(why(Cause::HostNotAllowed, 2, Some(&name)), now);
        }
        for number in 0..2000u32 {
            let mut nameless = why(Cause::NotNvme, 3, None);
            let [_, b, c, d] = number.to_be_bytes();
            nameless.remote.set_ip([10, b, c, d].into());
            disconnects.note_at(nameless, now);
        }
        let quiet = "nqn.2026-11.host:quiet".parse().unwrap();
        let left = disconnects.list(Some(&quiet));
        assert_eq!((left.len(), left[0].why.cause), (1, Cause::KeepAlive));
        assert!(disconnects.list(None).len() <= LATEST + HOSTS);
        assert_eq!(disconnects.count(Cause::NotNvme), 2000);
    }
}
