//! Access of hosts to subsystems by listener, and discovery, as configured.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use nvme::Nqn;
use nvme::fabrics::CNTLID_MAX;
use toml::Spanned;

use crate::core::subsystem::{
    AccessPolicy, DiscoveryConfig, DuplicateHosts, ListenerConfig, MAX_NSID, Referral,
};

use super::Limits;
use super::schema::{NQN_FORM, bounded, mdts, name, one_of};
use super::size::Size;
use super::table_reader::{At, Diagnostics, TableReader};

/// The most referrals of discovery.
const MOST_REFERRALS: usize = 256;

/// Displays the values that differ from the default, one per line.
pub(super) fn show(offer: &AccessPolicy, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if !offer.listeners.is_empty() {
        writeln!(f, "            at the listeners {:?}", offer.listeners)?;
    }
    let mut limits = Vec::new();
    limits.extend(offer.queue_depth.map(|depth| format!("queue_depth {depth}")));
    limits.extend(offer.io_queues.map(|queues| format!("io_queues {queues}")));
    limits.extend(offer.mdts_bytes.map(|bytes| format!("mdts {}", Size(bytes.into()))));
    limits.extend(offer.controllers.map(|most| format!("controllers {most}")));
    if offer.max_nsid != MAX_NSID {
        limits.push(format!("max_nsid {}", offer.max_nsid));
    }
    if !limits.is_empty() {
        writeln!(f, "            limits: {}", limits.join(", "))?;
    }
    let (first, last) = (offer.cntlids.start(), offer.cntlids.end());
    if (*first, *last) != (1, CNTLID_MAX) {
        writeln!(f, "            controller ids {first} to {last}")?;
    }
    match offer.duplicates {
        DuplicateHosts::Allow => {}
        DuplicateHosts::Refuse => writeln!(f, "            a host that is there is refused")?,
        DuplicateHosts::Replace => writeln!(f, "            a host that is there is replaced")?,
    }
    for (nsid, hosts) in &offer.masks {
        let hosts: Vec<&str> = hosts.iter().map(Nqn::as_str).collect();
        let hosts = if hosts.is_empty() { "nobody".to_owned() } else { hosts.join(", ") };
        writeln!(f, "            namespace {nsid} is seen by {hosts}")?;
    }
    Ok(())
}

/// Access settings of a `[[subsystem]]`, without its masks.
pub(super) fn offer(
    section: &mut TableReader<'_>,
    listeners: &[At<ListenerConfig>],
    limits: &Limits,
    report: &mut Diagnostics<'_>,
) -> AccessPolicy {
    let mut offer = AccessPolicy {
        listeners: at_listeners(section, listeners, report),
        ..AccessPolicy::default()
    };
    let mut own = |key, least, most: u32, report: &mut Diagnostics<'_>| {
        section.has(key).then(|| bounded(section, key, least..most, most, report))
    };
    offer.queue_depth = own("queue_depth", 2, limits.queue_depth.into(), report).map(|n| n as u16);
    offer.io_queues = own("io_queues", 1, limits.io_queues.into(), report).map(|n| n as u16);
    offer.controllers = own("controllers", 1, limits.controllers.into(), report).map(|n| n as u16);
    offer.max_nsid = own("max_nsid", 1, MAX_NSID, report).unwrap_or(MAX_NSID);
    offer.mdts_bytes = mdts(section, limits.mdts_bytes, report);
    let form = format!("two numbers from 1 to {CNTLID_MAX}, such as [1, 100]");
    if let Some(At { value: [first, last], span }) =
        section.take::<[u16; 2]>("cntlids", &form, report)
    {
        if (1..=last).contains(&first) && last <= CNTLID_MAX {
            offer.cntlids = first..=last;
        } else {
            let what = format!("`cntlids` are from {first} to {last}");
            report.add(&span, what, format!("write {form}"));
        }
    }
    offer.duplicates = one_of("duplicate_hosts", &DuplicateHosts::ALL, section, report);
    offer
}

