//! `Violation`: a block with an invalid content, with the history that explains it.

use std::fmt;

use super::block_history::{CandidateState, ReadBlock, Value};
use crate::verify::block_stamp::{Content, Stamp};

/// Number of bytes displayed from the first difference on.
const SHOWN_BYTES: usize = 32;
/// A block with at most this number of wrong bits is damaged, not something else.
const DAMAGE_BITS: u32 = 8;

/// Kind of a violation, as far as it can be determined from the block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// An older value of this very block: a write was lost, or a read came from a stale copy.
    Stale,
    /// A write of this block that was not submitted before the read had ended.
    Impossible,
    /// Data of another block: written to the wrong place, or read from it.
    Misplaced,
    /// Pieces of several writes.
    Torn,
    /// Single bits are wrong.
    Damaged,
    /// Zeros instead of data.
    Zeros,
    /// A stamp of another run of the tool.
    OtherRun,
    /// Content that was not written by the tool.
    Foreign,
    /// It changed without a write.
    Changed,
}

/// A valid value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expected {
    /// The value.
    pub value: Value,
    /// Whether its write had ended.
    pub standing: CandidateState,
    /// Whether a flush or FUA has made it durable (it, or a younger one).
    pub durable: bool,
}

impl Expected {
    pub(super) fn new(value: Value, standing: CandidateState, floor: u64) -> Expected {
        let durable = standing == CandidateState::Settled && value.start() <= floor && floor > 0;
        Expected { value, standing, durable }
    }
}

/// A block with an invalid content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The block.
    pub lba: u64,
    /// The kind of violation.
    pub kind: Kind,
    /// The content found.
    pub content: Content,
    /// The valid values, newest first.
    pub expected: Vec<Expected>,
    /// The first difference from the newest expected data; `None` if no exact value was
    /// expected.
    pub difference: Option<Difference>,
}

/// The first difference between a block and the newest expected data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Offset in the block, in bytes, rounded down to 16.
    pub at_bytes: usize,
    /// The bytes found.
    pub found: Vec<u8>,
    /// The expected bytes.
    pub expected: Vec<u8>,
}

impl Kind {
    /// Name of the kind, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Stale => "stale",
            Kind::Impossible => "impossible",
            Kind::Misplaced => "misplaced",
            Kind::Torn => "torn",
            Kind::Damaged => "damaged",
            Kind::Zeros => "zeros",
            Kind::OtherRun => "other-run",
            Kind::Foreign => "foreign",
            Kind::Changed => "changed",
        }
    }
}

impl Violation {
    pub(super) fn new(seen: &ReadBlock<'_>, expected: Vec<Expected>, now: u64) -> Violation {
        let difference = difference(seen, &expected);
        let kind = kind_of(seen, &expected, now);
        Violation { lba: seen.lba, kind, content: seen.content, expected, difference }
    }
}

fn kind_of(seen: &ReadBlock<'_>, expected: &[Expected], now: u64) -> Kind {
    let of_before = |it: &Expected| matches!(it.value, Value::Before { .. });
    match seen.content {
        Content::Whole(stamp) if stamp.run != seen.run => Kind::OtherRun,
        Content::Whole(stamp) if stamp.lba != seen.lba => Kind::Misplaced,
        Content::Whole(stamp) if stamp.sequence > now => Kind::Impossible,
        Content::Whole(_) => Kind::Stale,
        _ if fewest_wrong_bits(seen, expected) <= DAMAGE_BITS => Kind::Damaged,
        Content::Torn(_) | Content::Foreign { piece: Some(_) } => Kind::Torn,
        _ if expected.iter().all(of_before) => Kind::Changed,
        Content::Zeros => Kind::Zeros,
        Content::Foreign { piece: None } => Kind::Foreign,
    }
}

/// Returns an exact value, as bytes.
fn right_block(seen: &ReadBlock<'_>, expected: &Expected) -> Option<Vec<u8>> {
    match expected.value {
        Value::Data { sequence, client, generation } => {
            let mut block = vec![0; seen.block.len()];
            let stamp = Stamp { run: seen.run, sequence, lba: seen.lba, client, generation };
            stamp.fill(&mut block);
            Some(block)
        }
        Value::Zeros { .. } => Some(vec![0; seen.block.len()]),
        Value::Before { .. } | Value::Survivor { .. } => None,
    }
}

