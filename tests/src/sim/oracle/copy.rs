//! Oracle for Copy: valid contents of the destination follow from possible contents of the sources.

use super::blocks::{Entry, Model, Moment, NEVER, PossibleValue, Span, Value, Violation};

/// A copy that may still take effect.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) op: u32,
    /// Source blocks, in order.
    from: Vec<u32>,
    space: usize,
    /// First destination block.
    to: u32,
}

impl Model {
    /// A copy is sent from the blocks of `from` to those of `to`, in order, all of one namespace.
    /// It counts as a read too, until it has ended.
    pub fn copy(&mut self, op: u32, from: &[Span], to: Span) -> Moment {
        let began = self.begin_read();
        let from: Vec<u32> = from.iter().flat_map(|s| s.lba..s.lba + s.blocks).collect();
        let held: Vec<Vec<Value>> = from
            .iter()
            .zip(to.lba..)
            .map(|(lba, to_lba)| self.held(to.space, *lba, to_lba))
            .collect();
        for (entries, some) in self.blocks_mut(to).iter_mut().zip(&held) {
            entries.push(Entry::new(op, PossibleValue::Any(some.clone()), began));
        }
        self.copies.push(Copying { op, from, space: to.space, to: to.lba });
        // Outstanding copies have not read what this one writes, but may do so. This one is among
        // them: what another copy has got of it is later got from other commands as well.
        for (lba, some) in (to.lba..).zip(held) {
            self.spread(to.space, lba, &some);
        }
        began
    }

    /// A copy sent at `began` has completed with success.
    ///
    /// # Errors
    /// Some of its source was unreadable all the time.
    pub fn copied(&mut self, op: u32, began: Moment, to: Span) -> Result<(), Violation> {
        self.forget_read(began);
        for (lba, entries) in (to.lba..).zip(self.blocks(to)) {
            // If the backing store was exchanged meanwhile there are two: of the old and of the new
            // one.
            let mut own = entries.iter().filter(|entry| entry.op == op).peekable();
            if own.peek().is_some() && own.all(|own| own.held == PossibleValue::Any(Vec::new())) {
                let text = format!("block {lba} was copied from one that cannot be read");
                return Err(Violation(text));
            }
        }
        Ok(())
    }

    /// A block may get these values: so may the destinations of copies from it.
    pub(super) fn spread(&mut self, space: usize, lba: u32, values: &[Value]) {
        let mut news: Vec<(u32, Vec<Value>)> = vec![(lba, values.to_vec())];
        while let Some((lba, values)) = news.pop() {
            for copying in self.copies.iter().filter(|copying| copying.space == space) {
                for (_, to) in copying.from.iter().zip(copying.to..).filter(|(at, _)| **at == lba) {
                    let entries = &mut self.spaces[space].blocks[to as usize];
                    let own = entries.iter_mut().find(|e| e.op == copying.op && e.open);
                    let Some(PossibleValue::Any(some)) = own.map(|own| &mut own.held) else {
                        continue;
                    };
                    let moved = values.iter().filter_map(|value| value.moved(lba, to));
                    let more: Vec<Value> = moved.filter(|value| !some.contains(value)).collect();
                    if !more.is_empty() {
                        some.extend(&more);
                        news.push((to, more));
                    }
                }
            }
        }
    }

    /// A command has ended; removes it if it is a copy.
    pub(super) fn end_copy(&mut self, op: u32) {
        self.copies.retain(|copying| copying.op != op);
    }

    /// The possible contents of a block, as they would be in another one.
    fn held(&self, space: usize, lba: u32, to: u32) -> Vec<Value> {
        let mut held = Vec::new();
        for entry in self.spaces[space].blocks[lba as usize].iter().filter(|e| e.gone == NEVER) {
            let some = match &entry.held {
                PossibleValue::One(one) => std::slice::from_ref(one),
                PossibleValue::Any(some) => some,
            };
            for value in some.iter().filter_map(|value| value.moved(lba, to)) {
                if !held.contains(&value) {
                    held.push(value);
                }
            }
        }
        held
    }
}

