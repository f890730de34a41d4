//! Oracle for Format NVM, and for the block size that each host uses: written from the
//! specifications, not from the implementation.
//!
//! Hosts send one such command at a time for each namespace. While it is outstanding I/O may be
//! rejected; a command that was sent after the last one had ended, with none outstanding, must not
//! be. A format leaves zeros: durable once it has completed with success, and otherwise there or
//! not, block by block. The block size is the one that was last completed, also after a restart;
//! after a format without a response it is one of two, until a host queries it. A new block size
//! that a host has seen before the response is not reverted any more.
//!
//! Hosts learn of another block size by an event, when they connect, or by a rejected command; then
//! they query it. Until then they use what they know, and no command that moves data may be
//! executed so. Commands without data would be executed, elsewhere: hosts send none while the size
//! is not certain, and begin no change of size while one of those is outstanding.

use nvme::Status;
use nvme::identify::IdentifyNamespace;
use rdma::soft::sim::Rng;

use super::blocks::{Moment, SECTOR_BYTES, Span};
use crate::sim::scenario::Profile;
use crate::sim::workload::command::{Kind, Op};

/// log2 of the sectors in a block: the possible values.
pub const SHIFTS: [u8; 2] = [0, 3];

#[derive(Clone, Debug)]
struct Format {
    /// The outstanding command, and log2 of the sectors in a block that it requests.
    order: Option<(u32, u8)>,
    /// When it was sent.
    sent: Moment,
    /// A host has seen the block size that it requests, which is another than before.
    seen: bool,
    /// When the last one ended.
    settled: Moment,
    /// log2 of the sectors in a block, if certain.
    size: Option<u8>,
    /// Outstanding commands without data that change blocks.
    bare: Vec<u32>,
}

impl Format {
    /// Ends a command without a response.
    fn end_unanswered(&mut self, new_size: u8, now: Moment) {
        let unsure = self.size.filter(|size| *size == new_size);
        self.size = if self.seen { Some(new_size) } else { unsure };
        (self.order, self.settled) = (None, now);
    }
}

/// What a host knows of a namespace.
#[derive(Clone, Copy, Debug)]
struct Belief {
    shift: u8,
    /// It has to query it.
    doubts: bool,
    /// It has sent the query.
    asked: bool,
}

/// State of the oracle for Format NVM.
#[derive(Debug)]
pub struct Formats {
    formats: Vec<Format>,
    /// By host and namespace.
    beliefs: Vec<Vec<Belief>>,
    /// Formats per mille of commands.
    chance: u16,
    /// Whether the block size may change.
    reshapes: bool,
}

impl Formats {
    /// For all hosts and namespaces.
    pub fn new(profile: &Profile) -> Formats {
        let shifts = || (0..profile.shapes.len()).map(|space| profile.shift(space));
        let format = |shift| Format {
            order: None,
            sent: 0,
            seen: false,
            settled: 0,
            size: Some(shift),
            bare: vec![],
        };
        let belief = |shift| Belief { shift, doubts: false, asked: false };
        Formats {
            formats: shifts().map(format).collect(),
            beliefs: vec![shifts().map(belief).collect(); profile.hosts],
            chance: profile.formats,
            reshapes: profile.reshapes,
        }
    }

    /// A format of a namespace, if a host is to send one.
    pub fn next_order(&self, space: usize, dice: &mut Rng) -> Option<Kind> {
        let format = &self.formats[space];
        if !dice.per_mille(self.chance) || format.order.is_some() {
            return None;
        }
        let other = self.reshapes && format.bare.is_empty() && dice.per_mille(700);
        let shift = match format.size {
            Some(size) if !other => size,
            Some(size) => SHIFTS[usize::from(size == SHIFTS[0])],
            None if other => SHIFTS[dice.below(2) as usize],
            None => return None,
        };
        let index = u8::from(self.reshapes && shift != SHIFTS[0]);
        Some(Kind::Format { erase: dice.per_mille(500), index, shift })
    }

