//! Checks that all packets of a train arrive, that is, that the device numbers the segments as the
//! kernel does.
//!
//! The CRC covers the IPv4 identification, and the packets of a train are made for 0, 1, 2, ..
//! ([`super::icrc::train_identification`]). A device that segments trains itself
//! (`tx-udp-segmentation`), or a tunnel, may give all of them the same one, or others. Adapters and
//! `rdma_rxe` then find a wrong CRC in all packets but the first, and drop them silently: of each
//! train one packet arrives, and everything else is sent again, as a train. (This implementation
//! does not see that field and solves for it, and IPv6 has none: neither is affected.)
//!
//! The peer's responses are the evidence. For each packet it is recorded whether it left as the
//! first of its train or behind it. If one that left behind is missing, and one that left first has
//! arrived meanwhile, that is a *miss*; one that left behind and has arrived resets the count.
//! After [`MISSES`] in a row trains are not used on that path any more, for as long as there are
//! connections on it: each miss costs one round trip, or one timeout. Losses alone cause that about
//! once in p^-6 recoveries, and the cost is that of the additional system calls.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use crate::wire::psn::Psn;

/// Maximum of datagrams in one train: the limit of the kernel (`UDP_MAX_SEGMENTS`, before 6.9).
pub(crate) const MOST_SEGMENTS: usize = 64;
/// Consecutive misses that end trains.
const MISSES: u32 = 6;
/// Number of packets that are recorded: a power of two.
const REMEMBERED: u32 = 4096;
/// Number of packets before the missing one that are examined: entries further back may belong to
/// newer packets.
const LOOKED_AT: u32 = REMEMBERED / 4;

/// Positions in their trains of the latest packets, by number.
#[derive(Debug, Default)]
pub(crate) struct Places {
    first: Bits,
    behind: Bits,
}

#[derive(Debug)]
struct Bits([u64; (REMEMBERED / 64) as usize]);

impl Default for Bits {
    fn default() -> Bits {
        Bits([0; (REMEMBERED / 64) as usize])
    }
}

impl Bits {
    fn set(&mut self, psn: Psn, on: bool) {
        let at = psn.get() % REMEMBERED;
        let word = &mut self.0[(at / 64) as usize];
        *word = *word & !(1 << (at % 64)) | u64::from(on) << (at % 64);
    }

    fn take(&mut self, psn: Psn) -> bool {
        let at = psn.get() % REMEMBERED;
        let set = self.0[(at / 64) as usize] >> (at % 64) & 1 == 1;
        self.set(psn, false);
        set
    }
}

/// Acknowledged and lost packets of a path.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Arrivals {
    /// One that left first in its train has arrived.
    first: bool,
    /// One that left behind others has arrived.
    behind: bool,
    /// One that left behind others is missing.
    missing: bool,
}

impl Places {
    /// Records that a packet leaves at this place of its train.
    pub(crate) fn depart(&mut self, psn: Psn, place: usize) {
        self.first.set(psn, place == 0);
        self.behind.set(psn, place > 0);
    }

    /// The peer has all before `end` (of which at most `new` are new), and may lack that one.
    pub(crate) fn arrive(&mut self, end: Psn, new: u32, lacks: bool) -> Arrivals {
        let mut arrivals = Arrivals::default();
        let mut psn = end;
        for _ in 0..new.min(LOOKED_AT) {
            psn = psn.previous();
            arrivals.first |= self.first.take(psn);
            arrivals.behind |= self.behind.take(psn);
        }
        arrivals.missing = lacks && self.behind.take(end);
        arrivals
    }
}

/// Segmentation state of a path. All endpoints that share it write here, in any order.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// One that left first has arrived since the last miss.
    first: AtomicBool,
    misses: AtomicU32,
}

impl Segments {
    /// Whether trains are used.
    pub(crate) fn are_kept(&self) -> bool {
        self.misses.load(Relaxed) < MISSES
    }

    /// Updates the state. Returns true if trains are not used from now on.
    pub(crate) fn note(&self, arrivals: Arrivals) -> bool {
        let misses = self.misses.load(Relaxed);
        if arrivals == Arrivals::default() || misses >= MISSES {
            return false;
        }
        if arrivals.behind && misses > 0 {
            self.misses.store(0, Relaxed);
        }
        if arrivals.missing && (arrivals.first || self.first.load(Relaxed)) {
            self.first.store(false, Relaxed);
            return self.misses.fetch_add(1, Relaxed) + 1 == MISSES;
        }
        if arrivals.first && !self.first.load(Relaxed) {
            self.first.store(true, Relaxed);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::gso_check::*;

    /// A train of four leaves, of which the peer reports the first `have` as received.
    fn train(places: &mut Places, start: &mut Psn, have: u32) -> Arrivals {
        for place in 0..4 {
            places.depart(start.add(place), place as usize);
        }
        *start = start.add(have);
        places.arrive(*start, have, have < 4)
    }

    #[test]
    fn six_consecutive_gso_misses_disable_trains_permanently() {
        let (mut places, segments) = (Places::default(), Segments::default());
        let mut start = Psn::new(0xff_fff0);
        for nth in 1..=6 {
            assert!(segments.are_kept(), "{nth}");
            assert_eq!(segments.note(train(&mut places, &mut start, 1)), nth == 6);
        }
        assert!(!segments.are_kept());
        // Permanently, and reported once.
        assert!(!segments.note(train(&mut places, &mut start, 1)));
        assert!(!segments.note(train(&mut places, &mut start, 4)) && !segments.are_kept());
    }

    #[test]
    fn packet_losses_alone_do_not_disable_gso_trains() {
        let (mut places, segments) = (Places::default(), Segments::default());
        let mut start = Psn::new(5);
        for _ in 0..20 {
            (0..4).for_each(|_| assert!(!segments.note(train(&mut places, &mut start, 1))));
            assert!(!segments.note(train(&mut places, &mut start, 2)), "the second has come");
        }
        // No packet arrives: that is no evidence about trains.
        (0..50).for_each(|_| assert!(!segments.note(train(&mut places, &mut start, 0))));
        // Nor is it when the first packet of its train has arrived before.
        (0..50).for_each(|_| {
            places.depart(start.add(1), 1);
            assert!(!segments.note(places.arrive(start.add(1), 0, true)));
        });
        // Each is counted once.
        for place in 0..2 {
            places.depart(start.add(place), place as usize);
        }
        (0..50).for_each(|_| {
            segments.note(places.arrive(start.add(1), 1, true));
        });
        assert!(segments.are_kept());
    }
}
