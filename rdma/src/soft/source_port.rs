//! The UDP source port of a queue pair.
//!
//! Senders use one for each queue pair, so that the network keeps its packets in order: `rdma_rxe`
//! derives it from the number of its queue pair, adapters from that or a flow label, this
//! implementation uses 4791 or one derived from both numbers (annex A17; `rdma_get_udp_sport`). So
//! it is learned from the first packet that only an end of the connection can send, and packets
//! from other ports are dropped: an attacker who does not see a connection has one number more to
//! guess.
//!
//! A sender may be given another port while it is connected (`mlx5dv_modify_qp_udp_sport`). So
//! another one is accepted after [`AGREED`] packets from it without one from the old port in
//! between, each of which is exactly the expected one, or the next after such. To forge these takes
//! as many guesses of queue pair and packet number as for any protocol of this kind, 2^48.

use crate::wire::psn::Psn;

/// Number of packets after which another port is accepted.
const AGREED: u8 = 4;

/// The source port of a queue pair; see the module.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct SourcePort {
    known: Option<u16>,
    /// Another port, the number of consecutive packets from it, and the number of the last.
    other: Option<(u16, u8, Psn)>,
}

impl SourcePort {
    pub(crate) fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// Only an end of the connection can have sent a packet from this port.
    pub(crate) fn learn(&mut self, port: u16) {
        if self.known.is_none() {
            self.known = Some(port);
        }
    }

    /// Whether a packet from this port is accepted. `expected`: its number is a likely one for the
    /// sender.
    #[inline]
    pub(crate) fn admits(&mut self, port: u16, psn: Psn, expected: impl FnOnce() -> bool) -> bool {
        if self.known.is_none_or(|known| known == port) {
            self.other = None;
            return true;
        }
        let run = self.other.filter(|(other, ..)| *other == port);
        let follows = run.is_some_and(|(.., last)| psn.since(last) == 1);
        if !follows && !expected() {
            return false;
        }
        let agreed = run.map_or(0, |(_, agreed, _)| agreed) + 1;
        self.other = Some((port, agreed, psn));
        if agreed >= AGREED {
            *self = SourcePort { known: Some(port), other: None };
        }
        agreed >= AGREED
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::source_port::*;

    #[test]
    fn a_new_source_port_is_accepted_after_four_expected_packets() {
        let mut port = SourcePort::default();
        assert!(port.admits(1, Psn::new(0), || false) && port.admits(2, Psn::new(0), || false));
        port.learn(7);
        port.learn(8);
        assert!(port.is_known() && port.admits(7, Psn::new(5), || false));
        // Repeated, or consecutive.
        for numbers in [[5, 5, 5, 5], [5, 6, 7, 8], [5, 6, 5, 6]] {
            let mut port = port;
            let admitted = numbers.map(|psn| port.admits(9, Psn::new(psn), || psn == 5));
            assert_eq!(admitted, [false, false, false, true]);
            assert!(
                port.admits(9, Psn::new(99), || false) && !port.admits(7, Psn::new(5), || true)
            );
        }
        // Not with packets from the old one in between, nor from others.
        for _ in 0..3 {
            for _ in 0..3 {
                assert!(!port.admits(9, Psn::new(5), || true));
            }
            assert!(port.admits(7, Psn::new(6), || false));
        }
        // Consecutive numbers may wrap.
        let mut wraps = port;
        let numbers = [0xff_fffe, 0xff_ffff, 0, 1];
        let admitted = numbers.map(|n| wraps.admits(9, Psn::new(n), || n == 0xff_fffe));
        assert_eq!(admitted, [false, false, false, true]);
        for nth in 0..100 {
            assert!(!port.admits(9 + nth % 2, Psn::new(5), || true));
            assert!(!port.admits(9, Psn::new(50 + u32::from(nth) * 2), || false));
        }
    }
}
