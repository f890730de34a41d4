//! Chooses the next command of a host.

use nvme::log::LogId;
use nvme::sqe::Flags;
use rdma::soft::sim::Rng;

use crate::sim::oracle::blocks::{SECTOR_BYTES, Span, Value};
use crate::sim::oracle::{Oracle, Stage};
use crate::sim::scenario::Profile;
use crate::sim::workload::command::{Kind, Mistake, Op, Question};

/// Maximum of commands that may still change a block; no more are sent there.
const CROWD: usize = 4;
/// Maximum of blocks of a command in the last read of everything.
const SWEEP_BLOCKS: u32 = 16;

impl Oracle {
    /// The next command of a host, if it is to send one.
    pub fn next_op(&mut self, host: usize, profile: &Profile, dice: &mut Rng) -> Option<Op> {
        self.next_id += 1;
        let id = self.next_id;
        let shifts: Vec<u8> =
            (0..profile.shapes.len()).map(|space| self.formats.believed(host, space)).collect();
        let op = |kind, span: Span| {
            let shift = shifts[span.space];
            Some(Op { kind, host, id, span, began: 0, half: 0, shift })
        };
        let whole = |space: usize| Span { space, lba: 0, blocks: profile.sectors(space) };
        match self.news.next_log(host).filter(|_| self.stage != Stage::Rest) {
            Some(LogId::ANA) => return op(Kind::Admin(Question::Paths), whole(0)),
            Some(_) => return op(Kind::Admin(Question::Changed), whole(0)),
            None => {}
        }
        if let Some(space) = self.formats.next_doubt(host).filter(|_| self.stage != Stage::Rest) {
            return op(Kind::Admin(Question::Namespace), whole(space));
        }
        match self.stage {
            Stage::Work if self.sent < self.commands => {}
            Stage::Clear if host == 0 => {
                let (space, order) = self.fencing.last_order().0?;
                return op(Kind::Order(order), whole(space));
            }
            Stage::Sweep if host == 0 && self.sweep.0 < profile.shapes.len() => {
                let (space, lba) = self.sweep;
                if !self.formats.is_clear(host, space) {
                    return None;
                }
                let most = profile.mdts_bytes / SECTOR_BYTES;
                let blocks = SWEEP_BLOCKS.min(most).min(whole(space).blocks - lba);
                let span = Span { space, lba, blocks };
                let blocks = self.readable(span, shifts[space]);
                let end = lba + blocks == whole(space).blocks;
                self.sweep = if end { (space + 1, 0) } else { (space, lba + blocks) };
                self.sweeping += 1;
                return op(Kind::Read, Span { space, lba, blocks });
            }
            _ => return None,
        }
        let space = dice.below(profile.shapes.len() as u64) as usize;
        if std::mem::take(&mut self.reset[host]) {
            return op(Kind::Disable, whole(space));
        }
        if let Some((kind, span)) = self.paths.next_again(host)
            && self.model.crowd(span) < CROWD
            && self.formats.can_send(host, &kind, span)
        {
            return op(kind, span);
        }
        if let Some((queue, cid)) = self.aborts.next_wish(host, dice) {
            return op(Kind::Abort(queue, cid), whole(space));
        }
        if let Some(order) = self.fencing.next_order(space, host, dice) {
            return op(Kind::Order(order), whole(space));
        }
        if let Some(on) = self.write_protect.next_order(space, dice) {
            return op(Kind::Protect(on), whole(space));
        }
        if let Some(deed) = self.made.next_deed(host, dice) {
            return op(Kind::Made(deed), whole(0));
        }
        if let Some(kind) = self.formats.next_order(space, dice) {
            return op(kind, whole(space));
        }
        if let Some(op) = self.next_rare(host, space, id, profile, dice) {
            return Some(op);
        }
        let space = match self.fencing.is_barred(space, host) && dice.per_mille(900) {
            true => (space + 1) % profile.shapes.len(),
            false => space,
        };
        let shift = shifts[space];
        let span = pick_span(space, shift, profile, dice);
        let crowded = self.model.crowd(span) >= CROWD;
        let bare = self.formats.may_be_bare(host, space);
        let fua = dice.per_mille(profile.fua);
        let kind = match choose(&profile.mix, dice) {
            1 if !crowded => Kind::Write { fua },
            2 => Kind::Flush,
            3 if !crowded && bare => Kind::Zeroes { fua, deallocate: dice.per_mille(500) },
            4 if bare => {
                let count = 1 + dice.below(3);
                let spans = (0..count).map(|_| pick_span(space, shift, profile, dice));
                let spans: Vec<Span> = spans.collect();
                match spans.iter().any(|span| self.model.crowd(*span) >= CROWD) {
                    true => Kind::Read,
                    false => Kind::Deallocate(spans),
                }
            }
            5 => {
                if !crowded && dice.per_mille(500) {
                    // The first half of a fused command: of one block.
                    let span = Span { blocks: 1 << shift, ..span };
                    let kind = Kind::Compare(self.compared(span));
                    let half = Flags::FUSED_FIRST;
                    return Some(Op { kind, host, id, span, began: 0, half, shift });
                }
                let span = Span { blocks: span.blocks.min(4 << shift), ..span };
                return op(Kind::Compare(self.compared(span)), span);
            }
            6 => Kind::Admin(question(dice)),
            7 => Kind::Wrong(mistake(dice)),
            _ => Kind::Read,
        };
        op(kind, span)
    }

