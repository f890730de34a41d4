//! Notices that a file was truncated, also if it has its length again.
//!
//! A length that is examined once a second misses who truncates a file and fills it again meanwhile:
//! `cp`, `dd`, `qemu-img convert`. The kernel knows: a process that writes to a private mapping of a
//! file gets a page of its own, which truncation removes, because a mapping may not reach beyond the
//! end of its file (`even_cows` of `unmap_mapping_range`). Nothing else does: writes of anybody,
//! holes, growth, defragmentation and the reclaim of the page cache leave it alone. So the last page
//! that is served has such a copy, with a mark in it.
//!
//! Only the kernel accesses the copy, to pass it to and from a counter (eventfd): beyond the end of a
//! truncated file it answers with EFAULT where an access by this process would end it (SIGBUS). It
//! does so too where the copy cannot be read (swap, memory limit, device), so EFAULT says nothing: a
//! file that is short is found by its length.
//!
//! There is no mark on ntfs3, which removes such copies also when it punches holes, nor on file
//! systems of several machines, which may wait for a server while they hold the lock of the mappings.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::eventfd::{EfdFlags, EventFd};
use vm_memory::{
    FileOffset, MmapRegion, ReadVolatile, VolatileMemory, VolatileMemoryError, VolatileSlice,
    WriteVolatile,
};

use crate::file_system::file_system;
use crate::lock;
use crate::owner_file::may_have_other_machines;

/// What the copy begins with: not what a file has there, except by a chance of 1 in 2^64.
const MARK: u64 = 0x9C1F_5A2B_E07D_4683;
/// More than the kernel reads around a page that is mapped.
const READ_AROUND_BYTES: u64 = 4 << 20;
/// `f_type` of statfs(2).
const NTFS3: u32 = 0x7366_746e;

/// Whether the file of a store was truncated since it was opened.
#[derive(Debug, Default)]
pub(crate) struct Truncation {
    page: Mutex<Option<Arc<MarkedPage>>>,
    /// Whether the file system removes a copy at truncation only, and does not wait for others.
    is_fit: OnceLock<bool>,
    /// The last attempt has failed.
    has_failed: AtomicBool,
}

impl Truncation {
    /// Gives the last page of `size_bytes` its copy, if it has none. May block on the device.
    ///
    /// # Errors
    /// The page cannot be mapped or read, for the first time in succession. The former one, if there
    /// is one, is used on.
    pub(crate) fn follow(&self, file: &Arc<File>, size_bytes: &AtomicU64) -> io::Result<()> {
        let outcome = self.mark_last(file, size_bytes);
        let is_known = self.has_failed.swap(outcome.is_err(), Ordering::Relaxed);
        if is_known { Ok(()) } else { outcome }
    }

    fn mark_last(&self, file: &Arc<File>, size_bytes: &AtomicU64) -> io::Result<()> {
        let last = || last_page(size_bytes.load(Ordering::Relaxed));
        let at = last();
        if lock(&self.page).as_ref().is_some_and(|page| page.at == at)
            || !self.is_fit.get_or_init(|| is_fit(file))
        {
            return Ok(());
        }
        let page = MarkedPage::of(file, at);
        // After that, because the former copy has noticed what was before.
        if self.has_happened() {
            return Ok(());
        }
        let mut current = lock(&self.page);
        // The store may have become smaller meanwhile: see `end_at`.
        if last() == at {
            *current = Some(Arc::new(page?));
        }
        Ok(())
    }

    /// The store ends there from now on: its file may be truncated to that.
    pub(crate) fn end_at(&self, size_bytes: u64) {
        lock(&self.page).take_if(|page| page.at > last_page(size_bytes));
    }

    /// Whether the file was truncated. May block on the device.
    pub(crate) fn has_happened(&self) -> bool {
        // Without the lock, for which `end_at` would wait.
        let Some(page) = lock(&self.page).clone() else { return false };
        page.has_lost_mark() && lock(&self.page).as_ref().is_some_and(|it| Arc::ptr_eq(it, &page))
    }
}

fn is_fit(file: &File) -> bool {
    file_system(file) != Some(NTFS3) && !may_have_other_machines(file)
}

