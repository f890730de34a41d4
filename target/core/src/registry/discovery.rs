//! Records of the Discovery log, from the registry.

use std::net::SocketAddr;
use std::sync::Arc;

use nvme::Nqn;

use super::Registry;
use crate::controller::discovery::{Record, Subtype};
use crate::subsystem::Subsystem;

impl Registry {
    /// The discovery log for a host that reached us at `local`: generation and records. It contains
    /// the subsystems that the host may use, each at the listeners that offer it.
    #[must_use]
    pub fn discovery(&self, host: &Nqn, local: SocketAddr) -> (u64, Vec<Record>) {
        let book = self.lock();
        let mut records = Vec::new();
        for listener in book.listeners() {
            let Some(address) = reachable(listener.address, local) else { continue };
            if book.discovery.by_listener && address != local {
                continue;
            }
            let port_id = listener.id;
            let mut add = |subtype, nqn| records.push(Record { subtype, nqn, address, port_id });
            if address == local {
                add(Subtype::CURRENT_DISCOVERY, book.discovery.nqn);
            }
            let offered = |s: &&Arc<Subsystem>| {
                !book.leaving && s.admits(host) && s.offer.is_at(Some(port_id))
            };
            for subsystem in book.subsystems.values().filter(offered) {
                add(Subtype::NVM, subsystem.nqn);
            }
        }
        // The port identifier of a referral is assigned by the other target; 0 is not used here.
        records.extend(book.discovery.referrals.iter().map(|referral| Record {
            subtype: Subtype::REFERRAL,
            nqn: referral.nqn,
            address: referral.address,
            port_id: 0,
        }));
        (book.generation, records)
    }

    /// The name of this target's discovery subsystem.
    #[must_use]
    pub(crate) fn discovery_nqn(&self) -> Nqn {
        self.lock().discovery.nqn
    }
}

/// The address at which a host that reached us at `local` reaches `listener`: a wildcard is the
/// very address that it used, if of the same family.
fn reachable(listener: SocketAddr, local: SocketAddr) -> Option<SocketAddr> {
    if !listener.ip().is_unspecified() {
        return Some(listener);
    }
    let same = listener.is_ipv4() == local.is_ipv4();
    same.then(|| SocketAddr::new(local.ip(), listener.port()))
}
