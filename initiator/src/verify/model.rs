//! `Model`: the contents that a namespace must have, derived from requests and their completions.
//!
//! Pure: no clock, no I/O, nothing of the target. The driver announces each operation before it is
//! submitted ([`Model::write`], [`Model::read`], [`Model::flush`]) and reports its end. Time is a
//! counter that each announcement and each end increments; the time of a write's submission is
//! also its sequence number in the stamps.
//!
//! # What is required of the namespace
//!
//! * *Each block is a regular register.* A read finds a value that was current or being written at
//!   some time between its submission and its end. Blocks are atomic; commands of several blocks
//!   are not.
//! * *A found value is retained.* When a read without a concurrent write finds one of several possible
//!   values, later reads find the same.
//! * *A failed write* leaves the old or the new value in each of its blocks. So does one whose
//!   association failed, but it may also be executed later, until [`Model::settle`].
//! * *A flush* (or a write with FUA) makes everything durable that was completed before its submission
//!   (or itself). After [`Model::crash`] a block has a value that is not older than its durable one.
//!   If writes of one block overlapped in time, "older" refers to their submission.
//!
//! # Memory
//!
//! A fixed part and [`Model::memory_bytes`] a block; in addition, the outstanding operations.

use std::collections::VecDeque;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::block_history::{NEVER, ReadBlock, Record, Registers, View};
use super::violation::{Expected, Violation};
use crate::verify::block_stamp::{self, Stamp};

/// Maximum number of blocks of a model.
pub const BLOCKS_LIMIT: u64 = 1 << 30;

/// The block range of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shape {
    /// The first block.
    pub first_lba: u64,
    /// Number of blocks: 1 to [`BLOCKS_LIMIT`], all below [`block_stamp::LBA_LIMIT`].
    pub blocks: u64,
    /// Bytes of a block: a multiple of 8, more than [`block_stamp::HEADER_BYTES`].
    pub block_bytes: u32,
    /// The run: a unique number.
    pub run: u64,
}

/// Kinds of writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Stamps the blocks: [`Model::fill`] creates the data.
    Data,
    /// Write Zeroes.
    Zeros,
    /// Deallocate. Unless they are `sure` to read as zeros afterwards, blocks may also be unchanged.
    Deallocate {
        /// The namespace guarantees zeros.
        sure: bool,
    },
}

/// An outstanding operation. It ends in exactly one call that takes it.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "an operation has an end: `done`, `failed`, `lost` or `check`"]
pub struct Op {
    slot: u32,
    start: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OperationKind {
    Write { change: Change, durable: bool },
    Read,
    Flush,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    kind: OperationKind,
    start: u64,
    first: usize,
    blocks: usize,
}

/// Counters of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Writes, also of zeros, that were completed with success.
    pub writes: u64,
    /// Flushes that were completed with success.
    pub flushes: u64,
    /// Blocks that were read and compared.
    pub blocks_checked: u64,
    /// Writes and flushes that were completed with an error.
    pub failed: u64,
    /// Writes and flushes whose association failed.
    pub lost: u64,
    /// Blocks with invalid content.
    pub violations: u64,
}

/// The expected contents of a range of blocks.
#[derive(Debug)]
pub struct Model {
    shape: Shape,
    clock: u64,
    flushed: u64,
    registers: Registers,
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
    /// Reads and flushes in the order of their submission; some may have ended.
    watchers: VecDeque<(u64, u32)>,
    /// Slots of writes that nobody waits for any more, but that may still be executed.
    lost: Vec<u32>,
    counts: Counts,
}

