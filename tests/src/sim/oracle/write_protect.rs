//! Oracle for write protection (feature 84h): written from the specifications, not from the
//! implementation.
//!
//! Hosts send one request at a time for each namespace, so its outcome is certain. A write that was
//! sent after the last request was answered, with none outstanding, must be rejected or not
//! according to that request. Once protection was answered no earlier write may change a block any
//! more: the host may make a copy of the namespace.

use std::collections::BTreeMap;

use nvme::Status;
use rdma::soft::sim::Rng;

use super::blocks::{Moment, Span};
use crate::sim::workload::command::{Kind, Op};

#[derive(Debug)]
struct Shield {
    /// Whether it is protected; unknown after a request without success.
    known: Option<bool>,
    /// The outstanding request.
    order: Option<u32>,
    /// When the last one ended.
    settled: Moment,
    /// Outstanding changes that protection has ended: it is not removed before they have ended,
    /// because they may still arrive, and must be rejected.
    ended: Vec<u32>,
}

/// State of the oracle for write protection.
#[derive(Debug)]
pub struct WriteProtectOracle {
    write_protect: Vec<Shield>,
    /// Requests per mille of commands.
    chance: u16,
    /// Outstanding commands that change blocks, and the blocks.
    open: BTreeMap<u32, Vec<Span>>,
}

impl WriteProtectOracle {
    /// For this number of namespaces, all unprotected.
    pub fn new(spaces: usize, chance: u16) -> WriteProtectOracle {
        let shield = |_| Shield { known: Some(false), order: None, settled: 0, ended: Vec::new() };
        WriteProtectOracle {
            write_protect: (0..spaces).map(shield).collect(),
            chance,
            open: BTreeMap::new(),
        }
    }

    /// Whether to protect or unprotect a namespace now; none: neither.
    pub fn next_order(&self, space: usize, dice: &mut Rng) -> Option<bool> {
        let shield = &self.write_protect[space];
        let often = if shield.known == Some(false) { 1 } else { 40 };
        let free = shield.order.is_none() && shield.ended.is_empty();
        let now = dice.per_mille(self.chance * often) && free;
        now.then(|| shield.known == Some(false) || dice.per_mille(100))
    }

    /// A command is sent.
    pub fn leaves(&mut self, op: &Op) {
        if self.chance == 0 {
            return;
        }
        if let Some(spans) = op.changes() {
            self.open.insert(op.id, spans.to_vec());
        }
        if let Kind::Protect(_) = op.kind {
            self.write_protect[op.span.space].order = Some(op.id);
        }
    }

    /// A command has ended: a response arrived, or the target can no longer hold a part of it.
    pub fn is_over(&mut self, op: &Op, now: Moment) {
        self.open.remove(&op.id);
        for shield in &mut self.write_protect {
            shield.ended.retain(|id| *id != op.id);
        }
        let shield = &mut self.write_protect[op.span.space];
        if shield.order == Some(op.id) {
            (shield.known, shield.order, shield.settled) = (None, None, now);
        }
    }

    /// The target has crashed. Protection persists.
    pub fn crash(&mut self, now: Moment) {
        self.open.clear();
        for shield in &mut self.write_protect {
            shield.ended.clear();
            if shield.order.take().is_some() {
                (shield.known, shield.settled) = (None, now);
            }
        }
    }

    /// A request was answered. Returns the changes that have happened by now or never will.
    pub fn answered(&mut self, op: &Op, status: Status, now: Moment) -> Vec<(u32, Span)> {
        let (Kind::Protect(on), space) = (&op.kind, op.span.space) else { return Vec::new() };
        let current = self.write_protect[space].order == Some(op.id);
        self.is_over(op, now);
        if !current || !status.is_success() {
            return Vec::new();
        }
        self.write_protect[space].known = Some(*on);
        let spans = self.open.iter().flat_map(|(id, spans)| spans.iter().map(|s| (*id, *s)));
        let ended: Vec<_> = spans.filter(|(_, span)| *on && span.space == space).collect();
        self.write_protect[space].ended = ended.iter().map(|(id, _)| *id).collect();
        ended
    }

    /// Checks the response to a command that changes blocks.
    ///
    /// # Errors
    /// It is invalid.
    pub fn check(&self, op: &Op, status: Status) -> Result<(), String> {
        let shield = &self.write_protect[op.span.space];
        let refused = status.is(Status::NAMESPACE_WRITE_PROTECTED);
        if op.changes().is_none() {
            return match refused {
                true => Err("it writes nothing, and was refused for write protection".to_owned()),
                false => Ok(()),
            };
        }
        if shield.order.is_some() || shield.settled >= op.began {
            return Ok(());
        }
        match (shield.known, refused, status.is_success()) {
            (Some(true), _, true) => Err("it was carried out on a protected namespace".to_owned()),
            (Some(false), true, _) => Err("it was refused, and nothing is protected".to_owned()),
            _ => Ok(()),
        }
    }

    /// Whether write protection may explain a failed command.
    pub fn excuses(&self, status: Status) -> bool {
        self.chance > 0 && status.is(Status::NAMESPACE_WRITE_PROTECTED)
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::write_protect::*;

    const SPAN: Span = Span { space: 0, lba: 0, blocks: 1 };
    const PROTECTED: Status = Status::NAMESPACE_WRITE_PROTECTED;

    fn op(id: u32, began: Moment, kind: Kind) -> Op {
        Op { kind, host: 0, id, span: SPAN, began, half: 0, shift: 0 }
    }

    #[test]
    fn only_writes_to_a_protected_namespace_must_fail() {
        let mut write_protect = WriteProtectOracle::new(1, 10);
        let write = |began| op(9, began, Kind::Write { fua: false });
        let order = op(1, 10, Kind::Protect(true));
        let before = write(5);
        write_protect.leaves(&before);
        write_protect.leaves(&order);
        assert!(write_protect.check(&write(11), PROTECTED).is_ok(), "an order is under way");
        let ended = write_protect.answered(&order, Status::SUCCESS, 12);
        assert_eq!(ended, [(9, SPAN)], "a write of before does nothing any more");
        assert!(write_protect.check(&before, Status::SUCCESS).is_ok(), "it may have, before");
        assert!(write_protect.check(&write(13), Status::SUCCESS).is_err());
        assert!(write_protect.check(&write(13), PROTECTED).is_ok());
        assert!(write_protect.check(&op(8, 13, Kind::Flush), PROTECTED).is_err());
        let dice = &mut Rng::new(1);
        assert!(
            (0..9999).all(|_| write_protect.next_order(0, dice).is_none()),
            "it may still arrive"
        );
        write_protect.is_over(&before, 14);
        assert!((0..9999).any(|_| write_protect.next_order(0, dice) == Some(false)));
        let back = op(2, 20, Kind::Protect(false));
        write_protect.leaves(&back);
        assert_eq!(write_protect.answered(&back, Status::SUCCESS, 21), []);
        assert!(write_protect.check(&write(22), PROTECTED).is_err());
        assert!(write_protect.check(&write(22), Status::SUCCESS).is_ok());
    }

    #[test]
    fn an_unanswered_protect_command_leaves_both_states_possible() {
        let mut write_protect = WriteProtectOracle::new(1, 10);
        let order = op(1, 10, Kind::Protect(true));
        write_protect.leaves(&order);
        write_protect.crash(11);
        let write = op(9, 12, Kind::Write { fua: false });
        assert!(write_protect.check(&write, PROTECTED).is_ok());
        assert!(write_protect.check(&write, Status::SUCCESS).is_ok());
    }
}
