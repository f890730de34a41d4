//! Explicit congestion notification of RoCEv2 (annex A17, "RoCEv2 congestion management"; RFC 3168
//! for the marks). A switch marks packets instead of dropping them; the receiver informs the sender
//! by a congestion notification packet (CNP), and the sender reduces its rate.
//!
//! * A marked flow must react, so packets are ECN-capable only towards peers that support it: those
//!   of this implementation, and those whose own packets are ECN-capable, as of adapters that have
//!   it enabled. `rdma_rxe` marks nothing, sends no CNP, and its packets are dropped instead.
//! * A queue pair with marks sends at most one CNP in [`CNP_INTERVAL_NS`].
//! * A CNP halves the requester's window, once a round trip; the window grows again by a packet a
//!   round trip, as after a loss. A forged CNP needs the number of the queue pair (24 bits) in
//!   every round trip, and cannot reduce the window below two packets.

use crate::soft::clock::Time;
use crate::wire::header::{Bth, Extended};
use crate::wire::opcode::Opcode;
use crate::wire::psn::{Psn, Qpn};
use crate::wire::tx_packet::{Payload, TxPacket};

/// The two bits of the type of service that are explicit congestion notification.
const ECN: u8 = 3;
/// "Congestion experienced".
pub(crate) const MARKED: u8 = 3;
/// "ECN-capable transport", codepoint ECT(0).
pub(crate) const CAPABLE: u8 = 2;
/// Minimum interval of congestion notifications of one queue pair; as in DCQCN (Zhu and others,
/// SIGCOMM 2015).
const CNP_INTERVAL_NS: u64 = 50_000;
/// Bytes behind the base transport header of a CNP, all 0.
pub(super) const RESERVED: [u8; 16] = [0; 16];

/// Whether a type of service contains "congestion experienced".
pub(crate) fn is_marked(tos: u8) -> bool {
    tos & ECN == MARKED
}

/// Whether the sender is ECN-capable.
pub(crate) fn is_capable(tos: u8) -> bool {
    tos & ECN != 0
}

/// The type of service without ECN.
pub(crate) fn without(tos: u8) -> u8 {
    tos & !ECN
}

/// Sends congestion notifications to the sender of marked packets, at a limited rate.
#[derive(Debug, Default)]
pub(super) struct NotificationPoint {
    sent: Option<Time>,
    due: bool,
}

impl NotificationPoint {
    /// A marked packet has arrived.
    pub(super) fn on_mark(&mut self, now: Time) {
        if self.sent.is_none_or(|sent| now.since_ns(sent) >= CNP_INTERVAL_NS) {
            (self.sent, self.due) = (Some(now), true);
        }
    }

    /// Whether a notification is due.
    pub(super) fn is_due(&self) -> bool {
        self.due
    }

    /// The notification that is due, to the peer's queue pair.
    pub(super) fn transmit(&mut self, peer: Qpn) -> Option<TxPacket> {
        std::mem::take(&mut self.due).then(|| {
            let bth = Bth {
                becn: true,
                ..Bth::new(Opcode::CongestionNotification, peer, Psn::default())
            };
            TxPacket::new(bth, &Extended::default(), Payload::Reserved, RESERVED.len() as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::ecn::*;

    #[test]
    fn congestion_notifications_are_sent_at_once_then_per_interval() {
        let (mut point, start) = (NotificationPoint::default(), Time::default());
        assert_eq!(point.transmit(Qpn::new(5)), None);
        let told = (0..1000u32).filter(|at| {
            point.on_mark(start.after_ns(u64::from(*at) * 1000));
            point.transmit(Qpn::new(5)).is_some()
        });
        assert_eq!(told.count(), 1000 / 50);
    }

    #[test]
    fn congestion_notification_layout_matches_the_annex() {
        let mut point = NotificationPoint::default();
        point.on_mark(Time::default());
        let cnp = point.transmit(Qpn::new(0x123456)).unwrap();
        // Operation code 0x81; migrated, no padding; default partition; BECN; queue pair; PSN 0.
        let header = [0x81, 0x40, 0xff, 0xff, 0x40, 0x12, 0x34, 0x56, 0, 0, 0, 0];
        assert_eq!(cnp.header(), header);
        assert_eq!(cnp.datagram_bytes(), 12 + 16 + 4);
    }

    #[test]
    fn codepoints_are_those_of_rfc_3168() {
        assert_eq!([0x68, 0x69, 0x6a, 0x6b].map(is_marked), [false, false, false, true]);
        assert_eq!([0x68, 0x69, 0x6a, 0x6b].map(is_capable), [false, true, true, true]);
    }
}
