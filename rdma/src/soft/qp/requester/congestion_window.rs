//! Congestion window: the number of packets allowed in flight. A loss is taken as congestion and
//! reduces it; acknowledgements let it grow again, by one packet a round trip.
//!
//! The cost of a loss depends on the peer. If the peer keeps out-of-order packets, and for data of
//! reads, only the missing packet is sent again; so each loss takes one from the window, which
//! settles near one loss a round trip. If the peer drops everything after a gap, a loss costs as
//! much as the window is large; so the window shrinks by a quarter.
//!
//! If the network marks packets instead of dropping them, marks halve the window, once a round trip
//! (RFC 3168, 5), down to a minimum at which the peer never waits for a packet.

/// Minimum after losses, where a loss costs one packet, and where it costs all.
const LEAST: u64 = 32;
const LEAST_DEAR: u64 = 16;
/// Minimum after marks.
const LEAST_MARKED: u64 = 2;

#[derive(Debug)]
pub(super) struct CongestionWindow {
    most: u64,
    size: u64,
    /// Acknowledgements counted towards the next increment.
    answers: u64,
    /// Losses of a whole window, and marks, before this packet belong to the last one that counted.
    round: u64,
}

impl CongestionWindow {
    pub(super) fn new(most: u64) -> CongestionWindow {
        CongestionWindow { most, size: most, answers: 0, round: 0 }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Whether it was not reduced recently by a loss.
    pub(super) fn is_whole(&self) -> bool {
        self.size == self.most
    }

    /// This many packets were acknowledged.
    pub(super) fn grow(&mut self, packets: u64) {
        self.answers += packets;
        while self.answers >= self.size {
            self.answers -= self.size;
            if self.size == self.most {
                self.answers = 0;
                return;
            }
            self.size += 1;
        }
    }

    /// This many packets were lost, and only they.
    pub(super) fn lose(&mut self, packets: u64) {
        let least = LEAST.min(self.size);
        self.size = self.size.saturating_sub(packets).max(least);
    }

    /// Packet `at` was lost, with all packets up to `next`, the next to be sent.
    pub(super) fn lose_all(&mut self, at: u64, next: u64) {
        if at >= self.round {
            let least = LEAST_DEAR.min(self.size);
            self.size = (self.size * 3 / 4).max(least);
            (self.round, self.answers) = (next, 0);
        }
    }

    /// Marks reported after the acknowledgements up to `una`, for packets before `next`. They are
    /// new only if a packet was sent since the last report.
    pub(super) fn on_congestion(&mut self, una: u64, next: u64) {
        if una >= self.round && next > self.round {
            let least = LEAST_MARKED.min(self.size);
            self.size = (self.size / 2).max(least);
            (self.round, self.answers) = (next, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::requester::congestion_window::*;

    #[test]
    fn selective_losses_shrink_the_window_by_one_and_acks_regrow_it() {
        let mut window = CongestionWindow::new(128);
        window.lose(1);
        window.lose(9);
        assert_eq!(window.size(), 118);
        window.grow(118);
        assert_eq!(window.size(), 119);
        window.lose(1000);
        assert_eq!(window.size(), LEAST);
        window.grow(1 << 20);
        assert_eq!(window.size(), 128);
        let mut small = CongestionWindow::new(4);
        small.lose(9);
        assert_eq!(small.size(), 4);
    }

    #[test]
    fn ecn_marks_halve_the_window_once_per_round_trip() {
        let mut window = CongestionWindow::new(128);
        window.on_congestion(5, 100);
        window.on_congestion(99, 120);
        assert_eq!(window.size(), 64);
        window.on_congestion(100, 130);
        assert_eq!(window.size(), 32);
        (0..10).for_each(|_| window.on_congestion(130, 130));
        assert_eq!(window.size(), 32, "nothing has been sent since");
        (0..10).for_each(|round| window.on_congestion(131 + round, 131 + round));
        assert_eq!(window.size(), LEAST_MARKED);
        window.grow(LEAST_MARKED);
        assert_eq!(window.size(), LEAST_MARKED + 1);
        let mut one = CongestionWindow::new(1);
        one.on_congestion(0, 1);
        assert_eq!(one.size(), 1);
    }

    #[test]
    fn go_back_n_losses_shrink_the_window_once_per_round_trip() {
        let mut window = CongestionWindow::new(128);
        window.lose_all(5, 100);
        window.lose_all(99, 120);
        assert_eq!(window.size(), 96);
        window.lose_all(100, 130);
        assert_eq!(window.size(), 72);
        (0..10).for_each(|_| window.grow(72));
        assert!((79..=82).contains(&window.size()), "{}", window.size());
        (0..100).for_each(|round| window.lose_all(130 + round, 130 + round));
        assert_eq!(window.size(), LEAST_DEAR);
        let mut small = CongestionWindow::new(4);
        small.lose_all(0, 0);
        assert_eq!(small.size(), 4);
    }
}
