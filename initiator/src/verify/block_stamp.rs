//! `Stamp`: the content that `nvmf verify` writes into every block; it identifies the block and the
//! write.
//!
//! ```text
//! 0  magic       8 bytes  "nvmf-blk"
//! 8  run         u64      a run of the tool: identifies stamps of other runs
//! 16 sequence    u64      number of the write in the run
//! 24 lba         u64      below 2^48
//! 32 client      u16      then two bytes of zeros
//! 36 generation  u32      number of the write of this block, from 1
//! 40 block_bytes u32      then eight bytes of zeros
//! 52 crc         u32      CRC-32 (ISO-HDLC) of the whole block, this field taken as zeros
//! 56 zeros       8 bytes
//! 64 body        words of 8 bytes to the end of the block
//! ```
//!
//! All numbers are little-endian. Word `i` of the block is `A + i * STEP` where `i` is even and
//! `B + i * STEP` where it is odd. `A` is made of run and sequence, `B` of run, client and LBA, by
//! an invertible function. So any 16 bytes of a body identify their write and their position: of a
//! torn block, both writes are known.
//!
//! This module uses no device, clock or target.

use std::fmt;

use crate::rng::mix;

/// The first bytes of every stamped block.
pub const MAGIC: [u8; 8] = *b"nvmf-blk";
/// Bytes before the body.
pub const HEADER_BYTES: usize = 64;
/// LBAs are below this.
pub const LBA_LIMIT: u64 = 1 << 48;

const CRC_AT: usize = 52;
/// Increment per word: an odd number without a pattern (the golden ratio).
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Fields of a stamp.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stamp {
    /// The run of the tool.
    pub run: u64,
    /// The write, unique in its run; later writes have larger numbers.
    pub sequence: u64,
    /// The LBA of the block, below [`LBA_LIMIT`].
    pub lba: u64,
    /// The client of the run that wrote it.
    pub client: u16,
    /// Number of the write of this block in the run, from 1.
    pub generation: u32,
}

/// Classification of the bytes of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// A complete and valid stamp. Whether it is the expected one is not checked here.
    Whole(Stamp),
    /// Zeros only.
    Zeros,
    /// The header of a stamp, and a body that differs from it.
    Torn(TornBlock),
    /// No header of a stamp, and not zeros.
    Foreign {
        /// The first piece of a body that belongs to this run nevertheless, if any.
        piece: Option<Piece>,
    },
}

/// A block that begins as one write and continues as something else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TornBlock {
    /// Content of the header; the header itself may be damaged.
    pub header: Stamp,
    /// Offset in bytes of the first word that does not belong to the header's write. The header
    /// itself counts as one piece: 0 if only its CRC is wrong.
    pub at_bytes: u32,
    /// Number of wrong words of the body (or header words, if the body is intact).
    pub wrong_words: u32,
    /// Number of bits of those words that differ from those of the header's write.
    pub wrong_bits: u32,
    /// The other write to which some of the wrong words belong, if it is only one.
    pub piece: Option<Piece>,
}

/// Fields of 16 bytes of a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset of this piece in the block, in bytes.
    pub at_bytes: u32,
    /// The write to which it belongs.
    pub sequence: u64,
    /// The LBA of the block.
    pub lba: u64,
    /// The client that wrote it.
    pub client: u16,
}

