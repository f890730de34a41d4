//! Packet trains: datagrams of equal length, the last one possibly shorter, passed to the kernel in
//! one call (`UDP_SEGMENT`, udp(7)). The price of sending is that of the call and its socket
//! buffer, not of the bytes: a train of fifteen costs little more than a single datagram.
//!
//! Datagrams of several queue pairs may share a train when they take the same way; the order
//! within a queue pair stays as it is.

use std::net::IpAddr;

use crate::soft::endpoint::{Endpoint, QueuedPacket};
use crate::soft::gso_check::MOST_SEGMENTS;

/// Maximum of datagrams that are sorted at once.
pub(crate) const MOST_GATHERED: usize = 256;
/// Maximum size of a train: that of an IP datagram.
pub(super) const MOST_BYTES: usize = 65_507;

/// Headers and CRC of a write packet.
const WRITE_BYTES: usize = 32;

/// Payload of one train of write packets.
pub(crate) fn payload_bytes(mtu: u32) -> u32 {
    let packets = MOST_BYTES / (mtu as usize + WRITE_BYTES);
    packets.clamp(1, MOST_SEGMENTS) as u32 * mtu
}

/// Common properties of the packets of a train: the addresses of both ends, the source port and the
/// type of service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Way {
    pub(super) from: IpAddr,
    /// Source port.
    pub(super) port: u16,
    pub(super) to: IpAddr,
    pub(super) tos: u8,
}

/// A datagram that is to be assigned to a train.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TrainItem {
    pub(super) way: Way,
    /// Datagrams of one queue stay in order.
    pub(super) queue: u32,
    /// Length of the datagram.
    pub(super) bytes: usize,
}

impl TrainItem {
    /// A packet that an endpoint wants to send.
    pub(crate) fn of(endpoint: &Endpoint, queued: &QueuedPacket) -> Option<TrainItem> {
        let (flow, tos) = endpoint.envelope(queued)?;
        let (from, to) = (flow.source, flow.destination.ip());
        let way = Way { from: from.ip(), port: from.port(), to, tos };
        Some(TrainItem { way, queue: queued.slot, bytes: queued.packet.datagram_bytes() })
    }
}

/// Assigns datagrams to trains. It keeps its memory between uses.
#[derive(Debug, Default)]
pub(crate) struct Trains {
    /// Indices of the items, train after train.
    order: Vec<u16>,
    /// End of each train in `order`.
    ends: Vec<u16>,
    left: Vec<u16>,
    /// By queue: the train to which nothing more of it may be appended.
    shut: Vec<u32>,
    train: u32,
}

impl Trains {
    /// Allocates for [`MOST_GATHERED`] items.
    pub(crate) fn new() -> Trains {
        Trains {
            order: Vec::with_capacity(MOST_GATHERED),
            ends: Vec::with_capacity(MOST_GATHERED),
            left: Vec::with_capacity(MOST_GATHERED),
            ..Trains::default()
        }
    }

    /// Assigns these items to trains of at most `most` datagrams each (1: no trains).
    pub(crate) fn make(&mut self, items: &[TrainItem], most: usize) {
        self.order.clear();
        self.ends.clear();
        self.left.clear();
        if let Some(first) = items.first()
            && items.iter().all(|item| (item.queue, item.way) == (first.queue, first.way))
        {
            self.make_of_one(items, most.min(MOST_SEGMENTS));
            return;
        }
        self.left.extend(0..items.len() as u16);
        while !self.left.is_empty() {
            self.train = self.train.wrapping_add(1);
            let Some(first) = self.take_first(items) else { break };
            self.append(items, first, most.min(MOST_SEGMENTS));
            self.ends.push(self.order.len() as u16);
        }
    }

    /// The same for items of one queue: in their order, with as many in a train as fit.
    fn make_of_one(&mut self, items: &[TrainItem], most: usize) {
        self.order.extend(0..items.len() as u16);
        let mut start = 0;
        while let Some(first) = items.get(start) {
            let room = (MOST_BYTES / first.bytes.max(1)).min(most).max(1);
            let rest = &items[start..items.len().min(start + room)];
            let equal = rest.iter().take_while(|item| item.bytes == first.bytes).count();
            let tail = rest.get(equal).is_some_and(|item| item.bytes < first.bytes);
            start += equal + usize::from(tail);
            self.ends.push(start as u16);
        }
    }

