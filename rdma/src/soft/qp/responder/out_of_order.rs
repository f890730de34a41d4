//! Packets received before a missing one. They are kept in the
//! [`ReorderBuffer`](crate::soft::qp::reorder_buffer::ReorderBuffer); a peer of this implementation
//! gets a list of them.

use std::collections::VecDeque;

use crate::soft::qp::reorder_buffer::ReorderBuffer;
use crate::wire::header::Packet;

/// Marks a missing packet.
const NONE: u32 = u32::MAX;
/// A peer of this implementation gets a report at the latest after this many early packets.
const REPORT_INTERVAL: u32 = 4;

/// Handling of an out-of-order packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReorderOutcome {
    /// It was kept.
    Kept,
    /// It was kept before: the peer, or the network, has repeated it.
    Again,
    /// There is no room for it.
    Dropped,
}

/// The out-of-order packets of one queue pair.
#[derive(Debug)]
pub(super) struct OutOfOrder {
    /// Entries in the reorder buffer, from the missing packet on.
    places: VecDeque<u32>,
    count: u32,
    most: usize,
    mtu: usize,
    /// The peer gets reports of kept packets.
    selective: bool,
    /// Kept packets that were not reported yet.
    unreported: u32,
}

impl OutOfOrder {
    pub(super) fn new(most: u32, mtu: u32, selective: bool) -> OutOfOrder {
        let (most, mtu) = (most as usize, mtu as usize);
        OutOfOrder { places: VecDeque::new(), count: 0, most, mtu, selective, unreported: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the peer is of this implementation, and sends only missing packets again.
    pub(super) fn is_selective(&self) -> bool {
        self.selective
    }

    /// Whether there is something to report, and the peer understands it.
    pub(super) fn has_report(&self) -> bool {
        self.selective && self.count > 0
    }

    /// Keeps the packet that is `ahead` of the missing one, if there is room; also returns whether
    /// a report is due.
    pub(super) fn keep(
        &mut self,
        ahead: u32,
        packet: &Packet<'_>,
        reorder: &mut ReorderBuffer,
    ) -> (ReorderOutcome, bool) {
        let (ahead, end) = (ahead as usize, self.places.len());
        if self.places.get(ahead).is_some_and(|place| *place != NONE) {
            return (ReorderOutcome::Again, packet.bth.ack_request);
        }
        let fits = ahead < self.most && packet.payload.len() <= self.mtu;
        let Some(place) = fits.then(|| reorder.put(packet, self.count)).flatten() else {
            return (ReorderOutcome::Dropped, packet.bth.ack_request);
        };
        self.places.resize(end.max(ahead + 1), NONE);
        self.places[ahead] = place;
        self.count += 1;
        self.unreported += 1;
        let gap = ahead > end.max(1) || self.count == 1;
        let report = gap || packet.bth.ack_request || self.unreported >= REPORT_INTERVAL;
        if report {
            self.unreported = 0;
        }
        (ReorderOutcome::Kept, report)
    }

    /// This many packets, the missing one first, were received. Returns the entry of the packet
    /// that is expected now, if it is kept.
    pub(super) fn pass(&mut self, packets: u32, reorder: &mut ReorderBuffer) -> Option<u32> {
        for _ in 0..packets {
            match self.places.pop_front() {
                None => break,
                Some(NONE) => {}
                Some(place) => {
                    // Its number is among those of a read, where no request may be.
                    reorder.drop(place);
                    self.count -= 1;
                }
            }
        }
        let place = self.places.front_mut().filter(|place| **place != NONE)?;
        self.count -= 1;
        Some(std::mem::replace(place, NONE))
    }

    /// Bitmap of the 128 packets after the missing one, the next one in the lowest bit.
    pub(super) fn held(&self) -> u128 {
        let behind = self.places.iter().skip(1).take(128).enumerate();
        behind.fold(0, |held, (at, place)| held | u128::from(*place != NONE) << at)
    }

    /// Drops all.
    pub(super) fn clear(&mut self, reorder: &mut ReorderBuffer) {
        self.places.drain(..).filter(|place| *place != NONE).for_each(|place| reorder.drop(place));
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::responder::out_of_order::*;
    use crate::wire::header::Bth;
    use crate::wire::opcode::Opcode;
    use crate::wire::psn::{Psn, Qpn};

    fn packet(psn: u32) -> Packet<'static> {
        let bth = Bth::new(Opcode::SendOnly, Qpn::new(5), Psn::new(psn));
        Packet::plain(bth, &[7; 16])
    }

    #[test]
    fn early_packets_are_delivered_in_order_and_release_entries() {
        let (mut early, mut reorder) = (OutOfOrder::new(16, 1024, true), ReorderBuffer::new(32));
        assert_eq!(early.keep(2, &packet(2), &mut reorder), (ReorderOutcome::Kept, true), "a gap");
        assert_eq!(early.keep(3, &packet(3), &mut reorder), (ReorderOutcome::Kept, false));
        assert_eq!(early.keep(3, &packet(3), &mut reorder), (ReorderOutcome::Again, false));
        assert_eq!(
            early.keep(16, &packet(16), &mut reorder),
            (ReorderOutcome::Dropped, false),
            "too far"
        );
        assert_eq!(
            early.keep(5, &packet(5), &mut reorder),
            (ReorderOutcome::Kept, true),
            "one more gap"
        );
        assert_eq!((early.held(), reorder.len()), (0b10110, 3));
        assert_eq!(early.pass(1, &mut reorder), None, "packet 1 is missing as well");
        assert_eq!(early.held(), 0b1011);
        for psn in [2, 3] {
            let place = early.pass(1, &mut reorder).unwrap();
            let bytes = reorder.take(place);
            assert_eq!(Packet::parse(&bytes), Ok(packet(psn)));
            reorder.give(place, bytes);
        }
        assert_eq!((early.pass(1, &mut reorder), early.is_empty()), (None, false));
        assert!(early.pass(1, &mut reorder).is_some());
        assert!(early.is_empty());
        assert_eq!(early.pass(1, &mut reorder), None);
    }

    #[test]
    fn reorder_entries_are_bounded_and_released() {
        let (mut early, mut reorder) = (OutOfOrder::new(16, 1024, false), ReorderBuffer::new(32));
        for psn in 1..5 {
            assert_eq!(early.keep(psn, &packet(psn), &mut reorder).0, ReorderOutcome::Kept);
        }
        assert_eq!(early.keep(5, &packet(5), &mut reorder).0, ReorderOutcome::Dropped);
        let long = Packet::plain(packet(6).bth, &[0; 1025]);
        early.clear(&mut reorder);
        assert!(reorder.is_empty() && early.is_empty());
        assert_eq!(early.keep(6, &long, &mut reorder).0, ReorderOutcome::Dropped);
        // A read of ten packets, with invalid packets among its numbers.
        assert_eq!(early.keep(6, &packet(6), &mut reorder).0, ReorderOutcome::Kept);
        assert_eq!(early.pass(10, &mut reorder), None);
        assert!(reorder.is_empty() && early.is_empty());
    }

    #[test]
    fn a_queue_pair_takes_only_a_share_of_the_reorder_buffer() {
        let mut reorder = ReorderBuffer::new(64);
        let mut queues: Vec<_> = (0..20).map(|_| OutOfOrder::new(1000, 1024, false)).collect();
        let taken = queues.iter_mut().map(|early| {
            let kept =
                |psn: &u32| early.keep(*psn, &packet(*psn), &mut reorder).0 == ReorderOutcome::Kept;
            (1..1000).take_while(kept).count()
        });
        let taken: Vec<usize> = taken.collect();
        assert_eq!(
            taken[..11],
            [8, 8, 8, 8, 8, 8, 8, 4, 2, 1, 1],
            "the last ones share what is left"
        );
        // Freed entries are available to all queue pairs.
        queues[0].clear(&mut reorder);
        let late = &mut queues[15];
        assert_eq!(late.keep(1, &packet(1), &mut reorder).0, ReorderOutcome::Kept);
        queues.iter_mut().for_each(|queue| queue.clear(&mut reorder));
        assert!(reorder.is_empty());
    }
}
