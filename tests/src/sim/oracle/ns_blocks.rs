//! Oracle for blocks of host-created namespaces: zeroes first, then the written data, always
//! durable. Never data of another namespace, in particular not of one that had the same id.

use std::collections::BTreeMap;

use crate::sim::oracle::blocks::{Moment, Value};

/// A write of a block.
#[derive(Debug)]
struct Wrote {
    op: u32,
    began: Moment,
    /// When it has ended.
    ended: Option<Moment>,
    /// It completed with success, and has no other destination.
    surely: bool,
}

/// All blocks, by the command that created the namespace.
#[derive(Debug, Default)]
pub(super) struct Blocks(BTreeMap<(u32, u32), Vec<Wrote>>);

impl Blocks {
    /// A write sent at `began` may reach this block.
    pub(super) fn may_reach(&mut self, (birth, lba): (u32, u32), op: u32, began: Moment) {
        let writes = self.0.entry((birth, lba)).or_default();
        if !writes.iter().any(|wrote| wrote.op == op) {
            writes.push(Wrote { op, began, ended: None, surely: false });
        }
    }

    /// A write has ended; `surely`: with success, and this was the only destination.
    pub(super) fn ended(&mut self, op: u32, lba: u32, surely: bool, now: Moment) {
        let places = self.0.iter_mut().filter(|((_, own), _)| *own == lba);
        for wrote in places.flat_map(|(_, writes)| writes).filter(|wrote| wrote.op == op) {
            (wrote.ended, wrote.surely) = (wrote.ended.or(Some(now)), surely);
        }
    }

    /// The target has crashed: no command is in progress.
    pub(super) fn crash(&mut self, now: Moment) {
        for wrote in self.0.values_mut().flatten() {
            wrote.ended = wrote.ended.or(Some(now));
        }
    }

    /// Whether a read sent at `began` may return this.
    pub(super) fn may_be(&self, birth: u32, lba: u32, value: Value, began: Moment) -> bool {
        let writes = self.0.get(&(birth, lba)).map(Vec::as_slice).unwrap_or_default();
        let ended = match value {
            Value::Zeros => Some(0),
            Value::Write(op) => match writes.iter().find(|wrote| wrote.op == op) {
                Some(wrote) => wrote.ended,
                None => return false,
            },
            _ => return false,
        };
        let is_replaced = |by: &Wrote| {
            let before = by.surely && by.ended.is_some_and(|end| end < began);
            before && ended.is_some_and(|ended| ended < by.began)
        };
        !writes.iter().any(is_replaced)
    }
}
