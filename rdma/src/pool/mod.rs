//! `Pool` and `Buf`: the registered memory.
//!
//! One allocation a reactor, registered twice: with the adapter (memory region) and with the ring
//! (fixed buffer). So a disk reads straight into what the adapter sends.
//!
//! ```text
//! | cells (64 B: responses) | receives (page + in-capsule bytes) | data (buddy, 4 KiB and up) |
//! ```
//!
//! A receive buffer's window begins `lead_bytes` before a page boundary, so that what follows the
//! first `lead_bytes` of a message is page aligned and can go to an `O_DIRECT` file as it lies.
//!
//! # How the unsafe code is fenced
//!
//! * The allocation is one anonymous mapping, owned by [`Region`], alive while anyone holds it:
//!   providers and rings keep an `Arc<Region>` for as long as a device may touch it.
//! * A [`Buf`] is move-only and made by [`Pool`] alone, with bytes that no other live `Buf` has.
//!   Giving it to a fabric or a disk moves it, so no reference can exist while a device writes.
//! * A [`RemoteRegion`] buffer, which peers may write at any time, gives no slice, only copies. A
//!   provider that moves data itself gets at its bytes by the one `Window` that was split off when
//!   the buffer was exposed; the buffer is free again only when that has come back.
//! * Slices are made from a `&Buf`/`&mut Buf` plus a region of the same identity, and only inside
//!   the buffer's bounds, which are checked where they are set.
#![expect(unsafe_code, reason = "the registered memory: a mapping, and slices of it")]

mod buddy;
mod remote_region;

use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use buddy::Buddy;
pub use remote_region::RemoteRegion;

/// The unit of the data section and of every alignment, in bytes.
pub const PAGE_BYTES: u32 = 4096;
/// The size of a cell, in bytes.
pub const CELL_BYTES: u32 = 64;

/// Bytes that a data buffer of `len` bytes takes of its pool: a power of two of pages. For lengths
/// that a pool has, up to 2 GiB.
#[inline]
#[must_use]
pub fn capacity_for(len: u32) -> u32 {
    PAGE_BYTES.saturating_mul(len.div_ceil(PAGE_BYTES).next_power_of_two())
}

/// Size of a pool. [`PoolPlan::total_bytes`] is the formula.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolPlan {
    /// Small buffers for responses.
    pub cells: u32,
    /// Receive buffers.
    pub receives: u32,
    /// Bytes of a message that come before its page-aligned part (at most 4096).
    pub lead_bytes: u32,
    /// Bytes of the page-aligned part (a multiple of 4096, may be 0).
    pub tail_bytes: u32,
    /// Bytes for data; rounded up to a multiple of `largest_bytes`.
    pub data_bytes: u64,
    /// The largest data buffer: 4096 times a power of two.
    pub largest_bytes: u32,
}

impl PoolPlan {
    /// Bytes of one receive buffer.
    #[must_use]
    pub fn receive_bytes(&self) -> u64 {
        u64::from(PAGE_BYTES) + u64::from(self.tail_bytes)
    }

    /// What the pool takes: cells × 64 + receives × (4096 + tail) + data, each section rounded up
    /// to whole pages.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.cell_section() + self.receive_section() + self.data_section()
    }

    fn cell_section(&self) -> u64 {
        (u64::from(self.cells) * u64::from(CELL_BYTES)).next_multiple_of(u64::from(PAGE_BYTES))
    }

    fn receive_section(&self) -> u64 {
        u64::from(self.receives) * self.receive_bytes()
    }

    fn data_section(&self) -> u64 {
        self.data_bytes.next_multiple_of(u64::from(self.largest_bytes.max(PAGE_BYTES)))
    }

    fn check(&self) -> io::Result<()> {
        let largest_ok = self.largest_bytes >= PAGE_BYTES && self.largest_bytes.is_power_of_two();
        let tail_ok = self.tail_bytes.is_multiple_of(PAGE_BYTES) && self.tail_bytes <= 1 << 20;
        // So sums of sections fit 64 bits, and no offset is more than the `isize::MAX` that one
        // may be.
        let data_ok = self.data_bytes <= 1 << 48;
        let sizes_ok = largest_ok && tail_ok && data_ok && self.lead_bytes <= PAGE_BYTES;
        if sizes_ok && self.total_bytes() > 0 {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("impossible pool: {self:?}")))
    }
}