    /// log2 of the sectors in a block, as known to a host.
    pub fn believed(&self, host: usize, space: usize) -> u8 {
        self.beliefs[host][space].shift
    }

    /// A namespace that a host has to query, and has not.
    pub fn next_doubt(&self, host: usize) -> Option<usize> {
        self.beliefs[host].iter().position(|belief| belief.doubts && !belief.asked)
    }

    /// Whether a host, and every other, is certain about a namespace.
    pub fn is_clear(&self, host: usize, space: usize) -> bool {
        let belief = self.beliefs[host][space];
        self.formats[space].order.is_none() && !belief.doubts && !belief.asked
    }

    /// Whether a format may have been in progress while a command was.
    pub fn may_hold(&self, op: &Op) -> bool {
        let Format { order, settled, .. } = self.formats[op.span.space];
        order.is_some() || settled >= op.began
    }

    /// Whether one of them has not ended.
    pub fn are_under_way(&self) -> bool {
        self.formats.iter().any(|format| format.order.is_some())
    }

    /// Whether a host may send commands without data that change blocks.
    pub fn may_be_bare(&self, host: usize, space: usize) -> bool {
        let Format { order, size, .. } = self.formats[space];
        let keeps = order.is_none_or(|(_, new_size)| Some(new_size) == size);
        keeps && size == Some(self.beliefs[host][space].shift)
    }

    /// Whether a host may send a command on these blocks: whole ones, as it knows them.
    pub fn can_send(&self, host: usize, kind: &Kind, span: Span) -> bool {
        let shift = self.beliefs[host][span.space].shift;
        let moves = matches!(kind, Kind::Read | Kind::Write { .. } | Kind::Compare(_));
        (span.lba | span.blocks).trailing_zeros() >= shift.into()
            && (moves || self.may_be_bare(host, span.space))
    }

    /// A host has to query a namespace.
    pub fn doubt(&mut self, host: usize, space: usize) {
        if let Some(belief) = self.beliefs[host].get_mut(space).filter(|_| self.reshapes) {
            belief.doubts = true;
        }
    }

    /// The association of a host has ended: it queries when it has another one.
    pub fn forget(&mut self, host: usize) {
        for space in 0..self.formats.len() {
            self.beliefs[host][space].asked = false;
            self.doubt(host, space);
        }
    }

    /// A command is sent.
    pub fn leaves(&mut self, op: &Op) {
        let format = &mut self.formats[op.span.space];
        match op.kind {
            Kind::Format { shift, .. } => {
                (format.order, format.sent, format.seen) = (Some((op.id, shift)), op.began, false);
            }
            _ if op.is_bare() => format.bare.push(op.id),
            _ if op.asks_shape() => {
                let belief = &mut self.beliefs[op.host][op.span.space];
                (belief.doubts, belief.asked) = (false, true);
            }
            _ => {}
        }
    }

    /// A command has ended: answered, or lost for so long that the target has nothing of it.
    pub fn is_over(&mut self, op: &Op, now: Moment) {
        let format = &mut self.formats[op.span.space];
        format.bare.retain(|id| *id != op.id);
        if let Some((id, new_size)) = format.order
            && id == op.id
        {
            format.end_unanswered(new_size, now);
        }
    }

    /// The target has crashed, and with it the erasing.
    pub fn crash(&mut self, now: Moment) {
        for format in &mut self.formats {
            format.bare.clear();
            if let Some((_, new_size)) = format.order.take() {
                format.end_unanswered(new_size, now);
            }
        }
    }

    /// The association of a host has ended before this response.
    pub fn lost(&mut self, op: &Op) {
        if op.asks_shape() {
            self.beliefs[op.host][op.span.space].asked = false;
            self.doubt(op.host, op.span.space);
        }
    }

