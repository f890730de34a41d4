//! The file of the times with power ([`PowerMeter`]).
//!
//! The persistent part is a file in the `state_directory`, written beside its name, synced and
//! renamed at the start, every few minutes, and at the end, by the thread that writes the usage. A
//! start without a recorded end before it counts as an unsafe shutdown. Without a `state_directory`
//! each start is the first.
//!
//! ```text
//! nvmfd power 1
//! cycles 7
//! seconds 86400
//! unsafe 2
//! on
//! crc32 5f3a9c01
//! ```

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tracing::warn;

use crate::blockdev::record::Record;
use crate::core::subsystem::power::PowerMeter;
use crate::state::record::StateDir;

const NAME: &str = "power";
/// The maximum time with power that a crash may lose.
pub(super) const SAVE_EVERY: Duration = Duration::from_secs(600);

/// The file, and its counters.
#[derive(Debug)]
pub struct PowerLog {
    /// The previous record.
    pub meter: PowerMeter,
    directory: Option<PathBuf>,
}

impl PowerLog {
    /// Reads the record in `directory`. Without a directory nothing is persisted.
    ///
    /// A file that cannot be read, or is invalid, is ignored with a warning: no data depend on
    /// these numbers.
    #[must_use]
    pub fn open(directory: Option<&Path>, now: Instant) -> PowerLog {
        let fresh = PowerMeter { since: Some(now), ..PowerMeter::default() };
        let mut meter = directory.and_then(|directory| load(directory, now)).unwrap_or(fresh);
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        meter.since_unix_ms = clock.as_millis().try_into().unwrap_or_default();
        PowerLog { meter, directory: directory.map(Path::to_owned) }
    }

    /// Writes the time with power, and whether it is still on: a file with `on` belongs to a daemon
    /// that is running, or was killed.
    pub(super) fn save(&self, now: Instant, is_on: bool) {
        let Some(directory) = &self.directory else { return };
        save(directory, &self.meter, now, is_on);
    }
}

/// Content of the record.
struct Saved {
    cycles: u64,
    seconds: u64,
    unsafe_shutdowns: u64,
    is_on: bool,
}

impl Record for Saved {
    const KIND: &'static str = "power";
    const REMEDY: &'static str = "remove it";

    fn emit(&self) -> String {
        let Saved { cycles, seconds, unsafe_shutdowns, is_on } = self;
        let state = if *is_on { "on" } else { "off" };
        format!("cycles {cycles}\nseconds {seconds}\nunsafe {unsafe_shutdowns}\n{state}\n")
    }

    fn parse(body: &str) -> Option<Saved> {
        let mut lines = body.lines();
        let mut number = |word| lines.next()?.strip_prefix(word)?.parse().ok();
        Some(Saved {
            cycles: number("cycles ")?,
            seconds: number("seconds ")?,
            unsafe_shutdowns: number("unsafe ")?,
            is_on: lines.next()? == "on",
        })
    }
}

/// Result of a start.
fn load(directory: &Path, now: Instant) -> Option<PowerMeter> {
    let saved: Saved = StateDir(directory).load_if_usable(NAME)?;
    Some(PowerMeter {
        cycles: saved.cycles.saturating_add(1),
        unsafe_shutdowns: saved.unsafe_shutdowns.saturating_add(saved.is_on.into()),
        seconds_before: saved.seconds,
        since: Some(now),
        since_unix_ms: 0,
    })
}

fn save(directory: &Path, meter: &PowerMeter, now: Instant, is_on: bool) {
    let PowerMeter { cycles, unsafe_shutdowns, .. } = *meter;
    let seconds = meter.seconds_before.saturating_add(meter.here(now).as_secs());
    let saved = Saved { cycles, seconds, unsafe_shutdowns, is_on };
    if let Err(error) = StateDir(directory).replace(NAME, &saved) {
        warn!("cannot write {}: {error}", directory.join(NAME).display());
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::state::power::*;

    #[test]
    fn an_unsafe_shutdown_is_counted_at_the_next_start() {
        let directory = tempfile::tempdir().unwrap();
        let start = |now| {
            let log = PowerLog::open(Some(directory.path()), now);
            log.save(now, true);
            log
        };
        let told = |log: &PowerLog, now| {
            let power = log.meter.at(now);
            (power.cycles, power.on_hours, power.unsafe_shutdowns)
        };
        let now = Instant::now();
        let first = start(now);
        assert_eq!(told(&first, now + Duration::from_secs(7200)), (1, 2, 0));
        drop(PowerLog::open(Some(directory.path()), now));
        first.save(now, false);
        let second = start(now);
        assert_eq!(told(&second, now), (2, 0, 0), "a start that failed does not count");
        // The state after a crash: on.
        let third = start(now);
        assert_eq!(told(&third, now), (3, 0, 1));
        save(directory.path(), &third.meter, now + Duration::from_secs(3600), false);
        assert_eq!(told(&start(now), now + Duration::from_secs(3600)), (4, 2, 1));
    }

    #[test]
    fn damaged_files_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let now = Instant::now();
        let meter = PowerMeter { since: Some(now), ..PowerMeter::default() };
        save(directory.path(), &meter, now, false);
        let path = directory.path().join(NAME);
        let good = fs::read_to_string(&path).unwrap();
        assert!(load(directory.path(), now).is_some());
        for bad in ["", "crc32 ", &good.replace("cycles 1", "cycles 2"), &good[..good.len() - 1]] {
            fs::write(&path, bad).unwrap();
            let log = PowerLog::open(Some(directory.path()), now);
            let power = log.meter.at(now);
            assert_eq!((power.cycles, power.on_hours, power.unsafe_shutdowns), (1, 0, 0));
        }
        let full =
            PowerMeter { cycles: u64::MAX, seconds_before: u64::MAX, ..PowerMeter::default() };
        save(directory.path(), &full, now, true);
        let next = load(directory.path(), now).unwrap();
        assert_eq!((next.cycles, next.unsafe_shutdowns), (u64::MAX, 1));
    }

    #[test]
    fn power_counters_restart_without_a_state_directory() {
        let now = Instant::now();
        let log = PowerLog::open(None, now);
        log.save(now, true);
        assert_eq!(log.meter.at(now + Duration::from_secs(3600)).on_hours, 1);
        assert_eq!(PowerMeter::default().at(now).cycles, 1);
    }
}