/// The mapping itself. Whoever registers it with a device holds it until the registration is gone.
#[derive(Debug)]
pub struct Region {
    /// The pool's identity, which its buffers carry.
    id: u32,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: Region hands out addresses, and slices only against a Buf, which is exclusive. Unmapping
// happens once, when the last holder is gone.
unsafe impl Send for Region {}
// SAFETY: as above; a slice needs the Buf, and a mutable one needs it mutably.
unsafe impl Sync for Region {}

impl Region {
    /// Address of the first byte.
    #[must_use]
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The window's bytes, for providers that move data themselves.
    ///
    /// # Panics
    /// When the buffer is of another pool; so does [`Region::bytes_mut`].
    #[must_use]
    pub fn bytes<'a>(&'a self, buf: &'a Buf) -> &'a [u8] {
        self.check(buf);
        // SAFETY: `check` proved the buffer is ours, so it lies inside the live mapping; its bytes
        // belong to this Buf alone, which is borrowed, so nobody writes them for 'a. The mapping
        // is zero-filled by the kernel, hence initialised.
        unsafe { std::slice::from_raw_parts(self.at(buf), buf.len as usize) }
    }

    /// The window's bytes, to change.
    #[must_use]
    pub fn bytes_mut<'a>(&'a self, buf: &'a mut Buf) -> &'a mut [u8] {
        self.check(buf);
        // SAFETY: as in `bytes`; the Buf is borrowed mutably, so this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.at(buf), buf.len as usize) }
    }

    /// The bytes of a buffer that peers may access.
    pub(crate) fn exposed<'a>(&'a self, window: &'a Window) -> &'a [u8] {
        assert_eq!(window.pool, self.id, "a window of another pool");
        // SAFETY: a window lies in a buffer of this pool (checked above), which is inside an
        // `RemoteRegion` for as long as the window exists, or lost. So the only other way to these bytes
        // is `copy_out` and `copy_in`: these need the `RemoteRegion`, which cannot leave its thread.
        // Windows are kept by `Memory` alone, which asserts that it is on that thread before it
        // comes here. So only code that holds what this returns could copy meanwhile. That is code
        // of this crate, for no public function returns it: it goes into a copy, a CRC or a
        // system call, and nothing of a user's is called until it is dropped.
        unsafe { std::slice::from_raw_parts(self.place(window.offset), window.len as usize) }
    }

    /// The bytes of a buffer that peers may access, to change.
    pub(crate) fn exposed_mut<'a>(&'a self, window: &'a mut Window) -> &'a mut [u8] {
        assert_eq!(window.pool, self.id, "a window of another pool");
        // SAFETY: as in `exposed`; the window is the only one and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.place(window.offset), window.len as usize) }
    }

    fn check(&self, buf: &Buf) {
        assert_eq!(buf.pool, self.id, "a buffer of another pool");
    }

    fn at(&self, buf: &Buf) -> *mut u8 {
        self.place(buf.offset())
    }

    fn place(&self, offset: u64) -> *mut u8 {
        // SAFETY: base + start + len was checked against the section when the buffer was made and
        // against the capacity whenever its window moved; both lie inside the mapping.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by Pool::new with this base and length and nobody else
        // unmaps it; the last Arc is gone, so no device and no Pool uses it any more.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// What a buffer is for; decides its section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Class {
    Cell,
    Receive,
    /// `PAGE_BYTES << order`
    Data(u8),
}

/// A piece of a [`Pool`], owned. Posting moves it away, completing brings it back; it must end in
/// [`Pool::give`]. Its *window* is the part that operations act upon.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a buffer that is dropped is lost to its pool: give it back"]
pub struct Buf {
    pool: u32,
    class: Class,
    base: u64,
    capacity: u32,
    start: u32,
    len: u32,
}

impl Buf {
    /// Bytes in the window.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a length, not a collection")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Bytes in the whole buffer.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Where the window begins within the buffer.
    #[must_use]
    pub fn start(&self) -> u32 {
        self.start
    }

    /// Where the window begins within the [`Region`].
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.base + u64::from(self.start)
    }

    /// Whether the buffer lies in this region: for providers and rings, before they hand its
    /// address to a device.
    #[must_use]
    pub fn is_of(&self, region: &Region) -> bool {
        self.pool == region.id
    }

