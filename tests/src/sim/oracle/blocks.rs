//! Oracle for block contents: every block is a register, observed only through completions of
//! hosts. Nothing here depends on the implementation of the target.
//!
//! A write takes effect at one moment between its command and its response; so does the observation
//! of a read. Nobody sees these moments, but the moments that hosts see bound them, and so the
//! values that a block may have. Every written value is unique (see `sim/block_stamp.rs`), which
//! makes this simple:
//!
//! * A completed write leaves no value that had taken effect before the write began.
//! * A write that failed, or whose association ended, may have taken effect or not. One without a
//!   response may still do so later, until it is *fenced*: until the target is known to have no
//!   command of that association.
//! * Some time after the end of an association the target knows of it, and a change that is still
//!   at a device is *ordered*: one of the same block that begins from then on takes effect after
//!   it. It may still be late, but not after a completed write that began then.
//! * The value returned by a read must have been possible at some moment of the read. It is then
//!   known to have taken effect, and to be younger than all that had taken effect before the read
//!   began.
//! * A power failure leaves any value that a block has had since the last durable one. A write is
//!   durable when it has completed with FUA, or completed before a flush began that succeeded.
//!
//! Deallocated blocks may read as zeros or be unchanged. Zeros are not unique; a read of zeros
//! proves only the minimum.
//!
//! A block that was made unreadable has a value as well, which no read returns, and which is as
//! durable as its command specifies. A write replaces it with its response at the latest: a read
//! that began before the block was unreadable may return data of that write earlier. A copy writes
//! one of the values that its source had at some moment between its command and its response; a
//! read determines which.

use super::copy;
use std::fmt::Write as _;

/// Counter of the events seen by hosts: a command sent, a response received. No two are
/// simultaneous.
pub type Moment = u64;

pub(super) const NEVER: Moment = Moment::MAX;

/// A possible content of a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Value {
    /// Initial, deallocated or zeroed.
    Zeros,
    /// Marked by Write Uncorrectable.
    Unreadable,
    /// Data of this write.
    Write(u32),
    /// Data of this write to another block, copied from there.
    Moved(u32, u32),
}

/// Size of the blocks of the model, and of all spans: blocks of hosts consist of one or eight of
/// them, and may change their size.
pub const SECTOR_BYTES: u32 = 512;

/// Blocks of a namespace, of [`SECTOR_BYTES`] each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Index of the namespace.
    pub space: usize,
    /// First block.
    pub lba: u32,
    /// Number of blocks.
    pub blocks: u32,
}

/// Result of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Completed with success. Durable if that was requested.
    Done {
        /// With Force Unit Access.
        fua: bool,
    },
    /// Failed, or advisory: it has ended and may have changed some blocks.
    Doubtful,
    /// Its association has ended.
    Lost,
}

/// Invalid data.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

/// A value that a block has, had, or may get.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// The command that writes it; 0 for the initial value.
    pub(super) op: u32,
    pub(super) held: PossibleValue,
    pub(super) began: Moment,
    /// The time by which it has taken effect, if ever. `NEVER` while it may still do so.
    pub(super) effect_by: Moment,
    /// Without response and not fenced.
    pub(super) open: bool,
    /// Commands that begin after this take effect after it.
    pub(super) ordered: Moment,
    /// When it is known to be overwritten.
    pub(super) gone: Moment,
    /// When a completed write is known to have replaced it.
    pub(super) buried: Moment,
    /// One of the possible values after a power failure, of which exactly one is real.
    pub(super) left: bool,
    /// When a completed write had replaced it that was lost with its device, unless a flush that
    /// began later succeeds.
    pub(super) revived: Moment,
}

/// Value of an entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PossibleValue {
    One(Value),
    /// One of these: it was copied.
    Any(Vec<Value>),
}

#[derive(Debug)]
pub(super) struct Space {
    pub(super) blocks: Vec<Vec<Entry>>,
    /// Everything completed before this is durable.
    pub(super) flushed: Moment,
    /// When its device was last removed: earlier reads are no evidence any more, and earlier writes
    /// may be lost.
    pub(super) lost: Moment,
}

