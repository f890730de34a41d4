//! Reorder buffer for packets received before a missing one. All queue pairs of an endpoint share
//! its capacity, so that memory is bounded; a packet without room is dropped, as if it had been
//! lost.
//!
//! A queue pair may use an eighth of all entries, and not more than are still free: if many use as
//! much as they can get, others still find some.

use crate::wire::header::{ICRC_BYTES, Packet};

/// A queue pair may use one part in this many of the capacity.
const SHARES: u32 = 8;

/// The buffer.
#[derive(Debug)]
pub struct ReorderBuffer {
    slots: Vec<Vec<u8>>,
    free: Vec<u32>,
    limit: u32,
}

impl ReorderBuffer {
    /// For at most `limit` packets. Allocates when needed, and keeps the memory.
    pub fn new(limit: u32) -> ReorderBuffer {
        ReorderBuffer { slots: Vec::new(), free: Vec::new(), limit }
    }

    /// Copies a packet of a queue pair that already has `own` entries, and returns its entry; none
    /// if that is its share.
    pub(crate) fn put(&mut self, packet: &Packet<'_>, own: u32) -> Option<u32> {
        let free = (self.limit as usize).saturating_sub(self.len());
        if own as usize >= free.min(self.limit.div_ceil(SHARES) as usize) {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < self.limit as usize => {
                self.slots.push(Vec::new());
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        let bytes = &mut self.slots[slot as usize];
        bytes.extend_from_slice(&packet.bth.emit());
        bytes.extend_from_slice(packet.headers());
        bytes.extend_from_slice(packet.payload);
        bytes.resize(bytes.len() + usize::from(packet.bth.pad) + ICRC_BYTES, 0);
        Some(slot)
    }

    /// Takes the bytes of a datagram, without a valid CRC, out of its entry;
    /// [`ReorderBuffer::give`] returns their memory.
    pub(crate) fn take(&mut self, slot: u32) -> Vec<u8> {
        self.slots.get_mut(slot as usize).map(std::mem::take).unwrap_or_default()
    }

    /// Frees an entry.
    pub(crate) fn give(&mut self, slot: u32, mut bytes: Vec<u8>) {
        bytes.clear();
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = bytes;
            self.free.push(slot);
        }
    }

    /// Frees an entry with its packet.
    pub(crate) fn drop(&mut self, slot: u32) {
        let bytes = self.take(slot);
        self.give(slot, bytes);
    }

    /// Number of packets.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