    /// Moves the window to `len` bytes from `start` of the buffer.
    ///
    /// # Panics
    /// When that leaves the buffer: a mistake of the caller, who chose the buffer by this length.
    #[inline]
    pub fn select(&mut self, start: u32, len: u32) {
        assert!(
            start.checked_add(len).is_some_and(|end| end <= self.capacity),
            "window {start}+{len} leaves a buffer of {} bytes",
            self.capacity
        );
        self.start = start;
        self.len = len;
    }
}

/// The window of an exposed buffer, for the provider that moves its data: made by
/// `RemoteRegion::split` alone, once for each, and given back to `RemoteRegion::join`.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pool: u32,
    offset: u64,
    len: u32,
}

impl Window {
    /// For `RemoteRegion` only.
    fn of(buf: &Buf) -> Window {
        Window { pool: buf.pool, offset: buf.offset(), len: buf.len }
    }

    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }
}

/// The buffers of one reactor.
#[derive(Debug)]
pub struct Pool {
    id: u32,
    plan: PoolPlan,
    region: Arc<Region>,
    cells: Vec<u32>,
    receives: Vec<u32>,
    data: Buddy,
}

impl Pool {
    /// Maps the memory and puts every buffer on its free list. All lists are allocated here; none
    /// grows later.
    ///
    /// # Errors
    /// The plan is impossible or the mapping fails.
    pub fn new(plan: PoolPlan) -> io::Result<Pool> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        plan.check()?;
        let len = usize::try_from(plan.total_bytes()).map_err(io::Error::other)?;
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let units =
            u32::try_from(plan.data_section() / u64::from(PAGE_BYTES)).map_err(io::Error::other)?;
        let top = (plan.largest_bytes / PAGE_BYTES).trailing_zeros() as u8;
        // Whether a buffer lies in a region is told by this number alone, so none is given twice.
        let id = u32::try_from(NEXT.fetch_add(1, Ordering::Relaxed))
            .map_err(|_| io::Error::other("there have been 2^32 pools"))?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice; it
        // overlaps nothing and is unmapped by Region alone.
        let base = unsafe { mmap_anonymous(None, size, prot, MapFlags::MAP_PRIVATE)? };
        Ok(Pool {
            id,
            plan,
            region: Arc::new(Region { id, base: base.cast(), len }),
            cells: (0..plan.cells).rev().collect(),
            receives: (0..plan.receives).rev().collect(),
            data: Buddy::new(units, top),
        })
    }

    /// The memory, for registering it with a device.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// What the pool was made from.
    #[must_use]
    pub fn plan(&self) -> &PoolPlan {
        &self.plan
    }

    /// A buffer of 64 bytes, all in the window.
    pub fn take_cell(&mut self) -> Option<Buf> {
        let index = self.cells.pop()?;
        let base = u64::from(index) * u64::from(CELL_BYTES);
        Some(self.buf(Class::Cell, base, CELL_BYTES, 0, CELL_BYTES))
    }

    /// A receive buffer; the window is the lead and the tail.
    pub fn take_receive(&mut self) -> Option<Buf> {
        let index = self.receives.pop()?;
        let base = self.plan.cell_section() + u64::from(index) * self.plan.receive_bytes();
        let start = PAGE_BYTES - self.plan.lead_bytes;
        let len = self.plan.lead_bytes + self.plan.tail_bytes;
        Some(self.buf(Class::Receive, base, PAGE_BYTES + self.plan.tail_bytes, start, len))
    }

    /// A page-aligned buffer with a window of `len` bytes (1 to the plan's largest), or none when
    /// no free piece is large enough just now. A `len` of 0 or above the largest is always none.
    pub fn take_data(&mut self, len: u32) -> Option<Buf> {
        self.take_from(len, Buddy::take)
    }

    /// The same for the one for whom a part is set aside: from that part, or else from the rest.
    pub fn take_aside(&mut self, len: u32) -> Option<Buf> {
        self.take_from(len, |data, order| data.take_aside(order).or_else(|| data.take(order)))
    }

    /// The same for who may have any: from the rest, or else from that part.
    pub fn take_any(&mut self, len: u32) -> Option<Buf> {
        self.take_from(len, |data, order| data.take(order).or_else(|| data.take_aside(order)))
    }

    /// Sets another part of the data buffers aside, in place of what was, large enough for `bytes`
    /// when all that is taken of it has come home: nobody else gets anything of it meanwhile. The
    /// parts have their turns, and then there is none for a turn. Whether that one has come.
    pub fn set_aside(&mut self, bytes: u64) -> bool {
        let parts = bytes.div_ceil(self.plan.largest_bytes.into()).max(1);
        self.data.set_aside(u32::try_from(parts).unwrap_or(u32::MAX))
    }

    /// Nothing is set aside any more. The same part is the first one of the next time.
    pub fn put_back(&mut self) {
        self.data.put_back();
    }

    /// Bytes that buffers can be made of for sure, however many: outside of what is set aside, and
    /// in there.
    #[must_use]
    pub fn whole_bytes(&self) -> (u64, u64) {
        let bytes = |units| u64::from(units) * u64::from(PAGE_BYTES);
        (bytes(self.data.largest_units()), bytes(self.data.largest_aside_units()))
    }

    fn take_from(
        &mut self,
        len: u32,
        take: impl FnOnce(&mut Buddy, u8) -> Option<u32>,
    ) -> Option<Buf> {
        if len == 0 || len > self.plan.largest_bytes {
            return None;
        }
        let order = (capacity_for(len) / PAGE_BYTES).trailing_zeros() as u8;
        let unit = take(&mut self.data, order)?;
        let base = self.plan.cell_section()
            + self.plan.receive_section()
            + u64::from(unit) * u64::from(PAGE_BYTES);
        Some(self.buf(Class::Data(order), base, PAGE_BYTES << order, 0, len))
    }

    /// Takes a buffer back.
    ///
    /// # Panics
    /// When the buffer is of another pool.
    pub fn give(&mut self, buf: Buf) {
        self.region.check(&buf);
        let sections = (self.plan.cell_section(), self.plan.receive_section());
        match buf.class {
            Class::Cell => self.cells.push((buf.base / u64::from(CELL_BYTES)) as u32),
            Class::Receive => {
                let index = (buf.base - sections.0) / self.plan.receive_bytes();
                self.receives.push(index as u32);
            }
            Class::Data(order) => {
                let unit = (buf.base - sections.0 - sections.1) / u64::from(PAGE_BYTES);
                self.data.give(unit as u32, order);
            }
        }
    }

    /// Resets a receive buffer's window to what [`Pool::take_receive`] gave.
    #[inline]
    pub fn rewind(&self, buf: &mut Buf) {
        if buf.class == Class::Receive {
            let len = self.plan.lead_bytes + self.plan.tail_bytes;
            buf.select(PAGE_BYTES - self.plan.lead_bytes, len);
        }
    }

    /// The window's bytes.
    ///
    /// # Panics
    /// When the buffer is of another pool; so do the others that take one.
    #[must_use]
    pub fn bytes<'a>(&'a self, buf: &'a Buf) -> &'a [u8] {
        self.region.bytes(buf)
    }

    /// The window's bytes, to change.
    #[inline]
    #[must_use]
    pub fn bytes_mut<'a>(&'a self, buf: &'a mut Buf) -> &'a mut [u8] {
        self.region.bytes_mut(buf)
    }

    /// Copies bytes of a window that peers may be changing, from `at` on.
    ///
    /// # Panics
    /// When that leaves the window.
    pub fn copy_out(&self, from: &RemoteRegion, at: u32, into: &mut [u8]) {
        let source = self.inside(from.buf(), at, into.len());
        // SAFETY: `inside` proved that the bytes lie in the live mapping and in the window of this
        // Buf, which nobody else in the process has; `into` lies elsewhere, since no reference
        // into an exposed window can exist. What a device writes meanwhile may come out torn,
        // and is bytes in any case.
        unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes into a window that peers may be reading, from `at` on.
    ///
    /// # Panics
    /// When that leaves the window.
    pub fn copy_in(&self, into: &mut RemoteRegion, at: u32, from: &[u8]) {
        let sink = self.inside(into.buf(), at, from.len());
        // SAFETY: as in `copy_out`, with the roles exchanged.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), sink, from.len()) }
    }

    fn inside(&self, buf: &Buf, at: u32, len: usize) -> *mut u8 {
        self.region.check(buf);
        let end = (at as usize).checked_add(len);
        assert!(end.is_some_and(|end| end <= buf.len as usize), "{at}+{len} leaves the window");
        // SAFETY: at most `buf.len`, which lies inside the mapping.
        unsafe { self.region.at(buf).add(at as usize) }
    }

    /// Free buffers: (cells, receives, data bytes).
    #[must_use]
    pub fn free(&self) -> (u32, u32, u64) {
        let data = u64::from(self.data.free_units()) * u64::from(PAGE_BYTES);
        (self.cells.len() as u32, self.receives.len() as u32, data)
    }

    /// Bytes of data buffers that are free outside of what is set aside.
    #[must_use]
    pub fn free_for_all_bytes(&self) -> u64 {
        u64::from(self.data.free_for_all_units()) * u64::from(PAGE_BYTES)
    }

    /// Whether every buffer is home.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free() == (self.plan.cells, self.plan.receives, self.plan.data_section())
    }

    fn buf(&self, class: Class, base: u64, capacity: u32, start: u32, len: u32) -> Buf {
        Buf { pool: self.id, class, base, capacity, start, len }
    }
}

