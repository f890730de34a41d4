//! Memory regions that peers may read and write: the buffers behind the remote keys (IBTA volume 1,
//! 10.6 "Memory Management"). A target has none; a host registers the data buffers of its commands.
//!
//! A key is the number of a slot and a generation of eight bits, which changes whenever the slot is
//! reused, so that an old key is not valid for a new region.
//!
//! The bytes are accessed in two ways: here, and by copies of the owner (`Pool::copy_in`). Outside
//! this crate both only copy, so no reference exists while the other writes; and both run on one
//! thread, that of the [`RemoteRegion`], which cannot leave it: other threads are refused here.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pool::Window;
use crate::wire::tx_packet::Place;
use crate::{Buf, Region, RemoteRegion};

/// Access rights of a peer to a queue pair or to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rights(u8);

impl Rights {
    /// Nothing.
    pub const NONE: Rights = Rights(0);
    /// RDMA Read.
    pub const READ: Rights = Rights(1);
    /// RDMA Write.
    pub const WRITE: Rights = Rights(2);
    /// Compare and swap, fetch and add: nobody has it.
    pub(crate) const ATOMIC: Rights = Rights(4);
    /// RDMA Read and RDMA Write.
    pub const ALL: Rights = Rights(3);

    /// The union of both sets.
    #[must_use]
    pub const fn and(self, other: Rights) -> Rights {
        Rights(self.0 | other.0)
    }

    /// Whether all of `other` are in this set.
    pub const fn has(self, other: Rights) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The key is unknown or of an earlier generation, or does not grant this access to these bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no such access to exposed memory")]
pub struct Denied;

#[derive(Debug)]
struct Exposure {
    window: Window,
    rights: Rights,
    /// Cleared by a peer's invalidation; the buffer still has to be revoked.
    valid: bool,
}

#[derive(Debug)]
struct KeySlot {
    generation: u8,
    exposure: Option<Exposure>,
}

/// The table of remote regions of one pool. It grows up to its limit and never shrinks.
#[derive(Debug)]
pub struct Memory {
    slots: Vec<KeySlot>,
    free: Vec<u32>,
    limit: u32,
    /// The thread that registered the regions, while there are any.
    home: Option<Thread>,
}

/// Number of a thread, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Thread(u64);

impl Thread {
    /// The current thread. Needed for every packet, so it is cheaper than the function of the
    /// standard library.
    fn here() -> Thread {
        static LAST: AtomicU64 = AtomicU64::new(0);
        thread_local!(static OWN: Cell<u64> = const { Cell::new(0) });
        OWN.with(|own| {
            if own.get() == 0 {
                own.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
            }
            Thread(own.get())
        })
    }
}

/// Bits of a key that are the generation.
const GENERATION_BITS: u32 = 8;
/// Slots that a key can name.
const MOST_SLOTS: u32 = 1 << (32 - GENERATION_BITS);

impl Memory {
    /// An empty table for at most `limit` regions (at most 2^24).
    pub fn new(limit: u32) -> Memory {
        Memory { slots: Vec::new(), free: Vec::new(), limit: limit.min(MOST_SLOTS), home: None }
    }

    /// Registers the window of `buf`. Its bytes may only be copied until [`Memory::revoke`]. Does
    /// not allocate once the table has grown.
    ///
    /// # Errors
    /// The table is full; the buffer is returned.
    ///
    /// # Panics
    /// Another thread has registered regions here that are not revoked.
    pub fn expose(&mut self, buf: Buf, rights: Rights) -> Result<RemoteRegion, Buf> {
        self.stay();
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < self.limit as usize => {
                self.slots.push(KeySlot { generation: 0, exposure: None });
                self.slots.len() as u32 - 1
            }
            None => return Err(buf),
        };
        let place = &mut self.slots[slot as usize];
        place.generation = place.generation.wrapping_add(1);
        let key = slot << GENERATION_BITS | u32::from(place.generation);
        let (exposed, window) = RemoteRegion::split(buf, key);
        place.exposure = Some(Exposure { window, rights, valid: true });
        self.home = Some(Thread::here());
        Ok(exposed)
    }