/// All blocks of all namespaces.
#[derive(Debug)]
pub struct Model {
    pub(super) spaces: Vec<Space>,
    now: Moment,
    /// When the target last crashed: earlier commands are no evidence any more.
    crashed: Moment,
    /// Outstanding reads.
    reads: Vec<Moment>,
    /// Copies that may still take effect.
    pub(super) copies: Vec<copy::Copying>,
}

impl Model {
    /// Namespaces of these numbers of blocks, all zeros.
    pub fn new(blocks: &[u32]) -> Model {
        let zeros = Entry {
            op: 0,
            held: PossibleValue::One(Value::Zeros),
            began: 0,
            effect_by: 0,
            open: false,
            ordered: 0,
            gone: NEVER,
            buried: NEVER,
            left: true,
            revived: NEVER,
        };
        let space = |count: &u32| Space {
            blocks: vec![vec![zeros.clone()]; *count as usize],
            flushed: 0,
            lost: 0,
        };
        let spaces = blocks.iter().map(space).collect();
        Model { spaces, now: 1, crashed: 0, reads: Vec::new(), copies: Vec::new() }
    }

    /// A command that writes nothing is sent.
    pub fn begin(&mut self) -> Moment {
        self.now += 1;
        self.now
    }

    /// Maximum number of commands that may still change one of these blocks.
    pub fn crowd(&self, span: Span) -> usize {
        let open = |entries: &Vec<Entry>| entries.iter().filter(|entry| entry.open).count();
        self.blocks(span).iter().map(open).max().unwrap_or(0)
    }

    /// A guess of the contents of these blocks.
    pub fn guess(&self, span: Span) -> Vec<Value> {
        let last = |entries: &Vec<Entry>| {
            let mut over = entries.iter().filter(|entry| !entry.open && entry.gone == NEVER);
            over.next_back().and_then(|entry| entry.held.first()).unwrap_or(Value::Zeros)
        };
        self.blocks(span).iter().map(last).collect()
    }

    /// A command is sent that writes `value` to these blocks. `op` is not 0 and unique.
    pub fn write(&mut self, op: u32, span: Span, value: Value) -> Moment {
        let began = self.begin();
        for entries in self.blocks_mut(span) {
            entries.push(Entry::new(op, PossibleValue::One(value), began));
        }
        for lba in span.lba..span.lba + span.blocks {
            self.spread(span.space, lba, &[value]);
        }
        began
    }

    /// Such a command has ended.
    pub fn wrote(&mut self, op: u32, span: Span, ending: Ending) {
        let now = self.begin();
        if ending == Ending::Lost {
            return;
        }
        self.end_copy(op);
        let oldest = self.oldest_read();
        let Space { flushed, lost, .. } = self.spaces[span.space];
        for entries in self.blocks_mut(span) {
            let Some(own) = entries.iter_mut().find(|entry| entry.op == op && entry.open) else {
                // The target has crashed since it wrote this.
                continue;
            };
            own.open = false;
            own.effect_by = own.effect_by.min(now);
            let began = own.began;
            if ending == (Ending::Done { fua: false }) && began < lost {
                // It was executed before the removal, and may be lost, or afterwards.
                for older in entries.iter_mut().filter(|older| older.precedes(began)) {
                    older.revived = older.revived.min(now);
                }
            } else if let Ending::Done { fua } = ending {
                for older in entries.iter_mut().filter(|older| older.precedes(began)) {
                    older.gone = older.gone.min(now);
                    older.buried = if fua { 0 } else { older.buried.min(now) };
                }
                entries.retain(|e| {
                    e.open || e.gone == NEVER || e.gone >= oldest || e.buried > flushed
                });
            }
        }
    }

    /// The target knows that the association of a lost command has ended.
    pub fn order(&mut self, op: u32, span: Span) {
        let now = self.begin();
        for entries in self.blocks_mut(span) {
            let own = entries.iter_mut().find(|entry| entry.op == op && entry.open);
            own.into_iter().for_each(|own| own.ordered = own.ordered.min(now));
        }
    }

    /// Whether all of these values, which were just read, are left by a power failure.
    pub fn is_left(&self, span: Span, found: &[Value]) -> bool {
        self.blocks(span).iter().zip(found).all(|(entries, value)| {
            let mut there = entries.iter().filter(|entry| entry.held.may_be(*value));
            there.any(|entry| entry.left)
        })
    }

