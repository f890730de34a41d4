//! Scoreboard of the packets in flight, from the oldest unacknowledged to the newest sent: a ring
//! of bits.
//!
//! # Loss detection
//!
//! Every sending of a packet has an ordinal. When the peer answers a packet, every unanswered one
//! that was sent before is overdue. It may only have been overtaken; so it is marked as lost when
//! packets of [`TOLERANCE`] later ordinals have been answered, or a moment later (see `Requester`).
//! Loss of a retransmission is detected in the same way.

use std::ops::Range;

/// Number of later packets that may overtake one before it is considered lost.
pub(super) const TOLERANCE: u64 = 8;

/// Bits by packet number, modulo a power of two.
#[derive(Debug)]
struct Bitmap(Vec<u64>);

impl Bitmap {
    fn new(count: u64) -> Bitmap {
        Bitmap(vec![0; (count.next_power_of_two() / 64).max(1) as usize])
    }

    fn word(&self, at: u64) -> u64 {
        self.0[(at / 64) as usize & (self.0.len() - 1)]
    }

    fn get(&self, at: u64) -> bool {
        self.word(at) >> (at % 64) & 1 == 1
    }

    /// The word that contains a bit.
    fn word_mut(&mut self, at: u64) -> &mut u64 {
        let index = (at / 64) as usize & (self.0.len() - 1);
        &mut self.0[index]
    }

    fn set(&mut self, at: u64, on: bool) {
        let word = self.word_mut(at);
        *word = *word & !(1 << (at % 64)) | u64::from(on) << (at % 64);
    }
}

/// The bits of a range, not empty, that are in the word of its first.
fn mask(range: Range<u64>) -> u64 {
    let before_end = match range.end - (range.start & !63) {
        64.. => u64::MAX,
        bits => (1 << bits) - 1,
    };
    before_end & u64::MAX << (range.start % 64)
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

/// The response that revealed a loss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Evidence {
    /// An acknowledgement: evidence about all kinds of packets.
    Report,
    /// Data of a read: evidence about other data only.
    Data,
}

/// The ring. Bits of packets that are not in flight are clear.
#[derive(Debug)]
pub(super) struct Scoreboard {
    /// Done: the data have arrived, or the peer has the request.
    done: Bitmap,
    /// To be sent again.
    lost: Bitmap,
    /// Response packets of a read.
    read: Bitmap,
    /// Ordinal of the last sending.
    order: Vec<u64>,
    una: u64,
    /// The peer has executed all before this one.
    executed: u64,
    next: u64,
    /// The end of the last read.
    read_end: u64,
    /// The last packet that the peer reported as missing, and the end of its report on what it
    /// keeps.
    hole: u64,
    horizon: u64,
    /// Bits set in `done` between `una` and `next`.
    done_count: u64,
    lost_count: u64,
    /// Total number of packets done.
    finished: u64,
    /// The last ordinal assigned.
    ordinal: u64,
    /// The highest ordinal of an acknowledgement's evidence, and of any.
    reported: u64,
    seen: u64,
}

