//! Counters of received datagrams by outcome: each datagram has exactly one, so the counters add up
//! to the number received.

use std::ops::Index;

macro_rules! outcomes {
    ($($(#[$about:meta])* $outcome:ident = $name:literal,)*) => {
        /// Outcome of a datagram.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum DatagramOutcome { $($(#[$about])* $outcome,)* }

        impl DatagramOutcome {
            /// All of them.
            pub const ALL: &[DatagramOutcome] = &[$(DatagramOutcome::$outcome,)*];

            /// A name for reports: lower case, one word.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(DatagramOutcome::$outcome => $name,)* }
            }
        }
    };
}

outcomes! {
    /// A request of a peer, executed.
    Executed = "executed",
    /// A response of a peer, taken.
    Answered = "answered",
    /// A message of connection management, acted upon.
    Message = "message",
    /// Not a packet: too short, another version, an unknown operation code.
    Malformed = "malformed",
    /// To many hosts at once: a broadcast or multicast address.
    Broadcast = "broadcast",
    /// Of another partition.
    Partition = "partition",
    /// For a queue pair that there is not.
    Stray = "stray",
    /// For a queue pair of another peer than the sender.
    Foreign = "foreign",
    /// With a wrong CRC.
    Damaged = "damaged",
    /// From another UDP port than the packets of its queue pair come from.
    Port = "port",
    /// With a CRC that is right only for an IPv4 identification that its sender does not use now: it is
    /// damaged as well, or its sender has jumped.
    Implausible = "implausible",
    /// The peer says that packets of ours have met congestion (CNP): fewer are sent at once.
    Congestion = "congestion",
    /// Nothing that the queue pair takes, or takes in its state.
    Unfit = "unfit",
    /// A request behind a gap, kept until that is filled.
    Kept = "kept",
    /// A request behind a gap that was there already, or for which there is no room.
    Early = "early",
    /// A request that has been executed before; perhaps answered again.
    Late = "late",
    /// A request for which there is no receive.
    NotReady = "notready",
    /// A response to nothing that was asked, or out of its turn.
    Unasked = "unasked",
    /// A request that breaks a rule: it has ended its connection.
    Invalid = "invalid",
    /// A request for memory that is not the peer's to use: it has ended its connection.
    NoAccess = "noaccess",
    /// A message of connection management that is none, or about nothing that there is.
    Unknown = "unknown",
    /// A request to connect that has come before.
    Repeated = "repeated",
    /// A request to connect that was refused.
    Rejected = "rejected",
    /// A request to connect that waits until its sender proves to be there, or the connection that
    /// it would replace does.
    Doubted = "doubted",
    /// A request to connect from an address that has too many.
    Crowded = "crowded",
    /// A request to connect from an address whose connections keep ending before their peers have
    /// been let in.
    Barred = "barred",
    /// A request to connect from a link-local IPv6 address: no answer would find the link.
    LinkLocal = "linklocal",
}

impl DatagramOutcome {
    /// Whether the datagram did what it was sent for.
    #[must_use]
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

    /// Whether it can only have come from who has the other end of its connection, or knows as
    /// much.
    #[must_use]
    pub(crate) const fn shows_life(self) -> bool {
        matches!(
            self,
            DatagramOutcome::Executed
                | DatagramOutcome::Answered
                | DatagramOutcome::Kept
                | DatagramOutcome::NotReady
        )
    }

    /// Whether it was a request that ended its connection.
    #[must_use]
    pub const fn is_fatal(self) -> bool {
        matches!(self, DatagramOutcome::Invalid | DatagramOutcome::NoAccess)
    }
}

/// Number of datagrams by outcome since the endpoint was created. Index it with a
/// [`DatagramOutcome`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counters {
    /// Datagrams received.
    pub received: u64,
    /// Those that the network has marked as having met congestion, whatever became of them.
    pub marked: u64,
    by_fate: [u64; DatagramOutcome::ALL.len()],
}

impl Counters {
    /// Counts one more datagram.
    pub(crate) fn count(&mut self, outcome: DatagramOutcome) {
        self.by_fate[outcome as usize] += 1;
    }

    /// Datagrams that came to nothing.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        let dropped = DatagramOutcome::ALL.iter().filter(|outcome| !outcome.is_taken());
        dropped.map(|outcome| self[*outcome]).sum()
    }

    /// Datagrams with a fate: as many as were received.
    #[must_use]
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
    fn outcomes_have_places_and_names_of_their_own() {
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
