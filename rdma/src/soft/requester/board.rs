//! What has become of each packet between the oldest unacknowledged one and the newest that was
//! sent: a ring of bits.
//!
//! # Which packets are lost
//!
//! Every sending of a packet has an ordinal. When the peer answers a packet, every other one that
//! was sent before and of which nothing was heard is overdue. It may have been overtaken only; so
//! it is given up when packets of [`TOLERANCE`] later ordinals have come through, or a moment
//! later (see `Requester`). That a packet that was sent again is lost again is seen the same way.

use std::ops::Range;

/// How many later packets may overtake one before it is taken for lost.
pub(super) const TOLERANCE: u64 = 8;

/// Bits by packet number, modulo a power of two of them.
#[derive(Debug)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: u64) -> Bits {
        Bits(vec![0; (count.next_power_of_two() / 64).max(1) as usize])
    }

    fn word(&self, at: u64) -> u64 {
        self.0[(at / 64) as usize & (self.0.len() - 1)]
    }

    fn get(&self, at: u64) -> bool {
        self.word(at) >> (at % 64) & 1 == 1
    }

    fn set(&mut self, at: u64, on: bool) {
        let index = (at / 64) as usize & (self.0.len() - 1);
        self.0[index] = self.0[index] & !(1 << (at % 64)) | u64::from(on) << (at % 64);
    }
}

/// The first number in a range whose bit is set in its word.
fn find(range: Range<u64>, word: impl Fn(u64) -> u64) -> Option<u64> {
    let mut at = range.start;
    while at < range.end {
        let rest = word(at) >> (at % 64);
        if rest != 0 {
            let found = at + u64::from(rest.trailing_zeros());
            return Some(found).filter(|found| *found < range.end);
        }
        at = (at | 63) + 1;
    }
    None
}

/// Which answer has shown that something is overdue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Evidence {
    /// An acknowledgement: it tells of all kinds of packets.
    Report,
    /// Data of a read: they tell only of other data.
    Data,
}

/// The ring.
#[derive(Debug)]
pub(super) struct Board {
    /// Nothing more is wanted of it: the data have come, or the request has.
    done: Bits,
    /// To be sent again.
    lost: Bits,
    /// Of a read.
    read: Bits,
    /// Ordinal of the last sending.
    order: Vec<u64>,
    una: u64,
    /// The peer has executed all before this one.
    executed: u64,
    next: u64,
    /// The last packet that the peer has said it lacks, and up to where it has said what it keeps.
    hole: u64,
    horizon: u64,
    /// Bits set of those between `una` and `next`.
    done_count: u64,
    lost_count: u64,
    /// Packets that were ever done.
    finished: u64,
    /// The last ordinal given.
    ordinal: u64,
    /// The highest ordinal that an acknowledgement, or that anything, has told of.
    reported: u64,
    seen: u64,
}

impl Board {
    /// For at most `span` packets at once.
    pub(super) fn new(span: u64) -> Board {
        let span = span.next_power_of_two().max(64);
        Board {
            done: Bits::new(span),
            lost: Bits::new(span),
            read: Bits::new(span),
            order: vec![0; span as usize],
            una: 0,
            executed: 0,
            next: 0,
            hole: 0,
            horizon: 0,
            done_count: 0,
            lost_count: 0,
            finished: 0,
            ordinal: 0,
            reported: 0,
            seen: 0,
        }
    }

    /// The oldest packet that is not acknowledged.
    pub(super) fn una(&self) -> u64 {
        self.una
    }

    /// The packet that has not been sent yet.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Packets that are known to be lost, and not yet sent again.
    pub(super) fn lost(&self) -> u64 {
        self.lost_count
    }

    /// The peer has executed all before this packet.
    pub(super) fn executed(&self) -> u64 {
        self.executed
    }

    /// Packets that may be between those two.
    pub(super) fn span(&self) -> u64 {
        self.order.len() as u64
    }

    /// Packets sent of which an answer is wanted.
    pub(super) fn outstanding(&self) -> u64 {
        self.next - self.una - self.done_count
    }

    /// The same, without those that are known to be lost.
    pub(super) fn in_flight(&self) -> u64 {
        self.outstanding() - self.lost_count
    }

    pub(super) fn is_read(&self, at: u64) -> bool {
        self.read.get(at)
    }

    pub(super) fn is_lost(&self, at: u64) -> bool {
        self.lost.get(at)
    }

    /// Packets that were ever done.
    pub(super) fn finished(&self) -> u64 {
        self.finished
    }

    /// Packets leave for the first time.
    pub(super) fn send(&mut self, packets: u64, read: bool) {
        for _ in 0..packets {
            let at = self.next;
            self.next += 1;
            self.done.set(at, false);
            self.lost.set(at, false);
            self.read.set(at, read);
            self.stamp(at);
        }
    }

    /// Lost packets leave again.
    pub(super) fn send_again(&mut self, packets: Range<u64>) {
        for at in packets {
            self.set_lost(at, false);
            self.stamp(at);
        }
    }

    fn stamp(&mut self, at: u64) {
        self.ordinal += 1;
        let index = self.index(at);
        self.order[index] = self.ordinal;
    }

    fn index(&self, at: u64) -> usize {
        at as usize & (self.order.len() - 1)
    }

