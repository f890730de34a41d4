//! What hosts have done with each subsystem, over restarts of the daemon: the numbers of the SMART
//! log that are of a life.
//!
//! They are one file in the `state_directory`, written beside its name, synced and renamed, once a
//! minute while they change, and at the end. So a crash forgets at most the last minute. What was
//! done with a subsystem that is gone is kept for the case that it comes again. Without a
//! `state_directory` a life is that of the daemon.
//!
//! ```text
//! nvmfd usage 1
//! subsystem 3 240 1000 500 8000 4000 0 nqn.2026-11.io.nvmfd:disk1
//! namespace 1 240 1000 500 8000 4000 0
//! crc32 5f3a9c01
//! ```
//!
//! The numbers of a subsystem are: errors, quarters of a second with commands under way, reads,
//! writes, 512-byte units read and written, media errors. Its namespaces follow, with their id in
//! the place of the errors.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::str::SplitN;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nvme::Nqn;
use tracing::warn;

use crate::kept;
use crate::usage::{Account, Usage, Work};

const FIRST_LINE: &str = "nvmfd usage 1";
const NAME: &str = "usage";
/// Longer files are not ours: a thousand subsystems with a hundred namespaces each take less.
const BYTES_MAX: u64 = 16 << 20;
/// How much of what hosts did a crash may lose.
const SAVE_EVERY: Duration = Duration::from_secs(60);

type Usages = BTreeMap<Nqn, Arc<Usage>>;

/// The numbers of all subsystems, and the file.
#[derive(Debug)]
pub struct Ledger {
    usages: Mutex<Usages>,
    folder: Option<PathBuf>,
}

/// The thread that writes the file.
#[derive(Debug)]
pub struct Keeping {
    thread: JoinHandle<()>,
    stop: Sender<()>,
}

impl Ledger {
    /// Reads what is in `folder`. Without a folder nothing is kept.
    ///
    /// A file that cannot be read, or makes no sense, is passed over with a warning: no data depend
    /// on these numbers.
    #[must_use]
    pub fn open(folder: Option<&Path>) -> Ledger {
        let usages = Mutex::new(folder.map(load).unwrap_or_default());
        Ledger { usages, folder: folder.map(Path::to_owned) }
    }

    /// What hosts have done with a subsystem, counting on from what was kept.
    #[must_use]
    pub fn usage(&self, subsystem: &Nqn) -> Arc<Usage> {
        let mut usages = self.usages.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(usages.entry(*subsystem).or_default())
    }

    /// Keeps the numbers from now on, since the target has started; none without a folder.
    #[must_use]
    pub fn keep(self: Arc<Ledger>) -> Option<Keeping> {
        let folder = self.folder.clone()?;
        let (stop, stopped) = channel();
        let work = move || {
            let mut kept = String::new();
            loop {
                let asked = stopped.recv_timeout(SAVE_EVERY);
                if asked == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
                let text = emit(&self.usages);
                if text != kept && save(&folder, &text) {
                    kept = text;
                }
                if asked.is_ok() {
                    return;
                }
            }
        };
        match std::thread::Builder::new().name("ledger".to_owned()).spawn(work) {
            Ok(thread) => Some(Keeping { thread, stop }),
            Err(error) => {
                warn!("no thread to keep what hosts have done: {error}");
                None
            }
        }
    }
}

