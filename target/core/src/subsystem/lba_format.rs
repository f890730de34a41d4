//! The LBA format of a namespace, as set by Format NVM.
//!
//! The configuration determines the initial block size. Once a host has chosen another one, that is
//! valid until a host chooses again: it is kept in a file, written and synced before the response.
//! The configured size is then ignored, because data of one block size must not be read as data of
//! another.
//!
//! ```text
//! begin: published, I/O is refused ─► commands in progress have ended ─► erased, durably ─► persisted
//!     ─► published with the new size, on every reactor ─► answered
//! ```
//!
//! A daemon that is killed finds the old size, with data or zeros, or the new size with zeros. So
//! does one that is stopped, or whose namespace is removed meanwhile: the erasing ends.
//!
//! Source: NVMe Base Specification 2.0, "Format NVM command"; NVM Command Set Specification 1.0,
//! "LBA Format Data Structure".

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use nvme::{Nqn, Status};
use tracing::info;

use crate::subsystem::persistence::{Persist, Section};
use nvmfd_blockdev::{SHIFTS, lock};

/// Progress of a format, and its cancellation. Two of them are equal when they are the same one.
#[derive(Debug)]
pub struct Progress {
    left_percent: AtomicU8,
    stopped: AtomicBool,
    /// Whether an erase is in progress.
    busy: Mutex<bool>,
    idle: Condvar,
}

impl Progress {
    /// No progress.
    pub fn none() -> Progress {
        Progress {
            left_percent: AtomicU8::new(100),
            stopped: AtomicBool::new(false),
            busy: Mutex::new(false),
            idle: Condvar::new(),
        }
    }

    /// Sets the bytes done and the total.
    pub fn set(&self, done: u64, of: u64) {
        let left = u128::from(of.saturating_sub(done)) * 100;
        // At least one percent is left until all is done.
        let percent = left.div_ceil(u128::from(of.max(1))).clamp(1, 100);
        self.left_percent.store(percent as u8, Ordering::Relaxed);
    }

    /// Remaining percent, 1 to 100.
    pub fn left_percent(&self) -> u8 {
        self.left_percent.load(Ordering::Relaxed)
    }

    /// Stops the erasing.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether the erasing is to stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Marks an erase in progress, until this is dropped.
    pub fn erasing(&self) -> Erasing<'_> {
        *lock(&self.busy) = true;
        Erasing(self)
    }

    /// Blocks until no erase runs, at most for `patience`; returns whether none runs. After
    /// [`Progress::stop`] none begins.
    #[must_use]
    pub fn wait_until_idle(&self, patience: Duration) -> bool {
        let waited = self.idle.wait_timeout_while(lock(&self.busy), patience, |busy| *busy);
        let (busy, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !*busy
    }
}

/// An erase in progress.
#[derive(Debug)]
pub struct Erasing<'a>(&'a Progress);

impl Drop for Erasing<'_> {
    fn drop(&mut self) {
        *lock(&self.0.busy) = false;
        self.0.idle.notify_all();
    }
}

impl PartialEq for Progress {
    fn eq(&self, other: &Progress) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Progress {}

/// The LBA format chosen by hosts, and a format in progress. For changes of the configuration; I/O
/// uses the snapshot.
#[derive(Debug)]
pub struct Format {
    subsystem: Nqn,
    nsid: u32,
    kept: Persistence,
    state: Mutex<FormatState>,
}

#[derive(Debug, Default)]
struct FormatState {
    block_size_bytes: Option<u32>,
    under_way: Option<Arc<Progress>>,
}

/// Persistence of the block size.
#[derive(Debug)]
enum Persistence {
    /// Nowhere: it cannot change.
    Nowhere,
    /// That of the backing store, which is memory.
    Memory,
    /// In a section of this file, with the path of the backing store.
    File { file: Box<dyn Persist>, store: String },
}

impl Format {
    /// One that cannot be changed, because it could not be persisted.
    pub fn fixed(subsystem: Nqn, nsid: u32) -> Arc<Format> {
        Arc::new(Format { subsystem, nsid, kept: Persistence::Nowhere, state: Mutex::default() })
    }

    /// One that ends with the daemon, as the blocks of a store in memory do.
    pub fn volatile(subsystem: Nqn, nsid: u32) -> Arc<Format> {
        Arc::new(Format { subsystem, nsid, kept: Persistence::Memory, state: Mutex::default() })
    }

    /// A format persisted in `file`, with its present contents. `store` is the path of the data.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or is invalid. Such a file is never ignored:
    /// the data would be read as blocks of another size.
    pub fn kept(
        subsystem: Nqn,
        nsid: u32,
        file: impl Persist + 'static,
        store: &Path,
    ) -> Result<Arc<Format>, String> {
        let (file, store): (Box<dyn Persist>, _) = (Box::new(file), format!("{store:?}"));
        let block_size_bytes = file.load()?.map(|chosen: ChosenFormat| chosen.block_size_bytes);
        let kept = Persistence::File { file, store };
        let state = Mutex::new(FormatState { block_size_bytes, under_way: None });
        Ok(Arc::new(Format { subsystem, nsid, kept, state }))
    }

    /// Whether a host can choose another block size.
    pub fn can_change(&self) -> bool {
        !matches!(self.kept, Persistence::Nowhere)
    }

    /// Bytes of a block, if a host has chosen.
    pub fn block_size_bytes(&self) -> Option<u32> {
        lock(&self.state).block_size_bytes
    }

    /// Progress of a format, if one is in progress.
    pub fn under_way(&self) -> Option<Arc<Progress>> {
        lock(&self.state).under_way.clone()
    }

