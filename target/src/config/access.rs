//! Access of hosts to subsystems by listener, and discovery, as configured.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use nvme::Nqn;
use nvme::fabrics::CNTLID_MAX;
use toml::Spanned;

use crate::core::subsystem::{
    AccessPolicy, DiscoveryConfig, DuplicateHosts, ListenerConfig, MAX_NSID, Referral,
};

use super::Limits;
use super::schema::{NQN_FORM, bounded, mdts, name, one_of};
use super::table_reader::{At, TableReader};

/// The most referrals of discovery.
const MOST_REFERRALS: usize = 256;

/// Access settings of a `[[subsystem]]`, without its masks.
pub(super) fn offer(
    section: &mut TableReader<'_>,
    listeners: &[At<ListenerConfig>],
    limits: &Limits,
) -> AccessPolicy {
    let mut offer =
        AccessPolicy { listeners: at_listeners(section, listeners), ..AccessPolicy::default() };
    let mut own =
        |key, least, most: u32| section.has(key).then(|| bounded(section, key, least..most, most));
    offer.queue_depth = own("queue_depth", 2, limits.queue_depth.into()).map(|n| n as u16);
    offer.io_queues = own("io_queues", 1, limits.io_queues.into()).map(|n| n as u16);
    offer.controllers = own("controllers", 1, limits.controllers.into()).map(|n| n as u16);
    offer.max_nsid = own("max_nsid", 1, MAX_NSID).unwrap_or(MAX_NSID);
    offer.mdts_bytes = mdts(section, limits.mdts_bytes);
    let form = format!("two numbers from 1 to {CNTLID_MAX}, such as [1, 100]");
    if let Some(At { value: [first, last], span }) = section.take::<[u16; 2]>("cntlids", &form) {
        if (1..=last).contains(&first) && last <= CNTLID_MAX {
            offer.cntlids = first..=last;
        } else {
            let what = format!("`cntlids` are from {first} to {last}");
            section.add(&span, what, format!("write {form}"));
        }
    }
    offer.duplicates = one_of("duplicate_hosts", &DuplicateHosts::ALL, section);
    offer
}

fn at_listeners(section: &mut TableReader<'_>, listeners: &[At<ListenerConfig>]) -> BTreeSet<u16> {
    let form = "a list of listener ids, such as [1, 2]; a listener without `id` has its place";
    let Some(At { value, span }) = section.take::<Vec<u16>>("listeners", form) else {
        return BTreeSet::new();
    };
    for id in &value {
        if !listeners.iter().any(|listener| listener.value.id == *id) {
            section.add(&span, format!("there is no listener {id}"), format!("write {form}"));
        }
    }
    if value.is_empty() {
        let what = "the list of listeners is empty";
        section.add(&span, what, "leave `listeners` out to offer it at all of them");
    }
    value.into_iter().collect()
}

/// Reads the list `hosts`, if present.
pub(super) fn hosts(section: &mut TableReader<'_>) -> Option<BTreeSet<Nqn>> {
    let form = "a list of host NQNs in quotes; a host's own is in /etc/nvme/hostnqn";
    let listed = section.take::<Vec<Spanned<String>>>("hosts", form)?;
    let mut hosts = BTreeSet::new();
    for host in listed.value {
        let at = At { span: host.span(), value: host.into_inner() };
        let span = at.span.clone();
        if let Some(host) = name(at, section.report)
            && !hosts.insert(host.value)
        {
            section.add(&span, "this host is listed twice", "list every host once");
        }
    }
    Some(hosts)
}

/// Reads `[discovery]`.
pub(super) fn discovery(root: &mut TableReader<'_>, subsystems: &[At<Nqn>]) -> DiscoveryConfig {
    let mut config = DiscoveryConfig::default();
    let mut section = root.table("discovery", "[discovery]");
    let own = section.take::<String>("nqn", NQN_FORM);
    if let Some(At { value, span }) = own.and_then(|at| name(at, section.report)) {
        if let Some(rival) = subsystems.iter().find(|subsystem| subsystem.value == value) {
            let place = section.report.shown(&rival.span, &span);
            let what = format!("this is the name of the subsystem of {place}");
            section.add(&span, what, "give discovery a name of its own");
        }
        config.nqn = value;
    }
    config.by_listener = section.flag("by_listener", false);
    config.mdns = section.flag("mdns", false);
    let span = section.span().clone();
    for table in section.tables("referral", "[[discovery.referral]]") {
        config.referrals.extend(referral(table));
    }
    if config.referrals.len() > MOST_REFERRALS {
        let what = format!("there are {} referrals", config.referrals.len());
        section.add(&span, what, format!("write at most {MOST_REFERRALS}"));
    }
    section.end();
    config
}

fn referral(mut section: TableReader<'_>) -> Option<Referral> {
    let form = "the IP address of another discovery service, such as \"192.0.2.7\"";
    let address = section.need::<IpAddr>("address", form);
    let port = bounded(&mut section, "port", 1..65535, nvme::PORT.into()) as u16;
    let nqn = section.take::<String>("nqn", NQN_FORM);
    let nqn = nqn.map(|at| name(at, section.report));
    let hosts = hosts(&mut section);
    section.end();
    let At { value: ip, span } = address?;
    if ip.is_unspecified() || ip.is_multicast() {
        section.add(&span, format!("no host can connect to {ip}"), format!("write {form}"));
    }
    let nqn = match nqn {
        Some(nqn) => nqn?.value,
        None => Nqn::DISCOVERY,
    };
    Some(Referral { nqn, address: SocketAddr::new(ip, port), hosts })
}
