//! Acknowledged durable writes, recorded as marks in the log of the device: a mark is written after
//! the completion, so it follows everything that it covers. The mark itself makes nothing durable,
//! unlike a record that is written and synced. If the machine of the device loses its power, the
//! acknowledgements are recorded in a file of another machine.
//!
//! `x=LBA+BLOCKS@SEQUENCE,..` for writes, `a=..` for completed writes that may be volatile,
//! `n=NUMBER` for other events.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
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
    /// These writes were completed, and may be volatile.
    Completed(Vec<Extent>),
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
        ("x", extents) => list(extents).map(Ack::Extents),
        ("a", extents) => list(extents).map(Ack::Completed),
        ("n", number) => number.parse().ok().map(Ack::Note),
        _ => None,
    }
}

fn list(text: &str) -> Option<Vec<Extent>> {
    text.split(',').map(extent).collect()
}

fn extent(text: &str) -> Option<Extent> {
    let (lba, rest) = text.split_once('+')?;
    let (blocks, sequence) = rest.split_once('@')?;
    let (lba, blocks) = (lba.parse().ok()?, blocks.parse().ok()?);
    Some(Extent { lba, blocks, sequence: sequence.parse().ok()? })
}

/// Where acknowledgements are recorded.
#[derive(Debug)]
pub(crate) enum Writer {
    /// A device of `dm-log-writes`, by its name.
    Device(String),
    /// A file, to whose end they are appended.
    File(File),
}

impl Writer {
    /// Opens a file that the power failure does not affect.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn file(path: &Path) -> io::Result<Writer> {
        OpenOptions::new().create(true).append(true).open(path).map(Writer::File)
    }

    /// Records these writes as durable.
    ///
    /// # Errors
    /// The acknowledgement cannot be recorded.
    pub(crate) fn extents(&self, extents: &[Extent]) -> io::Result<()> {
        encode(extents).iter().try_for_each(|mark| self.mark(mark))
    }

    /// Records a completed write that may be volatile. The log of a device needs no such record: it
    /// contains the write itself.
    ///
    /// # Errors
    /// The record cannot be written.
    pub(crate) fn completed(&self, Extent { lba, blocks, sequence }: &Extent) -> io::Result<()> {
        match self {
            Writer::Device(_) => Ok(()),
            Writer::File(_) => self.mark(&format!("a={lba}+{blocks}@{sequence}")),
        }
    }

    /// Records the event with this number.
    ///
    /// # Errors
    /// The record cannot be written.
    pub(crate) fn note(&self, number: u64) -> io::Result<()> {
        self.mark(&format!("n={number}"))
    }

    fn mark(&self, text: &str) -> io::Result<()> {
        let name = match self {
            Writer::Device(name) => name,
            Writer::File(file) => return writeln!(&mut &*file, "{text}"),
        };
        let status = Command::new("dmsetup").args(["message", name, "0", "mark", text]).status()?;
        let failed = || io::Error::other(format!("dmsetup message: {status}"));
        if status.success() { Ok(()) } else { Err(failed()) }
    }
}

#[cfg(test)]
mod tests {
    use crate::acks::*;

    #[test]
    fn marks_round_trip_and_fit_in_a_sector_each() {
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
    fn ack_files_have_a_line_per_durable_or_completed_extent() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("acks");
        let extent = Extent { lba: 3, blocks: 2, sequence: 9 };
        for _ in 0..2 {
            let acks = Writer::file(&path).expect("a file");
            acks.completed(&extent).expect("recorded");
            acks.extents(&[extent]).expect("recorded");
        }
        let text = std::fs::read_to_string(&path).expect("a file");
        let found: Vec<_> = text.lines().map(decode).collect();
        let pair = [Some(Ack::Completed(vec![extent])), Some(Ack::Extents(vec![extent]))];
        assert_eq!(found, [pair.clone(), pair].concat());
    }

    #[test]
    fn malformed_marks_decode_to_none() {
        for text in ["", "dm-log-writes-end", "x=", "x=1+2", "x=1+2@", "a=", "n=", "y=1"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