    /// A command was answered.
    ///
    /// # Errors
    /// The response is invalid.
    pub fn answered(&mut self, op: &Op, status: Status, now: Moment) -> Result<(), String> {
        let verdict = self.check(op, status);
        let format = &mut self.formats[op.span.space];
        if let Kind::Format { .. } = op.kind
            && let Some((id, new_size)) = format.order
            && id == op.id
        {
            let size =
                if status.is_success() || format.seen { Some(new_size) } else { format.size };
            (format.order, format.settled, format.size) = (None, now, size);
            // The host that sent it knows the new size.
            if status.is_success() {
                self.beliefs[op.host][op.span.space].shift = new_size;
            }
        }
        self.is_over(op, now);
        let of_length = status.is(Status::DATA_SGL_LENGTH_INVALID);
        if of_length || op.moves_blocks() && status.is(Status::INVALID_FIELD) {
            self.doubt(op.host, op.span.space);
        }
        if op.asks_shape() && !status.is_success() {
            self.lost(op);
        }
        verdict
    }

    /// A host has received the block size.
    ///
    /// # Errors
    /// It is wrong.
    pub fn learns(&mut self, op: &Op, page: &[u8]) -> Result<(), String> {
        let belief = &mut self.beliefs[op.host][op.span.space];
        belief.asked = false;
        let page = page.first_chunk().map(IdentifyNamespace::parse);
        let page = page.ok_or("the page is cut off")?;
        // The page of a missing namespace is all zeros.
        let Some(bytes) = page.block_bytes().filter(|_| page.nsze > 0) else {
            self.doubt(op.host, op.span.space);
            return Ok(());
        };
        let shift = (bytes / SECTOR_BYTES).trailing_zeros() as u8;
        belief.shift = shift;
        let Format { order, sent, seen, settled, size, .. } = &mut self.formats[op.span.space];
        if let Some((_, new_size)) = order {
            let is_new = shift == *new_size && size.is_some_and(|size| size != shift);
            *seen |= is_new && op.began > *sent && op.began > *settled;
            return Ok(());
        }
        if *settled >= op.began {
            return Ok(());
        }
        match size.replace(shift) {
            Some(size) if size != shift => {
                Err(format!("it has blocks of {bytes} bytes, not of {}", SECTOR_BYTES << size))
            }
            _ => Ok(()),
        }
    }

    fn check(&self, op: &Op, status: Status) -> Result<(), String> {
        if self.may_hold(op) {
            return Ok(());
        }
        let size = self.formats[op.span.space].size;
        if status.is(Status::FORMAT_IN_PROGRESS) {
            return Err("it was refused for a format, and nobody formats".to_owned());
        }
        let Some(size) = size.filter(|_| op.moves_blocks()) else { return Ok(()) };
        let of_length = status.is(Status::DATA_SGL_LENGTH_INVALID);
        match (size == op.shift, status.is_success(), of_length) {
            (false, true, _) => Err("it was carried out with blocks of another size".to_owned()),
            (true, _, true) => Err("it was refused for its length, which is right".to_owned()),
            _ => Ok(()),
        }
    }