impl Stamp {
    /// Fills a block, header and body.
    ///
    /// # Panics
    /// If the length of `block` is not a multiple of 8 bytes, or not larger than the header.
    pub fn fill(&self, block: &mut [u8]) {
        check_shape(block);
        let (even, odd) = self.bases();
        let header = self.header(block.len());
        block[..HEADER_BYTES].copy_from_slice(&header);
        let mut offset = STEP.wrapping_mul((HEADER_BYTES / 8) as u64);
        for (i, bytes) in block.chunks_exact_mut(8).enumerate().skip(HEADER_BYTES / 8) {
            let base = if i % 2 == 0 { even } else { odd };
            bytes.copy_from_slice(&base.wrapping_add(offset).to_le_bytes());
            offset = offset.wrapping_add(STEP);
        }
        let crc = crc32fast::hash(block);
        block[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// Classifies the content of a block of a run.
    ///
    /// # Panics
    /// If the length of `block` is not a multiple of 8 bytes, or not larger than the header.
    pub fn read(block: &[u8], run: u64) -> Content {
        check_shape(block);
        let Some((stamp, stamped_bytes)) = Stamp::parse_header(block) else {
            if block.iter().all(|&byte| byte == 0) {
                return Content::Zeros;
            }
            return Content::Foreign { piece: first_piece(block, run, HEADER_BYTES, None) };
        };
        let whole = stamped_bytes == block.len() && crc_is_right(block);
        let wrong = stamp.compare(block);
        match wrong {
            None if whole => Content::Whole(stamp),
            _ => Content::Torn(stamp.tear(block, wrong)),
        }
    }

    /// Returns the bases of the even and of the odd words.
    fn bases(&self) -> (u64, u64) {
        let place = self.lba & (LBA_LIMIT - 1) | u64::from(self.client) << 48;
        (mix(self.sequence ^ self.run), mix(place ^ self.run.rotate_left(32)))
    }

    fn header(&self, block_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..16].copy_from_slice(&self.run.to_le_bytes());
        header[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        header[24..32].copy_from_slice(&self.lba.to_le_bytes());
        header[32..34].copy_from_slice(&self.client.to_le_bytes());
        header[36..40].copy_from_slice(&self.generation.to_le_bytes());
        header[40..44].copy_from_slice(&(block_bytes as u32).to_le_bytes());
        header
    }

    /// Returns the fields of a header and the size of the block that it was written for.
    fn parse_header(block: &[u8]) -> Option<(Stamp, usize)> {
        if block[..8] != MAGIC {
            return None;
        }
        let stamp = Stamp {
            run: word(block, 1),
            sequence: word(block, 2),
            lba: word(block, 3),
            client: u16::from_le_bytes([block[32], block[33]]),
            generation: u32::from_le_bytes([block[36], block[37], block[38], block[39]]),
        };
        Some((stamp, u32::from_le_bytes([block[40], block[41], block[42], block[43]]) as usize))
    }

    /// Returns the index of the first word of the body that does not belong to this stamp.
    fn compare(&self, block: &[u8]) -> Option<usize> {
        let (even, odd) = self.bases();
        let mut expected = STEP.wrapping_mul((HEADER_BYTES / 8) as u64);
        for (i, bytes) in block.chunks_exact(8).enumerate().skip(HEADER_BYTES / 8) {
            let base = if i % 2 == 0 { even } else { odd };
            if bytes != base.wrapping_add(expected).to_le_bytes() {
                return Some(i);
            }
            expected = expected.wrapping_add(STEP);
        }
        None
    }

    /// Returns word `i` of a block with this stamp; of the header, without its CRC.
    fn word(&self, i: usize, block_bytes: usize) -> u64 {
        if i < HEADER_BYTES / 8 {
            return word(&self.header(block_bytes), i);
        }
        let (even, odd) = self.bases();
        let base = if i.is_multiple_of(2) { even } else { odd };
        base.wrapping_add(STEP.wrapping_mul(i as u64))
    }

    fn tear(self, block: &[u8], first_wrong: Option<usize>) -> TornBlock {
        let at = first_wrong.unwrap_or(0);
        let (mut wrong_words, mut wrong_bits) = (0, 0);
        for i in HEADER_BYTES / 8..block.len() / 8 {
            let difference = word(block, i) ^ self.word(i, block.len());
            wrong_words += u32::from(difference != 0);
            wrong_bits += difference.count_ones();
        }
        let piece = first_wrong.and_then(|at| first_piece(block, self.run, at * 8, Some(&self)));
        TornBlock { header: self, at_bytes: (at * 8) as u32, wrong_words, wrong_bits, piece }
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "write {} of client {} to LBA {} (its generation {}, run {:016x})",
            self.sequence, self.client, self.lba, self.generation, self.run
        )
    }
}

/// Returns the first position at or after `from` where four consecutive words belong to one write
/// of `run`, other than `than`.
fn first_piece(block: &[u8], run: u64, from: usize, than: Option<&Stamp>) -> Option<Piece> {
    let known = than.map(Stamp::bases);
    let start = from.max(HEADER_BYTES).next_multiple_of(16) / 8;
    for i in (start..block.len() / 8).step_by(2) {
        if i + 4 > block.len() / 8 {
            return None;
        }
        let base = |i: usize| word(block, i).wrapping_sub(STEP.wrapping_mul(i as u64));
        let (even, odd) = (base(i), base(i + 1));
        if (base(i + 2), base(i + 3)) != (even, odd) || known == Some((even, odd)) {
            continue;
        }
        let sequence = unmix(even) ^ run;
        let place = unmix(odd) ^ run.rotate_left(32);
        let (lba, client) = (place & (LBA_LIMIT - 1), (place >> 48) as u16);
        // Four words of another run are consistent as well; their numbers have no pattern then.
        if sequence < 1 << 56 {
            return Some(Piece { at_bytes: (i * 8) as u32, sequence, lba, client });
        }
    }
    None
}

fn crc_is_right(block: &[u8]) -> bool {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&block[..CRC_AT]);
    crc.update(&[0; 4]);
    crc.update(&block[CRC_AT + 4..]);
    crc.finalize().to_le_bytes() == block[CRC_AT..CRC_AT + 4]
}