impl Scoreboard {
    /// For at most `span` packets in flight.
    pub(super) fn new(span: u64) -> Scoreboard {
        let span = span.next_power_of_two().max(64);
        Scoreboard {
            done: Bitmap::new(span),
            lost: Bitmap::new(span),
            read: Bitmap::new(span),
            order: vec![0; span as usize],
            una: 0,
            executed: 0,
            next: 0,
            read_end: 0,
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

    /// The oldest unacknowledged packet.
    pub(super) fn una(&self) -> u64 {
        self.una
    }

    /// The next packet to be sent for the first time.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Number of packets that are known to be lost, and not yet sent again.
    pub(super) fn lost(&self) -> u64 {
        self.lost_count
    }

    /// The peer has executed all before this packet.
    pub(super) fn executed(&self) -> u64 {
        self.executed
    }

    /// Maximum of packets between those two.
    pub(super) fn span(&self) -> u64 {
        self.order.len() as u64
    }

    /// Number of packets sent and not done.
    pub(super) fn outstanding(&self) -> u64 {
        self.next - self.una - self.done_count
    }

    /// As [`Scoreboard::outstanding`], without those known to be lost.
    pub(super) fn in_flight(&self) -> u64 {
        self.outstanding() - self.lost_count
    }

    pub(super) fn is_read(&self, at: u64) -> bool {
        self.read.get(at)
    }

    pub(super) fn is_lost(&self, at: u64) -> bool {
        self.lost.get(at)
    }

    /// Total number of packets done.
    pub(super) fn finished(&self) -> u64 {
        self.finished
    }

    /// Packets are sent for the first time.
    #[inline(always)] // for each packet
    pub(super) fn send(&mut self, packets: u64, read: bool) {
        for at in self.next..self.next + packets {
            if read {
                self.read.set(at, true);
            }
            self.stamp(at);
        }
        self.next += packets;
        if read {
            self.read_end = self.next;
        }
    }

    /// Lost packets are sent again.
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

    #[inline]
    fn set_done(&mut self, at: u64) -> bool {
        let (word, bit) = (self.done.word_mut(at), 1 << (at % 64));
        if *word & bit != 0 {
            return false;
        }
        *word |= bit;
        if self.lost_count > 0 {
            self.set_lost(at, false);
        }
        self.done_count += 1;
        self.finished += 1;
        true
    }

    /// The peer has executed all before `upto`. This is no evidence for reads: their data may be
    /// lost.
    pub(super) fn execute(&mut self, upto: u64) {
        let (mut at, end) = (self.executed.max(self.una), upto.min(self.next));
        while at < end {
            let executed = mask(at..end) & !(self.read.word(at) | self.done.word(at));
            let lost = self.lost.word(at) & executed;
            *self.lost.word_mut(at) &= !lost;
            *self.done.word_mut(at) |= executed;
            let count = u64::from(executed.count_ones());
            self.lost_count -= u64::from(lost.count_ones());
            self.done_count += count;
            self.finished += count;
            at = (at | 63) + 1;
        }
        self.executed = self.executed.max(upto);
    }

    /// As [`Scoreboard::execute`] and then [`Scoreboard::advance`].
    #[inline]
    pub(super) fn acknowledge(&mut self, upto: u64) -> u64 {
        let (una, states) = (self.una, self.done_count + self.lost_count);
        if states > 0 || self.read_end > una || self.executed > una {
            self.execute(upto);
            return self.advance();
        }
        // No packet in flight has a bit, as a rule: so many more are done.
        self.executed = self.executed.max(upto);
        self.una = una.max(upto.min(self.next));
        self.finished += self.una - una;
        self.una
    }

    /// The data of a packet have arrived, or the peer keeps the packet. Returns false if that was
    /// known.
    #[inline]
    pub(super) fn finish(&mut self, at: u64) -> bool {
        self.set_done(at)
    }

    /// The peer has answered this packet.
    pub(super) fn on_ack(&mut self, at: u64, evidence: Evidence) {
        let order = self.order[self.index(at)];
        self.seen = self.seen.max(order);
        if evidence == Evidence::Report {
            self.reported = self.reported.max(order);
        }
    }

    /// The peer reports a missing packet, and which of those before `horizon` it keeps. It may keep
    /// more.
    pub(super) fn on_gap(&mut self, hole: u64, horizon: u64) {
        (self.hole, self.horizon) = (hole, horizon);
    }

    /// The peer keeps the request of these packets of a read and has not executed it: they are not
    /// overdue.
    pub(super) fn mark_deferred(&mut self, packets: Range<u64>) {
        for at in packets {
            self.set_lost(at, false);
            let index = self.index(at);
            self.order[index] = self.ordinal;
        }
    }

    /// The first data of a piece of a read have arrived: those of packet `at`. The others follow
    /// now, whatever was answered while the peer kept the request.
    pub(super) fn begin(&mut self, at: u64, piece: Range<u64>) {
        if self.order[self.index(at)] < self.seen {
            piece.for_each(|at| self.stamp(at));
        }
    }

    /// Moves `una` past everything done and executed, and returns it.
    pub(super) fn advance(&mut self) -> u64 {
        while self.una < self.next {
            let una = self.una;
            let executed = if una < self.executed { mask(una..self.executed) } else { 0 };
            let past = self.done.word(una) & (self.read.word(una) | executed);
            let run = u64::from((!(past >> (una % 64))).trailing_zeros());
            if run == 0 {
                break;
            }
            let gone = mask(una..una + run);
            *self.done.word_mut(una) &= !gone;
            *self.read.word_mut(una) &= !gone;
            self.una += run;
            self.done_count -= run;
        }
        self.una
    }

    /// A packet that the peer kept is to be sent again.
    pub(super) fn reopen(&mut self, at: u64) {
        if self.done.get(at) {
            self.done.set(at, false);
            self.done_count -= 1;
        }
    }

    /// Marks packets of a range as lost that are not done.
    pub(super) fn lose(&mut self, range: Range<u64>) {
        for at in range {
            if !self.done.get(at) {
                self.set_lost(at, true);
            }
        }
    }

    /// Marks packets as lost that are long overdue; of requests other than reads, those that
    /// `tolerance` later ones have overtaken. Returns true if others are overdue.
    pub(super) fn detect_loss(&mut self, tolerance: u64) -> bool {
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

    /// Marks packets as lost that were sent before `ordinal` and are overdue, as time has passed.
    pub(super) fn mark_lost(&mut self, ordinal: u64) {
        self.each_open(|board, at, order, seen, _| {
            if order < seen.min(ordinal) {
                board.set_lost(at, true);
            }
        });
    }

    /// The highest ordinal of any evidence.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// Every packet that is neither done nor lost, and that the evidence may concern: its number
    /// and ordinal, the evidence for its kind, and whether it is of a read.
    fn each_open(&mut self, mut look: impl FnMut(&mut Scoreboard, u64, u64, u64, bool)) {
        let mut at = self.una;
        let end = if self.executed <= self.hole { self.next.min(self.horizon) } else { self.next };
        loop {
            let open = |at| !(self.done.word(at) | self.lost.word(at));
            let Some(found) = find(at..end, open) else { return };
            // For packets that the peer has not executed, data are no evidence.
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

    /// Length of the run of lost packets from `at`, up to `end`.
    pub(super) fn lost_run(&self, at: u64, end: u64) -> u64 {
        let end = end.min(self.next);
        find(at..end, |at| !self.lost.word(at)).unwrap_or(end) - at
    }

    /// Whether all packets of a range are done.
    pub(super) fn are_done(&self, range: Range<u64>) -> bool {
        find(range, |at| !self.done.word(at)).is_none()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::soft::qp::requester::scoreboard::*;

    /// The state of each packet, one by one: the model.
    #[derive(Default)]
    struct Plain {
        packets: Vec<(bool, bool, bool)>,
        una: usize,
        executed: usize,
    }

    impl Plain {
        fn execute(&mut self, upto: usize) {
            for at in self.executed.max(self.una)..upto.min(self.packets.len()) {
                let (done, lost, read) = &mut self.packets[at];
                (*done, *lost) = (*done | !*read, *lost & *read & !*done);
            }
            self.executed = self.executed.max(upto);
        }

        fn advance(&mut self) {
            let past = |at: usize, (done, _, read): (bool, bool, bool)| {
                done && (read || at < self.executed)
            };
            while self.packets.get(self.una).is_some_and(|packet| past(self.una, *packet)) {
                self.una += 1;
            }
        }
    }

    proptest! {
        /// Words at a time give the same as bit by bit; and no bits are left for packets that use
        /// the same places later.
        #[test]
        fn scoreboard_matches_a_model_packet_by_packet(
            steps in prop::collection::vec((0u8..8, any::<u64>(), any::<bool>()), 0..300),
        ) {
            let (mut board, mut plain) = (Scoreboard::new(256), Plain::default());
            for (step, number, read) in steps {
                let (una, next) = (plain.una as u64, plain.packets.len() as u64);
                let at = una + number % (next - una + 1);
                match step {
                    0 | 1 => {
                        let packets = (number % 70).min(una + board.span() - next);
                        board.send(packets, read);
                        plain.packets.extend((0..packets).map(|_| (false, false, read)));
                    }
                    2 => {
                        board.execute(at);
                        plain.execute(at as usize);
                    }
                    3 if at < next => {
                        board.finish(at);
                        let (done, lost, _) = &mut plain.packets[at as usize];
                        (*done, *lost) = (true, false);
                    }
                    6 | 7 => {
                        board.acknowledge(at);
                        plain.execute(at as usize);
                        plain.advance();
                    }
                    4 => {
                        let upto = next.min(at + number % 9);
                        board.lose(at..upto);
                        for (done, lost, _) in &mut plain.packets[at as usize..upto as usize] {
                            *lost |= !*done;
                        }
                    }
                    _ => {
                        board.advance();
                        plain.advance();
                    }
                }
                let open = &plain.packets[plain.una..];
                let next = plain.packets.len() as u64;
                prop_assert_eq!((board.una(), board.next()), (plain.una as u64, next));
                prop_assert_eq!(board.executed(), plain.executed as u64);
                let lost = open.iter().filter(|(_, lost, _)| *lost).count();
                let done = open.iter().filter(|(done, ..)| *done).count();
                prop_assert_eq!((board.lost(), board.done_count), (lost as u64, done as u64));
                prop_assert_eq!(board.finished(), board.una + board.done_count);
                for (at, packet) in (board.una..).zip(open) {
                    let got = (board.done.get(at), board.lost.get(at), board.read.get(at));
                    prop_assert_eq!(got, *packet, "packet {}", at);
                }
                for bits in [&board.done, &board.lost, &board.read] {
                    let set: u32 = bits.0.iter().map(|word| word.count_ones()).sum();
                    let open = (board.una..board.next).filter(|at| bits.get(*at)).count();
                    prop_assert_eq!(set as usize, open, "bits of nobody");
                }
            }
        }
    }
}
