//! The passes of a copy: parts go from the source to the target, several at once; then, if asked
//! for, both are read and compared.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::state_file::{CopyState, StateFile};
use super::volume::{Action, Part, Volume};
use crate::Error;

/// Parts under way at once.
pub(super) const DEPTH: usize = 32;
/// Bytes of a part: zeros are found in units of that.
pub(super) const PART_BYTES: u32 = 256 << 10;
/// The target is flushed and the state saved this often, and after so many bytes.
const CHECKPOINT_EVERY: Duration = Duration::from_secs(5);
const CHECKPOINT_BYTES: u64 = 1 << 30;
/// The longest sleep: also how late the end of a pass that is asked for is seen.
const SLEEP: Duration = Duration::from_millis(100);
/// The same with two namespaces, of which each sleep only waits for one.
const SHORT_SLEEP: Duration = Duration::from_millis(1);

/// What was copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Counts {
    pub(super) data_bytes: u64,
    pub(super) zero_bytes: u64,
    pub(super) compared_bytes: u64,
}

/// What parts are begun for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Copy,
    Compare,
}

/// A copy.
pub(super) struct Engine {
    pub(super) source: Volume,
    pub(super) target: Volume,
    pub(super) state: CopyState,
    pub(super) file: StateFile,
    pub(super) counts: Counts,
    part_bytes: u64,
    /// The first byte of the next part.
    next: u64,
    under_way: usize,
    /// For the target, which had no room for it.
    held: VecDeque<(Action, Part)>,
    /// What the source has, of parts that are being compared.
    expected: BTreeMap<u64, Vec<u8>>,
    failure: Option<Error>,
}

impl Engine {
    pub(super) fn new(source: Volume, target: Volume, state: CopyState, file: StateFile) -> Engine {
        let most_bytes = source.most_bytes().min(target.most_bytes()).min(PART_BYTES);
        Engine {
            // A power of two, and so whole blocks of both.
            part_bytes: 1 << most_bytes.max(1).ilog2(),
            source,
            target,
            state,
            file,
            counts: Counts::default(),
            next: 0,
            under_way: 0,
            held: VecDeque::new(),
            expected: BTreeMap::new(),
            failure: None,
        }
    }

    /// Copies from `state.done_bytes` on. Returns whether all is done: otherwise `goes_on`, which gets
    /// the bytes that are done, has ended it.
    pub(super) fn copy(&mut self, mut goes_on: impl FnMut(u64) -> bool) -> Result<bool, Error> {
        self.next = self.state.done_bytes;
        let mut since = Instant::now();
        loop {
            let goes = goes_on(self.done_bytes()) && self.failure.is_none();
            let is_due = since.elapsed() >= CHECKPOINT_EVERY
                || self.next - self.state.done_bytes >= CHECKPOINT_BYTES;
            let mut any = false;
            while let Some((part, outcome)) = self.source.next_done() {
                any = true;
                self.on_read(part, outcome);
            }
            // What the source has just told of its holes lets parts begin.
            any |= goes && !is_due && self.begin(Pass::Copy);
            any |= self.send();
            while let Some((part, outcome)) = self.target.next_done() {
                any = true;
                self.on_end(part.offset, outcome);
            }
            let is_complete = self.next >= self.state.size_bytes;
            if self.under_way == 0 && (!goes || is_due || is_complete) {
                self.checkpoint()?;
                since = Instant::now();
                if !goes || is_complete {
                    return Ok(is_complete);
                }
            }
            self.wait(any);
        }
    }

    /// Compares all. Returns whether that is done, as above.
    pub(super) fn compare(&mut self, mut goes_on: impl FnMut(u64) -> bool) -> Result<bool, Error> {
        self.next = 0;
        self.source.forget_holes();
        loop {
            let goes = goes_on(self.done_bytes()) && self.failure.is_none();
            let mut any = false;
            while let Some((part, outcome)) = self.source.next_done() {
                any = true;
                self.on_expected(part, outcome);
            }
            any |= goes && self.begin(Pass::Compare);
            any |= self.send();
            while let Some((part, outcome)) = self.target.next_done() {
                any = true;
                let outcome = outcome.and_then(|()| self.check(&part));
                self.on_end(part.offset, outcome);
            }
            let is_complete = self.next >= self.state.size_bytes;
            if self.under_way == 0 && (!goes || is_complete) {
                return self.failure.take().map_or(Ok(is_complete), Err);
            }
            self.wait(any);
        }
    }

