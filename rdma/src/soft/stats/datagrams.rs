//! Counters of received datagrams by outcome: each datagram has exactly one, so the counters add up
//! to the number received.

use std::ops::Index;

crate::named_enum! {
    /// Outcome of a datagram: its name in statistics is one word of lower case.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub enum DatagramOutcome {
        /// A request of a peer, executed.
        Executed = "executed",
        /// A response of a peer, accepted.
        Answered = "answered",
        /// A message of connection management, handled.
        Message = "message",
        /// Not a packet: too short, another version, an unknown operation code.
        Malformed = "malformed",
        /// To a broadcast or multicast address.
        Broadcast = "broadcast",
        /// Of another partition.
        Partition = "partition",
        /// For an unknown queue pair.
        Stray = "stray",
        /// For a queue pair whose peer is not the sender.
        Foreign = "foreign",
        /// With a wrong CRC.
        Damaged = "damaged",
        /// From another UDP port than the other packets of its queue pair.
        Port = "port",
        /// With a CRC that is valid only for an IPv4 identification that its sender does not use
        /// now: it is damaged as well, or its sender has skipped numbers.
        Implausible = "implausible",
        /// A CNP: packets of ours were marked, so the rate is reduced.
        Congestion = "congestion",
        /// A packet that the queue pair does not accept, at all or in its state.
        Unfit = "unfit",
        /// A request after a gap, kept until that is filled.
        Kept = "kept",
        /// A request after a gap that was kept before, or for which there is no room.
        Early = "early",
        /// A request that was executed before; possibly answered again.
        Late = "late",
        /// A request for which there is no receive.
        NotReady = "notready",
        /// A response to no request, or out of order.
        Unasked = "unasked",
        /// An invalid request, which has ended its connection.
        Invalid = "invalid",
        /// A request for memory without access, which has ended its connection.
        NoAccess = "noaccess",
        /// A message of connection management that is invalid, or about nothing known.
        Unknown = "unknown",
        /// A repeated connection request.
        Repeated = "repeated",
        /// A connection request that was rejected.
        Rejected = "rejected",
        /// A connection request that waits for an answer to its challenge, or for evidence about
        /// the connection that it would replace.
        Doubted = "doubted",
        /// A connection request from a source that has too many.
        Crowded = "crowded",
        /// A connection request from a source whose connections repeatedly ended without being
        /// admitted.
        Barred = "barred",
        /// A connection request from a link-local IPv6 address to a listener without a link, from
        /// which an answer could not be routed.
        LinkLocal = "linklocal",
    }
}

impl DatagramOutcome {
    /// Whether the datagram was accepted.
    pub const fn is_taken(self) -> bool {
        matches!(
            self,
            DatagramOutcome::Executed
                | DatagramOutcome::Answered
                | DatagramOutcome::Message
                | DatagramOutcome::Kept
                | DatagramOutcome::Congestion
        )
    }

    /// Whether it was a request that ended its connection.
    pub const fn is_fatal(self) -> bool {
        matches!(self, DatagramOutcome::Invalid | DatagramOutcome::NoAccess)
    }
}

/// A set of outcomes: those of datagrams that were received together.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct OutcomeSet(u32);

impl OutcomeSet {
    /// Those that prove that the other end of a connection is alive: only that knows enough to send
    /// such a datagram.
    pub(crate) const ALIVE: OutcomeSet = OutcomeSet::of(&[
        DatagramOutcome::Executed,
        DatagramOutcome::Answered,
        DatagramOutcome::Kept,
        DatagramOutcome::NotReady,
    ]);

    /// Those of a request with the expected number: as [`OutcomeSet::ALIVE`], and fatal ones.
    pub(crate) const CONFIRMING: OutcomeSet = {
        let fatal = OutcomeSet::of(&[DatagramOutcome::Invalid, DatagramOutcome::NoAccess]);
        OutcomeSet(OutcomeSet::ALIVE.0 | fatal.0)
    };

    const fn of(outcomes: &[DatagramOutcome]) -> OutcomeSet {
        let (mut set, mut at) = (0, 0);
        while at < outcomes.len() {
            set |= 1 << outcomes[at] as u32;
            at += 1;
        }
        OutcomeSet(set)
    }

    /// Adds an outcome.
    #[inline]
    pub(crate) fn insert(&mut self, outcome: DatagramOutcome) {
        self.0 |= 1 << outcome as u32;
    }

    /// Whether any outcome is in both.
    #[inline]
    pub(crate) fn has_any(self, of: OutcomeSet) -> bool {
        self.0 & of.0 != 0
    }
}

const _: () = assert!(DatagramOutcome::ALL.len() <= u32::BITS as usize);

/// Number of datagrams by outcome since the endpoint was created. Index it with a
/// [`DatagramOutcome`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// Datagrams received.
    pub received: u64,
    /// Those with a congestion mark, whatever their outcome.
    pub marked: u64,
    by_fate: [u64; DatagramOutcome::ALL.len()],
}

impl Counters {
    /// Counts a datagram, but for [`Counters::note_received`].
    pub(crate) fn count(&mut self, outcome: DatagramOutcome) {
        self.by_fate[outcome as usize] += 1;
    }

    /// Counts so many datagrams that were received with this congestion mark or without.
    pub(crate) fn note_received(&mut self, count: u64, is_marked: bool) {
        self.received += count;
        self.marked += if is_marked { count } else { 0 };
    }

    /// Datagrams that were not accepted.
    pub fn dropped(&self) -> u64 {
        let dropped = DatagramOutcome::ALL.iter().filter(|outcome| !outcome.is_taken());
        dropped.map(|outcome| self[*outcome]).sum()
    }

    /// Datagrams with an outcome: as many as were received.
    pub fn accounted(&self) -> u64 {
        self.by_fate.iter().sum()
    }
}

impl Index<DatagramOutcome> for Counters {
    type Output = u64;

    fn index(&self, outcome: DatagramOutcome) -> &u64 {
        &self.by_fate[outcome as usize]
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::stats::datagrams::*;

    #[test]
    fn datagram_outcomes_have_distinct_counters_and_names() {
        let mut counters = Counters::default();
        for (at, outcome) in DatagramOutcome::ALL.iter().enumerate() {
            assert_eq!(*outcome as usize, at);
            counters.count(*outcome);
            assert_eq!(counters[*outcome], 1, "{}", outcome.name());
            assert!(DatagramOutcome::ALL[..at].iter().all(|other| other.name() != outcome.name()));
        }
        assert_eq!(counters.accounted(), DatagramOutcome::ALL.len() as u64);
        assert_eq!(counters.dropped(), counters.accounted() - 5);
    }
}
