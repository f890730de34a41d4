//! Counters of link errors: losses, and peers that were not ready. Each connection has plain
//! counters, changed only at an error; they are summed by address when they are read.

use std::net::IpAddr;

use crate::wire::header::{Nak, Syndrome};

crate::named_enum! {
    /// A kind of link error: its name in statistics is of lower case, with underscores.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum LinkError {
        /// A packet was retransmitted: a request, or data of a read that a peer requested again.
        SentAgain = "sent_again",
        /// The oldest packet was retransmitted after a timeout without any response.
        Timeout = "timeout",
        /// A NAK for missing packets was sent (PSN sequence error).
        SequenceSent = "nak_sequence_sent",
        /// Such a NAK was received.
        SequenceReceived = "nak_sequence_received",
        /// An RNR NAK was sent: there was no receive for a message.
        NotReadySent = "rnr_nak_sent",
        /// An RNR NAK was received.
        NotReadyReceived = "rnr_nak_received",
        /// A NAK was sent for a request that ended the connection (any other NAK).
        RefusalSent = "nak_error_sent",
        /// Such a NAK was received.
        RefusalReceived = "nak_error_received",
        /// A CNP was sent: packets of a peer were marked.
        CongestionSent = "cnp_sent",
        /// A CNP was received: the rate to the peer is reduced.
        CongestionReceived = "cnp_received",
        /// Trains are not used any more for a peer: only the first packet of each has arrived.
        TrainsEnded = "trains_ended",
    }
}

/// Number of link errors by kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct LinkErrorCounts([u64; LinkError::ALL.len()]);

impl LinkErrorCounts {
    /// Number of this kind.
    pub fn of(&self, trouble: LinkError) -> u64 {
        self.0[trouble as usize]
    }

    pub(crate) fn note(&mut self, trouble: LinkError) {
        self.0[trouble as usize] += 1;
    }

    /// Counts a sent NAK, if the acknowledgement is one.
    pub(crate) fn note_sent(&mut self, syndrome: Syndrome) {
        match syndrome {
            Syndrome::Ack(_) | Syndrome::Reserved(_) => {}
            Syndrome::Rnr(_) => self.note(LinkError::NotReadySent),
            Syndrome::Nak(Nak::Sequence) => self.note(LinkError::SequenceSent),
            Syndrome::Nak(_) => self.note(LinkError::RefusalSent),
        }
    }

    /// Counts a received NAK, if the acknowledgement is one.
    pub(crate) fn note_received(&mut self, syndrome: Syndrome) {
        match syndrome {
            Syndrome::Ack(_) | Syndrome::Reserved(_) => {}
            Syndrome::Rnr(_) => self.note(LinkError::NotReadyReceived),
            Syndrome::Nak(Nak::Sequence) => self.note(LinkError::SequenceReceived),
            Syndrome::Nak(_) => self.note(LinkError::RefusalReceived),
        }
    }

    pub(crate) fn add(&mut self, other: &LinkErrorCounts) {
        self.0.iter_mut().zip(other.0).for_each(|(own, more)| *own += more);
    }
}

/// Maximum of local addresses that are counted separately; others are counted with the last.
const MOST_ADDRESSES: usize = 32;

/// Link errors of closed connections by local address.
#[derive(Debug, Default)]
pub(crate) struct ByAddress(Vec<(IpAddr, LinkErrorCounts)>);

impl ByAddress {
    /// A connection begins at this address.
    pub(crate) fn begin(&mut self, at: IpAddr) {
        let known = self.0.iter().any(|(own, _)| *own == at);
        if !known && self.0.len() < MOST_ADDRESSES {
            self.0.push((at, LinkErrorCounts::default()));
        }
    }

    /// A connection with these errors has ended.
    pub(crate) fn end(&mut self, at: IpAddr, troubles: &LinkErrorCounts) {
        let place = self.place(at);
        if let Some((_, own)) = self.0.get_mut(place) {
            own.add(troubles);
        }
    }

    /// The sums of each address, including those of its `live` connections.
    pub(crate) fn each(
        &self,
        live: impl Iterator<Item = (IpAddr, LinkErrorCounts)> + Clone,
        mut visit: impl FnMut(IpAddr, &LinkErrorCounts),
    ) {
        for (place, (at, ended)) in self.0.iter().enumerate() {
            let mut sum = *ended;
            live.clone()
                .filter(|(own, _)| self.place(*own) == place)
                .for_each(|(_, more)| sum.add(&more));
            visit(*at, &sum);
        }
    }

    fn place(&self, at: IpAddr) -> usize {
        let found = self.0.iter().position(|(own, _)| *own == at);
        found.unwrap_or(MOST_ADDRESSES - 1)
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::stats::link_errors::*;

    fn address(n: u8) -> IpAddr {
        [192, 0, 2, n].into()
    }

    fn told(all: &ByAddress, live: &[(IpAddr, LinkErrorCounts)]) -> Vec<(IpAddr, u64)> {
        let mut told = Vec::new();
        all.each(live.iter().copied(), |at, sum| told.push((at, sum.of(LinkError::Timeout))));
        told
    }

    #[test]
    fn link_errors_have_distinct_counters_and_names() {
        let mut troubles = LinkErrorCounts::default();
        for (at, trouble) in LinkError::ALL.iter().enumerate() {
            assert_eq!(*trouble as usize, at);
            troubles.note(*trouble);
            assert_eq!(troubles.of(*trouble), 1);
            assert!(LinkError::ALL[..at].iter().all(|other| other.name() != trouble.name()));
        }
    }

    #[test]
    fn counts_of_open_and_closed_connections_are_summed() {
        let mut all = ByAddress::default();
        all.begin(address(1));
        all.begin(address(2));
        all.begin(address(1));
        let mut one = LinkErrorCounts::default();
        one.note(LinkError::Timeout);
        all.end(address(2), &one);
        let live = [(address(1), one), (address(2), one), (address(2), one)];
        assert_eq!(told(&all, &live), [(address(1), 1), (address(2), 3)]);
        assert_eq!(told(&all, &[]), [(address(1), 0), (address(2), 1)]);
    }

    #[test]
    fn too_many_addresses_share_the_last_place() {
        let mut all = ByAddress::default();
        (0..40).for_each(|n| all.begin(address(n)));
        let mut one = LinkErrorCounts::default();
        one.note(LinkError::Timeout);
        (0..40).for_each(|n| all.end(address(n), &one));
        let told = told(&all, &[(address(39), one)]);
        assert_eq!((told.len(), told[0].1, told[31].1), (32, 1, 10));
    }
}