#[cfg(test)]
mod tests {
    use crate::pool::*;
    use proptest::prelude::*;

    fn plan() -> PoolPlan {
        PoolPlan {
            cells: 4,
            receives: 3,
            lead_bytes: 64,
            tail_bytes: 8192,
            data_bytes: 1 << 20,
            largest_bytes: 1 << 18,
        }
    }

    #[test]
    fn a_receive_buffers_tail_is_page_aligned() {
        let mut pool = Pool::new(plan()).unwrap();
        let buf = pool.take_receive().unwrap();
        assert_eq!(buf.len(), 64 + 8192);
        assert_eq!((pool.region().addr() as u64 + buf.offset() + 64) % 4096, 0);
        pool.give(buf);
        assert!(pool.is_full());
    }

    #[test]
    fn running_out_is_none_and_giving_back_heals() {
        let mut pool = Pool::new(plan()).unwrap();
        let bufs: Vec<Buf> = std::iter::from_fn(|| pool.take_data(1 << 18)).collect();
        assert_eq!(bufs.len(), 4);
        assert!(pool.take_data(1).is_none());
        for buf in bufs {
            pool.give(buf);
        }
        assert!(pool.is_full());
        assert!(pool.take_data(0).is_none());
        assert!(pool.take_data((1 << 18) + 1).is_none());
    }

