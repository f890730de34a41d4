//! Records of the Discovery log, from the registry.

use std::net::SocketAddr;
use std::sync::Arc;

use nvme::Nqn;
use rdma::zone::is_link_local;

use super::{ControllerTable, Registry};
use crate::controller::discovery::{Record, Subtype};
use crate::message::Message;
use crate::subsystem::Subsystem;

/// A listener of another gateway of the group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PeerListener {
    /// Its port identifier, which is unique in the group.
    pub id: u16,
    /// Its address and port, never a wildcard.
    pub address: SocketAddr,
}

impl Registry {
    /// The discovery log for a host that reached us at `local`: generation and records. It contains
    /// the subsystems that the host may use, each at the listeners that offer it, also those of
    /// other gateways of a group.
    pub fn discovery(&self, host: &Nqn, local: SocketAddr) -> (u64, Vec<Record>) {
        let table = self.lock();
        let mut records = Vec::new();
        for listener in table.listeners() {
            let Some(address) = reachable(listener.address, local) else { continue };
            // What is on one link only is reported to hosts that have come by it.
            let is_used = (address.ip(), address.port()) == (local.ip(), local.port());
            if !is_used && (table.discovery.by_listener || is_link_local(address.ip())) {
                continue;
            }
            let port_id = listener.id;
            let mut add = |subtype, nqn| records.push(Record { subtype, nqn, address, port_id });
            if is_used {
                add(Subtype::CURRENT_DISCOVERY, table.discovery.nqn);
            }
            let offered = table.offered_at(host, port_id).filter(|_| !table.leaving);
            offered.for_each(|subsystem| add(Subtype::NVM, subsystem.nqn));
        }
        // The other gateways serve while this one leaves.
        for PeerListener { id: port_id, address } in table.peers() {
            let offered = table.offered_at(host, port_id);
            let subtype = Subtype::NVM;
            records.extend(offered.map(|it| Record { subtype, nqn: it.nqn, address, port_id }));
        }
        // The port identifier of a referral is assigned by the other target; 0 is not used here.
        let referrals = table.discovery.referrals.iter().filter(|referral| referral.is_for(host));
        records.extend(referrals.map(|referral| Record {
            subtype: Subtype::REFERRAL,
            nqn: referral.nqn,
            address: referral.address,
            port_id: 0,
        }));
        (table.generation, records)
    }

    /// As [`Registry::discovery`]; none if that is still of the generation `known`.
    #[must_use]
    pub(crate) fn discovery_after(
        &self,
        known: Option<u64>,
        host: &Nqn,
        local: SocketAddr,
    ) -> Option<(u64, Vec<Record>)> {
        let is_known = known == Some(self.lock().generation);
        (!is_known).then(|| self.discovery(host, local))
    }

    /// Sets the listeners of the other gateways of the group, which serve the same subsystems.
    pub fn set_peer_listeners(&self, mut peers: Vec<PeerListener>) {
        peers.sort_unstable();
        {
            let mut table = self.lock();
            if table.peers == peers {
                return;
            }
            table.peers = peers;
            table.generation += 1;
        }
        self.announce_discovery();
    }

    /// Makes the reactors notify discovery controllers whose log has changed.
    pub(super) fn announce_discovery(&self) {
        for reactor in &self.reactors {
            reactor.send(Message::DiscoveryChanged);
        }
        self.wake_reactors();
    }

    /// The name of this target's discovery subsystem.
    pub(crate) fn discovery_nqn(&self) -> Nqn {
        self.lock().discovery.nqn
    }
}

impl ControllerTable {
    /// The subsystems that a host may use at a listener of any gateway.
    fn offered_at(&self, host: &Nqn, port_id: u16) -> impl Iterator<Item = &Arc<Subsystem>> {
        let all = self.subsystems.values();
        all.filter(move |it| it.admits(host) && it.offer.is_at(Some(port_id)))
    }

    /// The listeners of other gateways that are reported: none where hosts are to see the one that
    /// they use only.
    fn peers(&self) -> impl Iterator<Item = PeerListener> {
        let own =
            |peer: &&PeerListener| self.listeners().iter().any(|it| it.address == peer.address);
        let reported = self
            .peers
            .iter()
            .filter(|peer| !self.discovery.by_listener && !is_link_local(peer.address.ip()));
        reported.filter(move |peer| !own(peer)).copied()
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
