//! End-to-end flow control (IBTA volume 1, 9.7.7.2): an acknowledgement may carry the number of
//! receives that the peer has posted. A send without such a credit waits, unless nothing else is in
//! flight: then it is sent as a probe, because new receives need not be announced. Writes and reads
//! count as messages and need no receive.
//!
//! Adapters implement this; `rdma_rxe` reports no limit, and neither do we: NVMe never has more
//! messages in flight than the other end has receives, and a limit that is too low costs time.

use crate::wire::header::Credits as Code;
use crate::wire::psn::Msn;

/// End-to-end credits reported by the peer.
#[derive(Debug, Default)]
pub(super) struct CreditLimit {
    /// Messages started.
    begun: u64,
    /// Maximum of that, in total; none: unlimited.
    limit: Option<u64>,
}

impl CreditLimit {
    /// A message was started.
    pub(super) fn begin(&mut self) {
        self.begun += 1;
    }

    /// Whether there is a credit for the next message.
    pub(super) fn allow(&self) -> bool {
        self.limit.is_none_or(|limit| self.begun < limit)
    }

    /// The peer has completed this many messages, and has room for more. Reports may be late, and
    /// receives are not withdrawn, so the highest one counts.
    pub(super) fn update(&mut self, completed: Msn, code: Code) {
        let Some(more) = code.messages() else {
            self.limit = None;
            return;
        };
        // Of 2^24 numbers the one next after those started.
        let behind = (self.begun as u32).wrapping_sub(completed.get()) & 0x00ff_ffff;
        let Some(completed) = self.begun.checked_sub(u64::from(behind)) else { return };
        let limit = completed + u64::from(more);
        self.limit = Some(self.limit.map_or(limit, |old| old.max(limit)));
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::qp::requester::credits::*;

    #[test]
    fn send_limit_is_completed_messages_plus_credits() {
        let mut credits = CreditLimit::default();
        assert!(credits.allow(), "nothing is known");
        (0..5).for_each(|_| credits.begin());
        credits.update(Msn::new(3), Code::new(2));
        assert!(!credits.allow());
        credits.update(Msn::new(4), Code::new(2));
        assert!(credits.allow());
        credits.begin();
        assert!(!credits.allow());
        credits.update(Msn::new(2), Code::new(0));
        credits.update(Msn::new(6), Code::new(3));
        credits.update(Msn::new(1), Code::new(1));
        assert!(credits.allow(), "old reports change nothing");
        // More than was started, which the peer cannot have completed.
        credits.update(Msn::new(7), Code::new(30));
        assert_eq!(credits.limit, Some(9));
        credits.update(Msn::new(6), Code::UNLIMITED);
        (0..100).for_each(|_| credits.begin());
        assert!(credits.allow());
    }

    #[test]
    fn the_number_of_completed_messages_wraps() {
        let mut credits = CreditLimit { begun: (1 << 24) + 2, limit: None };
        credits.update(Msn::new(0x00ff_ffff), Code::new(3));
        assert_eq!((credits.limit, credits.allow()), (Some((1 << 24) + 2), false));
        credits.update(Msn::new(1), Code::new(2));
        assert_eq!((credits.limit, credits.allow()), (Some((1 << 24) + 3), true));
    }
}
