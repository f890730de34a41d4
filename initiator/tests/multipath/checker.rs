//! What blocks may contain, independently of how requests are carried out: each block is a register.

use std::collections::BTreeMap;
use std::ops::Range;

/// A change of one block.
#[derive(Clone, Copy, Debug)]
struct Change {
    stamp: u64,
    begun: u64,
    /// When it was acknowledged, or has failed; `None`: not yet.
    ended: Option<u64>,
    /// It has taken effect: a failed one may have.
    is_certain: bool,
}

/// An operation under way.
#[derive(Clone, Debug)]
struct Op {
    blocks: Range<u64>,
    begun: u64,
    is_change: bool,
}

/// The changes of all blocks. Time is the number of events.
#[derive(Default)]
pub(crate) struct Checker {
    time: u64,
    changes: BTreeMap<u64, Vec<Change>>,
    ops: BTreeMap<u64, Op>,
}

impl Checker {
    /// An operation begins: a change to these stamps, or a read or flush.
    pub(crate) fn begin(&mut self, tag: u64, blocks: Range<u64>, stamps: Option<&[u64]>) {
        self.time += 1;
        let begun = self.time;
        for (block, stamp) in blocks.clone().zip(stamps.into_iter().flatten()) {
            let change = Change { stamp: *stamp, begun, ended: None, is_certain: false };
            self.changes.entry(block).or_default().push(change);
        }
        let op = Op { blocks, begun, is_change: stamps.is_some() };
        assert!(self.ops.insert(tag, op).is_none(), "tag {tag} is used twice");
    }

    /// An operation ends, once. A failed change has taken effect by then, or never will.
    pub(crate) fn end(&mut self, tag: u64, success: bool) -> Range<u64> {
        self.time += 1;
        let op = self.ops.get(&tag).unwrap_or_else(|| panic!("request {tag} was done twice"));
        for block in op.blocks.clone().filter(|_| op.is_change) {
            let changes = self.changes.get_mut(&block).expect("changed");
            let change = changes.iter_mut().find(|change| change.begun == op.begun);
            let change = change.expect("begun");
            (change.ended, change.is_certain) = (Some(self.time), success);
        }
        self.ops.remove(&tag).expect("there").blocks
    }

    /// When an operation that is under way began.
    pub(crate) fn begun(&self, tag: u64) -> u64 {
        self.ops[&tag].begun
    }

    pub(crate) fn now(&self) -> u64 {
        self.time
    }

    /// Fails unless a block may have had this content at some time from `since` until now.
    #[track_caller]
    pub(crate) fn expect(&self, block: u64, stamp: u64, since: u64) {
        let none = Vec::new();
        let changes = self.changes.get(&block).unwrap_or(&none);
        let initial = Change { stamp: 0, begun: 0, ended: Some(0), is_certain: true };
        let mut sources =
            std::iter::once(&initial).chain(changes).filter(|change| change.stamp == stamp);
        let is_permitted = sources.any(|source| {
            let overwritten = |later: &Change| {
                let after = source.ended.is_some_and(|ended| ended < later.begun);
                after && later.is_certain && later.ended.is_some_and(|ended| ended < since)
            };
            !changes.iter().any(overwritten)
        });
        assert!(is_permitted, "block {block} cannot contain {stamp:#x}");
    }
}