fn word(block: &[u8], i: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&block[i * 8..i * 8 + 8]);
    u64::from_le_bytes(bytes)
}

fn check_shape(block: &[u8]) {
    let good = block.len() > HEADER_BYTES && block.len().is_multiple_of(8);
    assert!(good, "a block of {} bytes cannot be stamped", block.len());
}

/// Inverse of `mix`.
fn unmix(mut z: u64) -> u64 {
    z = (z ^ z >> 31 ^ z >> 62).wrapping_mul(0x3196_42B2_D24D_8EC3);
    z = (z ^ z >> 27 ^ z >> 54).wrapping_mul(0x96DE_1B17_3F11_9089);
    z ^ z >> 30 ^ z >> 60
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::verify::block_stamp::*;

    fn stamps() -> impl Strategy<Value = Stamp> {
        (any::<u64>(), 0..1u64 << 48, 0..LBA_LIMIT, any::<u16>(), any::<u32>()).prop_map(
            |(run, sequence, lba, client, generation)| Stamp {
                run,
                sequence,
                lba,
                client,
                generation,
            },
        )
    }

    fn sizes() -> impl Strategy<Value = usize> {
        prop_oneof![Just(512), Just(520), Just(4096), Just(72)]
    }

    fn filled(stamp: &Stamp, bytes: usize) -> Vec<u8> {
        let mut block = vec![0xEE; bytes];
        stamp.fill(&mut block);
        block
    }

    #[test]
    fn the_layout_is_as_documented() {
        let stamp = Stamp {
            run: 0x1112_1314_1516_1718,
            sequence: 0x21,
            lba: 0x31,
            client: 0x41,
            generation: 0x51,
        };
        let block = filled(&stamp, 512);
        assert_eq!(&block[..8], b"nvmf-blk");
        assert_eq!(block[8..16], [0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]);
        assert_eq!((block[16], block[24], block[32], block[36]), (0x21, 0x31, 0x41, 0x51));
        assert_eq!(block[40..44], 512u32.to_le_bytes());
        let even = mix(0x21 ^ stamp.run).wrapping_add(STEP.wrapping_mul(8));
        assert_eq!(block[64..72], even.to_le_bytes());
        let mut plain = block.clone();
        plain[CRC_AT..CRC_AT + 4].fill(0);
        assert_eq!(block[CRC_AT..CRC_AT + 4], crc32fast::hash(&plain).to_le_bytes());
    }

    proptest! {
        #[test]
        fn stamps_round_trip(stamp in stamps(), bytes in sizes()) {
            let block = filled(&stamp, bytes);
            prop_assert_eq!(Stamp::read(&block, stamp.run), Content::Whole(stamp));
            // A stamp of another run is complete as well: it is not evaluated here.
            prop_assert_eq!(Stamp::read(&block, !stamp.run), Content::Whole(stamp));
        }

        #[test]
        fn every_flipped_bit_is_seen(stamp in stamps(), bytes in sizes(), bit in any::<usize>()) {
            let mut block = filled(&stamp, bytes);
            let bit = bit % (bytes * 8);
            block[bit / 8] ^= 1 << (bit % 8);
            let content = Stamp::read(&block, stamp.run);
            prop_assert!(!matches!(content, Content::Whole(_) | Content::Zeros), "{:?}", content);
            if bit / 8 >= HEADER_BYTES {
                let Content::Torn(tear) = content else { panic!("{content:?}") };
                prop_assert_eq!((tear.wrong_words, tear.wrong_bits), (1, 1));
                prop_assert_eq!(tear.at_bytes as usize, bit / 64 * 8);
                prop_assert_eq!(tear.header, stamp);
            }
        }

        #[test]
        fn both_writes_of_a_torn_block_are_identified(
            old in stamps(), new in stamps(), cut in 1usize..8,
        ) {
            let old = Stamp { run: new.run, ..old };
            let mut block = filled(&new, 4096);
            let cut = cut * 512;
            block[cut..].copy_from_slice(&filled(&old, 4096)[cut..]);
            let Content::Torn(tear) = Stamp::read(&block, new.run) else { panic!("not seen") };
            prop_assert_eq!(tear.header, new);
            let piece = tear.piece.expect("the other write");
            prop_assert_eq!(
                (piece.sequence, piece.lba, piece.client), (old.sequence, old.lba, old.client)
            );
            prop_assert!(tear.at_bytes as usize <= cut + 8 && piece.at_bytes as usize <= cut + 16);
        }

        #[test]
        fn a_body_without_its_header_is_recognised(stamp in stamps(), cut in 1usize..7) {
            let mut block = filled(&stamp, 4096);
            block[..cut * 512].fill(0);
            let Content::Foreign { piece: Some(piece) } = Stamp::read(&block, stamp.run)
                else { panic!("not seen") };
            prop_assert_eq!((piece.sequence, piece.lba), (stamp.sequence, stamp.lba));
            prop_assert_eq!(piece.at_bytes as usize, cut * 512);
        }

        #[test]
        fn other_bytes_are_foreign(bytes in proptest::collection::vec(any::<u8>(), 512)) {
            let content = Stamp::read(&bytes, 7);
            prop_assert!(matches!(content, Content::Foreign { .. }), "{:?}", content);
        }

        #[test]
        fn unmix_inverts_mix(value in any::<u64>()) {
            prop_assert_eq!(unmix(mix(value)), value);
            prop_assert_eq!(mix(unmix(value)), value);
        }
    }

    #[test]
    fn a_wrong_body_with_a_valid_crc_is_reported_as_torn() {
        let stamp = Stamp { run: 1, sequence: 2, lba: 3, client: 4, generation: 5 };
        let mut block = filled(&stamp, 512);
        block[200] ^= 1;
        block[CRC_AT..CRC_AT + 4].fill(0);
        let crc = crc32fast::hash(&block);
        block[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        let Content::Torn(tear) = Stamp::read(&block, 1) else { panic!("not seen") };
        assert_eq!((tear.at_bytes, tear.wrong_bits, tear.piece), (200, 1, None));
    }

    #[test]
    fn only_all_zero_blocks_read_as_zeros() {
        assert_eq!(Stamp::read(&[0; 512], 7), Content::Zeros);
        let mut nearly = [0; 512];
        nearly[511] = 1;
        assert_eq!(Stamp::read(&nearly, 7), Content::Foreign { piece: None });
    }
}
