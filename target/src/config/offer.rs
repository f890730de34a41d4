//! Where and to whom things are offered: listeners, what a subsystem grants its hosts, who sees
//! which namespace, and what discovery tells besides.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use nvme::Nqn;
use nvme::fabrics::CNTLID_MAX;
use serde::Serialize;
use toml::Spanned;

use crate::subsystem::MAX_NSID;

use super::section::{At, Report, Section};
use super::size::Size;
use super::text::{NQN_FORM, bounded, mdts, name};
use super::tree;
use super::{Limits, ListenerConfig};

/// Referrals that discovery may name, at most.
const MOST_REFERRALS: usize = 256;

/// What becomes of a host (the same NQN and host identifier) that connects to a subsystem once
/// more, at an address where it has a controller already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DuplicateHosts {
    /// It gets another controller.
    #[default]
    Allow,
    /// It is refused while it has one.
    Refuse,
    /// It gets another one, and the one that it had ends.
    Replace,
}

/// How a subsystem is offered, besides to whom.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Offer {
    /// Port identifiers of the listeners that offer it; empty: all.
    pub listeners: BTreeSet<u16>,
    /// Entries of an I/O queue; none: what `[limits]` says. The same for all below.
    pub queue_depth: Option<u16>,
    /// I/O queues of one controller.
    pub io_queues: Option<u16>,
    /// Data that one command may move, in bytes; 4096 times a power of two.
    #[serde(rename = "mdts", serialize_with = "tree::some_size")]
    pub mdts_bytes: Option<u32>,
    /// Controllers at once.
    pub controllers: Option<u16>,
    /// Highest namespace id, from 1 to [`MAX_NSID`].
    pub max_nsid: u32,
    /// Controller ids that it gives; others belong to other targets of the same subsystem.
    #[serde(serialize_with = "tree::range")]
    pub cntlids: RangeInclusive<u16>,
    /// Hosts that come twice.
    #[serde(rename = "duplicate_hosts")]
    pub duplicates: DuplicateHosts,
    /// Namespaces that only some hosts see, and those hosts.
    #[serde(flatten, serialize_with = "tree::masks")]
    pub masks: BTreeMap<u32, BTreeSet<Nqn>>,
}

impl Default for Offer {
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

impl Offer {
    /// Whether the listener with this port identifier offers the subsystem; none: a listener that
    /// is no longer there.
    #[must_use]
    pub fn is_at(&self, listener: Option<u16>) -> bool {
        self.listeners.is_empty() || listener.is_some_and(|id| self.listeners.contains(&id))
    }

    /// Whether a host sees a namespace.
    #[must_use]
    pub fn shows(&self, nsid: u32, host: &Nqn) -> bool {
        self.masks.get(&nsid).is_none_or(|hosts| hosts.contains(host))
    }
}

/// What differs from the default, a line each.
impl fmt::Display for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.listeners.is_empty() {
            writeln!(f, "            at the listeners {:?}", self.listeners)?;
        }
        let mut limits = Vec::new();
        limits.extend(self.queue_depth.map(|depth| format!("queue_depth {depth}")));
        limits.extend(self.io_queues.map(|queues| format!("io_queues {queues}")));
        limits.extend(self.mdts_bytes.map(|bytes| format!("mdts {}", Size(bytes.into()))));
        limits.extend(self.controllers.map(|most| format!("controllers {most}")));
        if self.max_nsid != MAX_NSID {
            limits.push(format!("max_nsid {}", self.max_nsid));
        }
        if !limits.is_empty() {
            writeln!(f, "            limits: {}", limits.join(", "))?;
        }
        let (first, last) = (self.cntlids.start(), self.cntlids.end());
        if (*first, *last) != (1, CNTLID_MAX) {
            writeln!(f, "            controller ids {first} to {last}")?;
        }
        match self.duplicates {
            DuplicateHosts::Allow => {}
            DuplicateHosts::Refuse => writeln!(f, "            a host that is there is refused")?,
            DuplicateHosts::Replace => writeln!(f, "            a host that is there is replaced")?,
        }
        for (nsid, hosts) in &self.masks {
            let hosts: Vec<&str> = hosts.iter().map(Nqn::as_str).collect();
            let hosts = if hosts.is_empty() { "nobody".to_owned() } else { hosts.join(", ") };
            writeln!(f, "            namespace {nsid} is seen by {hosts}")?;
        }
        Ok(())
    }
}