impl Keeping {
    /// Keeps the numbers as they are now, for the last time; gives up at the deadline.
    pub fn close(self, deadline: Instant) {
        let _ = self.stop.send(());
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn load(folder: &Path) -> Usages {
    let path = folder.join(NAME);
    let read = fs::metadata(&path).and_then(|found| match found.len() > BYTES_MAX {
        true => Err(io::Error::other("it is too long")),
        false => fs::read_to_string(&path),
    });
    let usages = match read {
        Ok(text) => parse(&text),
        Err(error) if error.kind() == ErrorKind::NotFound => return Usages::new(),
        Err(error) => {
            warn!("{} cannot be read, counting anew: {error}", path.display());
            return Usages::new();
        }
    };
    usages.unwrap_or_else(|| {
        warn!("{} makes no sense, counting anew", path.display());
        Usages::new()
    })
}

fn save(folder: &Path, text: &str) -> bool {
    let written = match text.len() as u64 > BYTES_MAX {
        true => Err(io::Error::other("there are too many namespaces for it")),
        false => kept::write(folder, NAME, text.as_bytes()),
    };
    if let Err(error) = &written {
        warn!("{} cannot be written: {error}", folder.join(NAME).display());
    }
    written.is_ok()
}

fn emit(usages: &Mutex<Usages>) -> String {
    let usages = usages.lock().unwrap_or_else(PoisonError::into_inner);
    let mut text = format!("{FIRST_LINE}\n");
    for (nqn, usage) in &*usages {
        let (errors, whole, namespaces) = usage.accounts();
        if errors == 0 && whole == Account::default() && namespaces.is_empty() {
            continue;
        }
        // Writing to a string does not fail.
        let _ = writeln!(text, "subsystem {errors} {} {nqn}", numbers(&whole));
        for (nsid, account) in namespaces {
            let _ = writeln!(text, "namespace {nsid} {}", numbers(&account));
        }
    }
    let sum = crc32fast::hash(text.as_bytes());
    text + &format!("crc32 {sum:08x}\n")
}

fn numbers(account: &Account) -> String {
    let Account { work, busy_grains } = account;
    let Work { reads, writes, units_read, units_written, media_errors } = work;
    format!("{busy_grains} {reads} {writes} {units_read} {units_written} {media_errors}")
}

/// What is in a file that [`emit`] wrote; none for any other.
fn parse(text: &str) -> Option<Usages> {
    let (body, sum) = text.split_at(text.rfind("crc32 ")?);
    if sum != format!("crc32 {:08x}\n", crc32fast::hash(body.as_bytes())) {
        return None;
    }
    let mut lines = body.lines().peekable();
    (lines.next()? == FIRST_LINE).then_some(())?;
    let mut usages = Usages::new();
    while let Some(line) = lines.next() {
        let mut words = line.strip_prefix("subsystem ")?.splitn(8, ' ');
        let (errors, whole) = entry(&mut words)?;
        let nqn = words.next()?.parse().ok()?;
        let mut namespaces = Vec::new();
        while let Some(line) = lines.next_if(|line| line.starts_with("namespace ")) {
            let mut words = line.strip_prefix("namespace ")?.splitn(7, ' ');
            let (nsid, account) = entry(&mut words)?;
            namespaces.push((u32::try_from(nsid).ok()?, account));
        }
        let usage = Usage::default();
        usage.carry(errors, &whole, &namespaces);
        usages.insert(nqn, Arc::new(usage));
    }
    Some(usages)
}

fn entry(words: &mut SplitN<'_, char>) -> Option<(u64, Account)> {
    let mut number = || words.next()?.parse::<u64>().ok();
    let (first, busy_grains) = (number()?, number()?);
    let work = Work {
        reads: number()?,
        writes: number()?,
        units_read: number()?,
        units_written: number()?,
        media_errors: number()?,
    };
    Some((first, Account { work, busy_grains }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(reads: u64) -> Work {
        Work { reads, writes: 2, units_read: reads * 8, units_written: 16, media_errors: 1 }
    }

    fn nqn(name: &str) -> Nqn {
        format!("nqn.2026-11.io.nvmfd:{name}").parse().unwrap()
    }

    fn started(folder: &Path) -> (Arc<Ledger>, Keeping) {
        let ledger = Arc::new(Ledger::open(Some(folder)));
        let keeping = Arc::clone(&ledger).keep().unwrap();
        (ledger, keeping)
    }

    fn stopped(keeping: Keeping) {
        keeping.close(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn a_life_goes_on_over_restarts_also_of_subsystems_that_were_gone_meanwhile() {
        let folder = tempfile::tempdir().unwrap();
        let now = Instant::now();
        let [a, b] = ["a", "b"].map(nqn);
        let (first, keeping) = started(folder.path());
        let usage = first.usage(&a);
        usage.add(1, &work(10));
        usage.add(7, &work(100));
        usage.note_busy(7, now);
        assert_eq!([usage.count_error(), usage.count_error()], [1, 2]);
        first.usage(&b).add(1, &work(5));
        stopped(keeping);

        let (second, keeping) = started(folder.path());
        let usage = second.usage(&a);
        assert_eq!(usage.whole.total().reads, 110);
        assert_eq!((usage.of(1).total(), usage.of(7).total()), (work(10), work(100)));
        assert_eq!(usage.whole.busy(), Duration::from_millis(250));
        assert_eq!(usage.count_error(), 3, "no number comes twice");
        usage.add(7, &work(1));
        // A start that fails keeps nothing, and forgets nothing.
        drop(Ledger::open(Some(folder.path())));
        stopped(keeping);

        let third = Ledger::open(Some(folder.path()));
        assert_eq!(third.usage(&a).of(7).total().reads, 101);
        assert_eq!(third.usage(&b).whole.total(), work(5), "nobody asked for it meanwhile");
        assert_eq!(third.usage(&nqn("c")).whole.total(), Work::default());
        assert!(Arc::ptr_eq(&third.usage(&a), &third.usage(&a)));
    }

    #[test]
    fn damaged_files_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        let (ledger, keeping) = started(folder.path());
        ledger.usage(&nqn("a")).add(3, &work(u64::MAX / 8));
        stopped(keeping);
        let good = fs::read_to_string(&path).unwrap();
        assert_eq!(parse(&good).unwrap().len(), 1);
        for cut in 0..good.len() {
            assert!(parse(&good[..cut]).is_none(), "{cut}");
        }
        let sealed = |body: &str| format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()));
        let bodies = [
            "",
            "nvmfd usage 2\n",
            "nvmfd usage 1\nnamespace 1 0 0 0 0 0 0\n",
            "nvmfd usage 1\nsubsystem 0 0 0 0 0 0 0 not a name\n",
            "nvmfd usage 1\nsubsystem 0 0 0 0 0 0 nqn.2026-11.io.nvmfd:a\n",
            "nvmfd usage 1\nsubsystem 0 0 0 0 0 0 0 nqn.2026-11.io.nvmfd:a\nnamespace 4294967296 0 0 0 0 0 0\n",
        ];
        for bad in bodies.map(sealed).into_iter().chain(["x".to_owned()]) {
            assert!(parse(&bad).is_none(), "{bad:?}");
            fs::write(&path, bad).unwrap();
            let ledger = Ledger::open(Some(folder.path()));
            assert_eq!(ledger.usage(&nqn("a")).whole.total(), Work::default());
        }
    }

    #[test]
    fn without_a_folder_a_life_is_that_of_the_daemon() {
        let ledger = Arc::new(Ledger::open(None));
        ledger.usage(&nqn("a")).add(1, &work(1));
        assert_eq!(ledger.usage(&nqn("a")).whole.total(), work(1));
        assert!(ledger.keep().is_none());
    }
}
