//! The file of the times with power ([`PowerMeter`]).
//!
//! What has to outlast the daemon is a file in the `state_directory`, written beside its name, synced and
//! renamed, at the start, every few minutes, and at the end. A start that finds no end before it
//! counts an unsafe shutdown. Without a `state_directory` each start is the first.
//!
//! ```text
//! nvmfd power 1
//! cycles 7
//! seconds 86400
//! unsafe 2
//! on
//! crc32 5f3a9c01
//! ```

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tracing::warn;

use crate::core::subsystem::power::PowerMeter;
use crate::state::atomic_file;

const FIRST_LINE: &str = "nvmfd power 1";
const NAME: &str = "power";
/// Longer files are not ours.
const BYTES_MAX: u64 = 4096;
/// How much of the time with power a crash may lose.
const SAVE_EVERY: Duration = Duration::from_secs(600);

/// The file, and the thread that writes it now and then.
#[derive(Debug)]
pub struct PowerLog {
    /// What was found.
    pub meter: PowerMeter,
    folder: Option<PathBuf>,
    keeper: Option<(JoinHandle<()>, Sender<()>)>,
}

impl PowerLog {
    /// Reads what is in `folder`. Without a folder nothing is kept.
    ///
    /// A file that cannot be read, or makes no sense, is passed over with a warning: no data depend
    /// on these numbers.
    #[must_use]
    pub fn open(folder: Option<&Path>, now: Instant) -> PowerLog {
        let fresh = PowerMeter { since: Some(now), ..PowerMeter::default() };
        let mut meter = folder.and_then(|folder| load(folder, now)).unwrap_or(fresh);
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        meter.since_unix_ms = clock.as_millis().try_into().unwrap_or_default();
        PowerLog { meter, folder: folder.map(Path::to_owned), keeper: None }
    }

    /// Writes that power is on, since the target has started.
    pub fn begin(&mut self, now: Instant) {
        let Some(folder) = self.folder.clone() else { return };
        let meter = self.meter;
        save(&folder, &meter, now, true);
        let (stop, stopped) = channel();
        let work = move || loop {
            let asked = stopped.recv_timeout(SAVE_EVERY);
            if asked == Err(RecvTimeoutError::Disconnected) {
                return;
            }
            save(&folder, &meter, Instant::now(), asked.is_err());
            if asked.is_ok() {
                return;
            }
        };
        match std::thread::Builder::new().name("power".to_owned()).spawn(work) {
            Ok(thread) => self.keeper = Some((thread, stop)),
            Err(error) => warn!("no thread to note the time with power: {error}"),
        }
    }

    /// Notes that this is a proper end; gives up at the deadline.
    pub fn close(self, deadline: Instant) {
        let Some((thread, stop)) = self.keeper else { return };
        let _ = stop.send(());
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn emit(meter: &PowerMeter, now: Instant, on: bool) -> String {
    let PowerMeter { cycles, unsafe_shutdowns, .. } = meter;
    let seconds = meter.seconds_before.saturating_add(meter.here(now).as_secs());
    let (seconds, state) = (seconds, if on { "on" } else { "off" });
    let text = format!(
        "{FIRST_LINE}\ncycles {cycles}\nseconds {seconds}\nunsafe {unsafe_shutdowns}\n{state}\n"
    );
    atomic_file::sealed(&text)
}

/// What a start finds in a file that [`emit`] wrote; none for any other.
fn parse(text: &str, now: Instant) -> Option<PowerMeter> {
    let mut lines = atomic_file::unsealed(text, FIRST_LINE).ok()?;
    let mut number = |word| lines.next()?.strip_prefix(word)?.parse::<u64>().ok();
    let (cycles, seconds_before) = (number("cycles ")?, number("seconds ")?);
    let unsafe_before = number("unsafe ")?;
    let crashed = match lines.next()? {
        "on" => 1,
        "off" => 0,
        _ => return None,
    };
    Some(PowerMeter {
        cycles: cycles.saturating_add(1),
        unsafe_shutdowns: unsafe_before.saturating_add(crashed),
        seconds_before,
        since: Some(now),
        since_unix_ms: 0,
    })
}

fn load(folder: &Path, now: Instant) -> Option<PowerMeter> {
    let path = folder.join(NAME);
    let read = fs::metadata(&path).and_then(|found| match found.len() > BYTES_MAX {
        true => Err(io::Error::other("it is too long")),
        false => fs::read_to_string(&path),
    });
    let text = match read {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return None,
        Err(error) => {
            warn!("{} cannot be read, counting anew: {error}", path.display());
            return None;
        }
    };
    let meter = parse(&text, now);
    if meter.is_none() {
        warn!("{} makes no sense, counting anew", path.display());
    }
    meter
}

fn save(folder: &Path, meter: &PowerMeter, now: Instant, on: bool) {
    if let Err(error) = atomic_file::write(folder, NAME, emit(meter, now, on).as_bytes()) {
        warn!("{} cannot be written: {error}", folder.join(NAME).display());
    }
}

#[cfg(test)]
mod tests {
    use crate::state::power::*;

    #[test]
    fn an_end_without_a_goodbye_is_counted_by_the_next_start() {
        let folder = tempfile::tempdir().unwrap();
        let start = |now| {
            let mut book = PowerLog::open(Some(folder.path()), now);
            book.begin(now);
            book
        };
        let told = |book: &PowerLog, now| {
            let power = book.meter.at(now);
            (power.cycles, power.on_hours, power.unsafe_shutdowns)
        };
        let now = Instant::now();
        let first = start(now);
        assert_eq!(told(&first, now + Duration::from_secs(7200)), (1, 2, 0));
        drop(PowerLog::open(Some(folder.path()), now));
        first.close(now + Duration::from_secs(60));
        let second = start(now);
        assert_eq!(told(&second, now), (2, 0, 0), "a start that failed does not count");
        // As a crash leaves it: on.
        let third = start(now);
        assert_eq!(told(&third, now), (3, 0, 1));
        save(folder.path(), &third.meter, now + Duration::from_secs(3600), false);
        assert_eq!(told(&start(now), now + Duration::from_secs(3600)), (4, 2, 1));
    }

    #[test]
    fn damaged_files_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let now = Instant::now();
        let meter = PowerMeter { since: Some(now), ..PowerMeter::default() };
        let good = emit(&meter, now, false);
        assert!(parse(&good, now).is_some());
        for cut in 0..good.len() {
            assert_eq!(parse(&good[..cut], now), None);
        }
        for bad in ["", "crc32 ", &good.replace("cycles 1", "cycles 2"), &"x".repeat(5000)] {
            fs::write(folder.path().join(NAME), bad).unwrap();
            let book = PowerLog::open(Some(folder.path()), now);
            let power = book.meter.at(now);
            assert_eq!((power.cycles, power.on_hours, power.unsafe_shutdowns), (1, 0, 0));
        }
        let full =
            PowerMeter { cycles: u64::MAX, seconds_before: u64::MAX, ..PowerMeter::default() };
        let next = parse(&emit(&full, now, true), now).unwrap();
        assert_eq!((next.cycles, next.unsafe_shutdowns), (u64::MAX, 1));
    }

    #[test]
    fn without_a_folder_each_start_is_the_first() {
        let now = Instant::now();
        let mut book = PowerLog::open(None, now);
        book.begin(now);
        assert_eq!(book.meter.at(now + Duration::from_secs(3600)).on_hours, 1);
        book.close(now);
        assert_eq!(PowerMeter::default().at(now).cycles, 1);
    }
}
