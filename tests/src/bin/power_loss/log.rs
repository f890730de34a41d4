//! The log of `dm-log-writes`: every write of a block device in the order in which it became
//! durable.
//!
//! ```text
//! sector 0   magic u64 | version u64 | entries u64 | sector_bytes u32
//! then each  sector u64 | sectors u64 | flags u64 | mark_bytes u64 | text of a mark, padded to a sector,
//!            then its data
//! ```
//!
//! Little-endian (Linux, `drivers/md/dm-log-writes.c`). A write without Force Unit Access is logged
//! when the next flush completes, one with it when it completes itself. So the entries before any
//! entry are the state after a power failure at that point, whatever the cache of the device below.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const ENTRY_BYTES: usize = 32;
/// The kernel's limit for a bio.
const DATA_LIMIT_BYTES: u64 = 64 << 20;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// One entry of the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    /// Offset of its data on the device.
    pub(crate) at_bytes: u64,
    /// Data written; empty for a flush.
    pub(crate) data: Vec<u8>,
    /// Number of bytes discarded from there on.
    pub(crate) discarded_bytes: u64,
    /// Everything before it is durable.
    pub(crate) flush: bool,
    /// It was durable when it completed.
    pub(crate) fua: bool,
    /// A mark: its text.
    pub(crate) mark: Option<String>,
}

impl Entry {
    /// Whether a power failure is simulated here: something became durable.
    pub(crate) fn is_barrier(&self) -> bool {
        self.flush || self.fua
    }
}

/// A log, entry by entry.
#[derive(Debug)]
pub(crate) struct Log<R> {
    from: R,
    sector_bytes: u64,
    left: u64,
}

impl Log<BufReader<File>> {
    /// Opens the device or file that `dm-log-writes` has written.
    ///
    /// # Errors
    /// It cannot be read, or has another format.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Log::new(BufReader::with_capacity(1 << 20, File::open(path)?))
    }
}

impl<R: Read + Seek> Log<R> {
    /// Reads from the first byte of the device on.
    ///
    /// # Errors
    /// It has another format.
    pub(crate) fn new(mut from: R) -> io::Result<Self> {
        let mut head = [0; ENTRY_BYTES];
        from.read_exact(&mut head)?;
        let [magic, version, left] = [0, 8, 16].map(|at| u64_at(&head, at));
        let sector_bytes = u64_at(&head, 24) & u64::from(u32::MAX);
        let good = magic == MAGIC && version == VERSION && (512..=65_536).contains(&sector_bytes);
        if !good {
            return Err(bad("no log of dm-log-writes"));
        }
        from.seek(SeekFrom::Start(sector_bytes))?;
        Ok(Log { from, sector_bytes, left })
    }

    /// The next entry.
    ///
    /// # Errors
    /// The log is truncated or damaged.
    pub(crate) fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let mut sector = vec![0; self.sector_bytes as usize];
        self.from.read_exact(&mut sector)?;
        let [at, sectors, flags, data_bytes] = [0, 8, 16, 24].map(|at| u64_at(&sector, at));
        let bytes = |sectors: u64| {
            sectors.checked_mul(self.sector_bytes).ok_or_else(|| bad("a number beyond any device"))
        };
        if flags & MARK != 0 {
            let text = sector.get(ENTRY_BYTES..).and_then(|text| text.get(..data_bytes as usize));
            let text = String::from_utf8_lossy(text.unwrap_or_default());
            let mark = Some(text.trim_end_matches('\0').to_owned());
            return Ok(Some(Entry { mark, ..Entry::default() }));
        }
        let (at_bytes, len) = (bytes(at)?, bytes(sectors)?);
        let (flush, fua) = (flags & FLUSH != 0, flags & FUA != 0);
        let discards = flags & DISCARD != 0;
        let discarded_bytes = if discards { len } else { 0 };
        let data = if discards { Vec::new() } else { self.data(len)? };
        Ok(Some(Entry { at_bytes, data, discarded_bytes, flush, fua, mark: None }))
    }

    fn data(&mut self, len: u64) -> io::Result<Vec<u8>> {
        if len > DATA_LIMIT_BYTES {
            return Err(bad("an entry that is longer than any"));
        }
        let mut data = vec![0; len as usize];
        self.from.read_exact(&mut data)?;
        Ok(data)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |field| u64::from_le_bytes(*field))
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Cursor;

    use crate::log::*;

    /// A log with these entries: sector, data, flags.
    pub(crate) fn log_of(entries: &[(u64, Vec<u8>, u64)]) -> Log<Cursor<Vec<u8>>> {
        let mut bytes = Vec::new();
        for field in [MAGIC, VERSION, entries.len() as u64, 512] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        bytes.resize(512, 0);
        for (sector, data, flags) in entries {
            let start = bytes.len();
            let is_mark = flags & MARK != 0;
            let (sectors, own) = if is_mark { (0, data.len()) } else { (data.len() / 512, 0) };
            for field in [*sector, sectors as u64, *flags, own as u64] {
                bytes.extend_from_slice(&field.to_le_bytes());
            }
            if is_mark {
                bytes.extend_from_slice(data);
            }
            bytes.resize(start + 512, 0);
            if is_mark {
                continue;
            }
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        Log::new(Cursor::new(bytes)).expect("a log")
    }

    pub(crate) const NONE: u64 = 0;
    pub(crate) const A_FLUSH: u64 = FLUSH;
    pub(crate) const A_FUA: u64 = FUA;
    pub(crate) const A_MARK: u64 = MARK;

    #[test]
    fn entries_are_read_in_order_and_marks_with_their_text() {
        let mut log = log_of(&[
            (8, vec![1; 1024], NONE),
            (0, b"a mark".to_vec(), MARK),
            (0, Vec::new(), FLUSH),
            (16, vec![2; 512], FUA),
        ]);
        let mut seen = Vec::new();
        while let Some(entry) = log.next_entry().expect("whole") {
            let text = entry.mark.unwrap_or_default();
            seen.push((entry.at_bytes, entry.data.len(), entry.flush, entry.fua, text));
        }
        let none = String::new;
        let expected = [
            (4096, 1024, false, false, none()),
            (0, 0, false, false, "a mark".into()),
            (0, 0, true, false, none()),
            (8192, 512, false, true, none()),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn invalid_and_truncated_logs_are_refused() {
        assert!(Log::new(Cursor::new(vec![0; 4096])).is_err());
        let whole = log_of(&[(8, vec![1; 1024], NONE)]).from.into_inner();
        let mut cut = Log::new(Cursor::new(whole[..1400].to_vec())).expect("its head");
        assert!(cut.next_entry().is_err());
    }
}
