//! Oracle for a removed device: it loses data that were answered and not flushed, and no flush
//! succeeds afterwards that would promise them.

use super::blocks::{Model, Moment, NEVER, PossibleValue};

impl Model {
    /// The device of a namespace is removed, and returns with what was durable, or more. Commands
    /// under way may have been executed before, fail, or are executed afterwards.
    pub fn lose_unsynced(&mut self, space: usize) {
        let now = self.begin();
        let oldest = self.oldest_read();
        let flushed = self.spaces[space].flushed;
        self.spaces[space].lost = now;
        for lba in 0..self.spaces[space].blocks.len() {
            let entries = &mut self.spaces[space].blocks[lba];
            entries.retain(|entry| entry.open || entry.buried > flushed || entry.gone >= oldest);
            let mut values = Vec::new();
            for entry in entries.iter_mut().filter(|entry| entry.open || entry.buried > flushed) {
                // One without a response that was not replaced may still take effect.
                if entry.open && entry.effect_by == NEVER && entry.gone == NEVER {
                    continue;
                }
                entry.revived = entry.revived.min(entry.buried);
                (entry.effect_by, entry.left) = (entry.effect_by.min(now), true);
                (entry.gone, entry.buried) = (NEVER, NEVER);
                values.extend(match entry.held {
                    PossibleValue::One(value) => Some(value),
                    PossibleValue::Any(_) => None,
                });
            }
            // What is copied from now on may be one of these.
            self.spread(space, lba as u32, &values);
        }
    }

    /// A flush sent at `began` has succeeded: no write that had been answered then was lost.
    pub(super) fn confirm(&mut self, space: usize, began: Moment) {
        if self.spaces[space].lost == 0 {
            return;
        }
        for entries in &mut self.spaces[space].blocks {
            for entry in entries.iter_mut().filter(|entry| entry.revived < began) {
                (entry.gone, entry.buried) = (entry.gone.min(began), 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocks::{Ending, Span, Value};
    use crate::sim::oracle::device_removal::*;

    const B: Span = Span { space: 0, lba: 3, blocks: 1 };
    const DONE: Ending = Ending::Done { fua: false };

    fn reads(model: &mut Model, write: u32) -> bool {
        let began = model.begin_read();
        model.read(began, B, std::iter::once(Value::Write(write))).is_ok()
    }

    fn put(model: &mut Model, op: u32, ending: Ending) {
        model.write(op, B, Value::Write(op));
        model.wrote(op, B, ending);
    }

    #[test]
    fn unflushed_writes_may_be_lost_unless_a_later_flush_succeeds() {
        for flushes in [false, true] {
            let mut model = Model::new(&[8]);
            put(&mut model, 1, Ending::Done { fua: true });
            put(&mut model, 2, DONE);
            model.lose_unsynced(0);
            let flush = model.begin();
            if flushes {
                model.flushed(flush, 0);
            }
            assert_eq!(reads(&mut model, 1), !flushes);
            assert_eq!(reads(&mut model, 2), flushes, "it was one of them, and stays");
        }
    }

    #[test]
    fn flushed_writes_survive_device_removal() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1, DONE);
        put(&mut model, 2, DONE);
        let flush = model.begin();
        model.flushed(flush, 0);
        model.lose_unsynced(0);
        assert!(!reads(&mut model, 1) && reads(&mut model, 2));
        put(&mut model, 3, Ending::Done { fua: true });
        model.lose_unsynced(0);
        assert!(!reads(&mut model, 2) && reads(&mut model, 3));
    }

    #[test]
    fn pending_writes_without_fua_may_be_lost_on_removal() {
        for (ending, may_be_lost) in [(DONE, true), (Ending::Done { fua: true }, false)] {
            let mut model = Model::new(&[8]);
            put(&mut model, 1, DONE);
            model.write(2, B, Value::Write(2));
            model.lose_unsynced(0);
            model.wrote(2, B, ending);
            assert_eq!(reads(&mut model, 1), may_be_lost, "{ending:?}");
        }
        let mut model = Model::new(&[8]);
        put(&mut model, 1, DONE);
        model.lose_unsynced(0);
        put(&mut model, 2, DONE);
        assert!(!reads(&mut model, 1) && reads(&mut model, 2), "it was written afterwards");
    }

    #[test]
    fn a_lost_write_returns_if_the_write_that_replaced_it_is_lost_with_the_device() {
        for flushes in [false, true] {
            let mut model = Model::new(&[8]);
            put(&mut model, 1, Ending::Lost);
            model.order(1, B);
            put(&mut model, 2, DONE);
            model.lose_unsynced(0);
            let flush = model.begin();
            if flushes {
                model.flushed(flush, 0);
            }
            assert_eq!(reads(&mut model, 1), !flushes);
        }
    }

    #[test]
    fn reads_begun_before_the_removal_settle_no_value() {
        let mut model = Model::new(&[8]);
        put(&mut model, 1, DONE);
        put(&mut model, 2, DONE);
        let early = model.begin_read();
        model.lose_unsynced(0);
        assert!(model.read(early, B, std::iter::once(Value::Write(2))).is_ok());
        assert!(reads(&mut model, 1) && !reads(&mut model, 2));
    }
}
