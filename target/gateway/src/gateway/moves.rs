//! Moves of ANA groups by an administrator: one after the other, each by its owner.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Gateway, Pending};
use crate::interface::{Operation, Stage};
use crate::record::{Key, MoveRequest, Ownership, Slot};

/// A move that is not done by then is given up, with those after it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Groups to move.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// In this order.
    queue: VecDeque<(u32, Slot)>,
    /// When the first one became the first.
    since: Option<Duration>,
    /// It has begun.
    has_begun: bool,
}

impl Moves {
    /// Adds a move after the others; an earlier one of the same group has no effect any more.
    pub(super) fn add(&mut self, group: u32, to: Slot) {
        if self.queue.front().is_some_and(|(first, _)| *first == group) {
            self.finish();
        }
        self.queue.retain(|(other, _)| *other != group);
        self.queue.push_back((group, to));
    }

    pub(super) fn next(&self) -> Option<(u32, Slot)> {
        self.queue.front().copied()
    }

    fn finish(&mut self) {
        self.queue.pop_front();
        (self.since, self.has_begun) = (None, false);
    }
}

impl Gateway {
    /// Begins the next move when the one before is done.
    pub(super) fn continue_moves(&mut self) {
        while let Some((group, to)) = self.moves.next() {
            let record = self.object.group(group);
            let is_there = record.is_some_and(
                |record| matches!(&record.ownership, Ownership::Serving(owner) if owner.slot == to),
            );
            let since = *self.moves.since.get_or_insert(self.now);
            if is_there {
                self.moves.finish();
            } else if self.now >= since + PATIENCE || !self.live_members().contains(&to) {
                self.moves = Moves::default();
            } else {
                // One that is about to apply the shared configuration is waited for.
                if !self.moves.has_begun && self.is_fresh() && self.may_take(to) {
                    self.moves.has_begun = true;
                    self.begin_move(group, to);
                }
                return;
            }
        }
    }

    fn begin_move(&mut self, group: u32, to: Slot) {
        if self.stage(group) == Some(Stage::Serving) {
            return self.step(group, Stage::Releasing(Some(to)));
        }
        let (text, record) = (self.object.text(Key::Group(group)), self.object.group(group));
        let Some((record, update)) = record.zip(self.own_update()) else { return };
        let request = MoveRequest { epoch: record.epoch, to };
        let update = update.compare(Key::Group(group), text).set(Key::Move(group), &request);
        self.start(Pending::Ask, Operation::Update(update));
    }

    /// Gives the groups that another gateway asks for.
    pub(super) fn give_requested(&mut self) {
        let live = self.live_members();
        let serving = self.groups.iter().filter(|(_, group)| group.stage == Stage::Serving);
        let given = serving.filter_map(|(id, group)| {
            let to = self.object.move_request(*id)?;
            let is_current = self.object.group(*id) == group.record.as_ref();
            let is_other = to != self.member.slot && live.contains(&to);
            (is_current && is_other && self.may_take(to)).then_some((*id, to))
        });
        let given: Vec<(u32, Slot)> = given.collect();
        given.into_iter().for_each(|(id, to)| self.step(id, Stage::Releasing(Some(to))));
    }
}
