//! History of a block: its possible values, and which of them may reappear after a crash.
//!
//! A block is a register. Each write of it is an [`Entry`] with three times of a logical clock:
//! its submission, its end (completed, or lost), and when it was certainly overwritten. A read may
//! find every value that was not certainly overwritten when the read was submitted.
//!
//! Entries of a block form a list, newest first. They are removed when no outstanding read or
//! flush can refer to them, so an idle block has one.

use serde::{Deserialize, Serialize};

use crate::verify::block_stamp::{Content, Stamp};

const NIL: u32 = u32::MAX;
/// A time in the indefinite future.
pub(super) const NEVER: u64 = u64::MAX;

/// A possible value of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Value {
    /// The content before the run. Unknown at first (0); once it was read, it does not change.
    Before {
        /// A hash of the content, or 0.
        hash: u64,
    },
    /// A stamp.
    Data {
        /// The write; also the time of its submission.
        sequence: u64,
        /// The client that wrote it.
        client: u16,
        /// Number of the write of this block.
        generation: u32,
    },
    /// Zeros, by Write Zeroes or Deallocate.
    Zeros {
        /// The command; also the time of its submission.
        sequence: u64,
    },
    /// After a crash: any value of the run not older than `from`, or zeros if there were any
    /// since. 0: also the content before the run.
    Survivor {
        /// The oldest possible write.
        from: u64,
    },
}

impl Value {
    /// Returns when it was submitted.
    pub(super) fn start(&self) -> u64 {
        match *self {
            Value::Before { .. } => 0,
            Value::Data { sequence, .. } | Value::Zeros { sequence } => sequence,
            Value::Survivor { from } => from,
        }
    }
}

/// State of a candidate value of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CandidateState {
    /// It was certainly the content, unless that was another value of the list.
    Settled,
    /// Its write is outstanding, or was when the association ended.
    InFlight,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    value: Value,
    end: u64,
    gone: u64,
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    head: u32,
    generation: u32,
    /// Older values do not reappear after a crash.
    floor: u64,
    /// The last command that may have written zeros; 0 for none.
    zeroed: u64,
}

/// State of the whole model: the last completed flush, and the entries still needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    /// The submission of the latest completed flush; 0 for none.
    pub(super) flushed: u64,
    /// The submission of the oldest outstanding read or flush, or `NEVER`.
    pub(super) horizon: u64,
    pub(super) now: u64,
}

/// Content of one block returned by a read.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadBlock<'a> {
    pub(super) run: u64,
    pub(super) lba: u64,
    pub(super) block: &'a [u8],
    pub(super) content: Content,
    /// When the read was submitted.
    pub(super) since: u64,
}

/// One block as it is saved and restored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) generation: u32,
    pub(super) floor: u64,
    pub(super) zeroed: u64,
    /// Values and the times of their end.
    pub(super) values: Vec<(Value, u64)>,
}

/// The blocks of a range.
#[derive(Debug)]
pub(super) struct Registers {
    cells: Vec<Cell>,
    entries: Vec<Entry>,
    free: Vec<u32>,
}

/// The record of a block that was never accessed.
impl Default for Record {
    fn default() -> Record {
        let values = vec![(Value::Before { hash: 0 }, 0)];
        Record { generation: 0, floor: 0, zeroed: 0, values }
    }
}

impl Registers {
    pub(super) fn new(blocks: usize) -> Registers {
        let entry = Entry { value: Value::Before { hash: 0 }, end: 0, gone: NEVER, next: NIL };
        let cell = |head| Cell { head, generation: 0, floor: 0, zeroed: 0 };
        Registers {
            cells: (0..blocks as u32).map(cell).collect(),
            entries: vec![entry; blocks],
            free: Vec::new(),
        }
    }

