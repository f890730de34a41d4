//! How hosts reach this gateway, and what is said about one that no host reaches.

use nix::ifaddrs::getifaddrs;
use nvmfd_gateway::Gateway;
use nvmfd_gateway::record::{Front, Slot};

use crate::api::GatewayFront;
use crate::core::registry::Registry;
use crate::platform::availability::is_reachable;

/// How hosts reach this gateway at present.
pub(super) fn look(registry: &Registry) -> Front {
    let interfaces: Vec<_> = getifaddrs().into_iter().flatten().collect();
    let open = registry.addresses().into_iter().filter(|at| is_reachable(*at, &interfaces));
    let (hosts, associations) = registry.connected();
    Front { listeners: open.count(), hosts, associations, ..Front::default() }
}

/// Why a gateway gives its ANA groups to another one.
pub(super) fn unreached(gateway: &Gateway, slot: Slot) -> Option<String> {
    if gateway.is_closed(slot) {
        return Some("no listener is open at an interface whose link is up".to_owned());
    }
    gateway.is_deserted(slot).then(|| "no host is connected, but hosts are to others".to_owned())
}

pub(super) fn reported(front: Front) -> GatewayFront {
    let Front { listeners, hosts, associations, .. } = front;
    let [listeners, hosts, associations] = [listeners, hosts, associations].map(|it| it as u64);
    GatewayFront { listeners, hosts, associations }
}