impl Model {
    /// Creates a model of blocks with unknown contents.
    ///
    /// # Panics
    /// If the shape violates the limits of its fields.
    pub fn new(shape: Shape) -> Model {
        assert!((1..=BLOCKS_LIMIT).contains(&shape.blocks), "{} blocks", shape.blocks);
        let end = shape.first_lba.checked_add(shape.blocks);
        assert!(end.is_some_and(|end| end <= block_stamp::LBA_LIMIT), "blocks beyond the last LBA");
        let good = shape.block_bytes as usize > block_stamp::HEADER_BYTES
            && shape.block_bytes.is_multiple_of(8);
        assert!(good, "blocks of {} bytes cannot be stamped", shape.block_bytes);
        Model {
            shape,
            clock: 0,
            flushed: 0,
            registers: Registers::new(shape.blocks as usize),
            pending: Vec::new(),
            free: Vec::new(),
            watchers: VecDeque::new(),
            lost: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Returns the block range.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the memory in use, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.registers.memory_bytes() + self.pending.capacity() * size_of::<Option<Pending>>()
    }

    /// A write is about to be submitted. `durable`: its completion implies that it is on stable
    /// storage (FUA, or the controller has no volatile cache).
    ///
    /// # Panics
    /// If `lbas` is empty or exceeds the model; the same applies to [`Model::read`].
    pub fn write(&mut self, client: u16, lbas: Range<u64>, change: Change, durable: bool) -> Op {
        let (first, blocks) = self.locate(&lbas);
        let start = self.tick();
        let view = self.view();
        for i in first..first + blocks {
            match change {
                Change::Data => {
                    let _ = self.registers.begin_data(i, start, client, view);
                }
                _ => self.registers.begin_zeros(i, start, view),
            }
        }
        self.begin(Pending { kind: OperationKind::Write { change, durable }, start, first, blocks })
    }

    /// A read is about to be submitted.
    pub fn read(&mut self, lbas: Range<u64>) -> Op {
        let (first, blocks) = self.locate(&lbas);
        let start = self.tick();
        let op = self.begin(Pending { kind: OperationKind::Read, start, first, blocks });
        self.watch(&op);
        op
    }

    /// A flush is about to be submitted.
    pub fn flush(&mut self) -> Op {
        let start = self.tick();
        let op = self.begin(Pending { kind: OperationKind::Flush, start, first: 0, blocks: 0 });
        self.watch(&op);
        op
    }

    /// Creates the data of a write of [`Change::Data`].
    ///
    /// # Panics
    /// If the length of `data` is not that of the write.
    pub fn fill(&self, op: &Op, data: &mut [u8]) {
        let pending = self.pending(op);
        let block_bytes = self.shape.block_bytes as usize;
        assert_eq!(data.len(), pending.blocks * block_bytes, "the data of a write");
        for (n, block) in data.chunks_exact_mut(block_bytes).enumerate() {
            let i = pending.first + n;
            let lba = self.shape.first_lba + i as u64;
            if let Some(stamp) = self.registers.stamp(i, op.start, self.shape.run, lba) {
                stamp.fill(block);
            }
        }
    }

    /// A write or a flush was completed with success.
    pub fn done(&mut self, op: Op) {
        let pending = self.end(op);
        match pending.kind {
            OperationKind::Write { change, durable } => {
                self.counts.writes += 1;
                let sure = change != Change::Deallocate { sure: false };
                self.end_write(pending, sure, durable);
            }
            OperationKind::Flush => {
                self.counts.flushes += 1;
                self.flushed = self.flushed.max(pending.start);
            }
            OperationKind::Read => {}
        }
    }

    /// An operation was completed with an error.
    pub fn failed(&mut self, op: Op) {
        let pending = self.end(op);
        self.counts.failed += u64::from(pending.kind != OperationKind::Read);
        if let OperationKind::Write { .. } = pending.kind {
            self.end_write(pending, false, false);
        }
    }

    /// The association failed before a completion. A write may be done, or not, or still be executed later.
    pub fn lost(&mut self, op: Op) {
        if let OperationKind::Write { .. } = self.pending(&op).kind {
            self.counts.lost += 1;
            self.lost.push(op.slot);
        } else {
            let pending = self.end(op);
            self.counts.lost += u64::from(pending.kind == OperationKind::Flush);
        }
    }

    /// From now on no lost write is executed any more: the other end of its association is known
    /// to have ended.
    pub fn settle(&mut self) {
        while let Some(slot) = self.lost.pop() {
            if let Some(pending) = self.release(slot) {
                let _ = self.tick();
                self.end_write(pending, false, false);
            }
        }
    }

    /// The target lost its power: of each block, everything that was not durable may be lost. All
    /// outstanding operations were passed to [`Model::lost`]; they are not executed any more.
    pub fn crash(&mut self) {
        self.settle();
        let _ = self.tick();
        let view = self.view();
        for i in 0..self.shape.blocks as usize {
            self.registers.crash(i, view);
        }
    }

    /// A read was completed with success and returned `data`: returns every block that has an
    /// invalid content.
    ///
    /// # Panics
    /// If the length of `data` is not that of the read.
    #[must_use = "what a read has found must be looked at"]
    pub fn check(&mut self, op: Op, data: &[u8]) -> Vec<Violation> {
        let pending = self.end(op);
        let block_bytes = self.shape.block_bytes as usize;
        assert_eq!(data.len(), pending.blocks * block_bytes, "the data of a read");
        let mut violations = Vec::new();
        for (n, block) in data.chunks_exact(block_bytes).enumerate() {
            let i = pending.first + n;
            let seen = ReadBlock {
                run: self.shape.run,
                lba: self.shape.first_lba + i as u64,
                block,
                content: Stamp::read(block, self.shape.run),
                since: pending.start,
            };
            self.counts.blocks_checked += 1;
            if !self.registers.judge(i, &seen, self.view()) {
                self.counts.violations += 1;
                violations.push(self.violation(i, &seen));
            }
        }
        violations
    }

    /// Returns the possible contents of a block now: for reports.
    ///
    /// # Panics
    /// If `lba` is not in this model.
    pub fn expected(&self, lba: u64) -> Vec<Expected> {
        let (i, _) = self.locate(&(lba..lba + 1));
        self.expected_since(i, self.clock)
    }

    fn expected_since(&self, i: usize, since: u64) -> Vec<Expected> {
        let floor = self.registers.floor(i);
        let possible = self.registers.possible(i, since).into_iter();
        possible.map(|(value, standing)| Expected::new(value, standing, floor)).collect()
    }

    fn violation(&self, i: usize, seen: &ReadBlock<'_>) -> Violation {
        let expected = self.expected_since(i, seen.since);
        Violation::new(seen, expected, self.clock)
    }

    fn end_write(&mut self, pending: Pending, sure: bool, durable: bool) {
        let view = self.view();
        for i in pending.first..pending.first + pending.blocks {
            self.registers.end(i, pending.start, sure, durable, view);
        }
    }

    fn begin(&mut self, pending: Pending) -> Op {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            (self.pending.len() - 1) as u32
        });
        self.pending[slot as usize] = Some(pending);
        Op { slot, start: pending.start }
    }

    fn watch(&mut self, op: &Op) {
        self.watchers.push_back((op.start, op.slot));
    }

    fn pending(&self, op: &Op) -> Pending {
        let pending = self.pending.get(op.slot as usize).copied().flatten();
        pending.filter(|it| it.start == op.start).expect("an operation of this model")
    }

    fn end(&mut self, op: Op) -> Pending {
        let pending = self.pending(&op);
        let _ = self.release(op.slot);
        let _ = self.tick();
        pending
    }

    fn release(&mut self, slot: u32) -> Option<Pending> {
        let pending = self.pending[slot as usize].take()?;
        self.free.push(slot);
        // Watchers at the front that have ended are not needed any more.
        while let Some(&(start, slot)) = self.watchers.front() {
            let running = self.pending[slot as usize].is_some_and(|it| it.start == start);
            if running {
                break;
            }
            let _ = self.watchers.pop_front();
        }
        Some(pending)
    }

    fn locate(&self, lbas: &Range<u64>) -> (usize, usize) {
        let first = lbas.start.checked_sub(self.shape.first_lba);
        let inside = first.is_some_and(|first| {
            lbas.start < lbas.end && first + (lbas.end - lbas.start) <= self.shape.blocks
        });
        assert!(inside, "blocks {lbas:?} of a model of {:?}", self.shape);
        (first.unwrap_or(0) as usize, (lbas.end - lbas.start) as usize)
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn view(&self) -> View {
        let horizon = self.watchers.front().map_or(NEVER, |&(start, _)| start);
        View { flushed: self.flushed, horizon, now: self.clock }
    }
}

/// Persistence.
impl Model {
    /// Returns the logical time.
    pub(super) fn clock(&self) -> u64 {
        self.clock
    }

    /// Returns one block, as if all operations were settled.
    pub(super) fn record(&mut self, i: usize) -> Record {
        self.registers.save(i, self.view())
    }

    /// Restores the saved state.
    pub(super) fn restore(&mut self, clock: u64, records: impl Iterator<Item = (usize, Record)>) {
        self.clock = clock;
        for (i, record) in records {
            self.registers.restore(i, &record);
        }
    }
}

#[cfg(test)]
mod tests;
