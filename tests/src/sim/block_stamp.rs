//! Contents of blocks in the simulation: the writer and the address, repeated over the block.

use super::oracle::blocks::Value;

/// Odd and pseudorandom: 2^64 divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Defect of the bytes of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Spoilt {
    /// Data of another namespace or block.
    #[error("it holds block {lba} of namespace {nsid} as write {write} left it")]
    Misplaced {
        /// The write in the stamp.
        write: u32,
        /// The namespace in the stamp.
        nsid: u8,
        /// The block in the stamp.
        lba: u32,
    },
    /// The beginning is of one write, and the rest is not.
    #[error("it begins as write {write} left it and differs from byte {at} on")]
    Mixed {
        /// The write.
        write: u32,
        /// Offset of the first different byte.
        at: usize,
    },
}

fn first(write: u32, nsid: u8, lba: u32) -> u64 {
    // Data written to a block are never all zeros: writes are counted from 1.
    u64::from(write) << 32 | u64::from(nsid & 0xf) << 28 | u64::from(lba & 0x0fff_ffff)
}

/// Fills a block (a multiple of 8 bytes).
pub fn fill(write: u32, nsid: u8, lba: u32, block: &mut [u8]) {
    let head = first(write, nsid, lba);
    for (at, word) in block.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&head.wrapping_add((at as u64).wrapping_mul(STEP)).to_le_bytes());
    }
}

/// The write that a block contains.
///
/// # Errors
/// What is wrong with the contents.
pub fn identify(nsid: u8, lba: u32, block: &[u8]) -> Result<Value, Spoilt> {
    let mut words =
        block.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap_or([0; 8])));
    let head = words.next().unwrap_or(0);
    let write = (head >> 32) as u32;
    let (of, home) = ((head >> 28 & 0xf) as u8, head as u32 & 0x0fff_ffff);
    let (step, value) = match (head, home == lba) {
        (0, _) => (0, Value::Zeros),
        (_, true) => (STEP, Value::Write(write)),
        (_, false) => (STEP, Value::Moved(write, home)),
    };
    let mut expected = head;
    let differs = words.position(|word| {
        expected = expected.wrapping_add(step);
        word != expected
    });
    if let Some(at) = differs {
        return Err(Spoilt::Mixed { write, at: 8 + 8 * at });
    }
    if head != 0 && of != nsid & 0xf {
        return Err(Spoilt::Misplaced { write, nsid: of, lba: home });
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use crate::sim::block_stamp::*;

    #[test]
    fn stamps_identify_their_write_and_reveal_any_damage() {
        let mut block = [0; 512];
        assert_eq!(identify(1, 7, &block), Ok(Value::Zeros));
        block[511] = 1;
        assert_eq!(identify(1, 7, &block), Err(Spoilt::Mixed { write: 0, at: 504 }));
        fill(9, 1, 7, &mut block);
        assert_eq!(identify(1, 7, &block), Ok(Value::Write(9)));
        assert_eq!(identify(1, 8, &block), Ok(Value::Moved(9, 7)), "nobody may have copied it");
        assert_eq!(identify(2, 7, &block), Err(Spoilt::Misplaced { write: 9, nsid: 1, lba: 7 }));
        for at in 0..512 {
            block[at] ^= 0x10;
            assert!(identify(1, 7, &block).is_err(), "byte {at}");
            block[at] ^= 0x10;
        }
        let mut other = [0; 512];
        fill(10, 1, 7, &mut other);
        block[256..].copy_from_slice(&other[256..]);
        assert_eq!(identify(1, 7, &block), Err(Spoilt::Mixed { write: 9, at: 256 }));
    }
}