    /// The trains, as indices of items.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u16]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .map(|(start, end)| &self.order[usize::from(start)..usize::from(*end)])
    }

    /// Takes the longest one of the datagrams that are first in their queues: the earliest of
    /// these.
    fn take_first(&mut self, items: &[TrainItem]) -> Option<TrainItem> {
        let mut best: Option<TrainItem> = None;
        for at in 0..self.left.len() {
            let item = items[usize::from(self.left[at])];
            if self.is_closed(item.queue) {
                continue;
            }
            self.shut(item.queue);
            if best.is_none_or(|best| item.bytes > best.bytes) {
                best = Some(item);
            }
        }
        self.train = self.train.wrapping_add(1);
        best
    }

    /// Appends items that fit after the first, and keeps the rest.
    fn append(&mut self, items: &[TrainItem], first: TrainItem, most: usize) {
        let start = self.order.len();
        let room = (MOST_BYTES / first.bytes.max(1)).min(most);
        let mut tail = None;
        let mut kept = 0;
        for at in 0..self.left.len() {
            let index = self.left[at];
            let item = items[usize::from(index)];
            let free = !self.is_closed(item.queue) && self.order.len() - start < room;
            if free && item.way == first.way && item.bytes == first.bytes {
                self.order.push(index);
                continue;
            }
            if free && item.way == first.way && item.bytes < first.bytes && tail.is_none() {
                // It may be the shorter end of the train; nothing of its queue follows it.
                tail = Some((kept, index));
            }
            self.shut(item.queue);
            self.left[kept] = index;
            kept += 1;
        }
        self.left.truncate(kept);
        if let Some((at, index)) = tail
            && self.order.len() - start < room
        {
            self.order.push(index);
            self.left.remove(at);
        }
    }

    fn is_closed(&self, queue: u32) -> bool {
        self.shut.get(queue as usize) == Some(&self.train)
    }

    fn shut(&mut self, queue: u32) {
        let at = queue as usize;
        if self.shut.len() <= at {
            self.shut.resize(at + 1, self.train.wrapping_sub(1));
        }
        self.shut[at] = self.train;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::soft::udp::train::*;

    fn item(queue: u32, bytes: usize) -> TrainItem {
        let at = IpAddr::from([192, 0, 2, 1]);
        TrainItem { way: Way { from: at, port: 4791, to: at, tos: 0 }, queue, bytes }
    }

    fn trains(items: &[TrainItem], most: usize) -> Vec<Vec<u16>> {
        let mut trains = Trains::new();
        trains.make(items, most);
        trains.iter().map(<[u16]>::to_vec).collect()
    }

    #[test]
    fn equal_datagrams_share_a_gso_train_and_a_shorter_one_ends_it() {
        let one = [item(0, 4128), item(0, 36), item(0, 20)];
        assert_eq!(trains(&one, 64), [vec![0, 1], vec![2]]);
        let two = [item(0, 4128), item(0, 36), item(1, 4128), item(1, 36), item(1, 20)];
        assert_eq!(trains(&two, 64), [vec![0, 2, 1], vec![3, 4]]);
        assert_eq!(trains(&two, 1), [vec![0], vec![2], vec![1], vec![3], vec![4]]);
    }

    #[test]
    fn a_train_is_as_long_as_the_kernel_takes() {
        let long: Vec<TrainItem> = (0..40).map(|_| item(0, 4128)).collect();
        assert_eq!(trains(&long, 64).iter().map(Vec::len).collect::<Vec<_>>(), [15, 15, 10]);
        let short: Vec<TrainItem> = (0..100).map(|_| item(0, 36)).collect();
        assert_eq!(trains(&short, 64).iter().map(Vec::len).collect::<Vec<_>>(), [64, 36]);
    }

    #[test]
    fn datagrams_of_different_paths_use_separate_gso_trains() {
        let mut items = [item(0, 100), item(1, 100), item(0, 100)];
        items[1].way.tos = 4;
        assert_eq!(trains(&items, 64), [vec![0, 2], vec![1]]);
    }

    proptest! {
        /// Every datagram is in one train, those of a queue in order, and the kernel accepts every
        /// train.
        #[test]
        fn trains_are_in_order(
            items in proptest::collection::vec((0u32..5, 0usize..4, 0u8..2), 0..MOST_GATHERED),
            most in 1usize..70,
        ) {
            let lengths = [20, 36, 80, 4128];
            let items: Vec<TrainItem> = items
                .into_iter()
                .map(|(queue, len, tos)| {
                    let mut item = item(queue, lengths[len]);
                    item.way.tos = tos * u8::from(queue % 2 == 0);
                    item
                })
                .collect();
            let trains = trains(&items, most);
            let mut all: Vec<u16> = trains.concat();
            for queue in 0..5 {
                let of_queue: Vec<u16> =
                    all.iter().copied().filter(|i| items[usize::from(*i)].queue == queue).collect();
                prop_assert!(of_queue.is_sorted());
            }
            all.sort_unstable();
            prop_assert_eq!(all, (0..items.len() as u16).collect::<Vec<_>>());
            for train in trains {
                let train: Vec<TrainItem> = train.iter().map(|i| items[usize::from(*i)]).collect();
                let (last, rest) = train.split_last().unwrap();
                prop_assert!(train.len() <= most.min(MOST_SEGMENTS));
                prop_assert!(train.iter().all(|item| item.way == train[0].way));
                prop_assert!(rest.iter().all(|item| item.bytes == train[0].bytes));
                prop_assert!(last.bytes <= train[0].bytes);
                prop_assert!(train.iter().map(|item| item.bytes).sum::<usize>() <= MOST_BYTES);
            }
        }
    }
}
