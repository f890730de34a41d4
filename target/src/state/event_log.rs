//! The file of the persistent events of a subsystem.

use std::path::Path;
use std::sync::mpsc::SyncSender;

use nvme::Nqn;
use tracing::warn;
use uuid::Uuid;

use crate::core::subsystem::event_log::PersistentEventLog;
use crate::state::record::StateDir;

/// Names of files are derived from this one. Never change it: the events would be lost.
const UUID_SPACE: Uuid = Uuid::from_u128(0x6a2b_9d0c_71e8_4c55_8f3e_6e76_6d66_6450);

/// Reads the events in `directory`; later events notify `wake`.
///
/// A file that cannot be read, or is invalid, is ignored with a warning: no data depend on it.
pub(crate) fn open(directory: &Path, subsystem: Nqn, wake: SyncSender<()>) -> PersistentEventLog {
    let saved = StateDir(directory).load_if_usable(&name(&subsystem));
    PersistentEventLog::new(subsystem, saved, wake)
}

/// Writes the file, if it has changed since it was written.
pub(crate) fn save(log: &PersistentEventLog, directory: &Path) {
    let name = name(log.subsystem());
    if let Err(error) = log.save(|saved| StateDir(directory).replace(&name, saved)) {
        warn!("cannot write {}: {error}", directory.join(name).display());
    }
}

/// Removes the file of a subsystem.
pub(crate) fn remove(subsystem: &Nqn, directory: &Path) {
    let name = name(subsystem);
    if let Err(error) = StateDir(directory).remove(&name) {
        warn!("cannot remove {}: {error}", directory.join(name).display());
    }
}

fn name(subsystem: &Nqn) -> String {
    format!("{}.events", Uuid::new_v5(&UUID_SPACE, subsystem.as_str().as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::sync_channel;

    use nvme::Text;
    use nvme::persistent_event::PersistentEventHeader;

    use super::*;
    use crate::core::subsystem::event_log::{LogHeader, PersistentEvent};
    use crate::core::subsystem::power::Power;

    fn nqn() -> Nqn {
        "nqn.2026-11.io.nvmfd:history".parse().unwrap()
    }

    fn opened(directory: &Path) -> PersistentEventLog {
        open(directory, nqn(), sync_channel(1).0)
    }

    fn reset(log: &PersistentEventLog) {
        let event = PersistentEvent::PowerOnOrReset { firmware: Text::lossy("1.2.3"), cntlid: 3 };
        log.note(event, &Power::default());
    }

    /// Returns the number of events of a subsystem.
    fn events(directory: &Path, nqn: Nqn) -> u32 {
        let header = LogHeader { nqn, serial: Text::lossy("S"), model: Text::lossy("M") };
        let page = open(directory, nqn, sync_channel(1).0).report(&header, &Power::default());
        PersistentEventHeader::parse(page.first_chunk().unwrap()).events
    }

    #[test]
    fn damaged_files_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name(&nqn()));
        let history = opened(directory.path());
        reset(&history);
        save(&history, directory.path());
        assert_eq!(events(directory.path(), nqn()), 1);
        let other = "nqn.2026-11.io.nvmfd:other".parse().unwrap();
        fs::copy(&path, directory.path().join(name(&other))).unwrap();
        assert_eq!(events(directory.path(), other), 0, "another's");
        let sealed = |event: &str| {
            let body = format!("nvmfd events 1\nsubsystem {}\n{event}\n", nqn());
            let sum = crc32fast::hash(body.as_bytes());
            format!("{body}crc32 {sum:08x}\n")
        };
        let data = "00".repeat(12);
        fs::write(&path, sealed(&format!("event 7 1 5 {data}"))).unwrap();
        assert_eq!(events(directory.path(), nqn()), 1);
        let bad = [
            "event".to_owned(),
            "event 7 1 5".to_owned(),
            format!("event 7 1 5 {data}00"),
            format!("event 7 1 5 {}g0", &data[2..]),
            format!("event 7 1 5 {}", &data[1..]),
            format!("event 5 1 5 {data}"),
            format!("event 256 1 5 {data}"),
            format!("event 7 65536 5 {data}"),
            format!("event 7 1 -5 {data}"),
        ];
        for bad in bad.iter().map(|event| sealed(event)) {
            fs::write(&path, bad).unwrap();
            assert_eq!(events(directory.path(), nqn()), 0);
        }
    }

    #[test]
    fn unchanged_event_logs_are_not_written_and_failures_are_retried() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name(&nqn()));
        let history = opened(directory.path());
        save(&history, directory.path());
        assert!(!path.exists());
        reset(&history);
        // A directory in place of the temporary file.
        let beside = path.with_extension("events.new");
        fs::create_dir(&beside).unwrap();
        save(&history, directory.path());
        assert!(!path.exists());
        fs::remove_dir(&beside).unwrap();
        save(&history, directory.path());
        assert!(path.exists());
    }
}