    /// A Disconnect of a queue that is not the last one of a host, if it is to send one.
    pub fn next_departure(&mut self, host: usize, dice: &mut Rng) -> Option<Op> {
        if self.stage != Stage::Work || !dice.per_mille(self.departures.chance()) {
            return None;
        }
        self.next_id += 1;
        let span = Span { space: 0, lba: 0, blocks: 1 };
        let id = self.next_id;
        Some(Op { kind: Kind::Leave, host, id, span, began: 0, half: 0, shift: 0 })
    }

    /// The second half of a fused command.
    pub fn second_half(&mut self, first: &Op) -> Op {
        self.next_id += 1;
        let kind = Kind::Write { fua: false };
        Op { kind, id: self.next_id, began: 0, half: Flags::FUSED_SECOND, ..first.clone() }
    }

    /// A command that only some profiles have.
    fn next_rare(
        &self,
        host: usize,
        space: usize,
        id: u32,
        profile: &Profile,
        dice: &mut Rng,
    ) -> Option<Op> {
        let shift = self.formats.believed(host, space);
        let op = |kind, span| Some(Op { kind, host, id, span, began: 0, half: 0, shift });
        if !self.formats.may_be_bare(host, space) {
            return None;
        }
        let span = pick_span(space, shift, profile, dice);
        let crowded = |span| self.model.crowd(span) >= CROWD;
        if profile.spoils > 0 && dice.per_mille(profile.spoils) {
            let span = Span { blocks: span.blocks.min(4 << shift), ..span };
            return op(Kind::Spoil, span).filter(|_| !crowded(span));
        }
        if profile.copies > 0 && dice.per_mille(profile.copies) {
            let all = profile.sectors(space);
            let most = (profile.mdts_bytes / SECTOR_BYTES).min(all);
            let mut from = vec![span];
            let mut blocks = span.blocks;
            for _ in 0..dice.below(3) {
                let more = pick_span(space, shift, profile, dice);
                if blocks + more.blocks <= most {
                    blocks += more.blocks;
                    from.push(more);
                }
            }
            let room = u64::from((all - blocks) >> shift);
            let near = dice.below(room.min(12) + 1) as u32;
            let far = dice.below(room + 1) as u32;
            let lba = if dice.per_mille(600) { near } else { far } << shift;
            let (format, fua) = (dice.below(2) as u8, dice.per_mille(profile.fua));
            let to = Span { space, lba, blocks };
            return op(Kind::Copy { from, format, fua }, to).filter(|_| !crowded(to));
        }
        None
    }

    /// The data of a Compare, which a success confirms: zeros for unreadable blocks.
    fn compared(&self, span: Span) -> Vec<Value> {
        let sent = |value| if value == Value::Unreadable { Value::Zeros } else { value };
        self.model.guess(span).into_iter().map(sent).collect()
    }

    /// Number of these sectors that one command reads in the end: those before an unreadable block,
    /// or that one.
    fn readable(&self, span: Span, shift: u8) -> u32 {
        let guess = self.model.guess(span);
        let before = guess.iter().take_while(|value| **value != Value::Unreadable).count();
        (before as u32 >> shift).max(1) << shift
    }
}

/// Whole blocks of a namespace, each of 2^`shift` sectors.
fn pick_span(space: usize, shift: u8, profile: &Profile, dice: &mut Rng) -> Span {
    let all = profile.sectors(space) >> shift;
    let most = (profile.mdts_bytes / (SECTOR_BYTES << shift)).min(all);
    let end = match dice.below(16) {
        0 => u64::from(most),
        1..=4 => u64::from(most).min(8),
        _ => 2,
    };
    let blocks = 1 + dice.below(end) as u32;
    let room = all - blocks;
    let within = if dice.per_mille(profile.hot) { room.min(8) } else { room };
    let lba = dice.below(u64::from(within) + 1) as u32;
    Span { space, lba: lba << shift, blocks: blocks << shift }
}

fn choose(weights: &[u16], dice: &mut Rng) -> usize {
    let mut at = dice.below(weights.iter().map(|w| u64::from(*w)).sum());
    for (index, weight) in weights.iter().enumerate() {
        match at.checked_sub((*weight).into()) {
            Some(left) => at = left,
            None => return index,
        }
    }
    0
}

fn question(dice: &mut Rng) -> Question {
    let all = [Question::Controller, Question::Namespace, Question::Namespaces, Question::Queues];
    all[dice.below(4) as usize]
}

fn mistake(dice: &mut Rng) -> Mistake {
    [Mistake::Range, Mistake::Namespace, Mistake::Opcode][dice.below(3) as usize]
}