/// Offset of the page with the last of so many bytes.
fn last_page(size_bytes: u64) -> u64 {
    let page_bytes = rustix::param::page_size() as u64;
    size_bytes.saturating_sub(1) / page_bytes * page_bytes
}

/// A page of a file in private memory, with the mark.
#[derive(Debug)]
struct MarkedPage {
    at: u64,
    mapping: MmapRegion,
}

impl MarkedPage {
    fn of(file: &Arc<File>, at: u64) -> io::Result<MarkedPage> {
        let page_bytes = rustix::param::page_size();
        let mapping = MmapRegion::build(
            Some(FileOffset::from_arc(Arc::clone(file), at)),
            page_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE,
        );
        let page = MarkedPage { at, mapping: mapping.map_err(io::Error::other)? };
        let counter = counter()?;
        counter.write(MARK)?;
        let marked = page.mark().and_then(|mut mark| counter.as_fd().read_volatile(&mut mark));
        marked.map_err(io::Error::other)?;
        // Blocks that are allocated and were never written count as written while they are in the
        // page cache, which nothing else needs.
        let from = libc::off_t::try_from(at.saturating_sub(READ_AROUND_BYTES)).unwrap_or(0);
        let _ = posix_fadvise(file, from, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        Ok(page)
    }

    /// Whether there is something else where the mark was.
    fn has_lost_mark(&self) -> bool {
        // Without another descriptor it is not known, nor if the page cannot be read.
        let Ok(counter) = counter() else { return false };
        match self.mark().and_then(|mark| counter.as_fd().write_volatile(&mark)) {
            Ok(_) => counter.read() != Ok(MARK),
            // The one value that a counter refuses: bytes 0xFF.
            Err(VolatileMemoryError::IOError(error)) => error.raw_os_error() == Some(libc::EINVAL),
            Err(_) => false,
        }
    }

    fn mark(&self) -> Result<VolatileSlice<'_>, VolatileMemoryError> {
        self.mapping.get_slice(0, size_of_val(&MARK))
    }
}

/// Passes 8 bytes from the kernel to memory, or back.
fn counter() -> nix::Result<EventFd> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use crate::owner_file::tests::pretend_several_machines;
    use crate::truncation::*;

    const BYTES: usize = 1 << 18;

    /// A file of that size, and whoever notices its truncation.
    fn file() -> (Arc<File>, AtomicU64, Truncation) {
        let file = tempfile::tempfile_in(crate::testing::directory()).unwrap();
        file.set_len(BYTES as u64).unwrap();
        (Arc::new(file), AtomicU64::new(BYTES as u64), Truncation::default())
    }

    #[test]
    fn a_refilled_page_is_truncation_and_an_unreadable_one_is_not() {
        let (file, size, truncation) = file();
        truncation.follow(&file, &size).unwrap();
        assert!(!truncation.has_happened());
        // As where swap or the device fails.
        file.set_len(0).unwrap();
        assert!(!truncation.has_happened());
        for byte in [0x11, 0xFF, 0] {
            file.write_all_at(&vec![byte; BYTES], 0).unwrap();
            assert!(truncation.has_happened(), "{byte}");
        }
    }

    #[test]
    fn a_mark_that_could_not_be_made_is_made_later_and_reported_once() {
        let (file, size, truncation) = file();
        for is_first in [true, false, false] {
            file.set_len(0).unwrap();
            assert_eq!(truncation.follow(&file, &size).is_err(), is_first);
        }
        for _ in 0..2 {
            file.set_len(BYTES as u64).unwrap();
            truncation.follow(&file, &size).unwrap();
            assert!(!truncation.has_happened());
            file.set_len(0).unwrap();
            file.set_len(BYTES as u64).unwrap();
            assert!(truncation.has_happened());
            truncation.end_at(0);
        }
    }

    #[test]
    fn files_that_other_machines_may_change_have_no_mark() {
        let _pretence = pretend_several_machines();
        let (file, size, truncation) = file();
        truncation.follow(&file, &size).unwrap();
        assert!(lock(&truncation.page).is_none());
    }
}
