//! Access rules of a subsystem: hosts, listeners, and discovery.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use nvme::Nqn;
use nvme::fabrics::CNTLID_MAX;

use super::MAX_NSID;

rdma::named_enum! {
    /// Policy for a host (the same NQN and host identifier) that connects to a subsystem again, at
    /// an address where it has a controller already.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum DuplicateHosts {
        /// It gets another controller.
        #[default]
        Allow = "allow",
        /// It is refused while it has one.
        Refuse = "refuse",
        /// It gets another one, and the one that it had ends.
        Replace = "replace",
    }
}

/// Access policy of a subsystem, besides its hosts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessPolicy {
    /// Port identifiers of the listeners that offer it; empty: all.
    pub listeners: BTreeSet<u16>,
    /// Entries of an I/O queue; none: as in `[limits]`. The same applies to the fields below.
    pub queue_depth: Option<u16>,
    /// I/O queues of one controller.
    pub io_queues: Option<u16>,
    /// Data that one command may move, in bytes; 4096 times a power of two.
    pub mdts_bytes: Option<u32>,
    /// Maximum of controllers.
    pub controllers: Option<u16>,
    /// Highest namespace id, from 1 to [`MAX_NSID`].
    pub max_nsid: u32,
    /// Range of controller ids; others belong to other targets of the same subsystem.
    pub cntlids: RangeInclusive<u16>,
    /// Policy for duplicate hosts.
    pub duplicates: DuplicateHosts,
    /// Namespaces that only some hosts see, and these hosts.
    pub masks: BTreeMap<u32, BTreeSet<Nqn>>,
}

impl Default for AccessPolicy {
    fn default() -> Self {
        Self {
            listeners: BTreeSet::new(),
            queue_depth: None,
            io_queues: None,
            mdts_bytes: None,
            controllers: None,
            max_nsid: MAX_NSID,
            cntlids: 1..=CNTLID_MAX,
            duplicates: DuplicateHosts::default(),
            masks: BTreeMap::new(),
        }
    }
}

impl AccessPolicy {
    /// Whether the listener with this port identifier offers the subsystem; none: a listener that
    /// is no longer there.
    pub fn is_at(&self, listener: Option<u16>) -> bool {
        self.listeners.is_empty() || listener.is_some_and(|id| self.listeners.contains(&id))
    }

    /// Whether a host sees a namespace.
    pub fn shows(&self, nsid: u32, host: &Nqn) -> bool {
        self.masks.get(&nsid).is_none_or(|hosts| hosts.contains(host))
    }
}

/// Discovery: its NQN, and referrals.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiscoveryConfig {
    /// The name of this target's discovery subsystem: its own, or the well-known one, which is
    /// answered to in any case.
    pub nqn: Nqn,
    /// Hosts learn only of subsystems offered by the listener that they use.
    pub by_listener: bool,
    /// Announces the discovery service by multicast DNS.
    pub mdns: bool,
    /// Referrals to other discovery services.
    pub referrals: Vec<Referral>,
    /// Controller ids to assign. The gateways of a group may have one name together, of which Linux
    /// takes no controller id twice.
    pub cntlids: RangeInclusive<u16>,
}

impl Default for DiscoveryConfig {
    fn default() -> Self {
        Self {
            nqn: Nqn::DISCOVERY,
            by_listener: false,
            mdns: false,
            referrals: Vec::new(),
            cntlids: 1..=CNTLID_MAX,
        }
    }
}

/// Another discovery service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Referral {
    /// Its name.
    pub nqn: Nqn,
    /// Where it is.
    pub address: SocketAddr,
    /// The hosts to which it is reported; none: to every host.
    pub hosts: Option<BTreeSet<Nqn>>,
}

impl Referral {
    /// Whether it is reported to a host.
    pub fn is_for(&self, host: &Nqn) -> bool {
        self.hosts.as_ref().is_none_or(|hosts| hosts.contains(host))
    }
}
