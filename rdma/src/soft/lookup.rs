//! Lookup of slots by their ids on the wire.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Slots, or other values, by numbers that we have chosen at random: peers cannot cause collisions, so
/// a multiplication is a sufficient hash, and deterministic.
pub(crate) type Table<K, V = u32> = HashMap<K, V, BuildHasherDefault<Scatter>>;

/// The hash of a number: its product with 2^64 divided by the golden ratio.
#[derive(Default)]
pub(crate) struct Scatter(u64);

impl Hasher for Scatter {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
