//! The requests of a queue pair, and the command ids in use.

use std::ops::{Index, IndexMut};

use rdma::Pool;

use super::request::{Reply, Request, SLOTS_PER_RECEIVE};

/// Command slots, by number.
#[derive(Debug)]
pub(super) struct Requests {
    /// The number of the queue pair, which identifies it in operations of devices and workers.
    pub(super) key: u32,
    entries: Vec<Request>,
    free: Vec<u16>,
    /// Operations of devices and workers, and requests to cancel some, in progress: each completes.
    pub(super) outstanding: u16,
    /// Command ids that are outstanding, a bit each.
    cids: Box<[u64; 1024]>,
}

impl Requests {
    /// Returns the slots of a queue pair with this number of receives.
    pub(super) fn new(key: u32, receives: u16, pool: &mut Pool) -> Requests {
        let count = receives * SLOTS_PER_RECEIVE;
        Requests {
            key,
            entries: (0..count).map(|_| Request::new(pool.take_cell())).collect(),
            free: (0..count).rev().collect(),
            outstanding: 0,
            cids: Box::new([0; 1024]),
        }
    }

    /// Returns the number of slots.
    pub(super) fn count(&self) -> u16 {
        self.entries.len() as u16
    }

    /// Returns all slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.entries.iter()
    }

    /// Returns all slots, mutable.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Request> {
        self.entries.iter_mut()
    }

    /// Returns all slots with their numbers.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (u16, &Request)> {
        (0..).zip(&self.entries)
    }

    /// Returns the number of the first slot for which `is_it` is true.
    pub(super) fn find(&self, is_it: impl Fn(&Request) -> bool) -> Option<u16> {
        self.entries.iter().position(is_it).map(|slot| slot as u16)
    }

    /// Takes a free slot.
    #[inline]
    pub(super) fn take_free(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Returns a slot to the free ones.
    #[inline]
    pub(super) fn give_free(&mut self, slot: u16) {
        self.free.push(slot);
    }

    /// Whether no slot is free.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns the number of free slots.
    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Whether all slots are free.
    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    /// Records that a command id is outstanding; false if it already was.
    #[inline]
    pub(super) fn claim_cid(&mut self, cid: u16) -> bool {
        let (word, bit) = (&mut self.cids[usize::from(cid >> 6)], 1 << (cid & 63));
        let free = *word & bit == 0;
        *word |= bit;
        free
    }

    /// Takes the right to complete a command, and releases its id: the host may reuse that when it
    /// has the response. None if the command was completed.
    #[inline]
    pub(super) fn take_reply(&mut self, slot: u16) -> Option<(Reply, &mut Request)> {
        let entry = &mut self.entries[usize::from(slot)];
        let reply = entry.take_reply()?;
        let cid = entry.sqe.cid;
        self.cids[usize::from(cid >> 6)] &= !(1 << (cid & 63));
        Some((reply, entry))
    }

    /// Returns the tag that identifies a command's operation at a device or a worker.
    #[inline]
    pub(super) fn tag(&self, slot: u16) -> u64 {
        u64::from(self.key) << 32 | u64::from(slot)
    }
}

impl Index<u16> for Requests {
    type Output = Request;

    #[inline]
    fn index(&self, slot: u16) -> &Request {
        &self.entries[usize::from(slot)]
    }
}

impl IndexMut<u16> for Requests {
    #[inline]
    fn index_mut(&mut self, slot: u16) -> &mut Request {
        &mut self.entries[usize::from(slot)]
    }
}
