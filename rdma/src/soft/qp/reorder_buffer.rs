//! Reorder buffer for packets received before a missing one. All queue pairs of an endpoint share
//! the room for them, so that nobody can fill the memory; what finds none is dropped, as if it had
//! been lost.
//!
//! A queue pair may have an eighth of all places, and not more than are still free: when there are
//! many that take what they can get, whoever comes next still finds some.

use crate::soft::wire::header::{HeaderBytes, ICRC_BYTES, Packet};

/// The part of all places that a queue pair may have is one of so many.
const SHARES: u32 = 8;

/// The room.
#[derive(Debug)]
pub struct ReorderBuffer {
    slots: Vec<Vec<u8>>,
    free: Vec<u32>,
    limit: u32,
}

impl ReorderBuffer {
    /// For at most so many packets. Takes memory only when there are any, and keeps that.
    #[must_use]
    pub fn new(limit: u32) -> ReorderBuffer {
        ReorderBuffer { slots: Vec::new(), free: Vec::new(), limit }
    }

    /// Copies a packet of a queue pair that has `own` places already, and gives its place; none when
    /// that is its share.
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
        bytes.extend_from_slice(HeaderBytes::emit(&packet.bth, &packet.ext).as_slice());
        bytes.extend_from_slice(packet.payload);
        bytes.resize(bytes.len() + usize::from(packet.bth.pad) + ICRC_BYTES, 0);
        Some(slot)
    }

    /// Takes the bytes of a datagram, without a valid CRC, from its place; [`ReorderBuffer::give`] brings
    /// their memory back.
    pub(crate) fn take(&mut self, slot: u32) -> Vec<u8> {
        self.slots.get_mut(slot as usize).map(std::mem::take).unwrap_or_default()
    }

    /// Frees a place.
    pub(crate) fn give(&mut self, slot: u32, mut bytes: Vec<u8>) {
        bytes.clear();
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = bytes;
            self.free.push(slot);
        }
    }

    /// Frees a place and forgets its packet.
    pub(crate) fn drop(&mut self, slot: u32) {
        let bytes = self.take(slot);
        self.give(slot, bytes);
    }

    /// How many packets lie here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether none does.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