    /// Starts a format for a host.
    ///
    /// # Errors
    /// Format in Progress: another one has begun.
    pub fn begin(&self) -> Result<Arc<Progress>, Status> {
        let mut state = lock(&self.state);
        if state.under_way.is_some() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        Ok(Arc::clone(state.under_way.insert(Arc::new(Progress::none()))))
    }

    /// It has ended, with any result.
    pub fn end(&self) {
        lock(&self.state).under_way = None;
    }

    /// Sets the block size: persists it, and then makes it effective.
    ///
    /// # Errors
    /// Internal Error if it cannot be persisted; it is unchanged then.
    pub fn choose(&self, block_size_bytes: u32) -> Result<(), Status> {
        let old = self.block_size_bytes();
        if let Persistence::File { file, store } = &self.kept {
            let chosen =
                |block_size_bytes| ChosenFormat { block_size_bytes, store: Some(store.clone()) };
            let replaced = file.replace(Some(&chosen(block_size_bytes)), old.map(chosen).as_ref());
            replaced.map_err(|_| Status::INTERNAL_ERROR)?;
        }
        lock(&self.state).block_size_bytes = Some(block_size_bytes);
        info!(
            subsystem = %self.subsystem, nsid = self.nsid,
            "a host has formatted it to blocks of {block_size_bytes} bytes"
        );
        Ok(())
    }

    /// A sentence for the administrator if the configured block size differs from that chosen by a
    /// host.
    pub fn difference_from(&self, configured_bytes: u32) -> Option<String> {
        let chosen = self.block_size_bytes().filter(|chosen| *chosen != configured_bytes)?;
        let remedy = match &self.kept {
            Persistence::File { file, .. } => format!(
                "; to have the other, let a host format it again (or stop the daemon and remove \
                 {}, if neither data nor what else it says are needed)",
                file.path().display()
            ),
            _ => String::new(),
        };
        Some(format!(
            "namespace {} of {} has blocks of {chosen} bytes, as a host has formatted it; the \
             `block_size` of {configured_bytes} in the configuration is not heeded{remedy}",
            self.nsid, self.subsystem
        ))
    }
}

/// The format chosen by a host.
pub struct ChosenFormat {
    /// Bytes of a block.
    pub block_size_bytes: u32,
    /// Path of the store, quoted and without a line end; absent in the first version.
    pub store: Option<String>,
}

impl Section for ChosenFormat {
    const NAME: &'static str = "format";

    fn emit(&self) -> String {
        let store = self.store.as_ref().map(|store| format!("store {store}\n"));
        format!("block_size {}\n{}", self.block_size_bytes, store.unwrap_or_default())
    }

    fn parse(body: &str) -> Option<ChosenFormat> {
        let mut lines = body.lines();
        let block_size_bytes = lines.next()?.strip_prefix("block_size ")?.parse().ok()?;
        let store = lines.next().map(|line| line.strip_prefix("store ").map(str::to_owned));
        let chosen =
            ChosenFormat { block_size_bytes, store: store.map_or(Some(None), |it| it.map(Some))? };
        SHIFTS.iter().any(|shift| 1 << shift == block_size_bytes).then_some(chosen)
    }
}

#[cfg(test)]
mod tests {

    use crate::subsystem::lba_format::*;
    use crate::subsystem::persistence::tests::MemorySections;

    fn made(store: &MemorySections) -> Arc<Format> {
        let nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        Format::kept(nqn, 1, store.clone(), Path::new("/srv/one.img")).unwrap()
    }

    #[test]
    fn the_remaining_percentage_of_a_format_is_never_zero() {
        let progress = Progress::none();
        for (done, of, left) in
            [(0, 1000, 100), (1, 1000, 100), (990, 1000, 1), (1000, 1000, 1), (0, 0, 1)]
        {
            progress.set(done, of);
            assert_eq!(progress.left_percent(), left, "{done} of {of}");
        }
        progress.set(u64::MAX / 2, u64::MAX);
        assert_eq!(progress.left_percent(), 51);
    }

    #[test]
    fn wait_until_idle_returns_after_a_stopped_erase_ends() {
        let progress = Progress::none();
        let (at_once, patience) = (Duration::ZERO, Duration::from_secs(600));
        assert!(progress.wait_until_idle(at_once), "nobody has begun");
        let erasing = progress.erasing();
        progress.stop();
        assert!(progress.is_stopped() && !progress.wait_until_idle(at_once));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| progress.wait_until_idle(patience));
            drop(erasing);
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn a_block_size_survives_restarts_and_formats_exclude_each_other() {
        let store = MemorySections::default();
        let format = made(&store);
        assert_eq!((format.block_size_bytes(), format.difference_from(4096)), (None, None));
        let progress = format.begin().unwrap();
        assert_eq!(format.begin(), Err(Status::FORMAT_IN_PROGRESS));
        assert_eq!(format.under_way(), Some(progress));
        format.choose(512).unwrap();
        format.end();
        assert!(format.begin().is_ok());
        let again = made(&store);
        assert_eq!((again.block_size_bytes(), again.under_way()), (Some(512), None));
        assert_eq!(again.difference_from(512), None);
        let sentence = again.difference_from(4096).unwrap();
        assert!(
            sentence.contains("blocks of 512 bytes") && sentence.contains("memory"),
            "{sentence}"
        );
        again.choose(4096).unwrap();
        assert_eq!(made(&store).block_size_bytes(), Some(4096));
    }

    #[test]
    fn an_unpersisted_block_size_change_is_not_applied() {
        let store = MemorySections::default();
        let format = made(&store);
        store.fail(true);
        assert_eq!(format.choose(512), Err(Status::INTERNAL_ERROR));
        assert_eq!(format.block_size_bytes(), None);
        store.fail(false);
        assert_eq!(format.choose(512), Ok(()));
    }
}
