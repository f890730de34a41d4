//! The history of the configuration: changes and reloads that took effect, when, and by whom.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tracing::warn;

use crate::api::HistoryEntry;
use crate::blockdev::record::Record;
use crate::plural::count;
use crate::state::record::StateDir;

/// Name in the state directory.
const NAME: &str = "history";

/// The most entries; the oldest is dropped.
const MOST_ENTRIES: usize = 256;

/// The most lines of an entry's list.
const MOST_LINES: usize = 32;

/// The longest line, in bytes.
const MOST_LINE_BYTES: usize = 1024;

/// The history, shared by all published configurations.
#[derive(Clone, Debug)]
pub(crate) struct History(Arc<Mutex<Entries>>);

/// Entries, the oldest first: a line of JSON each.
#[derive(Debug, Default)]
struct Entries(VecDeque<HistoryEntry>);

impl Record for Entries {
    const KIND: &'static str = "history of the configuration";
    const REMEDY: &'static str =
        "remove it: earlier changes are then forgotten, and none is undone";

    fn emit(&self) -> String {
        let line = |entry| serde_json::to_string(entry).unwrap_or_default() + "\n";
        self.0.iter().map(line).collect()
    }

    fn parse(body: &str) -> Option<Entries> {
        body.lines().map(|line| serde_json::from_str(line).ok()).collect::<Option<_>>().map(Entries)
    }
}

impl History {
    /// The history in this state directory; without one it ends with the daemon.
    pub(super) fn open(directory: Option<&Path>) -> History {
        let entries = directory.and_then(|path| StateDir(path).load_if_usable(NAME));
        History(Arc::new(Mutex::new(entries.unwrap_or_default())))
    }

    /// Appends a change that has taken effect. It is in force also if this cannot be persisted. For one
    /// caller at a time: the owner of the target.
    pub(super) fn note(&self, directory: Option<&Path>, mut entry: HistoryEntry) {
        shorten(&mut entry.requested);
        shorten(&mut entry.differences);
        let entries = {
            let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if entries.0.len() == MOST_ENTRIES {
                entries.0.pop_front();
            }
            entries.0.push_back(entry);
            Entries(entries.0.clone())
        };
        // The directory may hang, and the control thread lists the entries: no lock is held.
        let written = directory.map_or(Ok(()), |path| StateDir(path).replace(NAME, &entries));
        if let Err(error) = written {
            warn!("the history of the configuration cannot be persisted: {error}");
        }
    }

    /// All entries, the latest first.
    pub(crate) fn list(&self) -> Vec<HistoryEntry> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.0.iter().rev().cloned().collect()
    }
}

fn shorten(lines: &mut Vec<String>) {
    for line in lines.iter_mut().filter(|line| line.len() > MOST_LINE_BYTES) {
        let end = (0..=MOST_LINE_BYTES).rev().find(|at| line.is_char_boundary(*at));
        line.truncate(end.unwrap_or(0));
        line.push('…');
    }
    let more = lines.len().saturating_sub(MOST_LINES);
    if more > 0 {
        lines.truncate(MOST_LINES);
        lines.push(format!("and {}", count(more, "more line")));
    }
}

/// Now, in seconds since 1970.
pub(super) fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use crate::control::history::*;

    fn entry(at_unix_s: u64) -> HistoryEntry {
        let requested = vec!["é".repeat(MOST_LINE_BYTES)];
        let differences = (0..=MOST_LINES).map(|line| line.to_string()).collect();
        HistoryEntry { at_unix_s, uid: Some(7), by_token: false, requested, differences }
    }

    /// Opening a pipe for writing waits for a reader. The thread that lists the history notifies the
    /// watchdog.
    #[test]
    fn the_history_is_listed_while_its_directory_hangs() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("history.new");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let history = History::open(Some(directory.path()));
        let (own, path) = (history.clone(), directory.path().to_owned());
        let notes = std::thread::spawn(move || own.note(Some(&path), entry(1)));
        let (listed, is_listed) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            while history.list().is_empty() {
                std::thread::yield_now();
            }
            listed.send(()).unwrap();
        });
        is_listed.recv_timeout(std::time::Duration::from_secs(60)).expect("listed");
        assert!(!notes.is_finished(), "it is being written");
        drop(std::fs::File::open(&pipe).unwrap());
        notes.join().unwrap();
    }

    #[test]
    fn the_latest_changes_survive_a_restart_shortened() {
        let directory = tempfile::tempdir().unwrap();
        let path = Some(directory.path());
        let history = History::open(path);
        let all = MOST_ENTRIES as u64 + 2;
        (0..all).for_each(|at_unix_s| history.note(path, entry(at_unix_s)));
        let list = History::open(path).list();
        assert_eq!(list, history.list());
        assert_eq!(list.len(), MOST_ENTRIES);
        assert_eq!((list[0].at_unix_s, list[MOST_ENTRIES - 1].at_unix_s), (all - 1, 2));
        assert_eq!(list[0].requested[0].len(), MOST_LINE_BYTES + "…".len());
        assert_eq!(list[0].differences[MOST_LINES], "and 1 more line");
        assert_eq!(History::open(None).list(), []);
    }
}