impl Value {
    /// The value of block `from` when it is in block `to`: none if it cannot be read.
    fn moved(self, from: u32, to: u32) -> Option<Value> {
        let (write, home) = match self {
            Value::Unreadable => return None,
            Value::Zeros => return Some(self),
            Value::Write(write) => (write, from),
            Value::Moved(write, home) => (write, home),
        };
        Some(if home == to { Value::Write(write) } else { Value::Moved(write, home) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::Ending;
    use crate::sim::oracle::copy::*;

    const DONE: Ending = Ending::Done { fua: false };

    fn at(lba: u32) -> Span {
        Span { space: 0, lba, blocks: 1 }
    }

    fn read(model: &mut Model, lba: u32, value: Value) -> bool {
        let began = model.begin_read();
        model.read(began, at(lba), std::iter::once(value)).is_ok()
    }

    fn put(model: &mut Model, op: u32, lba: u32, value: Value) {
        model.write(op, at(lba), value);
        model.wrote(op, at(lba), Ending::Done { fua: value == Value::Unreadable });
    }

    #[test]
    fn copies_contain_a_value_their_source_had_meanwhile() {
        for seen in [1, 2] {
            let mut model = Model::new(&[8]);
            put(&mut model, 9, 1, Value::Write(9));
            put(&mut model, 1, 1, Value::Write(1));
            let began = model.copy(3, &[at(1)], at(5));
            put(&mut model, 2, 1, Value::Write(2));
            model.wrote(3, at(5), DONE);
            model.copied(3, began, at(5)).unwrap();
            put(&mut model, 4, 1, Value::Write(4));
            for never in [Value::Zeros, Value::Moved(9, 1), Value::Moved(4, 1), Value::Write(1)] {
                assert!(!read(&mut model, 5, never), "{never:?}");
            }
            assert!(read(&mut model, 5, Value::Moved(seen, 1)));
            assert!(!read(&mut model, 5, Value::Moved(3 - seen, 1)), "it is settled");
        }
    }

    #[test]
    fn a_copy_back_to_the_origin_equals_the_original_write() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1, 1, Value::Write(1));
        for (op, from, to) in [(2, 1, 2), (3, 2, 3), (4, 3, 1)] {
            model.copy(op, &[at(from)], at(to));
            model.wrote(op, at(to), DONE);
        }
        assert!(read(&mut model, 3, Value::Moved(1, 1)) && read(&mut model, 1, Value::Write(1)));
        assert!(!read(&mut model, 1, Value::Zeros));
    }

    #[test]
    fn concurrent_writes_to_a_source_pass_through_chained_copies() {
        let mut model = Model::new(&[8]);
        model.copy(1, &[at(0)], at(1));
        model.copy(2, &[at(1)], at(2));
        model.write(3, at(0), Value::Write(3));
        for (op, lba) in [(3, 0), (1, 1), (2, 2)] {
            model.wrote(op, at(lba), DONE);
        }
        assert!(read(&mut model, 2, Value::Moved(3, 0)));
    }

    #[test]
    fn overlapping_copies_may_pass_on_each_others_values() {
        let mut model = Model::new(&[8]);
        for lba in [1, 2, 3] {
            put(&mut model, lba, lba, Value::Write(lba));
        }
        let both = Span { blocks: 2, ..at(1) };
        model.copy(4, &[at(1)], at(3));
        model.copy(5, &[at(0), at(3)], both);
        // It is zeroed, and is copied first to block 3, then to block 2.
        model.write(6, at(1), Value::Zeros);
        for (op, span) in [(6, at(1)), (4, at(3)), (5, both)] {
            model.wrote(op, span, DONE);
        }
        assert!(read(&mut model, 2, Value::Zeros));
    }

    #[test]
    fn copies_of_unreadable_blocks_must_fail() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1, 1, Value::Unreadable);
        let began = model.copy(2, &[at(0), at(1)], Span { blocks: 2, ..at(4) });
        model.wrote(2, Span { blocks: 2, ..at(4) }, DONE);
        assert!(model.copied(2, began, Span { blocks: 2, ..at(4) }).is_err());
        assert!(model.copied(2, began, at(4)).is_ok());
        assert!(model.unreadable(began, &[at(0)]).is_err());
        assert!(model.unreadable(began, &[at(0), at(1)]).is_ok());
    }
}
