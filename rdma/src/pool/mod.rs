//! `Pool` and `Buf`: the registered memory.
//!
//! One allocation for each reactor, registered twice: with the adapter (memory region) and with the
//! ring (fixed buffer). So a device reads directly into the memory that the adapter sends.
//!
//! ```text
//! | cells (64 B: responses) | receives (page + in-capsule bytes) | data (buddy, 4 KiB and up) |
//! ```
//!
//! The window of a receive buffer begins `lead_bytes` before a page boundary, so the rest of a
//! message is page aligned and can be written to an `O_DIRECT` file without a copy.
//!
//! # Invariants of the unsafe code
//!
//! * The allocation is one anonymous mapping, owned by [`Region`], which lives as long as it is
//!   referenced: providers and rings keep an `Arc<Region>` for as long as a device may access it.
//! * A [`Buf`] is move-only and created by [`Pool`] alone, with bytes that no other live `Buf` has.
//!   Passing it to a fabric or a device moves it, so no reference can exist while a device writes.
//! * A [`RemoteRegion`] buffer, which peers may write at any time, allows no slices, only copies. A
//!   provider that moves data itself accesses its bytes by the one `Window` that was split off when
//!   the buffer was registered; the buffer is free again only after that was returned.
//! * Slices are made from a `&Buf`/`&mut Buf` plus a region of the same identity, and only inside
//!   the bounds of the buffer, which are checked where they are set.
#![expect(unsafe_code, reason = "the registered memory: a mapping, and slices of it")]

mod buddy;
mod remote_region;

use std::io;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use buddy::Buddy;
pub use remote_region::RemoteRegion;

/// The unit of the data section and of every alignment, in bytes.
pub const PAGE_BYTES: u32 = 4096;
/// The size of a cell, in bytes.
pub(crate) const CELL_BYTES: u32 = 64;

/// Bytes that a data buffer of `len` bytes occupies in its pool: a power of two of pages. For
/// lengths that a pool supports, up to 2 GiB.
#[inline]
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
    /// A pool whose messages are received in cells or data buffers.
    #[must_use]
    pub const fn without_receives(cells: u32, data_bytes: u64, largest_bytes: u32) -> PoolPlan {
        PoolPlan { cells, receives: 0, lead_bytes: 0, tail_bytes: 0, data_bytes, largest_bytes }
    }

    /// Bytes of one receive buffer.
    pub fn receive_bytes(&self) -> u64 {
        u64::from(PAGE_BYTES) + u64::from(self.tail_bytes)
    }

    /// Size of the pool: cells × 64 + receives × (4096 + tail) + data, each section rounded up to
    /// whole pages.
    pub fn total_bytes(&self) -> u64 {
        self.cell_section() + self.receive_section() + self.data_section()
    }

    /// Bytes of the section of cells.
    pub fn cell_section(&self) -> u64 {
        (u64::from(self.cells) * u64::from(CELL_BYTES)).next_multiple_of(u64::from(PAGE_BYTES))
    }

    /// Bytes of the section of receive buffers.
    pub fn receive_section(&self) -> u64 {
        u64::from(self.receives) * self.receive_bytes()
    }

    /// Bytes of the section of data buffers.
    pub fn data_section(&self) -> u64 {
        self.data_bytes.next_multiple_of(u64::from(self.largest_bytes.max(PAGE_BYTES)))
    }

    fn check(&self) -> io::Result<()> {
        let largest_ok = self.largest_bytes >= PAGE_BYTES && self.largest_bytes.is_power_of_two();
        let tail_ok = self.tail_bytes.is_multiple_of(PAGE_BYTES) && self.tail_bytes <= 1 << 20;
        // So sums of sections fit in 64 bits, and offsets in `isize`.
        let data_ok = self.data_bytes <= 1 << 48;
        let sizes_ok = largest_ok && tail_ok && data_ok && self.lead_bytes <= PAGE_BYTES;
        if sizes_ok && self.total_bytes() > 0 {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("impossible pool: {self:?}")))
    }
}