    pub(super) fn close(&mut self) {
        self.source.close();
        self.target.close();
    }

    /// What is done for certain: parts may end in another order than they begin.
    fn done_bytes(&self) -> u64 {
        self.next.saturating_sub(self.under_way as u64 * self.part_bytes)
    }

    /// Begins parts. Returns whether it did.
    fn begin(&mut self, pass: Pass) -> bool {
        let mut any = false;
        while self.under_way < DEPTH && self.next < self.state.size_bytes {
            let offset = self.next;
            let left = self.state.size_bytes - offset;
            let block = self.source.block_bytes().max(self.target.block_bytes());
            // The last block of a target may be longer than what is left of a file.
            let len = left.next_multiple_of(block).min(self.part_bytes) as usize;
            let mut part = Part { offset, bytes: Vec::new(), len };
            let Some(hole_end) = self.source.hole_end(offset) else { return any };
            let is_hole = hole_end >= offset + left.min(len as u64);
            match (is_hole, pass) {
                (true, Pass::Copy) => self.held.push_back((Action::Zero, part)),
                (true, Pass::Compare) => {
                    part.bytes.resize(len, 0);
                    self.held.push_back((Action::Read, part));
                }
                (false, _) => {
                    if self.source.submit(Action::Read, part).is_err() {
                        return any;
                    }
                }
            }
            any = true;
            self.under_way += 1;
            self.next = (offset + len as u64).min(self.state.size_bytes);
        }
        any
    }

