//! Logical block sizes that a backing store supports.

/// log2 of all block sizes, in the order of LBA formats.
pub const SHIFTS: [u8; 2] = [9, 12];

/// LBA formats of a namespace, numbered from 0 by ascending block size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSizes([bool; SHIFTS.len()]);

impl BlockSizes {
    /// Only the format with blocks of 2^`shift` bytes.
    pub fn only(shift: u8) -> BlockSizes {
        BlockSizes::those(|each| each == shift)
    }

    /// The formats whose log2 of the block size satisfies `can`.
    pub fn those(can: impl Fn(u8) -> bool) -> BlockSizes {
        BlockSizes(SHIFTS.map(can))
    }

    /// log2 of their block sizes, in ascending order.
    pub fn shifts(self) -> impl Iterator<Item = u8> {
        SHIFTS.into_iter().zip(self.0).filter_map(|(shift, can)| can.then_some(shift))
    }

    /// log2 of the block size of the format with this index, if there is one.
    pub fn shift(self, index: u8) -> Option<u8> {
        self.shifts().nth(index.into())
    }

    /// Index of the format with blocks of 2^`shift` bytes.
    pub fn index(self, shift: u8) -> u8 {
        self.shifts().take_while(|each| *each != shift).count() as u8
    }
}

#[cfg(test)]
mod tests {
    use crate::block_sizes::*;

    #[test]
    fn formats_are_numbered_by_ascending_block_size() {
        let both = BlockSizes::those(|_| true);
        assert_eq!((both.shift(0), both.shift(1), both.shift(2)), (Some(9), Some(12), None));
        assert_eq!((both.index(9), both.index(12)), (0, 1));
        for shift in SHIFTS {
            let one = BlockSizes::only(shift);
            assert_eq!((one.shift(0), one.shift(1), one.index(shift)), (Some(shift), None, 0));
        }
    }
}