    /// Ends the peers' access and returns the buffer.
    ///
    /// # Panics
    /// The region belongs to another table, whose peers would still have access.
    pub fn revoke(&mut self, exposed: RemoteRegion) -> Buf {
        let number = exposed.remote().key >> GENERATION_BITS;
        let slot = self.slots.get_mut(number as usize);
        let exposure = slot.and_then(|slot| slot.exposure.take());
        let buf = exposed.join(exposure.expect("exposed by another fabric").window);
        self.free.push(number);
        if self.exposed() == 0 {
            self.home = None;
        }
        buf
    }

    /// Whether this thread may access the regions: it has registered them, or there are none.
    pub(crate) fn is_home(&self) -> bool {
        self.home.is_none_or(|home| home == Thread::here())
    }

    /// # Panics
    /// The regions were registered by another thread.
    pub(crate) fn stay(&self) {
        assert!(self.is_home(), "moved to another thread while memory was exposed");
    }

    /// Number of remote regions.
    pub fn exposed(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Ends the peers' access at the request of a peer; the buffer stays until [`Memory::revoke`].
    ///
    /// # Errors
    /// The key is not valid.
    pub fn invalidate(&mut self, key: u32) -> Result<(), Denied> {
        let exposure = self.slots.get_mut((key >> GENERATION_BITS) as usize).ok_or(Denied)?;
        if u32::from(exposure.generation) != key & 0xff {
            return Err(Denied);
        }
        let exposure = exposure.exposure.as_mut().filter(|e| e.valid).ok_or(Denied)?;
        exposure.valid = false;
        Ok(())
    }

    /// Resolves `len` bytes at `address` under `key`.
    ///
    /// # Errors
    /// The access is not allowed.
    pub fn place(&self, key: u32, address: u64, len: u32, rights: Rights) -> Result<Place, Denied> {
        let number = key >> GENERATION_BITS;
        let slot = self.slots.get(number as usize).ok_or(Denied)?;
        let exposure = slot.exposure.as_ref().filter(|e| e.valid).ok_or(Denied)?;
        if u32::from(slot.generation) != key & 0xff || !exposure.rights.has(rights) {
            return Err(Denied);
        }
        let at = address.checked_sub(exposure.window.offset()).ok_or(Denied)?;
        let end = at.checked_add(u64::from(len)).ok_or(Denied)?;
        if end > u64::from(exposure.window.len()) {
            return Err(Denied);
        }
        Ok(Place { slot: number, at: at as u32, len })
    }

    /// The bytes of a place; empty if the region was revoked since. While the slice is in use,
    /// nothing may be called that copies into remote regions, and so no user code.
    ///
    /// # Panics
    /// As [`Memory::stay`]; [`Memory::write`] panics as well.
    pub(crate) fn bytes<'a>(&'a self, region: &'a Region, place: Place) -> &'a [u8] {
        self.stay();
        let exposure = self.slots.get(place.slot as usize).and_then(|s| s.exposure.as_ref());
        let range = place.at as usize..place.at as usize + place.len as usize;
        exposure.and_then(|e| region.exposed(&e.window).get(range)).unwrap_or_default()
    }

    /// Writes to a place that was just resolved; no effect if `bytes` has another length.
    pub(crate) fn write(&mut self, region: &Region, place: Place, bytes: &[u8]) {
        self.stay();
        let exposure = self.slots.get_mut(place.slot as usize).and_then(|s| s.exposure.as_mut());
        let range = place.at as usize..place.at as usize + place.len as usize;
        if let Some(into) = exposure.and_then(|e| region.exposed_mut(&mut e.window).get_mut(range))
            && into.len() == bytes.len()
        {
            into.copy_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::memory_region::*;
    use crate::{Pool, PoolPlan, Remote};

    fn pool() -> Pool {
        Pool::new(PoolPlan::without_receives(4, 0, 4096)).unwrap()
    }

    #[test]
    fn access_requires_the_window_rights_and_key_generation() {
        let (mut pool, mut memory) = (pool(), Memory::new(4));
        let mut buf = pool.take_cell().unwrap();
        buf.select(8, 16);
        let exposed = memory.expose(buf, Rights::READ).unwrap();
        let Remote { addr, key, len } = exposed.remote();
        assert_eq!(len, 16);
        assert!(memory.place(key, addr, 16, Rights::READ).is_ok());
        assert!(memory.place(key, addr + 16, 0, Rights::READ).is_ok());
        for (key, addr, len, rights) in [
            (key, addr, 16, Rights::WRITE),
            (key, addr, 17, Rights::READ),
            (key, addr - 1, 2, Rights::READ),
            (key, addr + 15, 2, Rights::READ),
            (key, u64::MAX, 2, Rights::READ),
            (key, addr, u32::MAX, Rights::READ),
            (key ^ 1, addr, 1, Rights::READ),
            (key + 256, addr, 1, Rights::READ),
        ] {
            assert_eq!(memory.place(key, addr, len, rights), Err(Denied));
        }
        assert_eq!(memory.exposed(), 1);
        pool.give(memory.revoke(exposed));
        assert_eq!(memory.exposed(), 0);
        assert_eq!(memory.place(key, addr, 1, Rights::READ), Err(Denied));
        let again = memory.expose(pool.take_cell().unwrap(), Rights::READ).unwrap();
        let key_again = again.remote().key;
        assert_eq!((key_again >> 8, key_again == key), (key >> 8, false));
        assert_eq!(memory.place(key, addr, 1, Rights::READ), Err(Denied));
        pool.give(memory.revoke(again));
        assert!(pool.is_full());
    }

    #[test]
    fn invalidated_buffers_refuse_access_and_can_be_revoked() {
        let (mut pool, mut memory) = (pool(), Memory::new(1));
        let exposed = memory.expose(pool.take_cell().unwrap(), Rights::ALL).unwrap();
        let remote = exposed.remote();
        let refused = memory.expose(pool.take_cell().unwrap(), Rights::ALL).unwrap_err();
        pool.give(refused);
        assert_eq!(memory.invalidate(remote.key ^ 1), Err(Denied));
        assert_eq!(memory.invalidate(remote.key), Ok(()));
        assert_eq!(memory.invalidate(remote.key), Err(Denied));
        assert_eq!(memory.place(remote.key, remote.addr, 1, Rights::READ), Err(Denied));
        pool.give(memory.revoke(exposed));
        assert!(pool.is_full());
    }

    #[test]
    fn no_other_thread_touches_what_is_exposed() {
        let (mut pool, mut memory) = (pool(), Memory::new(2));
        let mut buf = pool.take_cell().unwrap();
        pool.bytes_mut(&mut buf).fill(7);
        let exposed = memory.expose(buf, Rights::ALL).unwrap();
        let Remote { addr, key, .. } = exposed.remote();
        let place = memory.place(key, addr, 64, Rights::READ).unwrap();
        assert_eq!(memory.bytes(pool.region(), place), [7; 64]);
        let spare = pool.take_cell().unwrap();
        let region = std::sync::Arc::clone(pool.region());
        let elsewhere = std::thread::spawn(move || {
            let refused = |step: &mut dyn FnMut()| {
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)).is_err()
            };
            assert!(!memory.is_home());
            assert!(refused(&mut || assert_eq!(memory.bytes(&region, place), [7; 64])));
            assert!(refused(&mut || memory.write(&region, place, &[8; 64])));
            let mut spare = Some(spare);
            assert!(refused(&mut || drop(memory.expose(spare.take().unwrap(), Rights::ALL))));
            memory
        });
        let mut memory = elsewhere.join().unwrap();
        let buf = memory.revoke(exposed);
        assert_eq!(pool.bytes(&buf), [7; 64]);
        // No region is left, so it may move to another thread.
        assert!(std::thread::spawn(move || memory.is_home()).join().unwrap());
        pool.give(buf);
    }

    #[test]
    #[should_panic(expected = "exposed by another fabric")]
    fn revoking_a_buffer_of_another_table_panics() {
        let (mut pool, mut memory, mut other) = (pool(), Memory::new(1), Memory::new(1));
        let exposed = memory.expose(pool.take_cell().unwrap(), Rights::ALL).unwrap();
        let _theirs = other.expose(pool.take_cell().unwrap(), Rights::ALL).unwrap();
        let _ = other.revoke(exposed);
    }
}