    /// The source has returned a part that is to be copied.
    fn on_read(&mut self, part: Part, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) if part.bytes.iter().all(|byte| *byte == 0) => {
                self.held.push_back((Action::Zero, part));
            }
            Ok(()) => self.held.push_back((Action::Write, part)),
            Err(error) => self.on_end(part.offset, Err(error)),
        }
    }

    /// The source has returned a part that is to be compared.
    fn on_expected(&mut self, part: Part, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.held.push_back((Action::Read, part)),
            Err(error) => self.on_end(part.offset, Err(error)),
        }
    }

    /// Passes parts on to the target. Returns whether it did.
    fn send(&mut self) -> bool {
        let mut any = false;
        while let Some((action, mut part)) = self.held.pop_front() {
            let (offset, len) = (part.offset, part.len as u64);
            let is_compared = action == Action::Read;
            if is_compared {
                self.expected.insert(offset, std::mem::take(&mut part.bytes));
            }
            match self.target.submit(action, part) {
                Ok(()) => any = true,
                Err(mut part) => {
                    if let Some(bytes) = self.expected.remove(&offset) {
                        part.bytes = bytes;
                    }
                    self.held.push_front((action, part));
                    return any;
                }
            }
            let len = len.min(self.state.size_bytes - offset);
            match action {
                Action::Write => self.counts.data_bytes += len,
                Action::Zero => self.counts.zero_bytes += len,
                Action::Read => self.counts.compared_bytes += len,
                Action::Flush => {}
            }
        }
        any
    }

    fn check(&mut self, part: &Part) -> Result<(), Error> {
        let expected = self.expected.remove(&part.offset).unwrap_or_default();
        let len = (self.state.size_bytes - part.offset).min(part.len as u64) as usize;
        let differs = |at: &usize| expected.get(*at) != part.bytes.get(*at);
        match (0..len).find(differs) {
            Some(at) => Err(Error::Local(format!(
                "source and target differ at byte {}",
                part.offset + at as u64
            ))),
            None => Ok(()),
        }
    }

    /// A part is done, or has failed: the first failure counts.
    fn on_end(&mut self, offset: u64, outcome: Result<(), Error>) {
        self.under_way -= 1;
        self.expected.remove(&offset);
        if let Err(error) = outcome {
            self.failure.get_or_insert(error);
        }
    }

    /// Nothing is under way: flushes the target, and saves how far it is.
    fn checkpoint(&mut self) -> Result<(), Error> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let mut flush = Some(Part { offset: 0, bytes: Vec::new(), len: 0 });
        loop {
            if let Some(part) = flush.take() {
                flush = self.target.submit(Action::Flush, part).err();
            }
            if let Some((_, outcome)) = self.target.next_done() {
                outcome?;
                break;
            }
            self.wait(false);
        }
        self.state.done_bytes = self.next;
        self.file.save(&self.state)
    }

    /// Moves both ends; sleeps if nothing has happened.
    fn wait(&mut self, any: bool) {
        let both = self.source.is_namespace() && self.target.is_namespace();
        let limit = match (any, both) {
            (true, _) => Duration::ZERO,
            (false, true) => SHORT_SLEEP,
            (false, false) => SLEEP,
        };
        self.source.wait(limit);
        self.target.wait(limit);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::super::volume::FileVolume;
    use super::*;

    fn engine(source: &Path, target: &Path, done_bytes: u64) -> Engine {
        let source = Volume::File(FileVolume::open(source, None).expect("there"));
        let size_bytes = source.size_bytes();
        let target = Volume::File(FileVolume::open(target, Some(size_bytes)).expect("created"));
        target.prepare().expect("room");
        let state =
            CopyState { source: String::new(), target: String::new(), size_bytes, done_bytes };
        Engine::new(source, target, state, StateFile(None))
    }

    #[test]
    fn copies_resume_and_compare_reports_the_first_differing_byte() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let part = u64::from(PART_BYTES);
        let mut bytes = vec![0x5A; 3 * part as usize + 7];
        bytes[part as usize..2 * part as usize].fill(0);
        std::fs::write(path("source"), &bytes).expect("written");
        std::fs::write(path("target"), vec![0x11; 5 * part as usize]).expect("written");
        let mut copy = engine(&path("source"), &path("target"), part);
        assert_eq!(copy.copy(|_| true), Ok(true));
        let expected = Counts { data_bytes: part + 7, zero_bytes: part, compared_bytes: 0 };
        assert_eq!((copy.counts, copy.state.done_bytes), (expected, 3 * part + 7));
        let found = std::fs::read(path("target")).expect("there");
        assert!(found[..part as usize].iter().all(|byte| *byte == 0x11), "it was done before");
        assert!(found[part as usize..] == bytes[part as usize..]);
        let differs = |at: u64| Err(Error::Local(format!("source and target differ at byte {at}")));
        assert_eq!(copy.compare(|_| true), differs(0));
        let target = std::fs::OpenOptions::new().write(true).open(path("target")).expect("there");
        target.write_all_at(&bytes[..part as usize], 0).expect("written");
        assert_eq!(copy.compare(|_| true), Ok(true));
        // A hole of the source is compared too, and nothing is written.
        target.write_all_at(&[1], part + 9).expect("written");
        let source = std::fs::File::create(path("source")).expect("there");
        source.set_len(bytes.len() as u64).expect("possible");
        source.write_all_at(&bytes[..part as usize], 0).expect("written");
        source.write_all_at(&bytes[2 * part as usize..], 2 * part).expect("written");
        let mut again = engine(&path("source"), &path("target"), 0);
        assert_eq!(again.compare(|_| true), differs(part + 9));
        assert_eq!(again.counts.zero_bytes, 0);
        target.write_all_at(&[0], part + 9).expect("written");
        target.write_all_at(&[1], 3 * part + 6).expect("written");
        assert_eq!(copy.compare(|_| true), differs(3 * part + 6));
    }

    #[test]
    fn an_interrupted_copy_has_written_its_done_bytes() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let bytes = vec![0x5A; 3 * DEPTH * PART_BYTES as usize];
        std::fs::write(path("source"), &bytes).expect("written");
        let mut copy = engine(&path("source"), &path("target"), 0);
        assert_eq!(copy.copy(|done_bytes| done_bytes == 0), Ok(false));
        let done = copy.state.done_bytes as usize;
        assert_eq!(done, DEPTH * PART_BYTES as usize);
        let found = std::fs::read(path("target")).expect("there");
        assert!(found[..done] == bytes[..done] && found[done..].iter().all(|byte| *byte == 0));
    }
}