/// What discovery tells besides the subsystems, and how it is called.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DiscoveryConfig {
    /// The name of this target's discovery subsystem: its own, or the well-known one, which is
    /// answered to in any case.
    #[serde(serialize_with = "tree::shown")]
    pub nqn: Nqn,
    /// Hosts learn only of what the listener offers that they ask.
    pub by_listener: bool,
    /// The network is told by multicast DNS where discovery is.
    pub mdns: bool,
    /// Other discovery services that hosts may ask.
    #[serde(rename = "referral")]
    pub referrals: Vec<Referral>,
}

impl Default for DiscoveryConfig {
    fn default() -> Self {
        Self { nqn: Nqn::DISCOVERY, by_listener: false, mdns: false, referrals: Vec::new() }
    }
}

/// Another discovery service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Referral {
    /// Its name.
    #[serde(serialize_with = "tree::shown")]
    pub nqn: Nqn,
    /// Where it is.
    pub address: SocketAddr,
}

impl fmt::Display for DiscoveryConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nqn != Nqn::DISCOVERY {
            writeln!(f, "discovery   {}", self.nqn)?;
        }
        if self.by_listener {
            writeln!(f, "discovery   tells of each listener at that listener only")?;
        }
        if self.mdns {
            writeln!(f, "discovery   announced by multicast DNS")?;
        }
        for Referral { nqn, address } in &self.referrals {
            writeln!(f, "referral    to {nqn} at {address}")?;
        }
        Ok(())
    }
}

/// What a `[[subsystem]]` says of how it is offered, without its masks.
pub(super) fn offer(
    section: &mut Section<'_>,
    listeners: &[At<ListenerConfig>],
    limits: &Limits,
    report: &mut Report<'_>,
) -> Offer {
    let mut offer =
        Offer { listeners: at_listeners(section, listeners, report), ..Offer::default() };
    let mut own = |key, least, most: u32, report: &mut Report<'_>| {
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
    let form = "\"allow\", \"refuse\" or \"replace\"";
    if let Some(At { value, span }) = section.take::<String>("duplicate_hosts", form, report) {
        match value.as_str() {
            "allow" => offer.duplicates = DuplicateHosts::Allow,
            "refuse" => offer.duplicates = DuplicateHosts::Refuse,
            "replace" => offer.duplicates = DuplicateHosts::Replace,
            other => {
                let what = format!("`duplicate_hosts` is {other:?}");
                report.add(&span, what, format!("write {form}"));
            }
        }
    }
    offer
}

fn at_listeners(
    section: &mut Section<'_>,
    listeners: &[At<ListenerConfig>],
    report: &mut Report<'_>,
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

/// The list `hosts`, where there is one.
pub(super) fn hosts(section: &mut Section<'_>, report: &mut Report<'_>) -> Option<BTreeSet<Nqn>> {
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
    root: &mut Section<'_>,
    subsystems: &[At<Nqn>],
    report: &mut Report<'_>,
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
    let mut flag = |key, report: &mut Report<'_>| {
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

fn referral(mut section: Section<'_>, report: &mut Report<'_>) -> Option<Referral> {
    let form = "the IP address of another discovery service, such as \"192.0.2.7\"";
    let address = section.need::<IpAddr>("address", form, report);
    let port = bounded(&mut section, "port", 1..65535, nvme::PORT.into(), report) as u16;
    let nqn = section.take::<String>("nqn", NQN_FORM, report);
    let nqn = nqn.map(|at| name(at, report));
    section.end(report);
    let At { value: ip, span } = address?;
    if ip.is_unspecified() || ip.is_multicast() {
        report.add(&span, format!("nobody can connect to {ip}"), format!("write {form}"));
    }
    let nqn = match nqn {
        Some(nqn) => nqn?.value,
        None => Nqn::DISCOVERY,
    };
    Some(Referral { nqn, address: SocketAddr::new(ip, port) })
}