/// The mapping. An owner that registers it with a device keeps it until the registration has ended.
#[derive(Debug)]
pub struct Region {
    /// The pool's identity, which its buffers carry.
    id: NonZeroU32,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: Region hands out addresses, and slices only against a Buf, which is exclusive. Unmapping
// happens once, when the last reference is dropped.
unsafe impl Send for Region {}
// SAFETY: as above; a slice needs the Buf, and a mutable one needs it mutably.
unsafe impl Sync for Region {}

impl Region {
    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes of the window, for providers that move data themselves.
    ///
    /// # Panics
    /// The buffer is of another pool; [`Region::bytes_mut`] panics as well.
    #[inline(always)] // for each packet
    pub fn bytes<'a>(&'a self, buf: &'a Buf) -> &'a [u8] {
        self.check(buf);
        // SAFETY: `check` proved that the buffer belongs to this pool, so it is inside the live
        // mapping; its bytes belong to this Buf alone, which is borrowed, so nobody writes them for
        // 'a. The mapping is zero-filled by the kernel, hence initialised.
        unsafe { std::slice::from_raw_parts(self.at(buf), buf.len as usize) }
    }

    /// The bytes of the window, mutable.
    #[inline(always)] // for each packet
    pub fn bytes_mut<'a>(&'a self, buf: &'a mut Buf) -> &'a mut [u8] {
        self.check(buf);
        // SAFETY: as in `bytes`; the Buf is borrowed mutably, so this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.at(buf), buf.len as usize) }
    }

    /// The bytes of a buffer that peers may access.
    pub(crate) fn exposed<'a>(&'a self, window: &'a Window) -> &'a [u8] {
        assert_eq!(window.pool, self.id, "a window of another pool");
        // SAFETY: a window is in a buffer of this pool (checked above), which is inside a
        // `RemoteRegion` for as long as the window exists, or leaked. So the only other access to
        // these bytes is by `copy_out` and `copy_in`: these need the `RemoteRegion`, which cannot
        // leave its thread. Windows are kept by `Memory` alone, which asserts that it is on that
        // thread before it calls this. So only code that holds the returned slice could copy
        // meanwhile. That is code of this crate, because no public function returns it: it passes
        // it to a copy, a CRC or a system call, and calls no user code until it is dropped.
        unsafe { std::slice::from_raw_parts(self.place(window.offset), window.len as usize) }
    }

    /// The bytes of a buffer that peers may access, mutable.
    pub(crate) fn exposed_mut<'a>(&'a self, window: &'a mut Window) -> &'a mut [u8] {
        assert_eq!(window.pool, self.id, "a window of another pool");
        // SAFETY: as in `exposed`; the window is the only one and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.place(window.offset), window.len as usize) }
    }

    #[inline]
    fn check(&self, buf: &Buf) {
        assert_eq!(buf.pool, self.id, "a buffer of another pool");
    }

    #[inline]
    fn at(&self, buf: &Buf) -> *mut u8 {
        self.place(buf.offset())
    }

