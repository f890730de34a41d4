//! Acknowledged durable writes, recorded as marks in the log of the device: a mark is written after
//! the completion, so it follows everything that it covers. The mark itself makes nothing durable,
//! unlike a record that is written and synced.
//!
//! `x=LBA+BLOCKS@SEQUENCE,..` for writes, `n=NUMBER` for other events.

use std::io;
use std::process::Command;

/// A mark is a text in one sector, after the 32 bytes of its entry.
const MARK_BYTES: usize = 480;

/// Blocks that contain at least this write from now on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// The first one.
    pub(crate) lba: u64,
    /// Number of blocks.
    pub(crate) blocks: u32,
    /// The number of the write; a later one has a larger number.
    pub(crate) sequence: u64,
}

/// An acknowledgement recorded by a mark.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ack {
    /// These writes are durable.
    Extents(Vec<Extent>),
    /// The event with this number has happened.
    Note(u64),
}

/// Marks that record these writes as durable.
fn encode(extents: &[Extent]) -> Vec<String> {
    let mut marks: Vec<String> = Vec::new();
    for Extent { lba, blocks, sequence } in extents {
        let text = format!("{lba}+{blocks}@{sequence}");
        match marks.last_mut() {
            Some(mark) if mark.len() + text.len() < MARK_BYTES - 2 => {
                mark.push(',');
                mark.push_str(&text);
            }
            _ => marks.push(format!("x={text}")),
        }
    }
    marks
}

/// Parses a mark, if it is one of ours.
pub(crate) fn decode(mark: &str) -> Option<Ack> {
    match mark.split_once('=')? {
        ("x", extents) => extents.split(',').map(extent).collect::<Option<_>>().map(Ack::Extents),
        ("n", number) => number.parse().ok().map(Ack::Note),
        _ => None,
    }
}

fn extent(text: &str) -> Option<Extent> {
    let (lba, rest) = text.split_once('+')?;
    let (blocks, sequence) = rest.split_once('@')?;
    let (lba, blocks) = (lba.parse().ok()?, blocks.parse().ok()?);
    Some(Extent { lba, blocks, sequence: sequence.parse().ok()? })
}

/// A device of `dm-log-writes`, by its name.
#[derive(Clone, Debug)]
pub(crate) struct Writer(pub(crate) String);

impl Writer {
    /// Records these writes as durable.
    ///
    /// # Errors
    /// The device accepts no marks.
    pub(crate) fn extents(&self, extents: &[Extent]) -> io::Result<()> {
        encode(extents).iter().try_for_each(|mark| self.mark(mark))
    }

    /// Records the event with this number.
    ///
    /// # Errors
    /// The device accepts no marks.
    pub(crate) fn note(&self, number: u64) -> io::Result<()> {
        self.mark(&format!("n={number}"))
    }

    fn mark(&self, text: &str) -> io::Result<()> {
        let status =
            Command::new("dmsetup").args(["message", &self.0, "0", "mark", text]).status()?;
        let failed = || io::Error::other(format!("dmsetup message: {status}"));
        if status.success() { Ok(()) } else { Err(failed()) }
    }
}

#[cfg(test)]
mod tests {
    use crate::acks::*;

    #[test]
    fn marks_say_what_was_written_each_within_its_sector() {
        let extents = (0..100).map(|n| Extent { lba: 1 << 40, blocks: 8, sequence: 1000 + n });
        let extents: Vec<_> = extents.collect();
        let marks = encode(&extents);
        assert!(marks.len() > 1 && marks.iter().all(|mark| mark.len() <= MARK_BYTES));
        let mut found = Vec::new();
        for mark in &marks {
            match decode(mark) {
                Some(Ack::Extents(some)) => found.extend(some),
                other => panic!("{mark}: {other:?}"),
            }
        }
        assert_eq!(found, extents);
        assert_eq!(decode("n=12"), Some(Ack::Note(12)));
    }

    #[test]
    fn other_texts_say_nothing() {
        for text in ["", "dm-log-writes-end", "x=", "x=1+2", "x=1+2@", "n=", "y=1"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