fn difference(seen: &ReadBlock<'_>, expected: &[Expected]) -> Option<Difference> {
    let right = expected.iter().find_map(|it| right_block(seen, it))?;
    let at = seen.block.iter().zip(&right).position(|(found, right)| found != right)?;
    let at_bytes = at / 16 * 16;
    let shown = at_bytes..(at_bytes + SHOWN_BYTES).min(right.len());
    Some(Difference {
        at_bytes,
        found: seen.block[shown.clone()].to_vec(),
        expected: right[shown].to_vec(),
    })
}

/// Returns the number of bits in which the block differs from the nearest valid value.
fn fewest_wrong_bits(seen: &ReadBlock<'_>, expected: &[Expected]) -> u32 {
    let bits = |right: &Vec<u8>| -> u32 {
        seen.block.iter().zip(right).map(|(found, right)| (found ^ right).count_ones()).sum()
    };
    let right = expected.iter().filter_map(|it| right_block(seen, it));
    right.map(|right| bits(&right)).min().unwrap_or(u32::MAX)
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Stale => "an older value: a write is lost, or the read is stale",
            Kind::Impossible => "a write that was never submitted",
            Kind::Misplaced => "the data of another block",
            Kind::Torn => "pieces of several writes",
            Kind::Damaged => "wrong bits",
            Kind::Zeros => "zeros instead of data",
            Kind::OtherRun => "data of another run",
            Kind::Foreign => "something that was never written here",
            Kind::Changed => "a content that has changed, though nothing was written",
        })
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value {
            Value::Before { hash: 0 } => return f.write_str("what was there before the run"),
            Value::Before { .. } => return f.write_str("what was there before, as read earlier"),
            Value::Survivor { from } => {
                return write!(f, "after the crash, any write from number {from} on");
            }
            Value::Data { sequence, client, generation } => {
                write!(f, "write {sequence} of client {client} (generation {generation})")?;
            }
            Value::Zeros { sequence } => write!(f, "zeros of command {sequence}")?,
        }
        f.write_str(match (self.standing, self.durable) {
            (CandidateState::InFlight, _) => ", in flight",
            (CandidateState::Settled, false) => ", not flushed",
            (CandidateState::Settled, true) => ", durable",
        })
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "LBA {}: {}", self.lba, self.kind)?;
        writeln!(f, "  found     {}", ContentText(self.content))?;
        for (n, expected) in self.expected.iter().enumerate() {
            writeln!(f, "  {:9} {expected}", if n == 0 { "expected" } else { "or" })?;
        }
        if let Some(difference) = &self.difference {
            writeln!(f, "  the first difference, from byte {}:", difference.at_bytes)?;
            writeln!(f, "  found     {}", Hex(&difference.found))?;
            writeln!(f, "  expected  {}", Hex(&difference.expected))?;
        }
        Ok(())
    }
}

struct ContentText(Content);

impl fmt::Display for ContentText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let piece = match self.0 {
            Content::Whole(stamp) => return stamp.fmt(f),
            Content::Zeros => return f.write_str("zeros"),
            Content::Foreign { piece: None } => return f.write_str("no stamp"),
            Content::Torn(tear) => {
                write!(f, "{}, but ", tear.header)?;
                if tear.wrong_words == 0 {
                    return f.write_str("with a wrong header");
                }
                let (words, bits, at) = (tear.wrong_words, tear.wrong_bits, tear.at_bytes);
                write!(f, "{words} words ({bits} bits) are wrong from byte {at}")?;
                tear.piece
            }
            Content::Foreign { piece } => {
                f.write_str("no header")?;
                piece
            }
        };
        let Some(piece) = piece else { return Ok(()) };
        let (at, sequence, client, lba) = (piece.at_bytes, piece.sequence, piece.client, piece.lba);
        write!(f, "; from byte {at}: write {sequence} of client {client} to LBA {lba}")
    }
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, byte) in self.0.iter().enumerate() {
            if n > 0 && n % 8 == 0 {
                f.write_str(" ")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}