    #[inline]
    fn place(&self, offset: u64) -> *mut u8 {
        // SAFETY: base + start + len was checked against the section when the buffer was made and
        // against the capacity whenever its window moved; both are inside the mapping.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by Pool::new with this base and length and nothing else
        // unmaps it; the last Arc was dropped, so no device and no Pool uses it any more.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Section of a buffer: cells, receives, or else data of this order (`PAGE_BYTES << order`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Class(u8);

impl Class {
    const CELL: Class = Class(u8::MAX);
    const RECEIVE: Class = Class(u8::MAX - 1);
}

/// An owned part of a [`Pool`]. Posting moves it away, completion returns it; finally it goes to
/// [`Pool::give`]. Its *window* is the part that operations use.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a buffer that is dropped is lost to its pool: give it back"]
pub struct Buf {
    /// The number of its pool. It is not zero, so it also tells whether there is a buffer: one that
    /// may not be there is moved in two copies of 16 bytes.
    pool: NonZeroU32,
    class: Class,
    base: u64,
    capacity: u32,
    start: u32,
    len: u32,
}

impl Buf {
    /// Bytes in the window.
    #[expect(clippy::len_without_is_empty, reason = "a length, not a collection")]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Bytes in the whole buffer.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Start of the window within the buffer.
    #[must_use]
    pub fn start(&self) -> u32 {
        self.start
    }

    /// Start of the window within the [`Region`].
    pub fn offset(&self) -> u64 {
        self.base + u64::from(self.start)
    }

    /// Whether the buffer is in this region: checked by providers and rings before they pass its
    /// address to a device.
    pub fn is_of(&self, region: &Region) -> bool {
        self.pool == region.id
    }

    /// Moves the window to `len` bytes from `start` of the buffer.
    ///
    /// # Panics
    /// The window is outside of the buffer: a bug of the caller, who allocated the buffer for this
    /// length.
    #[inline(always)] // for each work request
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

/// The window of a remote region, for the provider that moves its data: made by
/// `RemoteRegion::split` alone, once for each region, and returned to `RemoteRegion::join`.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Window {
    pool: NonZeroU32,
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
    id: NonZeroU32,
    plan: PoolPlan,
    /// Offsets of the receives and of the data.
    receives_at: u64,
    data_at: u64,
    /// Start and length of the window of a receive: the lead and the tail.
    receive_window: (u32, u32),
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
    /// The plan is invalid or the mapping fails.
    pub fn new(plan: PoolPlan) -> io::Result<Pool> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        plan.check()?;
        let len = usize::try_from(plan.total_bytes()).map_err(io::Error::other)?;
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let units =
            u32::try_from(plan.data_section() / u64::from(PAGE_BYTES)).map_err(io::Error::other)?;
        let top = (plan.largest_bytes / PAGE_BYTES).trailing_zeros() as u8;
        // This number alone tells whether a buffer is in a region, so it is never reused.
        let id = u32::try_from(NEXT.fetch_add(1, Ordering::Relaxed)).ok().and_then(NonZeroU32::new);
        let id = id.ok_or_else(|| io::Error::other("there have been 2^32 pools"))?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice; it
        // overlaps nothing and is unmapped by Region alone.
        let base = unsafe { mmap_anonymous(None, size, prot, MapFlags::MAP_PRIVATE)? };
        let receives_at = plan.cell_section();
        Ok(Pool {
            id,
            plan,
            receives_at,
            data_at: receives_at + plan.receive_section(),
            receive_window: (PAGE_BYTES - plan.lead_bytes, plan.lead_bytes + plan.tail_bytes),
            region: Arc::new(Region { id, base: base.cast(), len }),
            cells: (0..plan.cells).rev().collect(),
            receives: (0..plan.receives).rev().collect(),
            data: Buddy::new(units, top),
        })
    }

    /// The memory, for registering it with a device.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// The plan of the pool.
    pub fn plan(&self) -> &PoolPlan {
        &self.plan
    }

    /// Allocates a buffer of 64 bytes, all in the window.
    pub fn take_cell(&mut self) -> Option<Buf> {
        let index = self.cells.pop()?;
        let base = u64::from(index) * u64::from(CELL_BYTES);
        Some(self.buf(Class::CELL, base, CELL_BYTES, 0, CELL_BYTES))
    }

    /// Allocates a receive buffer; the window is the lead and the tail.
    pub fn take_receive(&mut self) -> Option<Buf> {
        let index = self.receives.pop()?;
        let base = self.receives_at + u64::from(index) * self.plan.receive_bytes();
        let (start, len) = self.receive_window;
        Some(self.buf(Class::RECEIVE, base, PAGE_BYTES + self.plan.tail_bytes, start, len))
    }

    /// Allocates a page-aligned buffer with a window of `len` bytes (1 to the plan's largest), or
    /// none if no free block is large enough at present. A `len` of 0 or above the largest always
    /// returns none.
    pub fn take_data(&mut self, len: u32) -> Option<Buf> {
        self.take_from(len, Buddy::take)
    }

    /// As [`Pool::take_data`], for the user of the range set aside: from that range, or else from
    /// the rest.
    pub fn take_aside(&mut self, len: u32) -> Option<Buf> {
        self.take_from(len, |data, order| data.take_aside(order).or_else(|| data.take(order)))
    }

    /// As [`Pool::take_data`], from the rest, or else from the range set aside.
    pub fn take_any(&mut self, len: u32) -> Option<Buf> {
        self.take_from(len, |data, order| data.take(order).or_else(|| data.take_aside(order)))
    }

    /// Sets the next range of data buffers aside, instead of the previous one. It has room for
    /// `bytes` once all its allocations are released, because no others are made in it. Each range
    /// has its turn, and after the last one there is none for one round; returns whether this is
    /// that round.
    pub fn set_aside(&mut self, bytes: u64) -> bool {
        let parts = bytes.div_ceil(self.plan.largest_bytes.into()).max(1);
        self.data.set_aside(u32::try_from(parts).unwrap_or(u32::MAX))
    }

    /// Sets nothing aside any more. The same range is the first one of the next time.
    pub fn put_back(&mut self) {
        self.data.put_back();
    }

    /// Bytes that can certainly be allocated, in any number of buffers: outside of the range set
    /// aside, and inside.
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
        let base = self.data_at + u64::from(unit) * u64::from(PAGE_BYTES);
        Some(self.buf(Class(order), base, PAGE_BYTES << order, 0, len))
    }

