//! Oracle for a replaced device: valid contents follow from the time when a command was submitted.

use super::blocks::{Entry, Model, NEVER, PossibleValue, Value};

impl Model {
    /// A namespace gets another backing store, all zeros, after the removal of the earlier one.
    /// Commands sent before may use either, but each of them only one: what they read is of the old
    /// or of the new one, what they write may be in either, and what they copy was read from the
    /// one that is written.
    pub fn exchange(&mut self, space: usize) {
        let now = self.begin();
        let copying = |op: u32, model: &Model| model.copies.iter().any(|copy| copy.op == op);
        let blocks = self.spaces[space].blocks.len() as u32;
        for lba in 0..blocks {
            let mut entries = std::mem::take(&mut self.spaces[space].blocks[lba as usize]);
            let mut news = Vec::new();
            for entry in &mut entries {
                let copies = entry.open && copying(entry.op, self);
                if copies {
                    news.push(Entry::new(entry.op, PossibleValue::Any(Vec::new()), entry.began));
                }
                if !entry.open || copies {
                    entry.open = false;
                    (entry.gone, entry.buried) = (entry.gone.min(now), 0);
                }
            }
            let zeros = Entry::new(0, PossibleValue::One(Value::Zeros), now);
            entries.push(Entry { effect_by: now, open: false, ..zeros });
            entries.extend(news);
            self.spaces[space].blocks[lba as usize] = entries;
        }
        // What is copied from now on may be of the new one.
        for lba in 0..blocks {
            let entries = &self.spaces[space].blocks[lba as usize];
            let there = entries.iter().filter(|entry| entry.gone == NEVER);
            let held = there.filter_map(|entry| match entry.held {
                PossibleValue::One(value) => Some(value),
                PossibleValue::Any(_) => None,
            });
            let held: Vec<Value> = held.collect();
            self.spread(space, lba, &held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{Ending, Span};
    use crate::sim::oracle::device_swap::*;

    const B: Span = Span { space: 0, lba: 3, blocks: 1 };
    const TO: Span = Span { lba: 5, ..B };
    const DONE: Ending = Ending::Done { fua: false };

    fn read(model: &mut Model, began: u64, span: Span, value: Value) -> bool {
        model.read(began, span, std::iter::once(value)).is_ok()
    }

    fn reads(model: &mut Model, span: Span, value: Value) -> bool {
        let began = model.begin_read();
        read(model, began, span, value)
    }

    #[test]
    fn only_reads_begun_before_the_swap_see_the_old_device() {
        let mut model = Model::new(&[8]);
        model.write(1, B, Value::Write(1));
        model.wrote(1, B, DONE);
        let early = model.begin_read();
        model.exchange(0);
        assert!(!reads(&mut model, B, Value::Write(1)) && reads(&mut model, B, Value::Zeros));
        assert!(read(&mut model, early, B, Value::Write(1)));
        model.crash(true);
        assert!(!reads(&mut model, B, Value::Write(1)) && reads(&mut model, B, Value::Zeros));
    }

    #[test]
    fn pending_writes_reach_the_old_or_the_new_device() {
        for to_new in [false, true] {
            let mut model = Model::new(&[8]);
            model.write(1, B, Value::Write(1));
            model.exchange(0);
            model.wrote(1, B, Ending::Done { fua: true });
            let value = if to_new { Value::Write(1) } else { Value::Zeros };
            assert!(reads(&mut model, B, value), "{to_new}");
            model.write(2, B, Value::Write(2));
            model.wrote(2, B, DONE);
            assert!(!reads(&mut model, B, value), "{to_new}");
        }
    }

    #[test]
    fn copies_carry_no_data_of_the_old_device_to_the_new_one() {
        let mut model = Model::new(&[8]);
        model.write(1, B, Value::Write(1));
        model.wrote(1, B, DONE);
        model.copy(2, &[B], TO);
        model.exchange(0);
        model.write(3, B, Value::Write(3));
        model.wrote(2, TO, DONE);
        let moved = |write| Value::Moved(write, B.lba);
        assert!(!reads(&mut model, TO, moved(1)) && reads(&mut model, TO, moved(3)));
    }
}