    fn set_lost(&mut self, at: u64, lost: bool) {
        if self.lost.get(at) != lost {
            self.lost.set(at, lost);
            self.lost_count = if lost { self.lost_count + 1 } else { self.lost_count - 1 };
        }
    }

    fn set_done(&mut self, at: u64) -> bool {
        if self.done.get(at) {
            return false;
        }
        self.set_lost(at, false);
        self.done.set(at, true);
        self.done_count += 1;
        self.finished += 1;
        true
    }

    /// The peer has executed all before `upto`. Of reads that says nothing: their data may be lost.
    pub(super) fn execute(&mut self, upto: u64) {
        for at in self.executed.max(self.una)..upto.min(self.next) {
            if !self.read.get(at) {
                self.set_done(at);
            }
        }
        self.executed = self.executed.max(upto);
    }

    /// A packet's data have come, or the peer keeps it. False when that was known.
    pub(super) fn finish(&mut self, at: u64) -> bool {
        self.set_done(at)
    }

    /// The peer has answered this packet.
    pub(super) fn witness(&mut self, at: u64, evidence: Evidence) {
        let order = self.order[self.index(at)];
        self.seen = self.seen.max(order);
        if evidence == Evidence::Report {
            self.reported = self.reported.max(order);
        }
    }

    /// The peer lacks a packet, and says which of those before `horizon` it keeps. It may keep more.
    pub(super) fn lack(&mut self, hole: u64, horizon: u64) {
        (self.hole, self.horizon) = (hole, horizon);
    }

    /// The peer keeps the request of these packets of a read and has not executed it: they are not
    /// overdue.
    pub(super) fn excuse(&mut self, packets: Range<u64>) {
        for at in packets {
            self.set_lost(at, false);
            let index = self.index(at);
            self.order[index] = self.ordinal;
        }
    }

    /// The first data of a piece of a read have come: those of packet `at`. The others follow now,
    /// whatever was answered while the peer kept the request.
    pub(super) fn begin(&mut self, at: u64, piece: Range<u64>) {
        if self.order[self.index(at)] < self.seen {
            piece.for_each(|at| self.stamp(at));
        }
    }

    /// Moves `una` past all that is done and executed, and tells it.
    pub(super) fn advance(&mut self) -> u64 {
        while self.una < self.next
            && self.done.get(self.una)
            && (self.read.get(self.una) || self.una < self.executed)
        {
            self.una += 1;
            self.done_count -= 1;
        }
        self.una
    }

    /// A packet that the peer kept is wanted again.
    pub(super) fn reopen(&mut self, at: u64) {
        if self.done.get(at) {
            self.done.set(at, false);
            self.done_count -= 1;
        }
    }

    /// Gives up those of a range that are not done.
    pub(super) fn lose(&mut self, range: Range<u64>) {
        for at in range {
            if !self.done.get(at) {
                self.set_lost(at, true);
            }
        }
    }

    /// Gives up what is long overdue; of requests, that are not reads, what as many as `tolerance`
    /// have not overtaken. True when something else is overdue.
    pub(super) fn judge(&mut self, tolerance: u64) -> bool {
        let regular = self.done_count == 0 && self.lost_count == 0;
        if regular && (self.una == self.next || self.order[self.index(self.una)] >= self.seen) {
            return false;
        }
        let mut overdue = false;
        self.each_open(|board, at, order, seen, read| {
            let tolerance = if read { TOLERANCE } else { tolerance };
            if order + tolerance < seen {
                board.set_lost(at, true);
            } else if order < seen {
                overdue = true;
            }
        });
        overdue
    }

    /// Gives up what was sent before `ordinal` and is overdue, as time has passed.
    pub(super) fn condemn(&mut self, ordinal: u64) {
        self.each_open(|board, at, order, seen, _| {
            if order < seen.min(ordinal) {
                board.set_lost(at, true);
            }
        });
    }

    /// The highest ordinal that anything has told of.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// Every packet that is neither done nor lost, and that the peer might have told of: its number
    /// and ordinal, what was heard of its kind, and whether it is of a read.
    fn each_open(&mut self, mut look: impl FnMut(&mut Board, u64, u64, u64, bool)) {
        let mut at = self.una;
        let end = if self.executed <= self.hole { self.next.min(self.horizon) } else { self.next };
        loop {
            let open = |at| !(self.done.word(at) | self.lost.word(at));
            let Some(found) = find(at..end, open) else { return };
            // What the peer has not executed yet its data do not tell of.
            let read = self.read.get(found) && found < self.executed;
            let seen = if read { self.seen } else { self.reported };
            let order = self.order[self.index(found)];
            look(self, found, order, seen, read);
            at = found + 1;
        }
    }

    /// The first lost packet from `at` on.
    pub(super) fn first_lost(&self, at: u64) -> Option<u64> {
        if self.lost_count == 0 {
            return None;
        }
        find(at..self.next, |at| self.lost.word(at))
    }

    /// How many packets from a lost one on are lost, up to `end`.
    pub(super) fn lost_run(&self, at: u64, end: u64) -> u64 {
        let end = end.min(self.next);
        find(at..end, |at| !self.lost.word(at)).unwrap_or(end) - at
    }

    /// Whether all of a range are done.
    pub(super) fn are_done(&self, range: Range<u64>) -> bool {
        find(range, |at| !self.done.word(at)).is_none()
    }
}