    /// Releases a buffer.
    ///
    /// # Panics
    /// The buffer is of another pool.
    pub fn give(&mut self, buf: Buf) {
        self.region.check(&buf);
        match buf.class {
            Class::CELL => self.cells.push((buf.base / u64::from(CELL_BYTES)) as u32),
            Class::RECEIVE => {
                let index = (buf.base - self.receives_at) / self.plan.receive_bytes();
                self.receives.push(index as u32);
            }
            Class(order) => {
                let unit = (buf.base - self.data_at) / u64::from(PAGE_BYTES);
                self.data.give(unit as u32, order);
            }
        }
    }

    /// Resets the window of a receive buffer to that of [`Pool::take_receive`].
    #[inline(always)] // for each receive
    pub fn rewind(&self, buf: &mut Buf) {
        if buf.class == Class::RECEIVE {
            let (start, len) = self.receive_window;
            buf.select(start, len);
        }
    }

    /// The bytes of the window.
    ///
    /// # Panics
    /// The buffer is of another pool; the other methods with a buffer panic as well.
    #[inline]
    pub fn bytes<'a>(&'a self, buf: &'a Buf) -> &'a [u8] {
        self.region.bytes(buf)
    }

    /// The bytes of the window, mutable.
    #[inline]
    pub fn bytes_mut<'a>(&'a self, buf: &'a mut Buf) -> &'a mut [u8] {
        self.region.bytes_mut(buf)
    }

    /// Copies bytes from `at` on out of a window that peers may be writing.
    ///
    /// # Panics
    /// The range is outside of the window.
    pub fn copy_out(&self, from: &RemoteRegion, at: u32, into: &mut [u8]) {
        let source = self.inside(from.buf(), at, into.len());
        // SAFETY: `inside` proved that the bytes are in the live mapping and in the window of this
        // Buf, which is unique in the process; `into` is elsewhere, since no reference into a
        // remote region can exist. Bytes that a device writes meanwhile may be torn, and are bytes
        // in any case.
        unsafe { std::ptr::copy_nonoverlapping(source, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes from `at` on into a window that peers may be reading.
    ///
    /// # Panics
    /// The range is outside of the window.
    pub fn copy_in(&self, into: &mut RemoteRegion, at: u32, from: &[u8]) {
        let sink = self.inside(into.buf(), at, from.len());
        // SAFETY: as in `copy_out`, with the roles exchanged.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), sink, from.len()) }
    }

    fn inside(&self, buf: &Buf, at: u32, len: usize) -> *mut u8 {
        self.region.check(buf);
        let end = (at as usize).checked_add(len);
        assert!(end.is_some_and(|end| end <= buf.len as usize), "{at}+{len} leaves the window");
        // SAFETY: at most `buf.len`, which is inside the mapping.
        unsafe { self.region.at(buf).add(at as usize) }
    }

    /// Free buffers: cells, receives, data bytes.
    pub fn free(&self) -> (u32, u32, u64) {
        let data = u64::from(self.data.free_units()) * u64::from(PAGE_BYTES);
        (self.cells.len() as u32, self.receives.len() as u32, data)
    }

    /// Bytes of free data buffers outside of the range set aside.
    #[inline]
    pub fn free_for_all_bytes(&self) -> u64 {
        u64::from(self.data.free_for_all_units()) * u64::from(PAGE_BYTES)
    }

    /// Whether no buffer is allocated.
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
    fn exhausted_pool_returns_none_and_is_full_after_release() {
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
        /// Any order of allocations and releases: live buffers never overlap, all are in bounds and
        /// aligned, written bytes stay, and the pool is full in the end.
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
