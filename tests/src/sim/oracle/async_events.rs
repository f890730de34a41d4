//! Oracle for asynchronous events: every change is reported as an event with a log page that names
//! the change. No change is lost, however many come at once.

use std::time::{Duration, Instant};

use nvme::log::LogId;

use super::blocks::Moment;

/// Maximum delay. A host whose association ends meanwhile reads everything again.
const PATIENCE: Duration = Duration::from_secs(100);

/// A change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// This namespace, by its id.
    Namespace(u32),
    /// The ANA state of a group on the host's path.
    Path,
}

#[derive(Debug)]
struct Owed {
    host: usize,
    what: Change,
    since: Moment,
    until: Instant,
}

/// Events that hosts must receive.
#[derive(Debug, Default)]
pub struct ExpectedEvents {
    owed: Vec<Owed>,
    /// For each host the logs of received events, to be read.
    logs: Vec<Vec<LogId>>,
}

impl ExpectedEvents {
    /// For this number of hosts.
    pub fn new(hosts: usize) -> ExpectedEvents {
        ExpectedEvents { owed: Vec::new(), logs: vec![Vec::new(); hosts] }
    }

    /// A connected host must be notified of a change.
    pub fn owe(&mut self, host: usize, what: Change, since: Moment, now: Instant) {
        self.owed.push(Owed { host, what, since, until: now + PATIENCE });
    }

    /// A host has received an event, or could not read its log.
    pub fn is_to_read(&mut self, host: usize, log: LogId) {
        self.logs[host].push(log);
    }

    /// The log that a host reads next.
    pub fn next_log(&mut self, host: usize) -> Option<LogId> {
        self.logs[host].pop()
    }

    /// A host has read the list of changed namespaces; returns them.
    pub fn read_changed(&mut self, host: usize, page: &[u8]) -> Vec<u32> {
        let nsids = page.chunks_exact(4).map(|nsid| nsid.try_into().map_or(0, u32::from_le_bytes));
        let nsids: Vec<u32> = nsids.take_while(|nsid| *nsid != 0).collect();
        self.owed.retain(|owed| match owed.what {
            Change::Namespace(nsid) => owed.host != host || !nsids.contains(&nsid),
            Change::Path => true,
        });
        nsids
    }

    /// A host has read the ANA states of its path, with a command sent at `began`; whether they are the
    /// present ones. A change while that command was on its way needs no further event: the target
    /// may have answered with it.
    pub fn read_path(&mut self, host: usize, began: Moment, is_current: bool) {
        let is_read = |owed: &Owed| is_current || owed.since < began;
        self.owed.retain(|owed| owed.host != host || owed.what != Change::Path || !is_read(owed));
    }

    /// A host sees other namespaces, so pending changes of ANA states may concern none of them.
    pub fn forget_path(&mut self, host: usize) {
        self.owed.retain(|owed| owed.host != host || owed.what != Change::Path);
    }

    /// The association of a host has ended.
    pub fn forget(&mut self, host: usize) {
        self.owed.retain(|owed| owed.host != host);
        self.logs[host].clear();
    }

    /// A notification that is overdue.
    pub fn overdue(&self, now: Instant) -> Option<String> {
        let late = self.owed.iter().find(|owed| owed.until < now)?;
        Some(format!("host {} was never told of a change: {:?}", late.host, late.what))
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::async_events::*;

    #[test]
    fn changes_are_overdue_until_read_from_their_own_log() {
        let (start, mut news) = (Instant::now(), ExpectedEvents::new(2));
        let late = start + PATIENCE * 2;
        news.owe(1, Change::Namespace(2), 10, start);
        news.read_changed(1, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        news.read_changed(0, &[2, 0, 0, 0]);
        assert!(news.overdue(start).is_none());
        assert!(news.overdue(late).unwrap().contains("host 1"), "the list ends with a zero");
        news.read_changed(1, &[2, 0, 0, 0]);
        assert_eq!(news.overdue(late), None);
        news.owe(0, Change::Path, 10, start);
        news.read_path(0, 9, false);
        assert!(news.overdue(late).is_some(), "asked before");
        news.read_path(0, 11, false);
        assert_eq!(news.overdue(late), None);
        news.owe(0, Change::Path, 10, start);
        news.read_path(0, 9, true);
        assert_eq!(news.overdue(late), None, "asked before, answered after");
        news.owe(0, Change::Path, 10, start);
        news.forget(0);
        assert_eq!(news.overdue(late), None);
    }
}
