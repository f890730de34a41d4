//! Random ids of an endpoint: queue pair numbers and communication ids (which also steer packets to
//! it), and initial packet sequence numbers and transaction ids.

use super::Endpoint;
use crate::wire::psn::{Psn, Qpn};

impl Endpoint {
    /// An unused queue pair number that a packet filter steers to this endpoint.
    pub(super) fn random_qpn(&mut self) -> Qpn {
        let (endpoints, own) = self.config.steer;
        loop {
            let number = (self.entropy)() as u32 & 0x00ff_ffff;
            let number = number - number % endpoints.max(1) + own;
            // 0 and 1 are reserved, the highest means multicast.
            let usable = (2..0x00ff_ffff).contains(&number);
            let qpn = Qpn::new(number);
            if usable && !self.by_qpn.contains_key(&qpn) {
                return qpn;
            }
        }
    }

    /// An unused communication id, which is steered to this endpoint as well.
    pub(super) fn random_comm(&mut self) -> u32 {
        let (endpoints, own) = self.config.steer;
        loop {
            let comm = (self.entropy)() as u32 >> 1;
            let comm = comm - comm % endpoints.max(1) + own;
            let used = self.by_comm.contains_key(&comm)
                || self.manager.retries.get(comm).is_some()
                || self.manager.challenges_by_name.contains_key(&comm);
            if comm != 0 && !used {
                return comm;
            }
        }
    }

    /// An initial packet number.
    pub(super) fn random_psn(&mut self) -> Psn {
        Psn::new((self.entropy)() as u32)
    }

    /// A transaction id, which matches answers to requests; it only has to be unusual.
    pub(super) fn random_transaction(&mut self) -> u64 {
        (self.entropy)()
    }
}