    /// The target has nothing of a lost command any more.
    pub fn fence(&mut self, op: u32, span: Span) {
        let now = self.begin();
        self.end_copy(op);
        for entries in self.blocks_mut(span) {
            if let Some(own) = entries.iter_mut().find(|entry| entry.op == op && entry.open) {
                own.open = false;
                own.effect_by = own.effect_by.min(now);
            }
        }
    }

    /// A read is sent.
    pub fn begin_read(&mut self) -> Moment {
        let began = self.begin();
        self.reads.push(began);
        began
    }

    /// When the oldest outstanding read was sent.
    pub(super) fn oldest_read(&self) -> Moment {
        self.reads.iter().copied().min().unwrap_or(NEVER)
    }

    /// A read has ended without data.
    pub fn forget_read(&mut self, began: Moment) {
        self.reads.retain(|read| *read != began);
    }

    /// A read sent at `began` returned these values, one for each block of the span.
    ///
    /// # Errors
    /// One of them was not possible.
    pub fn read(
        &mut self,
        began: Moment,
        span: Span,
        found: impl Iterator<Item = Value>,
    ) -> Result<(), Violation> {
        let now = self.begin();
        self.forget_read(began);
        if began < self.crashed.max(self.spaces[span.space].lost) {
            return Ok(());
        }
        for ((entries, lba), value) in self.blocks_mut(span).iter_mut().zip(span.lba..).zip(found) {
            if !look(entries, began, now, value) {
                let nsid = span.space + 1;
                let mut text = format!(
                    "a read of namespace {nsid} between {began} and {now} found in block {lba} \
                     {}, which cannot be; known of the block:",
                    name(value)
                );
                entries.iter().for_each(|entry| describe(entry, &mut text));
                return Err(Violation(text));
            }
        }
        Ok(())
    }

    /// A flush sent at `began` has completed with success.
    pub fn flushed(&mut self, began: Moment, space: usize) {
        self.begin();
        if began >= self.crashed {
            self.spaces[space].flushed = self.spaces[space].flushed.max(began);
            self.confirm(space, began);
        }
    }

    /// The target has crashed: commands in progress have no further effect. With `power` all that
    /// is not durable may be lost.
    pub fn crash(&mut self, power: bool) {
        let now = self.begin();
        self.crashed = now;
        self.copies.clear();
        for space in &mut self.spaces {
            let flushed = space.flushed;
            for entries in &mut space.blocks {
                if power {
                    entries.retain(|entry| entry.buried > flushed);
                }
                for entry in entries.iter_mut() {
                    entry.open = false;
                    entry.effect_by = entry.effect_by.min(now);
                    if power {
                        (entry.effect_by, entry.left) = (now, true);
                        (entry.gone, entry.buried, entry.revived) = (NEVER, NEVER, NEVER);
                    }
                }
                if power {
                    let mut zeros = 0;
                    entries.retain(|entry| {
                        let is_zeros = entry.held == PossibleValue::One(Value::Zeros);
                        zeros += usize::from(is_zeros);
                        !is_zeros || zeros == 1
                    });
                }
            }
        }
    }