fn at_listeners(
    section: &mut TableReader<'_>,
    listeners: &[At<ListenerConfig>],
    report: &mut Diagnostics<'_>,
) -> BTreeSet<u16> {
    let form = "a list of listener ids, such as [1, 2]; a listener without `id` has its place";
    let Some(At { value, span }) = section.take::<Vec<u16>>("listeners", form, report) else {
        return BTreeSet::new();
    };
    for id in &value {
        if !listeners.iter().any(|listener| listener.value.id == *id) {
            report.add(&span, format!("there is no listener {id}"), format!("write {form}"));
        }
    }
    if value.is_empty() {
        let what = "the list of listeners is empty";
        report.add(&span, what, "leave `listeners` out to offer it at all of them");
    }
    value.into_iter().collect()
}

/// Reads the list `hosts`, if present.
pub(super) fn hosts(
    section: &mut TableReader<'_>,
    report: &mut Diagnostics<'_>,
) -> Option<BTreeSet<Nqn>> {
    let form = "a list of host NQNs in quotes; a host's own is in /etc/nvme/hostnqn";
    let listed = section.take::<Vec<Spanned<String>>>("hosts", form, report)?;
    let mut hosts = BTreeSet::new();
    for host in listed.value {
        let at = At { span: host.span(), value: host.into_inner() };
        let span = at.span.clone();
        if let Some(host) = name(at, report)
            && !hosts.insert(host.value)
        {
            report.add(&span, "this host is listed twice", "list every host once");
        }
    }
    Some(hosts)
}

/// Reads `[discovery]`.
pub(super) fn discovery(
    root: &mut TableReader<'_>,
    subsystems: &[At<Nqn>],
    report: &mut Diagnostics<'_>,
) -> DiscoveryConfig {
    let mut config = DiscoveryConfig::default();
    let mut section = root.table("discovery", "[discovery]", report);
    let own = section.take::<String>("nqn", NQN_FORM, report);
    if let Some(At { value, span }) = own.and_then(|at| name(at, report)) {
        if let Some(rival) = subsystems.iter().find(|subsystem| subsystem.value == value) {
            let place = report.shown(&rival.span, &span);
            let what = format!("this is the name of the subsystem of {place}");
            report.add(&span, what, "give discovery a name of its own");
        }
        config.nqn = value;
    }
    let mut flag = |key, report: &mut Diagnostics<'_>| {
        section.take(key, "true or false", report).is_some_and(|flag| flag.value)
    };
    config.by_listener = flag("by_listener", report);
    config.mdns = flag("mdns", report);
    let span = section.span().clone();
    for table in section.tables("referral", "[[discovery.referral]]", report) {
        config.referrals.extend(referral(table, report));
    }
    if config.referrals.len() > MOST_REFERRALS {
        let what = format!("there are {} referrals", config.referrals.len());
        report.add(&span, what, format!("write at most {MOST_REFERRALS}"));
    }
    section.end(report);
    config
}

fn referral(mut section: TableReader<'_>, report: &mut Diagnostics<'_>) -> Option<Referral> {
    let form = "the IP address of another discovery service, such as \"192.0.2.7\"";
    let address = section.need::<IpAddr>("address", form, report);
    let port = bounded(&mut section, "port", 1..65535, nvme::PORT.into(), report) as u16;
    let nqn = section.take::<String>("nqn", NQN_FORM, report);
    let nqn = nqn.map(|at| name(at, report));
    let hosts = hosts(&mut section, report);
    section.end(report);
    let At { value: ip, span } = address?;
    if ip.is_unspecified() || ip.is_multicast() {
        report.add(&span, format!("no host can connect to {ip}"), format!("write {form}"));
    }
    let nqn = match nqn {
        Some(nqn) => nqn?.value,
        None => Nqn::DISCOVERY,
    };
    Some(Referral { nqn, address: SocketAddr::new(ip, port), hosts })
}