    /// Returns the memory in use, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        self.cells.capacity() * size_of::<Cell>()
            + self.entries.capacity() * size_of::<Entry>()
            + self.free.capacity() * size_of::<u32>()
    }

    /// A write of data is submitted; returns the generation of the block.
    pub(super) fn begin_data(&mut self, i: usize, sequence: u64, client: u16, view: View) -> u32 {
        self.tidy(i, view);
        let generation = self.cells[i].generation.wrapping_add(1);
        self.cells[i].generation = generation;
        self.push(i, Value::Data { sequence, client, generation }, NEVER);
        generation
    }

    /// A write of zeros is submitted.
    pub(super) fn begin_zeros(&mut self, i: usize, sequence: u64, view: View) {
        self.tidy(i, view);
        self.cells[i].zeroed = sequence;
        self.push(i, Value::Zeros { sequence }, NEVER);
    }

    /// The write submitted at `start` has ended. `sure`: it was executed, so values that ended
    /// before its submission are overwritten. `durable`: it is on stable storage.
    pub(super) fn end(&mut self, i: usize, start: u64, sure: bool, durable: bool, view: View) {
        let Some(mine) = self.list(i).find(|&at| {
            let entry = &self.entries[at as usize];
            entry.end == NEVER && entry.value.start() == start
        }) else {
            return;
        };
        self.entries[mine as usize].end = view.now;
        if sure {
            let mut at = self.cells[i].head;
            while at != NIL {
                let entry = &mut self.entries[at as usize];
                if entry.end < start && entry.gone == NEVER {
                    entry.gone = view.now;
                }
                at = entry.next;
            }
        }
        if durable {
            self.raise_floor(i, view.now);
        }
        self.tidy(i, view);
    }

    /// Returns the stamp of the write submitted at `sequence`.
    pub(super) fn stamp(&self, i: usize, sequence: u64, run: u64, lba: u64) -> Option<Stamp> {
        self.list(i).find_map(|at| match self.entries[at as usize].value {
            Value::Data { sequence: it, client, generation } if it == sequence => {
                Some(Stamp { run, sequence, lba, client, generation })
            }
            _ => None,
        })
    }

    /// Whether the block may contain the value that a read has found. If so, and no write was
    /// outstanding, the block contains this value from now on.
    pub(super) fn judge(&mut self, i: usize, seen: &ReadBlock<'_>, view: View) -> bool {
        let possible = |at: &u32| self.entries[*at as usize].gone > seen.since;
        let fitting = |at: &u32| self.fits(i, &self.entries[*at as usize], seen, view.now);
        let Some(found) = self.list(i).filter(possible).find(fitting) else { return false };
        let quiet =
            self.list(i).filter(possible).all(|at| self.entries[at as usize].end < seen.since);
        if quiet {
            self.pin(i, found, seen, view);
        }
        true
    }

    /// Returns the possible contents of the block, for the user: newest first.
    pub(super) fn possible(&self, i: usize, since: u64) -> Vec<(Value, CandidateState)> {
        let entries = self.list(i).map(|at| &self.entries[at as usize]);
        let standing =
            |end| if end == NEVER { CandidateState::InFlight } else { CandidateState::Settled };
        entries
            .filter(|entry| entry.gone > since)
            .map(|entry| (entry.value, standing(entry.end)))
            .collect()
    }

    /// Returns the oldest write that may reappear after a crash.
    pub(super) fn floor(&self, i: usize) -> u64 {
        self.cells[i].floor
    }

    /// The target's machine has lost data that were not durable, or part of them.
    pub(super) fn crash(&mut self, i: usize, view: View) {
        self.tidy(i, view);
        let from = self.cells[i].floor;
        let settled = self.list(i).all(|at| {
            let entry = &self.entries[at as usize];
            entry.gone != NEVER || (entry.end != NEVER && entry.value.start() == from)
        });
        if settled {
            return;
        }
        let mut at = self.cells[i].head;
        while at != NIL {
            let entry = &mut self.entries[at as usize];
            // Outstanding writes may also be executed after the crash.
            if entry.end != NEVER && entry.gone == NEVER {
                entry.gone = view.now;
            }
            at = entry.next;
        }
        self.push(i, Value::Survivor { from }, view.now);
        self.tidy(i, view);
    }

    pub(super) fn save(&mut self, i: usize, view: View) -> Record {
        self.tidy(i, view);
        let Cell { generation, floor, zeroed, .. } = self.cells[i];
        let entries = self.list(i).map(|at| self.entries[at as usize]);
        let alive = entries.filter(|entry| entry.gone == NEVER);
        let values = alive.map(|entry| (entry.value, entry.end.min(view.now))).collect();
        Record { generation, floor, zeroed, values }
    }

    pub(super) fn restore(&mut self, i: usize, record: &Record) {
        while self.cells[i].head != NIL {
            let head = self.cells[i].head;
            self.cells[i].head = self.entries[head as usize].next;
            self.free.push(head);
        }
        for &(value, end) in record.values.iter().rev() {
            self.push(i, value, end);
        }
        let cell = &mut self.cells[i];
        (cell.generation, cell.floor, cell.zeroed) =
            (record.generation, record.floor, record.zeroed);
    }

    /// Applies the latest flush, then removes entries that are not needed any more. In this order:
    /// the flush may concern removed entries.
    fn tidy(&mut self, i: usize, view: View) {
        if view.flushed > self.cells[i].floor {
            self.raise_floor(i, view.flushed);
        }
        let mut before = NIL;
        let mut at = self.cells[i].head;
        while at != NIL {
            let Entry { gone, next, .. } = self.entries[at as usize];
            if gone < view.horizon && gone != NEVER {
                match before {
                    NIL => self.cells[i].head = next,
                    before => self.entries[before as usize].next = next,
                }
                self.free.push(at);
            } else {
                before = at;
            }
            at = next;
        }
    }

    /// Everything that was completed by `moment` is durable: values older than those possible then
    /// do not reappear.
    fn raise_floor(&mut self, i: usize, moment: u64) {
        let entries = self.list(i).map(|at| &self.entries[at as usize]);
        let then = entries.filter(|entry| entry.value.start() < moment && entry.gone > moment);
        if let Some(oldest) = then.map(|entry| entry.value.start()).min() {
            self.cells[i].floor = self.cells[i].floor.max(oldest);
        }
    }

    fn fits(&self, i: usize, entry: &Entry, seen: &ReadBlock<'_>, now: u64) -> bool {
        match (entry.value, seen.content) {
            (Value::Data { sequence, client, generation }, Content::Whole(stamp)) => {
                let (run, lba) = (seen.run, seen.lba);
                stamp == Stamp { run, sequence, lba, client, generation }
            }
            (Value::Zeros { .. }, Content::Zeros) => true,
            (Value::Before { hash: 0 }, _) => is_of_before(seen, now),
            (Value::Before { hash }, _) => hash == hash_of(seen.block),
            (Value::Survivor { from }, Content::Whole(stamp)) if stamp.run == seen.run => {
                stamp.lba == seen.lba && stamp.sequence >= from && stamp.sequence <= entry.end
            }
            (Value::Survivor { from }, Content::Zeros) => {
                let zeroed = self.cells[i].zeroed;
                from == 0 || zeroed >= from
            }
            (Value::Survivor { from: 0 }, _) => is_of_before(seen, now),
            _ => false,
        }
    }

    /// Sets the content of the block to the found value, and excludes all other values.
    fn pin(&mut self, i: usize, found: u32, seen: &ReadBlock<'_>, view: View) {
        let mut at = self.cells[i].head;
        while at != NIL {
            let entry = &mut self.entries[at as usize];
            if at != found && entry.gone == NEVER {
                entry.gone = view.now;
            }
            at = entry.next;
        }
        let zeroed = self.cells[i].zeroed;
        let entry = &mut self.entries[found as usize];
        entry.value = match (entry.value, seen.content) {
            (Value::Survivor { .. }, Content::Whole(stamp)) if stamp.run == seen.run => {
                let Stamp { sequence, client, generation, .. } = stamp;
                Value::Data { sequence, client, generation }
            }
            (Value::Survivor { from }, Content::Zeros) if zeroed >= from && zeroed != 0 => {
                Value::Zeros { sequence: zeroed }
            }
            (Value::Before { hash: 0 } | Value::Survivor { .. }, _) => {
                Value::Before { hash: hash_of(seen.block) }
            }
            (value, _) => value,
        };
        self.tidy(i, view);
    }

    fn push(&mut self, i: usize, value: Value, end: u64) {
        let entry = Entry { value, end, gone: NEVER, next: self.cells[i].head };
        let at = match self.free.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                if self.entries.len() == self.entries.capacity() {
                    // Grows by an eighth rather than by doubling: most blocks never need a second entry.
                    self.entries.reserve_exact((self.entries.len() / 8).max(1024));
                }
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.cells[i].head = at;
    }

    fn list(&self, i: usize) -> impl Iterator<Item = u32> {
        let there = |at: u32| (at != NIL).then_some(at);
        std::iter::successors(there(self.cells[i].head), move |&at| {
            there(self.entries[at as usize].next)
        })
    }
}

/// Whether a content may be older than the run: any without a stamp of the run.
fn is_of_before(seen: &ReadBlock<'_>, now: u64) -> bool {
    match seen.content {
        Content::Whole(stamp) => stamp.run != seen.run,
        Content::Torn(tear) => tear.header.run != seen.run,
        Content::Foreign { piece } => piece.is_none_or(|piece| piece.sequence > now),
        Content::Zeros => true,
    }
}

/// Never 0.
fn hash_of(block: &[u8]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for bytes in block.chunks_exact(8) {
        let word = u64::from_le_bytes([
            bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
        ]);
        hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(29);
    }
    hash | 1
}