    #[test]
    #[should_panic(expected = "another pool")]
    fn a_foreign_buffer_is_refused() {
        let mut a = Pool::new(plan()).unwrap();
        let b = Pool::new(plan()).unwrap();
        let buf = a.take_cell().unwrap();
        let _ = b.bytes(&buf);
    }

    proptest! {
        /// Any order of taking and giving: live buffers never overlap, all are in bounds and
        /// aligned, bytes written stay, and the pool ends full.
        #[test]
        fn live_buffers_never_overlap(ops in proptest::collection::vec((0u8..4, 1u32..300_000), 1..200)) {
            let mut pool = Pool::new(plan()).unwrap();
            let mut live: Vec<(Buf, u8)> = Vec::new();
            for (step, (what, n)) in ops.into_iter().enumerate() {
                let taken = match what {
                    0 => pool.take_cell(),
                    1 => pool.take_receive(),
                    2 => pool.take_data(n),
                    _ => {
                        if !live.is_empty() {
                            let (buf, stamp) = live.swap_remove(n as usize % live.len());
                            prop_assert!(pool.bytes(&buf).iter().all(|b| *b == stamp));
                            pool.give(buf);
                        }
                        None
                    }
                };
                if let Some(mut buf) = taken {
                    pool.bytes_mut(&mut buf).fill(step as u8);
                    for (other, _) in &live {
                        let (a, b) = ((buf.base, u64::from(buf.capacity)), (other.base, u64::from(other.capacity)));
                        prop_assert!(a.0 + a.1 <= b.0 || b.0 + b.1 <= a.0);
                    }
                    prop_assert!(buf.base + u64::from(buf.capacity) <= pool.region().len() as u64);
                    live.push((buf, step as u8));
                }
            }
            for (buf, _) in live {
                pool.give(buf);
            }
            prop_assert!(pool.is_full());
        }
    }
}