    /// Whether a format may explain a failed command; [`Formats::answered`] is exact.
    pub fn excuses(&self, op: &Op, status: Status) -> bool {
        // The same number of blocks of another size may exceed the maximum transfer (MDTS).
        let of_size =
            [Status::DATA_SGL_LENGTH_INVALID, Status::LBA_OUT_OF_RANGE, Status::INVALID_FIELD];
        let stale = self.formats[op.span.space].settled >= op.began
            || self.formats[op.span.space].order.is_some()
            || self.formats[op.span.space].size != Some(op.shift);
        let of_size = of_size.into_iter().any(|of| status.is(of));
        self.chance > 0 && status.is(Status::FORMAT_IN_PROGRESS)
            || self.reshapes && stale && of_size && op.is_for_blocks()
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::oracle::format::*;
    use crate::sim::workload::command::Question;

    const WHOLE: Span = Span { space: 1, lba: 0, blocks: 8 };
    const REFUSED: Status = Status::FORMAT_IN_PROGRESS;

    fn op(id: u32, began: Moment, shift: u8, kind: Kind) -> Op {
        Op { kind, host: 0, id, span: WHOLE, began, half: 0, shift }
    }

    fn format(id: u32, shift: u8) -> Op {
        op(id, 5, 3, Kind::Format { erase: true, index: 0, shift })
    }

    fn formats() -> Formats {
        let profile = Profile::new(1, 10);
        Formats::new(&Profile { hosts: 2, formats: 10, reshapes: true, ..profile })
    }

    #[test]
    fn commands_are_refused_while_a_format_is_under_way_and_not_otherwise() {
        let mut formats = formats();
        let read = |began| op(2, began, 3, Kind::Read);
        assert!(formats.check(&read(1), REFUSED).is_err());
        formats.leaves(&format(1, 3));
        assert!(formats.check(&read(6), REFUSED).is_ok());
        let dice = &mut Rng::new(1);
        assert!((0..9999).all(|_| formats.next_order(1, dice).is_none()), "one at a time");
        assert!((0..9999).any(|_| formats.next_order(0, dice).is_some()));
        formats.is_over(&format(1, 3), 9);
        assert!(formats.check(&read(8), REFUSED).is_ok(), "it may have arrived before");
        assert!(formats.check(&read(10), REFUSED).is_err());
        formats.leaves(&format(1, 3));
        formats.crash(20);
        assert!(formats.check(&read(21), REFUSED).is_err());
    }

    #[test]
    fn transfers_must_use_the_acknowledged_block_size() {
        let mut formats = formats();
        let (refused, done) = (Status::DATA_SGL_LENGTH_INVALID, Status::SUCCESS);
        let read = |began, shift| op(2, began, shift, Kind::Read);
        assert!(formats.check(&read(1, 0), done).is_err());
        assert!(formats.check(&read(1, 3), refused).is_err());
        formats.leaves(&format(1, 0));
        assert!(
            formats.check(&read(6, 0), done).is_ok() && formats.check(&read(6, 3), done).is_ok()
        );
        assert_eq!(formats.answered(&format(1, 0), done, 9), Ok(()));
        assert!(
            formats.check(&read(10, 3), done).is_err() && formats.excuses(&read(10, 3), refused)
        );
        assert!(
            formats.check(&read(10, 0), done).is_ok() && !formats.excuses(&read(10, 0), refused)
        );
        assert_eq!((formats.believed(0, 1), formats.believed(1, 1)), (0, 3));
    }

    #[test]
    fn identify_must_report_a_possible_block_size() {
        let mut formats = formats();
        let ask = |began| op(3, began, 3, Kind::Admin(Question::Namespace));
        let mut told = IdentifyNamespace { nsze: 8, ..IdentifyNamespace::default() };
        told.lbaf[0].lbads = 9;
        let mut page = [0; 4096];
        told.emit(&mut page);
        assert!(formats.learns(&ask(6), &page).is_err(), "nobody has formatted it");
        let mut formats = self::formats();
        formats.leaves(&format(1, 0));
        formats.crash(8);
        assert!(!formats.may_be_bare(0, 1), "it is one of two");
        assert_eq!(formats.next_doubt(0), None);
        formats.forget(0);
        assert_eq!(formats.next_doubt(0), Some(0));
        formats.leaves(&ask(9));
        assert!(!formats.is_clear(0, 1));
        assert_eq!(formats.learns(&ask(9), &page), Ok(()));
        assert!(formats.is_clear(0, 1) && formats.may_be_bare(0, 1));
        assert!(formats.check(&op(2, 10, 3, Kind::Read), Status::SUCCESS).is_err());
        // A block size that a host has seen is not reverted.
        let mut formats = self::formats();
        formats.leaves(&format(1, 0));
        assert_eq!(formats.learns(&ask(6), &page), Ok(()));
        formats.crash(8);
        assert!(formats.may_be_bare(0, 1));
        told.lbaf[0].lbads = 12;
        told.emit(&mut page);
        assert!(formats.learns(&ask(9), &page).is_err());
    }
}