    /// A command sent at `began` failed because one of these blocks cannot be read.
    ///
    /// # Errors
    /// All of them were readable, all the time.
    pub fn unreadable(&mut self, began: Moment, spans: &[Span]) -> Result<(), Violation> {
        let now = self.begin();
        self.forget_read(began);
        if began < self.crashed {
            return Ok(());
        }
        let fits = |e: &Entry| e.held == PossibleValue::One(Value::Unreadable) && e.gone >= began;
        let mut places = Vec::new();
        for span in spans {
            let lbas = (span.lba..).zip(self.blocks(*span));
            let some = lbas.filter(|(_, entries)| entries.iter().any(fits));
            places.extend(some.map(|(lba, _)| Span { lba, blocks: 1, ..*span }));
        }
        match places[..] {
            [] => Err(Violation("it was told of an unreadable block, and there was none".into())),
            [place] => {
                look(&mut self.blocks_mut(place)[0], began, now, Value::Unreadable);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn blocks(&self, span: Span) -> &[Vec<Entry>] {
        &self.spaces[span.space].blocks[span.lba as usize..(span.lba + span.blocks) as usize]
    }

    pub(super) fn blocks_mut(&mut self, span: Span) -> &mut [Vec<Entry>] {
        &mut self.spaces[span.space].blocks[span.lba as usize..(span.lba + span.blocks) as usize]
    }
}

impl Entry {
    /// For a command that is sent now.
    pub(super) fn new(op: u32, held: PossibleValue, began: Moment) -> Entry {
        let (effect_by, ordered, gone, buried, revived) = (NEVER, NEVER, NEVER, NEVER, NEVER);
        let (open, left) = (true, false);
        Entry { op, held, began, effect_by, open, ordered, gone, buried, left, revived }
    }

    /// Whether it takes effect, if ever, before a completed write that began then.
    fn precedes(&self, began: Moment) -> bool {
        self.effect_by.min(self.ordered) < began
    }
}

impl PossibleValue {
    fn may_be(&self, value: Value) -> bool {
        match self {
            PossibleValue::One(one) => *one == value,
            PossibleValue::Any(some) => some.contains(&value),
        }
    }

    fn first(&self) -> Option<Value> {
        match self {
            PossibleValue::One(one) => Some(*one),
            PossibleValue::Any(some) => some.first().copied(),
        }
    }

    fn name(&self) -> String {
        match self {
            PossibleValue::One(one) => name(*one),
            PossibleValue::Any(some) => {
                let names: Vec<String> = some.iter().map(|value| name(*value)).collect();
                format!("one of [{}]", names.join(", "))
            }
        }
    }
}

/// Takes a value that was read; returns false if it was not possible.
fn look(entries: &mut [Entry], began: Moment, now: Moment, value: Value) -> bool {
    let fits = |entry: &Entry| entry.held.may_be(value) && entry.gone >= began;
    let mut matching = entries.iter().enumerate().filter(|(_, entry)| fits(entry));
    let Some((at, _)) = matching.next() else { return false };
    if matching.next().is_some() {
        // With several zeros, only earlier values other than zeros are known to be older.
        for entry in entries.iter_mut().filter(|e| !e.held.may_be(value) && e.effect_by < began) {
            entry.gone = entry.gone.min(now);
        }
        return true;
    }
    entries[at].held = PossibleValue::One(value);
    let own = entries[at].began;
    // Marks stay until the write has completed, and a read that is older than they are does not see
    // them.
    let hides = |e: &Entry| e.held == PossibleValue::One(Value::Unreadable) && began < e.effect_by;
    let is_hidden = entries.iter().any(|e| e.effect_by < own && hides(e));
    if entries[at].effect_by == NEVER && !is_hidden {
        entries[at].effect_by = now;
        for older in entries.iter_mut().filter(|older| older.effect_by < own) {
            older.gone = older.gone.min(now);
        }
    }
    let left = entries[at].left;
    for (_, other) in entries.iter_mut().enumerate().filter(|(other, _)| *other != at) {
        if other.effect_by < began {
            other.gone = other.gone.min(now);
        }
        if left && other.left {
            (other.gone, other.buried) = (other.gone.min(now), 0);
        }
    }
    true
}

fn name(value: Value) -> String {
    match value {
        Value::Zeros => "zeros".to_owned(),
        Value::Unreadable => "nothing that can be read".to_owned(),
        Value::Write(write) => format!("what write {write} left"),
        Value::Moved(write, lba) => format!("what write {write} left in block {lba}"),
    }
}

fn describe(entry: &Entry, text: &mut String) {
    let moment = |at: Moment| if at == NEVER { "?".to_owned() } else { at.to_string() };
    let _ = write!(
        text,
        "\n    {:24} by command {:5}: began {}, in effect by {}, replaced by {}, for good by {}{}{}",
        entry.held.name(),
        entry.op,
        entry.began,
        moment(entry.effect_by),
        moment(entry.gone),
        moment(entry.buried),
        if entry.open { ", open" } else { "" },
        if entry.left { ", left by a power failure" } else { "" },
    );
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::blocks::*;

    const B: Span = Span { space: 0, lba: 3, blocks: 1 };
    const DONE: Ending = Ending::Done { fua: false };

    fn read(model: &mut Model, value: Value) -> bool {
        let began = model.begin_read();
        model.read(began, B, std::iter::once(value)).is_ok()
    }

    fn w(op: u32) -> Value {
        Value::Write(op)
    }

    fn put(model: &mut Model, op: u32) {
        model.write(op, B, w(op));
        model.wrote(op, B, DONE);
    }

    #[test]
    fn reads_must_return_the_last_completed_write() {
        let mut model = Model::new(&[8]);
        assert!(read(&mut model, Value::Zeros) && !read(&mut model, w(1)));
        put(&mut model, 1);
        assert!(read(&mut model, w(1)) && !read(&mut model, Value::Zeros));
        put(&mut model, 2);
        assert!(!read(&mut model, w(1)) && read(&mut model, w(2)));
    }

    #[test]
    fn a_read_settles_the_order_of_concurrent_writes() {
        for last in [1, 2] {
            let mut model = Model::new(&[8]);
            model.write(1, B, w(1));
            model.write(2, B, w(2));
            model.wrote(1, B, DONE);
            model.wrote(2, B, DONE);
            assert!(!read(&mut model, Value::Zeros));
            assert!(read(&mut model, w(last)));
            assert!(!read(&mut model, w(3 - last)), "it was older");
            assert!(read(&mut model, w(last)));
        }
    }

    #[test]
    fn a_read_during_a_write_may_see_both_but_not_new_and_then_old() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1);
        model.write(2, B, w(2));
        assert!(read(&mut model, w(1)) && read(&mut model, w(2)));
        assert!(!read(&mut model, w(1)), "the new value has been seen");
        model.wrote(2, B, DONE);
        assert!(read(&mut model, w(2)));
    }

    #[test]
    fn a_long_read_may_see_what_was_overwritten_meanwhile() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1);
        let (a, b) = (model.begin_read(), model.begin_read());
        put(&mut model, 2);
        put(&mut model, 3);
        let late = model.begin_read();
        for (began, value, possible) in
            [(a, w(1), true), (b, w(2), true), (late, w(2), false), (late, w(3), true)]
        {
            assert_eq!(model.read(began, B, std::iter::once(value)).is_ok(), possible, "{value:?}");
        }
    }

    #[test]
    fn writes_of_doubtful_outcome_may_be_applied_or_not() {
        let mut model = Model::new(&[8]);
        model.write(1, B, w(1));
        model.wrote(1, B, Ending::Doubtful);
        let mut other = Model::new(&[8]);
        other.write(1, B, w(1));
        other.wrote(1, B, Ending::Doubtful);
        assert!(read(&mut model, Value::Zeros) && !read(&mut model, w(1)), "and it stays so");
        assert!(read(&mut other, w(1)) && !read(&mut other, Value::Zeros));
        put(&mut other, 2);
        assert!(!read(&mut other, w(1)));
    }

    #[test]
    fn a_lost_write_may_be_applied_late_until_fenced() {
        let mut model = Model::new(&[8]);
        model.write(1, B, w(1));
        model.wrote(1, B, Ending::Lost);
        put(&mut model, 2);
        assert!(read(&mut model, w(2)));
        assert!(read(&mut model, w(1)), "late");
        assert!(!read(&mut model, w(2)), "but once");

        let mut model = Model::new(&[8]);
        model.write(1, B, w(1));
        model.wrote(1, B, Ending::Lost);
        model.fence(1, B);
        put(&mut model, 2);
        assert!(!read(&mut model, w(1)));
    }

    #[test]
    fn lost_writes_precede_writes_begun_after_the_end_is_detected() {
        for ordered in [false, true] {
            let mut model = Model::new(&[8]);
            model.write(1, B, w(1));
            model.wrote(1, B, Ending::Lost);
            model.write(2, B, w(2));
            if ordered {
                model.order(1, B);
            }
            model.wrote(2, B, DONE);
            model.write(3, B, w(3));
            model.wrote(3, B, DONE);
            assert!(read(&mut model, w(3)));
            assert_eq!(read(&mut model, w(1)), !ordered, "late, and too late");
            model.crash(true);
            assert!(survivors(&model).contains(&w(1)), "nothing was flushed");
        }
        let mut model = Model::new(&[8]);
        model.write(1, B, w(1));
        model.order(1, B);
        assert!(read(&mut model, Value::Zeros) && read(&mut model, w(1)), "late");
        model.write(2, B, w(2));
        model.wrote(2, B, Ending::Done { fua: true });
        model.crash(true);
        assert_eq!(survivors(&model), [w(2)]);
    }

    fn survivors(model: &Model) -> Vec<Value> {
        model.spaces[0].blocks[3].iter().filter_map(|entry| entry.held.first()).collect()
    }

    #[test]
    fn power_loss_leaves_durable_or_later_data() {
        let mut model = Model::new(&[8]);
        for op in 1..=2 {
            put(&mut model, op);
        }
        let flush = model.begin();
        put(&mut model, 3);
        model.flushed(flush, 0);
        model.write(4, B, w(4));
        model.crash(true);
        assert_eq!(survivors(&model), [w(2), w(3), w(4)], "3 was answered after the flush began");
        model.wrote(4, B, DONE);
        assert!(read(&mut model, w(2)) && !read(&mut model, w(3)) && !read(&mut model, w(4)));
        model.crash(true);
        assert_eq!(survivors(&model), [w(2)], "what was read after a failure stays");
    }

    #[test]
    fn fua_writes_are_durable_on_completion() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1);
        model.write(2, B, w(2));
        model.write(3, B, w(3));
        model.wrote(2, B, Ending::Done { fua: true });
        model.wrote(3, B, DONE);
        model.crash(true);
        assert_eq!(survivors(&model), [w(2), w(3)]);
    }

    #[test]
    fn a_killed_target_loses_no_completed_write() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1);
        put(&mut model, 2);
        model.write(3, B, w(3));
        model.crash(false);
        assert!(!read(&mut model, w(1)));
        assert!(read(&mut model, w(2)) && !read(&mut model, w(3)), "not done then, never done");
        model.crash(true);
        assert_eq!(survivors(&model)[0], Value::Zeros, "nothing was flushed");
    }

    #[test]
    fn deallocated_blocks_are_zeros_or_as_before() {
        for zeros in [false, true] {
            let mut model = Model::new(&[8]);
            put(&mut model, 1);
            model.write(2, B, Value::Zeros);
            model.wrote(2, B, Ending::Doubtful);
            let (is, is_not) = if zeros { (Value::Zeros, w(1)) } else { (w(1), Value::Zeros) };
            assert!(read(&mut model, is) && !read(&mut model, is_not));
        }
    }

    #[test]
    fn unreadable_blocks_stay_unreadable_until_written() {
        let bad = Value::Unreadable;
        let told = |model: &mut Model| {
            let began = model.begin_read();
            model.unreadable(began, &[Span { lba: 2, blocks: 3, ..B }]).is_ok()
        };
        let mut model = Model::new(&[8]);
        put(&mut model, 1);
        assert!(!told(&mut model), "nothing is");
        model.write(2, B, bad);
        assert!(read(&mut model, w(1)), "not yet");
        model.wrote(2, B, Ending::Done { fua: true });
        assert!(told(&mut model) && !read(&mut model, w(1)) && !read(&mut model, Value::Zeros));
        for power in [false, true] {
            model.crash(power);
            assert!(told(&mut model) && !read(&mut model, w(1)), "{power}");
        }
        put(&mut model, 3);
        assert!(!told(&mut model) && read(&mut model, w(3)));
    }

    #[test]
    fn only_reads_begun_after_an_unreadable_mark_settle_writes() {
        let told = |model: &mut Model| {
            let began = model.begin_read();
            model.unreadable(began, &[Span { lba: 2, blocks: 3, ..B }]).is_ok()
        };
        let values = |value| std::iter::repeat_n(value, B.blocks as usize);
        for is_older in [true, false] {
            let mut model = Model::new(&[8]);
            put(&mut model, 1);
            let older = model.begin_read();
            model.write(2, B, Value::Unreadable);
            model.wrote(2, B, Ending::Done { fua: true });
            model.write(3, B, w(3));
            let began = if is_older { older } else { model.begin_read() };
            assert!(model.read(began, B, values(w(3))).is_ok());
            assert_eq!(told(&mut model), is_older);
            model.wrote(3, B, DONE);
            assert!(!told(&mut model) && read(&mut model, w(3)));
        }
    }

    #[test]
    fn unobservable_values_are_discarded() {
        let mut model = Model::new(&[8]);
        for op in 1..100 {
            put(&mut model, op);
            let flush = model.begin();
            model.flushed(flush, 0);
        }
        assert!(survivors(&model).len() <= 3, "{:?}", survivors(&model));
    }
}
